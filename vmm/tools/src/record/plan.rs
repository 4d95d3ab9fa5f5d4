//! What is sampled: events on counters, and how far apart samples are.

use perfmon::{LogicalPmu, VirtualPmd};
use perfmon_abi::consts::PFM_REGFL_RANDOM;
use perfmon_abi::wire::info::VirtualPmdInfo;
use perfmon_abi::{PMD_WORDS, PmcArg, PmdArg};
use pmu_model::CountRequest;
use umpire_events::{EventSampling, NameTable, extras};

use super::frequency::Control;
use crate::profile::Sampling;
use crate::registers;
use crate::stat::events::{Asked, Source, asked};
use crate::stat::schedule::{Counters, Schedule};
use crate::stat::spec::EventList;

/// An event on its counter.
#[derive(Clone, Debug)]
pub(super) struct Sampled {
    pub(super) name: String,
    pub(super) pmc: u16,
    pub(super) pmd: u16,
    value: u64,
}

/// All of them.
#[derive(Clone, Debug)]
pub(super) struct SamplingPlan {
    pub(super) events: Vec<Sampled>,
    pub(super) sampling: Sampling,
    /// Bits by which periods vary.
    random: u32,
    /// What is recorded with each sample.
    body: [u64; PMD_WORDS],
}

impl SamplingPlan {
    /// The events of a list on the counters of a PMU.
    ///
    /// # Errors
    /// One is none, cannot be sampled, or there are more than counters.
    pub(super) fn new(
        list: &EventList,
        pmu: &LogicalPmu,
        quantities: &[VirtualPmdInfo],
        names: &dyn NameTable,
        sampling: Sampling,
        random: u32,
    ) -> Result<Self, String> {
        let groups = asked(list, pmu.model(), quantities, names)?;
        let sampling = sampling_of(list)?.unwrap_or(sampling);
        let asked: Vec<Asked> = groups.into_iter().flatten().collect();
        let mut wanted = Vec::new();
        for (number, asked) in asked.iter().enumerate() {
            wanted.push((number, registers::need(pmu, counter_of(asked)?)));
        }
        let model = pmu.model();
        let counters = Counters {
            programmable: model.programmable(),
            fixed: model.fixed(),
        };
        let schedule = Schedule::of(&[wanted], counters);
        let Some(places) = schedule.sets.first() else {
            return Err(format!(
                "{} events need more counters than {} has ({} programmable, {} fixed); sample \
                 fewer at once",
                asked.len(),
                model.name(),
                model.programmable(),
                model.fixed_map().count_ones()
            ));
        };
        let mut events = Vec::new();
        for (number, counter) in places {
            let request = asked.get(*number).and_then(|it| Some((it, it.request()?)));
            let programmed = request.and_then(|(asked, request)| {
                let (pmc, value) = registers::program(pmu, *counter, request)?;
                Some(Sampled {
                    name: asked.name.clone(),
                    pmc: pmc.num,
                    pmd: pmc.pmd,
                    value,
                })
            });
            events.extend(programmed);
        }
        check_random(sampling, random)?;
        Ok(Self {
            events,
            sampling,
            random,
            body: bits(&[VirtualPmd::Ring.pmd(), VirtualPmd::Cr3.pmd()]),
        })
    }

    /// The period to begin with.
    pub(super) fn control(&self, tsc_khz: u64) -> Option<Control> {
        match self.sampling {
            Sampling::Period(_) => None,
            Sampling::Frequency(hz) => Some(Control::new(hz, tsc_khz)),
        }
    }

    /// The PMCs. A sample names its event by its number here.
    pub(super) fn pmcs(&self) -> Vec<PmcArg> {
        let flags = if self.random > 0 { PFM_REGFL_RANDOM } else { 0 };
        let numbered = (0u64..).zip(&self.events);
        numbered
            .map(|(number, event)| PmcArg {
                num: event.pmc,
                flags,
                value: event.value,
                smpl_pmds: self.body,
                eventid: number,
                ..PmcArg::default()
            })
            .collect()
    }

    /// The PMD of an event for a period. Random numbers make periods shorter, so
    /// they begin longer, and their mean is the one that was asked for.
    pub(super) fn pmd(&self, event: &Sampled, period: u64, seed: u32) -> PmdArg {
        let bits = self.random.min(period.max(1).ilog2());
        let random_mask = (1u64 << bits) - 1;
        let reset = period.saturating_add(random_mask / 2).wrapping_neg();
        PmdArg {
            num: event.pmd,
            value: reset,
            long_reset: reset,
            short_reset: reset,
            random_mask,
            random_seed: seed,
            ..PmdArg::default()
        }
    }
}

/// What is asked of a counter, as only counters overflow.
fn counter_of(asked: &Asked) -> Result<&CountRequest, String> {
    match &asked.source {
        Source::Counter(request) => Ok(request),
        Source::Quantity { .. } | Source::Elapsed => Err(format!(
            "'{}' is no counter that could overflow, so there are no samples of it; \
             umpire stat counts it",
            asked.name
        )),
        Source::Nothing { why } => Err(format!("'{}': {why}", asked.name)),
    }
}

