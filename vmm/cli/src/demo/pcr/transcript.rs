//! What the guest said of each step, and what was decided meanwhile.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use arbiter::{Auditor, Record};
use vmm::devices::Platform;
use vmm::devices::ports::TEST_EXIT;
use vmm::devices::{DeviceOutcome, GuestEnd};
use vmm::micro::UNEXPECTED_VECTOR_PORT;

use super::guest::{DONE_PORT, FAULT_PORT, HIGH_PORT, LOW_PORT, NOTICE_PORT, STEP_PORT};

/// What a step came to, as the guest saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Read(u64),
    /// The instruction was carried out, as far as the guest can tell.
    Done,
    /// #GP.
    Fault,
}

/// One step that was played.
#[derive(Debug, Clone)]
pub(super) struct Played {
    pub(super) step: usize,
    /// What it came to; `None` if the guest ended within it.
    pub(super) outcome: Option<Outcome>,
    /// Interrupts of notices that came during it.
    pub(super) notices: u32,
    /// Decisions during it, repeated ones once, with how many there were.
    pub(super) decisions: Vec<(Record, u32)>,
    /// Microseconds from its beginning to its end.
    pub(super) micros: u64,
}

#[derive(Debug)]
struct Transcription {
    played: Vec<Played>,
    began: Instant,
    low: u32,
}

/// Collects what happens; also the guest's devices.
#[derive(Debug)]
pub(super) struct Transcript(Mutex<Transcription>);

impl Transcript {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Transcription {
            played: Vec::new(),
            began: Instant::now(),
            low: 0,
        }))
    }

    pub(super) fn played(&self) -> Vec<Played> {
        self.state().played.clone()
    }

    /// A panic elsewhere leaves the list whole: it is only appended to.
    fn state(&self) -> MutexGuard<'_, Transcription> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transcription {
    fn begin(&mut self, step: u32) {
        self.played.push(Played {
            step: usize::try_from(step).unwrap_or(usize::MAX),
            outcome: None,
            notices: 0,
            decisions: Vec::new(),
            micros: 0,
        });
        self.began = Instant::now();
    }

    fn end(&mut self, outcome: Outcome) {
        let micros = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        if let Some(step) = self.played.last_mut() {
            step.outcome = Some(outcome);
            step.micros = micros;
        }
    }
}

impl Platform for Transcript {
    fn port_read(&self, _: u16, _: u8, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn port_write(&self, port: u16, _: u8, data: &[u8]) -> DeviceOutcome {
        let value = u32::from_le_bytes(data.try_into().unwrap_or([0xff; 4]));
        let mut state = self.state();
        match port {
            STEP_PORT => state.begin(value),
            LOW_PORT => state.low = value,
            HIGH_PORT => {
                let read = u64::from(value) << 32 | u64::from(state.low);
                state.end(Outcome::Read(read));
            }
            DONE_PORT => state.end(Outcome::Done),
            FAULT_PORT => state.end(Outcome::Fault),
            NOTICE_PORT => {
                if let Some(step) = state.played.last_mut() {
                    step.notices += 1;
                }
            }
            TEST_EXIT => return DeviceOutcome::Exit(GuestEnd::TestExit(value)),
            UNEXPECTED_VECTOR_PORT => {
                return DeviceOutcome::Exit(GuestEnd::TestExit(value.max(1)));
            }
            _ => {}
        }
        DeviceOutcome::Continue
    }

    fn mmio_read(&self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn mmio_write(&self, _: u64, _: &[u8]) {}
}

/// Hands decisions to the transcript.
#[derive(Debug)]
pub(super) struct Recorder(pub(super) Arc<Transcript>);

impl Auditor for Recorder {
    fn record(&mut self, record: &Record) {
        let mut state = self.0.state();
        let Some(step) = state.played.last_mut() else {
            return;
        };
        match step.decisions.iter_mut().find(|(one, _)| one == record) {
            Some((_, times)) => *times += 1,
            None => step.decisions.push((*record, 1)),
        }
    }
}
