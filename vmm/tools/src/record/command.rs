//! The loop of `umpire record`.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use perfmon_abi::Config;
use umpire_perfmon::Call;

use super::book::Book;
use super::callers::ProgramCallers;
use super::kernel::KernelNames;
use super::options::{Dwarf, RecordOptions};
use super::output::{Ended, Output, check_pipe};
use super::place::rescue;
use super::plan::SamplingPlan;
use super::programs::AskedPrograms;
use super::samples::Clock;
use super::session::{SamplingSession, Scene};
use super::switch::{Files, pass_over_signal};
use super::tasks::TaskFilter;
use crate::command::{CommandOutput, Limit, Until};
use crate::error::host;
use crate::lifecycle::Starter;
use crate::private;
use crate::profile::symfs::Symfs;
use crate::profile::unwind::ProgramUnwinder;
use crate::profile::{Header, Record, SampledEvent, Sampling, Totals};
use crate::stat::spec::EventList;
use crate::targets::Target;
use crate::vm::NO_CYCLES;
use crate::wait::Woken;
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
/// How soon it is said that nothing was sampled of a process that was asked for.
const SOON: Duration = Duration::from_secs(1);
/// How often a terminal shows the progress.
const PROGRESS: Duration = Duration::from_millis(500);
/// The least sampling buffer: two blocks with callers.
const LEAST_BUFFER: u64 = 16 << 10;
/// For so many stacks a buffer has room beside what was asked for: half a second of them.
const STACKS: u64 = 512;

/// `umpire record`.
///
/// # Errors
/// There is no VM, no such event, vCPU or core, the VM refuses, or the file
/// cannot be written.
pub fn run(options: &RecordOptions) -> Result<Completion, ToolError> {
    let starter = if options.resume {
        Starter::of(1)
    } else {
        Starter::default()
    };
    run_with(options, &starter)
}

/// The same, beside other tools that a VM waits for.
///
/// # Errors
/// As of [`run`].
pub fn run_with(options: &RecordOptions, starter: &Starter) -> Result<Completion, ToolError> {
    pass_over_signal().map_err(host("passing over SIGUSR2"))?;
    let until = options.until.until()?;
    let dwarf = options.dwarf()?;
    if options.is_pipe() {
        check_pipe()?;
    }
    let callers = dwarf.as_ref().map(callers).transpose()?;
    let stack = dwarf.as_ref().map_or(0, |dwarf| dwarf.stack);
    let vm = Vm::find(&options.who.vm)?;
    let targets = options.who.targets(vm.model.vcpus, vm.model.cores)?;
    let plan = plan(options, &vm).map_err(ToolError::Input)?;
    if names_none(options) && vm.usual_event() != "cycles" && !options.quiet {
        crate::note(&mut io::stderr(), NO_CYCLES);
    }
    let clock = Clock::of(&vm);
    let mut scene = Scene {
        vm: &vm,
        plan: &plan,
        clock,
        flags: options.who.flags(),
        chains: options.callers || options.call_graph.is_some(),
        stack,
        buffer: buffer(
            (options.buffer << 10) + STACKS * u64::from(stack),
            targets.len(),
            &vm,
        )?
        .max(LEAST_BUFFER + 4 * u64::from(stack)),
    };
    let waiter = Waiter::new().map_err(host("waiting for events"))?;
    let files = Files::of(options, &waiter)?;
    let mut sessions = sessions(&scene, &targets, &waiter)?;
    scene.clock.start = now(&mut sessions, &scene);
    let filter = TaskFilter::new(&options.processes, &options.threads);
    let book = (filter.is_some() || files.is_some()).then(Book::default);
    let mut recording = Recording {
        output: Output::new(&options.output, header(&scene, options)),
        scene,
        options,
        sessions,
        waiter: &waiter,
        files,
        names: KernelNames::new(&vm),
        programs: AskedPrograms::default(),
        filter,
        callers,
        book,
        shown: None,
        unreported: false,
        began: false,
    };
    if let Some(within) = vm.within()
        && !options.quiet
    {
        recording.say(&within);
    }
    if options.verbose {
        recording.say(&described(&recording.scene, &targets));
    }
    let went = recording.go(&until, starter);
    if went.is_err() && !recording.has_any() {
        return went;
    }
    // What was measured is kept, whatever has happened since.
    let kept = recording.finish();
    let completion = went?;
    kept?;
    Ok(completion)
}

