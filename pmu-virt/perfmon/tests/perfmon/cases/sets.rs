//! Event sets.

use perfmon::Context;
use perfmon_abi::wire::{Call, Errno};
use perfmon_abi::{SetDesc, SetInfo, Timespec, consts as pfm};

use super::super::bench::{context_without_sets, set};
use super::{ALL, ATTACHED, Case, State, case, decode, play, works};

const CREATE: &str = "PFM_CREATE_EVTSETS";
const DELETE: &str = "PFM_DELETE_EVTSETS";
const INFO: &str = "PFM_GETINFO_EVTSETS";

const DETACHED: &[State] = &[State::Unloaded];
const EINVAL: Result<(), Errno> = Err(Errno::EINVAL);
const EFAULT: Result<(), Errno> = Err(Errno::EFAULT);
const EBUSY: Result<(), Errno> = Err(Errno::EBUSY);
const BAD: u32 = pfm::PFM_SET_RETFL_EINVAL;
const NOSET: u32 = pfm::PFM_SET_RETFL_NOSET;
const TIME: u32 = pfm::PFM_SETFL_TIME_SWITCH;

const NO_SET: &str = "there is no such event set";
const FLAGS: &str = "`set_flags` has bits that are not the command's";
const IS_ATTACHED: &str = "the context is attached";
const COUNT: &str = "the number of elements is 0, negative, or more than `cf_arg_size_max` allows";

fn create(context: &mut Context, desc: SetDesc) -> super::Played {
    play(context, Call::CreateEvtsets(vec![desc]))
}

fn delete(context: &mut Context, id: u16, flags: u32) -> super::Played {
    play(context, Call::DeleteEvtsets(vec![set(id, flags, 0, 0)]))
}

fn info(context: &mut Context, id: u16, flags: u32) -> super::Played {
    let asked = SetInfo {
        id,
        flags,
        ..SetInfo::default()
    };
    play(context, Call::GetinfoEvtsets(vec![asked]))
}

pub(super) const CASES: &[Case] = &[
    works(
        CREATE,
        DETACHED,
        "a new set, or new properties of one; its registers stay",
        |context| create(context, set(7, TIME, 0, 1)),
    ),
    case(CREATE, ATTACHED, EBUSY, 0, IS_ATTACHED, |context| {
        create(context, set(7, 0, 0, 0))
    }),
    case(CREATE, DETACHED, EINVAL, BAD, FLAGS, |context| {
        create(context, set(7, 0x20, 0, 0))
    }),
    case(
        CREATE,
        DETACHED,
        EINVAL,
        BAD,
        "PFM_SETFL_EXCL_KERNEL_ONLY_THREADS, which is not supported",
        |context| {
            create(
                context,
                set(7, pfm::PFM_SETFL_EXCL_KERNEL_ONLY_THREADS, 0, 0),
            )
        },
    ),
    case(
        CREATE,
        DETACHED,
        EINVAL,
        BAD,
        "PFM_SETFL_TIME_SWITCH with PFM_SETFL_OVFL_SWITCH",
        |context| create(context, set(7, TIME | pfm::PFM_SETFL_OVFL_SWITCH, 0, 1)),
    ),
    case(
        CREATE,
        DETACHED,
        EINVAL,
        BAD,
        "PFM_SETFL_TIME_SWITCH with a timeout of 0",
        |context| create(context, set(7, TIME, 0, 0)),
    ),
    case(
        CREATE,
        DETACHED,
        EINVAL,
        BAD,
        "PFM_SETFL_TIME_SWITCH with a timeout that is negative, not normalised, or of 2^64 ns",
        |context| {
            let timeout = Timespec {
                sec: 0,
                nsec: 1_000_000_000,
            };
            create(
                context,
                SetDesc {
                    timeout,
                    ..set(7, TIME, 0, 0)
                },
            )
        },
    ),
    case(
        CREATE,
        DETACHED,
        EINVAL,
        BAD,
        "`set_id` is not 0, and the sampling format supports set 0 only",
        |_| create(&mut context_without_sets(), set(7, 0, 0, 0)),
    ),
    case(
        CREATE,
        DETACHED,
        Err(Errno::ENOMEM),
        0,
        "the context has 1024 sets already",
        |context| {
            let sets = (0..1025).map(|id| set(id, 0, 0, 0)).collect();
            play(context, Call::CreateEvtsets(sets))
        },
    ),
    case(CREATE, ALL, EFAULT, 0, COUNT, |_| {
        decode(pfm::PFM_CREATE_EVTSETS, 0, 0)
    }),
    works(
        DELETE,
        DETACHED,
        "links to it are looked at by PFM_LOAD_CONTEXT",
        |context| delete(context, 1, 0),
    ),
    case(DELETE, ATTACHED, EBUSY, 0, IS_ATTACHED, |context| {
        delete(context, 1, 0)
    }),
    case(DELETE, DETACHED, EINVAL, NOSET, NO_SET, |context| {
        delete(context, 9, 0)
    }),
    case(DELETE, DETACHED, EINVAL, BAD, "it is set 0", |context| {
        delete(context, 0, 0)
    }),
    case(DELETE, DETACHED, EINVAL, BAD, FLAGS, |context| {
        delete(context, 1, TIME)
    }),
    case(DELETE, ALL, EFAULT, 0, COUNT, |_| {
        decode(pfm::PFM_DELETE_EVTSETS, -5, 0)
    }),
    works(INFO, ALL, "tells what became of the set", |context| {
        info(context, 1, NOSET)
    }),
    case(INFO, ALL, EINVAL, NOSET, NO_SET, |context| {
        info(context, 9, 0)
    }),
    case(INFO, ALL, EINVAL, BAD, FLAGS, |context| {
        info(context, 1, TIME)
    }),
    case(INFO, ALL, EFAULT, 0, COUNT, |_| {
        decode(pfm::PFM_GETINFO_EVTSETS, 0, 0)
    }),
];
