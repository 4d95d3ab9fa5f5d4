//! What host tools count in the VM has leases of its own: beside what the guest's lease holds.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use umpire_lease::{Arbiter, CallError, Keeper, News, NoReply, ReleaseIn};
use vmm_control::{ContextLoad, ContextNews, LeaseLine, Target};

use super::NOTICES;
use super::plan::Plan;

/// Between two tries to get a lease anew that was taken away.
const TRIES: Duration = Duration::from_secs(1);

/// Contexts of host tools, and the counters that they may use.
#[derive(Debug, Default)]
pub(super) struct Tools {
    /// The oldest first.
    contexts: Vec<Known>,
    leases: Vec<Share>,
    /// When to ask anew, after a lease was taken away.
    asks: Option<Instant>,
}

/// A context.
#[derive(Debug)]
struct Known {
    number: pmu_virt::perfmon::ContextId,
    wants: Wants,
    state: State,
}

/// So many counters, there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wants {
    target: Target,
    counters: usize,
}

#[derive(Debug)]
enum State {
    /// On its way, which it gives up then.
    Loads(Box<ContextLoad>, Instant),
    Counts,
    /// For want of a lease.
    Stands,
}

/// A lease of some counters.
#[derive(Debug)]
struct Share {
    keeper: Keeper,
    /// So many are asked for.
    asked: usize,
}

/// Counters that contexts want at a time. Those of two vCPUs never count on one thread, and
/// nor do those of two cores; one of each may.
fn wanted<'a>(contexts: impl IntoIterator<Item = &'a Wants>) -> usize {
    let (mut vcpus, mut cores) = (Vec::new(), Vec::new());
    for Wants { target, counters } in contexts {
        let (sums, at) = match *target {
            Target::Vcpu(number) => (&mut vcpus, number),
            Target::Core(number) => (&mut cores, number),
        };
        if sums.len() <= at {
            sums.resize(at + 1, 0);
        }
        sums[at] += counters;
    }
    let most = |sums: Vec<usize>| sums.into_iter().max().unwrap_or(0);
    most(vcpus) + most(cores)
}

/// Which of `contexts`, the oldest first, may count with so many counters.
fn served(contexts: &[Wants], counters: usize) -> Vec<bool> {
    let mut serving: Vec<Wants> = Vec::new();
    let serve = |wants: &Wants| {
        let fits = wanted(serving.iter().chain([wants])) <= counters;
        if fits {
            serving.push(*wants);
        }
        fits
    };
    contexts.iter().map(serve).collect()
}

impl Tools {
    /// Takes in what happened to contexts and to their leases, and does what follows.
    pub(super) fn turn(&mut self, line: &mut LeaseLine, plan: &Plan) {
        while let Some(news) = line.contexts() {
            match news {
                ContextNews::Loads(load) if load.counters == 0 => line.let_load(load),
                ContextNews::Loads(load) => {
                    self.contexts.push(Known {
                        number: load.context,
                        wants: Wants {
                            target: load.target,
                            counters: load.counters,
                        },
                        state: State::Loads(Box::new(load), Instant::now() + NOTICES),
                    });
                    // One by one: what cannot be had is refused to whom it was for.
                    self.ask(line, plan);
                }
                ContextNews::Left(context) => self.contexts.retain(|one| one.number != context),
            }
        }
        for share in &mut self.leases {
            share.hear();
        }
        self.leases.retain(|share| !share.keeper.has_ended());
        self.give_back(plan);
        self.ask(line, plan);
        self.serve(line, plan);
    }

    fn wants(&self) -> Vec<Wants> {
        self.contexts.iter().map(|one| one.wants).collect()
    }

    fn asked(&self) -> usize {
        self.leases.iter().map(|share| share.asked).sum()
    }

    /// Gives back what no context wants any more: first leases that wait for their turn,
    /// then the newest.
    fn give_back(&mut self, plan: &Plan) {
        self.leases.sort_by_key(|share| share.holds() == 0);
        let mut more = self.asked().saturating_sub(wanted(&self.wants()));
        while let Some(mut share) = self.leases.pop() {
            if share.asked > more {
                if more > 0
                    && let Err(error) = share.keep(share.asked - more, plan)
                {
                    log::debug!("{more} counters cannot be given back now: {error}");
                }
                self.leases.push(share);
                return;
            }
            more -= share.asked;
        }
    }

    /// Asks for what contexts lack. What cannot be had for those on their way is refused.
    fn ask(&mut self, line: &LeaseLine, plan: &Plan) {
        let now = Instant::now();
        while wanted(&self.wants()) > self.asked() {
            let more = wanted(&self.wants()) - self.asked();
            let is_new = |one: &&Known| matches!(one.state, State::Loads(..));
            let newest = self.contexts.iter().rposition(|one| is_new(&one));
            if newest.is_none() && self.asks.is_some_and(|asks| now < asks) {
                return;
            }
            match plan.lease_for_tool(more, &self.tool()) {
                Ok(keeper) => self.leases.push(Share {
                    keeper,
                    asked: more,
                }),
                Err(error) => {
                    let Some(newest) = newest else {
                        log::warn!("host tools count nothing, as there is no lease: {error}");
                        self.asks = Some(now + TRIES);
                        return;
                    };
                    self.refuse(newest, line, &error);
                }
            }
        }
        self.asks = None;
    }

