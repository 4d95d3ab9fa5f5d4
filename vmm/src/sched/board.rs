//! Where cores meet: an idle core says so, a crowded one asks it, and a vCPU is
//! handed over.
//!
//! A core does not notice when the one vCPU that it runs halts, nor when the
//! halted one that it sleeps in goes on. So all it can say is that no vCPU waits
//! there, and a crowded core asks before it hands one over.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::sys::KickTarget;
use crate::vcpu::Vcpu;

/// Nobody, where the number of a core stands.
const NOBODY: usize = usize::MAX;

/// What all cores of a machine see.
#[derive(Debug)]
pub struct Board {
    cores: Vec<Post>,
}

/// One core's part of it.
#[derive(Debug)]
struct Post {
    attention: AtomicBool,
    target: OnceLock<KickTarget>,
    arrivals: Mutex<Vec<Vcpu>>,
    bell: Condvar,
    /// No vCPU waits for this core: it may be idle.
    free: AtomicBool,
    /// The crowded core that asks whether this one is idle.
    asked_by: AtomicUsize,
    /// The idle core that takes a vCPU of this one.
    taker: AtomicUsize,
}

impl Board {
    /// For `cores` cores.
    #[must_use]
    pub fn new(cores: usize) -> Self {
        let post = || Post {
            attention: AtomicBool::new(false),
            target: OnceLock::new(),
            arrivals: Mutex::default(),
            bell: Condvar::new(),
            free: AtomicBool::new(false),
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
    pub(super) fn sit_down(&self, core: usize, target: KickTarget) {
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

    /// `core` has no vCPU: waits until it is called.
    pub(super) fn wait(&self, core: usize) {
        let post = &self.cores[core];
        let called = |_: &mut Vec<Vcpu>| !post.attention.load(Ordering::Acquire);
        let guard = post.bell.wait_while(lock(&post.arrivals), called);
        drop(guard.unwrap_or_else(PoisonError::into_inner));
    }

    /// No vCPU waits for `core`, or some do.
    pub(super) fn set_free(&self, core: usize, free: bool) {
        let flag = &self.cores[core].free;
        if flag.load(Ordering::Relaxed) != free {
            flag.store(free, Ordering::Release);
        }
    }

    /// The crowded `core` asks another one whether it is idle; a different one at
    /// each `attempt`.
    pub(super) fn ask(&self, core: usize, attempt: usize) {
        let cores = self.cores.len();
        let others = (0..cores).map(|other| (attempt % cores + other) % cores);
        for other in others.filter(|&other| other != core) {
            let post = &self.cores[other];
            let free = post.free.load(Ordering::Acquire)
                && post
                    .asked_by
                    .compare_exchange(NOBODY, core, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok();
            if free {
                return self.call(other);
            }
        }
    }

    /// Answers who asked `core`.
    pub(super) fn answer(&self, core: usize, idle: bool) {
        let asker = self.cores[core].asked_by.swap(NOBODY, Ordering::AcqRel);
        if asker != NOBODY && idle {
            let post = &self.cores[asker];
            post.taker.store(core, Ordering::Release);
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

    fn call(&self, core: usize) {
        let post = &self.cores[core];
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
