//! PEBS: records in a guest's own memory.

use anyhow::{Result, ensure};
use guest_tests::micro::Op::{Read, ReadGp, Write, WriteGp};
use guest_tests::micro::{
    DATA, Lab, LabRun, Op, Program, Script, Setup, Test, Written, enter_user, exit, log_value,
    spin, wrmsr,
};
use iced_x86::code_asm::{
    CodeAssembler, byte_ptr, dword_ptr, eax, ebx, ecx, edx, qword_ptr, rax, rbx, rcx, rdi, rdx,
    rsi, rsp,
};
use iced_x86::{Decoder, DecoderOptions};
use vmm::micro::{KERNEL_CODE, KERNEL_STACK, USER_CODE, assemble};

use crate::overflow::{Apic, TAKEN};

const EXACT: &str = "intel-v4,pebs=exact";
const SKID: &str = "intel-v4,pebs=skid";

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "pebs::registers",
        run: registers,
    },
    Test {
        name: "pebs::exact_at_cpl_0",
        run: |lab| exact(lab, 0),
    },
    Test {
        name: "pebs::exact_at_cpl_3",
        run: |lab| exact(lab, 3),
    },
    Test {
        name: "pebs::groups_of_a_record",
        run: groups,
    },
    Test {
        name: "pebs::format_3",
        run: format_3,
    },
    Test {
        name: "pebs::addresses_of_loads_and_stores",
        run: data_addresses,
    },
    Test {
        name: "pebs::skidding_records_and_their_pmis",
        run: skidding,
    },
    Test {
        name: "pebs::bad_areas",
        run: bad_areas,
    },
];

/// The debug store area, and its buffer; behind the words that other tests use.
const AREA: u64 = DATA + 0x400;
const BUFFER: u64 = DATA + 0x1000;
const BASE: u64 = 0x20;
const INDEX: u64 = 0x28;
const RESET0: u64 = 0x40;
/// A region of code whose instructions are known.
const REGION: u64 = 0x11_0000;
const ROUNDS: u32 = 7;
const FULL: u64 = 0xffff_ffff_ffff;
const OVF_BUFFER: u64 = 1 << 62;
const GLOBAL_CONTROL: u32 = 0x38f;
const ADAPTIVE: u64 = 1 << 34;

fn registers(lab: &Lab) -> Result<()> {
    let check = |name, model, ops: &[Op]| {
        let script = Script {
            name,
            cr4: 0,
            kernel: ops,
            user: &[],
        };
        script.check(lab, &Setup::clock(model)).map(drop)
    };
    let absent = [
        ReadGp(0x3f1),
        WriteGp(0x3f1, 0),
        ReadGp(0x3f2),
        ReadGp(0x600),
    ];
    check("without PEBS", "intel-v4", &absent)?;
    let format_4 = [
        Read(0x345, 0x64c0),
        Write(0x3f1, 0x7_0000_000f),
        Read(0x3f1, 0x7_0000_000f),
        WriteGp(0x3f1, 1 << 4),
        Write(0x3f2, 7),
        WriteGp(0x3f2, 8),
        Read(0x3f2, 7),
        Write(0x600, 0xffff_8000_0000_0000),
        WriteGp(0x600, 0x8000_0000_0000),
        Read(0x600, 0xffff_8000_0000_0000),
        Write(0x186, ADAPTIVE),
        Write(0x38d, 1 << 40),
    ];
    check("format 4", SKID, &format_4)?;
    let format_3 = [
        Read(0x345, 0x23c0),
        Write(0x3f1, 0xf),
        WriteGp(0x3f1, 1 << 32),
        ReadGp(0x3f2),
        WriteGp(0x186, ADAPTIVE),
    ];
    check("format 3", "intel-v4,pebs=skid,pebs-format=3", &format_3)?;
    // Read-only bits stay as they are, and what is KVM's is KVM's.
    let program = Program::new()?.kernel(|a| {
        let read = |a: &mut CodeAssembler| {
            a.mov(ecx, 0x1a0)?;
            a.rdmsr()?;
            log_value(a)
        };
        read(a)?;
        wrmsr(a, 0x1a0, 0x1001)?;
        read(a)?;
        exit(a)
    })?;
    let ran = lab.run(&Setup::clock(SKID), &program.start(0))?;
    let seen: Vec<u64> = ran.log.iter().map(|one| one.a & 0x1881).collect();
    ensure!(
        seen.len() == 2 && seen.iter().all(|one| one & 0x1880 == 0x880) && seen[1] & 1 == 1,
        "MISC_ENABLE {seen:x?}"
    );
    Ok(())
}

