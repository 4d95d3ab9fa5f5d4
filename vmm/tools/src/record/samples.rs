//! From samples in a buffer to records in a file.

use perfmon::VirtualPmd;
use perfmon_abi::parse;

use crate::Vm;
use crate::profile::{Record, Ring, Sample};

/// What times in a file are counted from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// The TSC when sampling began: the host's, or the VM's where its time is virtual.
    pub start: u64,
    /// Its frequency in kHz.
    pub khz: u64,
}

impl Clock {
    /// From now on, as far as the host tells it: where the VM's time is virtual, from the VM's
    /// beginning.
    #[must_use]
    pub fn of(vm: &Vm) -> Self {
        let start = if vm.model.virtual_time {
            0
        } else {
            crate::sys::rdtsc()
        };
        Self {
            start,
            khz: vm.model.tsc_khz,
        }
    }

    /// A moment in nanoseconds since sampling began; 0 for earlier ones.
    #[must_use]
    pub fn ns(&self, tsc: u64) -> u64 {
        self.span(tsc.saturating_sub(self.start))
    }

    /// Ticks in nanoseconds.
    #[must_use]
    pub fn span(&self, ticks: u64) -> u64 {
        let ns = u128::from(ticks) * 1_000_000 / u128::from(self.khz.max(1));
        u64::try_from(ns).unwrap_or(u64::MAX)
    }
}

/// A record of a sample. `periods` are those of the events, in their order, for
/// samples that do not have theirs. `None` if it is of an event that nobody
/// asked for, or does not say where it was taken.
#[must_use]
pub fn record(sample: parse::Sample, clock: &Clock, periods: &[u64]) -> Option<Record> {
    let entry = sample.entry?;
    let event = usize::try_from(sample.eventid?).ok()?;
    let usual = *periods.get(event)?;
    let value = |which: VirtualPmd| {
        let of = |(pmd, _): &&(u16, u64)| *pmd == which.pmd();
        let found = sample.values.iter().find(of).map(|(_, value)| *value);
        // All ones stand for what the host does not know.
        found.filter(|value| *value != u64::MAX)
    };
    let period = match entry.last_reset_val.wrapping_neg() {
        0 => usual,
        period => period,
    };
    Some(Record::Sample(Sample {
        time_ns: clock.ns(entry.tstamp),
        ip: sample.ip?,
        period,
        cr3: value(VirtualPmd::Cr3),
        vm: u32::try_from(entry.pid).ok()?,
        vcpu: u32::try_from(entry.tid).ok()?,
        core: entry.cpu.into(),
        event: u16::try_from(event).ok()?,
        set: entry.set,
        ring: value(VirtualPmd::Ring).map(|ring| match ring {
            0 => Ring::Kernel,
            _ => Ring::User,
        }),
        guest: sample.guest,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use perfmon_abi::DefaultEntry;
    use perfmon_abi::compact::GuestPlace;

    const CLOCK: Clock = Clock {
        start: 1000,
        khz: 2_000_000,
    };

    fn sample() -> parse::Sample {
        parse::Sample {
            ip: Some(0x1234),
            entry: Some(DefaultEntry {
                pid: 7,
                tid: 3,
                ovfl_pmd: 1,
                set: 0,
                cpu: 2,
                last_reset_val: 500u64.wrapping_neg(),
                tstamp: 3000,
                ip: 0x1234,
            }),
            eventid: Some(1),
            values: vec![(VirtualPmd::Ring.pmd(), 3), (VirtualPmd::Cr3.pmd(), 0x5000)],
            guest: GuestPlace {
                task: 4,
                mapping: 5,
                ..GuestPlace::default()
            },
        }
    }

    #[test]
    fn a_sample_becomes_a_record() {
        let expected = Sample {
            time_ns: 1000,
            ip: 0x1234,
            period: 500,
            cr3: Some(0x5000),
            vm: 7,
            vcpu: 3,
            core: 2,
            event: 1,
            set: 0,
            ring: Some(Ring::User),
            guest: sample().guest,
        };
        let check = |sample: parse::Sample, expected| {
            assert_eq!(record(sample, &CLOCK, &[10, 20]), expected);
        };
        check(sample(), Some(Record::Sample(expected.clone())));
        // What the host does not know, and what was not recorded.
        let unknown = parse::Sample {
            values: vec![(VirtualPmd::Ring.pmd(), u64::MAX)],
            ..sample()
        };
        let without = Sample {
            ring: None,
            cr3: None,
            ..expected.clone()
        };
        check(unknown, Some(Record::Sample(without)));
        // Before the first reset.
        let mut first = sample();
        if let Some(entry) = &mut first.entry {
            entry.last_reset_val = 0;
        }
        let usual = Sample {
            period: 20,
            ..expected
        };
        check(first, Some(Record::Sample(usual)));
    }

    #[test]
    fn what_makes_no_sense_is_no_record() {
        let odd = |change: fn(&mut parse::Sample)| {
            let mut sample = sample();
            change(&mut sample);
            assert_eq!(record(sample, &CLOCK, &[10, 20]), None);
        };
        odd(|sample| sample.eventid = Some(2));
        odd(|sample| sample.eventid = None);
        odd(|sample| sample.entry = None);
        odd(|sample| sample.ip = None);
        odd(|sample| {
            if let Some(entry) = &mut sample.entry {
                entry.tid = -1;
            }
        });
    }

    #[test]
    fn times_begin_with_the_recording() {
        assert_eq!(CLOCK.ns(999), 0);
        assert_eq!(CLOCK.ns(1001), 0);
        assert_eq!(CLOCK.ns(1000 + 2_000_000_000), 1_000_000_000);
        assert_eq!(Clock { start: 0, khz: 0 }.ns(u64::MAX), u64::MAX);
    }
}
