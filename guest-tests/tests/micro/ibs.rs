//! Instruction-based sampling, seen by a guest.

use anyhow::{Context, Result, ensure};
use guest_tests::micro::Op::{Read, ReadGp, ReadWithin, Spin, Wait, Write, WriteGp};
use guest_tests::micro::{
    DATA, Lab, LabRun, Op, Program, Script, Setup, Test, Written, enter_user, exit, log_value,
    one_of_three, spin_for, wrmsr,
};
use iced_x86::code_asm::{
    CodeAssembler, ax, byte_ptr, dword_ptr, eax, ecx, edx, qword_ptr, r13, rax, rbx, rdx, rsp, ss,
};
use iced_x86::{Decoder, DecoderOptions};
use pmu_virt::{ClockBackend, CombinedBackend, CounterBackend, StepBackend};
use vmm::micro::{KERNEL_CODE, USER_CODE, assemble};
use vmm::vcpu::StepSupport;

use crate::overflow::{Apic, await_value, handler};

const MODELS: &[&str] = &[
    "amd-fam10h,ibs=on",
    "amd-core,ibs=on",
    "amd-perfmonv2,ibs=on",
];
const ZEN: &str = "amd-core,ibs=on";

const FETCH: u32 = 0xc001_1030;
const FETCH_LINEAR: u32 = 0xc001_1031;
const FETCH_PHYSICAL: u32 = 0xc001_1032;
const OP: u32 = 0xc001_1033;
const RIP: u32 = 0xc001_1034;
const OP_DATA: u32 = 0xc001_1035;
const OP_DATA3: u32 = 0xc001_1037;
const LINEAR: u32 = 0xc001_1038;
const PHYSICAL: u32 = 0xc001_1039;
const CONTROL: u32 = 0xc001_103a;
/// Select of the first counter: once it is written RDPMC is served.
const SELECT: u32 = 0xc001_0200;
/// CR4.PCE: RDPMC at CPL 3.
const PCE: u64 = 1 << 8;
const TARGET: u32 = 0xc001_103b;
const VECTOR: u32 = 0x850;

const FETCH_EN: u64 = 1 << 48;
const FETCH_VAL: u64 = 1 << 49;
const FETCH_COMPLETE: u64 = 1 << 50;
const FETCH_PHYSICAL_VALID: u64 = 1 << 52;
const OP_EN: u64 = 1 << 17;
const OP_VAL: u64 = 1 << 18;
const OPS: u64 = 1 << 19;
const RIP_INVALID: u64 = 1 << 38;
/// A maximum of 16 million cycles: longer than a guest's first exits on any KVM.
const LONG: u64 = 0x10 << 20;

/// Where sampled code lies.
const REGION: u64 = KERNEL_CODE + 0x2000;
/// Its stack.
const STACK: u64 = DATA + 0x1000;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "ibs::registers",
        run: registers,
    },
    Test {
        name: "ibs::absent",
        run: absent,
    },
    Test {
        name: "ibs::cycles",
        run: cycles,
    },
    Test {
        name: "ibs::ops_are_those_that_were_executed",
        run: ops,
    },
    Test {
        name: "ibs::every_sixteenth_op",
        run: every_sixteenth,
    },
    Test {
        name: "ibs::an_emulated_op_is_one_that_was_executed",
        run: emulated,
    },
    Test {
        name: "ibs::an_emulated_op_of_a_ring_that_is_not_stepped_is_near_by",
        run: |lab| one_of_three(lab, emulated_unseen),
    },
    Test {
        name: "ibs::a_stepped_op_of_cycles",
        run: stepped_cycles,
    },
    Test {
        name: "ibs::fetches_are_those_that_were_executed",
        run: fetches,
    },
    Test {
        name: "ibs::nmi_of_cycles",
        run: nmi,
    },
    Test {
        name: "ibs::fixed_vector_of_fetches",
        run: fixed,
    },
    Test {
        name: "ibs::a_tiny_period_leaves_the_guest_time",
        run: tiny,
    },
    Test {
        name: "ibs::extended_vectors_in_x2apic_mode",
        run: vectors,
    },
];

