//! The `msr` backend against a simulated register file: layouts, refusals,
//! faults, and somebody else who takes the counters.

use pmu_virt::contract::{self, Asked, Driver};
use pmu_virt::{
    Constraint, CountRequest, CounterBackend, CpuidRegs, EventCode, EventFamily, FixedFunction,
    HostCpuid, MsrBackend, MsrDevice, MsrIndex, MsrOptions, MsrRefusal, Progress, Reading, Ring,
    SlotIndex, SlotSet, Ticks, Tsc, UnavailableReason, Vendor,
};
use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroU64;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard};

const A: SlotIndex = SlotIndex(0);
const B: SlotIndex = SlotIndex(1);
const KHZ: u32 = 2_000_000;
const ENABLE: u64 = 1 << 22;
const GLOBAL: MsrIndex = MsrIndex(0x38f);
const FIXED_CONTROL: MsrIndex = MsrIndex(0x38d);
const EIO: i32 = 5;
const EPERM: i32 = 1;

/// The registers of one CPU; clones are the same CPU.
#[derive(Clone, Debug)]
struct Cpu(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    registers: BTreeMap<u32, u64>,
    intel: bool,
    /// Programmable counters: value and select.
    counters: Vec<(u32, u32)>,
    writes: Vec<(u32, u64)>,
    reads: usize,
    faulty: Option<(u32, i32)>,
    read_only: bool,
    drops_writes: bool,
    on_cpu: bool,
}

impl Cpu {
    /// Skylake: four programmable and three fixed counters, global control.
    fn intel() -> Self {
        let counters: Vec<_> = (0..4).map(|n| (0x4c1 + n, 0x186 + n)).collect();
        let mut cpu = Cpu::with(counters, true);
        for msr in [0x309, 0x30a, 0x30b, FIXED_CONTROL.0, GLOBAL.0] {
            cpu.set(msr, 0);
        }
        cpu.set(0x345, 1 << 13);
        cpu
    }

    /// Zen 2: six counters, each with its own enable only.
    fn amd() -> Self {
        Cpu::with(
            (0..6)
                .map(|n| (0xc001_0201 + 2 * n, 0xc001_0200 + 2 * n))
                .collect(),
            false,
        )
    }

