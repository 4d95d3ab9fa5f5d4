//! What programs in a job do with its lease: a small VM, and counting, as a user without any right.
//! The machine may have no PMU: the guest's counters are simulated, and the kernel's software events
//! stand in for those of hardware, whose way to a program is the same.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};

use guest_tests::kernel::{Kernel, Protocol};
use guest_tests::umpire::{self, on_emu, skipped_without_kvm};
use serde_json::Value;
use umpire_lease::{Lease, LeaseScope};

use super::cluster::{Cluster, POLICY, job_of, said, shared, soon, until_leases};
use crate::arbiterd::fixture::Daemon;
use crate::arbiterd::python::python3;
use crate::arbiterd::vm::counts;

/// The arbiters, which the users of jobs may ask, too, also for perf events.
fn open_arbiters(cluster: &Cluster) -> [Daemon; 2] {
    // PERF_TYPE_SOFTWARE.
    let policy = POLICY.replace("cpus =", "perf-type = 1\ncpus =");
    let arbiters = cluster.arbiters(&format!("{policy}opens-events = true\n"));
    for daemon in &arbiters {
        daemon.open_to_all();
        let events = daemon.folder.path().join("socket.events");
        fs::set_permissions(events, fs::Permissions::from_mode(0o777)).expect("it is ours");
    }
    arbiters
}

/// A VM in a step with two counters, whose guest counts on as many as it may have; with more flags.
fn vm(cluster: &Cluster, command: fn(&Cluster, &[&str]) -> Command, flags: &[&str]) -> Child {
    let kernel = Kernel::new(Protocol::Linux64, |a, _| counts(a)).expect("a kernel");
    let out = cluster.folder.join("out");
    fs::copy(kernel.path(), out.join("kernel")).expect("a copy");
    fs::write(
        out.join("rates"),
        "counters = 4\n[event.cycles]\nrate = 1000\n",
    )
    .expect("a file");
    for file in ["kernel", "rates"] {
        let all_read = fs::Permissions::from_mode(0o644);
        fs::set_permissions(out.join(file), all_read).expect("it is ours");
    }
    let program = umpire::path().display().to_string();
    let mut words = vec!["srun", "-p", "own", "-w", "n1", "--counters=2", &program];
    words.extend(["run", "--kernel", "kernel", "--memory", "32"]);
    words.extend(["--pmu", "amd-core", "--cpu-vendor", "amd"]);
    words.extend(flags);
    let mut job = command(cluster, &words);
    job.stdout(Stdio::piped()).stderr(Stdio::piped());
    job.spawn().expect("it starts")
}

/// What came of it.
fn ended(vm: Child) -> (Option<i32>, String) {
    said(&vm.wait_with_output().expect("it is ours"))
}

/// The step's lease, and that of the VM in it, once the VM has one.
fn until_within(daemon: &Daemon) -> (Lease, Lease) {
    let step = until_leases(daemon, 1).remove(0);
    let mut vm = None;
    soon(|| {
        let mut leases = daemon.connect().leases().expect("it answers").into_iter();
        vm = leases.find(|lease| lease.within == Some(step.id));
        vm.as_ref()
            .map(drop)
            .ok_or_else(|| "no lease of a VM".to_owned())
    });
    (step, vm.expect("it was found"))
}

/// Waits until the guest counts on two counters, which its VM's lease holds.
fn until_both_count(cluster: &Cluster) {
    let mut budget = Command::new(umpire::path());
    budget.args(["budget", "-j"]);
    budget.env("UMPIRE_PERFMON", cluster.folder.join("out/vm.sock"));
    soon(|| {
        let shown = budget.output().expect("umpire starts").stdout;
        let shown: Value = serde_json::from_slice(&shown).unwrap_or_default();
        let kind = &shown["vcpus"][0]["programmable"];
        let has_both = kind["counting"] == 2 && kind["leased"] == 2;
        has_both.then_some(()).ok_or_else(|| shown.to_string())
    });
}

