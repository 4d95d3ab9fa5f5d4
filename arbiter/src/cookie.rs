//! Cookies: secrets that the users of a counter share with the machine.

use core::fmt;
use core::hint::black_box;

use crate::abi;

/// A cookie of 48 bits.
///
/// Nothing prints or returns its bits. [`Cookie::matches`] is the only comparison.
#[derive(Clone, Copy)]
pub struct Cookie(u64);

impl Cookie {
    /// `PCR_DEFAULT_COOKIE`, which an access without a cookie presents.
    pub const DEFAULT: Cookie = Cookie(abi::DEFAULT_COOKIE);

    /// The cookie in a register's 64 bits. `None` means that a bit above the 48th is
    /// set.
    #[inline]
    pub const fn new(register: u64) -> Option<Cookie> {
        match register & !abi::COOKIE_MASK {
            0 => Some(Cookie(register)),
            _ => None,
        }
    }

    /// A cookie made of random bits. It is never the default cookie.
    pub const fn from_random(bits: u64) -> Cookie {
        match bits & abi::COOKIE_MASK {
            0 => Cookie(1),
            bits => Cookie(bits),
        }
    }

    /// Whether this is [`Cookie::DEFAULT`]. That is no secret: `STATUS` shows it.
    #[inline]
    pub const fn is_default(self) -> bool {
        self.0 == abi::DEFAULT_COOKIE
    }

    /// Whether two cookies are equal. The comparison takes the same time wherever they
    /// differ.
    #[inline]
    pub fn matches(self, other: Cookie) -> bool {
        // This is one exclusive-or and one test of the whole word, so there is no
        // byte at which the comparison could stop early. `black_box` keeps the
        // optimiser from using what it knows of either side. On x86-64 it compiles
        // to XOR, a store, CMP of the whole word with 0 and SETE: the first branch
        // that depends on a cookie depends on the outcome alone. The presented
        // register is written nowhere else.
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
