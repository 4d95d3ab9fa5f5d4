//! Events that somebody has and should not use any more. A descriptor cannot be taken back,
//! so each is looked at for as long as there is something that it could count. One look is
//! excused: who enables an event in the moment in which the lease ends is told soon enough.
//! Whoever has it count after that has taken a counter that nobody gave.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use arbiter_host::{Group, GroupId};

use super::OpenEvent;
use super::stops::{EventFile, EventSight, Order, Stops, ThreadEvent};
use crate::groups::{GroupState, LateTree};
use crate::peer::{self, Started};
use crate::service::{Allowed, Taken, TakenBy, Told};
use crate::task::Life;

/// Most lost events that are looked at in one go.
const LOOKS_AT: usize = 2048;
/// Of so many of a user it is found out at once whether they are over, where there is no room; and
/// of so many of all that are not stopped or looked at in time, in one go.
const TRIES: usize = 16;
/// So often it is looked whether there is still something that a lost event could count, in
/// nanoseconds; so long each is looked at in any case, and so long after it was last seen on
/// its counter is taken for used.
const LIVES: u64 = 60_000_000_000;
/// So long it is from one round of looks to the next, in nanoseconds.
const ROUND: u64 = 500_000_000;
/// The first look so long after the loss is the last that excuses, in nanoseconds.
const EXCUSED: u64 = 500_000_000;
/// What is not stopped at the first round of looks so long after it was to be counts as taken, in
/// nanoseconds: nobody who has got its counter waits for longer to be told so.
const STOPS: u64 = 1_000_000_000;
/// And what is not looked at for so long. It was off, and its turn comes behind all that its user
/// has lost.
const LATE: u64 = 10_000_000_000;
/// So many looks at an event that others may have inherited are excused if each of them finds it
/// on: what was being started at a stop takes its state from who started it, and is stopped by
/// the next one, for which nobody can do anything.
const SETTLES: u8 = 4;
/// So many losses of a process are excused in [`LIVES`]: who gets lease after lease counts no
/// longer by it.
const MOST_EXCUSED: usize = 3;
/// And so many of a user: who starts process after process is no better off.
const MOST_OF_USER: usize = 32;

/// A process that has asked for events: its user, its number and its start.
type Process = (u32, u32, Option<Started>);

/// Of which losses something of each process was excused, by when they were. A user may run
/// many VMs, each of which loses its counters for itself.
#[derive(Debug, Default)]
pub(super) struct Excuses(BTreeMap<Process, Vec<u64>>);

impl Excuses {
    /// Whether one more event is excused that a process lost then. What it lost at once, all
    /// the threads of a VM, is one, and so is what more than one look sees of it.
    fn take(&mut self, process: Process, loss: u64, look: u64) -> bool {
        let (uid, ..) = process;
        let is_new = |before: &&u64| before.saturating_add(LIVES) > look;
        let all = (uid, 0, None)..=(uid, u32::MAX, Some(Started(u64::MAX)));
        let of_user = self.0.range(all).flat_map(|(_, losses)| losses);
        let of_user = of_user.filter(is_new).count();
        let losses = self.0.entry(process).or_default();
        losses.retain(|before| is_new(&before));
        if losses.contains(&loss) {
            return true;
        }
        let has_room = losses.len() < MOST_EXCUSED && of_user < MOST_OF_USER;
        if has_room {
            losses.push(loss);
        }
        has_room
    }

    fn forget_old(&mut self, now: u64) {
        let is_new = |loss: &u64| loss.saturating_add(LIVES) > now;
        self.0.retain(|_, losses| losses.iter().any(is_new));
    }
}

/// How lost events are looked at, and what of it is excused.
#[derive(Debug)]
pub(super) struct Judges {
    pub(super) stops: Stops,
    pub(super) excuses: Excuses,
}

/// An event that somebody should not use any more.
#[derive(Debug)]
pub(super) struct Lost {
    open: OpenEvent,
    /// `None`: the kernel had no counter for it. It says the time again when somebody has
    /// enabled it anew, and when the thread that it counts has ended.
    enabled: Option<Duration>,
    since: u64,
    /// Nobody asks before whether there is something left that it could count.
    until: u64,
    /// A look was excused: there is no other.
    excused: bool,
    /// It counts for somebody who should not, as far as the last looks know.
    taken_until: u64,
    /// What is being done to it.
    asked: Option<Asked>,
    /// So many looks are excused still if they find it on, until one finds it off.
    settles: u8,
    /// When it was looked last whether it is over though it is not stopped.
    tried: Option<u64>,
}

