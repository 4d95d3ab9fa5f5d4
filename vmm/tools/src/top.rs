//! `umpire top`: the VMs that run, live: what their vCPUs do, who holds which counter, and in
//! which symbols the guests are.
//!
//! Each VM has a thread (`watch`) with contexts that count and sample; when it is asked it
//! gives a `reading`. The `state` has the readings and what keys have chosen, a `frame` is
//! the text that follows from it, `view` puts this on a screen of any size or makes lines of
//! it. All but `watch`, `names`, `terminal` and the loop here is pure.
//!
//! Contexts are preemptible and ask nobody for counters: guests and other tools come first.

mod frame;
mod keys;
mod names;
mod reading;
mod state;
mod terminal;
mod view;
mod watch;

use std::collections::BTreeSet;
use std::io::{self, IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use clap::Args;
use perfmon_abi::consts::{PFM_FL_NO_ASK, PFM_FL_PREEMPTIBLE};
use serde::Serialize;

use self::frame::Frame;
use self::keys::keys;
use self::reading::{CACHE_MISSES, CYCLES, EXITS, INSTRUCTIONS, RUN_TIME, VmReading};
use self::state::{Action, Standing, State};
use self::terminal::Screen;
use self::watch::{News, Reporter, Settings, Watcher};
use crate::error::host;
use crate::find::{VmChoice, known_sockets, name_of, running_sockets};
use crate::profile::symbols::{self, offset};
use crate::record::LiveSampling;
use crate::stat::spec::EventList;
use crate::{Completion, ToolError, Waiter, note};

/// How long VMs have to answer at the beginning, and for a frame that is printed; and at the
/// beginning where the names in that frame are waited for.
const PATIENCE: Duration = Duration::from_secs(8);
const WITH_NAMES: Duration = Duration::from_secs(12);
/// How long a frame waits for a VM that takes its time.
const ANSWER: Duration = Duration::from_millis(300);
/// How soon the first rates are there.
const FIRST: Duration = Duration::from_secs(1);
/// What comes within this time is drawn at once.
const TOGETHER: Duration = Duration::from_millis(20);
/// How often new VMs are looked for.
const SEARCH: Duration = Duration::from_secs(2);
/// How long threads have to leave their VMs at the end.
const LEAVE: Duration = Duration::from_secs(1);
/// Columns of a frame that is printed where nobody says.
const COLUMNS: u16 = 120;
/// What the loop waits for.
const BELL: usize = 0;
const KEYBOARD: usize = 1;
const RESIZED: usize = 2;

/// What is shown, and how.
#[derive(Clone, Debug, Args)]
pub struct TopOptions {
    /// The VM.
    #[command(flatten)]
    pub vm: VmChoice,
    /// Seconds from frame to frame, 0.1 to 3600
    #[arg(short, long, value_name = "SECONDS", default_value = "2", value_parser = delay)]
    pub delay: Duration,
    /// End after so many frames [default: q or Ctrl-C ends it]
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub frames: Option<u64>,
    /// Print one frame as text, of COLUMNS columns or 120, after one delay, and after up to 10 s
    /// for the names in it; needs no terminal
    #[arg(long, conflicts_with = "frames")]
    pub once: bool,
    /// With --once, print JSON: one object for each VM, a line each
    #[arg(short, long, requires = "once")]
    pub json: bool,
    /// The event that is sampled for the symbols, and has a column [default: cycles, or
    /// instructions where the VM counts no cycles]
    #[arg(short, long, value_name = "EVENT")]
    pub event: Option<EventList>,
    /// Take so many samples a second of a vCPU's time
    // Not in step with the ticks of guests.
    #[arg(short = 'F', long, value_name = "HZ", default_value_t = 29,
          value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub freq: u64,
    /// Sample nothing, and show no symbols
    #[arg(long, conflicts_with_all = ["event", "freq", "symbols"])]
    pub no_samples: bool,
    /// Names for the guest's kernel, of one VM: vmlinux, System.map, or a copy of the guest's
    /// /proc/kallsyms [default: what the guest's kernel has in its memory]
    #[arg(long, value_name = "FILE", visible_aliases = ["vmlinux", "kallsyms", "system-map"])]
    pub symbols: Option<PathBuf>,
    /// How far the kernel moved itself from the addresses in vmlinux or System.map, in
    /// hexadecimal
    #[arg(long, value_name = "HEX", requires = "symbols", allow_hyphen_values = true,
          value_parser = offset)]
    pub kaslr_offset: Option<u64>,
}

