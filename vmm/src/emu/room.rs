//! A machine of emulated vCPUs: what they have in common, and the loop that runs them.

use std::hash::Hasher;
use std::ops::Range;
use std::sync::Arc;

use emu::{Cpu, NotAnnounced, Observer, Ram, RamError, SlowPaths};
use iced_x86::CpuidFeature;
use irqchip::{BadMachine, Chips, IoApicVersion, Machine};
use kvm_pmu::{Tsc, VcpuId};
use pmu_virt::{PmuState, Ring};
use thiserror::Error;
use vm_memory::GuestMemoryMmap;
use vmm_control::KickThread;

use super::TSC_HZ;
use super::clock::VirtualClock;
use super::common::Common;
use super::hash::StateHasher;
use super::outside::{Lines, Outside, Waited};
use super::saved::{NotSaved, RoomState};
use super::schedule::{Doing, Next, TURN, earliest, next};
use super::vcpu::{EmuVcpu, EmuVcpuParts, NotRestored, Step};
use crate::audit::Holding;
use crate::devices::Platform;
use crate::vcpu::{VcpuControl, VcpuEnd};

/// There can be no such machine.
#[derive(Debug, Error)]
pub enum RoomError {
    /// Its memory is none that a processor can have.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// Its interrupt controllers are none that there can be.
    #[error(transparent)]
    Machine(#[from] BadMachine),
}

/// What a machine is made of.
#[derive(Debug)]
pub struct RoomParts {
    /// Its memory.
    pub memory: GuestMemoryMmap,
    /// Its vCPUs, by their numbers.
    pub vcpus: Vec<EmuVcpuParts>,
    /// Devices, beside interrupt controllers and the PIT.
    pub platform: Arc<dyn Platform>,
    /// Requests from outside.
    pub control: Arc<VcpuControl>,
    /// Interrupt lines of the devices.
    pub lines: Arc<Lines>,
    /// The host's time and its people.
    pub outside: Box<dyn Outside>,
    /// The clock of the devices.
    pub clock: VirtualClock,
}

/// How a machine ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoomEnd {
    /// Whose end it is.
    pub vcpu: VcpuId,
    /// How that ended.
    pub end: VcpuEnd,
}

/// A machine, which one thread runs.
#[derive(Debug)]
pub struct Room {
    vcpus: Vec<EmuVcpu>,
    shared: Common,
    control: Arc<VcpuControl>,
    outside: Box<dyn Outside>,
    /// Who looks on: with the vCPU whose turn it is.
    observer: Option<Box<dyn Observer>>,
    /// Who had the last turn.
    last: usize,
    /// Instructions of which the log has told that CPUID does not announce them.
    unannounced: Vec<NotAnnounced>,
    /// How often all waited since, and nobody woke.
    fruitless: u32,
}

/// Timers that expire so often in a row, and wake nobody, never will.
const FRUITLESS: u32 = 100_000;

impl Room {
    /// The machine that `parts` are.
    ///
    /// # Errors
    /// [`RoomError`].
    pub fn new(parts: RoomParts) -> Result<Self, RoomError> {
        let physical_bits = parts
            .vcpus
            .first()
            .map_or(36, |vcpu| vcpu.cpuid.physical_bits());
        let mut chips = Chips::new(&Machine {
            cpus: parts.vcpus.len(),
            tsc_hz: TSC_HZ,
            // As KVM's.
            apic_hz: 1_000_000_000,
            physical_bits: physical_bits.clamp(36, 52),
            ioapic: IoApicVersion::V11,
        })?;
        let several = parts.vcpus.len() > 1;
        let mut vcpus = Vec::new();
        for (number, part) in parts.vcpus.into_iter().enumerate() {
            let mut cpu = Cpu::new(Ram::new(parts.memory.clone())?, part.cpuid.clone());
            if several {
                cpu.share_memory();
            }
            if part.state.is_some() {
                chips.start(number);
            }
            let id = VcpuId(u32::from(number.to_le_bytes()[0]));
            vcpus.push(EmuVcpu::new(id, cpu, part, several));
        }
        Ok(Self {
            last: vcpus.len().saturating_sub(1),
            fruitless: 0,
            vcpus,
            shared: Common::new(
                chips,
                parts.memory,
                (parts.platform, parts.lines),
                parts.clock,
            ),
            control: parts.control,
            outside: parts.outside,
            observer: None,
            unannounced: Vec::new(),
        })
    }

