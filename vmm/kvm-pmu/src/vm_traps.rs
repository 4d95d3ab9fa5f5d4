//! How RDPMC is trapped in one VM, and the #GP handlers of its vCPUs that are patched.
//!
//! A byte of code is changed only while no vCPU of the VM is in its `KVM_RUN`: every
//! KVM has some way of meeting half of a change. So each vCPU says before an entry
//! that it is inside, and after its exit that it is not, in a word of its own; who
//! changes something says so in a word that all look at, kicks those that are inside,
//! and waits until none is. That costs an entry a store and a load.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::yield_now;
use std::time::{Duration, Instant};

use crate::error::VcpuId;
use crate::memory::GuestBytes;
use crate::protect::ProtectPages;
use crate::sys::KickTarget;
use crate::trap::{Displaced, LONGEST, OUT, Patch, PatchRefusal, Patches, page_of};

/// How RDPMC is trapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TrapMode {
    /// By a patch of the guest's #GP handler, and where that cannot be by a breakpoint.
    #[default]
    Auto,
    /// By a patch; where that cannot be, RDPMC raises #GP.
    Patch,
    /// By a breakpoint, which takes the guest's debug registers.
    Breakpoint,
    /// Not at all: RDPMC raises #GP.
    None,
}

/// How RDPMC is to be trapped, and what speaks against a patch on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TrapPlan {
    /// What was asked for.
    pub mode: TrapMode,
    /// Why handlers are not patched here.
    pub obstacle: Option<PatchRefusal>,
}

impl TrapPlan {
    /// Whether a handler may come to be patched, for which memory has to be mapped
    /// twice.
    #[must_use]
    pub fn may_patch(&self) -> bool {
        matches!(self.mode, TrapMode::Auto | TrapMode::Patch) && self.obstacle.is_none()
    }
}

/// After so many writes to its handlers' pages a guest is served otherwise.
const MOST_WRITES: u8 = 8;
/// And after so many patches within a [`PATCH_SPAN`]: each protects a page anew, for
/// which the host interrupts all CPUs that run the process. A kernel that boots needs
/// one or two.
const MOST_PATCHES: u8 = 64;
const PATCH_SPAN: Duration = Duration::from_secs(60);
/// A page that was written to is left alone for so long: the next write is near.
pub(crate) const QUIET: Duration = Duration::from_millis(1);
/// A vCPU that has not left its `KVM_RUN` by then is kicked again.
const KICK_AGAIN: Duration = Duration::from_millis(1);
/// Handlers of earlier kernels that are remembered: of two at a time there are few.
const MOST_ABANDONED: usize = 8;
/// Pages of handlers that are remembered because the host does not protect them: likewise.
const MOST_REFUSED: usize = 8;
/// Different reasons that are logged.
const MOST_REASONS: usize = 8;

/// How RDPMC is trapped in one VM: shared by the PMUs of all its vCPUs.
#[derive(Debug)]
pub struct VmTraps {
    /// The process whose VM it is. A child of it has the same memory, where it shares that, but
    /// none of the vCPUs: its ioctls fail, and none of them ever leaves its `KVM_RUN` there.
    process: u32,
    mode: TrapMode,
    memory: Option<Arc<dyn ProtectPages>>,
    /// Changes so far, times two, and 1 while one is being made.
    changes: AtomicU64,
    /// The guest has programmed a counter, and may read any on any vCPU from then on.
    read: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    patches: Patches,
    vcpus: Vec<Arc<Inside>>,
    /// Why nothing is patched any more, or never was.
    given_up: Option<PatchRefusal>,
    writes: u8,
    last_write: Option<Instant>,
    /// Patches since then, and tries, within one [`PATCH_SPAN`].
    patched: (Option<Instant>, u8),
    /// Handlers that are not patched, each since this vCPU has left it for another one.
    abandoned: Vec<(u64, VcpuId)>,
    /// Pages that could not be protected, why, and since when: each try stops all vCPUs.
    refused: Vec<(u64, PatchRefusal, Instant)>,
    logged: Vec<PatchRefusal>,
    /// That one is patched was logged.
    told: bool,
}

