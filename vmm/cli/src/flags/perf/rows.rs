//! The table: a row is an option of perf, and what it is here.
//!
//! A text stands behind "umpire: COMMAND has no option '-x': " and says in one sentence what to
//! do instead, or why there is nothing to do.

use super::Here::{Alias, No, Otherwise};
use super::Row;

/// perf's commands that are here, and their tables.
pub(super) static COMMANDS: [(&str, &[&[Row]]); 7] = [
    ("stat", &[STAT]),
    ("record", &[RECORD, SAMPLING]),
    ("report", &[REPORT, READING]),
    ("script", &[SCRIPT, READING]),
    ("annotate", &[ANNOTATE, READING]),
    ("diff", &[DIFF, READING]),
    ("top", &[TOP, SAMPLING, READING]),
];

/// perf's commands that are not here. A text stands behind "umpire: there is no command 'X': ".
pub(super) static ELSEWHERE: &[(&str, &str)] = &[
    (
        "archive, buildid-cache, buildid-list",
        "no cache of files is kept: umpire report --symfs DIR finds those of the guest by build id",
    ),
    (
        "c2c, ftrace, inject, kmem, kwork, lock, mem, probe, sched, timechart, trace",
        "run perf in the guest, to which umpire run gives a PMU of its own",
    ),
    (
        "check, test, version",
        "umpire --version says the version, and umpire doctor what works on this host",
    ),
    (
        "config",
        "there are no settings for all commands; umpire run --config FILE has those of a VM",
    ),
    (
        "daemon",
        "umpire record --for 60s -o FILE, in a loop or a unit of systemd",
    ),
    (
        "data",
        "umpire report --perf-data FILE writes a file that perf data converts",
    ),
    (
        "evlist",
        "umpire report -j says which events a profile has, and how they were sampled",
    ),
    ("help", "umpire COMMAND --help explains a command"),
    (
        "iostat",
        "the host's I/O units are not the guest's; umpire stat -e vm-exits counts how often it left",
    ),
    (
        "kallsyms",
        "umpire record finds the names of the guest's kernel by itself",
    ),
    (
        "kvm",
        "guests are what all of umpire looks at: umpire stat, umpire record, umpire top",
    ),
    ("list", "umpire events lists what can be counted"),
];

/// perf's commands below `perf stat`. A text stands behind "umpire: stat has no command 'X': ".
pub(super) static BELOW_STAT: &[(&str, &str)] = &[
    (
        "record",
        "umpire record takes samples, and umpire stat -o FILE writes counts to a file",
    ),
    (
        "report",
        "umpire report shows a profile of umpire record, and umpire stat -o FILE writes text",
    ),
];

const GROUPS: &str = "braces make a group: -e '{cycles,instructions}'";
const INHERIT: &str = "a vCPU is looked at whatever runs on it, so nothing is inherited";
const CGROUPS: &str = "control groups are the guest's own, and not known here; --vm chooses the VM";
const TRACEPOINTS: &str = "-e takes no tracepoints, so there is nothing to filter";
const NO_BPF: &str = "nothing here runs or records BPF programs";
const NO_BRANCHES: &str = "samples have no records of branches (LBR); record -g has their callers";
const NO_TRACES: &str = "hardware traces (AUX, Intel PT) of a guest are not recorded";
const NO_DATA: &str =
    "samples have no addresses of data; in the guest perf record -d has them with PEBS";
const NO_SOURCE: &str = "lines of source are not looked up; umpire annotate shows the instructions";
const NO_HELPER: &str =
    "no other program is called: files are read and code is written by umpire itself";
const NO_MARKS: &str = "a profile has no events that could begin or end a part of it";
const BUILD_IDS: &str =
    "the profile has the build ids of the guest's files where they are known, and no cache is kept";
const ONE_THREAD: &str = "one thread fetches all samples, and the guest never waits for it";
const MODIFIERS: &str =
    "an event says it itself: -e cycles:u counts in programs, -e cycles:k in the kernel";