/// Sets up the area for `records` and a `threshold` as many records behind the base, and
/// PEBS of the first counter.
fn prepare(a: &mut CodeAssembler, size: u64, records: u64, threshold: u64, period: u64) -> Written {
    let words = [
        BUFFER,
        BUFFER,
        BUFFER + size * records,
        BUFFER + size * threshold,
        FULL + 1 - period,
    ];
    for (word, at) in words.into_iter().zip((AREA + BASE..).step_by(8)) {
        a.mov(rax, word)?;
        a.mov(qword_ptr(at), rax)?;
    }
    wrmsr(a, GLOBAL_CONTROL, 0)?;
    wrmsr(a, 0x600, AREA)?;
    wrmsr(a, 0x3f1, 1)?;
    wrmsr(a, 0x4c1, FULL + 1 - period)
}

/// A loop; its instructions are `mov`, then as often as it goes round `nop`, `lea`, `dec`
/// and `jne`.
fn region(a: &mut CodeAssembler) -> Written {
    let mut again = a.create_label();
    a.mov(ebx, ROUNDS)?;
    a.set_label(&mut again)?;
    a.nop()?;
    a.lea(rax, qword_ptr(rax + 1))?;
    a.dec(ebx)?;
    a.jne(again)
}

/// Where the region's instructions are that retire, in order.
fn executed(at: u64) -> Result<Vec<u64>> {
    let mut a = CodeAssembler::new(64)?;
    region(&mut a)?;
    let code = a.assemble(at)?;
    let decoder = Decoder::with_ip(64, &code, at, DecoderOptions::NONE);
    let places: Vec<u64> = decoder.into_iter().map(|insn| insn.ip()).collect();
    let [first, round @ ..] = places.as_slice() else {
        anyhow::bail!("an empty region");
    };
    let rounds = (0..ROUNDS).flat_map(|_| round.iter().copied());
    Ok(std::iter::once(*first).chain(rounds).collect())
}

/// The region at CPL 0, with `event` in the first counter. Three moves stop it.
fn at_cpl_0(
    event: u64,
    size: u64,
    period: u64,
    more: fn(&mut CodeAssembler) -> Written,
) -> Result<Program> {
    Program::new()?
        .code(REGION, |a| {
            region(a)?;
            wrmsr(a, GLOBAL_CONTROL, 0)?;
            exit(a)
        })?
        .kernel(|a| {
            prepare(a, size, 40, 40, period)?;
            more(a)?;
            wrmsr(a, 0x186, event)?;
            a.mov(rbx, REGION)?;
            wrmsr(a, GLOBAL_CONTROL, 1)?;
            a.jmp(rbx)
        })
}

/// The addresses in the records, each of `size` bytes with the address at `at`.
fn addresses(ran: &LabRun, size: u64, at: u64) -> Result<Vec<u64>> {
    let end = ran.word(AREA + INDEX)?;
    let records = (BUFFER..end).step_by(usize::try_from(size)?);
    records.map(|record| ran.word(record + at)).collect()
}

/// Every `period + 1`st of the events.
fn sampled<T>(events: impl Iterator<Item = T>, period: u64) -> Result<Vec<T>> {
    let step = usize::try_from(period)? + 1;
    Ok(events.skip(step - 1).step_by(step).collect())
}

