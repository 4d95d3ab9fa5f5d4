//! The secondary processors. The boot processor wakes one after the other, each
//! reserves its counters, and all wait for a start-up IPI again when the kernel
//! is entered.
//!
//! Everything that two processors use at the same time is atomic or never
//! changes, so a processor that answers too late does no harm.

use core::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

use firmware::config::{Config, MAX_COUNTERS};
use firmware::layout::START_UP_VECTOR;
use firmware::reserve::mailbox::Held;
use firmware::reserve::{self, Cookies, Pcr};

use super::console::say;
use super::outcomes;
use super::processor::Processor;
use super::sys::{self, Shared};
use super::timer::Timer;

/// How long a processor may take for all of its counters.
const PATIENCE_MS: u32 = 10_000;
/// How long it waits, of this, for answers to its requests.
const ANSWERS_MS: u32 = 5_000;
/// After this part of the patience a second start-up IPI follows: the first is
/// lost if the processor had not taken its INIT yet.
const SECOND_CALL: u64 = 100;

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
/// The work, for the processors that are woken.
static WORK: Shared<Work> = Shared::new();
/// Processors that are done, one bit for each.
static DONE: AtomicU64 = AtomicU64::new(0);

impl Work {
    /// Reserves all counters on this processor, and returns what it holds.
    pub(crate) fn perform(&self, cpu: usize) -> Held {
        let mut processor = Processor::waiting(cpu, self.config.pm_timer, ANSWERS_MS);
        let mut held = Held::nothing();
        for (number, counter) in (0u8..).zip(self.config.counters()) {
            let cookies = cookies(usize::from(number));
            let wanted = (number, counter);
            let outcome = reserve::reserve(&mut processor, &self.pcr, wanted, cookies, &mut held);
            outcomes::set(cpu, usize::from(number), outcome);
        }
        DONE.fetch_or(1 << cpu, Release);
        held
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
/// that does not answer. This one does `meanwhile` again and again.
pub(crate) fn wake_all(work: Work, mut meanwhile: impl FnMut()) -> u64 {
    let (cpus, pm_timer) = (work.config.cpus, work.config.pm_timer);
    if cpus > 1 {
        WORK.set(work);
        sys::with_apic(|| wake(cpus, pm_timer, &mut meanwhile));
    }
    DONE.load(Acquire)
}

fn wake(cpus: u8, pm_timer: u16, meanwhile: &mut impl FnMut()) {
    for cpu in 1..cpus {
        sys::send_init(cpu);
        sys::send_start_up(cpu, START_UP_VECTOR);
        let again = || sys::send_start_up(cpu, START_UP_VECTOR);
        let answered = wait(1 << cpu, pm_timer, again, meanwhile);
        // Back to the state in which the kernel expects it.
        sys::send_init(cpu);
        if !answered {
            say!(
                "CPU {cpu} did not answer within 10 s; the CPUs from there on have no counters reserved"
            );
            break;
        }
    }
}

/// Waits for a processor's bit, and calls the processor again on the way.
fn wait(bit: u64, pm_timer: u16, again: impl FnOnce(), meanwhile: &mut impl FnMut()) -> bool {
    let mut timer = Timer::new(pm_timer, PATIENCE_MS);
    let mut again = Some(again);
    while !timer.is_over() {
        if DONE.load(Acquire) & bit != 0 {
            return true;
        }
        sys::relax();
        meanwhile();
        if timer.is_past(SECOND_CALL)
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
    let [.., id] = sys::cpuid(1, 0).ebx.to_le_bytes();
    // Nobody answers for it once it waits again.
    let _ = work.perform(usize::from(id));
}
