//! A machine whose registers are short to write down.

use irqchip::{Answer, Chips, Delivery, IoApicVersion, Machine};

pub(crate) const TPR: u8 = 0x08;
pub(crate) const PPR: u8 = 0x0a;
pub(crate) const EOI: u8 = 0x0b;
pub(crate) const LDR: u8 = 0x0d;
pub(crate) const DFR: u8 = 0x0e;
pub(crate) const SVR: u8 = 0x0f;
pub(crate) const ISR: u8 = 0x10;
pub(crate) const TMR: u8 = 0x18;
pub(crate) const IRR: u8 = 0x20;
pub(crate) const ESR: u8 = 0x28;
pub(crate) const ICR: u8 = 0x30;
pub(crate) const ICR_HIGH: u8 = 0x31;
pub(crate) const LVT_TIMER: u8 = 0x32;
pub(crate) const LVT_THERMAL: u8 = 0x33;
pub(crate) const LVTPC: u8 = 0x34;
pub(crate) const LVT_LINT0: u8 = 0x35;
pub(crate) const LVT_LINT1: u8 = 0x36;
pub(crate) const LVT_ERROR: u8 = 0x37;
pub(crate) const INITIAL: u8 = 0x38;
pub(crate) const CURRENT: u8 = 0x39;
pub(crate) const DIVIDE: u8 = 0x3e;
pub(crate) const SELF_IPI: u8 = 0x3f;

pub(crate) const APIC_BASE: u32 = 0x1b;
pub(crate) const DEADLINE: u32 = 0x6e0;
pub(crate) const ENABLE: u64 = 1 << 11;
pub(crate) const X2APIC: u64 = 1 << 10;
pub(crate) const PAGE: u64 = 0xfee0_0000;
pub(crate) const IOAPIC: u64 = 0xfec0_0000;

/// The TSC and the timers' clock.
pub(crate) const TSC_HZ: u64 = 2_000_000_000;
pub(crate) const APIC_HZ: u64 = 1_000_000_000;

pub(crate) fn machine(cpus: usize, ioapic: IoApicVersion) -> Machine {
    Machine {
        cpus,
        tsc_hz: TSC_HZ,
        apic_hz: APIC_HZ,
        physical_bits: 41,
        ioapic,
    }
}

/// Chips, and what time it is.
pub(crate) struct Board {
    pub(crate) chips: Chips,
    pub(crate) now: u64,
}

impl Board {
    /// APICs enabled by software, all CPUs started, in xAPIC mode.
    pub(crate) fn new(cpus: usize) -> Self {
        Self::with(cpus, IoApicVersion::V11)
    }

    pub(crate) fn with(cpus: usize, ioapic: IoApicVersion) -> Self {
        let mut board = Self::reset(cpus, ioapic);
        for cpu in 0..cpus {
            board.store(cpu, SVR, 0x1ff);
        }
        for cpu in 1..cpus {
            board.send(0, cpu, 0x4500);
            board.send(0, cpu, 0x4600);
            assert_eq!(board.take(cpu), Some(Delivery::Init));
            assert_eq!(board.take(cpu), Some(Delivery::Sipi(0)));
            board.store(cpu, SVR, 0x1ff);
        }
        board
    }

    /// As after power-up.
    pub(crate) fn reset(cpus: usize, ioapic: IoApicVersion) -> Self {
        Self {
            chips: Chips::new(&machine(cpus, ioapic)).unwrap(),
            now: 0,
        }
    }

    /// The same in x2APIC mode.
    pub(crate) fn x2apic(cpus: usize) -> Self {
        let mut board = Self::new(cpus);
        for cpu in 0..cpus {
            let base = board.base(cpu);
            assert_eq!(board.set_base(cpu, base | X2APIC), Answer::Done);
        }
        board
    }

