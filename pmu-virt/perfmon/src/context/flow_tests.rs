//! Overflows, restarts, resets and switches, on contexts that are put together
//! by hand.

mod overflow;
mod restart;
mod sampling;
mod switching;

use std::sync::{Arc, Mutex, PoisonError};

use perfmon_abi::Message;
use perfmon_abi::consts::PFM_REGFL_OVFL_NOTIFY;
use perfmon_abi::wire::{Call, Errno, Refusal};
use pmu_model::{PmuModel, Provenance, Ring, Vendor};

use super::notice::Notices;
use super::registers::{Pmc, Pmd};
use super::set::EventSet;
use super::{Context, PFM_FL_OVFL_NO_MSG};
use crate::bits::PmdBits;
use crate::description::LogicalPmu;
use crate::format::{Control, OverflowArg, Sampler, SamplingFormat, Setup};
use crate::moment::{MessageQueue, Moment, Quantities};
use crate::throttle::Throttle;
use pmu_model::VirtualPmd;

/// A message queue without a reader.
#[derive(Debug, Default)]
pub(super) struct Queue {
    pub(super) messages: Vec<Option<Message>>,
    /// Messages that were there before.
    pub(super) unread: usize,
}

impl MessageQueue for Queue {
    fn waiting(&self) -> usize {
        self.unread + self.messages.len()
    }
    fn post(&mut self, message: Option<&Message>) {
        self.messages.push(message.copied());
    }
}

/// Knows one quantity.
pub(super) struct Exits(pub(super) u64);

impl Quantities for Exits {
    fn read(&self, which: VirtualPmd) -> Option<u64> {
        (which == VirtualPmd::Exits).then_some(self.0)
    }
}

pub(super) fn moment(tsc: u64) -> Moment {
    Moment {
        tsc,
        ip: 0x1000,
        ring: Ring::User,
        cr3: 0x7000,
        vm: 42,
        vcpu: 1,
        core: 2,
    }
}

pub(super) fn bits(pmds: &[u16]) -> PmdBits {
    pmds.iter().copied().collect()
}

/// Loaded and started, with set 0 alone.
pub(super) fn context(flags: u32) -> Context {
    let pmu = Arc::new(LogicalPmu::new(PmuModel::default_for(Vendor::Amd)));
    let mut context = Context::new(pmu, flags, None).expect("valid flags");
    for _ in 0..3 {
        context.attached(0);
    }
    assert_eq!(command(&mut context, Call::Start(None)), Ok(()));
    *context.sets.set_mut(0) = EventSet::default();
    context
}

/// A sampling counter: PMC flags; reset values -1000 (long) and -100 (short).
pub(super) fn counter(context: &mut Context, set: u16, num: u16, flags: u32) {
    let set = context.sets.set_mut(set);
    *set.pmc_mut(num) = Pmc {
        flags,
        ..Pmc::default()
    };
    *set.pmd_mut(num) = Pmd {
        long_reset: 1000u64.wrapping_neg(),
        short_reset: 100u64.wrapping_neg(),
        value: 5,
        ..Pmd::default()
    };
}

pub(super) const NOTIFY: u32 = PFM_REGFL_OVFL_NOTIFY;

pub(super) fn pmd(context: &mut Context, set: u16, num: u16) -> &mut Pmd {
    context.sets.set_mut(set).pmd_mut(num)
}

pub(super) fn pmc(context: &mut Context, set: u16, num: u16) -> &mut Pmc {
    context.sets.set_mut(set).pmc_mut(num)
}

/// Distance to the overflow.
pub(super) fn period(context: &mut Context, set: u16, num: u16) -> u64 {
    pmd(context, set, num).value.wrapping_neg()
}

/// These counters overflow; the messages of it.
pub(super) fn overflow(context: &mut Context, pmds: &[u16]) -> Vec<Option<Message>> {
    let mut queue = Queue::default();
    overflow_with(context, pmds, 1, &mut queue);
    queue.messages
}

