//! The guest that times its own PMU accesses.
//!
//! RDTSC before and after each access, in the guest: what is measured is the
//! whole round trip as the guest feels it, and nothing is added to the host's
//! side of it.

use iced_x86::code_asm::{
    CodeAssembler, al, dword_ptr, dx, eax, ebx, ecx, edx, esi, r8, r9d, r13, rax, rdi, rdx, rsp,
};
use pmu_virt::PmuModel;
use serde::Serialize;
use vmm::micro::{
    KERNEL_CODE, MicroError, MicroGuest, SCRATCH, Start, UNEXPECTED_VECTOR_PORT, USER_CODE,
    USER_CS, USER_SS, USER_STACK, assemble,
};

use super::harness::DONE;
use super::registers::{PmuMsrs, Written};
use super::sources::{INT, USR_OS_ENABLE};

/// Samples that the guest takes before it reports.
pub(super) const BATCH: u32 = 100;
/// Samples by the place of the access in [`Access::ALL`].
pub(super) type AccessSamples = [Vec<u32>; Access::ALL.len()];

/// The port that a #GP handler which does nothing else writes to.
pub(super) const GP_PORT: u16 = 0xe2;

const MAIN: u64 = KERNEL_CODE + 0x1000;
/// In the page of [`MAIN`], behind its code.
const NEAR_USER: u64 = MAIN + 0x800;
const NEAR_GP_HANDLER: u64 = MAIN + 0xc00;
const FAR_GP_HANDLER: u64 = KERNEL_CODE + 0x2000;
/// The handler that does one OUT, from the other one.
const REFERENCE: u64 = 0x100;
const USER_DONE: u64 = KERNEL_CODE + 0x3000;
pub(super) const GP_VECTOR: u8 = 13;
/// UD2 leads from CPL 3 to CPL 0 on every KVM; INT n does not on a software one.
const USER_DONE_VECTOR: u8 = 6;
const SAMPLES_STRIDE: u64 = 0x1000;
const RFLAGS_FIXED: i32 = 2;
const CR4_PCE: u64 = 1 << 8;

const ENABLE: u32 = 1 << 22;
/// Far from an overflow on every model.
const PRESET: u32 = 0x4000_0000;

/// Where the #GP handler is, at which RDPMC is caught, and the code that executes
/// RDPMC: a KVM may slow down a whole page for a breakpoint on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placement {
    /// On pages of their own.
    Apart,
    /// On one page.
    Together,
}

impl Placement {
    /// Where the #GP handler is that Umpire watches.
    pub(super) fn gp_handler(self) -> u64 {
        match self {
            Self::Apart => FAR_GP_HANDLER,
            Self::Together => NEAR_GP_HANDLER,
        }
    }

    /// Where the #GP handler is that does one OUT to [`GP_PORT`] and returns.
    pub(super) fn reference_handler(self) -> u64 {
        self.gp_handler() + REFERENCE
    }

    fn user(self) -> u64 {
        match self {
            Self::Apart => USER_CODE,
            Self::Together => NEAR_USER,
        }
    }
}

/// One kind of trapped access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Access {
    /// RDMSR of a running counter.
    ReadCounter,
    /// WRMSR to a running counter.
    WriteCounter,
    /// RDMSR of its event select.
    ReadSelect,
    /// WRMSR to its event select, which starts or stops it in turn.
    WriteSelect,
    /// RDPMC at CPL 0.
    RdpmcKernel,
    /// RDPMC at CPL 3.
    RdpmcUser,
}

impl Access {
    /// In the order in which the guest goes through them.
    pub const ALL: [Self; 6] = [
        Self::ReadCounter,
        Self::WriteCounter,
        Self::ReadSelect,
        Self::WriteSelect,
        Self::RdpmcKernel,
        Self::RdpmcUser,
    ];

    /// True if it is caught by the breakpoint and not by the MSR filter.
    #[must_use]
    pub fn is_rdpmc(self) -> bool {
        matches!(self, Self::RdpmcKernel | Self::RdpmcUser)
    }

    /// Name for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ReadCounter => "RDMSR counter",
            Self::WriteCounter => "WRMSR counter",
            Self::ReadSelect => "RDMSR event select",
            Self::WriteSelect => "WRMSR event select",
            Self::RdpmcKernel => "RDPMC at CPL 0",
            Self::RdpmcUser => "RDPMC at CPL 3",
        }
    }
}

/// Where vCPU `vcpu` leaves its [`BATCH`] samples: TSC ticks, 32 bits each.
pub(super) fn samples_at(vcpu: u8) -> u64 {
    SCRATCH + u64::from(vcpu) * SAMPLES_STRIDE
}

/// A guest whose `vcpus` vCPUs all do the same, batch after batch, for ever, with
/// a counter on the event of code `event`.
pub(super) fn guest(model: &PmuModel, event: u64, vcpus: u8) -> Result<MicroGuest, MicroError> {
    guest_placed(model, event, vcpus, Placement::Apart)
}

/// [`guest`] with its code at `place`. The IDT names a handler that no RDPMC is to
/// reach; the one that does one OUT is there for a vCPU with another IDT.
pub(super) fn guest_placed(
    model: &PmuModel,
    event: u64,
    vcpus: u8,
    place: Placement,
) -> Result<MicroGuest, MicroError> {
    let all = PmuMsrs::of(model);
    let (select, counter) = all.first();
    let flags = USR_OS_ENABLE | INT;
    let msrs = Msrs {
        all,
        counter,
        select,
        control: u32::try_from(event | flags).unwrap_or(u32::MAX),
    };
    let (handler, reference) = (place.gp_handler(), place.reference_handler());
    let user_at = place.user();
    let mut guest = MicroGuest::new()
        .code(KERNEL_CODE, assemble(KERNEL_CODE, |a| begin(a, &msrs))?)
        .code(MAIN, assemble(MAIN, |a| main(a, &msrs, user_at))?)
        .code(user_at, assemble(user_at, user)?)
        .code(USER_DONE, assemble(USER_DONE, user_done)?)
        .code(handler, assemble(handler, unwanted_gp)?)
        .code(reference, assemble(reference, reference_gp)?)
        .handler(GP_VECTOR, handler)
        .handler(USER_DONE_VECTOR, USER_DONE);
    for vcpu in 0..vcpus {
        let mut start = Start::at(KERNEL_CODE, 0);
        start.rdi = samples_at(vcpu);
        start.cr4 = CR4_PCE;
        guest = guest.start(start);
    }
    Ok(guest)
}

