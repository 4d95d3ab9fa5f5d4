//! The general register that carries the cookie of an access (`docs/pcr.md`,
//! "Presenting a cookie").

use std::fmt;

use kvm_bindings::{kvm_regs, kvm_sregs};

const EFER_LMA: u64 = 1 << 10;

/// What an instruction presented. It may be a secret, so it is never printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Presented(pub u64);

impl fmt::Debug for Presented {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Presented(..)")
    }
}

impl Presented {
    /// Of an instruction in code of this width: RSI in 64-bit mode, otherwise EDI
    /// over ESI.
    #[must_use]
    pub(crate) fn by(regs: &kvm_regs, bitness: u32) -> Self {
        const LOW: u64 = 0xffff_ffff;
        Self(match bitness {
            64 => regs.rsi,
            _ => (regs.rdi & LOW) << 32 | regs.rsi & LOW,
        })
    }

    /// Of the instruction that a vCPU stopped at.
    #[must_use]
    pub(crate) fn now(regs: &kvm_regs, sregs: &kvm_sregs) -> Self {
        let long = sregs.efer & EFER_LMA != 0 && sregs.cs.l != 0;
        Self::by(regs, if long { 64 } else { 32 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn which_register() {
        let regs = kvm_regs {
            rsi: 0x1111_2222_3333_4444,
            rdi: 0x5555_6666_7777_8888,
            ..Default::default()
        };
        let check = |lma: bool, l: u8, expected| {
            let mut sregs = kvm_sregs {
                efer: if lma { EFER_LMA } else { 0 },
                ..Default::default()
            };
            sregs.cs.l = l;
            assert_eq!(Presented::now(&regs, &sregs), Presented(expected));
        };
        check(true, 1, 0x1111_2222_3333_4444);
        // Compatibility mode, and protected mode with a bit that means nothing there.
        check(true, 0, 0x7777_8888_3333_4444);
        check(false, 1, 0x7777_8888_3333_4444);
        check(false, 0, 0x7777_8888_3333_4444);
    }

    #[test]
    fn it_is_not_printed() {
        assert_eq!(format!("{:x?}", Presented(0xabcd)), "Presented(..)");
    }
}
