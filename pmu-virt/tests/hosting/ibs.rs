//! Samplers of IBS: those of a vCPU's guest, or of a tool.

use std::sync::Arc;

use arbiter::{Caller, Cookie, CounterId, Effects, Layer, Outcome, Request, Wanted, abi};
use perfmon_abi::wire::{Call, Errno, Refusal};
use perfmon_abi::{PmcArg, PmdArg, consts as pfm};
use pmu_virt::ibs::{OpRecord, OpSample};
use pmu_virt::perfmon::{AttachedContext, Context, ContextId, HostPolicy, LogicalPmu, Moment};
use pmu_virt::{
    Claimant, ClockBackend, CorePmu, CounterBackend, Grant, IbsKind, IbsSample, MsrIndex, OwnerId,
    PmuModel, Progress, ReadOutcome, Retirement, Ring, StepBackend, Ticks, Tsc, WriteOutcome,
};

use proptest::prelude::{prop_assert_eq, proptest};

use super::reserved::with_reservations;
use super::rig::{KERNEL, Mail, Nothing};
use super::truth::KHZ;
use crate::seated::Seated;

const MODEL: &str = "amd-core,ibs=on";
const FETCH_MSR: u32 = 0xc001_1030;
const OP_MSR: u32 = 0xc001_1033;
const OP_PMC: u16 = 5;
const OP_PMD: u16 = 7;
const RIP_PMD: u16 = 8;
const FETCH_PMC: u16 = 4;
const FETCH_EN: u64 = 1 << 48;
const OP_EN: u64 = 1 << 17;
const OP_VAL: u64 = 1 << 18;
const OPS: u64 = 1 << 19;
/// A sample each 16 ops.
const EACH_16: u64 = 1 | OP_EN | OPS;

fn model() -> PmuModel {
    PmuModel::parse(MODEL).expect("a model")
}

fn seated(backend: impl CounterBackend + 'static) -> Seated {
    let mut pmu = Seated::detached(OwnerId(0), model(), Grant::everything());
    let mut core = CorePmu::new(Box::new(backend));
    core.enable_hosting(HostPolicy::GuestFirst, KHZ);
    pmu.attach(Box::new(core));
    pmu
}

fn context(flags: u32, writes: &[PmcArg]) -> Context {
    let mut context =
        Context::new(Arc::new(LogicalPmu::new(model())), flags, None).expect("a context");
    let mut call = Call::WritePmcs(writes.to_vec());
    let done = context.call(&mut call, &Nothing);
    assert_eq!(done, Ok(()));
    context
}

fn pmc(num: u16, value: u64, flags: u32) -> PmcArg {
    PmcArg {
        num,
        value,
        flags,
        ..PmcArg::default()
    }
}

/// One that takes op samples.
fn ops(flags: u32) -> Context {
    context(0, &[pmc(OP_PMC, EACH_16, flags)])
}

fn load(pmu: &mut Seated, id: u32, context: Context, mail: &Mail) -> Result<(), Refusal> {
    let hosted = AttachedContext::new(ContextId(id), Box::new(context), Box::new(mail.clone()));
    let loaded = pmu.load_context(hosted, 0);
    loaded.map_err(|not| not.refusal)
}

fn call(pmu: &mut Seated, id: u32, mut call: Call) -> Result<(), Refusal> {
    pmu.call_context(ContextId(id), &mut call, &Nothing)
}

fn read(pmu: &mut Seated, id: u32, num: u16) -> u64 {
    let mut call = Call::ReadPmds(vec![PmdArg {
        num,
        ..PmdArg::default()
    }]);
    let done = pmu.call_context(ContextId(id), &mut call, &Nothing);
    assert_eq!(done, Ok(()));
    match call {
        Call::ReadPmds(args) => args[0].value,
        other => panic!("{other:?}"),
    }
}

fn write_msr(pmu: &mut Seated, msr: u32, value: u64) {
    assert_eq!(pmu.wrmsr(MsrIndex(msr), value, KERNEL), WriteOutcome::Done);
}

fn msr(pmu: &mut Seated, msr: u32) -> u64 {
    match pmu.rdmsr(MsrIndex(msr), KERNEL) {
        ReadOutcome::Value(value) => value,
        other => panic!("{other:?}"),
    }
}

