//! The loop of `umpire record`.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant, SystemTime};

use perfmon_abi::Config;
use umpire_perfmon::Call;

use super::callers::ProgramCallers;
use super::kernel::KernelNames;
use super::output::Output;
use super::plan::SamplingPlan;
use super::programs::Programs;
use super::samples::Clock;
use super::session::{SamplingSession, Scene};
use crate::command::{Limit, Until};
use crate::error::host;
use crate::lifecycle::Starter;
use crate::profile::symfs::Symfs;
use crate::profile::unwind::ProgramUnwinder;
use crate::profile::{Header, Record, SampledEvent, Sampling, Totals};
use crate::stat::spec::EventList;
use crate::targets::{Selection, Target};
use crate::{Completion, ToolError, Vm, Waiter, refused};

/// How often buffers are emptied. At 100,000 samples a second, which is what a
/// context may take at most by default, a buffer of 1 MiB lasts for longer.
const DRAIN: Duration = Duration::from_millis(50);
/// How often the counters are looked at, for the first time and then.
const FIRST_LOOK: Duration = Duration::from_millis(10);
const LOOK: Duration = Duration::from_millis(100);
/// How long the VM may look for the guest's kernel, and how long a guest that does nothing is
/// waited for.
const KERNEL: Duration = Duration::from_secs(10);
const IDLE: Duration = Duration::from_millis(200);
/// How often a terminal shows the progress.
const PROGRESS: Duration = Duration::from_millis(500);
/// The least sampling buffer: two blocks with callers.
const LEAST_BUFFER: u64 = 16 << 10;
/// For so many stacks a buffer has room beside what was asked for: half a second of them.
const STACKS: u64 = 512;
const DEFAULT: &str = "cycles";

/// What is sampled, and where samples go.
#[derive(Clone, Debug)]
pub struct RecordOptions {
    /// The VM, and what of it.
    pub selection: Selection,
    /// What to sample, all at once; without any the cycles.
    pub events: Vec<EventList>,
    /// How far apart samples are.
    pub sampling: Sampling,
    /// Record the callers of each sample, too.
    pub chains: bool,
    /// Find those of programs by the unwind tables of their files.
    pub dwarf: Option<Dwarf>,
    /// Vary each period at random by so many of its low bits.
    pub random: u32,
    /// The file for the samples.
    pub output: PathBuf,
    /// Bytes for the samples of a vCPU or core that were not fetched yet.
    pub buffer: u64,
    /// How long to sample.
    pub until: Until,
    /// Who lets a paused VM go on.
    pub starter: Starter,
}

/// How callers of programs are found by the unwind tables of their files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dwarf {
    /// Bytes of the stack that each sample brings, a multiple of 8.
    pub stack: u16,
    /// The guest's root, or a copy of what it has of the programs, and those of containers.
    pub symfs: Vec<PathBuf>,
}

/// How callers of programs are found, as `--call-graph` of perf says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallGraph {
    /// By frame pointers.
    FramePointers,
    /// By the unwind tables of their files, and so many bytes of the stack.
    Dwarf(u16),
}

impl CallGraph {
    /// Bytes of the stack where nobody says: as with perf.
    const STACK: u16 = 8192;
}

impl FromStr for CallGraph {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (how, bytes) = match text.split_once(',') {
            Some((how, bytes)) => (how, Some(bytes)),
            None => (text, None),
        };
        match (how, bytes) {
            ("fp", None) => Ok(Self::FramePointers),
            ("dwarf", None) => Ok(Self::Dwarf(Self::STACK)),
            ("dwarf", Some(bytes)) => {
                let bytes: Option<u16> = bytes.parse().ok();
                let bytes = bytes.filter(|bytes| *bytes > 0 && bytes.is_multiple_of(8));
                let wrong = "the bytes of the stack are a multiple of 8 from 8 to 65528";
                bytes.map(Self::Dwarf).ok_or_else(|| wrong.to_owned())
            }
            _ => Err(
                "callers are found by fp (frame pointers) or by dwarf[,BYTES] (the files of \
                 --symfs)"
                    .to_owned(),
            ),
        }
    }
}

