//! A tool that finds no room has the owners of the guest's reserved counters asked.

use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use arbiter::abi;
use guest_tests::micro::Written;
use guest_tests::umpire::{self, skipped_without_firmware, skipped_without_kvm};
use guest_tests::vm::Vm;
use iced_x86::code_asm::CodeAssembler;
use perfmon_abi::consts::{PFM_FL_NOTIFY_BLOCK, PFM_REGFL_OVFL_NOTIFY};
use perfmon_abi::{LoadArg, PmcArg, PmdArg};
use serde_json::Value;
use umpire_perfmon::{Call, Client, Event, Wait};

use super::RATES;
use super::reservations::{await_held, await_word, write};

/// The guest's cookie.
const OWN: u64 = 0x1234_5678;
/// `cycles` in both rings, as PMC values have it.
const CYCLES: u64 = 0x43_0076;
/// Five events at the same time: of six counters the guest has reserved two.
const FIVE: &str = "{cycles,instructions,branches,branch-misses,cycles:u}";

/// The notice that the hypervisor asks for a counter.
fn asked(n: u64) -> u64 {
    abi::NOTICE_ASKED
        | n << abi::NOTICE_POSITION_SHIFT
        | abi::LAYER_HYPERVISOR << abi::NOTICE_LAYER_SHIFT
}

fn reply(a: &mut CodeAssembler, n: u64, reply: u64) -> Written {
    let value = reply | n << abi::REPLY_POSITION_SHIFT;
    write(a, (abi::MSR_REPLY, 0), value, OWN)
}

/// Holds PMC4 and PMC5. Asked for the first time it keeps both, then it yields PMC5, and
/// then it does not answer any more.
fn owner(a: &mut CodeAssembler) -> Written {
    for n in [4, 5] {
        write(a, (abi::MSR_MANAGEMENT_KEY, n), OWN, 0)?;
        write(a, (abi::MSR_ACCESS_KEY, n), OWN, OWN)?;
    }
    for n in [5, 4] {
        await_word(a, abi::MSR_NOTICE, asked(n))?;
        reply(a, n, abi::REPLY_REFUSE)?;
    }
    await_word(a, abi::MSR_NOTICE, asked(5))?;
    reply(a, 5, abi::REPLY_YIELD)?;
    let mut forever = a.create_label();
    a.set_label(&mut forever)?;
    a.jmp(forever)
}

fn boot(flags: &[&str]) -> Vm {
    let rates = RATES.replace("COUNT", "6");
    let host_first = ["--host-policy", "host-first", "--grace", "300"];
    let flags = [&host_first, flags].concat();
    let vm = Vm::boot_kernel(&umpire::path(), &rates, &flags, owner);
    await_held(&vm, &["PMC4", "PMC5"]);
    vm
}

fn stat(vm: &Vm, events: &str) -> Output {
    vm.tool(&[
        "stat", "--log-fd", "1", "-j", "-e", events, "--for", "200ms",
    ])
}

/// No event of `output` has a count, and it says why.
fn is_not_counted(output: &Output, why: &str) {
    let printed = String::from_utf8_lossy(&output.stdout);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains(why), "'{why}' is not in: {told}");
    let counts = printed
        .lines()
        .filter(|line| line.contains("<not counted>"));
    assert!(counts.count() >= 5, "{printed}");
}

/// Every event of `output` has a count, of the whole time.
fn is_counted(output: &Output) {
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    let printed = String::from_utf8_lossy(&output.stdout);
    let rows = printed
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"));
    let rows: Vec<Value> = rows.collect();
    let counts = rows.iter().filter(|row| row["counter-value"].is_string());
    assert_eq!(counts.count(), 5, "{printed}");
    for row in &rows {
        assert_eq!(row["pcnt-running"], 100.0, "{row}");
    }
}

#[test]
fn an_owner_keeps_its_counters_yields_them_or_is_silent() {
    if skipped_without_kvm("an_owner") {
        return;
    }
    let mut vm = boot(&["--scheme", "interacting", "--audit", "audit.json"]);
    // It keeps them.
    let why = "vCPU 0: the guest kernel holds PMC4 PMC5: the holder refused to yield";
    is_not_counted(&stat(&vm, FIVE), why);
    await_held(&vm, &["PMC4", "PMC5"]);

    // It yields one, which is the hypervisor's as long as the context is loaded.
    is_counted(&stat(&vm, FIVE));
    await_held(&vm, &["PMC4"]);

    // There is room now, and nobody is asked.
    is_counted(&stat(&vm, FIVE));
    let six = FIVE.replace('}', ",instructions:u}");
    let why = "PMC4: another layer's minimum would not be left";
    is_not_counted(&stat(&vm, &six), why);
    let told = vm.printed(&["pcr", "policy", "kernel:min=0"]);
    assert!(told.contains("kernel"), "{told}");
    let began = Instant::now();
    let why = "PMC4: the holder did not answer in time";
    is_not_counted(&stat(&vm, &six), why);
    assert!(
        began.elapsed() > Duration::from_millis(250),
        "it had its grace"
    );
    vm.stop();
    let audit = std::fs::read_to_string(vm.path("audit.json")).expect("the audit");
    for part in [
        r#""what":"reserve","held":1,"cookie":"hypervisor","result":"pending""#,
        r#""layer":"kernel","counter":"PMC5","event":"yielded""#,
        r#""layer":"hypervisor","counter":"PMC5","event":"released""#,
    ] {
        assert!(audit.contains(part), "{part} is not in: {audit}");
    }
}

