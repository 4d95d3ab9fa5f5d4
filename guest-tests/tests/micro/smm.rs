//! What runs in SMM is the firmware's: no sample tells the kernel of it.

use anyhow::{Result, ensure};
use guest_tests::micro::{
    DATA, Lab, LabRun, Program, Setup, Test, Written, exit, log_value, wrmsr,
};
use iced_x86::code_asm::{
    CodeAssembler, dx, eax, ebx, ecx, edi, edx, esi, ptr, qword_ptr, rax, rbx, rdx, rsp,
};
use vm_memory::Bytes;
use vm_memory::GuestAddress;
use vmm::kvm::SMM_ENTRY;
use vmm::micro::{KERNEL_CODE, KERNEL_STACK, MEMORY_SIZE, MicroGuest, assemble_for};

use crate::overflow::Apic;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "smm::no_pebs_record_has_its_registers",
        run: pebs,
    },
    Test {
        name: "smm::no_exact_pebs_record_has_its_registers",
        run: exact_pebs,
    },
    Test {
        name: "smm::no_sample_of_ibs_is_there",
        run: ibs,
    },
    Test {
        name: "smm::no_exact_sample_of_ibs_is_there",
        run: exact_ibs,
    },
];

/// What the code in SMM has in EDI and ESI.
const SECRET: [u32; 2] = [0x5ec2_37a1, 0xe7c0_91d4];
/// Where it is, from the segment's base on, and as a linear address.
const SEGMENT: u64 = SMM_ENTRY - 0x8000;
const SMI_TO_0: u64 = 2 << 8;
const ICR: u32 = 0x830;
const PORT: u32 = 0x90;
const FULL: u64 = 0xffff_ffff_ffff;

/// The debug store area and its buffer.
const AREA: u64 = DATA + 0x400;
const BUFFER: u64 = DATA + 0x1000;
const INDEX: u64 = AREA + 0x28;
/// A record with general registers, and where its instruction's address is.
const RECORD: u64 = 32 + 18 * 8;
const RECORDS: u64 = 40;

const OP: u32 = 0xc001_1033;
const OP_RIP: u32 = 0xc001_1034;
const OP_LINEAR: u32 = 0xc001_1038;
const FETCH: u32 = 0xc001_1030;
const FETCH_LINEAR: u32 = 0xc001_1031;

/// Code in SMM with a secret, which exits `times` times before it leaves.
fn exits_with_secret(times: u32) -> Result<Vec<u8>> {
    Ok(assemble_for(16, SMM_ENTRY, |a| {
        let mut again = a.create_label();
        a.mov(edi, SECRET[0])?;
        a.mov(esi, SECRET[1])?;
        a.mov(ebx, times)?;
        a.set_label(&mut again)?;
        a.mov(dx, PORT)?;
        a.out(dx, eax)?;
        a.dec(ebx)?;
        a.jne(again)?;
        a.rsm()
    })?)
}

/// Sends an SMI to this processor.
fn smi(a: &mut CodeAssembler) -> Written {
    wrmsr(a, ICR, SMI_TO_0)?;
    (0..8).try_for_each(|_| a.nop())
}

/// Whether an address is one of code in SMM, with or without its segment's base.
fn is_in_smm(address: u64) -> bool {
    let offset = address.wrapping_sub(SEGMENT);
    [address, offset]
        .iter()
        .any(|at| (0x8000..0x1_0000).contains(at))
}

/// No half of the secret is anywhere in ordinary memory.
fn ensure_secret(ran: &LabRun) -> Result<()> {
    const PAGE: usize = 0x1000;
    let mut all = vec![0; MEMORY_SIZE];
    let memory = &ran.outcome.memory;
    memory.read_slice(&mut all, GuestAddress(0))?;
    let halves = SECRET.map(u32::to_le_bytes);
    let used = all.chunks_exact(PAGE).enumerate();
    for (number, page) in used.filter(|(_, page)| *page != [0; PAGE]) {
        let found = page
            .chunks_exact(4)
            .find(|word| halves.contains(&[word[0], word[1], word[2], word[3]]));
        ensure!(
            found.is_none(),
            "{found:x?} of the secret is in page {number:#x}"
        );
    }
    Ok(())
}