/// So many instructions; each op that falls due is told as its number.
fn retire(pmu: &mut Seated, instructions: u64) -> Vec<u64> {
    let mut sampled = Vec::new();
    for number in 1..=instructions {
        pmu.observe(Progress::Retired {
            ring: Ring::User,
            insn: Retirement::default(),
        });
        while let Some(kind) = pmu.ibs_due() {
            assert_eq!(kind, IbsKind::Op);
            pmu.sampled(IbsSample::Op(OpSample::Exact(OpRecord {
                rip: number,
                ..OpRecord::default()
            })));
            sampled.push(number);
        }
        if pmu.has_host_overflow() {
            pmu.sample_hosts(&moment(), &Nothing);
        }
    }
    sampled
}

fn run(pmu: &mut Seated, from: u64, ticks: u64) {
    pmu.observe(Progress::Entered { tsc: Tsc(from) });
    pmu.observe(Progress::Left {
        tsc: Tsc(from + ticks),
        halted: Ticks(0),
        ring: Some(Ring::Kernel),
    });
}

fn moment() -> Moment {
    Moment {
        tsc: 1,
        ip: 2,
        ring: Ring::User,
        cr3: 3,
        vm: 4,
        vcpu: 0,
        core: 0,
    }
}

fn refused(result: Result<(), Refusal>, errno: Errno, words: &[&str]) {
    let refusal = result.expect_err("a refusal");
    assert_eq!(refusal.errno, errno, "{refusal}");
    let reason = &refusal.reason;
    assert!(words.iter().all(|word| reason.contains(word)), "{reason}");
}

#[test]
fn a_tool_samples_the_very_op_and_reads_it_after_a_stop() {
    let mut pmu = seated(StepBackend::new());
    let mail = Mail::default();
    load(&mut pmu, 1, ops(pfm::PFM_REGFL_OVFL_NOTIFY), &mail).expect("room");
    assert!(!pmu.needs().stepping && !pmu.ibs_runs());
    call(&mut pmu, 1, Call::Start(None)).expect("a start");
    assert!(pmu.needs().stepping && pmu.ibs_runs());
    assert_eq!(retire(&mut pmu, 20), [16]);
    // The notice has masked it.
    assert_eq!(mail.kinds(), [pfm::PFM_MSG_OVFL]);
    call(&mut pmu, 1, Call::Stop).expect("a stop");
    assert_eq!(read(&mut pmu, 1, OP_PMD), EACH_16 | OP_VAL);
    assert_eq!(read(&mut pmu, 1, RIP_PMD), 16);
    assert!(!pmu.needs().stepping);
    // Nothing of it is the guest's.
    assert_eq!(msr(&mut pmu, OP_MSR), 0);
    assert_eq!(msr(&mut pmu, OP_MSR + 1), 0);
    assert_eq!(pmu.take_ibs_interrupt(), None);
    // After a restart it goes on where it was stopped.
    call(&mut pmu, 1, Call::Restart).expect("a restart");
    assert_eq!(retire(&mut pmu, 40), [0_u64; 0]);
    call(&mut pmu, 1, Call::Start(None)).expect("a start");
    assert_eq!(retire(&mut pmu, 16), [16]);
    let context = pmu.unload_context(ContextId(1)).expect("the context");
    assert!(!context.context().has_pending_overflow());
    assert!(!pmu.needs().stepping);
}

/// A tool that reads a sample with a reset has the next one 16 ops later.
#[test]
fn a_tool_that_polls_has_one_sample_after_the_other() {
    let mut pmu = seated(StepBackend::new());
    load(&mut pmu, 1, ops(0), &Mail::default()).expect("room");
    call(&mut pmu, 1, Call::Start(None)).expect("a start");
    for _ in 0..3 {
        assert_eq!(retire(&mut pmu, 50), [16]);
        assert_eq!(read(&mut pmu, 1, RIP_PMD), 16);
        let reset = PmdArg {
            num: OP_PMD,
            flags: pfm::PFM_REGFL_READ_RESET,
            ..PmdArg::default()
        };
        call(&mut pmu, 1, Call::ReadPmds(vec![reset])).expect("a reset");
    }
}