/// An order of which there is no answer yet.
#[derive(Clone, Copy, Debug)]
struct Asked {
    number: u64,
    /// It is being stopped, and not only looked at.
    stops: bool,
    since: u64,
    /// That takes too long: until it is answered the event counts as taken.
    is_late: bool,
}

impl Lost {
    /// One that is lost now: it is stopped, or is going to be.
    pub(super) fn new(open: OpenEvent, stops: &mut Stops, now: u64) -> Self {
        let mut lost = Lost {
            open,
            enabled: None,
            since: now,
            until: now.saturating_add(LIVES),
            excused: false,
            taken_until: 0,
            asked: None,
            settles: 0,
            tried: None,
        };
        lost.stop(stops, now);
        lost
    }

    /// Stops it, or has that done. Whatever it has done before has no price.
    fn stop(&mut self, stops: &mut Stops, now: u64) {
        match &self.open.event {
            EventFile::OfCpu(event) => {
                let stopped = stops.kernel().stop(event);
                self.stopped(&stopped);
            }
            EventFile::OfThread(event) => {
                if event.is_inherited() {
                    self.settles = SETTLES;
                }
                let event = Arc::clone(event);
                // A look stops it, too, if it is on.
                let asked = self.ask(stops, &event, Order::Stop, now);
                asked.stops = true;
            }
        }
    }

    /// Gives an order, unless there is one that is not answered yet.
    fn ask(
        &mut self,
        stops: &mut Stops,
        event: &Arc<ThreadEvent>,
        order: Order,
        now: u64,
    ) -> &mut Asked {
        self.asked.get_or_insert_with(|| Asked {
            number: stops.begin(event, order),
            stops: order == Order::Stop,
            since: now,
            is_late: false,
        })
    }

    pub(super) fn event(&self) -> &OpenEvent {
        &self.open
    }

    /// What came of it.
    fn stopped(&mut self, seen: &EventSight) {
        self.enabled = seen.enabled;
        if let Some(error) = &seen.failed {
            let lease = self.open.allowed.lease.0;
            log::error!("an event of lease {lease} runs on: {error}");
        }
    }

    /// One of before a restart, of a user who is barred: it counts still, until looks say
    /// that it does not.
    pub(super) fn taken(self, now: u64) -> Self {
        Lost {
            taken_until: now.saturating_add(LIVES),
            ..self
        }
    }

    fn process(&self) -> Process {
        (self.open.uid, self.open.pid, self.open.process)
    }

    /// Whether there is nothing left that it could count.
    fn is_over(&self, groups: &mut States<'_>) -> bool {
        let allowed = &self.open.allowed;
        if self.open.root.is_some() {
            return self.open.none_is_left(|group| {
                let state = groups.of(group);
                matches!(state, Some(GroupState::Empty | GroupState::Gone))
            });
        }
        let group = allowed.group.as_ref();
        if group.is_some_and(|group| groups.of(group) == Some(GroupState::Gone)) {
            return true;
        }
        let is_gone = |(number, started)| peer::is_gone(started, &Life::of(number));
        // A thread that has called `execve` has the number and the start of its process.
        is_gone(self.open.life) && is_gone((self.open.pid, self.open.process))
    }

    /// Whether the thread that it counts has ended, as far as its number tells.
    fn thread_has_ended(&self) -> bool {
        self.open.allowed.event.thread.is_some() && self.open.has_ended()
    }

    /// Looks whether it has counted since the last look, and stops it; or has that done, and says
    /// when it is.
    fn look(&mut self, stops: &mut Stops, excuses: &mut Excuses, now: u64) -> OnOff {
        match &self.open.event {
            EventFile::OfCpu(event) => {
                let seen = stops.kernel().look(event, self.enabled);
                self.saw(&seen, excuses, now, now)
            }
            EventFile::OfThread(event) => {
                let (event, order) = (
                    Arc::clone(event),
                    Order::Look {
                        known: self.enabled,
                        stops: self.settles > 0,
                    },
                );
                self.ask(stops, &event, order, now);
                OnOff::Off
            }
        }
    }

    /// What is not answered in time counts as taken.
    fn age(&mut self, now: u64) {
        if let Some(asked) = &mut self.asked {
            let takes = if asked.stops { STOPS } else { LATE };
            asked.is_late |= asked.since.saturating_add(takes) <= now;
        }
    }

