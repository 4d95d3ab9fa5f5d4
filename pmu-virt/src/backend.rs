//! Where counts come from: one trait, and the backends behind it.

mod clock;
mod combined;
pub mod msr;
pub mod perf;
mod sim;
mod slots;
mod sources;
mod step;

pub use clock::ClockBackend;
pub use combined::CombinedBackend;
pub use msr::{HostCpuid, MsrBackend, MsrDevice, MsrOptions, MsrRefusal, MsrReport};
pub use sim::{RateError, RateProblem, RateTable, SimBackend, SimClocks};
pub use sources::{Source, Sources};
pub use step::StepBackend;

use crate::assign::{AssignError, Constraint};
use crate::event::EventCode;
use crate::ids::{OwnerId, SlotIndex, SlotSet, Vendor};
use crate::progress::{LossReason, Progress};
use crate::request::CountRequest;
use serde::{Deserialize, Serialize};
use std::fmt::{self, Debug};
use std::num::NonZeroU64;
use thiserror::Error;

/// A source of counts: a set of physical counters, addressed by slot.
///
/// A slot goes through `program` (stopped, count 0), any number of `start` and
/// `stop`, and `release`. Calls at a slot that is not programmed change
/// nothing, and reading it says so. Counters are programmed, started and
/// stopped while the guest does not run, that is outside of an interval from
/// [`Progress::Entered`] to [`Progress::Left`].
pub trait CounterBackend: Send + Debug {
    /// Its name, as in `--counters`.
    fn name(&self) -> &'static str;

    /// Slots that it has, at most 128. Slots of several vCPUs may be
    /// programmed at once; a source whose stopped counters cost nothing offers
    /// more slots than one vCPU needs.
    fn capacity(&self) -> usize;

    /// Whether it could count `request`, and how well.
    ///
    /// # Errors
    /// Why it cannot.
    fn can_count(&self, request: &CountRequest) -> Result<Provenance, Unavailable>;

    /// Which slots can count `request`; a request that cannot be counted has
    /// no meaningful answer.
    fn constraint(&self, request: &CountRequest) -> Constraint {
        let _ = request;
        Constraint::any(self.capacity())
    }

    /// Binds a slot to a request: stopped, with count 0. What it counted
    /// before is forgotten.
    ///
    /// # Errors
    /// Why it cannot; the slot is then not programmed.
    fn program(
        &mut self,
        slot: SlotIndex,
        request: &CountRequest,
    ) -> Result<Provenance, Unavailable>;

    /// Frees a slot; it counts no longer.
    fn release(&mut self, slot: SlotIndex);

    /// Lets a programmed slot count from now on.
    fn start(&mut self, slot: SlotIndex);

    /// Freezes a slot's count.
    fn stop(&mut self, slot: SlotIndex);

    /// Starts every slot of a set: one operation where the source has a
    /// common enable.
    fn resume(&mut self, slots: SlotSet) {
        for slot in slots.iter() {
            self.start(slot);
        }
    }

    /// Stops every slot of a set, likewise. The counts stand still until
    /// [`CounterBackend::resume`], whoever runs in between.
    fn pause(&mut self, slots: SlotSet) {
        for slot in slots.iter() {
            self.stop(slot);
        }
    }

    /// The vCPU for which slots are programmed, started and stopped from now
    /// on.
    fn attach(&mut self, owner: OwnerId) {
        let _ = owner;
    }

    /// Events since `program`. Never falls.
    fn read(&self, slot: SlotIndex) -> Reading;

    /// Asks for one overflow when `after` further events have been counted;
    /// `None` takes an earlier request back.
    fn arm(&mut self, slot: SlotIndex, after: Option<NonZeroU64>);

    /// What happened to the vCPU.
    fn observe(&mut self, progress: &Progress);

    /// Slots whose armed overflow came, each told once.
    fn take_overflows(&mut self) -> SlotSet;

    /// TSC value at which the guest has to be interrupted, known after
    /// [`Progress::Entered`]: an armed overflow, or a sample of the ring.
    fn deadline(&self) -> Option<u64>;

    /// Whether a running slot needs the ring in [`Progress::Left`].
    fn needs_ring(&self) -> bool {
        false
    }