/// PEBS with general registers of `event`, every `period` of them.
fn enable_pebs(a: &mut CodeAssembler, event: u64, period: u64) -> Written {
    const ADAPTIVE: u64 = 1 << 34;
    let end = BUFFER + RECORD * RECORDS;
    let words = [BUFFER, BUFFER, end, end, FULL + 1 - period];
    for (word, at) in words.into_iter().zip((AREA + 0x20..).step_by(8)) {
        a.mov(rax, word)?;
        a.mov(qword_ptr(at), rax)?;
    }
    wrmsr(a, 0x600, AREA)?;
    wrmsr(a, 0x3f2, 2)?;
    wrmsr(a, 0x3f1, 1)?;
    wrmsr(a, 0x4c1, FULL + 1 - period)?;
    wrmsr(a, 0x186, event | ADAPTIVE)?;
    wrmsr(a, 0x38f, 1)
}

/// The addresses in the records.
fn records(ran: &LabRun) -> Result<Vec<[u64; 2]>> {
    let end = ran.word(INDEX)?;
    let records = (BUFFER..end).step_by(usize::try_from(RECORD)?);
    records
        .map(|record| Ok([ran.word(record + 8)?, ran.word(record + 0x28)?]))
        .collect()
}

fn check_records(ran: &LabRun) -> Result<usize> {
    let found = records(ran)?;
    let inside = found.as_flattened().iter().find(|at| is_in_smm(**at));
    ensure!(inside.is_none(), "a record of SMM: {found:x?}");
    ensure_secret(ran)?;
    Ok(found.len())
}

/// A clock notices the overflow while code in SMM exits. The record is of where the kernel
/// goes on, and comes although the kernel does not exit there.
fn pebs(lab: &Lab) -> Result<()> {
    const PERIOD: u64 = 1_000_000;
    let program = Program::new()?.kernel(|a| {
        let mut wait = a.create_label();
        Apic::X2.enable(a)?;
        enable_pebs(a, 0x42_003c, PERIOD)?;
        for _ in 0..3 {
            smi(a)?;
        }
        a.set_label(&mut wait)?;
        a.pause()?;
        a.mov(rax, BUFFER)?;
        a.cmp(qword_ptr(INDEX), rax)?;
        a.je(wait)?;
        wrmsr(a, 0x38f, 0)?;
        exit(a)
    })?;
    let guest = program.start(0).smm(exits_with_secret(200)?);
    let ran = lab.run(&Setup::clock("intel-v4,pebs=skid"), &guest)?;
    let found = check_records(&ran)?;
    ensure!(found > 0, "no record");
    ensure!(ran.outcome.written_to(u16::try_from(PORT)?).len() == 600);
    Ok(())
}

/// A guest whose instruction of unknown target waits as the SMI comes: it was not executed
/// with what code in SMM left behind.
fn before_a_jump(
    start: impl Fn(&mut CodeAssembler) -> Written,
    end: impl Fn(&mut CodeAssembler) -> Written,
) -> Result<MicroGuest> {
    let program = Program::new()?.kernel(|a| {
        Apic::X2.enable(a)?;
        start(a)?;
        for nops in 0..4 {
            let mut next = a.create_label();
            a.lea(rbx, ptr(next))?;
            a.mov(ecx, ICR)?;
            a.mov(eax, u32::try_from(SMI_TO_0).unwrap_or(0))?;
            a.xor(edx, edx)?;
            a.wrmsr()?;
            a.jmp(rbx)?;
            a.set_label(&mut next)?;
            for _ in 0..=nops {
                a.nop()?;
            }
        }
        end(a)?;
        exit(a)
    })?;
    // PUSHF stands in the kernel's memory wherever SMM has its code.
    let pushfs = vec![0x9c; 0x200];
    Ok(program
        .start(0)
        .code(SMM_ENTRY, pushfs)
        .smm(exits_with_secret(3)?))
}

