//! Bytes as a context and as what befalls it.

use std::slice::Iter;

use perfmon_abi::wire::Call;
use perfmon_abi::{PmcArg, PmdArg, SetDesc, SetInfo, StartArg, Timespec, consts as pfm};
use pmu_model::Provenance;

use super::{Sampling, Setup, Step};

/// A number that most bytes make an ordinary one.
const ODD_NUMBERS: [u16; 8] = [4, 13, 16, 32, 63, 78, 127, u16::MAX];
/// More steps than this tell nothing new, and take their time.
const MOST_STEPS: usize = 400;

pub(crate) struct Script<'a> {
    bytes: Iter<'a, u8>,
    steps: usize,
}

impl<'a> Script<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Script {
            bytes: bytes.iter(),
            steps: 0,
        }
    }

    /// The next byte; 0 after the last.
    fn byte(&mut self) -> u8 {
        self.bytes.next().copied().unwrap_or(0)
    }

    fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    fn half(&mut self) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    pub(crate) fn setup(&mut self) -> Setup {
        let kind = self.byte();
        let flags = match kind & 3 {
            0 | 1 => 0,
            2 => pfm::PFM_FL_NOTIFY_BLOCK,
            _ => pfm::PFM_FL_SYSTEM_WIDE,
        };
        let quiet = if kind & 0x1c == 0 {
            pfm::PFM_FL_OVFL_NO_MSG
        } else {
            0
        };
        let limit = self.byte();
        let size = usize::from(self.byte());
        let headers = [0, 0, pfm::PFM_DFL_SMPL_NO_HDR, pfm::PFM_DFL_SMPL_IIP_HDR];
        let header = headers[usize::from(limit & 3)];
        let sampling = match kind >> 5 {
            0 | 1 => Sampling::None,
            2 | 3 => {
                let answers = usize::from(limit >> 5) + 1;
                let script = (0..answers).map(|_| self.byte()).collect();
                Sampling::Puppet(script, size >= 0xe0)
            }
            4 | 5 => Sampling::Default(header, size * 2),
            6 => {
                let when_full = if limit & 4 == 0 {
                    0
                } else {
                    pfm::PFM_DOUBLE_FMT_MASK_WHEN_FULL
                };
                Sampling::Double(header | when_full, size * 3)
            }
            _ => Sampling::Compact(size, usize::from(limit & 3)),
        };
        Setup {
            flags: flags | quiet,
            sampling,
            most: (limit & 0x18 == 0x18).then(|| u64::from(limit >> 5) + 1),
        }
    }

    /// An event set: mostly one that can exist.
    fn set(byte: u8) -> u16 {
        match byte % 32 {
            30 => 9,
            31 => u16::MAX,
            other => u16::from(other % 4),
        }
    }

    fn num(byte: u8) -> u16 {
        match byte >> 2 {
            low @ 0..8 => ODD_NUMBERS[usize::from(low)],
            8 => 14,
            9 => 15,
            10 => 64 + u16::from(byte & 3),
            11 => 76 + u16::from(byte & 1),
            _ => u16::from(byte & 3),
        }
    }

    /// Values near the wraps of 64 and 48 bits, and others.
    fn value(&mut self) -> u64 {
        let byte = self.byte();
        let low = u64::from(byte & 0x1f);
        match byte >> 5 {
            0..=3 => 0u64.wrapping_sub(low + 1),
            4 => (1 << 48) - 1 - low,
            5 => low,
            6 => 0u64.wrapping_sub(low << 8),
            _ => self.word(),
        }
    }

    /// A vector of PMDs: mostly counters, sometimes virtual ones, rarely any.
    fn bits(&mut self) -> [u64; 2] {
        let byte = self.byte();
        let low = u64::from(byte & 0xf);
        match byte >> 4 {
            0..=5 => [0, 0],
            6..=11 => [low, 0],
            12 | 13 => [low | 0xc000, 0],
            14 => [low, 0xffff],
            _ => [self.word(), self.word()],
        }
    }

    /// An event select: one that counts, parts of one, or anything.
    fn event(&mut self) -> u64 {
        const COUNTS: u64 = 1 << 22 | 3 << 16 | 0xc0;
        match self.byte() {
            byte @ 0..16 => {
                let bit = |n: u32, to: u32| u64::from(byte >> n & 1) << to;
                COUNTS ^ (bit(0, 22) | bit(1, 16) | bit(2, 40) | bit(3, 41))
            }
            16 => self.word(),
            _ => COUNTS,
        }
    }

    fn pmc(&mut self) -> PmcArg {
        let (place, flags) = (self.byte(), self.byte());
        PmcArg {
            num: Self::num(place),
            set: Self::set(flags >> 3),
            flags: match flags {
                0xf8.. => self.half(),
                _ => u32::from(flags & 7),
            },
            value: self.event(),
            reset_pmds: self.bits(),
            smpl_pmds: self.bits(),
            eventid: self.byte().into(),
        }
    }

    fn pmd(&mut self) -> PmdArg {
        let (place, at) = (self.byte(), self.byte());
        let mut pmd = PmdArg {
            num: Self::num(place),
            set: Self::set(at >> 3),
            value: self.value(),
            long_reset: self.value(),
            short_reset: self.value(),
            last_reset_val: 77,
            ovflsw_thres: u64::from(at & 3),
            ..PmdArg::default()
        };
        if at & 4 != 0 {
            pmd.random_mask = self.value();
            pmd.random_seed = self.half();
        }
        if at >= 0xf8 {
            pmd.flags = self.half();
        }
        pmd
    }

    fn read(&mut self) -> PmdArg {
        let (place, at) = (self.byte(), self.byte());
        PmdArg {
            num: Self::num(place),
            set: Self::set(at >> 3),
            flags: match at & 7 {
                0..=3 => 0,
                4..=6 => pfm::PFM_REGFL_READ_RESET,
                _ => self.half(),
            },
            ..PmdArg::default()
        }
    }

    fn desc(&mut self) -> SetDesc {
        let (id, flags) = (self.byte(), self.byte());
        let steps = i64::from(self.byte());
        let timeout = match flags >> 4 {
            15 => Timespec {
                sec: self.word().cast_signed(),
                nsec: self.word().cast_signed(),
            },
            14 => Timespec { sec: 0, nsec: 0 },
            13 => Timespec {
                sec: steps,
                nsec: 999_999_999,
            },
            _ => Timespec {
                sec: 0,
                nsec: 1 + steps * 10_000,
            },
        };
        SetDesc {
            id: Self::set(id),
            next: Self::set(id >> 3),
            flags: match flags & 0xf {
                15 => self.half(),
                other => other.into(),
            },
            timeout,
        }
    }

    fn vector<T>(&mut self, count: u8, mut element: impl FnMut(&mut Self) -> T) -> Vec<T> {
        let count = match count & 3 {
            3 => 3,
            2 => 2,
            _ => 1,
        };
        (0..count).map(|_| element(self)).collect()
    }

    fn deletion(&mut self) -> SetDesc {
        let byte = self.byte();
        SetDesc {
            id: Self::set(byte),
            flags: if byte < 0xf0 { 0 } else { self.half() },
            ..SetDesc::default()
        }
    }

    fn question(&mut self) -> SetInfo {
        let byte = self.byte();
        SetInfo {
            id: Self::set(byte),
            flags: if byte < 0xf0 { 0 } else { self.half() },
            runs: 9,
            ..SetInfo::default()
        }
    }

    fn call(&mut self, what: u8, how: u8) -> Call {
        match what {
            0..4 => Call::WritePmcs(self.vector(how, Self::pmc)),
            4..8 => Call::WritePmds(self.vector(how, Self::pmd)),
            8 => Call::ReadPmds(self.vector(how, Self::read)),
            9 => Call::Start(None),
            10 => Call::Start(Some(StartArg {
                set: Self::set(how),
            })),
            11 => Call::Stop,
            12 | 13 => Call::Restart,
            14 => Call::CreateEvtsets(self.vector(how, Self::desc)),
            _ if how >= 0x80 => Call::DeleteEvtsets(self.vector(how, Self::deletion)),
            _ => Call::GetinfoEvtsets(self.vector(how, Self::question)),
        }
    }

    fn events(&mut self, how: u8) -> (u64, Provenance) {
        use Provenance::{Derived, Exact, Hardware, Scaled, Simulated};
        let events = match how >> 5 {
            0..6 => u64::from(how & 0x3f),
            6 => 1 << 48,
            _ => self.word(),
        };
        let all = [Exact, Hardware, Scaled, Derived, Simulated];
        (events, all[usize::from(how % 5)])
    }

    fn step(&mut self, what: u8) -> Step {
        let how = self.byte();
        let small = u64::from(how);
        match what {
            0..16 => Step::Call(self.call(what, how)),
            16 | 17 => Step::Load(Self::set(how)),
            18 => Step::Unload,
            19..23 => {
                let (events, provenance) = self.events(how);
                Step::Count(usize::from(what - 19), events, provenance)
            }
            23 => {
                let (events, provenance) = self.events(how);
                Step::Late(u16::from(how & 3), events, provenance)
            }
            24 => Step::Lose(u16::from(how & 3)),
            25 => Step::Pass(small * 5_000, how & 1 == 0),
            26 => Step::Pass(small * small * 20_000, how & 1 == 0),
            27 => Step::Expire,
            28 | 29 => Step::Overflow(small),
            30 => Step::ReadMessages,
            _ => match how & 3 {
                0 => Step::Preempted,
                1 => Step::Restored(small << 8),
                2 => Step::Ended,
                _ => Step::Overflow(small << 8),
            },
        }
    }
}

impl Iterator for Script<'_> {
    type Item = Step;

    fn next(&mut self) -> Option<Step> {
        self.steps += 1;
        if self.steps > MOST_STEPS {
            return None;
        }
        let what = *self.bytes.next()?;
        Some(self.step(what % 32))
    }
}
