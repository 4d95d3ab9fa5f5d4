//! An arbiter in the process of those who ask it, for them alone: the same decisions without a
//! service. Nothing of it can be reached from outside, and nothing outlives the process.
//!
//! Whoever asks decides by a moment's look at what all share. Two threads beside do what comes
//! with time. One ends what is due. The other looks which CPUs are online, and what outsiders
//! and the NMI watchdog have of the counters: however long that takes, what is due ends in its
//! time. Both end with the last who may ask.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::Builder;
use std::time::{Duration, Instant};

use arbiter_host::{
    BootTime, Caller, Change, CpuSet, Group, HostArbiter, LeaseId, Outcome, PmuId, Reason, Scope,
    TenantId, Terms, ThreadId, What,
};
use rustix::event::{EventfdFlags, eventfd};
use umpire_lease::{self as wire, CallError, Kept, Leases, News};
use umpire_service::raise_open_files;

use crate::config::{ArbiterConfig, PmuConfig};
use crate::convert::{self, Means, Wrong};
use crate::event_loop::{ServeError, failed, now};
use crate::host::HostFiles;
use crate::peer::Client;
use crate::probe::{self, Found, Outside, Seen};
use crate::service::{Calling, ConnectionId, Denial, Viewer, WatchdogClaim, owner, shown};

/// Between two looks at the host.
const LOOKS: Duration = Duration::from_millis(500);
/// Between two measurements of its counters: every VM may have such an arbiter.
const MEASUREMENTS: Duration = Duration::from_secs(5);
/// Between two tries to renew.
const TRIES: Duration = Duration::from_secs(1);
const MS: u64 = 1_000_000;
/// The one tenant.
const TENANT: TenantId = TenantId(0);

/// Leases of an arbiter in this process.
#[derive(Clone, Debug)]
pub struct OwnLeases(Arc<Shared>);

/// What those who ask share with each other, and with the threads.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Something may be due earlier now.
    wakes: SyncSender<()>,
    /// The host is looked at for as long as this is there.
    _looks: SyncSender<Infallible>,
}

/// Who has what, and what its holders have not heard of yet.
#[derive(Debug)]
struct State {
    arbiter: HostArbiter,
    config: ArbiterConfig,
    outside: Outside,
    watchdog: WatchdogClaim,
    letters: BTreeMap<LeaseId, Letters>,
}

/// What has happened to a lease.
#[derive(Debug)]
struct Letters {
    events: VecDeque<(Instant, wire::Event)>,
    /// Readable while there are any.
    bell: Arc<OwnedFd>,
}

/// A lease, as its holder keeps it.
#[derive(Debug)]
struct OwnLease {
    all: Arc<Shared>,
    bell: Arc<OwnedFd>,
    lease: wire::Lease,
    heard: Instant,
    ended: bool,
    /// When it is renewed.
    due: Option<Instant>,
}

impl OwnLeases {
    /// An arbiter of the counters of a PMU that is stated, or else of what the kernel shows on
    /// `cpus`: what is not free there now is somebody else's.
    ///
    /// # Errors
    /// The kernel shows no counters there, or they may not be measured; or the host has no
    /// thread left.
    pub fn start(stated: Option<PmuConfig>, cpus: &CpuSet) -> Result<Self, ServeError> {
        raise_open_files();
        let config = ArbiterConfig {
            pmus: stated.into_iter().collect(),
            ..ArbiterConfig::default()
        };
        let config = config.with_watchdog()?;
        let host = HostFiles::new(&config);
        let mut host = host.map_err(failed("reading the CPUs of this host"))?;
        let found = if config.pmus.is_empty() {
            let found = probe::found(host.present(), Some(cpus), &BTreeMap::new());
            found.map_err(ServeError::NotMeasured)?
        } else {
            Vec::new()
        };
        host.expect_watchdog(&config, found.first());
        let state = State::new(config, host.present(), &found)?;
        let mut looks = Looks {
            host,
            found,
            due: Instant::now(),
        };
        Self::of(state, move || looks.look())
    }