const TEXT: &str = "the output is plain text without colours always; umpire top is the live view";
const SILENT: &str = "2>/dev/null keeps warnings from the screen";
const TALKATIVE: &str = "what is not as asked is said on standard error without it";
const HEADER: &str =
    "the lines with # at the beginning of umpire report say what the profile is of";

/// `umpire stat`.
static STAT: &[Row] = &[
    (
        "-a",
        Otherwise("all cores that run vCPUs of the VM; the host's other work is not counted"),
    ),
    ("--all-cpus", Alias("--all-cores")),
    (
        "--affinity",
        No("the VM's own threads count; there is none to move between CPUs"),
    ),
    ("-G, --cgroup, --for-each-cgroup", No(CGROUPS)),
    (
        "--control",
        Otherwise("the VM's control socket; to count a part of a run, give --for, or a command"),
    ),
    (
        "--cputype, --pmu-filter",
        No("a vCPU has one PMU; umpire run --pmu chooses its model"),
    ),
    (
        "-d, --detailed",
        Otherwise(
            "references and misses of the cache besides; given twice or more it adds no more",
        ),
    ),
    ("--filter", No(TRACEPOINTS)),
    ("-g, --group", No(GROUPS)),
    (
        "-j, --json-output",
        Otherwise("as in perf, but refused together with -x, where perf writes half of each form"),
    ),
    (
        "--hide-zero-events",
        No("a 0 here is a count that was taken; what nobody counted says so"),
    ),
    (
        "--hybrid-merge, --no-merge",
        No("a vCPU has one PMU, so no event is there twice and nothing is merged"),
    ),
    ("-i, --no-inherit", No(INHERIT)),
    (
        "--interval-clear",
        No("umpire top draws the same screen anew"),
    ),
    (
        "--iostat",
        No("the host's I/O units are not the guest's; -e vm-exits counts how often it left"),
    ),
    (
        "--metric-no-group, --metric-no-merge",
        No("events of -M that belong together are a group; write your own with -e"),
    ),
    (
        "--metric-no-threshold",
        No("a metric of -M has no threshold that could colour it"),
    ),
    (
        "--no-scale",
        No("a count is scaled, and says so, only where events took turns: name fewer with -e"),
    ),
    (
        "--per-core",
        Otherwise("a row for each vCPU, or with -a for each core, as -A"),
    ),
    (
        "--per-cache, --per-cluster, --per-die, --per-node, --per-socket",
        No("-A prints a row for each vCPU, with -a for each core; nothing larger is summed up"),
    ),
    (
        "--per-thread",
        No("threads are the guest's: umpire record, then umpire report --sort comm,tid"),
    ),
    (
        "--percore-show-thread",
        No("events have no qualifier percore here; -a -A prints a row for each core"),
    ),
    (
        "-p, --pid, -t, --tid",
        No("--vm chooses the VM, --vcpu its vCPUs; a process of the guest: umpire record -p"),
    ),
    (
        "--post, --pre",
        No("put it beside the command: umpire stat -- sh -c 'BEFORE; COMMAND; AFTER'"),
    ),
    (
        "--record-tpebs, --tpebs-mode",
        No("no metric here needs latencies that would have to be sampled"),
    ),
    (
        "--scale",
        Otherwise("how counts are scaled: --scale phases, or linear as perf does"),
    ),
    (
        "--smi-cost",
        No("system management interrupts are the host's: perf stat --smi-cost on the host"),
    ),
    (
        "-S, --sync",
        No("let the command do it: umpire stat -- sh -c 'sync; COMMAND'"),
    ),
    (
        "--table",
        No("-r prints means and their standard errors; a run for itself: --for 1s, repeated"),
    ),
    (
        "--td-level, --topdown",
        No("no top-down metric is known here; -M names those that are"),
    ),
    (
        "-T, --transaction",
        No("no event of hardware transactions is counted for a guest"),
    ),
];

