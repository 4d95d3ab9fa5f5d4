//! A model of a kernel's perf groups, which can be told to fail.

use pmu_virt::perf::{Errno, EventFd, EventSpec, PerfSyscalls, note_overflow_signal};
use pmu_virt::{Ring, SoftwareEvent};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// `si_code` of an overflow.
const POLL_IN: i32 = 1;

/// A call that can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Call {
    Open,
    Id,
    Enable,
    Disable,
    Period,
    Signal,
    Read,
    Map,
}

#[derive(Debug)]
struct Event {
    spec: EventSpec,
    /// `None` for a leader.
    leader: Option<i32>,
    id: u64,
    enabled: bool,
    count: u64,
    /// Events to the next overflow.
    left: u64,
    period: u64,
    signals: bool,
    mapped: bool,
}

/// What the model knows.
#[derive(Debug)]
pub(crate) struct Kernel {
    events: BTreeMap<i32, Event>,
    /// Descriptors closed twice, or used after their end.
    pub(crate) misuse: Vec<String>,
    pub(crate) calls: Vec<Call>,
    failures: Vec<(Call, usize, i32)>,
    /// Physical counters; 0 has no hardware events at all.
    pub(crate) counters: usize,
    /// A pinned hardware group is in error from now on.
    pub(crate) unpinned: bool,
    /// Bytes that a read leaves out at its end.
    pub(crate) short_by: usize,
    /// The share of a running hardware group's time that it is on its
    /// counters, in percent.
    pub(crate) running_percent: u64,
    pub(crate) time: BTreeMap<i32, (u64, u64)>,
    /// RDPMC is allowed.
    pub(crate) rdpmc: bool,
    next: i32,
}

/// A handle on the model.
#[derive(Clone, Debug)]
pub(crate) struct FakeKernel(Arc<Mutex<Kernel>>);

impl FakeKernel {
    pub(crate) fn new(counters: usize) -> Self {
        FakeKernel(Arc::new(Mutex::new(Kernel {
            events: BTreeMap::new(),
            misuse: Vec::new(),
            calls: Vec::new(),
            failures: Vec::new(),
            counters,
            unpinned: false,
            short_by: 0,
            running_percent: 100,
            time: BTreeMap::new(),
            rdpmc: false,
            next: 10,
        })))
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, Kernel> {
        self.0.lock().unwrap_or_else(|error| error.into_inner())
    }

    /// Lets the next `times` calls of `call` fail.
    pub(crate) fn fail(&self, call: Call, times: usize, errno: i32) {
        self.state().failures.push((call, times, errno));
    }

    /// Calls since the last look.
    pub(crate) fn take_calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.state().calls)
    }

    /// Lets `events` of every sort happen, in a ring of a guest or outside of
    /// one, which takes as many nanoseconds.
    pub(crate) fn happen(&self, events: u64, guest: Option<Ring>) {
        if self.state().happen(events, guest) {
            note_overflow_signal(POLL_IN);
        }
    }

    /// Descriptors that are open.
    pub(crate) fn open_events(&self) -> usize {
        self.state().events.len()
    }
}

impl Kernel {
    fn call(&mut self, call: Call, fd: Option<EventFd>) -> Result<(), Errno> {
        self.calls.push(call);
        if let Some(EventFd(fd)) = fd
            && !self.events.contains_key(&fd)
        {
            self.misuse
                .push(format!("{call:?} on {fd}, which is not open"));
            return Err(Errno(libc::EBADF));
        }
        if let Some(failure) = self
            .failures
            .iter_mut()
            .find(|failure| failure.0 == call && failure.1 > 0)
        {
            failure.1 -= 1;
            return Err(Errno(failure.2));
        }
        Ok(())
    }

    fn members(&self, leader: i32) -> usize {
        let behind = |event: &&Event| event.leader == Some(leader);
        self.events.values().filter(behind).count()
    }