    /// Those who ask share `state`, which follows what `look` sees of the host.
    fn of(
        mut state: State,
        mut look: impl FnMut() -> Look + Send + 'static,
    ) -> Result<Self, ServeError> {
        // It looks before anybody asks. What two looks saw is believed.
        let first = look();
        for _ in 0..2 {
            state.see(&first);
        }
        let (wakes, woken) = sync_channel(1);
        let (looks, ends) = sync_channel(0);
        let all = Arc::new(Shared {
            state: Mutex::new(state),
            wakes,
            _looks: looks,
        });
        let shared = Arc::downgrade(&all);
        let body = move || pass_time(&shared, &woken);
        let thread = Builder::new().name("arbiter".to_owned()).spawn(body);
        thread.map_err(failed("the arbiter's thread"))?;
        let shared = Arc::downgrade(&all);
        let body = move || watch_host(&shared, &ends, look);
        let thread = Builder::new().name("arbiter-looks".to_owned()).spawn(body);
        thread.map_err(failed("the thread of the arbiter's looks"))?;
        Ok(OwnLeases(all))
    }
}

impl Leases for OwnLeases {
    fn places(&self) -> Result<Vec<wire::Place>, CallError> {
        let state = self.0.lock();
        let places = shown::who(&state.arbiter, None, viewer());
        places.map_err(|refusal| state.refused(refusal))
    }

    fn acquire(&self, request: &wire::Request) -> Result<Box<dyn Kept>, CallError> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = Arc::new(bell.map_err(std::io::Error::from)?);
        let lease = self.0.lock().acquire(request, bell.clone())?;
        self.0.wake();
        let mut kept = OwnLease {
            all: self.0.clone(),
            bell,
            lease,
            heard: Instant::now(),
            ended: false,
            due: None,
        };
        kept.plan_renewal();
        Ok(Box::new(kept))
    }

    fn explain(&self, request: &wire::Request) -> Result<wire::ExplainOut, CallError> {
        let state = self.0.lock();
        let now = now();
        let (owner, terms) = state.asked(request, now)?;
        let explained = shown::explained(&state.arbiter, owner, terms, now);
        Ok(wire::ExplainOut {
            why: explained.why.map(in_here),
            ..explained
        })
    }
}

/// What a request of this process means.
struct OfThisProcess;

impl Means for OfThisProcess {
    /// All are of this process, which ends before its numbers mean another.
    fn threads(&mut self, numbers: &[u32]) -> Result<(Vec<ThreadId>, Option<Arc<Group>>), String> {
        let thread = |&number: &u32| ThreadId { number, started: 0 };
        Ok((numbers.iter().map(thread).collect(), None))
    }

    fn own_group(&mut self) -> Result<Option<(ThreadId, Arc<Group>)>, String> {
        Ok(None)
    }

    fn group(&mut self, _: &str) -> Result<Group, String> {
        Err("control groups have leases of the host's arbiter alone (umpire arbiterd)".to_owned())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the thread look when something is due.
    fn wake(&self) {
        // It is awake in any case, if this is not the first.
        let _ = self.wakes.try_send(());
    }
}

/// The caller of all: the user of this process.
fn caller() -> Caller {
    Caller {
        tenant: TENANT,
        uid: rustix::process::geteuid().as_raw(),
        operator: true,
    }
}

fn viewer() -> Viewer {
    Viewer::of(caller())
}

/// A refusal names the holders itself: nobody outside could tell who they are.
fn in_here(refusal: wire::Refusal) -> wire::Refusal {
    // Another reason is the lease that waits, whatever it holds.
    if refusal.reason != Reason::Held {
        return refusal;
    }
    let holder = |lease: &wire::Lease| format!("lease {} ({})", lease.id, lease.label);
    let holders: Vec<String> = refusal.held_by.iter().map(holder).collect();
    if holders.is_empty() {
        return refusal;
    }
    wire::Refusal {
        message: format!("the counters are held by {}", holders.join(", ")),
        ..refusal
    }
}

impl State {
    fn new(config: ArbiterConfig, present: &CpuSet, found: &[Found]) -> Result<Self, ServeError> {
        let pmus = if config.pmus.is_empty() {
            found.iter().map(|found| found.host.clone()).collect()
        } else {
            config.host_pmus(present)
        };
        if pmus.is_empty() {
            return Err(ServeError::NoPmu);
        }
        Ok(State {
            arbiter: HostArbiter::new(pmus, config.policy.clone())?,
            config,
            outside: Outside::default(),
            watchdog: WatchdogClaim::default(),
            letters: BTreeMap::new(),
        })
    }