/// The firmware answers for its counters as long as its phase lasts: it yields one, and
/// keeps the other.
#[test]
fn firmware_answers_in_its_phase() {
    if skipped_without_kvm("firmware_answers") || skipped_without_firmware("firmware_answers") {
        return;
    }
    let rates = RATES.replace("COUNT", "6");
    let flags = [
        "--scheme",
        "interacting",
        "--policy",
        "kernel:min=0",
        "--firmware",
        "builtin",
        "--firmware-counter",
        "cycles,on=PMC5,yield",
        "--firmware-counter",
        "cycles,on=PMC4",
        "--firmware-delay",
        "5000",
        "--host-policy",
        "host-first",
        "--audit",
        "audit.json",
    ];
    let began = Instant::now();
    let mut vm = Vm::boot_kernel(&umpire::path(), &rates, &flags, |a| a.ud2());
    await_held(&vm, &["PMC4", "PMC5"]);
    is_counted(&stat(&vm, FIVE));
    await_held(&vm, &["PMC4"]);
    let six = FIVE.replace('}', ",instructions:u}");
    let why = "vCPU 0: the firmware holds PMC4: the holder refused to yield";
    is_not_counted(&stat(&vm, &six), why);
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "its phase still lasts"
    );
    let own = "umpire-firmware: ";
    let expected = [
        "counter 0: position 5 reserved on 1 of 1 CPUs, others are dropped",
        "counter 1: position 4 reserved on 1 of 1 CPUs, others are dropped",
        "counter 0: yielded on CPU 0 to the hypervisor",
        "counter 1: kept on CPU 0, asked for by the hypervisor",
    ];
    let console = vm.console();
    let told: Vec<&str> = console
        .lines()
        .filter_map(|l| l.strip_prefix(own))
        .collect();
    assert_eq!(told, expected, "{console}");
    vm.stop();
    let audit = std::fs::read_to_string(vm.path("audit.json")).expect("the audit");
    for part in [
        r#""layer":"firmware","counter":"PMC5","event":"yielded""#,
        r#""layer":"firmware","counter":"PMC4","event":"declined""#,
    ] {
        assert!(audit.contains(part), "{part} is not in: {audit}");
    }
}

#[test]
fn priority_decides_about_an_owner_who_is_silent() {
    if skipped_without_kvm("priority_decides") {
        return;
    }
    let flags = ["--scheme", "single", "--policy", "hypervisor:priority=1"];
    let rates = RATES.replace("COUNT", "6");
    let host_first = ["--host-policy", "host-first", "--grace", "300"];
    // The firmware's code of a VM without firmware is its kernel's.
    let vm = Vm::boot_kernel(
        &umpire::path(),
        &rates,
        &[&host_first[..], &flags].concat(),
        requester,
    );
    await_held(&vm, &["PMC4", "PMC5"]);
    is_counted(&stat(&vm, FIVE));
    await_held(&vm, &["PMC4"]);
}

/// A tool has its vCPU blocked, so that its guest cannot answer: another tool's load ends
/// all the same.
#[test]
fn a_vcpu_that_is_blocked_holds_no_load_up() {
    if skipped_without_kvm("a_vcpu_that_is_blocked") {
        return;
    }
    for cores in [&[][..], &["--cores", "1"]] {
        let rates = RATES.replace("COUNT", "7");
        let policy = ["--host-policy", "host-first", "--grace", "300"];
        let flags = [&policy[..], &["--scheme", "interacting"], cores].concat();
        let vm = Vm::boot_kernel(&umpire::path(), &rates, &flags, owner);
        await_held(&vm, &["PMC4", "PMC5"]);
        let client = Client::connect(vm.socket()).expect("a connection");
        let blocking = client
            .create(PFM_FL_NOTIFY_BLOCK, None, &[])
            .expect("a context");
        let cycles = PmcArg {
            flags: PFM_REGFL_OVFL_NOTIFY,
            value: CYCLES,
            ..PmcArg::default()
        };
        let soon = PmdArg {
            value: 1_000_000_u64.wrapping_neg(),
            ..PmdArg::default()
        };
        for mut call in [
            Call::WritePmcs(vec![cycles]),
            Call::WritePmds(vec![soon]),
            Call::Load(LoadArg { pid: 0, set: 0 }),
            Call::Start(None),
        ] {
            client.call(&blocking, &mut call).expect("it is possible");
        }
        let told = blocking.read_message(Wait::For(Duration::from_secs(20)));
        assert!(matches!(told, Ok(Event::Message(_))), "{told:?}");
        let began = Instant::now();
        let why = "the guest kernel holds PMC4 PMC5: the holder did not answer in time";
        is_not_counted(&stat(&vm, FIVE), why);
        assert!(began.elapsed() < Duration::from_secs(10), "{cores:?}");
        await_held(&vm, &["PMC4", "PMC5"]);
    }
}