#[test]
fn a_vm_in_a_job_takes_its_counters_out_of_the_steps_lease() {
    const TEST: &str = "a_vm_in_a_job_takes_its_counters_out_of_the_steps_lease";
    let Some(cluster) = shared(TEST) else {
        return;
    };
    let arbiters = open_arbiters(&cluster);
    // The processor in software needs no counter of the host's, so it has no lease.
    let flags = ["--engine", "emu", "--timeout", "0.5"];
    let (status, text) = ended(vm(&cluster, Cluster::user, &flags));
    assert!(
        status == Some(124) && !text.contains("lease"),
        "{status:?}: {text}"
    );
    if on_emu() || skipped_without_kvm(TEST) {
        return;
    }
    // Root's job, since others may not open /dev/kvm everywhere.
    let socket = arbiters[0].socket().display().to_string();
    let flags = |budget| {
        let mut flags = vec![
            "--engine",
            "kvm",
            "--timeout",
            "60",
            "--counters",
            "sim=rates",
        ];
        flags.extend(["--arbiter", &socket, "--control", "vm.sock"]);
        flags.extend(["--oversubscribe", "refuse", "--budget", budget]);
        flags
    };
    let running = vm(&cluster, Cluster::root, &flags("programmable=2,round"));
    let (step, lease) = until_within(&arbiters[0]);
    assert!(
        lease.scope == LeaseScope::Thread && lease.holds == 2,
        "{lease:?}"
    );
    // It asks for the CPUs on which Slurm keeps it.
    assert_eq!(lease.cpus, step.cpus);
    until_both_count(&cluster);
    // Both end with the step, and the VM has said whose counters it has.
    cluster.asked(&["scancel", &job_of(&step.label).to_string()]);
    let (_, text) = ended(running);
    let expected = format!(
        "lease {} on the host's counters: 2 of 2, out of lease {}, of the control group that the VM \
         is in",
        lease.id, step.id
    );
    assert!(text.contains(&expected), "{text}");
    soon(
        || match arbiters[0].connect().leases().expect("it answers") {
            leases if leases.is_empty() => Ok(()),
            leases => Err(format!("{leases:?}")),
        },
    );
    // More than the step has is not to be had, though the node has four.
    cluster.be_idle();
    let (status, text) = ended(vm(&cluster, Cluster::root, &flags("programmable=4,round")));
    assert!(
        status == Some(2) && text.contains("taken out of lease"),
        "{status:?}: {text}"
    );
}

/// A program that may open no perf event itself, at whatever kernel.perf_event_paranoid: it asks the
/// arbiter for events of its step's lease, whose number it finds by its own control group.
const COUNTS: &str = r#"
import array, ctypes, fcntl, json, os, socket, struct, subprocess, sys, threading, time

libc = ctypes.CDLL(None, use_errno=True)
OPEN, EPERM = 298, 1
# seccomp(2): perf_event_open fails with EPERM, everything else is as before.
code = struct.pack("HBBI" * 4, 0x20, 0, 0, 0, 0x15, 0, 1, OPEN, 6, 0, 0, 0x50000 | EPERM, 6, 0, 0, 0x7fff0000)
code = ctypes.create_string_buffer(code)
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(code)))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0
attributes = ctypes.create_string_buffer(struct.pack("II", 1, 64) + bytes(56))
assert libc.syscall(OPEN, attributes, 0, -1, -1, 0) == -1 and ctypes.get_errno() == EPERM

peer = socket.socket(socket.AF_UNIX)
peer.connect(sys.argv[1])
peer.sendall(b'{"method": "io.umpire.Arbiter.Groups"}\0')
answer = b""
while not answer.endswith(b"\0"):
    answer += peer.recv(65536)
groups = json.loads(answer[:-1])["parameters"]["groups"]
own = [line[3:] for line in open("/proc/self/cgroup").read().split("\n") if line.startswith("0::")]
lease = [group["lease"] for group in groups if [group["path"]] == own][0]

# The lease is for the CPUs of the step, which keep its tasks.
[cpu] = os.sched_getaffinity(0)
events = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
events.connect(sys.argv[1] + ".events")
def ask(counter):
    asked = {"lease": lease, "counter": counter, "cpu": cpu, "thread": threading.get_native_id(), "config": 1}
    events.send(json.dumps(asked).encode())
    reply, rights, _, _ = events.recvmsg(65536, socket.CMSG_SPACE(4))
    refused = json.loads(reply).get("refused")
    if refused:
        return refused
    fds = array.array("i")
    fds.frombytes(rights[0][2])
    return fds[0]

