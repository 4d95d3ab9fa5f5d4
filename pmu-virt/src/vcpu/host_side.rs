//! What tools of the host do to a vCPU: contexts that count beside its guest, and requests
//! to those who have reserved counters.

use arbiter::{
    Answer, Cookie, CounterId, CounterSet, Effects, Layer, Outcome, PerKind, Reason, Request,
    Wanted,
};
use perfmon::{ContextId, Quantities};
use perfmon_abi::wire::{Call, Errno, Refusal};
use pmu_model::IbsKind;

use super::claims::BudgetRefused;
use super::hosts::Hosts;
use super::seat::Seat;
use super::tally::Tally;
use super::tenancy::Tenancy;
use crate::attached::{AttachedContext, GuestLimit, NotLoaded};

/// A vCPU where it is, for tools of the host.
#[derive(Debug)]
pub struct HostSide<'a> {
    tenancy: &'a mut Tenancy,
    seat: Seat<'a>,
}

impl<'a> HostSide<'a> {
    pub(super) fn new(tenancy: &'a mut Tenancy, seat: Seat<'a>) -> Self {
        HostSide { tenancy, seat }
    }

    /// Attaches a context to this vCPU, which is on a core.
    ///
    /// # Errors
    /// EBUSY: the vCPU has as many contexts as it may or is on no core, or there is
    /// no room, and who has it. EINVAL: there is no such set, or nothing counts one
    /// of its events.
    pub fn load(&mut self, hosted: Box<AttachedContext>, set: u16) -> Result<(), NotLoaded> {
        self.tenancy.introduce_anew(&mut self.seat);
        let counting = self.tenancy.counting();
        let (tally, hosts) = (counting.tally(), counting.hosts());
        let owner = tally.owner();
        let Some(core) = self.seat.core_mut() else {
            let reason = format!("{owner} is on no core at present; try again");
            return Err(NotLoaded::new(hosted, Refusal::new(Errno::EBUSY, reason)));
        };
        let free = hosts.check_room(core, owner);
        let check = |kind: IbsKind| check_free(tally, hosts, kind);
        if let Err(refusal) = free.and_then(|()| hosted.check_samplers(check)) {
            return Err(NotLoaded::new(hosted, refusal));
        }
        let hosted = core.admit_hosted(hosted, Some(owner), set)?;
        self.tenancy.counting_mut().hosts_mut().add(*hosted);
        self.tenancy.hosts_changed(&mut self.seat);
        Ok(())
    }

    /// Detaches a context of this vCPU, with all that it has counted.
    pub fn unload(&mut self, id: ContextId) -> Option<Box<AttachedContext>> {
        let hosts = self.tenancy.counting_mut().hosts_mut();
        let hosted = hosts.remove(&mut self.seat, id)?;
        self.tenancy.hosts_changed(&mut self.seat);
        Some(hosted)
    }

    /// Carries out a command on a context of this vCPU. An overflow may be found
    /// that nobody has handled yet ([`Hosts::has_overflow`](super::Hosts::has_overflow)).
    ///
    /// # Errors
    /// The command's; EINVAL if there is no such context.
    pub fn call(
        &mut self,
        id: ContextId,
        call: &mut Call,
        values: &dyn Quantities,
    ) -> Result<(), Refusal> {
        let counting = self.tenancy.counting_mut();
        let (tally, hosts) = counting.beside_hosts();
        let check = |kind, hosts: &Hosts| check_free(tally, hosts, kind);
        let (changed, result) = hosts.call(&mut self.seat, id, call, values, check);
        if changed {
            counting.hosts_changed(&mut self.seat);
        }
        self.tenancy.tell_owners();
        result
    }

    /// A context of this vCPU may use so many counters at a time from now on
    /// ([`AttachedContext::set_lease`]).
    pub fn lease(&mut self, id: ContextId, counters: usize) {
        let hosts = self.tenancy.counting_mut().hosts_mut();
        if hosts.lease(&mut self.seat, id, counters) {
            self.tenancy.hosts_changed(&mut self.seat);
        }
    }