/// Plays `ops` at CPL 0.
fn check(lab: &Lab, name: &str, setup: &Setup, ops: &[Op]) -> Result<()> {
    let script = Script {
        name,
        cr4: 0,
        kernel: ops,
        user: &[],
    };
    script.check(lab, setup).map(drop)
}

fn registers(lab: &Lab) -> Result<()> {
    let ops = [
        Read(CONTROL, 0x100),
        WriteGp(CONTROL, 0x100),
        Write(FETCH, !FETCH_EN),
        Read(FETCH, 0x0202_0000_ffff_ffff),
        Write(FETCH, 0),
        Write(RIP, 0x1234),
        Read(RIP, 0x1234),
        Write(PHYSICAL, u64::MAX),
        Read(PHYSICAL, 0xf_ffff_ffff_ffff),
        ReadGp(0xc001_103c),
        WriteGp(0xc001_103d, 0),
        // The local APIC is in its old mode.
        ReadGp(VECTOR),
        WriteGp(VECTOR, 0x400),
        // The northbridge's and the shared cache's counters.
        ReadGp(0xc001_0230),
        WriteGp(0xc001_0240, 0),
    ];
    for model in MODELS {
        check(lab, "registers", &Setup::clock(model), &ops)?;
    }
    let ops = [
        Write(OP, !OP_EN),
        // A clock counts no ops.
        Read(OP, 0x07ff_ffff_07f4_ffff),
        Write(TARGET, 0x4321),
        Read(TARGET, 0x4321),
    ];
    check(lab, "27 bits", &Setup::clock(ZEN), &ops)?;
    let ops = [
        Write(OP, !OP_EN),
        Read(OP, 0x000f_ffff_000c_ffff),
        ReadGp(TARGET),
    ];
    check(lab, "20 bits, and ops", &Setup::step(MODELS[0]), &ops)
}

fn absent(lab: &Lab) -> Result<()> {
    let ops = [
        ReadGp(FETCH),
        WriteGp(OP, 0),
        ReadGp(CONTROL),
        WriteGp(TARGET, 0),
        ReadGp(0xc001_103d),
        ReadGp(VECTOR),
    ];
    for model in ["amd-k7", "amd-core", "amd-perfmonv2", "intel-v2"] {
        check(lab, "absent", &Setup::clock(model), &ops)?;
    }
    Ok(())
}

fn cycles(lab: &Lab) -> Result<()> {
    const MAX: u64 = 0x4000;
    let ops = [
        Write(OP, MAX | OP_EN),
        Wait(0x8_0000),
        // The sample is there, and the count stands at 0.
        Read(OP, MAX | OP_EN | OP_VAL),
        ReadWithin(RIP, KERNEL_CODE, KERNEL_CODE + 0x1_0000),
        Read(OP_DATA, RIP_INVALID),
        Read(OP_DATA3, 0),
        Read(LINEAR, 0),
        Write(OP, 0),
        Wait(0x8_0000),
        Read(OP, 0),
        // A maximum of 0 never comes to its end.
        Write(OP, OP_EN),
        Wait(0x1_0000),
        Read(OP, OP_EN),
        Write(OP, 0),
        Write(FETCH, MAX | FETCH_EN),
        Wait(0x8_0000),
        ReadWithin(
            FETCH,
            MAX | MAX << 16 | FETCH_EN | FETCH_VAL | FETCH_COMPLETE,
            u64::MAX >> 8,
        ),
        ReadWithin(FETCH_LINEAR, KERNEL_CODE, KERNEL_CODE + 0x1_0000),
        ReadWithin(FETCH_PHYSICAL, KERNEL_CODE, KERNEL_CODE + 0x1_0000),
        Write(FETCH, 0),
    ];
    for model in MODELS {
        check(lab, "cycles", &Setup::clock(model), &ops)?;
    }
    let ops = [
        Write(OP, LONG | OP_EN),
        Spin(10),
        ReadWithin(OP, LONG | OP_EN | 1 << 32, LONG | OP_EN | 0x7ff_ffff << 32),
        Write(OP, 0),
    ];
    check(lab, "the count", &Setup::clock(ZEN), &ops)
}

