//! What happened, and when.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use arbiter::CounterId;
use pmu_virt::{
    CountRequest, CounterBackend, CounterSet, FixedFunction, MsrIndex, PmuModel, ReadOutcome,
    Register, Ring, WriteOutcome,
};
use serde::Serialize;
use vmm::devices::Platform;
use vmm::devices::ports::TEST_EXIT;
use vmm::devices::{DeviceClock, DeviceOutcome, GuestEnd};
use vmm::emu::VirtualClock;
use vmm::kvm::VcpuId;
use vmm::micro::UNEXPECTED_VECTOR_PORT;
use vmm::sync::lock;
use vmm::vcpu::{Observer, PmiDelivery, PmiRoute, TrapEvent};

use super::guest::{GP_PORT, NMI_PORT, PROGRAM_PORT};

/// One thing that happened.
#[derive(Debug, Clone, PartialEq)]
pub struct Happening {
    /// Microseconds since the vCPU first ran.
    pub micros: u64,
    /// Which vCPU.
    pub vcpu: VcpuId,
    pub what: What,
}

/// What happened.
#[derive(Debug, Clone, PartialEq)]
pub enum What {
    /// The trap path reported it.
    Trap(TrapEvent),
    /// The guest wrote to a port.
    Port { port: u16, value: u32 },
}

/// Collects happenings; also the guest's devices.
#[derive(Debug)]
pub(super) struct Record {
    vcpu: VcpuId,
    clock: Clock,
    happenings: Mutex<Vec<Happening>>,
}

/// The time of happenings.
#[derive(Debug)]
enum Clock {
    /// The host's, since then.
    Host(Mutex<Instant>),
    /// The guest's own.
    Virtual(VirtualClock),
}

impl Record {
    pub(super) fn new(vcpu: VcpuId) -> Self {
        Self {
            vcpu,
            clock: Clock::Host(Mutex::new(Instant::now())),
            happenings: Mutex::default(),
        }
    }

    /// Of a guest in virtual time.
    pub(super) fn in_virtual_time(vcpu: VcpuId, clock: VirtualClock) -> Self {
        Self {
            clock: Clock::Virtual(clock),
            ..Self::new(vcpu)
        }
    }

    /// Time counts from now.
    pub(super) fn start(&self) {
        if let Clock::Host(start) = &self.clock {
            *lock(start) = Instant::now();
        }
    }

    pub(super) fn happenings(&self) -> Vec<Happening> {
        lock(&self.happenings).clone()
    }

    fn add(&self, vcpu: VcpuId, what: What) {
        let elapsed = match &self.clock {
            Clock::Host(start) => lock(start).elapsed(),
            Clock::Virtual(clock) => clock.elapsed(),
        };
        let micros = u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX);
        lock(&self.happenings).push(Happening { micros, vcpu, what });
    }
}

/// Hands the trap path's reports to the record.
#[derive(Debug)]
pub(super) struct Witness(pub(super) Arc<Record>);

impl Observer for Witness {
    fn event(&mut self, vcpu: VcpuId, event: &TrapEvent) {
        // How RDPMC is trapped is no access of the guest's.
        if !matches!(event, TrapEvent::Armed(_)) {
            self.0.add(vcpu, What::Trap(event.clone()));
        }
    }
}

impl Platform for Record {
    fn port_read(&self, _: u16, _: u8, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn port_write(&self, port: u16, _: u8, data: &[u8]) -> DeviceOutcome {
        let value = u32::from_le_bytes(data.try_into().unwrap_or([0xff; 4]));
        self.add(self.vcpu, What::Port { port, value });
        match port {
            TEST_EXIT => DeviceOutcome::Exit(GuestEnd::TestExit(value)),
            UNEXPECTED_VECTOR_PORT => DeviceOutcome::Exit(GuestEnd::TestExit(value.max(1))),
            _ => DeviceOutcome::Continue,
        }
    }

    fn mmio_read(&self, _: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn mmio_write(&self, _: u64, _: &[u8]) {}
}

/// One row of the table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    /// Microseconds since the vCPU first ran.
    pub time_us: u64,
    /// Number of the vCPU.
    pub vcpu: u32,
    /// What the guest did, or what was done to it.
    pub what: &'static str,
    /// The register or port, by name and index.
    pub register: String,
    /// The value written, or read.
    pub value: Option<String>,
    /// What it came to.
    pub outcome: String,
}

/// `happenings` in words.
pub(super) fn describe(
    happenings: &[Happening],
    model: &PmuModel,
    backend: &dyn CounterBackend,
) -> Vec<Row> {
    let mut teller = Teller {
        model,
        backend,
        frozen: CounterSet::EMPTY,
    };
    happenings.iter().map(|one| teller.row(one)).collect()
}

/// Puts happenings into words, and remembers which counters nobody counts for.
struct Teller<'a> {
    model: &'a PmuModel,
    backend: &'a dyn CounterBackend,
    frozen: CounterSet,
}

