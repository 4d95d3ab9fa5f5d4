//! PFM_RESTART and the resets that it brings.

use perfmon_abi::consts::{PFM_FL_NOTIFY_BLOCK, PFM_REGFL_NO_64BIT_EMUL, PFM_REGFL_RANDOM};
use perfmon_abi::wire::Errno;
use proptest::prelude::{any, prop_assert_eq, proptest};

use super::{
    NOTIFY, RESET, STOP, Scripted, bits, context, counter, lines, mask, overflow, period, pmc, pmd,
    restart,
};
use crate::carta;
use crate::context::set::Period;
use crate::context::{Context, How, Phase};
use crate::format::Control;
use pmu_model::VirtualPmd;

/// The long reset of one PMD.
fn reset(context: &mut Context, set: u16, num: u16) {
    let pmu = context.requests.pmu();
    context.sets.reset(pmu, set, bits(&[num]), Period::Long);
}

#[test]
fn which_restart_is_valid() {
    let keep_masked = Control {
        mask_monitoring: true,
        ..Control::default()
    };
    // Phase, format; result, phase after it.
    let format = |on_restart, masked_only| {
        Some(Scripted {
            on_restart,
            masked_only,
            ..Scripted::default()
        })
    };
    let (unloaded, loaded, masked) = (Phase::Unloaded, Phase::Loaded, Phase::Masked);
    let busy = Err(Errno::EBUSY);
    let table = [
        (unloaded, None, busy, unloaded),
        (unloaded, format(RESET, false), busy, unloaded),
        (loaded, None, busy, loaded),
        (loaded, format(RESET, true), busy, loaded),
        (loaded, format(RESET, false), Ok(()), loaded),
        (loaded, format(keep_masked, false), Ok(()), masked),
        (masked, None, Ok(()), loaded),
        // Also a saturated buffer (3.6.5).
        (masked, format(RESET, true), Ok(()), loaded),
        (masked, format(keep_masked, true), Ok(()), masked),
    ];
    for (row, (phase, format, result, after)) in table.into_iter().enumerate() {
        let mut context = context(0);
        match phase {
            Phase::Unloaded => context.detached(),
            Phase::Loaded => {}
            Phase::Masked => mask(&mut context),
        }
        if let Some(format) = format {
            format.install(&mut context);
        }
        assert_eq!(restart(&mut context), result, "row {row}");
        assert_eq!(context.phase(), after, "row {row}");
    }
}

#[test]
fn without_a_format_all_that_overflowed_get_their_long_period() {
    let mut context = context(PFM_FL_NOTIFY_BLOCK);
    for num in [0, 1, 2, 3] {
        counter(&mut context, 0, num, if num == 1 { NOTIFY } else { 0 });
    }
    // A virtual PMD has nothing that could be reset.
    pmc(&mut context, 0, 1).reset_pmds = bits(&[2, VirtualPmd::Exits.pmd()]);
    overflow(&mut context, &[0, 1]);
    assert!(context.is_blocked());
    assert_eq!(restart(&mut context), Ok(()));
    let left = [0, 1, 2, 3].map(|num| period(&mut context, 0, num));
    assert_eq!(left, [1000, 1000, 1000, 5u64.wrapping_neg()]);
    assert!(!context.is_blocked());
    assert_eq!(pmd(&mut context, 0, 1).last_reset.wrapping_neg(), 1000);
    assert_eq!(restart(&mut context), Err(Errno::EBUSY), "once is enough");
}

#[test]
fn a_format_decides_about_the_reset_and_hears_whether_monitoring_was_active() {
    for (on_restart, left) in [(RESET, 1000), (Control::default(), 5u64.wrapping_neg())] {
        let mut context = context(0);
        counter(&mut context, 0, 1, NOTIFY);
        let format = Scripted {
            controls: vec![(1, STOP)],
            on_restart,
            ..Scripted::default()
        };
        let log = format.install(&mut context);
        overflow(&mut context, &[1]);
        assert_eq!(restart(&mut context), Ok(()));
        assert_eq!(period(&mut context, 0, 1), left);
        assert_eq!(restart(&mut context), Ok(()));
        let heard = lines(&log).split_off(1);
        assert_eq!(heard, ["restart active false", "restart active true"]);
    }
}

#[test]
fn what_was_reset_at_the_overflow_is_not_reset_again_at_the_restart() {
    let mut context = context(0);
    counter(&mut context, 0, 0, 0);
    counter(&mut context, 0, 1, 0);
    let format = Scripted {
        controls: vec![(0, RESET)],
        on_restart: RESET,
        ..Scripted::default()
    };
    format.install(&mut context);
    overflow(&mut context, &[0, 1]);
    assert_eq!(restart(&mut context), Ok(()));
    assert_eq!([0, 1].map(|num| period(&mut context, 0, num)), [100, 1000]);
}

#[test]
fn a_read_resets_with_the_long_period_what_the_pmc_names() {
    let mut context = context(0);
    for num in [0, 1, 2] {
        counter(&mut context, 0, num, 0);
    }
    pmc(&mut context, 0, 0).reset_pmds = bits(&[2]);
    pmd(&mut context, 0, 0).how = How::Lost;
    reset(&mut context, 0, 0);
    reset(&mut context, 0, VirtualPmd::Exits.pmd());
    reset(&mut context, 9, 0);
    let left = [0, 1, 2].map(|num| period(&mut context, 0, num));
    assert_eq!(left, [1000, 5u64.wrapping_neg(), 1000]);
    assert_eq!(
        pmd(&mut context, 0, 0).how,
        How::NotCounted,
        "it begins anew"
    );
    let mut known = context.sets.set_mut(0).known_pmds();
    assert!(known.all(|num| num != VirtualPmd::Exits.pmd()));
}

#[test]
fn without_emulation_a_value_is_as_wide_as_the_hardware() {
    let mut context = context(0);
    counter(&mut context, 0, 0, PFM_REGFL_NO_64BIT_EMUL);
    reset(&mut context, 0, 0);
    let width = context.requests.pmu().model().width();
    let pmd = pmd(&mut context, 0, 0);
    assert_eq!(pmd.value, (1 << width) - 1000);
    assert_eq!(pmd.last_reset, pmd.value, "what was loaded (3.1.4)");
}

proptest! {
    #[test]
    fn a_seed_decides_all_resets(seed in any::<u32>(), mask in any::<u64>(), resets in 1usize..20) {
        let mut context = context(0);
        counter(&mut context, 0, 0, PFM_REGFL_RANDOM);
        let first = pmd(&mut context, 0, 0);
        (first.random_mask, first.random) = (mask, seed);
        let mut state = seed;
        for _ in 0..resets {
            reset(&mut context, 0, 0);
            let base = 1000u64.wrapping_neg();
            let (value, next) = carta::vary(base, mask, state);
            state = next;
            let pmd = pmd(&mut context, 0, 0);
            prop_assert_eq!((pmd.value, pmd.last_reset), (value, value));
        }
    }

    #[test]
    fn without_the_flag_nothing_is_random(seed in any::<u32>(), mask in any::<u64>()) {
        let mut context = context(0);
        counter(&mut context, 0, 0, 0);
        let first = pmd(&mut context, 0, 0);
        (first.random_mask, first.random) = (mask, seed);
        reset(&mut context, 0, 0);
        prop_assert_eq!(period(&mut context, 0, 0), 1000);
        prop_assert_eq!(pmd(&mut context, 0, 0).random, seed);
    }
}
