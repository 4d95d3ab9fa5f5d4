//! Where cores meet: a crowded core asks one with fewer runnable vCPUs, and hands
//! one over.
//!
//! A core does not notice when the one vCPU that it runs halts, nor when the
//! halted one that it sleeps in goes on. So what it says here may be old, and a
//! crowded core asks before it hands a vCPU over.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, OnceLock};
use std::time::Duration;

use vmm_control::WakeCore;

use crate::sync::lock;
use crate::sys::KickTarget;
use crate::vcpu::Vcpu;

/// Nobody, where the number of a core stands.
const NOBODY: usize = usize::MAX;

/// What all cores of a machine see.
#[derive(Debug)]
pub struct CoreExchange {
    cores: Vec<Post>,
}

/// One core's part of it.
#[derive(Debug)]
struct Post {
    attention: AtomicBool,
    target: OnceLock<KickTarget>,
    arrivals: Mutex<Vec<Vcpu>>,
    bell: Condvar,
    /// Its runnable vCPUs when it last looked.
    load: AtomicUsize,
    /// The crowded core that asks how many there are now.
    asked_by: AtomicUsize,
    /// The core that takes a vCPU of this one.
    taker: AtomicUsize,
}

impl CoreExchange {
    /// For `cores` cores.
    #[must_use]
    pub fn new(cores: usize) -> Self {
        let post = || Post {
            attention: AtomicBool::new(false),
            target: OnceLock::new(),
            arrivals: Mutex::default(),
            bell: Condvar::new(),
            load: AtomicUsize::new(usize::MAX),
            asked_by: AtomicUsize::new(NOBODY),
            taker: AtomicUsize::new(NOBODY),
        };
        Self {
            cores: std::iter::repeat_with(post).take(cores).collect(),
        }
    }

    /// Has every core look up from what it does.
    pub fn call_all(&self) {
        (0..self.cores.len()).for_each(|core| self.call(core));
    }

    /// The calling thread is `core`.
    pub(super) fn bind_thread(&self, core: usize, target: KickTarget) {
        let _ = self.cores[core].target.set(target);
    }

    pub(super) fn attention(&self, core: usize) -> &AtomicBool {
        &self.cores[core].attention
    }

    /// Takes what has come for `core`, and its attention back.
    pub(super) fn collect(&self, core: usize) -> Vec<Vcpu> {
        let post = &self.cores[core];
        if !post.attention.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        std::mem::take(&mut *lock(&post.arrivals))
    }

    /// `core` has no vCPU to run: waits until it is called, or for so long.
    pub(super) fn wait(&self, core: usize, most: Option<Duration>) {
        let post = &self.cores[core];
        let called = |_: &mut Vec<Vcpu>| !post.attention.load(Ordering::Acquire);
        let guard = lock(&post.arrivals);
        match most {
            Some(most) => drop(post.bell.wait_timeout_while(guard, most, called)),
            None => drop(post.bell.wait_while(guard, called)),
        }
    }

    /// `core` has so many runnable vCPUs.
    pub(super) fn set_load(&self, core: usize, load: usize) {
        let known = &self.cores[core].load;
        if known.load(Ordering::Relaxed) != load {
            known.store(load, Ordering::Release);
        }
    }

    fn load(&self, core: usize) -> usize {
        self.cores[core].load.load(Ordering::Acquire)
    }

