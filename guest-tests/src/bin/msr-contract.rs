//! Holds the `msr` backend to the contract on the machine that this runs on:
//! in the tests a Linux guest, whose msr device reaches a virtual PMU.
//!
//! Prints what was found and every clause; status 1 if one is broken, 2 if the
//! counters cannot be used.

use std::fs::File;
use std::io::Read;
use std::ops::RangeInclusive;
use std::process::ExitCode;

use pmu_virt::contract::{self, Driver};
use pmu_virt::{
    BackendEnv, CountRequest, CounterBackend, EventCode, EventFamily, MsrBackend, MsrOptions,
    Progress, Ring, Ticks, Tsc, Vendor,
};
use vmm::sys::{pin_this_thread, rdtsc};

/// Cycles in a unit: some hundred units are long against the ring's sampling
/// period of the `clock` backend, 1 ms, in which a cycle may be counted for
/// the wrong ring, and against the cost of entry and exit.
const UNIT: u64 = 200_000;
/// Spun for each event that is asked for, in percent: time in which a
/// hypervisor answers traps and interrupts does not count.
const SPUN: u64 = 150;
/// Counted at most for what was spun, in percent.
const MOST: u64 = 130;

/// Makes cycles pass, in user code or in the kernel.
struct CycleDriver {
    vendor: Vendor,
    kernel: File,
    buffer: Vec<u8>,
}

impl CycleDriver {
    /// The event select of cycles or, from the other vendor, of something that
    /// this processor does not have.
    fn event(&self, vendor: Vendor) -> CountRequest {
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

    fn pass(&mut self, ring: Ring, ticks: u64) {
        let start = rdtsc();
        while rdtsc().wrapping_sub(start) < ticks {
            match ring {
                // The kernel clears the buffer, which is where the time goes.
                Ring::Kernel => self.kernel.read_exact(&mut self.buffer).expect("/dev/zero"),
                Ring::User => (0..1000).for_each(|_| std::hint::spin_loop()),
            }
        }
    }
}

impl Driver for CycleDriver {
    fn request(&self) -> CountRequest {
        self.event(self.vendor)
    }

    fn uncountable(&self) -> CountRequest {
        self.event(match self.vendor {
            Vendor::Intel => Vendor::Amd,
            Vendor::Amd => Vendor::Intel,
        })
    }

    fn unit(&self) -> u64 {
        UNIT
    }

    fn run(
        &mut self,
        backend: &mut dyn CounterBackend,
        ring: Ring,
        events: u64,
    ) -> RangeInclusive<u64> {
        let ticks = events * SPUN / 100;
        let entered = rdtsc();
        backend.observe(&Progress::Entered { tsc: Tsc(entered) });
        self.pass(ring, ticks);
        let left = rdtsc();
        backend.observe(&Progress::Left {
            tsc: Tsc(left),
            halted: Ticks(0),
            ring: None,
        });
        let most = rdtsc().wrapping_sub(entered);
        events..=most * MOST / 100
    }

    fn deadline(&mut self, backend: &mut dyn CounterBackend) -> Option<Option<Tsc>> {
        backend.observe(&Progress::Entered { tsc: Tsc(rdtsc()) });
        let deadline = backend.deadline();
        backend.observe(&Progress::Left {
            tsc: Tsc(rdtsc()),
            halted: Ticks(0),
            ring: None,
        });
        Some(deadline)
    }
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
    let driver = CycleDriver {
        vendor: if report.model.starts_with("intel") {
            Vendor::Intel
        } else {
            Vendor::Amd
        },
        kernel: File::open("/dev/zero").expect("every Linux has it"),
        buffer: vec![0; 1 << 16],
    };
    let factory = || -> Box<dyn CounterBackend> {
        Box::new(MsrBackend::open(options, &env).expect("it could be opened before"))
    };
    let broken = contract::check(factory, driver).err().unwrap_or_default();
    for clause in contract::all_clauses() {
        match broken.iter().find(|violation| violation.clause == clause) {
            None => println!("kept: {clause}"),
            Some(violation) => println!("BROKEN: {violation}"),
        }
    }
    println!("{} broken", broken.len());
    ExitCode::from(u8::from(!broken.is_empty()))
}