/// A period that varies stays one.
fn check_random(sampling: Sampling, random: u32) -> Result<(), String> {
    match sampling {
        Sampling::Period(period) if random > 0 && period >> random == 0 => Err(format!(
            "--random {random} varies periods by up to {}, more than the period {period}; \
             give fewer bits",
            (1u64 << random) - 1
        )),
        _ => Ok(()),
    }
}

/// What the events themselves say of how far apart samples are (`period=`, `freq=`): all are
/// sampled alike.
fn sampling_of(list: &EventList) -> Result<Option<Sampling>, String> {
    let names = || list.groups.iter().flatten();
    for name in names() {
        if extras(name).precise > 0 {
            return Err(format!(
                "'{name}': p asks for samples that are no instruction late, and the source of \
                 counts decides how precise they are (those of step are exact); P takes the most \
                 precise there is"
            ));
        }
    }
    let said: Vec<_> = names().map(|name| extras(name).sampling).collect();
    let first = said.first().copied().flatten();
    if let Some((other, _)) = names().zip(&said).find(|(_, one)| **one != first) {
        return Err(format!(
            "'{other}': umpire record samples all events alike; give all of them the same \
             period= or freq=, or none"
        ));
    }
    Ok(first.map(|sampling| match sampling {
        EventSampling::Period(events) => Sampling::Period(events),
        EventSampling::Frequency(hz) => Sampling::Frequency(hz),
    }))
}

fn bits(pmds: &[u16]) -> [u64; PMD_WORDS] {
    let mut words = [0; PMD_WORDS];
    for pmd in pmds {
        if let Some(word) = words.get_mut(usize::from(pmd / 64)) {
            *word |= 1 << (pmd % 64);
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use pmu_model::PmuModel;
    use umpire_events::{LibraryError, NoTables};

    fn plan(
        model: &str,
        list: &str,
        sampling: Sampling,
        random: u32,
    ) -> Result<SamplingPlan, String> {
        let pmu = LogicalPmu::new(PmuModel::parse(model).unwrap());
        let exits = VirtualPmdInfo {
            pmd: 64,
            name: "vm-exits".to_owned(),
            unit: "count".to_owned(),
            description: String::new(),
        };
        let names = NoTables(LibraryError::TooLate);
        SamplingPlan::new(
            &list.parse().unwrap(),
            &pmu,
            &[exits],
            &names,
            sampling,
            random,
        )
    }

    #[test]
    fn events_get_counters_and_periods() {
        let plan = plan("intel-v2", "branches,cycles", Sampling::Period(1000), 0).unwrap();
        let pmcs = plan.pmcs();
        let numbers: Vec<(u16, u64)> = pmcs.iter().map(|pmc| (pmc.num, pmc.eventid)).collect();
        assert_eq!(numbers, [(0, 0), (33, 1)]);
        assert_eq!(pmcs[0].smpl_pmds, [0, 1 << 12 | 1 << 13]);
        let pmd = plan.pmd(&plan.events[1], 1000, 1);
        assert_eq!((pmd.num, pmd.value), (33, 1000u64.wrapping_neg()));
        assert_eq!((pmd.long_reset, pmd.short_reset), (pmd.value, pmd.value));
        assert_eq!(plan.control(1), None);
    }

    #[test]
    fn an_event_may_say_its_period() {
        let check = |list: &str, expected: Sampling| {
            let plan = plan("amd-core", list, Sampling::Period(9), 0).expect(list);
            assert_eq!(plan.sampling, expected, "{list}");
        };
        check("cycles:P", Sampling::Period(9));
        check("cpu/cycles,period=0X10/", Sampling::Period(16));
        check("cycles/freq=7/u,rc0/freq=7/", Sampling::Frequency(7));
    }

    #[test]
    fn random_periods_have_the_mean_that_was_asked_for() {
        let plan = plan("amd-core", "cycles", Sampling::Period(1000), 4).unwrap();
        assert_eq!(plan.pmcs()[0].flags, PFM_REGFL_RANDOM);
        let pmd = plan.pmd(&plan.events[0], 1000, 9);
        assert_eq!((pmd.random_mask, pmd.random_seed), (15, 9));
        assert_eq!(pmd.value.wrapping_neg(), 1007);
        // A period that was adapted may be shorter than the bits.
        assert_eq!(plan.pmd(&plan.events[0], 4, 9).random_mask, 3);
        assert_eq!(plan.pmd(&plan.events[0], 1, 9).random_mask, 0);
    }

    #[test]
    fn what_cannot_be_sampled_is_refused() {
        let check = |list: &str, random, expected: &str| {
            let error = plan("amd-k7", list, Sampling::Period(100), random).unwrap_err();
            assert!(error.contains(expected), "{error}");
        };
        check("vm-exits", 0, "no counter that could overflow");
        check("slots", 0, "'slots': the PMU model amd-k7 has no event");
        check("page-faults", 0, "'page-faults': the guest's kernel");
        check("task-clock", 0, "'task-clock'");
        check("duration_time", 0, "no counter that could overflow");
        check("rc0:pp", 0, "'rc0:pp': p asks for samples");
        check(
            "rc0,rc1/period=5/",
            0,
            "'rc1/period=5/': umpire record samples all",
        );
        check("rc0,rc1,rc2,rc3,rc4", 0, "5 events need more counters");
        check("rc0", 7, "give fewer bits");
        check("nonsense", 0, "'nonsense'");
    }
}