/// What is sampled, for people.
fn described(scene: &Scene<'_>, targets: &[Target]) -> String {
    let targets: Vec<String> = targets.iter().map(Target::to_string).collect();
    let event = |event: &super::plan::Sampled| format!("{} (PMD {})", event.name, event.pmd);
    let events: Vec<String> = scene.plan.events.iter().map(event).collect();
    format!(
        "{}: {}; sampled are {}; a buffer has {} KiB",
        scene.vm.title(),
        targets.join(", "),
        events.join(", "),
        scene.buffer >> 10
    )
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

/// What the clock that samples have shows now.
fn now(sessions: &mut [SamplingSession], scene: &Scene<'_>) -> u64 {
    if !scene.vm.model.virtual_time {
        return crate::sys::rdtsc();
    }
    let shown = sessions.iter_mut().map(|session| session.now(scene));
    shown.max().unwrap_or(scene.clock.start)
}

/// No event was asked for.
fn names_none(options: &RecordOptions) -> bool {
    options.event.iter().all(|list| list.groups.is_empty())
}

fn plan(options: &RecordOptions, vm: &Vm) -> Result<SamplingPlan, String> {
    if options.event.iter().any(|list| list.reads_at_samples) {
        return Err(
            "':S' asks for the counts of a group in each sample, and umpire record takes none; \
             leave it out, and each event is sampled by itself"
                .to_owned(),
        );
    }
    let mut list = EventList::default();
    options.event.iter().for_each(|other| list.append(other));
    if list.groups.is_empty() {
        list.groups.push(vec![vm.usual_event().to_owned()]);
    }
    let names = umpire_events::names();
    SamplingPlan::new(
        &list,
        &vm.pmu,
        &vm.model.virtual_pmds,
        names.as_ref(),
        options.sampling(),
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
        let added = waiter.add(session.fd(), number);
        added.map_err(host("waiting for messages"))?;
        sessions.push(session);
    }
    Ok(sessions)
}

fn header(scene: &Scene<'_>, options: &RecordOptions) -> Header {
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
        virtual_time: scene.vm.model.virtual_time,
        events: scene.plan.events.iter().map(event).collect(),
        processes: options.processes.clone(),
        threads: options.threads.clone(),
    }
}

/// Nanoseconds since 1970.
fn unix_ns() -> u64 {
    let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    unix.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(0))
}

/// `Linux 6.1.0 x86_64`, as far as the host says.
fn host_words() -> String {
    let word = |name: &str| std::fs::read(format!("/proc/sys/kernel/{name}")).unwrap_or_default();
    // A release is called as whoever has built the kernel likes.
    let words = ["ostype", "osrelease", "arch"].map(word).join(&b' ');
    umpire_events::one_line(&String::from_utf8_lossy(&words))
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
    options: &'a RecordOptions,
    sessions: Vec<SamplingSession>,
    waiter: &'a Waiter,
    output: Output,
    /// Where the recording has several files.
    files: Option<Files>,
    names: KernelNames,
    programs: AskedPrograms,
    /// Whose samples are taken in, where not all are.
    filter: Option<TaskFilter>,
    /// Where programs' callers are found by their files.
    callers: Option<ProgramCallers>,
    /// Where not all descriptions go to the file.
    book: Option<Book>,
    /// When progress was shown last.
    shown: Option<Instant>,
    /// Others had counters for a time that nobody reports.
    unreported: bool,
    /// All that was asked for has begun: what is sampled is the recording's.
    began: bool,
}

