//! A thread for each VM: counts and samples it, and says what there is when it is asked. A VM
//! that takes its time keeps nobody waiting but its own thread.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use perfmon_abi::wire::budget::BudgetRequest;
use perfmon_abi::wire::info::{MachineInfo, VcpuInfo, VcpuState};
use perfmon_abi::wire::pcr::{PcrAct, PcrRequest};
use rustix::process::{PidfdFlags, pidfd_open};

use super::names::GuestNames;
use super::reading::{Answers, HotPlace, HotRow, Program, SampleReading, VmReading};
use crate::error::host;
use crate::find::is_trusted;
use crate::profile::location::CodeLocation;
use crate::profile::symbols::SymbolTable;
use crate::profile::{Record, Ring, Sample, Totals};
use crate::record::{LiveSamples, LiveSampling};
use crate::stat::spec::EventList;
use crate::stat::{LiveCounts, Row};
use crate::targets::Target;
use crate::{ToolError, Vm, Waiter, refused};

/// How soon periods are adapted at first, and how often buffers are emptied then.
const FIRST_LOOK: Duration = Duration::from_millis(20);
const LOOK: Duration = Duration::from_millis(500);
/// Samples whose names are looked for together.
const TOGETHER: usize = 1 << 16;
/// How long the guest's tasks and its kernel's names are waited for; the names of a kernel whose
/// tasks will not be known, which may be no Linux; and a guest that does nothing.
const NAMES: Duration = Duration::from_secs(10);
const WITHOUT_TASKS: Duration = Duration::from_secs(2);
const IDLE: Duration = Duration::from_millis(300);
/// What the thread waits for besides its contexts.
const ASKED: usize = usize::MAX - 1;
const PROCESS: usize = usize::MAX - 2;

/// What every VM is watched for.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) counted: EventList,
    /// None: nothing is sampled.
    pub(super) sampling: Option<LiveSampling>,
    /// Of the contexts that count.
    pub(super) flags: u32,
    /// Of a file that the user gave.
    pub(super) symbols: Option<SymbolTable>,
    /// The first frame is the only one: it is worth waiting for the names in it.
    pub(super) patient: bool,
    /// The user named the VM, so whose it is does not matter.
    pub(super) named: bool,
}

/// What a thread says of its VM.
#[derive(Debug)]
pub(super) enum News {
    Reading(Box<VmReading>),
    /// The VM has ended.
    Ended,
    Failed(ToolError),
    /// It is not watched: this program has seen enough, or nobody led it there.
    Left,
}

/// Who hears the news, with the VM's number.
#[derive(Debug)]
pub(super) struct Reporter {
    pub(super) id: u64,
    pub(super) news: Sender<(u64, News)>,
    /// Has a byte for each of them.
    pub(super) bell: UnixStream,
}

impl Reporter {
    fn tell(&self, news: News) {
        // Where nobody listens any more the thread ends soon; a bell that is full rings.
        let _ = self.news.send((self.id, news));
        let _ = (&self.bell).write(&[0]);
    }
}

/// A VM that is watched.
#[derive(Debug)]
pub(super) struct Watcher {
    pub(super) id: u64,
    pub(super) socket: PathBuf,
    /// A byte asks for a reading; its end ends the thread.
    ask: Option<UnixStream>,
    thread: JoinHandle<()>,
    /// It was asked, and has not answered.
    pub(super) asked: bool,
}

impl Watcher {
    /// Begins to watch the VM behind `socket`.
    ///
    /// # Errors
    /// The host has no descriptor or thread left.
    pub(super) fn start(
        socket: PathBuf,
        settings: Arc<Settings>,
        reporter: Reporter,
    ) -> io::Result<Self> {
        let (ask, asked) = UnixStream::pair()?;
        ask.set_nonblocking(true)?;
        asked.set_nonblocking(true)?;
        let id = reporter.id;
        let path = socket.clone();
        let watch = move || {
            let mut answered = false;
            match watch(&path, &settings, &asked, &reporter, &mut answered) {
                Ok(WatchEnd::Told) => reporter.tell(News::Left),
                Ok(WatchEnd::Ended) => reporter.tell(News::Ended),
                Err(error) if answered && error.is_gone() => reporter.tell(News::Ended),
                Err(error) => reporter.tell(News::Failed(error)),
            }
        };
        let thread = Builder::new().name("watch".to_owned()).spawn(watch)?;
        Ok(Self {
            id,
            socket,
            ask: Some(ask),
            thread,
            // The first reading comes unasked.
            asked: true,
        })
    }