impl RecordOptions {
    /// Samples a second where nobody says.
    pub const DEFAULT_HZ: u64 = 1000;
}

/// `umpire record`.
///
/// # Errors
/// There is no VM, no such event, vCPU or core, the VM refuses, or the file
/// cannot be written.
pub fn run(options: &RecordOptions) -> Result<Completion, ToolError> {
    let selection = &options.selection;
    let callers = options.dwarf.as_ref().map(callers).transpose()?;
    let stack = options.dwarf.as_ref().map_or(0, |dwarf| dwarf.stack);
    let vm = Vm::find(&selection.vm)?;
    let targets = selection.targets(vm.model.vcpus, vm.model.cores)?;
    let plan = plan(options, &vm).map_err(ToolError::Input)?;
    let clock = Clock {
        start: crate::sys::rdtsc(),
        khz: vm.model.tsc_khz,
    };
    let scene = Scene {
        vm: &vm,
        plan: &plan,
        clock,
        flags: selection.flags(),
        chains: options.chains || stack > 0,
        stack,
        buffer: buffer(
            options.buffer + STACKS * u64::from(stack),
            targets.len(),
            &vm,
        )?
        .max(LEAST_BUFFER + 4 * u64::from(stack)),
    };
    let waiter = Waiter::new().map_err(host("waiting for events"))?;
    let sessions = sessions(&scene, &targets, &waiter)?;
    let output = Output::create(&options.output, header(&scene))?;
    let mut recording = Recording {
        scene,
        sessions,
        waiter: &waiter,
        output,
        names: KernelNames::new(&vm),
        programs: Programs::default(),
        callers,
        shown: None,
        unreported: false,
    };
    let file = options.output.display().to_string();
    let went = recording.go(options);
    if went.is_err() && !recording.has_any() {
        return went;
    }
    // What was measured is kept, whatever has happened since.
    let kept = recording.finish(&file);
    let completion = went?;
    kept?;
    Ok(completion)
}

/// Who finds callers in the files of programs.
fn callers(dwarf: &Dwarf) -> Result<ProgramCallers, ToolError> {
    let symfs = Symfs::open(&dwarf.symfs);
    let symfs = symfs.map_err(|error| ToolError::Input(error.to_string()))?;
    let none = || ToolError::Input("give --symfs DIR, the guest's root".to_owned());
    let symfs = symfs.ok_or_else(none)?;
    let unwinder = ProgramUnwinder::new(symfs, dwarf.stack.into());
    Ok(ProgramCallers::new(unwinder))
}

fn plan(options: &RecordOptions, vm: &Vm) -> Result<SamplingPlan, String> {
    if options.events.iter().any(|list| list.reads_at_samples) {
        return Err(
            "':S' asks for the counts of a group in each sample, and umpire record takes none; \
             leave it out, and each event is sampled by itself"
                .to_owned(),
        );
    }
    let groups = options.events.iter().flat_map(|list| list.groups.clone());
    let mut list = EventList {
        groups: groups.collect(),
        reads_at_samples: false,
    };
    if list.groups.is_empty() {
        list.groups.push(vec![DEFAULT.to_owned()]);
    }
    let names = umpire_events::names();
    SamplingPlan::new(
        &list,
        &vm.pmu,
        &vm.model.virtual_pmds,
        names.as_ref(),
        options.sampling,
        options.random,
    )
}

/// Bytes of a sampling buffer: as asked for, or less if all together would have
/// more than the VM allows.
pub(super) fn buffer(wanted: u64, count: usize, vm: &Vm) -> Result<u64, ToolError> {
    let mut config = Call::GetConfig(Config::default());
    vm.client
        .ask(&mut config)
        .map_err(refused("asking for the interface"))?;
    let most = match config {
        Call::GetConfig(config) => config.smpl_buf_size_max,
        _ => wanted,
    };
    let count = u64::try_from(count).unwrap_or(u64::MAX).max(1);
    // Half of it is left to other tools, in whole pages.
    Ok(wanted.min(most / 2 / count / 4096 * 4096).max(LEAST_BUFFER))
}

