//! All of a machine's chips, and what goes from one to another.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::bits::low;
use crate::ioapic::{IoApic, IoApicVersion, Line, PINS};
use crate::lapic::{Activity, Delivery, Effect, EoiBroadcast, Lint, LocalApic, Receipt, Refused};
use crate::message::{Message, Order, Trigger};
use crate::pic::PicMasks;
use crate::pit::{Pit, Tick};
use crate::time::Rate;

/// What the chips are part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// Local APICs, 1 to 255, with IDs from 0 on. Number 0 is the bootstrap processor's.
    pub cpus: usize,
    /// Ticks of the TSC a second: the unit of all times.
    pub tsc_hz: u64,
    /// The clock that the APICs' timers divide, in cycles a second.
    pub apic_hz: u64,
    /// Bits of a physical address, as CPUID says: 36 to 52.
    pub physical_bits: u32,
    /// Which I/O APIC.
    pub ioapic: IoApicVersion,
}

/// There can be no such [`Machine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadMachine {
    /// IDs of 8 bits name no more, and 255 is all of them.
    #[error("{0} CPUs: local APICs can be 1 to 255")]
    Cpus(usize),
    /// It would never go on.
    #[error("a clock of 0 Hz")]
    Clock,
    /// Architectural limits.
    #[error("physical addresses of {0} bits: they have 36 to 52")]
    PhysicalBits(u32),
}

/// What an access comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// What is read, in the low bits.
    Value(u64),
    /// It is written.
    Done,
    /// The CPU gets #GP(0).
    Gp,
}

/// The 8254's OUT is wired to this pin, as an MADT has to say of IRQ 0.
const PIT_PIN: u8 = 2;

/// 256 bytes, as KVM's.
const IOAPIC_START: u64 = 0xfec0_0000;

const APIC_BASE: u32 = 0x1b;
const TSC_DEADLINE: u32 = 0x6e0;
const X2APIC_FIRST: u32 = 0x800;
const X2APIC_LAST: u32 = 0x8ff;

/// The chips. A time before that of an earlier call counts as that one; a CPU that is not
/// there is given nothing and does nothing.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Chips {
    now: u64,
    apics: Vec<LocalApic>,
    ioapic: IoApic,
    pic: PicMasks,
    pit: Pit,
}

impl Chips {
    /// As after power-up, at time 0.
    ///
    /// # Errors
    ///
    /// There can be no such machine.
    pub fn new(machine: &Machine) -> Result<Self, BadMachine> {
        let ids = match u8::try_from(machine.cpus) {
            Ok(cpus @ 1..) => 0..u32::from(cpus),
            _ => return Err(BadMachine::Cpus(machine.cpus)),
        };
        if machine.tsc_hz == 0 || machine.apic_hz == 0 {
            return Err(BadMachine::Clock);
        }
        if !(36..=52).contains(&machine.physical_bits) {
            return Err(BadMachine::PhysicalBits(machine.physical_bits));
        }
        let eoi_broadcast = match machine.ioapic {
            IoApicVersion::V11 => EoiBroadcast::Always,
            IoApicVersion::V20 => EoiBroadcast::Suppressible,
        };
        let apic = |id| {
            let rate = Rate::new(machine.apic_hz, machine.tsc_hz);
            LocalApic::new(id, rate, machine.physical_bits, eoi_broadcast)
        };
        Ok(Self {
            now: 0,
            apics: ids.map(apic).collect(),
            ioapic: IoApic::new(machine.ioapic),
            pic: PicMasks::new(),
            pit: Pit::new(machine.tsc_hz),
        })
    }

    /// Time goes on to `now`: timers that are due have expired.
    ///
    /// A periodic timer whose period passed more than once is one interrupt: who wants each
    /// goes from deadline to deadline.
    pub fn advance(&mut self, now: u64) {
        self.now = self.now.max(now);
        for apic in &mut self.apics {
            apic.advance(self.now);
        }
        if self.pit.advance(self.now) == Tick::Rose {
            self.pulse_pit();
        }
    }

    /// When something happens next if nobody does anything: always later than the time of
    /// the last call. None is never: no timer runs whose interrupt anybody would get.
    #[must_use]
    pub fn next_deadline(&self) -> Option<u64> {
        let pit = self.pit.next().filter(|_| !self.ioapic.is_masked(PIT_PIN));
        let timers = self.apics.iter().filter_map(LocalApic::next);
        timers.chain(pit).min()
    }

    /// All that `cpu` could be given now, most urgent first. The caller takes the first that
    /// the CPU's state lets it take (IF, blocking of NMIs, shadows), and says so by
    /// [`Self::acknowledge`].
    pub fn pending(&self, cpu: usize) -> impl Iterator<Item = Delivery> + use<> {
        let apic = self.apics.get(cpu).map(LocalApic::pending);
        apic.into_iter().flatten()
    }

