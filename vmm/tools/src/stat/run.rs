//! One run of `umpire stat`: from attaching contexts to their last counts.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use super::events::{Asked, Source};
use super::print::{Form, Interval, write_interval};
use super::rows::{Layout, Part};
use super::session::{CountingSession, Job};
use super::tally::CountTally;
use super::trial::CountingPlan;
use super::watch::{Watched, since};
use super::{Row, StatOptions, verbose};
use crate::command::{Limit, Until};
use crate::error::host;
use crate::lifecycle::Starter;
use crate::targets::Target;
use crate::wait::Woken;
use crate::{Completion, ToolError, Vm, Waiter, note, refused};

/// How often a context without turns is read: what it has counted is not lost
/// with the VM.
const POLL: Duration = Duration::from_millis(100);

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The time, or the command, is over.
    Time,
    /// Ctrl-C, or the command's end after it.
    Stopped,
    /// Nobody is left to count.
    Ended,
    /// Nobody reads the output.
    Unread,
}

/// What every run is about.
pub(super) struct Measure<'a> {
    pub(super) job: Job<'a>,
    pub(super) plan: &'a CountingPlan,
    pub(super) targets: &'a [Target],
    pub(super) waiter: &'a Waiter,
    pub(super) options: &'a StatOptions,
    pub(super) until: &'a Until,
    pub(super) form: &'a Form,
}

impl Measure<'_> {
    /// Who lets a paused VM go on.
    fn starter(&self) -> Starter {
        if self.options.resume {
            Starter::of(1)
        } else {
            self.options.starter.clone()
        }
    }

    /// What passes before anything counts.
    fn delay(&self) -> Option<Duration> {
        self.options.delay.filter(|delay| !delay.is_zero())
    }

    /// Who counts what: with `-a` the vCPUs' contexts have the quantities of the
    /// VMM, which a core does not have.
    fn sessions(&self) -> Result<Vec<(CountingSession, Kind)>, ToolError> {
        let vm = self.job.vm;
        let is_quantity = |event: &Asked| matches!(event.source, Source::Quantity { .. });
        let quantities = self.job.events.iter().any(is_quantity);
        let mut sessions = Vec::new();
        for target in self.targets {
            let kind = Kind {
                counters: true,
                quantities: matches!(target, Target::Vcpu(_)),
            };
            let session = CountingSession::open(&self.job, *target, kind.quantities)
                .map_err(refused(format!("{target} cannot be measured")))?;
            sessions.push((session, kind));
        }
        let beside = self.options.selection.takes_all_cores() && quantities;
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
            let session = CountingSession::open(&job, target, true)
                .map_err(refused(format!("{target} does not give its quantities")))?;
            sessions.push((session, kind));
        }
        Ok(sessions)
    }
}

/// Lets every context count from now on.
fn start(watched: &[(Watched, Kind)], vm: &Vm) -> Result<(), ToolError> {
    let mut sessions = watched.iter().map(|(watched, _)| watched.session());
    sessions.try_for_each(|session| session.start(vm))
}

/// What of a context is looked at.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub(super) counters: bool,
    pub(super) quantities: bool,
}

/// Whether anybody reads the output.
pub(super) fn read_by(written: io::Result<()>) -> Result<bool, ToolError> {
    match written {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(ToolError::Counts(error)),
    }
}

/// One run.
pub(super) struct Run<'a> {
    measure: &'a Measure<'a>,
    watched: Vec<(Watched, Kind)>,
    limit: Limit,
    began: Instant,
    ended: Instant,
    /// When the last interval ended.
    shown_ns: u64,
}

impl<'a> Run<'a> {
    /// Starts what is to be started: the contexts, the guest, the command. With a delay
    /// nothing counts yet.
    pub(super) fn launch(measure: &'a Measure<'a>) -> Result<Self, ToolError> {
        let vm = measure.job.vm;
        let mut watched = Vec::new();
        for (session, kind) in measure.sessions()? {
            let number = watched.len();
            let added = measure.waiter.add(&session.handle.fd, number);
            added.map_err(host("waiting for messages"))?;
            let events = measure.job.events.len();
            watched.push((Watched::begin(vm, session, events)?, kind));
        }
        let delay = measure.delay();
        let began = Instant::now();
        if delay.is_none() {
            start(&watched, vm)?;
        }
        // A command that cannot be started leaves a paused guest where it is.
        let mut limit = Limit::begin(measure.until, measure.waiter)?;
        measure.starter().ready(vm)?;
        limit.postpone(delay.unwrap_or_default());
        Ok(Self {
            measure,
            watched,
            limit,
            began,
            ended: began,
            shown_ns: 0,
        })
    }

