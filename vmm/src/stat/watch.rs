//! A context while it counts: its readings, and what its messages say.

use std::time::Instant;

use perfmon_abi::Message;
use perfmon_abi::consts::{PFM_MSG_END, PFM_MSG_PREEMPTED, PFM_MSG_RESTORED};
use perfmon_abi::wire::Refusal;
use umpire_perfmon::{Event, Wait};

use super::reading::Reading;
use super::session::Session;
use super::tally::Tally;
use crate::tools::{ToolError, Vm, is_gone, refused};

/// What has happened to a context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    /// Its vCPU or core has ended: the registers stay as they are.
    pub(super) ended: bool,
    /// The VM is gone, and the registers with it.
    pub(super) gone: bool,
    /// Since when others have its counters, in nanoseconds of the caller's clock.
    pub(super) preempted: Option<u64>,
    /// Nanoseconds without counters that were told and not yet taken.
    pub(super) blind_ns: u64,
}

impl State {
    /// Takes a message in that came at `now_ns`.
    pub(super) fn take(&mut self, message: &Message, now_ns: u64) {
        match message.kind {
            PFM_MSG_END => self.ended = true,
            PFM_MSG_PREEMPTED => self.preempted = self.preempted.or(Some(now_ns)),
            PFM_MSG_RESTORED => {
                self.preempted = None;
                let [blind_ns, _] = message.ovfl_pmds;
                self.blind_ns = self.blind_ns.saturating_add(blind_ns);
            }
            // Nothing here asks for overflows; a later version may tell more.
            _ => {}
        }
    }

    /// It is the end: what nobody will tell any more is taken from the clock.
    pub(super) fn finish(&mut self, now_ns: u64) {
        if let Some(since) = self.preempted.take() {
            self.blind_ns = self.blind_ns.saturating_add(now_ns.saturating_sub(since));
        }
    }
}

/// A context that counts, with all that it has counted.
#[derive(Debug)]
pub(super) struct Watched {
    pub(super) session: Session,
    pub(super) state: State,
    /// Since the beginning.
    pub(super) whole: Tally,
    /// Since the interval began.
    pub(super) interval: Tally,
    events: usize,
    last: Reading,
    last_ns: u64,
    active: usize,
}

impl Watched {
    /// Reads the registers as they are before counting begins.
    pub(super) fn begin(vm: &Vm, session: Session, events: usize) -> Result<Self, ToolError> {
        let last = session.read(vm).map_err(refused(format!(
            "reading the registers of {}",
            session.target
        )))?;
        Ok(Self {
            session,
            state: State::default(),
            whole: Tally::new(events),
            interval: Tally::new(events),
            events,
            last,
            last_ns: 0,
            active: 0,
        })
    }

    /// Whether nothing more will come.
    pub(super) fn is_over(&self) -> bool {
        self.state.ended || self.state.gone
    }

    /// Reads all messages that have come.
    pub(super) fn messages(&mut self, began: Instant) -> Result<(), ToolError> {
        while !self.is_over() {
            match self.session.handle.read_message(Wait::No) {
                Ok(Event::Message(message)) => self.state.take(&message, since(began)),
                Ok(Event::Overflow) => {}
                Ok(Event::Nothing) => return Ok(()),
                Ok(Event::Gone) => self.state.gone = true,
                Err(refusal) => return Err(self.failed(refusal)),
            }
        }
        Ok(())
    }

    /// Reads the registers, and counts what took place since.
    pub(super) fn poll(&mut self, vm: &Vm, began: Instant) -> Result<(), ToolError> {
        if self.state.gone {
            return Ok(());
        }
        let reading = match self.session.read(vm) {
            Ok(reading) => reading,
            Err(refusal) if is_gone(&refusal) => {
                self.state.gone = true;
                return Ok(());
            }
            Err(refusal) => return Err(self.failed(refusal)),
        };
        let now = since(began);
        let elapsed = now.saturating_sub(self.last_ns);
        let active = self.whole.add(&self.last, &reading, self.active, elapsed);
        self.interval
            .add(&self.last, &reading, self.active, elapsed);
        self.take_blind();
        (self.active, self.last, self.last_ns) = (active, reading, now);
        Ok(())
    }

    /// The time without counters, as far as it is known.
    fn take_blind(&mut self) {
        let blind_ns = std::mem::take(&mut self.state.blind_ns);
        if blind_ns > 0 {
            self.whole.add_blind(blind_ns);
            self.interval.add_blind(blind_ns);
        }
    }

    /// Counting is over: reads what is left.
    pub(super) fn finish(&mut self, vm: &Vm, began: Instant) -> Result<(), ToolError> {
        if !self.is_over() {
            match self.session.stop(vm) {
                // A vCPU that has ended in this moment counts no more either.
                Ok(()) => {}
                Err(refusal) if is_gone(&refusal) => self.state.gone = true,
                Err(_) => {}
            }
            self.messages(began)?;
        }
        self.state.finish(since(began));
        self.poll(vm, began)?;
        self.take_blind();
        // Or whoever attaches the next context there, this program among them,
        // might come too early.
        self.session.detach(vm);
        Ok(())
    }

    /// A new interval begins.
    pub(super) fn next_interval(&mut self) {
        self.interval = Tally::new(self.events);
    }

    fn failed(&self, refusal: Refusal) -> ToolError {
        ToolError::refused(format!("counting on {}", self.session.target), refusal)
    }
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
        let mut state = State::default();
        state.take(&message(PFM_MSG_PREEMPTED, 0), 5);
        state.take(&message(PFM_MSG_PREEMPTED, 0), 9);
        assert_eq!(state.preempted, Some(5));
        state.take(&message(PFM_MSG_RESTORED, 70), 80);
        assert_eq!((state.preempted, state.blind_ns), (None, 70));
        state.take(&message(PFM_MSG_PREEMPTED, 0), 100);
        state.finish(130);
        assert_eq!((state.preempted, state.blind_ns), (None, 100));
        state.take(&message(0x9999, 3), 140);
        assert!(!state.ended);
        state.take(&message(PFM_MSG_END, 3), 140);
        assert_eq!((state.ended, state.blind_ns), (true, 100));
    }
}
