//! What counter reservations cost an access: the round trip with them, beside
//! the same instruction in a guest without (`--pcr off`). The two guests take
//! turns on one thread, so that noise hits both alike. And what the arbiter's own part of
//! a request costs ([`decisions`]).

mod decisions;

pub use decisions::DecisionRow;

use std::io::{self, Write};
use std::sync::Arc;

use arbiter::{Phase, Policy, Scheme, abi};
use iced_x86::code_asm::{
    CodeAssembler, dword_ptr, dx, eax, ebx, ecx, edx, r8, r9, r10d, rax, rdi, rdx, rsi,
};
use pmu_virt::{ClockBackend, Holdings, Reservations};
use serde::Serialize;
use vmm::audit::AuditTrail;
use vmm::config::PcrChoice;
use vmm::firmware::SetAside;
use vmm::kvm::KvmVm;
use vmm::micro::Solo;
use vmm::micro::{
    KERNEL_CODE, MicroError, MicroGuest, SCRATCH, Start, UNEXPECTED_VECTOR_PORT, assemble,
};
use vmm::reservations::MachineReservations;
use vmm::vcpu::Silent;

use super::error::BenchError;
use super::harness::{self, BatchPort, DONE, Harness, PATIENCE, ratio};
use super::registers::{PmuMsrs, Written, wrmsr};
use super::report::{Report, pair, table, where_it_ran};
use super::sources::{INT, USR_OS_ENABLE, first_countable};
use super::stats::{Percentiles, percentiles};

/// Samples that the guest takes before it reports.
const BATCH: u32 = 100;
const MAIN: u64 = KERNEL_CODE + 0x1000;
const GP_HANDLER: u64 = KERNEL_CODE + 0x3000;
const GP_VECTOR: u8 = 13;
const CR4_PCE: u64 = 1 << 8;
/// The cookies of the counter that the guest reserves.
const KEY: u64 = 0x1234_5678_9abc;
const ACCESS: u64 = 0xfeed_0123_4567;
/// Free, private, and taken and given back again and again.
const FREE: u32 = 0;
const PRIVATE: u32 = 1;
const SPARE: u32 = 2;

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub struct PcrOptions {
    /// How often each access and each request.
    pub iterations: u32,
    /// How layers come by counters.
    pub scheme: Scheme,
    /// Who may hold how many.
    pub policy: Policy,
    /// Counters of each vCPU that the hypervisor holds while its kernel asks.
    pub contention: u8,
    /// vCPUs whose kernels ask in turn.
    pub vcpus: u8,
}

/// One kind of access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PcrAccess {
    /// RDMSR of a counter that nobody holds.
    Read,
    /// RDMSR by its alias of a counter that nobody holds.
    ReadAlias,
    /// RDMSR of a private counter by its alias, with the cookie.
    ReadCookie,
    /// RDMSR of a private counter without it.
    ReadDropped,
    /// WRMSR to a counter that nobody holds.
    Write,
    /// WRMSR to a private counter by its alias, with the cookie.
    WriteCookie,
    /// RDPMC at CPL 0 of a counter that nobody holds.
    Rdpmc,
    /// RDPMC at CPL 0 of a private counter, with the cookie.
    RdpmcCookie,
    /// Reserving a counter and giving it back: two WRMSR.
    Reserve,
}

impl PcrAccess {
    /// In the order in which the guest goes through them.
    const ALL: [Self; 9] = [
        Self::Read,
        Self::ReadAlias,
        Self::ReadCookie,
        Self::ReadDropped,
        Self::Write,
        Self::WriteCookie,
        Self::Rdpmc,
        Self::RdpmcCookie,
        Self::Reserve,
    ];
    /// What a guest without reservations can do.
    const LEGACY: [Self; 3] = [Self::Read, Self::Write, Self::Rdpmc];

    /// What this instruction is compared with, where there are no reservations.
    fn baseline(self) -> Option<Self> {
        match self {
            Self::Read | Self::ReadAlias | Self::ReadCookie | Self::ReadDropped => Some(Self::Read),
            Self::Write | Self::WriteCookie => Some(Self::Write),
            Self::Rdpmc | Self::RdpmcCookie => Some(Self::Rdpmc),
            Self::Reserve => None,
        }
    }

    /// Name for people.
    fn name(self) -> &'static str {
        match self {
            Self::Read => "RDMSR, nobody holds it",
            Self::ReadAlias => "RDMSR by alias, nobody holds it",
            Self::ReadCookie => "RDMSR with the cookie",
            Self::ReadDropped => "RDMSR, dropped",
            Self::Write => "WRMSR, nobody holds it",
            Self::WriteCookie => "WRMSR with the cookie",
            Self::Rdpmc => "RDPMC, nobody holds it",
            Self::RdpmcCookie => "RDPMC with the cookie",
            Self::Reserve => "reserve and give back",
        }
    }
}

