//! What the perfmon core costs by itself, without counters, sockets or a guest:
//! a read, an overflow into each sampling format, a switch of event sets.
//!
//! `cargo bench -p perfmon --bench perfmon`

use std::hint::black_box;
use std::sync::Arc;

use criterion::{Criterion, criterion_group, criterion_main};
use perfmon::{
    CompactFormat, Context, DefaultFormat, DoubleFormat, LogicalPmu, MessageQueue, Moment, PmdBits,
    Quantities, Sampler, SamplingFormat, Setup, VirtualPmd,
};
use perfmon_abi::compact::{CallChain, ChainEnd, GuestPlace, ProgramFrame, ProgramStack};
use perfmon_abi::consts::{
    PFM_REGFL_OVFL_NOTIFY, PFM_SETFL_TIME_SWITCH, UMPIRE_COMPACT_FL_CHAIN,
    UMPIRE_COMPACT_FL_STACK_SHIFT, UMPIRE_COMPACT_FL_TASK,
};
use perfmon_abi::wire::Call;
use perfmon_abi::{CompactArg, DefaultArg, Message, PmcArg, PmdArg, Record, SetDesc, Timespec};
use pmu_model::{Nanos, PmuModel, Provenance, Ring};

const MODEL: &str = "intel-v2,counters=8,fixed=0";
/// On, in both rings.
const SELECT: u64 = 0x43_003c;
const COUNTERS: u16 = 6;
const PERIOD: u64 = 1_000;
/// Bytes of a sampling buffer: some thousand samples.
const BUFFER: u64 = 1 << 20;
/// Bytes of a stack that perf records.
const STACK: u32 = 8192;
const SET_TIME: Nanos = Nanos(1_000_000);

/// A tool that reads no message, and a machine without quantities.
#[derive(Debug)]
struct Nobody;

/// A machine that has looked into its guest.
#[derive(Debug)]
struct Seen(GuestPlace);

impl Quantities for Seen {
    fn read(&self, _: VirtualPmd) -> Option<u64> {
        None
    }

    fn guest(&self) -> Option<&GuestPlace> {
        Some(&self.0)
    }
}

/// A format with its argument, what it is told, and what that adds to its name.
type Case<'a> = (
    Arc<dyn SamplingFormat>,
    &'a [u8],
    &'a dyn Quantities,
    &'a str,
);

/// A task with 8 frames in the kernel and 8 in a program, as far apart as they are there.
fn seen() -> Seen {
    let kernel = (0..8).map(|frame| 0xffff_ffff_8100_0000 + frame * 0x1_2345);
    let program = (0..8).map(|frame| ProgramFrame {
        address: 0x7f12_3456_0000 + frame * 0x1234,
        mapping: 3 + frame % 2,
    });
    Seen(GuestPlace {
        task: 1,
        mapping: 0,
        chain: CallChain {
            kernel: kernel.collect(),
            kernel_end: Some(ChainEnd::Entry),
            program: program.collect(),
            program_end: Some(ChainEnd::Outermost),
        },
        stack: ProgramStack {
            sp: 0x7ffc_1234_5670,
            bp: Some(0x7ffc_1234_5690),
            mappings: vec![3, 4],
            bytes: vec![0x5a; STACK as usize],
        },
    })
}

impl Quantities for Nobody {
    fn read(&self, _: VirtualPmd) -> Option<u64> {
        None
    }
}

impl MessageQueue for Nobody {
    fn waiting(&self) -> usize {
        0
    }

    fn post(&mut self, _: Option<&Message>) {}
}

fn must(context: &mut Context, mut call: Call) {
    let done = context.call(&mut call, &Nobody);
    done.unwrap_or_else(|refusal| panic!("{call:?}: {refusal}"));
}

