//! The state behind [`super::PerfBackend`]: slots, and groups by vCPU.

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::thread::{self, ThreadId};
use std::time::Duration;

use pmu_model::{
    CountRequest, Nanos, OwnerId, Provenance, Reading, SlotIndex, SlotSet, Ticks, Tsc,
    UnavailableReason,
};

use super::group::{Failure, Group, refused};
use super::member::Member;
use super::syscalls::{EventSpec, PerfSyscalls};
use super::trials::Trials;
use super::{CAPACITY, NAME, signal};
use crate::backend::BackendEnv;

/// Which group: a vCPU's of hardware, or its other one.
type Key = (OwnerId, bool);

#[derive(Clone, Copy, Debug)]
enum SlotState {
    Free,
    Open(Key),
    Failed(UnavailableReason),
}

/// Slots of one vCPU's hardware events: as many as a model has counters, or more.
const BLOCK: u8 = 12;
const BLOCKS: usize = CAPACITY / BLOCK as usize;

/// A guest that does not exit by itself is stopped as often, to see whether the host's
/// kernel has taken counters away. It tells nobody.
const LOOK: Duration = Duration::from_millis(10);

#[derive(Debug)]
pub(super) struct Inner {
    kernel: Box<dyn PerfSyscalls>,
    env: BackendEnv,
    floor: Nanos,
    owner: OwnerId,
    slots: [SlotState; CAPACITY],
    groups: BTreeMap<Key, Group>,
    trials: Trials,
    /// A vCPU was here.
    met_vcpu: bool,
    /// Whose the blocks of slots are, for hardware events.
    blocks: [Option<OwnerId>; BLOCKS],
    next_block: usize,
    /// The thread for which events are open.
    thread: Option<ThreadId>,
    in_guest: bool,
    deadline: Option<Tsc>,
    /// When to look at the latest whether counters were taken away.
    look: Option<Tsc>,
    /// Slots that have lost theirs, and whose owners have not heard of it.
    lost: SlotSet,
    /// An overflow may have come that was not looked for.
    doubt: bool,
    /// The signals that were looked after.
    signals: u32,
    /// The log knows that counters can be lost here.
    warned: bool,
}

impl Inner {
    pub(super) fn new(kernel: Box<dyn PerfSyscalls>, env: BackendEnv, floor: Nanos) -> Self {
        Inner {
            kernel,
            env,
            floor,
            owner: OwnerId::default(),
            slots: [SlotState::Free; CAPACITY],
            groups: BTreeMap::new(),
            trials: Trials::default(),
            met_vcpu: false,
            blocks: [None; BLOCKS],
            next_block: 0,
            thread: None,
            in_guest: false,
            deadline: None,
            look: None,
            lost: SlotSet::EMPTY,
            doubt: false,
            signals: signal::generation(),
            warned: false,
        }
    }

    /// The best event for `request` that the kernel opens.
    pub(super) fn choose(
        &mut self,
        request: &CountRequest,
    ) -> Result<EventSpec, UnavailableReason> {
        self.trials.choose(self.kernel.as_mut(), request, &self.env)
    }

    /// Slots that an event can take: of a hardware event as many at a time as
    /// there are counters for it, in the block of the vCPU that is here. Groups
    /// of several vCPUs are open side by side, so each has slots of its own.
    pub(super) fn room(&mut self, event: &EventSpec) -> SlotSet {
        if !event.source.is_hardware() {
            return SlotSet::below(CAPACITY);
        }
        // How many fit is tried with that many events. Who asks before there is a
        // vCPU wants to know whether, not where.
        let fitting = self
            .met_vcpu
            .then(|| self.trials.fitting(self.kernel.as_mut(), event));
        let slots = fitting
            .flatten()
            .unwrap_or(CAPACITY)
            .min(usize::from(BLOCK));
        let first = u8::try_from(self.block()).unwrap_or_default();
        SlotSet::below(slots).shifted_up(first.saturating_mul(BLOCK))
    }

    /// The block of the vCPU that is here, or that it would get; once all are given
    /// away, the one that was given away first.
    fn block(&self) -> usize {
        let mine = |block: &Option<OwnerId>| *block == Some(self.owner);
        let mine = self.blocks.iter().position(mine);
        mine.unwrap_or(self.next_block)
    }

    /// The vCPU that is here has a hardware event: it keeps its block.
    fn take_block(&mut self) {
        let at = self.block();
        if self.blocks[at] != Some(self.owner) {
            self.blocks[at] = Some(self.owner);
            self.next_block = (at + 1) % BLOCKS;
        }
    }

