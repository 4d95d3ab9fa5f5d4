//! What a machine does to a processor between its runs: resets, other processors beside it,
//! and looks that change nothing.
use super::Cpu;
use crate::code::CodeChanges;
use crate::paging::walk;
use crate::state::{CR0_CD, CR0_ET, CR0_NW, Seg, Segment, State};
use crate::tlb::Set;

/// Where CS leads after INIT and reset (SDM vol. 3A, 10.1.4).
const RESET_BASE: u64 = 0xffff_0000;
const RESET_SELECTOR: u16 = 0xf000;
const RESET_RIP: u64 = 0xfff0;

impl Cpu {
    /// There are other processors on the same memory. What [`Cpu::take_code_changes`] gives is
    /// to be told to the others ([`Cpu::others_changed`]) before any of them runs.
    pub fn share_memory(&mut self) {
        self.core.code.share();
    }

    /// What others have to know of this processor's code, since this was last asked.
    #[inline]
    pub fn take_code_changes(&mut self) -> CodeChanges {
        self.core.code.take_changes()
    }

    /// What another processor has told.
    pub fn others_changed(&mut self, changes: &CodeChanges) {
        // What is held now may have been decoded after it was written.
        for page in &changes.written {
            self.core.code.written_by_others(*page);
        }
        for page in &changes.held {
            if self.core.code.set_others(*page) {
                self.core.tlb.protect(u64::from(*page) << 12);
            }
        }
        self.drop_written();
    }

    /// From now on PAUSE ends a run with [`VmExit::Paused`](crate::VmExit::Paused), or does not.
    pub fn stop_at_pause(&mut self, stops: bool) {
        self.core.stops_at_pause = stops;
    }

    /// From now on [`VmExit::Window`](crate::VmExit::Window) says when an NMI can be taken.
    pub fn want_nmi_window(&mut self, wants: bool) {
        self.wants_nmi = wants;
    }

    /// CR8, which is a register of the local APIC. A write of the guest's that changes it ends
    /// a run with [`VmExit::Window`](crate::VmExit::Window): interrupts may have become urgent enough.
    pub fn set_cr8(&mut self, value: u8) {
        self.core.state.cr8 = u64::from(value & 15);
    }

    /// The time is `now`, if that is later.
    pub fn pass_to(&mut self, now: u64) {
        let time = &mut self.core.state.time;
        *time = (*time).max(now);
    }

    /// Whether an instruction has begun that waits for an answer, or has had one.
    #[must_use]
    pub fn is_half_done(&self) -> bool {
        self.core.is_half_done()
    }

    /// The registers as INIT leaves them (SDM vol. 3A, table 10-1): x87, SSE, MSRs and the time
    /// stay.
    pub fn init(&mut self) {
        let old = self.state();
        let mut new = State {
            xmm: old.xmm,
            x87: old.x87,
            mxcsr: old.mxcsr,
            msrs: old.msrs,
            time: old.time,
            cr0: CR0_ET | old.cr0 & (CR0_CD | CR0_NW),
            rip: RESET_RIP,
            ..State::default()
        };
        new.r[2] = u64::from(self.core.cpuid.answer(1, 0).eax);
        let cs = Segment {
            selector: RESET_SELECTOR,
            base: RESET_BASE,
            ..new.segment(Seg::Cs)
        };
        new.set_segment(Seg::Cs, cs);
        self.core.halted = false;
        self.set_state(new);
    }

    /// A start-up IPI has come to a processor after INIT: it begins at `vector` × 1000h.
    pub fn start_up(&mut self, vector: u8) {
        let mut state = self.state().clone();
        let cs = Segment {
            selector: u16::from(vector) << 8,
            base: u64::from(vector) << 12,
            ..state.segment(Seg::Cs)
        };
        state.set_segment(Seg::Cs, cs);
        state.rip = 0;
        self.set_state(state);
    }

    /// The guest-physical address of what is mapped at a linear one, whoever may get at it, and
    /// the base-2 logarithm of the page's size, 32 without paging. No A is set by that.
    #[must_use]
    pub fn locate(&self, linear: u64) -> Option<(u64, u32)> {
        // Nothing that is mapped is closed to the kernel under AC.
        let mapped = walk(&self.core.ram, &self.core.rules, linear, Set::OpenRead).ok()?;
        Some((mapped.physical, mapped.page))
    }

    /// The guest-physical address of RAM that an access of the processor's own reaches at a
    /// linear one, as one to a table does; none if a page fault would come of it. No A is set.
    #[must_use]
    pub fn reach(&self, linear: u64, writes: bool) -> Option<u64> {
        let set = if writes {
            Set::KernelWrite
        } else {
            Set::KernelRead
        };
        let mapped = walk(&self.core.ram, &self.core.rules, linear, set).ok()?;
        self.core.ram.offset_of(mapped.physical)?;
        Some(mapped.physical)
    }
}