fn delay(text: &str) -> Result<Duration, String> {
    let seconds: Result<f64, _> = text.parse();
    match seconds.ok().filter(|it| (0.1..=3600.0).contains(it)) {
        Some(seconds) => Ok(Duration::from_secs_f64(seconds)),
        None => Err("it is a number of seconds from 0.1 to 3600".to_owned()),
    }
}

/// Columns of a frame that is printed: what COLUMNS says, if it is a number.
fn columns() -> u16 {
    let columns = std::env::var("COLUMNS").ok();
    let columns = columns.and_then(|columns| columns.parse().ok());
    columns.filter(|columns| *columns > 0).unwrap_or(COLUMNS)
}

impl TopOptions {
    fn settings(&self) -> Result<Settings, ToolError> {
        let sampled = match &self.event {
            None => CYCLES.to_owned(),
            Some(list) => match &list.groups.concat()[..] {
                [one] if !list.reads_at_samples => one.clone(),
                _ => {
                    return Err(ToolError::Input(
                        "-e: umpire top samples one event; give one, or use umpire record"
                            .to_owned(),
                    ));
                }
            },
        };
        let mut counted = [CYCLES, INSTRUCTIONS, CACHE_MISSES, EXITS, RUN_TIME]
            .map(str::to_owned)
            .to_vec();
        if !counted.contains(&sampled) {
            counted.push(sampled.clone());
        }
        let list = |names: Vec<String>| EventList {
            groups: names.into_iter().map(|name| vec![name]).collect(),
            ..EventList::default()
        };
        let offset = self.kaslr_offset.unwrap_or(0);
        let symbols = self.symbols.as_ref();
        let symbols = symbols.map(|path| symbols::load(path, offset));
        let symbols = symbols.transpose();
        let symbols = symbols.map_err(|error| ToolError::Input(error.to_string()))?;
        let flags = PFM_FL_PREEMPTIBLE | PFM_FL_NO_ASK;
        Ok(Settings {
            counted: list(counted),
            sampling: (!self.no_samples).then(|| LiveSampling {
                event: self.event.is_some().then(|| list(vec![sampled])),
                hz: self.freq,
                flags,
            }),
            flags,
            symbols,
            patient: self.once,
            named: self.is_named(),
        })
    }

    /// Only one VM is meant: symbols are those of one kernel.
    fn is_named(&self) -> bool {
        let choice = &self.vm;
        choice.control.is_some() || choice.vm.is_some() || self.symbols.is_some()
    }
}

/// Shows VMs on the terminal until the user has seen enough, or one frame on `out`; `notes`
/// has a line if the VMs have ended.
///
/// # Errors
/// There is no VM, no such event, none can be looked at, or there is no terminal.
pub fn run(
    options: &TopOptions,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<Completion, ToolError> {
    let terminal = io::stdin().is_terminal() && io::stdout().is_terminal();
    if !options.once && !terminal {
        return Err(ToolError::Input(
            "top needs a terminal for its input and output; umpire top --once prints one frame \
             as text"
                .to_owned(),
        ));
    }
    let mut top = Top::begin(options)?;
    let shown = if options.once {
        top.print(columns(), out)
    } else {
        top.show(notes)
    };
    top.leave();
    shown
}

/// All VMs, and who watches them.
struct Top<'a> {
    options: &'a TopOptions,
    settings: Arc<Settings>,
    state: State,
    watchers: Vec<Watcher>,
    /// The number of the next one.
    next: u64,
    /// Sockets of VMs that cannot be looked at.
    refused: BTreeSet<PathBuf>,
    news: Receiver<(u64, News)>,
    reporter: Sender<(u64, News)>,
    /// Both ends of what the watchers ring.
    bell: (UnixStream, UnixStream),
    waiter: Waiter,
    began: Instant,
    /// Why the first one of those that cannot be looked at cannot be.
    failed: Option<ToolError>,
}

