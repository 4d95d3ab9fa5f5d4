//! The loop of `umpire stat`.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use super::Row;
use super::events::{Asked, DEFAULT, Source, asked};
use super::print::{Form, Interval, Whole, write_interval, write_whole};
use super::rows::{Layout, Part, mean};
use super::runs::Runs;
use super::session::{Job, Session};
use super::spec::EventList;
use super::tally::Tally;
use super::trial::{Plan, Question};
use super::watch::{Watched, since};
use crate::cli::StatFlags;
use crate::config::{ExitStatus, UserError};
use crate::tools::targets::Target;
use crate::tools::{ToolError, Vm, Waiter, refused};

/// How often a context without turns is read: what it has counted is not lost
/// with the VM.
const POLL: Duration = Duration::from_millis(100);

/// `umpire stat`.
///
/// # Errors
/// There is no VM, no such event, vCPU or core, or standard output cannot be
/// written to. Whoever closes it early has seen enough: that is no error.
pub fn run(flags: &StatFlags) -> Result<ExitStatus, UserError> {
    let vm = Vm::find(flags.who.control.as_deref())?;
    let list = event_list(&flags.event)?;
    let names = crate::events::names();
    let groups = asked(
        &list,
        vm.pmu.model(),
        &vm.model.virtual_pmds,
        names.as_ref(),
    )
    .map_err(UserError::bad_input)?;
    let mut number = 0..;
    let numbered = |group: &Vec<Asked>| number.by_ref().take(group.len()).collect();
    let numbers: Vec<Vec<usize>> = groups.iter().map(numbered).collect();
    let events: Vec<Asked> = groups.into_iter().flatten().collect();
    let choice = flags.who.choice();
    let targets = choice.targets(vm.model.vcpus, vm.model.cores)?;
    let question = Question {
        vm: &vm,
        events: &events,
        groups: &numbers,
        targets: &targets,
        preemptible: flags.who.preemptible,
    };
    let plan = question.plan()?;
    for note in &plan.notes {
        tell(note);
    }
    let job = Job {
        vm: &vm,
        events: &events,
        sets: &plan.schedule.sets,
        turn: flags.turn(),
        preemptible: flags.who.preemptible,
    };
    let waiter = Waiter::new().map_err(|error| ToolError::Host {
        what: "waiting for events".to_owned(),
        error,
    })?;
    let measure = Measure {
        job,
        plan: &plan,
        targets: &targets,
        waiter: &waiter,
        flags,
    };
    measure.all()
}

/// All lists in one, or the default.
fn event_list(lists: &[EventList]) -> Result<EventList, UserError> {
    if lists.is_empty() {
        return DEFAULT.parse().map_err(UserError::bad_input);
    }
    let groups = lists.iter().flat_map(|list| list.groups.clone()).collect();
    Ok(EventList { groups })
}

/// One line for the user, where the output has no place for it.
fn tell(note: &str) {
    let _ = writeln!(io::stderr(), "umpire: {}", crate::config::one_line(note));
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The time is over.
    Time,
    /// Ctrl-C.
    Stopped,
    /// Nobody is left to count.
    Ended,
    /// Nobody reads the output.
    Unread,
}

struct Measure<'a> {
    job: Job<'a>,
    plan: &'a Plan,
    targets: &'a [Target],
    waiter: &'a Waiter,
    flags: &'a StatFlags,
}