    pub(super) fn seconds(&self) -> f64 {
        self.ended.duration_since(self.began).as_secs_f64()
    }

    /// Counts until the end.
    pub(super) fn go(&mut self, out: &mut dyn Write) -> Result<(End, Completion), ToolError> {
        let end = self.run(out)?;
        Ok((end, self.limit.completion()))
    }

    fn run(&mut self, out: &mut dyn Write) -> Result<End, ToolError> {
        if let Some(delay) = self.measure.delay() {
            if let Some(end) = self.await_start(delay)? {
                self.began = Instant::now();
                self.finish()?;
                return Ok(end);
            }
            let vm = self.measure.job.vm;
            let each = self.watched.iter_mut();
            each.map(|(watched, _)| watched)
                .try_for_each(|watched| watched.begin_here(vm))?;
            self.began = Instant::now();
            start(&self.watched, vm)?;
        }
        if let Some(timeout) = self.measure.options.timeout {
            self.limit.end_after(timeout);
        }
        let (end, unprinted) = self.count(out)?;
        if end == End::Unread {
            return Ok(end);
        }
        self.finish()?;
        match unprinted {
            Some(first) if !self.print_interval(first, out)? => Ok(End::Unread),
            _ => Ok(end),
        }
    }

    /// Waits before anything counts; the run's end, if it ends meanwhile.
    fn await_start(&mut self, delay: Duration) -> Result<Option<End>, ToolError> {
        let starts = Instant::now() + delay;
        let mut stopped = false;
        loop {
            let moments = [Some(starts), self.limit.due()];
            let woken = self.wait(moments.into_iter().flatten().min())?;
            stopped |= woken.stop;
            if self.limit.is_over(&woken)? {
                return Ok(Some(if stopped { End::Stopped } else { End::Time }));
            }
            if !self.limit.is_command() && self.all_over() {
                return Ok(Some(End::Ended));
            }
            if starts <= Instant::now() {
                return Ok(None);
            }
        }
    }

    /// Counts until the end. What was counted since the last interval is to be printed, if
    /// there is something: as the first one, if there was none.
    fn count(&mut self, out: &mut dyn Write) -> Result<(End, Option<bool>), ToolError> {
        let options = self.measure.options;
        let several = self.measure.job.sets.len() > 1;
        let poll = if several { options.turn() } else { POLL };
        let mut stopped = false;
        let mut next_poll = self.began + poll;
        let mut next_interval = options.interval.map(|every| self.began + every);
        let mut printed = 0;
        loop {
            let moments = [Some(next_poll), next_interval, self.limit.due()];
            let woken = self.wait(moments.into_iter().flatten().min())?;
            if self.watched.iter().any(|(watched, _)| watched.has_last()) {
                // Of this interval, and of no later one.
                self.poll()?;
            }
            let now = Instant::now();
            stopped |= woken.stop;
            let unprinted = next_interval.map(|_| printed == 0);
            if self.limit.is_over(&woken)? {
                let end = if stopped { End::Stopped } else { End::Time };
                return Ok((end, unprinted));
            }
            if !self.limit.is_command() && self.all_over() {
                return Ok((End::Ended, unprinted));
            }
            let interval_due = next_interval.is_some_and(|next| next <= now);
            if interval_due || next_poll <= now {
                self.poll()?;
                next_poll = later(next_poll, poll, now);
            }
            if let (true, Some(every), Some(next)) = (interval_due, options.interval, next_interval)
            {
                if !self.print_interval(printed == 0, out)? {
                    return Ok((End::Unread, None));
                }
                printed += 1;
                next_interval = Some(later(next, every, now));
            }
            if options.interval_count == Some(printed) {
                next_interval = None;
                if !self.limit.is_command() {
                    return Ok((End::Time, None));
                }
            }
        }
    }