    fn refused(&self, denial: impl Into<Denial>) -> CallError {
        let refusal = denial.into().refusal(&self.arbiter, viewer());
        CallError::Refused(Box::new(in_here(refusal)))
    }

    /// Whose a request is, and its terms.
    fn asked(
        &self,
        request: &wire::Request,
        now: BootTime,
    ) -> Result<(arbiter_host::Owner, Terms), CallError> {
        let caller = caller();
        let client = Client {
            pid: std::process::id(),
            uid: caller.uid,
            ..Client::default()
        };
        let calling = Calling {
            from: ConnectionId(0),
            client: &client,
            tenants: vec![TENANT],
            caller,
            more: true,
            now,
        };
        let owner = owner(&self.arbiter, &calling, request);
        let owner = owner.map_err(|denial| self.refused(denial))?;
        let (config, arbiter) = (&self.config, &self.arbiter);
        let terms = convert::terms(config, arbiter, owner.tenant, request, &mut OfThisProcess);
        let terms = terms.map_err(|Wrong(what)| self.refused(Denial::wrong(what)))?;
        Ok((owner, terms))
    }

    fn acquire(
        &mut self,
        request: &wire::Request,
        bell: Arc<OwnedFd>,
    ) -> Result<wire::Lease, CallError> {
        let now = now();
        let (owner, terms) = self.asked(request, now)?;
        let mut changes = Vec::new();
        let outcome = self.arbiter.request(owner, terms, now, &mut changes);
        self.tell(&changes);
        let (id, waits) = match outcome.map_err(|refusal| self.refused(refusal))? {
            Outcome::Granted { lease, .. } => (lease, None),
            Outcome::Waits { lease, behind, why } => {
                let waits = Change::Waits { lease, behind, why };
                (lease, convert::event(&self.arbiter, &waits))
            }
        };
        let mut letters = Letters {
            events: VecDeque::new(),
            bell,
        };
        waits.into_iter().for_each(|event| letters.add(event));
        self.letters.insert(id, letters);
        let lease = self.arbiter.lease(id);
        let lease = lease.map(|lease| convert::lease(&self.arbiter, lease));
        lease.ok_or_else(|| self.refused(arbiter_host::Refusal::NoSuchLease))
    }

    /// Does something to the leases, and tells their holders what came of it.
    fn change<T>(&mut self, change: impl FnOnce(&mut HostArbiter, &mut Vec<Change>) -> T) -> T {
        let mut changes = Vec::new();
        let done = change(&mut self.arbiter, &mut changes);
        self.tell(&changes);
        done
    }

    fn tell(&mut self, changes: &[Change]) {
        for change in changes {
            let Some(letters) = self.letters.get_mut(&change.lease()) else {
                continue;
            };
            if let Some(event) = convert::event(&self.arbiter, change) {
                log::debug!("lease {} {}", event.lease.id, event.message);
                letters.add(event);
            }
        }
    }

    /// Takes over what was seen of the host.
    fn see(&mut self, look: &Look) {
        let now = now();
        self.follow_host(look, now);
        let writes_registers = |lease: &arbiter_host::Lease| {
            lease.terms.scope == Scope::Cpu && !self.watchdog.is(lease.id)
        };
        let writes_registers = self.arbiter.leases().any(writes_registers);
        for seen in &look.seen {
            let place = seen.place;
            let Some(pmu) = self.arbiter.pmus().get(usize::from(place.pmu.0)) else {
                continue;
            };
            // The kernel sees nothing of counters whose registers this process writes.
            let leased = if writes_registers {
                self.watchdog.holds(place, &self.arbiter)
            } else {
                self.arbiter.leased(place)
            };
            // Who has no lease is not looked for.
            let may_be_any = true;
            if self.outside.see(seen, pmu.counters, leased, may_be_any) {
                let outside = self.outside.of(place).to_vec();
                if self.arbiter.outside(place) != outside {
                    self.change(|arbiter, out| arbiter.set_outside(place, outside, now, out));
                }
            }
        }
    }

