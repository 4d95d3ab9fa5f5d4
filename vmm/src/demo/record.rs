//! What happened, and when.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use arbiter::CounterId;
use pmu_virt::{MsrIndex, PmuModel, ReadOutcome, Register, Ring, WriteOutcome};
use serde::Serialize;

use super::guest::{GP_PORT, NMI_PORT, PROGRAM_PORT};
use crate::devices::ports::TEST_EXIT;
use crate::devices::{DeviceOutcome, GuestEnd};
use crate::kvm::VcpuId;
use crate::micro::UNEXPECTED_VECTOR_PORT;
use crate::vcpu::{Observer, Platform, PmiDelivery, PmiRoute, TrapEvent};

/// One thing that happened.
#[derive(Debug, Clone, PartialEq)]
pub struct Happening {
    /// Microseconds since the vCPU first ran.
    pub micros: u64,
    /// Which vCPU.
    pub vcpu: VcpuId,
    /// What.
    pub what: What,
}

/// What happened.
#[derive(Debug, Clone, PartialEq)]
pub enum What {
    /// The trap path reported it.
    Trap(TrapEvent),
    /// The guest wrote to a port.
    Port {
        /// The port.
        port: u16,
        /// The value.
        value: u32,
    },
}

/// Collects happenings; also the guest's devices.
#[derive(Debug)]
pub(super) struct Record {
    vcpu: VcpuId,
    start: Mutex<Instant>,
    happenings: Mutex<Vec<Happening>>,
}

impl Record {
    pub(super) fn new(vcpu: VcpuId) -> Self {
        Self {
            vcpu,
            start: Mutex::new(Instant::now()),
            happenings: Mutex::default(),
        }
    }

    /// Time counts from now.
    pub(super) fn start(&self) {
        *lock(&self.start) = Instant::now();
    }

    pub(super) fn happenings(&self) -> Vec<Happening> {
        lock(&self.happenings).clone()
    }

    fn add(&self, vcpu: VcpuId, what: What) {
        let micros = u64::try_from(lock(&self.start).elapsed().as_micros()).unwrap_or(u64::MAX);
        lock(&self.happenings).push(Happening { micros, vcpu, what });
    }
}

/// A panic elsewhere leaves the list whole: it is only appended to.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Hands the trap path's reports to the record.
#[derive(Debug)]
pub(super) struct Witness(pub(super) Arc<Record>);