    /// Runs the machine until one of its vCPUs ends, which ends all, or it is stopped. After
    /// an end that the guest asked for, and after a stop, it can be run on.
    pub fn run(&mut self) -> RoomEnd {
        loop {
            if self.control.stopping() {
                return self.ended(self.last, VcpuEnd::Stopped);
            }
            self.shared.take_lines();
            for vcpu in &mut self.vcpus {
                vcpu.serve(&mut self.shared);
            }
            match self.next() {
                Next::Turn(vcpu) => {
                    self.last = vcpu;
                    self.fruitless = 0;
                    if let Some(end) = self.turn(vcpu) {
                        return self.ended(vcpu, end);
                    }
                    let now = self.outside.turn_over(self.shared.now());
                    self.shared.set_now(now);
                }
                Next::Idle(until) => {
                    if self.idle(until) == Waited::Forever {
                        return self.ended(self.last, VcpuEnd::Asleep);
                    }
                }
            }
        }
    }

    /// Nobody runs before `until`.
    fn idle(&mut self, until: Option<u64>) -> Waited {
        let now = self.shared.now();
        let held = self.vcpus.iter().filter_map(|vcpu| vcpu.held(now));
        let stands = held.clone().any(|held| held == Doing::Held(None));
        let held = held.count() > 0;
        // While a tool holds a vCPU and no other runs, time stands still. A periodic timer that
        // nobody lets in wakes nobody, however often it expires.
        let until = until.filter(|_| !stands && self.fruitless < FRUITLESS);
        // What is due and was not done cannot be done yet.
        let until = until.map(|until| until.max(now + 1));
        self.fruitless += 1;
        let waited = self.outside.idle(now, until, held);
        if let Waited::Until(now) = waited {
            self.pass_to(now);
        }
        waited
    }

    fn ended(&self, vcpu: usize, end: VcpuEnd) -> RoomEnd {
        RoomEnd {
            vcpu: VcpuId(u32::from(vcpu.to_le_bytes()[0])),
            end,
        }
    }

    fn next(&self) -> Next {
        let mut due = self.shared.next_deadline();
        for vcpu in &self.vcpus {
            due = earliest([due, vcpu.due()]);
        }
        let doing = |vcpu: usize| self.vcpus[vcpu].doing(&self.shared);
        next(self.last, self.vcpus.len(), doing, due)
    }

    /// All vCPUs wait until `now`.
    fn pass_to(&mut self, now: u64) {
        self.shared.set_now(now);
        self.shared.advance();
        for vcpu in &mut self.vcpus {
            vcpu.pass(&mut self.shared);
        }
    }

    /// A turn of one vCPU.
    fn turn(&mut self, number: usize) -> Option<VcpuEnd> {
        let end = self.shared.now() + TURN;
        self.vcpus[number].note_turn(true, &self.shared);
        self.vcpus[number].begin(&self.shared);
        if let Some(mut observer) = self.observer.take() {
            observer.comes_to(number);
            self.vcpus[number].cpu_mut().observe(Some(observer));
        }
        let ended = loop {
            let step = self.vcpus[number].step(&mut self.shared, end);
            self.tell_writes();
            match step {
                Step::On => {}
                Step::Over => break None,
                Step::Ended(end) => break Some(end),
            }
        };
        self.observer = self.vcpus[number].cpu_mut().observe(None);
        self.vcpus[number].end(&self.shared);
        self.vcpus[number].note_turn(false, &self.shared);
        self.share_code(number);
        self.tell_unannounced(number);
        ended
    }