impl Teller<'_> {
    fn row(&mut self, happening: &Happening) -> Row {
        let (what, register, value, outcome) = match &happening.what {
            What::Trap(event) => self.trap(event),
            What::Port { port, value } => {
                let register = format!("port {port:#x}");
                let value = Some(hex((*value).into()));
                ("OUT", register, value, port_meaning(*port).to_owned())
            }
        };
        Row {
            time_us: happening.micros,
            vcpu: happening.vcpu.0,
            what,
            register,
            value,
            outcome,
        }
    }

    fn trap(&mut self, event: &TrapEvent) -> Cells {
        match event {
            TrapEvent::MsrRead { msr, outcome } => {
                let counter = match self.model.decode(*msr) {
                    Some(Register::Counter { counter, .. }) => Some(counter),
                    _ => None,
                };
                let (value, outcome) = self.read(*outcome, counter);
                ("RDMSR", msr_name(*msr, self.model), value, outcome)
            }
            TrapEvent::MsrWrite {
                msr,
                value,
                outcome,
            } => {
                let outcome = match outcome {
                    WriteOutcome::Done => self.written(*msr, *value),
                    WriteOutcome::Gp => "#GP into the guest".to_owned(),
                    WriteOutcome::NotHandled => "no such register: #GP into the guest".to_owned(),
                };
                let register = msr_name(*msr, self.model);
                ("WRMSR", register, Some(hex(*value)), outcome)
            }
            TrapEvent::Secret { msr, write, gp } => {
                let what = if *write { "WRMSR" } else { "RDMSR" };
                let outcome = if *gp {
                    "#GP into the guest"
                } else {
                    "a secret, not shown"
                };
                (what, msr_name(*msr, self.model), None, outcome.to_owned())
            }
            TrapEvent::LockedOut { .. } => {
                plain("penalty", "kept off its core for guessing cookies")
            }
            TrapEvent::Notice { vector, sent } => notice(*vector, *sent),
            TrapEvent::Rdpmc {
                index,
                ring,
                outcome,
            } => self.rdpmc(*index, *ring, *outcome),
            TrapEvent::Armed(_) => plain("RDPMC", "is trapped"),
            TrapEvent::HandlerWritten => plain("store", "to the page of its patched #GP handler"),
            TrapEvent::ForeignGp => plain("#GP", "passes on to the guest's handler"),
            TrapEvent::GuestDebug { dr6 } => {
                let outcome = "the guest's own: handed back".to_owned();
                ("#DB", "DR6".to_owned(), Some(hex(*dr6)), outcome)
            }
            TrapEvent::DebugRegistersFull => plain("DR", "all four in use: RDPMC will fault"),
            TrapEvent::Pmi {
                request, delivery, ..
            } => {
                let counters: Vec<String> =
                    request.counters.iter().map(|one| one.to_string()).collect();
                ("overflow", counters.join(" "), None, pmi(*delivery))
            }
            TrapEvent::PmiLate => plain("overflow", "PMI held back by the throttle"),
        }
    }

    fn rdpmc(&self, index: u32, ring: Ring, outcome: ReadOutcome) -> Cells {
        let what = match ring {
            Ring::Kernel => "RDPMC, CPL 0",
            Ring::User => "RDPMC, CPL 3",
        };
        let counter = self.model.rdpmc_counter(index);
        let register = match counter {
            Some(counter) => format!("{counter} (ECX {index:#x})"),
            None => format!("absent (ECX {index:#x})"),
        };
        match outcome {
            ReadOutcome::Value(_) => {
                let (value, outcome) = self.read(outcome, counter);
                (what, register, value, outcome)
            }
            ReadOutcome::Merge { .. } | ReadOutcome::Gp | ReadOutcome::NotHandled => {
                let outcome = "no such counter: its #GP passes on to the guest's handler";
                (what, register, None, outcome.to_owned())
            }
        }
    }

    fn read(&self, outcome: ReadOutcome, counter: Option<CounterId>) -> (Option<String>, String) {
        match outcome {
            ReadOutcome::Value(value) => {
                let frozen = counter.is_some_and(|counter| self.frozen.contains(counter));
                let outcome = match (frozen, counter) {
                    (true, _) => "frozen: not a count".to_owned(),
                    (false, Some(counter)) => self.count(value, counter),
                    (false, None) => "read".to_owned(),
                };
                (Some(hex(value)), outcome)
            }
            ReadOutcome::Merge { .. } => (None, "shared with the processor".to_owned()),
            ReadOutcome::Gp => (None, "#GP into the guest".to_owned()),
            ReadOutcome::NotHandled => (None, "no such register: #GP into the guest".to_owned()),
        }
    }

    /// A value close below the end of the counter's width is a preset on its
    /// way to an overflow.
    fn count(&self, value: u64, counter: CounterId) -> String {
        match self.to_overflow(value, counter) {
            Some(left) => format!("{left} before the overflow"),
            None => format!("count {value}"),
        }
    }

    fn to_overflow(&self, value: u64, counter: CounterId) -> Option<u64> {
        const NEAR: u64 = 1 << 31;
        let mask = self.model.counter_mask(counter);
        let left = mask - (value & mask) + 1;
        (left <= NEAR).then_some(left)
    }

    /// What a write that was carried out means.
    fn written(&mut self, msr: MsrIndex, value: u64) -> String {
        match self.model.decode(msr) {
            Some(Register::Select(n)) => {
                let request = CountRequest::decode(self.model.events(), value);
                self.selected(CounterId::Programmable(n), &request)
            }
            Some(Register::FixedControl) => self.fixed_selected(value),
            Some(Register::Counter { counter, .. }) => match self.to_overflow(value, counter) {
                Some(left) => format!("set: {left} before the overflow"),
                None => format!("set: count {value}"),
            },
            _ => "done".to_owned(),
        }
    }

    /// What a write of the control of all fixed counters means.
    fn fixed_selected(&mut self, value: u64) -> String {
        let mut all = Vec::new();
        for function in (0..self.model.fixed()).filter_map(FixedFunction::of) {
            let request = CountRequest::decode_fixed(function, value);
            if request.enabled {
                all.push(self.selected(CounterId::Fixed(function.index()), &request));
            }
        }
        if all.is_empty() {
            "stop".to_owned()
        } else {
            all.join("; ")
        }
    }

    fn selected(&mut self, counter: CounterId, request: &CountRequest) -> String {
        if !request.enabled {
            return "stop".to_owned();
        }
        match self.backend.plan(request) {
            Ok(plan) => {
                let others = self.frozen.iter().filter(|&other| other != counter);
                self.frozen = others.collect();
                format!("count {request}, {}", plan.provenance)
            }
            Err(unavailable) => {
                self.frozen.insert(counter);
                format!("{unavailable}: stays frozen")
            }
        }
    }
}

