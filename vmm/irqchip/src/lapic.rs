//! A local APIC (SDM 3A, chapter 11).

use serde::{Deserialize, Serialize};

use crate::bits::{Vectors, byte, low, with_low};
use crate::message::{Destination, Message, Order, Trigger};
use crate::registers::{ICR_WRITABLE, Lvt, Register, SVR_SUPPRESS, SVR_WRITABLE};
use crate::time::Rate;
use crate::timer::{ApicTimer, Expiry, TimerMode};

/// What a CPU is to be given at an instruction's boundary, most urgent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Delivery {
    /// The CPU resets as for INIT, and waits for a SIPI unless it is the bootstrap processor.
    Init,
    /// It leaves that wait at the real-mode address `vector` × 1000h. No CPU that does not
    /// wait is offered one.
    Sipi(u8),
    /// A system management interrupt.
    Smi,
    /// An NMI. Blocking is the CPU's.
    Nmi,
    /// An interrupt that RFLAGS.IF allows.
    Vector(u8),
}

/// Whether a CPU executes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Activity {
    /// It does, or has halted itself.
    Runs,
    /// It waits for a SIPI, and takes nothing else but INIT.
    WaitsForStartup,
}

/// Local interrupt pins of a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lint {
    /// LINT0, where an 8259 would be.
    Zero,
    /// LINT1, where NMIs of the machine come in.
    One,
}

/// A register is not there, or not to be written so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Refused;

/// What an access makes others do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    None,
    /// The end of a level-triggered interrupt.
    EndOf(u8),
    Send(Message),
}

/// Whether somebody took a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Receipt {
    Accepted,
    Ignored,
}

/// Whether EOIs of level-triggered interrupts can be kept from being broadcast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum EoiBroadcast {
    Always,
    Suppressible,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
enum Mode {
    Disabled,
    XApic,
    X2Apic,
}

impl Mode {
    /// Of `IA32_APIC_BASE`.
    fn of(base: u64) -> Option<Self> {
        match base & (BASE_ENABLE | BASE_X2APIC) {
            0 => Some(Self::Disabled),
            BASE_ENABLE => Some(Self::XApic),
            BASE_X2APIC => None,
            _ => Some(Self::X2Apic),
        }
    }
}

const BASE_BOOTSTRAP: u64 = 1 << 8;
const BASE_X2APIC: u64 = 1 << 10;
const BASE_ENABLE: u64 = 1 << 11;
const BASE_ADDRESS: u64 = 0xfee0_0000;

/// Version 14h, an entry for each LVT.
const VERSION: u32 = 0x14 | 5 << 16;
const VERSION_SUPPRESS: u32 = 1 << 24;

const LVT_MASKED: u32 = 1 << 16;
const SVR_ENABLED: u32 = 1 << 8;
const SVR_RESET: u32 = 0xff;
const DFR_RESET: u32 = 0xffff_ffff;

const ERROR_SEND_VECTOR: u32 = 1 << 5;
const ERROR_RECEIVED_VECTOR: u32 = 1 << 6;
const ERROR_REGISTER: u32 = 1 << 7;

/// Vectors below are the processor's own.
const FIRST_VECTOR: u8 = 16;

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct LocalApic {
    id: u32,
    physical_bits: u32,
    eoi_broadcast: EoiBroadcast,
    base: u64,
    mode: Mode,
    tpr: u8,
    ldr: u32,
    dfr: u32,
    svr: u32,
    isr: Vectors,
    tmr: Vectors,
    irr: Vectors,
    /// What ESR shows, and what it will after a write.
    shown_errors: u32,
    errors: u32,
    icr: u64,
    lvt: [u32; Lvt::COUNT],
    timer: ApicTimer,
    activity: Activity,
    /// What is latched until the CPU takes it.
    init: bool,
    sipi: Option<u8>,
    smi: bool,
    nmi: bool,
}

impl LocalApic {
    /// As after power-up: in xAPIC mode, CPU 0 is the bootstrap processor and the others wait.
    pub(crate) fn new(
        id: u32,
        rate: Rate,
        physical_bits: u32,
        eoi_broadcast: EoiBroadcast,
    ) -> Self {
        let (role, activity) = match id {
            0 => (BASE_BOOTSTRAP, Activity::Runs),
            _ => (0, Activity::WaitsForStartup),
        };
        Self {
            id,
            physical_bits,
            eoi_broadcast,
            base: BASE_ADDRESS | BASE_ENABLE | role,
            mode: Mode::XApic,
            tpr: 0,
            ldr: 0,
            dfr: DFR_RESET,
            svr: SVR_RESET,
            isr: Vectors::default(),
            tmr: Vectors::default(),
            irr: Vectors::default(),
            shown_errors: 0,
            errors: 0,
            icr: 0,
            lvt: [LVT_MASKED; Lvt::COUNT],
            timer: ApicTimer::new(rate),
            activity,
            init: false,
            sipi: None,
            smi: false,
            nmi: false,
        }
    }

