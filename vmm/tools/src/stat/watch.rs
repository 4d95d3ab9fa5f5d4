//! A context while it counts: its readings, and what its messages say.

use std::time::Instant;

use perfmon_abi::Message;
use perfmon_abi::consts::{PFM_MSG_END, PFM_MSG_PREEMPTED, PFM_MSG_RESTORED};
use perfmon_abi::wire::Refusal;
use umpire_perfmon::{Event, Wait};

use super::reading::Reading;
use super::session::CountingSession;
use super::tally::CountTally;
use crate::targets::Target;
use crate::{ToolError, Vm, is_gone, refused};

/// What has happened to a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ContextState {
    /// Its vCPU or core has ended: the registers stay as they are.
    pub(super) ended: bool,
    /// The VM is gone, and the registers with it.
    pub(super) gone: bool,
    /// Others have its counters.
    pub(super) preempted: bool,
    /// They took them, or gave them back, since this was asked last.
    pub(super) disturbed: bool,
    /// Nanoseconds without counters that were reported and not yet taken.
    pub(super) reported_ns: u64,
    /// Nanoseconds that were taken before they were reported.
    ahead_ns: u64,
}

/// Time without counters since the last reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Blind {
    /// So many nanoseconds,
    pub(super) ns: u64,
    /// or more: nobody reports it.
    pub(super) unreported: bool,
}

impl ContextState {
    /// Takes a message in.
    pub(super) fn take(&mut self, message: &Message) {
        match message.kind {
            PFM_MSG_END => self.ended = true,
            PFM_MSG_PREEMPTED => (self.preempted, self.disturbed) = (true, true),
            PFM_MSG_RESTORED => {
                (self.preempted, self.disturbed) = (false, true);
                let [blind_ns, _] = message.ovfl_pmds;
                self.reported_ns = self.reported_ns.saturating_add(blind_ns);
            }
            // Nothing here asks for overflows; a later version may say more.
            _ => {}
        }
    }

    /// The time without counters since the last reading, in which no set was
    /// active for `inactive_ns` of the context's time, if that is known. What
    /// is taken from there while others have the counters will be reported once
    /// more, when they give them back.
    pub(super) fn blind(&mut self, inactive_ns: Option<u64>) -> Blind {
        let reported = std::mem::take(&mut self.reported_ns);
        match (self.preempted, inactive_ns) {
            (true, Some(ns)) => {
                self.ahead_ns = self.ahead_ns.saturating_add(ns).saturating_sub(reported);
                Blind {
                    ns,
                    unreported: false,
                }
            }
            (unreported, _) => Blind {
                ns: reported.saturating_sub(std::mem::take(&mut self.ahead_ns)),
                unreported,
            },
        }
    }
}

/// What a context has counted.
#[derive(Debug)]
pub(super) struct Course {
    state: ContextState,
    /// Since the beginning.
    whole: CountTally,
    /// Since the interval began.
    interval: CountTally,
    events: usize,
    last: Reading,
    last_ns: u64,
    active: usize,
    /// Others have the counters, and nobody has reported for how long.
    unreported: bool,
}

impl Course {
    fn new(first: Reading, events: usize) -> Self {
        Self {
            state: ContextState::default(),
            whole: CountTally::new(events),
            interval: CountTally::new(events),
            events,
            last: first,
            last_ns: 0,
            active: 0,
            unreported: false,
        }
    }

    /// Takes in what the registers say at `now_ns`, before which all messages
    /// were read. They were `disturbed` before the registers were, too.
    fn take(&mut self, mut reading: Reading, disturbed: bool, target: Target, now_ns: u64) {
        // As long as others have the counters, they read as lost again and again.
        if disturbed || self.state.disturbed || self.state.preempted {
            reading.explain();
        }
        let elapsed = now_ns.saturating_sub(self.last_ns);
        let inactive = inactive_ns(
            &self.last,
            &reading,
            match target {
                Target::Vcpu(_) => None,
                Target::Core(_) => Some(elapsed),
            },
        );
        let active = self.whole.add(&self.last, &reading, self.active, elapsed);
        self.interval
            .add(&self.last, &reading, self.active, elapsed);
        self.take_blind(inactive);
        let base = reading.base(&self.last);
        (self.active, self.last, self.last_ns) = (active, base, now_ns);
    }

