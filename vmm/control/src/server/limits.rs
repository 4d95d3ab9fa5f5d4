//! How much tools may have, and PFM_GET_CONFIG and PFM_SET_CONFIG.

use perfmon_abi::Config;
use perfmon_abi::consts::{PFM_GROUP_ANY, PFM_MAX_PMCS, PFM_VERSION};
use perfmon_abi::wire::{Errno, MAX_PAYLOAD, Refusal, Subcode};
use perfmon_abi::{PMC_WORDS, PMD_WORDS};
use pmu_virt::perfmon::LogicalPmu;

use super::connections::MOST_REFUSED;
use crate::config::{ARG_SIZES, ControlConfig};
use crate::sys::PAGE;
use umpire_service::Peer;

/// Most contexts of a VM.
const MOST_CONTEXTS: usize = 4096;
/// Descriptors of a context in the VMM: its socket and its buffer.
pub(super) const CONTEXT_FILES: usize = 2;
/// Descriptors kept for the VMM: devices, logs, and those that come with packets.
const MACHINE_FILES: usize = 256;
/// Descriptors kept for each vCPU. Counters of the host are among them.
const VCPU_FILES: usize = 16;

/// The kernel reports this user for all users that a user namespace does not have. It
/// stands for nobody in particular.
const OVERFLOW_UID: u32 = 65_534;

/// The limits, some of which PFM_SET_CONFIG changes.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    pub(super) contexts: usize,
    pub(super) rate: u64,
    /// `cf_arg_size_max`.
    pub(super) arg_size: usize,
    /// `cf_smpl_buf_size_max`.
    pub(super) buffers: u64,
    sys_gid: u32,
    thread_gid: u32,
    /// The user who may change the limits, as root may.
    owner: u32,
    /// Tools of this very process are in every group.
    own_tools: bool,
}

impl Limits {
    /// For a process that may have `files` descriptors and runs `vcpus` vCPUs.
    pub(super) fn new(config: &ControlConfig, files: u64, vcpus: usize) -> Self {
        Self {
            contexts: most_contexts(files, config.connections, vcpus),
            rate: config.rate,
            arg_size: config.arg_size,
            buffers: config.buffers,
            sys_gid: config.sys_gid.unwrap_or(PFM_GROUP_ANY),
            thread_gid: config.thread_gid.unwrap_or(PFM_GROUP_ANY),
            owner: rustix::process::geteuid().as_raw(),
            own_tools: config.own_tools,
        }
    }

    /// Refuses `peer` a context that it may not create (4.2).
    pub(super) fn admit(&self, peer: &Peer, system_wide: bool) -> Result<(), Refusal> {
        let (group, name, what) = if system_wide {
            (self.sys_gid, "cf_sys_gid", "cores")
        } else {
            (self.thread_gid, "cf_thread_gid", "vCPUs")
        };
        let what = format!("create contexts for {what}");
        self.admit_member(peer, group, name, &what)
    }

    /// Refuses `peer` to change reservations if it may not create contexts for cores.
    pub(super) fn admit_administrator(&self, peer: &Peer) -> Result<(), Refusal> {
        let what = "change reservations and budgets, or pause the VM";
        self.admit_member(peer, self.sys_gid, "cf_sys_gid", what)
    }

    fn admit_member(&self, peer: &Peer, group: u32, name: &str, what: &str) -> Result<(), Refusal> {
        let is_own = self.own_tools && peer.pid == std::process::id();
        if group == PFM_GROUP_ANY || peer.is_in(group) || is_own {
            return Ok(());
        }
        let reason = format!("only members of group {group} ({name}) may {what}");
        Err(Refusal::new(Errno::EPERM, reason))
    }

    /// PFM_GET_CONFIG (3.1.17).
    pub(super) fn get(&self, pmu: &LogicalPmu) -> Config {
        let mut pmcs = [0; PMC_WORDS];
        for pmc in pmu.pmcs().iter().filter(|pmc| pmc.num < PFM_MAX_PMCS) {
            pmcs[usize::from(pmc.num / 64)] |= 1 << (pmc.num % 64);
        }
        let pmds: [u64; PMD_WORDS] = pmu.implemented_pmds().words();
        Config {
            version: PFM_VERSION,
            flags: 0,
            impl_pmcs: pmcs,
            impl_pmds: pmds,
            sys_gid: self.sys_gid,
            thread_gid: self.thread_gid,
            arg_size_max: self.arg_size as u64,
            smpl_buf_size_max: self.buffers,
            counter_width: pmu.model().width().into(),
        }
    }

