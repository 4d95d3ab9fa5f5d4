//! The rules of the registers as a table, and how one is played.

pub(crate) mod amd;
pub(crate) mod ibs;
pub(crate) mod intel;
pub(crate) mod intel_global;
pub(crate) mod intel_pebs;
pub(crate) mod intel_versions;

use std::cell::RefCell;
use std::fmt;
use std::ops::Range;

use instruction_facts::Operand;
use pmu_virt::ibs::{FetchRecord, OpSample};
use pmu_virt::{
    Caller, ClockBackend, CodePlace, Grant, IbsKind, IbsSample, Layer, LinearMemory,
    MomentRegisters, MsrIndex, PmuModel, Progress, ReadOutcome, Ring, Ticks, Tsc, WriteOutcome,
};

use crate::seated::{Seated, Snapshot};

/// Every Intel model, with as many counters as the rules expect.
pub(crate) const INTEL: &[&str] = &[
    "intel-v1",
    "intel-v2",
    "intel-v3",
    "intel-v4",
    "intel-v5,counters=4",
];

/// Those with global registers.
pub(crate) const INTEL_GLOBAL: &[&str] =
    &["intel-v2", "intel-v3", "intel-v4", "intel-v5,counters=4"];

/// One rule: where it stands, and what shows it.
pub(crate) struct Rule {
    /// Short and unique.
    pub(crate) name: &'static str,
    /// Models that it is shown on.
    pub(crate) models: &'static [&'static str],
    /// Document and section.
    pub(crate) source: &'static str,
    /// Operations from reset on, each with its outcome.
    pub(crate) shown_by: &'static [Op],
}

/// One operation and its outcome.
pub(crate) enum Op {
    /// WRMSR: index, value.
    Write(u32, u64),
    /// WRMSR that raises #GP.
    WriteGp(u32, u64),
    /// WRMSR of an absent register.
    WriteAbsent(u32),
    /// RDMSR: index, value.
    Read(u32, u64),
    /// RDMSR of an absent register.
    ReadAbsent(u32),
    /// RDPMC: ECX, value.
    Rdpmc(u32, u64),
    /// RDPMC that raises #GP.
    RdpmcGp(u32),
    /// The guest runs for so many ticks in CPL 0.
    Kernel(u64),
    /// The guest runs for so many ticks in CPL 3.
    User(u64),
    /// The pending PMI, as bits of the global status; 0 for none.
    Pmi(u64),
    /// The sample of an op is due, and taken where the guest is found, at this RIP.
    SampledNear(u64),
    /// The sample of a fetch is due, at this linear and physical address in a page of
    /// 4 KiB.
    FetchSample(u64, u64),
    /// No sample is due.
    NoIbsSample,
    /// The interrupt of samples, by delivery mode and vector; 0 for none.
    IbsInterrupt(u32),
    /// The guest sets or clears IA32_DEBUGCTL.FREEZE_PERFMON_ON_PMI, and the processor
    /// takes its part of that register.
    Freeze(bool),
    /// RDMSR of a register that the PMU shares with the processor: which bits are the
    /// PMU's, and what they are.
    Merge(u32, u64, u64),
    /// WRMSR of such a register, and what the processor gets.
    Rest(u32, u64, u64),
    /// A word of the guest's memory, of which 64 KiB from 0x10000 on are mapped.
    Poke(u64, u64),
    /// What a word of the guest's memory is.
    Peek(u64, u64),
    /// Where the guest stands when it is left.
    At(u64),
    /// The vCPU is reset.
    Reset,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Op::Write(msr, value) => write!(f, "WRMSR {msr:#x} ← {value:#x}"),
            Op::WriteGp(msr, value) => write!(f, "WRMSR {msr:#x} ← {value:#x}: #GP"),
            Op::WriteAbsent(msr) => write!(f, "WRMSR {msr:#x}: absent"),
            Op::Read(msr, value) => write!(f, "RDMSR {msr:#x} = {value:#x}"),
            Op::ReadAbsent(msr) => write!(f, "RDMSR {msr:#x}: absent"),
            Op::Rdpmc(ecx, value) => write!(f, "RDPMC {ecx:#x} = {value:#x}"),
            Op::RdpmcGp(ecx) => write!(f, "RDPMC {ecx:#x}: #GP"),
            Op::Kernel(ticks) => write!(f, "{ticks:#x} ticks at CPL 0"),
            Op::User(ticks) => write!(f, "{ticks:#x} ticks at CPL 3"),
            Op::Pmi(0) => write!(f, "no PMI"),
            Op::Pmi(counters) => write!(f, "PMI for {counters:#x}"),
            Op::Freeze(on) => write!(f, "WRMSR 0x1d9 ← {:#x}", freeze_on_pmi(on)),
            Op::SampledNear(rip) => write!(f, "op sample at an exit, RIP {rip:#x}"),
            Op::FetchSample(linear, physical) => {
                write!(f, "fetch sample at {linear:#x}, physical {physical:#x}")
            }
            Op::NoIbsSample => write!(f, "no sample"),
            Op::IbsInterrupt(0) => write!(f, "no IBS interrupt"),
            Op::IbsInterrupt(vector) => write!(f, "IBS interrupt {vector:#x}"),
            Op::Merge(msr, ours, value) => {
                write!(f, "RDMSR {msr:#x}, bits {ours:#x} = {value:#x}")
            }
            Op::Rest(msr, value, rest) => {
                write!(f, "WRMSR {msr:#x} ← {value:#x}, the processor's {rest:#x}")
            }
            Op::Poke(address, value) => write!(f, "[{address:#x}] ← {value:#x}"),
            Op::Peek(address, value) => write!(f, "[{address:#x}] = {value:#x}"),
            Op::At(rip) => write!(f, "RIP ← {rip:#x}"),
            Op::Reset => write!(f, "reset"),
        }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ops: Vec<_> = self.shown_by.iter().map(Op::to_string).collect();
        write!(
            f,
            "| {} | {} | {} | {} |",
            self.name,
            self.models.join("<br>"),
            self.source,
            ops.join("<br>")
        )
    }
}

