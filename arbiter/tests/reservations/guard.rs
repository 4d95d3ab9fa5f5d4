//! Wrong cookies: when they bring a penalty, how long it is, and how many cookies a
//! layer can try that does nothing else.

use std::sync::Arc;

use arbiter::{Guard, GuardLimits, Layer, Penalty, Phase, Ticks, Tsc};
use proptest::prelude::{ProptestConfig, any, prop, proptest};

/// Ticks are milliseconds here.
fn limits() -> GuardLimits {
    GuardLimits::with_ticks_per_ms(1)
}

/// Limits with these times: forgiving, the first penalty, the longest one.
fn limits_of(burst: u32, times: [u64; 3]) -> GuardLimits {
    let [forgive_after, first_penalty, longest_penalty] = times.map(Ticks);
    GuardLimits {
        burst,
        forgive_after,
        first_penalty,
        longest_penalty,
    }
}

/// A wrong cookie of the kernel's, and how long it locks the vCPU out.
fn present(guard: &mut Guard, now: u64) -> Option<u64> {
    let penalty = guard.wrong(Layer::GuestKernel, Tsc(now))?;
    match penalty {
        Penalty::LockedOut(ticks) => Some(ticks.0),
        Penalty::Deaf(_) => panic!("a penalty for programs"),
    }
}

/// The end of the lock-out of a vCPU that wants to run at `now`.
fn locked_out(guard: &Guard, now: u64) -> Option<u64> {
    guard.locked_out_until(Tsc(now)).map(|until| until.0)
}

/// Wrong cookies at these times bring these penalties.
fn check(limits: GuardLimits, wrong: &[(u64, Option<u64>)]) {
    let mut guard = Guard::new(limits);
    for (n, (now, penalty)) in wrong.iter().enumerate() {
        assert_eq!(
            present(&mut guard, *now),
            *penalty,
            "wrong cookie {n} at {now}"
        );
        assert_eq!(guard.total(), 1 + u64::try_from(n).expect("few"));
        if let Some(ticks) = penalty {
            let end = now + ticks;
            assert_eq!(locked_out(&guard, *now), Some(end).filter(|_| *ticks > 0));
            assert_eq!(locked_out(&guard, end.saturating_sub(1)), Some(end));
            assert_eq!(locked_out(&guard, end), None);
        }
    }
}

/// As many free ones as the page promises.
fn burst(at: u64) -> Vec<(u64, Option<u64>)> {
    vec![(at, None); 16]
}

#[test]
fn sixteen_are_free_and_each_further_one_costs_twice_as_much() {
    let mut wrong = burst(0);
    let penalties = [10, 20, 40, 80, 160, 320, 640, 1000, 1000, 1000];
    // All at once: nothing is forgiven meanwhile.
    wrong.extend(penalties.map(|ticks| (0, Some(ticks))));
    check(limits(), &wrong);
}

#[test]
fn one_is_forgiven_each_hundred_milliseconds() {
    check(limits(), &[burst(0), vec![(99, Some(10))]].concat());
    check(
        limits(),
        &[burst(0), vec![(100, None), (100, Some(10))]].concat(),
    );
    check(
        limits(),
        &[burst(0), vec![(250, None), (250, None), (250, Some(10))]].concat(),
    );
    // The remainder counts: half of it was over at 250, the rest at 300.
    check(
        limits(),
        &[
            burst(0),
            vec![(250, None), (250, None), (300, None), (300, Some(10))],
        ]
        .concat(),
    );
}

#[test]
fn time_without_a_wrong_cookie_is_not_saved_up() {
    let long = 1_000_000;
    let fresh = |at| [burst(at), vec![(at, Some(10))]].concat();
    check(limits(), &fresh(0));
    check(limits(), &fresh(long));
    check(limits(), &[vec![(0, None)], fresh(150)].concat());
    check(limits(), &[vec![(0, None)], fresh(long + 99)].concat());
}

