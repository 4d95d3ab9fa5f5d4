//! The CMOS memory with its real-time clock (MC146818), ports 0x70 and 0x71.
//!
//! The clock runs on the host's time of day (UTC), in BCD and 24-hour mode. It
//! cannot be set: guests that write to it go on with their own offset, so writes
//! to data registers are dropped. Every register without a meaning reads as 0.

use serde::{Deserialize, Serialize};

use super::ports::CMOS_CENTURY;
use super::time::{CalendarTime, DeviceClock};

/// Status A: the divider runs (0b010 in bits 6:4), 1024 Hz rate; bit 7, "update in
/// progress", is never set because a reading is always complete.
const STATUS_A: u8 = 0x26;
/// Status B: bit 1 selects 24-hour mode; bit 2 clear selects BCD.
const STATUS_B: u8 = 0x02;
/// Status D: bit 7 means that memory and time are valid.
const STATUS_D: u8 = 0x80;
/// Bit 7 of the index port gates NMIs on real hardware and is no part of the index.
const INDEX_MASK: u8 = 0x7f;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rtc {
    index: u8,
}

impl Rtc {
    pub(super) fn write_index(&mut self, value: u8) {
        self.index = value & INDEX_MASK;
    }

    pub(super) fn read_data(&self, time: &dyn DeviceClock) -> u8 {
        let now = || CalendarTime::from_unix(time.unix_seconds());
        match self.index {
            0x00 => bcd(now().second),
            0x02 => bcd(now().minute),
            0x04 => bcd(now().hour),
            0x06 => bcd(now().weekday),
            0x07 => bcd(now().day),
            0x08 => bcd(now().month),
            0x09 => bcd(two_digits(now().year % 100)),
            CMOS_CENTURY => bcd(two_digits(now().year / 100 % 100)),
            0x0a => STATUS_A,
            0x0b => STATUS_B,
            0x0d => STATUS_D,
            _ => 0,
        }
    }
}

fn two_digits(value: u64) -> u8 {
    u8::try_from(value % 100).unwrap_or(0)
}

/// Two decimal digits as one byte; `value` is below 100.
fn bcd(value: u8) -> u8 {
    ((value / 10) << 4) | (value % 10)
}

#[cfg(test)]
mod tests {
    use super::super::time::tests::FixedTime;
    use super::*;

    fn check(index: u8, expected: u8) {
        // 2026-11-21 07:58:09 UTC, a Saturday.
        let time = FixedTime {
            unix: 1_795_247_889,
            ..FixedTime::default()
        };
        let mut rtc = Rtc::default();
        rtc.write_index(index);
        assert_eq!(rtc.read_data(&time), expected, "register {index:#x}");
    }

    #[test]
    fn registers() {
        check(0x00, 0x09);
        check(0x02, 0x58);
        check(0x04, 0x07);
        check(0x06, 0x07);
        check(0x07, 0x21);
        check(0x08, 0x11);
        check(0x09, 0x26);
        check(0x32, 0x20);
        check(0x0a, 0x26);
        check(0x0b, 0x02);
        check(0x0c, 0x00);
        check(0x0d, 0x80);
        check(0x7f, 0x00);
        check(0x80, 0x09); // the NMI gate bit is not part of the index
    }
}