    /// The time without counters, as far as it is known.
    fn take_blind(&mut self, inactive_ns: Option<u64>) {
        let blind = self.state.blind(inactive_ns);
        if blind.ns > 0 {
            self.whole.add_blind(blind.ns);
            self.interval.add_blind(blind.ns);
        }
        // What is reported at last is of the interval before, too.
        if blind.unreported || self.unreported {
            self.interval.add_unreported();
        }
        self.unreported = blind.unreported;
    }

    /// Nobody will report any more what is not reported yet.
    fn finish(&mut self) {
        if self.unreported {
            self.whole.add_unreported();
        }
    }

    fn next_interval(&mut self) {
        self.interval = CountTally::new(self.events);
    }
}

/// A context that counts, with all that it has counted.
#[derive(Debug)]
pub(super) struct Watched {
    session: CountingSession,
    course: Course,
    /// Its last counts were read: nothing changes any more.
    is_done: bool,
}

fn first(vm: &Vm, session: &mut CountingSession) -> Result<Reading, ToolError> {
    let what = format!("reading the registers of {}", session.target);
    session.read(vm, false).map_err(refused(what))
}

impl Watched {
    /// Reads the registers as they are before counting begins.
    pub(super) fn begin(
        vm: &Vm,
        mut session: CountingSession,
        events: usize,
    ) -> Result<Self, ToolError> {
        let course = Course::new(first(vm, &mut session)?, events);
        Ok(Self {
            session,
            course,
            is_done: false,
        })
    }

    /// Takes the registers as they are now for those before counting begins: quantities of the
    /// VMM have gone on while nothing was started.
    pub(super) fn begin_here(&mut self, vm: &Vm) -> Result<(), ToolError> {
        if !self.is_over() {
            self.course.last = first(vm, &mut self.session)?;
        }
        Ok(())
    }

    pub(super) fn session(&self) -> &CountingSession {
        &self.session
    }

    /// What was counted since the beginning.
    pub(super) fn whole(&self) -> &CountTally {
        &self.course.whole
    }

    /// What was counted since the interval began.
    pub(super) fn interval(&self) -> &CountTally {
        &self.course.interval
    }

    /// A new interval begins.
    pub(super) fn next_interval(&mut self) {
        self.course.next_interval();
    }

    /// Whether nothing more will come.
    pub(super) fn is_over(&self) -> bool {
        self.course.state.ended || self.course.state.gone
    }

    /// Whether it has ended, and what it counted last was not read yet.
    pub(super) fn has_last(&self) -> bool {
        self.course.state.ended && !self.is_done && !self.course.state.gone
    }

    /// Reads all messages that have come.
    pub(super) fn messages(&mut self) -> Result<(), ToolError> {
        while !self.is_over() {
            match self.session.handle.read_message(Wait::No) {
                Ok(Event::Message(message)) => self.course.state.take(&message),
                Ok(Event::Overflow) => {}
                Ok(Event::Nothing) => return Ok(()),
                Ok(Event::Gone) => self.course.state.gone = true,
                Err(refusal) => return Err(self.failed(refusal)),
            }
        }
        Ok(())
    }

    /// Reads the registers, and counts what took place since.
    pub(super) fn poll(&mut self, vm: &Vm, began: Instant) -> Result<(), ToolError> {
        if self.course.state.gone || self.is_done {
            return Ok(());
        }
        let had_ended = self.course.state.ended;
        // A counter that was taken away reads as lost until it is written or
        // reset. A loss that nobody reports shall be seen all the same.
        let disturbed = std::mem::take(&mut self.course.state.disturbed);
        // What is left of one that has ended cannot be reset, and changes no more.
        let reading = match self.session.read(vm, disturbed && !had_ended) {
            Ok(reading) => reading,
            Err(refusal) if is_gone(&refusal) => {
                self.course.state.gone = true;
                return Ok(());
            }
            Err(refusal) => return Err(self.failed(refusal)),
        };
        // The message of what the registers show has come before they do.
        self.messages()?;
        let target = self.session.target;
        self.course.take(reading, disturbed, target, since(began));
        self.is_done = had_ended;
        Ok(())
    }

    /// Counting is over: reads what is left.
    pub(super) fn finish(&mut self, vm: &Vm, began: Instant) -> Result<(), ToolError> {
        if !self.is_over() {
            match self.session.stop(vm) {
                // A vCPU that has ended in this moment counts no more either.
                Ok(()) => {}
                Err(refusal) if is_gone(&refusal) => self.course.state.gone = true,
                Err(_) => {}
            }
            self.messages()?;
        }
        self.poll(vm, began)?;
        self.course.finish();
        // Or whoever attaches the next context there, this program among them,
        // might come too early.
        self.session.detach(vm);
        Ok(())
    }

