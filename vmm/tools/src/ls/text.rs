//! What `umpire ls` prints for people.

use std::io::{self, Write};

use perfmon_abi::wire::info::{
    ContextInfo, ContextState, CoreInfo, Holder, HolderInfo, Scope, VcpuInfo, VcpuState,
};
use umpire_events::one_line;

use super::VmListing;
use crate::table::indented;

/// Writes all of a VM, with an empty line before it if it is not the first.
pub(super) fn write(vm: &VmListing, apart: bool, out: &mut dyn Write) -> io::Result<()> {
    if apart {
        writeln!(out)?;
    }
    let machine = &vm.machine;
    writeln!(
        out,
        "VM {} ({}) at {}",
        machine.pid,
        one_line(&machine.guest),
        vm.socket.display()
    )?;
    writeln!(
        out,
        "  PMU {}: {} programmable and {} fixed counters of {} bits; counts from {}; {}",
        vm.model.model,
        vm.model.programmable,
        vm.model.fixed,
        vm.model.counter_width,
        machine.counters,
        machine.policy
    )?;
    let formats = vm.formats.iter();
    let formats = formats.map(|it| format!("{}={}", one_line(&it.name), one_line(&it.uuid)));
    writeln!(out, "  Sampling formats: {}", listed(formats.collect()))?;
    let vcpus = machine.vcpus.iter().map(vcpu).collect();
    indented(
        &["VCPU", "STATE", "CORE", "CONTEXT", "RESERVED"],
        vcpus,
        out,
    )?;
    let cores = machine.cores.iter().map(core).collect();
    indented(
        &["CORE", "THREAD", "VCPU", "CONTEXT", "COUNTERS"],
        cores,
        out,
    )?;
    let contexts: Vec<Vec<String>> = machine.contexts.iter().map(context).collect();
    if contexts.is_empty() {
        return writeln!(out, "  no contexts");
    }
    let heads = [
        "CONTEXT", "OF", "STATE", "PID", "UID", "SETS", "ACTIVE", "FORMAT", "BUFFER", "UNREAD",
        "DROPPED",
    ];
    indented(&heads, contexts, out)
}

/// What a vCPU does, in a word.
pub(crate) fn vcpu_state(vcpu: &VcpuInfo) -> &'static str {
    match vcpu.state {
        // One that is halted needs no core.
        VcpuState::Running | VcpuState::Waiting if vcpu.halted == Some(true) => "halted",
        VcpuState::Running => "running",
        VcpuState::Waiting => "waiting",
        VcpuState::Blocked => "blocked",
        VcpuState::Paused => "paused",
        VcpuState::Offline => "offline",
        VcpuState::Ended => "ended",
    }
}

fn vcpu(vcpu: &VcpuInfo) -> Vec<String> {
    let reserved = vcpu.reserved.iter();
    let reserved = reserved.map(|it| format!("{}: {}", one_line(&it.counter), one_line(&it.layer)));
    vec![
        vcpu.vcpu.to_string(),
        vcpu_state(vcpu).to_owned(),
        or_none(vcpu.core),
        attached(&vcpu.contexts, vcpu.context),
        listed(reserved.collect()),
    ]
}

fn core(core: &CoreInfo) -> Vec<String> {
    let held = core.counters.iter().map(holder);
    let free = core.free.map(|free| format!("{free} free"));
    vec![
        core.core.to_string(),
        core.tid.to_string(),
        or_none(core.vcpu),
        attached(&core.contexts, core.context),
        listed(held.chain(free).collect()),
    ]
}

/// `pmc0: vCPU 1's guest (0x4300c0)`.
fn holder(held: &HolderInfo) -> String {
    let who = match held.holder {
        Holder::Free => "free".to_owned(),
        Holder::Guest(vcpu) => format!("vCPU {vcpu}'s guest"),
        Holder::Context(id) => format!("context {id}"),
        Holder::Reserved => "reserved below".to_owned(),
    };
    let event = held.event.map_or(String::new(), |it| format!(" ({it:#x})"));
    format!("{}: {who}{event}", one_line(&held.counter))
}

fn context(context: &ContextInfo) -> Vec<String> {
    let state = match (context.state, context.started) {
        (ContextState::Unloaded, _) => "unloaded",
        (ContextState::Loaded, true) => "counting",
        (ContextState::Loaded, false) => "loaded",
        (ContextState::Masked, _) => "masked",
        (ContextState::Preempted, _) => "preempted",
        (ContextState::Zombie, _) => "zombie",
    };
    let of = match (context.scope, context.target) {
        (Scope::Vcpu, Some(number)) => format!("vCPU {number}"),
        (Scope::Core, Some(number)) => format!("core {number}"),
        (Scope::Vcpu, None) => "a vCPU".to_owned(),
        (Scope::Core, None) => "a core".to_owned(),
    };
    vec![
        context.id.to_string(),
        of,
        state.to_owned(),
        context.pid.to_string(),
        context.uid.to_string(),
        context.sets.to_string(),
        context.active_set.to_string(),
        context.format.as_deref().map_or("-".to_owned(), one_line),
        match context.buffer_size {
            0 => "-".to_owned(),
            bytes => format!("{} KiB", bytes.div_ceil(1024)),
        },
        context.unread.to_string(),
        context.dropped.to_string(),
    ]
}

