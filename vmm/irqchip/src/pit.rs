//! A programmable interval timer (8254) and port 61h.

use serde::{Deserialize, Serialize};

use crate::time::Rate;

/// Cycles a second of the clock that the three channels count: a twelfth of 14.31818 MHz.
pub(crate) const PIT_HZ: u64 = 1_193_182;

/// What is read and written of a count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
enum Halves {
    Low,
    High,
    Both,
}

/// The half of a count that comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
enum Half {
    Low,
    High,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
enum Gate {
    Low,
    High,
}

/// Cycles that a channel has counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
enum Count {
    /// It waits for a count or, in modes 1 and 5, for its gate.
    Waits,
    /// All since this cycle.
    Since(u64),
    /// So many, and its gate is low.
    Held(u64),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Channel {
    /// 0 to 5.
    mode: u8,
    halves: Halves,
    decimal: bool,
    /// What was written; `written` holds the low half until the high one comes.
    reload: u16,
    written: u8,
    write_half: Half,
    read_half: Half,
    count: Count,
    gate: Gate,
    latched_count: Option<u16>,
    latched_status: Option<u8>,
}

impl Channel {
    fn new(gate: Gate) -> Self {
        Self {
            mode: 3,
            halves: Halves::Both,
            decimal: false,
            reload: 0,
            written: 0,
            write_half: Half::Low,
            read_half: Half::Low,
            count: Count::Waits,
            gate,
            latched_count: None,
            latched_status: None,
        }
    }

    /// Cycles from the load to the end of a period. 0 stands for the most; 1 is not allowed
    /// in modes 2 and 3, and counts as 2.
    fn period(&self) -> u64 {
        let most = if self.decimal { 10_000 } else { 0x1_0000 };
        let reload = if self.decimal {
            from_decimal(self.reload)
        } else {
            self.reload.into()
        };
        match (reload, self.mode) {
            (0, _) => most,
            (1, 2 | 3) => 2,
            _ => reload,
        }
    }

    fn elapsed(&self, cycle: u64) -> Option<u64> {
        match self.count {
            Count::Waits => None,
            Count::Since(start) => Some(cycle.saturating_sub(start)),
            Count::Held(elapsed) => Some(elapsed),
        }
    }

    /// The counting element.
    fn value(&self, cycle: u64) -> u16 {
        let Some(elapsed) = self.elapsed(cycle) else {
            return self.reload;
        };
        let period = self.period();
        let most = if self.decimal { 10_000 } else { 0x1_0000 };
        let value = match self.mode {
            2 => period - elapsed % period,
            // By two, from an even number.
            3 => (period & !1) - 2 * (elapsed % period) % (period & !1),
            // It goes on below 0.
            _ => (period + most - elapsed % most) % most,
        };
        if self.decimal {
            to_decimal(value % most)
        } else {
            u16::try_from(value % most).unwrap_or(0)
        }
    }

    /// OUT is high.
    fn out(&self, cycle: u64) -> bool {
        let period = self.period();
        match (self.mode, self.elapsed(cycle)) {
            (0, elapsed) => elapsed.is_some_and(|elapsed| elapsed >= period),
            (_, None) => true,
            (1, Some(elapsed)) => elapsed >= period,
            (2, Some(elapsed)) => elapsed % period != period - 1,
            (3, Some(elapsed)) => elapsed % period < period.div_ceil(2),
            (_, Some(elapsed)) => elapsed != period,
        }
    }

    /// The first cycle after this one at which OUT rises.
    fn next_rise(&self, cycle: u64) -> Option<u64> {
        let Count::Since(start) = self.count else {
            return None;
        };
        let period = self.period();
        let rise = match self.mode {
            0 | 1 => start.checked_add(period)?,
            2 | 3 => {
                let periods = cycle.saturating_sub(start) / period + 1;
                start.checked_add(periods.checked_mul(period)?)?
            }
            _ => start.checked_add(period + 1)?,
        };
        (rise > cycle).then_some(rise)
    }

