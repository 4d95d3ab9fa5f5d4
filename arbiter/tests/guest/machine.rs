//! A machine of several CPUs, each with the real reservations and registers
//! that stand for its PMU.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use arbiter::guest::{
    DeniedAccess, Discovery, EnforcingMaster, Fault, FullMaster, Key, Master, MinimalMaster,
    PcrPort,
};
use arbiter::{
    Access, Auditor, Caller, Context, Control, CounterId, CounterSet, Entropy, GuardLimits, Layer,
    NoAudit, PcrConfig, PcrRegister, PcrUnit, PerKind, Phase, Policy, Scheme, Shared, Tsc, Verdict,
    abi,
};

pub(crate) const PMC0: CounterId = CounterId::Programmable(0);
pub(crate) const PMC1: CounterId = CounterId::Programmable(1);
pub(crate) const PMC2: CounterId = CounterId::Programmable(2);
pub(crate) const FIXED0: CounterId = CounterId::Fixed(0);
pub(crate) const FIXED1: CounterId = CounterId::Fixed(1);

/// What a machine is like.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) cpus: usize,
    pub(crate) counters: PerKind,
    /// Counters with a legacy name once the firmware's phase is over.
    pub(crate) legacy: Option<PerKind>,
    pub(crate) policy: Policy,
    pub(crate) scheme: Scheme,
}

impl Shape {
    pub(crate) fn new(cpus: usize, programmable: u8, fixed: u8) -> Self {
        Shape {
            cpus,
            counters: PerKind {
                programmable,
                fixed,
            },
            legacy: None,
            policy: Policy::default(),
            scheme: Scheme::Independent,
        }
    }

    /// The same under this scheme.
    pub(crate) fn under(&self, scheme: Scheme) -> Self {
        Shape {
            scheme,
            ..self.clone()
        }
    }

    /// So many counters have legacy names.
    pub(crate) fn legacy(self, programmable: u8, fixed: u8) -> Self {
        Shape {
            legacy: Some(PerKind {
                programmable,
                fixed,
            }),
            ..self
        }
    }
}

/// Numbers that do not repeat; none at all once it is dry.
#[derive(Debug)]
struct Numbers {
    state: u64,
    dry: bool,
}

impl Entropy for Numbers {
    fn bits(&mut self) -> Option<u64> {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.state ^ self.state >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (!self.dry).then_some(mixed ^ mixed >> 32)
    }
}

#[derive(Debug)]
struct Cpu {
    unit: PcrUnit,
    /// By position.
    selects: [u64; 64],
    counts: [u64; 64],
}

#[derive(Debug)]
struct Machine {
    cpus: Vec<Cpu>,
    entropy: Numbers,
    audit: NoAudit,
    now: u64,
    /// Accesses until one of them fails without reason.
    until_fault: Option<u32>,
    accesses: u64,
    phase: Arc<Phase>,
}

/// The machine as code in one layer sees it.
#[derive(Clone, Debug)]
pub(crate) struct Port {
    machine: Rc<RefCell<Machine>>,
    layer: Layer,
}

const TICKS_PER_MS: u64 = 1000;

impl Port {
    /// The machine in its firmware's phase, as the firmware sees it.
    pub(crate) fn new(shape: &Shape) -> Port {
        let phase = Arc::new(Phase::new(true));
        let cpu = |_| Cpu {
            unit: PcrUnit::new(PcrConfig {
                counters: shape.counters,
                widths: PerKind {
                    programmable: 48,
                    fixed: 48,
                },
                policy: shape.policy,
                guard: GuardLimits::with_ticks_per_ms(TICKS_PER_MS),
                ticks_per_ms: TICKS_PER_MS,
                phase: phase.clone(),
                legacy: shape.legacy,
                scheme: shape.scheme,
                smm: true,
            }),
            selects: [0; 64],
            counts: [0; 64],
        };
        Port {
            machine: Rc::new(RefCell::new(Machine {
                cpus: (0..shape.cpus).map(cpu).collect(),
                entropy: Numbers {
                    state: 1,
                    dry: false,
                },
                audit: NoAudit,
                now: 0,
                until_fault: None,
                accesses: 0,
                phase,
            })),
            layer: Layer::Firmware,
        }
    }

    /// A machine whose firmware wants nothing, as its kernel sees it.
    pub(crate) fn kernel(shape: &Shape) -> Port {
        Port::new(shape).end_phase()
    }

    /// The firmware hands over to the kernel.
    pub(crate) fn end_phase(self) -> Port {
        self.machine.borrow().phase.end();
        self.as_layer(Layer::GuestKernel)
    }

    /// The same machine for other code.
    pub(crate) fn as_layer(&self, layer: Layer) -> Port {
        Port {
            machine: self.machine.clone(),
            layer,
        }
    }

    /// What CPUID would say.
    pub(crate) fn discovery(&self) -> Discovery {
        let machine = self.machine.borrow();
        let unit = &machine.cpus[0].unit;
        let PerKind {
            programmable,
            fixed,
        } = PerKind::count(unit.bank().counters());
        Discovery {
            base: abi::MSR_BASE,
            features: unit.features(),
            programmable,
            fixed,
        }
    }