impl Recording<'_> {
    /// Samples until the time or the command is over, it is stopped, or nobody is left.
    fn go(&mut self, until: &Until, starter: &Starter) -> Result<Completion, ToolError> {
        if self.begin(starter)? {
            return self.end().map(|()| Completion::Complete);
        }
        let output = if self.options.is_pipe() {
            CommandOutput::Error
        } else {
            CommandOutput::Own
        };
        let delay = self.options.delay;
        let mut limit = Limit::begin_with(until, self.waiter, delay, output)?;
        self.began = true;
        // Not before: a command that cannot be started leaves a paused guest where it is.
        starter.ready(self.scene.vm)?;
        if delay.is_zero() || self.sit_out(delay, &mut limit)? {
            self.watch(&mut limit)?;
        }
        self.end()?;
        Ok(limit.completion())
    }

    /// Begins to sample, but for what comes after a delay, and opens the file. Returns whether
    /// it is over already.
    fn begin(&mut self, starter: &Starter) -> Result<bool, ToolError> {
        if starter.is_waited_for() {
            self.output.open()?;
            if self.options.delay.is_zero() {
                self.start()?;
            }
            return Ok(false);
        }
        self.start()?;
        let is_over = self.get_ready()?;
        self.need_tasks()?;
        self.output.open()?;
        Ok(is_over)
    }

    fn start(&mut self) -> Result<(), ToolError> {
        for session in self
            .sessions
            .iter_mut()
            .filter(|session| !session.is_over())
        {
            session.start(self.scene.vm)?;
        }
        Ok(())
    }

    /// Samples nothing for so long, and then begins. Returns false if it is over before that.
    fn sit_out(&mut self, delay: Duration, limit: &mut Limit) -> Result<bool, ToolError> {
        let until = Instant::now() + delay;
        for session in &mut self.sessions {
            session.pause(&self.scene);
        }
        // While it got ready something was sampled.
        drained(&mut self.sessions, &self.scene)?;
        loop {
            let next = limit.due().into_iter().chain([until]).min();
            let woken = self.waiter.wait(next);
            let woken = woken.map_err(host("waiting out the delay"))?;
            self.pass_over(&woken)?;
            if limit.is_over(&woken)? || self.none_left() && !limit.is_command() {
                self.say("it was over before the delay was, so nothing was sampled");
                return Ok(false);
            }
            if until <= Instant::now() {
                break;
            }
        }
        self.begin_time();
        self.start()?;
        Ok(true)
    }

    /// Takes in what came before sampling begins.
    fn pass_over(&mut self, woken: &Woken) -> Result<(), ToolError> {
        for number in &woken.ready {
            if let Some(session) = self.sessions.get_mut(*number) {
                session.messages(&self.scene)?;
                if session.is_over() {
                    self.waiter.remove(session.fd());
                }
            }
        }
        if let Some(files) = &mut self.files {
            files.hear(woken);
        }
        Ok(())
    }

    /// What is sampled from now on is the recording's.
    fn begin_time(&mut self) {
        self.scene.clock.start = now(&mut self.sessions, &self.scene);
        self.output.begin(unix_ns(), self.scene.clock.start);
    }

    fn none_left(&self) -> bool {
        self.sessions.iter().all(|session| session.is_over())
    }

    /// Takes in what is left, and samples no more.
    fn end(&mut self) -> Result<(), ToolError> {
        self.look()?;
        for session in &mut self.sessions {
            session.stop(&self.scene);
        }
        for number in 0..self.sessions.len() {
            self.messages(number)?;
        }
        self.drain()?;
        let mut losses = Vec::new();
        let mut notes = Vec::new();
        for session in &mut self.sessions {
            match session.unrestored(&self.scene) {
                Some(Ok(loss)) => losses.push(loss),
                Some(Err(note)) => notes.push(note),
                None => {}
            }
        }
        self.unreported |= !notes.is_empty();
        for note in notes {
            self.say(&note);
        }
        // Behind the samples before them.
        self.write(losses)
    }

    fn watch(&mut self, limit: &mut Limit) -> Result<(), ToolError> {
        let began = Instant::now();
        if let Some(files) = &mut self.files {
            files.begin(began);
        }
        let (mut next_drain, mut next_look) = (began + DRAIN, began + FIRST_LOOK);
        let mut absent = self.filter.as_ref().map(|_| began + SOON);
        loop {
            let switch = self.files.as_ref().and_then(Files::due);
            let moments = [Some(next_drain), Some(next_look), limit.due(), switch];
            let next = moments.into_iter().flatten().min();
            let woken = self
                .waiter
                .wait(next)
                .map_err(host("waiting for messages"))?;
            for number in &woken.ready {
                self.messages(*number)?;
            }
            let now = Instant::now();
            let none_left = self.none_left();
            if limit.is_over(&woken)? || none_left && !limit.is_command() {
                return Ok(());
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
            if absent.is_some_and(|at| at <= now) {
                absent = None;
                self.tell_absent(
                    "so far there is no sample of",
                    "; they are taken in when it runs",
                );
            }
            self.switch_if_due(&woken, now)?;
            if self.output.is_closed() || self.is_full() {
                return Ok(());
            }
            self.show(now);
        }
    }

    /// Whether the file has as many bytes as it may, which is said.
    fn is_full(&mut self) -> bool {
        let most = self.options.max_size;
        let is_full = most.is_some_and(|most| self.output.bytes() >= most);
        if is_full {
            let name = self.output.name();
            self.say(&format!(
                "{name} has the bytes of --max-size: sampling ends"
            ));
        }
        is_full
    }

    /// Goes on in another file if it is time.
    fn switch_if_due(&mut self, woken: &Woken, now: Instant) -> Result<(), ToolError> {
        let bytes = self.output.bytes();
        let files = self.files.as_mut();
        if files.is_some_and(|files| files.is_due(woken, bytes, now)) {
            self.switch()?;
        }
        Ok(())
    }

    /// Ends this file, with all that its samples need, and begins another. What is sampled
    /// meanwhile is the next one's.
    fn switch(&mut self) -> Result<(), ToolError> {
        self.drain()?;
        let (unix_ns, tsc) = (unix_ns(), now(&mut self.sessions, &self.scene));
        let duration_ns = self.scene.clock.ns(tsc);
        self.scene.clock.start = tsc;
        let mut held = Ok(Vec::new());
        let (sessions, scene) = (&mut self.sessions, &self.scene);
        let described = self.programs.rest(&scene.vm.client, || {
            if let Ok(records) = &mut held {
                match drained(sessions, scene) {
                    Ok(more) => records.extend(more),
                    Err(error) => held = Err(error),
                }
            }
        });
        self.put(described)?;
        self.put_rest()?;
        let symbols = self.names.text_of_file(self.scene.vm);
        let next = self.output.next(unix_ns, tsc);
        self.close(duration_ns, &symbols)?;
        if let Some(book) = &mut self.book {
            book.turn_over();
        }
        self.output = next;
        self.output.open()?;
        if let Some(files) = &mut self.files {
            files.begin(Instant::now());
        }
        let held = held?;
        self.write(held)
    }

    /// Takes in what is in the buffers yet, and says whether anything was measured.
    fn has_any(&mut self) -> bool {
        if !self.began || !self.output.is_open() {
            return false;
        }
        // Why it fails, if it does, was said already.
        let _ = self.drain();
        let callers = self.callers.as_ref();
        let filter = self.filter.as_ref();
        let waits = callers.is_some_and(|callers| !callers.is_empty())
            || filter.is_some_and(|filter| !filter.is_empty());
        waits || self.output.totals() != Totals::default()
    }

    /// Samples until the VM knows the guest's kernel, so that those of the recording have
    /// tasks; what was sampled so far is no part of it. It is not waited for where nothing can
    /// be known, or nothing runs. Returns whether it was stopped meanwhile.
    fn get_ready(&mut self) -> Result<bool, ToolError> {
        let began = Instant::now();
        let (mut any, mut stopped) = (false, false);
        while !stopped && began.elapsed() < if any { KERNEL } else { IDLE } {
            let records = drained(&mut self.sessions, &self.scene)?;
            any |= !records.is_empty();
            self.programs.take(&records);
            if self.programs.is_ready(&self.scene.vm.client) {
                break;
            }
            let woken = self.waiter.wait(Some(Instant::now() + FIRST_LOOK));
            let woken = woken.map_err(host("waiting for samples"))?;
            self.pass_over(&woken)?;
            stopped = woken.stop || self.none_left();
        }
        self.begin_time();
        Ok(stopped)
    }

    /// Whoever asks for processes has a guest whose processes are known.
    fn need_tasks(&self) -> Result<(), ToolError> {
        let asks = self.filter.is_some();
        let why = || self.programs.why_unknown(&self.scene.vm.client);
        match asks.then(why).flatten() {
            Some(why) => Err(ToolError::Input(format!(
                "-p and -t need the guest's processes, which are not known: {why}"
            ))),
            None => Ok(()),
        }
    }

    fn messages(&mut self, number: usize) -> Result<(), ToolError> {
        let Some(session) = self.sessions.get_mut(number) else {
            return Ok(());
        };
        // A loss comes behind the samples before it.
        let mut records = session.drain(&self.scene)?;
        records.extend(session.messages(&self.scene)?);
        if session.is_over() {
            self.waiter.remove(session.fd());
        }
        self.write(records)
    }

    fn write(&mut self, records: Vec<Record>) -> Result<(), ToolError> {
        self.programs.take(&records);
        self.put(records)
    }

    /// To the file, or where samples wait until it is known whose they are.
    fn put(&mut self, mut records: Vec<Record>) -> Result<(), ToolError> {
        if let (Some(filter), Some(book)) = (&mut self.filter, &mut self.book) {
            records = filter.push(records, book, Instant::now());
        }
        self.put_wanted(records)
    }

    /// The same, or where samples wait for what is known of their programs.
    fn put_wanted(&mut self, mut records: Vec<Record>) -> Result<(), ToolError> {
        self.names.take(&records);
        if let Some(callers) = &mut self.callers {
            records = callers.push(records, Instant::now());
        }
        self.put_complete(records)
    }

    fn put_complete(&mut self, mut records: Vec<Record>) -> Result<(), ToolError> {
        if let Some(book) = &mut self.book {
            book.turn(&mut records);
        }
        self.output.write(&records)
    }

    /// What still waits: nothing more will be described for this file.
    fn put_rest(&mut self) -> Result<(), ToolError> {
        if let (Some(filter), Some(book)) = (&mut self.filter, &self.book) {
            let rest = filter.rest(book);
            self.put_wanted(rest)?;
        }
        if let Some(callers) = &mut self.callers {
            let rest = callers.rest();
            self.put_complete(rest)?;
        }
        Ok(())
    }

    fn drain(&mut self) -> Result<(), ToolError> {
        let records = drained(&mut self.sessions, &self.scene)?;
        self.write(records)
    }

    /// Where periods adapt, or it is not known yet how events are counted.
    fn look(&mut self) -> Result<(), ToolError> {
        let adapts = matches!(self.scene.plan.sampling, Sampling::Frequency(_));
        if !adapts && self.output.is_learned() {
            return Ok(());
        }
        for session in self
            .sessions
            .iter_mut()
            .filter(|session| !session.is_over())
        {
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
        if !due || self.options.quiet || !io::stderr().is_terminal() {
            return;
        }
        self.shown = Some(now);
        let mut totals = self.output.totals();
        totals.left_out = self
            .filter
            .as_ref()
            .map_or(totals.left_out, TaskFilter::left_out);
        let _ = write!(io::stderr(), "\r\x1b[K{}", progress(&totals));
    }

    /// A line for the user, who may not want any.
    fn say(&mut self, text: &str) {
        if self.options.quiet {
            return;
        }
        if self.shown.take().is_some() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
        crate::note(&mut io::stderr(), text);
    }

    /// Which of the processes and threads that were asked for have no sample.
    fn tell_absent(&mut self, before: &str, behind: &str) {
        let absent = self.filter.as_ref().and_then(TaskFilter::absent);
        if let Some(absent) = absent {
            self.say(&format!("{before} the guest's {absent}{behind}"));
        }
    }

    fn finish(mut self) -> Result<(), ToolError> {
        let ended = now(&mut self.sessions, &self.scene);
        let described = self.programs.rest(&self.scene.vm.client, || ());
        self.put(described)?;
        self.put_rest()?;
        let warnings = self.callers.as_ref().map(ProgramCallers::warnings);
        let note = self.programs.note();
        let note = note.filter(|_| self.output.totals().samples > 0);
        for line in warnings.into_iter().flatten().chain(note) {
            self.say(&line);
        }
        let symbols = self.names.text(self.scene.vm);
        self.close(self.scene.clock.ns(ended), &symbols)?;
        self.tell_absent(
            "there is no sample of",
            ": it did not run, or had another number",
        );
        if self.output.totals().samples == 0 {
            self.need_tasks()?;
        }
        Ok(())
    }

    /// Ends the file, and says what it has.
    fn close(&mut self, duration_ns: u64, symbols: &str) -> Result<(), ToolError> {
        let left_out = self.filter.as_mut().map(TaskFilter::take_left_out);
        let left_out = left_out.unwrap_or_default();
        let ended = self.output.finish(duration_ns, left_out, symbols)?;
        let at = self.output.name();
        let totals = self.output.totals();
        let line = progress(&totals);
        let none = if was_idle(&totals) && !self.unreported {
            "; the guest was idle, or did nothing of this kind"
        } else {
            ""
        };
        let Ended::Written(bytes) = ended else {
            self.say(&format!("{line}; {at} is left as it was{none}"));
            return Ok(());
        };
        let mut lost = self.output.lost();
        let name = match (&mut self.files, &mut lost) {
            (Some(files), lost) => files.put_away(lost.as_mut())?,
            (None, Some(lost)) => rescued(lost, &self.options.output)?,
            (None, None) => at.clone(),
        };
        if lost.is_some() {
            self.say(&format!(
                "{at} was removed or replaced by somebody else; what was recorded is in {name}"
            ));
        }
        if self.output.is_closed() {
            self.say(&format!("{line}; nobody reads {name} any more"));
        } else {
            let kib = bytes.div_ceil(1024);
            self.say(&format!("{line}; {name} has {kib} KiB{none}"));
        }
        Ok(())
    }
}

/// Writes a file that has no name any more anew beside `path`; its name.
fn rescued(lost: &mut File, path: &Path) -> Result<String, ToolError> {
    let made = private::create_beside(path);
    let made = made.and_then(|(mut to, name)| rescue(lost, &mut to).map(|()| name));
    let name = made.map_err(|error| ToolError::Host {
        what: format!("{}: somebody else has replaced it", path.display()),
        error,
    })?;
    Ok(name.display().to_string())
}

/// What all of them have sampled since the last time, by time.
fn drained(sessions: &mut [SamplingSession], scene: &Scene<'_>) -> Result<Vec<Record>, ToolError> {
    let mut records = Vec::new();
    for session in sessions {
        records.extend(session.drain(scene)?);
    }
    records.sort_by_key(|record| match record {
        Record::Sample(sample) => sample.time_ns,
        Record::Loss(loss) => loss.time_ns,
        Record::Described(_) => 0,
    });
    Ok(records)
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
    if let Some(left_out) = totals.left_out.words() {
        text.push_str(&format!(", {left_out}"));
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
    use crate::profile::LeftOut;

    #[test]
    fn progress_tells_losses() {
        let totals = Totals {
            samples: 12,
            lost: 3,
            throttled: 2,
            blind_ns: 1_500_000,
            left_out: LeftOut {
                others: 5,
                unknown: 6,
            },
        };
        assert_eq!(
            progress(&totals),
            "12 samples, 3 lost, 5 samples of others and 6 of unknown tasks left out, \
             throttled 2 times, 1.500 ms without a counter"
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
