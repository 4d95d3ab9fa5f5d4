//! Holds the hardware events of the `perf` backend to the contract on the machine that
//! this runs on, and to what it promises beside a second user of the counters: in the
//! tests a Linux guest, whose PMU is a virtual one.
//!
//! The argument is an event: `instructions`, of which there has to be one a nanosecond,
//! or `cycles`, of which there has to be one a tick of the TSC. Prints every clause and
//! every promise; status 1 if one is broken, 2 if nothing can be counted.

mod other_user;
mod promises;

use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::Instant;

use guest_tests::passing::{self, TimeDriver};
use pmu_virt::contract::PerfDriver;
use pmu_virt::perf::PerfBackend;
use pmu_virt::{
    BackendEnv, CountRequest, CounterBackend, EventCode, EventFamily, FixedFunction, OwnerId,
    Vendor,
};
use vmm::counters::host_vendor;
use vmm::sys::{install_kick_handler, kick_signal, pin_this_thread, rdtsc};

/// An event, and how it is counted here.
#[derive(Clone, Copy)]
struct Setup {
    env: BackendEnv,
    request: CountRequest,
    clock: fn() -> u64,
    unit: u64,
    /// The event for `perf`.
    name: &'static str,
}

impl Setup {
    fn of(event: &str) -> Option<Self> {
        let vendor = host_vendor()?;
        let env = BackendEnv {
            tsc_khz: 2_000_000,
            host_vendor: Some(vendor),
            host_events: None,
            overflow_signal: kick_signal(),
            ..BackendEnv::default()
        };
        // The one goes through as the raw code that it is, the other one by its meaning.
        let setup = |code, name, clock, unit| Self {
            env,
            request: CountRequest::plain(code, true, true),
            clock,
            unit,
            name,
        };
        match event {
            "instructions" => Some(setup(
                instructions(vendor),
                "instructions",
                nanoseconds,
                45_000,
            )),
            "cycles" => {
                let code = EventCode::Fixed(FixedFunction::CoreCycles);
                Some(setup(code, "cycles", rdtsc, 150_000))
            }
            _ => None,
        }
    }

    /// A backend that counts this thread, with a vCPU on it.
    fn backend(&self) -> PerfBackend {
        let backend = PerfDriver::hardware(&self.env);
        let mut backend = backend.expect("it could be opened before");
        backend.attach(OwnerId(0));
        backend
    }

    fn driver(&self) -> TimeDriver {
        let uncountable = CountRequest {
            any_thread: true,
            ..self.request
        };
        let driver = TimeDriver::new(self.clock, self.unit, self.request, uncountable);
        let driver = driver.expect("every Linux has /dev/zero");
        // Without `exclude_host` an event counts whatever the thread does.
        driver.with_what_is_between()
    }
}

fn instructions(vendor: Vendor) -> EventCode {
    let family = match vendor {
        Vendor::Intel => EventFamily::Intel,
        Vendor::Amd => EventFamily::AmdZen,
    };
    EventCode::Selected {
        family,
        select: 0xc0,
        umask: 0,
    }
}

fn nanoseconds() -> u64 {
    static BEGIN: OnceLock<Instant> = OnceLock::new();
    let passed = BEGIN.get_or_init(Instant::now).elapsed().as_nanos();
    u64::try_from(passed).unwrap_or(u64::MAX)
}

/// Whether anything can be counted, and by how many counters.
fn counters(setup: &Setup) -> Result<usize, String> {
    install_kick_handler().map_err(|error| format!("no handler of signals: {error}"))?;
    pin_this_thread(0).map_err(|error| format!("the thread cannot stay on CPU 0: {error}"))?;
    let mut backend = PerfDriver::hardware(&setup.env).map_err(|error| error.to_string())?;
    backend.attach(OwnerId(0));
    let plan = backend.plan(&setup.request);
    let plan = plan.map_err(|unavailable| unavailable.to_string())?;
    Ok(plan.constraint.slots.iter().count())
}

fn main() -> ExitCode {
    let event = std::env::args().nth(1).unwrap_or_default();
    let Some(setup) = Setup::of(&event) else {
        eprintln!("usage: perf-contract instructions|cycles");
        return ExitCode::from(2);
    };
    let counters = match counters(&setup) {
        Ok(counters) => counters,
        Err(why) => {
            eprintln!("{event} cannot be counted: {why}");
            return ExitCode::from(2);
        }
    };
    println!("{}: {counters} counters", setup.request);
    let factory = || -> Box<dyn CounterBackend> { Box::new(setup.backend()) };
    let broken = passing::hold(factory, setup.driver());
    let broken = broken + promises::hold(&setup, counters);
    ExitCode::from(u8::from(broken > 0))
}
