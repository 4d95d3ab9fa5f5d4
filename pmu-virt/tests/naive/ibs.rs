//! Instruction-based sampling a second time: two counters of cycles, and a map of registers.

use pmu_virt::{ReadOutcome, WriteOutcome};
use std::collections::BTreeMap;

/// RIP of all samples of ops; linear and physical address of all fetches.
pub(crate) const RIP: u64 = 0x1234_5678;
pub(crate) const FETCHED: u64 = 0x40_2000;

pub(crate) struct NaiveIbs {
    pub(crate) there: bool,
    extended: bool,
    fetch: u64,
    op: u64,
    /// Counts of fetches and of ops.
    counts: [u64; 2],
    rest: BTreeMap<u32, u64>,
    seed: u64,
    /// What the interrupt is, if there is one.
    pub(crate) interrupt: Option<u32>,
}

const FETCH: u32 = 0xc001_1030;
const OP: u32 = 0xc001_1033;

impl NaiveIbs {
    pub(crate) fn new(spec: &str) -> Self {
        NaiveIbs {
            there: spec.contains("ibs=on"),
            extended: !spec.contains("fam10h"),
            fetch: 0,
            op: 0,
            counts: [0, 0],
            rest: (0x850..0x854).map(|msr| (msr, 0x1_0000)).collect(),
            seed: 1,
            interrupt: None,
        }
    }

    pub(crate) fn reset(&mut self) {
        let (there, extended) = (self.there, self.extended);
        *self = NaiveIbs {
            there,
            extended,
            ..NaiveIbs::new("")
        };
    }

    pub(crate) fn has(&self, msr: u32) -> bool {
        self.there
            && match msr {
                0xc001_1030..=0xc001_103a | 0x840 | 0x841 | 0x850..=0x853 => true,
                0xc001_103b => self.extended,
                _ => false,
            }
    }

    pub(crate) fn read(&self, msr: u32) -> ReadOutcome {
        ReadOutcome::Value(match msr {
            FETCH => self.fetch | (self.counts[0] >> 4 & 0xffff) << 16,
            OP => self.op | self.counts[1] << 32,
            0xc001_103a => 0x100,
            0x840 => 0x4_0000,
            _ => self.rest.get(&msr).copied().unwrap_or(0),
        })
    }

    pub(crate) fn write(&mut self, msr: u32, value: u64) -> WriteOutcome {
        match msr {
            0xc001_103a | 0x840 => return WriteOutcome::Gp,
            0x841 => {}
            0x850..=0x853 => drop(self.rest.insert(msr, value & 0x1_07ff)),
            0xc001_1032 | 0xc001_1039 => drop(self.rest.insert(msr, value << 12 >> 12)),
            FETCH => {
                let sample = self.fetch & 0x05fd_ffff_0000_0000 & !(1 << 48);
                self.fetch = sample | value & 0x0203_0000_0000_ffff;
                self.counts[0] = (value >> 16 & 0xffff) * 16;
                if value >> 48 & 1 == 1 && value >> 57 & 1 == 1 {
                    self.seed = self.seed * 16_807 % 0x7fff_ffff;
                    self.counts[0] += self.seed >> 8 & 0xf;
                }
                self.clamp();
            }
            OP => {
                let (control, count) = if self.extended {
                    (0x07fe_ffff, 0x07ff_ffff)
                } else {
                    (0x000e_ffff, 0x000f_ffff)
                };
                self.op = value & control;
                self.counts[1] = value >> 32 & count;
                self.clamp();
            }
            _ => drop(self.rest.insert(msr, value)),
        }
        WriteOutcome::Done
    }

    /// Maxima of fetches and of ops, 0 where nothing is counted.
    fn maxima(&self) -> [u64; 2] {
        let on = |control: u64, enable: u32, max: u64| {
            if control >> enable & 3 == 1 { max } else { 0 }
        };
        let op = (self.op & 0xffff) * 16 + (self.op & 0x07f0_0000);
        [
            on(self.fetch, 48, (self.fetch & 0xffff) * 16),
            on(self.op, 17, op),
        ]
    }

    /// A count at its maximum comes to its end with the next event.
    fn clamp(&mut self) {
        let maxima = self.maxima();
        for (count, max) in self.counts.iter_mut().zip(maxima) {
            if max != 0 {
                *count = (*count).min(max - 1);
            }
        }
    }

    pub(crate) fn run(&mut self, ticks: u64) {
        let [fetch, op] = self.maxima();
        // A clock counts no ops.
        let op = if self.op >> 19 & 1 == 1 { 0 } else { op };
        let mut sampled = false;
        if fetch != 0 {
            self.counts[0] += ticks;
            if self.counts[0] >= fetch {
                self.counts[0] = fetch;
                self.fetch &= !0x05fc_ffff_0000_0000;
                // Valid, complete, a page of 4 KiB.
                self.fetch |= 1 << 49 | 1 << 50 | 1 << 52;
                self.rest.insert(0xc001_1031, FETCHED);
                self.rest.insert(0xc001_1032, FETCHED);
                sampled = true;
            }
        }
        if op != 0 {
            self.counts[1] += ticks;
            if self.counts[1] >= op {
                self.counts[1] = 0;
                self.op |= 1 << 18;
                self.rest.insert(0xc001_1034, RIP);
                self.rest.insert(0xc001_1035, 1 << 38);
                for msr in [
                    0xc001_1036,
                    0xc001_1037,
                    0xc001_1038,
                    0xc001_1039,
                    0xc001_103b,
                ] {
                    self.rest.insert(msr, 0);
                }
                sampled = true;
            }
        }
        let entry = self.rest[&0x850];
        if sampled && entry & 0x1_0000 == 0 {
            self.interrupt = u32::try_from(entry).ok();
        }
    }
}