    /// PFM_SET_CONFIG (3.1.16). Nothing changes unless all of `new` is right, and
    /// nothing changes for contexts that exist.
    pub(super) fn set(&mut self, peer: &Peer, new: &Config) -> Result<(), Refusal> {
        let is_owner = peer.uid == self.owner && self.owner != OVERFLOW_UID;
        if peer.uid != 0 && !is_owner {
            let reason = "only root and the user who runs the VMM may change the configuration";
            return Err(Refusal::new(Errno::EPERM, reason).because(Subcode::RequiresPrivilege));
        }
        let refuse = |reason: String| Err(Refusal::new(Errno::EINVAL, reason));
        if new.flags != 0 {
            return refuse(format!("cf_flags {:#x}: no flag is defined", new.flags));
        }
        let arg_size = usize::try_from(new.arg_size_max).unwrap_or(usize::MAX);
        if !ARG_SIZES.contains(&arg_size) {
            return refuse(format!(
                "cf_arg_size_max {}: it is at least {PAGE}, a page, and at most {MAX_PAYLOAD}, \
                 what fits into a packet",
                new.arg_size_max
            ));
        }
        if new.smpl_buf_size_max < PAGE as u64 {
            return refuse(format!(
                "cf_smpl_buf_size_max {}: it is at least {PAGE}, a page",
                new.smpl_buf_size_max
            ));
        }
        self.arg_size = arg_size;
        self.buffers = new.smpl_buf_size_max;
        self.sys_gid = new.sys_gid;
        self.thread_gid = new.thread_gid;
        Ok(())
    }
}

/// The most contexts that leave descriptors for the machine and for every
/// connection.
fn most_contexts(files: u64, connections: usize, vcpus: usize) -> usize {
    let machine = VCPU_FILES
        .saturating_mul(vcpus)
        .saturating_add(MACHINE_FILES);
    let others = machine
        .saturating_add(connections)
        .saturating_add(MOST_REFUSED);
    let left = usize::try_from(files)
        .unwrap_or(usize::MAX)
        .saturating_sub(others);
    (left / CONTEXT_FILES).clamp(1, MOST_CONTEXTS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pmu_virt::PmuModel;

    fn limits() -> Limits {
        Limits::new(&ControlConfig::at("control".into()), u64::MAX, 1)
    }

    #[test]
    fn options_hold_from_the_start() {
        let config = ControlConfig {
            sys_gid: Some(7),
            thread_gid: Some(8),
            arg_size: 8192,
            buffers: 4096,
            ..ControlConfig::at("control".into())
        };
        let pmu = LogicalPmu::new(PmuModel::parse("amd-core").unwrap());
        let told = Limits::new(&config, u64::MAX, 1).get(&pmu);
        assert_eq!((told.sys_gid, told.thread_gid), (7, 8));
        assert_eq!((told.arg_size_max, told.smpl_buf_size_max), (8192, 4096));
    }

    #[test]
    fn contexts_leave_descriptors_to_the_machine() {
        let check = |files, connections, vcpus, expected| {
            let most = most_contexts(files, connections, vcpus);
            assert_eq!(most, expected, "{files} {connections} {vcpus}");
        };
        check(u64::MAX, 64, 1, 4096);
        check(1024, 64, 1, (1024 - 256 - 16 - 64 - 128) / 2);
        check(1024, 64, 8, (1024 - 256 - 128 - 64 - 128) / 2);
        check(256, 64, 1, 1);
        check(1 << 20, usize::MAX, usize::MAX, 1);
    }

    #[test]
    fn the_owner_changes_what_is_possible() {
        let pmu = LogicalPmu::new(PmuModel::parse("amd-core").unwrap());
        let owner = Peer::of_user(rustix::process::geteuid().as_raw());
        let other = Peer::of_user(65_534);
        let mut limits = limits();
        let config = limits.get(&pmu);
        assert_eq!(
            (config.arg_size_max, config.smpl_buf_size_max),
            (4096, 64 << 20)
        );
        assert_eq!(config.impl_pmcs[0].count_ones(), 6);
        assert_eq!(config.counter_width, 48);
        assert_eq!(limits.set(&other, &config).unwrap_err().errno, Errno::EPERM);
        let mut check = |change: fn(&mut Config), expected: Option<Errno>| {
            let mut new = config;
            change(&mut new);
            let error = limits.set(&owner, &new).err().map(|refusal| refusal.errno);
            assert_eq!(error, expected, "{new:?}");
        };
        check(|new| new.arg_size_max = 4095, Some(Errno::EINVAL));
        check(
            |new| new.arg_size_max = MAX_PAYLOAD as u64 + 1,
            Some(Errno::EINVAL),
        );
        check(|new| new.smpl_buf_size_max = 4095, Some(Errno::EINVAL));
        check(|new| new.flags = 1, Some(Errno::EINVAL));
        check(|new| new.smpl_buf_size_max = u64::MAX, None);
        // The command ignores fields that it does not set (3.1.16).
        check(|new| new.counter_width = 1, None);
        check(|new| new.sys_gid = 12_345, None);
        assert_eq!(limits.admit(&other, false), Ok(()));
        // The VMM is run by a user whom the namespace does not have.
        let mut nobodys = limits.clone();
        nobodys.owner = OVERFLOW_UID;
        assert_eq!(
            nobodys.set(&other, &config).unwrap_err().errno,
            Errno::EPERM
        );
        assert_eq!(limits.admit(&other, true).unwrap_err().errno, Errno::EPERM);
    }
}