    /// Tells once why a program gets #UD for an instruction that other processors have.
    fn tell_unannounced(&mut self, number: usize) {
        for met in self.vcpus[number].cpu_mut().take_unannounced() {
            if self.unannounced.iter().any(|told| told.code == met.code) {
                continue;
            }
            self.unannounced.push(met);
            log::warn!(
                "vCPU {number}: #UD at RIP {:#x} for {:?}, which needs {:?}: {}",
                met.rip,
                met.code,
                met.code.cpuid_features(),
                advice(met.code.cpuid_features()),
            );
        }
    }

    /// Where the VMM has written, code may have been.
    fn tell_writes(&mut self) {
        for range in self.shared.take_written() {
            for vcpu in &mut self.vcpus {
                vcpu.cpu_mut().written(range.clone());
            }
        }
    }

    /// The others get to know which code a vCPU holds, and which it has written over.
    fn share_code(&mut self, number: usize) {
        let changes = self.vcpus[number].cpu_mut().take_code_changes();
        if changes.is_empty() {
            return;
        }
        for (other, vcpu) in self.vcpus.iter_mut().enumerate() {
            if other != number {
                vcpu.cpu_mut().others_changed(&changes);
            }
        }
    }

    /// Virtual time: ticks, and so nanoseconds, since the machine started.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.shared.now()
    }

    /// What is due in the reservations by now has taken place, also of vCPUs that do not run.
    pub fn tick(&mut self) {
        let now = Tsc(self.now());
        for vcpu in &mut self.vcpus {
            vcpu.tick(now);
        }
    }

    /// The vCPUs, while none runs.
    #[must_use]
    pub fn vcpus(&self) -> &[EmuVcpu] {
        &self.vcpus
    }

    /// What of each vCPU's instructions took the slow path, by reason.
    #[must_use]
    pub fn slow_paths(&self) -> Vec<SlowPaths> {
        let vcpus = self.vcpus.iter();
        vcpus.map(|vcpu| vcpu.cpu().slow_paths()).collect()
    }

    /// Bytes of decoded code.
    #[must_use]
    pub fn code_bytes(&self) -> usize {
        let vcpus = self.vcpus.iter();
        vcpus.map(|vcpu| vcpu.cpu().code_bytes()).sum()
    }

    /// The guest's memory. Who writes to it says so by [`Room::written`].
    #[must_use]
    pub fn memory(&self) -> &GuestMemoryMmap {
        self.shared.memory()
    }

    /// Somebody else has written to guest-physical addresses while nothing runs.
    pub fn written(&mut self, range: Range<u64>) {
        self.shared.note_written(range);
        self.tell_writes();
    }

    /// Puts who looks on in the place of who did. It is told when the guest's kernel comes to one
    /// of `places`, linear addresses; what the guest does is the same.
    pub fn observe(
        &mut self,
        by: Option<Box<dyn Observer>>,
        places: &[u64],
    ) -> Option<Box<dyn Observer>> {
        for vcpu in &mut self.vcpus {
            vcpu.cpu_mut().watch(places.to_vec());
        }
        std::mem::replace(&mut self.observer, by)
    }

    /// From now on processors run for so many ticks at a time at most. What the guest does is
    /// the same: this is for tests of that.
    pub fn run_in_pieces(&mut self, most: u64) {
        self.shared.set_most(most);
    }

    /// All decoded code is dropped; nothing else changes.
    pub fn forget_code(&mut self) {
        for vcpu in &mut self.vcpus {
            vcpu.cpu_mut().forget_code();
        }
    }

    /// One number for all that the guest could ever notice: registers, memory, interrupt
    /// controllers, time. It is the same on every host.
    #[must_use]
    pub fn state_hash(&self) -> u64 {
        let mut hash = StateHasher::default();
        self.shared.hash_state(&mut hash);
        for vcpu in &self.vcpus {
            vcpu.hash_state(&mut hash);
        }
        hash.finish()
    }

    /// Instructions that its vCPUs have executed in a ring since it was made.
    #[must_use]
    pub fn executed(&self, ring: Ring) -> u64 {
        self.vcpus.iter().map(|vcpu| vcpu.executed(ring)).sum()
    }

    /// Instructions that raised #UD because CPUID does not announce them, each code once.
    #[must_use]
    pub fn unannounced(&self) -> &[NotAnnounced] {
        &self.unannounced
    }

    // Snapshots.

    /// What the machine is between two instructions, beside its memory and its devices. It
    /// can be run on after that.
    ///
    /// # Errors
    /// The instruction in hand has ended the machine.
    pub fn save(&mut self) -> Result<RoomState, NotSaved> {
        self.shared.take_lines();
        let mut vcpus = Vec::new();
        for vcpu in &mut self.vcpus {
            vcpus.push(vcpu.save(&mut self.shared).ok_or(NotSaved)?);
        }
        self.tell_writes();
        Ok(RoomState {
            shared: self.shared.save(),
            vcpus,
            last: self.last,
        })
    }

    /// Goes on from there: a machine of the same parts, which has not run, with the memory of
    /// that time, and whose devices have their state already.
    ///
    /// # Errors
    /// The state is one of another machine.
    pub fn restore(&mut self, state: &RoomState) -> Result<(), NotRestored> {
        if state.vcpus.len() != self.vcpus.len() || state.last >= self.vcpus.len() {
            return Err(NotRestored::Parts);
        }
        for (vcpu, saved) in self.vcpus.iter_mut().zip(&state.vcpus) {
            vcpu.restore(saved)?;
        }
        if !self.shared.restore(&state.shared) {
            return Err(NotRestored::Parts);
        }
        self.last = state.last;
        Ok(())
    }

    // Host tools.

    /// The calling thread runs the machine from now on; `thread` ends its waits.
    pub fn comes_to(&self, thread: &(impl KickThread + Clone + 'static)) {
        for vcpu in self.vcpus() {
            vcpu.comes_to(thread.clone());
        }
    }

    /// The machine has ended: tools get their contexts back, and `keep` hears who holds which
    /// counters. The states of its PMUs.
    pub fn close(&mut self, keep: impl Fn(VcpuId, Vec<Holding>)) -> Vec<(VcpuId, PmuState)> {
        let now = Tsc(self.now());
        let mut states = Vec::new();
        for vcpu in &mut self.vcpus {
            let (held, state) = vcpu.close(now);
            keep(vcpu.id(), held);
            states.extend(state.map(|state| (vcpu.id(), state)));
        }
        states
    }
}

