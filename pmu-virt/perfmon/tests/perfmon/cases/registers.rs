//! PFM_WRITE_PMCS, PFM_WRITE_PMDS, PFM_READ_PMDS, and what registers are.

use perfmon_abi::wire::{Call, Errno};
use perfmon_abi::{PmcArg, PmcInfo, PmdArg, PmdInfo, consts as pfm};

use super::super::bench::{COUNTS, pmc, pmd};
use super::{ALL, ANY, Case, case, decode, play, works};

const PMCS: &str = "PFM_WRITE_PMCS";
const PMDS: &str = "PFM_WRITE_PMDS";
const READ: &str = "PFM_READ_PMDS";
const PMC_INFO: &str = "PFM_GETINFO_PMCS";
const PMD_INFO: &str = "PFM_GETINFO_PMDS";

const EINVAL: Result<(), Errno> = Err(Errno::EINVAL);
const EFAULT: Result<(), Errno> = Err(Errno::EFAULT);
const BAD: u32 = pfm::PFM_REG_RETFL_EINVAL;
const NOTAVAIL: u32 = pfm::PFM_REG_RETFL_NOTAVAIL;
const NOSET: u32 = pfm::PFM_REG_RETFL_NOSET;

const NO_SET: &str = "`reg_set` does not exist";
const NO_REGISTER: &str = "there is no such register";
const FLAGS: &str = "`reg_flags` has bits that are not the command's";
const COUNT: &str = "the number of elements is 0, negative, or more than `cf_arg_size_max` allows";

fn pmc_info(num: u16, flags: u32) -> Call {
    Call::GetinfoPmcs(vec![PmcInfo {
        num,
        flags,
        ..PmcInfo::default()
    }])
}

fn pmd_info(num: u16, flags: u32) -> Call {
    Call::GetinfoPmds(vec![PmdInfo {
        num,
        flags,
        ..PmdInfo::default()
    }])
}

pub(super) const CASES: &[Case] = &[
    works(
        PMCS,
        ALL,
        "reserved bits silently keep their default",
        |context| play(context, Call::WritePmcs(vec![pmc(0, 1, u64::MAX)])),
    ),
    case(PMCS, ALL, EINVAL, NOSET, NO_SET, |context| {
        play(context, Call::WritePmcs(vec![pmc(9, 0, COUNTS)]))
    }),
    case(PMCS, ALL, EINVAL, NOTAVAIL, NO_REGISTER, |context| {
        play(context, Call::WritePmcs(vec![pmc(0, 9, COUNTS)]))
    }),
    case(PMCS, ALL, EINVAL, BAD, FLAGS, |context| {
        let arg = PmcArg {
            flags: pfm::PFM_REGFL_READ_RESET,
            ..pmc(0, 0, COUNTS)
        };
        play(context, Call::WritePmcs(vec![arg]))
    }),
    case(
        PMCS,
        ALL,
        EINVAL,
        BAD,
        "`reg_reset_pmds` names a PMD that there is not",
        |context| {
            let arg = PmcArg {
                reset_pmds: [1 << 9, 0],
                ..pmc(0, 0, COUNTS)
            };
            play(context, Call::WritePmcs(vec![arg]))
        },
    ),
    case(
        PMCS,
        ALL,
        EINVAL,
        BAD,
        "`reg_smpl_pmds` names a PMD that there is not",
        |context| {
            let arg = PmcArg {
                smpl_pmds: [0, 1 << 63],
                ..pmc(0, 0, COUNTS)
            };
            play(context, Call::WritePmcs(vec![arg]))
        },
    ),
    case(PMCS, ALL, EFAULT, 0, COUNT, |_| {
        decode(pfm::PFM_WRITE_PMCS, 0, 0)
    }),
    works(PMDS, ALL, "a new value begins a new period", |context| {
        play(context, Call::WritePmds(vec![pmd(0, 0, 5)]))
    }),
    case(PMDS, ALL, EINVAL, NOSET, NO_SET, |context| {
        play(context, Call::WritePmds(vec![pmd(9, 0, 0)]))
    }),
    case(PMDS, ALL, EINVAL, NOTAVAIL, NO_REGISTER, |context| {
        play(context, Call::WritePmds(vec![pmd(0, 9, 0)]))
    }),
    case(PMDS, ALL, EINVAL, BAD, FLAGS, |context| {
        let arg = PmdArg {
            flags: 1,
            ..pmd(0, 0, 0)
        };
        play(context, Call::WritePmds(vec![arg]))
    }),
    case(PMDS, ALL, EINVAL, BAD, "it is a virtual PMD", |context| {
        play(context, Call::WritePmds(vec![pmd(0, 64, 0)]))
    }),
    case(PMDS, ALL, EFAULT, 0, COUNT, |_| {
        decode(pfm::PFM_WRITE_PMDS, -1, 0)
    }),
    works(
        READ,
        ALL,
        "one that was never written reads as its default",
        |context| play(context, Call::ReadPmds(vec![pmd(0, 3, 0), pmd(0, 64, 0)])),
    ),
    case(READ, ALL, EINVAL, NOSET, NO_SET, |context| {
        play(context, Call::ReadPmds(vec![pmd(9, 0, 0)]))
    }),
    case(READ, ALL, EINVAL, NOTAVAIL, NO_REGISTER, |context| {
        play(context, Call::ReadPmds(vec![pmd(0, 9, 0)]))
    }),
    case(READ, ALL, EINVAL, BAD, FLAGS, |context| {
        let arg = PmdArg {
            flags: 1,
            ..pmd(0, 0, 0)
        };
        play(context, Call::ReadPmds(vec![arg]))
    }),
    case(
        READ,
        ALL,
        EINVAL,
        BAD,
        "PFM_REGFL_READ_RESET of a virtual PMD",
        |context| {
            let arg = PmdArg {
                flags: pfm::PFM_REGFL_READ_RESET,
                ..pmd(0, 64, 0)
            };
            play(context, Call::ReadPmds(vec![arg]))
        },
    ),
    case(READ, ALL, EFAULT, 0, COUNT, |_| {
        decode(pfm::PFM_READ_PMDS, 1000, 88_000)
    }),
    works(
        PMC_INFO,
        ANY,
        "tells default, reserved bits, type and index",
        |context| play(context, pmc_info(0, pfm::PFM_REG_RETFL_MASK)),
    ),
    case(PMC_INFO, ANY, EINVAL, BAD, NO_REGISTER, |context| {
        play(context, pmc_info(9, 0))
    }),
    case(PMC_INFO, ANY, EINVAL, BAD, FLAGS, |context| {
        play(context, pmc_info(0, 1))
    }),
    case(PMC_INFO, ANY, EFAULT, 0, COUNT, |_| {
        decode(pfm::PFM_GETINFO_PMCS, 0, 0)
    }),
    works(
        PMD_INFO,
        ANY,
        "tells default, reserved bits, type and index",
        |context| play(context, pmd_info(64, pfm::PFM_REG_RETFL_MASK)),
    ),
    case(PMD_INFO, ANY, EINVAL, BAD, NO_REGISTER, |context| {
        play(context, pmd_info(9, 0))
    }),
    case(PMD_INFO, ANY, EINVAL, BAD, FLAGS, |context| {
        play(context, pmd_info(0, 1))
    }),
    case(PMD_INFO, ANY, EFAULT, 0, COUNT, |_| {
        decode(pfm::PFM_GETINFO_PMDS, 0, 0)
    }),
];
