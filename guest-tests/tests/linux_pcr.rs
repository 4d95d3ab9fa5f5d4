//! Counter reservations under an unmodified Debian kernel: its own driver beside counters that
//! others hold, and the three arbiters of `guest-tests/linux/pcr` as its modules.

use std::time::Duration;

use guest_tests::linux::{self, Image, MODULES};

/// On a machine without reservations the modules say so, and leave nothing behind.
#[test]
fn arbiters_find_no_reservations_elsewhere() {
    let load = |module: &&str| format!("insmod /lib/modules/{module}.ko");
    let script: Vec<String> = MODULES[..3].iter().map(load).collect();
    let script = format!(
        "{}\ndmesg | grep pcr_\ncat /proc/modules /sys/kernel/debug/kprobes/list",
        script.join("\n")
    );
    let guest = Image::fetch()
        .and_then(Image::with_arbiters)
        .and_then(|image| image.with_script(&script))
        .expect("the guest's image");
    let console = guest.emulate(Duration::from_secs(120)).expect("QEMU works");
    let steps = linux::steps(&console);
    let [loads @ .., log, left] = steps.as_slice() else {
        panic!("five steps:\n{console}");
    };
    for (module, step) in MODULES.iter().zip(loads) {
        assert!(step.output.contains("No such device"), "{}", step.output);
        let line = format!("{module}: no counter reservations on this machine");
        assert!(log.output.contains(&line), "{}", log.output);
    }
    assert!(!log.output.contains("WARNING"), "{}", log.output);
    assert_eq!(left.output, "");
}