/// What to do about an instruction that needs `features`. The levels 3 and 4 of x86-64 (System
/// V psABI, 3.1.1) are the compilers' to leave out, the kernel's code and a program's alike.
fn advice(features: &[CpuidFeature]) -> &'static str {
    let of_a_level = features.iter().any(|feature| {
        matches!(
            feature,
            CpuidFeature::AVX
                | CpuidFeature::AVX2
                | CpuidFeature::AVX512F
                | CpuidFeature::AVX512BW
                | CpuidFeature::AVX512CD
                | CpuidFeature::AVX512DQ
                | CpuidFeature::AVX512VL
                | CpuidFeature::BMI1
                | CpuidFeature::BMI2
                | CpuidFeature::F16C
                | CpuidFeature::FMA
                | CpuidFeature::LZCNT
                | CpuidFeature::MOVBE
        )
    });
    if of_a_level {
        "the engine emu has SSE to SSE4.2 and no AVX; build for x86-64-v2"
    } else {
        "the guest's CPUID does not announce it"
    }
}

#[cfg(test)]
mod tests {
    use iced_x86::Code;

    use super::*;

    #[test]
    fn only_what_a_compiler_leaves_out_is_to_be_built_anew() {
        for code in [
            Code::VEX_Vaddps_ymm_ymm_ymmm256,
            Code::EVEX_Vaddps_zmm_k1z_zmm_zmmm512b32_er,
            Code::VEX_Andn_r64_r64_rm64,
            Code::Movbe_r32_m32,
        ] {
            assert!(
                advice(code.cpuid_features()).contains("x86-64-v2"),
                "{code:?}"
            );
        }
        for code in [Code::Rdrand_r64, Code::Crc32_r32_rm32, Code::Xsave_mem] {
            let told = advice(code.cpuid_features());
            assert_eq!(told, "the guest's CPUID does not announce it", "{code:?}");
        }
    }
}
