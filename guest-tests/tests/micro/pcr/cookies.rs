//! Which register carries the cookie, and random numbers for it.

use anyhow::{Result, ensure};
use arbiter::abi;
use guest_tests::micro::{DATA, Lab, Program, Test, Written, exit, log_value, wrmsr};
use iced_x86::code_asm::{
    CodeAssembler, dword_ptr, eax, ecx, edi, edx, esi, qword_ptr, r14, r15, rsi,
};
use vmm::micro::{KERNEL_CS, KERNEL_SS, SCRATCH, assemble_for};

use super::{ACCESS, KEY, access_key, alias, alias_select, key, rdpmc, setup, single};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "pcr::the_cookie_in_32_bit_code",
        run: compatibility_mode,
    },
    Test {
        name: "pcr::random_numbers",
        run: random,
    },
];

const GDT_SLOT: u64 = 0x5000 + 0x38;
const CS_32: u16 = 0x38;
/// A 32-bit code segment of CPL 0.
const CODE_32: u64 = 0x00cf_9b00_0000_ffff;
const AT_32: u64 = SCRATCH + 0xc000;
const COUNT: u64 = 0x1_2345_6789;

/// WRMSR that presents a cookie.
fn wrmsr_with(a: &mut CodeAssembler, cookie: u64, msr: u32, value: u64) -> Written {
    a.mov(rsi, cookie)?;
    wrmsr(a, msr, value)?;
    a.xor(esi, esi)
}

/// Reads the counter as compatibility mode sees it, by RDMSR and by RDPMC.
fn compatibility_mode(lab: &Lab) -> Result<()> {
    let low = u32::try_from(ACCESS & 0xffff_ffff)?;
    let high = u32::try_from(ACCESS >> 32)?;
    let data = |at: u64| u32::try_from(DATA + at);
    let (first, second, third) = (data(0)?, data(8)?, data(16)?);
    let code = assemble_for(32, AT_32, |a| {
        a.mov(esi, low)?;
        a.mov(edi, high)?;
        a.mov(ecx, alias(1))?;
        a.rdmsr()?;
        a.mov(dword_ptr(first), eax)?;
        a.mov(dword_ptr(first + 4), edx)?;
        a.mov(ecx, rdpmc(1))?;
        a.rdpmc()?;
        a.mov(dword_ptr(second), eax)?;
        a.mov(dword_ptr(second + 4), edx)?;
        // Without EDI it is another cookie.
        a.xor(edi, edi)?;
        a.mov(ecx, alias(1))?;
        a.rdmsr()?;
        a.mov(dword_ptr(third), eax)?;
        a.mov(dword_ptr(third + 4), edx)?;
        // More than 48 bits: #GP, whose handler goes on at R15.
        a.mov(edi, 1 << 16)?;
        a.rdmsr()
    })?;
    let program = Program::new()?.kernel(|a| {
        wrmsr(a, key(1), KEY)?;
        wrmsr_with(a, KEY, access_key(1), ACCESS)?;
        wrmsr_with(a, ACCESS, alias(1), COUNT)?;
        wrmsr_with(a, ACCESS, alias_select(1), 0)?;
        let mut end = a.create_label();
        a.lea(r15, qword_ptr(end))?;
        a.mov(r14, AT_32)?;
        a.push(i32::from(KERNEL_SS))?;
        a.push(0x6_0000)?;
        a.push(2)?;
        a.push(i32::from(CS_32))?;
        a.push(i32::try_from(AT_32).unwrap_or(0))?;
        a.iretq()?;
        a.set_label(&mut end)?;
        exit(a)
    })?;
    // The handler must return to 64-bit code.
    let program = program.handler(13, |a| {
        use iced_x86::code_asm::{rax, rsp};
        log_value(a)?;
        a.mov(qword_ptr(rsp + 8), r15)?;
        a.mov(rax, u64::from(KERNEL_CS))?;
        a.mov(qword_ptr(rsp + 16), rax)?;
        a.add(rsp, 8)?;
        a.iretq()
    })?;
    let guest = program
        .data(AT_32, code)
        .data(GDT_SLOT, CODE_32.to_le_bytes().to_vec())
        .start(0);
    let ran = lab.run(&setup(), &guest)?;
    let seen = [ran.word(DATA)?, ran.word(DATA + 8)?, ran.word(DATA + 16)?];
    ensure!(seen == [COUNT, COUNT, 0], "{seen:x?}");
    ensure!(ran.log.len() == 1, "one #GP at last: {:x?}", ran.log);
    Ok(())
}

fn random(lab: &Lab) -> Result<()> {
    const NUMBERS: u64 = 16;
    let guest = Program::new()?.kernel(|a| {
        for _ in 0..NUMBERS {
            a.mov(ecx, single(abi::MSR_RANDOM))?;
            a.rdmsr()?;
            log_value(a)?;
        }
        exit(a)
    })?;
    let ran = lab.run(&setup(), &guest.start(0))?;
    let mut numbers: Vec<u64> = ran.log.iter().map(|one| one.b << 32 | one.a).collect();
    let ones: u32 = numbers.iter().map(|number| number.count_ones()).sum();
    numbers.sort_unstable();
    numbers.dedup();
    ensure!(numbers.len() == 16, "{numbers:x?}");
    // 512 of 1024 are expected; 128 away is eight standard deviations.
    ensure!(ones.abs_diff(512) < 128, "{numbers:x?}");
    let seen = format!("{:x?}", ran.outcome.vcpus[0].events);
    ensure!(!seen.contains(&format!("{:x}", numbers[0])), "{seen}");
    Ok(())
}
