//! Quantities of the VMM that a tool reads as registers: exits, times, memory.

use std::fmt;

/// First index of the virtual PMDs.
const VIRTUAL: u16 = 64;

/// Defines the virtual PMDs: name, index above the first, what they tell.
macro_rules! virtual_pmds {
    ($($text:literal $name:ident = $index:literal, $word:literal;)*) => {
        /// A quantity of the VMM that can be read as a PMD (§3.2.2). Those of a
        /// context for a core are the sum of what its vCPUs did while it had
        /// them; in a sample they are those of the vCPU that was sampled.
        /// Exits and PMIs are counted one by one, times and memory are derived
        /// from what the host tells.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum VirtualPmd {
            $(#[doc = $text] $name,)*
        }

        impl VirtualPmd {
            /// Every one, by ascending index.
            pub const ALL: &[VirtualPmd] = &[$(VirtualPmd::$name),*];

            /// Its PMD.
            #[must_use]
            pub fn pmd(self) -> u16 {
                VIRTUAL + match self { $(VirtualPmd::$name => $index),* }
            }

            /// Its name as an event of the tools.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(VirtualPmd::$name => $word),* }
            }

            /// What it tells.
            #[must_use]
            pub fn text(self) -> &'static str {
                match self { $(VirtualPmd::$name => $text),* }
            }
        }
    };
}

virtual_pmds! {
    "Exits to the VMM, for whatever reason; what KVM handles by itself is not among them." Exits = 0, "vm-exits";
    "Exits for RDMSR and WRMSR." MsrExits = 1, "vm-exits-msr";
    "Exits for RDPMC." RdpmcExits = 2, "vm-exits-rdpmc";
    "Exits for port I/O." PortExits = 3, "vm-exits-port";
    "Exits for memory-mapped I/O." MmioExits = 4, "vm-exits-mmio";
    "Exits for breakpoints and single steps." DebugExits = 5, "vm-exits-debug";
    "Exits for kicks: timers, signals, requests of the VMM." KickExits = 6, "vm-exits-kick";
    "PMIs that were raised in the guest." Pmis = 7, "vm-pmis";
    "Nanoseconds that the vCPU ran, halted ones left out." RunTime = 8, "vm-run-ns";
    "Nanoseconds that the vCPU could have run and did not: others had its core or its host CPU."
        StealTime = 9, "vm-steal-ns";
    "Nanoseconds that the vCPU was halted, or waited to be started." HaltTime = 10, "vm-halt-ns";
    "Bytes of guest memory that the host has given pages for." GuestMemory = 11, "vm-memory-bytes";
    "Ring at the overflow, 0 for the guest's kernel and 3 for its programs." Ring = 12, "ring";
    "CR3 at the overflow: tells the guest's processes apart." Cr3 = 13, "cr3";
    "Instruction pointer at the overflow." Ip = 14, "ip";
    "The TSC at the overflow: the host's, or the clock of a VM whose time is virtual."
        Tsc = 15, "tsc";
    "Nanoseconds of the host's monotonic clock as the context's registers are read."
        Clock = 16, "clock-ns";
}

impl VirtualPmd {
    /// Whether it tells of the moment of an overflow: in samples, and while the
    /// context is masked or keeps its vCPU blocked.
    #[must_use]
    pub fn is_of_overflow(self) -> bool {
        matches!(
            self,
            VirtualPmd::Ring | VirtualPmd::Cr3 | VirtualPmd::Ip | VirtualPmd::Tsc
        )
    }
}

impl fmt::Display for VirtualPmd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
