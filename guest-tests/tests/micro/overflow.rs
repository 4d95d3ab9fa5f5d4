//! From an overflow to the guest's interrupt.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use guest_tests::micro::{
    DATA, Lab, LabRun, Program, Setup, Test, Written, exit, log_value, wrmsr,
};
use iced_x86::code_asm::{CodeAssembler, dword_ptr, eax, ecx, edx, qword_ptr, r13, rax, rcx, rdx};
use vmm::micro::LAPIC;
use vmm::vcpu::{PmiDelivery, PmiRoute, TrapEvent};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "overflow::nmi",
        run: |lab| every_way(lab, PmiRoute::Nmi),
    },
    Test {
        name: "overflow::fixed_vector",
        run: |lab| every_way(lab, PmiRoute::Fixed(VECTOR)),
    },
    Test {
        name: "overflow::masked_lvtpc_keeps_the_status",
        run: masked,
    },
    Test {
        name: "overflow::intel_masks_lvtpc_until_the_guest_unmasks_it",
        run: unmasking,
    },
    Test {
        name: "overflow::throttled_pmis_are_late_and_not_lost",
        run: throttled,
    },
];

/// Vector of PMIs.
pub(crate) const VECTOR: u8 = 0x70;
const NMI: u8 = 2;
/// PMIs that the guest took.
pub(crate) const TAKEN: u64 = DATA;
/// Global status and LVTPC as the handler found them.
const STATUS: u64 = DATA + 8;
const LVTPC: u64 = DATA + 16;
const MASK: u64 = 1 << 16;
const FULL: u64 = 0xffff_ffff_ffff;

/// How the guest talks to its local APIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Apic {
    X,
    X2,
}

impl Apic {
    /// Switches the APIC on; in xAPIC mode R13 points at it from here on.
    pub(crate) fn enable(self, a: &mut CodeAssembler) -> Written {
        const APIC_BASE: u32 = 0x1b;
        const X2APIC: i32 = 1 << 10;
        a.mov(r13, LAPIC)?;
        if self == Apic::X2 {
            a.mov(ecx, APIC_BASE)?;
            a.rdmsr()?;
            a.or(eax, X2APIC)?;
            a.wrmsr()?;
        }
        self.write(a, 0xf0, 0x1ff)
    }

    /// Writes the register at `offset` of the xAPIC's page.
    pub(crate) fn write(self, a: &mut CodeAssembler, offset: u32, value: u32) -> Written {
        match self {
            Apic::X => {
                a.mov(eax, value)?;
                a.mov(dword_ptr(r13 + offset), eax)
            }
            Apic::X2 => wrmsr(a, 0x800 + offset / 16, value.into()),
        }
    }

    /// Reads it into RAX.
    fn read(self, a: &mut CodeAssembler, offset: u32) -> Written {
        match self {
            Apic::X => a.mov(eax, dword_ptr(r13 + offset)),
            Apic::X2 => {
                a.mov(ecx, 0x800 + offset / 16)?;
                a.rdmsr()
            }
        }
    }

    /// Routes PMIs.
    pub(crate) fn route(self, a: &mut CodeAssembler, lvtpc: u32) -> Written {
        self.write(a, 0x340, lvtpc)
    }

    pub(crate) fn end_of_interrupt(self, a: &mut CodeAssembler) -> Written {
        self.write(a, 0xb0, 0)
    }
}

/// Registers of one model's first counter.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counter {
    pub(crate) model: &'static str,
    select: u32,
    count: u32,
    /// Cycles with INT.
    event: u64,
    /// Status and its clearing.
    status: Option<(u32, u32)>,
    intel: bool,
}

pub(crate) const INTEL: Counter = Counter {
    model: "intel-v2",
    select: 0x186,
    count: 0x4c1,
    event: 0x53_013c,
    status: Some((0x38e, 0x390)),
    intel: true,
};

pub(crate) const AMD: Counter = Counter {
    model: "amd-core",
    select: 0xc001_0200,
    count: 0xc001_0201,
    event: 0x53_0076,
    status: None,
    intel: false,
};

const AMD_V2: Counter = Counter {
    model: "amd-perfmonv2",
    status: Some((0xc000_0300, 0xc000_0302)),
    ..AMD
};

impl Counter {
    /// Starts the counter so that it overflows after `ticks`.
    pub(crate) fn start(&self, a: &mut CodeAssembler, ticks: u64) -> Written {
        self.reload(a, ticks)?;
        wrmsr(a, self.select, self.event)
    }

    pub(crate) fn reload(&self, a: &mut CodeAssembler, ticks: u64) -> Written {
        wrmsr(a, self.count, FULL + 1 - ticks)
    }

