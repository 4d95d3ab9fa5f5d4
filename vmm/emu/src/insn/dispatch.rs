//! From an operation to its handler.

use super::alu::{ADC, ADD, AND, CMP, DEC, INC, NEG, NOT, OR, SBB, SUB, TEST, XOR};
use super::core::{Core, Exec};
use super::muldiv::{DIV, IDIV, IMUL, MUL};
use super::op::Op;
use super::operand::{MI, MR, RI, RM, RR};
use super::shift::{ROL, ROR, SAR, SHL, SHR};
use super::table::{K, operations};
use super::vector::{self, moves};
use super::{alu, bits, branch, image, legacy, mem, muldiv, shift, slow, strings, system, x87};
use crate::slow_path::SlowPath;

/// Makes of the table what finds operations, and the one dispatch.
macro_rules! dispatch {
    (
        widths { $($pick:ident $path:ident::$fn:ident($($arg:ident),*):
            $n8:ident $n16:ident $n32:ident $n64:ident;)* }
        words { $($wpick:ident $wpath:ident::$wfn:ident($($warg:ident),*):
            $w16:ident $w32:ident $w64:ident;)* }
        conditions { $($cond:ident $cpath:ident::$cfn:ident($($carg:ident),*):
            $c0:ident $c1:ident $c2:ident $c3:ident $c4:ident $c5:ident $c6:ident $c7:ident
            $c8:ident $c9:ident $c10:ident $c11:ident $c12:ident $c13:ident $c14:ident $c15:ident;)* }
        quiet { $($qpath:ident::$qfn:ident($($qarg:ident),*) $which:ident:
            $of32:ident $of64:ident => $q32:ident $q64:ident;)* }
        single { $($one:ident = $handler:expr;)* }
    ) => {
        impl Pick {
            /// The operations of 8, 16, 32 and 64 bits; of some there is none of 8.
            pub(crate) fn widths(self) -> Option<[K; 4]> {
                match self {
                    $(Pick::$pick($($arg),*) => Some([K::$n8, K::$n16, K::$n32, K::$n64]),)*
                    $(Pick::$wpick($($warg),*) => Some([K::Absent, K::$w16, K::$w32, K::$w64]),)*
                    _ => None,
                }
            }

            /// The operations by condition.
            pub(crate) fn conditions(self) -> Option<[K; 16]> {
                match self {
                    $(Pick::$cond($($carg),*) => Some([
                        K::$c0, K::$c1, K::$c2, K::$c3, K::$c4, K::$c5, K::$c6, K::$c7,
                        K::$c8, K::$c9, K::$c10, K::$c11, K::$c12, K::$c13, K::$c14, K::$c15,
                    ]),)*
                    _ => None,
                }
            }
        }

        /// Carries out one operation.
        #[inline(always)]
        pub(crate) fn execute(core: &mut Core, op: &Op) -> Exec {
            match op.k {
                $(
                    K::$n8 => $path::$fn::<u8, $({ $arg }),*>(core, op),
                    K::$n16 => $path::$fn::<u16, $({ $arg }),*>(core, op),
                    K::$n32 => $path::$fn::<u32, $({ $arg }),*>(core, op),
                    K::$n64 => $path::$fn::<u64, $({ $arg }),*>(core, op),
                )*
                $(
                    K::$w16 => $wpath::$wfn::<u16, $({ $warg }),*>(core, op),
                    K::$w32 => $wpath::$wfn::<u32, $({ $warg }),*>(core, op),
                    K::$w64 => $wpath::$wfn::<u64, $({ $warg }),*>(core, op),
                )*
                $(
                    K::$c0 => $cpath::$cfn::<0, $({ $carg }),*>(core, op),
                    K::$c1 => $cpath::$cfn::<1, $({ $carg }),*>(core, op),
                    K::$c2 => $cpath::$cfn::<2, $({ $carg }),*>(core, op),
                    K::$c3 => $cpath::$cfn::<3, $({ $carg }),*>(core, op),
                    K::$c4 => $cpath::$cfn::<4, $({ $carg }),*>(core, op),
                    K::$c5 => $cpath::$cfn::<5, $({ $carg }),*>(core, op),
                    K::$c6 => $cpath::$cfn::<6, $({ $carg }),*>(core, op),
                    K::$c7 => $cpath::$cfn::<7, $({ $carg }),*>(core, op),
                    K::$c8 => $cpath::$cfn::<8, $({ $carg }),*>(core, op),
                    K::$c9 => $cpath::$cfn::<9, $({ $carg }),*>(core, op),
                    K::$c10 => $cpath::$cfn::<10, $({ $carg }),*>(core, op),
                    K::$c11 => $cpath::$cfn::<11, $({ $carg }),*>(core, op),
                    K::$c12 => $cpath::$cfn::<12, $({ $carg }),*>(core, op),
                    K::$c13 => $cpath::$cfn::<13, $({ $carg }),*>(core, op),
                    K::$c14 => $cpath::$cfn::<14, $({ $carg }),*>(core, op),
                    K::$c15 => $cpath::$cfn::<15, $({ $carg }),*>(core, op),
                )*
                $(
                    K::$q32 => $qpath::$qfn::<u32, $({ $qarg }),*>(core, op),
                    K::$q64 => $qpath::$qfn::<u64, $({ $qarg }),*>(core, op),
                )*
                $(K::$one => $handler(core, op),)*
            }
        }
    };
}

/// Families of operations, by what is done and with which operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pick {
    Alu(u8, u8),
    Mov(u8),
    Unary(u8, u8),
    Shift(u8, u8),
    MulDiv(u8, u8),
    Imul(u8),
    ImulImm(u8),
    Xchg(u8),
    Bt(u8),
    Jcc(),
    Compare8(u8, u8),
    Compare32(u8, u8),
    Compare64(u8, u8),
    Set(u8),
    Cmov16(u8),
    Cmov32(u8),
    Cmov64(u8),
}

operations!(dispatch);