fn exact(lab: &Lab, cpl: u8) -> Result<()> {
    let all = executed(if cpl == 0 { REGION } else { USER_CODE })?;
    let last = all.last().copied();
    for period in [1, 2, 3, 5, 8] {
        for branches in [false, true] {
            let event: u64 = if branches { 0xc4 } else { 0xc0 };
            let program = if cpl == 0 {
                at_cpl_0(event | 0x42_0000, 32, period, |_| Ok(()))?
            } else {
                Program::new()?
                    .user(|a| {
                        region(a)?;
                        a.ud2()
                    })?
                    .kernel(|a| {
                        prepare(a, 32, 40, 40, period)?;
                        wrmsr(a, 0x186, event | 0x41_0000)?;
                        wrmsr(a, GLOBAL_CONTROL, 1)?;
                        enter_user(a, 0)
                    })?
            };
            let ran = lab.run(&Setup::step(EXACT), &program.start(0))?;
            let found = addresses(&ran, 32, 8)?;
            // At CPL 0 the way into the region counts, and the moves that stop it.
            let jump = (cpl == 0).then_some(0);
            let ran_through = all.iter().copied();
            let events: Vec<u64> = jump
                .into_iter()
                .chain(ran_through)
                .filter(|at| !branches || *at == 0 || Some(*at) == last)
                .collect();
            let mut expected = sampled(events.iter().copied(), period)?;
            let mut found_here = found.clone();
            for places in [&mut expected, &mut found_here] {
                places.retain(|at| all.contains(at));
            }
            ensure!(
                found_here == expected,
                "CPL {cpl}, period {period}, branches {branches}: {found:x?}, not {expected:x?}"
            );
            ensure!(!expected.is_empty() || period > 5, "no record to look at");
        }
    }
    Ok(())
}

fn groups(lab: &Lab) -> Result<()> {
    // Basic, memory and general registers: 208 bytes.
    let event = 0x42_00c0 | ADAPTIVE;
    let program = at_cpl_0(event, 208, 3, |a| wrmsr(a, 0x3f2, 3))?;
    let ran = lab.run(&Setup::step(EXACT), &program.start(0))?;
    let all = executed(REGION)?;
    let found = addresses(&ran, 208, 8)?;
    let (mut tsc, mut round) = (0, 0);
    for (at, record) in found.iter().zip((BUFFER..).step_by(208)) {
        let word = |offset: u64| ran.word(record + offset);
        ensure!(word(0)? == 208 << 48 | 3, "format {:#x}", word(0)?);
        ensure!(word(0x10)? == 1, "counters {:#x}", word(0x10)?);
        ensure!(word(0x18)? > tsc, "the TSC goes back");
        tsc = word(0x18)?;
        for offset in (0x20..0x40).step_by(8) {
            ensure!(word(offset)? == 0, "memory at {offset:#x}");
        }
        let flags = word(0x40)?;
        ensure!(flags & 0x102 == 2, "RFLAGS {flags:#x}");
        // Instructions of the loop are followed by the next one.
        let Some(place) = all[1..5].iter().position(|one| one == at) else {
            continue;
        };
        let (next, counter) = (word(0x48)?, word(0x68)?);
        if place < 3 {
            ensure!(next == all[place + 2], "{at:#x} leads to {next:#x}");
        }
        // RBX falls with DEC, and records come in order.
        let done = u64::from(ROUNDS) - counter;
        ensure!(done >= round && done <= ROUNDS.into(), "RBX is {counter}");
        round = done;
    }
    ensure!(found.len() >= 5, "{found:x?}");
    Ok(())
}

fn format_3(lab: &Lab) -> Result<()> {
    let program = at_cpl_0(0x42_00c0, 200, 4, |_| Ok(()))?;
    let setup = Setup::step("intel-v3,pebs=exact,pebs-format=3");
    let ran = lab.run(&setup, &program.start(0))?;
    let all = executed(REGION)?;
    let expected = sampled(std::iter::once(0).chain(all.iter().copied()), 4)?;
    let mut found = addresses(&ran, 200, 0xb0)?;
    found.retain(|at| all.contains(at));
    ensure!(found == expected, "{found:x?}, not {expected:x?}");
    let behind = ran.word(BUFFER + 8)?;
    ensure!(all.contains(&behind), "RIP behind it is {behind:#x}");
    ensure!(ran.word(BUFFER + 0x90)? == 1, "applicable counters");
    Ok(())
}

