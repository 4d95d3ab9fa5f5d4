//! Building blocks of a guest's code.
//!
//! R12 points at the next log entry, from RDI at the start. An instruction
//! that may fault is announced in R14 (its address) and R15 (where to go on
//! after a fault); the fault handlers log the distance to R14 and return to
//! R15.

use anyhow::Result;
use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, CodeLabel, dx, eax, ecx, edx, qword_ptr, r10, r11, r12, r14, r15, rax, rdi, rdx,
    rsp,
};
use vmm::micro::{
    KERNEL_CODE, MicroGuest, SCRATCH, Start, USER_CODE, USER_CS, USER_SS, USER_STACK, assemble,
};

/// The result of assembling.
pub type Written = Result<(), IcedError>;

/// Start of vCPU 0's log: 32 KiB.
pub const LOG: u64 = SCRATCH;
/// A guest's own data: 32 KiB.
pub const DATA: u64 = SCRATCH + 0x8000;
/// Bytes of a log entry.
pub const ENTRY_SIZE: u64 = 32;
/// Kind of a log entry: a value.
pub const VALUE: u64 = 1;
/// Kind of a log entry: a fault, plus its vector.
pub const FAULT: u64 = 0x100;

/// First instructions of a #GP handler that is patched: ENDBR64, CLAC, NOPs.
pub const DISPLACEABLE: [&[u8]; 5] = [
    &ENDBR64,
    &[0x0f, 0x01, 0xca],
    &[0x0f, 0x1f, 0x00],
    &[0x0f, 0x1f, 0x40, 0x00],
    &[0x66, 0x0f, 0x1f, 0x00],
];
/// ENDBR64.
pub const ENDBR64: [u8; 4] = [0xf3, 0x0f, 0x1e, 0xfa];

const HANDLERS: u64 = KERNEL_CODE + 0x8_0000;
const SYSCALL_CODE: u64 = KERNEL_CODE + 0xa_0000;
const HANDLER_SIZE: u64 = 0x100;
const TEST_EXIT: u32 = 0xf4;

/// A guest in the making.
#[derive(Debug, Clone)]
pub struct Program {
    guest: MicroGuest,
}

impl Program {
    /// Handlers for #GP, which logs and skips, and for #UD, which ends the
    /// guest: UD2 is the one way out of CPL 3 that every KVM has.
    ///
    /// # Errors
    /// Never in practice; the assembler's signature.
    pub fn new() -> Result<Self> {
        let program = Self {
            guest: MicroGuest::new(),
        };
        program
            .handler(13, |a| log_fault(a, 13, true))?
            .handler(6, exit)
    }

    /// Code at CPL 0 where vCPU 0 starts.
    ///
    /// # Errors
    /// An operand that no instruction has.
    pub fn kernel(self, write: impl FnOnce(&mut CodeAssembler) -> Written) -> Result<Self> {
        self.code(KERNEL_CODE, |a| {
            a.mov(r12, rdi)?;
            write(a)
        })
    }

    /// Code at CPL 3, where [`enter_user`] goes.
    ///
    /// # Errors
    /// As [`Program::kernel`].
    pub fn user(self, write: impl FnOnce(&mut CodeAssembler) -> Written) -> Result<Self> {
        self.code(USER_CODE, write)
    }

    /// `begin` at CPL 0, then `body` at CPL 0 or, if `cpl` is 3, there; then the end.
    ///
    /// # Errors
    /// As [`Program::kernel`].
    pub fn at_cpl(
        self,
        cpl: u8,
        begin: impl FnOnce(&mut CodeAssembler) -> Written,
        body: impl Fn(&mut CodeAssembler) -> Written,
    ) -> Result<Self> {
        let program = self.kernel(|a| {
            begin(a)?;
            if cpl == 3 {
                return enter_user(a, 0);
            }
            body(a)?;
            exit(a)
        })?;
        program.user(|a| {
            body(a)?;
            a.ud2()
        })
    }

    /// Code at `address`.
    ///
    /// # Errors
    /// As [`Program::kernel`].
    pub fn code(
        mut self,
        address: u64,
        write: impl FnOnce(&mut CodeAssembler) -> Written,
    ) -> Result<Self> {
        let bytes = assemble(address, write)?;
        self.guest = self.guest.code(address, bytes);
        Ok(self)
    }

    /// Bytes at `address`, before the guest starts.
    #[must_use]
    pub fn data(mut self, address: u64, bytes: Vec<u8>) -> Self {
        self.guest = self.guest.code(address, bytes);
        self
    }

    /// The handler of `vector`.
    ///
    /// # Errors
    /// As [`Program::kernel`].
    pub fn handler(
        self,
        vector: u8,
        write: impl FnOnce(&mut CodeAssembler) -> Written,
    ) -> Result<Self> {
        let address = Self::handler_address(vector);
        let mut program = self.code(address, write)?;
        program.guest = program.guest.handler(vector, address);
        Ok(program)
    }

    /// The #GP handler begins with `first`: with one of [`DISPLACEABLE`] it is patched.
    ///
    /// # Errors
    /// Never in practice; the assembler's signature.
    pub fn gp_begins(self, first: &[u8]) -> Result<Self> {
        self.handler(13, |a| {
            a.db(first)?;
            log_fault(a, 13, true)
        })
    }

