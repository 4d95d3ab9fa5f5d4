//! A PMU written a second time, naively: a map of raw MSR values, and every
//! rule spelled out at the bit level. It counts cycles only, as the clock does.

use pmu_virt::{PmuModel, ReadOutcome, Ring, Vendor, WriteOutcome};
use std::collections::BTreeMap;

pub(crate) struct Naive {
    amd: bool,
    name: &'static str,
    counters: u32,
    fixed: u32,
    width: u32,
    fixed_width: u32,
    full_width: bool,
    /// Registers by the name of `Naive::canonical`.
    registers: BTreeMap<u32, u128>,
    pub(crate) pending: u64,
}

/// Canonical names: the counter n, its select, and so on.
const COUNTER: u32 = 0x1000;
const FIXED: u32 = 0x2000;
const SELECT: u32 = 0x3000;
const FIXED_CTRL: u32 = 0x4000;
const CTRL: u32 = 0x4001;
const STATUS: u32 = 0x4002;
const CLEAR: u32 = 0x4003;
const SET: u32 = 0x4004;
const CAPABILITIES: u32 = 0x4005;

impl Naive {
    pub(crate) fn new(model: &PmuModel) -> Self {
        let mut naive = Naive {
            amd: model.vendor() == Vendor::Amd,
            name: model.name(),
            counters: u32::from(model.programmable()),
            fixed: u32::from(model.fixed()),
            width: u32::from(model.width()),
            fixed_width: u32::from(model.fixed_width()),
            full_width: model.full_width(),
            registers: BTreeMap::new(),
            pending: 0,
        };
        naive.reset();
        naive
    }

    pub(crate) fn reset(&mut self) {
        self.registers.clear();
        self.pending = 0;
        if self.has_global() {
            self.registers.insert(CTRL, (1 << self.counters) - 1);
        }
    }

    fn has_global(&self) -> bool {
        matches!(self.name, "intel-v2" | "amd-perfmonv2")
    }

    fn get(&self, register: u32) -> u64 {
        let value = self.registers.get(&register).copied().unwrap_or_default();
        u64::try_from(value).expect("registers have 64 bits")
    }

    fn canonical(&self, msr: u32) -> Option<u32> {
        let n = self.counters;
        let extended = matches!(self.name, "amd-core" | "amd-perfmonv2");
        if self.amd {
            return match msr {
                0xc001_0000..0xc001_0004 => Some(SELECT + msr - 0xc001_0000),
                0xc001_0004..0xc001_0008 => Some(COUNTER + msr - 0xc001_0004),
                0xc001_0200.. if extended && msr < 0xc001_0200 + 2 * n => {
                    let base = if msr.is_multiple_of(2) {
                        SELECT
                    } else {
                        COUNTER
                    };
                    Some(base + (msr - 0xc001_0200) / 2)
                }
                0xc000_0300..=0xc000_0303 if self.has_global() => {
                    Some([STATUS, CTRL, CLEAR, SET][(msr & 3) as usize])
                }
                _ => None,
            };
        }
        let v2 = self.has_global();
        [
            (0xc1, n, COUNTER),
            (0x186, n, SELECT),
            (0x4c1, if self.full_width { n } else { 0 }, COUNTER),
            (0x309, self.fixed, FIXED),
            (0x345, u32::from(self.full_width), CAPABILITIES),
            (0x38d, u32::from(self.fixed > 0), FIXED_CTRL),
            (0x38e, u32::from(v2), STATUS),
            (0x38f, u32::from(v2), CTRL),
            (0x390, u32::from(v2), CLEAR),
        ]
        .into_iter()
        .find(|(first, count, _)| (*first..first + count).contains(&msr))
        .map(|(first, _, register)| register + msr - first)
    }

    pub(crate) fn read(&self, msr: u32) -> ReadOutcome {
        match self.canonical(msr) {
            None => ReadOutcome::NotHandled,
            Some(CLEAR | SET) => ReadOutcome::Value(0),
            Some(CAPABILITIES) => ReadOutcome::Value(0x2000),
            Some(register) => ReadOutcome::Value(self.get(register)),
        }
    }