    /// Hardware events behind a leader that want a counter.
    fn wanting(&self, leader: i32) -> usize {
        let wants = |event: &&Event| {
            event.leader == Some(leader) && event.enabled && event.spec.source.is_hardware()
        };
        self.events.values().filter(wants).count()
    }

    /// Whether a hardware group is pinned to counters that it has not got. Groups that were
    /// opened before have theirs first.
    fn in_error(&self, leader: i32) -> bool {
        let others = self.events.range(..leader);
        let others = others.filter(|(_, event)| event.leader.is_none() && event.enabled);
        let taken: usize = others.map(|(fd, _)| self.wanting(*fd)).sum();
        self.is_hardware(leader) && (self.unpinned || taken + self.wanting(leader) > self.counters)
    }

    fn is_hardware(&self, leader: i32) -> bool {
        self.events
            .values()
            .any(|event| event.leader == Some(leader) && event.spec.source.is_hardware())
    }

    fn happen(&mut self, events: u64, guest: Option<Ring>) -> bool {
        let leaders: Vec<(i32, bool)> = self
            .events
            .iter()
            .filter(|(_, event)| event.leader.is_none())
            .map(|(fd, event)| (*fd, event.enabled))
            .collect();
        let mut signalled = false;
        for (leader, enabled) in leaders {
            let hardware = self.is_hardware(leader);
            if !enabled || self.in_error(leader) {
                continue;
            }
            let percent = if hardware { self.running_percent } else { 100 };
            let time = self.time.entry(leader).or_default();
            time.0 += events;
            time.1 += events * percent / 100;
            let counted = events * percent / 100;
            for event in self.events.values_mut() {
                if event.leader == Some(leader) && counts_in(&event.spec, guest) {
                    signalled |= event.count(counted);
                }
            }
        }
        signalled
    }
}

/// Whether an event counts there. Those of software take no notice of guests.
fn counts_in(spec: &EventSpec, guest: Option<Ring>) -> bool {
    match guest {
        _ if !spec.source.is_hardware() => true,
        None => !spec.exclude_host,
        Some(Ring::Kernel) => !spec.exclude_kernel,
        Some(Ring::User) => !spec.exclude_user,
    }
}

impl Event {
    /// Counts; whether a signal is due.
    fn count(&mut self, events: u64) -> bool {
        if !self.enabled {
            return false;
        }
        self.count += events;
        if self.spec.period.is_none() {
            return false;
        }
        if events < self.left {
            self.left -= events;
            return false;
        }
        self.left = self.period - (events - self.left) % self.period;
        self.signals
    }
}

impl PerfSyscalls for FakeKernel {
    fn open(&mut self, spec: &EventSpec, group: Option<EventFd>) -> Result<EventFd, Errno> {
        let mut kernel = self.state();
        kernel.call(Call::Open, group)?;
        if spec.source.is_hardware() {
            // The kernel takes no notice of events that are disabled.
            let taken = group.map_or(0, |leader| kernel.wanting(leader.0));
            if kernel.counters == 0 {
                return Err(Errno(libc::ENOENT));
            }
            if taken >= kernel.counters {
                return Err(Errno(libc::EINVAL));
            }
        }
        if group.is_some() && spec.pinned {
            return Err(Errno(libc::EINVAL));
        }
        kernel.next += 1;
        let fd = kernel.next;
        kernel.events.insert(
            fd,
            Event {
                spec: *spec,
                leader: group.map(|fd| fd.0),
                id: 1_000 + u64::from(fd.unsigned_abs()),
                enabled: false,
                count: 0,
                left: spec.period.unwrap_or(u64::MAX),
                period: spec.period.unwrap_or(u64::MAX),
                signals: false,
                mapped: false,
            },
        );
        Ok(EventFd(fd))
    }

    fn id(&mut self, event: EventFd) -> Result<u64, Errno> {
        let mut kernel = self.state();
        kernel.call(Call::Id, Some(event))?;
        Ok(kernel.events[&event.0].id)
    }

