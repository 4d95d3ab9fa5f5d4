//! Contexts with their events, as every measurement makes them.

use std::time::Duration;

use perfmon_abi::consts::{PFM_REGFL_OVFL_NOTIFY, PFM_SETFL_TIME_SWITCH};
use perfmon_abi::{PmcArg, PmdArg, SetDesc, Timespec};
use pmu_virt::perfmon::{LogicalPmu, PmcDescription, PmdBits, VirtualPmd};
use pmu_virt::{CountRequest, CounterId, PmuModel, Vendor};
use umpire_perfmon::{Call, Client, ContextHandle};

use super::tool::{Format, call};
use crate::error::BenchError;
use crate::sources::{Event, LeftOut, Source, countable};
use crate::switch;

/// Parts of an event select.
const USR: u64 = 1 << 16;
const OS: u64 = 1 << 17;
const ENABLE: u64 = 1 << 22;

/// Registers and events of a machine.
#[derive(Clone, Debug)]
pub(super) struct Fixture {
    pub(super) model: PmuModel,
    /// PMC and PMD of each programmable counter.
    pub(super) counters: Vec<(u16, u16)>,
    /// Selects that the source counts at CPL 3, cycles first.
    pub(super) selects: Vec<u64>,
    /// What they count.
    pub(super) names: Vec<String>,
}

/// What a context is to do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Program {
    /// Events, in as many sets as they need.
    pub(super) events: usize,
    /// Events between two samples of each event; none: it only counts.
    pub(super) period: Option<u64>,
    pub(super) format: Option<(Format, u64)>,
    /// Time of a set, where there are several.
    pub(super) slice: Duration,
}

impl Program {
    /// Counts so many events.
    pub(super) fn counting(events: usize) -> Self {
        Self {
            events,
            period: None,
            format: None,
            slice: Duration::from_millis(4),
        }
    }
}

/// The model that measurements use: one with six counters at least.
pub(super) fn model(vendor: Vendor) -> Result<PmuModel, BenchError> {
    match vendor {
        Vendor::Amd => Ok(PmuModel::default_for(vendor)),
        Vendor::Intel => Ok(PmuModel::parse(switch::MODEL)?),
    }
}

impl Fixture {
    /// `Err`: why there is nothing to measure with this source.
    pub(super) fn new(
        model: &PmuModel,
        source: &Source,
    ) -> Result<Result<Self, LeftOut>, BenchError> {
        let left_out = |reason: &str| LeftOut {
            source: source.name,
            reason: reason.to_owned(),
        };
        if source.name == "step" {
            let reason = "it steps the guest through every instruction; bench traps tells its cost";
            return Ok(Err(left_out(reason)));
        }
        let events = countable(model, source.open()?.as_ref());
        if events.is_empty() {
            return Ok(Err(left_out("it counts no event of the PMU here")));
        }
        let pmu = LogicalPmu::new(model.clone());
        let programmable = |pmc: &PmcDescription| {
            matches!(pmc.counter, CounterId::Programmable(_)).then_some((pmc.num, pmc.pmd))
        };
        // What counts both rings together may not tell them apart.
        let can = |select| {
            let request = CountRequest::decode(model.events(), select);
            Ok::<_, BenchError>(source.open()?.plan(&request).is_ok())
        };
        let (mut selects, mut names) = (Vec::new(), Vec::new());
        for (select, name) in variants(&events) {
            if can(select)? {
                selects.push(select);
                names.push(name);
            }
        }
        if selects.is_empty() {
            return Ok(Err(left_out("it refuses every event of the PMU here")));
        }
        Ok(Ok(Self {
            model: model.clone(),
            counters: pmu.pmcs().iter().filter_map(programmable).collect(),
            selects,
            names,
        }))
    }

    /// Sets that so many events need.
    pub(super) fn sets(&self, events: usize) -> usize {
        events.div_ceil(self.counters.len().max(1)).max(1)
    }

    /// The selects of each set.
    fn spread(&self, events: usize) -> Vec<Vec<u64>> {
        let selects: Vec<u64> = self.selects.iter().copied().cycle().take(events).collect();
        let sets = selects.chunks(self.counters.len().max(1));
        sets.map(<[u64]>::to_vec).collect()
    }

    /// Makes a context.
    pub(super) fn create(
        &self,
        client: &Client,
        program: &Program,
    ) -> Result<ContextHandle, BenchError> {
        let (uuid, argument) = match program.format {
            Some((format, size)) => (Some(format.uuid()), format.argument(size)),
            None => (None, Vec::new()),
        };
        let made = client.create(0, uuid, &argument);
        let context = made.map_err(|refusal| BenchError::refused("creating a context", refusal))?;
        let sets = self.spread(program.events);
        if sets.len() > 1 {
            let timeout = u64::try_from(program.slice.as_nanos()).unwrap_or(u64::MAX);
            let set = |id| SetDesc {
                id,
                flags: PFM_SETFL_TIME_SWITCH,
                timeout: Timespec::from_ns(timeout),
                ..SetDesc::default()
            };
            let all = (0..).zip(&sets).map(|(id, _)| set(id)).collect();
            call(client, &context, Call::CreateEvtsets(all))?;
        }
        for (id, set) in (0..).zip(&sets) {
            call(
                client,
                &context,
                Call::WritePmcs(self.pmcs(id, set, program)),
            )?;
            if program.period.is_some() {
                call(
                    client,
                    &context,
                    Call::WritePmds(self.pmds(id, set, program)),
                )?;
            }
        }
        Ok(context)
    }