#[test]
fn penalties_start_anew_when_all_is_forgiven() {
    let first = [burst(0), vec![(0, Some(10)), (0, Some(20))]].concat();
    // 18 wrong ones are forgiven after 1800.
    let again = [burst(1800), vec![(1800, Some(10))]].concat();
    check(limits(), &[first.clone(), again].concat());
    // One is left at 1799: the next penalty is the third.
    let not_yet = [vec![(1799, None); 15], vec![(1799, Some(40))]].concat();
    check(limits(), &[first, not_yet].concat());
}

#[test]
fn odd_limits_do_no_harm() {
    let zero = limits_of(0, [0, 0, 0]);
    let mut guard = Guard::new(zero);
    for now in [0, 1, u64::MAX, 0] {
        assert_eq!(present(&mut guard, now), Some(0));
        assert_eq!(locked_out(&guard, now), None);
    }
    let huge = limits_of(0, [u64::MAX, u64::MAX, u64::MAX]);
    let mut guard = Guard::new(huge);
    for now in [0, 5, u64::MAX] {
        assert_eq!(present(&mut guard, now), Some(u64::MAX));
    }
    for _ in 0..100 {
        assert_eq!(present(&mut guard, 7), Some(u64::MAX));
    }
}

/// A guesser that tries as soon as the guard lets the vCPU run.
#[test]
fn an_hour_of_guessing_is_a_few_thousand_guesses() {
    let (limits, hour) = (limits(), 3_600_000);
    let mut guard = Guard::new(limits);
    let (mut now, mut guesses) = (0_u64, 0_u64);
    while now < hour {
        guesses += 1;
        now = now.saturating_add(present(&mut guard, now).unwrap_or(0));
    }
    // One for each that is forgiven, and one for each penalty, of which all but
    // the first seven are the longest one.
    let forgiven = hour / limits.forgive_after.0;
    let penalties = hour / limits.longest_penalty.0 + 8;
    let bound = u64::from(limits.burst) + forgiven + penalties;
    assert!(guesses <= bound, "{guesses} of at most {bound}");
    assert!(guesses > forgiven, "the guard forgives: {guesses}");
}

/// Whatever programs present, the vCPU runs, and what the kernel may present
/// free of charge is not less. Of programs, not more are compared in an hour than
/// of a kernel.
#[test]
fn programs_guess_at_their_own_expense() {
    let (limits, hour) = (limits(), 3_600_000);
    let mut guard = Guard::new(limits);
    let mut compared = 0_u64;
    for now in 0..hour {
        if guard.is_deaf(Tsc(now)) {
            continue;
        }
        compared += 1;
        match guard.wrong(Layer::GuestUser, Tsc(now)) {
            Some(Penalty::Deaf(Ticks(ticks))) => {
                assert!(guard.is_deaf(Tsc(now + ticks - 1)) && !guard.is_deaf(Tsc(now + ticks)));
            }
            None => assert!(!guard.is_deaf(Tsc(now))),
            Some(Penalty::LockedOut(_)) => panic!("a program bars its kernel"),
        }
        assert_eq!(locked_out(&guard, now), None);
    }
    let forgiven = hour / limits.forgive_after.0;
    let penalties = hour / limits.longest_penalty.0 + 8;
    let bound = u64::from(limits.burst) + forgiven + penalties;
    assert!(compared <= bound, "{compared} of at most {bound}");
    assert_eq!(guard.total(), compared);
    for _ in 0..limits.burst {
        assert_eq!(present(&mut guard, hour), None, "the kernel's own account");
    }
    assert_eq!(present(&mut guard, hour), Some(limits.first_penalty.0));
}

/// The guards of a machine's vCPUs.
fn machine(vcpus: usize) -> Vec<Guard> {
    let phase = Arc::new(Phase::new(false));
    let guard = |_| Guard::of_vcpu(limits(), Arc::clone(&phase));
    (0..vcpus).map(guard).collect()
}

