//! The secondary processors. The boot processor wakes one after the other, each
//! reserves its counters, and all wait for a start-up IPI again when the kernel
//! is entered.
//!
//! Everything that two processors use at the same time is atomic or never
//! changes, so a processor that answers too late does no harm.

use core::sync::atomic::{
    AtomicU8, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use firmware::config::{Config, MAX_COUNTERS, MAX_CPUS, Outcome, Step};
use firmware::layout::START_UP_VECTOR;
use firmware::reserve::{self, Cookies, Pcr};

use super::console::say;
use super::sys::{self, Processor, Shared};

/// How long a processor may take for all of its counters.
const PATIENCE_S: u64 = 10;
/// After this part of the patience a second start-up IPI follows: the first is
/// lost if the processor had not taken its INIT yet.
const SECOND_CALL: u64 = 100;
/// The ACPI timer's frequency in Hz, and the bits that every one has.
const PM_TIMER_HZ: u64 = 3_579_545;
const PM_TIMER_MASK: u32 = 0xff_ffff;
/// Without that timer: the number of looks before giving up.
const LOOKS: u64 = 100_000_000;

/// What every processor does.
#[derive(Debug)]
pub(crate) struct Work {
    /// The reservations.
    pub(crate) pcr: Pcr,
    /// The counters.
    pub(crate) config: Config,
}

/// Two words for each counter.
static COOKIES: [AtomicU64; 2 * MAX_COUNTERS] = [const { AtomicU64::new(0) }; 2 * MAX_COUNTERS];
/// A row for each processor.
static OUTCOMES: [AtomicU8; MAX_CPUS * MAX_COUNTERS] =
    [const { AtomicU8::new(0) }; MAX_CPUS * MAX_COUNTERS];
/// The work, for the processors that are woken.
static WORK: Shared<Work> = Shared::new();
/// Processors that are done, one bit for each.
static DONE: AtomicU64 = AtomicU64::new(0);

impl Work {
    /// Reserves all counters on this processor.
    pub(crate) fn perform(&self, cpu: usize) {
        for (number, counter) in self.config.counters().iter().enumerate() {
            let outcome = reserve::reserve(&mut Processor, &self.pcr, counter, cookies(number));
            if let Some(place) = OUTCOMES.get(cpu * MAX_COUNTERS + number) {
                place.store(outcome.code(), Relaxed);
            }
        }
        DONE.fetch_or(1 << cpu, Release);
    }
}

/// What a processor got; for processors in [`wake_all`]'s answer.
pub(crate) fn outcome(cpu: usize, number: usize) -> Outcome {
    match OUTCOMES.get(cpu * MAX_COUNTERS + number) {
        Some(code) => Outcome::of(code.load(Relaxed)),
        None => Outcome::Failed(Step::Absent),
    }
}

/// The cookies of a counter.
pub(crate) fn cookies(number: usize) -> Cookies {
    let word = |at: usize| COOKIES.get(at).map_or(0, |word| word.load(Relaxed));
    Cookies {
        management: word(2 * number),
        access: word(2 * number + 1),
    }
}

/// Keeps the cookies of a counter until all processors have used them.
pub(crate) fn set_cookies(number: usize, cookies: Cookies) {
    for (at, value) in [(0, cookies.management), (1, cookies.access)] {
        if let Some(word) = COOKIES.get(2 * number + at) {
            word.store(value, Relaxed);
        }
    }
}

/// Forgets all cookies.
pub(crate) fn wipe_cookies() {
    COOKIES.iter().for_each(|word| word.store(0, Relaxed));
}

/// Makes every other processor do the work, and returns those that did, and
/// this one, as bits. They share a stack, so no processor is woken after one
/// that does not answer.
pub(crate) fn wake_all(work: Work) -> u64 {
    let (cpus, pm_timer) = (work.config.cpus, work.config.pm_timer);
    if cpus > 1 {
        WORK.set(work);
        sys::with_apic(|| wake(cpus, pm_timer));
    }
    DONE.load(Acquire)
}

fn wake(cpus: u8, pm_timer: u16) {
    for cpu in 1..cpus {
        sys::send_init(cpu);
        sys::send_start_up(cpu, START_UP_VECTOR);
        let answered = wait(1 << cpu, pm_timer, || {
            sys::send_start_up(cpu, START_UP_VECTOR);
        });
        // Back to the state in which the kernel expects it.
        sys::send_init(cpu);
        if !answered {
            say!(
                "CPU {cpu} did not answer within {PATIENCE_S} s; the CPUs from there on have no counters reserved"
            );
            break;
        }
    }
}

/// Waits for a processor's bit, and calls the processor again on the way.
fn wait(bit: u64, pm_timer: u16, again: impl FnOnce()) -> bool {
    let limit = match pm_timer {
        0 => LOOKS,
        _ => PATIENCE_S * PM_TIMER_HZ,
    };
    let now = || sys::read_timer(pm_timer) & PM_TIMER_MASK;
    let mut again = Some(again);
    let mut last = now();
    let mut passed = 0;
    while passed < limit {
        if DONE.load(Acquire) & bit != 0 {
            return true;
        }
        sys::relax();
        passed += match pm_timer {
            0 => 1,
            _ => {
                let time = now();
                let step = time.wrapping_sub(last) & PM_TIMER_MASK;
                last = time;
                u64::from(step)
            }
        };
        if passed > limit / SECOND_CALL
            && let Some(again) = again.take()
        {
            again();
        }
    }
    false
}

/// What every other processor does before it waits again.
pub(crate) fn start() {
    let Some(work) = WORK.get() else {
        return;
    };
    let [.., id] = reserve::Machine::cpuid(&mut Processor, 1, 0)
        .ebx
        .to_le_bytes();
    work.perform(usize::from(id));
}
