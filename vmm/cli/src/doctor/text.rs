//! The report as text: sections of marked lines, the verdict last.

use std::fmt;
use std::io::{self, Write};

use pmu_virt::PmuModel;
use umpire_tools::table;
use vmm::doctor::{Diagnosis, Kvm};
use vmm::host::{CounterHolder, HardwarePmu, HostFacts, KvmAccess};
use vmm::kvm::KvmFeatures;
use vmm::probe::{GuestStep, HandlerOut, ProbeReport, RdpmcBehaviour};

/// What a line means to the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    /// As wanted.
    Ok,
    /// Missing or broken, and needed for what the line is about.
    No,
    /// Good to know.
    Note,
}

impl fmt::Display for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Ok => "ok",
            Self::No => "no",
            Self::Note => "note",
        })
    }
}

struct Finding {
    mark: Mark,
    what: String,
    finding: String,
}

fn line(mark: Mark, what: impl Into<String>, finding: impl Into<String>) -> Finding {
    Finding {
        mark,
        what: what.into(),
        finding: finding.into(),
    }
}

/// `Ok` or the mark for its absence.
fn mark(good: bool, otherwise: Mark) -> Mark {
    if good { Mark::Ok } else { otherwise }
}

/// What is there on every host.
const EMU: &str = "umpire run --engine emu needs no KVM: a processor in software counts \
                   instructions, branches, loads,\nstores and more exactly, and no cycles but \
                   simulated ones.";

/// Writes the report.
pub(super) fn write(diagnosis: &Diagnosis, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "umpire {} doctor", diagnosis.umpire)?;
    section(out, "Host", &host(&diagnosis.host))?;
    if let Some(kvm) = &diagnosis.kvm {
        section(out, "KVM's capabilities", &capabilities(&kvm.features))?;
        if let Some(probe) = &kvm.probe {
            section(out, "What KVM really does, by probe guests", &probed(probe))?;
        }
        section(out, "PMU models (--pmu)", &models(kvm))?;
    } else {
        section(out, "PMU models (--pmu), with --engine emu", &emu_models())?;
    }
    section(out, "Counter backends (--counters)", &backends(diagnosis))?;
    writeln!(out)?;
    match &diagnosis.verdict.reason {
        None => writeln!(
            out,
            "A guest with a virtual PMU can run here. Next: umpire demo\n\
             {EMU}\n\
             Of a guest that runs with --control SOCKET, umpire stat and umpire record on this \
             host count with the same backends."
        ),
        Some(reason) => writeln!(
            out,
            "No guest with a virtual PMU can run on KVM here: {reason}.\n\
             {EMU}\n\
             Next: umpire demo. A machine with a KVM of its own: \
             cargo l1 -- target/release/umpire demo"
        ),
    }
}

fn section(out: &mut dyn Write, title: &str, lines: &[Finding]) -> io::Result<()> {
    writeln!(out, "\n{title}")?;
    let row = |line: &Finding| {
        // Marks are as wide in every section.
        let mark = format!("{:<4}", line.mark.to_string());
        vec![mark, line.what.clone(), line.finding.clone()]
    };
    table::lines(lines.iter().map(row).collect(), |_, _| false)
        .try_for_each(|line| writeln!(out, "  {line}"))
}

fn host(host: &HostFacts) -> Vec<Finding> {
    let mut lines = vec![
        line(
            Mark::Note,
            "processor",
            host.cpu.model_name.as_deref().unwrap_or("unknown"),
        ),
        match &host.kvm {
            KvmAccess::Usable => line(Mark::Ok, "/dev/kvm", "can be opened"),
            KvmAccess::Unusable { reason } => line(Mark::No, "/dev/kvm", reason),
        },
    ];
    for module in &host.kvm_modules {
        let parameters: Vec<String> = module
            .parameters
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        let finding = if parameters.is_empty() {
            "no parameter that matters here".to_owned()
        } else {
            parameters.join(" ")
        };
        lines.push(line(Mark::Note, format!("module {}", module.name), finding));
    }
    lines.push(hardware_pmu(&host.pmu));
    lines.push(match host.perf_event_paranoid {
        Some(level) => line(Mark::Note, "perf_event_paranoid", level.to_string()),
        None => line(
            Mark::Note,
            "perf_event_paranoid",
            "not there: no perf, or no /proc",
        ),
    });
    lines.push(match host.nmi_watchdog {
        Some(true) => line(Mark::Note, "NMI watchdog", "on"),
        Some(false) => line(Mark::Ok, "NMI watchdog", "off"),
        None => line(Mark::Ok, "NMI watchdog", "this kernel has none"),
    });
    lines.extend(holders(host));
    lines
}

fn hardware_pmu(pmu: &HardwarePmu) -> Finding {
    let what = "hardware PMU";
    match pmu {
        HardwarePmu::Usable => line(Mark::Ok, what, "counts cycles for this user"),
        HardwarePmu::Refused { reason } => line(Mark::Note, what, format!("refused: {reason}")),
        HardwarePmu::Absent { reason } => line(Mark::Note, what, format!("none: {reason}")),
        HardwarePmu::Unknown { reason } => line(Mark::Note, what, format!("unknown: {reason}")),
    }
}

