//! An I/O APIC (82093AA; its EOI register is that of ICH's) with 24 pins.

use serde::{Deserialize, Serialize};

use crate::bits::{byte, low, with_low};
use crate::lapic::Receipt;
use crate::message::{Destination, Message, Order, Trigger};

/// What the I/O APIC has besides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum IoApicVersion {
    /// 11h: level-triggered interrupts end by the local APICs' broadcast alone. As KVM's.
    V11,
    /// 20h: by the EOI register too, and local APICs can do without the broadcast.
    V20,
}

/// How a line stands, whatever its voltage: polarities are kept and change nothing, as in
/// KVM, for nobody drives a line of the other one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Line {
    /// It asks for an interrupt.
    Asserted,
    /// It does not.
    Deasserted,
}

pub(crate) const PINS: u8 = 24;

const REMOTE_IRR: u64 = 1 << 14;
const LEVEL: u64 = 1 << 15;
const MASKED: u64 = 1 << 16;
/// What software sets of bits 31:0 and of bits 63:32. Delivery status is always 0: a message
/// is sent at once.
const WRITABLE_LOW: u32 = 0x0001_afff;
const WRITABLE_HIGH: u32 = 0xff00_0000;

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct IoApic {
    version: IoApicVersion,
    id: u32,
    index: u8,
    entries: [u64; PINS as usize],
    /// Lines that are asserted, and edges that are not sent yet: a bit a pin.
    lines: u32,
    edges: u32,
}

impl IoApic {
    pub(crate) fn new(version: IoApicVersion) -> Self {
        Self {
            version,
            id: 0,
            index: 0,
            entries: [MASKED; PINS as usize],
            lines: 0,
            edges: 0,
        }
    }

    fn entry(&self, pin: u8) -> u64 {
        self.entries
            .get(usize::from(pin))
            .copied()
            .unwrap_or(MASKED)
    }

    pub(crate) fn is_masked(&self, pin: u8) -> bool {
        self.entry(pin) & MASKED != 0
    }

    /// Index register at 0, data at 10h.
    pub(crate) fn load(&self, offset: u8) -> u32 {
        match offset {
            0 => self.index.into(),
            0x10 => self.register(),
            _ => 0,
        }
    }

    fn register(&self) -> u32 {
        match self.index {
            // The arbitration ID is the ID, since that was last written.
            0 | 2 => self.id,
            1 => {
                let version = match self.version {
                    IoApicVersion::V11 => 0x11,
                    IoApicVersion::V20 => 0x20,
                };
                u32::from(PINS - 1) << 16 | version
            }
            0x10..=0x3f => {
                let entry = self.entry((self.index - 0x10) / 2);
                low(entry >> (32 * u32::from(self.index & 1)))
            }
            _ => 0,
        }
    }

    /// The vector whose end this says, at 40h.
    pub(crate) fn eoi_register(&self, offset: u8, value: u32) -> Option<u8> {
        (self.version == IoApicVersion::V20 && offset == 0x40).then_some(byte(value))
    }

    pub(crate) fn store(&mut self, offset: u8, value: u32) {
        match (offset, self.index) {
            (0, _) => self.index = byte(value),
            (0x10, 0) => self.id = value & 0x0f00_0000,
            (0x10, 0x10..=0x3f) => self.set_entry(value),
            _ => {}
        }
    }

    fn set_entry(&mut self, value: u32) {
        let pin = usize::from((self.index - 0x10) / 2);
        let Some(entry) = self.entries.get_mut(pin) else {
            return;
        };
        if self.index & 1 == 1 {
            *entry = u64::from(value & WRITABLE_HIGH) << 32 | *entry & 0xffff_ffff;
            return;
        }
        let remote_irr = *entry & REMOTE_IRR;
        *entry = with_low(*entry, value & WRITABLE_LOW);
        // By way of an edge, software ends interrupts where there is no EOI register.
        if *entry & LEVEL != 0 {
            *entry |= remote_irr;
        }
    }

    /// A pin's line; an edge that finds its pin masked is lost.
    pub(crate) fn set_line(&mut self, pin: u8, line: Line) {
        if pin >= PINS {
            return;
        }
        let bit = 1 << pin;
        match line {
            Line::Deasserted => self.lines &= !bit,
            Line::Asserted => {
                if self.lines & bit == 0 && !self.is_masked(pin) {
                    self.edges |= bit;
                }
                self.lines |= bit;
            }
        }
    }

    /// What a pin has to send. Modes that name no vector are edges (82093AA, 3.2.4).
    pub(crate) fn due(&mut self, pin: u8) -> Option<Message> {
        let bit = 1u32.checked_shl(pin.into())?;
        let edge = self.edges & bit != 0;
        self.edges &= !bit;
        let entry = self.entry(pin);
        let word = low(entry);
        let order = Order::of(word >> 8, byte(word))?;
        let (trigger, due) = match order {
            // There is no such delivery mode here.
            Order::Startup(_) => return None,
            Order::Fixed(_) | Order::Lowest(_) if entry & LEVEL != 0 => {
                let due = self.lines & bit != 0 && entry & (MASKED | REMOTE_IRR) == 0;
                (Trigger::Level, due)
            }
            _ => (Trigger::Edge, edge),
        };
        due.then_some(Message {
            destination: Self::destination(entry),
            order,
            trigger,
        })
    }

    fn destination(entry: u64) -> Destination {
        const LOGICAL: u64 = 1 << 11;
        match low(entry >> 56) {
            0xff => Destination::All,
            address if entry & LOGICAL != 0 => Destination::Logical(address),
            id => Destination::Physical(id),
        }
    }

    /// What became of a pin's message.
    pub(crate) fn sent(&mut self, pin: u8, trigger: Trigger, receipt: Receipt) {
        if (trigger, receipt) == (Trigger::Level, Receipt::Accepted)
            && let Some(entry) = self.entries.get_mut(usize::from(pin))
        {
            *entry |= REMOTE_IRR;
        }
    }

    /// The level-triggered interrupts of this vector end.
    pub(crate) fn end_of(&mut self, vector: u8) {
        for entry in &mut self.entries {
            if byte(low(*entry)) == vector {
                *entry &= !REMOTE_IRR;
            }
        }
    }
}
