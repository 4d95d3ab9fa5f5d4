//! MOVS, CMPS, SCAS, LODS, STOS, INS and OUTS. Under REP a step does what lies on one page, or
//! some elements; who steps on sees registers that have moved. Where CMPS or SCAS faults under
//! REP, the flags are those of the last element that was compared, as AMD's processors leave
//! them; Intel's put back those from before (SDM vol. 2B, "REP").

use iced_x86::{Instruction, Mnemonic, OpKind};
use instruction_facts::EventClass;

use super::alu;
use super::core::{Core, Exec, Spot, Trap, Width};
use super::operand::{Linear, by_width, in_segment, memory_seg};
use super::system::check_port;
use crate::state::{DF, Seg, TF};

/// Elements of a step that goes one by one.
const ELEMENTS: u64 = 128;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Movs,
    Cmps,
    Scas,
    Lods,
    Stos,
    Ins,
    Outs,
}

/// A string instruction taken apart.
#[derive(Debug, Clone, Copy)]
struct Strings {
    what: What,
    bytes: u64,
    address_bits: u32,
    source: Seg,
    repeated: bool,
    /// ZF that ends it, under REPE and REPNE.
    ends_at_zf: Option<bool>,
}

fn of(core: &Core, insn: &Instruction) -> Strings {
    use Mnemonic as M;
    let (what, bytes) = match insn.mnemonic() {
        M::Movsb => (What::Movs, 1),
        M::Movsw => (What::Movs, 2),
        M::Movsd => (What::Movs, 4),
        M::Movsq => (What::Movs, 8),
        M::Cmpsb => (What::Cmps, 1),
        M::Cmpsw => (What::Cmps, 2),
        M::Cmpsd => (What::Cmps, 4),
        M::Cmpsq => (What::Cmps, 8),
        M::Scasb => (What::Scas, 1),
        M::Scasw => (What::Scas, 2),
        M::Scasd => (What::Scas, 4),
        M::Scasq => (What::Scas, 8),
        M::Lodsb => (What::Lods, 1),
        M::Lodsw => (What::Lods, 2),
        M::Lodsd => (What::Lods, 4),
        M::Lodsq => (What::Lods, 8),
        M::Stosb => (What::Stos, 1),
        M::Stosw => (What::Stos, 2),
        M::Stosd => (What::Stos, 4),
        M::Stosq => (What::Stos, 8),
        M::Insb => (What::Ins, 1),
        M::Insw => (What::Ins, 2),
        M::Insd => (What::Ins, 4),
        M::Outsb => (What::Outs, 1),
        M::Outsw => (What::Outs, 2),
        _ => (What::Outs, 4),
    };
    let address_bits = insn.op_kinds().find_map(|kind| match kind {
        OpKind::MemorySegSI | OpKind::MemorySegDI | OpKind::MemoryESDI => Some(16),
        OpKind::MemorySegESI | OpKind::MemorySegEDI | OpKind::MemoryESEDI => Some(32),
        OpKind::MemorySegRSI | OpKind::MemorySegRDI | OpKind::MemoryESRDI => Some(64),
        _ => None,
    });
    let compares = matches!(what, What::Cmps | What::Scas);
    let ends_at_zf = match (compares, insn.has_repne_prefix(), insn.has_rep_prefix()) {
        (true, true, _) => Some(true),
        (true, _, true) => Some(false),
        _ => None,
    };
    Strings {
        what,
        bytes,
        address_bits: address_bits.unwrap_or(64),
        source: memory_seg(core, insn),
        repeated: insn.has_rep_prefix() || insn.has_repne_prefix(),
        ends_at_zf,
    }
}

impl Strings {
    fn mask(self) -> u64 {
        u64::MAX >> (64 - self.address_bits)
    }

    fn get(self, core: &Core, number: usize) -> u64 {
        core.state.r[number] & self.mask()
    }

    fn advance(self, core: &mut Core, number: u8, by: u64) {
        let value = core.state.r[usize::from(number)].wrapping_add(by);
        by_width!(self.address_bits, W => core.set_reg(number, W::of(value)));
    }

    fn stride(self, core: &Core) -> u64 {
        if core.state.system_flags & DF != 0 {
            self.bytes.wrapping_neg()
        } else {
            self.bytes
        }
    }

    fn from(self, core: &mut Core) -> Exec<Linear> {
        let offset = self.get(core, 6);
        in_segment(core, self.source, offset, self.bytes, false)
    }

    fn to(self, core: &mut Core, write: bool) -> Exec<Linear> {
        let offset = self.get(core, 7);
        in_segment(core, Seg::Es, offset, self.bytes, write)
    }

    fn load(self, core: &mut Core, at: Linear) -> Exec<u64> {
        by_width!(self.bytes * 8, W => core.load::<W>(at.at, at.seg).map(W::wide))
    }

    fn store(self, core: &mut Core, at: Linear, value: u64) -> Exec {
        by_width!(self.bytes * 8, W => core.store(at.at, at.seg, W::of(value)))
    }

    fn compare(self, core: &mut Core, a: u64, b: u64) {
        core.state.flags = by_width!(self.bytes * 8, W => {
            alu::compute(alu::CMP, W::of(a), W::of(b), false).1
        });
    }