    /// Reserves a counter for this layer on one CPU, privately.
    pub(crate) fn hold(&mut self, cpu: u32, counter: CounterId, key: Key) -> Result<(), Fault> {
        let position = counter.global_bit().expect("a counter of the test");
        let row = |row: u32| abi::MSR_BASE + row + position;
        let value = key.register();
        if self
            .wrmsr(cpu, row(abi::MSR_MANAGEMENT_KEY), value)
            .is_err()
        {
            // A master grants.
            let which = u64::from(position) << abi::REQUEST_WHICH_SHIFT;
            let word = abi::REQUEST_RESERVE | abi::REQUEST_POSITION | which;
            self.wrmsr_with(cpu, abi::MSR_BASE + abi::MSR_REQUEST, word, key)?;
        }
        self.wrmsr_with(cpu, row(abi::MSR_ACCESS_KEY), value, key)
    }

    /// The counter behind a legacy name.
    pub(crate) fn behind(&self, cpu: u32, name: CounterId) -> Option<CounterId> {
        let mut machine = self.machine.borrow_mut();
        machine.cpus[cpu as usize].unit.map().counter(name)
    }

    /// The verdict on a legacy access to a counter's registers.
    pub(crate) fn legacy(&self, cpu: u32, name: CounterId, access: Access) -> Option<Verdict> {
        let counter = self.behind(cpu, name)?;
        Some(self.verdict(cpu, counter, Key::DEFAULT, access))
    }

    /// The verdict on an access by a counter's alias.
    pub(crate) fn verdict(
        &self,
        cpu: u32,
        counter: CounterId,
        key: Key,
        access: Access,
    ) -> Verdict {
        let machine = self.machine.borrow();
        let cookie = arbiter::Cookie::new(key.register()).expect("a key has 48 bits");
        let unit = &machine.cpus[cpu as usize].unit;
        unit.check((self.layer, cookie), counter, access, Tsc(machine.now))
    }

    pub(crate) fn held(&self, cpu: u32) -> CounterSet {
        self.machine.borrow().cpus[cpu as usize].unit.bank().held()
    }

    pub(crate) fn held_by(&self, cpu: u32, layer: Layer) -> CounterSet {
        let machine = self.machine.borrow();
        machine.cpus[cpu as usize].unit.bank().held_by(layer)
    }

    pub(crate) fn control(&self, cpu: u32, counter: CounterId) -> Control {
        let machine = self.machine.borrow();
        let bank = machine.cpus[cpu as usize].unit.bank();
        let held = bank.reservation(counter);
        held.map_or(Control::INITIAL, |reservation| reservation.control)
    }

    /// Whether nobody holds anything, every shared control reaches every
    /// counter, and no register has anything in it.
    pub(crate) fn is_pristine(&self) -> bool {
        self.machine.borrow().cpus.iter().all(|cpu| {
            let bank = cpu.unit.bank();
            let reached = |shared: Shared| cpu.unit.reached_by(shared) == bank.counters();
            bank.held().is_empty()
                && Shared::ALL.into_iter().all(reached)
                && cpu.selects == [0; 64]
                && cpu.counts == [0; 64]
        })
    }

    pub(crate) fn wrong_cookies(&self) -> u64 {
        let machine = self.machine.borrow();
        machine
            .cpus
            .iter()
            .map(|cpu| cpu.unit.wrong_cookies())
            .sum()
    }

    pub(crate) fn accesses(&self) -> u64 {
        self.machine.borrow().accesses
    }

    /// Random numbers run out.
    pub(crate) fn run_dry(&self) {
        self.machine.borrow_mut().entropy.dry = true;
    }

    /// The access after `n` others fails.
    pub(crate) fn fail_after(&self, n: u32) {
        self.machine.borrow_mut().until_fault = Some(n);
    }

    /// Milliseconds pass on one CPU; what has ended, ends.
    pub(crate) fn pass(&self, cpu: u32, ms: u64) {
        let machine = &mut *self.machine.borrow_mut();
        machine.now += ms * TICKS_PER_MS;
        let cpu = &mut machine.cpus[cpu as usize];
        let effects = cpu.unit.tick(&mut Context {
            now: Tsc(machine.now),
            entropy: &mut machine.entropy,
            audit: &mut machine.audit,
        });
        cpu.clear(effects.cleared);
    }
}

impl Cpu {
    fn clear(&mut self, counters: CounterSet) {
        for bit in counters.iter().filter_map(CounterId::global_bit) {
            self.selects[bit as usize] = 0;
            self.counts[bit as usize] = 0;
        }
    }

    /// The PMU's register under an alias; `None` for one of the reservations'.
    fn alias(&mut self, register: PcrRegister) -> Option<(CounterId, &mut u64)> {
        let (counter, words) = match register {
            PcrRegister::Counter(counter) => (counter, &mut self.counts),
            PcrRegister::Select(counter) => (counter, &mut self.selects),
            _ => return None,
        };
        Some((counter, &mut words[counter.global_bit()? as usize]))
    }

