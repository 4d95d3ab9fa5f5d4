//! vCPUs and contexts on cores, as a VMM moves them.

use std::sync::{Arc, Mutex};

use perfmon_abi::wire::{Call, Errno, Refusal};
use perfmon_abi::{Message, PmcArg, PmdArg, SetDesc, Timespec, consts as pfm};
use pmu_virt::perfmon::{
    AttachedContext, Context, ContextId, GuestLimit, HostPolicy, LogicalPmu, MessageQueue,
    Quantities, VirtualPmd,
};
use pmu_virt::{
    Caller, CorePmu, CounterBackend, Grant, Layer, MsrIndex, OwnerId, PmuModel, Progress,
    ReadOutcome, Tsc, WriteOutcome,
};

use super::truth::KHZ;
use crate::seated::Seated;

pub(crate) const KERNEL: Caller = Caller::legacy(Layer::GuestKernel);

/// A machine that knows none of its quantities.
#[derive(Debug)]
pub(crate) struct Nothing;

impl Quantities for Nothing {
    fn read(&self, _: VirtualPmd) -> Option<u64> {
        None
    }
}

/// A queue that the test reads.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mail(Arc<Mutex<Vec<Option<Message>>>>);

impl Mail {
    pub(crate) fn take(&self) -> Vec<Option<Message>> {
        std::mem::take(&mut *self.0.lock().expect("the queue"))
    }

    /// The types of the messages since the last look.
    pub(crate) fn kinds(&self) -> Vec<u32> {
        self.take()
            .iter()
            .map(|message| message.as_ref().map_or(0, |message| message.kind))
            .collect()
    }
}

impl MessageQueue for Mail {
    fn waiting(&self) -> usize {
        self.0.lock().expect("the queue").len()
    }

    fn post(&mut self, message: Option<&Message>) {
        self.0.lock().expect("the queue").push(message.copied());
    }
}

/// Where a context is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Spot {
    Vcpu(usize),
    Core(usize),
}

/// PMC of the model `amd-core` by number of the counter.
pub(crate) fn register(n: usize) -> u16 {
    let n = u16::try_from(n).expect("a small number");
    if n < 4 { n } else { 10 + n }
}

/// A context for the model `amd-core`; sets of (counter, select).
pub(crate) fn context(flags: u32, sets: &[Vec<(usize, u64)>], timeout: u64) -> Context {
    let pmu = LogicalPmu::new(PmuModel::parse("amd-core").expect("a model"));
    let mut context = Context::new(Arc::new(pmu), flags, None).expect("a context");
    let mut number = 0..;
    for set in sets {
        let id = number.next().unwrap_or(0);
        let description = SetDesc {
            id,
            flags: if sets.len() > 1 {
                pfm::PFM_SETFL_TIME_SWITCH
            } else {
                0
            },
            timeout: Timespec::from_ns(timeout),
            ..SetDesc::default()
        };
        if sets.len() > 1 {
            must(&mut context, Call::CreateEvtsets(vec![description]));
        }
        let writes = set.iter().map(|&(n, value)| PmcArg {
            num: register(n),
            set: id,
            value,
            ..PmcArg::default()
        });
        let writes: Vec<_> = writes.collect();
        if !writes.is_empty() {
            must(&mut context, Call::WritePmcs(writes));
        }
    }
    context
}

fn must(context: &mut Context, mut call: Call) {
    let done = context.call(&mut call, &Nothing);
    assert_eq!(done, Ok(()), "{call:?}");
}

/// Reads a counter of a set: its value, and how it was counted.
pub(crate) fn reading(set: u16, n: usize) -> Call {
    Call::ReadPmds(vec![PmdArg {
        num: register(n),
        set,
        ..PmdArg::default()
    }])
}

/// What [`reading`] has come to.
pub(crate) fn was_read(call: &Call) -> (u64, u32) {
    let Call::ReadPmds(args) = call else {
        panic!("{call:?} is no reading");
    };
    let how = (args[0].flags & pfm::PFM_REG_RETFL_PROV_MASK) >> pfm::PFM_REG_RETFL_PROV_SHIFT;
    (args[0].value, how)
}

/// vCPUs on cores.
#[derive(Debug)]
pub(crate) struct Rig {
    pub(crate) vcpus: Vec<Seated>,
    /// The core on which a vCPU is or was last.
    pub(crate) home: Vec<Option<usize>>,
    /// Cores on which no vCPU is.
    idle: Vec<Option<Box<CorePmu>>>,
    /// Who is on each core.
    on: Vec<Option<usize>>,
    pub(crate) tsc: u64,
    made: u32,
    /// What would have made room for the last context that found none.
    pub(crate) beside: Option<GuestLimit>,
}

impl Rig {
    pub(crate) fn new(
        (vcpus, cores): (u32, usize),
        policy: HostPolicy,
        backend: impl Fn() -> Box<dyn CounterBackend>,
    ) -> Self {
        let model = PmuModel::parse("amd-core").expect("a model");
        let vcpu = |n| Seated::detached(OwnerId(n), model.clone(), Grant::everything());
        let vcpus: Vec<_> = (0..vcpus).map(vcpu).collect();
        let core = |_| {
            let mut core = CorePmu::new(backend());
            core.enable_hosting(policy, KHZ);
            Some(Box::new(core))
        };
        Rig {
            home: vec![None; vcpus.len()],
            vcpus,
            idle: (0..cores).map(core).collect(),
            on: vec![None; cores],
            tsc: 1_000,
            made: 0,
            beside: None,
        }
    }

    /// Parks whoever is on `core`.
    pub(crate) fn clear(&mut self, core: usize) {
        if let Some(vcpu) = self.on[core].take() {
            self.idle[core] = self.vcpus[vcpu].park();
        }
    }

