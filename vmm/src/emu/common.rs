//! What the vCPUs of an emulated machine have in common: memory, interrupt controllers,
//! devices, and the time.

use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use irqchip::{Answer as ChipAnswer, Chips, Line};
use kvm_pmu::{Answer, VcpuId};
use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::clock::VirtualClock;
use super::hash::hash_memory;
use super::outside::Lines;
use super::paravirt::{GuestTime, GuestWrite};
use crate::devices::Platform;

/// `IA32_APIC_BASE`.
const APIC_BASE: u32 = 0x1b;

/// No machine lives so long: 292 years.
const NEVER: u64 = 1 << 63;

/// What vCPUs of a machine have in common.
#[derive(Debug)]
pub(super) struct Common {
    chips: Chips,
    /// Ticks since the machine started.
    now: u64,
    memory: GuestMemoryMmap,
    platform: Arc<dyn Platform>,
    lines: Arc<Lines>,
    clock: VirtualClock,
    /// The number of this process, which samples carry as that of the VM.
    process: i32,
    /// Guest-physical addresses that the VMM has written to: code may have been there.
    written: Vec<Range<u64>>,
    most: u64,
}

/// What is kept of it beside memory, which is too large to be copied, and devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedCommon {
    chips: Chips,
    now: u64,
    /// When virtual time began.
    began: u64,
}

impl Common {
    pub(super) fn new(
        chips: Chips,
        memory: GuestMemoryMmap,
        (platform, lines): (Arc<dyn Platform>, Arc<Lines>),
        clock: VirtualClock,
    ) -> Self {
        Self {
            chips,
            now: 0,
            memory,
            platform,
            lines,
            clock,
            process: std::process::id().cast_signed(),
            written: Vec::new(),
            most: u64::MAX,
        }
    }

    pub(super) fn memory(&self) -> &GuestMemoryMmap {
        &self.memory
    }

