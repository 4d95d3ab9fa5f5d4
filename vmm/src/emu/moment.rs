//! The moment in which an emulated vCPU was stopped, for samples.

use std::cell::RefCell;
use std::convert::Infallible;
use std::ops::Range;

use emu::{Cpu, Seg};
use instruction_facts::{
    AddressRegisters, Decoded, InstructionInfoFactory, Operand, OperandKind, decode, operand,
};
use kvm_pmu::{TrapObserver, VcpuId};
use pmu_virt::perfmon::{self, Quantities, Wish};
use pmu_virt::{
    CodePlace, LinearMemory, Moment, MomentRegisters, Retirement, Ring, SampledInstruction,
};
use vm_memory::{Bytes, GuestAddress};

use super::registers::{general, special};

/// Bytes of an instruction at most.
const LONGEST: usize = 15;

/// An instruction, and what it found.
#[derive(Debug)]
pub(super) struct Watched {
    decoded: Decoded,
    registers: AddressRegisters,
    at: CodePlace,
    flags: u64,
    /// What it did, once it has retired.
    did: Option<Retirement>,
}

impl Watched {
    /// The next one of a processor; none where it cannot be fetched.
    pub(super) fn next(cpu: &Cpu, factory: &mut InstructionInfoFactory) -> Option<Self> {
        let state = cpu.state();
        let linear = cpu.linear_rip();
        let mut bytes = [0; LONGEST];
        let memory = Memory::of(cpu);
        // It may end in front of a page that is not there.
        let most = (1..=LONGEST).rev();
        let len = { most }.find(|len| memory.fetch(linear, &mut bytes[..*len]))?;
        let decoded = decode(&bytes[..len], state.bits(), state.rip, factory).ok()?;
        let mut general = [0; 16];
        general.copy_from_slice(&state.r[..16]);
        let segments = [Seg::Es, Seg::Cs, Seg::Ss, Seg::Ds, Seg::Fs, Seg::Gs];
        Some(Self {
            decoded,
            registers: AddressRegisters {
                general,
                bases: segments.map(|seg| state.segment(seg).base),
            },
            at: CodePlace {
                rip: state.rip,
                linear,
            },
            flags: state.rflags(),
            did: None,
        })
    }

    /// It has retired, and led to `next`.
    pub(super) fn retired(&mut self, next: u64) {
        let [_, rcx, ..] = self.registers.general;
        self.did = Some(self.decoded.facts.retire(next, self.flags, rcx));
    }

    /// What samples are told of it.
    fn sampled(&self) -> Option<SampledInstruction> {
        let did = self.did?;
        Some(SampledInstruction::Executed { at: self.at, did })
    }

    fn operand(&self, kind: OperandKind, factory: &mut InstructionInfoFactory) -> Option<Operand> {
        let did = self.did?;
        let [_, rcx, ..] = self.registers.general;
        if did.loads == 0 && did.stores == 0 || self.decoded.facts.is_idle(rcx) {
            return None;
        }
        operand(&self.decoded.insn, kind, &self.registers, factory)
    }
}

/// Where and when a vCPU stands.
#[derive(Debug, Clone, Copy)]
pub(super) struct Standing {
    pub(super) id: VcpuId,
    pub(super) apic_base: u64,
    /// Virtual time.
    pub(super) now: u64,
    /// Process of the VMM.
    pub(super) process: i32,
}

/// A stopped vCPU.
pub(super) struct Stopped<'a> {
    cpu: &'a Cpu,
    standing: Standing,
    observer: &'a mut dyn TrapObserver,
    memory: Memory<'a>,
    watched: Option<&'a Watched>,
    factory: &'a mut InstructionInfoFactory,
}

impl<'a> Stopped<'a> {
    /// With what it has just executed, where that was watched.
    pub(super) fn new(
        cpu: &'a Cpu,
        standing: Standing,
        observer: &'a mut dyn TrapObserver,
        (watched, factory): (Option<&'a Watched>, &'a mut InstructionInfoFactory),
    ) -> Self {
        Self {
            cpu,
            standing,
            observer,
            memory: Memory::of(cpu),
            watched,
            factory,
        }
    }

    /// Guest-physical addresses that samples were written to.
    pub(super) fn into_written(self) -> Vec<Range<u64>> {
        self.memory.written.into_inner()
    }
}

/// What the processor itself reaches in memory.
struct Memory<'a> {
    cpu: &'a Cpu,
    /// Guest-physical addresses that were written to: code may have been there.
    written: RefCell<Vec<Range<u64>>>,
}

impl<'a> Memory<'a> {
    fn of(cpu: &'a Cpu) -> Self {
        Self {
            cpu,
            written: RefCell::new(Vec::new()),
        }
    }

    /// The guest-physical pieces of linear memory, a page each at most, as `find` finds them; none
    /// if one of them is not there.
    fn pieces(
        address: u64,
        len: usize,
        find: impl Fn(u64) -> Option<u64>,
    ) -> Option<Vec<(u64, usize)>> {
        let mut pieces = Vec::new();
        let mut done = 0;
        while done < len {
            let at = address.wrapping_add(done as u64);
            let room = usize::try_from(0x1000 - (at & 0xfff)).unwrap_or(0);
            let piece = room.min(len - done);
            pieces.push((find(at)?, piece));
            done += piece;
        }
        Some(pieces)
    }