    /// Follows which CPUs are online, and for which the watchdog is.
    fn follow_host(&mut self, look: &Look, now: BootTime) {
        let online = look.online.as_ref();
        let online = online.filter(|online| *online != self.arbiter.online());
        self.watchdog.set_cpus(look.watchdog.clone(), &self.arbiter);
        if online.is_none() && !self.watchdog.is_due(&self.arbiter) {
            return;
        }
        // The watchdog is on a CPU that comes before anybody can be given counters there, and
        // nobody is given what it had before.
        self.arbiter.freeze();
        if let Some(online) = online {
            self.outside.look_anew();
            self.change(|arbiter, out| arbiter.set_online(online.clone(), now, out));
        }
        if self.watchdog.is_due(&self.arbiter) {
            self.claim_watchdog(now);
        }
        self.change(|arbiter, out| arbiter.thaw(now, out));
    }

    /// The watchdog's lease is for its CPUs of now.
    fn claim_watchdog(&mut self, now: BootTime) {
        if let Some(id) = self.watchdog.take_lease() {
            self.change(|arbiter, out| arbiter.holder_gone(id, now, out));
        }
        let Some((owner, terms)) = self.watchdog.request(&self.arbiter, true) else {
            return;
        };
        match self.change(|arbiter, out| arbiter.request(owner, terms, now, out)) {
            Ok(Outcome::Granted { lease, .. } | Outcome::Waits { lease, .. }) => {
                self.watchdog.has(lease);
            }
            Err(refusal) => {
                let why = crate::words::message(&self.arbiter, &refusal);
                log::warn!("the NMI watchdog's counter is not accounted for: {why}");
            }
        }
    }
}

impl Letters {
    fn add(&mut self, event: wire::Event) {
        self.events.push_back((Instant::now(), event));
        // It is readable already, if it is full.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// The next; `None`: there is none, and the bell is silent.
    fn take(&mut self) -> Option<(Instant, wire::Event)> {
        let next = self.events.pop_front();
        if next.is_none() {
            let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        }
        next
    }
}

impl OwnLease {
    fn id(&self) -> LeaseId {
        LeaseId(self.lease.id)
    }

    /// It is renewed at half of the time that it had left when that was heard.
    fn plan_renewal(&mut self) {
        let left = self.lease.left_ms;
        self.due = left.map(|ms| self.heard + Duration::from_millis(ms / 2));
    }

    fn renew(&mut self) -> Result<(), CallError> {
        // It may be possible again before the time is over.
        self.due = Some(Instant::now() + TRIES);
        let (id, generation) = (self.id(), Some(self.lease.generation));
        let mut state = self.all.lock();
        let (now, heard) = (now(), Instant::now());
        let until =
            state.change(|arbiter, out| arbiter.renew_first(id, generation, caller(), now, out));
        let until = until.map_err(|refusal| state.refused(refusal))?;
        drop(state);
        self.lease.left_ms = until.map(|until| until.since(now).0 / MS);
        self.heard = heard;
        self.plan_renewal();
        self.all.wake();
        Ok(())
    }
}

impl Kept for OwnLease {
    fn lease(&self) -> &wire::Lease {
        &self.lease
    }

    fn heard(&self) -> Instant {
        self.heard
    }

    fn has_ended(&self) -> bool {
        self.ended
    }

    fn connection(&self) -> Option<BorrowedFd<'_>> {
        (!self.ended).then(|| self.bell.as_fd())
    }

    fn due(&self) -> Option<Instant> {
        self.due
    }

