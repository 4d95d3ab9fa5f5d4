//! `umpire run --arbiter`: what a guest may use is what its VM's lease holds.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use guest_tests::kernel::{Kernel, Protocol, spin_forever};
use guest_tests::micro::Written;
use guest_tests::umpire::{self, skipped_without_kvm};
use guest_tests::vm::Vm;
use iced_x86::code_asm::{CodeAssembler, eax, ecx, edx};
use serde_json::Value;
use umpire_lease::{Counters, LeaseScope, Request, Standing};

use super::fixture::{Daemon, programmable};
use super::groups::Slice;
use super::killed::kills;

/// The VMs themselves end after a minute.
const PATIENCE: Duration = Duration::from_secs(20);
const RATES: &str = "counters = 6\n[event.cycles]\nrate = 1000\n";
/// Cycles in both rings, enabled.
const CYCLES: u64 = 0x43_0076;
/// `PerfEvtSel0` of the core extension.
const SELECT: u32 = 0xc001_0200;

/// Counts on all six counters.
pub(crate) fn counts(a: &mut CodeAssembler) -> Written {
    for n in 0..6 {
        a.mov(ecx, SELECT + 2 * n)?;
        a.mov(eax, u32::try_from(CYCLES).expect("32 bits"))?;
        a.mov(edx, 0)?;
        a.wrmsr()?;
    }
    let mut forever = a.create_label();
    a.set_label(&mut forever)?;
    a.jmp(forever)
}

fn boot(daemon: &Daemon, terms: &str, flags: &[&str]) -> Vm {
    let socket = daemon.socket();
    let asks = ["--arbiter", &socket.display().to_string()].map(str::to_owned);
    let mut all = vec!["--oversubscribe", "refuse"];
    all.extend(asks.iter().map(String::as_str));
    if !terms.is_empty() {
        all.extend(["--arbiter-terms", terms]);
    }
    all.extend(flags);
    Vm::boot_kernel(&umpire::path(), RATES, &all, counts)
}

fn budget(vm: &Vm) -> Value {
    let listing: Value = serde_json::from_str(&vm.printed(&["budget", "-j"])).expect("JSON");
    listing["vcpus"][0]["programmable"].clone()
}