    /// Whether a running slot has to be told every instruction.
    fn needs_stepping(&self) -> bool {
        false
    }

    /// Why a slot's count is no longer exact, if it once was.
    fn loss(&self, slot: SlotIndex) -> Option<LossReason> {
        let _ = slot;
        None
    }

    /// Whether a stopped slot may count on for another vCPU as it is programmed.
    /// False where it belongs to the vCPU for which it was programmed.
    fn is_shared(&self, slot: SlotIndex) -> bool {
        let _ = slot;
        false
    }

    /// Name of the source behind a slot; differs from [`CounterBackend::name`]
    /// in a combination of sources.
    fn source(&self, slot: SlotIndex) -> &'static str {
        let _ = slot;
        self.name()
    }
}

/// How a count came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Provenance {
    /// Every event was seen.
    Exact,
    /// Counted by a physical counter.
    Hardware,
    /// Extrapolated from a part of the time or of the events.
    Scaled,
    /// Computed from another quantity.
    Derived,
    /// Made up by a declared rate.
    Simulated,
}

impl Provenance {
    /// The label of a sum: that of the part that says least about what really
    /// took place.
    #[must_use]
    pub fn and(self, other: Provenance) -> Provenance {
        let rank = |provenance| match provenance {
            Provenance::Exact => 0,
            Provenance::Hardware => 1,
            Provenance::Derived => 2,
            Provenance::Scaled => 3,
            Provenance::Simulated => 4,
        };
        if rank(other) > rank(self) {
            other
        } else {
            self
        }
    }
}

impl fmt::Display for Provenance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Provenance::Exact => "exact",
            Provenance::Hardware => "hardware",
            Provenance::Scaled => "scaled",
            Provenance::Derived => "derived",
            Provenance::Simulated => "simulated",
        })
    }
}

/// A request that cannot be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{reason}")]
pub struct Unavailable {
    /// Why.
    pub reason: UnavailableReason,
}

/// Why something cannot be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum UnavailableReason {
    /// The backend has no source for the event.
    #[error("the {backend} backend cannot count {event}")]
    Event {
        /// The backend's name.
        backend: &'static str,
        /// The event.
        event: EventCode,
    },
    /// Edge, invert, cmask or any-thread.
    #[error("the {backend} backend cannot count with edge, invert, cmask or any-thread")]
    Modifier {
        /// The backend's name.
        backend: &'static str,
    },
    /// The event is counted in both rings together only.
    #[error("the {backend} backend cannot count {event} in one ring alone")]
    OneRing {
        /// The backend's name.
        backend: &'static str,
        /// The event.
        event: EventCode,
    },
    /// The only ring that is asked for is one that the backend cannot see on
    /// this host.
    #[error("the {backend} backend cannot see CPL 3 on this host; `umpire doctor` says why")]
    Unseen {
        /// The backend's name.
        backend: &'static str,
    },
    /// Every slot is taken.
    #[error("the {backend} backend has no free counter among its {capacity}")]
    NoFreeCounter {
        /// The backend's name.
        backend: &'static str,
        /// Number of its slots.
        capacity: usize,
    },
    /// The slot does not exist.
    #[error("the {backend} backend has no counter {slot}", slot = slot.0)]
    NoSuchSlot {
        /// The backend's name.
        backend: &'static str,
        /// The slot.
        slot: SlotIndex,
    },
    /// The slot exists and cannot count this.
    #[error("counter {slot} of the {backend} backend cannot count this event", slot = slot.0)]
    Misplaced {
        /// The backend's name.
        backend: &'static str,
        /// The slot.
        slot: SlotIndex,
    },
    /// The slot is bound to no request.
    #[error("counter {slot} of the {backend} backend is not programmed", slot = slot.0)]
    NotProgrammed {
        /// The backend's name.
        backend: &'static str,
        /// The slot.
        slot: SlotIndex,
    },
    /// The guest does not hold the counter.
    #[error("the counter is not granted to this guest")]
    NotGranted,
    /// The host refused to count.
    #[error("the {backend} backend was refused by the host: {}", errno_text(*errno))]
    Refused {
        /// The backend's name.
        backend: &'static str,
        /// What the host's kernel answered, as a positive `errno`.
        errno: i32,
    },
    /// The host counted, and took the physical counter away.
    #[error("the host took the {backend} backend's counter away")]
    Lost {
        /// The backend's name.
        backend: &'static str,
    },
    /// Somebody else uses the physical counters.
    #[error("the counters of the {backend} backend are in use by the host")]
    Busy {
        /// The backend's name.
        backend: &'static str,
    },
    /// Not all of the counters that are wanted find a physical one.
    #[error("no place for it: {0}")]
    Conflict(AssignError),
    /// It has not had its turn on a physical counter yet.
    #[error("it waits for its turn on a physical counter")]
    Waiting,
    /// The vCPU is not on a core.
    #[error("the vCPU runs on no core")]
    NoCore,
}