/// `umpire record` and `umpire top`.
static SAMPLING: &[Row] = &[
    (
        "-a",
        Otherwise("all cores that run vCPUs of the VM; the host's other work is not sampled"),
    ),
    ("--all-cgroups, -G, --cgroup", No(CGROUPS)),
    (
        "-b, --branch-any, --branch-filter, --branch-history",
        No(NO_BRANCHES),
    ),
    ("-j", No(NO_BRANCHES)),
    ("--filter", No(TRACEPOINTS)),
    ("--group", No(GROUPS)),
    (
        "--namespaces",
        No("a file of a container is told from the root's by its device, always"),
    ),
    ("--no-bpf-event", No(NO_BPF)),
    ("-i, --no-inherit", No(INHERIT)),
    (
        "--num-thread-synthesize",
        No("tasks are looked up in the guest at each sample, not before"),
    ),
    (
        "--overwrite",
        No("samples that find no room are lost and counted; record --buffer makes room"),
    ),
    (
        "--proc-map-timeout",
        No("mappings are looked up in the guest at each sample, and nothing waits for them"),
    ),
    (
        "-r, --realtime",
        No("samples are taken by the VM itself, whenever this program fetches them"),
    ),
    (
        "-u, --uid",
        No("users are the guest's own, and not known here; umpire report --sort comm,pid"),
    ),
];

/// `umpire record`.
static RECORD: &[Row] = &[
    ("--affinity, --aio", No(ONE_THREAD)),
    ("--all-cpus", Alias("--all-cores")),
    ("--all-kernel, --all-user", No(MODIFIERS)),
    ("--aux-sample, -S, --snapshot", No(NO_TRACES)),
    (
        "--buildid-all, --buildid-mmap, -B, --no-buildid, -N, --no-buildid-cache",
        No(BUILD_IDS),
    ),
    ("--clang-opt, --clang-path", No(NO_BPF)),
    (
        "-k, --clockid",
        No("times are nanoseconds since the beginning; the header has its date and TSC"),
    ),
    (
        "--code-page-size, -d, --data, --data-page-size, --phys-data, --sample-mem-info, -W, --weight",
        No(NO_DATA),
    ),
    (
        "--control",
        Otherwise("the VM's control socket; to sample a part of a run, give --for, or a command"),
    ),
    (
        "--data-mmap",
        No("only mappings with samples in them are described, and samples are in code"),
    ),
    (
        "--debuginfod",
        No("files of the guest are looked for below umpire report --symfs DIR alone"),
    ),
    (
        "--dry-run",
        No("umpire events NAME says whether an event is known, and how it is counted"),
    ),
    (
        "--exclude-perf",
        No("only the guest is sampled, so no sample is of this program"),
    ),
    (
        "-I, --intr-regs, --user-regs",
        No("samples have the instruction pointer and CR3, and no other register"),
    ),
    (
        "--kcore",
        No("code of the guest's kernel comes from its file: umpire annotate --vmlinux FILE"),
    ),
    (
        "--kernel-callchains, --user-callchains",
        No("-g records the callers of both, the kernel's and the program's"),
    ),
    (
        "--latency",
        No("only what runs is sampled; waiting has no samples"),
    ),
    (
        "-m, --mmap-pages",
        No("--buffer KIB is the memory for samples that were not fetched yet"),
    ),
    (
        "--mmap-flush, --no-buffering",
        No("samples are fetched while the guest runs on; --buffer says how many can wait"),
    ),
    (
        "-n, --no-samples, -s, --stat",
        No("umpire stat counts without samples"),
    ),
    (
        "--off-cpu, --off-cpu-thresh",
        No("only what runs is sampled; a halted vCPU counts nothing"),
    ),
    (
        "-P, --period, --sample-cpu, --sample-identifier, -T, --timestamp",
        No("every sample has its time, period, event, vCPU and core without it"),
    ),
    (
        "--per-thread, --threads",
        No("each vCPU has a buffer of its own, and one thread fetches them"),
    ),
    (
        "-R, --raw-samples",
        No("only tracepoints have raw data, and -e takes none"),
    ),
    (
        "--running-time",
        No("the profile says for how long it had no counter, without it"),
    ),
    (
        "--setup-filter",
        No("there is no filter by BPF that could be set up; umpire report chooses samples"),
    ),
    (
        "--strict-freq",
        No("a rate that the VM cannot keep is throttled, and umpire report says how often"),
    ),
    (
        "--switch-events",
        No("switches of tasks are not recorded; each sample has its process and thread"),
    ),
    (
        "--switch-output-event, --timestamp-filename",
        No("record a part after the other: umpire record --for 60s -o FILE, in a loop"),
    ),
    (
        "--synth, --tail-synthesize",
        No("processes and files are described when a sample is in them, in the same file"),
    ),
    (
        "--timestamp-boundary",
        No("a profile has its beginning and its duration without it"),
    ),
    (
        "--transaction",
        No("samples say nothing of hardware transactions"),
    ),
    (
        "--vmlinux",
        No("names of the kernel are taken when the profile is read: umpire report --vmlinux FILE"),
    ),
    (
        "-z, --compression-level",
        No("a sample is some 70 bytes; umpire record -o - | zstd writes a compressed file"),
    ),
];