    fn stop(&self, a: &mut CodeAssembler) -> Written {
        wrmsr(a, self.select, 0)
    }
}

/// Spins until the quadword at `at` is `value` or above.
pub(crate) fn await_value(a: &mut CodeAssembler, at: u64, value: i32) -> Written {
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.pause()?;
    a.cmp(qword_ptr(at), value)?;
    a.jb(again)
}

/// A PMI handler that counts, keeps what it does to itself, and returns.
pub(crate) fn handler(
    a: &mut CodeAssembler,
    apic: Option<Apic>,
    body: impl FnOnce(&mut CodeAssembler) -> Written,
) -> Written {
    a.push(rax)?;
    a.push(rcx)?;
    a.push(rdx)?;
    a.inc(qword_ptr(TAKEN))?;
    body(a)?;
    if let Some(apic) = apic {
        apic.end_of_interrupt(a)?;
    }
    a.pop(rdx)?;
    a.pop(rcx)?;
    a.pop(rax)?;
    a.iretq()
}

/// Value of LVTPC, and the vector that arrives.
pub(crate) fn lvtpc_of(route: PmiRoute) -> (u32, u8) {
    match route {
        PmiRoute::Fixed(vector) => (vector.into(), vector),
        _ => (0x400, NMI),
    }
}

fn pmis(ran: &LabRun) -> Vec<PmiDelivery> {
    let deliveries = ran.outcome.vcpus[0].events.iter();
    deliveries
        .filter_map(|event| match event {
            TrapEvent::Pmi { delivery, .. } => Some(*delivery),
            _ => None,
        })
        .collect()
}

fn every_way(lab: &Lab, route: PmiRoute) -> Result<()> {
    for counter in [INTEL, AMD, AMD_V2] {
        for apic in [Apic::X, Apic::X2] {
            one_way(lab, route, &counter, apic)
                .map_err(|error| error.context(format!("{} with {apic:?}", counter.model)))?;
        }
    }
    Ok(())
}

/// One overflow, one interrupt, one status bit.
fn one_way(lab: &Lab, route: PmiRoute, counter: &Counter, apic: Apic) -> Result<()> {
    let (lvtpc, vector) = lvtpc_of(route);
    let eoi = (vector != NMI).then_some(apic);
    let program = Program::new()?.handler(vector, |a| {
        handler(a, eoi, |a| {
            counter.stop(a)?;
            apic.read(a, 0x340)?;
            a.mov(qword_ptr(LVTPC), rax)?;
            if let Some((status, clear)) = counter.status {
                a.mov(ecx, status)?;
                a.rdmsr()?;
                a.mov(qword_ptr(STATUS), rax)?;
                wrmsr(a, clear, 1)?;
            }
            Ok(())
        })
    })?;
    let program = program.kernel(|a| {
        apic.enable(a)?;
        apic.route(a, lvtpc)?;
        a.sti()?;
        counter.start(a, 10_000)?;
        await_value(a, TAKEN, 1)?;
        if let Some((status, _)) = counter.status {
            a.mov(ecx, status)?;
            a.rdmsr()?;
            log_value(a)?;
        }
        a.mov(ecx, counter.count)?;
        a.rdmsr()?;
        log_value(a)?;
        exit(a)
    })?;
    let ran = lab.run(&Setup::clock(counter.model), &program.start(0))?;
    // KVM's local APIC cannot be told so outside of x2APIC mode.
    let masked_after = counter.intel && (apic == Apic::X2 || ran.emulated);
    let expected = PmiDelivery {
        route,
        masked_after,
    };
    ensure!(pmis(&ran) == [expected], "{:?}", pmis(&ran));
    ensure!(ran.word(TAKEN)? == 1, "{} interrupts", ran.word(TAKEN)?);
    let mask = ran.word(LVTPC)? & MASK != 0;
    ensure!(mask == masked_after, "LVTPC {:#x}", ran.word(LVTPC)?);
    let mut log = ran.log.iter();
    if counter.status.is_some() {
        ensure!(ran.word(STATUS)? == 1, "status {:#x}", ran.word(STATUS)?);
        let after = log.next().map(|entry| entry.a);
        ensure!(after == Some(0), "cleared status {after:x?}");
    }
    // It went on from 0.
    let count = log.next().map(|entry| entry.b << 32 | entry.a);
    ensure!(count.is_some_and(|count| count < 1 << 40), "{count:x?}");
    Ok(())
}