    /// Waits for the first of messages, which it takes in, Ctrl-C and the moment.
    fn wait(&mut self, until: Option<Instant>) -> Result<Woken, ToolError> {
        let woken = self.measure.waiter.wait(until);
        let woken = woken.map_err(host("waiting for messages"))?;
        for number in &woken.ready {
            self.messages(*number)?;
        }
        Ok(woken)
    }

    fn all_over(&self) -> bool {
        self.watched.iter().all(|(watched, _)| watched.is_over())
    }

    fn messages(&mut self, number: usize) -> Result<(), ToolError> {
        let Some((watched, _)) = self.watched.get_mut(number) else {
            return Ok(());
        };
        watched.messages()?;
        if watched.is_over() {
            // It stays readable, and there is nothing more to come.
            self.measure.waiter.remove(&watched.session().handle.fd);
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<(), ToolError> {
        let vm = self.measure.job.vm;
        let is_live = |it: &Watched| !it.is_over() || it.has_last();
        let mut live = self.watched.iter_mut().filter(|(it, _)| is_live(it));
        live.try_for_each(|(watched, _)| watched.poll(vm, self.began))
    }

    fn finish(&mut self) -> Result<(), ToolError> {
        let vm = self.measure.job.vm;
        self.ended = Instant::now();
        for (watched, _) in &mut self.watched {
            watched.finish(vm, self.began)?;
            self.measure.waiter.remove(&watched.session().handle.fd);
        }
        Ok(())
    }

    pub(super) fn rows(&self, tally: impl Fn(&Watched) -> &CountTally, seconds: f64) -> Vec<Row> {
        self.rows_of(tally, seconds, false)
    }

    /// The rows; `apart`: of each vCPU or core, whatever the options say.
    fn rows_of(
        &self,
        tally: impl Fn(&Watched) -> &CountTally,
        seconds: f64,
        apart: bool,
    ) -> Vec<Row> {
        let layout = Layout {
            events: self.measure.job.events,
            supported: &self.measure.plan.supported,
            scale: self.measure.options.scale,
            apart: apart || self.measure.options.look.per_vcpu,
        };
        let part = |(watched, kind): &'_ (Watched, Kind)| (watched.session().target, *kind);
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
        let mut rows = layout.rows(&parts, seconds);
        if self.measure.job.vm.model.virtual_time {
            // Ticks of virtual time in a nanosecond of the host's are no frequency.
            for row in &mut rows {
                row.metric = row.metric.take().filter(|metric| metric.unit != "GHz");
            }
        }
        rows
    }

    /// Prints what was counted since the last time; false if nobody reads it.
    fn print_interval(&mut self, first: bool, out: &mut dyn Write) -> Result<bool, ToolError> {
        let end_ns = since(self.began);
        let passed = end_ns.saturating_sub(self.shown_ns);
        let seconds = Duration::from_nanos(passed).as_secs_f64();
        self.shown_ns = end_ns;
        let rows = self.rows(|it| it.interval(), seconds);
        let interval = Interval {
            end_ns,
            rows: &rows,
            first,
        };
        let read = read_by(write_interval(&interval, self.measure.form, out))?;
        for (watched, _) in &mut self.watched {
            watched.next_interval();
        }
        Ok(read)
    }

    /// What every event has counted, for `-v`.
    pub(super) fn note_counts(&self, apart: bool, seconds: f64, notes: &mut dyn Write) {
        let rows = self.rows_of(|it| it.whole(), seconds, apart);
        verbose::counts(&rows, notes);
    }

    /// What the user must know of the blind spots.
    pub(super) fn note_blind(&self, notes: &mut dyn Write) {
        for (watched, _) in &self.watched {
            let blind = watched.whole().blind_ns();
            if blind > 0 {
                let ms = Duration::from_nanos(blind).as_secs_f64() * 1e3;
                let all = Duration::from_nanos(watched.whole().monitored_ns());
                let part = ms / 10.0 / all.as_secs_f64();
                let text = format!(
                    "{}: others had its counters for {ms:.3} ms ({part:.2}% of the time); counts \
                     are scaled",
                    watched.session().target
                );
                note(notes, &text);
            }
        }
    }
}

/// The next of the moments at every `step` that is not over.
fn later(last: Instant, step: Duration, now: Instant) -> Instant {
    let next = last + step;
    if next > now { next } else { now + step }
}