    /// Asks for a reading, unless it owes one.
    pub(super) fn ask(&mut self) {
        if let (false, Some(ask)) = (self.asked, &self.ask) {
            self.asked = true;
            let _ = (&mut &*ask).write(&[0]);
        }
    }

    /// Tells the thread to leave the VM.
    pub(super) fn stop(&mut self) {
        self.ask = None;
    }

    /// Whether the thread has ended.
    pub(super) fn is_over(&self) -> bool {
        self.thread.is_finished()
    }
}

/// How a VM came to be no longer watched.
enum WatchEnd {
    /// This program has seen enough.
    Told,
    /// The VM has ended.
    Ended,
}

fn watch(
    socket: &Path,
    settings: &Settings,
    asked: &UnixStream,
    reporter: &Reporter,
    answered: &mut bool,
) -> Result<WatchEnd, ToolError> {
    let vm = Vm::at(socket)?;
    let server = vm.client.server().map_err(host("asking whose the VM is"))?;
    if !settings.named && !is_trusted(server.uid) {
        return Ok(WatchEnd::Told);
    }
    let waiter = Waiter::without_signals().map_err(host("waiting for messages"))?;
    waiter
        .add(asked, ASKED)
        .map_err(host("waiting for messages"))?;
    // One that is not seen from here is known to be gone by its socket.
    let process: Option<OwnedFd> = pidfd_open(server.pid, PidfdFlags::empty()).ok();
    if let Some(process) = &process {
        waiter
            .add(process, PROCESS)
            .map_err(host("watching the VM"))?;
    }
    let mut watch = Watch::begin(&vm, settings, &waiter)?;
    if settings.patient {
        watch.get_ready()?;
    }
    let ending = watch.go(asked, reporter, answered);
    watch.leave();
    ending
}

/// What is known of a VM between two readings.
struct Watch<'a> {
    vm: &'a Vm,
    waiter: &'a Waiter,
    counts: LiveCounts,
    /// Contexts that count; those that sample have the numbers behind theirs.
    counting: usize,
    samples: Option<LiveSamples>,
    sampling: Option<&'a LiveSampling>,
    names: GuestNames,
    /// Samples that have no names yet, and those that have.
    held: Vec<Sample>,
    hot: BTreeMap<HotPlace, (u64, u64)>,
    totals: Totals,
    notes: Vec<String>,
}

impl<'a> Watch<'a> {
    fn begin(vm: &'a Vm, settings: &'a Settings, waiter: &'a Waiter) -> Result<Self, ToolError> {
        let ended = |vcpu: u32| {
            let is_it = |info: &&VcpuInfo| info.vcpu == vcpu;
            let info = vm.machine.vcpus.iter().find(is_it);
            info.is_some_and(|info| info.state == VcpuState::Ended)
        };
        let targets = (0..vm.model.vcpus).filter(|vcpu| !ended(*vcpu));
        let targets: Vec<Target> = targets.map(Target::Vcpu).collect();
        let counts = LiveCounts::start(vm, &settings.counted, &targets, settings.flags)?;
        let mut notes = counts.notes().to_vec();
        let sampling = settings.sampling.as_ref();
        let samples = match sampling.map(|what| LiveSamples::start(vm, what, &targets)) {
            None => None,
            Some(Ok(samples)) => {
                notes.extend_from_slice(samples.notes());
                Some(samples).filter(LiveSamples::is_any)
            }
            Some(Err(error)) if error.is_gone() => return Err(error),
            Some(Err(error)) => {
                notes.push(format!("no samples: {error}"));
                None
            }
        };
        // All vCPUs have the same to say.
        notes.dedup();
        let counting = counts.descriptors().count();
        let all = counts
            .descriptors()
            .chain(samples.iter().flat_map(LiveSamples::descriptors));
        for (number, descriptor) in all.enumerate() {
            waiter
                .add(descriptor, number)
                .map_err(host("waiting for messages"))?;
        }
        Ok(Self {
            vm,
            waiter,
            counts,
            counting,
            samples,
            sampling,
            names: GuestNames::new(&vm.socket, settings.symbols.clone()),
            held: Vec::new(),
            hot: BTreeMap::new(),
            totals: Totals::default(),
            notes,
        })
    }