/// Each of the SMIs was taken at its time, while the guest is stepped.
fn ensure_each(ran: &LabRun) -> Result<()> {
    let exits = ran.outcome.written_to(u16::try_from(PORT)?);
    ensure!(exits.len() == 12, "{} exits", exits.len());
    Ok(())
}

fn exact_pebs(lab: &Lab) -> Result<()> {
    const WORDS: u64 = 0xffff_ffff_ffff_ffff;
    for period in [1, 2] {
        let guest = before_a_jump(
            |a| {
                // What lies below the stack is the kernel's: nobody clears a TF there.
                a.mov(rax, WORDS)?;
                a.mov(qword_ptr(KERNEL_STACK - 0x100), rax)?;
                a.mov(rsp, KERNEL_STACK - 0x100)?;
                enable_pebs(a, 0x42_00c0, period)
            },
            |a| {
                wrmsr(a, 0x38f, 0)?;
                a.mov(rsp, KERNEL_STACK)
            },
        )?;
        let ran = lab.run(&Setup::step("intel-v4,pebs=exact"), &guest)?;
        ensure!(check_records(&ran)? > 0, "period {period}: no record");
        ensure_each(&ran)?;
        let word = ran.word(KERNEL_STACK - 0x100)?;
        ensure!(word == WORDS, "{word:x}");
    }
    Ok(())
}

/// Enables both samplers. `OP` counts ops or cycles.
fn enable_ibs(a: &mut CodeAssembler, op: u64, fetch: u64) -> Written {
    wrmsr(a, OP, 1 << 17 | op)?;
    wrmsr(a, FETCH, 1 << 48 | fetch)
}

/// Waits for a sample of each, and logs where they are.
fn log_samples(a: &mut CodeAssembler) -> Written {
    for (control, valid, place) in [(OP, 18, OP_RIP), (FETCH, 49, FETCH_LINEAR)] {
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.pause()?;
        a.mov(ecx, control)?;
        a.rdmsr()?;
        a.shl(rdx, 32)?;
        a.or(rax, rdx)?;
        a.bt(rax, valid)?;
        a.jae(again)?;
        for register in [place, OP_LINEAR] {
            a.mov(ecx, register)?;
            a.rdmsr()?;
            log_value(a)?;
        }
        wrmsr(a, control, 0)?;
    }
    Ok(())
}

fn check_samples(ran: &LabRun) -> Result<()> {
    let seen: Vec<u64> = ran.log.iter().map(|one| one.b << 32 | one.a).collect();
    ensure!(seen.len() == 4, "{seen:x?}");
    let inside = seen.iter().find(|at| is_in_smm(**at));
    ensure!(inside.is_none(), "a sample of SMM: {seen:x?}");
    let code = KERNEL_CODE..KERNEL_CODE + 0x1000;
    ensure!(
        code.contains(&seen[0]) && code.contains(&seen[2]),
        "{seen:x?}"
    );
    Ok(())
}

fn ibs(lab: &Lab) -> Result<()> {
    // A million cycles, and as many fetches.
    const MAX: u64 = 0xffff;
    let program = Program::new()?.kernel(|a| {
        Apic::X2.enable(a)?;
        enable_ibs(a, MAX, MAX)?;
        for _ in 0..3 {
            smi(a)?;
        }
        log_samples(a)?;
        exit(a)
    })?;
    let guest = program.start(0).smm(exits_with_secret(200)?);
    check_samples(&lab.run(&Setup::clock("amd-core,ibs=on"), &guest)?)
}

fn exact_ibs(lab: &Lab) -> Result<()> {
    const OPS: u64 = 1 << 19;
    let guest = before_a_jump(|a| enable_ibs(a, OPS | 1, 1), log_samples)?;
    let ran = lab.run(&Setup::step("amd-core,ibs=on"), &guest)?;
    ensure_each(&ran)?;
    check_samples(&ran)
}
