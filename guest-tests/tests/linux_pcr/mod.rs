//! Counter reservations under an unmodified Debian kernel: its own driver beside counters that
//! others hold, and the three arbiters of `guest-tests/linux/pcr` as its modules. On KVM in L1, and
//! what needs no firmware on the engine emu.

mod arbiters;
mod budget;
mod interacting;
mod on_emu;
mod smm;
mod unaware;

use std::sync::OnceLock;

use arbiter::abi::STATUS_PRIVATE;
use guest_tests::linux::{LinuxImage, UnderUmpire};
use vmm::config::Engine;

/// Firmware that keeps the first counter for itself.
const FIRMWARE: [&str; 4] = [
    "--firmware",
    "builtin",
    "--firmware-counter",
    "cycles,on=PMC0",
];
/// The NMI watchdog would hold counters from the start.
const NO_WATCHDOG: &str = "nmi_watchdog=0";
/// The same event twice: Linux gives the first one Intel's fixed-function counter.
const EVENTS: [&str; 2] = ["cycles", "cpu-cycles"];
/// How far cycles may be from run time times TSC frequency. The tests in `linux.rs` look at the
/// percents; a counter that somebody else has shows in orders of magnitude.
const TOLERANCE: f64 = 0.4;

/// A line that has `perf` count cycles: twice, where neighbours may disturb it. Its reports are the
/// output.
fn perf(engine: Engine) -> String {
    let (rounds, seconds) = match engine {
        Engine::Kvm => ("1 2", 0.4),
        Engine::Emu => ("1", 0.1),
    };
    format!(
        "rm -f /tmp/s; for i in {rounds}; do perf stat -x, --append -o /tmp/s \
         -e cycles,cpu-cycles,task-clock taskset 1 spin {seconds}; done; cat /tmp/s"
    )
}

/// A guest with two vCPUs of which nothing but the script uses counters.
fn guest(engine: Engine, image: LinuxImage, flags: &[&str]) -> UnderUmpire {
    let flags = [flags, &["--cpus", "2"]].concat();
    UnderUmpire::on(engine, image, &flags).with_kernel_options(NO_WATCHDOG)
}

/// The guest with the modules, which are built once.
fn image() -> LinuxImage {
    static IMAGE: OnceLock<LinuxImage> = OnceLock::new();
    let build = || LinuxImage::fetch().and_then(LinuxImage::with_arbiters);
    let image = IMAGE.get_or_init(|| build().expect("the guest's image"));
    image.clone()
}

/// The same with Debian's newer kernel.
fn newer_image() -> LinuxImage {
    static IMAGE: OnceLock<LinuxImage> = OnceLock::new();
    let build = || LinuxImage::fetch_newer().and_then(LinuxImage::with_arbiters);
    let image = IMAGE.get_or_init(|| build().expect("the guest's image"));
    image.clone()
}

/// Whether a status word is that of a counter with an access cookie.
fn is_private(status: &str) -> bool {
    let digits = status.trim_start_matches("0x");
    let word = u64::from_str_radix(digits, 16).expect("a status word");
    word & STATUS_PRIVATE != 0
}