#[test]
fn a_sampler_has_one_user() {
    let mut pmu = seated(StepBackend::new());
    let mail = Mail::default();
    write_msr(&mut pmu, OP_MSR, EACH_16);
    let guests = ["IBSOP of vCPU 0", "the guest has enabled it"];
    refused(load(&mut pmu, 1, ops(0), &mail), Errno::EBUSY, &guests);
    // A context without one, which then writes.
    let empty = context(0, &[pmc(0, 0x43_00c0, 0)]);
    load(&mut pmu, 2, empty, &mail).expect("room");
    let mut writes = Call::WritePmcs(vec![pmc(0, 0x43_00c2, 0), pmc(OP_PMC, EACH_16, 0)]);
    let result = pmu.call_context(ContextId(2), &mut writes, &Nothing);
    refused(result, Errno::EBUSY, &guests);
    let Call::WritePmcs(args) = writes else {
        panic!("{writes:?}")
    };
    assert_eq!(
        (args[0].flags, args[1].flags),
        (0, pfm::PFM_REG_RETFL_EINVAL)
    );
    // The other sampler is free, and off again so is this one.
    call(
        &mut pmu,
        2,
        Call::WritePmcs(vec![pmc(FETCH_PMC, 1 | FETCH_EN, 0)]),
    )
    .expect("free");
    write_msr(&mut pmu, OP_MSR, 0);
    call(&mut pmu, 2, Call::WritePmcs(vec![pmc(OP_PMC, EACH_16, 0)])).expect("free");
    let context_2 = ["IBSOP of vCPU 0", "context 2"];
    refused(load(&mut pmu, 3, ops(0), &mail), Errno::EBUSY, &context_2);
    call(&mut pmu, 2, Call::WritePmcs(vec![pmc(OP_PMC, 0, 0)])).expect("a write");
    load(&mut pmu, 3, ops(0), &mail).expect("room");
    let back = Call::WritePmcs(vec![pmc(OP_PMC, EACH_16, 0)]);
    refused(call(&mut pmu, 2, back), Errno::EBUSY, &["context 3"]);
}

/// Also while it stands still.
#[test]
fn what_the_guest_has_reserved_is_not_a_tool_s() {
    let mut pmu = with_reservations(seated(StepBackend::new()));
    let request = Request::Reserve {
        wanted: Wanted::This(CounterId::Ibs(IbsKind::Op)),
        cookie: Cookie::new(7).expect("a cookie"),
        lease_ms: None,
        event: None,
    };
    let asked = pmu.arbitrate(
        |unit, cx| match unit.request(Layer::GuestKernel, request, cx) {
            Ok((answer, effects)) => (Ok(answer.outcome), effects),
            Err(reason) => (Err(reason), Effects::NONE),
        },
    );
    assert!(matches!(asked, Some(Ok(Outcome::Granted(_)))), "{asked:?}");
    let refusal = load(&mut pmu, 1, ops(0), &Mail::default());
    refused(
        refusal,
        Errno::EBUSY,
        &["IBSOP of vCPU 0", "reserved", "umpire pcr"],
    );
    let fetches = context(0, &[pmc(FETCH_PMC, 1 | FETCH_EN, 0)]);
    load(&mut pmu, 2, fetches, &Mail::default()).expect("the other one is free");
}

/// The guest's control keeps its bits, and it gets samples when the tool has gone.
#[test]
fn a_guest_waits_for_a_sampler_that_a_tool_has() {
    let mut pmu = seated(StepBackend::new());
    let mail = Mail::default();
    load(&mut pmu, 1, ops(pfm::PFM_REGFL_OVFL_NOTIFY), &mail).expect("room");
    write_msr(&mut pmu, OP_MSR, EACH_16 | 4 << 32);
    assert_eq!(retire(&mut pmu, 100), [0_u64; 0], "neither is started");
    call(&mut pmu, 1, Call::Start(None)).expect("a start");
    assert_eq!(retire(&mut pmu, 100), [16]);
    assert_eq!(msr(&mut pmu, OP_MSR), EACH_16 | 4 << 32);
    assert_eq!(pmu.take_ibs_interrupt(), None);
    // The other sampler is the guest's as ever.
    write_msr(&mut pmu, FETCH_MSR, 0x10 | FETCH_EN);
    retire(&mut pmu, 20);
    assert_eq!(msr(&mut pmu, FETCH_MSR) >> 16 & 0xffff, 1);
    let unloaded = pmu.unload_context(ContextId(1));
    assert!(unloaded.is_some());
    assert_eq!(retire(&mut pmu, 11), [0_u64; 0]);
    assert_eq!(retire(&mut pmu, 1), [1]);
    assert_eq!(msr(&mut pmu, OP_MSR) & OP_VAL, OP_VAL);
    assert_eq!(msr(&mut pmu, OP_MSR + 1), 1);
}