    /// `cpu` takes `delivery`. The answer is what it gets: of an interrupt, the vector, which
    /// is the spurious one if priorities hold the interrupt back by now; none if what was
    /// pending is no longer.
    pub fn acknowledge(&mut self, cpu: usize, delivery: Delivery) -> Option<Delivery> {
        self.apics.get_mut(cpu)?.acknowledge(delivery)
    }

    /// Whether `cpu` executes; one that is not there waits.
    #[must_use]
    pub fn activity(&self, cpu: usize) -> Activity {
        let apic = self.apics.get(cpu);
        apic.map_or(Activity::WaitsForStartup, LocalApic::activity)
    }

    /// Lets `cpu` execute without a SIPI, as if it had come, where whoever loads the machine
    /// starts all of its CPUs.
    pub fn start(&mut self, cpu: usize) {
        if let Some(apic) = self.apics.get_mut(cpu) {
            apic.start();
        }
    }

    /// Whether the local APIC of `cpu` takes interrupts with a vector.
    #[must_use]
    pub fn takes_vectors(&self, cpu: usize) -> bool {
        self.apics.get(cpu).is_some_and(LocalApic::takes_vectors)
    }

    /// LVTPC of `cpu` as it is latched; masked where the APIC is disabled, in either way.
    ///
    /// A PMI is the caller's: it decides by this register what becomes of an overflow, sends
    /// that by [`Self::raise_nmi`] or [`Self::raise`], and sets the mask by
    /// [`Self::mask_lvtpc`] if the model's processors do.
    #[must_use]
    pub fn lvtpc(&self, cpu: usize) -> Option<u32> {
        self.apics.get(cpu).map(LocalApic::lvtpc)
    }

    /// Sets LVTPC's mask bit.
    pub fn mask_lvtpc(&mut self, cpu: usize) {
        if let Some(apic) = self.apics.get_mut(cpu) {
            apic.mask_lvtpc();
        }
    }

    /// An NMI for `cpu`.
    pub fn raise_nmi(&mut self, cpu: usize) {
        self.order(cpu, Order::Nmi);
    }

    /// An edge-triggered interrupt for `cpu`; with a vector below 16, an APIC error.
    pub fn raise(&mut self, cpu: usize, vector: u8) {
        self.order(cpu, Order::Fixed(vector));
    }

    fn order(&mut self, cpu: usize, order: Order) {
        if let Some(apic) = self.apics.get_mut(cpu) {
            apic.accept(order, Trigger::Edge);
        }
    }

    /// A pulse on a local pin of `cpu`, which does what its entry of the LVT says. `ExtINT`
    /// is nothing: no 8259 has a vector.
    pub fn pulse(&mut self, cpu: usize, lint: Lint) {
        if let Some(apic) = self.apics.get_mut(cpu) {
            apic.pulse(lint);
        }
    }

    /// The line of a pin of the I/O APIC.
    pub fn set_line(&mut self, pin: u8, line: Line) {
        self.ioapic.set_line(pin, line);
        self.serve(pin);
    }

    /// As KVM's, it is a pulse even where OUT stays high.
    fn pulse_pit(&mut self) {
        self.set_line(PIT_PIN, Line::Asserted);
        self.set_line(PIT_PIN, Line::Deasserted);
    }

    fn serve(&mut self, pin: u8) {
        if let Some(message) = self.ioapic.due(pin) {
            let receipt = self.route(&message);
            self.ioapic.sent(pin, message.trigger, receipt);
        }
    }

    fn serve_all(&mut self) {
        for pin in 0..PINS {
            self.serve(pin);
        }
    }

    /// Gives a message to those that it is for.
    fn route(&mut self, message: &Message) -> Receipt {
        if let Order::Lowest(_) = message.order {
            return self.route_to_one(message);
        }
        let mut receipt = Receipt::Ignored;
        for apic in &mut self.apics {
            if apic.is_addressed(message.destination)
                && apic.accept(message.order, message.trigger) == Receipt::Accepted
            {
                receipt = Receipt::Accepted;
            }
        }
        receipt
    }

    /// Of several that do equally unimportant work, the first is chosen.
    fn route_to_one(&mut self, message: &Message) -> Receipt {
        let addressed = self.apics.iter_mut().filter_map(|apic| {
            let burden = apic.burden()?;
            apic.is_addressed(message.destination)
                .then_some((burden, apic))
        });
        match addressed.min_by_key(|(burden, _)| *burden) {
            Some((_, apic)) => apic.accept(message.order, message.trigger),
            None => Receipt::Ignored,
        }
    }

    fn bring_about(&mut self, effect: Effect) {
        match effect {
            Effect::None => {}
            Effect::EndOf(vector) => {
                self.ioapic.end_of(vector);
                self.serve_all();
            }
            Effect::Send(message) => {
                self.route(&message);
            }
        }
    }

    /// CR8 of `cpu`, which is its APIC's.
    #[must_use]
    pub fn cr8(&self, cpu: usize) -> u8 {
        self.apics.get(cpu).map_or(0, LocalApic::cr8)
    }

    /// Writes CR8, of which there are bits 3:0.
    pub fn set_cr8(&mut self, cpu: usize, cr8: u8) {
        if let Some(apic) = self.apics.get_mut(cpu) {
            apic.set_cr8(cr8);
        }
    }

