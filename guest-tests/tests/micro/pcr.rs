//! Counter reservations as guests meet them (`docs/reference/pcr.md`).

pub(crate) mod access;
pub(crate) mod asking;
pub(crate) mod cookies;
pub(crate) mod guard;
pub(crate) mod interrupts;
pub(crate) mod layers;
pub(crate) mod replayed;

use arbiter::abi;
use guest_tests::micro::{DATA, LabRun, Op, Setup, Written};
use iced_x86::code_asm::{CodeAssembler, ecx, qword_ptr, rax, rcx, rdx};
use vmm::micro::MicroPcr;

use crate::overflow::Apic;

/// Management and access cookies.
const KEY: u64 = 0x1234_5678_9abc;
const OTHER_KEY: u64 = 0xcba9_8765_4321;
const ACCESS: u64 = 0x0f1e_2d3c_4b5a;

const CR4_PCE: u64 = 1 << 8;

/// The legacy registers of `amd-core`'s counter `n`.
const fn select(n: u32) -> u32 {
    0xc001_0200 + 2 * n
}

const fn counter(n: u32) -> u32 {
    0xc001_0201 + 2 * n
}

/// The register at `offset` of the block, of position `n`.
const fn pcr(offset: u32, n: u32) -> u32 {
    abi::MSR_BASE + offset + n
}

const fn key(n: u32) -> u32 {
    pcr(abi::MSR_MANAGEMENT_KEY, n)
}

const fn access_key(n: u32) -> u32 {
    pcr(abi::MSR_ACCESS_KEY, n)
}

const fn control(n: u32) -> u32 {
    pcr(abi::MSR_CONTROL, n)
}

const fn drop_value(n: u32) -> u32 {
    pcr(abi::MSR_DROP_VALUE, n)
}

const fn alias(n: u32) -> u32 {
    pcr(abi::MSR_COUNTER, n)
}

const fn alias_select(n: u32) -> u32 {
    pcr(abi::MSR_SELECT, n)
}

const fn status(n: u32) -> u32 {
    pcr(abi::MSR_STATUS, n)
}

/// A register of which there is one.
const fn single(offset: u32) -> u32 {
    abi::MSR_BASE + offset
}

/// RDPMC's ECX for counter `n` with a cookie.
const fn rdpmc(n: u32) -> u32 {
    abi::RDPMC_COOKIE + n
}

/// Where [`take_notice`] counts the notices that it took.
const TAKEN: u64 = DATA;
/// Where it leaves the last one.
const NOTICE: u64 = DATA + 8;

/// The handler of a notice's interrupt: takes the notice.
fn take_notice(a: &mut CodeAssembler) -> Written {
    a.push(rax)?;
    a.push(rcx)?;
    a.push(rdx)?;
    a.mov(ecx, single(abi::MSR_NOTICE))?;
    a.rdmsr()?;
    a.shl(rdx, 32)?;
    a.or(rax, rdx)?;
    a.mov(qword_ptr(NOTICE), rax)?;
    a.inc(qword_ptr(TAKEN))?;
    Apic::X2.end_of_interrupt(a)?;
    a.pop(rdx)?;
    a.pop(rcx)?;
    a.pop(rax)?;
    a.iretq()
}

/// `STATUS` of a counter that the kernel holds.
const KERNELS: u64 = abi::STATUS_RESERVED | abi::LAYER_KERNEL << abi::STATUS_OWNER_SHIFT;

/// Reserves PMC1 for whoever runs, and keeps others from it.
const TAKE: [Op; 2] = [
    Op::Write(key(1), KEY),
    Op::With(KEY, &Op::Write(access_key(1), ACCESS)),
];

fn setup() -> Setup {
    Setup::clock("amd-core")
}

fn with(pcr: MicroPcr) -> Setup {
    Setup {
        pcr: Some(pcr),
        ..setup()
    }
}

/// Words of what was decided on vCPU 0, and how often in a row: "reserved",
/// "dropped-read held".
fn decisions(ran: &LabRun) -> Vec<(String, usize)> {
    let decisions = &ran.outcome.vcpus[0].decisions;
    let words = decisions.iter().map(|record| {
        let reason = record.event.reason();
        let reason = reason.map_or(String::new(), |reason| format!(" {}", reason.name()));
        format!("{}{reason}", record.event.name())
    });
    let words: Vec<String> = words.collect();
    let alike = words.chunk_by(|one, other| one == other);
    alike.map(|run| (run[0].clone(), run.len())).collect()
}

/// The same as one text.
fn told(ran: &LabRun) -> String {
    let one = |(word, times): (String, usize)| match times {
        1 => word,
        times => format!("{word} x{times}"),
    };
    let told: Vec<String> = decisions(ran).into_iter().map(one).collect();
    told.join(", ")
}
