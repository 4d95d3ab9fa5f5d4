//! Plays sequences of commands and happenings on a context and on the naive model,
//! and compares every answer and everything that can be seen in between.
//!
//! The fuzz target `commands` in `pmu-virt/fuzz` is made of this module as well.

mod buffer;
mod script;
mod seen;
mod spy;

use perfmon::{Context, Moment, Nanos, Phase, Throttle};
use perfmon_abi::wire::Call;
use perfmon_abi::{PmdArg, SetInfo, consts as pfm};
use pmu_model::{Provenance, Ring};

use super::bench::{Known, Messages, outcome, pmu};
use super::model::{COUNTERS, Limit, Model, State};
use buffer::Buffer;
pub(crate) use script::Script;
pub(crate) use seen::Seen;
use std::num::NonZeroU64;

/// What a context is made with.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// PFM_FL_*, a combination that is allowed.
    pub(crate) flags: u32,
    pub(crate) sampling: Sampling,
    /// Interrupts in a window of 1000 ticks; any number.
    pub(crate) most: Option<u64>,
}

/// Its sampling format.
#[derive(Clone, Debug)]
pub(crate) enum Sampling {
    None,
    /// One that answers so, and may support set 0 only.
    Puppet(Vec<u8>, bool),
    /// Flags, and bytes above the least that the buffer has to have.
    Default(u32, usize),
    Double(u32, usize),
    /// Bytes of a block above the least, and blocks.
    Compact(usize, usize),
}

/// What can befall a context.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Call(Call),
    Load(u16),
    Unload,
    /// Events at one of the counters that are to count.
    Count(usize, u64, Provenance),
    /// Events that are told late, of a counter that need not count any more.
    Late(u16, u64, Provenance),
    Lose(u16),
    Pass(u64, bool),
    Expire,
    /// So many ticks after the last.
    Overflow(u64),
    ReadMessages,
    Preempted,
    Restored(u64),
    /// The vCPU has ended.
    Ended,
}

/// A context and the model of it.
pub(crate) struct Pair {
    context: Context,
    queue: Messages,
    buffer: Buffer,
    model: Model,
    tsc: u64,
}

/// Plays what `bytes` say, and returns what came about.
///
/// # Panics
/// The context does something else than the model.
pub(crate) fn run(bytes: &[u8]) -> Seen {
    let mut script = Script::new(bytes);
    let setup = script.setup();
    let mut pair = Pair::new(&setup);
    let mut seen = Seen::default();
    let mut told = Told(Vec::new());
    for step in script {
        told.0.push(format!("{step:?}"));
        pair.play(&step);
        pair.compare();
        seen.look(&step, &pair.model);
    }
    pair.finish();
    seen
}

/// The last steps, for whoever has to find out why context and model differ.
struct Told(Vec<String>);

impl Drop for Told {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let last = self.0.len().saturating_sub(20);
            eprintln!("the last steps:\n{}", self.0[last..].join("\n"));
        }
    }
}

fn code(provenance: Provenance) -> u32 {
    match provenance {
        Provenance::Exact => pfm::PFM_PROV_EXACT,
        Provenance::Hardware => pfm::PFM_PROV_HARDWARE,
        Provenance::Scaled => pfm::PFM_PROV_SCALED,
        Provenance::Derived => pfm::PFM_PROV_DERIVED,
        Provenance::Simulated => pfm::PFM_PROV_SIMULATED,
    }
}

impl Pair {
    pub(crate) fn new(setup: &Setup) -> Self {
        let (buffer, sampler, format) = Buffer::new(setup);
        let mut pair = Pair {
            context: Context::new(pmu("amd-core"), setup.flags, sampler).expect("a context"),
            queue: Messages::default(),
            buffer,
            model: Model::new(setup.flags),
            tsc: 0,
        };
        pair.model.format = format;
        pair.model.only_set_0 = matches!(setup.sampling, Sampling::Puppet(_, true));
        if let Some(most) = setup.most {
            pair.context.set_throttle(Throttle::per_second(most, 1));
            pair.model.limit = Limit::new(most, 1000);
        }
        pair.compare();
        pair
    }