/// Each owner of a sampler that a tool has hears that it stands: one that takes it anew, and
/// one to whom it is handed over as it is.
#[test]
fn each_owner_hears_that_a_tool_has_the_sampler() {
    const POSITION: u32 = abi::POSITION_IBS_OP;
    const MANAGEMENT: MsrIndex = MsrIndex(abi::MSR_BASE + abi::MSR_MANAGEMENT_KEY + POSITION);
    const NOTICE: MsrIndex = MsrIndex(abi::MSR_BASE + abi::MSR_NOTICE);
    let mut pmu = with_reservations(seated(StepBackend::new()));
    load(&mut pmu, 1, ops(0), &Mail::default()).expect("room");
    call(&mut pmu, 1, Call::Start(None)).expect("a start");
    let hand = |pmu: &mut Seated, layer: Layer, presented: u64, key: u64| {
        let caller = Caller { layer, presented };
        assert_eq!(pmu.wrmsr(MANAGEMENT, key, caller), WriteOutcome::Done);
    };
    let hears = |pmu: &mut Seated, layer: Layer| {
        let expected = abi::NOTICE_TAKEN
            | u64::from(POSITION) << abi::NOTICE_POSITION_SHIFT
            | u64::from(layer.code()) << abi::NOTICE_LAYER_SHIFT
            | abi::REASON_UNBACKED << abi::NOTICE_REASON_SHIFT;
        for value in [expected, abi::NOTICE_NONE] {
            let notice = pmu.rdmsr(NOTICE, Caller::legacy(layer));
            assert_eq!(notice, ReadOutcome::Value(value), "{layer}");
        }
    };
    let (kernel, firmware) = (Layer::GuestKernel, Layer::Firmware);
    for _ in 0..2 {
        hand(&mut pmu, kernel, 0, 7);
        write_msr(&mut pmu, OP_MSR, EACH_16);
        hears(&mut pmu, kernel);
        hand(&mut pmu, kernel, 7, 0);
    }
    hand(&mut pmu, kernel, 0, 7);
    write_msr(&mut pmu, OP_MSR, EACH_16);
    hears(&mut pmu, kernel);
    hand(&mut pmu, firmware, 7, 8);
    hears(&mut pmu, firmware);
}

#[test]
fn what_no_source_counts_is_refused_as_a_counter_is() {
    let mut pmu = seated(ClockBackend::new());
    let mail = Mail::default();
    let counter = context(0, &[pmc(0, 0x43_00c0, 0)]);
    let refusal = load(&mut pmu, 1, counter, &mail).expect_err("no instructions");
    let reason = refusal.reason.split_once("PMD0: ").expect("a reason").1;
    refused(
        load(&mut pmu, 2, ops(0), &mail),
        Errno::EINVAL,
        &["PMD7", reason],
    );
    let cycles = context(0, &[pmc(OP_PMC, 0x10 | OP_EN, 0)]);
    load(&mut pmu, 3, cycles, &mail).expect("cycles are counted");
    let write = Call::WritePmcs(vec![pmc(OP_PMC, EACH_16, 0)]);
    refused(call(&mut pmu, 3, write), Errno::EINVAL, &["PMC5", reason]);
    // Fetches are cycles there.
    let write = Call::WritePmcs(vec![pmc(FETCH_PMC, 0x10 | FETCH_EN, 0)]);
    call(&mut pmu, 3, write).expect("cycles are counted");
}

#[test]
fn a_sample_of_a_clock_is_taken_at_the_exit() {
    let mut pmu = seated(ClockBackend::new());
    let mail = Mail::default();
    let cycles = context(0, &[pmc(OP_PMC, 0x100 | OP_EN, pfm::PFM_REGFL_OVFL_NOTIFY)]);
    load(&mut pmu, 1, cycles, &mail).expect("room");
    call(&mut pmu, 1, Call::Start(None)).expect("a start");
    let holders = pmu.core().expect("a core").holders();
    let holder = Claimant::Context {
        vcpu: Some(OwnerId(0)),
        context: ContextId(1),
        pmd: OP_PMD,
    };
    assert_eq!(
        holders.iter().map(|held| held.holder).collect::<Vec<_>>(),
        [holder]
    );
    run(&mut pmu, 0, 0x800);
    assert_eq!(pmu.ibs_due(), None);
    run(&mut pmu, 0x1000, 0x1000);
    assert_eq!(pmu.ibs_due(), Some(IbsKind::Op));
    assert!(!pmu.has_host_overflow());
    // A stop in between leaves it due, and it is taken.
    call(&mut pmu, 1, Call::Stop).expect("a stop");
    assert_eq!(pmu.ibs_due(), Some(IbsKind::Op));
    pmu.sampled(IbsSample::Op(OpSample::Near { rip: 0x1234 }));
    assert!(pmu.has_host_overflow());
    pmu.sample_hosts(&moment(), &Nothing);
    assert_eq!(mail.kinds(), [pfm::PFM_MSG_OVFL]);
    assert_eq!(read(&mut pmu, 1, OP_PMD), 0x100 | OP_EN | OP_VAL);
    assert_eq!(read(&mut pmu, 1, RIP_PMD), 0x1234);
    assert_eq!(read(&mut pmu, 1, RIP_PMD + 1), 1 << 38, "RipInvalid");
    // What it counted further is nobody's.
    run(&mut pmu, 0x3000, 0x4000);
    assert_eq!(pmu.ibs_due(), None);
}