/// The commands that read a profile, and `umpire top`.
static READING: &[Row] = &[
    (
        "--addr2line, --addr2line-style, --objdump, --unwind-style, --xed",
        No(NO_HELPER),
    ),
    (
        "--asm-raw",
        No("umpire annotate shows instructions without their bytes"),
    ),
    (
        "--full-source-path, --inline, --prefix, --prefix-strip, --source",
        No(NO_SOURCE),
    ),
    (
        "-b, --branch-stack, --branch-history, --stitch-lbr, --total-cycles",
        No(NO_BRANCHES),
    ),
    (
        "--comms",
        No("umpire report --sort comm has a row for each command name"),
    ),
    (
        "--dsos",
        No("umpire report --sort dso has a row for each program and library"),
    ),
    (
        "--demangle, --demangle-kernel",
        No(
            "names of C++ and Rust are shown as their sources have them; --no-demangle shows the file's",
        ),
    ),
    (
        "-D, --dump-raw-trace",
        No("umpire script -j prints each record of the profile as JSON"),
    ),
    (
        "-f, --force",
        No("whose file a profile is does not matter here: who may read it may report it"),
    ),
    (
        "--group, --group-sort-idx",
        No("each event has a table of its own; --event chooses one"),
    ),
    ("--header, --header-only, -I, --show-info", No(HEADER)),
    (
        "--ignore-vmlinux",
        No("no vmlinux is looked for, only the one that --vmlinux names is used"),
    ),
    ("--itrace", No(NO_TRACES)),
    (
        "-k",
        No("--vmlinux FILE names the file of the guest's kernel"),
    ),
    (
        "--max-stack",
        No("a part of a chain has at most 127 frames, and all of them are read"),
    ),
    (
        "-m, --modules",
        No("the profile brings the names of the guest's modules with those of its kernel"),
    ),
    ("--ns", No("umpire script -j has times in nanoseconds")),
    (
        "--percent-type",
        No("percentages are parts of the events, by the periods of their samples"),
    ),
    ("-q, --quiet", No(SILENT)),
    (
        "--raw-trace",
        No("only tracepoints have raw data, and a guest's are not recorded"),
    ),
    (
        "--show-on-off-events, --switch-off, --switch-on",
        No(NO_MARKS),
    ),
    (
        "-n, --show-nr-samples, --show-total-period",
        No("umpire report -j has the number of samples and the events of each row"),
    ),
    (
        "--skip-empty",
        No("an event without samples says so in one line"),
    ),
    ("--stdio, --stdio2, --stdio-color, --tui", No(TEXT)),
    (
        "-S",
        No("umpire annotate SYMBOL looks at one symbol; --symbols names a file here"),
    ),
    (
        "--symbols",
        Otherwise("a file with the names of the guest's kernel, and no list of symbols"),
    ),
    (
        "--time",
        No("umpire script -j has each sample's time, for jq or any other filter"),
    ),
    ("-v, --verbose", No(TALKATIVE)),
    (
        "-w, --column-widths",
        No("columns are as wide as their longest entry"),
    ),
];