    pub(crate) fn play(&mut self, step: &Step) {
        match step {
            Step::Call(call) => self.call(call.clone()),
            Step::Load(set) => self.load(*set),
            Step::Unload if self.is_attached() => self.unload(),
            Step::Unload => self.call(Call::Unload),
            Step::Count(which, events, provenance) => {
                let wanted = self.model.wanted();
                if let Some(&(pmd, _)) = wanted.get(*which % wanted.len().max(1)) {
                    self.count(pmd, *events, *provenance);
                }
            }
            Step::Late(pmd, events, provenance) => {
                if self.is_attached() {
                    self.count(*pmd, *events, *provenance);
                }
            }
            Step::Lose(pmd) => {
                if self.is_attached() {
                    self.context.lose(*pmd);
                    self.model.lose(*pmd);
                }
            }
            Step::Pass(ns, counted) => {
                self.context.pass(Nanos(*ns), *counted);
                self.model.pass(*ns, *counted);
            }
            Step::Expire => {
                self.context.expire();
                self.model.expire();
            }
            Step::Overflow(ticks) => self.overflow(*ticks),
            Step::ReadMessages => {
                self.queue.0.clear();
                self.model.queue.clear();
            }
            Step::Preempted => {
                self.context.preempted(&mut self.queue);
                self.model.preempted();
            }
            Step::Restored(ns) => {
                self.context.restored(Nanos(*ns), &mut self.queue);
                self.model.restored(*ns);
            }
            Step::Ended => {
                if self.is_attached() {
                    self.unload();
                    self.context.ended(&mut self.queue);
                    self.model.ended();
                }
            }
        }
    }

    fn is_attached(&self) -> bool {
        self.model.state != State::Unloaded
    }

    fn load(&mut self, set: u16) {
        let expected = self.model.may_load(set);
        assert_eq!(outcome(self.context.prepare_load(set)), expected);
        if expected.is_ok() {
            self.context.attached(set);
            self.queue.0.clear();
            self.model.load(set);
        }
    }

    fn unload(&mut self) {
        let attached = self.is_attached();
        if attached {
            self.context.keep_quantities(&Known);
        }
        self.context.detached();
        self.model.unload(attached);
    }

    fn count(&mut self, pmd: u16, events: u64, provenance: Provenance) {
        self.context.count(pmd, events, provenance);
        self.model.count(pmd, events, code(provenance));
    }

    fn overflow(&mut self, ticks: u64) {
        self.tsc += ticks;
        let low = u16::try_from(self.tsc % 5).expect("a small number");
        let moment = Moment {
            tsc: self.tsc,
            ip: 0xffff_ffff_8100_0000 + ticks * 7,
            ring: if low == 0 { Ring::Kernel } else { Ring::User },
            cr3: 0x1000 * (ticks % 3),
            vm: 400,
            vcpu: i32::from(low) - 1,
            core: low / 2,
        };
        self.context.overflow(&moment, &Known, &mut self.queue);
        self.model.overflow(&moment);
    }

    fn call(&mut self, mut call: Call) {
        let mut expected = call.clone();
        let told = self.context.call(&mut call, &Known);
        let told = outcome(told);
        assert_eq!(told, self.model.call(&mut expected), "{call:?}");
        if let (Call::ReadPmds(told), Call::ReadPmds(expected)) = (&call, &expected) {
            for (told, expected) in told.iter().zip(expected) {
                assert_eq!(told, expected);
            }
        }
        assert_eq!(call, expected);
    }

    /// All that can be seen without changing anything.
    pub(crate) fn compare(&mut self) {
        let (context, model) = (&self.context, &self.model);
        let state = match context.phase() {
            Phase::Unloaded => State::Unloaded,
            Phase::Loaded => State::Loaded,
            Phase::Masked => State::Masked,
        };
        assert_eq!(state, model.state);
        assert_eq!(context.is_started(), model.started);
        assert_eq!(context.is_blocked(), model.blocked);
        assert_eq!(context.generation(), model.generation);
        assert_eq!(context.active_set(), model.active);
        assert_eq!(context.has_pending_overflow(), !model.wrapped.is_empty());
        assert_eq!(context.switch_due().map(|due| due.0), model.switch_due());
        assert_eq!(*context.account(), model.account);
        assert_eq!(self.queue.0, model.queue);
        let wanted: Vec<_> = context
            .wanted()
            .iter()
            .map(|it| (it.pmd, it.until.map(NonZeroU64::get)))
            .collect();
        assert_eq!(wanted, model.wanted());
        self.buffer.compare(&self.model);
        let infos = self.model.set_ids().into_iter().map(|id| SetInfo {
            id,
            ..SetInfo::default()
        });
        let infos: Vec<_> = infos.collect();
        assert_eq!(self.context.set_count(), infos.len());
        let reads = infos.iter().flat_map(|info| {
            COUNTERS
                .into_iter()
                .chain([64, 76, 77, 78, 79])
                .map(|num| PmdArg {
                    num,
                    set: info.id,
                    ..PmdArg::default()
                })
        });
        let reads = reads.collect();
        self.call(Call::GetinfoEvtsets(infos));
        self.call(Call::ReadPmds(reads));
    }

    /// The context is destroyed.
    pub(crate) fn finish(self) {
        let Pair {
            context,
            buffer,
            model,
            ..
        } = self;
        drop(context);
        buffer.finish(&model);
    }
}
