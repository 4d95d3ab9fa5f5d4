//! ACPI's fixed power management registers: the PM1a event and control blocks
//! and the power management timer (ACPI 6.5, sections 4.8.3.1 to 4.8.3.3).

use serde::{Deserialize, Serialize};

use super::time::DeviceClock;

/// The frequency of the power management timer in hertz (ACPI 6.5, 4.8.3.3).
pub const PM_TIMER_HZ: u32 = 3_579_545;

/// The SLP_TYP value that the DSDT's `\_S5` package must name for a power-off.
pub const SLP_TYP_POWER_OFF: u16 = 5;

/// How many bits the power management timer counts before it wraps. It has to
/// agree with the FADT flag TMR_VAL_EXT.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TimerWidth {
    /// 24 bits: TMR_VAL_EXT is clear.
    Bits24,
    /// 32 bits: TMR_VAL_EXT is set.
    #[default]
    Bits32,
}

/// PM1 control: SCI_EN. There is no SMI and thus no legacy mode to leave, so it
/// always reads as 1.
const SCI_EN: u16 = 1 << 0;
/// PM1 control: SLP_TYP, bits 12:10.
const SLP_TYP_SHIFT: u16 = 10;
const SLP_TYP_MASK: u16 = 0b111 << SLP_TYP_SHIFT;
/// PM1 control: SLP_EN, write only, reads as 0.
const SLP_EN: u16 = 1 << 13;
/// PM1 control bits that read back as written: BM_RLD (1) and SLP_TYP. GBL_RLS
/// (2) is write only.
const CONTROL_KEPT: u16 = 1 << 1 | SLP_TYP_MASK;
/// PM1 enable bits that exist: TMR (0), GBL (5), PWRBTN (8), SLPBTN (9), RTC (10).
const ENABLE_KEPT: u16 = 1 << 0 | 1 << 5 | 1 << 8 | 1 << 9 | 1 << 10;

/// Bytes from the first to the last register of the block.
const LEN: usize = 12;
const ENABLE: usize = 2;
const CONTROL: usize = 4;
const TIMER: usize = 8;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AcpiPm {
    enable: u16,
    control: u16,
    width: TimerWidth,
}

impl AcpiPm {
    pub(super) fn new(width: TimerWidth) -> Self {
        Self {
            width,
            ..Self::default()
        }
    }

    /// Reads from byte `offset` of the block on; bytes past its end are all ones.
    pub(super) fn read(&self, offset: usize, data: &mut [u8], time: &dyn DeviceClock) {
        let image = self.image(time);
        for (i, byte) in data.iter_mut().enumerate() {
            *byte = image.get(offset + i).copied().unwrap_or(0xff);
        }
    }

    /// Writes from byte `offset` of the block on. Returns true if that is the
    /// order to power off.
    pub(super) fn write(&mut self, offset: usize, data: &[u8]) -> bool {
        let at = |register: usize| {
            // The bytes of a 16-bit register that this access covers, and their mask.
            let (mut value, mut mask) = (0u16, 0u16);
            for (i, &byte) in data.iter().enumerate() {
                match (offset + i).checked_sub(register) {
                    Some(0) => (value, mask) = (value | u16::from(byte), mask | 0x00ff),
                    Some(1) => (value, mask) = (value | u16::from(byte) << 8, mask | 0xff00),
                    _ => {}
                }
            }
            (value, mask)
        };
        let (value, mask) = at(ENABLE);
        self.enable = (self.enable & !mask | value) & ENABLE_KEPT;
        let (value, mask) = at(CONTROL);
        self.control = (self.control & !mask | value) & CONTROL_KEPT;
        // A guest may write the two bytes of the register one by one: SLP_TYP and
        // SLP_EN share the upper one, so the order is complete with it.
        let sleeps = value & SLP_EN != 0;
        sleeps && (self.control & SLP_TYP_MASK) >> SLP_TYP_SHIFT == SLP_TYP_POWER_OFF
    }

    fn image(&self, time: &dyn DeviceClock) -> [u8; LEN] {
        let mut image = [0; LEN];
        // No event source exists, so the status register (offset 0) stays 0.
        image[ENABLE..ENABLE + 2].copy_from_slice(&self.enable.to_le_bytes());
        image[CONTROL..CONTROL + 2].copy_from_slice(&(self.control | SCI_EN).to_le_bytes());
        image[TIMER..TIMER + 4].copy_from_slice(&self.timer(time).to_le_bytes());
        image
    }

    fn timer(&self, time: &dyn DeviceClock) -> u32 {
        let ticks = time.elapsed().as_nanos() * u128::from(PM_TIMER_HZ) / 1_000_000_000;
        let bits = match self.width {
            TimerWidth::Bits24 => 24,
            TimerWidth::Bits32 => 32,
        };
        u32::try_from(ticks & ((1 << bits) - 1)).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::time::tests::FixedTime;
    use super::*;

    fn read(pm: &AcpiPm, offset: usize, len: usize) -> u64 {
        let mut data = [0; 8];
        pm.read(offset, &mut data[..len], &FixedTime::default());
        u64::from_le_bytes(data)
    }

    #[test]
    fn control_keeps_sleep_type_and_always_shows_sci_en() {
        let mut pm = AcpiPm::default();
        assert_eq!(read(&pm, 4, 2), 1);
        assert!(!pm.write(4, &0x1c00u16.to_le_bytes()));
        assert_eq!(read(&pm, 4, 2), 0x1c01);
    }

    #[test]
    fn power_off_needs_type_5_and_the_enable_bit() {
        fn check(offset: usize, data: &[u8], expected: bool) {
            let mut pm = AcpiPm::default();
            assert_eq!(pm.write(offset, data), expected, "{offset} {data:x?}");
            assert_eq!(read(&pm, 4, 2) & u64::from(SLP_EN), 0);
        }
        check(4, &0x3400u16.to_le_bytes(), true);
        check(4, &0x3400u32.to_le_bytes(), true);
        check(5, &[0x34], true);
        check(4, &0x1400u16.to_le_bytes(), false); // no SLP_EN
        check(4, &0x2000u16.to_le_bytes(), false); // type 0
        check(2, &0x3400u16.to_le_bytes(), false); // another register
        check(2, &0x3400_0000u32.to_le_bytes(), true); // across both
    }

    #[test]
    fn event_registers() {
        let mut pm = AcpiPm::default();
        assert!(!pm.write(0, &[0xff; 4]));
        assert_eq!(read(&pm, 0, 2), 0);
        assert_eq!(read(&pm, 2, 2), u64::from(ENABLE_KEPT));
        assert_eq!(read(&pm, 10, 4), 0xffff_0000); // past the end
    }

    #[test]
    fn timer_counts_and_wraps() {
        fn check(width: TimerWidth, elapsed: Duration, expected: u32) {
            let time = FixedTime {
                elapsed,
                ..FixedTime::default()
            };
            let mut data = [0; 4];
            AcpiPm::new(width).read(TIMER, &mut data, &time);
            assert_eq!(u32::from_le_bytes(data), expected, "{width:?} {elapsed:?}");
        }
        let s = Duration::from_secs;
        check(TimerWidth::Bits24, s(1), PM_TIMER_HZ);
        check(TimerWidth::Bits24, s(5), 5 * PM_TIMER_HZ - (1 << 24));
        check(TimerWidth::Bits32, s(5), 5 * PM_TIMER_HZ);
        check(TimerWidth::Bits32, s(1200), 486_704);
        check(TimerWidth::Bits32, Duration::from_nanos(280), 1);
        check(TimerWidth::Bits32, Duration::from_nanos(279), 0);
    }
}
