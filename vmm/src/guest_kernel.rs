//! The guest's kernel and what runs there, as its memory shows it.
//!
//! A vCPU that is sampled looks for itself ([`VcpuLook`]), with a [`KernelView`] that a thread
//! of the VM has found and keeps up to date. What it meets for the first time gets a number,
//! and the thread describes it for tools: names of files are too long for a vCPU to read.

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
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    MemoryRegionAddress,
};
use vmm_control::GuestKernel;

use self::described::{Descriptions, Files, News, of_mapping, of_task};
pub(crate) use self::place::VcpuLook;
use crate::kvm::KvmVm;
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
    vm: Arc<KvmVm>,
    /// What was found serves until the guest has another one. Whoever searches holds it.
    found: Mutex<Option<KernelView>>,
    /// What vCPUs look with, and how often it was another one.
    shown: Mutex<Option<Arc<KernelView>>>,
    version: AtomicU64,
    /// A vCPU has looked lately.
    looked: AtomicBool,
    descriptions: Descriptions,
}

impl VmKernel {
    /// Also starts the thread that describes what vCPUs find; it ends with the VM.
    ///
    /// # Errors
    /// The host gives no thread.
    pub(crate) fn new(vm: Arc<KvmVm>) -> io::Result<Arc<Self>> {
        let (descriptions, news) = Descriptions::new();
        let kernel = Arc::new(Self {
            vm,
            found: Mutex::default(),
            shown: Mutex::default(),
            version: AtomicU64::new(0),
            looked: AtomicBool::new(false),
            descriptions,
        });
        let weak = Arc::downgrade(&kernel);
        let describe = move || describe(&weak, &news);
        Builder::new().name("guest-view".into()).spawn(describe)?;
        Ok(kernel)
    }

    /// A vCPU looks at the guest.
    fn looks(&self) {
        self.looked.store(true, Ordering::Relaxed);
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

    fn show(&self, view: Option<KernelView>) {
        let mut shown = lock(&self.shown);
        *shown = view.map(Arc::new);
        self.version.fetch_add(1, Ordering::Release);
    }

    /// The kernel that runs with `cr3`, with the modules that it has now; and whether it is
    /// another one than the last time.
    fn view(&self, cr3: u64) -> Result<(KernelView, bool), String> {
        let ram = Ram(self.vm.memory());
        let mut found = lock(&self.found);
        if let Some(view) = found.take().filter(|view| view.is_current(&ram, cr3)) {
            // A list that is being changed is as it was.
            let newer = view.refreshed(&ram).ok().flatten();
            let is_new = newer.is_some();
            let view = newer.unwrap_or(view);
            return Ok((found.insert(view).clone(), is_new));
        }
        let view = search(&ram, cr3)?;
        Ok((found.insert(view).clone(), true))
    }

    /// Has vCPUs look with the kernel that runs with `cr3`.
    fn show_present(&self, cr3: u64) {
        let unknown = match self.view(cr3) {
            Ok((view, _)) => {
                let missing = view.missing().find(|(what, _)| *what == "tasks");
                let unknown = missing.map(|(_, why)| {
                    let release = view.release();
                    format!("the kernel {release} does not describe its tasks: {why}")
                });
                self.show(Some(view));
                unknown
            }
            Err(why) => {
                if lock(&self.shown).is_some() {
                    self.show(None);
                }
                Some(why)
            }
        };
        self.descriptions.set_unknown(unknown);
    }

    /// Has vCPUs look with the modules that the kernel has now.
    fn refresh(&self) {
        let ram = Ram(self.vm.memory());
        let mut found = lock(&self.found);
        let newer = found.as_ref().and_then(|view| view.refreshed(&ram).ok()?);
        if let Some(view) = newer {
            self.show(Some(found.insert(view).clone()));
        }
    }

    fn describe(&self, news: News, (files, pace): (&mut Files, &mut Pace)) {
        match news {
            News::Kernel(cr3, version) => {
                // Several vCPUs ask at once; the others follow.
                let is_latest = self.version.load(Ordering::Acquire) == version;
                if is_latest && pace.may(Instant::now()) {
                    self.show_present(cr3);
                    pace.ended(Instant::now(), lock(&self.shown).is_some());
                }
            }
            News::Elsewhere => {
                let why = "what runs is no Linux kernel, or one that has just begun";
                self.descriptions.set_unknown(Some(why.to_owned()));
            }
            News::Task(number, task) => self.descriptions.add(of_task(number, &task)),
            News::Mapping(number, program, mapping) => {
                let ram = Ram(self.vm.memory());
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
struct Pace(Option<(Instant, Duration)>);

impl Pace {
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
    let (mut files, mut pace) = (Files::default(), Pace::default());
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
            if looked && lock(&kernel.shown).is_some() {
                kernel.refresh();
            }
        }
    }
}

impl GuestKernel for VmKernel {
    fn find(&self, cr3: u64) -> Result<KernelInfo, String> {
        let (view, is_new) = self.view(cr3)?;
        if is_new && lock(&self.shown).is_some() {
            self.show(Some(view.clone()));
        }
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

fn search(ram: &Ram<'_>, cr3: u64) -> Result<KernelView, String> {
    let ranges = ram.0.iter().map(|region| -> Range<u64> {
        let start = region.start_addr().0;
        start..start.saturating_add(region.len())
    });
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
        let mut pace = Pace::default();
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
