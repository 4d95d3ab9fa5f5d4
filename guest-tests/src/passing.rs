//! Makes time pass in front of a counter backend, and prints what it made of the
//! contract: for the programs that a test runs inside of a guest.

use std::fs::File;
use std::io::{self, Read};
use std::ops::RangeInclusive;

use pmu_virt::contract::{self, Asked, Driver, Violation};
use pmu_virt::{CountRequest, CounterBackend, Progress, Ring, Ticks, Tsc};
use vmm::sys::rdtsc;

/// Spun for each event that is asked for, in percent: time in which a
/// hypervisor answers traps and interrupts does not count, and what is found in the
/// kernel at a sample of the ring counts for the kernel. Clauses arm overflows four times as far
/// off, which are not to be due even if somebody takes some of the processor's time, which counts.
const SPUN: u64 = 250;
/// Counted at most for what was spun, in percent.
const MOST: u64 = 130;
/// What the kernel clears at a time.
const BUFFER: usize = 1 << 16;

/// A driver whose events are a clock's: as many as it goes on by.
#[derive(Debug)]
pub struct TimeDriver {
    clock: fn() -> u64,
    unit: u64,
    request: CountRequest,
    uncountable: CountRequest,
    tied_to_time: bool,
    /// The clock at the end of the last run, where what happens behind it counts.
    left: Option<u64>,
    kernel: File,
    buffer: Vec<u8>,
}

impl TimeDriver {
    /// Events of `request` happen as often as `clock` ticks. A `unit` has to be long
    /// against the ring's sampling period of `clock` and `sim`, 1 ms, in which an event
    /// may be counted for the wrong ring, and against the cost of entry and exit: some
    /// hundred units are a run.
    ///
    /// # Errors
    /// That of opening `/dev/zero`.
    pub fn new(
        clock: fn() -> u64,
        unit: u64,
        request: CountRequest,
        uncountable: CountRequest,
    ) -> io::Result<Self> {
        Ok(Self {
            clock,
            unit,
            request,
            uncountable,
            tied_to_time: false,
            left: None,
            kernel: File::open("/dev/zero")?,
            buffer: vec![0; BUFFER],
        })
    }

    /// For a backend that foresees its overflows by the time.
    #[must_use]
    pub fn tied_to_time(self) -> Self {
        Self {
            tied_to_time: true,
            ..self
        }
    }

    /// For a backend whose running counters count between two runs as well.
    #[must_use]
    pub fn with_what_is_between(self) -> Self {
        Self {
            left: Some((self.clock)()),
            ..self
        }
    }

    fn pass(&mut self, ring: Ring, ticks: u64) {
        let start = (self.clock)();
        while (self.clock)().wrapping_sub(start) < ticks {
            match ring {
                // The kernel clears the buffer, which is where the time goes.
                Ring::Kernel => self.kernel.read_exact(&mut self.buffer).expect("/dev/zero"),
                Ring::User => (0..1000).for_each(|_| std::hint::spin_loop()),
            }
        }
    }
}

impl Driver for TimeDriver {
    fn request(&self) -> CountRequest {
        self.request
    }

    fn uncountable(&self) -> CountRequest {
        self.uncountable
    }

    fn unit(&self) -> u64 {
        self.unit
    }

    fn run(
        &mut self,
        backend: &mut dyn CounterBackend,
        ring: Ring,
        events: u64,
    ) -> RangeInclusive<u64> {
        let begin = self.left.unwrap_or_else(|| (self.clock)());
        backend.observe(&Progress::Entered { tsc: Tsc(rdtsc()) });
        self.pass(ring, events * SPUN / 100);
        leave(backend);
        let end = (self.clock)();
        self.left = self.left.map(|_| end);
        events..=end.wrapping_sub(begin) * MOST / 100
    }

    fn deadline(&mut self, backend: &mut dyn CounterBackend) -> Asked {
        backend.observe(&Progress::Entered { tsc: Tsc(rdtsc()) });
        let deadline = backend.deadline();
        leave(backend);
        if self.tied_to_time {
            Asked::Deadline(deadline)
        } else {
            Asked::NotTimed
        }
    }
}

fn leave(backend: &mut dyn CounterBackend) {
    backend.observe(&Progress::Left {
        tsc: Tsc(rdtsc()),
        halted: Ticks(0),
        ring: None,
    });
}

/// Holds backends of `factory` to the contract and prints each clause. Returns how many
/// are broken.
pub fn hold(factory: impl Fn() -> Box<dyn CounterBackend>, driver: TimeDriver) -> usize {
    let broken: Vec<Violation> = contract::check(factory, driver).err().unwrap_or_default();
    for clause in contract::all_clauses() {
        match broken.iter().find(|violation| violation.clause == clause) {
            None => println!("kept: {clause}"),
            Some(violation) => println!("BROKEN: {violation}"),
        }
    }
    println!("{} broken", broken.len());
    broken.len()
}