fn holders(host: &HostFacts) -> Vec<Finding> {
    let what = "counters held by";
    let mut lines: Vec<Finding> = host
        .counter_holders
        .seen
        .iter()
        .map(|holder| match holder {
            CounterHolder::NmiWatchdog => line(
                Mark::Note,
                what,
                "the NMI watchdog: one on every CPU (sysctl kernel.nmi_watchdog=0 frees it)",
            ),
            CounterHolder::Process { pid, name, events } => line(
                Mark::Note,
                what,
                format!("{name} (process {pid}): {events} perf events open"),
            ),
        })
        .collect();
    let hidden = host.counter_holders.unreadable_processes;
    if hidden > 0 {
        lines.push(line(
            Mark::Note,
            what,
            format!("unknown: {hidden} processes cannot be looked into; root can"),
        ));
    } else if lines.is_empty() {
        lines.push(line(Mark::Ok, what, "nobody"));
    }
    lines
}

/// What a capability is for, and whether the host has it.
type Capability = (bool, &'static str, &'static str);

/// Those that Umpire cannot do without.
fn needed(features: &KvmFeatures) -> [Capability; 7] {
    [
        (features.irqchip, "KVM_CAP_IRQCHIP", "in-kernel irqchip"),
        (
            features.user_space_msr,
            "KVM_CAP_X86_USER_SPACE_MSR",
            "MSR exits",
        ),
        (
            features.msr_filter,
            "KVM_CAP_X86_MSR_FILTER",
            "which MSRs exit",
        ),
        (
            features.guest_debug,
            "KVM_CAP_SET_GUEST_DEBUG",
            "breakpoints and steps",
        ),
        (
            features.immediate_exit,
            "KVM_CAP_IMMEDIATE_EXIT",
            "kicks are never lost",
        ),
        (
            features.signal_msi,
            "KVM_CAP_SIGNAL_MSI",
            "PMIs with a vector",
        ),
        (features.user_nmi, "KVM_CAP_USER_NMI", "PMIs as NMI"),
    ]
}

/// Those without which something is worse.
fn useful(features: &KvmFeatures) -> [Capability; 4] {
    [
        (features.pit2, "KVM_CAP_PIT2", "timer of legacy guests"),
        (
            features.guest_debug_blockirq,
            "KVM_GUESTDBG_BLOCKIRQ",
            "holds interrupts back in a step",
        ),
        (
            features.binary_stats,
            "KVM_CAP_BINARY_STATS_FD",
            "polling of a halted vCPU is told apart",
        ),
        (
            features.get_tsc_khz,
            "KVM_CAP_GET_TSC_KHZ",
            "the guest's TSC frequency",
        ),
    ]
}

fn capabilities(features: &KvmFeatures) -> Vec<Finding> {
    let one = |otherwise: Mark| {
        move |(has, name, use_): Capability| {
            let finding = if has {
                use_.to_owned()
            } else {
                format!("missing: {use_}")
            };
            line(mark(has, otherwise), name, finding)
        }
    };
    let mut lines: Vec<Finding> = needed(features).map(one(Mark::No)).into();
    lines.extend(useful(features).map(one(Mark::Note)));
    lines.push(line(
        Mark::Note,
        "KVM's own vPMU",
        if features.pmu_capability {
            "there is one; it is switched off in Umpire's guests"
        } else {
            "none"
        },
    ));
    lines.push(line(
        Mark::Note,
        "vCPUs in one guest",
        format!("at most {}", features.max_vcpus),
    ));
    lines
}

/// How fast the guest's kernel code runs.
fn speed(probe: &ProbeReport) -> Finding {
    let ns = |ps: u64| format!("{}.{:02} ns", ps / 1000, ps % 1000 / 10);
    let speed = format!(
        "{} an instruction at CPL 0, {} at CPL 3",
        ns(probe.cpl0_ps_per_instruction),
        ns(probe.cpl3_ps_per_instruction)
    );
    let (mark, how) = if probe.slow_cpl0() {
        (Mark::Note, "in KVM's instruction emulator")
    } else {
        (Mark::Ok, "natively")
    };
    line(mark, "guest kernel code", format!("runs {how}: {speed}"))
}

fn rdpmc(behaviour: RdpmcBehaviour) -> Finding {
    let (mark, what) = match behaviour {
        RdpmcBehaviour::Faults => (Mark::Ok, "raises #GP, so it is emulated"),
        RdpmcBehaviour::SilentZero => (Mark::No, "silently returns 0"),
        RdpmcBehaviour::Answered => (Mark::No, "is answered by KVM, not by Umpire"),
        RdpmcBehaviour::Unknown => (Mark::No, "ended in an unknown way"),
    };
    line(mark, "RDPMC", what)
}

