//! The exchange of vCPUs between cores: a crowded core asks one with fewer runnable
//! vCPUs, and hands a vCPU over.
//!
//! A core does not notice when the one vCPU that it runs halts, nor when the halted
//! vCPU in which it sleeps goes on. So the load that it has set may be old, and a
//! crowded core asks before it hands a vCPU over.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::time::Duration;

use pmu_virt::OtherCores;
use vmm_control::WakeCore;

use crate::kvm::VcpuId;
use crate::sync::lock;
use crate::sys::KickTarget;
use crate::vcpu::Vcpu;

/// Stands for no core where the number of a core is stored.
const NOBODY: usize = usize::MAX;

/// What the cores of a machine share.
#[derive(Debug)]
pub struct CoreExchange {
    cores: Vec<CorePart>,
}

/// What other cores see of a core.
#[derive(Debug)]
struct CorePart {
    /// The core has something else to do than to run its vCPU.
    attention: AtomicBool,
    target: OnceLock<KickTarget>,
    arrivals: Mutex<Vec<Vcpu>>,
    /// Wakes the core while it has no vCPU to run.
    wakeup: Condvar,
    /// Its runnable vCPUs when it last looked.
    load: AtomicUsize,
    /// The crowded core that asks for the present load.
    asked_by: AtomicUsize,
    /// The core that takes a vCPU from this one.
    taker: AtomicUsize,
    /// Counters that it has for what a vCPU relies on, when it last looked.
    room: AtomicUsize,
    /// vCPUs, by bit, for whose named events it has none.
    refuses: AtomicU64,
}

/// The cores of an exchange beside one of them.
#[derive(Debug)]
pub(super) struct Others {
    pub(super) exchange: Arc<CoreExchange>,
    pub(super) core: usize,
}

impl OtherCores for Others {
    fn most_room(&self) -> usize {
        self.exchange.room_elsewhere(self.core)
    }
}

impl CoreExchange {
    /// For `cores` cores.
    #[must_use]
    pub fn new(cores: usize) -> Self {
        let part = || CorePart {
            attention: AtomicBool::new(false),
            target: OnceLock::new(),
            arrivals: Mutex::default(),
            wakeup: Condvar::new(),
            load: AtomicUsize::new(usize::MAX),
            asked_by: AtomicUsize::new(NOBODY),
            taker: AtomicUsize::new(NOBODY),
            room: AtomicUsize::new(0),
            refuses: AtomicU64::new(0),
        };
        Self {
            cores: std::iter::repeat_with(part).take(cores).collect(),
        }
    }

    /// Has every core look at what there is to do.
    pub fn call_all(&self) {
        (0..self.cores.len()).for_each(|core| self.call(core));
    }

    /// `target` is the thread of `core`.
    pub(super) fn bind_thread(&self, core: usize, target: KickTarget) {
        let _ = self.cores[core].target.set(target);
    }

    /// Set while `core` has something else to do than to run its vCPU.
    pub(super) fn attention(&self, core: usize) -> &AtomicBool {
        &self.cores[core].attention
    }

    /// Takes the vCPUs that were handed to `core`, and clears its attention.
    pub(super) fn collect(&self, core: usize) -> Vec<Vcpu> {
        let part = &self.cores[core];
        if !part.attention.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        std::mem::take(&mut *lock(&part.arrivals))
    }

    /// Waits until `core` is called, for `most` at the longest. It has no vCPU to run.
    pub(super) fn wait(&self, core: usize, most: Option<Duration>) {
        let part = &self.cores[core];
        let called = |_: &mut Vec<Vcpu>| !part.attention.load(Ordering::Acquire);
        let guard = lock(&part.arrivals);
        match most {
            Some(most) => drop(part.wakeup.wait_timeout_while(guard, most, called)),
            None => drop(part.wakeup.wait_while(guard, called)),
        }
    }

    /// `core` has `load` runnable vCPUs.
    pub(super) fn set_load(&self, core: usize, load: usize) {
        let known = &self.cores[core].load;
        if known.load(Ordering::Relaxed) != load {
            known.store(load, Ordering::Release);
        }
    }

    fn load(&self, core: usize) -> usize {
        self.cores[core].load.load(Ordering::Acquire)
    }

    /// The crowded `core` asks another core to take a vCPU. Each `attempt` begins with
    /// a different one.
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

    /// `core` has `room` counters for what a vCPU relies on, and none for the vCPUs of
    /// `refuses`, by bit.
    pub(super) fn set_room(&self, core: usize, room: usize, refuses: u64) {
        self.cores[core].room.store(room, Ordering::Relaxed);
        self.cores[core].refuses.store(refuses, Ordering::Relaxed);
    }

    /// Whether `core` has no room for the events that the guest of `vcpu` has named.
    pub(super) fn refuses(&self, core: usize, vcpu: VcpuId) -> bool {
        let refuses = self.cores[core].refuses.load(Ordering::Relaxed);
        let bit = 1_u64.checked_shl(vcpu.0);
        bit.is_some_and(|bit| refuses & bit != 0)
    }

