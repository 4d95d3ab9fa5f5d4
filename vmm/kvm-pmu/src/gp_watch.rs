//! The watch on the guest's #GP handler, through which RDPMC is emulated: by an OUT in
//! the place of its first instruction, or by a breakpoint on it.

mod stop;

use std::sync::Arc;
use std::time::Duration;

use kvm_bindings::{kvm_regs, kvm_sregs};
use pmu_virt::{Ticks, Tsc};

use crate::error::{VcpuError, VcpuId};
use crate::memory::GuestBytes;
use crate::observe::Armed;
use crate::sys::KickTarget;
use crate::thread::earliest;
use crate::time;
use crate::trap::{CpuContext, Displaced, GP_VECTOR, Gate, PatchRefusal, patch_site};
use crate::vcpu::KvmVcpu;
use crate::vm_traps::{TrapMode, VcpuTraps, VmTraps};

pub(crate) use stop::{Onward, OutStop};

/// LIDT, and stores to a gate, have no exit: while a counter may be read, the handler is
/// looked at again before an entry when the last look is so old.
const LOOK: Duration = Duration::from_millis(10);
/// And a guest that does not exit is kicked for a look after so long. (Where debug
/// registers are ours it is kicked more often, for these.)
const KICK: Duration = Duration::from_millis(100);

/// How the handler is looked at.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Look {
    /// Instructions are counted one by one: a patch would be one of them.
    pub(crate) stepped: bool,
    /// A way through page tables that was walked less than so long ago is trusted.
    pub(crate) walked: Ticks,
    /// Where it cannot be watched for the moment, when it is looked at again.
    pub(crate) pause: Ticks,
}

/// Whether the handler was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Looked {
    /// It was: [`GpWatch::breakpoint`] is where one has to be.
    Now,
    /// Nothing can be seen of it, or nothing is to be.
    NotNow,
}

/// Where the #GP handler of one vCPU is, and how it is watched.
#[derive(Debug)]
pub(crate) struct GpWatch {
    gate: Option<Gate>,
    found: Option<Found>,
    reported_full: bool,
    warned_full: bool,
    traps: VcpuTraps,
    armed: Armed,
    /// What the handler begins with, where an OUT stands in for it.
    displaced: Option<Displaced>,
    /// A store of this vCPU's to the handler's page is to take place at its next entry.
    storing: bool,
    /// When the handler is to be looked at again, for a reason of its own.
    look_at: Option<Tsc>,
    /// When it was looked at last.
    looked: Tsc,
    /// [`LOOK`].
    look: Ticks,
    /// [`KICK`].
    kick: Ticks,
    /// Guest-physical address of the last handler that was found, of whichever kernel.
    home: Option<u64>,
}

/// How the gate was found. A look at 16 bytes then shows whether it has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found {
    /// IDTR, CR0, CR3, CR4 and EFER.
    through: (u64, u16, [u64; 4]),
    /// Guest-physical address of the descriptor.
    at: u64,
    descriptor: [u8; 16],
    /// When: page tables may change without a trace.
    tsc: Tsc,
}

impl Found {
    fn new(context: &CpuContext<'_>) -> Option<Self> {
        let size: u64 = if context.long_mode() { 16 } else { 8 };
        let linear = context
            .sregs
            .idt
            .base
            .wrapping_add(size * u64::from(GP_VECTOR));
        let at = context.physical(linear)?;
        Some(Self {
            through: Self::through(context.sregs),
            at,
            descriptor: Self::descriptor(context, at)?,
            tsc: time::now(),
        })
    }

    fn through(sregs: &kvm_sregs) -> (u64, u16, [u64; 4]) {
        let roots = [sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer];
        (sregs.idt.base, sregs.idt.limit, roots)
    }

    fn descriptor(context: &CpuContext<'_>, at: u64) -> Option<[u8; 16]> {
        context.memory.array(at)
    }

    fn still_holds(&self, context: &CpuContext<'_>, fresh_for: Ticks) -> bool {
        time::now() - self.tsc < fresh_for
            && self.through == Self::through(context.sregs)
            && Self::descriptor(context, self.at) == Some(self.descriptor)
    }
}