fn sessions(
    scene: &Scene<'_>,
    targets: &[Target],
    waiter: &Waiter,
) -> Result<Vec<SamplingSession>, ToolError> {
    let mut sessions = Vec::new();
    for (number, target) in targets.iter().enumerate() {
        let session = SamplingSession::open(scene, *target)?;
        let added = waiter.add(&session.handle.fd, number);
        added.map_err(host("waiting for messages"))?;
        sessions.push(session);
    }
    Ok(sessions)
}

fn header(scene: &Scene<'_>) -> Header {
    let event = |event: &super::plan::Sampled| SampledEvent {
        name: event.name.clone(),
        sampling: scene.plan.sampling,
        // Nobody knows yet.
        provenance: None,
    };
    Header {
        umpire: env!("CARGO_PKG_VERSION").to_owned(),
        vm: scene.vm.machine.pid,
        vm_name: scene.vm.machine.guest.clone(),
        vcpus: scene.vm.model.vcpus,
        cores: scene.vm.model.cores,
        host: host_words(),
        command: own_words(),
        start_unix_ns: unix_ns(),
        start_tsc: scene.clock.start,
        tsc_khz: scene.vm.model.tsc_khz,
        events: scene.plan.events.iter().map(event).collect(),
    }
}

/// Nanoseconds since 1970.
fn unix_ns() -> u64 {
    let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    unix.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(0))
}

/// `Linux 6.1.0 x86_64`, as far as the host says.
fn host_words() -> String {
    let word = |name: &str| std::fs::read_to_string(format!("/proc/sys/kernel/{name}"));
    let words = ["ostype", "osrelease", "arch"].map(|name| word(name).unwrap_or_default());
    umpire_events::one_line(&words.join(" "))
}

/// What this program was called with, up to 4 KiB: a header has a limit.
fn own_words() -> Vec<String> {
    let words = std::env::args_os().map(|word| umpire_events::one_line(&word.to_string_lossy()));
    let mut bytes = 0;
    let fits = |word: &String| {
        bytes += word.len() + 1;
        bytes <= 4096
    };
    words.take_while(fits).collect()
}

struct Recording<'a> {
    scene: Scene<'a>,
    sessions: Vec<SamplingSession>,
    waiter: &'a Waiter,
    output: Output,
    names: KernelNames,
    programs: Programs,
    /// Where programs' callers are found by their files.
    callers: Option<ProgramCallers>,
    /// When progress was shown last.
    shown: Option<Instant>,
    /// Others had counters for a time that nobody reports.
    unreported: bool,
}