    /// Where the handler of `vector` lies.
    #[must_use]
    pub fn handler_address(vector: u8) -> u64 {
        HANDLERS + u64::from(vector) * HANDLER_SIZE
    }

    /// SYSCALL's target.
    ///
    /// # Errors
    /// As [`Program::kernel`].
    pub fn syscall(self, write: impl FnOnce(&mut CodeAssembler) -> Written) -> Result<Self> {
        let mut program = self.code(SYSCALL_CODE, write)?;
        program.guest = program.guest.lstar(SYSCALL_CODE);
        Ok(program)
    }

    /// One vCPU that starts at the kernel code, with these CR4 bits.
    #[must_use]
    pub fn start(self, cr4: u64) -> MicroGuest {
        self.guest.start(Start {
            cr4,
            rdi: LOG,
            ..Start::at(KERNEL_CODE, 0)
        })
    }

    /// The guest without vCPUs.
    #[must_use]
    pub fn guest(self) -> MicroGuest {
        self.guest
    }
}

/// Ends the guest; CPL 0.
///
/// # Errors
/// Never in practice; the assembler's signature.
pub fn exit(a: &mut CodeAssembler) -> Written {
    a.xor(eax, eax)?;
    a.mov(edx, TEST_EXIT)?;
    a.out(dx, eax)?;
    a.hlt()
}

/// Goes to [`USER_CODE`] at CPL 3 with these flags: eight instructions,
/// five of which store, and an IRET.
///
/// # Errors
/// Never in practice; the assembler's signature.
pub fn enter_user(a: &mut CodeAssembler, rflags: u32) -> Written {
    a.push(i32::from(USER_SS))?;
    a.mov(rax, USER_STACK)?;
    a.push(rax)?;
    a.mov(eax, rflags | 2)?;
    a.push(rax)?;
    a.push(i32::from(USER_CS))?;
    a.mov(rax, USER_CODE)?;
    a.push(rax)?;
    a.iretq()
}

/// Logs RAX and RDX.
///
/// # Errors
/// Never in practice; the assembler's signature.
pub fn log_value(a: &mut CodeAssembler) -> Written {
    a.mov(qword_ptr(r12), i32::try_from(VALUE).unwrap_or(0))?;
    a.mov(qword_ptr(r12 + 8), rax)?;
    a.mov(qword_ptr(r12 + 16), rdx)?;
    a.lea(r12, qword_ptr(r12 + ENTRY_SIZE))
}

/// A handler that logs its exception and goes on at R15.
///
/// # Errors
/// Never in practice; the assembler's signature.
pub fn log_fault(a: &mut CodeAssembler, vector: u8, with_error: bool) -> Written {
    if !with_error {
        a.push(0)?;
    }
    a.push(rax)?;
    a.mov(
        qword_ptr(r12),
        i32::try_from(FAULT).unwrap_or(0) + i32::from(vector),
    )?;
    a.mov(rax, qword_ptr(rsp + 8))?;
    a.mov(qword_ptr(r12 + 8), rax)?;
    a.mov(rax, qword_ptr(rsp + 16))?;
    a.sub(rax, r14)?;
    a.mov(qword_ptr(r12 + 16), rax)?;
    a.mov(rax, qword_ptr(rsp + 24))?;
    a.mov(qword_ptr(r12 + 24), rax)?;
    a.lea(r12, qword_ptr(r12 + ENTRY_SIZE))?;
    a.mov(qword_ptr(rsp + 16), r15)?;
    a.pop(rax)?;
    a.lea(rsp, qword_ptr(rsp + 8))?;
    a.iretq()
}

/// WRMSR of a constant: four instructions.
///
/// # Errors
/// Never in practice; the assembler's signature.
pub fn wrmsr(a: &mut CodeAssembler, msr: u32, value: u64) -> Written {
    a.mov(ecx, msr)?;
    a.mov(eax, low(value))?;
    a.mov(edx, low(value >> 32))?;
    a.wrmsr()
}

/// A loop of `times` two-instruction rounds, after one instruction; ECX ends at 0.
///
/// # Errors
/// Never in practice; the assembler's signature.
pub fn spin(a: &mut CodeAssembler, times: u32) -> Written {
    a.mov(ecx, times)?;
    let mut again: CodeLabel = a.create_label();
    a.set_label(&mut again)?;
    a.dec(ecx)?;
    a.jne(again)
}

/// The TSC into RAX; RDX is lost.
///
/// # Errors
/// Never in practice; the assembler's signature.
pub fn tsc(a: &mut CodeAssembler) -> Written {
    a.rdtsc()?;
    a.shl(rdx, 32)?;
    a.or(rax, rdx)
}

/// Spins for `ticks` of the TSC, without an exit; RAX, RDX, R10 and R11 are lost.
///
/// # Errors
/// Never in practice; the assembler's signature.
pub fn spin_for(a: &mut CodeAssembler, ticks: u64) -> Written {
    let mut again = a.create_label();
    tsc(a)?;
    a.mov(r10, rax)?;
    a.mov(r11, ticks)?;
    a.add(r10, r11)?;
    a.set_label(&mut again)?;
    tsc(a)?;
    a.cmp(rax, r10)?;
    a.jb(again)
}

pub(super) fn low(value: u64) -> u32 {
    u32::try_from(value & 0xffff_ffff).unwrap_or(0)
}