    fn set_gate(&mut self, gate: Gate, cycle: u64) {
        let was = std::mem::replace(&mut self.gate, gate);
        self.count = match (self.mode, was, gate, self.count) {
            (0 | 4, Gate::High, Gate::Low, Count::Since(start)) => {
                Count::Held(cycle.saturating_sub(start))
            }
            (0 | 4, Gate::Low, Gate::High, Count::Held(elapsed)) => {
                Count::Since(cycle.saturating_sub(elapsed))
            }
            (2 | 3, Gate::High, Gate::Low, Count::Since(_)) => Count::Held(0),
            (2 | 3, Gate::Low, Gate::High, Count::Held(_)) => Count::Since(cycle),
            (1 | 5, Gate::Low, Gate::High, _) => Count::Since(cycle),
            (_, _, _, count) => count,
        };
    }

    /// A control word for this channel.
    fn control(&mut self, word: u8, cycle: u64) {
        let halves = match word >> 4 & 3 {
            0 => return self.latch_count(cycle),
            1 => Halves::Low,
            2 => Halves::High,
            _ => Halves::Both,
        };
        // Modes 2 and 3 have two codes.
        let mode = match word >> 1 & 7 {
            mode @ (6 | 7) => mode - 4,
            mode => mode,
        };
        *self = Self {
            mode,
            halves,
            decimal: word & 1 != 0,
            ..Self::new(self.gate)
        };
    }

    fn latch_count(&mut self, cycle: u64) {
        if self.latched_count.is_none() {
            self.latched_count = Some(self.value(cycle));
        }
    }

    fn latch_status(&mut self, cycle: u64) {
        const NULL_COUNT: u8 = 1 << 6;
        if self.latched_status.is_some() {
            return;
        }
        let halves = match self.halves {
            Halves::Low => 1,
            Halves::High => 2,
            Halves::Both => 3,
        };
        let mut status = u8::from(self.out(cycle)) << 7;
        if self.count == Count::Waits {
            status |= NULL_COUNT;
        }
        self.latched_status = Some(status | halves << 4 | self.mode << 1 | u8::from(self.decimal));
    }

    fn read(&mut self, cycle: u64) -> u8 {
        if let Some(status) = self.latched_status.take() {
            return status;
        }
        let [low, high] = self
            .latched_count
            .unwrap_or_else(|| self.value(cycle))
            .to_le_bytes();
        let (half, last) = match (self.halves, self.read_half) {
            (Halves::Low, _) => (low, true),
            (Halves::High, _) => (high, true),
            (Halves::Both, Half::Low) => (low, false),
            (Halves::Both, Half::High) => (high, true),
        };
        if last {
            self.latched_count = None;
            self.read_half = Half::Low;
        } else {
            self.read_half = Half::High;
        }
        half
    }

    fn write(&mut self, value: u8, cycle: u64) {
        match (self.halves, self.write_half) {
            (Halves::Low, _) => self.load(value.into(), cycle),
            (Halves::High, _) => self.load(u16::from(value) << 8, cycle),
            (Halves::Both, Half::Low) => {
                self.written = value;
                self.write_half = Half::High;
                // The first half stops a count of mode 0.
                if self.mode == 0 {
                    self.count = Count::Waits;
                }
            }
            (Halves::Both, Half::High) => {
                self.write_half = Half::Low;
                self.load(u16::from_le_bytes([self.written, value]), cycle);
            }
        }
    }