impl<'a> Top<'a> {
    /// Begins to watch, and waits until each VM has answered or failed.
    fn begin(options: &'a TopOptions) -> Result<Self, ToolError> {
        let settings = Arc::new(options.settings()?);
        let sockets = if settings.named {
            vec![options.vm.socket()?]
        } else {
            running_sockets()
        };
        if sockets.is_empty() {
            return Err(ToolError::NoVm);
        }
        let bell = UnixStream::pair().map_err(host("waiting for VMs"))?;
        for end in [&bell.0, &bell.1] {
            end.set_nonblocking(true).map_err(host("waiting for VMs"))?;
        }
        let waiter = Waiter::new().map_err(host("waiting for VMs"))?;
        waiter.add(&bell.0, BELL).map_err(host("waiting for VMs"))?;
        let (reporter, news) = channel();
        let mut top = Self {
            options,
            settings,
            state: State::new(options.delay),
            watchers: Vec::new(),
            next: 0,
            refused: BTreeSet::new(),
            news,
            reporter,
            bell,
            waiter,
            began: Instant::now(),
            failed: None,
        };
        for socket in sockets {
            top.watch(socket)?;
        }
        let patience = if top.settings.patient {
            WITH_NAMES
        } else {
            PATIENCE
        };
        top.await_answers(Instant::now() + patience)?;
        for watcher in top.watchers.iter().filter(|one| one.asked) {
            top.state.expect(watcher.id, name_of(&watcher.socket));
        }
        match top.failed.take() {
            Some(error) if top.watchers.is_empty() => Err(error),
            _ => Ok(top),
        }
    }

    fn watch(&mut self, socket: PathBuf) -> Result<(), ToolError> {
        let bell = self.bell.1.try_clone();
        let reporter = Reporter {
            id: self.next,
            news: self.reporter.clone(),
            bell: bell.map_err(host("watching a VM"))?,
        };
        self.next += 1;
        let watcher = Watcher::start(socket, self.settings.clone(), reporter);
        self.watchers.push(watcher.map_err(host("watching a VM"))?);
        Ok(())
    }

    /// Looks for VMs that are new.
    fn search(&mut self) -> Result<(), ToolError> {
        if self.settings.named {
            return Ok(());
        }
        for socket in known_sockets() {
            let known = self.watchers.iter().any(|one| one.socket == socket);
            if !known && !self.refused.contains(&socket) {
                self.watch(socket)?;
            }
        }
        Ok(())
    }

    /// Takes in what VMs have said; whether there was anything.
    fn take_news(&mut self) -> Result<bool, ToolError> {
        let _ = (&self.bell.0).read(&mut [0; 256]);
        // Who has ended before the news are looked at has told all of them.
        let over = self.watchers.iter().filter(|one| one.is_over());
        let over: Vec<u64> = over.map(|one| one.id).collect();
        let mut any = false;
        while let Ok((id, news)) = self.news.try_recv() {
            any = true;
            self.take(id, news);
        }
        // Who said that there is nothing more is not among them any more.
        if self.watchers.iter().any(|one| over.contains(&one.id)) {
            return Err(ToolError::Input(
                "who watched a VM panicked; this is a bug in Umpire".to_owned(),
            ));
        }
        Ok(any)
    }

    fn take(&mut self, id: u64, news: News) {
        let Some(watcher) = self.watchers.iter_mut().find(|one| one.id == id) else {
            return;
        };
        let socket = watcher.socket.clone();
        let name = name_of(&socket);
        let known = self.state.vms().iter().any(|line| line.id == id);
        match news {
            News::Reading(reading) => {
                watcher.asked = false;
                self.state.answer(id, name, *reading, self.began.elapsed());
            }
            News::Left => self.forget(id),
            News::Ended => {
                self.forget(id);
                self.state.end(id, name, Standing::Ended);
            }
            // What a VM that ended badly has left is no news.
            News::Failed(error @ ToolError::Connect { .. }) if !known => {
                self.forget(id);
                self.failed.get_or_insert(error);
            }
            News::Failed(error) => {
                self.forget(id);
                let standing = Standing::Failed(error.to_string());
                self.state.end(id, name, standing);
                self.refused.insert(socket.clone());
                self.failed.get_or_insert(error);
            }
        }
    }