    /// Puts a vCPU on a core, as the scheduler does.
    pub(crate) fn switch(&mut self, vcpu: usize, core: usize) -> &mut Seated {
        if self.on[core] != Some(vcpu) {
            if let Some(old) = self.home[vcpu].filter(|old| *old != core) {
                self.clear(old);
                let mut left = self.idle[old].take().expect("the core");
                self.vcpus[vcpu].leave(&mut left);
                self.idle[old] = Some(left);
            }
            self.clear(core);
            let here = self.idle[core].take().expect("the core");
            self.vcpus[vcpu].attach(here);
            self.on[core] = Some(vcpu);
            self.home[vcpu] = Some(core);
        }
        &mut self.vcpus[vcpu]
    }

    /// Works with a core, whether a vCPU is on it or not.
    pub(crate) fn core<R>(&mut self, core: usize, act: impl FnOnce(&mut CorePmu) -> R) -> R {
        match self.on[core] {
            Some(vcpu) => self.vcpus[vcpu].with_core(act).expect("it is on a core"),
            None => act(self.idle[core].as_mut().expect("the core")),
        }
    }

    /// A vCPU runs from now on, for so long.
    pub(crate) fn run(&mut self, vcpu: usize, core: usize, left: Progress) {
        let entered = self.tsc;
        let pmu = self.switch(vcpu, core);
        pmu.observe(Progress::Entered { tsc: Tsc(entered) });
        pmu.observe(left);
        if let Progress::Left { tsc, .. } = left {
            self.tsc = tsc.0;
        }
    }

    /// Loads a context; a vCPU is brought to its core for that.
    pub(crate) fn load(
        &mut self,
        spot: Spot,
        context: Context,
        mail: &Mail,
    ) -> Result<ContextId, Refusal> {
        self.made += 1;
        let id = ContextId(self.made);
        let hosted = AttachedContext::new(id, Box::new(context), Box::new(mail.clone()));
        let loaded = match spot {
            Spot::Vcpu(vcpu) => {
                let core = self.home[vcpu].unwrap_or(0);
                self.switch(vcpu, core).load_context(hosted, 0)
            }
            Spot::Core(core) => self.core(core, |core| core.load_context(hosted, 0)),
        };
        loaded.map(|()| id).map_err(|not| {
            self.beside = not.beside;
            not.refusal
        })
    }

    /// The contexts of a vCPU or core, the oldest first.
    pub(crate) fn contexts(&mut self, spot: Spot) -> Vec<ContextId> {
        match spot {
            Spot::Vcpu(vcpu) => self.vcpus[vcpu].context_ids(),
            Spot::Core(core) => self.core(core, |core| {
                core.host_contexts().map(AttachedContext::id).collect()
            }),
        }
    }

    /// The oldest context; one that does not exist if there is none.
    fn oldest(&mut self, spot: Spot) -> ContextId {
        let first = self.contexts(spot).first().copied();
        first.unwrap_or(ContextId(0))
    }

    /// Unloads the oldest context.
    pub(crate) fn unload(&mut self, spot: Spot) -> Option<Context> {
        let id = self.oldest(spot);
        self.unload_one(spot, id)
    }

    pub(crate) fn unload_one(&mut self, spot: Spot, id: ContextId) -> Option<Context> {
        let hosted = match spot {
            Spot::Vcpu(vcpu) => self.vcpus[vcpu].unload_context(id),
            Spot::Core(core) => self.core(core, |core| core.unload_context(id)),
        };
        hosted.map(|hosted| *hosted.into_parts().1)
    }

    /// Calls the oldest context.
    pub(crate) fn call(&mut self, spot: Spot, call: &mut Call) -> Result<(), Refusal> {
        let id = self.oldest(spot);
        self.call_one(spot, id, call)
    }

    pub(crate) fn call_one(
        &mut self,
        spot: Spot,
        id: ContextId,
        call: &mut Call,
    ) -> Result<(), Refusal> {
        match spot {
            Spot::Vcpu(vcpu) => self.vcpus[vcpu].call_context(id, call, &Nothing),
            Spot::Core(core) => self.core(core, |core| core.call_context(id, call, &Nothing)),
        }
    }

    /// The same, where the error alone matters.
    pub(crate) fn outcome(&mut self, spot: Spot, mut call: Call) -> Result<(), Errno> {
        self.call(spot, &mut call).map_err(|refusal| refusal.errno)
    }

    /// A counter of the oldest context, and how it was counted.
    pub(crate) fn read(&mut self, spot: Spot, set: u16, n: usize) -> (u64, u32) {
        let id = self.oldest(spot);
        self.read_one((spot, id), set, n)
    }

    pub(crate) fn read_one(
        &mut self,
        (spot, id): (Spot, ContextId),
        set: u16,
        n: usize,
    ) -> (u64, u32) {
        let mut call = reading(set, n);
        assert_eq!(self.call_one(spot, id, &mut call), Ok(()));
        was_read(&call)
    }

    /// Allows so many contexts on each vCPU and core.
    pub(crate) fn limit(&mut self, most: usize) {
        for core in self.idle.iter_mut().flatten() {
            core.limit_contexts(most);
        }
    }

    pub(crate) fn write(&mut self, vcpu: usize, msr: u32, value: u64) {
        let wrote = self.vcpus[vcpu].wrmsr(MsrIndex(msr), value, KERNEL);
        assert_eq!(wrote, WriteOutcome::Done);
    }

    pub(crate) fn value(&mut self, vcpu: usize, msr: u32) -> u64 {
        match self.vcpus[vcpu].rdmsr(MsrIndex(msr), KERNEL) {
            ReadOutcome::Value(value) => value,
            other => panic!("{other:?}"),
        }
    }
}
