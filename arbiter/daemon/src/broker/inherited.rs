//! Events that a thread may count by because whoever started it does (`inherit` of
//! perf_event_open(2)). The kernel lists nobody who has inherited an event, and who started whom
//! is lost when a process ends: all that is known for sure is when each was started.

use std::thread::sleep;
use std::time::Duration;

use arbiter_host::Group;
use rustix::time::{ClockId, clock_gettime};

use super::OpenEvent;
use crate::budget::Follows;
use crate::peer::{self, Started};
use crate::task::{Life, TICK};

/// The thread that an event counts first, as it was when the event was opened.
#[derive(Clone, Copy, Debug)]
pub(super) struct Root {
    /// The number of its process, if that is known.
    pub(super) process: Option<u32>,
    /// In which tick the event was opened, or an earlier one: who was started before has not
    /// inherited it.
    pub(super) since: Started,
    /// It was another user's than who asked, as far as anybody knows: what that does has no price
    /// for who asked.
    pub(super) foreign: bool,
}

/// The tick of a time since the host was booted, in nanoseconds.
pub(super) fn tick_of(time: u64) -> Started {
    Started(time / TICK)
}

/// Waits until a tick has begun, and returns it: whoever was started in one before was started
/// before anything that is done from now on.
pub(super) fn next_tick() -> Started {
    sleep(Duration::from_nanos(TICK - now() % TICK));
    tick_of(now())
}

/// Since the host was booted, in nanoseconds: the clock of proc_pid_stat(5).
fn now() -> u64 {
    let now = Duration::try_from(clock_gettime(ClockId::Boottime)).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

impl OpenEvent {
    /// Whether a thread of this number, that was started then, may count by an event of another's.
    /// `process`: of which process it is, if that is known.
    pub(super) fn may_have(
        &self,
        (number, started): (u32, Option<Started>),
        process: Option<u32>,
    ) -> bool {
        let Some(root) = self.root else { return false };
        let later = started.is_none_or(|started| started >= root.since);
        let same_process = root
            .process
            .zip(process)
            .is_none_or(|(root, other)| root == other);
        self.allowed.event.thread != Some(number)
            && match self.allowed.event.follows {
                Follows::Nothing => false,
                Follows::Threads => later && same_process,
                Follows::Children => later,
            }
    }

    /// Whether the thread that an event counts first has ended.
    pub(super) fn has_ended(&self) -> bool {
        let (thread, started) = self.life;
        let life = Life::of(thread);
        peer::is_gone(started, &life) || life.is_ok_and(|life| life.is_some_and(|life| life.ended))
    }

    /// Whether nothing is left that counts by it, as far as that can be told. Of an event of before
    /// a restart the kernel does not tell: that is looked at for as long as something runs in its
    /// group.
    pub(super) fn none_is_left(&self, is_empty: impl FnOnce(&Group) -> bool) -> bool {
        if let Some(lineage) = self.event.lineage() {
            return lineage.has_ended();
        }
        let group = self.allowed.group.as_ref();
        self.has_ended() && (self.went_with_process() || group.is_some_and(is_empty))
    }

    /// Whether all that counts by it has ended with the process of its first thread.
    fn went_with_process(&self) -> bool {
        let process = self.root.and_then(|root| root.process);
        self.allowed.event.follows == Follows::Threads
            && process.is_some_and(|process| matches!(Life::of(process), Ok(None)))
    }
}

/// Whether two events may count on the same CPU. One without a CPU counts on each.
pub(super) fn meet(a: Option<u32>, b: Option<u32>) -> bool {
    a.is_none() || b.is_none() || a == b
}

#[cfg(test)]
mod tests {

    use super::*;
    use umpire_service::Closer;

    use crate::broker::manager::tests::thread_clock;
    use crate::broker::stops::EventFile;
    use crate::budget::{Handed, HandedEvent};
    use crate::service::Allowed;
    use crate::task::Task;

    #[test]
    fn who_was_started_before_has_inherited_nothing() {
        let check = |follows, started: Option<u64>, process, expected: bool| {
            let Ok(event) = Handed::open(&thread_clock()) else {
                println!("skipped: who_was_started_before_has_inherited_nothing: no events");
                return;
            };
            let of = HandedEvent {
                thread: Some(41),
                follows,
                ..thread_clock()
            };
            let open = OpenEvent {
                event: EventFile::new(event, &of, None, &Closer::new(1 << 20), 7),
                allowed: Allowed::of(of),
                uid: 7,
                tenant: None,
                pid: 40,
                life: (41, Some(Started(5))),
                root: Some(Root {
                    process: Some(40),
                    since: Started(100),
                    foreign: false,
                }),
                process: None,
                name: None,
            };
            let thread = (42, started.map(Started));
            let may = open.may_have(thread, process);
            assert_eq!(may, expected, "{follows:?} {started:?} {process:?}");
            // Its own is another matter.
            assert!(!open.may_have((41, started.map(Started)), process));
        };
        use Follows::{Children, Nothing, Threads};
        check(Children, Some(99), Some(9), false);
        // In the same tick nobody knows which was first.
        check(Children, Some(100), Some(9), true);
        check(Children, Some(101), Some(40), true);
        check(Children, None, None, true);
        check(Threads, Some(99), Some(40), false);
        check(Threads, Some(100), Some(40), true);
        check(Threads, Some(100), Some(9), false);
        check(Threads, Some(100), None, true);
        check(Nothing, Some(100), Some(40), false);
    }

    /// What the kernel says of a process that is started now is no earlier tick, and what was
    /// started before is of one.
    #[test]
    fn a_tick_parts_what_was_started() {
        let started = || {
            let mut child = std::process::Command::new("sleep")
                .arg("60")
                .spawn()
                .expect("sleep starts");
            let task = Task::of(child.id()).expect("it can be seen");
            child.kill().expect("it is ours");
            child.wait().expect("it is ours");
            Started(task.expect("it is there").id.started)
        };
        for _ in 0..20 {
            let before = started();
            let tick = next_tick();
            assert!(before < tick && started() >= tick, "{before:?} {tick:?}");
        }
    }

    #[test]
    fn an_event_without_a_cpu_meets_each() {
        for (a, b, expected) in [
            (None, None, true),
            (Some(1), None, true),
            (Some(1), Some(1), true),
            (Some(1), Some(2), false),
        ] {
            assert_eq!((meet(a, b), meet(b, a)), (expected, expected));
        }
    }
}
