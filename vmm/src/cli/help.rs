//! The texts of the help pages. Lists of models and backends come from
//! `pmu-virt`, so help cannot fall behind them.

use std::fmt::Write;

use pmu_virt::{PmuModel, backend_names};

/// Adds the long parts to the derived definitions.
pub(super) fn attach(command: clap::Command) -> clap::Command {
    command
        .after_help(OVERVIEW)
        .mut_subcommand("run", |run| run.after_help(run_help()))
        .mut_subcommand("doctor", |doctor| doctor.after_help(DOCTOR))
        .mut_subcommand("demo", |demo| demo.after_help(DEMO))
        .mut_subcommand("bench", |bench| {
            bench.mut_subcommand("traps", |traps| traps.after_help(BENCH_TRAPS))
        })
}

/// The first paragraph of a message of clap, and its tips, on one line.
pub(super) fn one_line_of(message: &str) -> String {
    let mut parts = Vec::new();
    for (i, paragraph) in message.split("\n\n").enumerate() {
        let text = crate::config::one_line(paragraph);
        if i == 0 || text.starts_with("tip:") {
            parts.push(text.trim_start_matches("error: ").to_owned());
        }
    }
    parts.join("; ")
}

const OVERVIEW: &str = "\
Examples:
  umpire demo                                  see a virtual PMU at work, no files needed
  umpire doctor                                what can this host do, and what not, and why
  umpire run --kernel vmlinuz --initrd initrd.img --cmdline \"console=ttyS0\"

Exit status: 0 done; 2 bad input, or a host that cannot do it; 4 the host failed;
6 the guest failed (triple fault, instruction that KVM cannot emulate); 124 timeout;
130 interrupted; odd: the guest wrote V to port 0xf4, and the status is V * 2 + 1
(low 8 bits).";

const DOCTOR: &str = "\
Runs small probe guests to find what this KVM really does: is guest kernel code slow,
do single step and hardware breakpoints work and at which ring, does RDPMC fault.
Exit status: 0 when a guest with a virtual PMU can run here, else 2.";

const DEMO: &str = "\
Every row of the table is a real exit of a real guest. Without a usable /dev/kvm no
counts are shown.";

const BENCH_TRAPS: &str = "\
Compares, within one run, a trapped RDMSR and WRMSR of a PMU register with an MSR exit
that does nothing, and a trapped RDPMC with a breakpoint exit that only returns.
Times are in nanoseconds.";

fn run_help() -> String {
    let mut text = String::from("PMU models (--pmu):\n");
    let mut line = |name: &str, summary: &str| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {name:<14} {summary}");
    };
    for model in PmuModel::names() {
        line(model.name, model.summary);
    }
    line("auto", "the best model for the guest CPU's vendor");
    line(
        "none",
        "no PMU at all: CPUID and the MSRs of both vendors show none",
    );
    text.push_str(PROPERTIES);
    text.push_str("\nCounter backends (--counters):\n");
    for backend in backend_names() {
        let _ = writeln!(text, "  {:<14} {}", backend.name, backend.summary);
    }
    text.push_str(RUN_NOTES);
    text
}

const PROPERTIES: &str = "
  Properties follow the model, as in qemu's -cpu:
    counters=N           programmable counters
    fixed=N              fixed counters
    width=BITS           width of the programmable counters
    fixed-width=BITS     width of the fixed counters
    full-width=on|off    full-width counter writes
  A property that a model does not have is refused with what it allows.
";

const RUN_NOTES: &str = "
An event that the backend cannot count is announced as unavailable, never counted as 0.

Examples:
  umpire run --kernel vmlinuz --initrd initrd.img --cmdline \"console=ttyS0\" --memory 1024
  umpire run --kernel vmlinuz --cpu-vendor intel --pmu intel-v2,counters=8,width=40
  umpire run --kernel vmlinuz --cpus 4 --pmu none
  umpire run --kernel vmlinuz --cpus 16 --cores 2 --pin 0-1
  umpire run --kernel test.elf --module data.bin,first,words --counters step --timeout 10
  umpire run --config guest.toml --cpus 2

The configuration file holds the same options under the same names; its paths start at
its own folder, and repeatable options are lists:
  kernel = \"vmlinuz\"
  cpus = 2
  pmu = \"amd-core\"
  hide-feature = [\"cx16\", \"xsave\"]

The guest's serial port COM1 is this terminal. Ctrl-C stops the guest.";
