//! What the control socket without a VM says of itself.

use perfmon_abi::wire::info::uuid_text;
use perfmon_abi::wire::{Call, Errno, Refusal};
use perfmon_abi::{DefaultArg, Record, consts as pfm};
use serde_json::{Value, json};

use super::machine::{COUNTERS, refuse};

/// Commands without a context.
pub fn ask(call: &mut Call) -> Result<(), Refusal> {
    match call {
        Call::GetConfig(config) => {
            config.version = pfm::PFM_VERSION;
            config.impl_pmcs = [0xf, 0];
            config.impl_pmds = [0xf, 1];
            (config.sys_gid, config.thread_gid) = (pfm::PFM_GROUP_ANY, pfm::PFM_GROUP_ANY);
            (config.arg_size_max, config.smpl_buf_size_max) = (4096, 64 << 20);
            config.counter_width = 48;
        }
        Call::SetConfig(_) => return refuse(Errno::EPERM, "only root changes the interface"),
        Call::GetinfoPmcs(pmcs) => {
            for pmc in pmcs {
                if pmc.num >= COUNTERS {
                    pmc.flags |= pfm::PFM_REG_RETFL_NOTAVAIL;
                    return refuse(Errno::EINVAL, "there is no such register");
                }
                (pmc.kind, pmc.index) = (pfm::PFM_REG_TYPE_MSR, 0xc001_0000 + u64::from(pmc.num));
            }
        }
        Call::GetinfoPmds(pmds) => {
            for pmd in pmds {
                if pmd.num >= COUNTERS {
                    pmd.flags |= pfm::PFM_REG_RETFL_NOTAVAIL;
                    return refuse(Errno::EINVAL, "there is no such register");
                }
                (pmd.kind, pmd.index) = (pfm::PFM_REG_TYPE_MSR, 0xc001_0004 + u64::from(pmd.num));
            }
        }
        _ => return refuse(Errno::EBADF, "the command needs a context"),
    }
    Ok(())
}

pub fn formats() -> Value {
    json!([{
        "uuid": uuid_text(pfm::DEFAULT_FORMAT), "name": "default", "flags": 0,
        "arg_size": DefaultArg::SIZE, "queue_depth": 4, "description": "the default format",
    }])
}

pub fn model(core_cpus: &[u32]) -> Value {
    json!({
        "model": "amd-k7", "event_family": "none", "counters": "none", "programmable": 4,
        "fixed": 0, "counter_width": 48, "tsc_khz": 1, "vcpus": 2, "cores": 2, "core_cpus": core_cpus,
        "virtual_pmds": [],
    })
}
