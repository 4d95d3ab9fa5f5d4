//! From set to set, by time and by overflows.

use perfmon_abi::consts::{
    PFM_FL_SYSTEM_WIDE, PFM_SETFL_EXCL_IDLE, PFM_SETFL_EXPL_NEXT, PFM_SETFL_OVFL_SWITCH,
    PFM_SETFL_TIME_SWITCH,
};
use perfmon_abi::wire::Call;
use perfmon_abi::{SetDesc, StartArg};
use pmu_model::Nanos;
use proptest::prelude::{prop, prop_assert, prop_assert_eq, proptest};

use super::{
    NOTIFY, RESET, STOP, Scripted, bits, command, context, counter, mask, overflow, period, pmd,
    restart, wrap,
};
use crate::bits::PmdBits;
use crate::context::set::EventSet;
use crate::context::{Context, Phase};

fn add(context: &mut Context, number: u16, flags: u32, next: u16, timeout: u64) {
    let mut set = EventSet::default();
    let desc = SetDesc {
        flags,
        next,
        ..SetDesc::default()
    };
    set.describe(&desc, Nanos(timeout));
    *context.sets.set_mut(number) = set;
}

/// Sets that switch by time: number, timeout.
fn timed(flags: u32, sets: &[(u16, u64)]) -> Context {
    let mut context = context(flags);
    for &(number, timeout) in sets {
        add(&mut context, number, PFM_SETFL_TIME_SWITCH, 0, timeout);
    }
    context
}

/// `ns` go by, and the switches that are due take place.
fn pass(context: &mut Context, ns: u64) {
    pass_idle(context, ns, true);
}

fn pass_idle(context: &mut Context, ns: u64, counted: bool) {
    context.pass(Nanos(ns), counted);
    if context.switch_due() == Some(Nanos(0)) {
        context.expire();
    }
}

fn runs(context: &Context) -> Vec<(u16, u64, u64)> {
    let sets = context.sets.infos();
    sets.map(|info| (info.id, info.runs, info.act_duration.to_ns().unwrap()))
        .collect()
}

/// What is left of a set's timeout.
fn left(context: &Context, set: u16) -> u64 {
    let set = context.sets.get(set).unwrap();
    set.switch_due().unwrap().0
}

/// How often a set became active, and the triggers by which it was left.
fn turns(context: &mut Context, set: u16) -> (u64, PmdBits) {
    let info = context.sets.set_mut(set).info(set);
    (info.runs, PmdBits::from_words(info.switch_pmds))
}

#[test]
fn the_next_set_is_the_linked_one_or_the_next_number() {
    // Figure 3.34: 5 leads back to 0 and 11 to 8.
    let mut context = context(0);
    for (number, flags, next) in [
        (3, 0, 0),
        (5, PFM_SETFL_EXPL_NEXT, 0),
        (8, 0, 0),
        (11, PFM_SETFL_EXPL_NEXT, 8),
    ] {
        add(&mut context, number, flags, next, 0);
    }
    for (set, next) in [(0, 3), (3, 5), (5, 0), (8, 11), (11, 8)] {
        assert_eq!(context.sets.next_set(set), next, "after set {set}");
    }
    // Round robin; also from the highest number there can be.
    add(&mut context, 11, 0, 8, 0);
    assert_eq!(context.sets.next_set(11), 0);
    add(&mut context, u16::MAX, 0, 8, 0);
    assert_eq!(context.sets.next_set(u16::MAX), 0);
}

#[test]
fn a_timeout_leads_to_the_next_set_and_waits_while_masked() {
    let mut context = timed(0, &[(0, 100), (1, 50)]);
    pass(&mut context, 99);
    assert_eq!((context.active_set(), left(&context, 0)), (0, 1));
    // Figure 3.36: nothing while masked, then on from where it was.
    mask(&mut context);
    context.expire();
    assert_eq!((context.active_set(), left(&context, 0)), (0, 1));
    assert_eq!(restart(&mut context), Ok(()));
    pass(&mut context, 1);
    assert_eq!((context.active_set(), left(&context, 1)), (1, 50));
    assert_eq!(runs(&context), [(0, 0, 100), (1, 1, 0)]);
    // Figure 3.37: time off the core does not reach the context.
    pass(&mut context, 50);
    assert_eq!((context.active_set(), left(&context, 0)), (0, 100));
}