/// The contexts of a vCPU or core; a VMM of before names the only one.
fn attached(contexts: &[u64], only: Option<u64>) -> String {
    match contexts {
        [] => or_none(only),
        ids => listed(ids.iter().map(u64::to_string).collect()),
    }
}

fn or_none<T: ToString>(value: Option<T>) -> String {
    value.map_or("-".to_owned(), |value| value.to_string())
}

fn listed(words: Vec<String>) -> String {
    if words.is_empty() {
        "-".to_owned()
    } else {
        words.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perfmon_abi::wire::info::{FormatInfo, MachineInfo, ModelInfo, ReservedInfo};

    fn vm(contexts: Vec<ContextInfo>) -> VmListing {
        VmListing {
            socket: "vm1.sock".into(),
            machine: MachineInfo {
                pid: 71,
                guest: "vmlinuz\u{1b}[2J".to_owned(),
                counters: "sim".to_owned(),
                policy: "guest-first".to_owned(),
                vcpus: vec![
                    VcpuInfo {
                        vcpu: 0,
                        state: VcpuState::Running,
                        core: Some(0),
                        context: Some(4),
                        contexts: vec![4, 7],
                        halted: Some(false),
                        reserved: vec![ReservedInfo {
                            counter: "PMC5".to_owned(),
                            layer: "hypervisor".to_owned(),
                        }],
                    },
                    VcpuInfo {
                        vcpu: 1,
                        state: VcpuState::Waiting,
                        core: Some(0),
                        context: None,
                        contexts: Vec::new(),
                        halted: Some(true),
                        reserved: Vec::new(),
                    },
                ],
                cores: vec![CoreInfo {
                    core: 0,
                    tid: 73,
                    vcpu: Some(0),
                    context: Some(5),
                    contexts: Vec::new(),
                    counters: vec![
                        HolderInfo {
                            counter: "pmc0".to_owned(),
                            holder: Holder::Guest(0),
                            event: Some(0x4300c0),
                        },
                        HolderInfo {
                            counter: "pmc1".to_owned(),
                            holder: Holder::Context(4),
                            event: None,
                        },
                    ],
                    free: Some(4),
                }],
                contexts,
            },
            model: ModelInfo {
                model: "amd-core".to_owned(),
                event_family: "amd-core".to_owned(),
                counters: "sim".to_owned(),
                programmable: 6,
                fixed: 0,
                fixed_map: Some(0),
                counter_width: 48,
                tsc_khz: 1,
                virtual_time: false,
                lease_within: None,
                vcpus: 1,
                cores: 1,
                core_cpus: Vec::new(),
                virtual_pmds: Vec::new(),
                countable: Vec::new(),
            },
            formats: vec![FormatInfo {
                uuid: "f2b8".to_owned(),
                name: "default".to_owned(),
                flags: 0,
                arg_size: 0,
                queue_depth: 0,
                description: String::new(),
            }],
        }
    }

    #[test]
    fn a_vm_in_words() {
        let context = ContextInfo {
            id: 4,
            scope: Scope::Vcpu,
            target: Some(0),
            state: ContextState::Loaded,
            started: true,
            flags: 0,
            pid: 99,
            uid: 1000,
            sets: 2,
            active_set: 1,
            format: None,
            buffer_size: 1 << 20,
            unread: 0,
            dropped: 0,
        };
        let text = |vm: &VmListing, apart| {
            let mut out = Vec::new();
            write(vm, apart, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let head = "\
VM 71 (vmlinuz\u{fffd}[2J) at vm1.sock
  PMU amd-core: 6 programmable and 0 fixed counters of 48 bits; counts from sim; guest-first
  Sampling formats: default=f2b8
  VCPU  STATE    CORE  CONTEXT  RESERVED
  0     running  0     4, 7     PMC5: hypervisor
  1     halted   0     -        -
  CORE  THREAD  VCPU  CONTEXT  COUNTERS
  0     73      0     5        pmc0: vCPU 0's guest (0x4300c0), pmc1: context 4, 4 free
";
        let contexts = "  \
  CONTEXT  OF      STATE     PID  UID   SETS  ACTIVE  FORMAT  BUFFER    UNREAD  DROPPED
  4        vCPU 0  counting  99   1000  2     1       -       1024 KiB  0       0
";
        assert_eq!(text(&vm(vec![context]), false), format!("{head}{contexts}"));
        assert_eq!(
            text(&vm(Vec::new()), true),
            format!("\n{head}  no contexts\n")
        );
    }
}