impl Recording<'_> {
    /// Samples until the time or the command is over, it is stopped, or nobody is left.
    fn go(&mut self, options: &RecordOptions) -> Result<Completion, ToolError> {
        for session in &self.sessions {
            session.start(self.scene.vm)?;
        }
        options.starter.ready(self.scene.vm)?;
        let stopped = !options.starter.is_waited_for() && self.get_ready()?;
        let began = Instant::now();
        let mut limit = Limit::begin(&options.until, self.waiter)?;
        let (mut next_drain, mut next_look) = (began + DRAIN, began + FIRST_LOOK);
        loop {
            if stopped {
                break;
            }
            let moments = [Some(next_drain), Some(next_look), limit.due()];
            let next = moments.into_iter().flatten().min();
            let woken = self
                .waiter
                .wait(next)
                .map_err(host("waiting for messages"))?;
            for number in &woken.ready {
                self.messages(*number)?;
            }
            let now = Instant::now();
            let none_left = self.sessions.iter().all(|session| session.over);
            if limit.is_over(&woken)? || none_left && !limit.is_command() {
                break;
            }
            if next_drain <= now {
                self.drain()?;
                next_drain = now + DRAIN;
            }
            if next_look <= now {
                self.drain()?;
                self.look()?;
                self.describe()?;
                next_look = now + LOOK;
            }
            self.show(now);
        }
        self.look()?;
        for session in &mut self.sessions {
            session.stop(&self.scene);
        }
        for number in 0..self.sessions.len() {
            self.messages(number)?;
        }
        self.drain()?;
        let mut losses = Vec::new();
        for session in &mut self.sessions {
            match session.unrestored(&self.scene) {
                Some(Ok(loss)) => losses.push(loss),
                Some(Err(note)) => {
                    self.unreported = true;
                    crate::note(&mut io::stderr(), &note);
                }
                None => {}
            }
        }
        // Behind the samples before them.
        self.write(losses)?;
        Ok(limit.completion())
    }

    /// Takes in what is in the buffers yet, and says whether anything was measured.
    fn has_any(&mut self) -> bool {
        // Why it fails, if it does, was said already.
        let _ = self.drain();
        let callers = self.callers.as_ref();
        let waits = callers.is_some_and(|callers| !callers.is_empty());
        waits || self.output.totals() != Totals::default()
    }

    /// Samples until the VM knows the guest's kernel, so that those of the recording have
    /// tasks; what was sampled so far is no part of it. It is not waited for where nothing can
    /// be known, or nothing runs. Returns whether it was stopped meanwhile.
    fn get_ready(&mut self) -> Result<bool, ToolError> {
        let began = Instant::now();
        let (mut any, mut stopped) = (false, false);
        while !stopped && began.elapsed() < if any { KERNEL } else { IDLE } {
            let mut records = Vec::new();
            for session in &mut self.sessions {
                records.extend(session.drain(&self.scene)?);
            }
            any |= !records.is_empty();
            self.programs.take(&records);
            if self.programs.is_ready(&self.scene.vm.client) {
                break;
            }
            let woken = self.waiter.wait(Some(Instant::now() + FIRST_LOOK));
            let woken = woken.map_err(host("waiting for samples"))?;
            for number in woken.ready {
                if let Some(session) = self.sessions.get_mut(number) {
                    session.messages(&self.scene)?;
                    if session.over {
                        self.waiter.remove(&session.handle.fd);
                    }
                }
            }
            stopped = woken.stop || self.sessions.iter().all(|session| session.over);
        }
        self.scene.clock.start = crate::sys::rdtsc();
        self.output.begin(unix_ns(), self.scene.clock.start);
        Ok(stopped)
    }

    fn messages(&mut self, number: usize) -> Result<(), ToolError> {
        let Some(session) = self.sessions.get_mut(number) else {
            return Ok(());
        };
        // A loss comes behind the samples before it.
        let mut records = session.drain(&self.scene)?;
        records.extend(session.messages(&self.scene)?);
        if session.over {
            self.waiter.remove(&session.handle.fd);
        }
        self.write(records)
    }

    fn write(&mut self, records: Vec<Record>) -> Result<(), ToolError> {
        self.names.take(&records);
        self.programs.take(&records);
        self.put(records)
    }

    /// To the file, or where samples wait for what is known of their programs.
    fn put(&mut self, mut records: Vec<Record>) -> Result<(), ToolError> {
        if let Some(callers) = &mut self.callers {
            records = callers.push(records, Instant::now());
        }
        self.output.write(&records)
    }

    fn drain(&mut self) -> Result<(), ToolError> {
        let mut records = Vec::new();
        for session in &mut self.sessions {
            records.extend(session.drain(&self.scene)?);
        }
        records.sort_by_key(|record| match record {
            Record::Sample(sample) => sample.time_ns,
            Record::Loss(loss) => loss.time_ns,
            Record::Described(_) => 0,
        });
        self.write(records)
    }

    /// Where periods adapt, or it is not known yet how events are counted.
    fn look(&mut self) -> Result<(), ToolError> {
        let adapts = matches!(self.scene.plan.sampling, Sampling::Frequency(_));
        if !adapts && self.output.is_learned() {
            return Ok(());
        }
        for session in self.sessions.iter_mut().filter(|session| !session.over) {
            for (event, provenance) in session.look(&self.scene)? {
                self.output.learn(event, provenance);
            }
        }
        Ok(())
    }

    /// What samples have met in the guest.
    fn describe(&mut self) -> Result<(), ToolError> {
        let described = self.programs.ask(&self.scene.vm.client);
        self.put(described)
    }

    /// How far it is, for people.
    fn show(&mut self, now: Instant) {
        let due = self.shown.is_none_or(|last| last + PROGRESS <= now);
        if !due || !io::stderr().is_terminal() {
            return;
        }
        self.shown = Some(now);
        let _ = write!(io::stderr(), "\r\x1b[K{}", progress(&self.output.totals()));
    }

    fn finish(mut self, file: &str) -> Result<(), ToolError> {
        if self.shown.take().is_some() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
        let now = crate::sys::rdtsc();
        let described = self.programs.rest(&self.scene.vm.client);
        self.put(described)?;
        if let Some(callers) = &mut self.callers {
            self.output.write(&callers.rest())?;
            for warning in callers.warnings() {
                crate::note(&mut io::stderr(), &warning);
            }
        }
        let totals = self.output.totals();
        if let Some(note) = self.programs.note().filter(|_| totals.samples > 0) {
            crate::note(&mut io::stderr(), &note);
        }
        let symbols = self.names.text(self.scene.vm);
        let bytes = self.output.finish(self.scene.clock.ns(now), &symbols)?;
        let none = if was_idle(&totals) && !self.unreported {
            "; the guest was idle, or did nothing of this kind"
        } else {
            ""
        };
        let kib = bytes.div_ceil(1024);
        let line = progress(&totals);
        let _ = writeln!(io::stderr(), "umpire: {line}; {file} has {kib} KiB{none}");
        Ok(())
    }
}

