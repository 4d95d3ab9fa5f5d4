//! The events of one vCPU on one core thread: switched by their leader and
//! read at once.

use std::fmt;

use pmu_model::{Nanos, SlotIndex, UnavailableReason};

use super::NAME;
use super::member::Member;
use super::scale::GroupTimes;
use super::syscalls::{Errno, EventFd, EventSpec, PerfSyscalls, uninterrupted};

/// Words of a group's read before the events: their number and both times.
const HEADER: usize = 3;
/// Words of each event: its value and its id.
const EACH: usize = 2;

/// Why a group counts no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The pinned leader is in error: the host needed the counters.
    Unpinned,
    /// A read that does not tell every event.
    ShortRead,
    /// The group's thread is another one than ours.
    OtherThread,
    /// A call failed.
    Call(Errno),
}

impl Failure {
    /// What a reading of its slots says from now on.
    pub(super) fn reason(self) -> UnavailableReason {
        match self {
            Failure::Unpinned | Failure::ShortRead | Failure::OtherThread => {
                UnavailableReason::Lost { backend: NAME }
            }
            Failure::Call(errno) => refused(errno),
        }
    }
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Self {
        Failure::Call(errno)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Unpinned => f.write_str("the host's kernel took the counters away"),
            Failure::ShortRead => f.write_str("the kernel's answer did not tell every counter"),
            Failure::OtherThread => {
                f.write_str("the events count for the thread that opened them, and this is another")
            }
            Failure::Call(errno) => write!(f, "a call failed: {errno}"),
        }
    }
}

/// What the kernel's refusal means for a request.
pub(super) fn refused(errno: Errno) -> UnavailableReason {
    match errno.0 {
        libc::EBUSY => UnavailableReason::Busy { backend: NAME },
        errno => UnavailableReason::Refused {
            backend: NAME,
            errno,
        },
    }
}

/// A leader that counts nothing, and the events behind it.
///
/// Events behind a disabled leader do not count, however they are enabled
/// themselves. So one call on the leader stops all, and what is started and
/// stopped meanwhile is told to the kernel only when the leader goes on again.
#[derive(Debug)]
pub(super) struct Group {
    leader: EventFd,
    hardware: bool,
    on: bool,
    /// The counts are those of now.
    fresh: bool,
    times: GroupTimes,
    members: Vec<Member>,
    words: Vec<u64>,
}

impl Group {
    pub(super) fn open(kernel: &mut dyn PerfSyscalls, hardware: bool) -> Result<Self, Errno> {
        Ok(Group {
            leader: uninterrupted(|| kernel.open(&EventSpec::LEADER, None))?,
            hardware,
            on: false,
            fresh: true,
            times: GroupTimes::default(),
            members: Vec::new(),
            words: Vec::new(),
        })
    }

    /// Tries whether the kernel has a counter for one event more beside the groups that
    /// count. It gets a group of its own for that, so that no other loses its counters, and
    /// nothing is counted, as no guest runs.
    ///
    /// # Errors
    /// [`Failure::Unpinned`]: it has none. Or the kernel refuses to try.
    pub(super) fn try_counter(
        kernel: &mut dyn PerfSyscalls,
        event: EventSpec,
    ) -> Result<(), Failure> {
        let mut group = Group::open(kernel, true)?;
        let tried = group.try_alone(kernel, event);
        group.close(kernel);
        tried
    }

    fn try_alone(
        &mut self,
        kernel: &mut dyn PerfSyscalls,
        event: EventSpec,
    ) -> Result<(), Failure> {
        let alone = SlotIndex(0);
        let silent = EventSpec {
            period: None,
            ..event
        };
        self.add(kernel, alone, silent, 0)?;
        self.set_running(kernel, alone, true)?;
        self.switch(kernel, true)?;
        self.fresh = false;
        self.refresh(kernel)
    }

    pub(super) fn members(&self) -> &[Member] {
        &self.members
    }