/// What the others have to know of one vCPU.
#[derive(Debug, Default)]
struct Inside {
    /// The thread that has it in its `KVM_RUN`, or 0.
    thread: AtomicI32,
    /// Its PMU is programmed.
    programmed: AtomicBool,
}

impl VmTraps {
    /// Of a VM with `memory`, if its pages can be protected.
    #[must_use]
    pub fn new(plan: TrapPlan, memory: Option<Arc<dyn ProtectPages>>) -> Arc<Self> {
        let missing = memory.is_none().then_some(PatchRefusal::NoProtection);
        Arc::new(Self {
            process: std::process::id(),
            mode: plan.mode,
            memory,
            changes: AtomicU64::new(0),
            read: AtomicBool::new(false),
            state: Mutex::new(State {
                given_up: plan.obstacle.or(missing),
                ..State::default()
            }),
        })
    }

    /// Of a VM whose guest is left as it is: RDPMC is caught by a breakpoint.
    #[must_use]
    pub fn by_breakpoint() -> Arc<Self> {
        let plan = TrapPlan {
            mode: TrapMode::Breakpoint,
            obstacle: None,
        };
        Self::new(plan, None)
    }

    /// Takes every patch back. The next look at a handler patches it again, so this
    /// is for a guest that does not run: before its memory is saved. A child of the process
    /// whose VM it is changes nothing: the guest runs on there.
    pub fn restore(&self) {
        if self.is_of_a_parent() {
            return;
        }
        let mut state = self.lock();
        // That it is patched again is not the guest's doing.
        state.patched = (None, 0);
        self.take(&mut state, |_| true);
    }

    /// Reads guest memory as the guest wrote it, patches left out; false where some
    /// of it is no memory.
    pub fn read(&self, memory: &dyn GuestBytes, address: u64, buffer: &mut [u8]) -> bool {
        let state = self.lock();
        let read = memory.read(address, buffer);
        state.patches.hide(address, buffer);
        read
    }

    /// Whether this process is a fork of the one whose VM it is.
    fn is_of_a_parent(&self) -> bool {
        std::process::id() != self.process
    }

    /// Whether the handler at guest-physical address `at` is patched.
    #[cfg(test)]
    fn is_patched(&self, at: u64) -> bool {
        self.lock().patches.has(at)
    }

    /// Whether an RDPMC may come, on whichever vCPU, that is to read a value.
    #[inline]
    pub(crate) fn is_read(&self) -> bool {
        self.read.load(Ordering::Relaxed)
    }

    /// A vCPU's PMU was programmed, or is as after a reset. That some vCPU has gone meanwhile
    /// changes nothing: what was programmed on it may be read on the others.
    #[cold]
    fn programmed(&self, vcpu: &Inside, programmed: bool) {
        let mut state = self.lock();
        vcpu.programmed.store(programmed, Ordering::Relaxed);
        let mut vcpus = state.vcpus.iter();
        let read = vcpus.any(|vcpu| vcpu.programmed.load(Ordering::Relaxed));
        if read != self.is_read() {
            self.read.store(read, Ordering::Relaxed);
            if !read {
                // After a reset a kernel may be where an earlier one was.
                state.abandoned.clear();
            }
            // Those that are inside have a handler that nobody watches.
            self.change(&mut state, |_| ());
        }
    }

    /// Nothing is patched any more in this VM.
    pub(crate) fn give_up(&self, reason: PatchRefusal) {
        self.give_up_locked(&mut self.lock(), reason);
    }

    fn give_up_locked(&self, state: &mut State, reason: PatchRefusal) {
        if state.given_up.is_none() {
            state.given_up = Some(reason);
            self.take(state, |_| true);
        }
    }