    /// Registers as INIT leaves them; mode and address stay.
    fn reset(&mut self) {
        self.tpr = 0;
        self.ldr = match self.mode {
            Mode::X2Apic => self.x2apic_ldr(),
            _ => 0,
        };
        self.dfr = DFR_RESET;
        self.svr = SVR_RESET;
        self.isr = Vectors::default();
        self.tmr = Vectors::default();
        self.irr = Vectors::default();
        self.shown_errors = 0;
        self.errors = 0;
        self.icr = 0;
        self.lvt = [LVT_MASKED; Lvt::COUNT];
        self.timer.reset();
    }

    /// Cluster in bits 31:16, a bit in it below.
    fn x2apic_ldr(&self) -> u32 {
        (self.id >> 4) << 16 | 1 << (self.id & 15)
    }

    pub(crate) fn base(&self) -> u64 {
        self.base
    }

    /// Writes `IA32_APIC_BASE`. Of the ways between modes (figure 11-27), to x2APIC mode there
    /// is one, and out of it only the one that disables.
    pub(crate) fn set_base(&mut self, base: u64) -> Result<(), Refused> {
        let address = (1u64 << self.physical_bits) - (1 << 12);
        if base & !(address | BASE_BOOTSTRAP | BASE_X2APIC | BASE_ENABLE) != 0 {
            return Err(Refused);
        }
        let mode = Mode::of(base).ok_or(Refused)?;
        match (self.mode, mode) {
            (Mode::Disabled, Mode::X2Apic) | (Mode::X2Apic, Mode::XApic) => return Err(Refused),
            (Mode::XApic, Mode::X2Apic) => {
                self.mode = mode;
                self.ldr = self.x2apic_ldr();
                self.icr &= 0xffff_ffff;
            }
            (Mode::XApic | Mode::X2Apic, Mode::Disabled) => {
                self.mode = mode;
                self.reset();
            }
            _ => self.mode = mode,
        }
        self.base = base;
        Ok(())
    }

    /// Where its registers are in memory, if they are: 4 KiB.
    pub(crate) fn page(&self) -> Option<u64> {
        (self.mode == Mode::XApic).then_some(self.base & !0xfff)
    }

    /// 32 bits at an offset in its page. What is no register reads 0 and is an error.
    pub(crate) fn load(&mut self, offset: u8, now: u64) -> u32 {
        match Register::at(offset).filter(|register| register.in_memory()) {
            Some(register) => low(self.read(register, now)),
            None => {
                self.error(ERROR_REGISTER);
                0
            }
        }
    }

    /// Registers that are read-only stay as they are.
    pub(crate) fn store(&mut self, offset: u8, value: u32, now: u64) -> Effect {
        match Register::at(offset).filter(|register| register.in_memory()) {
            Some(register) => self.write(register, value.into(), now),
            None => {
                self.error(ERROR_REGISTER);
                Effect::None
            }
        }
    }

    fn at_msr(&self, number: u8) -> Result<Register, Refused> {
        match self.mode {
            Mode::X2Apic => Register::at(number).ok_or(Refused),
            _ => Err(Refused),
        }
    }

    /// RDMSR of 800h + `number`.
    pub(crate) fn rdmsr(&mut self, number: u8, now: u64) -> Result<u64, Refused> {
        let register = self.at_msr(number)?;
        if register.readable_msr() {
            Ok(self.read(register, now))
        } else {
            Err(Refused)
        }
    }

    /// WRMSR of 800h + `number`.
    pub(crate) fn wrmsr(&mut self, number: u8, value: u64, now: u64) -> Result<Effect, Refused> {
        let register = self.at_msr(number)?;
        let writable = register.writable_msr(self.svr_writable()).ok_or(Refused)?;
        if value & !writable != 0 {
            return Err(Refused);
        }
        Ok(self.write(register, value, now))
    }

    fn svr_writable(&self) -> u32 {
        match self.eoi_broadcast {
            EoiBroadcast::Always => SVR_WRITABLE,
            EoiBroadcast::Suppressible => SVR_WRITABLE | SVR_SUPPRESS,
        }
    }