impl GpWatch {
    pub(crate) fn new(traps: Arc<VmTraps>, vcpu: VcpuId, tsc_khz: u32) -> Self {
        Self {
            gate: None,
            found: None,
            reported_full: false,
            warned_full: false,
            traps: VcpuTraps::new(traps, vcpu),
            armed: Armed::Nothing,
            displaced: None,
            storing: false,
            look_at: None,
            looked: Tsc::default(),
            look: Ticks::of(LOOK, tsc_khz),
            kick: Ticks::of(KICK, tsc_khz),
            home: None,
        }
    }

    /// Whether this vCPU's PMU is one that may be read. A guest programs a counter on one
    /// vCPU, and may read it, and any other, on all of them.
    #[inline]
    pub(crate) fn programmed(&mut self, programmed: bool) {
        self.traps.programmed(programmed);
    }

    /// Whether the handler is to be watched, or is.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.gate.is_some() || self.traps.vm().is_read()
    }

    pub(crate) fn vm(&self) -> &VmTraps {
        self.traps.vm()
    }

    /// The guest could not do a store: opens `page`, or all that are protected if it is
    /// not known. True if the store can take place now, at the next entry.
    pub(crate) fn written(&mut self, page: Option<u64>) -> bool {
        self.storing = self.traps.vm().written(page);
        self.storing
    }

    /// The vCPU goes into its `KVM_RUN`; false if [`GpWatch::arm`] is due before.
    #[inline]
    pub(crate) fn enter(&mut self, thread: KickTarget) -> bool {
        if self.traps.enter(thread) {
            return true;
        }
        if !self.is_on() {
            // Nothing to look at.
            self.traps.unwatch();
        }
        false
    }

    /// The vCPU is outside of its `KVM_RUN`. True if handlers were patched or
    /// restored meanwhile.
    #[inline]
    pub(crate) fn leave(&mut self) -> bool {
        self.traps.leave();
        self.storing = false;
        self.traps.has_news()
    }

    /// Whether handlers were patched or restored since this vCPU looked last.
    pub(crate) fn has_news(&self) -> bool {
        self.traps.has_news()
    }

    /// Finds the #GP handler through IDTR and decides how it is watched. It is patched
    /// here; a breakpoint is for the caller to set, who has the debug registers.
    pub(crate) fn arm(
        &mut self,
        vcpu: &KvmVcpu,
        memory: &dyn GuestBytes,
        look: Look,
    ) -> Result<Looked, VcpuError> {
        // Who changes a patch waits for all that are inside.
        self.traps.leave();
        self.looked = time::now();
        if self.traps.mode() == TrapMode::None {
            return Ok(Looked::NotNow);
        }
        if vcpu.in_smm() {
            // Its registers are not the guest's, which goes on without an exit when it
            // leaves SMM: the handler is watched as it was until then.
            self.traps.take_in();
            self.look_at = Some(time::now() + look.pause);
            return Ok(Looked::NotNow);
        }
        let sregs = vcpu.get_sregs()?;
        let context = CpuContext {
            regs: &kvm_regs::default(),
            sregs: &sregs,
            memory,
        };
        if self
            .found
            .is_some_and(|found| found.still_holds(&context, look.walked))
            && !self.traps.has_news()
            && self.look_at.is_none()
            && !(look.stepped && self.armed == Armed::Patch)
        {
            return Ok(Looked::Now);
        }
        let regs = vcpu.get_regs()?;
        let context = CpuContext {
            regs: &regs,
            ..context
        };
        let gate = context.gate(GP_VECTOR);
        self.found = Found::new(&context);
        if gate != self.gate {
            log::debug!("{}: #GP handler at {gate:x?}", vcpu.id());
            self.gate = gate;
        }
        if let Some(at) = gate.and_then(|gate| context.physical(gate.handler))
            && let Some(before) = self.home.replace(at).filter(|before| *before != at)
        {
            self.traps.abandon(before);
        }
        self.choose(&context, look);
        Ok(Looked::Now)
    }

    /// Has the handler patched, if it can be, and decides how it is watched.
    #[cold]
    fn choose(&mut self, context: &CpuContext<'_>, look: Look) {
        let mode = self.traps.mode();
        self.look_at = None;
        self.displaced = None;
        self.armed = Armed::Nothing;
        let Some(gate) = self.gate else {
            self.traps.unwatch();
            return;
        };
        if mode == TrapMode::Breakpoint {
            self.traps.take_in();
            self.armed = Armed::Breakpoint(None);
            return;
        }
        if look.stepped {
            self.traps.vm().give_up(PatchRefusal::Stepped);
        }
        let site = patch_site(context, &gate);
        if site.is_err() {
            self.traps.unwatch();
        }
        let patched = site.and_then(|(at, displaced)| {
            if self.storing {
                self.traps.unwatch();
                return Err(PatchRefusal::JustWritten);
            }
            self.traps.watch(at, displaced)?;
            Ok(displaced)
        });
        match patched {
            Ok(displaced) => {
                self.displaced = Some(displaced);
                self.armed = Armed::Patch;
            }
            Err(reason) => {
                if reason == PatchRefusal::JustWritten {
                    self.look_at = Some(time::now() + look.pause);
                } else {
                    self.traps.log(reason);
                }
                if mode == TrapMode::Auto {
                    self.armed = Armed::Breakpoint(Some(reason));
                }
            }
        }
    }

    /// How the handler is watched.
    pub(crate) fn armed(&self) -> Armed {
        self.armed
    }

    /// Whether it is time for [`GpWatch::arm`], without a write of the guest's.
    pub(crate) fn is_due(&self, stepped: bool) -> bool {
        self.look_at.is_some_and(|at| at <= time::now())
            || stepped && self.armed == Armed::Patch
            || self.traps.vm().is_read() && time::now() - self.looked >= self.look
    }

    /// For how long a walk is trusted where nothing but time has passed.
    pub(crate) fn walk_holds(&self) -> Ticks {
        self.kick
    }

    /// Whether no counter can be read any more, and the watch is to end: the machine was
    /// reset.
    pub(crate) fn is_over(&self) -> bool {
        self.gate.is_some() && !self.traps.vm().is_read()
    }

    /// The handler is to be looked at before the next entry, if it is watched and the
    /// last look is `fresh_for` old: a PMI's handler is likely to read counters.
    pub(crate) fn look_soon(&mut self, fresh_for: Ticks) {
        let old = |found: Found| time::now() - found.tsc >= fresh_for;
        if self.gate.is_some() && self.found.is_none_or(old) {
            self.look_at = Some(Tsc::default());
        }
    }

    /// When something is to be done at the latest, if the guest does not exit before.
    pub(crate) fn deadline(&self) -> Option<Tsc> {
        let look = || self.looked + self.kick;
        let look = self.traps.vm().is_read().then(look);
        earliest(self.look_at, look)
    }

    /// Ends the watch, until the guest programs a counter.
    pub(crate) fn end(&mut self) {
        self.traps.unwatch();
        self.gate = None;
        self.found = None;
        self.displaced = None;
        self.look_at = None;
        self.armed = Armed::Nothing;
    }

    /// True if the guest has just taken the last debug register: so many of our breakpoints
    /// are `unplaced`.
    pub(crate) fn is_news(&mut self, unplaced: usize) -> bool {
        let full = unplaced > 0;
        // Always replaced: a guest that gives one back and takes it again is news again.
        let reported = std::mem::replace(&mut self.reported_full, full);
        full && !reported
    }

    /// Logs that the guest has taken the last debug register. Once: a guest that takes and
    /// leaves the last one in turn must not fill the host's log.
    pub(crate) fn warn_full(&mut self, vcpu: VcpuId) {
        if !std::mem::replace(&mut self.warned_full, true) {
            log::warn!("{vcpu}: the guest uses all four debug registers, its RDPMC will fault");
        }
    }

    /// The one breakpoint of the watch, if that is how it watches.
    pub(crate) fn breakpoint(&self) -> Option<u64> {
        match self.armed {
            Armed::Breakpoint(_) => self.gate.map(|gate| gate.handler),
            Armed::Patch | Armed::Nothing => None,
        }
    }

    /// The watched handler's gate.
    pub(crate) fn gate(&self) -> Option<Gate> {
        self.gate
    }
}