    pub(super) fn is_fresh(&self) -> bool {
        self.fresh
    }

    pub(super) fn members_mut(&mut self) -> &mut [Member] {
        &mut self.members
    }

    pub(super) fn get(&self, slot: SlotIndex) -> Option<&Member> {
        self.members.iter().find(|member| member.slot == slot)
    }

    pub(super) fn get_mut(&mut self, slot: SlotIndex) -> Option<&mut Member> {
        self.members.iter_mut().find(|member| member.slot == slot)
    }

    /// Opens an event for `slot`, stopped.
    pub(super) fn add(
        &mut self,
        kernel: &mut dyn PerfSyscalls,
        slot: SlotIndex,
        event: EventSpec,
        signal: i32,
    ) -> Result<(), Errno> {
        let fd = uninterrupted(|| kernel.open(&event, Some(self.leader)))?;
        let prepared = uninterrupted(|| kernel.id(fd)).and_then(|id| {
            if event.period.is_some() {
                uninterrupted(|| kernel.signal_on_overflow(fd, signal))?;
            }
            Ok(id)
        });
        let id = prepared.inspect_err(|_| kernel.close(fd))?;
        // Without its page an event is read by a system call.
        if self.hardware
            && let Err(errno) = kernel.map(fd)
        {
            log::debug!("the page of a hardware event cannot be mapped: {errno}");
        }
        self.members.push(Member::new(slot, event, fd, id));
        Ok(())
    }

    pub(super) fn remove(&mut self, kernel: &mut dyn PerfSyscalls, slot: SlotIndex) {
        if let Some(at) = self.members.iter().position(|member| member.slot == slot) {
            kernel.close(self.members.remove(at).fd);
        }
    }

    /// Closes everything; the leader last, for its end would free the others.
    pub(super) fn close(self, kernel: &mut dyn PerfSyscalls) {
        for member in &self.members {
            kernel.close(member.fd);
        }
        kernel.close(self.leader);
    }

    /// Marks a slot as started or stopped, for [`Group::switch`] to carry out.
    pub(super) fn set_running(
        &mut self,
        kernel: &mut dyn PerfSyscalls,
        slot: SlotIndex,
        running: bool,
    ) -> Result<(), Failure> {
        // A gap before the start is none of its.
        if self.on && running {
            self.refresh(kernel)?;
        }
        if let Some(member) = self.get_mut(slot) {
            member.running = running;
            member.ran |= running;
        }
        Ok(())
    }

    /// Lets the started events count, and no other. Those of the kernel's
    /// software would count outside of the guest as well, so they count only
    /// if it runs.
    pub(super) fn switch(
        &mut self,
        kernel: &mut dyn PerfSyscalls,
        in_guest: bool,
    ) -> Result<(), Failure> {
        let wanted = self.members.iter().any(|member| member.running);
        if !wanted || !(self.hardware || in_guest) {
            if self.on {
                uninterrupted(|| kernel.disable(self.leader))?;
                self.on = false;
            }
            return Ok(());
        }
        for member in &mut self.members {
            if member.enabled == member.running {
                continue;
            }
            if member.running {
                uninterrupted(|| kernel.enable(member.fd))?;
            } else {
                uninterrupted(|| kernel.disable(member.fd))?;
            }
            member.enabled = member.running;
        }
        if !self.on {
            uninterrupted(|| kernel.enable(self.leader))?;
            self.on = true;
        }
        Ok(())
    }

    /// The guest is about to run: sets the overflows that are due, and lets
    /// the events count.
    pub(super) fn enter(
        &mut self,
        kernel: &mut dyn PerfSyscalls,
        floor: Nanos,
    ) -> Result<(), Failure> {
        let stale = |member: &Member| member.is_off_target() || member.wants_deadline();
        if self.members.iter().any(stale) {
            self.refresh(kernel)?;
            for member in self
                .members
                .iter_mut()
                .filter(|member| member.is_off_target())
            {
                member.count_down(kernel, floor)?;
            }
        }
        self.switch(kernel, true)?;
        self.fresh &= !self.on;
        Ok(())
    }

