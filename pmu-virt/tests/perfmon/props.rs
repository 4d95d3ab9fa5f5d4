//! Any sequence of commands, counts and time, played to a context and to the
//! model: they agree on every answer, every error, and on all that can be seen
//! in between.

use super::bench::{Known, MOMENT, Messages, outcome, pmu};
use super::model::{COUNTERS, Model, State};
use super::steps::{Step, flags, steps};
use perfmon_abi::consts as pfm;
use perfmon_abi::wire::Call;
use perfmon_abi::{PmdArg, SetInfo};
use pmu_virt::Provenance;
use pmu_virt::perfmon::{Context, Phase};
use proptest::prelude::{ProptestConfig, proptest};
use proptest::test_runner::FileFailurePersistence;
use std::num::NonZeroU64;

struct Pair {
    context: Context,
    queue: Messages,
    model: Model,
}

fn code(provenance: Provenance) -> u32 {
    match provenance {
        Provenance::Exact => pfm::PFM_PROV_EXACT,
        Provenance::Hardware => pfm::PFM_PROV_HARDWARE,
        Provenance::Scaled => pfm::PFM_PROV_SCALED,
        Provenance::Derived => pfm::PFM_PROV_DERIVED,
        Provenance::Simulated => pfm::PFM_PROV_SIMULATED,
    }
}

impl Pair {
    fn play(&mut self, step: &Step) {
        match step {
            Step::Call(call) => self.call(call.clone()),
            Step::Load(set) => {
                let expected = self.model.may_load(*set);
                assert_eq!(outcome(self.context.prepare_load(*set)), expected);
                if expected.is_ok() {
                    self.context.attached(*set);
                    self.queue.0.clear();
                    self.model.load(*set);
                }
            }
            Step::Unload => {
                let attached = self.model.state != State::Unloaded;
                if attached {
                    self.context.keep_quantities(&Known);
                }
                self.context.detached();
                self.model.unload(attached);
            }
            Step::Count(which, events, provenance) => {
                let wanted = self.model.wanted();
                if let Some((pmd, _)) = wanted.get(*which % wanted.len().max(1)) {
                    self.context.count(*pmd, *events, *provenance);
                    self.model.count(*pmd, *events, code(*provenance));
                }
            }
            Step::Lose(pmd) => {
                if self.model.state != State::Unloaded {
                    self.context.lose(*pmd);
                    self.model.lose(*pmd);
                }
            }
            Step::Pass(ns, counted) => {
                self.context.pass(*ns, *counted);
                self.model.pass(*ns, *counted);
            }
            Step::Expire => {
                self.context.expire();
                self.model.expire();
            }
            Step::Overflow => {
                self.context.overflow(&MOMENT, &Known, &mut self.queue);
                self.model.overflow();
            }
            Step::ReadMessages => {
                self.queue.0.clear();
                self.model.queue.clear();
            }
        }
    }

    fn call(&mut self, mut call: Call) {
        let mut expected = call.clone();
        let told = self.context.call(&mut call, &Known, &mut self.queue);
        assert_eq!(outcome(told), self.model.call(&mut expected), "{call:?}");
        assert_eq!(call, expected);
    }

    /// All that can be seen without changing anything.
    fn compare(&mut self) {
        let (context, model) = (&self.context, &self.model);
        let state = match context.phase() {
            Phase::Unloaded => State::Unloaded,
            Phase::Loaded => State::Loaded,
            Phase::Masked => State::Masked,
        };
        assert_eq!(state, model.state);
        assert_eq!(context.is_started(), model.started);
        assert_eq!(context.is_blocked(), model.blocked);
        assert_eq!(context.generation(), model.generation);
        assert_eq!(context.active_set(), model.active);
        assert_eq!(context.has_pending_overflow(), !model.wrapped.is_empty());
        assert_eq!(context.switch_due(), model.switch_due());
        assert_eq!(self.queue.0, model.queue);
        let wanted: Vec<_> = context
            .wanted()
            .iter()
            .map(|it| (it.pmd, it.until.map(NonZeroU64::get)))
            .collect();
        assert_eq!(wanted, model.wanted());
        let infos = model.set_ids().into_iter().map(|id| SetInfo {
            id,
            ..SetInfo::default()
        });
        let infos: Vec<_> = infos.collect();
        assert_eq!(context.set_count(), infos.len());
        let reads = infos.iter().flat_map(|info| {
            COUNTERS.into_iter().chain([64, 77]).map(|num| PmdArg {
                num,
                set: info.id,
                ..PmdArg::default()
            })
        });
        let reads = reads.collect();
        self.call(Call::GetinfoEvtsets(infos));
        self.call(Call::ReadPmds(reads));
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1500,
        failure_persistence: Some(Box::new(FileFailurePersistence::Off)),
        ..ProptestConfig::default()
    })]
    #[test]
    fn context_and_model_agree(flags in flags(), steps in steps()) {
        let mut pair = Pair {
            context: Context::new(pmu("amd-core"), flags, None).expect("a context"),
            queue: Messages::default(),
            model: Model::new(flags),
        };
        pair.compare();
        for step in &steps {
            pair.play(step);
            pair.compare();
        }
    }
}
