//! What host tools count in the VM has leases of its own: beside what the guest's lease holds.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use umpire_lease::{CallError, Kept, News};
use vmm_control::{ContextLine, ContextLoad, ContextNews, Target};

use super::plan::LeasePlan;
use super::{NOTICES, wait};

/// Between two tries to get a lease anew that was taken away; and for so long what was refused
/// to one context is refused to others, without asking again.
const TRIES: Duration = Duration::from_secs(1);

/// Contexts of host tools, and the counters that they may use.
#[derive(Debug)]
pub(super) struct Tools {
    line: ContextLine,
    plan: LeasePlan,
    /// The oldest first.
    contexts: Vec<ToolContext>,
    leases: Vec<Share>,
    /// When to ask anew, after a lease was taken away.
    asks: Option<Instant>,
    /// So many counters more could not be had, why, and until when that is taken for granted.
    refused: Option<(usize, String, Instant)>,
}

/// A context.
#[derive(Debug)]
struct ToolContext {
    number: pmu_virt::perfmon::ContextId,
    wants: Wants,
    state: ToolState,
}

/// So many counters, there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wants {
    target: Target,
    counters: usize,
}

#[derive(Debug)]
enum ToolState {
    /// On its way, which it gives up then.
    Loads(Box<ContextLoad>, Instant),
    Counts,
    /// For want of a lease.
    Stands,
}

/// A lease of some counters.
#[derive(Debug)]
struct Share {
    kept: Box<dyn Kept>,
    /// So many are asked for.
    asked: usize,
    /// It has held them all.
    was_whole: bool,
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
    pub(super) fn new(line: ContextLine, plan: LeasePlan) -> Self {
        Tools {
            line,
            plan,
            contexts: Vec::new(),
            leases: Vec::new(),
            asks: None,
            refused: None,
        }
    }

    /// Does what follows from one piece of news, or waits for some.
    pub(super) fn turn(&mut self) {
        for share in &mut self.leases {
            share.hear();
        }
        self.leases.retain(|share| !share.kept.has_ended());
        self.tell_within();
        self.serve();
        match self.line.hear() {
            Some(ContextNews::Loads(load)) => self.load(load),
            Some(ContextNews::Left(context)) => {
                self.contexts.retain(|one| one.number != context);
                self.give_back();
            }
            None => {
                self.ask_anew();
                let leases = self.leases.iter();
                let connections = leases.filter_map(|share| share.kept.connection());
                wait(connections.chain([self.line.as_fd()]), [self.due()]);
            }
        }
    }

    /// Tools hear out of which lease the newest of theirs is taken.
    fn tell_within(&self) {
        let newest = self.leases.last();
        self.line
            .tell_within(newest.and_then(|share| share.kept.lease().within));
    }

    fn wants(&self, which: impl Fn(&ToolContext) -> bool) -> usize {
        let contexts = self.contexts.iter().filter(|one| which(one));
        wanted(contexts.map(|one| &one.wants))
    }

    fn asked(&self) -> usize {
        self.leases.iter().map(|share| share.asked).sum()
    }

    /// Gets counters for a context that is to be loaded, beside those that count and load.
    fn load(&mut self, load: ContextLoad) {
        if load.counters == 0 {
            self.line.let_load(load);
            return;
        }
        let tool = format!("tool {} of uid {}", load.pid, load.uid);
        let context = ToolContext {
            number: load.context,
            wants: Wants {
                target: load.target,
                counters: load.counters,
            },
            state: ToolState::Loads(Box::new(load), Instant::now() + NOTICES),
        };
        self.contexts.push(context);
        let wanted = self.wants(|one| !matches!(one.state, ToolState::Stands));
        let there: usize = self.leases.iter().map(Share::expects).sum();
        let more = wanted.saturating_sub(there);
        if let Err(why) = self.lease(more, &tool) {
            self.refuse(self.contexts.len() - 1, &why);
        }
    }

    /// Leases so many more.
    fn lease(&mut self, more: usize, tool: &str) -> Result<(), String> {
        if more == 0 {
            return Ok(());
        }
        let now = Instant::now();
        if let Some((least, why, until)) = &self.refused
            && more >= *least
            && now < *until
        {
            return Err(why.clone());
        }
        match self.plan.lease_for_tool(more, tool) {
            Ok(kept) => {
                self.leases.push(Share::new(kept, more));
                self.tell_within();
                Ok(())
            }
            Err(error) => {
                let why = error.to_string();
                self.refused = Some((more, why.clone(), now + TRIES));
                Err(why)
            }
        }
    }

