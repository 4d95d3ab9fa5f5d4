//! The `msr` backend where there is an msr device: in an unmodified Linux guest in L1, whose
//! registers are Umpire's own virtual PMU.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use guest_tests::l1::{End, Machine, Run};
use guest_tests::linux::{self, Image, Step};
use guest_tests::umpire;

/// One guest at a time: two emulated machines on two processors would measure each other.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const LOAD: &str = "insmod /lib/modules/msr.ko allow_writes=on";
const CONTRACT: &str = "msr-contract";
/// The guest's own `perf` holds a counter of CPU 0 meanwhile.
const REFUSED: &str = "perf stat -C 0 -e cycles sleep 60 2>/dev/null & sleep 2; \
     msr-contract; echo status $?; kill %1";

/// The program beside `umpire`, built with the same profile.
fn contract() -> PathBuf {
    let path = umpire::path().with_file_name("msr-contract");
    assert!(
        path.exists(),
        "{} is missing; build it with: cargo build -p guest-tests --bins",
        path.display()
    );
    path
}

/// Boots the guest with `model` and without the NMI watchdog; runs `script`.
fn boot(flags: &[&str], script: &[&str]) -> Vec<Step> {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let image = Image::fetch().expect("the guest's image");
    let guest = image
        .with_program(CONTRACT, contract())
        .with_script(&script.join("\n"))
        .expect("the guest's initramfs");
    let cmdline = format!("{} nmi_watchdog=0", linux::COMMAND_LINE);
    let run = Run::new(umpire::path())
        .args(["run", "--memory", "512", "--timeout", "180"])
        .args(["--cmdline", &cmdline])
        .args(flags)
        .arg("--kernel")
        .arg(guest.kernel())
        .arg("--initrd")
        .arg(guest.initrd());
    let output = Machine::new()
        .memory_mib(2048)
        .timeout(Duration::from_secs(240))
        .output(&run)
        .expect("L1 works");
    let out = String::from_utf8_lossy(&output.stdout);
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.outcome.end, End::Exited(0), "{out}\n{err}");
    let steps = linux::steps(&out);
    assert_eq!(steps.len(), script.len(), "{out}\n{err}");
    steps
}

fn check(flags: &[&str], found: &str) {
    let steps = boot(flags, &[LOAD, CONTRACT, REFUSED, CONTRACT]);
    let [load, first, refused, second] = steps.as_slice() else {
        panic!("four steps");
    };
    assert_eq!(load.status, Some(0), "{}", load.output);
    // Twice: what the first run and `perf` left behind does not stand in the way.
    for step in [first, second] {
        println!("{}", step.output);
        assert_eq!(step.status, Some(0), "{}", step.output);
        assert!(step.output.contains(found), "{}", step.output);
        let kept = step.output.matches("kept: ").count();
        assert_eq!(kept, pmu_virt::contract::all_clauses().count());
    }
    println!("{}", refused.output);
    assert!(refused.output.contains("status 2"), "{}", refused.output);
    let holder = "which enables counters: `perf` or another tool uses them";
    assert!(refused.output.contains(holder), "{}", refused.output);
}

#[test]
fn counters_with_their_own_enables_keep_the_contract() {
    let found = "CPU 0: amd-core with 6 programmable and 0 fixed counters, started one by one";
    check(&["--pmu", "amd-core"], found);
}

#[test]
fn counters_with_a_common_enable_keep_the_contract() {
    let found = "CPU 0: intel-v2 with 4 programmable and 3 fixed counters, started by one write";
    check(&["--cpu-vendor", "intel", "--pmu", "intel-v2"], found);
}