    fn enable(&mut self, event: EventFd) -> Result<(), Errno> {
        let mut kernel = self.state();
        kernel.call(Call::Enable, Some(event))?;
        if let Some(event) = kernel.events.get_mut(&event.0) {
            event.enabled = true;
        }
        Ok(())
    }

    fn disable(&mut self, event: EventFd) -> Result<(), Errno> {
        let mut kernel = self.state();
        kernel.call(Call::Disable, Some(event))?;
        if let Some(event) = kernel.events.get_mut(&event.0) {
            event.enabled = false;
        }
        Ok(())
    }

    fn set_period(&mut self, event: EventFd, events: u64) -> Result<(), Errno> {
        let mut kernel = self.state();
        kernel.call(Call::Period, Some(event))?;
        let Some(event) = kernel.events.get_mut(&event.0) else {
            return Err(Errno(libc::EBADF));
        };
        // The kernel gives a period only to what was opened with one, and
        // none that is 0 or has the top bit.
        if event.spec.period.is_none() || events == 0 || events >> 63 != 0 {
            return Err(Errno(libc::EINVAL));
        }
        event.period = events;
        event.left = events;
        Ok(())
    }

    fn signal_on_overflow(&mut self, event: EventFd, _: i32) -> Result<(), Errno> {
        let mut kernel = self.state();
        kernel.call(Call::Signal, Some(event))?;
        if let Some(event) = kernel.events.get_mut(&event.0) {
            event.signals = true;
        }
        Ok(())
    }

    fn read(&mut self, leader: EventFd, words: &mut [u64]) -> Result<usize, Errno> {
        let mut kernel = self.state();
        kernel.call(Call::Read, Some(leader))?;
        if kernel.in_error(leader.0) {
            return Ok(0);
        }
        let (enabled, running) = kernel.time.get(&leader.0).copied().unwrap_or_default();
        let mut told = vec![0, enabled, running];
        let behind =
            |(fd, event): &(&i32, &Event)| **fd == leader.0 || event.leader == Some(leader.0);
        for (_, event) in kernel.events.iter().filter(behind) {
            told[0] += 1;
            told.extend([event.count, event.id]);
        }
        if words.len() < told.len() {
            return Err(Errno(libc::ENOSPC));
        }
        words[..told.len()].copy_from_slice(&told);
        Ok((told.len() * 8).saturating_sub(kernel.short_by))
    }

    fn map(&mut self, event: EventFd) -> Result<(), Errno> {
        let mut kernel = self.state();
        kernel.call(Call::Map, Some(event))?;
        if let Some(event) = kernel.events.get_mut(&event.0) {
            event.mapped = true;
        }
        Ok(())
    }

    fn sample(&mut self, event: EventFd) -> Option<u64> {
        let kernel = self.state();
        let event = kernel.events.get(&event.0)?;
        let on = event.enabled && kernel.events.get(&event.leader?)?.enabled;
        let whole = kernel.running_percent == 100 && !kernel.unpinned;
        (kernel.rdpmc && on && whole && event.mapped).then_some(event.count)
    }

    fn is_on_counter(&mut self, event: EventFd) -> Option<bool> {
        let kernel = self.state();
        let event = kernel.events.get(&event.0)?;
        let on = event.enabled && kernel.events.get(&event.leader?)?.enabled;
        let error = event.leader.is_some_and(|leader| kernel.in_error(leader));
        let there = on && kernel.running_percent > 0 && !error;
        (kernel.rdpmc && event.mapped).then_some(there)
    }

    fn close(&mut self, event: EventFd) {
        let mut kernel = self.state();
        if kernel.members(event.0) > 0 {
            kernel
                .misuse
                .push(format!("{} closed before its group", event.0));
        }
        if kernel.events.remove(&event.0).is_none() {
            kernel.misuse.push(format!("{} closed twice", event.0));
        }
    }
}

/// The events that happen in the model.
pub(crate) const FAULTS: SoftwareEvent = SoftwareEvent::PageFaults;