const DEBUGCTL: u32 = 0x1d9;

fn freeze_on_pmi(on: bool) -> u64 {
    u64::from(on) << 12
}

/// A PMU of a model, driven by the clock.
pub(crate) struct Machine {
    pub(crate) pmu: Seated,
    now: u64,
    rip: u64,
    memory: Memory,
}

/// 64 KiB of guest memory from 0x10000 on, and nothing else.
struct Memory(RefCell<Vec<u8>>);

impl Memory {
    const FIRST: u64 = 0x1_0000;
    const SIZE: usize = 0x1_0000;

    fn new() -> Self {
        Memory(RefCell::new(vec![0; Self::SIZE]))
    }

    fn range(address: u64, len: usize) -> Option<Range<usize>> {
        let first = usize::try_from(address.checked_sub(Self::FIRST)?).ok()?;
        let end = first.checked_add(len)?;
        (end <= Self::SIZE).then_some(first..end)
    }
}

impl LinearMemory for Memory {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        let Some(range) = Self::range(address, bytes.len()) else {
            return false;
        };
        bytes.copy_from_slice(&self.0.borrow()[range]);
        true
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        let Some(range) = Self::range(address, bytes.len()) else {
            return false;
        };
        self.0.borrow_mut()[range].copy_from_slice(bytes);
        true
    }

    fn locate(&self, _: u64) -> Option<(u64, u32)> {
        None
    }
}

/// The TSC of every record.
const TSC: u64 = 0x7357;

/// Where the instruction of every record accesses memory.
const DATA_ADDRESS: u64 = 0xda7a;

/// A vCPU whose registers hold their own numbers, and 0x100 with them.
fn moment(rip: u64, memory: &Memory) -> Snapshot<'_> {
    let operand = Operand {
        linear: DATA_ADDRESS,
        bytes: 8,
        load: true,
        store: true,
    };
    Snapshot {
        registers: MomentRegisters {
            next: CodePlace::flat(rip),
            flags: 2,
            general: std::array::from_fn(|n| 0x100 + n as u64),
            ..MomentRegisters::default()
        },
        tsc: TSC,
        operands: [Some(operand); 2],
        xmm: std::array::from_fn(|n| [0x40 | u8::try_from(n).unwrap_or(0); 16]),
        ..Snapshot::of(memory)
    }
}

impl Machine {
    pub(crate) fn new(model: &str) -> Self {
        let model = PmuModel::parse(model).unwrap_or_else(|error| panic!("{error}"));
        let backend = Box::new(ClockBackend::new());
        Machine {
            pmu: Seated::new(model, backend, Grant::everything()),
            now: 1 << 32,
            rip: 0,
            memory: Memory::new(),
        }
    }

    pub(crate) fn run(&mut self, ring: Ring, ticks: u64) {
        self.now += 1_000;
        self.pmu.observe(Progress::Entered { tsc: Tsc(self.now) });
        self.now += ticks;
        self.pmu.observe(Progress::Left {
            tsc: Tsc(self.now),
            halted: Ticks(0),
            ring: Some(ring),
        });
        if self.pmu.pebs_due() {
            self.pmu.take_samples(&mut moment(self.rip, &self.memory));
        }
    }