/// Hardware loses the PMI, but not the status bit.
fn masked(lab: &Lab) -> Result<()> {
    for apic in [Apic::X, Apic::X2] {
        let program = Program::new()?
            .handler(NMI, |a| handler(a, None, |_| Ok(())))?
            .kernel(|a| {
                apic.enable(a)?;
                apic.route(a, 0x1_0400)?;
                INTEL.start(a, 1000)?;
                let mut again = a.create_label();
                a.set_label(&mut again)?;
                a.mov(ecx, 0x38e)?;
                a.rdmsr()?;
                a.test(eax, eax)?;
                a.je(again)?;
                INTEL.stop(a)?;
                apic.route(a, 0x400)?;
                guest_tests::micro::spin(a, 1000)?;
                a.mov(ecx, 0x38e)?;
                a.rdmsr()?;
                log_value(a)?;
                exit(a)
            })?;
        let ran = lab.run(&Setup::clock("intel-v2"), &program.start(0))?;
        let expected = PmiDelivery {
            route: PmiRoute::Masked,
            masked_after: false,
        };
        ensure!(pmis(&ran) == [expected], "{apic:?}: {:?}", pmis(&ran));
        ensure!(ran.word(TAKEN)? == 0, "{apic:?}: a masked PMI arrived");
        let status = ran.log.first().map(|entry| entry.a);
        ensure!(status == Some(1), "{apic:?}: status {status:x?}");
    }
    Ok(())
}

/// Three overflows; the second one meets the mask that the first one set.
fn unmasking(lab: &Lab) -> Result<()> {
    let apic = Apic::X2;
    let program = Program::new()?.handler(NMI, |a| {
        handler(a, None, |a| {
            INTEL.stop(a)?;
            wrmsr(a, 0x390, 1)
        })
    })?;
    let program = program.kernel(|a| {
        apic.enable(a)?;
        apic.route(a, 0x400)?;
        INTEL.start(a, 1000)?;
        await_value(a, TAKEN, 1)?;
        INTEL.start(a, 1000)?;
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.mov(ecx, 0x38e)?;
        a.rdmsr()?;
        a.test(eax, eax)?;
        a.je(again)?;
        INTEL.stop(a)?;
        wrmsr(a, 0x390, 1)?;
        a.mov(rax, qword_ptr(TAKEN))?;
        a.xor(edx, edx)?;
        log_value(a)?;
        apic.route(a, 0x400)?;
        INTEL.start(a, 1000)?;
        await_value(a, TAKEN, 2)?;
        exit(a)
    })?;
    let ran = lab.run(&Setup::clock("intel-v2"), &program.start(0))?;
    let sent = PmiDelivery {
        route: PmiRoute::Nmi,
        masked_after: true,
    };
    let lost = PmiDelivery {
        route: PmiRoute::Masked,
        masked_after: false,
    };
    ensure!(pmis(&ran) == [sent, lost, sent], "{:?}", pmis(&ran));
    let between = ran.log.first().map(|entry| entry.a);
    ensure!(between == Some(1), "{between:?} PMIs before the unmasking");
    Ok(())
}

/// The handler asks for the next overflow long before the floor is over.
fn throttled(lab: &Lab) -> Result<()> {
    const PMIS: u64 = 12;
    // Far above what the handler takes, on a loaded machine in L1 as well.
    const FLOOR: Duration = Duration::from_millis(20);
    let program = Program::new()?.handler(NMI, |a| handler(a, None, |a| AMD.reload(a, 1000)))?;
    let program = program.kernel(|a| {
        Apic::X.enable(a)?;
        Apic::X.route(a, 0x400)?;
        AMD.start(a, 1000)?;
        await_value(a, TAKEN, i32::try_from(PMIS).unwrap_or(0))?;
        AMD.stop(a)?;
        exit(a)
    })?;
    let mut setup = Setup::clock(AMD.model);
    setup.pmi_floor_us = u32::try_from(FLOOR.as_micros())?;
    let start = Instant::now();
    let ran = lab.run(&setup, &program.start(0))?;
    let took = ran.outcome.virtual_time.unwrap_or(start.elapsed());
    let (delivered, late) = ran.outcome.vcpus[0].pmis;
    let told = ran.events(|event| *event == TrapEvent::PmiLate).len() as u64;
    let taken = ran.word(TAKEN)?;
    // The last one may not have reached the handler.
    ensure!(
        taken >= PMIS && (taken..=taken + 1).contains(&delivered),
        "{delivered} PMIs delivered, {taken} taken"
    );
    // Every one but the first had to wait, unless the host was busy for
    // longer than the floor.
    ensure!(
        (PMIS / 3..=delivered).contains(&late) && late == told,
        "{late} late, {told} told, of {delivered}"
    );
    let least = FLOOR * u32::try_from(PMIS - 1)?;
    ensure!(took >= least, "{PMIS} PMIs came within {took:?}");
    Ok(())
}
