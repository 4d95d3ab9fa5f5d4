//! What a context wants counted, and what becomes of counts.

use std::num::NonZeroU64;

use perfmon::Context;
use perfmon_abi::wire::Call;
use perfmon_abi::{PmcArg, PmdArg, consts as pfm};
use pmu_model::Provenance;

use super::bench::{COUNTS, context, launch, must, pmc, pmd, read, set, start};

fn wanted(context: &Context) -> Vec<(u16, Option<u64>)> {
    let wanted = context.wanted();
    let of = |it: &perfmon::Wanted| (it.pmd, it.until.map(NonZeroU64::get));
    wanted.iter().map(of).collect()
}

#[test]
fn only_what_is_loaded_and_started_is_wanted() {
    let mut context = context("amd-core", 0);
    must(&mut context, Call::CreateEvtsets(vec![set(1, 0, 0, 0)]));
    let pmcs = vec![pmc(0, 0, COUNTS), pmc(0, 1, 0), pmc(1, 2, COUNTS)];
    must(&mut context, Call::WritePmcs(pmcs));
    let demands: Vec<(u16, Vec<u16>)> = context
        .demands()
        .into_iter()
        .map(|(set, requests)| (set, requests.iter().map(|request| request.0).collect()))
        .collect();
    assert_eq!(demands, [(0, vec![0]), (1, vec![2])]);
    assert_eq!(wanted(&context), []);
    context.attached(0);
    assert_eq!(wanted(&context), []);
    must(&mut context, Call::Start(None));
    assert_eq!(wanted(&context), [(0, None)]);
    must(&mut context, Call::Stop);
    assert_eq!(wanted(&context), []);
    must(&mut context, start(1));
    assert_eq!(wanted(&context), [(2, None)]);
    context.detached();
    assert_eq!(wanted(&context), []);
}

#[test]
fn the_distance_is_told_if_the_overflow_matters() {
    let check = |set_flags, pmc_flags, arg: PmdArg, expected| {
        let mut context = context("amd-core", 0);
        must(
            &mut context,
            Call::CreateEvtsets(vec![set(0, set_flags, 0, 0)]),
        );
        let control = PmcArg {
            flags: pmc_flags,
            ..pmc(0, 0, COUNTS)
        };
        must(&mut context, Call::WritePmcs(vec![control]));
        must(&mut context, Call::WritePmds(vec![arg]));
        launch(&mut context, 0);
        assert_eq!(wanted(&context), [(0, expected)]);
    };
    let at = |value| pmd(0, 0, value);
    let notify = pfm::PFM_REGFL_OVFL_NOTIFY;
    check(0, 0, at(0u64.wrapping_sub(100)), None);
    check(0, notify, at(0u64.wrapping_sub(100)), Some(100));
    check(0, notify, at(u64::MAX), Some(1));
    check(0, notify, at(0), Some(u64::MAX));
    let narrow = notify | pfm::PFM_REGFL_NO_64BIT_EMUL;
    check(0, narrow, at(0), Some(1 << 48));
    check(0, narrow, at(0u64.wrapping_sub(100)), Some(100));
    let trigger = PmdArg {
        ovflsw_thres: 2,
        ..at(0u64.wrapping_sub(7))
    };
    check(0, 0, trigger, None);
    check(pfm::PFM_SETFL_OVFL_SWITCH, 0, trigger, Some(7));
}

#[test]
fn counts_add_up_and_wrap() {
    let mut context = context("amd-core", 0);
    must(&mut context, Call::WritePmcs(vec![pmc(0, 0, COUNTS)]));
    must(&mut context, Call::WritePmds(vec![pmd(0, 0, u64::MAX - 9)]));
    launch(&mut context, 0);
    context.count(0, 0, Provenance::Exact);
    assert_eq!(
        read(&mut context, 0, 0),
        (u64::MAX - 9, pfm::PFM_PROV_EXACT)
    );
    context.count(0, 9, Provenance::Exact);
    assert!(!context.has_pending_overflow());
    context.count(0, 4, Provenance::Hardware);
    assert!(context.has_pending_overflow());
    assert_eq!(read(&mut context, 0, 0), (3, pfm::PFM_PROV_HARDWARE));
    context.count(64, 1, Provenance::Exact);
    context.count(4, 1, Provenance::Exact);
    must(&mut context, Call::WritePmds(vec![pmd(0, 0, 1)]));
    assert!(
        !context.has_pending_overflow(),
        "a new value is a new period"
    );
}

#[test]
fn a_loss_stays_until_the_next_write() {
    let mut context = context("amd-core", 0);
    launch(&mut context, 0);
    context.count(1, 5, Provenance::Exact);
    context.lose(1);
    context.count(1, 5, Provenance::Exact);
    assert_eq!(read(&mut context, 0, 1), (10, pfm::PFM_PROV_LOST));
    must(&mut context, Call::WritePmds(vec![pmd(0, 1, 0)]));
    assert_eq!(read(&mut context, 0, 1), (0, pfm::PFM_PROV_NOT_COUNTED));
}