#[test]
fn nothing_switches_while_stopped_or_before_an_overflow_was_dealt_with() {
    let due = || {
        let mut context = timed(0, &[(0, 100), (1, 50)]);
        context.pass(Nanos(100), true);
        context
    };
    let mut stopped = due();
    assert_eq!(command(&mut stopped, Call::Stop), Ok(()));
    stopped.expire();
    assert_eq!(stopped.active_set(), 0);
    let mut overflowed = due();
    wrap(&mut overflowed, 0);
    overflowed.expire();
    assert_eq!(overflowed.active_set(), 0);
    overflow(&mut overflowed, &[0]);
    overflowed.expire();
    assert_eq!(overflowed.active_set(), 1);
}

#[test]
fn a_late_exit_is_all_the_active_sets() {
    // Its events were counted for that set, so its time has to be, too.
    let mut context = timed(0, &[(0, 100), (1, 50)]);
    pass(&mut context, 170);
    assert_eq!((context.active_set(), left(&context, 1)), (1, 50));
    assert_eq!(runs(&context), [(0, 0, 170), (1, 1, 0)]);
}

#[test]
fn several_timeouts_can_be_up_at_once() {
    let mut context = timed(0, &[(0, 100), (1, 50), (2, 10)]);
    pass_idle(&mut context, 100 + 50 + 10 + 30, false);
    assert_eq!((context.active_set(), left(&context, 0)), (0, 70));
    assert_eq!(runs(&context), [(0, 1, 130), (1, 1, 50), (2, 1, 10)]);
    // A set that does not switch takes the rest.
    add(&mut context, 2, 0, 0, 0);
    pass_idle(&mut context, 70 + 50 + 1000, false);
    assert_eq!((context.active_set(), runs(&context)[2].2), (2, 1000));
}

#[test]
fn a_long_idle_time_costs_no_more_than_two_rounds() {
    let mut context = timed(PFM_FL_SYSTEM_WIDE, &[(0, 100_000), (1, 100_000)]);
    add(
        &mut context,
        1,
        PFM_SETFL_TIME_SWITCH | PFM_SETFL_EXCL_IDLE,
        0,
        100_000,
    );
    let started = std::time::Instant::now();
    let years = 1_000_000_000_000_000_000;
    pass_idle(&mut context, years + 130_000, false);
    assert!(started.elapsed().as_secs() < 5);
    assert_eq!(context.active_set(), 1);
    let rounds = years / 200_000;
    assert_eq!(
        runs(&context),
        [(0, rounds, years / 2 + 100_000), (1, rounds + 1, 0)]
    );
}

proptest! {
    #[test]
    fn time_is_conserved_and_pieces_make_no_difference(
        timeouts in prop::collection::vec(1u64..50, 1..5),
        link in 0u16..5,
        pieces in prop::collection::vec(0u64..500, 1..10),
    ) {
        let build = || {
            let sets: Vec<_> = (0..).zip(timeouts.iter().copied()).collect();
            let mut context = timed(0, &sets);
            let last = context.set_count() - 1;
            let last = u16::try_from(last).unwrap_or(0);
            let flags = PFM_SETFL_TIME_SWITCH | PFM_SETFL_EXPL_NEXT;
            add(&mut context, last, flags, link.min(last), timeouts[usize::from(last)]);
            context
        };
        let (mut whole, mut parts, mut single) = (build(), build(), build());
        let sum: u64 = pieces.iter().sum();
        pass_idle(&mut whole, sum, false);
        for ns in pieces {
            pass_idle(&mut parts, ns, false);
        }
        for _ in 0..sum {
            pass_idle(&mut single, 1, false);
        }
        let time: u64 = runs(&whole).iter().map(|&(_, _, ns)| ns).sum();
        prop_assert_eq!(time, sum);
        prop_assert_eq!(runs(&whole), runs(&single));
        prop_assert_eq!(runs(&parts), runs(&single));
        prop_assert_eq!(whole.active_set(), single.active_set());
        prop_assert!(left(&whole, whole.active_set()) > 0);
    }
}