    /// The number of the order by which it is being stopped, if others wait for that.
    pub(super) fn is_being_stopped(&self) -> Option<u64> {
        let asked = self.asked.filter(|asked| asked.stops && !asked.is_late);
        asked.map(|asked| asked.number)
    }

    /// Whether it counts for somebody who should not, as far as anybody knows.
    fn is_taken(&self, now: u64) -> bool {
        self.taken_until > now || self.is_late()
    }

    fn is_late(&self) -> bool {
        self.asked.is_some_and(|asked| asked.is_late)
    }

    /// What has come of an order.
    fn answered(&mut self, seen: &EventSight, excuses: &mut Excuses, now: u64) -> OnOff {
        match self.asked.take() {
            // How long the answer took is not the holder's doing.
            Some(asked) if !asked.stops => self.saw(seen, excuses, asked.since, now),
            _ => {
                self.stopped(seen);
                OnOff::Off
            }
        }
    }

    /// What a look has seen that began `at` some time.
    fn saw(&mut self, seen: &EventSight, excuses: &mut Excuses, at: u64, now: u64) -> OnOff {
        let was_told = self.enabled.is_some();
        self.enabled = seen.enabled;
        let Some(on) = seen.on else {
            // It is stopped, and may be started again and again with nobody seeing it.
            self.taken_until = now.saturating_add(LIVES);
            return OnOff::Off;
        };
        if !on {
            return self.judge(false, excuses, at);
        }
        if !was_told && self.thread_has_ended() {
            return self.judge(false, excuses, at);
        }
        self.until = now.saturating_add(LIVES);
        let seen = self.judge(true, excuses, at);
        if seen == OnOff::On {
            self.taken_until = now.saturating_add(LIVES);
        }
        seen
    }

    /// What it comes to that it was on at that time, or was not. Pure.
    fn judge(&mut self, on: bool, excuses: &mut Excuses, now: u64) -> OnOff {
        let first = !self.excused;
        self.excused |= now >= self.since.saturating_add(EXCUSED);
        let settles = self.settles;
        self.settles = if on { settles.saturating_sub(1) } else { 0 };
        if !on {
            return OnOff::Off;
        }
        if settles > 0 && excuses.take(self.process(), self.since, now) {
            return OnOff::Settles;
        }
        if first && excuses.take(self.process(), self.since, now) {
            return OnOff::Excused;
        }
        self.taken_until = now.saturating_add(LIVES);
        OnOff::On
    }
}

/// What runs in the groups of lost events, each looked at once: events are of few groups.
struct States<'a> {
    groups: &'a LateTree,
    seen: BTreeMap<GroupId, Option<GroupState>>,
}

impl<'a> States<'a> {
    fn new(groups: &'a LateTree) -> Self {
        let seen = BTreeMap::new();
        States { groups, seen }
    }

    /// `None`: it cannot be seen.
    fn of(&mut self, group: &Group) -> Option<GroupState> {
        let state = || self.groups.get().and_then(|tree| tree.state(group)).ok();
        *self.seen.entry(group.id).or_insert_with(state)
    }
}

/// What a look at a lost event saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnOff {
    Off,
    /// It was on, by what was being started when it was stopped, for all that anybody knows.
    Settles,
    /// It was on, which may be the holder's last doing before it knew.
    Excused,
    On,
}

/// Makes room for one more event of a user: of those that it has lost one goes for which there is
/// nothing left to count, among the few that are looked at. What could count stays, however long
/// it was off: whoever waits for that would have it count with nobody looking.
pub(super) fn take_over(
    lost: &mut VecDeque<Lost>,
    uid: u32,
    groups: &LateTree,
) -> Option<OpenEvent> {
    let own = |one: &Lost| one.open.uid == uid;
    let all = lost.iter().enumerate().filter(|(_, one)| own(one));
    let mut states = States::new(groups);
    let over = all.take(TRIES).find(|(_, one)| one.is_over(&mut states));
    let at = over.map(|(at, _)| at)?;
    lost.remove(at).map(|over| over.open)
}

