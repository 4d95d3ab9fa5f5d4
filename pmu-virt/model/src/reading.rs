//! Counts and where they come from, and why there is none.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::constraint::AssignError;
use crate::event::EventCode;
use crate::ids::SlotIndex;

/// How a count came about, by how much it says about what really took place: most
/// comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Provenance {
    /// Every event was seen.
    Exact,
    /// Counted by a physical counter.
    Hardware,
    /// Computed from another quantity.
    Derived,
    /// Extrapolated from a part of the time or of the events.
    Scaled,
    /// Made up by a declared rate.
    Simulated,
}

impl Provenance {
    /// The label of a sum: that of the part that says least about what really
    /// took place.
    #[must_use]
    #[inline]
    pub fn and(self, other: Provenance) -> Provenance {
        self.max(other)
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

/// A request that cannot be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{reason}")]
pub struct Unavailable {
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
        event: EventCode,
    },
    /// The only ring that is asked for is one that the backend cannot see on
    /// this host.
    #[error("the {backend} backend cannot see CPL 3 on this host; `umpire doctor` says why")]
    Unseen {
        /// The backend's name.
        backend: &'static str,
    },
    /// The host does not let the guest, or the tool, count it.
    #[error("the VM's --event-filter denies {event}")]
    Denied { event: EventCode },
    /// HostOnly alone, in a tool's event select (AMD).
    #[error(
        "HostOnly (bit 41) without GuestOnly counts what the host does outside of its guests, and \
         only the guest is counted here; on the host, use perf"
    )]
    HostOnly,
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
        slot: SlotIndex,
    },
    /// The slot exists and cannot count this.
    #[error("counter {slot} of the {backend} backend cannot count this event", slot = slot.0)]
    Misplaced {
        /// The backend's name.
        backend: &'static str,
        slot: SlotIndex,
    },
    /// The slot is bound to no request.
    #[error("counter {slot} of the {backend} backend is not programmed", slot = slot.0)]
    NotProgrammed {
        /// The backend's name.
        backend: &'static str,
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
    /// The host lets the guest use fewer counters at a time than it has enabled.
    #[error("the VM's budget allows {most} such counters at a time")]
    Budget {
        /// So many of its kind.
        most: u8,
    },
    /// It has not had its turn on a physical counter yet.
    #[error("it waits for its turn on a physical counter")]
    Waiting,
    /// The vCPU is not on a core.
    #[error("the vCPU runs on no core")]
    NoCore,
}

impl UnavailableReason {
    /// Whether the backend will never count what was asked for, whatever else it counts.
    pub fn is_lasting(self) -> bool {
        match self {
            Self::Event { .. }
            | Self::Modifier { .. }
            | Self::OneRing { .. }
            | Self::Denied { .. }
            | Self::HostOnly
            | Self::Unseen { .. } => true,
            // The host has no such event.
            Self::Refused { errno, .. } => {
                matches!(errno, libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP)
            }
            _ => false,
        }
    }
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
