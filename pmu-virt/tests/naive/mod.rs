//! A PMU written a second time, naively: a map of raw MSR values, and every
//! rule spelled out at the bit level. It counts cycles only, as the clock does.

pub(crate) mod ibs;

use ibs::NaiveIbs;
use pmu_virt::{CounterId, PmuModel, ReadOutcome, Ring, Vendor, WriteOutcome};
use std::collections::BTreeMap;

pub(crate) struct Naive {
    amd: bool,
    name: &'static str,
    counters: u32,
    /// Numbers of the fixed counters that there are.
    fixed: Vec<u32>,
    width: u32,
    fixed_width: u32,
    full_width: bool,
    capabilities: bool,
    /// The format of PEBS records; 0 without PEBS.
    pebs: u64,
    /// IA32_DEBUGCTL.FREEZE_PERFMON_ON_PMI.
    pub(crate) freeze: bool,
    /// Registers by the name of `Naive::canonical`.
    registers: BTreeMap<u32, u128>,
    pub(crate) pending: u64,
    pub(crate) ibs: NaiveIbs,
    /// AMD's property.
    freezes: bool,
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
const INUSE: u32 = 0x4006;
const PEBS: u32 = 0x4007;
const DATA_CFG: u32 = 0x4008;
const DS_AREA: u32 = 0x4009;
/// The counters stand while this bit of the status is set.
const FROZEN: u64 = 0x0800_0000_0000_0000;

impl Naive {
    pub(crate) fn new(model: &PmuModel) -> Self {
        let mut naive = Naive {
            amd: model.vendor() == Vendor::Amd,
            name: model.name(),
            counters: u32::from(model.programmable()),
            fixed: (0..3)
                .filter(|n| model.has(CounterId::Fixed(*n)))
                .map(u32::from)
                .collect(),
            width: u32::from(model.width()),
            fixed_width: u32::from(model.fixed_width()),
            full_width: model.full_width(),
            capabilities: model.perf_capabilities().is_some(),
            pebs: model.pebs().map_or(0, |pebs| pebs.format.number().into()),
            freeze: false,
            registers: BTreeMap::new(),
            pending: 0,
            ibs: NaiveIbs::new(&model.to_string()),
            freezes: model.to_string().ends_with(",freeze=on"),
        };
        naive.reset();
        naive
    }

    pub(crate) fn reset(&mut self) {
        self.registers.clear();
        self.pending = 0;
        self.freeze = false;
        self.ibs.reset();
        if self.has_global() {
            self.registers.insert(CTRL, (1 << self.counters) - 1);
        }
    }

    fn has_global(&self) -> bool {
        !matches!(self.name, "intel-v1" | "amd-k7" | "amd-fam10h" | "amd-core")
    }

    /// The registers of version 4.
    fn is_v4(&self) -> bool {
        matches!(self.name, "intel-v4" | "intel-v5")
    }

    /// Whether bit 12 of IA32_DEBUGCTL is ours.
    pub(crate) fn can_freeze(&self) -> bool {
        self.freezes || !self.amd && self.has_global() && self.capabilities
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
            (0x345, u32::from(self.capabilities), CAPABILITIES),
            (0x38d, u32::from(!self.fixed.is_empty()), FIXED_CTRL),
            (0x38e, u32::from(v2), STATUS),
            (0x38f, u32::from(v2), CTRL),
            (0x390, u32::from(v2), CLEAR),
            (0x391, u32::from(self.is_v4()), SET),
            (0x392, u32::from(self.is_v4()), INUSE),
            (0x3f1, u32::from(self.pebs != 0), PEBS),
            (0x3f2, u32::from(self.pebs == 4), DATA_CFG),
            (0x600, u32::from(self.pebs != 0), DS_AREA),
        ]
        .into_iter()
        .chain(self.fixed.iter().map(|n| (0x309 + n, 1, FIXED + n)))
        .find(|(first, count, _)| (*first..first + count).contains(&msr))
        .map(|(first, _, register)| register + msr - first)
    }

    pub(crate) fn read(&self, msr: u32) -> ReadOutcome {
        match self.canonical(msr) {
            None if self.ibs.has(msr) => self.ibs.read(msr),
            None => ReadOutcome::NotHandled,
            Some(CLEAR | SET) => ReadOutcome::Value(0),
            Some(CAPABILITIES) => {
                let full_width = if self.full_width { 0x2000 } else { 0 };
                let pebs = match self.pebs {
                    4 => 0x44c0,
                    3 => 0x3c0,
                    _ => 0,
                };
                ReadOutcome::Value(full_width | pebs)
            }
            Some(INUSE) => ReadOutcome::Value(self.in_use()),
            Some(register) => ReadOutcome::Value(self.get(register)),
        }
    }

    pub(crate) fn rdpmc(&self, ecx: u32) -> ReadOutcome {
        if ecx < self.counters {
            ReadOutcome::Value(self.get(COUNTER + ecx))
        } else if self.fixed.iter().any(|n| 0x4000_0000 + n == ecx) {
            ReadOutcome::Value(self.get(FIXED + ecx - 0x4000_0000))
        } else {
            ReadOutcome::Gp
        }
    }