/// Looks at some of them, and adds to `told` what was seen. Returns those that there is nothing
/// left to count for.
pub(super) fn look(
    lost: &mut VecDeque<Lost>,
    judges: &mut Judges,
    told: &mut Vec<Told>,
    groups: &LateTree,
    now: u64,
) -> Vec<OpenEvent> {
    let mut over = Vec::new();
    let mut states = States::new(groups);
    judges.excuses.forget_old(now);
    // Of all, however many are looked at: others wait for what is being stopped.
    lost.iter_mut().for_each(|one| one.age(now));
    // Of those that are late some each time: each is tried when all others were.
    let late = lost.iter().filter(|one| one.is_late()).count();
    let rounds = late.div_ceil(TRIES) * lost.len().div_ceil(LOOKS_AT);
    let round = u64::try_from(rounds)
        .unwrap_or(u64::MAX)
        .saturating_mul(ROUND);
    let mut tries = TRIES;
    for _ in 0..lost.len().min(LOOKS_AT) {
        let Some(mut one) = lost.pop_front() else {
            break;
        };
        let seen = one.look(&mut judges.stops, &mut judges.excuses, now);
        tell(&one, seen, told);
        if one.until <= now {
            if one.is_over(&mut states) {
                over.push(one.open);
                continue;
            }
            one.until = now.saturating_add(LIVES);
        }
        let is_due = |tried: u64| tried.saturating_add(round) <= now;
        let is_tried = tries > 0 && one.is_late() && one.tried.is_none_or(is_due);
        if is_tried {
            (one.tried, tries) = (Some(now), tries - 1);
        }
        if (one.taken_until > now || is_tried) && one.is_over(&mut states) {
            // Its counter is free again, and nobody has to wait for the minute.
            over.push(one.open);
            continue;
        }
        lost.push_back(one);
    }
    over
}

/// Adds to `told` what was seen of one.
fn tell(one: &Lost, seen: OnOff, told: &mut Vec<Told>) {
    if matches!(seen, OnOff::Excused | OnOff::On) {
        told.push(Told::Reenabled(one.open.having()));
    }
    let foreign = one.open.root.is_some_and(|root| root.foreign);
    if seen == OnOff::On && !foreign {
        told.push(Told::Outlived(one.open.having()));
    }
}

/// Hears what has come of orders, and adds to `told` what was seen. Whether there was anything.
pub(super) fn hear(
    lost: &mut VecDeque<Lost>,
    judges: &mut Judges,
    told: &mut Vec<Told>,
    now: u64,
) -> bool {
    let mut sights = judges.stops.finished();
    if sights.is_empty() {
        return false;
    }
    for one in lost.iter_mut() {
        let seen = one.asked.and_then(|asked| sights.remove(&asked.number));
        if let Some(seen) = seen {
            let seen = one.answered(&seen, &mut judges.excuses, now);
            tell(one, seen, told);
        }
    }
    true
}

/// What is taken, and by whom.
pub(super) fn taken(lost: &VecDeque<Lost>, now: u64) -> Vec<Taken> {
    // Of a group each thread has one event of a counter at most, whosever it was at first.
    let mut of_groups = BTreeSet::new();
    let taken = lost.iter().filter(|one| one.is_taken(now));
    let taken = taken.filter(|one| {
        let Allowed { lease, counter, .. } = one.open.allowed;
        one.open.root.is_none() || of_groups.insert((lease, counter, one.open.allowed.event.cpu))
    });
    taken
        .map(|one| Taken {
            uid: one.open.uid,
            pid: one.open.pid,
            lease: one.open.allowed.lease,
            pmu: one.open.allowed.pmu,
            counters: one.open.allowed.counters,
            by: taken_by(&one.open.allowed),
            cpu: one.open.allowed.event.cpu,
        })
        .collect()
}

fn taken_by(allowed: &Allowed) -> TakenBy {
    match (&allowed.group, allowed.event.thread) {
        (_, None) => TakenBy::Cpu,
        (Some(group), Some(_)) => TakenBy::Group(group.id),
        (None, Some(thread)) => TakenBy::Thread(thread),
    }
}

/// An operator has forgiven a user: what it has lost is excused once more, and nothing of it
/// is taken until it is seen on again, or not seen.
pub(super) fn forgive(lost: &mut VecDeque<Lost>, stops: &mut Stops, uid: u32, now: u64) {
    for one in lost.iter_mut().filter(|one| one.open.uid == uid) {
        one.stop(stops, now);
        (one.since, one.excused, one.taken_until) = (now, false, 0);
    }
}

#[cfg(test)]
#[path = "lost_tests.rs"]
pub(super) mod tests;