    fn go(
        &mut self,
        asked: &UnixStream,
        reporter: &Reporter,
        answered: &mut bool,
    ) -> Result<WatchEnd, ToolError> {
        let mut reading = self.reading(None)?;
        loop {
            reporter.tell(News::Reading(Box::new(reading)));
            *answered = true;
            if let Some(ending) = self.wait_for_question(asked)? {
                return Ok(ending);
            }
            self.drain()?;
            let counted = self.counts.rows(self.vm)?;
            reading = self.reading(Some(counted))?;
        }
    }

    /// Keeps buffers empty until somebody asks; how it has ended if nobody will.
    fn wait_for_question(&mut self, asked: &UnixStream) -> Result<Option<WatchEnd>, ToolError> {
        let mut look = Instant::now() + FIRST_LOOK;
        loop {
            let due = self.samples.is_some().then_some(look);
            let woken = self.waiter.wait(due);
            let woken = woken.map_err(host("waiting for messages"))?;
            if woken.ready.contains(&PROCESS) {
                return Ok(Some(WatchEnd::Ended));
            }
            for number in woken.ready.iter().filter(|number| **number < PROCESS) {
                self.messages(*number)?;
            }
            if due.is_some_and(|due| due <= Instant::now()) {
                self.drain()?;
                if let Some(samples) = &mut self.samples {
                    samples.adapt(self.vm)?;
                }
                look = Instant::now() + LOOK;
            }
            if woken.ready.contains(&ASKED) {
                // All that were asked meanwhile get the same answer.
                match (&mut &*asked).read(&mut [0; 64]) {
                    Ok(0) => return Ok(Some(WatchEnd::Told)),
                    _ => return Ok(None),
                }
            }
        }
    }

    fn messages(&mut self, number: usize) -> Result<(), ToolError> {
        let over = if number < self.counting {
            self.counts.messages(number)?
        } else if let Some(samples) = &mut self.samples {
            let number = number - self.counting;
            let drained = samples.drain(self.vm)?;
            let (losses, over) = samples.messages(self.vm, number)?;
            self.take(drained);
            self.take(losses);
            over
        } else {
            return Ok(());
        };
        if over {
            // It stays readable, and there is nothing more to come.
            let counting = self.counts.descriptors();
            let sampling = self.samples.iter().flat_map(LiveSamples::descriptors);
            if let Some(descriptor) = counting.chain(sampling).nth(number) {
                self.waiter.remove(descriptor);
            }
        }
        Ok(())
    }

    fn drain(&mut self) -> Result<(), ToolError> {
        if let Some(samples) = &mut self.samples {
            let records = samples.drain(self.vm)?;
            self.take(records);
        }
        Ok(())
    }

    fn take(&mut self, records: Vec<Record>) {
        records.iter().for_each(|record| self.totals.add(record));
        let samples = samples_of(records);
        self.names.look_for(&samples);
        self.held.extend(samples);
        if self.held.len() >= TOGETHER {
            self.name_held();
        }
    }

    /// Adds up the samples that were held back, by the names that are known by now.
    fn name_held(&mut self) {
        if let Some(samples) = &mut self.samples
            && !self.names.describe(samples.describe(self.vm))
        {
            samples.forget_descriptions();
        }
        let names = self.names.known();
        for mut sample in self.held.drain(..) {
            names.programs.settle(&mut sample.guest);
            let location = CodeLocation::of(&sample, names);
            let program = names.has_tasks().then(|| Program {
                comm: names.comm(names.task_of(&sample)).to_owned(),
                dso: location.object(names),
            });
            let symbol = location.name(names);
            let sum = self.hot.entry(HotPlace { program, symbol }).or_default();
            *sum = (sum.0 + 1, sum.1.saturating_add(sample.period));
        }
    }

