//! The backends by name, and what opening one needs.

use pmu_model::{EventFamily, Vendor};
use thiserror::Error;

/// A backend's line in lists for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendSummary {
    /// Its name, as [`crate::Sources::parse`] takes it.
    pub name: &'static str,
    /// One line of description.
    pub summary: &'static str,
}

const BACKENDS: [BackendSummary; 7] = [
    BackendSummary {
        name: "auto",
        summary: "the best that the host has: perf,clock where its PMU counts guests, else clock; emu's emu",
    },
    BackendSummary {
        name: "perf",
        summary: "the host's kernel and its PMU; where that counts no guests, perf,clock",
    },
    BackendSummary {
        name: "clock",
        summary: "TSC while the guest runs: reference cycles exact, core cycles derived",
    },
    BackendSummary {
        name: "step",
        summary: "single steps: instructions by kind, branches, loads, stores by ring, exact and slow",
    },
    BackendSummary {
        name: "emu",
        summary: "with --engine emu alone: instructions as step counts them, exact and fast",
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

/// Every name that [`crate::Sources::parse`] takes.
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
    /// Whose event codes these are, where the vendor's processors differ
    /// ([`EventFamily::of_processor`]).
    pub host_events: Option<EventFamily>,
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
