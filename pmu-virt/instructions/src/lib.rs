//! Facts about x86 instructions: what one is, where it accesses memory, what it can raise,
//! and what its execution counts for.
//!
//! - Who executes instructions decodes each once, keeps [`InsnFacts::events`], which no
//!   execution changes but for a conditional branch and a repeated instruction, and says
//!   by [`InsnFacts::retired`] how one went. How many events one instruction can be at most
//!   says [`EventClass::most`].
//! - Who sees a guest before and after an instruction finds out what it did by
//!   [`InsnFacts::retire`], and where it accessed memory by [`operand`].
//!
//! The caller owns the [`InstructionInfoFactory`], so nothing is allocated for an instruction.
//! Nothing here knows a counter, a vCPU or KVM.
//!
//! # What is counted
//! - **Loads and stores**: one per memory operand access, whatever its size:
//!   PUSH stores once, POP loads once, CALL stores once, RET loads once, a
//!   read-modify-write does both, IRET in 64-bit mode loads five times. LEA,
//!   multi-byte NOP, prefetches and cache-line flushes
//!   move nothing. A string instruction counts
//!   each of its operands once, also under REP; under REP with a count of 0
//!   it accesses nothing. Gathers and scatters count one operand. What the
//!   processor itself reads and writes (descriptors, page tables, the frame
//!   of an interrupt) is not counted.
//! - **Branches**: every near and far jump, call and return, LOOP and JCXZ,
//!   INT n, INT1, INT3, INTO, IRET, SYSCALL, SYSRET, SYSENTER, SYSEXIT. Far
//!   ones are also far branches. XBEGIN, XABORT and exceptions are none.
//! - **Conditional branches**: Jcc, LOOP, LOOPE, LOOPNE and JCXZ with its wider forms,
//!   taken or not. INTO is a far branch and none of these.
//! - **Calls and returns**: near ones.
//! - **String instructions**: MOVS, CMPS, SCAS, LODS, STOS, INS and OUTS, once
//!   each, however often they are repeated, also not at all.
//! - **x87, MMX, SSE**: by the registers that the instruction names: ST or the
//!   x87 set, then XMM, YMM, ZMM and mask registers (SSE), then MM (MMX). EMMS
//!   is MMX; LDMXCSR, STMXCSR and VZEROUPPER are SSE. Fences, prefetches,
//!   MOVNTI, FXSAVE and XSAVE are none of them.
//! - **Taken**: decided by where the guest went, and by flags and count where
//!   a conditional branch leads to the very next instruction.

#![forbid(unsafe_code)]

mod classify;
mod decode;
mod facts;
mod faults;
mod kinds;
mod memory;
mod operand;
mod retire;

pub use decode::{Decoded, Encoding, Undecodable, decode, rip_after_rdpmc};
pub use facts::InsnFacts;
pub use faults::{FaultSet, is_canonical, pushes_error_code};
pub use iced_x86::{Instruction, InstructionInfoFactory};
pub use kinds::{InsnClass, StepKind};
pub use operand::{AddressRegisters, Operand, OperandKind, operand};
pub use pmu_model::{EventClass, EventCounts, MathUnit, Retirement};
