//! Which perf event a holder may have of its lease. The attributes follow from the lease;
//! what is counted is the only word of the holder's. Pure.

use arbiter::{CounterId, CounterSet};
use arbiter_host::{Caller, CpuSet, LeaseId, PmuId, Scope};
use serde_json::{Value, json};
use umpire_budget::{EventSpec, Fixed, HandedEvent, Rings};
use umpire_lease::{self as wire, EventRequest};
use varlink::Reply;

use super::shown::Viewer;
use super::{Service, refusal, trail, wrong};
use crate::peer::{Client, NoThread};
use crate::task::Task;

/// What of `config` a holder may choose: the event and its unit mask, edge, invert and
/// threshold, and AMD's upper bits of the event. The bit of Intel's for any thread of the
/// core is not among them.
const CHOICE: u64 = 0xffff | 1 << 18 | 1 << 23 | 0xff << 24 | 0xf << 32;
/// Fewer counts between two overflows are refused.
const LEAST_PERIOD: u64 = 1_000;

/// An event that may be opened, and whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Allowed {
    pub(crate) lease: LeaseId,
    /// Which of the lease's counters.
    pub(crate) counter: usize,
    /// Those of the host that it may be on.
    pub(crate) pmu: PmuId,
    pub(crate) counters: CounterSet,
    pub(crate) event: HandedEvent,
}

impl Service {
    /// Whether a tenant may have events opened.
    pub(crate) fn opens_events(&self) -> bool {
        self.config
            .members
            .iter()
            .any(|members| members.opens_events)
    }

    /// The event that a client may have.
    ///
    /// # Errors
    /// Why it may not, as the varlink socket says it.
    pub(crate) fn allow(
        &mut self,
        client: &Client,
        request: &EventRequest,
    ) -> Result<Allowed, Box<wire::Refusal>> {
        let (tenants, operator) = self.config.tenants_of(client);
        let id = LeaseId(request.lease);
        let of = self.arbiter.lease(id).map(|lease| lease.owner.tenant);
        let tenant = of
            .filter(|of| tenants.contains(of))
            .or(tenants.first().copied());
        let caller = Caller {
            tenant: tenant.unwrap_or(arbiter_host::TenantId(u16::MAX)),
            uid: client.uid,
            operator,
        };
        let mut looks = 0;
        let thread = || {
            request
                .thread
                .map(|number| client.thread(number, &mut looks))
        };
        let allowed = self
            .not_barred(client.uid)
            .and_then(|()| self.event_of(caller, request, thread));
        self.looks += looks;
        allowed.map_err(|reply| self.not_allowed(client, caller, &reply))
    }

