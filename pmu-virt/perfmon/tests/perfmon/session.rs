//! Creation, load, start, stop.

use perfmon::{Context, Phase};
use perfmon_abi::consts as pfm;
use perfmon_abi::wire::{Call, Errno};

use super::bench::{call, context, info, launch, must, outcome, pmu, set, start};

/// Table 3.2, and bits that no flag has.
#[test]
fn flags_of_a_context() {
    let check = |flags, expected: Result<(), Errno>| {
        let made = Context::new(pmu("amd-core"), flags, None);
        assert_eq!(outcome(made.map(|_| ())), expected, "{flags:#x}");
    };
    let (block, wide) = (pfm::PFM_FL_NOTIFY_BLOCK, pfm::PFM_FL_SYSTEM_WIDE);
    let (quiet, yields) = (
        pfm::PFM_FL_OVFL_NO_MSG | pfm::PFM_FL_NO_ASK,
        pfm::PFM_FL_PREEMPTIBLE,
    );
    for extra in [0, quiet, yields, quiet | yields] {
        check(extra, Ok(()));
        check(extra | wide, Ok(()));
        check(extra | block, Ok(()));
        check(extra | block | wide, Err(Errno::EINVAL));
    }
    for bit in (0..32).map(|bit| 1 << bit) {
        if bit & (block | wide | quiet | yields) == 0 {
            check(bit, Err(Errno::EINVAL));
        }
    }
}

#[test]
fn a_new_context_is_detached_and_has_set_0() {
    let mut context = context("amd-core", 0);
    assert_eq!(context.phase(), Phase::Unloaded);
    assert!(!context.is_started() && context.wanted().is_empty());
    assert_eq!(info(&mut context, 0).runs, 0);
}

#[test]
fn start_and_stop_need_a_load() {
    let mut context = context("amd-core", 0);
    assert_eq!(call(&mut context, Call::Start(None)).0, Err(Errno::EBUSY));
    assert_eq!(call(&mut context, Call::Stop).0, Err(Errno::EBUSY));
    context.attached(0);
    assert_eq!(call(&mut context, start(1)).0, Err(Errno::EINVAL));
    assert!(!context.is_started());
    must(&mut context, Call::Start(None));
    must(&mut context, Call::Start(None));
    assert!(context.is_started());
    must(&mut context, Call::Stop);
    must(&mut context, Call::Stop);
    assert!(!context.is_started());
    context.detached();
    assert_eq!(call(&mut context, Call::Stop).0, Err(Errno::EBUSY));
}

/// The set of PFM_START overrides that of the load; without one, the last
/// active set goes on. While it counts, it does not change.
#[test]
fn start_chooses_the_set() {
    let mut context = context("amd-core", 0);
    must(
        &mut context,
        Call::CreateEvtsets(vec![set(3, 0, 0, 0), set(9, 0, 0, 0)]),
    );
    launch(&mut context, 3);
    assert_eq!(context.active_set(), 3);
    must(&mut context, start(9));
    assert_eq!(context.active_set(), 3, "it counts already");
    must(&mut context, Call::Stop);
    must(&mut context, start(9));
    assert_eq!(context.active_set(), 9);
    must(&mut context, Call::Stop);
    must(&mut context, Call::Start(None));
    assert_eq!(context.active_set(), 9);
    let runs = [0, 3, 9].map(|id| info(&mut context, id).runs);
    assert_eq!(runs, [0, 1, 1]);
}

#[test]
fn a_load_needs_its_set_and_sane_links() {
    let check = |sets: Vec<_>, load: u16, expected: Result<(), Errno>| {
        let mut context = context("amd-core", 0);
        must(&mut context, Call::CreateEvtsets(sets));
        assert_eq!(outcome(context.prepare_load(load)), expected);
    };
    let explicit = pfm::PFM_SETFL_EXPL_NEXT;
    check(vec![set(1, 0, 0, 0)], 1, Ok(()));
    check(vec![set(1, 0, 0, 0)], 2, Err(Errno::EINVAL));
    check(vec![set(1, explicit, 1, 0)], 0, Ok(()));
    check(vec![set(1, explicit, 2, 0)], 0, Err(Errno::EINVAL));
    check(vec![set(1, 0, 2, 0)], 0, Ok(()));
    check(
        vec![set(1, explicit, 2, 0), set(2, explicit, 1, 0)],
        0,
        Ok(()),
    );

    let mut context = context("amd-core", 0);
    context.attached(0);
    assert_eq!(outcome(context.prepare_load(0)), Err(Errno::EBUSY));
}

#[test]
fn loads_are_counted() {
    let mut context = context("amd-core", 0);
    for generation in 1..=3 {
        context.attached(0);
        assert_eq!(context.generation(), generation);
        assert_eq!(context.phase(), Phase::Loaded);
        assert!(!context.is_started());
        context.detached();
        assert_eq!(context.phase(), Phase::Unloaded);
    }
    assert_eq!(info(&mut context, 0).runs, 3);
}

#[test]
fn commands_of_others_are_refused() {
    let mut context = context("amd-core", 0);
    context.attached(0);
    for command in [
        Call::Create(Default::default(), Vec::new()),
        Call::Load(Default::default()),
        Call::Unload,
        Call::SetConfig(Default::default()),
        Call::GetConfig(Default::default()),
    ] {
        assert_eq!(call(&mut context, command).0, Err(Errno::EINVAL));
    }
}
