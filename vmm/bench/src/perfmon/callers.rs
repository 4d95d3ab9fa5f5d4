//! What a sample costs a vCPU with its task and 16 callers, against one without: the look into
//! the guest's memory, and the longer record.
//!
//! The guest is the toy Linux of guest-view's tests, in memory as a VM has it. It does not run,
//! since a micro-guest has no kernel that could be looked at: no exit and no lock is in the
//! figures, and neither side has one more of these than the other.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use guest_view::{Chain, Frame, KernelView, Look, Mapping, Registers, Task};
use perfmon_abi::compact::{CallChain, ChainEnd, GuestPlace, ProgramFrame};
use perfmon_abi::consts::{PFM_REGFL_OVFL_NOTIFY, UMPIRE_COMPACT_FL_CHAIN, UMPIRE_COMPACT_FL_TASK};
use perfmon_abi::wire::{Call, Refusal};
use perfmon_abi::{CompactArg, PmcArg, PmdArg, Record};
use pmu_virt::perfmon::{
    CompactFormat, Context, LogicalPmu, Moment, PmdBits, Quantities, Sampler, SamplingFormat,
    Setup, VirtualPmd,
};
use pmu_virt::{Provenance, Ring};
use serde::Serialize;
use vmm::sys::rdtsc;

use self::deep::{Ram, deep, view};
use self::linux::{Kind, Linux};
use super::fixture::Fixture;
use super::sets::Nobody;
use super::{Bench, progress};
use crate::error::BenchError;
use crate::stats::{Percentiles, percentiles};

#[path = "../../../guest-view/tests/linux/deep.rs"]
mod deep;
#[path = "../../../guest-view/tests/linux/mod.rs"]
mod linux;

/// What callers may cost at p50, in nanoseconds.
const TARGET_NS: u64 = 5_000;
const PERIOD: u64 = 1_000;
/// Bytes of the buffer: thousands of samples.
const BUFFER: u64 = 1 << 20;
/// Numbers of the recorded PMDs end below this one.
const PMDS: u16 = 64;
/// Bytes that are touched between two samples to have the caches of a processor forget what a
/// look needs: more than the second level of one has.
const OTHER_WORK: usize = 4 << 20;
/// Samples after such work are so many times fewer.
const FEWER: u32 = 10;
const LINE: usize = 64;

/// Samples with and without callers.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CallersRow {
    /// Other memory was in the processor's caches before each sample.
    pub cold: bool,
    /// Samples of each kind.
    pub samples: usize,
    /// A sample without task and callers.
    pub without: Percentiles,
    /// One with its task, 16 callers and what is mapped at those of the program.
    pub with: Percentiles,
    /// How much longer it takes at p50 and p99.
    pub more: Percentiles,
    /// Highest difference at p50 that is wanted, in nanoseconds.
    pub target_ns: u64,
    /// The difference is no higher.
    pub met: bool,
}

/// A vCPU that looks, as `vmm` does: with numbers for what it has met before.
struct Looker {
    memory: Ram,
    view: KernelView,
    at: Registers,
    chain: Chain,
    tasks: HashMap<Task, u64>,
    mappings: HashMap<Mapping, u64>,
    seen: Seen,
}

/// What the last look found.
#[derive(Debug, Default)]
struct Seen(GuestPlace);

impl Quantities for Seen {
    fn read(&self, _: VirtualPmd) -> Option<u64> {
        None
    }

    fn guest(&self) -> Option<&GuestPlace> {
        Some(&self.0)
    }
}

pub(super) fn measure(bench: &Bench<'_>) -> Result<Vec<CallersRow>, BenchError> {
    progress("samples with callers");
    let (_, fixture) = bench.clock()?;
    let refused = |refusal| BenchError::refused("a sampling context", refusal);
    let mut looker = Looker::new()?;
    let mut row = |cold: bool| {
        let samples = if cold {
            bench.iterations.div_ceil(FEWER)
        } else {
            bench.iterations
        };
        let flags = UMPIRE_COMPACT_FL_TASK | UMPIRE_COMPACT_FL_CHAIN;
        let mut plain = sampling(&fixture, 0).map_err(refused)?;
        let mut callers = sampling(&fixture, flags).map_err(refused)?;
        let mut other = vec![0u8; if cold { OTHER_WORK } else { 0 }];
        let (mut without, mut with) = (Vec::new(), Vec::new());
        for number in 0..u64::from(samples) {
            touch(&mut other);
            let moment = looker.moment(number);
            without.push(sample(&mut plain, |context| {
                context.overflow(&moment, &Nobody, &mut Nobody);
            })?);
            touch(&mut other);
            with.push(sample(&mut callers, |context| {
                looker.look();
                context.overflow(&moment, &looker.seen, &mut Nobody);
            })?);
            looker.check()?;
        }
        let none = || BenchError::Guest("nothing was timed".to_owned());
        let of = |ticks: &mut Vec<u64>| percentiles(ticks, bench.tsc_khz).ok_or_else(none);
        let (samples, without, with) = (without.len(), of(&mut without)?, of(&mut with)?);
        let more = Percentiles {
            p50_ns: with.p50_ns.saturating_sub(without.p50_ns),
            p99_ns: with.p99_ns.saturating_sub(without.p99_ns),
        };
        Ok::<_, BenchError>(CallersRow {
            cold,
            samples,
            without,
            with,
            more,
            target_ns: TARGET_NS,
            met: more.p50_ns <= TARGET_NS,
        })
    };
    Ok(vec![row(false)?, row(true)?])
}