    pub(crate) fn read(&mut self, msr: u32) -> ReadOutcome {
        self.pmu
            .rdmsr(MsrIndex(msr), Caller::legacy(Layer::GuestKernel))
    }

    pub(crate) fn write(&mut self, msr: u32, value: u64) -> WriteOutcome {
        self.pmu
            .wrmsr(MsrIndex(msr), value, Caller::legacy(Layer::GuestKernel))
    }

    fn play(&mut self, op: &Op, context: &str) {
        let read = |outcome, expected| assert_eq!(outcome, expected, "{context}: {op}");
        let wrote = |outcome, expected| assert_eq!(outcome, expected, "{context}: {op}");
        match *op {
            Op::Write(msr, value) => wrote(self.write(msr, value), WriteOutcome::Done),
            Op::WriteGp(msr, value) => wrote(self.write(msr, value), WriteOutcome::Gp),
            Op::WriteAbsent(msr) => wrote(self.write(msr, 0), WriteOutcome::NotHandled),
            Op::Read(msr, value) => read(self.read(msr), ReadOutcome::Value(value)),
            Op::ReadAbsent(msr) => read(self.read(msr), ReadOutcome::NotHandled),
            Op::Rdpmc(ecx, value) => read(
                self.pmu.rdpmc(ecx, Caller::legacy(Layer::GuestUser)),
                ReadOutcome::Value(value),
            ),
            Op::RdpmcGp(ecx) => read(
                self.pmu.rdpmc(ecx, Caller::legacy(Layer::GuestUser)),
                ReadOutcome::Gp,
            ),
            Op::Kernel(ticks) => self.run(Ring::Kernel, ticks),
            Op::User(ticks) => self.run(Ring::User, ticks),
            Op::Pmi(counters) => {
                let pending = self.pmu.take_pmi().map_or(0, |pmi| pmi.counters.bits());
                assert_eq!(pending, counters, "{context}: {op}");
            }
            Op::Freeze(on) => {
                let (debugctl, value) = (MsrIndex(DEBUGCTL), freeze_on_pmi(on));
                let caller = Caller::legacy(Layer::GuestKernel);
                let written = self.pmu.written(debugctl, value, caller);
                assert_eq!(written.rest, Some(0), "{context}: {op}");
                self.pmu.rest_taken(debugctl, value);
            }
            Op::SampledNear(rip) => {
                assert_eq!(self.pmu.ibs_due(), Some(IbsKind::Op), "{context}: {op}");
                self.pmu.sampled(IbsSample::Op(OpSample::Near { rip }));
            }
            Op::FetchSample(linear, physical) => {
                assert_eq!(self.pmu.ibs_due(), Some(IbsKind::Fetch), "{context}: {op}");
                let physical = Some((physical, 12));
                let record = FetchRecord { linear, physical };
                self.pmu.sampled(IbsSample::Fetch(record));
            }
            Op::NoIbsSample => assert_eq!(self.pmu.ibs_due(), None, "{context}: {op}"),
            Op::IbsInterrupt(vector) => {
                let found = self.pmu.take_ibs_interrupt().unwrap_or(0);
                assert_eq!(found, vector, "{context}: {op}");
            }
            Op::Merge(msr, ours, value) => {
                read(self.read(msr), ReadOutcome::Merge { ours, value });
            }
            Op::Rest(msr, value, rest) => {
                let caller = Caller::legacy(Layer::GuestKernel);
                let written = self.pmu.written(MsrIndex(msr), value, caller);
                assert_eq!(written.rest, Some(rest), "{context}: {op}");
                self.pmu.rest_taken(MsrIndex(msr), value);
            }
            Op::Poke(address, value) => {
                assert!(self.memory.write(address, &value.to_le_bytes()), "{op}");
            }
            Op::Peek(address, value) => {
                let mut bytes = [0; 8];
                assert!(self.memory.read(address, &mut bytes), "{op}");
                assert_eq!(u64::from_le_bytes(bytes), value, "{context}: {op}");
            }
            Op::At(rip) => self.rip = rip,
            Op::Reset => self.pmu.reset(),
        }
    }
}

/// Plays a rule on each of its models.
pub(crate) fn check(rule: &Rule) {
    for model in rule.models {
        let mut machine = Machine::new(model);
        for op in rule.shown_by {
            machine.play(op, &format!("'{}' on {model}", rule.name));
        }
    }
}