/// There are no samples, and nothing that keeps them from being taken.
fn was_idle(totals: &Totals) -> bool {
    *totals == Totals::default()
}

/// `12345 samples, 3 lost, 1.500 ms without a counter`.
fn progress(totals: &Totals) -> String {
    let mut text = format!("{} samples", totals.samples);
    if totals.lost > 0 {
        text.push_str(&format!(", {} lost", totals.lost));
    }
    if totals.throttled > 0 {
        text.push_str(&format!(", throttled {} times", totals.throttled));
    }
    if totals.blind_ns > 0 {
        let blind = Duration::from_nanos(totals.blind_ns).as_secs_f64() * 1e3;
        text.push_str(&format!(", {blind:.3} ms without a counter"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_are_found_as_perf_says_it() {
        let check = |text: &str, expected: Result<CallGraph, &str>| match (text.parse(), expected) {
            (Err(error), Err(part)) => {
                let error: String = error;
                assert!(error.contains(part), "{error}");
            }
            (how, expected) => assert_eq!(how.ok(), expected.ok(), "{text}"),
        };
        check("fp", Ok(CallGraph::FramePointers));
        check("dwarf", Ok(CallGraph::Dwarf(8192)));
        check("dwarf,16", Ok(CallGraph::Dwarf(16)));
        check("dwarf,65528", Ok(CallGraph::Dwarf(65_528)));
        for wrong in ["dwarf,65536", "dwarf,0", "dwarf,12", "dwarf,", "dwarf,-8"] {
            check(wrong, Err("a multiple of 8 from 8 to 65528"));
        }
        for wrong in ["", "lbr", "fp,8", "DWARF"] {
            check(wrong, Err("fp (frame pointers) or by dwarf[,BYTES]"));
        }
    }

    #[test]
    fn progress_tells_losses() {
        let totals = Totals {
            samples: 12,
            lost: 3,
            throttled: 2,
            blind_ns: 1_500_000,
        };
        assert_eq!(
            progress(&totals),
            "12 samples, 3 lost, throttled 2 times, 1.500 ms without a counter"
        );
        assert_eq!(progress(&Totals::default()), "0 samples");
        assert!(was_idle(&Totals::default()));
        let blind = Totals {
            blind_ns: 1,
            ..Totals::default()
        };
        assert!(!was_idle(&blind));
    }
}