    fn with(counters: Vec<(u32, u32)>, intel: bool) -> Self {
        let all = counters
            .iter()
            .flat_map(|(value, select)| [*value, *select]);
        Cpu(Arc::new(Mutex::new(State {
            registers: all.map(|msr| (msr, 0)).collect(),
            intel,
            counters,
            writes: Vec::new(),
            reads: 0,
            faulty: None,
            read_only: false,
            drops_writes: false,
            on_cpu: true,
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no test panicked with the lock")
    }

    fn set(&mut self, msr: u32, value: u64) {
        self.state().registers.insert(msr, value);
    }

    fn get(&self, msr: u32) -> u64 {
        self.state().registers[&msr]
    }

    fn cpuid(&self) -> HostCpuid {
        let regs = |eax, ebx, ecx, edx| CpuidRegs { eax, ebx, ecx, edx };
        if self.state().intel {
            HostCpuid {
                vendor: Some(Vendor::Intel),
                leaf_1: regs(0x0005_06e3, 0, 1 << 15, 0),
                leaf_0xa: regs(0x0730_0404, 0, 0, 0x603),
                ..HostCpuid::default()
            }
        } else {
            HostCpuid {
                vendor: Some(Vendor::Amd),
                leaf_1: regs(0x0083_0f10, 0, 0, 0),
                leaf_80000001: regs(0, 0, 1 << 23, 0),
                ..HostCpuid::default()
            }
        }
    }

    fn open(&self) -> Result<MsrBackend, MsrRefusal> {
        self.open_with(false, false)
    }

    fn open_with(&self, force: bool, watchdog: bool) -> Result<MsrBackend, MsrRefusal> {
        let options = MsrOptions { cpu: 3, force };
        MsrBackend::with_device(Box::new(self.clone()), self.cpuid(), options, KHZ, watchdog)
    }

    /// `events` of every kind happen in `ring`: each enabled counter gets them.
    fn happen(&self, ring: Ring, events: u64) {
        let mut state = self.state();
        let (usr, os) = (1 << 16, 1 << 17);
        let bit = if ring == Ring::Kernel { os } else { usr };
        let intel = state.intel;
        let global = if intel {
            state.registers[&GLOBAL.0]
        } else {
            u64::MAX
        };
        let mut hit = Vec::new();
        for (n, (value, select)) in state.counters.iter().enumerate() {
            let select = state.registers[select];
            if select & ENABLE != 0 && select & bit != 0 && global & 1 << n != 0 {
                hit.push(*value);
            }
        }
        if intel {
            let control = state.registers[&FIXED_CONTROL.0];
            let bit = if ring == Ring::Kernel { 1 } else { 2 };
            hit.extend(
                (0..3u32)
                    .filter(|n| control >> (4 * n) & bit != 0 && global & 1 << (32 + n) != 0)
                    .map(|n| 0x309 + n),
            );
        }
        for msr in hit {
            if let Some(value) = state.registers.get_mut(&msr) {
                *value = (*value + events) & ((1 << 48) - 1);
            }
        }
    }
}

impl MsrDevice for Cpu {
    fn read(&self, msr: MsrIndex) -> io::Result<u64> {
        let mut state = self.state();
        state.reads += 1;
        if let Some((faulty, errno)) = state.faulty
            && faulty == msr.0
        {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let value = state.registers.get(&msr.0).copied();
        value.ok_or_else(|| io::Error::from_raw_os_error(EIO))
    }

    fn write(&mut self, msr: MsrIndex, value: u64) -> io::Result<()> {
        let mut state = self.state();
        let faulty = state.faulty.filter(|(faulty, _)| *faulty == msr.0);
        if let Some((_, errno)) = faulty {
            return Err(io::Error::from_raw_os_error(errno));
        }
        if state.read_only {
            return Err(io::Error::from_raw_os_error(EPERM));
        }
        state.writes.push((msr.0, value));
        if !state.drops_writes {
            state.registers.insert(msr.0, value);
        }
        Ok(())
    }

    fn on_cpu(&self) -> bool {
        self.state().on_cpu
    }
}

/// Lets events happen in a [`Cpu`].
struct CpuDriver {
    cpu: Cpu,
    now: u64,
}

impl Driver for CpuDriver {
    fn request(&self) -> CountRequest {
        cycles(&self.cpu)
    }

    fn uncountable(&self) -> CountRequest {
        let family = if self.cpu.state().intel {
            EventFamily::AmdZen
        } else {
            EventFamily::Intel
        };
        selected(family, 0xc0, 0)
    }

    fn run(
        &mut self,
        backend: &mut dyn CounterBackend,
        ring: Ring,
        events: u64,
    ) -> RangeInclusive<u64> {
        // The host's own events must not be counted.
        self.cpu.happen(Ring::Kernel, 1_000_000);
        backend.observe(&Progress::Entered { tsc: Tsc(self.now) });
        self.cpu.happen(ring, events);
        self.now += events;
        backend.observe(&Progress::Left {
            tsc: Tsc(self.now),
            halted: Ticks(0),
            ring: None,
        });
        self.cpu.happen(Ring::User, 1_000_000);
        events..=events
    }

    fn deadline(&mut self, backend: &mut dyn CounterBackend) -> Asked {
        backend.observe(&Progress::Entered { tsc: Tsc(self.now) });
        let deadline = backend.deadline();
        backend.observe(&Progress::Left {
            tsc: Tsc(self.now),
            halted: Ticks(0),
            ring: None,
        });
        Asked::Deadline(deadline)
    }
}

fn selected(family: EventFamily, select: u16, umask: u8) -> CountRequest {
    let event = EventCode::Selected {
        family,
        select,
        umask,
    };
    CountRequest::plain(event, true, true)
}

fn cycles(cpu: &Cpu) -> CountRequest {
    if cpu.state().intel {
        selected(EventFamily::Intel, 0x3c, 0)
    } else {
        selected(EventFamily::AmdZen, 0x76, 0)
    }
}

fn run(backend: &mut MsrBackend, cpu: &Cpu, from: u64, events: u64) {
    backend.observe(&Progress::Entered { tsc: Tsc(from) });
    cpu.happen(Ring::User, events);
    backend.observe(&Progress::Left {
        tsc: Tsc(from + events),
        halted: Ticks(0),
        ring: None,
    });
}

fn counting(cpu: &Cpu) -> MsrBackend {
    let mut backend = cpu.open().expect("free counters");
    backend.program(A, &cycles(cpu)).expect("cycles");
    backend.start(A);
    backend
}

fn count(backend: &MsrBackend, slot: SlotIndex) -> u64 {
    match backend.read(slot) {
        Reading::Counted { value, .. } => value,
        Reading::Unavailable(reason) => panic!("{reason}"),
    }
}

const LOST: Reading = Reading::Unavailable(UnavailableReason::Lost { backend: "msr" });

#[test]
fn both_layouts_keep_the_contract() {
    for cpu in [Cpu::intel(), Cpu::amd()] {
        let driver = CpuDriver {
            cpu: cpu.clone(),
            now: 0,
        };
        let factory = || -> Box<dyn CounterBackend> { Box::new(cpu.open().expect("free")) };
        let violations = contract::check(factory, driver).err().unwrap_or_default();
        assert!(violations.is_empty(), "{violations:#?}");
    }
}

#[test]
fn what_was_there_is_restored() {
    let mut cpu = Cpu::intel();
    let before = [
        (0x4c1, 77),
        (0x186, 0x0003_00c0),
        (0x309, 5),
        (GLOBAL.0, 0x7_0000_000f),
    ];
    for (msr, value) in before {
        cpu.set(msr, value);
    }
    let mut backend = counting(&cpu);
    run(&mut backend, &cpu, 0, 100);
    assert_eq!(cpu.get(GLOBAL.0), 0, "nothing counts outside of the guest");
    drop(backend);
    for (msr, value) in before {
        assert_eq!(cpu.get(msr), value, "{msr:#x}");
    }
}

#[test]
fn one_write_starts_and_one_stops_where_there_is_a_common_enable() {
    let cpu = Cpu::intel();
    let mut backend = counting(&cpu);
    for slot in [B, SlotIndex(2)] {
        backend.program(slot, &cycles(&cpu)).expect("cycles");
        backend.start(slot);
    }
    cpu.state().writes.clear();
    run(&mut backend, &cpu, 0, 100);
    assert_eq!(cpu.state().writes, [(GLOBAL.0, 0b111), (GLOBAL.0, 0)]);
    // Nothing counts: nothing is touched. Stopping and starting costs nothing either.
    let all: SlotSet = [A, B, SlotIndex(2)].into_iter().collect();
    cpu.state().writes.clear();
    cpu.state().reads = 0;
    backend.pause(all);
    run(&mut backend, &cpu, 500, 100);
    backend.resume(all);
    assert!(cpu.state().writes.is_empty());
    assert_eq!(cpu.state().reads, 0);
    assert_eq!(count(&backend, B), 100);
}

#[test]
fn counters_in_use_are_refused_unless_forced() {
    fn check(msr: u32, value: u64, expected: &str) {
        let mut cpu = Cpu::intel();
        cpu.set(msr, value);
        let refusal = cpu.open().expect_err("in use").to_string();
        assert!(refusal.contains(expected), "{refusal}");
        assert!(cpu.state().writes.is_empty(), "a refusal changes nothing");
        let mut forced = cpu.open_with(true, true).expect("forced");
        forced.program(A, &cycles(&cpu)).expect("cycles");
        drop(forced);
        assert_eq!(cpu.get(msr), value, "given back");
    }
    check(
        0x187,
        0x0053_0076,
        "MSR 0x187 is 0x530076, which enables counters: `perf`",
    );
    check(FIXED_CONTROL.0, 0xb0, "MSR 0x38d is 0xb0");
    let watchdog = Cpu::amd().open_with(false, true).expect_err("watchdog");
    assert!(
        watchdog
            .to_string()
            .contains("sysctl kernel.nmi_watchdog=0")
    );
}

#[test]
fn faults_of_the_device_are_named() {
    let check = |change: &dyn Fn(&mut State), expected: &str| {
        let cpu = Cpu::amd();
        change(&mut cpu.state());
        let refusal = cpu.open().expect_err(expected).to_string();
        assert!(refusal.contains(expected), "{refusal}");
    };
    check(
        &|s| s.faulty = Some((0xc001_0203, EIO)),
        "MSR 0xc0010203 cannot be read: Input/output",
    );
    check(
        &|s| s.read_only = true,
        "lockdown, or `msr.allow_writes=off`",
    );
    check(&|s| s.drops_writes = true, "does not keep what is written");
    check(&|s| s.on_cpu = false, "does not run on CPU 3: pin it there");
}

#[test]
fn a_stolen_counter_has_no_count() {
    // Who changed what while the guest ran, or while it did not.
    type Theft = fn(&mut Cpu);
    let table: [(Cpu, Theft); 5] = [
        (Cpu::amd(), |cpu| cpu.set(0xc001_0200, 0x0053_00c0)),
        (Cpu::intel(), |cpu| cpu.set(GLOBAL.0, 0xf)),
        (Cpu::intel(), |cpu| cpu.set(0x186, 0x0053_00c0)),
        (Cpu::intel(), |cpu| cpu.state().faulty = Some((0x186, EIO))),
        (Cpu::amd(), |cpu| cpu.state().on_cpu = false),
    ];
    for (number, (mut cpu, theft)) in table.into_iter().enumerate() {
        for inside in [true, false] {
            let mut backend = counting(&cpu);
            run(&mut backend, &cpu, 0, 100);
            assert_eq!(count(&backend, A), 100);
            if !inside {
                theft(&mut cpu);
            }
            backend.observe(&Progress::Entered { tsc: Tsc(1000) });
            if inside {
                theft(&mut cpu);
            }
            backend.observe(&Progress::Left {
                tsc: Tsc(2000),
                halted: Ticks(0),
                ring: None,
            });
            assert_eq!(backend.read(A), LOST, "theft {number}, inside: {inside}");
            drop(backend);
            // The thief keeps what he took; the next try starts from a free CPU.
            let mut state = cpu.state();
            assert!(number != 0 || state.registers[&0xc001_0200] == 0x0053_00c0);
            (state.faulty, state.on_cpu) = (None, true);
            state.registers.values_mut().for_each(|value| *value = 0);
            if state.intel {
                state.registers.insert(0x345, 1 << 13);
            }
        }
    }
}

#[test]
fn a_counter_enabled_by_somebody_else_is_not_programmed() {
    let mut cpu = Cpu::amd();
    let mut backend = cpu.open().expect("free");
    cpu.set(0xc001_0200, 0x0053_0076);
    let refused = backend.program(A, &cycles(&cpu)).expect_err("in use");
    assert!(matches!(
        refused.reason,
        UnavailableReason::Refused { backend: "msr", .. }
    ));
    assert!(matches!(backend.read(A), Reading::Unavailable(_)));
    assert!(backend.program(B, &cycles(&cpu)).is_ok());
    drop(backend);
    assert_eq!(cpu.get(0xc001_0200), 0x0053_0076);
}

#[test]
fn events_go_where_the_processor_can_count_them() {
    let cpu = Cpu::intel();
    let mut backend = cpu.open().expect("free");
    let slots = |numbers: &[u8]| numbers.iter().copied().map(SlotIndex).collect::<SlotSet>();
    let fixed = |function| CountRequest::plain(EventCode::Fixed(function), true, true);
    let edge = CountRequest {
        edge: true,
        ..cycles(&cpu)
    };
    for (request, expected) in [
        (fixed(FixedFunction::RefCycles), slots(&[6])),
        (fixed(FixedFunction::CoreCycles), slots(&[0, 1, 2, 3, 5])),
        (
            selected(EventFamily::Intel, 0xc0, 0),
            slots(&[0, 1, 2, 3, 4]),
        ),
        (edge, slots(&[0, 1, 2, 3])),
        (selected(EventFamily::Intel, 0xc0, 1), slots(&[1])),
        (
            selected(EventFamily::Intel, 0x2e, 0x41),
            slots(&[0, 1, 2, 3]),
        ),
    ] {
        assert_eq!(constraint(&backend, &request).slots, expected, "{request}");
        for slot in SlotSet::below(backend.capacity()).iter() {
            let programmed = backend.program(slot, &request).is_ok();
            assert_eq!(
                programmed,
                expected.contains(slot),
                "{request} at {}",
                slot.0
            );
            backend.release(slot);
        }
    }
    // A fixed counter counts in one ring, by its own field.
    let user = CountRequest {
        os: false,
        ..fixed(FixedFunction::RefCycles)
    };
    backend
        .program(SlotIndex(6), &user)
        .expect("reference cycles");
    assert_eq!(cpu.get(FIXED_CONTROL.0), 0x200);
    backend.start(SlotIndex(6));
    run(&mut backend, &cpu, 0, 9);
    assert_eq!(count(&backend, SlotIndex(6)), 9);
}

#[test]
fn large_increments_take_a_pair() {
    let cpu = Cpu::amd();
    let mut backend = cpu.open().expect("free");
    let flops = selected(EventFamily::AmdZen, 0x003, 0xff);
    assert!(constraint(&backend, &flops).paired);
    assert!(backend.program(B, &flops).is_err(), "an odd counter");
    backend.program(A, &flops).expect("counters 0 and 1");
    assert_eq!(cpu.get(0xc001_0202), 0xf_0000_00ff, "merged");
    assert!(
        backend.program(B, &cycles(&cpu)).is_err(),
        "part of the pair"
    );
    backend.start(A);
    backend.observe(&Progress::Entered { tsc: Tsc(0) });
    assert_eq!(cpu.get(0xc001_0202), 0xf_0000_00ff | ENABLE);
    backend.observe(&Progress::Left {
        tsc: Tsc(1),
        halted: Ticks(0),
        ring: None,
    });
    backend.release(A);
    assert_eq!((cpu.get(0xc001_0200), cpu.get(0xc001_0202)), (0, 0));
    // Without its upper half a pair has no count.
    backend.program(A, &flops).expect("counters 0 and 1");
    assert_eq!(count(&backend, A), 0);
    cpu.clone().set(0xc001_0202, 0x53_0076);
    assert_eq!(
        backend.read(A),
        Reading::Unavailable(UnavailableReason::Lost { backend: "msr" })
    );
}

#[test]
fn polls_come_nearer_as_the_overflow_does() {
    let (shortest, longest) = (u64::from(KHZ) / 10, u64::from(KHZ));
    let cpu = Cpu::intel();
    let mut backend = counting(&cpu);
    backend.arm(A, NonZeroU64::new(10_000_000));
    let mut poll = |from: u64, events: u64| {
        backend.observe(&Progress::Entered { tsc: Tsc(from) });
        let deadline = backend.deadline().map(|at| at.0 - from);
        cpu.happen(Ring::User, events);
        backend.observe(&Progress::Left {
            tsc: Tsc(from + events),
            halted: Ticks(0),
            ring: None,
        });
        (deadline, backend.take_overflows().contains(A))
    };
    assert_eq!(
        poll(0, 1_000_000),
        (Some(shortest), false),
        "the rate is not known"
    );
    assert_eq!(poll(1, 8_000_000), (Some(longest), false), "far away");
    assert_eq!(
        poll(2, 700_000),
        (Some(1_000_000), false),
        "one event a tick"
    );
    assert_eq!(poll(3, 300_000), (Some(300_000), true), "there");
    assert_eq!(poll(4, 300_000), (None, false), "told once");
}

#[test]
fn a_count_that_may_have_wrapped_unseen_is_lost() {
    let cpu = Cpu::intel();
    let mut backend = counting(&cpu);
    backend.observe(&Progress::Entered { tsc: Tsc(0) });
    backend.observe(&Progress::Left {
        tsc: Tsc(1 << 47),
        halted: Ticks(0),
        ring: None,
    });
    assert_eq!(backend.read(A), LOST);
}

#[test]
fn the_hosts_own_events_are_measured_and_stated() {
    // A CPU on which every write costs 40 events.
    #[derive(Debug)]
    struct Slow(Cpu);
    impl MsrDevice for Slow {
        fn read(&self, msr: MsrIndex) -> io::Result<u64> {
            self.0.read(msr)
        }
        fn write(&mut self, msr: MsrIndex, value: u64) -> io::Result<()> {
            self.0.happen(Ring::Kernel, 40);
            self.0.write(msr, value)
        }
        fn on_cpu(&self) -> bool {
            true
        }
    }
    let cpu = Cpu::intel();
    let options = MsrOptions::default();
    let backend = MsrBackend::with_device(
        Box::new(Slow(cpu.clone())),
        cpu.cpuid(),
        options,
        KHZ,
        false,
    )
    .expect("free");
    assert_eq!(backend.report().residue_cycles, Some(40));
    let text = backend.report().to_string();
    assert!(
        text.contains("each entry adds 40 cycles of the host's"),
        "{text}"
    );
    let quiet = cpu.clone();
    drop(backend);
    let backend = quiet.open().expect("free");
    assert_eq!(
        backend.report().residue_cycles,
        None,
        "nothing counted is no zero"
    );
}

fn constraint(backend: &impl CounterBackend, request: &CountRequest) -> Constraint {
    backend.plan(request).expect("it counts that").constraint
}
