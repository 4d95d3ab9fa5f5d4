//! The control word of a reservation: which layers may use a counter, how a denied
//! access looks, and which shared controls reach the counter.

use crate::abi;
use crate::{Access, Layer};

/// A control word. The owner of a counter sets it; `docs/reference/pcr.md`, "The control word",
/// lists its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Control(u64);

/// A control register, or a function of one, that several counters share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shared {
    /// The global control register.
    GlobalControl,
    /// The freezing of counters on a PMI.
    Freeze,
    /// The global status register, and the registers that clear and set its bits.
    GlobalStatus,
    /// `IA32_FIXED_CTR_CTRL`.
    FixedControl,
    /// `IA32_PEBS_ENABLE`.
    PebsEnable,
}

impl Shared {
    /// All shared controls, in declaration order.
    pub const ALL: [Shared; 5] = [
        Shared::GlobalControl,
        Shared::Freeze,
        Shared::GlobalStatus,
        Shared::FixedControl,
        Shared::PebsEnable,
    ];

    const fn bit(self) -> u64 {
        match self {
            Shared::GlobalControl => abi::CONTROL_GLOBAL_CTRL,
            Shared::Freeze => abi::CONTROL_FREEZE,
            Shared::GlobalStatus => abi::CONTROL_OVF_CLEAR,
            Shared::FixedControl => abi::CONTROL_FIXED_CTRL,
            Shared::PebsEnable => abi::CONTROL_PEBS_ENABLE,
        }
    }
}

const MODES: u64 = 0xff;
const IMPLEMENTED: u64 =
    MODES | abi::CONTROL_FAULT | abi::CONTROL_FAULT_RDPMC | abi::CONTROL_SHARED | abi::CONTROL_LEND;

impl Control {
    /// The control word of a new reservation: both cookies are valid in every layer,
    /// an access with a wrong cookie is dropped, every shared control reaches the
    /// counter.
    pub const INITIAL: Control = Control(abi::CONTROL_INITIAL);

    /// The control word in a register's 64 bits. `None` means that a bit is set that
    /// must be 0.
    pub const fn new(bits: u64) -> Option<Control> {
        match bits & !IMPLEMENTED {
            0 => Some(Control(bits)),
            _ => None,
        }
    }

    /// The bits of the word.
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

    /// This control word with the owner's agreement to a revocation, or without it.
    #[must_use]
    pub const fn with_lend(self, lend: bool) -> Control {
        if lend {
            Control(self.0 | abi::CONTROL_LEND)
        } else {
            Control(self.0 & !abi::CONTROL_LEND)
        }
    }
}