/// What is sampled of one instruction: its place in the code; then target of a taken branch,
/// by place, and `IbsOpData` without RIP's bit; then `IbsOpData3` and where it accesses.
#[derive(Clone, Copy)]
struct Expected {
    place: usize,
    data: u64,
    target: Option<usize>,
    data3: u64,
    linear: u64,
}

const BRANCH: u64 = 1 << 37;
const TAKEN: u64 = 1 << 37 | 1 << 35;
const RETURN: u64 = 1 << 34;
const LOAD: u64 = 1;
const STORE: u64 = 2;
const ADDRESSES: u64 = 1 << 17 | 1 << 18;

const fn plain(place: usize) -> Expected {
    Expected {
        place,
        data: 0,
        target: None,
        data3: 0,
        linear: 0,
    }
}

const fn branch(place: usize, data: u64, target: Option<usize>) -> Expected {
    Expected {
        data,
        target,
        ..plain(place)
    }
}

/// `width`: n is 2^(n-1) bytes.
const fn access(of: Expected, kind: u64, width: u64, linear: u64) -> Expected {
    Expected {
        data3: kind | ADDRESSES | width << 22,
        linear,
        ..of
    }
}

/// Instructions of [`region`] in the order in which they are executed.
const EXECUTED: [Expected; 15] = [
    plain(0),
    access(plain(1), LOAD, 4, DATA),
    access(plain(2), STORE, 3, DATA + 8),
    access(plain(3), LOAD | STORE, 1, DATA + 0x10),
    access(plain(4), STORE, 4, STACK - 8),
    access(plain(5), LOAD, 4, STACK - 8),
    access(branch(6, TAKEN, Some(8)), STORE, 4, STACK - 8),
    access(branch(8, TAKEN | RETURN, Some(7)), LOAD, 4, STACK - 8),
    branch(7, TAKEN, Some(9)),
    plain(9),
    branch(10, BRANCH, None),
    branch(11, TAKEN, Some(12)),
    access(plain(12), LOAD, 3, DATA + 0x24),
    plain(13),
    access(plain(14), LOAD, 4, DATA + 0x18),
];

fn region(a: &mut CodeAssembler) -> Written {
    let (mut function, mut over, mut next) = (a.create_label(), a.create_label(), a.create_label());
    let mut begin = a.create_label();
    a.set_label(&mut begin)?;
    a.nop()?;
    a.mov(rax, qword_ptr(DATA))?;
    a.mov(dword_ptr(DATA + 8), eax)?;
    a.add(byte_ptr(DATA + 0x10), 1)?;
    a.push(rax)?;
    a.pop(rbx)?;
    a.call(function)?;
    a.jmp(over)?;
    a.set_label(&mut function)?;
    a.ret()?;
    a.set_label(&mut over)?;
    a.xor(ecx, ecx)?;
    a.jne(begin)?;
    a.je(next)?;
    a.set_label(&mut next)?;
    a.mov(edx, dword_ptr(r13 + rcx4()))?;
    a.lea(rax, qword_ptr(DATA))?;
    a.mov(rax, qword_ptr(DATA + 0x18))
}

/// The index and displacement of one operand.
fn rcx4() -> iced_x86::code_asm::AsmMemoryOperand {
    iced_x86::code_asm::rcx * 4 + 0x24
}

/// Addresses of the instructions of `code`, which begins at `at`.
fn places(at: u64, code: &[u8]) -> Vec<u64> {
    let decoder = Decoder::with_ip(64, code, at, DecoderOptions::NONE);
    decoder.into_iter().map(|insn| insn.ip()).collect()
}