    /// Samples until the VM knows the guest's tasks, and the names of its kernel are here: where
    /// these can be known, and something runs. What was counted and sampled so far is forgotten.
    fn get_ready(&mut self) -> Result<(), ToolError> {
        let began = Instant::now();
        let (mut any, mut cr3) = (false, None);
        while let Some(samples) = &mut self.samples {
            let drained = samples_of(samples.drain(self.vm)?);
            any |= !drained.is_empty();
            let (is_ready, has_tasks) = (samples.is_ready(self.vm), samples.has_tasks());
            // With tasks it is Linux, whose programs' page tables have the kernel, too.
            cr3 = page_tables(&drained, has_tasks).or(cr3);
            if is_ready && self.names.are_there(cr3) {
                break;
            }
            let patience = match (is_ready && !has_tasks, cr3) {
                _ if !any => IDLE,
                (true, None) => IDLE,
                (true, Some(_)) => WITHOUT_TASKS,
                (false, _) => NAMES,
            };
            if began.elapsed() >= patience {
                if patience == NAMES {
                    let late = "the VM did not give all names of its guest in time: some rows \
                                have addresses for symbols, or no thread";
                    self.notes.push(late.to_owned());
                }
                break;
            }
            std::thread::sleep(FIRST_LOOK);
        }
        self.counts.rows(self.vm)?;
        Ok(())
    }

    fn reading(&mut self, counted: Option<(Vec<Row>, f64)>) -> Result<VmReading, ToolError> {
        let client = &self.vm.client;
        let machine = client.list().map_err(refused("asking for the VM"))?;
        let asked = |vcpu| PcrRequest {
            vcpu,
            act: PcrAct::Show,
        };
        // What one vCPU does not say, because it has just ended, is left out.
        let reserved = vcpus(&machine, |info| !info.reserved.is_empty());
        let reservations = reserved.filter_map(|vcpu| client.pcr(&asked(vcpu)).ok());
        let live = vcpus(&machine, |info| info.state != VcpuState::Ended);
        let budget = |vcpu| BudgetRequest { vcpu, change: None };
        let budgets = live.filter_map(|vcpu| client.budget(&budget(vcpu)).ok());
        let answers = Answers {
            socket: self.vm.socket.clone(),
            model: &self.vm.model,
            reservations: reservations.collect(),
            budgets: budgets.collect(),
            machine: machine.clone(),
            counted,
            observer: std::process::id(),
        };
        self.name_held();
        let samples = self.sampling.zip(self.samples.as_ref());
        let rows = std::mem::take(&mut self.hot);
        let row = |(place, (samples, events))| HotRow {
            place,
            samples,
            events,
        };
        let totals = std::mem::take(&mut self.totals);
        Ok(VmReading {
            samples: samples.map(|(what, samples)| SampleReading {
                event: samples.event().to_owned(),
                hz: what.hz,
                totals,
                rows: rows.into_iter().map(row).collect(),
            }),
            notes: self.notes.clone(),
            ..answers.reading()
        })
    }

    /// Leaves the VM to others.
    fn leave(mut self) {
        self.counts.stop(self.vm);
        if let Some(samples) = &mut self.samples {
            samples.stop(self.vm);
        }
    }
}

fn samples_of(records: Vec<Record>) -> Vec<Sample> {
    let sample = |record| match record {
        Record::Sample(sample) => Some(sample),
        _ => None,
    };
    records.into_iter().filter_map(sample).collect()
}

/// CR3 of the latest sample whose page tables lead to the guest's kernel: in it, or in a program
/// of it.
fn page_tables(samples: &[Sample], or_program: bool) -> Option<u64> {
    let leads = |sample: &&Sample| match sample.ring {
        // What runs before the kernel has neither its place nor its page tables.
        Some(Ring::Kernel) => sample.ip >> 63 != 0,
        Some(Ring::User) => or_program,
        None => false,
    };
    samples.iter().rev().find(leads)?.cr3
}

/// The numbers of the vCPUs that are so.
fn vcpus(machine: &MachineInfo, is: impl Fn(&VcpuInfo) -> bool) -> impl Iterator<Item = u32> {
    let chosen = machine.vcpus.iter().filter(move |info| is(info));
    chosen.map(|info| info.vcpu)
}