/// Times one sample, in ticks.
fn sample(context: &mut Context, take: impl FnOnce(&mut Context)) -> Result<u64, BenchError> {
    context.count(0, PERIOD, Provenance::Exact);
    let begun = rdtsc();
    take(context);
    let ticks = rdtsc().wrapping_sub(begun);
    // A full buffer is given back, as its tool does.
    if context.is_masked() {
        let restarted = context.call(&mut Call::Restart, &Nobody);
        restarted.map_err(|refusal| BenchError::refused("restarting", refusal))?;
    }
    Ok(ticks)
}

/// Has the processor's caches hold `other` in place of what was there.
fn touch(other: &mut [u8]) {
    for byte in other.iter_mut().step_by(LINE) {
        *byte = byte.wrapping_add(1);
    }
    std::hint::black_box(other);
}

/// A context that samples one counter into the compact format, started.
fn sampling(fixture: &Fixture, flags: u32) -> Result<Context, Refusal> {
    let argument = CompactArg {
        buf_size: BUFFER,
        flags,
        ..CompactArg::default()
    }
    .to_bytes();
    let setup = Setup {
        ctx_flags: 0,
        num_pmds: PMDS,
        arg: &argument,
    };
    let size = CompactFormat.size(&setup)?;
    let sampler = Sampler::new(Arc::new(CompactFormat), &setup, Box::new(vec![0; size]))?;
    let pmu = Arc::new(LogicalPmu::new(fixture.model.clone()));
    let mut context = Context::new(pmu, 0, Some(sampler))?;
    let mut recorded = PmdBits::default();
    for which in [VirtualPmd::Ring, VirtualPmd::Cr3] {
        recorded.insert(which.pmd());
    }
    let counters = fixture.counters.iter().zip(&fixture.selects).take(1);
    let pmc = |(&(num, _), &value): (&(u16, u16), &u64)| PmcArg {
        num,
        value,
        flags: PFM_REGFL_OVFL_NOTIFY,
        smpl_pmds: recorded.words(),
        ..PmcArg::default()
    };
    let pmd = |(&(_, num), _): (&(u16, u16), &u64)| PmdArg {
        num,
        value: PERIOD.wrapping_neg(),
        long_reset: PERIOD.wrapping_neg(),
        short_reset: PERIOD.wrapping_neg(),
        ..PmdArg::default()
    };
    let pmcs = counters.clone().map(pmc).collect();
    let pmds = counters.map(pmd).collect();
    context.call(&mut Call::WritePmcs(pmcs), &Nobody)?;
    context.call(&mut Call::WritePmds(pmds), &Nobody)?;
    context.prepare_load(0)?;
    context.attached(0);
    context.call(&mut Call::Start(None), &Nobody)?;
    Ok(context)
}

impl Looker {
    fn new() -> Result<Self, BenchError> {
        let mut linux = Linux::new(Kind::V6_12);
        let at = deep(&mut linux);
        let memory = Ram::of(&linux).map_err(BenchError::Guest)?;
        let view = view(&memory).map_err(BenchError::Guest)?;
        Ok(Self {
            memory,
            view,
            at,
            chain: Chain::default(),
            tasks: HashMap::new(),
            mappings: HashMap::new(),
            seen: Seen::default(),
        })
    }

    fn moment(&self, number: u64) -> Moment {
        Moment {
            tsc: number * 3_000,
            ip: self.at.rip,
            ring: Ring::Kernel,
            cr3: self.at.cr3,
            vm: 1,
            vcpu: 0,
            core: 0,
        }
    }

    fn look(&mut self) {
        let place = &mut self.seen.0;
        place.chain.clear();
        let look = Look::at(&self.view, &self.memory);
        let task = look.task(0, &self.at).ok();
        place.task = task.map_or(0, |task| number(&mut self.tasks, task));
        look.chain(task.as_ref(), &self.at, &mut self.chain);
        let program = task.and_then(|task| task.memory);
        let CallChain {
            kernel,
            program: frames,
            ..
        } = &mut place.chain;
        kernel.extend(self.chain.kernel().iter().map(Frame::instruction));
        for frame in self.chain.program() {
            let address = frame.instruction();
            let found = program.and_then(|program| look.mapping(program, address).ok());
            let mapping = found.map_or(0, |found| number(&mut self.mappings, found));
            frames.push(ProgramFrame { address, mapping });
        }
        place.chain.kernel_end = Some(ChainEnd::Entry);
        place.chain.program_end = Some(ChainEnd::Outermost);
    }

    /// Nothing was left out.
    fn check(&self) -> Result<(), BenchError> {
        let GuestPlace { task, chain, .. } = &self.seen.0;
        let mapped = chain.program.iter().all(|frame| frame.mapping != 0);
        match (*task, chain.kernel.len(), chain.program.len(), mapped) {
            (1.., 8, 8, true) => Ok(()),
            _ => Err(BenchError::Guest("a look did not find everything".into())),
        }
    }
}

/// The number of something; what is new has the next one.
fn number<T: Eq + Hash>(numbers: &mut HashMap<T, u64>, thing: T) -> u64 {
    let next = numbers.len() as u64 + 1;
    *numbers.entry(thing).or_insert(next)
}
