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
        .mut_subcommand("events", |events| events.after_help(EVENTS))
        .mut_subcommand("arbitrate", |arbitrate| arbitrate.after_help(ARBITRATE))
        .mut_subcommand("count", |count| count.after_help(COUNT))
        .mut_subcommand("stat", |stat| stat.after_help(STAT))
        .mut_subcommand("track", |track| track.after_help(TRACK))
        .mut_subcommand("record", |record| record.after_help(RECORD))
        .mut_subcommand("top", |top| {
            let all = "The VM, by the name of its umpire run --name or by its process id \
                       [default: all that run]";
            top.after_help(TOP).mut_arg("vm", |vm| vm.help(all))
        })
        .mut_subcommand("pause", |pause| pause.after_help(PAUSE))
        .mut_subcommand("resume", |resume| resume.after_help(PAUSE))
        .mut_subcommand("stop", |stop| stop.after_help(STOP))
        .mut_subcommand("ls", |ls| ls.after_help(LS))
        .mut_subcommand("pcr", |pcr| pcr.after_help(PCR))
        .mut_subcommand("budget", |budget| budget.after_help(BUDGET))
        .mut_subcommand("arbiterd", |arbiterd| arbiterd.after_help(ARBITERD))
        .mut_subcommand("lease", |lease| lease.after_help(LEASE))
        .mut_subcommand("leases", |leases| leases.after_help(LEASES))
        .mut_subcommand("who", |who| who.after_help(WHO))
        .mut_subcommand("revoke", |revoke| revoke.after_help(REVOKE))
        .mut_subcommand("pardon", |pardon| pardon.after_help(PARDON))
        .mut_subcommand("slurm", |slurm| slurm.after_help(SLURM))
        .mut_subcommand("hog", |hog| hog.after_help(HOG))
        .mut_subcommand("report", |report| report.after_help(REPORT))
        .mut_subcommand("annotate", |annotate| annotate.after_help(ANNOTATE))
        .mut_subcommand("diff", |diff| diff.after_help(DIFF))
        .mut_subcommand("script", |script| script.after_help(SCRIPT))
        .mut_subcommand("bench", |bench| {
            BENCHES.iter().fold(bench, |bench, (name, help)| {
                bench.mut_subcommand(*name, |one| one.after_help(*help))
            })
        })
}