fn probed(probe: &ProbeReport) -> Vec<Finding> {
    let works = |good: bool| if good { "works" } else { "does not work" };
    let rings = |zero: bool, three: bool| match (zero, three) {
        (true, true) => "works at CPL 0 and CPL 3".to_owned(),
        (zero, three) => format!("{} at CPL 0, {} at CPL 3", works(zero), works(three)),
    };
    vec![
        speed(probe),
        rdpmc(probe.rdpmc),
        handler_patch(probe),
        line(
            mark(probe.breakpoint_cpl0, Mark::No),
            "hardware breakpoints",
            rings(probe.breakpoint_cpl0, probe.breakpoint_cpl3),
        ),
        line(
            mark(probe.step_cpl0 && probe.step_cpl3, Mark::Note),
            "single step",
            rings(probe.step_cpl0, probe.step_cpl3),
        ),
        line(
            mark(probe.rf_honoured, Mark::Note),
            "RF by KVM_SET_REGS",
            if probe.rf_honoured {
                "steps over a breakpoint"
            } else {
                "is ignored: the breakpoint is lifted for one step instead"
            },
        ),
        guest_steps(probe),
        line(
            mark(probe.dr_access_trap, Mark::Note),
            "debug register trap",
            if probe.dr_access_trap {
                "the guest's accesses are reported"
            } else {
                "none: the guest's debug registers are looked at every millisecond"
            },
        ),
        line(
            mark(probe.block_irq, Mark::Note),
            "interrupts in a step",
            if probe.block_irq {
                "can be held back"
            } else {
                "cannot be held back"
            },
        ),
        line(
            Mark::Note,
            "SMM",
            if probe.smm {
                "works: its code counts as firmware to counter reservations"
            } else {
                "none: only the firmware's phase counts as firmware"
            },
        ),
    ]
}

fn handler_patch(probe: &ProbeReport) -> Finding {
    let what = "patched #GP handler";
    match (probe.patch_obstacle(), probe.handler_out) {
        (Some(obstacle), _) => line(
            Mark::Note,
            what,
            format!("{obstacle}: RDPMC is trapped by a breakpoint"),
        ),
        (None, HandlerOut::Behind) => line(Mark::Ok, what, "works, with RIP behind the OUT"),
        (None, _) => line(Mark::Ok, what, "works, with RIP at the OUT"),
    }
}

fn guest_steps(probe: &ProbeReport) -> Finding {
    let what = "the guest's own steps";
    match (probe.guest_step, probe.guest_step_beside_ours) {
        (GuestStep::Lost, _) => line(Mark::Note, what, "are lost on this KVM (TF at CPL 3)"),
        (_, GuestStep::Lost) => line(
            Mark::Note,
            what,
            "are lost beside a breakpoint of Umpire's (TF at CPL 3)",
        ),
        (_, GuestStep::ToUs) => line(Mark::Ok, what, "arrive, and are handed back to it"),
        (_, GuestStep::ToGuest) => line(Mark::Ok, what, "arrive in its own handler"),
    }
}

fn models(kvm: &Kvm) -> Vec<Finding> {
    kvm.models
        .iter()
        .map(|model| {
            let finding = match (&model.reason, model.host_vendor) {
                (Some(reason), _) => format!("KVM refuses its CPUID: {reason}"),
                (None, true) => model.summary.to_owned(),
                (None, false) => format!("{}; with --cpu-vendor {}", model.summary, model.vendor),
            };
            line(mark(model.accepted, Mark::No), model.name, finding)
        })
        .collect()
}

/// Every processor in software can have any model.
fn emu_models() -> Vec<Finding> {
    PmuModel::names()
        .iter()
        .map(|model| line(Mark::Ok, model.name, model.summary))
        .collect()
}

/// What `auto` is here, and in general.
fn auto(diagnosis: &Diagnosis, summary: &str) -> String {
    match diagnosis.auto_counters.as_slice() {
        [] => summary.to_owned(),
        names => format!("{} on this host: {summary}", names.join(",")),
    }
}

fn backends(diagnosis: &Diagnosis) -> Vec<Finding> {
    let mut lines: Vec<Finding> = pmu_virt::backend_names()
        .iter()
        .filter(|backend| backend.name == "auto")
        .map(|backend| line(Mark::Note, backend.name, auto(diagnosis, backend.summary)))
        .collect();
    for backend in &diagnosis.backends {
        let finding = match &backend.reason {
            None => backend.summary.to_owned(),
            // The last lines have it whole.
            Some(reason) if Some(reason) == diagnosis.verdict.reason.as_ref() => {
                "cannot be used: it needs KVM".to_owned()
            }
            Some(reason) => format!("cannot be used: {reason}"),
        };
        lines.push(line(mark(backend.usable, Mark::No), backend.name, finding));
        for limit in &backend.limits {
            lines.push(line(Mark::Note, backend.name, limit.clone()));
        }
    }
    lines
}