    /// A new count, from which it counts at once. (An 8254 finishes the running period of
    /// modes 2 and 3 before; KVM's does not.)
    fn load(&mut self, reload: u16, cycle: u64) {
        self.reload = reload;
        self.count = match (self.mode, self.gate) {
            (1 | 5, _) => self.count,
            (_, Gate::High) => Count::Since(cycle),
            (_, Gate::Low) => Count::Held(0),
        };
    }
}

fn from_decimal(value: u16) -> u64 {
    let digit = |at: u32| u64::from(value >> (4 * at) & 0xf) * 10u64.pow(at);
    digit(0) + digit(1) + digit(2) + digit(3)
}

fn to_decimal(value: u64) -> u16 {
    let digits = (0..4).map(|at| (value / 10u64.pow(at) % 10) << (4 * at));
    u16::try_from(digits.sum::<u64>()).unwrap_or(0)
}

/// Whether OUT of channel 0 rose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tick {
    None,
    /// Once, or more often.
    Rose,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Pit {
    rate: Rate,
    channels: [Channel; 3],
    /// Bits 3:0 of port 61h.
    port_61: u8,
    /// The cycle at which it was last looked at.
    seen: u64,
}

impl Pit {
    pub(crate) fn new(tsc_hz: u64) -> Self {
        Self {
            rate: Rate::new(PIT_HZ, tsc_hz),
            channels: [Gate::High, Gate::High, Gate::Low].map(Channel::new),
            port_61: 0,
            seen: 0,
        }
    }

    /// When OUT of channel 0 rises next.
    pub(crate) fn next(&self) -> Option<u64> {
        self.rate.ticks(self.channels[0].next_rise(self.seen)?)
    }

    /// Goes on to `now`.
    pub(crate) fn advance(&mut self, now: u64) -> Tick {
        let cycle = self.rate.cycles(now);
        let rise = self.channels[0].next_rise(self.seen);
        self.seen = cycle;
        if rise.is_some_and(|rise| rise <= cycle) {
            Tick::Rose
        } else {
            Tick::None
        }
    }

    /// None if it is no port of its own. Time is that of the last [`Self::advance`].
    pub(crate) fn read(&mut self, port: u16) -> Option<u8> {
        match port {
            0x40..=0x42 => Some(self.channels[usize::from(port & 3)].read(self.seen)),
            0x43 => Some(0),
            0x61 => Some(self.system_control()),
            _ => None,
        }
    }

    pub(crate) fn write(&mut self, port: u16, value: u8) -> Option<()> {
        match port {
            0x40..=0x42 => self.channels[usize::from(port & 3)].write(value, self.seen),
            0x43 => self.control(value),
            0x61 => {
                self.port_61 = value & 0xf;
                let gate = if value & 1 == 0 {
                    Gate::Low
                } else {
                    Gate::High
                };
                self.channels[2].set_gate(gate, self.seen);
            }
            _ => return None,
        }
        Some(())
    }

    /// Bit 5 is OUT of channel 2, bit 4 changes at each refresh of memory.
    fn system_control(&self) -> u8 {
        /// 15 µs.
        const REFRESH: u64 = 18;
        let refresh = u8::from(!(self.seen / REFRESH).is_multiple_of(2));
        let out = u8::from(self.channels[2].out(self.seen));
        self.port_61 | refresh << 4 | out << 5
    }

    fn control(&mut self, word: u8) {
        match word >> 6 {
            3 => self.read_back(word),
            channel => self.channels[usize::from(channel)].control(word, self.seen),
        }
    }

    /// Latches counts unless bit 5, status unless bit 4, of the channels in bits 3:1.
    fn read_back(&mut self, word: u8) {
        for (at, channel) in self.channels.iter_mut().enumerate() {
            if word >> (at + 1) & 1 == 0 {
                continue;
            }
            if word & 1 << 5 == 0 {
                channel.latch_count(self.seen);
            }
            if word & 1 << 4 == 0 {
                channel.latch_status(self.seen);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decimal_counts() {
        for (value, digits) in [(0, 0), (9, 9), (10, 0x10), (9999, 0x9999), (1234, 0x1234)] {
            assert_eq!(to_decimal(value), digits);
            assert_eq!(from_decimal(digits), value);
        }
    }
}