pub(super) fn overflow_with(context: &mut Context, pmds: &[u16], tsc: u64, queue: &mut Queue) {
    for &num in pmds {
        wrap(context, num);
    }
    context.overflow(&moment(tsc), &Exits(77), queue);
    assert!(!context.has_pending_overflow());
}

/// A counter of the active set wraps, and is at 5 then.
pub(super) fn wrap(context: &mut Context, num: u16) {
    pmd(context, context.active_set(), num).value = u64::MAX;
    context.count(num, 6, Provenance::Exact);
    assert!(context.has_pending_overflow());
}

/// Masked, because something interrupts too often that nobody else uses.
pub(super) fn mask(context: &mut Context) {
    context.set_throttle(Throttle::per_second(1, 1000));
    for _ in 0..2 {
        overflow(context, &[3]);
    }
    context.set_throttle(Throttle::off());
    assert!(context.is_masked());
}

pub(super) fn command(context: &mut Context, mut call: Call) -> Result<(), Errno> {
    let done = context.call(&mut call, &Exits(0));
    done.map_err(|refusal| refusal.errno)
}

pub(super) fn restart(context: &mut Context) -> Result<(), Errno> {
    command(context, Call::Restart)
}

/// What a scripted format was asked, as one line each.
pub(super) type Log = Arc<Mutex<Vec<String>>>;

pub(super) fn lines(log: &Log) -> Vec<String> {
    std::mem::take(&mut *log.lock().unwrap_or_else(PoisonError::into_inner))
}

/// A format that answers what it was told to, by PMD.
#[derive(Debug, Default)]
pub(super) struct Scripted {
    pub(super) controls: Vec<(u16, Control)>,
    /// The handler fails for this PMD.
    pub(super) fails_at: Option<u16>,
    pub(super) on_restart: Control,
    /// It has no active restart.
    pub(super) masked_only: bool,
    pub(super) log: Log,
}

impl Scripted {
    pub(super) fn install(self, context: &mut Context) -> Log {
        let log = Arc::clone(&self.log);
        let setup = Setup {
            ctx_flags: 0,
            num_pmds: 1,
            arg: &[],
        };
        let sampler = Sampler::new(Arc::new(self), &setup, Box::new(Vec::new()));
        let sampler = sampler.expect("a format that accepts all");
        let silent = context.session.has_flag(PFM_FL_OVFL_NO_MSG);
        context.notices = Notices::new(sampler.queue_depth(), silent);
        context.sampler = Some(sampler);
        log
    }

    fn note(&self, line: String) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        log.push(line);
    }
}

impl SamplingFormat for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }
    fn uuid(&self) -> [u8; 16] {
        [1; 16]
    }
    fn queue_depth(&self) -> usize {
        2
    }
    fn handler(
        &self,
        _: &mut [u8],
        arg: &mut OverflowArg<'_>,
        moment: &Moment,
    ) -> Result<(), Refusal> {
        let (pmd, set, tsc) = (arg.ovfl_pmd, arg.active_set, moment.tsc);
        self.note(format!("PMD{pmd} set {set} tsc {tsc} {:x?}", arg.values));
        let control = self.controls.iter().find(|(num, _)| *num == pmd);
        arg.control = control.map_or(Control::default(), |&(_, control)| control);
        match self.fails_at {
            Some(num) if num == pmd => Err(Errno::EIO.into()),
            _ => Ok(()),
        }
    }
    fn restart(&self, _: &mut [u8], active: bool, control: &mut Control) -> Result<(), Refusal> {
        if active && self.masked_only {
            return Err(Errno::EBUSY.into());
        }
        self.note(format!("restart active {active}"));
        *control = self.on_restart;
        Ok(())
    }
}

pub(super) const RESET: Control = Control {
    notify_user: false,
    reset_ovfl_pmds: true,
    block_thread: false,
    mask_monitoring: false,
};
pub(super) const STOP: Control = Control {
    notify_user: true,
    reset_ovfl_pmds: false,
    block_thread: true,
    mask_monitoring: true,
};