/// Round trips of one kind of access.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PcrRow {
    /// What the guest did.
    pub access: PcrAccess,
    pub reservations: Percentiles,
    /// Without reservations; none where the access needs them.
    pub without: Option<Percentiles>,
    /// Ratio of the medians.
    pub ratio_p50: Option<f64>,
    /// How often in a second, by the median.
    pub per_second: u64,
}

/// The measurement.
#[derive(Clone, Debug, Serialize)]
pub struct PcrReport {
    /// The host's processor.
    pub processor: Option<String>,
    /// Guest CPL 0 runs in KVM's instruction emulator.
    pub slow_cpl0: bool,
    /// PMU model of the guests.
    pub model: &'static str,
    /// Samples of each kind.
    pub iterations: u32,
    /// TSC frequency in kHz.
    pub tsc_khz: u32,
    /// `single`, `independent` or `interacting`.
    pub scheme: &'static str,
    /// One for each kind of access.
    pub rows: Vec<PcrRow>,
    /// A request and the counter's return, without a guest.
    pub decision: DecisionRow,
}

/// Measures round trips of each kind with the `clock` backend, rounded up to whole
/// batches, and requests.
pub(super) fn measure(
    harness: &Harness<'_>,
    options: &PcrOptions,
) -> Result<PcrReport, BenchError> {
    let mut with = Side::new(harness, &PcrAccess::ALL, Some(options))?;
    let mut without = Side::new(harness, &PcrAccess::LEGACY, None)?;
    for side in [&mut with, &mut without] {
        // Caches, and the first write that finds the #GP handler.
        side.round()?;
        side.forget();
    }
    let rounds = options.iterations.div_ceil(BATCH).max(1);
    for round in 0..rounds {
        let sides = match round % 2 {
            0 => [&mut with, &mut without],
            _ => [&mut without, &mut with],
        };
        for side in sides {
            side.round()?;
        }
    }
    let tsc_khz = with.solo.tsc_khz();
    let rows = PcrAccess::ALL.map(|access| {
        let none = || BenchError::Guest("it took no samples".to_owned());
        let reservations = with.percentiles(access).ok_or_else(none)?;
        let baseline = access.baseline();
        let without = baseline.and_then(|baseline| without.percentiles(baseline));
        Ok(PcrRow {
            access,
            reservations,
            without,
            ratio_p50: without.map(|without| ratio(reservations.p50_ns, without.p50_ns)),
            per_second: 1_000_000_000 / reservations.p50_ns.max(1),
        })
    });
    Ok(PcrReport {
        processor: harness::processor(),
        slow_cpl0: harness.probe.slow_cpl0(),
        model: harness.model.name(),
        iterations: rounds * BATCH,
        tsc_khz,
        scheme: options.scheme.name(),
        rows: rows.into_iter().collect::<Result<_, BenchError>>()?,
        decision: decisions::measure(options, &harness.model, tsc_khz)?,
    })
}

/// One of the two guests.
#[derive(Debug)]
struct Side {
    solo: Solo,
    vm: Arc<KvmVm>,
    kinds: &'static [PcrAccess],
    samples: Vec<Vec<u32>>,
    // Auditors write to it for as long as the guest runs.
    _trail: AuditTrail,
}

impl Side {
    fn new(
        harness: &Harness<'_>,
        kinds: &'static [PcrAccess],
        options: Option<&PcrOptions>,
    ) -> Result<Self, BenchError> {
        let backend = Box::new(ClockBackend::new());
        let event = first_countable(&harness.model, backend.as_ref());
        let event = event.map_err(|none| BenchError::Guest(none.reason))?;
        let msrs = PmuMsrs::of(&harness.model);
        let control = event.code | USR_OS_ENABLE & !INT;
        let (vm, vcpus) = harness.build(&guest(&msrs, control, kinds, Way::of(options))?)?;
        let kvm = harness::only(vcpus)?;
        let trail = AuditTrail::new(1);
        let reservations = match options {
            Some(options) => {
                let rules = (options.policy, options.scheme);
                Some(reservations(harness, kvm.get_tsc_khz()?, &trail, rules)?)
            }
            None => None,
        };
        let port = Arc::new(BatchPort);
        Ok(Self {
            solo: harness.solo_with(kvm, &vm, backend, port, Box::new(Silent), reservations)?,
            vm,
            kinds,
            samples: vec![Vec::new(); kinds.len()],
            _trail: trail,
        })
    }

    /// One batch of each kind.
    fn round(&mut self) -> Result<(), BenchError> {
        for (expected, samples) in self.samples.iter_mut().enumerate() {
            let number = harness::batch(&mut self.solo, PATIENCE)?;
            if usize::try_from(number) != Ok(expected) {
                return Err(BenchError::Guest(format!(
                    "it finished batch {number} instead of {expected}"
                )));
            }
            let ticks = harness::words(&self.vm, SCRATCH, BATCH)?;
            samples.extend(ticks.into_iter().map(u32::from_le_bytes));
        }
        Ok(())
    }

