//! What the kernel's files say of the host while the arbiter runs: the CPUs that are
//! online, and the NMI watchdog, whose switch follows the watchdog's lease.

use std::io;
use std::path::PathBuf;

use arbiter_host::{BootTime, CpuSet, HostPmu};

use crate::config::ArbiterConfig;
use crate::probe::Found;
use crate::sysfs;
use crate::watchdog::{Keeper, Switched};

/// Between two looks, in nanoseconds.
const LOOKS: u64 = 500_000_000;

/// The files, and what was last done about them.
#[derive(Debug)]
pub(crate) struct HostFiles {
    root: PathBuf,
    present: CpuSet,
    keeper: Keeper,
    /// The counters are measured, not stated.
    measured: bool,
    /// The watchdog was on at the start, and had no counter: its CPUs watch each other.
    uses_none: bool,
    /// Whether the watchdog's counter is accounted for.
    watches: bool,
    /// What could not be done is tried again.
    retry: bool,
    due: u64,
}

impl HostFiles {
    /// # Errors
    /// The CPUs of the host cannot be read.
    pub(crate) fn new(config: &ArbiterConfig) -> io::Result<Self> {
        let root = config.root.clone();
        let online = sysfs::online(&root)?;
        Ok(HostFiles {
            keeper: Keeper::new(&root, config.state.as_deref()),
            present: sysfs::present(&root).unwrap_or(online),
            root,
            measured: false,
            uses_none: false,
            watches: false,
            retry: false,
            due: 0,
        })
    }

    /// The CPUs that there are, online or not.
    pub(crate) fn present(&self) -> &CpuSet {
        &self.present
    }

    /// Whether the watchdog's counter is accounted for: where counters are measured, or the
    /// configuration says so, unless the watchdog uses none (CPUs that watch each other).
    pub(crate) fn expect_watchdog(&mut self, config: &ArbiterConfig, first: Option<&Found>) {
        let there = self.keeper.look().is_some();
        let untouched = first.is_some_and(|found| found.untouched);
        self.measured = first.is_some();
        self.uses_none = there && untouched && !self.keeper.is_given_back();
        self.watches = self.is_to_watch(config);
        if !self.watches && self.keeper.is_given_back() {
            // An arbiter before this one had another configuration.
            self.keeper.end();
        }
        if self.uses_none {
            log::info!("the NMI watchdog is on and has no counter: its CPUs watch each other");
        }
    }

    fn is_to_watch(&self, config: &ArbiterConfig) -> bool {
        (config.watchdog.stated || self.measured) && !self.uses_none
    }

    /// Another configuration is in force. Whether the watchdog has a lease by that of before, and
    /// none by this one.
    pub(crate) fn follow_config(&mut self, config: &ArbiterConfig) -> bool {
        let before = self.watches;
        self.watches = self.is_to_watch(config);
        let ends = before && !self.watches;
        if ends {
            self.keeper.end();
        }
        ends
    }

    /// Whether the watchdog has a lease, where its counter is accounted for.
    pub(crate) fn watches(&self) -> bool {
        self.watches
    }

    /// When it is looked at next.
    pub(crate) fn due(&self) -> u64 {
        self.due
    }

    /// A look begins.
    pub(crate) fn begin_look(&mut self, now: BootTime) {
        self.due = now.0.saturating_add(LOOKS);
    }

    /// The CPUs that are online; `None`: they cannot be read, as was said.
    pub(crate) fn online(&self, pmus: &[HostPmu]) -> Option<CpuSet> {
        match sysfs::online(&self.root) {
            Ok(online) => {
                // CPUs that only the configuration knows are there by its word.
                let stated = pmus
                    .iter()
                    .flat_map(|pmu| pmu.domains.iter().flat_map(CpuSet::iter))
                    .filter(|&cpu| !self.present.contains(cpu));
                let online = online.and(&self.present);
                Some(online.iter().chain(stated).collect())
            }
            Err(error) => {
                log::warn!("the CPUs that are online cannot be read: {error}");
                None
            }
        }
    }

    /// Looks whether the watchdog is wanted: its CPUs.
    pub(crate) fn look_at_watchdog(&mut self) -> Option<CpuSet> {
        self.retry = true;
        self.keeper.look()
    }

    /// Turns the watchdog on or off. What failed is tried again at the next look.
    pub(crate) fn switch_watchdog(&mut self, on: bool) -> Switched {
        let is_so = self.keeper.is_given_back() != on;
        if !self.watches || !self.retry && (is_so || self.keeper.has_failed()) {
            return Switched::AsItWas;
        }
        self.retry = false;
        let switched = self.keeper.set(on);
        match &switched {
            Switched::To { on: true } => log::info!("the NMI watchdog is on again"),
            Switched::To { on: false } => {
                log::info!("the NMI watchdog is off: leases need its counter");
            }
            Switched::Failed(Some(why)) => {
                let to = if on { "on" } else { "off" };
                log::error!("the NMI watchdog cannot be turned {to}: {why}");
            }
            Switched::AsItWas | Switched::Failed(None) => {}
        }
        switched
    }

    /// The arbiter ends. What leases of the journal need stays theirs: the next arbiter goes
    /// on with it, or their holders do not come back to it in time.
    pub(crate) fn end(&mut self, leases_need_watchdogs_counter: bool) {
        if !self.watches {
            return;
        }
        if leases_need_watchdogs_counter {
            log::warn!(
                "the NMI watchdog stays off: leases need its counter; the next arbiter with this \
                 state folder turns it on when they have ended; without one, do: sysctl \
                 kernel.nmi_watchdog=1"
            );
        } else {
            self.keeper.end();
        }
    }
}