    pub(crate) fn base(&mut self, cpu: usize) -> u64 {
        match self.chips.rdmsr(self.now, cpu, APIC_BASE) {
            Some(Answer::Value(base)) => base,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn set_base(&mut self, cpu: usize, base: u64) -> Answer {
        self.chips.wrmsr(self.now, cpu, APIC_BASE, base).unwrap()
    }

    pub(crate) fn load(&mut self, cpu: usize, register: u8) -> u32 {
        let address = PAGE + u64::from(register) * 16;
        match self.chips.mmio_read(self.now, cpu, address, 4) {
            Some(Answer::Value(value)) => value.try_into().unwrap(),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn store(&mut self, cpu: usize, register: u8, value: u32) {
        let address = PAGE + u64::from(register) * 16;
        let answer = self
            .chips
            .mmio_write(self.now, cpu, address, 4, value.into());
        assert_eq!(answer, Some(Answer::Done));
    }

    pub(crate) fn rdmsr(&mut self, cpu: usize, register: u8) -> Answer {
        let msr = 0x800 + u32::from(register);
        self.chips.rdmsr(self.now, cpu, msr).unwrap()
    }

    pub(crate) fn wrmsr(&mut self, cpu: usize, register: u8, value: u64) -> Answer {
        let msr = 0x800 + u32::from(register);
        self.chips.wrmsr(self.now, cpu, msr, value).unwrap()
    }

    /// An IPI by the xAPIC's ICR.
    pub(crate) fn send(&mut self, cpu: usize, to: usize, command: u32) {
        self.store(cpu, ICR_HIGH, u32::try_from(to).unwrap() << 24);
        self.store(cpu, ICR, command);
    }

    pub(crate) fn pending(&self, cpu: usize) -> Vec<Delivery> {
        self.chips.pending(cpu).collect()
    }

    /// Takes the most urgent.
    pub(crate) fn take(&mut self, cpu: usize) -> Option<Delivery> {
        let first = self.chips.pending(cpu).next()?;
        self.chips.acknowledge(cpu, first)
    }

    pub(crate) fn vector(&mut self, cpu: usize) -> Option<u8> {
        match self.take(cpu) {
            Some(Delivery::Vector(vector)) => Some(vector),
            None => None,
            other => panic!("{other:?}"),
        }
    }

    /// Goes to the next deadline.
    pub(crate) fn sleep(&mut self) -> u64 {
        self.now = self.chips.next_deadline().unwrap();
        self.chips.advance(self.now);
        self.now
    }

    pub(crate) fn advance(&mut self, ticks: u64) {
        self.now += ticks;
        self.chips.advance(self.now);
    }

    pub(crate) fn ioapic(&mut self, index: u8) -> u32 {
        self.chips.mmio_write(self.now, 0, IOAPIC, 4, index.into());
        match self.chips.mmio_read(self.now, 0, IOAPIC + 0x10, 4) {
            Some(Answer::Value(value)) => value.try_into().unwrap(),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn set_ioapic(&mut self, index: u8, value: u32) {
        self.chips.mmio_write(self.now, 0, IOAPIC, 4, index.into());
        let answer = self
            .chips
            .mmio_write(self.now, 0, IOAPIC + 0x10, 4, value.into());
        assert_eq!(answer, Some(Answer::Done));
    }

    /// A pin's entry, as software that is not interrupted writes it.
    pub(crate) fn wire(&mut self, pin: u8, to: u32, entry: u32) {
        self.set_ioapic(0x11 + 2 * pin, to << 24);
        self.set_ioapic(0x10 + 2 * pin, entry);
    }

    pub(crate) fn port(&mut self, port: u16) -> u8 {
        match self.chips.port_read(self.now, port) {
            Some(Answer::Value(value)) => value.try_into().unwrap(),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn set_port(&mut self, port: u16, value: u8) {
        let answer = self.chips.port_write(self.now, port, value);
        assert_eq!(answer, Some(Answer::Done));
    }
}