    /// Does a store of the guest's that KVM could not do, because there is a patch in
    /// its page, or was one a moment ago; false if it is none of ours. To be called
    /// outside of `KVM_RUN`.
    pub(crate) fn store(&self, address: u64, data: &[u8]) -> bool {
        if self.changes.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let Some(memory) = &self.memory else {
            return false;
        };
        let mut state = self.lock();
        let page = page_of(address);
        let mut data = data.to_vec();
        // An OR of other bytes has read the patch, and stores it again.
        state.patches.hide(address, &mut data);
        self.open(&mut state, Some(page));
        // What cannot be protected was never patched.
        memory.protect(page, true).is_ok() && memory.bytes().write(address, &data)
    }

    /// The guest could not store to `page`, or to one that is not known: opens it if
    /// that is because of a patch. To be called outside of `KVM_RUN`.
    pub(crate) fn written(&self, page: Option<u64>) -> bool {
        self.open(&mut self.lock(), page)
    }

    fn open(&self, state: &mut State, page: Option<u64>) -> bool {
        let concerned = match page {
            Some(page) => state.patches.on_page(page),
            None => !state.patches.is_empty(),
        };
        if concerned {
            state.writes += 1;
            state.last_write = Some(Instant::now());
            let all = page.is_none() || state.writes >= MOST_WRITES;
            if state.writes >= MOST_WRITES {
                state.given_up = Some(PatchRefusal::Written(state.writes));
            }
            self.take(state, |patch| all || page == Some(patch.page()));
        }
        concerned
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Plain data, which a panic elsewhere does not spoil.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has every vCPU leave its `KVM_RUN`, and keeps them out during `act`.
    fn change<R>(&self, state: &mut State, act: impl FnOnce(&mut State) -> R) -> R {
        let changes = self.changes.load(Ordering::Relaxed);
        self.changes.store(changes | 1, Ordering::SeqCst);
        let mut kick_at = Instant::now();
        while state.vcpus.iter().any(|vcpu| vcpu.thread().is_some()) {
            if Instant::now() >= kick_at {
                let threads = state.vcpus.iter().filter_map(|vcpu| vcpu.thread());
                threads.for_each(KickTarget::kick);
                kick_at += KICK_AGAIN;
            }
            yield_now();
        }
        let result = act(state);
        self.changes.store(changes + 2, Ordering::SeqCst);
        result
    }

    /// Takes back the patches that `wanted` picks, and opens their pages.
    fn take(&self, state: &mut State, wanted: impl Fn(&Patch) -> bool) {
        let Some(memory) = &self.memory else { return };
        if state.patches.is_empty() {
            return;
        }
        self.change(state, |state| {
            for patch in state.patches.take(wanted) {
                let mut byte = [0];
                // Unless somebody on this side has written over it.
                if memory.bytes().read(patch.at, &mut byte) && byte == [OUT] {
                    memory.bytes().write(patch.at, &[patch.displaced.first]);
                }
                if !state.patches.on_page(patch.page())
                    && let Err(reason) = memory.protect(patch.page(), true)
                {
                    log::warn!("a page of the guest's stays read-only: {reason}");
                }
            }
        });
    }

    /// Puts an OUT at `at`.
    fn patch(
        &self,
        state: &mut State,
        (at, displaced): (u64, Displaced),
        vcpu: VcpuId,
    ) -> Result<(), PatchRefusal> {
        let memory = self.memory.as_ref().ok_or(PatchRefusal::NoProtection)?;
        let page = page_of(at);
        if let Some(reason) = state.refusal(page) {
            return Err(reason);
        }
        // What is no plain memory, or not shared, is known before vCPUs are stopped for it. Other
        // memory can only be tried.
        if !state.patches.on_page(page) {
            memory.protect(page, true)?;
        }
        let patched = self.change(state, |state| {
            // Another vCPU may have changed it since it was looked at. A patch that
            // is there already is an old one.
            let mut bytes = [0; LONGEST];
            if !memory.bytes().read(at, &mut bytes) {
                return Err(PatchRefusal::NotRam);
            }
            let there = Displaced::of(bytes).or(Displaced::behind_out(bytes));
            if there != Some(displaced) {
                return Err(PatchRefusal::Instruction(bytes));
            }
            state.patched.1 += 1;
            let protected = memory.protect(page, false);
            protected.inspect_err(|reason| state.refuse(page, *reason))?;
            memory.bytes().write(at, &[OUT]);
            state.patches.add(at, displaced, vcpu);
            Ok(())
        });
        if patched.is_err() {
            // No news: two vCPUs that try in turn would throw each other out for ever.
            self.changes.fetch_sub(2, Ordering::SeqCst);
        } else if !std::mem::replace(&mut state.told, true) {
            log::info!(
                "{vcpu}: the guest's #GP handler at {at:#x} is patched: RDPMC is trapped there"
            );
        }
        patched
    }
}

impl State {
    /// Why `page` could not be protected. After a [`PATCH_SPAN`] it may be other memory.
    fn refusal(&mut self, page: u64) -> Option<PatchRefusal> {
        self.refused
            .retain(|(_, _, since)| since.elapsed() < PATCH_SPAN);
        let refused = self.refused.iter().find(|(at, ..)| *at == page);
        refused.map(|(_, reason, _)| *reason)
    }

