//! Places for the guest's counters and those of host contexts, all at once.

use arbiter::CounterId;
use pmu_model::UnavailableReason;

use super::{Here, VcpuPmu};
use crate::assign::{Demand, Placement, assign, assign_most};
use crate::core_pmu::CorePmu;
use crate::perfmon::{ContextId, HostEvent, Hosted, Standing};
use crate::slot_bank::SlotBank;

/// Who demands a place.
#[derive(Clone, Copy, Debug)]
enum Party {
    Guest(CounterId),
    Host(ContextId, u16),
}

/// Demands by precedence.
struct Parties {
    parties: Vec<Party>,
    demands: Vec<Demand>,
}

impl VcpuPmu {
    /// Brings slots in line with what host contexts want, and the guest's with
    /// what they leave. Counts were settled before.
    pub(super) fn arrange(&mut self, here: &mut Here<'_>) {
        self.each_host(here, Hosted::reconcile);
        self.give_places(here);
        self.refresh_needs(here.as_deref());
    }

    /// Gives host contexts the places that they miss.
    pub(super) fn give_places(&mut self, here: &mut Here<'_>) {
        let mut short = false;
        self.each_host(here, |hosted, bank| {
            hosted.place_missing(bank);
            short |= hosted.is_short(bank);
        });
        if short {
            self.distribute(here);
        }
        self.each_host(here, |hosted, _| hosted.miss_the_rest());
    }

    /// Gives places to the guest's `wanted` counters and to host contexts.
    ///
    /// First those come that the policy puts first, then the others, then the
    /// contexts that have what is left over. Of these, one that may be preempted
    /// and does not find all that it wants is.
    pub(super) fn distribute_among_hosts(&mut self, here: &mut Here<'_>, wanted: Vec<Demand>) {
        let mut guest = wanted;
        loop {
            let Some(core) = here else { return };
            let (all, unclaimed) = (core.bank.slots(), core.bank.unclaimed());
            let Parties { parties, demands } = self.parties(core, &guest);
            // No other vCPU's counter is moved while there is room beside it.
            if let Ok(placement) = assign(&demands, unclaimed).or_else(|_| assign(&demands, all)) {
                self.turns.end();
                let otherwise = UnavailableReason::Waiting;
                self.move_all(here, &parties, &demands, &placement, otherwise);
                return;
            }
            let placement = assign_most(&demands, all, 0);
            let without = |index: usize| placement.slot(index).is_none();
            if let Some(loser) = self.loser(core, &parties, without) {
                self.preempt(here, loser);
                continue;
            }
            let lost = (0..)
                .zip(&parties)
                .any(|(index, party)| matches!(party, Party::Guest(_)) && without(index));
            let mut otherwise = UnavailableReason::Waiting;
            if lost {
                let busy = UnavailableReason::Busy {
                    backend: core.backend().name(),
                };
                let alone = assign(&guest, all);
                if self.turns.are_allowed() {
                    let conflict = alone.map_or_else(|e| e.to_string(), |_| busy.to_string());
                    if self.turns.start(self.ran) {
                        log::info!("{}: counters take turns, because {conflict}", self.owner);
                    }
                    let first = self.turns.first() % guest.len().max(1);
                    guest.rotate_left(first);
                    let Parties { parties, demands } = self.parties(core, &guest);
                    let placement = assign_most(&demands, all, 0);
                    self.move_all(here, &parties, &demands, &placement, otherwise);
                    return;
                }
                otherwise = alone.map_or_else(UnavailableReason::Conflict, |_| busy);
            }
            self.move_all(here, &parties, &demands, &placement, otherwise);
            return;
        }
    }

    /// Everybody's demands, by precedence.
    fn parties(&self, core: &CorePmu, guest: &[Demand]) -> Parties {
        let mut all = Parties {
            parties: Vec::new(),
            demands: Vec::new(),
        };
        let hosts_first = core.host.policy().places_hosts_first();
        for turn in [hosts_first, !hosts_first] {
            match turn {
                true => self.add_hosts(&mut all, core, Standing::Firm),
                false => all.add_guest(guest),
            }
        }
        self.add_hosts(&mut all, core, Standing::Spare);
        all
    }

