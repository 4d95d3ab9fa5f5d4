//! The NMI watchdog of Debian's kernel: it takes its counter, ticks, and finds a processor that
//! hangs with interrupts off.

use guest_tests::linux::{LinuxImage, Step, UnderUmpire, steps};
use vmm::config::Engine;

use super::{cycles, newer, older};

/// A period of a second rather than ten, and a panic at a lockup.
const HASTY: &str = "echo 1 > /proc/sys/kernel/watchdog_thresh; \
     echo 1 > /proc/sys/kernel/hardlockup_panic";
/// NMIs of the one processor.
const NMIS: &str = "awk '/NMI:/ { print $2 }' /proc/interrupts";

/// One tick for each of four seconds; half of them have to be seen even if L1 is busy.
fn check(engine: Engine, flags: [&str; 4], image: LinuxImage) {
    let image = image.with_lockup().expect("the module");
    let flags = [&flags, cycles(engine).as_slice()].concat();
    let script = [
        "cat /proc/sys/kernel/nmi_watchdog",
        HASTY,
        NMIS,
        "taskset 1 spin 4",
        NMIS,
        "dmesg | grep -E 'WARNING|lockup|self-detected' || true",
        "insmod /lib/modules/lockup.ko",
    ];
    let guest = UnderUmpire::on(engine, image, &flags).with_kernel_options("nmi_watchdog=1");
    let (console, errors) = guest.run_to_any_end(&script.join("\n"));
    let told = format!("{console}\n{errors}");
    let steps = steps(&console);
    let [on, _, before, _, after, quiet, hung] = steps.as_slice() else {
        panic!("seven steps:\n{told}");
    };
    assert_eq!(
        on.output.trim(),
        "1",
        "the watchdog has its counter:\n{told}"
    );
    let number = |step: &Step| step.output.trim().parse::<u32>().expect("a number");
    let ticks = number(after) - number(before);
    assert!((2..=8).contains(&ticks), "{ticks} ticks in four seconds");
    assert_eq!(quiet.output.trim(), "", "no lockup before there is one");
    assert_eq!(hung.status, None, "the module does not return:\n{told}");
    for text in [
        "Watchdog detected hard LOCKUP on cpu 0",
        "RIP: 0010:lockup_init",
        "Kernel panic - not syncing: Hard LOCKUP",
    ] {
        assert!(hung.output.contains(text), "no {text:?} in:\n{told}");
    }
}

#[test]
fn the_watchdog_of_linux_6_1_finds_a_hard_lockup_on_intel() {
    let flags = ["--cpu-vendor", "intel", "--cpu-model", "skylake"];
    check(Engine::Kvm, flags, older());
}

pub(super) fn linux_6_12_on_amd(engine: Engine) {
    let flags = ["--cpu-vendor", "amd", "--cpu-model", "zen2"];
    check(engine, flags, newer());
}
