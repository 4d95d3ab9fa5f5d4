//! An I/O APIC that is just enough for the edges of a serial port: KVM has the local APICs alone
//! (a split irqchip), so messages go to it as MSIs. Source: Intel's data sheet of the 82093AA.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::kvm_msi;
use kvm_ioctls::VmFd;
use vm_superio::Trigger;
use vmm_sys_util::errno;

/// Guest-physical address of its registers, and their bytes.
pub(crate) const START: u32 = 0xfec0_0000;
const LEN: u64 = 0x20;
/// Its inputs.
pub(crate) const PINS: u8 = 24;

const WINDOW: u64 = 0x10;
const VERSION: u32 = 0x11 | (PINS as u32 - 1) << 16;
const FIRST_ENTRY: usize = 0x10;
const MASKED: u64 = 1 << 16;
/// Bits that a store does not change: delivery status and remote IRR.
const READ_ONLY: u64 = 1 << 12 | 1 << 14;

/// Its registers, and an edge for each input that came while it was masked.
#[derive(Debug, Clone)]
pub(crate) struct SmallIoApic {
    select: u8,
    entries: [u64; PINS as usize],
    waiting: u32,
}

impl SmallIoApic {
    pub(crate) fn new() -> Self {
        Self {
            select: 0,
            entries: [MASKED; PINS as usize],
            waiting: 0,
        }
    }

    /// All that is in it.
    pub(crate) fn save(&self) -> Vec<u64> {
        let rest = [self.select.into(), self.waiting.into()];
        [&self.entries[..], &rest].concat()
    }

    /// Of what was in one; none if that is not of one.
    pub(crate) fn restored(words: &[u64]) -> Option<Self> {
        let (entries, rest) = words.split_first_chunk()?;
        let &[select, waiting] = rest else {
            return None;
        };
        Some(Self {
            select: u8::try_from(select).ok()?,
            entries: *entries,
            waiting: u32::try_from(waiting).ok()?,
        })
    }

    fn entry(&self) -> Option<(usize, bool)> {
        let at = usize::from(self.select).checked_sub(FIRST_ENTRY)?;
        (at / 2 < self.entries.len()).then_some((at / 2, at % 2 == 1))
    }

    fn load(&self, offset: u64) -> u32 {
        match (offset, self.select, self.entry()) {
            (0, select, _) => select.into(),
            (WINDOW, 1, _) => VERSION,
            (WINDOW, _, Some((pin, high))) => {
                let shift = if high { 32 } else { 0 };
                u32::try_from(self.entries[pin] >> shift & 0xffff_ffff).unwrap_or(0)
            }
            _ => 0,
        }
    }

    /// Takes a store in; the message that it lets go.
    fn store(&mut self, offset: u64, value: u32) -> Option<kvm_msi> {
        match (offset, self.entry()) {
            (0, _) => self.select = value.to_le_bytes()[0],
            (WINDOW, Some((pin, high))) => {
                let (shift, kept) = if high { (32, 0) } else { (0, READ_ONLY) };
                let entry = &mut self.entries[pin];
                let field = 0xffff_ffff_u64 << shift & !kept;
                *entry = *entry & !field | u64::from(value) << shift & field;
                if self.waiting & 1 << pin != 0 {
                    return self.edge(pin);
                }
            }
            _ => {}
        }
        None
    }

    /// An edge at an input: its message, unless it is masked.
    fn edge(&mut self, pin: usize) -> Option<kvm_msi> {
        let entry = self.entries[pin];
        if entry & MASKED != 0 {
            self.waiting |= 1 << pin;
            return None;
        }
        self.waiting &= !(1 << pin);
        let field = |from: u32, bits: u32| {
            let value = entry >> from & ((1 << bits) - 1);
            u32::try_from(value).unwrap_or(0)
        };
        // Destination and its mode go into the address, vector, delivery mode and trigger mode
        // into the data.
        Some(kvm_msi {
            address_lo: 0xfee0_0000 | field(56, 8) << 12 | field(11, 1) << 2,
            data: field(0, 8) | field(8, 3) << 8 | field(15, 1) << 15,
            ..Default::default()
        })
    }
}

/// The I/O APIC with its way to the local APICs.
#[derive(Debug, Clone)]
pub(crate) struct Interrupts {
    chip: Arc<Mutex<SmallIoApic>>,
    vm: Arc<VmFd>,
}

impl Interrupts {
    pub(crate) fn new(chip: SmallIoApic, vm: Arc<VmFd>) -> Self {
        Self {
            chip: Arc::new(Mutex::new(chip)),
            vm,
        }
    }

    pub(crate) fn chip(&self) -> MutexGuard<'_, SmallIoApic> {
        self.chip.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bytes of a load, where `address` is one of its.
    pub(crate) fn load(&self, address: u64) -> Option<[u8; 8]> {
        let offset = offset(address)?;
        Some(u64::from(self.chip().load(offset)).to_le_bytes())
    }

    /// Takes a store in, where `address` is one of its.
    pub(crate) fn store(&self, address: u64, bytes: [u8; 8]) -> Result<(), errno::Error> {
        let Some(offset) = offset(address) else {
            return Ok(());
        };
        let [a, b, c, d, ..] = bytes;
        let message = self.chip().store(offset, u32::from_le_bytes([a, b, c, d]));
        self.send(message)
    }

    fn send(&self, message: Option<kvm_msi>) -> Result<(), errno::Error> {
        message.map_or(Ok(()), |message| self.vm.signal_msi(message).map(drop))
    }
}

fn offset(address: u64) -> Option<u64> {
    let offset = address.checked_sub(START.into())?;
    (offset < LEN).then_some(offset)
}

/// One of its inputs.
#[derive(Debug)]
pub(crate) struct Pin {
    pub(crate) chip: Interrupts,
    pub(crate) number: u8,
}

impl Trigger for Pin {
    type E = errno::Error;

    fn trigger(&self) -> Result<(), errno::Error> {
        let message = self.chip.chip().edge(self.number.into());
        self.chip.send(message)
    }
}