    fn in_use(&self) -> u64 {
        let mut used = 0;
        for n in 0..self.counters {
            let select = self.get(SELECT + n);
            used |= u64::from(select & 0xff != 0) << n;
            used |= (select >> 20 & 1) << 63;
        }
        for n in &self.fixed {
            let field = self.get(FIXED_CTRL) >> (4 * n) & 0xf;
            used |= u64::from(field & 3 != 0) << (32 + n);
            used |= (field >> 3) << 63;
        }
        used
    }

    pub(crate) fn write(&mut self, msr: u32, value: u64) -> WriteOutcome {
        let Some(register) = self.canonical(msr) else {
            if self.ibs.has(msr) {
                return self.ibs.write(msr, value);
            }
            return WriteOutcome::NotHandled;
        };
        let fixed: u64 = self.fixed.iter().map(|n| 1 << (32 + n)).sum();
        let all = ((1u64 << self.counters) - 1) | fixed;
        let any_thread = matches!(self.name, "intel-v3" | "intel-v4");
        let adaptive = self.pebs == 4;
        let allowed = match register {
            PEBS if adaptive => all,
            PEBS => (1 << self.counters) - 1,
            DATA_CFG => 7,
            DS_AREA if (0x8000_0000_0000..=0xffff_7fff_ffff_ffff).contains(&value) => 0,
            DS_AREA => u64::MAX,
            SELECT.. if register < FIXED_CTRL => match self.name {
                _ if any_thread => 0xffff_ffff | u64::from(adaptive) << 34,
                _ if !self.amd || self.name == "amd-k7" => 0xffdf_ffff | u64::from(adaptive) << 34,
                _ => 0x30f_ffd7_ffff,
            },
            FIXED_CTRL => {
                let field = if any_thread { 0xf } else { 0xb };
                let field = field | u64::from(adaptive) << 32;
                self.fixed.iter().map(|n| field << (4 * n)).sum()
            }
            SET if self.is_v4() => all | 0x7c00_0000_0000_0000,
            CLEAR if self.is_v4() => all | 0xfc00_0000_0000_0000,
            CLEAR | SET if self.freezes => all | FROZEN,
            CTRL | SET => all,
            CLEAR if self.amd => all,
            CLEAR => all | 0b11 << 62,
            STATUS | CAPABILITIES | INUSE => {
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
        if self.ibs.there {
            self.ibs.run(ticks);
        }
        if self.get(STATUS) & FROZEN != 0 {
            return;
        }
        let before = std::mem::take(&mut self.pending);
        for n in 0..self.counters {
            let select = self.get(SELECT + n);
            let ring_bit = if ring == Ring::Kernel { 17 } else { 16 };
            let on = select >> 22 & 1 == 1 && select >> ring_bit & 1 == 1;
            if on && self.is_cycles(select) && self.is_enabled(n) {
                self.add(COUNTER + n, self.width, n, select >> 20 & 1 == 1, ticks);
            }
        }
        let field = self.get(FIXED_CTRL);
        for n in self.fixed.clone() {
            let field = field >> (4 * n) & 0xf;
            let on = field & if ring == Ring::Kernel { 1 } else { 2 } != 0;
            // Fixed 0 is instructions, which a clock has not.
            if on && n > 0 && self.is_enabled(32 + n) {
                self.add(FIXED + n, self.fixed_width, 32 + n, field & 8 != 0, ticks);
            }
        }
        if self.freeze && self.pending != 0 {
            if self.is_v4() || self.freezes {
                self.store(STATUS, self.get(STATUS) | FROZEN);
            } else {
                self.store(CTRL, 0);
            }
        }
        self.pending |= before;
    }

    fn is_enabled(&self, bit: u32) -> bool {
        !self.has_global() || self.get(CTRL) >> bit & 1 == 1
    }

    fn is_cycles(&self, select: u64) -> bool {
        // As a driver samples cycles: those in which fewer than 16 retire, which is all.
        let every = matches!(select & 0xffff, 0xc0 | 0x1c0 | 0x1c2 | 0x2c2);
        let mask = select >> 24 & 0xff;
        if !self.amd && every && mask >= 16 && select >> 23 & 1 == 1 && select >> 18 & 1 == 0 {
            return true;
        }
        // Edge, invert, counter mask. Of any-thread there is one.
        if select & 0xff84_0000 != 0 {
            return false;
        }
        if select >> 40 & 0b11 == 0b01 {
            return false;
        }
        let event = select & 0xff | select >> 24 & 0xf00;
        let umask = select >> 8 & 0xff;
        match self.name {
            _ if !self.amd => event == 0x3c && umask < 2,
            "amd-perfmonv2" => event == 0x76 || (event == 0x120 && umask == 1),
            _ => event == 0x76,
        }
    }

    /// Whether an overflow of the counter makes a record. There is no debug store area in
    /// these guests, so none is ever written.
    fn samples(&self, bit: u32) -> bool {
        self.get(PEBS) >> bit & 1 == 1
    }

    fn add(&mut self, register: u32, width: u32, bit: u32, int: bool, ticks: u64) {
        let sum = self.registers.get(&register).copied().unwrap_or_default() + u128::from(ticks);
        self.registers.insert(register, sum % (1 << width));
        if sum >= 1 << width && !self.samples(bit) {
            if self.has_global() {
                self.store(STATUS, self.get(STATUS) | 1 << bit);
            }
            if int {
                self.pending |= 1 << bit;
            }
        }
    }
}
