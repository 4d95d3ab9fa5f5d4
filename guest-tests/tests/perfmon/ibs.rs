//! Samplers of IBS in the hands of a tool.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};
use guest_tests::micro::{DATA, Lab, Program, Test, Written, exit, spin_for, wrmsr};
use iced_x86::code_asm::{CodeAssembler, dword_ptr, eax, ebx, ecx, qword_ptr, rax, rbx, rdi};
use iced_x86::{Decoder, DecoderOptions};
use perfmon_abi::consts::{DEFAULT_FORMAT, PFM_REGFL_OVFL_NOTIFY, PFM_REGFL_READ_RESET};
use perfmon_abi::{DefaultArg, DefaultEntry, DefaultHeader, PmcArg, PmdArg, Record};
use umpire_perfmon::{Call, Client, ContextHandle, Errno};
use vm_memory::{Bytes, GuestAddress};
use vmm::micro::{KERNEL_CODE, MEMORY_SIZE, assemble};

use crate::bed::{Bed, Gates, clock, eventually, gate, guest, load, pmc, read, step};
use crate::sampling::message;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "ibs::ops_in_the_buffer_are_those_that_were_executed",
        run: ops,
    },
    Test {
        name: "ibs::fetches_in_the_buffer_are_those_that_were_executed",
        run: fetches,
    },
    Test {
        name: "ibs::a_clock_s_sample_survives_a_stop",
        run: stopped,
    },
    Test {
        name: "ibs::a_tool_and_a_guest_take_turns",
        run: turns,
    },
    Test {
        name: "ibs::absent_and_uncounted_are_refused",
        run: refusals,
    },
];

pub(crate) const MODEL: &str = "amd-core,ibs=on";

const FETCH_PMC: u16 = 4;
const FETCH_PMD: u16 = 4;
const OP_PMC: u16 = 5;
const OP_PMD: u16 = 7;
const RIP_PMD: u16 = 8;
const DATA_PMD: u16 = 9;
const OP_MSR: u32 = 0xc001_1033;
const FETCH_EN: u64 = 1 << 48;
const FETCH_VAL: u64 = 1 << 49;
const OP_EN: u64 = 1 << 17;
const OP_VAL: u64 = 1 << 18;
const OPS: u64 = 1 << 19;
const RIP_INVALID: u64 = 1 << 38;
const BRANCH: u64 = 1 << 37;
const TAKEN: u64 = 1 << 35;

/// Where sampled code lies.
const REGION: u64 = KERNEL_CODE + 0x1_0000;
const ROUNDS: u32 = 80;
/// Instructions that are executed there: a mov, those of the rounds, and a ret.
const EXECUTED: u64 = 1 + 5 * ROUNDS as u64 + 1;

fn region(a: &mut CodeAssembler) -> Written {
    let mut again = a.create_label();
    a.mov(ecx, ROUNDS)?;
    a.set_label(&mut again)?;
    a.mov(rbx, qword_ptr(rdi))?;
    a.mov(dword_ptr(rdi + 8), ebx)?;
    a.nop()?;
    a.dec(ecx)?;
    a.jne(again)?;
    a.ret()
}

/// What is told of an op: `IbsOpData`, `IbsOpData3`, and its addresses, branch target last.
type Told = [u64; 5];

/// By the address of each instruction of the region.
fn expected() -> Result<BTreeMap<u64, Vec<Told>>> {
    const ADDRESSES: u64 = 1 << 17 | 1 << 18;
    let code = assemble(REGION, region)?;
    let decoder = Decoder::with_ip(64, &code, REGION, DecoderOptions::NONE);
    let at: Vec<u64> = decoder.into_iter().map(|insn| insn.ip()).collect();
    let plain = vec![[0; 5]];
    let load = [0, 1 | ADDRESSES | 4 << 22, DATA, DATA, 0];
    let store = [0, 2 | ADDRESSES | 3 << 22, DATA + 8, DATA + 8, 0];
    let taken = [BRANCH | TAKEN, 0, 0, 0, at[1]];
    let all = [
        plain.clone(),
        vec![load],
        vec![store],
        plain.clone(),
        plain,
        vec![taken, [BRANCH, 0, 0, 0, 0]],
    ];
    // Who the return returns to is not told here.
    Ok(at.into_iter().zip(all).collect())
}

fn bed(backend: vmm::micro::BackendFactory) -> Result<Bed> {
    let mut bed = Bed::new(backend)?;
    bed.model = MODEL;
    Ok(bed)
}

/// PMDs as bits.
fn bits(pmds: &[u16]) -> [u64; 2] {
    [pmds.iter().fold(0, |bits, pmd| bits | 1 << pmd), 0]
}

