//! Who asks, and what for: the layers of a machine, and the phase that tells
//! firmware from kernel.

use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};

#[cfg(feature = "alloc")]
use crate::account::Account;

/// The software layer that performs an access. The order is from the most to the
/// least privileged layer inside a guest; the host's own tools come last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Layer {
    /// Guest code that runs before the kernel (a BIOS, an option ROM), and code in
    /// SMM.
    Firmware,
    /// The hypervisor itself, on its own behalf.
    Hypervisor,
    /// The guest's kernel: CPL 0.
    GuestKernel,
    /// A program of the guest: CPL 1 to 3.
    GuestUser,
    /// A tool of the host that watches a guest.
    HostTool,
}

impl Layer {
    /// Every layer, in declaration order.
    pub const ALL: [Layer; 5] = [
        Layer::Firmware,
        Layer::Hypervisor,
        Layer::GuestKernel,
        Layer::GuestUser,
        Layer::HostTool,
    ];

    /// The layer's code in the ABI, which is also its bit in the mode bits of a
    /// control word. A guest sees a tool of the host as the hypervisor.
    #[inline]
    pub const fn code(self) -> u8 {
        match self {
            Layer::Firmware => 0,
            Layer::Hypervisor | Layer::HostTool => 1,
            Layer::GuestKernel => 2,
            Layer::GuestUser => 3,
        }
    }

    /// The layer's word in options, scripts and files.
    pub const fn word(self) -> &'static str {
        match self {
            Layer::Firmware => "firmware",
            Layer::Hypervisor => "hypervisor",
            Layer::GuestKernel => "kernel",
            Layer::GuestUser => "user",
            Layer::HostTool => "tool",
        }
    }

    /// The layer with this word.
    pub fn named(word: &str) -> Option<Layer> {
        Self::ALL.into_iter().find(|layer| layer.word() == word)
    }

    /// The layer that holds the counters of this one. A tool of the host holds them
    /// as the hypervisor.
    #[cfg(feature = "alloc")]
    pub(crate) const fn as_holder(self) -> Layer {
        match self {
            Layer::HostTool => Layer::Hypervisor,
            other => other,
        }
    }

    /// Whether the layer is code of the guest, which its grant binds.
    pub fn is_guest(self) -> bool {
        matches!(
            self,
            Layer::Firmware | Layer::GuestKernel | Layer::GuestUser
        )
    }
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Layer::Firmware => "firmware",
            Layer::Hypervisor => "hypervisor",
            Layer::GuestKernel => "guest kernel",
            Layer::GuestUser => "guest user",
            Layer::HostTool => "host tool",
        })
    }
}

/// The instruction that accesses a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// RDMSR.
    Read,
    /// WRMSR.
    Write,
    Rdpmc,
}

/// The firmware's phase of a machine: whether the firmware still runs. All vCPUs of
/// the machine share it, and with it the account of their wrong cookies.
#[derive(Debug)]
pub struct Phase {
    over: AtomicBool,
    has_firmware: bool,
    /// How often the machine has started over.
    starts: AtomicU32,
    in_smm: AtomicBool,
    /// Wrong cookies of firmware and kernel.
    #[cfg(feature = "alloc")]
    pub(crate) privileged: Account,
    /// Wrong cookies of programs.
    #[cfg(feature = "alloc")]
    pub(crate) programs: Account,
}

impl Phase {
    /// The phase at the start. A machine without firmware starts when it is over.
    pub const fn new(has_firmware: bool) -> Self {
        Phase {
            over: AtomicBool::new(!has_firmware),
            has_firmware,
            starts: AtomicU32::new(0),
            in_smm: AtomicBool::new(false),
            #[cfg(feature = "alloc")]
            privileged: Account::new(),
            #[cfg(feature = "alloc")]
            programs: Account::new(),
        }
    }

    /// Whether the machine has firmware, and so starts in its phase.
    pub fn has_firmware(&self) -> bool {
        self.has_firmware
    }

    /// Whether the firmware's phase is over.
    #[inline]
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Ends the firmware's phase. Returns false if it was over before.
    pub fn end(&self) -> bool {
        !self.over.swap(true, Ordering::AcqRel)
    }

    /// The firmware ends its phase, and has left code in SMM.
    #[cfg(feature = "alloc")]
    pub(crate) fn stay_in_smm(&self) {
        self.in_smm.store(true, Ordering::Release);
    }

    /// Whether the firmware has left code in SMM, which an SMI calls.
    #[inline]
    pub fn is_in_smm(&self) -> bool {
        self.in_smm.load(Ordering::Acquire)
    }

    /// Starts over after a reset of the machine: its firmware runs again.
    pub fn restart(&self) {
        self.in_smm.store(false, Ordering::Release);
        self.over.store(!self.has_firmware, Ordering::Release);
        // Who sees that it is another start sees whether the firmware runs in it.
        self.starts.fetch_add(1, Ordering::Release);
    }

    /// How often the machine has started over: a number for this start of it.
    #[cfg(feature = "alloc")]
    #[inline]
    pub(crate) fn starts(&self) -> u32 {
        self.starts.load(Ordering::Acquire)
    }

    /// The layer of guest code, by whether it runs at CPL 0 and whether in SMM.
    #[inline]
    pub fn layer(&self, cpl0: bool, smm: bool) -> Layer {
        match (smm || !self.is_over(), cpl0) {
            (true, true) => Layer::Firmware,
            (false, true) => Layer::GuestKernel,
            (_, false) => Layer::GuestUser,
        }
    }
}
