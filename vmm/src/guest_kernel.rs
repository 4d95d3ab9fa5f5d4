//! The guest's kernel and what runs there, as its memory shows it.
//!
//! A vCPU that is sampled looks for itself ([`VcpuLook`]), with a [`KernelView`] that a thread
//! of the VM has found and keeps up to date. What it meets for the first time gets a number,
//! and the thread describes it for tools: names of files are too long for a vCPU to read.

mod agent;
mod described;
mod place;

use std::fmt::Write;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, Weak};
use std::thread::Builder;
use std::time::{Duration, Instant};

use guest_view::{GuestMemory, KernelView, Look, Search, Step};
use perfmon_abi::wire::kernel::KernelInfo;
use perfmon_abi::wire::programs::ProgramsInfo;
use rustix::fs::{SeekFrom, seek};
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    MemoryRegionAddress,
};
use vmm_control::GuestKernel;

pub(crate) use self::agent::{AgentLine, AgentPort};
use self::described::{Descriptions, Files, News, of_mapping, of_task};
pub(crate) use self::place::VcpuLook;
use crate::sync::lock;

/// Most notes that are tried. A guest has one, and crashed kernels leave some.
const MOST_NOTES: usize = 16;
/// Pages of one step of a search; there is nobody to make room for between two.
const PAGES: usize = 1 << 16;

/// How often the kernel is looked at again while vCPUs are sampled: it may have other modules.
const FOLLOW: Duration = Duration::from_secs(1);

/// How long nobody searches a guest in which nothing is found, at most.
const SELDOM: Duration = Duration::from_secs(64);

/// The memory of a VM that `guest_view` reads.
struct Ram<'a>(&'a GuestMemoryMmap);

impl GuestMemory for Ram<'_> {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        let start = GuestAddress(address);
        let Some(region) = self.0.find_region(start) else {
            return false;
        };
        let at = MemoryRegionAddress(address - region.start_addr().0);
        // A sample reads some hundred numbers, each within one region: `read_slice` alone, which
        // is made for several, takes longer than the rest.
        match region.get_slice(at, buffer.len()) {
            Ok(found) => found.copy_to(buffer) == buffer.len(),
            Err(_) => self.0.read_slice(buffer, start).is_ok(),
        }
    }
}

/// The kernel of a VM's guest, and what runs there.
#[derive(Debug)]
pub(crate) struct VmKernel {
    memory: GuestMemoryMmap,
    /// What was found, with which vCPUs look until the guest has another one; and how often it
    /// was another one. Nobody holds it for long.
    shown: Mutex<Option<Arc<KernelView>>>,
    version: AtomicU64,
    /// A vCPU has looked lately.
    looked: AtomicBool,
    /// The guest was searched for its kernel, whether one was found or not.
    searched: AtomicBool,
    descriptions: Descriptions,
    /// Where an agent in the guest may be asked for what the kernel does not describe.
    agent: Option<Arc<AgentPort>>,
}

impl VmKernel {
    /// Also starts the thread that describes what vCPUs find; it ends with the VM.
    ///
    /// # Errors
    /// The host gives no thread.
    pub(crate) fn new(memory: GuestMemoryMmap, agent: Option<AgentLine>) -> io::Result<Arc<Self>> {
        let (descriptions, news) = Descriptions::new();
        let kernel = Arc::new(Self {
            memory,
            shown: Mutex::default(),
            version: AtomicU64::new(0),
            looked: AtomicBool::new(false),
            searched: AtomicBool::new(false),
            descriptions,
            agent: agent.as_ref().map(|agent| agent.port.clone()),
        });
        if let Some(agent) = agent {
            agent.serve(&kernel)?;
        }
        let weak = Arc::downgrade(&kernel);
        let describe = move || describe(&weak, &news);
        Builder::new().name("guest-view".into()).spawn(describe)?;
        Ok(kernel)
    }

    /// A vCPU looks at the guest.
    fn looks(&self) {
        if !self.looked.swap(true, Ordering::Relaxed) {
            self.descriptions.tell(News::Looks);
        }
    }