    fn hear(&mut self) -> Option<News> {
        if self.ended {
            return None;
        }
        let id = self.id();
        let letter = self.all.lock().letters.get_mut(&id)?.take();
        if let Some((at, event)) = letter {
            (self.lease, self.heard) = (event.lease.clone(), at);
            match event.what {
                What::Ended => (self.ended, self.due) = (true, None),
                // Its time begins anew with a grant.
                What::Holds | What::Spared | What::Mended => self.plan_renewal(),
                _ => {}
            }
            return Some(News::Event(Box::new(event)));
        }
        if self.due.is_none_or(|due| Instant::now() < due) {
            return None;
        }
        let renewed = self.renew();
        renewed
            .err()
            .map(|error| News::NotRenewed(error.to_string()))
    }

    fn keep(&mut self, counters: u32) -> Result<(), CallError> {
        let (id, now) = (self.id(), now());
        let keep = usize::try_from(counters).unwrap_or(usize::MAX);
        let mut state = self.all.lock();
        let kept = state.change(|arbiter, out| arbiter.release(id, keep, None, caller(), now, out));
        kept.map_err(|refusal| state.refused(refusal))?;
        drop(state);
        self.all.wake();
        Ok(())
    }

    fn report(&mut self, _figures: Vec<wire::Figure>) -> Result<(), CallError> {
        // There are no metrics that they could be part of.
        Ok(())
    }
}

impl Drop for OwnLease {
    fn drop(&mut self) {
        let (id, now) = (self.id(), now());
        let mut state = self.all.lock();
        state.letters.remove(&id);
        state.change(|arbiter, out| arbiter.holder_gone(id, now, out));
        drop(state);
        self.all.wake();
    }
}

/// What is looked at.
#[derive(Debug)]
struct Looks {
    host: HostFiles,
    /// The PMUs that are measured; none, where they are stated.
    found: Vec<Found>,
    /// When they are measured next.
    due: Instant,
}

/// What a look saw.
#[derive(Debug, Default)]
struct Look {
    /// The CPUs that are online; `None`: they cannot be read.
    online: Option<CpuSet>,
    /// Where the NMI watchdog's counter is accounted for; `None`: nowhere.
    watchdog: Option<CpuSet>,
    /// What is free; nothing, if it was not measured.
    seen: Vec<Seen>,
}

impl Looks {
    /// Those who ask do not wait for it: it takes its time, and they share only what it saw.
    fn look(&mut self) -> Look {
        // The configuration of such an arbiter states no CPUs.
        let online = self.host.online(&[]);
        let watchdog = if self.host.watches() {
            self.host.look_at_watchdog()
        } else {
            None
        };
        let mut seen = Vec::new();
        if self.due <= Instant::now() {
            let places = (0u16..).map(PmuId).zip(&self.found);
            seen.extend(places.flat_map(|(pmu, found)| found.look(pmu)));
            self.due = Instant::now() + MEASUREMENTS;
        }
        Look {
            online,
            watchdog,
            seen,
        }
    }
}

/// Ends what is due, until nobody is left who may ask.
fn pass_time(shared: &Weak<Shared>, woken: &Receiver<()>) {
    loop {
        let Some(all) = shared.upgrade() else {
            return;
        };
        let mut state = all.lock();
        let now = now();
        state.change(|arbiter, out| arbiter.advance(now, out));
        let due = state.arbiter.deadline();
        drop(state);
        drop(all);
        let left = due.map(|due| Duration::from_nanos(due.since(now).0));
        let ended = match left {
            Some(left) => woken.recv_timeout(left) == Err(RecvTimeoutError::Disconnected),
            None => woken.recv().is_err(),
        };
        if ended {
            return;
        }
    }
}

/// Looks at the host again and again, until nobody is left who may ask.
fn watch_host(shared: &Weak<Shared>, ends: &Receiver<Infallible>, mut look: impl FnMut() -> Look) {
    while let Err(RecvTimeoutError::Timeout) = ends.recv_timeout(LOOKS) {
        // Without this thread no outsider would be seen any more.
        let Ok(seen) = catch_unwind(AssertUnwindSafe(&mut look)) else {
            log::error!("the arbiter's look at the host has failed; it looks again");
            continue;
        };
        let Some(all) = shared.upgrade() else {
            return;
        };
        all.lock().see(&seen);
        all.wake();
    }
}

#[cfg(test)]
#[path = "own_tests.rs"]
mod tests;