/// Set 0 and 1 switch by overflows of PMD 0 (threshold 2) and PMD 1 (1), as in
/// figure 3.38.
fn triggered(flags: u32) -> Context {
    let mut context = context(0);
    add(&mut context, 0, PFM_SETFL_OVFL_SWITCH, 0, 0);
    add(&mut context, 1, PFM_SETFL_OVFL_SWITCH, 0, 0);
    for (set, num, threshold) in [(0, 0, 2), (1, 1, 1)] {
        counter(&mut context, set, num, flags);
        let pmd = pmd(&mut context, set, num);
        (pmd.threshold, pmd.threshold_left) = (threshold, threshold);
    }
    context
}

#[test]
fn thresholds_lead_from_set_to_set() {
    let mut context = triggered(0);
    // Set 1 is left by its first overflow, set 0 by its second.
    let expected = [
        (0, 0, 0, 1),
        (0, 1, 0, 0),
        (1, 0, 1, 2),
        (0, 0, 1, 1),
        (0, 1, 1, 0),
    ];
    for (trigger, active, runs_0, left) in expected {
        assert_eq!(overflow(&mut context, &[trigger]), vec![]);
        let runs = turns(&mut context, 0).0;
        assert_eq!((context.active_set(), runs), (active, runs_0));
        assert_eq!(pmd(&mut context, 0, 0).threshold_left, left);
        assert_eq!(context.phase(), Phase::Loaded);
    }
    assert_eq!(turns(&mut context, 0).1, bits(&[0]));
    assert_eq!(turns(&mut context, 1).1, bits(&[1]));
}

#[test]
fn a_trigger_is_reset_at_once_or_when_its_set_comes_back() {
    let mut context = triggered(0);
    overflow(&mut context, &[0]);
    assert_eq!(period(&mut context, 0, 0), 100);
    overflow(&mut context, &[0]);
    assert_eq!(pmd(&mut context, 0, 0).value, 5, "its set has left");
    overflow(&mut context, &[1]);
    assert_eq!(period(&mut context, 0, 0), 100, "and is back");
}

#[test]
fn several_thresholds_can_be_reached_at_once_and_0_is_none() {
    let mut context = triggered(0);
    for (num, threshold) in [(2, 1), (3, 0)] {
        counter(&mut context, 0, num, 0);
        let pmd = pmd(&mut context, 0, num);
        (pmd.threshold, pmd.threshold_left) = (threshold, threshold);
    }
    overflow(&mut context, &[0, 3]);
    assert_eq!(context.active_set(), 0);
    overflow(&mut context, &[0, 2, 3]);
    assert_eq!(context.active_set(), 1);
    assert_eq!(turns(&mut context, 0).1, bits(&[0, 2]));
    assert_eq!(pmd(&mut context, 0, 3).value, 5, "no trigger: it wraps");
}

#[test]
fn thresholds_mean_nothing_in_other_sets() {
    let mut context = triggered(0);
    add(&mut context, 0, 0, 0, 0);
    counter(&mut context, 0, 0, 0);
    pmd(&mut context, 0, 0).threshold = 1;
    overflow(&mut context, &[0]);
    assert_eq!(
        (context.active_set(), pmd(&mut context, 0, 0).value),
        (0, 5)
    );
}