    /// The agent in the guest, if it answers. It is not asked before the guest was searched:
    /// callers are found by the kernel alone.
    fn agent_there(&self) -> Option<&AgentPort> {
        let searched = self.searched.load(Ordering::Relaxed);
        let agent = self.agent.as_deref().filter(|_| searched);
        agent.filter(|agent| agent.is_there())
    }

    /// What vCPUs look with, if it is not that of `version` any more. Never waits.
    fn newer(&self, version: u64) -> Option<(u64, Option<Arc<KernelView>>)> {
        let now = self.version.load(Ordering::Acquire);
        if now == version {
            return None;
        }
        let shown = self.shown.try_lock().ok()?;
        Some((now, shown.clone()))
    }

    fn show(&self, view: Option<Arc<KernelView>>) {
        let mut shown = lock(&self.shown);
        *shown = view;
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Looks for the kernel that runs with `cr3`, and has vCPUs look with it.
    fn seek(&self, cr3: u64) -> Result<Arc<KernelView>, String> {
        let ram = Ram(&self.memory);
        let known = lock(&self.shown).clone();
        let found = match known.filter(|view| view.is_current(&ram, cr3)) {
            // A list of modules that is being changed is as it was.
            Some(view) => Ok(view.refreshed(&ram).ok().flatten().map_or(view, Arc::new)),
            None => search(&ram, cr3).map(Arc::new),
        };
        let unknown = match &found {
            Ok(view) => no_tasks(view),
            Err(why) => Some(why.clone()),
        };
        self.descriptions.set_unknown(unknown);
        self.show(found.as_ref().ok().cloned());
        self.searched.store(true, Ordering::Relaxed);
        found
    }

    /// Has vCPUs look with the modules that the kernel has now.
    fn refresh(&self) {
        let Some(view) = lock(&self.shown).clone() else {
            return;
        };
        if let Ok(Some(newer)) = view.refreshed(&Ram(&self.memory)) {
            self.show(Some(Arc::new(newer)));
        }
    }

    fn describe(&self, news: News, (files, pace): (&mut Files, &mut SearchPace)) {
        match news {
            News::Kernel(cr3, version) => {
                // Several vCPUs ask at once; the others follow.
                let is_latest = self.version.load(Ordering::Acquire) == version;
                if is_latest && pace.may(Instant::now()) {
                    let found = self.seek(cr3).is_ok();
                    pace.ended(Instant::now(), found);
                }
            }
            News::Looks => {}
            News::Elsewhere if lock(&self.shown).is_some() => {}
            News::Elsewhere => {
                let why = "what runs is no Linux kernel, or one that has just begun";
                self.descriptions.set_unknown(Some(why.to_owned()));
            }
            News::Task(number, task) => {
                let ram = Ram(&self.memory);
                let view = lock(&self.shown).clone();
                let inside = view
                    .as_deref()
                    .map(|view| Look::at(view, &ram).inside(&task));
                let inside = inside.unwrap_or_default();
                self.descriptions.add(of_task(number, &task, inside));
            }
            News::Mapping(number, program, mapping) => {
                let ram = Ram(&self.memory);
                let view = lock(&self.shown).clone();
                let facts = mapping.file.as_ref().map(|file| {
                    files.of(file, |facts| {
                        let Some(look) = view.as_deref().map(|view| Look::at(view, &ram)) else {
                            return;
                        };
                        facts.path = facts.path.take().or_else(|| look.path(file).ok());
                        let build_id = || look.build_id(program, &mapping);
                        facts.build_id = facts.build_id.take().or_else(build_id);
                    })
                });
                let facts = facts.unwrap_or_default();
                self.descriptions.add(of_mapping(number, &mapping, &facts));
            }
        }
    }
}

/// When to search again after nothing was found: soon, since a kernel that begins is there
/// soon, and then ever more seldom.
#[derive(Debug, Default)]
struct SearchPace(Option<(Instant, Duration)>);

impl SearchPace {
    fn may(&self, now: Instant) -> bool {
        self.0.is_none_or(|(next, _)| next <= now)
    }