/// One instruction of [`accesses`]: its place in the code, what it loads and what it stores.
type Access = (usize, Option<u64>, Option<u64>);
/// Instructions before they begin again.
const ROUND: usize = 11;

/// Goes three times through instructions with operands of each kind.
fn accesses(a: &mut CodeAssembler) -> Written {
    for _ in 0..3 {
        a.nop()?;
        a.mov(rax, qword_ptr(DATA))?;
        a.mov(dword_ptr(DATA + 8), eax)?;
        a.add(byte_ptr(DATA + 0x10), 1)?;
        a.lea(rax, qword_ptr(rax + 1))?;
        a.push(rax)?;
        a.push(qword_ptr(DATA + 0x18))?;
        a.movsq()?;
        a.pop(rcx)?;
        a.pop(rcx)?;
        a.mov(ecx, dword_ptr(rdi + 4))?;
    }
    Ok(())
}

/// What that does. MOVS goes on from one round to the next.
fn accessed() -> Vec<Access> {
    let (mut from, mut to) = (DATA + 0x40, DATA + 0x80);
    let mut all = Vec::new();
    for round in 0..3 {
        let [upper, lower] = [8, 16].map(|below| KERNEL_STACK - below);
        let moved = (Some(from), Some(to));
        (from, to) = (from + 8, to + 8);
        let round_of: [_; ROUND] = [
            (None, None),
            (Some(DATA), None),
            (None, Some(DATA + 8)),
            (Some(DATA + 0x10), Some(DATA + 0x10)),
            (None, None),
            (None, Some(upper)),
            (Some(DATA + 0x18), Some(lower)),
            moved,
            (Some(lower), None),
            (Some(upper), None),
            (Some(to + 4), None),
        ];
        let places = (round * ROUND..).zip(round_of);
        all.extend(places.map(|(place, (load, store))| (place, load, store)));
    }
    all
}

fn data_addresses(lab: &Lab) -> Result<()> {
    const LOADS: u64 = 0x42_81d0;
    const STORES: u64 = 0x42_82d0;
    const INSTRUCTIONS: u64 = 0x42_00c0;
    let code = assemble(REGION, accesses)?;
    let decoder = Decoder::with_ip(64, &code, REGION, DecoderOptions::NONE);
    let places: Vec<u64> = decoder.into_iter().map(|insn| insn.ip()).collect();
    // Bytes of a record with memory; where the instruction's address is, and the operand's.
    let formats = [
        (EXACT, 64, [8, 0x20]),
        ("intel-v4,pebs=exact,pebs-format=3", 200, [0xb0, 0x98]),
    ];
    for (model, size, [ip, address]) in formats {
        for (event, period) in [
            (LOADS, 1),
            (LOADS, 2),
            (STORES, 1),
            (STORES, 3),
            (INSTRUCTIONS, 1),
        ] {
            let adaptive = if size == 64 { ADAPTIVE } else { 0 };
            let program = Program::new()?
                .code(REGION, |a| {
                    accesses(a)?;
                    wrmsr(a, GLOBAL_CONTROL, 0)?;
                    exit(a)
                })?
                .kernel(|a| {
                    prepare(a, size, 40, 40, period)?;
                    if adaptive != 0 {
                        wrmsr(a, 0x3f2, 1)?;
                    }
                    wrmsr(a, 0x186, event | adaptive)?;
                    a.mov(rsp, KERNEL_STACK)?;
                    a.mov(rsi, DATA + 0x40)?;
                    a.mov(rdi, DATA + 0x80)?;
                    a.mov(rbx, REGION)?;
                    wrmsr(a, GLOBAL_CONTROL, 1)?;
                    a.jmp(rbx)
                })?;
            let ran = lab.run(&Setup::step(model), &program.start(0))?;
            let end = ran.word(AREA + INDEX)?;
            let records = (BUFFER..end).step_by(usize::try_from(size)?);
            let found: Result<Vec<_>> = records
                .map(|record| {
                    let word = |offset| ran.word(record + offset);
                    ensure!(word(address + 8)? == 0, "a source of the data");
                    ensure!(word(address + 16)? == 0, "a latency");
                    Ok((word(ip)?, word(address)?))
                })
                .collect();
            let mut found = found?;
            let context = format!("{model}, event {event:#x}, period {period}: {found:x?}");
            let what = |(place, load, store): Access| {
                let address = match event {
                    LOADS => load,
                    STORES => store,
                    // MOVS has its destination first.
                    _ if place % ROUND == 7 => store,
                    _ => load.or(store),
                };
                (places[place], address.unwrap_or(0))
            };
            // The jump there is an instruction, too, and the moves behind.
            let jump = (event == INSTRUCTIONS).then_some((0, 0));
            let all = jump.into_iter().chain(accessed().into_iter().map(what));
            let events = all.filter(|(_, address)| event == INSTRUCTIONS || *address != 0);
            let mut expected = sampled(events, period)?;
            for ends in [&mut found, &mut expected] {
                ends.retain(|(at, _)| places.contains(at));
            }
            ensure!(found == expected, "{context}, not {expected:x?}");
        }
    }
    Ok(())
}

