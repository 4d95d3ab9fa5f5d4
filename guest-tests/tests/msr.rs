//! The `msr` backend where there is an msr device: in an unmodified Linux guest in L1, whose
//! registers are Umpire's own virtual PMU.

use std::path::PathBuf;

use guest_tests::linux::{LinuxImage, Step, UnderUmpire};
use guest_tests::umpire;

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
    let image = LinuxImage::fetch().expect("the guest's image");
    let image = image.with_program(CONTRACT, contract());
    let guest = UnderUmpire::new(image, flags).with_kernel_options("nmi_watchdog=0");
    guest.alone().run(&script.join("\n")).steps
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
