//! Event sets: creation, change, deletion, information.

use perfmon::Nanos;
use perfmon_abi::wire::{Call, Errno};
use perfmon_abi::{SetDesc, SetInfo, Timespec, consts as pfm};

use super::bench::{
    call, context, context_without_sets, info, launch, must, pmc, pmd, read, set, start,
};

const OVFL: u32 = pfm::PFM_SETFL_OVFL_SWITCH;
const TIME: u32 = pfm::PFM_SETFL_TIME_SWITCH;
const EINVAL: u32 = pfm::PFM_SET_RETFL_EINVAL;
const NOSET: u32 = pfm::PFM_SET_RETFL_NOSET;

fn descs(call: Call) -> Vec<SetDesc> {
    match call {
        Call::CreateEvtsets(descs) | Call::DeleteEvtsets(descs) => descs,
        other => unreachable!("{other:?}"),
    }
}

#[test]
fn timeouts_are_rounded_up_to_100_us() {
    let check = |requested: Timespec, expected: Option<u64>| {
        let mut context = context("amd-core", 0);
        let desc = SetDesc {
            timeout: requested,
            ..set(1, TIME, 0, 0)
        };
        let (result, after) = call(&mut context, Call::CreateEvtsets(vec![desc]));
        let after = descs(after)[0];
        match expected {
            Some(ns) => {
                assert_eq!(result, Ok(()), "{requested:?}");
                assert_eq!(after.timeout, Timespec::from_ns(ns));
                assert_eq!(info(&mut context, 1).timeout, Timespec::from_ns(ns));
            }
            None => {
                assert_eq!(result, Err(Errno::EINVAL), "{requested:?}");
                assert_eq!(after.flags, TIME | EINVAL);
                assert_eq!(after.timeout, requested);
            }
        }
    };
    let time = |sec, nsec| Timespec { sec, nsec };
    check(time(0, 0), None);
    check(time(0, 1), Some(100_000));
    check(time(0, 100_000), Some(100_000));
    check(time(0, 100_001), Some(200_000));
    check(time(1, 999_999_999), Some(2_000_000_000));
    check(time(0, 1_000_000_000), None);
    check(time(0, -1), None);
    check(time(-1, 0), None);
    check(time(18_446_744_073, 0), Some(18_446_744_073_000_000_000));
    check(time(18_446_744_073, 709_551_615), None);
    check(time(i64::MAX, 0), None);
}

#[test]
fn descriptions_that_are_refused() {
    let check = |flags: u32, expected: Result<(), Errno>| {
        let mut context = context("amd-core", pfm::PFM_FL_SYSTEM_WIDE);
        let (result, after) = call(
            &mut context,
            Call::CreateEvtsets(vec![set(1, flags, 0, 100_000)]),
        );
        assert_eq!(result, expected, "{flags:#x}");
        let flag = if expected.is_ok() { 0 } else { EINVAL };
        assert_eq!(
            descs(after)[0].flags,
            flags & !pfm::PFM_SET_RETFL_MASK | flag
        );
    };
    check(OVFL | TIME, Err(Errno::EINVAL));
    check(pfm::PFM_SETFL_EXCL_KERNEL_ONLY_THREADS, Err(Errno::EINVAL));
    check(pfm::PFM_SETFL_EXCL_IDLE | TIME, Ok(()));
    check(EINVAL | NOSET, Ok(()));
    for bit in (5..29).chain([31]) {
        check(1 << bit, Err(Errno::EINVAL));
    }
}

#[test]
fn a_format_may_support_set_0_only() {
    let mut context = context_without_sets();
    must(
        &mut context,
        Call::CreateEvtsets(vec![set(0, TIME, 0, 100_000)]),
    );
    let (result, after) = call(&mut context, Call::CreateEvtsets(vec![set(1, 0, 0, 0)]));
    assert_eq!(result, Err(Errno::EINVAL));
    assert_eq!(descs(after)[0].flags, EINVAL);
}

#[test]
fn a_vector_ends_at_the_bad_element() {
    let mut context = context("amd-core", 0);
    let vector = vec![set(1, 0, 0, 0), set(2, OVFL | TIME, 0, 1), set(3, 0, 0, 0)];
    let (result, after) = call(&mut context, Call::CreateEvtsets(vector));
    assert_eq!(result, Err(Errno::EINVAL));
    let flags: Vec<u32> = descs(after).iter().map(|desc| desc.flags).collect();
    assert_eq!(flags, [0, OVFL | TIME | EINVAL, 0]);
    assert_eq!(context.set_count(), 2);

    let vector = vec![set(1, NOSET, 0, 0), set(1, 0, 0, 0), set(0, 0, 0, 0)];
    let (result, after) = call(&mut context, Call::DeleteEvtsets(vector));
    assert_eq!(result, Err(Errno::EINVAL));
    let flags: Vec<u32> = descs(after).iter().map(|desc| desc.flags).collect();
    assert_eq!(flags, [0, NOSET, 0]);
}