/// A context that counts in `sets` sets, attached and started.
fn started(sampler: Option<Sampler>, sets: u16) -> Context {
    let model = PmuModel::parse(MODEL).unwrap_or_else(|e| panic!("{e}"));
    let pmu = Arc::new(LogicalPmu::new(model));
    let mut context = Context::new(pmu, 0, sampler).unwrap_or_else(|e| panic!("{e}"));
    let mut recorded = PmdBits::default();
    for which in [VirtualPmd::Ring, VirtualPmd::Cr3] {
        recorded.insert(which.pmd());
    }
    for set in 0..sets {
        if sets > 1 {
            let description = SetDesc {
                id: set,
                flags: PFM_SETFL_TIME_SWITCH,
                timeout: Timespec::from_ns(SET_TIME.0),
                ..SetDesc::default()
            };
            must(&mut context, Call::CreateEvtsets(vec![description]));
        }
        let pmc = |num| PmcArg {
            num,
            set,
            value: SELECT,
            flags: PFM_REGFL_OVFL_NOTIFY,
            smpl_pmds: recorded.words(),
            ..PmcArg::default()
        };
        let pmd = |num| PmdArg {
            num,
            set,
            value: PERIOD.wrapping_neg(),
            long_reset: PERIOD.wrapping_neg(),
            short_reset: PERIOD.wrapping_neg(),
            ..PmdArg::default()
        };
        must(
            &mut context,
            Call::WritePmcs((0..COUNTERS).map(pmc).collect()),
        );
        must(
            &mut context,
            Call::WritePmds((0..COUNTERS).map(pmd).collect()),
        );
    }
    context.prepare_load(0).unwrap_or_else(|e| panic!("{e}"));
    context.attached(0);
    must(&mut context, Call::Start(None));
    context
}

fn read(criterion: &mut Criterion) {
    let mut context = started(None, 1);
    let pmd = |num| PmdArg {
        num,
        ..PmdArg::default()
    };
    let mut call = Call::ReadPmds((0..COUNTERS).map(pmd).collect());
    criterion.bench_function("a read of 6 PMDs", |bench| {
        bench.iter(|| context.call(black_box(&mut call), &Nobody));
    });
}

fn sampler(format: Arc<dyn SamplingFormat>, arg: &[u8]) -> Sampler {
    let setup = Setup {
        ctx_flags: 0,
        num_pmds: 22,
        arg,
    };
    let size = format.size(&setup).unwrap_or_else(|e| panic!("{e}"));
    let buffer = Box::new(vec![0; size]);
    Sampler::new(format, &setup, buffer).unwrap_or_else(|e| panic!("{e}"))
}

fn overflow(criterion: &mut Criterion) {
    let buffer = DefaultArg {
        buf_size: BUFFER,
        buf_flags: 0,
    }
    .to_bytes();
    let compact = CompactArg {
        buf_size: BUFFER,
        ..CompactArg::default()
    }
    .to_bytes();
    let callers = CompactArg {
        buf_size: BUFFER,
        block_size: 0,
        flags: UMPIRE_COMPACT_FL_TASK | UMPIRE_COMPACT_FL_CHAIN,
    }
    .to_bytes();
    let stacks = CompactArg {
        buf_size: BUFFER,
        block_size: 0,
        flags: UMPIRE_COMPACT_FL_CHAIN | STACK << UMPIRE_COMPACT_FL_STACK_SHIFT,
    }
    .to_bytes();
    let (nobody, seen) = (Nobody, seen());
    let formats: [Case<'_>; 5] = [
        (Arc::new(DefaultFormat), &buffer, &nobody, ""),
        (Arc::new(DoubleFormat), &buffer, &nobody, ""),
        (Arc::new(CompactFormat), &compact, &nobody, ""),
        (
            Arc::new(CompactFormat),
            &callers,
            &seen,
            ", with task and 16 frames",
        ),
        (
            Arc::new(CompactFormat),
            &stacks,
            &seen,
            ", with 16 frames and 8 KiB of stack",
        ),
    ];
    for (format, arg, values, with) in formats {
        let name = format!("an overflow into the {} format{with}", format.name());
        let mut context = started(Some(sampler(format, arg)), 1);
        let mut moment = Moment {
            tsc: 0,
            ip: 0xffff_ffff_8100_0000,
            ring: Ring::Kernel,
            cr3: 0x1000,
            vm: 1,
            vcpu: 0,
            core: 0,
        };
        criterion.bench_function(&name, |bench| {
            bench.iter(|| {
                moment.tsc += 3_000;
                moment.ip ^= moment.tsc & 0xff_f0;
                context.count(0, PERIOD, Provenance::Exact);
                context.overflow(&moment, values, &mut Nobody);
                // A full buffer is given back, as its tool does now and then.
                if context.is_masked() {
                    must(&mut context, Call::Restart);
                }
            });
        });
        assert!(!context.has_pending_overflow(), "{name}");
    }
}

fn switch(criterion: &mut Criterion) {
    let mut context = started(None, 2);
    criterion.bench_function("a switch of event sets, 6 counters each", |bench| {
        bench.iter(|| {
            context.pass(SET_TIME, true);
            if context.switch_due() == Some(Nanos(0)) {
                context.expire();
            }
            black_box(context.wanted());
        });
    });
}

criterion_group!(benches, read, overflow, switch);
criterion_main!(benches);
