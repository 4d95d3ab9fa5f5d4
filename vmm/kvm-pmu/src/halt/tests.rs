//! Tests of the time in which a vCPU does not run, with clocks of their own.

use proptest::prelude::*;

use super::*;

/// One tick a nanosecond.
const TSC_KHZ: u32 = 1_000_000;
const MS: u64 = 1_000_000;
const US: u64 = 1_000;

/// What happens next, in nanoseconds. Guest time is one interval.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// In the guest: running, asleep in HLT, polling for its end, preempted.
    Guest {
        counted: bool,
        ran: u64,
        waited: u64,
        polled: u64,
        preempted: u64,
    },
    /// In the VMM: running, and off the CPU.
    Vmm { ran: u64, off: u64 },
}

fn guest(ran: u64, waited: u64, polled: u64, preempted: u64) -> Step {
    Step::Guest {
        counted: true,
        ran,
        waited,
        polled,
        preempted,
    }
}

fn uncounted(ran: u64, waited: u64) -> Step {
    Step::Guest {
        counted: false,
        ran,
        waited,
        polled: 0,
        preempted: 0,
    }
}

fn vmm(ran: u64, off: u64) -> Step {
    Step::Vmm { ran, off }
}

#[derive(Debug, Default)]
struct Fake {
    moment: Moment,
    questions: u32,
}

