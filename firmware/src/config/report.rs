//! What firmware answers in the configuration area.
//!
//! Firmware writes it with the setters of [`Report`], and the host reads it
//! back. The host trusts nothing in it, because a guest may write anything
//! there.

use super::fields::{bytes, put, u32_at, u64_at};
use super::{Area, MAX_COUNTERS, MAX_CPUS};

const AT_STATE: usize = 0x900;
const AT_ANSWERED: usize = 0x908;
/// Management and access cookie of each counter, 8 bytes each; 0 if wiped.
const AT_COOKIES: usize = 0xa00;
/// A byte for each CPU and counter: a row of [`MAX_COUNTERS`] for each CPU.
pub(super) const AT_RESULTS: usize = 0x1000;
/// Nobody has tried.
pub(super) const NOT_TRIED: u8 = 0x80;

/// How far the firmware has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It has not begun.
    NotBegun,
    /// It is at work, or it ended there.
    Running,
    /// It has entered the kernel; the results tell what it reserved.
    Done,
    /// It has entered the kernel; CPUID shows no reservations.
    NoPcr,
    /// It has entered the kernel; there is no source of random numbers.
    NoRandom,
}

/// The step at which a reservation failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// It is taken, or policy refuses it.
    Reserve,
    /// Its control word or drop value was refused.
    Control,
    /// Its access cookie was refused.
    AccessKey,
    /// Counter or event select could not be written.
    Program,
    /// The machine has no such counter.
    Absent,
}

/// What one CPU got for one counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nobody has tried: the CPU did not answer, or there are no reservations.
    NotTried,
    /// The counter at this position.
    Granted(u8),
    /// Nothing; what had been reserved was given back.
    Failed(Step),
    /// It was reserved, and went to a layer that was short of one: the firmware was
    /// asked and yielded, or had agreed before.
    Yielded,
    /// It was reserved, and was revoked, or its lease has ended.
    Lost,
}

impl Outcome {
    /// The byte that stands for it in the area.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Granted(position) => position & 0x3f,
            Self::NotTried => NOT_TRIED,
            Self::Failed(Step::Reserve) => 0x81,
            Self::Failed(Step::Control) => 0x82,
            Self::Failed(Step::AccessKey) => 0x83,
            Self::Failed(Step::Program) => 0x84,
            Self::Failed(Step::Absent) => 0x85,
            Self::Yielded => 0x86,
            Self::Lost => 0x87,
        }
    }

    /// What a byte stands for; unknown ones for [`Outcome::NotTried`].
    #[must_use]
    pub fn of(code: u8) -> Self {
        match code {
            0..0x40 => Self::Granted(code),
            0x81 => Self::Failed(Step::Reserve),
            0x82 => Self::Failed(Step::Control),
            0x83 => Self::Failed(Step::AccessKey),
            0x84 => Self::Failed(Step::Program),
            0x85 => Self::Failed(Step::Absent),
            0x86 => Self::Yielded,
            0x87 => Self::Lost,
            _ => Self::NotTried,
        }
    }
}

/// The answer in an area.
#[derive(Debug)]
pub struct Report<A>(A);

impl<A: core::borrow::Borrow<Area>> Report<A> {
    /// The answer that lies in `area`.
    pub fn of(area: A) -> Self {
        Self(area)
    }

    /// How far the firmware has come; an unknown number reads as
    /// [`State::Running`].
    #[must_use]
    pub fn state(&self) -> State {
        match u32_at(self.0.borrow(), AT_STATE) {
            0 => State::NotBegun,
            2 => State::Done,
            3 => State::NoPcr,
            4 => State::NoRandom,
            _ => State::Running,
        }
    }

    /// The CPUs that have done their part, one bit for each.
    #[must_use]
    pub fn answered(&self) -> u64 {
        u64_at(self.0.borrow(), AT_ANSWERED)
    }

    /// What `cpu` got for `counter`, both counted from 0.
    #[must_use]
    pub fn outcome(&self, cpu: usize, counter: usize) -> Outcome {
        match result_at(cpu, counter) {
            Some(at) => {
                let [code] = bytes(self.0.borrow(), at);
                Outcome::of(code)
            }
            None => Outcome::NotTried,
        }
    }

    /// Management and access cookie of a counter; 0 if they were wiped.
    #[must_use]
    pub fn cookies(&self, counter: usize) -> (u64, u64) {
        match cookies_at(counter) {
            Some(at) => {
                let area = self.0.borrow();
                (u64_at(area, at), u64_at(area, at + 8))
            }
            None => (0, 0),
        }
    }
}

impl Report<&mut Area> {
    /// Records how far the firmware has come.
    pub fn set_state(&mut self, state: State) {
        let number: u32 = match state {
            State::NotBegun => 0,
            State::Running => 1,
            State::Done => 2,
            State::NoPcr => 3,
            State::NoRandom => 4,
        };
        put(self.0, AT_STATE, &number.to_le_bytes());
    }

    /// Records that `cpu` has done its part.
    pub fn set_answered(&mut self, cpu: usize) {
        if cpu < MAX_CPUS {
            let answered = u64_at(self.0, AT_ANSWERED) | 1 << cpu;
            put(self.0, AT_ANSWERED, &answered.to_le_bytes());
        }
    }

    /// Records what `cpu` got for `counter`.
    pub fn set_outcome(&mut self, cpu: usize, counter: usize, outcome: Outcome) {
        if let Some(at) = result_at(cpu, counter) {
            put(self.0, at, &[outcome.code()]);
        }
    }

    /// Leaves the cookies of a counter where the kernel's helpers can find them,
    /// or, both 0, wipes them.
    pub fn set_cookies(&mut self, counter: usize, management: u64, access: u64) {
        if let Some(at) = cookies_at(counter) {
            put(self.0, at, &management.to_le_bytes());
            put(self.0, at + 8, &access.to_le_bytes());
        }
    }
}

fn result_at(cpu: usize, counter: usize) -> Option<usize> {
    (cpu < MAX_CPUS && counter < MAX_COUNTERS).then(|| AT_RESULTS + cpu * MAX_COUNTERS + counter)
}

fn cookies_at(counter: usize) -> Option<usize> {
    (counter < MAX_COUNTERS).then(|| AT_COOKIES + counter * 16)
}