#[test]
fn what_one_vcpu_guesses_counts_on_all() {
    let mut vcpus = machine(4);
    for n in 0..16 {
        assert_eq!(present(&mut vcpus[n % 3], 0), None, "guess {n}");
    }
    // One that has guessed nothing yet.
    assert_eq!(present(&mut vcpus[3], 0), Some(10));
    assert_eq!(locked_out(&vcpus[3], 9), Some(10));
    // The others run, and each that guesses now is out for longer than the one before.
    for vcpu in &vcpus[..3] {
        assert_eq!(locked_out(vcpu, 0), None);
    }
    assert_eq!(present(&mut vcpus[0], 4), Some(10 + 20 - 4));
    assert_eq!(present(&mut vcpus[1], 5), Some(30 + 40 - 5));
    // Each vCPU has a total of its own.
    let totals = vcpus.iter().map(Guard::total);
    assert_eq!(totals.collect::<Vec<_>>(), [7, 6, 5, 1]);
    assert_eq!(present(&mut machine(1)[0], 0), None, "another machine");
}

#[test]
fn a_program_that_guesses_is_not_heard_on_any_vcpu() {
    let mut vcpus = machine(3);
    for n in 0..16 {
        assert_eq!(vcpus[n % 2].wrong(Layer::GuestUser, Tsc(0)), None);
    }
    let deaf = Some(Penalty::Deaf(Ticks(10)));
    assert_eq!(vcpus[1].wrong(Layer::GuestUser, Tsc(0)), deaf);
    for vcpu in &mut vcpus {
        assert!(vcpu.is_deaf(Tsc(9)) && !vcpu.is_deaf(Tsc(10)));
        assert_eq!(locked_out(vcpu, 0), None);
        assert_eq!(present(vcpu, 0), None, "the kernel's own account");
    }
}

/// Many vCPUs, each of which guesses whenever it runs: they are given no more guesses than
/// one, but for the first penalty of each.
#[test]
fn many_vcpus_guess_no_more_than_one() {
    let (limits, end) = (limits(), 600_000);
    let mut vcpus = machine(16);
    let mut guesses = 0_u64;
    for now in 0..end {
        for vcpu in &mut vcpus {
            while locked_out(vcpu, now).is_none() {
                guesses += 1;
                present(vcpu, now);
            }
        }
    }
    let forgiven = end / limits.forgive_after.0;
    let penalties = end / limits.longest_penalty.0 + 8 + 16;
    let bound = u64::from(limits.burst) + forgiven + penalties;
    assert!(guesses <= bound, "{guesses} of at most {bound}");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the rhythm, in every window the guesses without a penalty are
    /// a burst and what was forgiven meanwhile, and those with one are as many
    /// as first penalties fit.
    #[test]
    fn in_every_window_there_is_a_bound(
        waits in prop::collection::vec(0_u64..400, 1..200),
        burst in 0_u32..6,
        forgive_after in 1_u64..200,
    ) {
        let limits = limits_of(burst, [forgive_after, 10, 160]);
        let mut guard = Guard::new(limits);
        let mut now = 0;
        let mut guesses = Vec::new();
        for wait in waits {
            now += wait.saturating_sub(200);
            let penalty = present(&mut guard, now);
            guesses.push((now, penalty.is_some()));
            now += penalty.unwrap_or(0);
        }
        for (from, (start, _)) in guesses.iter().enumerate() {
            let (mut free, mut paid) = (0, 0);
            for (at, is_paid) in &guesses[from..] {
                let length = at - start;
                if *is_paid { paid += 1 } else { free += 1 }
                assert!(free <= u64::from(burst) + length / forgive_after + 1);
                assert!(paid <= length / 10 + 1);
            }
        }
    }

    /// The guard behaves like a leaky bucket: each wrong cookie fills it by the time
    /// that forgiving takes.
    #[test]
    fn the_guard_is_a_leaky_bucket(
        waits in prop::collection::vec((any::<bool>(), 0_u64..300), 1..200),
        burst in 0_u32..6,
        forgive_after in 1_u64..100,
    ) {
        let limits = limits_of(burst, [forgive_after, 3, 50]);
        let mut guard = Guard::new(limits);
        let (mut now, mut empty_at, mut next) = (5, 0, 3);
        for (at_once, wait) in waits {
            now += if at_once { 0 } else { wait };
            if empty_at <= now {
                (empty_at, next) = (now, 3);
            }
            empty_at += forgive_after;
            let is_over = empty_at - now > u64::from(burst) * forgive_after;
            assert_eq!(present(&mut guard, now), is_over.then_some(next));
            if is_over {
                next = (next * 2).min(50);
            }
        }
    }
}
