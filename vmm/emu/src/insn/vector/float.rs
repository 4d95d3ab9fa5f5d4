//! Floating point: operands here, arithmetic in `emu-fpu`.

use emu_fpu::sse::{self, Op};

use super::{Args, X, full, general, low, set_xmm, to, xmm};
use crate::flags::Flags;
use crate::insn::core::{Core, Exec};
use crate::state::CR4_OSXMMEXCPT;

/// What an operation makes of `a` and `b`. MXCSR gets the flags, also of an exception that is not
/// masked, which leaves all else as it is (SDM vol. 1, 11.5.1).
pub(super) fn result(core: &mut Core, op: Op, a: X, b: X, imm: u8) -> Exec<X> {
    let mxcsr = core.state.mxcsr;
    let outcome = sse::execute(op, a, b, imm, mxcsr);
    core.state.mxcsr |= outcome.flags;
    if outcome.faults(mxcsr) {
        return exception(core);
    }
    Ok(outcome.value)
}

#[cold]
fn exception<T>(core: &mut Core) -> Exec<T> {
    if core.state.cr4 & CR4_OSXMMEXCPT == 0 {
        return core.ud();
    }
    core.raise(19, None)
}

fn finish(core: &mut Core, args: &Args, op: Op, b: X) -> Exec {
    let to = to(args);
    let value = result(core, op, xmm(core, to), b, args.imm)?;
    set_xmm(core, to, value);
    Ok(())
}

/// Of all of the source.
pub(super) fn packed(core: &mut Core, args: &Args, op: Op) -> Exec {
    let b = full(core, args)?;
    finish(core, args, op, b)
}

/// Of its low 64 bits.
pub(super) fn double(core: &mut Core, args: &Args, op: Op) -> Exec {
    let b = low::<u64>(core, args)?;
    finish(core, args, op, b)
}

/// Of its low 32.
pub(super) fn single(core: &mut Core, args: &Args, op: Op) -> Exec {
    let b = low::<u32>(core, args)?;
    finish(core, args, op, b)
}

/// Of an integer of 32 bits or 64.
pub(super) fn integer(core: &mut Core, args: &Args, ops: [Op; 2]) -> Exec {
    if args.wide {
        let b = general::<u64>(core, args)?;
        finish(core, args, ops[1], [b, 0])
    } else {
        let b = general::<u32>(core, args)?;
        finish(core, args, ops[0], [b, 0])
    }
}

fn to_integer(core: &mut Core, args: &Args, ops: [Op; 2], b: X) -> Exec {
    if args.wide {
        let value = result(core, ops[1], b, b, 0)?;
        core.set_reg(to(args), value[0]);
    } else {
        let value = result(core, ops[0], b, b, 0)?;
        core.set_reg(to(args), value[0] as u32);
    }
    Ok(())
}

/// To an integer, of the low 64 bits.
pub(super) fn double_to_integer(core: &mut Core, args: &Args, ops: [Op; 2]) -> Exec {
    let b = low::<u64>(core, args)?;
    to_integer(core, args, ops, b)
}

/// Of the low 32.
pub(super) fn single_to_integer(core: &mut Core, args: &Args, ops: [Op; 2]) -> Exec {
    let b = low::<u32>(core, args)?;
    to_integer(core, args, ops, b)
}

fn compare(core: &mut Core, args: &Args, op: Op, b: X) -> Exec {
    let flags = result(core, op, xmm(core, to(args)), b, 0)?;
    core.state.flags = Flags::from_bits(flags[0]);
    Ok(())
}

/// Flags of a comparison of the low 64 bits.
pub(super) fn compare_double(core: &mut Core, args: &Args, op: Op) -> Exec {
    let b = low::<u64>(core, args)?;
    compare(core, args, op, b)
}

/// Of the low 32.
pub(super) fn compare_single(core: &mut Core, args: &Args, op: Op) -> Exec {
    let b = low::<u32>(core, args)?;
    compare(core, args, op, b)
}
