//! Commands in every state of a context, and what comes of them.

mod registers;
mod session;
mod sets;

use perfmon::{Context, Phase};
use perfmon_abi::wire::{Call, Errno};
use perfmon_abi::{PmcArg, consts as pfm};
use pmu_model::Provenance;

use super::bench::{
    COUNTS, Known, MOMENT, Messages, call, context, context_that_masks, must, pmc, pmd, set,
};

/// Where a context is. A zombie has no descriptor, so no command reaches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum State {
    Unloaded,
    Loaded,
    Started,
    /// By a format that tells nobody.
    Masked,
    /// Masked, and a message waits.
    Notified,
}

use State::{Loaded, Masked, Notified, Started, Unloaded};

pub(crate) const ALL: &[State] = &[Unloaded, Loaded, Started, Masked, Notified];
pub(crate) const ATTACHED: &[State] = &[Loaded, Started, Masked, Notified];
/// For commands that are not a context's.
pub(crate) const ANY: &[State] = &[Unloaded];

/// A case of the table.
#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) command: &'static str,
    pub(crate) states: &'static [State],
    pub(crate) outcome: Result<(), Errno>,
    /// Return flags of the last element, without the way of counting.
    pub(crate) flag: u32,
    pub(crate) when: &'static str,
    pub(crate) play: fn(&mut Context) -> Played,
}

/// What came of it, and the flags of the last element.
pub(crate) type Played = (Result<(), Errno>, u32);

/// A context with sets 0 and 1, in this state; PMC0 of set 0 counts.
pub(crate) fn in_state(state: State) -> Context {
    let mut context = match state {
        Masked => context_that_masks(),
        _ => context("amd-core", 0),
    };
    let notifies = PmcArg {
        flags: pfm::PFM_REGFL_OVFL_NOTIFY,
        ..pmc(0, 0, COUNTS)
    };
    must(&mut context, Call::CreateEvtsets(vec![set(1, 0, 0, 0)]));
    must(&mut context, Call::WritePmcs(vec![notifies]));
    must(&mut context, Call::WritePmds(vec![pmd(0, 0, u64::MAX)]));
    let mut queue = Messages::default();
    if state != Unloaded {
        context.attached(0);
    }
    if !matches!(state, Unloaded | Loaded) {
        must(&mut context, Call::Start(None));
    }
    if matches!(state, Masked | Notified) {
        context.count(0, 1, Provenance::Exact);
        context.overflow(&MOMENT, &Known, &mut queue);
        assert!(context.is_masked());
    }
    assert_eq!(queue.0.len(), usize::from(state == Notified));
    let phase = match state {
        Unloaded => Phase::Unloaded,
        Loaded | Started => Phase::Loaded,
        Masked | Notified => Phase::Masked,
    };
    assert_eq!(context.phase(), phase);
    context
}

/// Flags of the last element of a command's argument.
fn last_flags(call: &Call) -> u32 {
    let last = match call {
        Call::WritePmcs(v) => v.last().map(|it| it.flags),
        Call::WritePmds(v) | Call::ReadPmds(v) => v.last().map(|it| it.flags),
        Call::CreateEvtsets(v) | Call::DeleteEvtsets(v) => v.last().map(|it| it.flags),
        Call::GetinfoEvtsets(v) => v.last().map(|it| it.flags),
        Call::GetinfoPmcs(v) => v.last().map(|it| it.flags),
        Call::GetinfoPmds(v) => v.last().map(|it| it.flags),
        _ => None,
    };
    last.unwrap_or(0) & (pfm::PFM_REG_RETFL_MASK | pfm::PFM_SET_RETFL_MASK)
}

/// Carries out a command.
pub(crate) fn play(context: &mut Context, command: Call) -> Played {
    let (outcome, after) = call(context, command);
    let flags = last_flags(&after);
    (outcome, flags)
}

/// A request as it comes over the wire: `nargs` elements are told, `bytes` are
/// there.
pub(crate) fn decode(command: u16, nargs: i32, bytes: usize) -> Played {
    let decoded = Call::decode(command, nargs, &vec![0; bytes], 4096);
    (super::bench::outcome(decoded.map(|_| ())), 0)
}

/// Every case.
pub(crate) fn cases() -> impl Iterator<Item = &'static Case> {
    [session::CASES, registers::CASES, sets::CASES]
        .into_iter()
        .flatten()
}

/// One line of the table.
const fn case(
    command: &'static str,
    states: &'static [State],
    outcome: Result<(), Errno>,
    flag: u32,
    when: &'static str,
    play: fn(&mut Context) -> Played,
) -> Case {
    Case {
        command,
        states,
        outcome,
        flag,
        when,
        play,
    }
}

/// The same for a command that succeeds.
const fn works(
    command: &'static str,
    states: &'static [State],
    when: &'static str,
    play: fn(&mut Context) -> Played,
) -> Case {
    case(command, states, Ok(()), 0, when, play)
}