    fn refuse(&mut self, page: u64, reason: PatchRefusal) {
        if self.refused.len() >= MOST_REFUSED {
            self.refused.remove(0);
        }
        self.refused.push((page, reason, Instant::now()));
    }

    /// Whether handlers were patched as often as may be. Looked at before each patch.
    fn is_restless(&mut self) -> bool {
        let (since, _) = self.patched;
        if since.is_none_or(|since| since.elapsed() >= PATCH_SPAN) {
            self.patched = (Some(Instant::now()), 0);
        }
        self.patched.1 >= MOST_PATCHES
    }
}

impl Inside {
    fn thread(&self) -> Option<KickTarget> {
        match self.thread.load(Ordering::SeqCst) {
            0 => None,
            thread => Some(KickTarget::of_this_process(thread)),
        }
    }
}

/// One vCPU's part in its VM's traps.
#[derive(Debug)]
pub(crate) struct VcpuTraps {
    vm: Arc<VmTraps>,
    vcpu: VcpuId,
    inside: Arc<Inside>,
    /// The changes that this vCPU has taken in.
    seen: u64,
}

impl VcpuTraps {
    pub(crate) fn new(vm: Arc<VmTraps>, vcpu: VcpuId) -> Self {
        let inside = Arc::new(Inside::default());
        vm.lock().vcpus.push(inside.clone());
        Self {
            seen: vm.changes.load(Ordering::Relaxed),
            vm,
            vcpu,
            inside,
        }
    }

    pub(crate) fn vm(&self) -> &VmTraps {
        &self.vm
    }

    pub(crate) fn mode(&self) -> TrapMode {
        self.vm.mode
    }

    /// The vCPU goes into its `KVM_RUN` on `thread`. False if something has changed
    /// since it called [`VcpuTraps::watch`] or [`VcpuTraps::unwatch`]: it is still
    /// outside.
    #[inline]
    pub(crate) fn enter(&self, thread: KickTarget) -> bool {
        self.inside.thread.store(thread.thread(), Ordering::SeqCst);
        if self.vm.changes.load(Ordering::SeqCst) == self.seen {
            return true;
        }
        self.leave();
        false
    }

    /// The vCPU is outside of its `KVM_RUN`.
    #[inline]
    pub(crate) fn leave(&self) {
        self.inside.thread.store(0, Ordering::Release);
    }

    /// Whether this vCPU's PMU is programmed. It is outside of its `KVM_RUN`.
    #[inline]
    pub(crate) fn programmed(&self, programmed: bool) {
        let known = self.inside.programmed.load(Ordering::Relaxed);
        if programmed != known && self.vm.mode != TrapMode::None {
            self.leave();
            self.vm.programmed(&self.inside, programmed);
        }
    }

    /// Whether something has changed since the vCPU looked last.
    pub(crate) fn has_news(&self) -> bool {
        self.vm.changes.load(Ordering::Relaxed) != self.seen
    }