#[test]
fn a_mask_puts_the_switch_off_until_the_restart() {
    let mut context = triggered(NOTIFY);
    // PMD 1 overflowed when set 1 was active before, and was not reset.
    context.sets.set_mut(1).keep(bits(&[1]));
    for active in [0, 1] {
        let messages = overflow(&mut context, &[0]);
        assert_eq!(messages.len(), 1);
        assert_eq!((context.phase(), context.active_set()), (Phase::Masked, 0));
        assert_eq!(restart(&mut context), Ok(()));
        assert_eq!(
            (context.phase(), context.active_set()),
            (Phase::Loaded, active)
        );
        assert_eq!(period(&mut context, 0, 0), 1000);
    }
    assert_eq!(turns(&mut context, 1).0, 1);
    assert_eq!(
        period(&mut context, 1, 1),
        1000,
        "a long reset, at a restart"
    );
    mask(&mut context);
    assert_eq!(restart(&mut context), Ok(()));
    assert_eq!(context.active_set(), 1, "it took place once");
}

#[test]
fn a_start_while_masked_overrules_the_switch_that_was_put_off() {
    // Which set the tool names, if any; the one that counts after PFM_RESTART.
    for (named, active) in [(None, 1), (Some(0), 0), (Some(1), 1)] {
        let mut context = triggered(NOTIFY);
        pmd(&mut context, 0, 0).threshold_left = 1;
        overflow(&mut context, &[0]);
        assert_eq!((context.phase(), context.active_set()), (Phase::Masked, 0));
        let start = Call::Start(named.map(|set| StartArg { set }));
        assert_eq!(command(&mut context, start), Ok(()));
        assert_eq!(context.phase(), Phase::Masked);
        assert_eq!(restart(&mut context), Ok(()));
        assert_eq!(context.active_set(), active, "{named:?}");
        assert_eq!(turns(&mut context, active).0, 1, "{named:?}");
        let left = pmd(&mut context, 0, 0).threshold_left;
        assert_eq!(left, if active == 0 { 2 } else { 0 }, "{named:?}");
    }
}

#[test]
fn with_a_format_the_switch_takes_place_unless_it_masks() {
    for (control, active) in [(RESET, 1), (STOP, 0)] {
        let mut context = triggered(NOTIFY);
        pmd(&mut context, 0, 0).threshold_left = 1;
        let format = Scripted {
            controls: vec![(0, control)],
            on_restart: RESET,
            ..Scripted::default()
        };
        format.install(&mut context);
        overflow(&mut context, &[0]);
        assert_eq!(context.active_set(), active);
        if control == STOP {
            assert_eq!(restart(&mut context), Ok(()));
        } else {
            assert_eq!(period(&mut context, 0, 0), 100);
        }
        assert_eq!(context.active_set(), 1);
    }
}

#[test]
fn a_message_tells_the_set_that_was_active() {
    let mut context = triggered(NOTIFY);
    pmd(&mut context, 0, 0).threshold_left = 1;
    let notify = super::Control {
        notify_user: true,
        ..RESET
    };
    let format = Scripted {
        controls: vec![(0, notify)],
        ..Scripted::default()
    };
    format.install(&mut context);
    let messages = overflow(&mut context, &[0]);
    assert_eq!(context.active_set(), 1);
    let sets: Vec<_> = messages.iter().flatten().map(|m| m.active_set).collect();
    assert_eq!(sets, [0]);
}

#[test]
fn a_lone_set_can_follow_itself() {
    let mut context = triggered(0);
    let mut second = [SetDesc {
        id: 1,
        ..SetDesc::default()
    }];
    context.sets.delete(&mut second).unwrap();
    overflow(&mut context, &[0]);
    overflow(&mut context, &[0]);
    let runs = turns(&mut context, 0).0;
    assert_eq!((context.active_set(), runs), (0, 1));
    assert_eq!(pmd(&mut context, 0, 0).threshold_left, 2);
    assert_eq!(period(&mut context, 0, 0), 100, "reset as it comes back");
}