/// Logs the MSRs `read`.
fn log_msrs(a: &mut CodeAssembler, read: &[u32]) -> Written {
    for msr in read {
        a.mov(ecx, *msr)?;
        a.rdmsr()?;
        log_value(a)?;
    }
    Ok(())
}

/// Starts the sampler with `control`, goes to the region, then logs `read`.
fn sampled(
    lab: &Lab,
    setup: &Setup,
    (msr, control): (u32, u64),
    read: &[u32],
    region: impl Fn(&mut CodeAssembler) -> Written,
) -> Result<LabRun> {
    let guest = Program::new()?
        .kernel(|a| {
            a.mov(rsp, STACK)?;
            a.mov(r13, DATA)?;
            wrmsr(a, msr, control)?;
            a.jmp(REGION)
        })?
        .code(REGION, |a| {
            region(a)?;
            log_msrs(a, read)?;
            exit(a)
        })?;
    lab.run(setup, &guest.start(0))
}

fn values(ran: &LabRun) -> Vec<u64> {
    let values = ran.log.iter();
    values
        .map(|entry| entry.b << 32 | entry.a & 0xffff_ffff)
        .collect()
}

/// Each instruction of the region in turn: the count is begun so that it is the one.
fn ops(lab: &Lab) -> Result<()> {
    let places = places(REGION, &assemble(REGION, region)?);
    let read = [
        OP,
        RIP,
        OP_DATA,
        0xc001_1036,
        OP_DATA3,
        LINEAR,
        PHYSICAL,
        TARGET,
    ];
    for (n, expected) in (2..).zip(EXECUTED) {
        // The first one is the jump there.
        let control = 2 | OP_EN | OPS | (32 - n) << 32;
        let ran = sampled(lab, &Setup::step(ZEN), (OP, control), &read, region)?;
        let found = values(&ran);
        let [control, rip, data, data2, data3, linear, physical, target] = found[..] else {
            anyhow::bail!("eight values: {found:x?}");
        };
        let place = expected.place;
        let context = format!("instruction {place} of the region: {found:x?}");
        ensure!(
            control & 0xffff_ffff == 2 | OP_EN | OPS | OP_VAL,
            "{context}"
        );
        // Random bits.
        ensure!(control >> 32 < 128, "{context}");
        ensure!(rip == places[place], "{context}");
        ensure!([data, data2] == [expected.data, 0], "{context}");
        ensure!(data3 == expected.data3, "{context}");
        ensure!([linear, physical] == [expected.linear; 2], "{context}");
        let goes_to = expected.target.map_or(0, |place| places[place]);
        ensure!(target == goes_to, "{context}");
    }
    Ok(())
}

/// Without a written count it is the sixteenth one behind the WRMSR: the jump, then fourteen
/// of sixteen NOPs before it.
fn every_sixteenth(lab: &Lab) -> Result<()> {
    let nops = |a: &mut CodeAssembler| (0..20).try_for_each(|_| a.nop());
    for model in MODELS {
        let control = (OP, 1 | OP_EN | OPS);
        let ran = sampled(lab, &Setup::step(model), control, &[RIP, OP_DATA], nops)?;
        let found = values(&ran);
        ensure!(found == [REGION + 14, 0], "{model}: {found:x?}");
    }
    Ok(())
}

/// RDPMC, alone and behind what may be executed in one step with it.
fn counter_reads(a: &mut CodeAssembler) -> Written {
    a.xor(ecx, ecx)?;
    a.rdpmc()?;
    a.lfence()?;
    a.rdpmc()?;
    a.mov(ax, ss)?;
    a.mov(ss, ax)?;
    a.rdpmc()?;
    a.nop()
}