impl Measure<'_> {
    /// Every run, and what they come to.
    fn all(&self) -> Result<ExitStatus, UserError> {
        let mut runs: Vec<Vec<Row>> = Vec::new();
        let mut elapsed = Runs::default();
        let mut end = End::Time;
        for _ in 0..self.flags.repeat {
            let mut run = Run::begin(self)?;
            end = run.go()?;
            let seconds = run.ended.duration_since(run.began).as_secs_f64();
            runs.push(run.rows(|it| &it.whole, seconds));
            elapsed.add(seconds);
            run.tell_blind();
            if end != End::Time {
                break;
            }
        }
        if end == End::Ended {
            tell("the vCPUs that were measured have ended");
        }
        if self.flags.interval.is_none() && end != End::Unread {
            let rows = mean(&runs);
            let whole = Whole {
                title: &self.job.vm.title(),
                rows: &rows,
                elapsed: &elapsed,
            };
            read_by(write_whole(&whole, &self.form(), &mut io::stdout().lock()))?;
        }
        let cut_short = end == End::Stopped && self.flags.duration.is_some();
        Ok(match cut_short {
            true => ExitStatus::INTERRUPTED,
            false => ExitStatus::SUCCESS,
        })
    }

    fn form(&self) -> Form {
        match &self.flags.field_separator {
            _ if self.flags.json => Form::Json,
            Some(separator) => Form::Csv(separator.clone()),
            None => Form::Table,
        }
    }

    /// Who counts what: with `-a` the vCPUs' contexts tell the quantities of the
    /// VMM, which a core does not have.
    fn sessions(&self) -> Result<Vec<(Session, Kind)>, ToolError> {
        let vm = self.job.vm;
        let is_quantity = |event: &Asked| matches!(event.source, Source::Quantity { .. });
        let quantities = self.job.events.iter().any(is_quantity);
        let mut sessions = Vec::new();
        for target in self.targets {
            let kind = Kind {
                counters: true,
                quantities: matches!(target, Target::Vcpu(_)),
            };
            let session = Session::open(&self.job, *target, kind.quantities)
                .map_err(refused(format!("{target} cannot be measured")))?;
            sessions.push((session, kind));
        }
        let beside = self.flags.who.all_cores && quantities;
        for number in 0..if beside { vm.model.vcpus } else { 0 } {
            let job = Job {
                sets: &[],
                ..self.job
            };
            let kind = Kind {
                counters: false,
                quantities: true,
            };
            let target = Target::Vcpu(number);
            let session = Session::open(&job, target, true)
                .map_err(refused(format!("{target} cannot tell its quantities")))?;
            sessions.push((session, kind));
        }
        Ok(sessions)
    }
}

/// What of a context is looked at.
#[derive(Clone, Copy, Debug)]
struct Kind {
    counters: bool,
    quantities: bool,
}

/// One run.
struct Run<'a> {
    measure: &'a Measure<'a>,
    watched: Vec<(Watched, Kind)>,
    began: Instant,
    ended: Instant,
    /// When the last interval ended.
    shown_ns: u64,
}

impl<'a> Run<'a> {
    fn begin(measure: &'a Measure<'a>) -> Result<Self, ToolError> {
        let vm = measure.job.vm;
        let mut watched = Vec::new();
        for (session, kind) in measure.sessions()? {
            let number = watched.len();
            let added = measure.waiter.add(&session.handle.fd, number);
            added.map_err(|error| ToolError::Host {
                what: "waiting for messages".to_owned(),
                error,
            })?;
            let events = measure.job.events.len();
            watched.push((Watched::begin(vm, session, events)?, kind));
        }
        let began = Instant::now();
        for (watched, _) in &watched {
            watched.session.start(vm)?;
        }
        Ok(Self {
            measure,
            watched,
            began,
            ended: began,
            shown_ns: 0,
        })
    }

    fn go(&mut self) -> Result<End, UserError> {
        let flags = self.measure.flags;
        let several = self.measure.job.sets.len() > 1;
        let poll = if several { flags.turn() } else { POLL };
        let every = flags.interval.map(Duration::from_millis);
        let deadline = flags.duration.map(|span| self.began + span.0);
        let mut next_poll = self.began + poll;
        let mut next_interval = every.map(|every| self.began + every);
        let mut first = true;
        let end = loop {
            let moments = [Some(next_poll), next_interval, deadline];
            let next = moments.into_iter().flatten().min();
            let woken = self
                .measure
                .waiter
                .wait(next)
                .map_err(|error| ToolError::Host {
                    what: "waiting for messages".to_owned(),
                    error,
                })?;
            for number in woken.ready {
                self.messages(number)?;
            }
            let now = Instant::now();
            if woken.stop {
                break End::Stopped;
            }
            if deadline.is_some_and(|deadline| deadline <= now) {
                break End::Time;
            }
            if self.watched.iter().all(|(watched, _)| watched.is_over()) {
                break End::Ended;
            }
            let interval_due = next_interval.is_some_and(|next| next <= now);
            if interval_due || next_poll <= now {
                self.poll()?;
                next_poll = later(next_poll, poll, now);
            }
            if let (true, Some(every), Some(next)) = (interval_due, every, next_interval) {
                if !self.print_interval(first)? {
                    return Ok(End::Unread);
                }
                first = false;
                next_interval = Some(later(next, every, now));
            }
        };
        self.finish()?;
        if every.is_some() && !self.print_interval(first)? {
            return Ok(End::Unread);
        }
        Ok(end)
    }