    /// Who watched a VM has nothing more to say.
    fn forget(&mut self, id: u64) {
        self.watchers.retain(|one| one.id != id);
    }

    /// Waits until nobody owes an answer; false if that was cut short.
    fn await_answers(&mut self, until: Instant) -> Result<bool, ToolError> {
        loop {
            self.take_news()?;
            if !self.watchers.iter().any(|one| one.asked) {
                return Ok(true);
            }
            let woken = self.waiter.wait(Some(until));
            let woken = woken.map_err(host("waiting for VMs"))?;
            if woken.stop {
                return Ok(false);
            }
            if until <= Instant::now() {
                return Ok(true);
            }
        }
    }

    fn ask_all(&mut self) {
        self.watchers.iter_mut().for_each(Watcher::ask);
    }

    /// Prints one frame.
    fn print(&mut self, width: u16, out: &mut dyn Write) -> Result<Completion, ToolError> {
        let until = Instant::now() + self.options.delay;
        while Instant::now() < until && !self.watchers.is_empty() {
            let woken = self.waiter.wait(Some(until));
            if woken.map_err(host("waiting for VMs"))?.stop {
                return Ok(Completion::CutShort);
            }
            self.take_news()?;
        }
        self.ask_all();
        if !self.await_answers(Instant::now() + PATIENCE)? {
            return Ok(Completion::CutShort);
        }
        self.state.pass_time(self.began.elapsed());
        let written = if self.options.json {
            self.json(out)
        } else {
            let text = view::text(&Frame::whole(&self.state, &clock()), width);
            out.write_all(text.as_bytes())
        };
        match written.and_then(|()| out.flush()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(ToolError::Output(error))
            }
            _ => Ok(Completion::Complete),
        }
    }

    fn json(&self, out: &mut dyn Write) -> io::Result<()> {
        for line in self.state.vms() {
            let (standing, reading) = match &line.standing {
                Standing::Live => ("live".to_owned(), Some(&line.reading)),
                Standing::Silent(_) => ("silent".to_owned(), Some(&line.reading)),
                Standing::Ended => ("ended".to_owned(), None),
                Standing::Failed(why) => (why.clone(), None),
            };
            let object = VmObject {
                name: &line.name,
                standing,
                reading,
            };
            serde_json::to_writer(&mut *out, &object)?;
            writeln!(out)?;
        }
        Ok(())
    }

    /// What the keys that were pressed ask for. A terminal that is gone asks for the end.
    fn actions(&mut self, screen: &Screen) -> Vec<Action> {
        let mut bytes = [0; 256];
        let count = rustix::io::read(screen.keyboard(), &mut bytes).unwrap_or(0);
        if count == 0 {
            return vec![Action::Quit];
        }
        let pressed = keys(&bytes[..count]).into_iter();
        pressed.filter_map(|key| self.state.key(key)).collect()
    }

    /// Why nothing is watched any more.
    fn all_gone(&mut self) -> Result<&'static str, ToolError> {
        let vms = self.state.vms();
        let ended = vms.iter().filter(|line| line.standing == Standing::Ended);
        match ended.count() {
            0 => Err(self.failed.take().unwrap_or(ToolError::NoVm)),
            1 => Ok("the VM has ended"),
            _ => Ok("all VMs have ended"),
        }
    }

    /// Shows frames until the user has seen enough, or nobody is left.
    fn show(&mut self, notes: &mut dyn Write) -> Result<Completion, ToolError> {
        let failed = || host("drawing on the terminal");
        let mut screen = Screen::open().map_err(failed())?;
        let added = self.waiter.add(screen.keyboard(), KEYBOARD);
        added.map_err(host("waiting for keys"))?;
        let added = self.waiter.add(screen.resized(), RESIZED);
        added.map_err(host("waiting for the terminal"))?;
        let mut frames = 0;
        let mut draw = Some(Instant::now());
        let mut next = Instant::now() + self.state.interval().min(FIRST);
        let mut search = Instant::now() + SEARCH;
        // When a frame is done without those that have not answered.
        let mut complete: Option<Instant> = None;
        loop {
            let moments = [draw, Some(next), Some(search), complete];
            let woken = self.waiter.wait(moments.into_iter().flatten().min());
            let woken = woken.map_err(host("waiting for VMs"))?;
            if woken.stop {
                return Ok(self.completion(frames));
            }
            if woken.ready.contains(&RESIZED) {
                let _ = screen.resized().read(&mut [0; 64]);
                draw = Some(Instant::now());
            }
            if woken.ready.contains(&KEYBOARD) {
                for action in self.actions(&screen) {
                    match action {
                        Action::Quit => return Ok(self.completion(frames)),
                        Action::Interval(interval) => next = Instant::now() + interval,
                        Action::Suspend => screen.suspend().map_err(failed())?,
                        Action::Redraw => screen.clear().map_err(failed())?,
                    }
                }
                draw = Some(Instant::now());
            }
            let now = Instant::now();
            if self.take_news()? {
                draw = draw.or(Some(now + TOGETHER));
            }
            if self.watchers.is_empty() {
                drop(screen);
                note(notes, self.all_gone()?);
                return Ok(self.completion(frames));
            }
            if search <= now {
                self.search()?;
                search = now + SEARCH;
            }
            if next <= now {
                self.ask_all();
                next = now + self.state.interval();
                complete = Some(now + ANSWER);
            }
            let owed = self.watchers.iter().any(|one| one.asked);
            let done = complete.is_some_and(|at| at <= now || !owed);
            if done {
                complete = None;
                frames += 1;
            }
            if done || draw.is_some_and(|at| at <= now) {
                draw = None;
                self.state.pass_time(self.began.elapsed());
                let frame = Frame::of_screen(&self.state, &clock());
                screen.show(&frame).map_err(failed())?;
            }
            if self.options.frames.is_some_and(|most| frames >= most) {
                return Ok(self.completion(frames));
            }
        }
    }

    fn completion(&self, frames: u64) -> Completion {
        match self.options.frames {
            Some(wanted) if frames < wanted => Completion::CutShort,
            _ => Completion::Complete,
        }
    }

    /// Leaves the VMs to others. One that does not answer keeps nobody waiting: its contexts
    /// end with this process.
    fn leave(&mut self) {
        self.watchers.iter_mut().for_each(Watcher::stop);
        let until = Instant::now() + LEAVE;
        while Instant::now() < until && !self.watchers.iter().all(Watcher::is_over) {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[cfg_attr(test, schemars(extend("allOf" = [{"anyOf": [{"$ref": "#/$defs/VmReading"}, {}]}])))]
struct VmObject<'a> {
    /// The VM: the name of its `umpire run --name`, or its process id.
    name: &'a str,
    /// `live`, `silent` (it does not answer, and what it said last is shown), `ended`, or why it
    /// cannot be looked at.
    standing: String,
    #[serde(flatten)]
    #[cfg_attr(test, schemars(skip))]
    reading: Option<&'a VmReading>,
}

/// The time of day, in UTC.
fn clock() -> String {
    let now = jiff::Timestamp::now();
    let text = now.to_string();
    text.split('.').next().unwrap_or("").replace('T', " ") + " UTC"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_are_seconds() {
        assert_eq!(delay("0.1"), Ok(Duration::from_millis(100)));
        assert_eq!(delay("60"), Ok(Duration::from_secs(60)));
        for text in ["", "0", "-1", "0.05", "3601", "NaN", "1s", "inf"] {
            assert!(delay(text).is_err(), "{text}");
        }
    }

    #[test]
    fn schemas_are_of_the_structures() {
        crate::schema::check::<VmObject<'_>>("top");
        crate::schema::check::<VmReading>("top");
        crate::schema::check::<reading::HotPlace>("top");
    }
}