/// Samples of the region as a tool with a buffer has them, each with the values of `pmds`.
fn sampled(lab: &Lab, control: PmcArg, pmds: &[u16]) -> Result<Vec<(DefaultEntry, Vec<u64>)>> {
    let program = Program::new()?.kernel(|a| {
        gate(a, 1)?;
        a.mov(rdi, DATA)?;
        a.mov(rax, REGION)?;
        a.call(rax)?;
        gate(a, 2)?;
        gate(a, 3)?;
        exit(a)
    })?;
    let program = program.code(REGION, region)?;
    let control = PmcArg {
        smpl_pmds: bits(pmds),
        ..control
    };
    let (samples, _) = bed(step)?.run(lab, &program.start(0), |client, gates| {
        let arg = DefaultArg {
            buf_size: 8 << 20,
            buf_flags: 0,
        };
        let context = client.create(0, Some(DEFAULT_FORMAT), &arg.to_bytes())?;
        client.call(&context, &mut Call::WritePmcs(vec![control]))?;
        let mapping = context.map_buffer()?;
        load(client, &context, 0)?;
        client.call(&context, &mut Call::Start(None))?;
        gates.open(1);
        gates.reached(2)?;
        client.call(&context, &mut Call::Stop)?;
        let header = mapping.copy(0, DefaultHeader::SIZE).context("a header")?;
        let count = DefaultHeader::from_bytes(&header)?.count;
        let mut samples = Vec::new();
        let size = DefaultEntry::SIZE + 8 * pmds.len();
        for number in 0..usize::try_from(count)? {
            let at = DefaultHeader::SIZE + number * size;
            let bytes = mapping.copy(at, size).context("a sample")?;
            let (entry, values) = bytes.split_at(DefaultEntry::SIZE);
            let words = values.as_chunks::<8>().0.iter();
            let values = words.map(|word| u64::from_ne_bytes(*word)).collect();
            samples.push((DefaultEntry::from_bytes(entry)?, values));
        }
        Ok(samples)
    })?;
    Ok(samples)
}

fn ops(lab: &Lab) -> Result<()> {
    const PERIOD: u64 = 16;
    let control = 1 | OP_EN | OPS;
    let pmds = [OP_PMD, RIP_PMD, DATA_PMD, 11, 12, 13, 63];
    let samples = sampled(lab, pmc(OP_PMC, control), &pmds)?;
    let expected = expected()?;
    let mut seen = BTreeMap::new();
    for (entry, values) in &samples {
        let [read, rip, told @ ..] = values.as_slice() else {
            bail!("{values:x?}");
        };
        ensure!(entry.ovfl_pmd == OP_PMD, "{entry:?}");
        ensure!(*read == control | OP_VAL, "{values:x?}");
        if let Some(expected) = expected.get(rip) {
            let is_it = expected.iter().any(|one| one.as_slice() == told);
            ensure!(is_it, "{values:x?}, not {expected:x?}");
            *seen.entry(*rip).or_insert(0) += 1;
        }
    }
    // The rounds have five instructions, so that each of them has its turn.
    let all: u64 = seen.values().sum();
    let about = EXECUTED / PERIOD;
    ensure!((about - 1..=about + 1).contains(&all), "{seen:x?}");
    ensure!(seen.len() >= 5, "{seen:x?}");
    Ok(())
}

fn fetches(lab: &Lab) -> Result<()> {
    let control = 1 | FETCH_EN;
    let samples = sampled(lab, pmc(FETCH_PMC, control), &[FETCH_PMD, 5, 6])?;
    let expected = expected()?;
    let mut seen = 0;
    for (_, values) in &samples {
        let [read, linear, physical] = values[..] else {
            bail!("{values:x?}");
        };
        ensure!(
            read & (0xffff | FETCH_EN | FETCH_VAL) == control | FETCH_VAL,
            "{values:x?}"
        );
        ensure!(physical == linear, "{values:x?}");
        seen += u64::from(expected.contains_key(&linear));
    }
    let about = EXECUTED / 16;
    ensure!(
        (about - 1..=about + 1).contains(&seen),
        "{seen} of {samples:x?}"
    );
    Ok(())
}

/// A context with a notifying sampler of cycles, loaded.
fn of_cycles(client: &Client, flags: u32) -> Result<ContextHandle> {
    let context = client.create(0, None, &[])?;
    let control = PmcArg {
        flags,
        ..pmc(OP_PMC, CYCLES)
    };
    client.call(&context, &mut Call::WritePmcs(vec![control]))?;
    load(client, &context, 0)?;
    Ok(context)
}

/// Cycles between two samples: fewer than those of a guest's exit.
const PERIOD: u64 = 0x1000;
const CYCLES: u64 = PERIOD >> 4 | OP_EN;