    fn forget(&mut self) {
        self.samples.iter_mut().for_each(Vec::clear);
    }

    fn percentiles(&mut self, access: PcrAccess) -> Option<Percentiles> {
        let place = self.kinds.iter().position(|kind| *kind == access)?;
        percentiles(self.samples.get_mut(place)?, self.solo.tsc_khz())
    }
}

/// As of `umpire run` under such rules, the audit trail included.
pub(super) fn reservations(
    harness: &Harness<'_>,
    tsc_khz: u32,
    trail: &AuditTrail,
    (policy, scheme): (Policy, Scheme),
) -> Result<Reservations, BenchError> {
    let choice = PcrChoice {
        policy,
        scheme,
        ..PcrChoice::default()
    };
    let plan = choice.plan(&harness.model, SetAside::default());
    let machine = MachineReservations {
        plan: plan?,
        phase: Arc::new(Phase::new(false)),
        smm: false,
        holdings: Holdings::default(),
    };
    let auditor = trail.auditors().next();
    let auditor = auditor.ok_or_else(|| BenchError::Guest("it has no vCPU".to_owned()))?;
    machine
        .of_vcpu(
            &harness.model,
            (tsc_khz, vmm::vcpu::now()),
            Box::new(auditor),
        )
        .map_err(|error| BenchError::Guest(error.to_string()))
}

/// How the guest reserves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Never,
    /// By `MANAGEMENT_KEY`.
    Key,
    /// By `REQUEST`, as under a single master.
    Request,
}

impl Way {
    fn of(options: Option<&PcrOptions>) -> Self {
        match options.map(|options| options.scheme) {
            None => Self::Never,
            Some(Scheme::SingleMaster) => Self::Request,
            Some(Scheme::Independent | Scheme::Interacting) => Self::Key,
        }
    }
}

/// A write of `REQUEST` about one programmable counter.
const fn about(operation: u64, counter: u32) -> u64 {
    operation | abi::REQUEST_POSITION | (counter as u64) << abi::REQUEST_WHICH_SHIFT
}

/// The guest: goes through `kinds` batch after batch, for ever.
fn guest(
    msrs: &PmuMsrs,
    control: u64,
    kinds: &[PcrAccess],
    way: Way,
) -> Result<MicroGuest, MicroError> {
    let mut start = Start::at(KERNEL_CODE, 0);
    start.cr4 = CR4_PCE;
    Ok(MicroGuest::new()
        .code(
            KERNEL_CODE,
            assemble(KERNEL_CODE, |a| begin(a, msrs, control, way))?,
        )
        .code(MAIN, assemble(MAIN, |a| main(a, msrs, kinds, way))?)
        .code(GP_HANDLER, assemble(GP_HANDLER, unwanted_gp)?)
        .handler(GP_VECTOR, GP_HANDLER)
        .start(start))
}

const fn of(row: u32, counter: u32) -> u32 {
    abi::MSR_BASE + row + counter
}

fn begin(a: &mut CodeAssembler, msrs: &PmuMsrs, control: u64, way: Way) -> Written {
    a.mov(r8, SCRATCH)?;
    msrs.enable(a, 0b11)?;
    let (select, _) = msrs.first();
    wrmsr(a, select, control)?;
    if way != Way::Never {
        if way == Way::Key {
            a.mov(rsi, abi::DEFAULT_COOKIE)?;
            wrmsr(a, of(abi::MSR_MANAGEMENT_KEY, PRIVATE), KEY)?;
            a.mov(rsi, KEY)?;
        } else {
            a.mov(rsi, KEY)?;
            let reserve = about(abi::REQUEST_RESERVE, PRIVATE);
            wrmsr(a, of(abi::MSR_REQUEST, 0), reserve)?;
        }
        wrmsr(a, of(abi::MSR_ACCESS_KEY, PRIVATE), ACCESS)?;
        a.mov(rsi, ACCESS)?;
        wrmsr(a, of(abi::MSR_SELECT, PRIVATE), control)?;
    }
    a.jmp(MAIN)
}