/// `umpire report`.
static REPORT: &[Row] = &[
    (
        "--disable-order",
        No("samples are in the order of their times already"),
    ),
    (
        "-M, --disassembler-style",
        No("umpire annotate -M intel shows instructions"),
    ),
    (
        "-x, --exclude-other, -p, --parent",
        No("rows are not grouped by a caller; umpire report -g shows who called"),
    ),
    (
        "-U, --hide-unresolved",
        No("what has no name is shown as [unknown], so that percentages add up"),
    ),
    (
        "-H",
        No("--sort comm,dso,symbol shows the same rows without indentation"),
    ),
    (
        "--ignore-callees",
        No("trees of callers are shown whole; --folded is for tools that cut them"),
    ),
    (
        "--latency, --parallelism",
        No("only what runs is sampled; waiting has no samples"),
    ),
    ("--mem-mode", No(NO_DATA)),
    (
        "--mmaps, --tasks",
        No("--sort comm,pid,tid,dso has a row for each thread and file with samples"),
    ),
    (
        "--pretty, -T, --threads",
        No("--sort comm,pid,tid has a row for each thread"),
    ),
    (
        "--samples",
        No("there is no browser; umpire script prints the samples"),
    ),
    (
        "--show-cpu-utilization, --showcpuutilization",
        No("--sort ring,comm,symbol parts the kernel's samples from the programs'"),
    ),
    (
        "--show-ref-call-graph",
        No("each event has callers of its own where umpire record -g took them"),
    ),
    (
        "--socket-filter",
        No("--core LIST chooses samples by the host's threads that ran vCPUs"),
    ),
    ("--stats", No(HEADER)),
    (
        "--time-quantum",
        No("--sort has no key for times; umpire script -j has each sample's"),
    ),
];

/// `umpire script`.
static SCRIPT: &[Row] = &[
    (
        "-d",
        Otherwise("only samples in these programs and libraries, as --dsos"),
    ),
    (
        "-a, --all-cpus",
        No("a profile is read, and nothing recorded: umpire record -a, then umpire script"),
    ),
    (
        "--addr-range, --graph-function, --stop-bt",
        No("each sample has a line, and its chain is whole; -j is for jq"),
    ),
    (
        "--call-ret-trace, --call-trace, --insn-trace, --max-blocks",
        No(NO_TRACES),
    ),
    (
        "--debug-mode",
        No("what was lost has lines of its own between the samples"),
    ),
    (
        "--deltatime, --reltime",
        No("times are seconds since the beginning of the recording already"),
    ),
    (
        "--dlarg, --dlfilter, -g, --gen-script, -l, --list, --list-dlfilters, -s, --script",
        No("no scripts run inside of umpire; umpire script -j feeds any program"),
    ),
    (
        "--dump-unsorted-raw-trace",
        No("samples come in the order of the file, and -j prints each record"),
    ),
    (
        "--guest-code, --guestkallsyms, --guestmodules, --guestmount, --guestvmlinux",
        No("every profile is a guest's: --symbols FILE names its kernel, --symfs DIR its root"),
    ),
    (
        "-L, --Latency",
        No("only tracepoints have latencies of interrupts, and a guest's are not recorded"),
    ),
    (
        "--merge-callchains",
        No("a chain is whole where it is taken, with the kernel's part and the program's"),
    ),
    (
        "--per-event-dump",
        No("--event EVENT prints one event; redirect it into a file"),
    ),
    (
        "--show-bpf-events, --show-cgroup-events, --show-mmap-events, --show-namespace-events, \
         --show-round-events, --show-switch-events, --show-task-events, --show-text-poke-events",
        No("a profile has samples and losses; processes and files stand in each sample"),
    ),
    (
        "--show-kernel-path",
        No("-F dso prints whose a symbol is: [kernel.kallsyms] or a module"),
    ),
    (
        "--show-lost-events",
        No("losses have lines of their own between the samples, always"),
    ),
];

