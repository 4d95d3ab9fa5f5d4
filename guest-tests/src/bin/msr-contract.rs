//! Holds the `msr` backend to the contract on the machine that this runs on:
//! in the tests a Linux guest, whose msr device reaches a virtual PMU.
//!
//! Prints what was found and every clause; status 1 if one is broken, 2 if the
//! counters cannot be used.

use std::process::ExitCode;

use guest_tests::passing::{self, TimeDriver};
use pmu_virt::{
    BackendEnv, CountRequest, CounterBackend, EventCode, EventFamily, MsrBackend, MsrOptions,
    Vendor,
};
use vmm::sys::{pin_this_thread, rdtsc};

/// Cycles in a unit.
const UNIT: u64 = 150_000;

/// The event select of cycles.
fn cycles(vendor: Vendor) -> CountRequest {
    let (family, select) = match vendor {
        Vendor::Intel => (EventFamily::Intel, 0x3c),
        Vendor::Amd => (EventFamily::AmdZen, 0x76),
    };
    let event = EventCode::Selected {
        family,
        select,
        umask: 0,
    };
    CountRequest::plain(event, true, true)
}

fn main() -> ExitCode {
    let cpu = 0;
    if let Err(error) = pin_this_thread(cpu) {
        eprintln!("this thread cannot be pinned to CPU {cpu}: {error}");
        return ExitCode::from(2);
    }
    let options = MsrOptions {
        cpu: 0,
        force: std::env::args().any(|arg| arg == "--force"),
    };
    let env = BackendEnv {
        tsc_khz: 2_000_000,
        ..BackendEnv::default()
    };
    let report = match MsrBackend::open(options, &env) {
        Ok(backend) => *backend.report(),
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    println!("{report}");
    // Of the other vendor it is something that this processor does not have.
    let (own, other) = if report.model.starts_with("intel") {
        (Vendor::Intel, Vendor::Amd)
    } else {
        (Vendor::Amd, Vendor::Intel)
    };
    let driver = TimeDriver::new(rdtsc, UNIT, cycles(own), cycles(other));
    let driver = driver.expect("every Linux has /dev/zero").tied_to_time();
    let factory = || -> Box<dyn CounterBackend> {
        Box::new(MsrBackend::open(options, &env).expect("it could be opened before"))
    };
    ExitCode::from(u8::from(passing::hold(factory, driver) > 0))
}