/// Each instruction of [`counter_reads`] in turn.
fn emulated(lab: &Lab) -> Result<()> {
    let places = places(REGION, &assemble(REGION, counter_reads)?);
    (2..).zip(places).try_for_each(|(n, place)| {
        let guest = Program::new()?
            .kernel(|a| {
                wrmsr(a, SELECT, 0)?;
                wrmsr(a, OP, 2 | OP_EN | OPS | (32 - n) << 32)?;
                a.jmp(REGION)
            })?
            .code(REGION, |a| {
                counter_reads(a)?;
                log_msrs(a, &[RIP, OP_DATA])?;
                exit(a)
            })?;
        let guest = guest.start(0);
        one_of_three(lab, |lab| {
            let found = values(&lab.run(&Setup::step(ZEN), &guest)?);
            ensure!(found == [place, 0], "op {n}: {found:x?}");
            Ok(())
        })
    })
}

/// The guest runs from a NOP on, which was planned, to the RDPMC behind it: nobody saw what was
/// executed there. The sixteenth op is an RDPMC at CPL 3, however few were counted before.
fn emulated_unseen(lab: &Lab) -> Result<()> {
    let region = |a: &mut CodeAssembler| {
        a.xor(ecx, ecx)?;
        for _ in 0..20 {
            a.nop()?;
            a.rdpmc()?;
        }
        a.ud2()
    };
    let guest = Program::new()?
        .handler(6, |a| {
            log_msrs(a, &[OP, RIP, OP_DATA])?;
            exit(a)
        })?
        .kernel(|a| {
            wrmsr(a, SELECT, 0)?;
            wrmsr(a, OP, 1 | OP_EN | OPS)?;
            enter_user(a, 0)
        })?
        .user(region)?;
    let mut setup = Setup::step(ZEN);
    setup.step = Some(StepSupport {
        user: false,
        ..lab.probe.step_support()
    });
    let found = values(&lab.run(&setup, &guest.start(PCE))?);
    let [control, rip, data] = found[..] else {
        anyhow::bail!("three values: {found:x?}");
    };
    ensure!(control & OP_VAL != 0, "{found:x?}");
    let places = places(USER_CODE, &assemble(USER_CODE, region)?);
    let mut behind_reads = places.iter().skip(3).step_by(2);
    ensure!(behind_reads.any(|place| *place == rip), "{found:x?}");
    ensure!(data == RIP_INVALID, "{found:x?}");
    Ok(())
}

/// Steps for ops, and a clock for cycles: the op that is told is one that was stepped.
fn stepped_cycles(lab: &Lab) -> Result<()> {
    let setup = Setup {
        backend: || {
            let sources: Vec<Box<dyn CounterBackend>> =
                vec![Box::new(ClockBackend::new()), Box::new(StepBackend::new())];
            Box::new(CombinedBackend::new(sources))
        },
        ..Setup::clock(ZEN)
    };
    let read = [RIP, OP_DATA];
    let guest = Program::new()?
        .kernel(|a| {
            // Something to step for.
            wrmsr(a, SELECT, 0x43_00c0)?;
            wrmsr(a, OP, LONG | OP_EN)?;
            a.jmp(REGION)
        })?
        .code(REGION, |a| {
            spin_for(a, 0x1000_0000)?;
            log_msrs(a, &read)?;
            exit(a)
        })?;
    let found = values(&lab.run(&setup, &guest.start(0))?);
    let [rip, data] = found[..] else {
        anyhow::bail!("two values: {found:x?}");
    };
    ensure!((REGION..REGION + 0x40).contains(&rip), "{found:x?}");
    ensure!(data & RIP_INVALID == 0, "{found:x?}");
    Ok(())
}

fn fetches(lab: &Lab) -> Result<()> {
    let nops = |a: &mut CodeAssembler| (0..20).try_for_each(|_| a.nop());
    let read = [FETCH, FETCH_LINEAR, FETCH_PHYSICAL];
    let ran = sampled(lab, &Setup::step(ZEN), (FETCH, 1 | FETCH_EN), &read, nops)?;
    let found = values(&ran);
    let [control, linear, physical] = found[..] else {
        anyhow::bail!("three values: {found:x?}");
    };
    let expected = 1 | 1 << 16 | FETCH_EN | FETCH_VAL | FETCH_COMPLETE | FETCH_PHYSICAL_VALID;
    ensure!(control & !(0b11 << 53) == expected, "{found:x?}");
    ensure!([linear, physical] == [REGION + 14; 2], "{found:x?}");
    Ok(())
}