    /// What contexts lack that stand for want of a lease is asked for now and then. Leases
    /// that only wait come back by themselves.
    fn ask_anew(&mut self) {
        let more = self.wants(|_| true).saturating_sub(self.asked());
        let now = Instant::now();
        if more == 0 {
            self.asks = None;
        } else if self.asks.is_none_or(|asks| asks <= now) {
            if let Err(why) = self.lease(more, "tools") {
                log::warn!("host tools count less than they want: {why}");
            }
            self.asks = Some(now + TRIES);
        }
    }

    /// Gives back what no context wants any more: first leases that wait for their turn,
    /// then the newest.
    fn give_back(&mut self) {
        let mut more = self.asked().saturating_sub(self.wants(|_| true));
        if more == 0 {
            return;
        }
        // What was refused may be free now.
        self.refused = None;
        self.leases.sort_by_key(|share| share.holds() == 0);
        while let Some(mut share) = self.leases.pop() {
            if share.asked > more {
                if more > 0
                    && let Err(error) = share.keep(share.asked - more)
                {
                    log::debug!("{more} counters cannot be given back now: {error}");
                }
                self.leases.push(share);
                return;
            }
            more -= share.asked;
        }
    }

    fn refuse(&mut self, at: usize, why: &str) {
        if let ToolState::Loads(load, _) = self.contexts.remove(at).state {
            let reason = format!(
                "the host's arbiter has no counters for the context, which wants {} beside what \
                 the VM's leases hold: {why}; count fewer events at a time",
                load.counters
            );
            self.line.refuse_load(*load, reason);
            self.give_back();
        }
    }

    /// Lets contexts count as far as there are counters.
    fn serve(&mut self) {
        let now = Instant::now();
        let held = self.leases.iter().map(Share::holds).sum();
        let wants: Vec<Wants> = self.contexts.iter().map(|one| one.wants).collect();
        let mut late = None;
        let served = served(&wants, held);
        for (at, (context, serves)) in self.contexts.iter_mut().zip(served).enumerate() {
            let Wants { target, counters } = context.wants;
            context.state = match (
                std::mem::replace(&mut context.state, ToolState::Stands),
                serves,
            ) {
                (ToolState::Loads(load, _), true) => {
                    self.line.let_load(*load);
                    ToolState::Counts
                }
                (ToolState::Loads(load, until), false) => {
                    late = late.or((until <= now).then_some(at));
                    ToolState::Loads(load, until)
                }
                (ToolState::Counts, false) => {
                    log::warn!("{}: stands, as its lease was taken away", context.number);
                    self.line.lease_context(context.number, target, 0);
                    ToolState::Stands
                }
                (ToolState::Stands, true) => {
                    log::info!("{}: counts again", context.number);
                    self.line.lease_context(context.number, target, counters);
                    ToolState::Counts
                }
                (state, _) => state,
            };
        }
        if let Some(late) = late {
            self.refuse(late, "who had to make room for it did not do so in time");
        }
    }

    /// When there is something to do in any case.
    fn due(&self) -> Option<Instant> {
        let loads = self.contexts.iter().filter_map(|one| match &one.state {
            ToolState::Loads(_, until) => Some(*until),
            ToolState::Counts | ToolState::Stands => None,
        });
        let leases = self.leases.iter().filter_map(|share| share.kept.due());
        loads.chain(leases).chain(self.asks).min()
    }
}

impl Share {
    fn new(kept: Box<dyn Kept>, asked: usize) -> Self {
        let mut share = Share {
            kept,
            asked,
            was_whole: false,
        };
        share.was_whole = share.holds() == asked;
        share
    }

    /// Counters that it has, or will have soon: others were told to make room for it.
    fn expects(&self) -> usize {
        if self.was_whole {
            self.holds()
        } else {
            self.asked
        }
    }

    fn hear(&mut self) {
        while let Some(news) = self.kept.hear() {
            let id = self.kept.lease().id;
            match news {
                News::Event(event) => log::debug!("lease {id} for tools {}", event.message),
                News::Away => log::debug!("the arbiter has gone away; lease {id} is held on"),
                News::Back => log::debug!("the arbiter is back, and lease {id} is held"),
                News::Lost(why) | News::NotRenewed(why) => {
                    log::warn!("lease {id} for tools: {why}");
                }
            }
        }
        self.was_whole |= self.holds() == self.asked;
    }

    /// Counters that may be used: after a notice those that will be left.
    fn holds(&self) -> usize {
        let left = self.kept.leaves().map(|(_, left)| left);
        let holds = left.unwrap_or(self.kept.lease().holds);
        // What was just given back it may not have heard of yet.
        usize::try_from(holds).unwrap_or(usize::MAX).min(self.asked)
    }

    /// Keeps so many, and gives the rest back.
    fn keep(&mut self, counters: usize) -> Result<(), CallError> {
        self.kept
            .keep(u32::try_from(counters).unwrap_or(u32::MAX))?;
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