type Cells = (&'static str, String, Option<String>, String);

fn notice(vector: u8, sent: bool) -> Cells {
    let outcome = if sent {
        "an interrupt that announces it"
    } else {
        "no interrupt: the local APIC takes none"
    };
    let vector = format!("vector {vector}");
    ("notice", vector, None, outcome.to_owned())
}

/// A row about no register.
fn plain(what: &'static str, outcome: &str) -> Cells {
    (what, String::new(), None, outcome.to_owned())
}

fn pmi(delivery: PmiDelivery) -> String {
    let masked = if delivery.masked_after {
        ", LVTPC masked"
    } else {
        ""
    };
    match delivery.route {
        PmiRoute::Nmi => format!("PMI: NMI into the guest{masked}"),
        PmiRoute::Fixed(vector) => format!("PMI: vector {vector:#x} into the guest{masked}"),
        PmiRoute::Masked => "no PMI: LVTPC is masked".to_owned(),
        PmiRoute::Unusable(lvtpc) => format!("no PMI: LVTPC is {lvtpc:#x}"),
    }
}

fn port_meaning(port: u16) -> &'static str {
    match port {
        GP_PORT => "the guest's #GP handler tells RIP",
        NMI_PORT => "the guest's NMI handler tells the status",
        PROGRAM_PORT => "the guest's program is over; NMIs that came",
        TEST_EXIT => "the guest ends",
        UNEXPECTED_VECTOR_PORT => "an exception without a handler",
        _ => "no device",
    }
}

fn msr_name(msr: MsrIndex, model: &PmuModel) -> String {
    let name = match model.decode(msr) {
        Some(Register::Counter {
            counter: CounterId::Programmable(n),
            ..
        }) => format!("PMC{n}"),
        Some(Register::Counter {
            counter: CounterId::Fixed(n),
            ..
        }) => format!("FIXED_CTR{n}"),
        Some(Register::Counter {
            counter: sampler @ CounterId::Ibs(_),
            ..
        }) => sampler.to_string(),
        Some(Register::Select(n)) => format!("PERFEVTSEL{n}"),
        Some(Register::FixedControl) => "FIXED_CTR_CTRL".to_owned(),
        Some(Register::GlobalStatus) => "GLOBAL_STATUS".to_owned(),
        Some(Register::GlobalControl) => "GLOBAL_CTRL".to_owned(),
        Some(Register::GlobalStatusClear) => "GLOBAL_STATUS_CLR".to_owned(),
        Some(Register::GlobalStatusSet) => "GLOBAL_STATUS_SET".to_owned(),
        Some(Register::GlobalInUse) => "GLOBAL_INUSE".to_owned(),
        Some(Register::PerfCapabilities) => "PERF_CAPABILITIES".to_owned(),
        Some(Register::Ibs(register)) => format!("{register:?}"),
        Some(Register::PebsEnable) => "PEBS_ENABLE".to_owned(),
        Some(Register::PebsDataConfig) => "PEBS_DATA_CFG".to_owned(),
        Some(Register::DsArea) => "DS_AREA".to_owned(),
        None => "absent".to_owned(),
    };
    format!("{name} ({:#x})", msr.0)
}

fn hex(value: u64) -> String {
    format!("{value:#x}")
}