    fn ended(&mut self, now: Instant, found: bool) {
        let wait = self.0.map_or(FOLLOW, |(_, wait)| (wait * 2).min(SELDOM));
        self.0 = (!found).then_some((now + wait, wait));
    }
}

/// Describes what vCPUs find, and follows the guest's kernel while they look.
fn describe(kernel: &Weak<VmKernel>, news: &Receiver<News>) {
    let (mut files, mut pace) = (Files::default(), SearchPace::default());
    let mut next = Instant::now() + FOLLOW;
    loop {
        let wait = next.saturating_duration_since(Instant::now());
        let looks = kernel
            .upgrade()
            .is_some_and(|it| it.looked.load(Ordering::Relaxed));
        let told = if looks {
            news.recv_timeout(wait)
        } else {
            news.recv().map_err(|_| RecvTimeoutError::Disconnected)
        };
        let Some(kernel) = kernel.upgrade() else {
            return;
        };
        match told {
            Ok(news) => kernel.describe(news, (&mut files, &mut pace)),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if Instant::now() >= next {
            next = Instant::now() + FOLLOW;
            let looked = kernel.looked.swap(false, Ordering::Relaxed);
            if looked {
                kernel.refresh();
            }
        }
    }
}

impl GuestKernel for VmKernel {
    fn find(&self, cr3: u64) -> Result<KernelInfo, String> {
        // What vCPUs look with they make sure of themselves, and a tool's CR3 may be that of a
        // program that has ended.
        self.refresh();
        let shown = lock(&self.shown).clone();
        let view = shown.map_or_else(|| self.seek(cr3), Ok)?;
        let mut kallsyms = String::new();
        for symbol in view.symbols() {
            // It always succeeds.
            let _ = writeln!(kallsyms, "{symbol}");
        }
        Ok(KernelInfo {
            release: view.release().to_owned(),
            kallsyms,
        })
    }

    fn programs(&self, since: u64) -> ProgramsInfo {
        self.descriptions.after(since)
    }
}

/// Why the kernel's tasks cannot be known, if it is so.
fn no_tasks(view: &KernelView) -> Option<String> {
    let (_, why) = view.missing().find(|(what, _)| *what == "tasks")?;
    let release = view.release();
    Some(format!(
        "the kernel {release} does not describe its tasks: {why}"
    ))
}

/// The parts of guest memory that have been written: a search is not to take memory of the
/// host for what the guest does not use.
fn written(memory: &GuestMemoryMmap) -> Vec<Range<u64>> {
    let mut ranges = Vec::new();
    for region in memory.iter() {
        let (start, len) = (region.start_addr().0, region.len());
        let Some(file) = region.file_offset() else {
            // Of what was not written the host has one page for all.
            ranges.push(start..start.saturating_add(len));
            continue;
        };
        let end = file.start().saturating_add(len);
        let mut at = file.start();
        while at < end {
            let Ok(data) = seek(file.file(), SeekFrom::Data(at)) else {
                break;
            };
            let hole = seek(file.file(), SeekFrom::Hole(data))
                .unwrap_or(end)
                .min(end);
            if data >= hole {
                break;
            }
            let place = |offset: u64| start + (offset - file.start());
            ranges.push(place(data)..place(hole));
            at = hole;
        }
    }
    ranges
}

fn search(ram: &Ram<'_>, cr3: u64) -> Result<KernelView, String> {
    let ranges = written(ram.0);
    let mut search = Search::new(ranges);
    let mut why = "no Linux kernel that says where its symbols are was found in its memory; \
                   Linux 6.0 and later do"
        .to_owned();
    let mut notes = 0;
    while notes < MOST_NOTES {
        match search.step(ram, PAGES) {
            Step::Searching => {}
            Step::Found(note) => match KernelView::of(ram, note, cr3) {
                Ok(view) => return Ok(view),
                Err(error) => (why, notes) = (error.to_string(), notes + 1),
            },
            Step::Done => break,
        }
    }
    Err(why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn searches_in_vain_become_seldom() {
        let mut now = Instant::now();
        let mut pace = SearchPace::default();
        for wait in [1, 2, 4, 8, 16, 32, 64, 64] {
            assert!(pace.may(now));
            pace.ended(now, false);
            now += Duration::from_secs(wait);
            assert!(!pace.may(now - Duration::from_millis(1)));
        }
        pace.ended(now, true);
        assert!(pace.may(now), "the next kernel is looked for at once");
    }
}