#[test]
fn deletions_that_are_refused() {
    let check = |desc: SetDesc, flag: u32| {
        let mut context = context("amd-core", 0);
        must(&mut context, Call::CreateEvtsets(vec![set(5, 0, 0, 0)]));
        let (result, after) = call(&mut context, Call::DeleteEvtsets(vec![desc]));
        assert_eq!(result, Err(Errno::EINVAL));
        assert_eq!(descs(after)[0].flags, desc.flags | flag);
        assert_eq!(context.set_count(), 2);
    };
    check(set(0, 0, 0, 0), EINVAL);
    check(set(4, 0, 0, 0), NOSET);
    check(set(5, OVFL, 0, 0), EINVAL);
}

#[test]
fn sets_stay_while_the_context_is_loaded() {
    let mut context = context("amd-core", 0);
    must(&mut context, Call::CreateEvtsets(vec![set(5, 0, 0, 0)]));
    context.attached(0);
    let create = Call::CreateEvtsets(vec![set(6, 0, 0, 0)]);
    let delete = Call::DeleteEvtsets(vec![set(5, 0, 0, 0)]);
    assert_eq!(call(&mut context, create).0, Err(Errno::EBUSY));
    assert_eq!(call(&mut context, delete).0, Err(Errno::EBUSY));
    assert_eq!(context.set_count(), 2);
}

#[test]
fn there_is_a_most_of_sets() {
    let mut context = context("amd-core", 0);
    let sets: Vec<_> = (0..1024).map(|id| set(id, 0, 0, 0)).collect();
    must(&mut context, Call::CreateEvtsets(sets));
    let more = Call::CreateEvtsets(vec![set(1024, 0, 0, 0)]);
    assert_eq!(call(&mut context, more).0, Err(Errno::ENOMEM));
    must(&mut context, Call::CreateEvtsets(vec![set(1023, 0, 0, 0)]));
    assert_eq!(context.set_count(), 1024);
}

#[test]
fn a_change_keeps_registers_runs_and_duration() {
    let mut context = context("amd-core", 0);
    must(
        &mut context,
        Call::CreateEvtsets(vec![set(1, TIME, 0, 500_000)]),
    );
    must(&mut context, Call::WritePmds(vec![pmd(1, 2, 77)]));
    must(&mut context, Call::WritePmcs(vec![pmc(1, 2, 0)]));
    launch(&mut context, 1);
    context.pass(Nanos(200_000), true);
    assert_eq!(info(&mut context, 1).timeout, Timespec::from_ns(300_000));
    context.detached();
    must(&mut context, Call::CreateEvtsets(vec![set(1, OVFL, 0, 0)]));
    let now = info(&mut context, 1);
    assert_eq!((now.flags, now.runs), (OVFL, 1));
    assert_eq!(now.timeout, Timespec::default());
    assert_eq!(now.act_duration, Timespec::from_ns(200_000));
    assert_eq!(read(&mut context, 1, 2).0, 77);
}

#[test]
fn information_that_is_refused() {
    let check = |id, flags, flag| {
        let asked = SetInfo {
            id,
            flags,
            ..SetInfo::default()
        };
        let mut context = context("amd-core", 0);
        let (result, after) = call(&mut context, Call::GetinfoEvtsets(vec![asked]));
        assert_eq!(result, Err(Errno::EINVAL));
        let Call::GetinfoEvtsets(infos) = after else {
            unreachable!("the command stays the same")
        };
        assert_eq!(infos[0].flags, flags | flag);
    };
    check(1, 0, NOSET);
    check(0, TIME, EINVAL);
}

/// §3.7.6: timeouts go on from where a stop left them; a load sets them back.
#[test]
fn timeouts_stop_and_go_on() {
    let mut context = context("amd-core", 0);
    must(
        &mut context,
        Call::CreateEvtsets(vec![set(0, TIME, 0, 1_000_000)]),
    );
    assert_eq!(context.switch_due(), None);
    context.attached(0);
    context.pass(Nanos(100), true);
    assert_eq!(context.switch_due(), None, "not before the start");
    must(&mut context, start(0));
    assert_eq!(context.switch_due(), Some(Nanos(1_000_000)));
    context.pass(Nanos(400_000), true);
    must(&mut context, Call::Stop);
    context.pass(Nanos(100), true);
    must(&mut context, Call::Start(None));
    assert_eq!(context.switch_due(), Some(Nanos(600_000)));
    assert_eq!(
        info(&mut context, 0).act_duration,
        Timespec::from_ns(400_000)
    );
    context.detached();
    launch(&mut context, 0);
    assert_eq!(context.switch_due(), Some(Nanos(1_000_000)));
}

/// Idle time of a core runs timeouts, and is left out of durations of sets that
/// exclude it.
#[test]
fn excluded_idle_time() {
    let check = |flags, expected| {
        let mut context = context("amd-core", pfm::PFM_FL_SYSTEM_WIDE);
        must(
            &mut context,
            Call::CreateEvtsets(vec![set(0, TIME | flags, 0, 1_000_000)]),
        );
        launch(&mut context, 0);
        context.pass(Nanos(1_000), true);
        context.pass(Nanos(10_000), false);
        assert_eq!(context.switch_due(), Some(Nanos(989_000)));
        assert_eq!(
            info(&mut context, 0).act_duration,
            Timespec::from_ns(expected)
        );
    };
    check(0, 11_000);
    check(pfm::PFM_SETFL_EXCL_IDLE, 1_000);
}