    /// One element, without RCX.
    fn element(self, core: &mut Core) -> Exec {
        let stride = self.stride(core);
        let port = core.state.r[2] as u16;
        let width = self.bytes as u8;
        match self.what {
            What::Movs => {
                let from = self.from(core)?;
                let to = self.to(core, true)?;
                let value = self.load(core, from)?;
                self.store(core, to, value)?;
            }
            What::Cmps => {
                let from = self.from(core)?;
                let to = self.to(core, false)?;
                let a = self.load(core, from)?;
                let b = self.load(core, to)?;
                self.compare(core, a, b);
            }
            What::Scas => {
                let to = self.to(core, false)?;
                let b = self.load(core, to)?;
                let a = core.state.r[0];
                self.compare(core, a, b);
            }
            What::Lods => {
                let from = self.from(core)?;
                let value = self.load(core, from)?;
                by_width!(self.bytes * 8, W => core.set_reg(0, W::of(value)));
            }
            What::Stos => {
                let to = self.to(core, true)?;
                let value = core.state.r[0];
                self.store(core, to, value)?;
            }
            What::Ins => {
                check_port(core, port, width)?;
                let to = self.to(core, true)?;
                core.check_write(to.at, u32::from(width), to.seg)?;
                let value = core.port_in(port, width)?;
                self.store(core, to, value)?;
            }
            What::Outs => {
                check_port(core, port, width)?;
                let from = self.from(core)?;
                let value = self.load(core, from)? as u32;
                core.port_out(port, width, value)?;
            }
        }
        if !matches!(self.what, What::Scas | What::Stos | What::Ins) {
            self.advance(core, 6, stride);
        }
        if !matches!(self.what, What::Lods | What::Outs) {
            self.advance(core, 7, stride);
        }
        Ok(())
    }

    /// Elements of MOVS or STOS on one page each, upwards, all at once: how many.
    fn run(self, core: &mut Core, count: u64) -> Exec<u64> {
        let plain = matches!(self.what, What::Movs | What::Stos)
            && self.address_bits == 64
            && core.state.bits() == 64
            && core.state.system_flags & (DF | TF) == 0;
        let Some((read, write)) = core.plain_sets().filter(|_| plain) else {
            return Ok(0);
        };
        let to = self.to(core, true)?.at;
        let mut most = (4096 - (to & 0xfff)) / self.bytes;
        let mut source = None;
        if self.what == What::Movs {
            let from = self.from(core)?.at;
            most = most.min((4096 - (from & 0xfff)) / self.bytes);
            source = core.page(read, from)?;
            if source.is_none() {
                return Ok(0);
            }
        }
        let count = count.min(most);
        if count < 2 {
            return Ok(0);
        }
        let Some(to) = core.page(write, to)? else {
            return Ok(0);
        };
        core.code_write(Spot::Ram(to))?;
        self.fill_or_copy(core, source, to, count);
        core.code.write((to >> 12) as u32);
        Ok(count)
    }

    fn fill_or_copy(self, core: &mut Core, source: Option<u64>, to: u64, count: u64) {
        let bytes = count * self.bytes;
        match source {
            None => {
                let value = core.state.r[0];
                by_width!(self.bytes * 8, W => core.ram.fill(to, W::of(value), count));
            }
            // Element by element, where what was written is read again.
            Some(from) if from < to && to - from < bytes => {
                for at in (0..bytes).step_by(self.bytes as usize) {
                    by_width!(self.bytes * 8, W => {
                        let value = core.ram.load::<W>(from + at);
                        core.ram.store(to + at, value);
                    });
                }
            }
            Some(from) => core.ram.copy(from, to, bytes),
        }
        if source.is_some() {
            self.advance(core, 6, bytes);
        }
        self.advance(core, 7, bytes);
    }

    /// One element after the other: how many, and whether ZF has ended it.
    fn walk(self, core: &mut Core, count: u64) -> Exec<bool> {
        let most = if core.state.system_flags & TF != 0 {
            1
        } else {
            ELEMENTS
        };
        for _ in 0..count.min(most) {
            let asked = core.is_half_done();
            self.element(core)?;
            core.settle();
            self.advance(core, 1, u64::MAX);
            if self.ends_at_zf == Some(core.state.flags.zf()) {
                return Ok(true);
            }
            // A device may have taken its time, and may interrupt.
            if asked {
                break;
            }
        }
        Ok(false)
    }
}

/// Accesses nothing, and so counts no loads and stores.
fn idle(core: &mut Core, what: What) {
    let (loads, stores) = match what {
        What::Movs => (1, 1),
        What::Cmps => (2, 0),
        What::Scas | What::Lods | What::Outs => (1, 0),
        What::Stos | What::Ins => (0, 1),
    };
    for (event, count) in [(EventClass::Loads, loads), (EventClass::Stores, stores)] {
        let lane = &mut core.lanes[event as usize];
        *lane = lane.wrapping_sub(count);
    }
}

/// Nothing stands behind a string instruction in its block, so that it may write to code at
/// once. What it does in a step must not depend on where code is known.
pub(super) fn step(core: &mut Core, insn: &Instruction) -> Exec {
    let alone = std::mem::replace(&mut core.alone, true);
    let done = elements(core, insn);
    core.alone = alone;
    if done == Ok(()) && core.code.is_written() {
        return Err(Trap::Leave);
    }
    done
}

fn elements(core: &mut Core, insn: &Instruction) -> Exec {
    let strings = of(core, insn);
    if !strings.repeated {
        return strings.element(core);
    }
    let count = strings.get(core, 1);
    if matches!(strings.what, What::Ins | What::Outs) {
        // Who may not use the port is told so also if there is nothing to move.
        check_port(core, core.state.r[2] as u16, strings.bytes as u8)?;
    }
    if count == 0 {
        idle(core, strings.what);
        return Ok(());
    }
    let done = strings.run(core, count)?;
    if done > 0 {
        strings.advance(core, 1, done.wrapping_neg());
    } else if strings.walk(core, count)? {
        return Ok(());
    }
    if strings.get(core, 1) == 0 {
        Ok(())
    } else {
        Err(Trap::Again)
    }
}
