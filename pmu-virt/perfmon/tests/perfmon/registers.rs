//! PFM_WRITE_PMCS, PFM_WRITE_PMDS, PFM_READ_PMDS and the registers' description.

use perfmon::VirtualPmd;
use perfmon::registers::need;
use perfmon_abi::wire::{Call, Errno};
use perfmon_abi::{PmcArg, PmcInfo, PmdArg, PmdInfo, consts as pfm};
use pmu_model::{CountRequest, EventCode, FixedFunction};

use super::bench::{COUNTS, Known, call, context, must, outcome, pmc, pmd, pmu, read};

const EINVAL: u32 = pfm::PFM_REG_RETFL_EINVAL;
const NOTAVAIL: u32 = pfm::PFM_REG_RETFL_NOTAVAIL;
const NOSET: u32 = pfm::PFM_REG_RETFL_NOSET;

fn flags(call: Call) -> Vec<u32> {
    match call {
        Call::WritePmcs(args) => args.iter().map(|arg| arg.flags).collect(),
        Call::WritePmds(args) | Call::ReadPmds(args) => args.iter().map(|arg| arg.flags).collect(),
        other => unreachable!("{other:?}"),
    }
}

#[test]
fn pmcs_that_are_refused() {
    let check = |arg: PmcArg, flag: u32| {
        let mut context = context("amd-core", 0);
        let (result, after) = call(&mut context, Call::WritePmcs(vec![arg]));
        let expected = if flag == 0 {
            Ok(())
        } else {
            Err(Errno::EINVAL)
        };
        assert_eq!(result, expected, "{arg:?}");
        assert_eq!(flags(after), [arg.flags & !pfm::PFM_REG_RETFL_MASK | flag]);
    };
    let with = |flags| PmcArg {
        flags,
        ..pmc(0, 0, COUNTS)
    };
    check(pmc(0, 0, COUNTS), 0);
    check(pmc(1, 0, COUNTS), NOSET);
    check(pmc(0, 4, COUNTS), NOTAVAIL);
    check(pmc(0, 64, COUNTS), NOTAVAIL);
    check(pmc(0, u16::MAX, COUNTS), NOTAVAIL);
    check(with(7), 0);
    check(with(pfm::PFM_REG_RETFL_MASK), 0);
    for bit in 3..29 {
        check(with(1 << bit), EINVAL);
    }
    let reset = |words| PmcArg {
        reset_pmds: words,
        ..pmc(0, 0, 0)
    };
    let sampled = |words| PmcArg {
        smpl_pmds: words,
        ..pmc(0, 0, 0)
    };
    check(reset([0xf, 1]), 0);
    check(reset([0x10, 0]), EINVAL);
    check(sampled([0xf, 0x1_ffff]), 0);
    check(sampled([0, 0x2_0000]), EINVAL);
}

#[test]
fn pmds_that_are_refused() {
    let check = |arg: PmdArg, flag: u32| {
        let mut context = context("amd-core", 0);
        let (result, after) = call(&mut context, Call::WritePmds(vec![arg]));
        let expected = if flag == 0 {
            Ok(())
        } else {
            Err(Errno::EINVAL)
        };
        assert_eq!(result, expected, "{arg:?}");
        let returned = pfm::PFM_REG_RETFL_MASK | pfm::PFM_REG_RETFL_PROV_MASK;
        assert_eq!(flags(after), [arg.flags & !returned | flag]);
    };
    let with = |flags| PmdArg {
        flags,
        ..pmd(0, 0, 1)
    };
    check(pmd(0, 0, u64::MAX), 0);
    check(pmd(1, 0, 0), NOSET);
    check(pmd(0, 4, 0), NOTAVAIL);
    check(pmd(0, 200, 0), NOTAVAIL);
    check(
        with(pfm::PFM_REG_RETFL_MASK | pfm::PFM_REG_RETFL_PROV_MASK),
        0,
    );
    check(with(pfm::PFM_REGFL_READ_RESET), EINVAL);
    for which in VirtualPmd::ALL {
        check(pmd(0, which.pmd(), 0), EINVAL);
    }
}

#[test]
fn reads_that_are_refused() {
    let check = |arg: PmdArg, flag: u32| {
        let mut context = context("amd-core", 0);
        let (result, after) = call(&mut context, Call::ReadPmds(vec![arg]));
        assert_eq!(result, Err(Errno::EINVAL), "{arg:?}");
        assert_eq!(flags(after), [arg.flags | flag]);
    };
    let with = |num, flags| PmdArg {
        flags,
        ..pmd(0, num, 0)
    };
    check(pmd(1, 0, 0), NOSET);
    check(pmd(0, 4, 0), NOTAVAIL);
    check(with(0, 1), EINVAL);
    check(with(64, pfm::PFM_REGFL_READ_RESET), EINVAL);
}

#[test]
fn a_vector_ends_at_the_bad_element() {
    let mut context = context("amd-core", 0);
    let vector = vec![pmd(0, 0, 10), pmd(0, 99, 11), pmd(0, 1, 12)];
    let (result, after) = call(&mut context, Call::WritePmds(vector));
    assert_eq!(result, Err(Errno::EINVAL));
    assert_eq!(flags(after), [0, NOTAVAIL, 0]);
    assert_eq!(read(&mut context, 0, 0).0, 10);
    assert_eq!(read(&mut context, 0, 1).0, 0);
}