/// The first paragraph of a message of clap, and its tips, on one line.
pub(super) fn one_line_of(message: &str) -> String {
    let mut parts = Vec::new();
    for (i, paragraph) in message.split("\n\n").enumerate() {
        let text = umpire_events::one_line(paragraph);
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
  umpire events                                what can be counted, by name
  umpire run --kernel vmlinuz --initrd initrd.img --cmdline \"console=ttyS0\"
  umpire count -- gzip -k file                 count what a program executes, exactly
  umpire stat                                  count events of a guest that runs
  umpire top                                   watch all VMs that run

Exit status: 0 done; 2 bad input, or a host that cannot do it; 4 the host failed;
6 the guest failed (triple fault, an instruction that KVM lacks, or with --engine emu it sleeps
for ever); 8 the engine emu lacks what its CPUID announces, or an old mode, as the message says:
please report it; 124 timeout; 130 interrupted; odd: the guest wrote V to port 0xf4, and the
status is V * 2 + 1 (low 8 bits).";

const DOCTOR: &str = "\
Runs small probe guests to find what this KVM really does: is guest kernel code slow,
do single step and hardware breakpoints work and at which ring, does RDPMC fault.
Exit status: 0 when a guest with a virtual PMU can run on this KVM, else 2; on the engine emu
one can run everywhere.";

const DEMO: &str = "\
Every row of the table is a real exit of a real guest. Without a usable /dev/kvm, or with
--engine emu, a processor in software runs it: instructions are exact then, and times virtual.
The scenarios pcr and host need /dev/kvm.

With --event the guest counts these events instead while it works some hundred
instructions at CPL 0 and at CPL 3, and the counts are shown with how each was obtained:
<not supported> is an event that the backend cannot count, <not counted> one that found
no counter. A guest's PMU may be of the other vendor than the host.

  umpire demo --engine emu
  umpire demo --event instructions:u --event taken-branches
  umpire demo --event amd64_fam10h_barcelona::RETIRED_INSTRUCTIONS
  umpire demo --event skl::UNHALTED_REFERENCE_CYCLES --event r53013c --pmu intel-v2";

const EVENTS: &str = "\
An event is named in one of three ways:
  cycles, instructions:u         generic; add :u (CPL 1 to 3) or :k (CPL 0)
  r5300c0                        the event select itself, in hexadecimal; INT (bit 20) and EN
                                 (bit 22) do not matter; without USR and OS (bits 16 and 17)
                                 both rings are counted
  skl::INST_RETIRED:ANY_P:u      from a table of libpfm4, with its unit masks and modifiers
                                 (:u :k, :e edge, :i invert, :c=N counter mask, ...); without
                                 \"skl::\" where all tables of the guest's PMU model agree
Tables need the library libpfm4 (Debian, Ubuntu: apt-get install libpfm4).

Examples:
  umpire events                  generic names, and the tables that there are
  umpire events branch           names and descriptions with this word, in every table
  umpire events --pmu skl        all events of Skylake
  umpire events instructions:u   what a name stands for with each PMU model, and its other names
  umpire events r15302c2         the same for a code
  umpire events 'INST*:ANY*' --pmu icl -j
Exit status: 0; 2 if nothing is found.";

const ARBITRATE: &str = "\
A line of a script is: time in milliseconds, layer (firmware, hypervisor, kernel), action:
  reserve N|COUNTER [lease MS]   ask by the mailbox
  claim COUNTER                  reserve by the management key
  renew COUNTER                  start its lease anew
  release COUNTER|all            give back
  lend COUNTER, keep COUNTER     agree to a revocation, or no longer
  reply yield|refuse [COUNTER]   answer the last question, or that about a counter
  withdraw                       forget the pending request
  end-phase                      the firmware is done, and the kernel runs
A COUNTER is PMC0, FIXED1, ...; # begins a comment; the line \"500 tick\" lets time pass.

No guest runs and no host PMU is needed: it is the same arbiter that guests get.

--experiment simulates many vCPUs on cores, with generated demands, under every scheme and
policy of a TOML file and over many seeds; figures have 95 % intervals. --replay plays the
requests that umpire run --audit recorded, under every scheme beside what the run had. Both
print JSON with -j, one object per line.

  umpire arbitrate docs/examples/short.script
  umpire arbitrate --scheme interacting --policy kernel:priority=1 -j night.script
  echo '0 kernel reserve 2' | umpire arbitrate --counters 1 -
  umpire arbitrate --experiment docs/examples/experiment.toml --html figures.html
  umpire arbitrate --replay audit.json --policy kernel:priority=1
Exit status: 0; 2 if the script, the experiment, the audit file or a value cannot be used.";

const COUNT: &str = "\
The program of this machine runs in a small virtual machine, on a processor in software: no
KVM, no counters and no rights are needed, and the counts are the same on every machine, to the
last instruction, as long as the inputs are. --save keeps counts and all inputs (the program,
each library and file that was read, kernel, engine, arguments, environment), --compare names
what differs.

The program's output is that of this command, its standard input is read to its end before it
starts, and counts go to standard error, as perf stat's do. It sees the working folder, /usr, /lib
and some of /etc, read-only; what it writes is gone at the end unless --out brings it back. There
is no network. It runs as a user of the machine, with few variables (--env).

  umpire count --fetch-kernel               once, before the first run
  umpire count -- gzip -k file
  umpire count -e instructions:u --per-program --syscalls -- sh -c 'sort words | uniq -c'
  umpire count --save base.json -- ./bench
  umpire count --compare base.json --threshold 0.5% -- ./bench
  umpire count diff base.json now.json      which functions grew, if --functions counted them
  CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER='umpire count --' cargo test
Exit status: the program's; 128 + N if signal N ended it; 123 if a count is over --threshold; 124
after --timeout; 125 if it could not be run or counted, or one of the options is wrong; 130 after
Ctrl-C, 143 after SIGTERM. --status-file says whose it is.";

const STAT: &str = "\
Events are those of umpire events, for the VM's PMU model, and vm-exits, vm-run-ns and others
that the VMM measures of itself (umpire events vm-). The table says before each event how it
was counted. Counts and notes go to standard error, as perf stat's do; among fields (-x) or JSON
notes are comments (#).

<not supported> is an event that nothing here counts, <not counted> one that found no counter
or lost it. If there are more events than counters, sets of them take turns; a percentage says
for how much of the time an event was counted, and its count is scaled to the whole: by the
phases that are found in the counts of all events, or with --scale linear by time alone.

  umpire stat --for 5s
  umpire stat --vm web1 -- sleep 1
  umpire stat -e cycles,instructions,vm-exits --per-vcpu -I 1000
  umpire stat -a -e '{cycles,instructions},{branches,branch-misses}' -r 5 --for 1s
  umpire stat -M ipc,exits --metric-only -I 1000 -o web1.txt
  umpire stat -x ';' -e skl::INST_RETIRED:ANY_P:u --for 500ms
  umpire stat -x, -I100 --interval-count 10 --log-fd 1 -ecycles | ./plot
Exit status: 0, also after Ctrl-C without --for, and after the end of the VM; 130 if Ctrl-C cut
--for short; that of the command if there is one; 2 if something cannot be measured as asked.";

const TRACK: &str = "\
A line tick has what a vCPU has counted in the interval; lines exit and total, at the end, what
vCPUs have counted altogether. Times are seconds since counting began. umpire stat says more of
each count.

  umpire track -c cycles,instructions
  umpire track --vm web1 -c cycles:u,vm-exits -T 0.5 -N 20 -n -o web1.track
  umpire track --vm web1 -c instructions --resume
Exit status: 0, also after Ctrl-C and after the end of the VM; 130 if Ctrl-C cut -N short; 2 if
something cannot be counted as asked.";

const RECORD: &str = "\
Each sample has the guest's instruction pointer, ring and CR3, and of a Linux guest the process,
the thread and the file, with -g the callers too. umpire report, umpire annotate and umpire
script read the profile. The guest never waits for this program: samples that it fetches too
late are lost, and counted.

  umpire record --for 10s
  umpire record --vm web1 -a -g --for 5s
  umpire record -F 500 -e cycles,instructions --vcpu 0-1
  umpire record -e branches -c 100000 --random 8 -o branches.data
  umpire record -a --call-graph dwarf --symfs /mnt/guest --for 5s
  umpire record -p 4711 -g -D 500 --for 5s
  umpire record -a --for 5s -o - | umpire report -i -
  umpire record -a -o web1.data --switch-output=100M --switch-max-files 10
Exit status: 0, also after Ctrl-C without --for, and after the end of the VM; 130 if Ctrl-C cut
--for short; that of the command if there is one; 2 if something cannot be sampled as asked.";

const TOP: &str = "\
Without --vm it shows every VM that umpire ls finds, also those that begin later. For each: what
its vCPUs do in a second, who holds which counter (guests, tools, reservations and their
cookies), and the symbols in which its samples are, of the last 10 seconds. What nobody counted
is \"not counted\", never 0. Guests and other tools have counters before this program, and get
them as soon as they want them.

  umpire top
  umpire top --vm web1 -d 1
  umpire top --vm web1 -e branch-misses -F 500
  umpire top --vm web1 --symbols System.map
  umpire top --once                    one frame as text: for scripts, or to send to somebody
  umpire top --once -j -d 5 | jq .vcpus
Keys: q ends; Tab and arrows choose the VM; p pauses the display; s sorts; d asks for the delay;
h shows this and more.
Exit status: 0, also when the last VM has ended; 130 if -n or --once was cut short; 2 if there is
no VM, no terminal and no --once, or something cannot be sampled as asked.";

const PAUSE: &str = "\
A paused VM does nothing, and its counters stand still; the guest's clocks go on. umpire run
--paused starts one that way, and umpire stat or record --resume lets it go on as soon as
everything counts.

  umpire run --kernel vmlinuz --name web1 --paused
  umpire resume web1
  umpire pause web1
Exit status: 0; 2 if there is no such VM, or this user may not.";

const STOP: &str = "\
The VM gets SIGTERM, as by kill, and this program waits until it has ended: at most 15 s.

  umpire stop web1
Exit status: 0; 2 if there is no such VM, this user may not, or it has not ended in time.";

const LS: &str = "\
For each VM: its vCPUs and cores, the contexts of host tools, and who holds each physical
counter.

  umpire ls guest.sock
  umpire ls -j | jq '.machine.contexts[].pid'
Exit status: 0, also if no VM is found; 2 if a socket that was named does not answer.";

const PCR: &str = "\
Without a command it shows each reserved counter: who holds it, whether accesses without its
cookie are locked out (private), when its lease ends or it is revoked, and what it counts.
No cookie is shown: the VM tells none.

A change concerns all vCPUs, or those of --vcpu. The guest cannot refuse it. Its layers are
told by a notice with the reason ADMINISTRATOR (docs/reference/pcr.md), and the VM's audit file has
each change. Who may make changes: whoever may count on cores (--control-sys-gid).

  umpire pcr --vm web1
  umpire pcr revoke --vm web1 --vcpu 0 PMC1 --grace 500
  umpire pcr bar --vm web1 firmware
  umpire pcr policy --vm web1 kernel:min=2,lease=none firmware:max=1
  umpire pcr scheme --vm web1 interacting
  umpire pcr --vm web1 -j | jq '.vcpus[].reservations[]'
Exit status: 0; 2 if the VM cannot be reached, or something cannot be done as asked.";

const BUDGET: &str = "\
MAY USE is how many physical counters the guest of each vCPU may have at a time. Its registers
stay whatever the budget is. What is too many and not reserved takes turns or stands still at
once (umpire run --oversubscribe); lines below the table say which counters and why. What
firmware or kernel have reserved is taken last, after --grace, with a notice of the reason
BUDGET (docs/guide/arbitration.md). Give programmable=all to take a limit away.

  umpire budget --vm web1
  umpire budget --vm web1 programmable=2,fixed=1 --grace 500
  umpire budget --vm web1 programmable=0 --for 30s
  umpire budget --vm web1 -j | jq '.vcpus[].programmable.lacking'
Exit status: 0; 2 if the VM cannot be reached or refuses, or the words make no sense.";

const ARBITERD: &str = "\
One arbiter for a host. VMs and tools ask it for leases on physical counters, so that nobody
finds a count that somebody else has made wrong: who is refused is told who holds what. Without
--config the user who starts it is its one tenant. SIGHUP reads the file again; no lease is
dropped. SIGTERM ends it: with --state leases are kept, and holders claim them from the next one.
The interface is varlink (io.umpire.Arbiter): varlinkctl, and Python's varlink, can ask too.

  umpire arbiterd --budget programmable=4,fixed=3 --socket /tmp/arbiter
  umpire arbiterd --config /etc/umpire/arbiter.toml --check-config
  umpire arbiterd --config arbiter.toml --explain counters=2,cpus=0-3,tenant=blue,wait

A REQUEST has counters=N, fixed=N, event=NAME, at-least=N, cpus=LIST, tenant=NAME, label=TEXT,
priority=N, for-ms=N, best-effort, preemptible and wait.
Exit status: 0 when it was told to end; 2 if it cannot start; 4 if the host failed.";

const LEASE: &str = "\
The counters are the command's on these CPUs, whoever runs there, until it ends. The kernel knows
nothing of leases: pin events (perf's :D), so that the kernel does not let them take turns. What
happens to the lease meanwhile is told on standard error. If the arbiter is started anew the
lease is claimed from it.

  umpire lease --counters 2 --cpus 0-3 -- perf stat -a -C 0-3 -e cycles:D,instructions:D sleep 10
  umpire lease --counters 1 --for 30s --renew --wait=5s -- ./measure
  umpire lease --counters 4 --at-least 2 --best-effort -- ./sample
Exit status: the command's; without one 0; 2 if the lease cannot be had; 130 for Ctrl-C before.";

const LEASES: &str = "\
RANK is whether others may take the counters, and the priority. HOLDS is how many of the counters
it has on each CPU. UNTIL is when it ends unless it is renewed.

  umpire leases
  umpire leases -j | jq 'select(.state == \"waits\")'
Exit status: 0; 2 if there is no arbiter.";

const WHO: &str = "\
  umpire who                     every CPU
  umpire who 3                   who has the counters of CPU 3
  umpire who blue                where a tenant, or a lease of this label, holds counters
Exit status: 0; 2 if there is no arbiter, no such CPU, or nobody of that name.";

const REVOKE: &str = "\
One's own leases, those of tenants that the policy lets one revoke, and as an operator all.

  umpire revoke 17 --grace 500
Exit status: 0; 2 if there is no such lease, or it is another's.";

const PARDON: &str = "\
A user whose perf event of the arbiter's counted after its lease had ended is barred: it has no
leases and no events, also over a restart. Who is barred, and why, is in umpire who, in the
arbiter's log and in its audit. For operators.

  umpire pardon 1000
Exit status: 0; 2 if the user is not barred, or the caller is no operator.";

const SLURM: &str = "\
Jobs ask for counters by srun --counters=3 (docs/guide/slurm.md). On CPUs of their own they need
nothing else of Slurm; where jobs share CPUs, Slurm counts the GRES pmc and pmcfixed of each node.

  umpire slurm gres --node n1 --keep 1          lines for gres.conf and slurm.conf
  umpire slurm job-submit > /etc/slurm/job_submit.lua
  umpire slurm check                            what differs on this node, a line each
  umpire slurm epilog > /etc/slurm/umpire-epilog
Exit status: 0; 2 if something differs, or there is no arbiter or no Slurm.";

const HOG: &str = "\
  umpire hog 3 --cpus 0-1 --for 10s
  umpire hog 2 --no-lease                what the arbiter makes of an outsider
Exit status: 0; 2 if the counters cannot be had.";

const REPORT: &str = "\
Overhead is the part of the event's occurrences, which each sample stands for by its period.
The first lines say what could not be sampled. Columns and trees look as perf report prints
them: [k] is the kernel, [.] a program.

The guest's tasks, files and kernel symbols come with the profile where the VM knew them.
Symbols of programs come from their files below --symfs DIR. For kernels that the VM does not
know, --symbols names one file: a copy of the guest's /proc/kallsyms, made as root, has modules
too and fits a kernel that moved itself (KASLR). With vmlinux or System.map say how far it
moved: the address of _text in the guest's /proc/kallsyms less that in System.map.

  umpire report --symfs /mnt/guest
  umpire report --symfs /mnt/guest -g --percent-limit 1
  umpire report --sort pid,vcpu
  umpire report --stdio -g caller,2 -F overhead,sym -t ,    as with perf report
  umpire report --symfs /mnt/guest --flamegraph guest.svg
  umpire report --symfs /mnt/guest --folded | grep '^bash;'
  umpire report --firefox guest.json    open it in profiler.firefox.com
  umpire report --perf-data guest.perf    then perf report -i guest.perf --kallsyms guest.perf.kallsyms
  umpire report --pprof guest.pb.gz    then go tool pprof -http : guest.pb.gz
  umpire report --vmlinux vmlinux --kaslr-offset 0x1a000000
Exit status: 0, also for a profile that was cut off, after a warning; 2 if the profile, a
folder or a file of symbols cannot be used.";

const ANNOTATE: &str = "\
Percent is the part of the symbol's events at an instruction, as perf annotate --stdio prints it.
A counter overflows some instructions before the guest is interrupted: the cause of a sample is
often an instruction above it.

Code of programs comes from their files below --symfs DIR, that of the kernel from --vmlinux. The
kernel changes its code while it runs (alternatives, tracing), so single instructions may differ.

  umpire annotate --symfs /mnt/guest
  umpire annotate --symfs /mnt/guest main -M intel
  umpire annotate --vmlinux vmlinux clear_page_erms
Exit status: 0, also for a profile that was cut off, after a warning; 2 if the profile, a
folder or a file cannot be used, or no code is known.";

const DIFF: &str = "\
Baseline is a row's part of the event's occurrences in OLD, and Delta how much more or less of
them NEW has, as perf diff prints it; the greatest changes come first.

  umpire diff before.data after.data --symfs /mnt/guest
  umpire diff before.data after.data --sort comm --percent-limit 0.5
Exit status: 0, also for a profile that was cut off, after a warning; 2 if a profile or a file
of symbols cannot be used, or they have no event in common.";

const SCRIPT: &str = "\
A sample is what perf script prints: comm pid/tid [cpu] seconds: period event: address
symbol+offset (file), or a line for each caller and an empty one. The CPU is the vCPU, and seconds
count from the beginning of the recording. FlameGraph's stackcollapse-perf.pl, speedscope and
profiler.firefox.com read it. Lines that begin with # say what was lost.

  umpire script --symfs /mnt/guest
  umpire script --symfs /mnt/guest | stackcollapse-perf.pl | flamegraph.pl > guest.svg
  umpire script -F +vm,+ring,-period
  umpire script -F time,vcpu,ring,cr3,ip
  umpire script --comms bash --time 1.5,2
  umpire script --vcpu 0 -j | jq .ip
Exit status: 0, also for a profile that was cut off, after a warning; 2 if the profile, a
folder or a file of symbols cannot be used.";

const BENCH_TRAPS: &str = "\
Compares, within one run, a trapped RDMSR and WRMSR of a PMU register with an MSR exit
that does nothing, and a trapped RDPMC with a #GP whose handler does one OUT, nothing
armed; with every usable counter backend in turn, and with the #GP handler apart from the
guest's code and on its page. One that steps the guest takes a tenth of the samples.
Times are in nanoseconds.";

const BENCH_NEIGHBOUR: &str = "\
Two VMs on two host CPUs. The second one computes, or does its worst without a pause; both
in turn beside the same first one. With loading-beside they are two vCPUs of one VM. Times
are in nanoseconds.";

const BENCH_PMI: &str = "\
The handler begins with RDTSC; the backend knew when the overflow was due. Both are brought
to one scale, which is known as well as the last column says. Times are in nanoseconds.
The report names backends that do not know when their counters overflow, and leaves them out.
The bare loop beside it sets a timer, queues an NMI and does nothing else: the floor.";

const BENCH_SLOWDOWN: &str = "\
Three vCPUs run the same loop at CPL 3 in turn on one thread: nothing programmed, four
counters, and four of which one interrupts 100 times a second. Speed is the ratio of the
medians. A backend that steps the guest is left out.
The second table compares two ways to sample cycles 1000 times a second by NMI in a guest of
model amd-core,ibs=on: a counter, and instruction-based sampling. each is what a sample costs.
The last table has what events cost that the backend does not count.";

const BENCH_SWITCH: &str = "\
No guest runs: the switches are real and guest time is made up. Naive is to save and restore
every select and counter of the model at each switch, through the same backend; the last
column does so for those alone that are in use. All ways must count the same, else the
command fails. Times are in nanoseconds.";

const BENCH_SCALE: &str = "\
No guest runs. What the run loop asks of the PMU is done for all vCPUs in turn: settling an
entry and an exit, RDMSR of a running counter, and a switch of all vCPUs on one core.
Times are in nanoseconds.";

const BENCH_PCR: &str = "\
Two guests on one thread in turn: one with reservations as umpire run makes them, the audit
trail included, one as under --pcr off. The audit trail notes a dropped access. Under
--scheme single the guest reserves by REQUEST, else by MANAGEMENT_KEY.

The last lines are the arbiter's own part: a request for one counter and its return, on
--vcpus vCPUs in turn, with --contention counters of each held by the hypervisor. If that is
all of them (--policy kernel:min=0), the counter is had as the scheme has it: by a reply, by
revocation, or not.
Times are in nanoseconds.";

const BENCH_ARBITER: &str = "\
The arbiter is umpire arbiterd, a process that this command starts and ends, with a journal
in a folder of its own below /var/tmp. It is told of 512 CPUs with six programmable counters,
and gives them to nobody else. core needs no process, and traps needs /dev/kvm and two CPUs.
Under each table is what is wanted. Times in JSON are in nanoseconds unless a name says else.
Exit status: 0; 4 if a part could not be measured. A goal that is missed is no failure.";

const BENCH_PERFMON: &str = "\
A guest runs on /dev/kvm, and tools look at it through a control socket, as umpire stat and
umpire record do. A bound that is wanted stands under its table.
Exit status: 0; 2 if this host cannot run a guest; 4 if a part could not be measured. A goal
that is missed is no failure.";

const BENCH_EMU: &str = "\
No guest of KVM runs and no PMU is needed. The programs are one file without a system: eleven
of integers, two of doubles. Figures are millions of instructions a second, of the fastest of
--turns. Wanted of the speed of Callgrind on the same host: 0.85 for the programs of integers
in the geometric mean, 0.4 for each of them; those of doubles have no bound. With --kernel a
Linux runs as well, in some --turns of four boots: 80 million a second are wanted of its boot,
40 of a loop of system calls, at most 100 MiB beyond its RAM, and a recording at 1 kHz in 1.02
of the time without.

  umpire bench emu --length 2 --turns 1
  umpire bench emu --no-valgrind -j
  umpire bench emu --kernel vmlinuz
Exit status: 0, also where a goal is missed; 4 if a program did not run, or not as everywhere,
or the kernel did not.";

const BENCHES: [(&str, &str); 10] = [
    ("emu", BENCH_EMU),
    ("perfmon", BENCH_PERFMON),
    ("arbiter", BENCH_ARBITER),
    ("traps", BENCH_TRAPS),
    ("neighbour", BENCH_NEIGHBOUR),
    ("pcr", BENCH_PCR),
    ("pmi", BENCH_PMI),
    ("slowdown", BENCH_SLOWDOWN),
    ("switch", BENCH_SWITCH),
    ("scale", BENCH_SCALE),
];

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
    text.push_str(ENGINES);
    text.push_str(FIRMWARE);
    text.push_str(RESERVATIONS);
    text.push_str(LEASES_OF_VMS);
    text.push_str(CONTROL);
    text.push_str(RUN_NOTES);
    text
}

const ENGINES: &str = "
Engines (--engine): kvm is as fast as the host, and counts what its PMU or KVM lets it count.
emu executes every instruction of the guest itself, some hundred million a second, and so
counts instructions, branches, loads, stores and more exactly, the kernel's too, with PMIs at
the very instruction; it needs neither /dev/kvm nor any privilege, and its processor is the same
on every host. It counts no cycles, but simulated ones; it has no system management mode, so no
--firmware, and 64-bit kernels alone. auto is kvm where it can be used, else emu, and says so.
Its time is virtual: an instruction is a nanosecond, and idle time is skipped. With --real-time
the guest's time follows the host's clock. --timeout, and -I and --for of tools, are the host's
time; --grace, leases and --pmi-floor are the guest's. The single thread has the first CPU of
--pin alone.
  umpire run --engine emu --kernel vmlinuz --initrd initrd.img --cmdline \"console=ttyS0\"
  umpire run --engine emu --kernel vmlinuz --seed 1 --stat instructions,branches </dev/null
  umpire run --engine emu --kernel vmlinuz --cycles simulated --pmu amd-core
";

const PROPERTIES: &str = "
  Properties follow the model, as in qemu's -cpu:
    counters=N           programmable counters
    fixed=N              fixed counters; on intel-v5 also a bit for each, as 0x6
    width=BITS           width of the programmable counters
    fixed-width=BITS     width of the fixed counters
    full-width=on|off    full-width counter writes
    perf-capabilities=on|off
                         IA32_PERF_CAPABILITIES, and freezing on a PMI [as full-width]
    ibs=on|off           instruction-based sampling of fetches and ops (AMD) [off]
    freeze=on|off        freezing on a PMI by PerfCntrFreeze (amd-perfmonv2) [off]
  A property that a model does not have is refused with what it allows.
";

const FIRMWARE: &str = "
Counters of the firmware (--firmware-counter EVENT[,WORD...]); EVENT as in umpire events:
  on=PMCn|FIXEDn|any       which counter [any]
  access=private|shared    whether others are kept from using it [private]
  error=drop|fault|fault-rdpmc
                           what their accesses come to: they vanish, they raise #GP, or a
                           kernel's RDPMC as well [drop]
  layer=any|firmware       where its cookies are valid: for whoever has them, or in the
                           firmware's phase and in SMM alone [any]
  read=VALUE               what a dropped read yields [0]
  lend                     it may be revoked when another layer is short
  yield                    the firmware yields it to a layer that asks, else it refuses
  keep                     the cookies stay in the firmware's memory, else they are wiped
  isolate                  registers that several counters share do not reach it
";

const LEASES_OF_VMS: &str = "
Leases on the host's counters (--arbiter; docs/reference/arbiterd.md): what the guest may use follows
what the VM's lease holds. --arbiter-terms is a list of
  tenant=NAME          one of the tenants that this user belongs to [the first]
  priority=N           who is served first; more is more [0]
  preemptible, best-effort
                       who may take counters from it: higher priorities, all guarantees
  for-ms=N             it is renewed so often [never: it has no end]
  label=TEXT           its name in umpire who [vm and the kernel's]
  wait                 the VM waits until it is its turn, instead of being refused
";

const RESERVATIONS: &str = "
Counter reservations (--pcr): firmware, hypervisor and kernel can each hold counters of a
vCPU against the others (docs/reference/pcr.md). A kernel that knows nothing of it sees its usual PMU,
with fewer counters if some are set aside.
  --policy LAYER:KEY=N,...   LAYER is firmware, hypervisor or kernel; KEY is one of
    min, min-fixed           counters that no other layer can take from it [kernel: min=1]
    max, max-fixed           counters that it may hold
    priority                 who has the greater one gets a counter if none is free [0]
    lease                    its reservations end after so many milliseconds [never]
  umpire run --kernel vmlinuz --hypervisor-counters 2 --audit audit.json
  umpire run --kernel vmlinuz --pmu intel-v2 --cpu-vendor intel --hypervisor-counters PMC0,FIXED2
  umpire run --kernel vmlinuz --policy firmware:max=2,lease=5000 --policy kernel:min=3
Standard error says who held what at the end, and how often others were kept out.
";

const CONTROL: &str = "
Host tools: while the guest runs, umpire stat, record, ls, pcr and budget count and sample its
vCPUs and cores from outside, by the perfmon2 interface (docs/reference/perfmon-server.md), on the socket
NAME.sock in XDG_RUNTIME_DIR/umpire, of root in /run/umpire. Whoever may open the socket may do
so: its owner alone, unless --control-mode lets others in.
  umpire run --kernel vmlinuz --name web1
  umpire run --kernel vmlinuz --name web1 --host-policy shares:host=2
  umpire run --kernel vmlinuz --stat cycles,vm-exits --record first.data
  umpire run --kernel vmlinuz --control guest.sock --control-mode 660 --control-group 50
  umpire run --kernel vmlinuz --control guest.sock --control-sys-gid 50 --control-buffers 8192
";

const RUN_NOTES: &str = "
An event that the backend cannot count is announced as unavailable, never counted as 0.

Examples:
  umpire run --kernel vmlinuz --initrd initrd.img --cmdline \"console=ttyS0\" --memory 1024
  umpire run --kernel vmlinuz --cpu-vendor intel --pmu intel-v2,counters=8,width=40
  umpire run --kernel vmlinuz --cpu-vendor intel --cpu-model skylake
  umpire run --kernel vmlinuz --cpus 4 --pmu none
  umpire run --kernel vmlinuz --cpus 16 --cores 2 --pin 0-1
  umpire run --kernel test.elf --module data.bin,first,words --counters step --timeout 10
  umpire run --kernel vmlinuz --firmware builtin --firmware-counter cycles,error=fault
  umpire run --config guest.toml --cpus 2
  umpire run --kernel vmlinuz --restore pmu.json --save-on-exit pmu.json

The configuration file holds the same options under the same names; its paths start at
its own folder, and repeatable options are lists:
  kernel = \"vmlinuz\"
  cpus = 2
  pmu = \"amd-core\"
  hide-feature = [\"cx16\", \"xsave\"]

The guest's serial port COM1 is this terminal. Ctrl-C stops the guest.";