fn stopped(lab: &Lab) -> Result<()> {
    let spinning = guest(|a| spin_for(a, 0x100_0000))?;
    bed(clock)?.run(lab, &spinning, |client, gates| {
        let context = of_cycles(client, PFM_REGFL_OVFL_NOTIFY)?;
        client.call(&context, &mut Call::Start(None))?;
        gates.open(1);
        ensure!(
            message(&context)?.ovfl_pmds == bits(&[OP_PMD]),
            "another PMD"
        );
        gates.reached(2)?;
        let registers = || -> Result<[u64; 3]> {
            let value = |num| Ok::<_, anyhow::Error>(read(client, &context, num)?.value);
            Ok([value(OP_PMD)?, value(RIP_PMD)?, value(DATA_PMD)?])
        };
        let before = registers()?;
        client.call(&context, &mut Call::Stop)?;
        let after = registers()?;
        ensure!(before == after, "{before:x?} {after:x?}");
        client.call(&context, &mut Call::Unload)?;
        let last = registers()?;
        ensure!(before == last, "{before:x?} {last:x?}");
        let code = KERNEL_CODE..KERNEL_CODE + MEMORY_SIZE as u64;
        ensure!(code.contains(&before[1]), "{before:x?}");
        ensure!(
            [before[0], before[2]] == [CYCLES | OP_VAL, RIP_INVALID],
            "{before:x?}"
        );
        Ok(())
    })?;
    Ok(())
}

/// The call is refused for want of the sampler, and says who has it.
fn busy(result: Result<()>, word: &str) -> Result<()> {
    refused(result, Errno::EBUSY, &["IBSOP", word])
}

fn refused(result: Result<()>, errno: Errno, words: &[&str]) -> Result<()> {
    let Err(error) = result else {
        bail!("it was not refused");
    };
    let error: umpire_perfmon::CallError = error.downcast()?;
    ensure!(error.errno == errno, "{error}");
    ensure!(
        words.iter().all(|word| error.reason.contains(word)),
        "{error}"
    );
    Ok(())
}

/// The guest stores what its control reads.
fn store_control(a: &mut CodeAssembler, at: u64) -> Written {
    a.mov(ecx, OP_MSR)?;
    a.rdmsr()?;
    a.mov(dword_ptr(at), eax)
}

fn turns(lab: &Lab) -> Result<()> {
    let program = Program::new()?.kernel(|a| {
        gate(a, 1)?;
        wrmsr(a, OP_MSR, 0xffff | OP_EN)?;
        gate(a, 2)?;
        wrmsr(a, OP_MSR, 0)?;
        gate(a, 3)?;
        wrmsr(a, OP_MSR, CYCLES)?;
        spin_for(a, 0x100_0000)?;
        store_control(a, DATA)?;
        gate(a, 4)?;
        spin_for(a, 0x100_0000)?;
        store_control(a, DATA + 8)?;
        gate(a, 5)?;
        exit(a)
    })?;
    let use_it = |client: &Client, gates: &Gates| -> Result<()> {
        gates.open(1);
        gates.reached(2)?;
        busy(of_cycles(client, 0).map(drop), "the guest has enabled it")?;
        gates.open(2);
        gates.reached(3)?;
        let context = of_cycles(client, 0)?;
        busy(of_cycles(client, 0).map(drop), "context ")?;
        client.call(&context, &mut Call::Start(None))?;
        gates.open(3);
        gates.reached(4)?;
        // It holds its first sample until it is told to go on.
        let reset = || {
            Call::ReadPmds(vec![PmdArg {
                num: OP_PMD,
                flags: PFM_REGFL_READ_RESET,
                ..PmdArg::default()
            }])
        };
        for _ in 0..3 {
            eventually("a sample", || {
                Ok(read(client, &context, OP_PMD)?.value & OP_VAL != 0)
            })?;
            client.call(&context, &mut reset())?;
        }
        client.call(&context, &mut Call::Unload)?;
        gates.open(5);
        Ok(())
    };
    let (_, outcome) = bed(clock)?.run(lab, &program.start(0), use_it)?;
    let control = |at| -> Result<u32> { Ok(outcome.memory.read_obj(GuestAddress(at))?) };
    let (during, after) = (u64::from(control(DATA)?), u64::from(control(DATA + 8)?));
    ensure!(during == CYCLES, "while the tool had it: {during:#x}");
    ensure!(after == CYCLES | OP_VAL, "when it had gone: {after:#x}");
    Ok(())
}

fn refusals(lab: &Lab) -> Result<()> {
    let write = |client: &Client, value| -> Result<ContextHandle> {
        let context = client.create(0, None, &[])?;
        client.call(&context, &mut Call::WritePmcs(vec![pmc(OP_PMC, value)]))?;
        Ok(context)
    };
    Bed::new(clock)?.run(lab, &guest(|_| Ok(()))?, |client, _| {
        let absent = write(client, CYCLES).map(drop);
        refused(absent, Errno::EINVAL, &["has no PMC5"])
    })?;
    bed(clock)?.run(lab, &guest(|_| Ok(()))?, |client, _| {
        let context = write(client, 1 | OP_EN | OPS)?;
        let words = ["PMD7", "the clock backend cannot count"];
        refused(load(client, &context, 0), Errno::EINVAL, &words)
    })?;
    Ok(())
}
