//! No clock of a machine falls, whichever of its vCPUs reads it.

use emu::Cpuid;
use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, dword_ptr, dx, eax, ecx, edx, qword_ptr, r8d, rax, rbx, rcx, rdx,
};

use super::{nobody, room, set_msr, word};
use crate::devices::GuestEnd;
use crate::emu::paravirt::SYSTEM_TIME;
use crate::micro::{KERNEL_CODE, MicroGuest, SCRATCH, Start, assemble};
use crate::vcpu::VcpuEnd;

/// Readings of each vCPU: several turns of each.
const READINGS: u32 = 4_000;
/// Ticks that one takes at the least.
const TICKS: u64 = 80;

/// Who reads and compares has it, so that no turn ends between the two.
const LOCK: u64 = SCRATCH;
const DONE: u64 = SCRATCH + 8;
/// The last reading of any vCPU, and how often one was below that before it.
const TSC: Last = Last(SCRATCH + 16);
const CLOCK: Last = Last(SCRATCH + 32);
/// Readings before which another vCPU had read, and who read last.
const CHANGES: u64 = SCRATCH + 48;
const READER: u64 = SCRATCH + 56;
/// Pages of kvm-clock.
const PAGES: u64 = SCRATCH + 0x1000;

/// Where the last reading of a clock is kept, and behind it how often one fell.
#[derive(Clone, Copy)]
struct Last(u64);

impl Last {
    /// Takes the reading in RAX.
    fn take(self, a: &mut CodeAssembler) -> Result<(), IcedError> {
        let mut later = a.create_label();
        a.mov(rbx, self.0)?;
        a.cmp(rax, qword_ptr(rbx))?;
        a.mov(qword_ptr(rbx), rax)?;
        a.jae(later)?;
        a.add(qword_ptr(rbx + 8), 1)?;
        a.set_label(&mut later)?;
        a.nop()
    }
}

fn code_of(vcpu: u8) -> u64 {
    KERNEL_CODE + 0x1000 * u64::from(vcpu)
}

fn page_of(vcpu: u8) -> u64 {
    PAGES + 64 * u64::from(vcpu)
}

/// RAX becomes EDX:EAX.
fn whole(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.shl(rdx, 32)?;
    a.or(rax, rdx)
}

/// RAX becomes the time of kvm-clock by the vCPU's own page, as `pvclock-abi.h` has it with a
/// shift of 1.
fn read_clock(a: &mut CodeAssembler, vcpu: u8) -> Result<(), IcedError> {
    a.rdtscp()?;
    whole(a)?;
    a.mov(rbx, page_of(vcpu))?;
    a.sub(rax, qword_ptr(rbx + 8))?;
    a.shl(rax, 1)?;
    a.mov(ecx, dword_ptr(rbx + 24))?;
    a.mul(rcx)?;
    a.shrd(rax, rdx, 32)?;
    a.add(rax, qword_ptr(rbx + 16))
}

/// Both clocks, while it has the lock.
fn read_both(a: &mut CodeAssembler, vcpu: u8) -> Result<(), IcedError> {
    let (mut wait, mut has) = (a.create_label(), a.create_label());
    a.set_label(&mut wait)?;
    a.mov(rbx, LOCK)?;
    a.mov(eax, 1)?;
    a.xchg(dword_ptr(rbx), eax)?;
    a.test(eax, eax)?;
    a.je(has)?;
    a.pause()?;
    a.jmp(wait)?;
    a.set_label(&mut has)?;
    let mut same = a.create_label();
    a.mov(rbx, READER)?;
    a.mov(eax, u32::from(vcpu))?;
    a.xchg(qword_ptr(rbx), rax)?;
    a.cmp(eax, i32::from(vcpu))?;
    a.je(same)?;
    a.mov(rbx, CHANGES)?;
    a.add(qword_ptr(rbx), 1)?;
    a.set_label(&mut same)?;
    a.rdtsc()?;
    whole(a)?;
    TSC.take(a)?;
    read_clock(a, vcpu)?;
    CLOCK.take(a)?;
    a.mov(rbx, LOCK)?;
    a.mov(dword_ptr(rbx), 0)
}

/// What vCPU `vcpu` of `count` does; the last one sets its own TSC to `tsc` first, if that is
/// given.
fn reader(
    a: &mut CodeAssembler,
    (vcpu, count): (u8, u8),
    tsc: Option<u64>,
) -> Result<(), IcedError> {
    set_msr(a, SYSTEM_TIME, page_of(vcpu) | 1)?;
    if let Some(tsc) = tsc.filter(|_| vcpu == count - 1) {
        set_msr(a, 0x10, tsc)?;
    }
    a.mov(r8d, READINGS)?;
    let (mut again, mut work) = (a.create_label(), a.create_label());
    a.set_label(&mut again)?;
    // The assembler takes one label an instruction.
    a.nop()?;
    read_both(a, vcpu)?;
    // Rounds of different lengths: turns end anywhere in them.
    a.mov(ecx, 30 + 7 * u32::from(vcpu))?;
    a.set_label(&mut work)?;
    a.dec(ecx)?;
    a.jne(work)?;
    a.dec(r8d)?;
    a.jne(again)?;
    a.mov(rbx, DONE)?;
    a.lock().add(qword_ptr(rbx), 1)?;
    let mut wait = a.create_label();
    a.set_label(&mut wait)?;
    a.pause()?;
    a.cmp(qword_ptr(rbx), i32::from(count))?;
    a.jb(wait)?;
    a.xor(eax, eax)?;
    a.mov(edx, 0xf4)?;
    a.out(dx, eax)?;
    a.hlt()
}

/// How often TSC and kvm-clock fell on `count` vCPUs.
fn falls(count: u8, tsc: Option<u64>) -> [u64; 2] {
    assert!(Cpuid::implemented().answer(0x8000_0001, 0).edx >> 27 & 1 != 0);
    let guest = (0..count).fold(MicroGuest::new(), |guest, vcpu| {
        let at = code_of(vcpu);
        let code = assemble(at, |a| reader(a, (vcpu, count), tsc)).expect("code");
        guest.code(at, code).start(Start::at(at, 0))
    });
    let (mut room, _) = room(&guest, nobody);
    assert_eq!(room.run().end, VcpuEnd::Guest(GuestEnd::TestExit(0)));
    assert_eq!(word(&room, DONE), u64::from(count));
    // They read in turns, not one behind the other.
    let several = if count > 1 { 4 * u64::from(count) } else { 0 };
    let changes = word(&room, CHANGES);
    assert!(changes >= several, "{changes} changes");
    let readings = u64::from(READINGS) * u64::from(count);
    let clock = word(&room, CLOCK.0);
    assert!(clock > readings * TICKS, "{clock}");
    assert!(clock <= room.now(), "{clock} is not over at {}", room.now());
    [TSC, CLOCK].map(|last| word(&room, last.0 + 8))
}

#[test]
fn no_clock_ever_falls_on_1_2_4_and_8_vcpus() {
    for count in [1, 2, 4, 8] {
        assert_eq!(falls(count, None), [0, 0], "{count} vCPUs");
    }
}

/// A guest that sets the TSC of one vCPU sees it fall, and its clock goes on.
#[test]
fn a_tsc_that_the_guest_sets_falls_and_its_clock_does_not() {
    let [tsc, clock] = falls(4, Some(1 << 40));
    assert!(tsc >= 3, "{tsc}");
    assert_eq!(clock, 0);
}