    /// The crowded `core` asks another one whether it takes a vCPU; a different
    /// one at each `attempt`.
    pub(super) fn ask(&self, core: usize, attempt: usize) {
        let cores = self.cores.len();
        let others = (0..cores).map(|other| (attempt % cores + other) % cores);
        for other in others.filter(|&other| other != core) {
            let asked_by = &self.cores[other].asked_by;
            let free = may_take(self.load(core), self.load(other))
                && asked_by
                    .compare_exchange(NOBODY, core, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok();
            if free {
                return self.call(other);
            }
        }
    }

    /// Answers who asked `core`, which has told its load just now.
    pub(super) fn answer(&self, core: usize) {
        let asker = self.cores[core].asked_by.swap(NOBODY, Ordering::AcqRel);
        if asker != NOBODY && takes(self.load(asker), self.load(core)) {
            self.cores[asker].taker.store(core, Ordering::Release);
            self.call(asker);
        }
    }

    /// The core that takes a vCPU of `core` now.
    pub(super) fn taker(&self, core: usize) -> Option<usize> {
        let taker = self.cores[core].taker.swap(NOBODY, Ordering::AcqRel);
        (taker != NOBODY).then_some(taker)
    }

    /// Hands `vcpu` to `core`.
    pub(super) fn hand_over(&self, core: usize, vcpu: Vcpu) {
        lock(&self.cores[core].arrivals).push(vcpu);
        self.call(core);
    }

    /// Vcpus that were handed over and never collected, once all cores have ended.
    pub(crate) fn leftovers(&self) -> Vec<Vcpu> {
        let posts = self.cores.iter();
        posts
            .flat_map(|post| std::mem::take(&mut *lock(&post.arrivals)))
            .collect()
    }

    /// Has `core` look up; one that there is not has nothing to look up from.
    pub(crate) fn call(&self, core: usize) {
        let Some(post) = self.cores.get(core) else {
            return;
        };
        {
            // Under the lock, so that it does not fall between a look and a wait.
            let _waiting = lock(&post.arrivals);
            post.attention.store(true, Ordering::Release);
            post.bell.notify_all();
        }
        if let Some(target) = post.target.get() {
            target.kick();
        }
    }
}

impl WakeCore for CoreExchange {
    fn wake(&self, core: usize) {
        self.call(core);
    }
}

/// A vCPU changes sides where the difference is two at least: after that it is
/// not the other way round.
fn takes(from: usize, to: usize) -> bool {
    to.saturating_add(2) <= from
}

/// The same with what the other one said last: its one runnable vCPU may have
/// halted since.
fn may_take(from: usize, to: usize) -> bool {
    takes(from, if to == 1 { 0 } else { to })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_takes_a_vcpu() {
        fn check(from: usize, to: usize, asked: bool, taken: bool) {
            assert_eq!(
                (may_take(from, to), takes(from, to)),
                (asked, taken),
                "{from} {to}"
            );
        }
        check(2, 0, true, true);
        check(2, 1, true, false);
        check(2, 2, false, false);
        check(3, 1, true, true);
        check(3, 2, false, false);
        check(1, 0, false, false);
        // One that has not said anything yet.
        check(9, usize::MAX, false, false);
    }

    #[test]
    fn asking_and_answering() {
        let exchange = CoreExchange::new(3);
        for (core, load) in [(0, 3), (1, 3), (2, 1)] {
            exchange.set_load(core, load);
        }
        exchange.ask(0, 0);
        // Somebody else is quicker with the second question than the answer.
        exchange.ask(1, 0);
        assert!(exchange.attention(2).load(Ordering::Acquire));
        assert!(!exchange.attention(1).load(Ordering::Acquire));
        exchange.answer(2);
        assert_eq!((exchange.taker(0), exchange.taker(1)), (Some(2), None));
        assert_eq!(exchange.taker(0), None, "an answer serves once");
        // In the meantime the other one has got a second vCPU.
        exchange.ask(1, 1);
        exchange.set_load(2, 2);
        exchange.answer(2);
        assert_eq!(exchange.taker(1), None);
    }

    #[test]
    fn a_core_that_is_called_does_not_wait() {
        let exchange = CoreExchange::new(1);
        exchange.call_all();
        exchange.wait(0, None);
        assert!(exchange.collect(0).is_empty());
        assert!(!exchange.attention(0).load(Ordering::Acquire));
    }

    #[test]
    fn a_core_that_nobody_calls_waits_for_its_time() {
        let exchange = CoreExchange::new(1);
        let (began, most) = (std::time::Instant::now(), Duration::from_millis(5));
        exchange.wait(0, Some(most));
        assert!(began.elapsed() >= most);
    }
}
