//! Instructions that 64-bit code does not have.

use iced_x86::{Instruction, Mnemonic};

use super::core::{Core, Exec, Width};
use super::interrupt::Delivery;
use super::operand::{below, bits, by_width, get, linear, peek, read, set_stack, stack_at, write};
use super::segment::is_real;
use super::system::software;
use crate::flags::{AF, CF, Flags, OF, ZF};
use crate::state::RSP;

pub(super) fn is_known(mnemonic: Mnemonic) -> bool {
    use Mnemonic as M;
    matches!(
        mnemonic,
        M::Pusha
            | M::Pushad
            | M::Popa
            | M::Popad
            | M::Daa
            | M::Das
            | M::Aaa
            | M::Aas
            | M::Aam
            | M::Aad
            | M::Bound
            | M::Into
            | M::Arpl
            | M::Salc
    )
}

/// Executes an instruction, of which [`is_known`] is true.
pub(super) fn step(core: &mut Core, insn: &Instruction) -> Exec {
    match insn.mnemonic() {
        Mnemonic::Pusha => push_all(core, 16),
        Mnemonic::Pushad => push_all(core, 32),
        Mnemonic::Popa => pop_all(core, 16),
        Mnemonic::Popad => pop_all(core, 32),
        Mnemonic::Daa => decimal(core, false),
        Mnemonic::Das => decimal(core, true),
        Mnemonic::Aaa => ascii(core, false),
        Mnemonic::Aas => ascii(core, true),
        Mnemonic::Aam => ascii_product(core, insn.immediate8()),
        Mnemonic::Aad => {
            let [low, high] = core.reg::<u16>(0).to_le_bytes();
            let value = high.wrapping_mul(insn.immediate8()).wrapping_add(low);
            core.set_reg(0, u16::from(value));
            core.state.flags = Flags::logic(value.signed());
            Ok(())
        }
        Mnemonic::Bound => bound(core, insn),
        Mnemonic::Into if core.state.flags.bits() & OF == 0 => Ok(()),
        Mnemonic::Into => software(core, Delivery::Software(4)),
        Mnemonic::Arpl => adjust_privilege(core, insn),
        _ => {
            let value = if core.state.flags.cf() { 0xff } else { 0 };
            core.set_reg::<u8>(0, value);
            Ok(())
        }
    }
}

/// All are stored before RSP moves, of which its old value is stored.
fn push_all(core: &mut Core, width: u32) -> Exec {
    for number in 0..8u32 {
        let value = core.state.r[number as usize];
        below(core, (number + 1) * width / 8, width, value)?;
    }
    let top = stack_at(core, -i64::from(width));
    set_stack(core, top);
    Ok(())
}

/// All are loaded before any changes; that of RSP is passed over.
fn pop_all(core: &mut Core, width: u32) -> Exec {
    let mut values = [0; 8];
    for (above, value) in values.iter_mut().rev().enumerate() {
        *value = peek(core, above as u32 * width / 8, width)?;
    }
    for (number, value) in (0u8..).zip(values) {
        if usize::from(number) != RSP {
            by_width!(width, W => core.set_reg(number, W::of(value)));
        }
    }
    let top = stack_at(core, i64::from(width));
    set_stack(core, top);
    Ok(())
}

/// Flags of a value of 8 bits, with these carries.
fn with_carries(value: u8, cf: bool, af: bool) -> Flags {
    let mut bits = Flags::logic(value.signed()).bits() & !(CF | AF);
    bits |= if cf { CF } else { 0 } | if af { AF } else { 0 };
    Flags::from_bits(bits)
}

/// DAA and DAS (SDM vol. 2A). OF is undefined: 0.
fn decimal(core: &mut Core, down: bool) -> Exec {
    let old = core.reg::<u8>(0);
    let (cf, af) = (core.state.flags.cf(), core.state.flags.bits() & AF != 0);
    let adjust = af || old & 15 > 9;
    let carry = cf || old > 0x99;
    let by = if adjust { 6 } else { 0 } + if carry { 0x60 } else { 0 };
    let value = if down {
        old.wrapping_sub(by)
    } else {
        old.wrapping_add(by)
    };
    // The borrow of the low digit is DAS's carry too.
    let borrow = down && adjust && old < 6;
    core.set_reg(0, value);
    core.state.flags = with_carries(value, carry || borrow, adjust);
    Ok(())
}

/// AAA and AAS. The flags other than CF and AF are undefined: those of AL.
fn ascii(core: &mut Core, down: bool) -> Exec {
    let old = core.reg::<u16>(0);
    let adjust = core.state.flags.bits() & AF != 0 || old & 15 > 9;
    let by = if adjust { 0x106 } else { 0 };
    let value = if down {
        old.wrapping_sub(by)
    } else {
        old.wrapping_add(by)
    };
    core.set_reg(0, value & 0xff0f);
    core.state.flags = with_carries(value as u8 & 15, adjust, adjust);
    Ok(())
}

fn ascii_product(core: &mut Core, base: u8) -> Exec {
    let low = core.reg::<u8>(0);
    let (Some(high), Some(low)) = (low.checked_div(base), low.checked_rem(base)) else {
        return core.raise(0, None);
    };
    core.set_reg(0, u16::from_le_bytes([low, high]));
    core.state.flags = Flags::logic(low.signed());
    Ok(())
}

/// An index, signed, between two bounds in memory.
fn bound(core: &mut Core, insn: &Instruction) -> Exec {
    let width = bits(insn, 0);
    let at = linear(core, insn, false)?;
    let signed = |value| by_width!(width, W => W::of(value).signed()).cast_signed();
    let second = core.beyond(at.at, width / 8);
    let low = by_width!(width, W => core.load::<W>(at.at, at.seg).map(W::wide))?;
    let high = by_width!(width, W => core.load::<W>(second, at.seg).map(W::wide))?;
    let index = signed(get(core, insn.op0_register()));
    if index < signed(low) || index > signed(high) {
        return core.raise(5, None);
    }
    Ok(())
}

/// ARPL: the RPL of a selector is no less than that of another.
fn adjust_privilege(core: &mut Core, insn: &Instruction) -> Exec {
    if is_real(core) {
        return core.ud();
    }
    let selector = read(core, insn, 0)?;
    let least = read(core, insn, 1)? & 3;
    let raises = selector & 3 < least;
    if raises {
        write(core, insn, 0, selector & !3 | least)?;
    }
    let bits = core.state.flags.bits() & !ZF;
    core.state.flags = Flags::from_bits(bits | if raises { ZF } else { 0 });
    Ok(())
}