#[test]
fn a_core_has_no_samplers() {
    let mut pmu = seated(StepBackend::new());
    let flags = pfm::PFM_FL_SYSTEM_WIDE;
    let wide = |writes: &[PmcArg], id| {
        let context = context(flags, writes);
        AttachedContext::new(ContextId(id), Box::new(context), Box::new(Mail::default()))
    };
    let load = |core: &mut CorePmu, hosted| {
        let loaded = core.load_context(hosted, 0);
        loaded.map_err(|not| not.refusal)
    };
    let samples = wide(&[pmc(OP_PMC, EACH_16, 0)], 1);
    let loaded = pmu.with_core(|core| load(core, samples)).expect("a core");
    refused(loaded, Errno::EINVAL, &["IBSOP", "each vCPU"]);
    let counts = wide(&[pmc(0, 0x43_00c0, 0)], 2);
    let loaded = pmu.with_core(|core| load(core, counts)).expect("a core");
    loaded.expect("room");
    let mut write = Call::WritePmcs(vec![pmc(OP_PMC, EACH_16, 0)]);
    let written = pmu.with_core(|core| core.call_context(ContextId(2), &mut write, &Nothing));
    refused(
        written.expect("a core"),
        Errno::EINVAL,
        &["PMC5", "each vCPU"],
    );
}

/// The vCPU takes its tool's sampler along.
#[test]
fn a_sampler_goes_with_its_vcpu() {
    let mut pmu = seated(StepBackend::new());
    load(&mut pmu, 1, ops(0), &Mail::default()).expect("room");
    call(&mut pmu, 1, Call::Start(None)).expect("a start");
    retire(&mut pmu, 10);
    let mut left = pmu.park().expect("the core");
    assert_eq!(pmu.ibs_due(), None);
    // Off its core a tool can write, too.
    let write = Call::WritePmcs(vec![pmc(FETCH_PMC, 0x10 | FETCH_EN, 0)]);
    call(&mut pmu, 1, write).expect("a write");
    pmu.leave(&mut left);
    let mut core = CorePmu::new(Box::new(StepBackend::new()));
    core.enable_hosting(HostPolicy::GuestFirst, KHZ);
    pmu.attach(Box::new(core));
    assert_eq!(retire(&mut pmu, 6), [6]);
}

/// The tool leaves while the vCPU is on no core, which then goes to one without tools: the
/// guest's sampler counts there.
#[test]
fn a_sampler_comes_back_to_a_guest_that_moves() {
    let mut pmu = seated(StepBackend::new());
    load(&mut pmu, 1, ops(0), &Mail::default()).expect("room");
    write_msr(&mut pmu, OP_MSR, EACH_16);
    assert_eq!(retire(&mut pmu, 40), [0_u64; 0]);
    let mut left = pmu.park().expect("the core");
    assert!(pmu.unload_context(ContextId(1)).is_some());
    pmu.leave(&mut left);
    let core = CorePmu::new(Box::new(StepBackend::new()));
    pmu.attach(Box::new(core));
    assert_eq!(retire(&mut pmu, 20), [16]);
}

proptest! {
    /// A tool's sampler falls due where the guest's does, whatever count it begins with.
    #[test]
    fn a_tool_s_sampler_is_as_the_guest_s(max in 0u64..4, count in 0u64..80) {
        let control = max | OP_EN | OPS;
        let mut guest = seated(StepBackend::new());
        write_msr(&mut guest, OP_MSR, control | count << 32);
        let mut tool = seated(StepBackend::new());
        let samples = context(0, &[pmc(OP_PMC, control, 0)]);
        load(&mut tool, 1, samples, &Mail::default()).expect("room");
        let begin = PmdArg {
            num: OP_PMD,
            value: count << 32,
            ..PmdArg::default()
        };
        call(&mut tool, 1, Call::WritePmds(vec![begin])).expect("a write");
        call(&mut tool, 1, Call::Start(None)).expect("a start");
        for _ in 0..70 {
            prop_assert_eq!(retire(&mut guest, 1), retire(&mut tool, 1));
            let (told, read) = (msr(&mut guest, OP_MSR), read(&mut tool, 1, OP_PMD));
            prop_assert_eq!(told & 0xffff_ffff, read & 0xffff_ffff);
            // The guest's begins with random bits behind a sample.
            if told & OP_VAL == 0 {
                prop_assert_eq!(told, read);
            }
        }
    }
}