    pub(crate) fn rdpmc(&self, ecx: u32) -> ReadOutcome {
        if ecx < self.counters {
            ReadOutcome::Value(self.get(COUNTER + ecx))
        } else if (0x4000_0000..0x4000_0000 + self.fixed).contains(&ecx) {
            ReadOutcome::Value(self.get(FIXED + ecx - 0x4000_0000))
        } else {
            ReadOutcome::Gp
        }
    }

    pub(crate) fn write(&mut self, msr: u32, value: u64) -> WriteOutcome {
        let Some(register) = self.canonical(msr) else {
            return WriteOutcome::NotHandled;
        };
        let all = ((1u64 << self.counters) - 1) | (((1u64 << self.fixed) - 1) << 32);
        let allowed = match register {
            SELECT.. if register < FIXED_CTRL => match self.name {
                "intel-v1" | "intel-v2" | "amd-k7" => 0xffdf_ffff,
                _ => 0x30f_ffd7_ffff,
            },
            FIXED_CTRL => 0xbbb & ((1 << (4 * self.fixed)) - 1),
            CTRL | SET => all,
            CLEAR if self.amd => all,
            CLEAR => all | 0b11 << 62,
            STATUS | CAPABILITIES => {
                return if self.amd {
                    WriteOutcome::Done
                } else {
                    WriteOutcome::Gp
                };
            }
            FIXED.. => (1 << self.fixed_width) - 1,
            _ if msr == 0xc1 + register - COUNTER => {
                // Legacy: shift the sign into place, cut to the width.
                let extended = value.wrapping_shl(32).cast_signed() >> 32;
                let cut = extended.cast_unsigned() & ((1 << self.width) - 1);
                self.registers.insert(register, u128::from(cut));
                return WriteOutcome::Done;
            }
            _ => (1 << self.width) - 1,
        };
        if !self.amd && value & !allowed != 0 {
            return WriteOutcome::Gp;
        }
        let value = value & allowed;
        match register {
            CLEAR => self.store(STATUS, self.get(STATUS) & !value),
            SET => self.store(STATUS, self.get(STATUS) | value),
            _ => self.store(register, value),
        }
        WriteOutcome::Done
    }

    fn store(&mut self, register: u32, value: u64) {
        self.registers.insert(register, u128::from(value));
    }

    pub(crate) fn run(&mut self, ring: Ring, ticks: u64) {
        for n in 0..self.counters {
            let select = self.get(SELECT + n);
            let ring_bit = if ring == Ring::Kernel { 17 } else { 16 };
            let on = select >> 22 & 1 == 1 && select >> ring_bit & 1 == 1;
            if on && self.is_cycles(select) && self.is_enabled(n) {
                self.add(COUNTER + n, self.width, n, select >> 20 & 1 == 1, ticks);
            }
        }
        let field = self.get(FIXED_CTRL);
        for n in 0..self.fixed {
            let field = field >> (4 * n) & 0xf;
            let on = field & if ring == Ring::Kernel { 1 } else { 2 } != 0;
            // Fixed 0 is instructions, which a clock has not.
            if on && n > 0 && self.is_enabled(32 + n) {
                self.add(FIXED + n, self.fixed_width, 32 + n, field & 8 != 0, ticks);
            }
        }
    }

    fn is_enabled(&self, bit: u32) -> bool {
        !self.has_global() || self.get(CTRL) >> bit & 1 == 1
    }

    fn is_cycles(&self, select: u64) -> bool {
        // Edge, invert, any-thread, counter mask.
        if select & 0xffa4_0000 != 0 {
            return false;
        }
        if select >> 40 & 0b11 == 0b01 {
            return false;
        }
        let event = select & 0xff | select >> 24 & 0xf00;
        let umask = select >> 8 & 0xff;
        match self.name {
            "intel-v1" | "intel-v2" => event == 0x3c && umask < 2,
            "amd-perfmonv2" => event == 0x76 || (event == 0x120 && umask == 1),
            _ => event == 0x76,
        }
    }

    fn add(&mut self, register: u32, width: u32, bit: u32, int: bool, ticks: u64) {
        let sum = self.registers.get(&register).copied().unwrap_or_default() + u128::from(ticks);
        self.registers.insert(register, sum % (1 << width));
        if sum >= 1 << width {
            if self.has_global() {
                self.store(STATUS, self.get(STATUS) | 1 << bit);
            }
            if int {
                self.pending |= 1 << bit;
            }
        }
    }
}