/// The registers that the guest uses.
struct Msrs {
    all: PmuMsrs,
    counter: u32,
    select: u32,
    /// What the select asks for.
    control: u32,
}

fn begin(a: &mut CodeAssembler, msrs: &Msrs) -> Written {
    a.mov(r8, rdi)?;
    a.mov(r13, rsp)?;
    msrs.all.enable(a, 1)?;
    a.mov(r9d, msrs.control)?;
    a.mov(ecx, msrs.select)?;
    a.mov(eax, r9d)?;
    a.xor(edx, edx)?;
    a.wrmsr()?;
    a.jmp(MAIN)
}

fn main(a: &mut CodeAssembler, msrs: &Msrs, user_at: u64) -> Written {
    for access in Access::ALL {
        match access {
            Access::ReadCounter => batch(a, msrs.counter, |_| Ok(()), CodeAssembler::rdmsr)?,
            Access::ReadSelect => batch(a, msrs.select, |_| Ok(()), CodeAssembler::rdmsr)?,
            Access::WriteCounter => batch(
                a,
                msrs.counter,
                |_| Ok(()),
                |a| {
                    a.mov(eax, PRESET)?;
                    a.xor(edx, edx)?;
                    a.wrmsr()
                },
            )?,
            Access::WriteSelect => batch(
                a,
                msrs.select,
                |a| a.xor(r9d, ENABLE.cast_signed()),
                |a| {
                    a.mov(eax, r9d)?;
                    a.xor(edx, edx)?;
                    a.wrmsr()
                },
            )?,
            Access::RdpmcKernel => batch(a, 0, |_| Ok(()), CodeAssembler::rdpmc)?,
            Access::RdpmcUser => {
                prepare(a, 0)?;
                for word in [
                    i32::from(USER_SS),
                    i32::try_from(USER_STACK).unwrap_or(0),
                    RFLAGS_FIXED,
                    i32::from(USER_CS),
                    i32::try_from(user_at).unwrap_or(0),
                ] {
                    a.push(word)?;
                }
                a.iretq()?;
                continue;
            }
        }
        report(a, access)?;
    }
    Ok(())
}

/// Index in ECX, samples at RDI, count in EBX.
fn prepare(a: &mut CodeAssembler, index: u32) -> Written {
    a.mov(rdi, r8)?;
    a.mov(ebx, BATCH)?;
    a.mov(ecx, index)
}

fn batch(
    a: &mut CodeAssembler,
    index: u32,
    before: impl FnOnce(&mut CodeAssembler) -> Written,
    access: impl FnOnce(&mut CodeAssembler) -> Written,
) -> Written {
    prepare(a, index)?;
    timed_loop(a, before, access)
}

/// RAX is the TSC; RDX is lost.
pub(super) fn now(a: &mut CodeAssembler) -> Written {
    a.rdtsc()?;
    a.shl(rdx, 32)?;
    a.or(rax, rdx)
}

fn timed_loop(
    a: &mut CodeAssembler,
    before: impl FnOnce(&mut CodeAssembler) -> Written,
    access: impl FnOnce(&mut CodeAssembler) -> Written,
) -> Written {
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    before(a)?;
    a.rdtsc()?;
    a.mov(esi, eax)?;
    access(a)?;
    a.rdtsc()?;
    a.sub(eax, esi)?;
    a.mov(dword_ptr(rdi), eax)?;
    a.add(rdi, 4)?;
    a.dec(ebx)?;
    a.jne(again)
}

fn report(a: &mut CodeAssembler, access: Access) -> Written {
    let place = Access::ALL.iter().position(|&one| one == access);
    a.mov(
        eax,
        u32::try_from(place.unwrap_or(usize::MAX)).unwrap_or(u32::MAX),
    )?;
    a.mov(dx, u32::from(DONE))?;
    a.out(dx, eax)
}

fn user(a: &mut CodeAssembler) -> Written {
    timed_loop(a, |_| Ok(()), CodeAssembler::rdpmc)?;
    a.ud2()
}

/// Reports for the user's batch and begins again, the frame of the UD2 forgotten.
fn user_done(a: &mut CodeAssembler) -> Written {
    report(a, Access::RdpmcUser)?;
    a.mov(rsp, r13)?;
    a.jmp(MAIN)
}

/// Nothing here should raise a #GP that reaches its handler, which begins as those
/// of kernels do.
fn unwanted_gp(a: &mut CodeAssembler) -> Written {
    a.endbr64()?;
    a.mov(eax, u32::from(GP_VECTOR))?;
    a.mov(dx, u32::from(UNEXPECTED_VECTOR_PORT))?;
    a.out(dx, eax)?;
    a.hlt()
}

/// One exit, and back to where the frame says; who serves the exit has brought the
/// frame's RIP behind the RDPMC.
fn reference_gp(a: &mut CodeAssembler) -> Written {
    const ERROR_CODE: i32 = 8;
    a.out(u32::from(GP_PORT), al)?;
    a.add(rsp, ERROR_CODE)?;
    a.iretq()
}