    fn verdict(&self, caller: Caller, counter: CounterId, access: Access) -> Option<Verdict> {
        let cookie = arbiter::Cookie::new(caller.presented)?;
        let exists = self.unit.bank().counters().contains(counter);
        // Nobody guesses here.
        let verdict = self
            .unit
            .check((caller.layer, cookie), counter, access, Tsc(0));
        exists.then_some(verdict)
    }
}

impl Machine {
    fn access(
        &mut self,
        cpu: u32,
        msr: u32,
        write: Option<u64>,
        caller: Caller,
    ) -> Result<u64, Fault> {
        self.accesses += 1;
        if let Some(left) = &mut self.until_fault {
            match left.checked_sub(1) {
                Some(fewer) => *left = fewer,
                None => {
                    self.until_fault = None;
                    return Err(Fault);
                }
            }
        }
        let register = PcrRegister::decode(msr).ok_or(Fault)?;
        let mut cx = Context {
            now: Tsc(self.now),
            entropy: &mut self.entropy,
            audit: &mut self.audit as &mut dyn Auditor,
        };
        let cpu = self.cpus.get_mut(cpu as usize).ok_or(Fault)?;
        if let Some((counter, _)) = cpu.alias(register) {
            let access = write.map_or(Access::Read, |_| Access::Write);
            return match (cpu.verdict(caller, counter, access).ok_or(Fault)?, write) {
                (Verdict::Fault, _) => Err(Fault),
                (Verdict::Drop { read_as }, _) => Ok(read_as),
                (Verdict::Permit, write) => {
                    let (_, word) = cpu.alias(register).ok_or(Fault)?;
                    *word = write.unwrap_or(*word);
                    Ok(*word)
                }
            };
        }
        match write {
            None => cpu.unit.read(register, caller, &mut cx).ok_or(Fault),
            Some(value) => {
                let effects = cpu.unit.write(register, value, caller, &mut cx);
                cpu.clear(effects.ok_or(Fault)?.cleared);
                Ok(0)
            }
        }
    }
}

impl PcrPort for Port {
    fn cpus(&self) -> u32 {
        u32::try_from(self.machine.borrow().cpus.len()).expect("few CPUs")
    }

    fn rdmsr_with(&mut self, cpu: u32, msr: u32, key: Key) -> Result<u64, Fault> {
        let caller = Caller {
            layer: self.layer,
            presented: key.register(),
        };
        self.machine.borrow_mut().access(cpu, msr, None, caller)
    }

    fn wrmsr_with(&mut self, cpu: u32, msr: u32, value: u64, key: Key) -> Result<(), Fault> {
        let caller = Caller {
            layer: self.layer,
            presented: key.register(),
        };
        let mut machine = self.machine.borrow_mut();
        machine.access(cpu, msr, Some(value), caller).map(drop)
    }
}

/// One of the three arbiters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Minimal,
    Enforcing(DeniedAccess),
    Full(DeniedAccess),
}

impl Kind {
    pub(crate) const ALL: [Kind; 5] = [
        Kind::Minimal,
        Kind::Enforcing(DeniedAccess::Drop),
        Kind::Enforcing(DeniedAccess::Fault),
        Kind::Full(DeniedAccess::Drop),
        Kind::Full(DeniedAccess::Fault),
    ];

    /// One that holds what the kernel can get.
    pub(crate) fn claim(self, port: &Port) -> Box<dyn Master> {
        let (port, machine) = (port.clone(), port.discovery());
        match self {
            Kind::Minimal => {
                Box::new(MinimalMaster::claim(port, machine, DeniedAccess::Drop).expect("a kernel"))
            }
            Kind::Enforcing(denial) => {
                Box::new(EnforcingMaster::claim(port, machine, denial).expect("a kernel"))
            }
            Kind::Full(denial) => {
                Box::new(FullMaster::claim(port, machine, denial).expect("a kernel"))
            }
        }
    }

    /// What legacy software meets at a counter that is not reserved, or not for
    /// both registers.
    pub(crate) fn unreserved(self) -> Verdict {
        match self {
            Kind::Minimal => Verdict::Permit,
            Kind::Enforcing(DeniedAccess::Drop) | Kind::Full(DeniedAccess::Drop) => {
                Verdict::Drop { read_as: 0 }
            }
            Kind::Enforcing(DeniedAccess::Fault) | Kind::Full(DeniedAccess::Fault) => {
                Verdict::Fault
            }
        }
    }
}

/// The MSR of a row at a counter's position.
pub(crate) fn msr(row: u32, counter: CounterId) -> u32 {
    abi::MSR_BASE + row + counter.global_bit().expect("a counter of the test")
}

/// A key that is not a secret.
pub(crate) fn key(bits: u64) -> Key {
    Key::new(bits).expect("48 bits")
}

pub(crate) fn set(counters: &[CounterId]) -> CounterSet {
    counters.iter().copied().collect()
}