    /// Reads `pieces`, as many bytes as there are; false if one of them is no memory.
    fn take(&self, pieces: Option<Vec<(u64, usize)>>, bytes: &mut [u8]) -> bool {
        let mut rest = bytes;
        pieces.is_some_and(|pieces| {
            pieces.into_iter().all(|(physical, len)| {
                let (piece, behind) = std::mem::take(&mut rest).split_at_mut(len);
                rest = behind;
                let memory = self.cpu.ram().memory();
                memory.read_slice(piece, GuestAddress(physical)).is_ok()
            })
        })
    }

    /// Reads code of whatever ring runs. That of a program is closed to the kernel's own accesses
    /// where CR4.SMAP is set.
    fn fetch(&self, address: u64, bytes: &mut [u8]) -> bool {
        let find = |at| self.cpu.locate(at).map(|(physical, _)| physical);
        self.take(Self::pieces(address, bytes.len(), find), bytes)
    }
}

impl LinearMemory for Memory<'_> {
    fn read(&self, address: u64, bytes: &mut [u8]) -> bool {
        let find = |at| self.cpu.reach(at, false);
        self.take(Self::pieces(address, bytes.len(), find), bytes)
    }

    fn write(&self, address: u64, bytes: &[u8]) -> bool {
        let find = |at| self.cpu.reach(at, true);
        let Some(pieces) = Self::pieces(address, bytes.len(), find) else {
            return false;
        };
        let mut rest = bytes;
        pieces.into_iter().all(|(physical, len)| {
            let (piece, behind) = rest.split_at(len);
            rest = behind;
            let range = physical..physical + len as u64;
            self.written.borrow_mut().push(range);
            let memory = self.cpu.ram().memory();
            memory.write_slice(piece, GuestAddress(physical)).is_ok()
        })
    }

    fn locate(&self, address: u64) -> Option<(u64, u32)> {
        self.cpu.locate(address)
    }
}

impl Moment for Stopped<'_> {
    type Error = Infallible;

    fn registers(&mut self) -> Result<Option<MomentRegisters>, Infallible> {
        let state = self.cpu.state();
        let mut general = [0; 16];
        general.copy_from_slice(&state.r[..16]);
        Ok(Some(MomentRegisters {
            instruction: self.watched.and_then(Watched::sampled).unwrap_or_default(),
            next: CodePlace {
                rip: state.rip,
                linear: self.cpu.linear_rip(),
            },
            flags: state.rflags(),
            general,
        }))
    }

    fn xmm(&mut self) -> Result<[[u8; 16]; 16], Infallible> {
        let xmm = self.cpu.state().xmm;
        Ok(xmm.map(|[low, high]| (u128::from(high) << 64 | u128::from(low)).to_le_bytes()))
    }

    fn tsc(&mut self) -> Result<u64, Infallible> {
        Ok(tsc(self.cpu))
    }

    fn operand(&mut self, kind: OperandKind) -> Option<Operand> {
        self.watched?.operand(kind, self.factory)
    }

    fn memory(&mut self) -> Result<&dyn LinearMemory, Infallible> {
        Ok(&self.memory)
    }

    fn host(
        &mut self,
        wish: Wish,
        take: &mut dyn FnMut(&perfmon::Moment, &dyn Quantities),
    ) -> Result<(), Infallible> {
        let state = self.cpu.state();
        if !wish.is_empty() {
            let registers = (&general(state), &special(state, self.standing.apic_base));
            let tsc = || Some(tsc(self.cpu));
            self.observer.look(self.standing.id, wish, registers, &tsc);
        }
        let moment = perfmon::Moment {
            tsc: self.standing.now,
            ip: state.rip,
            ring: Ring::from_cpl(state.cpl()),
            cr3: state.cr3,
            vm: self.standing.process,
            vcpu: self.standing.id.0.cast_signed(),
            // It has its own.
            core: u16::try_from(self.standing.id.0).unwrap_or(u16::MAX),
        };
        take(&moment, self.observer.quantities());
        Ok(())
    }
}

/// The guest's TSC.
fn tsc(cpu: &Cpu) -> u64 {
    cpu.time().wrapping_add(cpu.state().msrs.tsc_offset)
}

#[cfg(test)]
mod tests {
    use emu::{Cpuid, Ram, VmExit};
    use iced_x86::code_asm::CodeAssembler;

    use super::*;
    use crate::micro::{MicroGuest, Start, USER_CODE, assemble};

    const CR4_SMAP: u64 = 1 << 21;

    /// Code of a program is looked at where the kernel may not read its pages, as in every Linux.
    #[test]
    fn a_program_is_seen_under_smap() {
        let code = assemble(USER_CODE, CodeAssembler::nop).expect("code");
        let guest = MicroGuest::new()
            .code(USER_CODE, code)
            .start(Start::at(USER_CODE, 3));
        for smap in [0, CR4_SMAP] {
            let (memory, states) = guest.emulated().expect("memory");
            let mut state = states.into_iter().next().expect("a vCPU");
            state.cr4 |= smap;
            let mut cpu = Cpu::new(Ram::new(memory).expect("memory"), Cpuid::implemented());
            cpu.set_state(state);
            let mut factory = InstructionInfoFactory::new();
            let mut watched = Watched::next(&cpu, &mut factory).expect("an instruction");
            assert_eq!(cpu.run(1), VmExit::Budget);
            watched.retired(cpu.state().rip);
            let seen = watched.sampled();
            let Some(SampledInstruction::Executed { at, did }) = seen else {
                panic!("{seen:?}");
            };
            assert_eq!(at.rip, USER_CODE);
            assert_eq!((did.loads, did.stores), (0, 0));
        }
    }
}