    pub(super) fn program(
        &mut self,
        index: SlotIndex,
        request: &CountRequest,
    ) -> Result<Provenance, UnavailableReason> {
        self.release(index);
        if usize::from(index.0) >= CAPACITY {
            return Err(no_such(index));
        }
        let event = self.choose(request)?;
        self.bind_thread();
        let key = (self.owner, event.source.is_hardware());
        let kernel = self.kernel.as_mut();
        let group = match self.groups.get_mut(&key) {
            Some(group) => group,
            None => {
                let group = Group::open(kernel, key.1).map_err(refused)?;
                self.groups.entry(key).or_insert(group)
            }
        };
        let taken = group.members().len();
        // Where counters are taken away, one event too many would cost all others theirs.
        if self.warned && group.is_at_risk() {
            Group::try_counter(kernel, event).map_err(Failure::reason)?;
        }
        let signal = self.env.overflow_signal;
        if let Err(errno) = group.add(kernel, index, event, signal) {
            return Err(match errno.0 {
                // Alone it opens: the group asks for more than there is.
                libc::EINVAL | libc::ENOSPC if key.1 && taken > 0 => {
                    UnavailableReason::NoFreeCounter {
                        backend: NAME,
                        capacity: taken,
                    }
                }
                _ => refused(errno),
            });
        }
        self.set(index, SlotState::Open(key));
        if key.1 {
            self.take_block();
        }
        Ok(event.source.provenance())
    }

    pub(super) fn release(&mut self, index: SlotIndex) {
        if let Some(key) = self.key_of(index) {
            let in_guest = self.runs_in_guest(key);
            self.with_group(key, |group, kernel| {
                group.remove(kernel, index);
                group.switch(kernel, in_guest)
            });
            // That of the vCPU which is here stays, for a driver's next event.
            if key.0 != self.owner {
                self.close_empty(key);
            }
        }
        self.set(index, SlotState::Free);
        self.lost.remove(index);
    }

    pub(super) fn set_running(&mut self, slots: SlotSet, running: bool) {
        let mut touched: Vec<Key> = Vec::with_capacity(2);
        for slot in slots.iter() {
            let Some(key) = self.key_of(slot) else {
                continue;
            };
            self.with_group(key, |group, kernel| {
                group.set_running(kernel, slot, running)
            });
            if !touched.contains(&key) {
                touched.push(key);
            }
        }
        for key in touched {
            let in_guest = self.runs_in_guest(key);
            self.with_group(key, |group, kernel| group.switch(kernel, in_guest));
        }
    }

    /// Groups without events go when their vCPU does.
    pub(super) fn attach(&mut self, owner: OwnerId) {
        self.met_vcpu = true;
        if owner == self.owner {
            return;
        }
        for key in self.own() {
            self.close_empty(key);
        }
        self.owner = owner;
    }

    pub(super) fn read(&mut self, index: SlotIndex) -> Reading {
        if let Some(key) = self.key_of(index) {
            let here = self.is_here();
            self.with_group(key, |group, kernel| group.refresh_one(kernel, index, here));
        }
        match self.slots.get(usize::from(index.0)) {
            None => Reading::Unavailable(no_such(index)),
            Some(SlotState::Failed(reason)) => Reading::Unavailable(*reason),
            Some(SlotState::Free) => Reading::Unavailable(UnavailableReason::NotProgrammed {
                backend: NAME,
                slot: index,
            }),
            Some(SlotState::Open(key)) => {
                let member = self.groups.get(key).and_then(|group| group.get(index));
                member.map_or(
                    Reading::Unavailable(UnavailableReason::Lost { backend: NAME }),
                    |member| member.reading(NAME),
                )
            }
        }
    }

    pub(super) fn arm(&mut self, index: SlotIndex, after: Option<NonZeroU64>) {
        let Some(key) = self.key_of(index) else {
            return;
        };
        let here = self.is_here();
        self.with_group(key, |group, kernel| {
            if after.is_some() {
                group.refresh_one(kernel, index, here)?;
            }
            if let Some(member) = group.get_mut(index) {
                let count = member.count.value();
                member.armed = after.map(|after| count.saturating_add(after.get()));
            }
            Ok(())
        });
    }

    pub(super) fn enter(&mut self, tsc: Tsc) {
        self.in_guest = true;
        if self
            .thread
            .is_some_and(|thread| thread != thread::current().id())
        {
            self.fail_all(Failure::OtherThread);
        }
        let floor = self.floor;
        for key in self.own() {
            self.with_group(key, |group, kernel| group.enter(kernel, floor));
        }
        let khz = self.env.tsc_khz;
        let own = self
            .own()
            .into_iter()
            .filter_map(|key| self.groups.get(&key));
        self.deadline = own
            .flat_map(Group::members)
            .filter(|member| member.wants_deadline())
            .filter_map(Member::left)
            // An event without signals counts nanoseconds.
            .map(|left| tsc + Ticks::of(Duration::from_nanos(left), khz))
            .min();
        // One time for several entries, or a guest that exits often would put it off.
        let hardware = self.groups.get(&(self.owner, true));
        self.look = hardware
            .is_some_and(Group::is_at_risk)
            .then(|| self.look.unwrap_or(tsc + Ticks::of(LOOK, khz)));
    }