    /// Guest-physical addresses that the VMM has written to since this was asked last.
    pub(super) fn take_written(&mut self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.written)
    }

    /// From now on a vCPU runs for so many ticks at a time at most.
    pub(super) fn set_most(&mut self, most: u64) {
        self.most = most;
    }

    /// What is kept of it. Lines that were pulsed have been taken in.
    pub(super) fn save(&self) -> SavedCommon {
        SavedCommon {
            chips: self.chips.clone(),
            now: self.now,
            began: self.clock.began(),
        }
    }

    /// Goes on from there; false if its clock began at another time.
    pub(super) fn restore(&mut self, saved: &SavedCommon) -> bool {
        self.chips = saved.chips.clone();
        self.now = saved.now;
        self.clock.set(self.now);
        // Devices that were made anew have raised their lines again: the chips know that.
        self.lines.take();
        saved.began == self.clock.began()
    }

    /// What the guest could ever notice of it.
    pub(super) fn hash_state(&self, hash: &mut impl Hasher) {
        (self.now, &self.chips).hash(hash);
        hash_memory(&self.memory, hash);
    }

    pub(super) fn now(&self) -> u64 {
        self.now
    }

    pub(super) fn set_now(&mut self, now: u64) {
        self.now = self.now.max(now);
        self.clock.set(self.now);
    }

    /// The most ticks that a vCPU may run for at a time.
    pub(super) fn most(&self) -> u64 {
        self.most
    }

    pub(super) fn chips(&self) -> &Chips {
        &self.chips
    }

    pub(super) fn chips_mut(&mut self) -> &mut Chips {
        &mut self.chips
    }

    pub(super) fn platform(&self) -> &dyn Platform {
        &*self.platform
    }

    pub(super) fn process(&self) -> i32 {
        self.process
    }

    /// When a timer expires next. One so far away that virtual time never comes to it is none.
    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.chips.next_deadline().filter(|due| *due < NEVER)
    }

    /// Timers that are due expire.
    pub(super) fn advance(&mut self) {
        self.chips.advance(self.now);
    }

    /// Takes in what devices have done to their lines: each pulse is an edge.
    pub(super) fn take_lines(&mut self) {
        let pulses = self.lines.take();
        if pulses == 0 {
            return;
        }
        self.advance();
        for pin in (0..24).filter(|pin| pulses >> pin & 1 != 0) {
            self.chips.set_line(pin, Line::Asserted);
            self.chips.set_line(pin, Line::Deasserted);
        }
    }

    /// When a vCPU with this offset of its TSC writes an MSR.
    pub(super) fn guest_time(&self, tsc_offset: u64) -> GuestTime {
        GuestTime {
            ticks: self.now,
            tsc_offset,
            began: self.clock.began(),
        }
    }

    /// Writes what an MSR fills into the guest's memory; where there is none, nothing happens,
    /// as on KVM.
    pub(super) fn fill(&mut self, write: &GuestWrite) {
        let bytes = write.bytes();
        let address = GuestAddress(write.address);
        if self.memory.write_slice(bytes, address).is_ok() {
            self.note_written(write.address..write.address + bytes.len() as u64);
        }
    }

    /// Takes in where devices have written to memory by themselves.
    pub(super) fn take_platform_writes(&mut self) {
        self.written.extend(self.platform.take_written());
    }

    /// The VMM has written to guest-physical addresses.
    pub(super) fn note_written(&mut self, range: Range<u64>) {
        self.written.push(range);
    }

    /// `IA32_APIC_BASE` of a vCPU.
    pub(super) fn apic_base(&mut self, vcpu: VcpuId) -> u64 {
        match self.chips_rdmsr(vcpu, APIC_BASE) {
            Some(ChipAnswer::Value(base)) => base,
            _ => 0,
        }
    }

    pub(super) fn chips_rdmsr(&mut self, vcpu: VcpuId, index: u32) -> Option<ChipAnswer> {
        self.chips.rdmsr(self.now, vcpu.index(), index)
    }

    pub(super) fn chips_wrmsr(
        &mut self,
        vcpu: VcpuId,
        index: u32,
        value: u64,
    ) -> Option<ChipAnswer> {
        self.chips.wrmsr(self.now, vcpu.index(), index, value)
    }

    /// IN; false if the first port is none of the chips'. Wider accesses are bytes.
    pub(super) fn chips_read(&mut self, port: u16, data: &mut [u8]) -> bool {
        let mut is_theirs = false;
        for (port, byte) in (port..=u16::MAX).zip(data.iter_mut()) {
            let read = self.chips.port_read(self.now, port);
            *byte = match read {
                Some(ChipAnswer::Value(value)) => value.to_le_bytes()[0],
                None if !is_theirs => return false,
                // The rest of a wide access reads as nothing does.
                _ => 0xff,
            };
            is_theirs = true;
        }
        is_theirs
    }

    /// OUT, likewise.
    pub(super) fn chips_write(&mut self, port: u16, data: &[u8]) -> bool {
        let mut ports = (port..=u16::MAX).zip(data);
        let is_theirs = ports
            .next()
            .is_some_and(|(port, byte)| self.chips.port_write(self.now, port, *byte).is_some());
        if is_theirs {
            for (port, byte) in ports {
                self.chips.port_write(self.now, port, *byte);
            }
        }
        is_theirs
    }

    /// A load from the chips' registers; none if there is none of them.
    pub(super) fn chips_load(&mut self, vcpu: VcpuId, address: u64, len: usize) -> Option<Answer> {
        let len = u8::try_from(len).unwrap_or(8);
        let read = self.chips.mmio_read(self.now, vcpu.index(), address, len)?;
        match read {
            ChipAnswer::Value(value) => Some(Answer::Mmio(value.to_le_bytes())),
            ChipAnswer::Done | ChipAnswer::Gp => None,
        }
    }

    /// A store to them; false if there is none of them.
    pub(super) fn chips_store(&mut self, vcpu: VcpuId, address: u64, data: &[u8]) -> bool {
        let mut bytes = [0; 8];
        let len = data.len().min(8);
        bytes[..len].copy_from_slice(&data[..len]);
        let (value, len) = (u64::from_le_bytes(bytes), len.to_le_bytes()[0]);
        let written = self
            .chips
            .mmio_write(self.now, vcpu.index(), address, len, value);
        written.is_some()
    }
}