    /// `thread`: the one that the request's number means, if it means one. To find it takes
    /// time: nobody has that who may have no event in any case.
    fn event_of(
        &self,
        caller: Caller,
        request: &EventRequest,
        thread: impl FnOnce() -> Option<Result<Task, NoThread>>,
    ) -> Result<Allowed, Reply> {
        let id = LeaseId(request.lease);
        let own = self.arbiter.own(id, request.generation, caller);
        let viewer = Viewer {
            uid: caller.uid,
            operator: caller.operator,
        };
        own.map_err(|refusal| self.refused(&refusal, viewer))?;
        let lease = self.arbiter.lease(id);
        let lease = lease.filter(|_| !self.is_watchdog(id));
        let lease = lease.ok_or_else(|| wrong("there is no such lease"))?;
        let members = self.config.members.get(usize::from(lease.owner.tenant.0));
        if !members.is_some_and(|members| members.opens_events) {
            return Err(refusal(
                "no-events".to_owned(),
                "the policy opens no events for this tenant; the operator can allow it \
                 (opens-events = true)"
                    .to_owned(),
            ));
        }
        let terms = &lease.terms;
        let counter = usize::try_from(request.counter).unwrap_or(usize::MAX);
        let demand = terms.demands[..lease.holds].get(counter);
        let demand = demand.filter(|_| lease.claim_by.is_none());
        let demand = demand.ok_or_else(|| {
            let holds = lease.holds;
            wrong(format!(
                "the lease holds {holds} counters now, from 0 on, and {counter} is none of them"
            ))
        })?;

        let pmu = &self.arbiter.pmus()[usize::from(demand.pmu.0)];
        let thread = match thread() {
            None => None,
            Some(Ok(task)) => Some(task.id),
            // It is none of the lease's.
            Some(Err(NoThread::None(0))) => None,
            Some(Err(NoThread::None(_))) if terms.scope != Scope::Cpu => None,
            Some(Err(why)) => return Err(refusal("foreign-thread".to_owned(), why.to_string())),
        };
        match (&terms.scope, thread) {
            (Scope::Thread(threads), Some(thread)) if threads.contains(&thread) => {}
            (Scope::Thread(_), _) => {
                return Err(wrong(
                    "the lease is for threads: name one of them, which is the caller's own",
                ));
            }
            (Scope::Cpu, Some(_)) if pmu.for_threads => {}
            (Scope::Cpu, None) if caller.operator && request.thread.is_none() => {}
            (Scope::Cpu, _) => {
                return Err(wrong(
                    "events of whole CPUs are for operators; name a thread of the caller's own",
                ));
            }
        }
        let mut all = pmu.domains.iter().flat_map(CpuSet::iter);
        let everywhere = all.all(|cpu| terms.cpus.contains(cpu));
        match request.cpu {
            Some(cpu) if terms.cpus.contains(cpu) => {}
            None if thread.is_some() && everywhere => {}
            _ => {
                let cpus = &terms.cpus;
                return Err(wrong(format!(
                    "the lease is for CPUs {cpus}: name one, with an event for each"
                )));
            }
        }
        let rings = match request.rings.as_deref() {
            _ if !pmu.for_threads => Rings::All,
            None | Some("user") => Rings::User,
            Some("guest") => Rings::Guest,
            Some("all") if caller.operator => Rings::All,
            Some("all") => return Err(wrong("the kernel is for operators; ask for user or guest")),
            Some(other) => {
                return Err(wrong(format!("rings '{other}': give user, guest or all")));
            }
        };
        if request.period.is_some_and(|period| period < LEAST_PERIOD) {
            return Err(wrong(format!(
                "the period is {LEAST_PERIOD} counts at least"
            )));
        }
        let Some(perf_type) = self.config.perf_type(&pmu.name) else {
            return Err(refusal(
                "no-events".to_owned(),
                format!(
                    "PMU '{}' is stated, and the configuration does not say what the kernel calls \
                     it (perf-type)",
                    pmu.name
                ),
            ));
        };
        Ok(Allowed {
            lease: id,
            counter,
            pmu: demand.pmu,
            counters: demand.counters,
            event: HandedEvent {
                spec: EventSpec {
                    perf_type,
                    config: config(demand.counters, request.config)?,
                    config1: 0,
                    config2: 0,
                },
                thread: thread.map(|thread| thread.number),
                cpu: request.cpu,
                rings,
                period: request.period,
            },
        })
    }

    /// Counts and records that a client does not get an event.
    pub(crate) fn not_allowed(
        &mut self,
        client: &Client,
        caller: Caller,
        reply: &Reply,
    ) -> Box<wire::Refusal> {
        let refusal = reply.parameters.as_ref().and_then(|all| all.get("refusal"));
        let refusal: wire::Refusal = refusal
            .and_then(|refusal| serde_json::from_value(refusal.clone()).ok())
            .unwrap_or_default();
        let who = trail::Who {
            tenant: Some(caller.tenant),
            uid: client.uid,
            pid: client.pid,
        };
        self.count_denial(&who, "event", &refusal.reason, Some(&refusal.message));
        Box::new(refusal)
    }

    /// The same, where the host says no.
    pub(crate) fn not_opened(
        &mut self,
        client: &Client,
        reason: &str,
        message: &str,
    ) -> wire::Refusal {
        let (tenants, _) = self.config.tenants_of(client);
        let who = trail::Who {
            tenant: tenants.first().copied(),
            uid: client.uid,
            pid: client.pid,
        };
        self.count_denial(&who, "event", reason, Some(message));
        wire::Refusal {
            reason: reason.to_owned(),
            message: message.to_owned(),
            held_by: Vec::new(),
        }
    }

    /// An event was handed over.
    pub(crate) fn handed(&mut self, client: &Client, allowed: &Allowed) {
        self.metrics.brokered.inc();
        let record = self.event_record("event-opened", client.uid, client.pid, allowed);
        self.record(&record);
    }

    /// A holder has enabled an event again that it had lost.
    pub(crate) fn reenabled(&mut self, uid: u32, pid: u32, allowed: &Allowed) {
        self.metrics.reenabled.inc();
        // Of a user who is barred that is known, and it does not fill the log.
        let level = if self.is_barred(uid) {
            log::Level::Debug
        } else {
            log::Level::Warn
        };
        log::log!(
            level,
            "process {pid} of user {uid} has enabled an event again that lease {} had lost; it was \
             disabled again",
            allowed.lease.0
        );
        let record = self.event_record("event-reenabled", uid, pid, allowed);
        self.record(&record);
    }