fn main(a: &mut CodeAssembler, msrs: &PmuMsrs, kinds: &[PcrAccess], way: Way) -> Written {
    let legacy = |n: u32| {
        let place = usize::try_from(n).unwrap_or(usize::MAX);
        msrs.counters.get(place).copied().unwrap_or_default()
    };
    for (number, kind) in (0u32..).zip(kinds) {
        let read = CodeAssembler::rdmsr;
        let write = |a: &mut CodeAssembler| {
            a.xor(eax, eax)?;
            a.xor(edx, edx)?;
            a.wrmsr()
        };
        match kind {
            PcrAccess::Read => batch(a, legacy(FREE), 0, read)?,
            PcrAccess::ReadAlias => batch(a, of(abi::MSR_COUNTER, FREE), 0, read)?,
            PcrAccess::ReadCookie => batch(a, of(abi::MSR_COUNTER, PRIVATE), ACCESS, read)?,
            PcrAccess::ReadDropped => batch(a, legacy(PRIVATE), 0, read)?,
            PcrAccess::Write => batch(a, legacy(FREE), 0, write)?,
            PcrAccess::WriteCookie => batch(a, of(abi::MSR_COUNTER, PRIVATE), ACCESS, write)?,
            PcrAccess::Rdpmc => batch(a, FREE, 0, CodeAssembler::rdpmc)?,
            PcrAccess::RdpmcCookie => {
                batch(a, abi::RDPMC_COOKIE + PRIVATE, ACCESS, CodeAssembler::rdpmc)?;
            }
            PcrAccess::Reserve if way == Way::Request => {
                batch(a, of(abi::MSR_REQUEST, 0), KEY, request)?;
            }
            PcrAccess::Reserve => batch(a, of(abi::MSR_MANAGEMENT_KEY, SPARE), 0, reserve)?,
        }
        a.mov(eax, number)?;
        a.mov(dx, u32::from(DONE))?;
        a.out(dx, eax)?;
    }
    a.jmp(MAIN)
}

/// `RSI` is 0 before and afterwards.
fn reserve(a: &mut CodeAssembler) -> Written {
    a.mov(rax, KEY)?;
    a.mov(rdx, rax)?;
    a.shr(rdx, 32)?;
    a.wrmsr()?;
    a.mov(rsi, KEY)?;
    a.xor(eax, eax)?;
    a.xor(edx, edx)?;
    a.wrmsr()?;
    a.mov(rsi, r9)
}

/// The same by the mailbox, with the cookie in `RSI`.
fn request(a: &mut CodeAssembler) -> Written {
    for operation in [abi::REQUEST_RESERVE, abi::REQUEST_RELEASE] {
        let value = about(operation, SPARE);
        a.mov(eax, u32::try_from(value).unwrap_or(u32::MAX))?;
        a.xor(edx, edx)?;
        a.wrmsr()?;
    }
    Ok(())
}

/// Times `access` with `index` in ECX and `cookie` in RSI.
fn batch(
    a: &mut CodeAssembler,
    index: u32,
    cookie: u64,
    access: impl FnOnce(&mut CodeAssembler) -> Written,
) -> Written {
    a.mov(rdi, r8)?;
    a.mov(ebx, BATCH)?;
    a.mov(ecx, index)?;
    a.mov(r9, cookie)?;
    a.mov(rsi, r9)?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.rdtsc()?;
    a.mov(r10d, eax)?;
    access(a)?;
    a.rdtsc()?;
    a.sub(eax, r10d)?;
    a.mov(dword_ptr(rdi), eax)?;
    a.add(rdi, 4)?;
    a.dec(ebx)?;
    a.jne(again)
}

/// Nothing here should raise a #GP that reaches its handler.
fn unwanted_gp(a: &mut CodeAssembler) -> Written {
    a.mov(eax, u32::from(GP_VECTOR))?;
    a.mov(dx, u32::from(UNEXPECTED_VECTOR_PORT))?;
    a.out(dx, eax)?;
    a.hlt()
}

impl Report for PcrReport {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "Round trips of PMU accesses with counter reservations and without (--pcr off), timed\n\
             in the guest\n\n{}, TSC {} MHz, model {}, scheme {}, {} samples of each\n\
             kind\n",
            where_it_ran(self.processor.as_deref(), self.slow_cpl0),
            self.tsc_khz / 1000,
            self.model,
            self.scheme,
            self.iterations
        )?;
        let rows = self.rows.iter().map(|row| {
            let ratio = row.ratio_p50.map(|ratio| format!("{ratio:.3}"));
            [
                row.access.name().to_owned(),
                pair(row.reservations),
                row.without.map_or("-".to_owned(), pair),
                ratio.unwrap_or("-".to_owned()),
                row.per_second.to_string(),
            ]
        });
        let titles = [
            "",
            "with, p50 / p99 [us]",
            "off, p50 / p99 [us]",
            "ratio",
            "per s",
        ];
        table(titles, 1..=4, rows, out)?;
        let decision = &self.decision;
        writeln!(
            out,
            "\nA request for one counter and its return, without a guest: {} / {} ns (p50 / p99),\n\
             {} vCPUs in turn, {} of {} counters held by the hypervisor: {}",
            decision.time.p50_ns,
            decision.time.p99_ns,
            decision.vcpus,
            decision.held,
            decision.there,
            decision.outcome
        )
    }
}
