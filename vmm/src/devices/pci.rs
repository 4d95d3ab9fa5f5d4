//! A PCI configuration mechanism #1 behind which there is no bus, and the reset
//! control register that shares its ports.
//!
//! Ports 0xCF8 to 0xCFB hold the address register, which answers only to 32-bit
//! accesses; a byte access to 0xCF9 is the reset control register instead (as
//! on Intel's and AMD's chipsets). Ports 0xCFC to 0xCFF are the data window:
//! every read is all ones, which is how a missing function reads.

use serde::{Deserialize, Serialize};

/// Address bits that exist: enable (31), bus (23:16), device and function (15:8),
/// register (7:2).
const ADDRESS_MASK: u32 = 0x80ff_fffc;
/// Reset control: RST_CPU, setting it resets the machine.
const RST_CPU: u8 = 1 << 2;
/// Reset control bits that read back: SYS_RST (1) and FULL_RST (3).
const RESET_KEPT: u8 = 1 << 1 | 1 << 3;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PciHole {
    address: u32,
    reset_control: u8,
}

impl PciHole {
    pub(super) fn read_address(&self) -> u32 {
        self.address
    }

    pub(super) fn write_address(&mut self, value: u32) {
        self.address = value & ADDRESS_MASK;
    }

    pub(super) fn read_reset_control(&self) -> u8 {
        self.reset_control
    }

    /// Returns true if this write resets the machine.
    pub(super) fn write_reset_control(&mut self, value: u8) -> bool {
        self.reset_control = value & RESET_KEPT;
        value & RST_CPU != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_keeps_what_exists() {
        fn check(written: u32, expected: u32) {
            let mut pci = PciHole::default();
            pci.write_address(written);
            assert_eq!(pci.read_address(), expected);
        }
        check(0x8000_0000, 0x8000_0000);
        check(0xffff_ffff, 0x80ff_fffc);
        check(0x0000_1234, 0x0000_1234);
    }

    #[test]
    fn reset_control() {
        fn check(written: u8, resets: bool, reads: u8) {
            let mut pci = PciHole::default();
            assert_eq!(pci.write_reset_control(written), resets);
            assert_eq!(pci.read_reset_control(), reads);
        }
        check(0x00, false, 0x00);
        check(0x02, false, 0x02);
        check(0x06, true, 0x02);
        check(0x0e, true, 0x0a);
        check(0xfb, false, 0x0a);
    }
}
