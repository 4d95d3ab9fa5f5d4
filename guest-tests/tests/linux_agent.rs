//! `umpire record -a -g` beside a Linux guest whose kernel has no BTF: `umpire-agent` in it tells
//! what runs.

use std::collections::BTreeMap;
use std::time::Duration;

use guest_tests::linux::profile::{Recordings, Sample, Tally, address, word};
use guest_tests::linux::{LinuxImage, Script, UnderUmpire};
use guest_tests::umpire;
use vmm::config::Engine;

/// One program runs all the time, one computes in a known function, one in the kernel; the last
/// one is there only for moments, in one process after the other.
const START: &str = "walk compute >/tmp/compute & echo compute $!; walk kernel >/tmp/kernel & \
                     echo kernel $!; umpire-agent >/tmp/agent 2>&1 & \
                     while :; do timeout 1 walk kernel >/dev/null; done 2>/dev/null & \
                     sleep 2; until grep outer /tmp/compute; do sleep 0.1; done; echo types $(hexdump -n 2 /sys/kernel/btf/vmlinux)";
const FLAGS: [&str; 7] = [
    "--agent",
    "--cpu-vendor",
    "intel",
    "--pmu",
    "intel-v2",
    "--cpus",
    "2",
];

/// Of the guest's time.
const SETTLED_NS: u64 = 50_000_000;
/// Of the host's, half of the recording: an agent in a slow L1 takes 4 s from being asked to its
/// first answer.
const ANSWERS_BY_NS: u64 = 6_000_000_000;

/// A line that has `record` called: for so many seconds of the host's on KVM, and a shorter time of
/// the guest's where that is another.
fn record(engine: Engine, options: &str, seconds: u32, file: &str) -> String {
    match engine {
        Engine::Kvm => {
            let arguments = format!("record -a -F 97 --for {seconds}s -o {file} {options}");
            UnderUmpire::on_host(&arguments)
        }
        Engine::Emu => {
            let arguments = format!("record -a -F 2000 -o {file} {options}");
            UnderUmpire::on_host_during(&arguments, "sleep 0.5")
        }
    }
}

