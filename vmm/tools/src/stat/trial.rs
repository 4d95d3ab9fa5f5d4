//! Finding out what can be counted, by trying.

use std::time::Duration;

use perfmon::LogicalPmu;
use perfmon_abi::consts::{PFM_FL_NO_ASK, PFM_FL_PREEMPTIBLE};
use perfmon_abi::wire::Errno;

use super::events::{Asked, Source};
use super::schedule::{Counters, Schedule, Wanted};
use super::session::{CountingSession, Job};
use crate::targets::{PREEMPTIBLE_HINT, Target};
use crate::{ToolError, Vm, refused, registers};

/// What can be counted, and how.
#[derive(Clone, Debug, Default)]
pub(super) struct CountingPlan {
    pub(super) schedule: Schedule,
    /// By event: something counts it.
    pub(super) supported: Vec<bool>,
    /// What the user should know of events that are not counted.
    pub(super) notes: Vec<String>,
}

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question<'a> {
    pub(super) vm: &'a Vm,
    pub(super) events: &'a [Asked],
    /// The events' numbers, group by group.
    pub(super) groups: &'a [Vec<usize>],
    pub(super) targets: &'a [Target],
    /// Of contexts that are tried, beside those of their targets.
    pub(super) flags: u32,
}

impl Question<'_> {
    /// The plan that all targets take.
    ///
    /// # Errors
    /// A target takes no context at all, or the VM fails.
    pub(super) fn plan(&self) -> Result<CountingPlan, ToolError> {
        let mut plan = CountingPlan {
            supported: vec![true; self.events.len()],
            ..CountingPlan::default()
        };
        // Whoever takes none at all, with no counters wanted, has a reason of
        // its own: another tool's context, or an end.
        for target in self.targets {
            self.try_on(*target, &[])?
                .map_err(refused(format!("{target} cannot be measured")))?;
        }
        let refused = self.find_supported(&mut plan)?;
        let (schedule, mut reason) = self.schedule(&plan.supported)?;
        plan.schedule = schedule;
        if !plan.schedule.left_out.is_empty() {
            // Taking turns does not help, so the guest is disturbed.
            let asking = Question {
                flags: self.flags & !PFM_FL_NO_ASK,
                ..*self
            };
            let groups = self.wanted(&plan.supported);
            let ways = attempts(&self.vm.pmu).map(|counters| Schedule::of(&groups, counters));
            // Of those that leave out least the one that takes the fewest counters.
            let ways = ways.collect::<Vec<_>>().into_iter().rev();
            if let Some(modest) = ways.min_by_key(|way| way.left_out.len())
                && modest.left_out.len() < plan.schedule.left_out.len()
            {
                match asking.try_everywhere(&modest)? {
                    Ok(()) => plan.schedule = modest,
                    Err(why) => reason = Some(why),
                }
            }
        }
        let mut parts = self.not_supported(&refused);
        if !plan.schedule.left_out.is_empty() {
            parts.push(self.note(&plan, reason)?);
        }
        if !parts.is_empty() {
            parts.push(format!("counted: {}", self.counted(&plan)));
            plan.notes.push(parts.join("; "));
        }
        Ok(plan)
    }

    /// What all targets admit, and why one did not admit more.
    fn schedule(&self, supported: &[bool]) -> Result<(Schedule, Option<String>), ToolError> {
        let groups = self.wanted(supported);
        let mut reason = None;
        for counters in attempts(&self.vm.pmu) {
            let schedule = Schedule::of(&groups, counters);
            match self.try_everywhere(&schedule)? {
                Ok(()) => return Ok((schedule, reason)),
                Err(why) => reason = Some(why),
            }
        }
        let none = Schedule {
            sets: Vec::new(),
            left_out: groups.iter().flatten().map(|it| it.0).collect(),
        };
        Ok((none, reason))
    }

    /// Events with a counter, as far as they are supported.
    fn wanted(&self, supported: &[bool]) -> Vec<Vec<Wanted>> {
        let one = |&event: &usize| -> Option<Wanted> {
            let request = self.events.get(event)?.request()?;
            let is = supported.get(event).copied().unwrap_or(false);
            is.then(|| (event, registers::need(&self.vm.pmu, request)))
        };
        let group = |group: &Vec<usize>| group.iter().filter_map(one).collect();
        self.groups.iter().map(group).collect()
    }

    /// Loads each event alone: what is refused then as invalid, no source counts.
    /// Returns these, with the reasons.
    fn find_supported(&self, plan: &mut CountingPlan) -> Result<Vec<(usize, String)>, ToolError> {
        let Some(&target) = self.targets.first() else {
            return Ok(Vec::new());
        };
        let mut refused = Vec::new();
        for (event, supported) in plan.supported.iter_mut().enumerate() {
            let Some(asked) = self.events.get(event) else {
                continue;
            };
            let Some(request) = asked.request() else {
                if let Source::Nothing { why } = &asked.source {
                    *supported = false;
                    refused.push((event, why.clone()));
                }
                continue;
            };
            let need = registers::need(&self.vm.pmu, request);
            let model = self.vm.pmu.model();
            let counters = Counters {
                programmable: model.programmable().min(1),
                fixed: model.fixed(),
            };
            let schedule = Schedule::of(&[vec![(event, need)]], counters);
            if !schedule.left_out.is_empty() {
                *supported = false;
                refused.push((event, "no counter of the VM's PMU counts it".to_owned()));
                continue;
            }
            match self.try_on(target, &schedule.sets)? {
                Err(refusal) if refusal.errno == Errno::EINVAL => {
                    *supported = false;
                    refused.push((event, reason_alone(&refusal.reason).to_owned()));
                }
                // Counters are missing, which is looked at below.
                Err(_) | Ok(()) => {}
            }
        }
        Ok(refused)
    }

    fn name(&self, event: usize) -> &str {
        self.events.get(event).map_or("", |it| it.name.as_str())
    }

    /// What nothing counts here, with the reasons.
    fn not_supported(&self, refused: &[(usize, String)]) -> Vec<String> {
        let with_reason = |same: &[(usize, String)]| {
            let names: Vec<&str> = same.iter().map(|(event, _)| self.name(*event)).collect();
            let reason = same.first().map_or("", |(_, reason)| reason);
            format!("{} ({reason})", names.join(", "))
        };
        let same = refused.chunk_by(|(_, one), (_, other)| one == other);
        let all: Vec<String> = same.map(with_reason).collect();
        let line = (!all.is_empty()).then(|| format!("not supported here: {}", all.join(", ")));
        line.into_iter().collect()
    }

    /// What is counted.
    fn counted(&self, plan: &CountingPlan) -> String {
        let each = plan.supported.iter().enumerate();
        let counts = each.filter(|(event, is)| **is && !plan.schedule.left_out.contains(event));
        let names: Vec<&str> = counts.map(|(event, _)| self.name(event)).collect();
        if names.is_empty() {
            "nothing".to_owned()
        } else {
            names.join(", ")
        }
    }

    fn try_everywhere(&self, schedule: &Schedule) -> Result<Result<(), String>, ToolError> {
        for target in self.targets {
            match self.try_on(*target, &schedule.sets)? {
                Ok(()) => {}
                Err(refusal) => return Ok(Err(format!("{target}: {}", refusal.reason))),
            }
        }
        Ok(Ok(()))
    }

    /// Attaches a context and lets it go; the inner error is the VM's answer.
    fn try_on(
        &self,
        target: Target,
        sets: &[Vec<super::schedule::Place>],
    ) -> Result<Result<(), perfmon_abi::wire::Refusal>, ToolError> {
        let job = Job {
            vm: self.vm,
            events: self.events,
            sets,
            turn: Duration::from_secs(1),
            flags: self.flags,
        };
        match CountingSession::open(&job, target, false) {
            Ok(session) => {
                // Closing it alone would leave it there for a moment.
                let mut unload = umpire_perfmon::Call::Unload;
                let unloaded = self.vm.client.call(&session.handle, &mut unload);
                unloaded.map_err(refused("trying what can be counted"))?;
                Ok(Ok(()))
            }
            Err(refusal) if matches!(refusal.errno, Errno::EBUSY | Errno::EINVAL) => {
                Ok(Err(refusal))
            }
            Err(refusal) => Err(ToolError::refused(
                format!("{target} cannot be measured"),
                refusal,
            )),
        }
    }

    /// What the user should know of events that have no counter.
    fn note(&self, plan: &CountingPlan, reason: Option<String>) -> Result<String, ToolError> {
        let left_out = &plan.schedule.left_out;
        let names = left_out.iter().filter_map(|it| self.events.get(*it));
        let names: Vec<&str> = names.map(|it| it.name.as_str()).collect();
        // Not every reason is one of counters that others hold.
        let preemptible = Question {
            flags: self.flags | PFM_FL_PREEMPTIBLE,
            ..*self
        };
        let is_preemptible = self.flags & PFM_FL_PREEMPTIBLE != 0;
        let helps = !is_preemptible && reason.is_some() && {
            let (schedule, _) = preemptible.schedule(&plan.supported)?;
            schedule.left_out.len() < left_out.len()
        };
        let hint = if helps { PREEMPTIBLE_HINT } else { "" };
        let reason =
            reason.unwrap_or_else(|| "a group needs more counters than there are".to_owned());
        let names = names.join(", ");
        Ok(format!("no counters for {names}: {reason}{hint}"))
    }
}