    fn read(&self, register: Register, now: u64) -> u64 {
        let value = match register {
            Register::Id if self.mode == Mode::X2Apic => self.id,
            Register::Id => self.id << 24,
            Register::Version => match self.eoi_broadcast {
                EoiBroadcast::Always => VERSION,
                EoiBroadcast::Suppressible => VERSION | VERSION_SUPPRESS,
            },
            Register::Tpr => self.tpr.into(),
            // Arbitration and remote reads ended with the APICs' own bus; EOI is written only.
            Register::Apr | Register::RemoteRead | Register::Eoi | Register::SelfIpi => 0,
            Register::Ppr => self.ppr().into(),
            Register::Ldr => self.ldr,
            Register::Dfr => self.dfr,
            Register::Svr => self.svr,
            Register::Isr(at) => self.isr.word(at),
            Register::Tmr(at) => self.tmr.word(at),
            Register::Irr(at) => self.irr.word(at),
            Register::Esr => self.shown_errors,
            Register::IcrLow => return self.icr,
            Register::IcrHigh => low(self.icr >> 32),
            Register::Lvt(lvt) => self.lvt[lvt.index()],
            Register::InitialCount => self.timer.initial(),
            Register::CurrentCount => self.timer.current(now),
            Register::Divide => self.timer.divide(),
        };
        value.into()
    }

    fn write(&mut self, register: Register, value: u64, now: u64) -> Effect {
        let word = low(value);
        match register {
            Register::Tpr => self.tpr = byte(word),
            Register::Eoi => return self.end_of_interrupt(),
            Register::Ldr => self.ldr = word & 0xff00_0000,
            Register::Dfr => self.dfr = word | 0x0fff_ffff,
            Register::Svr => self.set_svr(word),
            Register::Esr => self.shown_errors = std::mem::take(&mut self.errors),
            Register::IcrLow => {
                let command = u64::from(word & ICR_WRITABLE);
                self.icr = match self.mode {
                    Mode::X2Apic => value & !0xffff_ffff | command,
                    _ => with_low(self.icr, word & ICR_WRITABLE),
                };
                return self.command();
            }
            Register::IcrHigh => {
                self.icr = u64::from(word & 0xff00_0000) << 32 | self.icr & 0xffff_ffff;
            }
            Register::Lvt(lvt) => self.set_lvt(lvt, word),
            Register::InitialCount => self.timer.set_initial(word, now),
            Register::Divide => self.timer.set_divide(word, now),
            Register::SelfIpi => {
                let destination = Destination::Itself(self.index());
                return self.send(destination, Order::Fixed(byte(word)));
            }
            Register::Id
            | Register::Version
            | Register::Apr
            | Register::Ppr
            | Register::RemoteRead
            | Register::Isr(_)
            | Register::Tmr(_)
            | Register::Irr(_)
            | Register::CurrentCount => {}
        }
        Effect::None
    }

    /// Disabled by software, all of the LVT is masked.
    fn set_svr(&mut self, svr: u32) {
        self.svr = svr & self.svr_writable();
        if self.svr & SVR_ENABLED == 0 {
            for entry in &mut self.lvt {
                *entry |= LVT_MASKED;
            }
        }
    }

    fn set_lvt(&mut self, lvt: Lvt, value: u32) {
        let mut entry = value & lvt.writable();
        if self.svr & SVR_ENABLED == 0 {
            entry |= LVT_MASKED;
        }
        self.lvt[lvt.index()] = entry;
        if lvt == Lvt::Timer {
            self.timer.set_mode(TimerMode::of(entry));
        }
    }

    /// LVTPC, as it is latched.
    pub(crate) fn lvtpc(&self) -> u32 {
        self.lvt[Lvt::Counters.index()]
    }

    pub(crate) fn mask_lvtpc(&mut self) {
        self.lvt[Lvt::Counters.index()] |= LVT_MASKED;
    }

    /// `IA32_TSC_DEADLINE`, which is there in every mode of the APIC.
    pub(crate) fn deadline(&self) -> u64 {
        self.timer.deadline()
    }

    pub(crate) fn set_deadline(&mut self, deadline: u64) {
        self.timer.set_deadline(deadline);
    }

    /// When its timer will be felt.
    pub(crate) fn next(&self) -> Option<u64> {
        let masked = self.lvt[Lvt::Timer.index()] & LVT_MASKED != 0;
        self.timer.next().filter(|_| !masked)
    }

