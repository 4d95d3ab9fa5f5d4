//! The host beside an emulated machine: its clock, where virtual time follows that, and what
//! other threads say to the one that runs the vCPUs.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use vmm_control::KickThread;

use crate::devices::InterruptLine;
use crate::emu::{Outside, PinLine, Waited};
use crate::sync::lock;
use crate::sys::KickTarget;

/// A guest that is ahead of the host's clock by more waits for it.
const AHEAD: Duration = Duration::from_millis(1);

/// Has the machine's thread come back from a wait.
#[derive(Debug, Default)]
pub(super) struct Attention {
    state: Mutex<Said>,
    said: Condvar,
}

#[derive(Debug, Default)]
struct Said {
    /// Something was said since the last wait.
    something: bool,
    /// Nothing more comes from the console.
    input_ended: bool,
}

impl Attention {
    /// Something was said.
    pub(super) fn poke(&self) {
        lock(&self.state).something = true;
        self.said.notify_all();
    }

    /// Nothing more comes from the console.
    pub(super) fn end_input(&self) {
        let mut state = lock(&self.state);
        (state.something, state.input_ended) = (true, true);
        drop(state);
        self.said.notify_all();
    }

    /// Waits for a word, or for this long.
    fn wait(&self, most: Option<Duration>) {
        let state = lock(&self.state);
        let silent = |said: &mut Said| !said.something;
        let mut state = match most {
            None => self.said.wait_while(state, silent),
            Some(most) => self
                .said
                .wait_timeout_while(state, most, silent)
                .map(|(state, _)| state)
                .map_err(|error| std::sync::PoisonError::new(error.into_inner().0)),
        }
        .unwrap_or_else(std::sync::PoisonError::into_inner);
        state.something = false;
    }

    fn input_has_ended(&self) -> bool {
        lock(&self.state).input_ended
    }
}

/// The thread that runs the vCPUs looks for jobs at each turn; only its waits are to be ended.
#[derive(Clone, Debug)]
pub(super) struct MachineThread {
    attention: Arc<Attention>,
    /// As the host's kernel counts threads.
    number: i32,
}

impl MachineThread {
    /// The calling thread, whose waits `attention` ends.
    pub(super) fn of(attention: Arc<Attention>) -> Self {
        Self {
            attention,
            number: KickTarget::current().thread(),
        }
    }
}

impl KickThread for MachineThread {
    fn kick(&self) {
        self.attention.poke();
    }

    fn thread_id(&self) -> i32 {
        self.number
    }
}

/// The line of a device, whose edges end a machine's wait.
#[derive(Debug)]
pub(super) struct WakingLine {
    pub(super) line: PinLine,
    pub(super) attention: Arc<Attention>,
}

impl InterruptLine for WakingLine {
    fn raise(&self) -> std::io::Result<()> {
        self.line.raise()?;
        self.attention.poke();
        Ok(())
    }
}

/// What a machine's thread asks of the host.
#[derive(Debug)]
pub(super) struct HostSide {
    attention: Arc<Attention>,
    /// When virtual time began, where it follows the host's clock; set at its first question.
    began: Option<Instant>,
    follows: bool,
}

impl HostSide {
    /// For a machine that `attention` is for; its time `follows` the host's clock, or does not.
    pub(super) fn new(attention: Arc<Attention>, follows: bool) -> Self {
        Self {
            attention,
            began: None,
            follows,
        }
    }

    /// The host's clock as virtual time, which is at `now`.
    fn host_time(&mut self, now: u64) -> u64 {
        let began = *self
            .began
            .get_or_insert_with(|| Instant::now() - Duration::from_nanos(now));
        u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

impl Outside for HostSide {
    fn turn_over(&mut self, now: u64) -> u64 {
        if !self.follows {
            return now;
        }
        let host = self.host_time(now);
        let ahead = Duration::from_nanos(now.saturating_sub(host));
        if ahead > AHEAD {
            self.attention.wait(Some(ahead));
        }
        host.max(now)
    }

    fn idle(&mut self, now: u64, until: Option<u64>, held: bool) -> Waited {
        match until {
            Some(until) if !self.follows => return Waited::Until(until),
            None if !held && self.attention.input_has_ended() => return Waited::Forever,
            _ => {}
        }
        if !self.follows {
            self.attention.wait(None);
            return Waited::Until(now);
        }
        let host = self.host_time(now);
        let left = until.map(|until| Duration::from_nanos(until.saturating_sub(host)));
        if left != Some(Duration::ZERO) {
            self.attention.wait(left);
        }
        Waited::Until(self.host_time(now).max(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_skipped_and_without_an_end_it_waits_for_a_word() {
        let attention = Arc::new(Attention::default());
        let mut host = HostSide::new(attention.clone(), false);
        assert_eq!(host.turn_over(5), 5);
        assert_eq!(host.idle(5, Some(1 << 60), false), Waited::Until(1 << 60));
        let poked = attention.clone();
        let other = std::thread::spawn(move || poked.poke());
        assert_eq!(host.idle(9, None, false), Waited::Until(9));
        other.join().expect("the other thread");
        attention.end_input();
        assert_eq!(host.idle(9, None, false), Waited::Forever);
        // Who is held may be let go.
        assert_eq!(host.idle(9, None, true), Waited::Until(9));
    }

    #[test]
    fn time_that_follows_the_host_never_goes_back() {
        let attention = Arc::new(Attention::default());
        let mut host = HostSide::new(attention, true);
        let first = host.turn_over(1_000_000_000);
        assert!(first >= 1_000_000_000);
        let Waited::Until(later) = host.idle(first, Some(first + 2_000_000), false) else {
            panic!("it comes back");
        };
        assert!(later >= first + 2_000_000, "{later} {first}");
        // Far ahead of the host it waits, and goes on with its own time.
        assert_eq!(host.turn_over(later + 3_000_000), later + 3_000_000);
    }
}