/// Records are where the guest stands; each PMI has the buffer's bit and no counter's.
fn skidding(lab: &Lab) -> Result<()> {
    const PMIS: i32 = 5;
    const RECORDS: u64 = 3;
    const PERIOD: u64 = 400_000;
    let program = Program::new()?
        .handler(2, |a| {
            a.push(rax)?;
            a.push(rcx)?;
            a.push(rdx)?;
            // A full buffer reloads no counter: on a slow KVM it is full before the handler runs.
            wrmsr(a, GLOBAL_CONTROL, 0)?;
            wrmsr(a, 0x4c1, (1 << 48) - PERIOD)?;
            a.mov(ecx, 0x38e)?;
            a.rdmsr()?;
            log_value(a)?;
            a.mov(rax, qword_ptr(AREA + INDEX))?;
            a.xor(edx, edx)?;
            log_value(a)?;
            a.mov(rax, BUFFER)?;
            a.mov(qword_ptr(AREA + INDEX), rax)?;
            wrmsr(a, 0x390, OVF_BUFFER)?;
            Apic::X2.route(a, 0x400)?;
            wrmsr(a, GLOBAL_CONTROL, 1)?;
            a.inc(qword_ptr(TAKEN))?;
            a.pop(rdx)?;
            a.pop(rcx)?;
            a.pop(rax)?;
            a.iretq()
        })?
        .code(REGION, |a| {
            let mut again = a.create_label();
            a.set_label(&mut again)?;
            a.mov(rax, qword_ptr(TAKEN))?;
            a.cmp(rax, PMIS)?;
            a.jb(again)?;
            wrmsr(a, GLOBAL_CONTROL, 0)?;
            exit(a)
        })?
        .kernel(|a| {
            prepare(a, 32, 16, RECORDS, PERIOD)?;
            Apic::X2.enable(a)?;
            Apic::X2.route(a, 0x400)?;
            // INT means nothing with PEBS.
            wrmsr(a, 0x186, 0x53_013c)?;
            a.mov(rbx, REGION)?;
            wrmsr(a, GLOBAL_CONTROL, 1)?;
            a.jmp(rbx)
        })?;
    let ran = lab.run(&Setup::clock(SKID), &program.start(0))?;
    let seen: Vec<u64> = ran.log.iter().map(|one| one.b << 32 | one.a).collect();
    ensure!(seen.len() >= 2 * usize::try_from(PMIS)?, "{seen:x?}");
    for pmi in seen.chunks_exact(2) {
        ensure!(pmi[0] == OVF_BUFFER, "status {seen:x?}");
        let bytes = pmi[1] - BUFFER;
        ensure!(
            bytes >= 32 * RECORDS && bytes.is_multiple_of(32),
            "index {seen:x?}"
        );
    }
    for record in (BUFFER..BUFFER + 32 * RECORDS).step_by(32) {
        let ip = ran.word(record + 8)?;
        // The loop, or the handler.
        let code = [REGION, Program::handler_address(2), KERNEL_CODE];
        ensure!(
            code.iter().any(|from| (*from..from + 0x400).contains(&ip)),
            "a record at {ip:#x}"
        );
        ensure!(ran.word(record)? == 32 << 48, "format");
        ensure!(ran.word(record + 0x10)? == 1, "counters");
        ensure!(ran.word(record + 0x18)? != 0, "TSC");
    }
    Ok(())
}