    pub(crate) fn advance(&mut self, now: u64) {
        if self.timer.advance(now) == Expiry::Expired {
            self.local(Lvt::Timer);
        }
    }

    /// A pulse on a local pin.
    pub(crate) fn pulse(&mut self, lint: Lint) {
        self.local(match lint {
            Lint::Zero => Lvt::Lint0,
            Lint::One => Lvt::Lint1,
        });
    }

    /// An interrupt by an entry of the LVT. Entries without delivery mode have 0 there. INIT
    /// and SMI need no vector; lowest priority and SIPI are no local modes.
    fn local(&mut self, lvt: Lvt) {
        let entry = self.lvt[lvt.index()];
        if entry & LVT_MASKED != 0 {
            return;
        }
        match Order::of(entry >> 8, byte(entry)) {
            None | Some(Order::Lowest(_) | Order::Startup(_)) => {}
            Some(order) => {
                self.accept(order, Trigger::Edge);
            }
        }
    }

    /// Collects an error; a new one makes an interrupt.
    fn error(&mut self, error: u32) {
        if self.errors & error == 0 {
            self.errors |= error;
            self.local(Lvt::Error);
        }
    }

    fn index(&self) -> usize {
        usize::try_from(self.id).unwrap_or(usize::MAX)
    }

    /// ICR was written.
    fn command(&mut self) -> Effect {
        const LOGICAL: u32 = 1 << 11;
        const ASSERT: u32 = 1 << 14;
        const LEVEL: u32 = 1 << 15;
        let icr = low(self.icr);
        let Some(order) = Order::of(icr >> 8, byte(icr)) else {
            return Effect::None;
        };
        // The de-assertion that synchronised arbitration IDs.
        if order == Order::Init && icr & (LEVEL | ASSERT) == LEVEL {
            return Effect::None;
        }
        let (address, all) = match self.mode {
            Mode::X2Apic => (low(self.icr >> 32), u32::MAX),
            _ => (low(self.icr >> 56), 0xff),
        };
        let destination = match icr >> 18 & 3 {
            1 => Destination::Itself(self.index()),
            2 => Destination::All,
            3 => Destination::AllBut(self.index()),
            _ if address == all => Destination::All,
            _ if icr & LOGICAL != 0 => Destination::Logical(address),
            _ => Destination::Physical(address),
        };
        self.send(destination, order)
    }

    /// IPIs are edges. One with an illegal vector is an error here, and there.
    fn send(&mut self, destination: Destination, order: Order) -> Effect {
        if let Order::Fixed(vector) | Order::Lowest(vector) = order
            && vector < FIRST_VECTOR
        {
            self.error(ERROR_SEND_VECTOR);
        }
        Effect::Send(Message {
            destination,
            order,
            trigger: Trigger::Edge,
        })
    }

    /// Whether a message is for it (SDM 3A, 11.6.2).
    pub(crate) fn is_addressed(&self, destination: Destination) -> bool {
        if self.mode == Mode::Disabled {
            return false;
        }
        match destination {
            Destination::All => true,
            Destination::AllBut(other) => self.index() != other,
            Destination::Itself(this) => self.index() == this,
            Destination::Physical(id) => self.id == id,
            Destination::Logical(address) if self.mode == Mode::X2Apic => {
                self.ldr >> 16 == address >> 16 && self.ldr & address & 0xffff != 0
            }
            Destination::Logical(address) => self.matches_xapic(address),
        }
    }

    fn matches_xapic(&self, address: u32) -> bool {
        let logical = self.ldr >> 24;
        match self.dfr >> 28 {
            _ if address > 0xff => false,
            0xf => logical & address != 0,
            0 => logical >> 4 == address >> 4 && logical & address & 0xf != 0,
            _ => false,
        }
    }

    /// Whether it may be chosen for an interrupt of lowest priority, and how good a choice
    /// it is: the lower the better.
    pub(crate) fn burden(&self) -> Option<u8> {
        self.takes_vectors().then(|| self.ppr())
    }

    pub(crate) fn takes_vectors(&self) -> bool {
        self.mode != Mode::Disabled && self.svr & SVR_ENABLED != 0
    }