    /// RDMSR by `cpu`: `IA32_APIC_BASE`, `IA32_TSC_DEADLINE`, 800h to 8FFh. None if the MSR
    /// is not of these. Deadlines are in the time of the chips: who gives a CPU a TSC of its
    /// own converts them.
    pub fn rdmsr(&mut self, now: u64, cpu: usize, msr: u32) -> Option<Answer> {
        self.advance(now);
        let now = self.now;
        let apic = self.apics.get_mut(cpu)?;
        let read = match msr {
            APIC_BASE => Ok(apic.base()),
            TSC_DEADLINE => Ok(apic.deadline()),
            X2APIC_FIRST..=X2APIC_LAST => apic.rdmsr(msr.to_le_bytes()[0], now),
            _ => return None,
        };
        Some(read.map_or(Answer::Gp, Answer::Value))
    }

    /// WRMSR by `cpu`, likewise. Whether CPUID shows an APIC follows from what
    /// `IA32_APIC_BASE` reads then.
    pub fn wrmsr(&mut self, now: u64, cpu: usize, msr: u32, value: u64) -> Option<Answer> {
        self.advance(now);
        let apic = self.apics.get_mut(cpu)?;
        let written = match msr {
            APIC_BASE => apic.set_base(value).map(|()| Effect::None),
            TSC_DEADLINE => {
                apic.set_deadline(value);
                Ok(Effect::None)
            }
            X2APIC_FIRST..=X2APIC_LAST => apic.wrmsr(msr.to_le_bytes()[0], value, self.now),
            _ => return None,
        };
        // A deadline that has passed is one.
        apic.advance(self.now);
        match written {
            Ok(effect) => {
                self.bring_about(effect);
                Some(Answer::Done)
            }
            Err(Refused) => Some(Answer::Gp),
        }
    }

    /// A load by `cpu` of `len` bytes, 1 to 8, from its APIC's page or the I/O APIC's. None
    /// if the address is in neither.
    pub fn mmio_read(&mut self, now: u64, cpu: usize, address: u64, len: u8) -> Option<Answer> {
        self.advance(now);
        let now = self.now;
        if let Some(offset) = ioapic_offset(address) {
            return Some(Answer::Value(first(self.ioapic.load(offset).into(), len)));
        }
        let apic = self.apics.get_mut(cpu)?;
        let (register, byte) = apic_offset(apic.page()?, address)?;
        // Bytes 4 to 15 of a register are not there; nor is a register only looked at there.
        let value = match byte {
            0..4 => u64::from(apic.load(register, now)) >> (8 * byte),
            _ => 0,
        };
        Some(Answer::Value(first(value, len)))
    }

    /// A store by `cpu`, likewise: to its APIC, 4 aligned bytes or none.
    pub fn mmio_write(
        &mut self,
        now: u64,
        cpu: usize,
        address: u64,
        len: u8,
        value: u64,
    ) -> Option<Answer> {
        self.advance(now);
        let value = low(first(value, len));
        if let Some(offset) = ioapic_offset(address) {
            match self.ioapic.eoi_register(offset, value) {
                Some(vector) => self.ioapic.end_of(vector),
                None => self.ioapic.store(offset, value),
            }
            self.serve_all();
            return Some(Answer::Done);
        }
        let apic = self.apics.get_mut(cpu)?;
        let (register, byte) = apic_offset(apic.page()?, address)?;
        if (byte, len) == (0, 4) {
            let effect = apic.store(register, value, self.now);
            self.bring_about(effect);
        }
        Some(Answer::Done)
    }

    /// IN of a byte: 20h, 21h, A0h, A1h, 4D0h, 4D1h; 40h to 43h, 61h. None if it is another
    /// port. Who reads words reads bytes.
    pub fn port_read(&mut self, now: u64, port: u16) -> Option<Answer> {
        self.advance(now);
        let value = self.pic.read(port).or_else(|| self.pit.read(port))?;
        Some(Answer::Value(value.into()))
    }

    /// OUT of a byte, likewise.
    pub fn port_write(&mut self, now: u64, port: u16, value: u8) -> Option<Answer> {
        self.advance(now);
        let written = self.pic.write(port, value);
        written.or_else(|| self.pit.write(port, value))?;
        Some(Answer::Done)
    }
}

/// The first `len` bytes.
fn first(value: u64, len: u8) -> u64 {
    match len {
        0..8 => value & ((1 << (8 * len)) - 1),
        _ => value,
    }
}

fn ioapic_offset(address: u64) -> Option<u8> {
    let offset = address.checked_sub(IOAPIC_START)?;
    u8::try_from(offset).ok()
}

/// The register, and the byte in it, 0 to 15.
fn apic_offset(page: u64, address: u64) -> Option<(u8, u8)> {
    let offset = u16::try_from(address.checked_sub(page)?).ok()?;
    let register = u8::try_from(offset >> 4).ok()?;
    Some((register, offset.to_le_bytes()[0] & 0xf))
}
