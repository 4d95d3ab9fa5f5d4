//! A context on the table, and what is needed to talk to it.

use std::sync::Arc;

use perfmon::{
    Context, Control, LogicalPmu, MessageQueue, Moment, OverflowArg, Quantities, Sampler,
    SamplingFormat, Setup, VirtualPmd,
};
use perfmon_abi::wire::{Call, Errno, Refusal};
use perfmon_abi::{Message, PmcArg, PmdArg, SetDesc, SetInfo, StartArg, Timespec, consts as pfm};
use pmu_model::{PmuModel, Ring};

/// Select of an event that counts in both rings: on, OS, USR.
pub(crate) const COUNTS: u64 = 1 << 22 | 3 << 16 | 0xc0;

/// A machine that knows every quantity but those of an overflow: each is its PMD.
#[derive(Debug)]
pub(crate) struct Known;

impl Quantities for Known {
    fn read(&self, which: VirtualPmd) -> Option<u64> {
        (!which.is_of_overflow()).then(|| which.pmd().into())
    }
}

/// A queue that a tool reads at will.
#[derive(Debug, Default)]
pub(crate) struct Messages(pub(crate) Vec<Option<Message>>);

impl MessageQueue for Messages {
    fn waiting(&self) -> usize {
        self.0.len()
    }
    fn post(&mut self, message: Option<&Message>) {
        self.0.push(message.copied());
    }
}

/// A format that records nothing.
#[derive(Debug)]
struct Recordless {
    only_set_0: bool,
    masks: bool,
}

impl SamplingFormat for Recordless {
    fn name(&self) -> &str {
        "recordless"
    }
    fn uuid(&self) -> [u8; 16] {
        [7; 16]
    }
    fn only_set_0(&self) -> bool {
        self.only_set_0
    }
    fn handler(&self, _: &mut [u8], arg: &mut OverflowArg<'_>, _: &Moment) -> Result<(), Refusal> {
        arg.control = Control {
            mask_monitoring: self.masks,
            reset_ovfl_pmds: !self.masks,
            ..Control::default()
        };
        Ok(())
    }
    fn restart(&self, _: &mut [u8], active: bool, _: &mut Control) -> Result<(), Refusal> {
        if active {
            return Err(Refusal::new(Errno::EBUSY, "there is no active restart"));
        }
        Ok(())
    }
}

/// The registers of a model.
pub(crate) fn pmu(model: &str) -> Arc<LogicalPmu> {
    Arc::new(LogicalPmu::new(PmuModel::parse(model).expect("a model")))
}

/// A context of a model.
pub(crate) fn context(model: &str, flags: u32) -> Context {
    Context::new(pmu(model), flags, None).expect("a context")
}

fn with_format(format: Recordless) -> Context {
    let setup = Setup {
        ctx_flags: 0,
        num_pmds: 20,
        arg: &[],
    };
    let buffer = Box::new(Vec::new());
    let sampler = Sampler::new(Arc::new(format), &setup, buffer).expect("a sampler");
    Context::new(pmu("amd-core"), 0, Some(sampler)).expect("a context")
}

/// A context whose format supports set 0 only.
pub(crate) fn context_without_sets() -> Context {
    with_format(Recordless {
        only_set_0: true,
        masks: false,
    })
}

/// A context whose format masks at each overflow and notifies nobody.
pub(crate) fn context_that_masks() -> Context {
    with_format(Recordless {
        only_set_0: false,
        masks: true,
    })
}

/// A vCPU that has been stopped anywhere.
pub(crate) const MOMENT: Moment = Moment {
    tsc: 1,
    ip: 2,
    ring: Ring::User,
    cr3: 3,
    vm: 4,
    vcpu: 5,
    core: 6,
};

/// What a command comes to: `Ok`, or the error, whose reason is one line.
pub(crate) fn outcome(result: Result<(), Refusal>) -> Result<(), Errno> {
    result.map_err(|refusal| {
        assert!(!refusal.reason.is_empty() && !refusal.reason.contains('\n'));
        refusal.errno
    })
}

/// Carries out a command; the argument as it is after it.
pub(crate) fn call(context: &mut Context, mut call: Call) -> (Result<(), Errno>, Call) {
    let result = context.call(&mut call, &Known);
    (outcome(result), call)
}

/// Carries out a command that has to succeed.
pub(crate) fn must(context: &mut Context, mut what: Call) -> Call {
    let result = context.call(&mut what, &Known);
    assert_eq!(result, Ok(()), "{what:?}");
    what
}

/// Loads and starts it with this set.
pub(crate) fn launch(context: &mut Context, set: u16) {
    context.prepare_load(set).expect("it can be loaded");
    context.attached(set);
    must(context, Call::Start(None));
}

pub(crate) fn start(set: u16) -> Call {
    Call::Start(Some(StartArg { set }))
}

pub(crate) fn pmc(set: u16, num: u16, value: u64) -> PmcArg {
    PmcArg {
        num,
        set,
        value,
        ..PmcArg::default()
    }
}

pub(crate) fn pmd(set: u16, num: u16, value: u64) -> PmdArg {
    PmdArg {
        num,
        set,
        value,
        ..PmdArg::default()
    }
}

/// Reads one PMD: its value, and how it was counted.
pub(crate) fn read(context: &mut Context, set: u16, num: u16) -> (u64, u32) {
    let Call::ReadPmds(args) = must(context, Call::ReadPmds(vec![pmd(set, num, 0)])) else {
        unreachable!("the command stays the same")
    };
    let how = (args[0].flags & pfm::PFM_REG_RETFL_PROV_MASK) >> pfm::PFM_REG_RETFL_PROV_SHIFT;
    (args[0].value, how)
}

pub(crate) fn set(id: u16, flags: u32, next: u16, timeout: u64) -> SetDesc {
    SetDesc {
        id,
        next,
        flags,
        timeout: Timespec::from_ns(timeout),
    }
}

/// What PFM_GETINFO_EVTSETS says of a set.
pub(crate) fn info(context: &mut Context, id: u16) -> SetInfo {
    let asked = SetInfo {
        id,
        ..SetInfo::default()
    };
    let Call::GetinfoEvtsets(infos) = must(context, Call::GetinfoEvtsets(vec![asked])) else {
        unreachable!("the command stays the same")
    };
    infos[0]
}