/// The specification: a PMD that was never written reads as its default.
#[test]
fn a_pmd_reads_what_was_written() {
    let mut context = context("amd-core", 0);
    assert_eq!(read(&mut context, 0, 3), (0, pfm::PFM_PROV_NOT_COUNTED));
    must(&mut context, Call::WritePmds(vec![pmd(0, 3, u64::MAX - 4)]));
    assert_eq!(
        read(&mut context, 0, 3),
        (u64::MAX - 4, pfm::PFM_PROV_NOT_COUNTED)
    );
    let arg = PmdArg {
        flags: pfm::PFM_REG_RETFL_MASK,
        long_reset: 5,
        ..pmd(0, 3, 0)
    };
    let Call::ReadPmds(args) = must(&mut context, Call::ReadPmds(vec![arg])) else {
        unreachable!("the command stays the same")
    };
    assert_eq!(args[0].last_reset_val, u64::MAX - 4);
    assert_eq!(args[0].long_reset, 5, "not used by this command");
}

/// 6.2.1
#[test]
fn without_emulation_a_counter_has_the_hardwares_bits() {
    let mut context = context("amd-core", 0);
    let narrow = PmcArg {
        flags: pfm::PFM_REGFL_NO_64BIT_EMUL,
        ..pmc(0, 0, COUNTS)
    };
    must(&mut context, Call::WritePmds(vec![pmd(0, 0, u64::MAX)]));
    must(&mut context, Call::WritePmcs(vec![narrow]));
    assert_eq!(read(&mut context, 0, 0).0, (1 << 48) - 1);
    must(&mut context, Call::WritePmds(vec![pmd(0, 0, 1 << 48 | 5)]));
    assert_eq!(read(&mut context, 0, 0).0, 5);
}

/// A quantity is known while the context is attached; then its last value is.
#[test]
fn virtual_pmds() {
    let mut context = context("amd-core", 0);
    let exits = VirtualPmd::Exits.pmd();
    let unknown = (u64::MAX, pfm::PFM_PROV_NOT_COUNTED);
    assert_eq!(read(&mut context, 0, exits), unknown);
    context.attached(0);
    assert_eq!(
        read(&mut context, 0, exits),
        (exits.into(), pfm::PFM_PROV_NONE)
    );
    assert_eq!(read(&mut context, 0, VirtualPmd::Ring.pmd()), unknown);
    context.keep_quantities(&Known);
    context.detached();
    assert_eq!(
        read(&mut context, 0, exits),
        (exits.into(), pfm::PFM_PROV_NONE)
    );
}

#[test]
fn every_register_is_described() {
    for model in ["amd-core", "amd-core,ibs=on", "intel-v2"] {
        let pmu = pmu(model);
        for pmc in pmu.pmcs() {
            let mut info = [PmcInfo {
                num: pmc.num,
                ..PmcInfo::default()
            }];
            assert_eq!(pmu.getinfo_pmcs(&mut info), Ok(()));
            let PmcInfo {
                def_value,
                rsvd_mask,
                ..
            } = info[0];
            // §3.1.13: this is what a write leaves.
            for value in [0, u64::MAX, COUNTS, 0x5555_aaaa_5555_aaaa] {
                let left = value & !rsvd_mask | def_value & rsvd_mask;
                assert_eq!(pmc.accept(value), left, "{model} PMC{}", pmc.num);
            }
            let request = pmu.request(pmc, def_value).expect("a request");
            assert!(!request.can_advance(), "the default measures nothing");
        }
        for pmd in pmu.pmds() {
            let mut info = [PmdInfo {
                num: pmd.num,
                flags: EINVAL,
                ..PmdInfo::default()
            }];
            assert_eq!(pmu.getinfo_pmds(&mut info), Ok(()));
            assert_eq!((info[0].kind, info[0].index), (pmd.kind, pmd.index));
        }
    }
}

#[test]
fn registers_that_are_not_there_are_refused() {
    let pmu = pmu("amd-core");
    for (num, flags) in [(4, 0), (128, 0), (0, 1)] {
        let mut info = [PmcInfo {
            num,
            flags,
            ..PmcInfo::default()
        }];
        assert_eq!(outcome(pmu.getinfo_pmcs(&mut info)), Err(Errno::EINVAL));
        assert_eq!(info[0].flags, flags | EINVAL);
        let mut info = [PmdInfo {
            num,
            flags,
            ..PmdInfo::default()
        }];
        assert_eq!(outcome(pmu.getinfo_pmds(&mut info)), Err(Errno::EINVAL));
        assert_eq!(info[0].flags, flags | EINVAL);
    }
}

/// Which counters can count an event: a fixed one counts its own, without modifiers, and reference
/// cycles, which may tick at another rate, where it is named itself.
#[test]
fn a_fixed_counter_serves_its_own_event() {
    let pmu = pmu("intel-v2");
    let asked = |event, edge| {
        let plain = CountRequest::plain(event, true, true);
        let need = need(&pmu, &CountRequest { edge, ..plain });
        (need.fixed, need.programmable)
    };
    let selected = |select, umask| EventCode::Selected {
        family: pmu.model().events(),
        select,
        umask,
    };
    for (event, edge, expected) in [
        (selected(0xc0, 0), false, (Some(0), true)),
        (selected(0x3c, 0), false, (Some(1), true)),
        (selected(0xc0, 0), true, (None, true)),
        (selected(0x3c, 1), false, (None, true)),
        (selected(0x2e, 0x41), false, (None, true)),
        (
            EventCode::Fixed(FixedFunction::RefCycles),
            false,
            (Some(2), false),
        ),
    ] {
        assert_eq!(asked(event, edge), expected, "{event:?}, edge: {edge}");
    }
}