/// `umpire annotate`.
static ANNOTATE: &[Row] = &[
    (
        "--code-with-type, --data-type, --insn-stat, --type-stat",
        No("types of data are not looked up; instructions are shown as they are"),
    ),
    ("-P, --full-paths", No("names of files are whole always")),
    ("-l, --print-line", No(NO_SOURCE)),
    (
        "--skip-missing",
        No("without SYMBOL those whose code is not there are left out, and said to be"),
    ),
    (
        "-s",
        No("the symbol is a word of its own: umpire annotate SYMBOL"),
    ),
];

/// `umpire diff`.
static DIFF: &[Row] = &[
    (
        "-C",
        Otherwise("only samples of these vCPUs; --comms chooses by the command's name"),
    ),
    (
        "-b, --baseline-only",
        No("a row that is new has no baseline, and says so"),
    ),
    (
        "--compute, -F, --formula, -o, --order",
        No("the difference is in percentage points, the greatest first"),
    ),
    ("--cycles-hist, --stream", No(NO_BRANCHES)),
    (
        "-t, --field-separator",
        No("umpire report -j prints JSON of one profile, in which every field has its name"),
    ),
    (
        "-p, --period",
        No("umpire report -j has the events of each row, of one profile"),
    ),
];

/// `umpire top`.
static TOP: &[Row] = &[
    (
        "-a, --all-cpus",
        No("all vCPUs of all VMs are shown without it"),
    ),
    (
        "--call-graph, --children, -g, --ignore-callees, --max-stack",
        No("symbols are shown without callers: umpire record -g, then umpire report"),
    ),
    ("-c, --count", No("-F HZ says how often a sample is taken")),
    (
        "-f, --count-filter, -E, --entries, --percent-limit",
        No("as many symbols are shown as the screen has lines, those with most samples first"),
    ),
    (
        "-C, --cpu",
        No("all vCPUs of a VM are shown; --vm chooses one VM"),
    ),
    (
        "-M, --disassembler-style, --sym-annotate",
        No("umpire record, then umpire annotate -M intel SYMBOL shows instructions"),
    ),
    (
        "-D, --dump-symtab",
        No("--once prints a frame as text, with the symbols in it"),
    ),
    (
        "--fields, -s, --sort",
        No("the key s sorts; rows and columns are as they are"),
    ),
    (
        "-K, --hide_kernel_symbols, -U, --hide_user_symbols",
        No(
            "the event says where it is sampled: -e cycles:u in programs, -e cycles:k in the kernel",
        ),
    ),
    (
        "-H, --hierarchy",
        No("umpire record, then umpire report shows more than a list"),
    ),
    ("-j", Otherwise("one frame as JSON, with --once")),
    (
        "-m, --mmap-pages",
        No("buffers are emptied while the guest runs on; -F chooses how many samples come"),
    ),
    ("-n", Otherwise("ends after so many frames")),
    (
        "--percentage",
        No("no task, file or symbol is left out, so percentages are of all samples"),
    ),
    (
        "-p, --pid, -t, --tid",
        No(
            "--vm chooses the VM; processes of the guest: umpire record, then report --sort pid,tid",
        ),
    ),
    (
        "--stdio",
        No("--once prints a frame as text; -n 3 ends after three"),
    ),
    (
        "--tui",
        No("without --once the terminal is used, without being asked"),
    ),
    (
        "-z, --zero",
        No("the symbols are those of the last 10 seconds always"),
    ),
];