    fn pmcs(&self, set: u16, selects: &[u64], program: &Program) -> Vec<PmcArg> {
        let mut recorded = PmdBits::default();
        for which in [VirtualPmd::Ring, VirtualPmd::Cr3] {
            recorded.insert(which.pmd());
        }
        let samples = program.period.is_some();
        let pmc = |((num, _), value): (&(u16, u16), &u64)| PmcArg {
            num: *num,
            set,
            value: *value,
            flags: if samples { PFM_REGFL_OVFL_NOTIFY } else { 0 },
            smpl_pmds: if samples { recorded.words() } else { [0; 2] },
            ..PmcArg::default()
        };
        self.counters.iter().zip(selects).map(pmc).collect()
    }

    /// The first periods differ, so that no two events overflow together.
    fn pmds(&self, set: u16, selects: &[u64], program: &Program) -> Vec<PmdArg> {
        let period = program.period.unwrap_or(u64::MAX);
        let parts = u64::try_from(selects.len()).unwrap_or(u64::MAX).max(1);
        let pmd = |(n, (_, num)): (u64, &(u16, u16))| {
            let first = period / parts * n + period;
            PmdArg {
                num: *num,
                set,
                value: first.wrapping_neg(),
                long_reset: period.wrapping_neg(),
                short_reset: period.wrapping_neg(),
                ..PmdArg::default()
            }
        };
        let counters = self.counters.iter().take(selects.len());
        (0..).zip(counters).map(pmd).collect()
    }

    /// Reads the first `count` counters of set 0.
    pub(super) fn reading(&self, count: usize) -> Call {
        let pmd = |(_, num): &(u16, u16)| PmdArg {
            num: *num,
            ..PmdArg::default()
        };
        Call::ReadPmds(self.counters.iter().take(count).map(pmd).collect())
    }
}

/// Each event in both rings, then in the guest's programs alone.
fn variants(events: &[Event]) -> Vec<(u64, String)> {
    let both = events.iter().map(|event| (event, USR | OS, ""));
    let programs = events.iter().map(|event| (event, USR, ":u"));
    both.chain(programs)
        .map(|(event, rings, suffix)| {
            let select = event.code | rings | ENABLE;
            (select, format!("{}{suffix}", event.known))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use pmu_virt::KnownEvent;

    fn fixture(counters: u16) -> Fixture {
        let event = |code, known| Event { code, known };
        let events = [
            event(0x76, KnownEvent::CoreCycles),
            event(0xc0, KnownEvent::Instructions),
        ];
        let (selects, names) = variants(&events).into_iter().unzip();
        Fixture {
            model: PmuModel::default_for(Vendor::Amd),
            counters: (0..counters).map(|n| (n, n)).collect(),
            selects,
            names,
        }
    }

    #[test]
    fn events_are_told_apart_by_their_rings() {
        let fixture = fixture(6);
        assert_eq!(
            fixture.selects,
            [0x43_0076, 0x43_00c0, 0x41_0076, 0x41_00c0]
        );
        assert!(fixture.names[2].ends_with(":u"), "{:?}", fixture.names);
    }

    #[test]
    fn sets_hold_what_the_counters_can() {
        fn check(counters: u16, events: usize, expected: &[usize]) {
            let fixture = fixture(counters);
            let spread = fixture.spread(events);
            let sizes: Vec<usize> = spread.iter().map(Vec::len).collect();
            assert_eq!(
                (sizes.as_slice(), fixture.sets(events)),
                (expected, expected.len())
            );
        }
        check(6, 1, &[1]);
        check(6, 6, &[6]);
        check(6, 10, &[6, 4]);
        check(4, 10, &[4, 4, 2]);
    }

    #[test]
    fn no_two_events_of_a_set_overflow_together() {
        let fixture = fixture(6);
        let program = Program {
            period: Some(6_000),
            ..Program::counting(6)
        };
        let first = fixture.pmds(0, &[0; 6], &program);
        let values: Vec<u64> = first.iter().map(|pmd| pmd.value.wrapping_neg()).collect();
        assert_eq!(values, [6_000, 7_000, 8_000, 9_000, 10_000, 11_000]);
        assert!(
            first
                .iter()
                .all(|pmd| pmd.short_reset == 6_000_u64.wrapping_neg())
        );
    }
}