    /// Has the handler at guest-physical address `at` patched for this vCPU, and no
    /// other one. The vCPU is outside of `KVM_RUN`.
    pub(crate) fn watch(&mut self, at: u64, displaced: Displaced) -> Result<(), PatchRefusal> {
        let vm = self.vm.clone();
        let mut state = vm.lock();
        let watched = self.watch_locked(&mut state, (at, displaced));
        self.seen = vm.changes.load(Ordering::Relaxed);
        watched
    }

    fn watch_locked(
        &self,
        state: &mut State,
        (at, displaced): (u64, Displaced),
    ) -> Result<(), PatchRefusal> {
        self.leave_others(state, Some(at));
        if let Some(reason) = state.given_up {
            return Err(reason);
        }
        state.abandoned.retain(|by| *by != (at, self.vcpu));
        if state.abandoned.iter().any(|(left, _)| *left == at) {
            return Err(PatchRefusal::Abandoned);
        }
        if state.patches.join(at, self.vcpu) {
            return Ok(());
        }
        if state.last_write.is_some_and(|at| at.elapsed() < QUIET) {
            return Err(PatchRefusal::JustWritten);
        }
        if state.patches.is_full() {
            return Err(PatchRefusal::TooMany);
        }
        if state.is_restless() {
            let reason = PatchRefusal::TooOften(MOST_PATCHES);
            self.vm.give_up_locked(state, reason);
            return Err(reason);
        }
        self.vm.patch(state, (at, displaced), self.vcpu)
    }

    fn leave_others(&self, state: &mut State, but: Option<u64>) {
        if state.patches.leave(self.vcpu, but) {
            self.vm.take(state, Patch::is_unused);
        }
    }

    /// This vCPU has left the handler at `at` for another one. If other vCPUs have it still,
    /// they may be those that a crashed kernel has stopped, and this one runs the kernel that
    /// saves its memory: the guest's own byte comes back. Whoever does run there is served
    /// otherwise, until this vCPU comes back.
    #[cold]
    pub(crate) fn abandon(&self, at: u64) {
        let mut state = self.vm.lock();
        self.leave_others(&mut state, None);
        if !state.patches.has(at) {
            return;
        }
        if state.abandoned.len() >= MOST_ABANDONED {
            state.abandoned.remove(0);
        }
        state.abandoned.push((at, self.vcpu));
        log::debug!("{}: left the #GP handler at {at:#x}", self.vcpu);
        self.vm.take(&mut state, |patch| patch.at == at);
    }

    /// This vCPU needs no patch.
    #[cold]
    pub(crate) fn unwatch(&mut self) {
        let vm = self.vm.clone();
        let mut state = vm.lock();
        self.leave_others(&mut state, None);
        self.seen = vm.changes.load(Ordering::Relaxed);
    }

    /// What has changed concerns no patch of this vCPU's, or is looked at later.
    #[cold]
    pub(crate) fn take_in(&mut self) {
        self.seen = self.vm.changes.load(Ordering::Relaxed);
    }

    /// Logs why this vCPU's handler is not patched, each reason once a VM.
    pub(crate) fn log(&self, reason: PatchRefusal) {
        let mut state = self.vm.lock();
        if state.logged.contains(&reason) || state.logged.len() >= MOST_REASONS {
            return;
        }
        state.logged.push(reason);
        let vcpu = self.vcpu;
        match self.vm.mode {
            TrapMode::Patch => {
                log::warn!("{vcpu}: the #GP handler is not patched, RDPMC will fault: {reason}");
            }
            _ => log::info!("{vcpu}: RDPMC is trapped by a breakpoint: {reason}"),
        }
    }
}

impl Drop for VcpuTraps {
    fn drop(&mut self) {
        // Nor is the lock to be had, if another thread had it at the fork.
        if self.vm.is_of_a_parent() {
            return;
        }
        self.leave();
        self.unwatch();
        let mut state = self.vm.lock();
        state.abandoned.retain(|(_, by)| *by != self.vcpu);
        state.vcpus.retain(|vcpu| !Arc::ptr_eq(vcpu, &self.inside));
    }
}

#[cfg(test)]
mod tests;