    /// For whom the newest context is, for people.
    fn tool(&self) -> String {
        let loads = self.contexts.iter().rev().find_map(|one| match &one.state {
            State::Loads(load, _) => Some(format!("tool {} of uid {}", load.pid, load.uid)),
            State::Counts | State::Stands => None,
        });
        loads.unwrap_or_else(|| "tools".to_owned())
    }

    fn refuse(&mut self, at: usize, line: &LeaseLine, why: &CallError) {
        if let State::Loads(load, _) = self.contexts.remove(at).state {
            let reason = format!(
                "the host's arbiter has no counters for the context, which wants {} beside what \
                 the VM's lease holds: {why}; count fewer events at a time, or see `umpire who`",
                load.counters
            );
            line.refuse_load(*load, reason);
        }
    }

    /// Lets contexts count as far as there are counters.
    fn serve(&mut self, line: &LeaseLine, plan: &Plan) {
        let now = Instant::now();
        let held = self.leases.iter().map(Share::holds).sum();
        let served = served(&self.wants(), held);
        let mut late = None;
        for (at, (known, serves)) in self.contexts.iter_mut().zip(served).enumerate() {
            let Wants { target, counters } = known.wants;
            known.state = match (std::mem::replace(&mut known.state, State::Stands), serves) {
                (State::Loads(load, _), true) => {
                    line.let_load(*load);
                    State::Counts
                }
                (State::Loads(load, until), false) => {
                    late = late.or((until <= now).then_some(at));
                    State::Loads(load, until)
                }
                (State::Counts, false) => {
                    log::warn!("{}: stands, as its lease was taken away", known.number);
                    line.lease_context(known.number, target, 0);
                    State::Stands
                }
                (State::Stands, true) => {
                    log::info!("{}: counts again", known.number);
                    line.lease_context(known.number, target, counters);
                    State::Counts
                }
                (state, _) => state,
            };
        }
        if let Some(late) = late {
            let counters = self.contexts[late].wants.counters;
            let why = plan.explain_tool(counters, &self.tool());
            self.refuse(late, line, &why);
            self.give_back(plan);
        }
    }

    /// Readable when there is news of a lease.
    pub(super) fn connections(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let leases = self.leases.iter();
        leases.filter_map(|share| share.keeper.connection())
    }

    /// When there is something to do in any case.
    pub(super) fn due(&self) -> Option<Instant> {
        let loads = self.contexts.iter().filter_map(|one| match &one.state {
            State::Loads(_, until) => Some(*until),
            State::Counts | State::Stands => None,
        });
        let leases = self.leases.iter().filter_map(|share| share.keeper.due());
        loads.chain(leases).chain(self.asks).min()
    }
}

impl Share {
    fn hear(&mut self) {
        while let Some(news) = self.keeper.hear() {
            let id = self.keeper.lease().id;
            match news {
                News::Event(event) => log::debug!("lease {id} for tools {}", event.message),
                News::Away => log::debug!("the arbiter has gone away; lease {id} is held on"),
                News::Back => log::debug!("the arbiter is back, and lease {id} is held"),
                News::Lost(why) | News::NotRenewed(why) => {
                    log::warn!("lease {id} for tools: {why}");
                }
            }
        }
    }

    /// Counters that may be used: after a notice those that will be left.
    fn holds(&self) -> usize {
        let left = self.keeper.leaves().map(|(_, left)| left);
        let holds = left.unwrap_or(self.keeper.lease().holds);
        // What was just given back it may not have heard of yet.
        usize::try_from(holds).unwrap_or(usize::MAX).min(self.asked)
    }

    /// Keeps so many, and gives the rest back.
    fn keep(&mut self, counters: usize, plan: &Plan) -> Result<(), CallError> {
        let release = ReleaseIn {
            lease: self.keeper.lease().id,
            generation: None,
            keep: u32::try_from(counters).ok(),
        };
        let _: NoReply = Arbiter::connect(&plan.socket)?.call("Release", &release)?;
        self.asked = counters;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Target::{Core, Vcpu};
    use super::*;

    fn wants(all: &[(Target, usize)]) -> Vec<Wants> {
        let one = |&(target, counters)| Wants { target, counters };
        all.iter().map(one).collect()
    }

    #[test]
    fn contexts_want_what_may_count_at_a_time() {
        for (contexts, counters) in [
            (&[][..], 0),
            (&[(Vcpu(0), 2)], 2),
            (&[(Vcpu(0), 2), (Vcpu(1), 3)], 3),
            (&[(Vcpu(0), 2), (Vcpu(1), 3), (Vcpu(0), 2)], 4),
            (&[(Core(0), 1), (Core(7), 2), (Vcpu(1), 3)], 5),
        ] {
            assert_eq!(wanted(&wants(contexts)), counters, "{contexts:?}");
        }
    }

    #[test]
    fn the_oldest_are_served_first_and_small_ones_fill_the_rest() {
        let contexts = wants(&[(Vcpu(0), 2), (Vcpu(0), 4), (Vcpu(1), 3), (Core(0), 1)]);
        for (counters, expected) in [
            (0, [false, false, false, false]),
            (1, [false, false, false, true]),
            (2, [true, false, false, false]),
            (3, [true, false, true, false]),
            (4, [true, false, true, true]),
            (6, [true, true, true, false]),
            (7, [true, true, true, true]),
        ] {
            assert_eq!(served(&contexts, counters), expected, "{counters}");
        }
    }
}