    pub(super) fn leave(&mut self, tsc: Tsc) {
        self.in_guest = false;
        let may_ask = self.look.is_some_and(|look| look <= tsc);
        if may_ask {
            self.look = None;
        }
        self.with_group((self.owner, true), |group, kernel| {
            group.look_for_loss(kernel, may_ask)
        });
        for key in self.own() {
            self.with_group(key, Group::leave);
        }
        let own = self
            .own()
            .into_iter()
            .filter_map(|key| self.groups.get(&key));
        self.doubt |= own
            .flat_map(Group::members)
            .any(Member::may_be_due_unsignalled);
        self.doubt |= self.deadline.take().is_some_and(|deadline| deadline <= tsc);
    }

    pub(super) fn deadline(&self) -> Option<Tsc> {
        [self.deadline, self.look].into_iter().flatten().min()
    }

    /// Asks the kernel only after a signal or a deadline. Counts that are
    /// known anyway are compared in any case.
    pub(super) fn take_overflows(&mut self) -> SlotSet {
        let signals = signal::generation();
        let signalled = std::mem::replace(&mut self.signals, signals) != signals;
        let doubt = std::mem::take(&mut self.doubt) | signalled;
        let mut overflowed = SlotSet::EMPTY;
        let keys: Vec<Key> = self.groups.keys().copied().collect();
        for key in keys {
            self.with_group(key, |group, kernel| {
                if !group.members().iter().any(|member| member.armed.is_some()) {
                    return Ok(());
                }
                if doubt {
                    group.refresh(kernel)?;
                }
                if group.is_fresh() {
                    for member in group.members_mut() {
                        if member.take_overflow(doubt) {
                            overflowed.insert(member.slot);
                        }
                    }
                }
                Ok(())
            });
        }
        overflowed.union(std::mem::take(&mut self.lost))
    }

    /// The groups of the vCPU that runs.
    fn own(&self) -> [Key; 2] {
        [(self.owner, true), (self.owner, false)]
    }

    fn runs_in_guest(&self, key: Key) -> bool {
        self.in_guest && key.0 == self.owner
    }

    fn key_of(&self, index: SlotIndex) -> Option<Key> {
        match self.slots.get(usize::from(index.0))? {
            SlotState::Open(key) => Some(*key),
            SlotState::Free | SlotState::Failed(_) => None,
        }
    }

    fn set(&mut self, index: SlotIndex, slot: SlotState) {
        if let Some(place) = self.slots.get_mut(usize::from(index.0)) {
            *place = slot;
        }
    }

    /// Works on a group, if there is one, and gives it up where that fails.
    fn with_group(
        &mut self,
        key: Key,
        work: impl FnOnce(&mut Group, &mut dyn PerfSyscalls) -> Result<(), Failure>,
    ) {
        let Some(group) = self.groups.get_mut(&key) else {
            return;
        };
        if let Err(failure) = work(group, self.kernel.as_mut()) {
            self.fail(key, failure);
        }
    }

    /// Closes a group whose counts cannot be relied on any more.
    fn fail(&mut self, key: Key, failure: Failure) {
        let members = self
            .groups
            .get(&key)
            .map(Group::members)
            .unwrap_or_default();
        let slots: SlotSet = members.iter().map(|member| member.slot).collect();
        // A guest that has its counters placed again and again is told of once.
        let level = if std::mem::replace(&mut self.warned, true) {
            log::Level::Debug
        } else {
            log::Level::Warn
        };
        log::log!(
            level,
            "{NAME} gives up counting in {slots} for {}: {failure}",
            key.0
        );
        for slot in slots.iter() {
            self.set(slot, SlotState::Failed(failure.reason()));
            self.lost.insert(slot);
        }
        self.close(key);
    }

    fn fail_all(&mut self, failure: Failure) {
        let keys: Vec<Key> = self.groups.keys().copied().collect();
        for key in keys {
            self.fail(key, failure);
        }
        self.thread = None;
    }

    fn close_empty(&mut self, key: Key) {
        let group = self.groups.get(&key);
        if group.is_some_and(|group| group.members().is_empty()) {
            self.close(key);
        }
    }

    fn close(&mut self, key: Key) {
        if let Some(group) = self.groups.remove(&key) {
            group.close(self.kernel.as_mut());
        }
    }

    /// Whether the calling thread is the one for which events are open.
    fn is_here(&self) -> bool {
        self.thread == Some(thread::current().id())
    }

    /// Events that are opened from now on count for the calling thread; those
    /// of another one are of no use any more.
    fn bind_thread(&mut self) {
        let here = thread::current().id();
        if self.thread.is_some_and(|thread| thread != here) {
            self.fail_all(Failure::OtherThread);
        }
        self.thread = Some(here);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        while let Some((_, group)) = self.groups.pop_first() {
            group.close(self.kernel.as_mut());
        }
    }
}

fn no_such(slot: SlotIndex) -> UnavailableReason {
    UnavailableReason::NoSuchSlot {
        backend: NAME,
        slot,
    }
}