impl Observer for Witness {
    fn event(&mut self, vcpu: VcpuId, event: &TrapEvent) {
        self.0.add(vcpu, What::Trap(event.clone()));
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
    pub vcpu: u8,
    /// What the guest did, or what was done to it.
    pub what: &'static str,
    /// The register or port, by name and index.
    pub register: String,
    /// The value written, or read.
    pub value: Option<String>,
    /// What it came to.
    pub outcome: String,
}

impl Row {
    /// `happening` in words, with register names of `model`.
    pub fn describe(happening: &Happening, model: &PmuModel) -> Self {
        let (what, register, value, outcome) = match &happening.what {
            What::Trap(event) => trap(event, model),
            What::Port { port, value } => {
                let register = format!("port {port:#x}");
                (
                    "OUT",
                    register,
                    Some(hex((*value).into())),
                    port_meaning(*port),
                )
            }
        };
        Self {
            time_us: happening.micros,
            vcpu: happening.vcpu.0,
            what,
            register,
            value,
            outcome,
        }
    }
}

type Cells = (&'static str, String, Option<String>, String);

fn trap(event: &TrapEvent, model: &PmuModel) -> Cells {
    match event {
        TrapEvent::MsrRead { msr, outcome } => {
            let (value, outcome) = read(*outcome);
            ("RDMSR", msr_name(*msr, model), value, outcome)
        }
        TrapEvent::MsrWrite {
            msr,
            value,
            outcome,
        } => {
            let outcome = match outcome {
                WriteOutcome::Done => written(*msr, *value, model),
                WriteOutcome::Gp => "#GP into the guest".to_owned(),
                WriteOutcome::NotHandled => "no such register: #GP into the guest".to_owned(),
            };
            ("WRMSR", msr_name(*msr, model), Some(hex(*value)), outcome)
        }
        TrapEvent::Rdpmc {
            index,
            ring,
            outcome,
        } => {
            let what = match ring {
                Ring::Kernel => "RDPMC, CPL 0",
                Ring::User => "RDPMC, CPL 3",
            };
            let register = match model.rdpmc_counter(*index) {
                Some(counter) => format!("{counter} (ECX {index:#x})"),
                None => format!("ECX {index:#x}"),
            };
            let (value, outcome) = read(*outcome);
            (what, register, value, outcome)
        }
        TrapEvent::ForeignGp => (
            "#GP",
            String::new(),
            None,
            "not an RDPMC: passes on to the guest's handler".to_owned(),
        ),
        TrapEvent::GuestDebug { dr6 } => (
            "#DB",
            "DR6".to_owned(),
            Some(hex(*dr6)),
            "the guest's own: handed back".to_owned(),
        ),
        TrapEvent::DebugRegistersFull => (
            "DR",
            String::new(),
            None,
            "the guest uses all four: RDPMC will fault".to_owned(),
        ),
        TrapEvent::Pmi { request, delivery } => {
            let counters: Vec<String> = request.counters.iter().map(|c| c.to_string()).collect();
            ("overflow", counters.join(" "), None, pmi(*delivery))
        }
        TrapEvent::PmiLate => (
            "overflow",
            String::new(),
            None,
            "PMI held back by the throttle".to_owned(),
        ),
    }
}

fn read(outcome: ReadOutcome) -> (Option<String>, String) {
    match outcome {
        ReadOutcome::Value(value) => (Some(hex(value)), format!("reads {value}")),
        ReadOutcome::Gp => (None, "no such counter: #GP stays the guest's".to_owned()),
        ReadOutcome::NotHandled => (None, "no such register: #GP into the guest".to_owned()),
    }
}

fn pmi(delivery: PmiDelivery) -> String {
    let masked = match delivery.masked_after {
        true => ", LVTPC masked",
        false => "",
    };
    match delivery.route {
        PmiRoute::Nmi => format!("PMI: NMI into the guest{masked}"),
        PmiRoute::Fixed(vector) => format!("PMI: vector {vector:#x} into the guest{masked}"),
        PmiRoute::Masked => "no PMI: LVTPC is masked".to_owned(),
        PmiRoute::Unusable(lvtpc) => format!("no PMI: LVTPC is {lvtpc:#x}"),
    }
}

fn port_meaning(port: u16) -> String {
    match port {
        GP_PORT => "the guest's #GP handler: at this RIP",
        NMI_PORT => "the guest's NMI handler: this status",
        PROGRAM_PORT => "the guest's program is over: NMIs seen",
        TEST_EXIT => "the guest ends",
        UNEXPECTED_VECTOR_PORT => "an exception without a handler",
        _ => "no device",
    }
    .to_owned()
}

/// What a write to a control register asks for.
fn written(msr: MsrIndex, value: u64, model: &PmuModel) -> String {
    match model.decode(msr) {
        Some(Register::Select(_)) => {
            let request = pmu_virt::CountRequest::decode(model.events(), value);
            match request.enabled {
                true => format!("count {request}"),
                false => "stop".to_owned(),
            }
        }
        Some(Register::Counter { counter, .. }) => {
            let left = (model.counter_mask(counter) - value.min(model.counter_mask(counter))) + 1;
            match left < 1 << 32 {
                true => format!("overflow in {left}"),
                false => "set".to_owned(),
            }
        }
        _ => "done".to_owned(),
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
        Some(Register::Select(n)) => format!("PERFEVTSEL{n}"),
        Some(Register::FixedControl) => "FIXED_CTR_CTRL".to_owned(),
        Some(Register::GlobalStatus) => "GLOBAL_STATUS".to_owned(),
        Some(Register::GlobalControl) => "GLOBAL_CTRL".to_owned(),
        Some(Register::GlobalStatusClear) => "GLOBAL_STATUS_CLR".to_owned(),
        Some(Register::GlobalStatusSet) => "GLOBAL_STATUS_SET".to_owned(),
        Some(Register::PerfCapabilities) => "PERF_CAPABILITIES".to_owned(),
        None => "absent".to_owned(),
    };
    format!("{name} ({:#x})", msr.0)
}

fn hex(value: u64) -> String {
    format!("{value:#x}")
}