/// Waits until so many counters count, and these are held by the lease.
fn await_counting(vm: &Vm, counting: u64, leased: u64) {
    let began = Instant::now();
    loop {
        let kind = budget(vm);
        if kind["counting"] == counting && kind["leased"] == leased {
            return;
        }
        assert!(
            began.elapsed() < PATIENCE,
            "{kind}, not {counting} of {leased}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Six programmable counters of each CPU.
fn daemon() -> Daemon {
    Daemon::with(&["--budget", "programmable=6"], "")
}

/// So many counters of each CPU, for whatever runs there.
fn whole(count: u32) -> Request {
    Request {
        cpus: None,
        waits_ms: Some(-1),
        ..programmable(count)
    }
}

#[test]
fn a_guest_uses_what_the_lease_of_its_vm_holds() {
    if skipped_without_kvm("a_guest_uses_what_the_lease_of_its_vm_holds") {
        return;
    }
    let daemon = daemon();
    let vm = boot(
        &daemon,
        "best-effort,label=web",
        &["--arbiter-shortage", "fewer"],
    );
    await_counting(&vm, 6, 6);
    let who = daemon.out(&["who"]);
    assert!(who.contains("web"), "{who}");

    // A guarantee takes four of them, after a notice.
    let mut held = daemon.connect().acquire(&whole(4)).expect("it waits");
    held.wait().expect("it is served");
    await_counting(&vm, 2, 2);
    let kind = budget(&vm);
    let why = kind["lacking"][0]["reason"].as_str().expect("a reason");
    assert!(why.contains("at a time"), "{why}");

    // An administrator gives the guest less than the lease, and never more.
    let _ = vm.printed(&["budget", "programmable=1"]);
    await_counting(&vm, 1, 2);
    let _ = vm.printed(&["budget", "programmable=all"]);
    await_counting(&vm, 2, 2);

    // What is given back comes back.
    drop(held);
    await_counting(&vm, 6, 6);
}

#[test]
fn a_vm_that_cannot_have_its_counters_is_told_who_holds_them() {
    if skipped_without_kvm("a_vm_that_cannot_have_its_counters") {
        return;
    }
    let daemon = daemon();
    let held = daemon.acquire(&whole(4));
    let kernel = Kernel::new(Protocol::Linux64, |a, _| spin_forever(a)).expect("a kernel");
    let socket = daemon.socket().display().to_string();
    let run = |kernel: &Path, flags: &[&str]| {
        let mut words = vec![
            "run",
            "--memory",
            "32",
            "--timeout",
            "5",
            "--pmu",
            "amd-core",
        ];
        words.extend(["--cpu-vendor", "amd", "--counters", "clock", "--kernel"]);
        words.push(kernel.to_str().expect("UTF-8"));
        words.extend(flags);
        daemon.refused(&words)
    };
    let told = run(&kernel.path(), &["--arbiter", &socket]);
    let lease = format!("held by lease {}", held.lease().id);
    for part in [lease.as_str(), "--arbiter-shortage fewer"] {
        assert!(told.contains(part), "{told}");
    }
    let terms = ["--arbiter", &socket, "--arbiter-terms", "tenant=nobody"];
    let told = run(&kernel.path(), &terms);
    assert!(told.contains("nobody"), "{told}");
    let told = run(&kernel.path(), &["--arbiter", "/no/such/socket"]);
    assert!(told.contains("--arbiter none"), "{told}");
    let told = run(&kernel.path(), &["--arbiter-terms", "colour=red"]);
    assert!(told.contains("'colour'"), "{told}");
    let told = run(
        &kernel.path(),
        &["--arbiter", "none", "--arbiter-shortage", "fewer"],
    );
    assert!(told.contains("--arbiter none"), "{told}");

    // Without a lease nobody takes the VM's audit, and no file has that name.
    let audit = ["--audit", "arbiter"];
    let nothing = ["--budget", "programmable=0,fixed=0,round"];
    for flags in [
        [&audit[..], &["--arbiter", "none"]].concat(),
        [&audit[..], &["--arbiter", &socket], &nothing].concat(),
    ] {
        let told = run(&kernel.path(), &flags);
        assert!(
            told.contains("--audit arbiter: the VM has no lease of the host"),
            "{told}"
        );
    }

    // It starts with fewer, which it never gets more of: CPUID has said so.
    let vm = boot(&daemon, "", &["--arbiter-shortage", "fewer"]);
    await_counting(&vm, 2, 2);
    drop(held);
    std::thread::sleep(Duration::from_millis(200));
    await_counting(&vm, 2, 2);
    let leases = daemon.connect().leases().expect("a list");
    assert_eq!((leases[0].wants, leases[0].holds), (2, 2), "{leases:?}");
}

#[test]
fn a_vm_counts_on_without_the_arbiter_and_comes_back_after_a_revocation() {
    if skipped_without_kvm("a_vm_counts_on_without_the_arbiter") {
        return;
    }
    let mut daemon = daemon();
    let vm = boot(&daemon, "", &[]);
    await_counting(&vm, 6, 6);
    daemon.kill();
    std::thread::sleep(Duration::from_millis(300));
    await_counting(&vm, 6, 6);
    daemon.begin();
    let began = Instant::now();
    let lease = loop {
        let leases = daemon.connect().leases().expect("a list");
        if let Some(lease) = leases
            .into_iter()
            .find(|lease| lease.state == Standing::Holds)
        {
            break lease;
        }
        assert!(began.elapsed() < PATIENCE, "it is claimed");
        std::thread::sleep(Duration::from_millis(20));
    };
    await_counting(&vm, 6, 6);

    // Somebody waits for the counters: they are his, and then the VM's again.
    let mut held = daemon.connect().acquire(&whole(6)).expect("it waits");
    let _ = daemon.out(&["revoke", &lease.id.to_string(), "--grace", "50"]);
    held.wait().expect("it is served");
    await_counting(&vm, 0, 0);
    drop(held);
    await_counting(&vm, 6, 6);
}

/// Three VMs on the same counters, and an arbiter that is killed over and over: no lease is
/// lost, and no guest has less than its lease at any time that was looked at.
#[test]
fn guests_count_on_however_often_the_arbiter_is_killed() {
    if skipped_without_kvm("guests_count_on_however_often_the_arbiter_is_killed") {
        return;
    }
    let mut daemon = daemon();
    let vms = [(); 3].map(|()| boot(&daemon, "", &[]));
    let all_count = || {
        for vm in &vms {
            let kind = budget(vm);
            assert_eq!((&kind["counting"], &kind["leased"]), (&6.into(), &6.into()));
        }
    };
    for vm in &vms {
        await_counting(vm, 6, 6);
    }
    for round in 0..kills(10) {
        daemon.kill();
        // Between the claims of the one before, before them, or after.
        std::thread::sleep(Duration::from_millis(u64::from(round % 7) * 10));
        daemon.begin();
        std::thread::sleep(Duration::from_millis(u64::from(round % 5) * 30));
        if round % 4 == 0 {
            all_count();
        }
    }
    all_count();
    let began = Instant::now();
    loop {
        let leases = daemon.connect().leases().expect("a list");
        if leases.len() == 3 && leases.iter().all(|lease| lease.state == Standing::Holds) {
            assert!(
                leases
                    .iter()
                    .all(|lease| lease.holds == 6 && lease.blind_ms == 0)
            );
            break;
        }
        assert!(began.elapsed() < PATIENCE, "they are claimed: {leases:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    all_count();
}

/// A VM that was stopped for so long that its lease is no more asks anew.
#[test]
fn a_vm_that_comes_back_too_late_asks_anew() {
    if skipped_without_kvm("a_vm_that_comes_back_too_late") {
        return;
    }
    let mut daemon = Daemon::with(&["--budget", "programmable=6"], "claim-window-ms = 200\n");
    let vm = boot(&daemon, "", &[]);
    await_counting(&vm, 6, 6);
    vm.signal("-STOP");
    daemon.kill();
    daemon.begin();
    std::thread::sleep(Duration::from_millis(500));
    assert!(daemon.connect().leases().expect("a list").is_empty());
    let held = daemon.acquire(&whole(2));
    vm.signal("-CONT");
    await_counting(&vm, 4, 4);
    drop(held);
    await_counting(&vm, 6, 6);
}

/// The leases whose labels have this word.
fn leases_of(daemon: &Daemon, word: &str) -> Vec<umpire_lease::Lease> {
    let leases = daemon.connect().leases().expect("a list");
    let is_it = |lease: &umpire_lease::Lease| lease.label.contains(word);
    leases.into_iter().filter(is_it).collect()
}

fn await_leases(daemon: &Daemon, word: &str, holds: &[u32]) -> Vec<umpire_lease::Lease> {
    let began = Instant::now();
    loop {
        let leases = leases_of(daemon, word);
        let held: Vec<u32> = leases.iter().map(|lease| lease.holds).collect();
        if held == holds {
            return leases;
        }
        assert!(began.elapsed() < PATIENCE, "{leases:?}, not {holds:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What a tool counts in a VM has a lease beside the guest's, while it counts.
#[test]
fn what_tools_count_in_a_vm_is_leased_too() {
    if skipped_without_kvm("what_tools_count_in_a_vm_is_leased_too") {
        return;
    }
    let daemon = Daemon::with(&["--budget", "programmable=8"], "");
    let rates = RATES.replace("counters = 6", "counters = 12");
    let socket = daemon.socket().display().to_string();
    let asks = ["--arbiter", &socket, "--arbiter-terms", "label=web"];
    let vm = Vm::boot_kernel(&umpire::path(), &rates, &asks, counts);
    await_counting(&vm, 6, 6);
    let stat = |events: &str, time: &str| {
        let mut stat = vm.command(&["stat", "--log-fd", "1", "-j", "-e", events, "--for", time]);
        stat.stdout(Stdio::piped()).stderr(Stdio::piped());
        stat.spawn().expect("umpire can be started")
    };
    let rows = |stat: std::process::Child| -> (Vec<Value>, String) {
        let output = stat.wait_with_output().expect("it ends");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        let rows = printed
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"));
        (rows.collect(), told)
    };

    // Two are free beside the guest's six, and a third tool finds none.
    let two = stat("cycles,cycles:u", "3s");
    let held = await_leases(&daemon, "tool", &[2]);
    assert!(held[0].label.starts_with("web: tool "), "{held:?}");
    await_counting(&vm, 6, 6);
    let (none, told) = rows(stat("cycles", "200ms"));
    assert!(
        told.contains("arbiter") && told.contains("held by"),
        "{told}"
    );
    assert_eq!(none[0]["counter-value"], "<not counted>", "{none:?}");
    let (both, told) = rows(two);
    for row in &both {
        assert_eq!(row["pcnt-running"].as_f64(), Some(100.0), "{row} {told}");
    }
    // It ends, and what it had is free.
    await_leases(&daemon, "tool", &[]);

    // Taken away and given back: the tool says for how long it counted.
    let two = stat("cycles,cycles:u", "6s");
    await_leases(&daemon, "tool", &[2]);
    // It tries first, and has a lease for each try.
    std::thread::sleep(Duration::from_millis(500));
    let lease = await_leases(&daemon, "tool", &[2])[0].id;
    let mut held = daemon.connect().acquire(&whole(2)).expect("it waits");
    let _ = daemon.out(&["revoke", &lease.to_string(), "--grace", "50"]);
    held.wait().expect("it is served");
    await_counting(&vm, 6, 6);
    std::thread::sleep(Duration::from_millis(1500));
    drop(held);
    await_leases(&daemon, "tool", &[2]);
    let (both, told) = rows(two);
    for row in &both {
        let running = row["pcnt-running"].as_f64().expect("a number");
        assert!((10.0..90.0).contains(&running), "{row} {told}");
    }

    // A tool that is killed leaves nothing behind.
    let mut two = stat("cycles,cycles:u", "30s");
    await_leases(&daemon, "tool", &[2]);
    two.kill().expect("it is there");
    two.wait().expect("it has ended");
    await_leases(&daemon, "tool", &[]);
}

/// What tools of several vCPUs count takes turns on the same counters; what is not wanted any
/// more is given back, and the rest is held on.
#[test]
fn a_part_of_what_tools_have_is_given_back() {
    if skipped_without_kvm("a_part_of_what_tools_have_is_given_back") {
        return;
    }
    let daemon = Daemon::with(&["--budget", "programmable=9"], "");
    let rates = RATES.replace("counters = 6", "counters = 12");
    let socket = daemon.socket().display().to_string();
    let asks = ["--arbiter", &socket, "--cpus", "2"];
    let vm = Vm::boot_kernel(&umpire::path(), &rates, &asks, counts);
    await_counting(&vm, 6, 6);
    let stat = |vcpu: &str, events: &str, time: &str| {
        let mut stat = vm.command(&["stat", "--vcpu", vcpu, "-e", events, "--for", time]);
        stat.stdout(Stdio::null()).stderr(Stdio::null());
        stat.spawn().expect("umpire can be started")
    };
    let mut three = stat("0", "{cycles,cycles:u,cycles:k}", "30s");
    await_leases(&daemon, "tool", &[3]);
    // It tries first, and has a lease for each try.
    std::thread::sleep(Duration::from_millis(500));
    let lease = await_leases(&daemon, "tool", &[3])[0].id;
    let mut two = stat("1", "{cycles,cycles:u}", "30s");
    std::thread::sleep(Duration::from_millis(500));
    // They never count at a time on one thread.
    await_leases(&daemon, "tool", &[3]);
    three.kill().expect("it is there");
    three.wait().expect("it has ended");
    let held = await_leases(&daemon, "tool", &[2]);
    assert_eq!(held[0].id, lease, "the same goes on");
    assert!(held[0].blind_ms == 0, "{held:?}");
    two.kill().expect("it is there");
    two.wait().expect("it has ended");
    await_leases(&daemon, "tool", &[]);
}

/// A VM and its tools in a leased group have theirs out of that, and each says so in a line. With
/// more vCPUs than threads may have leases there the VM is one of these threads.
#[test]
fn what_runs_in_a_leased_group_says_out_of_what_it_counts() {
    let name = "what_runs_in_a_leased_group_says_out_of_what_it_counts";
    if skipped_without_kvm(name) {
        return;
    }
    let Some(slice) = Slice::new(name) else {
        return;
    };
    let daemon = Daemon::with(&["--budget", "programmable=8"], "");
    let above = daemon.acquire(&Request {
        counters: vec![Counters::programmable(8)],
        scope: Some(LeaseScope::Cgroup),
        cgroup: Some(slice.make("/vms")),
        ..Request::default()
    });
    let above = above.lease().id;
    let folder = tempfile::tempdir().expect("a folder");
    let [inside, said] = ["umpire", "said"].map(|name| folder.path().join(name));
    let script = format!(
        "#!/bin/sh\necho $$ > {}\n[ \"$1\" = run ] && exec 2> {}\nexec {} \"$@\"\n",
        slice.folder.join("vms/cgroup.procs").display(),
        said.display(),
        umpire::path().display()
    );
    std::fs::write(&inside, script).expect("a file");
    std::fs::set_permissions(&inside, PermissionsExt::from_mode(0o755)).expect("it is ours");
    let rates = RATES.replace("counters = 6", "counters = 12");
    let socket = daemon.socket().display().to_string();
    let asks = [
        "--arbiter",
        &socket,
        "--arbiter-terms",
        "label=web",
        "--cpus",
        "33",
    ];
    let vm = Vm::boot_kernel(&inside, &rates, &asks, counts);
    let of_vm = await_leases(&daemon, "web", &[6]);
    assert_eq!(of_vm[0].within, Some(above), "{of_vm:?}");
    let lines = |text: &[u8]| {
        let text = String::from_utf8_lossy(text).into_owned();
        let out_of = format!("out of lease {above}, of the control group that the VM is in");
        (text.matches(&out_of).count(), text)
    };
    let (count, told) = lines(&std::fs::read(&said).expect("a file"));
    assert_eq!(count, 1, "{told}");
    for (words, right) in [
        (&["stat", "--vcpu", "0", "-e", "cycles"][..], 1),
        (&["stat", "--vcpu", "0", "-e", "cycles", "-r", "2"], 1),
        // It takes no counter.
        (&["stat", "--vcpu", "0", "-e", "vm-exits"], 0),
        (&["record", "--vcpu", "0", "-e", "cycles"], 1),
        (&["record", "--vcpu", "0", "-e", "cycles", "-q"], 0),
    ] {
        let output = vm.tool(&[words, &["--for", "300ms"]].concat());
        let (count, told) = lines(&output.stderr);
        assert!(output.status.success(), "{words:?}: {told}");
        assert_eq!(count, right, "{words:?}: {told}");
    }

    // Moved out of the group it has another lease, and nobody names the one of before.
    let out = slice.folder.join("cgroup.procs");
    std::fs::write(out, vm.pid().to_string()).expect("a group of ours");
    let until = Instant::now() + PATIENCE;
    while await_leases(&daemon, "web", &[6])[0].within.is_some() {
        assert!(Instant::now() < until, "{}", daemon.log());
        std::thread::sleep(Duration::from_millis(50));
    }
    let output = vm.tool(&["stat", "--vcpu", "0", "-e", "cycles", "--for", "300ms"]);
    let (_, told) = lines(&output.stderr);
    assert!(
        output.status.success() && !told.contains("out of lease"),
        "{told}"
    );
}

/// How many Unix sockets a process listens at.
fn listening(pid: u32) -> usize {
    let folder = format!("/proc/{pid}/fd");
    let links = std::fs::read_dir(folder).expect("it runs").flatten();
    let links = links.filter_map(|one| std::fs::read_link(one.path()).ok());
    let sockets: Vec<String> = links
        .filter_map(|link| {
            let link = link.to_str()?.strip_prefix("socket:[")?;
            Some(link.trim_end_matches(']').to_owned())
        })
        .collect();
    let table = std::fs::read_to_string("/proc/net/unix").expect("the kernel's table");
    let rows = table.lines().map(|row| row.split_whitespace().collect());
    // Their flags are the fourth column (SO_ACCEPTCON), their inode the seventh.
    rows.filter(|row: &Vec<&str>| {
        row.get(3) == Some(&"00010000")
            && row
                .get(6)
                .is_some_and(|at| sockets.iter().any(|one| one == at))
    })
    .count()
}

/// An arbiter of the VM's own decides between its guest and its tools, in the VM's process:
/// nobody else can reach it.
#[test]
fn a_vm_may_have_an_arbiter_of_its_own() {
    if skipped_without_kvm("a_vm_may_have_an_arbiter_of_its_own") {
        return;
    }
    let rates = RATES.replace("counters = 6", "counters = 12");
    let asks = ["--arbiter", "own:programmable=7", "-v", "--log-file", "log"];
    let mut vm = Vm::boot_kernel(&umpire::path(), &rates, &asks, counts);
    await_counting(&vm, 6, 6);
    let log = std::fs::read_to_string(vm.path("log")).expect("the log");
    assert!(log.contains("an arbiter of its own"), "{log}");
    assert!(
        log.contains("lease 1 on the host's counters: 6 of 6"),
        "{log}"
    );
    let stat = |events| vm.tool(&["stat", "-x", ",", "-e", events, "--for", "100ms"]);
    let told = |output: &std::process::Output| {
        let all = [&output.stdout[..], &output.stderr].concat();
        String::from_utf8_lossy(&all).into_owned()
    };
    let one = told(&stat("cycles"));
    assert!(one.contains(",cycles,") && !one.contains('<'), "{one}");
    // A group has to be counted at once.
    let two = told(&stat("{cycles,cycles:u}"));
    assert!(
        two.contains("<not counted>") && two.contains("held by"),
        "{two}"
    );
    // It says itself who that is, as nobody else can be asked.
    assert!(two.contains("lease 1 (vm "), "{two}");
    assert_eq!(listening(vm.pid()), 1, "that for tools");
    vm.stop();

    // With fewer than its PMU has it starts all the same, and CPUID says so.
    let asks = [
        "--arbiter",
        "own:programmable=2",
        "--oversubscribe",
        "refuse",
    ];
    let vm = Vm::boot_kernel(&umpire::path(), &rates, &asks, counts);
    await_counting(&vm, 2, 2);
}

/// `auto` asks nobody where no physical PMU counts.
#[test]
fn a_vm_without_a_physical_pmu_needs_no_lease() {
    if skipped_without_kvm("a_vm_without_a_physical_pmu") {
        return;
    }
    let daemon = daemon();
    let kernel = Kernel::new(Protocol::Linux64, |a, _| spin_forever(a)).expect("a kernel");
    let status = Command::new(umpire::path())
        .args([
            "run",
            "--memory",
            "32",
            "--timeout",
            "0.5",
            "--counters",
            "clock",
            "--kernel",
        ])
        .arg(kernel.path())
        .env("UMPIRE_ARBITER", daemon.socket())
        .stdin(Stdio::null())
        .status();
    assert_eq!(status.expect("umpire starts").code(), Some(124));
    let log = daemon.log();
    assert!(!log.contains("lease"), "{log}");
}

/// Who asks, waits, is revoked and comes back, with counts that are true to the last event.
#[test]
fn the_demo_of_a_host() {
    if skipped_without_kvm("the_demo_of_a_host") {
        return;
    }
    let output = Command::new("timeout")
        .arg("60")
        .arg(umpire::path())
        .args(["demo", "host", "-j"])
        .output()
        .expect("it starts");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{errors}");
    let shown: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let lines = shown["lines"].as_array().expect("lines");
    let mut lines = lines.iter();
    for (who, what) in [
        ("blue-1", "holds 2 of 2"),
        ("blue-2", "holds 2 of 2"),
        ("green-1", "holds 6 of 6"),
        ("tool", "counts 2 events of blue-1"),
        ("blue-1: tool", "holds 2 of 2"),
        ("hog", "asks for 3"),
        ("hog", "waits"),
        ("blue-1: tool", "has ended"),
        ("green-1", "holds 3 of 6"),
        ("hog", "holds 3 of 3"),
        ("operator", "revokes"),
        ("hog", "has ended: user"),
        ("green-1", "holds 6 of 6"),
    ] {
        let is_next = |line: &Value| {
            line["who"]
                .as_str()
                .is_some_and(|name| name.starts_with(who))
                && line["what"]
                    .as_str()
                    .is_some_and(|text| text.starts_with(what))
        };
        assert!(lines.by_ref().any(is_next), "{who} {what}: {shown:#}");
    }
    let holders = shown["holders"].as_array().expect("holders");
    assert_eq!(holders.len(), 3, "{shown:#}");
    for counter in holders
        .iter()
        .flat_map(|one| one["counters"].as_array().expect("counters"))
    {
        assert_eq!(counter["events"], counter["truth"], "{shown:#}");
    }
    let green = &holders[2]["counters"];
    assert!(
        green[5]["blind"].as_u64() > green[0]["blind"].as_u64(),
        "{shown:#}"
    );
}