    fn messages(&mut self, number: usize) -> Result<(), ToolError> {
        let Some((watched, _)) = self.watched.get_mut(number) else {
            return Ok(());
        };
        watched.messages(self.began)?;
        if watched.is_over() {
            // It stays readable, and there is nothing more to come.
            self.measure.waiter.remove(&watched.session.handle.fd);
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<(), ToolError> {
        let vm = self.measure.job.vm;
        let mut live = self.watched.iter_mut().filter(|(it, _)| !it.is_over());
        live.try_for_each(|(watched, _)| watched.poll(vm, self.began))
    }

    fn finish(&mut self) -> Result<(), ToolError> {
        let vm = self.measure.job.vm;
        self.ended = Instant::now();
        for (watched, _) in &mut self.watched {
            watched.finish(vm, self.began)?;
            self.measure.waiter.remove(&watched.session.handle.fd);
        }
        Ok(())
    }

    fn rows(&self, tally: impl Fn(&Watched) -> &Tally, seconds: f64) -> Vec<Row> {
        let layout = Layout {
            events: self.measure.job.events,
            supported: &self.measure.plan.supported,
            scale: self.measure.flags.scale,
            apart: self.measure.flags.per_vcpu,
        };
        let part = |(watched, kind): &'_ (Watched, Kind)| (watched.session.target.whose(), *kind);
        let parts: Vec<Part<'_>> = self
            .watched
            .iter()
            .map(|one| {
                let (whose, kind) = part(one);
                Part {
                    whose,
                    tally: tally(&one.0),
                    counters: kind.counters,
                    quantities: kind.quantities,
                }
            })
            .collect();
        layout.rows(&parts, seconds)
    }

    /// Prints what was counted since the last time; false if nobody reads it.
    fn print_interval(&mut self, first: bool) -> Result<bool, UserError> {
        let end_ns = since(self.began);
        let passed = end_ns.saturating_sub(self.shown_ns);
        let seconds = Duration::from_nanos(passed).as_secs_f64();
        self.shown_ns = end_ns;
        let rows = self.rows(|it| &it.interval, seconds);
        let interval = Interval {
            end_ns,
            rows: &rows,
            first,
        };
        let out = &mut io::stdout().lock();
        let read = read_by(write_interval(&interval, &self.measure.form(), out))?;
        for (watched, _) in &mut self.watched {
            watched.next_interval();
        }
        Ok(read)
    }

    /// What the user must know of the blind spots.
    fn tell_blind(&self) {
        for (watched, _) in &self.watched {
            let blind = watched.whole.blind_ns();
            if blind > 0 {
                let ms = Duration::from_nanos(blind).as_secs_f64() * 1e3;
                let part = ms / 10.0 / (self.ended - self.began).as_secs_f64();
                tell(&format!(
                    "{}: others had its counters for {ms:.3} ms ({part:.2}% of the time); counts \
                     are scaled",
                    watched.session.target
                ));
            }
        }
    }
}

/// The next of the moments at every `step` that is not over.
fn later(last: Instant, step: Duration, now: Instant) -> Instant {
    let next = last + step;
    if next > now { next } else { now + step }
}

/// Whether anybody reads the output.
fn read_by(written: io::Result<()>) -> Result<bool, UserError> {
    match written {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(UserError::unwritable(error)),
    }
}