    /// Asks the owners of this vCPU's counters, for a host's tool, to keep to `limit`.
    /// `is_there`: the vCPU can be on the core of the tool's context. The hypervisor then
    /// holds what they give up, until `cookie` gives it back. `None` without
    /// reservations; [`Outcome::Nothing`] where they keep to it as it is.
    ///
    /// # Errors
    /// As [`arbiter::PcrUnit::request`].
    pub fn ask_owners(
        &mut self,
        limit: GuestLimit,
        is_there: bool,
        cookie: Cookie,
    ) -> Option<Result<Outcome, Reason>> {
        let terms = self.tenancy.counting().tally().terms();
        let held = PerKind::count(terms.held_by_guest).programmable;
        // Of what the guest's budget leaves out, counters fewer are none fewer to use.
        let left_out = || {
            let usable = PerKind::count(terms.usable);
            let usable = usize::from(usable.programmable + usable.fixed);
            let left_out = usable.saturating_sub(terms.wished());
            u8::try_from(left_out).unwrap_or(u8::MAX)
        };
        let fewer = match limit.fewer {
            fewer if is_there && fewer > 0 => fewer.saturating_add(left_out()),
            _ => 0,
        };
        let count = held.saturating_sub(limit.most).max(fewer);
        let request = Request::Reserve {
            wanted: Wanted::Held(count),
            cookie,
            lease_ms: None,
            event: None,
        };
        if count == 0 {
            return self.tenancy.claims().unit().map(|_| Ok(Outcome::Nothing));
        }
        let asked = self.request(request)?;
        Some(asked.map(|answer| answer.outcome))
    }

    /// What the owners have answered; `None` while they have not, or without
    /// reservations.
    pub fn owners_answer(&mut self) -> Option<Outcome> {
        let answer = self.tenancy.claims().unit()?.answer(Layer::HostTool);
        if answer.outcome == Outcome::Pending {
            return None;
        }
        self.tenancy.introduce_anew(&mut self.seat);
        Some(answer.outcome)
    }

    /// Nobody waits any more for what [`HostSide::ask_owners`] asked with this cookie.
    pub fn ask_no_more(&mut self, cookie: Cookie) {
        // It may have its answer already.
        let _ = self.request(Request::Withdraw { cookie });
    }

    /// Gives counters back that owners gave up. One that somebody else holds by now
    /// stays with them.
    pub fn give_back(&mut self, counters: CounterSet, cookie: Cookie) {
        for counter in counters.iter() {
            let _ = self.tenancy.arbitrate(&mut self.seat, |unit, cx| {
                ((), unit.give_back(counter, cookie, cx))
            });
        }
        self.tenancy.introduce_anew(&mut self.seat);
    }

    /// Makes a request for a host's tool.
    fn request(&mut self, request: Request) -> Option<Result<Answer, Reason>> {
        let done = self.tenancy.arbitrate(&mut self.seat, |unit, cx| {
            match unit.request(Layer::HostTool, request, cx) {
                Ok((answer, effects)) => (Ok(answer), effects),
                Err(reason) => (Err(reason), Effects::NONE),
            }
        });
        self.tenancy.introduce_anew(&mut self.seat);
        done
    }
}

/// A sampler has one user at a time, and what a layer of the guest has reserved is its.
fn check_free(tally: &Tally, hosts: &Hosts, kind: IbsKind) -> Result<(), Refusal> {
    let sampler = CounterId::Ibs(kind);
    let user = if let Some(context) = hosts.user_of(kind) {
        format!("{context} has it; unload that first")
    } else if tally.terms().held_by_guest.contains(sampler) {
        "the guest has reserved it; `umpire pcr` shows who".to_owned()
    } else if tally.samplers().is_enabled(kind) {
        "the guest has enabled it; try again when it has finished".to_owned()
    } else {
        return Ok(());
    };
    let reason = format!("{sampler} of {} is in use: {user}", tally.owner());
    Err(Refusal::new(Errno::EBUSY, reason))
}

impl From<BudgetRefused> for Refusal {
    fn from(refused: BudgetRefused) -> Self {
        Refusal::new(Errno::EBUSY, refused.to_string())
    }
}