fn check(engine: Engine, image: LinuxImage) {
    let image = image.without_btf().expect("a kernel");
    let image = image.with_program("umpire-agent", umpire::agent());
    let recordings = Recordings::of("walk");
    let guest = match engine {
        // On a machine with much else to do it takes some 150 s.
        Engine::Kvm => UnderUmpire::new(image, &[&FLAGS[..], &["--counters", "clock"]].concat())
            .with_timeout(Duration::from_secs(300)),
        Engine::Emu => UnderUmpire::new(image, &FLAGS).emulated(),
    };
    let guest = guest.with_kernel_options("nmi_watchdog=0");
    let log = Script::default()
        .step("start", START)
        .step("record", record(engine, "-g", 12, "umpire.data"))
        .step("without it", "killall umpire-agent")
        // The first one meets an agent that has gone without a word.
        .step("record unheard", record(engine, "", 1, "unheard.data"))
        .step("record later", record(engine, "", 1, "later.data"))
        .step("end", "killall walk; cat /tmp/agent")
        .run_on(&guest.with_host(recordings.path()));
    let said = log.of("start");
    println!("{}", log.errors());
    assert!(!said.contains("eb9f"), "it has BTF: {said}");
    for file in ["unheard.data", "later.data"] {
        let (named, kernel) = without_names(&recordings, file);
        assert!(named * 100 >= kernel * 95, "{file}: {named} of {kernel}");
    }
    let why = "programs of the guest have no names: the kernel 6.";
    let errors = log.errors();
    let reasons: Vec<&str> = errors.lines().filter(|line| line.contains(why)).collect();
    let parts = ["does not describe its tasks", "umpire-agent in the guest"];
    let is_whole = |line: &&str| parts.iter().all(|part| line.contains(part));
    assert!((1..=2).contains(&reasons.len()), "{errors}");
    assert!(reasons.iter().all(is_whole), "{errors}");
    let pid = |name| word(said, name).parse::<u64>().expect("a pid");
    let pids = ["compute", "kernel"].map(pid);
    // Only the first program runs these.
    let [leaf, middle] = ["leaf", "middle"].map(|name| address(word(said, name)));

    let mut tally = Tally::default();
    // By the second of the recording.
    let mut unknown: BTreeMap<u64, u32> = BTreeMap::new();
    let fields = "comm,pid,time,ip,ring,sym,dso,callchain";
    let samples = recordings.samples("umpire.data", fields);
    let at = |sample: &Sample| sample.0["time_ns"].as_u64().expect("a time");
    // The agent begins to look when it is asked, which is much of a short recording.
    let settled = match engine {
        Engine::Emu => SETTLED_NS,
        Engine::Kvm => {
            let known = samples.iter().find(|it| !it.0["pid"].is_null());
            known.map(at).expect("the agent answers")
        }
    };
    println!("the first answer: {settled} ns");
    assert!(
        settled < ANSWERS_BY_NS,
        "the agent answers after {settled} ns"
    );
    for sample in samples {
        let at = at(&sample);
        if at < settled {
            continue;
        }
        let (ip, chain) = (sample.ip(), sample.chain());
        let is_of = |pid: u64| sample.0["pid"] == pid;
        tally.judge("a task is known", !sample.0["pid"].is_null());
        if sample.0["pid"].is_null() {
            *unknown.entry(at / 1_000_000_000).or_default() += 1;
        }
        let own = sample.symbol();
        if sample.in_program() && (leaf..middle).contains(&ip) {
            let named = sample.0["dso"] == "/usr/bin/walk" && matches!(own, "leaf" | "inner");
            tally.judge("a program computes", is_of(pids[0]) && named);
            tally.judge("its callers", chain.join(" ").contains("middle outer main"));
        }
        if !sample.in_kernel() {
            continue;
        }
        // Without its types the kernel's chain has few callers.
        let is_random = own.contains("chacha") || chain.contains(&"get_random_bytes_user");
        if is_random {
            let is_right = sample.0["comm"] == "walk" && !is_of(pids[0]);
            tally.judge("in the kernel", is_right);
            tally.judge("of all the long one", is_of(pids[1]));
        }
        // Whatever it does there: its samples are all that have its pid. It reads random bytes, which
        // are made and copied. Interrupts of the agent's
        // port have it too, each with exits for every byte: 3 of 5 samples where an exit takes
        // 150 µs.
        if is_of(pids[1]) {
            tally.judge("symbols of the kernel", !own.is_empty());
            let is_copied = own.starts_with("copy_user");
            if !own.starts_with("io_serial_") {
                tally.judge("what it is there for", is_random || is_copied);
            }
        }
    }
    println!("{tally:?}, without a task: {unknown:?}");
    for what in [
        "a task is known",
        "a program computes",
        "its callers",
        "in the kernel",
        "symbols of the kernel",
    ] {
        tally.at_least(95, what);
    }
    tally.at_least(25, "what it is there for");
    let (long, all) = tally.of("of all the long one");
    assert!(0 < long && long < all, "there were others: {tally:?}");

    let sorted = ["report", "--no-children", "--sort", "pid,dso,symbol"];
    let report = recordings.umpire("umpire.data", &sorted);
    let rows = report.lines().filter(|line| !line.starts_with('#'));
    assert_eq!(
        rows.filter(|row| row.ends_with(" leaf")).count(),
        1,
        "{report}"
    );
}

/// Of a kernel that does not describe itself, and without an agent, samples have what they had
/// before there were tasks: rings, CR3, symbols of the kernel. Of those in the kernel how many
/// have a symbol, and how many there are.
fn without_names(recordings: &Recordings, file: &str) -> (u32, u32) {
    let (mut all, mut kernel, mut named, mut programs) = (0, 0, 0, 0);
    for sample in recordings.samples(file, "comm,pid,tid,ring,cr3,sym,dso") {
        all += 1;
        for field in ["comm", "pid", "tid"] {
            assert!(sample.0[field].is_null(), "{sample:?}");
        }
        assert!(sample.0["cr3"].is_string(), "{sample:?}");
        if sample.in_kernel() {
            kernel += 1;
            named += u32::from(!sample.symbol().is_empty());
        } else {
            programs += u32::from(sample.symbol().is_empty());
        }
    }
    println!(
        "{file}: {all}, {kernel} in the kernel, {named} with a symbol, {programs} of programs"
    );
    assert!(all >= 20 && kernel >= 10, "too few");
    assert_eq!(kernel + programs, all, "programs have no symbols");
    let report = recordings.umpire(file, &["report"]);
    assert!(report.contains("[user cr3=0x"), "{report}");
    // The VM may still know tasks of before; none of them has a sample.
    assert!(!report.contains(" walk "), "{report}");
    let rows = report.lines().filter(|line| line.contains("[k] "));
    assert!(rows.count() > 0, "{report}");
    (named, kernel)
}

#[test]
fn linux_6_1() {
    check(Engine::Kvm, LinuxImage::fetch().expect("the guest's image"));
}

#[test]
fn linux_6_12_on_emu() {
    check(
        Engine::Emu,
        LinuxImage::fetch_newer().expect("the guest's image"),
    );
}