impl TimeSource for Fake {
    fn now(&mut self) -> Moment {
        self.questions += 1;
        self.moment
    }
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Played {
    /// Ticks that were told not to have run.
    told: u64,
    questions: u32,
}

/// Plays `steps` as the run loop would.
fn play(steps: &[Step]) -> Played {
    let mut clock = HaltClock::with_source(Fake::default(), TSC_KHZ);
    let (mut told, mut counting) = (0, false);
    for step in steps {
        let now = clock.source.moment;
        let moment = &mut clock.source.moment;
        match *step {
            Step::Vmm { ran, off } => {
                moment.tsc = moment.tsc + Ticks(ran + off);
                moment.cpu += Duration::from_nanos(ran);
            }
            Step::Guest {
                counted,
                ran,
                waited,
                polled,
                preempted,
            } => {
                if counted {
                    clock.entering(now.tsc, !counting);
                }
                counting = counted;
                let moment = &mut clock.source.moment;
                moment.tsc = moment.tsc + Ticks(ran + waited + polled + preempted);
                moment.cpu += Duration::from_nanos(ran + polled);
                moment.waited += Duration::from_nanos(waited);
                moment.polled += Duration::from_nanos(polled);
                let left = moment.tsc;
                let Ticks(one) = clock.passed(now.tsc, left, counted);
                assert!(Ticks(one) <= left - now.tsc, "more than the interval has");
                assert!(counted || one == 0, "nothing counts");
                told += one;
            }
        }
    }
    let questions = clock.source.questions;
    Played { told, questions }
}

/// `expected`: ticks told, and questions asked.
fn check(steps: &[Step], expected: (u64, u32)) {
    let Played { told, questions } = play(steps);
    assert_eq!((told, questions), expected, "{steps:?}");
}

#[test]
fn a_long_interval_is_asked_about_at_once() {
    check(&[guest(300 * US, 0, 0, 0)], (0, 2));
    check(&[guest(100 * US, 4 * MS, 0, 0)], (4 * MS, 2));
    check(&[guest(100 * US, 0, 150 * US, 0)], (150 * US, 2));
    check(&[guest(2 * MS, 0, 0, 3 * MS)], (3 * MS, 2));
    check(&[guest(MS, 2 * MS, 100 * US, 4 * MS)], (6_100 * US, 2));
}

#[test]
fn short_intervals_are_asked_about_together() {
    // 40 us of each 100 us did not run; the tenth asks.
    let short = guest(60 * US, 10 * US, 10 * US, 20 * US);
    check(&[short; 9], (0, 1));
    // It can be told no more than it has; the next ones are told the rest.
    check(&[short; 10], (100 * US, 2));
    check(&[short; 14], (400 * US, 2));
}

/// The thread loses its CPU between the end of an interval and the question, or between
/// the question and the entry: the interval itself ran all the time.
#[test]
fn a_preemption_beside_an_interval_is_not_taken_off() {
    let off = |entered: u64, left: u64, cpu: u64| {
        let mut clock = HaltClock::with_source(Fake::default(), TSC_KHZ);
        clock.entering(Tsc(0), true);
        clock.source.moment.tsc = Tsc(4_200 * US);
        clock.source.moment.cpu = Duration::from_nanos(cpu);
        clock.passed(Tsc(entered), Tsc(left), true)
    };
    assert_eq!(off(0, 2 * MS, 2 * MS), Ticks(0), "after it");
    assert_eq!(off(2_200 * US, 4_200 * US, 2 * MS), Ticks(0), "before it");
    // What it lost itself is found beside that.
    assert_eq!(off(0, 2 * MS, MS), Ticks(MS));
    assert_eq!(off(2_200 * US, 4_200 * US, MS), Ticks(MS));
    assert_eq!(
        off(MS, 3 * MS, 500 * US),
        Ticks(1_500 * US),
        "on both sides"
    );
}

#[test]
fn time_in_the_vmm_is_not_taken_off() {
    // Short stretches on the CPU.
    let busy = [guest(90 * US, 0, 0, 0), vmm(20 * US, 0)];
    check(&busy.repeat(12), (0, 2));
    // A long one that waited, and one that worked: asked about at the entry.
    check(
        &[
            vmm(10, 0),
            guest(MS, 0, 0, 0),
            vmm(0, 9 * MS),
            guest(MS, 0, 0, 0),
        ],
        (0, 4),
    );
    check(
        &[guest(MS, 0, 0, 0), vmm(9 * MS, 0), guest(MS, 0, 0, 0)],
        (0, 4),
    );
    // What was halted before it stays known, and what was preempted in it does not.
    check(
        &[
            guest(50 * US, 100 * US, 0, 0),
            vmm(MS, MS),
            guest(MS, 0, 0, 0),
        ],
        (100 * US, 3),
    );
}

#[test]
fn time_that_nobody_counted_is_not_taken_off() {
    check(
        &[
            guest(MS, 0, 0, 0),
            uncounted(MS, 5 * MS),
            guest(MS, 0, 0, 0),
        ],
        (0, 4),
    );
    // Counters that are switched on and off in a row cost no question.
    let toggled = [guest(10 * US, 0, 0, 0), uncounted(10 * US, 0)];
    check(&toggled.repeat(99), (0, 1));
}

#[test]
fn clocks_that_disagree_a_little_lose_nothing() {
    let mut clock = HaltClock::with_source(Fake::default(), TSC_KHZ);
    clock.entering(Tsc(0), true);
    let mut told = 0;
    for round in 1..1000 {
        let moment = &mut clock.source.moment;
        moment.tsc = Tsc(round * MS);
        // The CPU clock is read up to 3 us late.
        moment.cpu = Duration::from_nanos(round * MS + round % 4 * US);
        told += clock.passed(Tsc((round - 1) * MS), Tsc(round * MS), true).0;
        clock.entering(Tsc(round * MS), false);
    }
    assert!(told <= 3 * US, "{told} ns were taken off in a second");
}

#[test]
fn another_thread_has_another_cpu_clock() {
    let mut clock = HaltClock::with_source(Fake::default(), TSC_KHZ);
    clock.entering(Tsc(0), true);
    clock.source.moment = Moment {
        tsc: Tsc(MS),
        cpu: Duration::from_millis(1),
        ..Moment::default()
    };
    assert_eq!(clock.passed(Tsc(0), Tsc(MS), true), Ticks(0));
    clock.leave(true);
    // The next one has run for less long than the one before.
    clock.source.moment.cpu = Duration::from_nanos(10);
    clock.entering(Tsc(MS), false);
    clock.source.moment.tsc = Tsc(2 * MS);
    clock.source.moment.cpu = Duration::from_nanos(10 + MS / 2);
    assert_eq!(clock.passed(Tsc(MS), Tsc(2 * MS), true), Ticks(MS / 2));
}

#[test]
fn what_was_lost_before_a_switch_is_told_after_it() {
    let mut clock = HaltClock::with_source(Fake::default(), TSC_KHZ);
    clock.entering(Tsc(0), true);
    let moment = &mut clock.source.moment;
    // Too short to be asked about at once.
    moment.tsc = Tsc(150 * US);
    (moment.cpu, moment.waited) = (Duration::from_micros(50), Duration::from_micros(100));
    assert_eq!(clock.passed(Tsc(0), Tsc(150 * US), true), Ticks(0));
    clock.leave(true);
    // Away for long, halted all the time: nobody counts that.
    let moment = &mut clock.source.moment;
    (moment.tsc, moment.waited) = (Tsc(9 * MS), Duration::from_millis(8));
    clock.entering(Tsc(9 * MS), false);
    clock.source.moment.tsc = Tsc(10 * MS);
    clock.source.moment.cpu += Duration::from_millis(1);
    assert_eq!(
        clock.passed(Tsc(9 * MS), Tsc(10 * MS), true),
        Ticks(100 * US)
    );
}

fn any_step() -> impl Strategy<Value = Step> {
    let ns = || prop_oneof![Just(0), 0..50 * US, 0..3 * MS];
    prop_oneof![
        (ns(), ns(), ns(), ns()).prop_map(|(a, b, c, d)| guest(a, b, c, d)),
        (ns(), ns()).prop_map(|(a, b)| uncounted(a, b)),
        (ns(), ns()).prop_map(|(a, b)| vmm(a, b)),
    ]
}

proptest! {
    /// Where the VMM never leaves the CPU and everything is counted, what is
    /// told is what was lost, but for what is still to be told.
    #[test]
    fn nothing_is_lost_or_told_twice(
        steps in prop::collection::vec((0..3 * MS, 0..3 * MS, 0..200 * US, 0..3 * MS), 1..40),
    ) {
        let steps: Vec<Step> = steps.into_iter().map(|(a, b, c, d)| guest(a, b, c, d)).collect();
        let lost: u64 = steps.iter().map(|step| match *step {
            Step::Guest { waited, polled, preempted, .. } => waited + polled + preempted,
            Step::Vmm { .. } => 0,
        }).sum();
        let told = play(&steps).told;
        prop_assert!(told <= lost);
        // Short intervals at the end are not asked about yet; what they are
        // told late is at most what they last.
        prop_assert!(u128::from(lost - told) <= 2 * UNASKED.as_nanos(), "{} of {}", told, lost);
    }

    /// Whatever happens, an interval never runs backwards (`play` checks it).
    #[test]
    fn never_more_than_the_interval(steps in prop::collection::vec(any_step(), 1..60)) {
        let ran_at_most: u64 = steps.iter().map(|step| match *step {
            Step::Guest { counted: true, ran, waited, polled, preempted } =>
                ran + waited + polled + preempted,
            _ => 0,
        }).sum();
        prop_assert!(play(&steps).told <= ran_at_most);
    }
}
