//! What the kernel's files say of the host while the arbiter runs: the CPUs that are
//! online, and the NMI watchdog, whose switch follows the watchdog's lease.

use std::io;
use std::path::PathBuf;

use arbiter_host::{BootTime, CpuSet};

use crate::config::ArbiterConfig;
use crate::probe::Found;
use crate::service::Service;
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

    /// Another configuration is in force: the watchdog has a lease by it, or has none.
    pub(crate) fn follow_config(&mut self, service: &mut Service, now: BootTime) {
        let before = self.watches;
        self.watches = self.is_to_watch(service.config());
        if before && !self.watches {
            self.keeper.end();
            service.set_watchdog(None, now);
        }
        if self.watches {
            self.look(service, now);
        }
    }

    /// When it is looked at next.
    pub(crate) fn due(&self) -> u64 {
        self.due
    }

    /// Looks which CPUs are online.
    pub(crate) fn follow_cpus(&mut self, service: &mut Service, now: BootTime) {
        match sysfs::online(&self.root) {
            Ok(online) => {
                // CPUs that only the configuration knows are there by its word.
                let pmus = service.arbiter().pmus().iter();
                let stated: CpuSet = pmus
                    .flat_map(|pmu| pmu.domains.iter().flat_map(CpuSet::iter))
                    .filter(|&cpu| !self.present.contains(cpu))
                    .collect();
                let online = online
                    .and(&self.present)
                    .iter()
                    .chain(stated.iter())
                    .collect();
                service.set_online(&online, now);
            }
            Err(error) => log::warn!("the CPUs that are online cannot be read: {error}"),
        }
    }

    /// Looks which CPUs are online, and whether the watchdog is wanted: that only after the
    /// leases of before a restart are known.
    pub(crate) fn look(&mut self, service: &mut Service, now: BootTime) {
        self.due = now.0.saturating_add(LOOKS);
        self.follow_cpus(service, now);
        if self.watches {
            self.retry = true;
            let cpus = self.keeper.look();
            service.set_watchdog(cpus, now);
            self.switch_watchdog(service, now);
        }
    }

    /// Turns the watchdog on or off as its lease says. Whoever has got its counter is told
    /// after that.
    pub(crate) fn switch_watchdog(&mut self, service: &mut Service, now: BootTime) {
        let Some(on) = service.watchdog_on().filter(|_| self.watches) else {
            return;
        };
        let is_so = self.keeper.is_given_back() != on;
        if !self.retry && (is_so || self.keeper.has_failed()) {
            return;
        }
        self.retry = false;
        match self.keeper.set(on) {
            Switched::AsItWas => {}
            Switched::To { on: true } => {
                log::info!("the NMI watchdog is on again");
                service.watchdog_switched(true);
            }
            Switched::To { on: false } => {
                log::info!("the NMI watchdog is off: leases need its counter");
                service.watchdog_switched(false);
                service.set_watchdog_stuck(false, now);
            }
            Switched::Failed(why) => {
                if let Some(why) = why {
                    let to = if on { "on" } else { "off" };
                    log::error!("the NMI watchdog cannot be turned {to}: {why}");
                }
                service.set_watchdog_stuck(!on, now);
            }
        }
    }

    /// The arbiter ends. What leases of the journal need stays theirs: the next arbiter goes
    /// on with it, or their holders do not come back to it in time.
    pub(crate) fn end(&mut self, service: &Service) {
        if !self.watches {
            return;
        }
        if service.needs_watchdogs_counter() {
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