    /// Whether the kernel can take counters away from it now.
    pub(super) fn is_at_risk(&self) -> bool {
        self.hardware && self.on
    }

    /// Looks whether the counters were taken away: the kernel has all events of a
    /// group on counters, or none. An event's page tells; where it does not, a system
    /// call has to, if it `may_ask`.
    pub(super) fn look_for_loss(
        &mut self,
        kernel: &mut dyn PerfSyscalls,
        may_ask: bool,
    ) -> Result<(), Failure> {
        let enabled = self.members.iter().find(|member| member.enabled);
        let Some(member) = enabled.filter(|_| self.is_at_risk()) else {
            return Ok(());
        };
        match kernel.is_on_counter(member.fd) {
            Some(true) => Ok(()),
            None if !may_ask => Ok(()),
            Some(false) | None => self.refresh(kernel),
        }
    }

    /// The guest has stopped.
    pub(super) fn leave(&mut self, kernel: &mut dyn PerfSyscalls) -> Result<(), Failure> {
        self.switch(kernel, false)
    }

    /// Brings the counts up to date: one system call, none if they are. Those
    /// of a group that counts outside of the guest as well would not stay.
    pub(super) fn refresh(&mut self, kernel: &mut dyn PerfSyscalls) -> Result<(), Failure> {
        if self.fresh {
            return Ok(());
        }
        let wanted = HEADER + EACH * (1 + self.members.len());
        self.words.resize(wanted, 0);
        let words = &mut self.words;
        let bytes = uninterrupted(|| kernel.read(self.leader, words))?;
        if bytes == 0 {
            return Err(Failure::Unpinned);
        }
        if bytes < wanted * size_of::<u64>() {
            return Err(Failure::ShortRead);
        }
        self.take_reading()?;
        self.fresh = true;
        Ok(())
    }

    fn take_reading(&mut self) -> Result<(), Failure> {
        let [_, enabled, running] = self.words[..HEADER] else {
            return Err(Failure::ShortRead);
        };
        let now = GroupTimes {
            enabled: Nanos(enabled),
            running: Nanos(running),
        };
        let passed = now.since(self.times);
        self.times = now;
        let (events, _) = self.words[HEADER..].as_chunks::<EACH>();
        for (place, member) in self.members.iter_mut().enumerate() {
            // The kernel tells them in the order of opening, behind the leader.
            let told = events.get(place + 1).filter(|[_, id]| *id == member.id);
            let told = told.or_else(|| events.iter().find(|[_, id]| *id == member.id));
            let &[raw, _] = told.ok_or(Failure::ShortRead)?;
            let was_scaled = member.count.is_scaled();
            member.count.reading(raw, passed, member.ran);
            member.ran = member.running;
            if member.count.is_scaled() && !was_scaled {
                log::warn!(
                    "slot {} of {NAME} was off its counter for {} of {} ns: scaled from now on",
                    member.slot.0,
                    (passed.enabled - passed.running).0,
                    passed.enabled.0,
                );
            }
        }
        Ok(())
    }

    /// Brings one slot's count up to date: without a system call where the
    /// processor may be asked directly. Only the group's own thread, if it is
    /// `here`, is on the processor that counts for it.
    pub(super) fn refresh_one(
        &mut self,
        kernel: &mut dyn PerfSyscalls,
        slot: SlotIndex,
        here: bool,
    ) -> Result<(), Failure> {
        if self.fresh {
            return Ok(());
        }
        if here
            && self.hardware
            && self.on
            && let Some(member) = self.get_mut(slot)
            && let Some(raw) = kernel.sample(member.fd)
        {
            member.count.sample(raw);
            return Ok(());
        }
        self.refresh(kernel)
    }
}
