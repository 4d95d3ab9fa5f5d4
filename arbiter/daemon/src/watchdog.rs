//! The NMI watchdog's switch: it follows what the arbiter has decided of the watchdog's
//! claim (`service::watchdog`), before anybody is told that a counter is free.

use std::path::Path;

use crate::budget::{FileError, GivenBack, Restored, Watchdog};
use arbiter_host::CpuSet;

/// The switch, and what is known of it.
#[derive(Debug)]
pub(crate) struct Keeper {
    watchdog: Watchdog,
    /// Whether there is a folder for the old value.
    keeps: bool,
    /// Whether this process, or one before it, has turned the watchdog off.
    given_back: bool,
    /// The last try failed, and was reported.
    failed: bool,
    /// What the last look saw, and whether those since have failed.
    seen: Option<CpuSet>,
    blind: bool,
}

/// What came of an attempt to have the switch as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Switched {
    /// It was as it should be.
    AsItWas,
    /// It was turned.
    To {
        /// On or off.
        on: bool,
    },
    /// It could not be turned; the reason, for the first of several such tries.
    Failed(Option<String>),
}

impl Keeper {
    /// The watchdog of the kernel below `root`. Its old value is kept in `state`; without
    /// that folder it is never turned off.
    pub(crate) fn new(root: &Path, state: Option<&Path>) -> Self {
        Keeper {
            watchdog: Watchdog::new(root, state.unwrap_or(Path::new(""))),
            keeps: state.is_some(),
            given_back: false,
            failed: false,
            seen: None,
            blind: false,
        }
    }

    /// The CPUs that the watchdog is for: it is on, or given back. `None`: nobody wants it.
    pub(crate) fn look(&mut self) -> Option<CpuSet> {
        let on = self.watchdog.on();
        let kept = if self.keeps {
            self.watchdog.given_back()
        } else {
            Ok(None)
        };
        match (on, kept) {
            (Ok(on), Ok(kept)) => {
                self.given_back = kept.is_some();
                self.blind = false;
                self.seen = on.or(kept);
                self.seen.clone()
            }
            (Err(error), _) | (_, Err(error)) => {
                // It is as it was seen last: nobody gets its counter for a look that failed.
                if !std::mem::replace(&mut self.blind, true) {
                    log::warn!("the NMI watchdog cannot be looked at: {error}");
                }
                self.seen.clone()
            }
        }
    }

    /// Whether it was given back, as of the last look.
    pub(crate) fn is_given_back(&self) -> bool {
        self.given_back
    }

    /// Whether it could not be turned the last time.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed
    }

    /// Turns it on or off.
    pub(crate) fn set(&mut self, on: bool) -> Switched {
        if !self.keeps || on && !self.given_back {
            return Switched::AsItWas;
        }
        let turned: Result<bool, FileError> = if on {
            let done = self.watchdog.restore();
            done.map(|done| matches!(done, Restored::Done | Restored::OnAlready))
        } else {
            let done = self.watchdog.give_back();
            done.map(|done| done == GivenBack::Freed)
        };
        match turned {
            Ok(turned) => {
                self.failed = false;
                self.given_back = !on && (self.given_back || turned);
                if turned {
                    Switched::To { on }
                } else {
                    Switched::AsItWas
                }
            }
            Err(error) => {
                let first = !std::mem::replace(&mut self.failed, true);
                Switched::Failed(first.then(|| error.to_string()))
            }
        }
    }

    /// The arbiter ends: the old value is in force again.
    pub(crate) fn end(&mut self) {
        if !self.keeps {
            return;
        }
        self.given_back = false;
        match self.watchdog.restore() {
            Ok(Restored::Done) => log::info!("the NMI watchdog is on again"),
            Ok(_) => {}
            Err(error) => log::error!(
                "the NMI watchdog was not turned on again: {error}; the next arbiter that starts \
                 with this state folder does it"
            ),
        }
    }
}
