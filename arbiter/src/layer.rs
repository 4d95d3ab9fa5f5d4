//! Who asks, and what for.

use core::fmt;

/// The party that performs an access, from the most to the least privileged
/// one inside a guest, and the host's own tools beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Layer {
    /// Guest code that ran before the kernel (a BIOS, an option ROM).
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

    /// The layer's code in the ABI, and its bit in the mode bits of a control
    /// word. A tool of the host is the hypervisor to a guest.
    #[inline]
    pub const fn code(self) -> u8 {
        match self {
            Layer::Firmware => 0,
            Layer::Hypervisor | Layer::HostTool => 1,
            Layer::GuestKernel => 2,
            Layer::GuestUser => 3,
        }
    }

    /// Whether the layer is code of the guest, and so bound by its grant.
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

/// What an access does to the register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// RDMSR.
    Read,
    /// WRMSR.
    Write,
    /// RDPMC.
    Rdpmc,
}