/// A guest in x2APIC mode whose sampler `msr` raises `vector`, by entry 0, `times` times: the
/// handler notes `noted` and starts it again.
fn interrupted(
    lab: &Lab,
    model: &str,
    (msr, control): (u32, u64),
    (entry, vector): (u32, u8),
    (noted, times): (u32, i32),
) -> Result<LabRun> {
    let apic = (entry & 0x700 == 0).then_some(Apic::X2);
    let program = Program::new()?.handler(vector, |a| {
        handler(a, apic, |a| {
            a.mov(ecx, noted)?;
            a.rdmsr()?;
            log_value(a)?;
            wrmsr(a, msr, control)
        })
    })?;
    let guest = program.kernel(|a| {
        Apic::X2.enable(a)?;
        wrmsr(a, VECTOR, entry.into())?;
        a.sti()?;
        wrmsr(a, msr, control)?;
        await_value(a, crate::overflow::TAKEN, times)?;
        wrmsr(a, msr, 0)?;
        exit(a)
    })?;
    let ran = lab.run(&Setup::clock(model), &guest.start(0));
    ran.with_context(|| format!("{model}, entry {entry:#x}"))
}

fn nmi(lab: &Lab) -> Result<()> {
    for model in MODELS {
        let control = (OP, 0x8000 | OP_EN);
        let ran = interrupted(lab, model, control, (0x400, 2), (RIP, 5))?;
        let found = values(&ran);
        ensure!(found.len() >= 5, "{model}: {found:x?}");
        // The handler starts the sampler before it returns.
        let code = [KERNEL_CODE, Program::handler_address(2)].map(|from| from..from + 0x1000);
        let is_code = |rip: &u64| code.iter().any(|code| code.contains(rip));
        ensure!(found.iter().all(is_code), "{model}: {found:x?}");
    }
    Ok(())
}

fn fixed(lab: &Lab) -> Result<()> {
    let control = (FETCH, 0x8000 | FETCH_EN);
    let ran = interrupted(lab, ZEN, control, (0xf2, 0xf2), (FETCH, 3))?;
    let found = values(&ran);
    ensure!(found.len() >= 3, "{found:x?}");
    let valid = |control: &u64| control & FETCH_VAL != 0 && control >> 16 & 0xffff == 0x8000;
    ensure!(found[..3].iter().all(valid), "{found:x?}");
    Ok(())
}

/// As Linux's least period: the floor between two interrupts lets the guest go on.
fn tiny(lab: &Lab) -> Result<()> {
    let ran = interrupted(lab, ZEN, (OP, 9 | OP_EN), (0x400, 2), (OP, 20))?;
    let found = values(&ran);
    let valid = |control: &u64| control & OP_VAL != 0;
    // One that was on its way when the sampler was stopped finds nothing, as on hardware.
    ensure!(found.len() >= 20, "{found:x?}");
    ensure!(found[..20].iter().all(valid), "{found:x?}");
    Ok(())
}

fn vectors(lab: &Lab) -> Result<()> {
    let read = |a: &mut CodeAssembler, msr: u32| {
        a.mov(ecx, msr)?;
        a.rdmsr()?;
        a.shl(rdx, 32)?;
        a.or(rax, rdx)?;
        a.xor(edx, edx)?;
        log_value(a)
    };
    let guest = Program::new()?.kernel(|a| {
        Apic::X2.enable(a)?;
        for msr in [0x840, 0x850, 0x853] {
            read(a, msr)?;
        }
        wrmsr(a, 0x851, 0x1_04f2)?;
        read(a, 0x851)?;
        exit(a)
    })?;
    let ran = lab.run(&Setup::clock(ZEN), &guest.start(0))?;
    let found = values(&ran);
    ensure!(
        found == [4 << 16, 0x1_0000, 0x1_0000, 0x1_04f2],
        "{found:x?}"
    );
    Ok(())
}