    /// The demands of the contexts with this standing; that of the oldest last,
    /// for it makes room first.
    fn add_hosts(&self, all: &mut Parties, core: &CorePmu, standing: Standing) {
        let mut hosts: Vec<&Hosted> = self
            .hosts(Some(core))
            .filter(|hosted| core.standing_of(hosted.id()) == Some(standing))
            .collect();
        hosts.sort_by_key(|hosted| std::cmp::Reverse(core.age_of(hosted.id())));
        for hosted in hosts {
            for (pmd, demand) in hosted.demands(&core.bank) {
                all.parties.push(Party::Host(hosted.id(), pmd));
                all.demands.push(demand);
            }
        }
    }

    /// A context that has to make room: it may be preempted, has what is left
    /// over, and that is not all it wants.
    fn loser(
        &self,
        core: &CorePmu,
        parties: &[Party],
        without: impl Fn(usize) -> bool,
    ) -> Option<ContextId> {
        let yields = |context| {
            let mut hosts = self.hosts(Some(core));
            hosts.any(|hosted| hosted.id() == context && hosted.is_preemptible())
                && core.standing_of(context) == Some(Standing::Spare)
        };
        let lost = parties.iter().enumerate().rev();
        lost.filter(|(index, _)| without(*index))
            .find_map(|(_, party)| match *party {
                Party::Host(context, _) if yields(context) => Some(context),
                Party::Host(..) | Party::Guest(_) => None,
            })
    }

    /// Works with one of them, and records what came of it.
    fn each_host_of(
        &mut self,
        here: &mut Here<'_>,
        context: ContextId,
        act: impl Fn(&mut Hosted, &mut SlotBank) -> Option<HostEvent>,
    ) {
        let mut event = None;
        self.each_host(here, |hosted, bank| {
            if hosted.id() == context {
                event = act(hosted, bank).map(|event| (hosted.vcpu(), event));
            }
        });
        if let (Some((vcpu, event)), Some(core)) = (event, here) {
            core.host.record(context, vcpu, event);
        }
    }

    fn preempt(&mut self, here: &mut Here<'_>, context: ContextId) {
        self.each_host_of(here, context, |hosted, bank| hosted.preempt(bank));
    }

    /// Restores contexts that were preempted and would find all that they want;
    /// they have no places yet.
    pub(super) fn restore_hosts(&mut self, here: &mut Here<'_>) {
        let Some(core) = here else { return };
        let guest = self.guest_demands(Some(core));
        let fits = |hosted: &Hosted| {
            let mut demands = self.parties(core, &guest).demands;
            demands.extend(hosted.demands_if_restored(&core.bank));
            assign(&demands, core.bank.slots()).is_ok()
        };
        let preempted = self
            .hosts(Some(core))
            .filter(|hosted| hosted.is_preempted());
        let restored = preempted.filter(|hosted| fits(hosted));
        // One at a time: each takes room.
        let Some(first) = restored.map(Hosted::id).next() else {
            return;
        };
        self.each_host_of(here, first, |hosted, _| hosted.restore());
    }

    /// Brings counters to their slots: first all that leave, then all that come.
    fn move_all(
        &mut self,
        here: &mut Here<'_>,
        parties: &[Party],
        demands: &[Demand],
        placement: &Placement,
        otherwise: UnavailableReason,
    ) {
        let moves = || {
            let demands = parties.iter().zip(demands).enumerate();
            demands
                .map(|(index, (party, demand))| (*party, demand, placement.slot(index)))
                .filter(|(_, demand, slot)| slot.is_none() || *slot != demand.held)
        };
        for (party, ..) in moves() {
            match party {
                Party::Guest(counter) => self.give_up_place(here, counter),
                Party::Host(context, pmd) => self.each_host(here, |hosted, bank| {
                    if hosted.id() == context {
                        hosted.displace(pmd, bank);
                    }
                }),
            }
        }
        for (party, demand, slot) in moves() {
            let slots = slot.map(|slot| demand.constraint.taken_at(slot));
            match (party, slots) {
                (Party::Guest(counter), slots) => self.guest_comes(here, counter, slots, otherwise),
                (Party::Host(context, pmd), Some(slots)) => self.each_host(here, |hosted, bank| {
                    if hosted.id() == context {
                        hosted.bind_slot(pmd, slots, bank);
                    }
                }),
                // It stays missing, and is told so in the end.
                (Party::Host(..), None) => {}
            }
        }
    }
}

impl Parties {
    fn add_guest(&mut self, guest: &[Demand]) {
        let counters = guest.iter().map(|demand| Party::Guest(demand.counter));
        self.parties.extend(counters);
        self.demands.extend_from_slice(guest);
    }
}