    /// The tenant of a lease, or of a user where that has ended.
    pub(super) fn tenant_of(&self, lease: LeaseId, uid: u32) -> Option<&str> {
        let of_user = || {
            let client = Client {
                uid,
                ..Client::default()
            };
            self.config.tenants_of(&client).0.first().copied()
        };
        let of_lease = self.arbiter.lease(lease).map(|lease| lease.owner.tenant);
        let tenant = self.arbiter.policy().tenant(of_lease.or_else(of_user)?)?;
        Some(&tenant.name)
    }

    /// The PMU that the kernel calls by this number.
    pub(crate) fn pmu_of(&self, perf_type: u32) -> Option<PmuId> {
        let pmus = (0u16..).map(PmuId).zip(self.arbiter.pmus());
        let mut same = pmus.filter(|(_, pmu)| self.config.perf_type(&pmu.name) == Some(perf_type));
        same.next().map(|(id, _)| id)
    }

    /// How many counters a lease holds, if it is there.
    pub(crate) fn holds(&self, lease: LeaseId) -> usize {
        self.arbiter.lease(lease).map_or(0, |lease| lease.holds)
    }

    /// Events of a lease were disabled: it does not hold their counters any more.
    pub(crate) fn disabled(&mut self, uid: u32, pid: u32, allowed: &Allowed) {
        let record = self.event_record("event-disabled", uid, pid, allowed);
        self.record(&record);
    }

    pub(super) fn event_record(&self, event: &str, uid: u32, pid: u32, allowed: &Allowed) -> Value {
        let of = &allowed.event;
        json!({
            "event": event,
            "lease": allowed.lease.0,
            "tenant": self.tenant_of(allowed.lease, uid),
            "counter": allowed.counter,
            "uid": uid,
            "pid": pid,
            "thread": of.thread,
            "cpu": of.cpu,
            "config": of.spec.config,
            "rings": format!("{:?}", of.rings).to_lowercase(),
            "period": of.period,
        })
    }
}

/// What the event counts: a fixed-function counter says it itself.
fn config(counters: CounterSet, chosen: Option<u64>) -> Result<u64, Reply> {
    let fixed = counters.iter().find_map(|counter| match counter {
        CounterId::Fixed(number) => Some(u32::from(number)),
        CounterId::Programmable(_) | CounterId::Ibs(_) => None,
    });
    let configs = Fixed::ALL.into_iter();
    let of = |number| configs.clone().find(|fixed| fixed.index() == number);
    match (fixed, chosen) {
        // Any of several counters: the choice is which.
        (Some(_), Some(chosen)) => {
            let mut all = counters.iter().filter_map(|counter| match counter {
                CounterId::Fixed(number) => of(u32::from(number)),
                CounterId::Programmable(_) | CounterId::Ibs(_) => None,
            });
            if all.any(|fixed| fixed.config() == chosen) {
                Ok(chosen)
            } else {
                Err(wrong(format!(
                    "config {chosen:#x} is no event of the lease's fixed-function counters"
                )))
            }
        }
        (Some(number), None) => of(number)
            .map(Fixed::config)
            .ok_or_else(|| wrong("the event of this fixed-function counter is not known; name it")),
        (None, Some(chosen)) if chosen & !CHOICE == 0 => Ok(chosen),
        (None, Some(chosen)) => Err(wrong(format!(
            "config {chosen:#x} has bits that are not the holder's to choose: {:#x} remain; only \
             event, unit mask, edge, invert and threshold are",
            chosen & CHOICE
        ))),
        (None, None) => Err(wrong("name the event: config, as the PMU has it")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_holder_chooses() {
        let any = CounterSet::first(4, 0);
        let fixed = CounterSet::from_iter([CounterId::Fixed(1)]);
        assert_eq!(config(any, Some(0x01c4)).ok(), Some(0x01c4));
        // Any thread, interrupts, the kernel, the enable bit.
        for bit in [16, 17, 19, 20, 21, 22, 36, 63] {
            assert!(config(any, Some(0xc4 | 1 << bit)).is_err(), "bit {bit}");
        }
        assert!(config(any, None).is_err());
        assert_eq!(config(fixed, None).ok(), Some(0x3c));
        assert!(config(fixed, Some(0xc4)).is_err());
        let fixed = CounterSet::first(0, 3);
        assert_eq!(config(fixed, Some(0x300)).ok(), Some(0x300));
    }
}