event = ask(0)
if isinstance(event, dict):
    sys.exit(event["message"])
read = lambda: struct.unpack("QQQ", os.read(event, 24))
assert read() == (0, 0, 0)
fcntl.ioctl(event, 0x2400, 0)
def spin():
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        pass
spin()
alone, enabled, running = read()
subprocess.run([sys.executable, "-c", "for _ in range(3000000): pass"], check=True)
print(lease, alone > 10**7, enabled == running, read()[0] > alone + 10**7, ask(2)["reason"])
"#;

#[test]
fn programs_in_a_job_count_without_privileges() {
    const TEST: &str = "programs_in_a_job_count_without_privileges";
    let Some(cluster) = shared(TEST) else {
        return;
    };
    let arbiters = open_arbiters(&cluster);
    let socket = arbiters[0].socket().display().to_string();
    let step = ["srun", "-w", "n1", "--counters=2"];
    // By events that the arbiter opens: its own time, and that of what it starts, whole; and no
    // counter that the step does not have.
    let words = [&step[..], &[python3(), "-c", COUNTS, &socket]].concat();
    let (status, text) = cluster.said(&words);
    let line: Vec<&str> = text.split_whitespace().collect();
    assert_eq!(status, Some(0), "{text}");
    assert_eq!(
        line[1..],
        ["True", "True", "True", "wrong-request"],
        "{text}"
    );
    let audit = fs::read_to_string(arbiters[0].folder.path().join("audit")).expect("an audit");
    let opened = audit.lines().find(|line| line.contains("event-opened"));
    let opened: Value = serde_json::from_str(opened.expect("it was")).expect("JSON");
    let of = [&opened["lease"], &opened["uid"], &opened["tenant"]].map(Value::to_string);
    assert_eq!(of, [line[0], "65534", "\"jobs\""], "{opened}");
}

/// By perf, whose events are the kernel's to give: it lets users count what is their own.
#[test]
fn perf_in_a_job_counts_with_a_part_of_the_steps_lease() {
    const TEST: &str = "perf_in_a_job_counts_with_a_part_of_the_steps_lease";
    let Some(cluster) = shared(TEST) else {
        return;
    };
    let paranoid = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").unwrap_or_default();
    let may_open = paranoid.trim().parse::<i32>().is_ok_and(|level| level <= 2);
    // Some distributions' is a script, which fails where the running kernel's own is not installed.
    let (status, version) = cluster.said(&["perf", "--version"]);
    if !may_open || status != Some(0) {
        println!(
            "skipped: {TEST}: no perf for users in a job's PATH: {version:?}, perf_event_paranoid \
             {paranoid:?}"
        );
        return;
    }
    let arbiters = open_arbiters(&cluster);
    let socket = arbiters[0].socket().display().to_string();
    let step = ["srun", "-w", "n1", "--counters=2"];
    let program = umpire::path().display().to_string();
    let stat = ["perf", "stat", "-x,", "-e", "task-clock:D", "true"];
    let lease = [
        &program,
        "lease",
        "--arbiter",
        &socket,
        "--counters",
        "1",
        "--",
    ];
    let (status, text) = cluster.said(&[&step[..], &lease, &stat].concat());
    assert_eq!(status, Some(0), "{text}");
    let is_part = |line: &str| line.contains(": 1 of 1") && line.contains("out of lease ");
    assert!(text.lines().any(is_part), "{text}");
    let count = text.lines().find(|line| line.contains("task-clock"));
    let count = count.and_then(|line| line.split(',').next()?.parse::<f64>().ok());
    assert!(count.is_some_and(|time| time > 0.0), "{text}");
    // Never more than the step has, though the node has four.
    let more = [
        &program,
        "lease",
        "--arbiter",
        &socket,
        "--counters",
        "3",
        "--",
        "true",
    ];
    let (status, text) = cluster.said(&[&step[..], &more].concat());
    assert!(
        status == Some(2) && text.contains("taken out of lease"),
        "{status:?}: {text}"
    );
}
