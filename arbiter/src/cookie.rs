//! Cookies: secrets that a counter's users share with the machine.

use crate::abi;
use core::fmt;
use core::hint::black_box;

/// A cookie of 48 bits.
///
/// It has no way out: it cannot be printed, and two can only be compared by
/// [`Cookie::matches`].
#[derive(Clone, Copy)]
pub struct Cookie(u64);

impl Cookie {
    /// `PCR_DEFAULT_COOKIE`: what accesses without a cookie present.
    pub const DEFAULT: Cookie = Cookie(abi::DEFAULT_COOKIE);

    /// Matches no cookie that anybody can present, as it has more than 48 bits.
    #[cfg(feature = "alloc")]
    pub(crate) const NOBODYS: Cookie = Cookie(u64::MAX);

    /// The cookie in a register's 64 bits; `None` if it has more than 48.
    #[inline]
    pub const fn new(register: u64) -> Option<Cookie> {
        match register & !abi::COOKIE_MASK {
            0 => Some(Cookie(register)),
            _ => None,
        }
    }

    /// A cookie out of random bits, never the default one.
    pub const fn from_random(bits: u64) -> Cookie {
        match bits & abi::COOKIE_MASK {
            0 => Cookie(1),
            bits => Cookie(bits),
        }
    }

    /// Whether it is [`Cookie::DEFAULT`]. Not a secret: `STATUS` tells it.
    #[inline]
    pub const fn is_default(self) -> bool {
        self.0 == abi::DEFAULT_COOKIE
    }

    /// Whether both are the same; takes the same time wherever they differ.
    #[inline]
    pub fn matches(self, other: Cookie) -> bool {
        // One exclusive-or and one test of the whole word: there is no byte at
        // which a comparison could stop early, and `black_box` keeps the optimiser
        // from making one out of what it knows of either side. On x86-64 it comes
        // to XOR, a store, CMP of the whole word with 0, SETE: the first branch
        // that depends on a cookie depends on the outcome alone. The register
        // that was presented is not written anywhere else.
        black_box(self.0 ^ other.0) == 0
    }
}

impl fmt::Debug for Cookie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_default() {
            "Cookie(default)"
        } else {
            "Cookie(secret)"
        })
    }
}