/// A refusal without the registers of the context that was tried, which say nothing to a user.
fn reason_alone(reason: &str) -> &str {
    match reason.split_once(": ") {
        Some((place, reason)) if place.starts_with("event set ") => reason,
        _ => reason,
    }
}

/// The groups, and of those that are `weak` (by number) each event by itself where all
/// counters together are too few for them.
pub(super) fn broken_up(
    groups: Vec<Vec<Asked>>,
    weak: &[usize],
    pmu: &LogicalPmu,
) -> Vec<Vec<Asked>> {
    let model = pmu.model();
    let counters = Counters {
        programmable: model.programmable(),
        fixed: model.fixed(),
    };
    let fits = |group: &[Asked]| {
        let requests = group.iter().filter_map(Asked::request).enumerate();
        let wanted: Vec<Wanted> = requests
            .map(|(number, request)| (number, registers::need(pmu, request)))
            .collect();
        Schedule::of(&[wanted], counters).left_out.is_empty()
    };
    let each = groups.into_iter().enumerate();
    each.flat_map(|(number, group)| {
        if weak.contains(&number) && !fits(&group) {
            group.into_iter().map(|event| vec![event]).collect()
        } else {
            vec![group]
        }
    })
    .collect()
}

/// Numbers of counters to try, the most first: others may hold some.
fn attempts(pmu: &LogicalPmu) -> impl Iterator<Item = Counters> {
    let model = pmu.model();
    let (most, fixed) = (model.programmable(), model.fixed());
    let with = move |fixed| {
        let each = (1..=most).rev();
        each.map(move |programmable| Counters {
            programmable,
            fixed,
        })
    };
    let without_fixed = (fixed > 0).then(|| with(0));
    with(fixed).chain(without_fixed.into_iter().flatten())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stat::events::asked;
    use crate::stat::spec::EventList;
    use pmu_model::PmuModel;
    use umpire_events::{LibraryError, NoTables};

    #[test]
    fn a_weak_group_that_does_not_fit_is_broken_up() {
        let check = |model: &str, list: &str, expected: &[usize]| {
            let pmu = LogicalPmu::new(PmuModel::parse(model).unwrap());
            let list: EventList = list.parse().unwrap();
            let names = NoTables(LibraryError::TooLate);
            let groups = asked(&list, pmu.model(), &[], &names).unwrap();
            let broken = broken_up(groups, &list.weak, &pmu);
            let lengths: Vec<usize> = broken.iter().map(Vec::len).collect();
            assert_eq!(lengths, expected, "{list:?}");
        };
        check("amd-k7", "rc0,{rc1,rc2}:W", &[1, 2]);
        check(
            "amd-k7",
            "{rc0,rc1,rc2,rc3,rc4}:W,{rc5,rc6}",
            &[1, 1, 1, 1, 1, 2],
        );
        check("amd-k7", "{rc0,rc1,rc2,rc3,rc4}", &[5]);
        check("amd-k7", "{rc0,rc1,rc2,rc3,cs}:W", &[5]);
        check(
            "intel-v2,counters=2",
            "{cycles,instructions,rc4,rc5}:W",
            &[4],
        );
    }

    #[test]
    fn the_most_counters_are_tried_first() {
        let check = |model: &str, expected: &[(u8, u8)]| {
            let pmu = LogicalPmu::new(PmuModel::parse(model).unwrap());
            let found: Vec<(u8, u8)> = attempts(&pmu)
                .map(|it| (it.programmable, it.fixed))
                .collect();
            assert_eq!(found, expected);
        };
        check("amd-k7", &[(4, 0), (3, 0), (2, 0), (1, 0)]);
        check("intel-v2,counters=2", &[(2, 3), (1, 3), (2, 0), (1, 0)]);
    }
}