/// Requests two counters of the master, and does nothing more.
fn requester(a: &mut CodeAssembler) -> Written {
    let two = abi::REQUEST_RESERVE | 2 << abi::REQUEST_WHICH_SHIFT;
    write(a, (abi::MSR_REQUEST, 0), two, OWN)?;
    let mut forever = a.create_label();
    a.set_label(&mut forever)?;
    a.jmp(forever)
}

#[test]
fn where_nobody_is_asked_the_answer_says_so() {
    if skipped_without_kvm("where_nobody_is_asked") {
        return;
    }
    let vm = boot(&[]);
    let why = "--scheme independent asks nobody";
    is_not_counted(&stat(&vm, FIVE), why);
}

/// Holds PMC1 until the administrator takes it, and asks for four counters then.
fn mover(a: &mut CodeAssembler) -> Written {
    write(a, (abi::MSR_MANAGEMENT_KEY, 1), OWN, 0)?;
    let revoked = abi::NOTICE_REVOKED
        | 1 << abi::NOTICE_POSITION_SHIFT
        | abi::LAYER_HYPERVISOR << abi::NOTICE_LAYER_SHIFT
        | abi::REASON_ADMINISTRATOR << abi::NOTICE_REASON_SHIFT;
    await_word(a, abi::MSR_NOTICE, revoked)?;
    let four = abi::REQUEST_RESERVE | 4 << abi::REQUEST_WHICH_SHIFT;
    write(a, (abi::MSR_REQUEST, 0), four, OWN)?;
    let mut forever = a.create_label();
    a.set_label(&mut forever)?;
    a.jmp(forever)
}

/// A core whose counters a tool has cannot back what the guest asks for; another one can.
#[test]
fn a_vcpu_goes_where_its_request_can_be_granted() {
    if skipped_without_kvm("a_vcpu_goes") {
        return;
    }
    let rates = RATES.replace("COUNT", "6");
    // Two other cores have room: it goes to one of them, and stays there.
    let shared = ["--cpus", "3", "--cores", "3", "--host-policy", "host-first"];
    let flags = [&shared[..], &["--grace", "5000", "--audit", "audit.json"]].concat();
    let mut vm = Vm::boot_kernel(&umpire::path(), &rates, &flags, mover);
    await_held(&vm, &["PMC1"]);
    let events = "{cycles,instructions,branches,branch-misses}";
    let machine = |vm: &Vm| -> Value {
        let listed = vm.printed(&["ls", "-j", &vm.socket()]);
        let listed: Value = serde_json::from_str(&listed).expect("JSON");
        listed["machine"].clone()
    };
    let core_of = |vm: &Vm| {
        let cores = machine(vm)["cores"].clone();
        let mut cores = cores.as_array().expect("a list").iter();
        cores.position(|core| core["vcpu"] == 0)
    };
    let home = core_of(&vm).expect("it runs");
    let core = home.to_string();
    let mut stat = vm.command(&[
        "stat", "--log-fd", "1", "-j", "--core", &core, "-e", events, "--for", "2s",
    ]);
    let stat = stat.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let stat = stat.expect("umpire can be started");
    let began = Instant::now();
    let counts = |machine: &Value| {
        let contexts = machine["contexts"].as_array().expect("a list");
        contexts.iter().any(|one| one["started"] == true)
    };
    while !counts(&machine(&vm)) {
        assert!(began.elapsed() < Duration::from_secs(20), "none counts");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(core_of(&vm), Some(home));
    let took = vm.printed(&["pcr", "revoke", "PMC1", "--vcpu", "0"]);
    assert!(took.contains("PMC1"), "{took}");
    await_held(&vm, &["PMC2", "PMC3", "PMC4", "PMC5"]);
    assert_ne!(core_of(&vm).expect("it runs"), home);
    let output = stat.wait_with_output().expect("an end");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    vm.stop();
    let audit = std::fs::read_to_string(vm.path("audit.json")).expect("the audit");
    for part in [
        r#""elsewhere":6"#,
        r#""result":"pending""#,
        r#""what":"backed""#,
    ] {
        assert!(audit.contains(part), "{part} is not in: {audit}");
    }
}