/// The meaning of an `errno`, and where to look further.
fn errno_text(errno: i32) -> String {
    let meaning = std::io::Error::from_raw_os_error(errno);
    let step = match errno {
        libc::EMFILE | libc::ENFILE => "; raise `ulimit -n`",
        libc::EACCES | libc::EPERM | libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP => {
            "; `umpire doctor` says what is missing"
        }
        _ => "",
    };
    format!("{meaning}{step}")
}

/// `a, b and c`.
pub(crate) fn list<T: fmt::Display>(items: impl Iterator<Item = T>) -> String {
    let words: Vec<String> = items.map(|item| item.to_string()).collect();
    match words.split_last() {
        None => "nothing".to_owned(),
        Some((only, [])) => only.clone(),
        Some((last, rest)) => format!("{} and {last}", rest.join(", ")),
    }
}

/// A count with its origin, or the reason why there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reading {
    /// Somebody counted.
    Counted {
        /// Events.
        value: u64,
        /// How they were counted.
        provenance: Provenance,
    },
    /// Nobody counted.
    Unavailable(UnavailableReason),
}

/// A backend's line in lists for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendSummary {
    /// Its name, as [`Sources::parse`] takes it.
    pub name: &'static str,
    /// One line of description.
    pub summary: &'static str,
}

const BACKENDS: [BackendSummary; 6] = [
    BackendSummary {
        name: "auto",
        summary: "the best that the host has: perf,clock where its PMU counts guests, else clock",
    },
    BackendSummary {
        name: "perf",
        summary: "the host's kernel: its PMU where there is one, else cycles from CPU time",
    },
    BackendSummary {
        name: "clock",
        summary: "TSC while the guest runs: reference cycles exact, core cycles derived",
    },
    BackendSummary {
        name: "step",
        summary: "single steps: instructions, branches, loads, stores by ring, exact and slow",
    },
    BackendSummary {
        name: "sim",
        summary: "sim=FILE.toml: declared rates over guest time, always labelled simulated",
    },
    BackendSummary {
        name: "msr",
        summary: "msr[=CPU][:force]: the physical registers of one host CPU, for one core",
    },
];

/// Every name that [`Sources::parse`] takes.
pub fn backend_names() -> &'static [BackendSummary] {
    &BACKENDS
}
/// What opening a backend needs to know of the host and of the VMM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BackendEnv {
    /// TSC ticks in a millisecond.
    pub tsc_khz: u32,
    /// Vendor of the host's processor, whose event codes its PMU takes.
    pub host_vendor: Option<Vendor>,
    /// The signal that makes a vCPU's thread leave the guest.
    pub overflow_signal: i32,
    /// The host's single steps stop at CPL 3 too.
    pub steps_cpl3: bool,
}

/// A counter backend cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum BackendError {
    /// No backend has the name.
    #[error(
        "no counter backend is called '{name}'; known are {}",
        known_backends()
    )]
    Unknown {
        /// The name given.
        name: String,
    },
    /// The words behind a backend's name make no sense.
    #[error("'{text}': {problem}")]
    Options {
        /// As given.
        text: String,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// The host does not let us use it.
    #[error("the {backend} backend cannot be used: {reason}")]
    Cannot {
        /// The backend's name.
        backend: &'static str,
        /// Why, and what to do.
        reason: String,
    },
}

fn known_backends() -> String {
    BACKENDS.map(|backend| backend.name).join(", ")
}