    /// Takes what a message orders.
    pub(crate) fn accept(&mut self, order: Order, trigger: Trigger) -> Receipt {
        match order {
            Order::Fixed(vector) | Order::Lowest(vector) => {
                return self.accept_vector(vector, trigger);
            }
            Order::Smi => self.smi = true,
            Order::Nmi => self.nmi = true,
            Order::Init => {
                self.init = true;
                self.sipi = None;
            }
            Order::Startup(vector) => {
                // One that waits, or will when it has taken its INIT, begins by the first.
                let waits = self.init || self.activity == Activity::WaitsForStartup;
                if waits && self.sipi.is_none() {
                    self.sipi = Some(vector);
                }
            }
        }
        Receipt::Accepted
    }

    fn accept_vector(&mut self, vector: u8, trigger: Trigger) -> Receipt {
        if !self.takes_vectors() {
            return Receipt::Ignored;
        }
        if vector < FIRST_VECTOR {
            self.error(ERROR_RECEIVED_VECTOR);
            return Receipt::Ignored;
        }
        self.irr.insert(vector);
        match trigger {
            Trigger::Edge => self.tmr.remove(vector),
            Trigger::Level => self.tmr.insert(vector),
        }
        Receipt::Accepted
    }

    /// Processor priority: the higher class of TPR and of what is in service.
    fn ppr(&self) -> u8 {
        let serving = self.isr.highest().unwrap_or(0);
        if self.tpr >> 4 >= serving >> 4 {
            self.tpr
        } else {
            serving & 0xf0
        }
    }

    /// CR8, which is bits 7:4 of TPR.
    pub(crate) fn cr8(&self) -> u8 {
        self.tpr >> 4
    }

    pub(crate) fn set_cr8(&mut self, cr8: u8) {
        self.tpr = cr8 << 4;
    }

    /// The interrupt that is to be taken next, if priorities let one through.
    fn deliverable(&self) -> Option<u8> {
        let vector = self.irr.highest()?;
        (vector >> 4 > self.ppr() >> 4).then_some(vector)
    }

    /// The CPU executes, whatever it waited for.
    pub(crate) fn start(&mut self) {
        self.activity = Activity::Runs;
    }

    pub(crate) fn activity(&self) -> Activity {
        self.activity
    }

    /// All that the CPU could take now, most urgent first. A CPU that waits takes no more
    /// than INIT and SIPI; the rest stays pending.
    pub(crate) fn pending(&self) -> impl Iterator<Item = Delivery> + use<> {
        let waits = self.activity == Activity::WaitsForStartup;
        let start = self.sipi.filter(|_| waits && !self.init);
        let all = [
            self.init.then_some(Delivery::Init),
            start.map(Delivery::Sipi),
            (self.smi && !waits).then_some(Delivery::Smi),
            (self.nmi && !waits).then_some(Delivery::Nmi),
            self.deliverable().filter(|_| !waits).map(Delivery::Vector),
        ];
        all.into_iter().flatten()
    }

    /// The CPU takes `delivery`: what it gets. An interrupt that priorities keep back by now
    /// is the spurious one.
    pub(crate) fn acknowledge(&mut self, delivery: Delivery) -> Option<Delivery> {
        match delivery {
            Delivery::Init => {
                if !std::mem::take(&mut self.init) {
                    return None;
                }
                self.smi = false;
                self.nmi = false;
                self.reset();
                self.activity = match self.base & BASE_BOOTSTRAP {
                    0 => Activity::WaitsForStartup,
                    _ => Activity::Runs,
                };
                Some(Delivery::Init)
            }
            Delivery::Sipi(_) => {
                if self.activity != Activity::WaitsForStartup || self.init {
                    return None;
                }
                let vector = self.sipi.take()?;
                self.activity = Activity::Runs;
                Some(Delivery::Sipi(vector))
            }
            Delivery::Smi => std::mem::take(&mut self.smi).then_some(Delivery::Smi),
            Delivery::Nmi => std::mem::take(&mut self.nmi).then_some(Delivery::Nmi),
            Delivery::Vector(_) => Some(Delivery::Vector(self.inta())),
        }
    }

    /// The processor asks for its vector.
    fn inta(&mut self) -> u8 {
        let Some(vector) = self.deliverable() else {
            return byte(self.svr);
        };
        self.irr.remove(vector);
        self.isr.insert(vector);
        vector
    }

    fn end_of_interrupt(&mut self) -> Effect {
        let Some(vector) = self.isr.highest() else {
            return Effect::None;
        };
        self.isr.remove(vector);
        let suppressed = self.svr & SVR_SUPPRESS != 0;
        if self.tmr.contains(vector) && !suppressed {
            Effect::EndOf(vector)
        } else {
            Effect::None
        }
    }
}