    fn failed(&self, refusal: Refusal) -> ToolError {
        ToolError::refused(format!("counting on {}", self.session.target), refusal)
    }
}

/// Nanoseconds between two readings in which no set was active, of a vCPU's run
/// time or of `elapsed_ns`, if that is the context's time.
fn inactive_ns(before: &Reading, now: &Reading, elapsed_ns: Option<u64>) -> Option<u64> {
    let ran = now.run_ns.zip(before.run_ns);
    let ran = ran.map(|(now, before)| now.saturating_sub(before));
    let active = now.active_ns().saturating_sub(before.active_ns());
    Some(elapsed_ns.or(ran)?.saturating_sub(active))
}

/// Nanoseconds since `began`.
pub(super) fn since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u32, blind_ns: u64) -> Message {
        Message {
            kind,
            ovfl_pmds: [blind_ns, 1],
            ..Message::default()
        }
    }

    #[test]
    fn messages_change_the_state() {
        let mut state = ContextState::default();
        state.take(&message(PFM_MSG_PREEMPTED, 0));
        assert!(state.preempted && state.disturbed);
        state.take(&message(PFM_MSG_RESTORED, 70));
        assert_eq!((state.preempted, state.reported_ns), (false, 70));
        state.take(&message(0x9999, 3));
        assert!(!state.ended);
        state.take(&message(PFM_MSG_END, 3));
        assert_eq!((state.ended, state.reported_ns), (true, 70));
    }

    /// What was reported since the last reading, whether others have the counters,
    /// the time that no set was active, and the blind time.
    type Step = (u64, bool, Option<u64>, Blind);

    fn check_blind(steps: &[Step]) {
        let mut state = ContextState::default();
        for (index, (reported_ns, preempted, inactive_ns, expected)) in steps.iter().enumerate() {
            (state.reported_ns, state.preempted) = (*reported_ns, *preempted);
            assert_eq!(state.blind(*inactive_ns), *expected, "step {index}");
        }
    }

    #[test]
    fn no_blind_time_is_taken_twice() {
        let known = |ns| Blind {
            ns,
            unreported: false,
        };
        let unknown = |ns| Blind {
            ns,
            unreported: true,
        };
        // It comes and goes between two readings.
        check_blind(&[(0, false, Some(3), known(0)), (7, false, Some(9), known(7))]);
        // It lasts for three readings, and is reported at the fourth.
        check_blind(&[
            (0, true, Some(10), known(10)),
            (0, true, Some(100), known(100)),
            (0, true, Some(100), known(100)),
            (250, false, Some(42), known(40)),
            (0, false, Some(1), known(0)),
        ]);
        // One ends, the next begins.
        check_blind(&[
            (0, true, Some(10), known(10)),
            (30, true, Some(25), known(25)),
            (5, false, Some(0), known(0)),
        ]);
        // The clocks differ.
        check_blind(&[
            (0, true, Some(10), known(10)),
            (8, false, Some(0), known(0)),
        ]);
        // Without a clock it is known afterwards only.
        check_blind(&[
            (0, true, None, unknown(0)),
            (30, true, None, unknown(30)),
            (30, false, None, known(30)),
        ]);
    }

    use crate::stat::reading::{Count, How, SetReading};
    use crate::stat::tally::{Counted, Scale};
    use pmu_model::Provenance;

    const HARDWARE: How = How::Counted(Provenance::Hardware);

    /// A vCPU that has run for so long, its set's time, and its counter.
    fn registers(run_ns: Option<u64>, active_ns: u64, value: u64, how: How) -> Reading {
        let event = 0;
        let counts = vec![Count { event, value, how }];
        Reading {
            sets: vec![SetReading { active_ns, counts }],
            run_ns,
            ..Reading::default()
        }
    }

    /// Value, provenance, enabled and running time.
    type Totals = (Option<u64>, Option<Provenance>, u64, u64);

    fn found(tally: &CountTally) -> Totals {
        let all = tally.counted(Scale::Linear);
        let Counted {
            value,
            provenance,
            enabled_ns,
            running_ns,
            ..
        } = all[0];
        (value, provenance, enabled_ns, running_ns)
    }

    /// Messages, then registers, as `Watched::poll` takes them. Returns the
    /// whole and the interval, which ends.
    fn poll(course: &mut Course, messages: &[Message], reading: Reading) -> (Totals, Totals) {
        for message in messages {
            course.state.take(message);
        }
        let disturbed = std::mem::take(&mut course.state.disturbed);
        course.take(reading, disturbed, Target::Vcpu(0), 0);
        let counted = (found(&course.whole), found(&course.interval));
        course.next_interval();
        counted
    }

    #[test]
    fn a_preemption_costs_its_own_time_and_no_more() {
        let ran = |ns| Some(ns);
        let mut course = Course::new(registers(ran(0), 0, 0, How::Never), 1);
        let hardware = Some(Provenance::Hardware);
        let scaled = Some(Provenance::Scaled);
        let all = (Some(1000), hardware, 100, 100);
        let reading = registers(ran(100), 100, 1000, HARDWARE);
        assert_eq!(poll(&mut course, &[], reading), (all, all));
        // Both messages before a reading: the PMD reads as lost.
        let messages = [message(PFM_MSG_PREEMPTED, 0), message(PFM_MSG_RESTORED, 10)];
        let reading = registers(ran(200), 190, 1900, How::Lost);
        assert_eq!(
            poll(&mut course, &messages, reading),
            (
                (Some(2000), scaled, 200, 190),
                // Nobody says how that part was counted.
                (Some(1000), scaled, 100, 90)
            )
        );
        // The register was reset: all is as before.
        let reading = registers(ran(300), 290, 2900, HARDWARE);
        assert_eq!(
            poll(&mut course, &[], reading),
            (
                (Some(3000), scaled, 300, 290),
                (Some(1000), hardware, 100, 100)
            )
        );
        // A loss that nobody reports is one.
        let reading = registers(ran(400), 390, 3000, How::Lost);
        let (whole, interval) = poll(&mut course, &[], reading);
        assert_eq!((whole.0, interval.0), (None, None));
    }

    #[test]
    fn a_preemption_that_does_not_end_is_measured() {
        let check = |clock: fn(u64) -> Option<u64>, expected: [Totals; 2]| {
            let mut course = Course::new(registers(clock(0), 0, 0, How::Never), 1);
            let taken = [message(PFM_MSG_PREEMPTED, 0)];
            let reading = registers(clock(100), 60, 600, How::Lost);
            poll(&mut course, &taken, reading);
            let reading = registers(clock(200), 60, 600, How::Never);
            let (_, interval) = poll(&mut course, &[], reading);
            course.finish();
            assert_eq!([found(&course.whole), interval], expected);
        };
        let scaled = Some(Provenance::Scaled);
        let nothing = (None, None, 100, 0);
        check(Some, [(Some(2000), scaled, 200, 60), nothing]);
        // Without a clock.
        let whole = (None, None, 60, 0);
        check(|_| None, [whole, (None, None, 0, 0)]);
    }

    #[test]
    fn a_preemption_may_last_for_many_readings() {
        let mut course = Course::new(registers(Some(0), 0, 0, How::Never), 1);
        poll(&mut course, &[], registers(Some(100), 100, 1000, HARDWARE));
        let taken = [message(PFM_MSG_PREEMPTED, 0)];
        poll(
            &mut course,
            &taken,
            registers(Some(200), 150, 1500, How::Lost),
        );
        poll(&mut course, &[], registers(Some(300), 150, 1500, How::Lost));
        let back = [message(PFM_MSG_RESTORED, 170)];
        poll(
            &mut course,
            &back,
            registers(Some(400), 230, 2300, How::Lost),
        );
        let (whole, _) = poll(&mut course, &[], registers(Some(500), 330, 3300, HARDWARE));
        assert_eq!(whole, (Some(5000), Some(Provenance::Scaled), 500, 330));
    }

    #[test]
    fn a_vcpu_is_measured_by_its_run_time() {
        let reading = |run_ns, active_ns| Reading {
            sets: vec![SetReading {
                active_ns,
                counts: Vec::new(),
            }],
            run_ns,
            ..Reading::default()
        };
        let check = |before, now, elapsed, expected| {
            assert_eq!(inactive_ns(&before, &now, elapsed), expected);
        };
        check(reading(Some(5), 2), reading(Some(50), 10), None, Some(37));
        check(reading(Some(5), 2), reading(Some(9), 10), None, Some(0));
        check(reading(None, 2), reading(Some(9), 10), None, None);
        check(reading(None, 2), reading(None, 10), Some(100), Some(92));
    }
}