/// What cannot be written is not, and the guest hears of nothing.
fn bad_areas(lab: &Lab) -> Result<()> {
    // The third large page of the identity map, mapped a second time and read-only.
    const ENTRY: u64 = 0x3010;
    const ALIAS: u64 = 0x40_0000;
    const READ_ONLY_AT_2_MIB: i32 = 0x20_0085;
    const ORIGINAL: u64 = 0x20_0000;
    let alias = |at: u64| at - ORIGINAL + ALIAS;
    // The area, the buffer, CR0.WP, and whether there is a record.
    let cases = [
        (AREA, BUFFER, true, true),
        (alias(AREA), BUFFER, false, true),
        (alias(AREA), BUFFER, true, false),
        (AREA, alias(BUFFER), true, false),
        (AREA, alias(BUFFER), false, true),
        // Behind the memory; in the page of the local APIC; at the ends of the halves.
        (0x4000_0000, BUFFER, false, false),
        (0xfee0_0000, BUFFER, false, false),
        (0x7fff_ffff_fff8, BUFFER, false, false),
        (0xffff_ffff_ffff_fff8, BUFFER, false, false),
        (AREA, 0x4000_0000, false, false),
        (AREA, 0xfee0_0000, false, false),
        (AREA, 0x8000_0000_0000, false, false),
        (AREA, FULL, false, false),
    ];
    for (area, buffer, protect, expected) in cases {
        let program = Program::new()?.kernel(|a| {
            a.mov(qword_ptr(ENTRY), READ_ONLY_AT_2_MIB)?;
            a.mov(rax, iced_x86::code_asm::cr0)?;
            a.and(eax, !(1 << 16))?;
            if protect {
                a.or(eax, 1 << 16)?;
            }
            a.mov(iced_x86::code_asm::cr0, rax)?;
            prepare(a, 32, 16, 16, 100)?;
            for at in [AREA + BASE, AREA + INDEX] {
                a.mov(rax, buffer)?;
                a.mov(qword_ptr(at), rax)?;
            }
            a.mov(rax, buffer.saturating_add(0x100))?;
            a.mov(qword_ptr(AREA + 0x30), rax)?;
            a.mov(rax, u64::MAX)?;
            a.mov(qword_ptr(AREA + 0x38), rax)?;
            wrmsr(a, 0x600, area)?;
            wrmsr(a, 0x186, 0x43_00c0)?;
            wrmsr(a, GLOBAL_CONTROL, 1)?;
            spin(a, 80)?;
            wrmsr(a, GLOBAL_CONTROL, 0)?;
            a.mov(ecx, 0x38e)?;
            a.rdmsr()?;
            log_value(a)?;
            exit(a)
        })?;
        let ran = lab.run(&Setup::step(EXACT), &program.start(0))?;
        let index = ran.word(AREA + INDEX)?;
        let told = format!("area {area:#x}, buffer {buffer:#x}, WP {protect}");
        ensure!((index != buffer) == expected, "{told}: index {index:#x}");
        ensure!((ran.word(BUFFER)? != 0) == expected, "{told}: a record");
        let status: Vec<u64> = ran.log.iter().map(|one| one.b << 32 | one.a).collect();
        ensure!(status == [0], "{told}: status {status:x?}");
        ensure!(ran.word(AREA + RESET0)? == FULL + 1 - 100, "{told}");
    }
    Ok(())
}
