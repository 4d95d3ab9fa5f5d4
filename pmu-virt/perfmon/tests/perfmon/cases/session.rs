//! Creation, load, unload, start, stop, restart, and the configuration.

use perfmon::{Context, Phase};
use perfmon_abi::wire::{Call, Errno};
use perfmon_abi::{Config, CtxArg, LoadArg, Record, consts as pfm};

use super::super::bench::{must, outcome, pmu, set, start};
use super::{ALL, ANY, ATTACHED, Case, State, case, decode, play, works};

const CREATE: &str = "PFM_CREATE_CONTEXT";
const LOAD: &str = "PFM_LOAD_CONTEXT";
const UNLOAD: &str = "PFM_UNLOAD_CONTEXT";
const START: &str = "PFM_START";
const STOP: &str = "PFM_STOP";
const RESTART: &str = "PFM_RESTART";

const EINVAL: Result<(), Errno> = Err(Errno::EINVAL);
const EFAULT: Result<(), Errno> = Err(Errno::EFAULT);
const EBUSY: Result<(), Errno> = Err(Errno::EBUSY);

fn create(flags: u32) -> super::Played {
    let made = Context::new(pmu("amd-core"), flags, None);
    (outcome(made.map(|_| ())), 0)
}

fn load(context: &mut Context, set: u16) -> super::Played {
    let result = outcome(context.prepare_load(set));
    if result.is_ok() {
        context.attached(set);
        assert_eq!(context.phase(), Phase::Loaded);
    }
    (result, 0)
}

pub(super) const CASES: &[Case] = &[
    works(
        CREATE,
        ANY,
        "for a vCPU or a core, as table 3.2 allows",
        |_| create(pfm::PFM_FL_SYSTEM_WIDE | pfm::PFM_FL_OVFL_NO_MSG),
    ),
    case(
        CREATE,
        ANY,
        EINVAL,
        0,
        "`ctx_flags` has bits that are not defined",
        |_| create(1 << 3),
    ),
    case(
        CREATE,
        ANY,
        EINVAL,
        0,
        "PFM_FL_NOTIFY_BLOCK with PFM_FL_SYSTEM_WIDE",
        |_| create(pfm::PFM_FL_NOTIFY_BLOCK | pfm::PFM_FL_SYSTEM_WIDE),
    ),
    case(
        CREATE,
        ANY,
        EINVAL,
        0,
        "the number of elements is not 1",
        |_| decode(pfm::PFM_CREATE_CONTEXT, 2, 2 * CtxArg::SIZE),
    ),
    case(CREATE, ANY, EFAULT, 0, "the argument is not whole", |_| {
        decode(pfm::PFM_CREATE_CONTEXT, 1, CtxArg::SIZE - 1)
    }),
    case(
        CREATE,
        ANY,
        Err(Errno::E2BIG),
        0,
        "the sampling format's argument exceeds `cf_arg_size_max`",
        |_| decode(pfm::PFM_CREATE_CONTEXT, 1, CtxArg::SIZE + 4097),
    ),
    works(
        LOAD,
        &[State::Unloaded],
        "the set exists, explicit links lead to sets",
        |context| load(context, 1),
    ),
    case(
        LOAD,
        ATTACHED,
        EBUSY,
        0,
        "the context is attached",
        |context| load(context, 0),
    ),
    case(
        LOAD,
        &[State::Unloaded],
        EINVAL,
        0,
        "`load_set` does not exist",
        |context| load(context, 9),
    ),
    case(
        LOAD,
        &[State::Unloaded],
        EINVAL,
        0,
        "an explicit link of any set leads to none",
        |context| {
            let astray = set(1, pfm::PFM_SETFL_EXPL_NEXT, 9, 0);
            must(context, Call::CreateEvtsets(vec![astray]));
            load(context, 0)
        },
    ),
    case(
        LOAD,
        ALL,
        EFAULT,
        0,
        "the number of elements is not 1",
        |_| decode(pfm::PFM_LOAD_CONTEXT, 2, 2 * LoadArg::SIZE),
    ),
    works(
        UNLOAD,
        ATTACHED,
        "stops and detaches; a blocked vCPU goes on",
        |context| {
            context.detached();
            assert_eq!(context.phase(), Phase::Unloaded);
            assert!(!context.is_started() && !context.is_blocked());
            (Ok(()), 0)
        },
    ),
    case(
        UNLOAD,
        &[State::Unloaded],
        EBUSY,
        0,
        "the context is not attached",
        |context| play(context, Call::Unload),
    ),
    works(START, &[State::Loaded], "counting begins", |context| {
        let played = play(context, start(1));
        assert_eq!(context.active_set(), 1);
        played
    }),
    works(
        START,
        &[State::Started],
        "nothing changes, nor does the active set",
        |context| {
            let played = play(context, start(1));
            assert_eq!(context.active_set(), 0);
            played
        },
    ),
    works(
        START,
        &[State::Masked, State::Notified],
        "chooses the set that counts after PFM_RESTART",
        |context| {
            let played = play(context, start(1));
            assert_eq!(context.active_set(), 1);
            assert!(context.is_masked());
            played
        },
    ),
    case(
        START,
        &[State::Unloaded],
        EBUSY,
        0,
        "the context is not attached",
        |context| play(context, Call::Start(None)),
    ),
    case(
        START,
        ATTACHED,
        EINVAL,
        0,
        "`start_set` does not exist",
        |context| play(context, start(9)),
    ),
    case(
        START,
        ALL,
        EFAULT,
        0,
        "the number of elements is not 0 or 1",
        |_| decode(pfm::PFM_START, 2, 4),
    ),
    works(STOP, ATTACHED, "counting ends; a mask stays", |context| {
        let masked = context.is_masked();
        let played = play(context, Call::Stop);
        assert!(!context.is_started() && context.wanted().is_empty());
        assert_eq!(context.is_masked(), masked);
        played
    }),
    case(
        STOP,
        &[State::Unloaded],
        EBUSY,
        0,
        "the context is not attached",
        |context| play(context, Call::Stop),
    ),
    works(
        RESTART,
        &[State::Masked, State::Notified],
        "counting goes on; what overflowed is reset, unless a format decides otherwise",
        |context| {
            let played = play(context, Call::Restart);
            assert!(!context.is_masked() && context.is_started());
            played
        },
    ),
    case(
        RESTART,
        &[State::Unloaded],
        EBUSY,
        0,
        "the context is not attached",
        |context| play(context, Call::Restart),
    ),
    case(
        RESTART,
        &[State::Loaded, State::Started],
        EBUSY,
        0,
        "not masked, and no format that has an active restart",
        |context| play(context, Call::Restart),
    ),
    case(
        "PFM_SET_CONFIG",
        ANY,
        EFAULT,
        0,
        "the number of elements is not 1",
        |_| decode(pfm::PFM_SET_CONFIG, 0, Config::SIZE),
    ),
    case(
        "PFM_GET_CONFIG",
        ANY,
        EFAULT,
        0,
        "the number of elements is not 1",
        |_| decode(pfm::PFM_GET_CONFIG, 2, 2 * Config::SIZE),
    ),
];
