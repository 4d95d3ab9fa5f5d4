//! The control word of a counter's reservation.

use crate::abi;
use crate::{Access, Layer};

/// What the owner of a counter says about it: `docs/pcr.md`, "The control word".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Control(u64);

/// A control that several counters share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shared {
    /// The global control register.
    GlobalControl,
    /// Freezing on a PMI.
    Freeze,
    /// Global status, and the registers that clear and set it.
    GlobalStatus,
    /// `IA32_FIXED_CTR_CTRL`.
    FixedControl,
}

impl Shared {
    /// All of them, in declaration order.
    pub const ALL: [Shared; 4] = [
        Shared::GlobalControl,
        Shared::Freeze,
        Shared::GlobalStatus,
        Shared::FixedControl,
    ];

    const fn bit(self) -> u64 {
        match self {
            Shared::GlobalControl => abi::CONTROL_GLOBAL_CTRL,
            Shared::Freeze => abi::CONTROL_FREEZE,
            Shared::GlobalStatus => abi::CONTROL_OVF_CLEAR,
            Shared::FixedControl => abi::CONTROL_FIXED_CTRL,
        }
    }
}

const MODES: u64 = 0xff;
const IMPLEMENTED: u64 = MODES
    | abi::CONTROL_FAULT
    | abi::CONTROL_FAULT_RDPMC
    | abi::CONTROL_GLOBAL_CTRL
    | abi::CONTROL_FREEZE
    | abi::CONTROL_OVF_CLEAR
    | abi::CONTROL_FIXED_CTRL
    | abi::CONTROL_LEND;

impl Control {
    /// The most basic environment: both cookies are valid everywhere, wrong
    /// ones are dropped, every legacy control reaches the counter.
    pub const INITIAL: Control = Control(abi::CONTROL_INITIAL);

    /// The control word in a register's 64 bits; `None` if a bit is set that
    /// must be 0.
    pub const fn new(bits: u64) -> Option<Control> {
        match bits & !IMPLEMENTED {
            0 => Some(Control(bits)),
            _ => None,
        }
    }

    /// The word.
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// Whether the management cookie is valid in `layer`.
    #[inline]
    pub fn manages(self, layer: Layer) -> bool {
        self.0 & (1 << layer.code()) != 0
    }

    /// Whether the access cookie is valid in `layer`.
    #[inline]
    pub fn accesses(self, layer: Layer) -> bool {
        self.0 & (1 << (4 + layer.code())) != 0
    }

    /// Whether `access` by `layer` with a wrong cookie raises #GP.
    #[inline]
    pub fn faults(self, layer: Layer, access: Access) -> bool {
        match (access, layer) {
            (Access::Rdpmc, Layer::GuestKernel | Layer::Firmware) => {
                self.0 & abi::CONTROL_FAULT_RDPMC != 0
            }
            _ => self.0 & abi::CONTROL_FAULT != 0,
        }
    }

    /// Whether a shared control reaches the counter.
    #[inline]
    pub fn reached_by(self, shared: Shared) -> bool {
        self.0 & shared.bit() != 0
    }

    /// Whether the owner agrees to a revocation.
    pub fn lends(self) -> bool {
        self.0 & abi::CONTROL_LEND != 0
    }

    /// The same, on loan or not.
    #[must_use]
    pub const fn with_lend(self, lend: bool) -> Control {
        match lend {
            true => Control(self.0 | abi::CONTROL_LEND),
            false => Control(self.0 & !abi::CONTROL_LEND),
        }
    }
}