    fn room(&self, core: usize) -> usize {
        self.cores[core].room.load(Ordering::Relaxed)
    }

    /// The most room that a core other than `core` has.
    fn room_elsewhere(&self, core: usize) -> usize {
        let others = (0..self.cores.len()).filter(|&other| other != core);
        others.map(|other| self.room(other)).max().unwrap_or(0)
    }

    /// Of the cores other than `core` that have this room for `vcpu` the one with the
    /// fewest runnable vCPUs.
    pub(super) fn with_room(&self, core: usize, vcpu: VcpuId, needs: usize) -> Option<usize> {
        let others = (0..self.cores.len()).filter(|&other| other != core);
        let with_room =
            others.filter(|&other| self.room(other) >= needs && !self.refuses(other, vcpu));
        with_room.min_by_key(|&other| self.load(other))
    }

    /// Answers the core that has asked `core`, which has just set its load and room.
    pub(super) fn answer(&self, core: usize) {
        let asker = self.cores[core].asked_by.swap(NOBODY, Ordering::AcqRel);
        if asker != NOBODY && takes(self.load(asker), self.load(core)) {
            self.cores[asker].taker.store(core, Ordering::Release);
            self.call(asker);
        }
    }

    /// The core that takes a vCPU of `core` now, and its room.
    pub(super) fn taker(&self, core: usize) -> Option<(usize, usize)> {
        let taker = self.cores[core].taker.swap(NOBODY, Ordering::AcqRel);
        (taker != NOBODY).then(|| (taker, self.room(taker)))
    }

    /// Hands `vcpu` to `core`.
    pub(super) fn hand_over(&self, core: usize, vcpu: Vcpu) {
        lock(&self.cores[core].arrivals).push(vcpu);
        self.call(core);
    }

    /// The vCPUs that were handed over and never collected, once all cores have ended.
    pub(crate) fn leftovers(&self) -> Vec<Vcpu> {
        let parts = self.cores.iter();
        parts
            .flat_map(|part| std::mem::take(&mut *lock(&part.arrivals)))
            .collect()
    }

    /// Has `core` look at what there is to do. A `core` that does not exist is ignored.
    pub(crate) fn call(&self, core: usize) {
        let Some(part) = self.cores.get(core) else {
            return;
        };
        {
            // Under the lock, or it could come after the core has looked and before it
            // waits.
            let _waiting = lock(&part.arrivals);
            part.attention.store(true, Ordering::Release);
            part.wakeup.notify_all();
        }
        if let Some(target) = part.target.get() {
            target.kick();
        }
    }
}

impl WakeCore for CoreExchange {
    fn wake(&self, core: usize) {
        self.call(core);
    }
}

/// Whether a core with load `to` takes a vCPU from one with load `from`. The difference
/// is two at least, so it does not go back.
fn takes(from: usize, to: usize) -> bool {
    to.saturating_add(2) <= from
}

/// Whether a core might take a vCPU whose load was last set to `to`: its one runnable
/// vCPU may have halted since.
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
        // A core that has not set a load yet.
        check(9, usize::MAX, false, false);
    }

    #[test]
    fn asking_and_answering() {
        let exchange = CoreExchange::new(3);
        for (core, load) in [(0, 3), (1, 3), (2, 1)] {
            exchange.set_load(core, load);
        }
        exchange.ask(0, 0);
        // The second question comes before the answer to the first one.
        exchange.ask(1, 0);
        assert!(exchange.attention(2).load(Ordering::Acquire));
        assert!(!exchange.attention(1).load(Ordering::Acquire));
        exchange.set_room(2, 3, 0);
        exchange.answer(2);
        assert_eq!((exchange.taker(0), exchange.taker(1)), (Some((2, 3)), None));
        assert_eq!(exchange.taker(0), None, "an answer serves once");
        // In the meantime core 2 has got a second vCPU.
        exchange.ask(1, 1);
        exchange.set_load(2, 2);
        exchange.answer(2);
        assert_eq!(exchange.taker(1), None);
    }

    #[test]
    fn a_core_with_room_is_the_one_with_the_least_to_do() {
        let exchange = CoreExchange::new(4);
        for (core, (load, room)) in [(9, 9), (3, 2), (2, 1), (4, 2)].into_iter().enumerate() {
            exchange.set_load(core, load);
            exchange.set_room(core, room, if core == 2 { 1 << 5 } else { 0 });
        }
        let check = |vcpu, needs, expected| {
            assert_eq!(exchange.with_room(0, VcpuId(vcpu), needs), expected);
        };
        check(0, 0, Some(2));
        check(0, 1, Some(2));
        check(0, 2, Some(1));
        check(0, 3, None);
        // Its guest has named what core 2 cannot count beside its own contexts.
        check(5, 0, Some(1));
        assert_eq!(exchange.room_elsewhere(0), 2, "its own does not matter");
        assert_eq!(exchange.room_elsewhere(1), 9);
        assert_eq!(CoreExchange::new(1).room_elsewhere(0), 0);
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
