//! The firmware's reservations against `arbiter`'s unit, behind the
//! instructions that a guest has.

use std::collections::HashMap;
use std::sync::Arc;

use arbiter::{
    Access, Caller, Context, Control, Cookie, CounterId, Entropy, GuardLimits, Layer, NoAudit,
    NoticeKind, PcrConfig, PcrRegister, PcrUnit, PerKind, Phase, Policy, Reason, Reply, Request,
    Scheme, Tsc, Verdict, Wanted, abi,
};
use firmware::config::{CounterRequest, Outcome, Position, Step};
use firmware::reserve::mailbox::{Happening, Held, News, answer_notices};
use firmware::reserve::{Cookies, Fault, Machine, Pcr, Regs, end_phase, reserve};

const GLOBAL_CTRL: u32 = 0x38f;
/// Not the constant of the ABI: the firmware has to take it from CPUID.
const BASE: u32 = 0x1234_5000;

#[derive(Debug)]
struct Counting(u64);

impl Entropy for Counting {
    fn bits(&mut self) -> Option<u64> {
        self.0 = self.0.wrapping_add(1);
        Some(self.0)
    }
}

/// A processor with counters, of which registers are kept as they are written.
struct Rig {
    unit: PcrUnit,
    phase: Arc<Phase>,
    registers: HashMap<u32, u64>,
    entropy: Counting,
    /// Features that CPUID does not announce.
    hidden: u32,
    /// Alias registers that fault.
    broken: Option<u32>,
    global_version: u32,
    block: u32,
    rdrand: Option<u64>,
    /// Milliseconds since the start.
    now: u64,
    /// How often the firmware may wait, for a millisecond each time.
    patience: u32,
    /// What the hypervisor replies when it is asked; `None`: nothing.
    hypervisor: Option<bool>,
    told: Vec<Happening>,
}

impl Rig {
    fn new(programmable: u8, fixed: u8) -> Self {
        Self::under(Scheme::Independent, programmable, fixed)
    }

    fn under(scheme: Scheme, programmable: u8, fixed: u8) -> Self {
        let policy = Policy {
            kernel: Policy::default().firmware,
            ..Policy::default()
        };
        Self::with_policy(scheme, policy, programmable, fixed)
    }

    fn with_policy(scheme: Scheme, policy: Policy, programmable: u8, fixed: u8) -> Self {
        let phase = Arc::new(Phase::new(true));
        let config = PcrConfig {
            counters: PerKind {
                programmable,
                fixed,
            },
            widths: PerKind {
                programmable: 48,
                fixed: 48,
            },
            policy,
            scheme,
            guard: GuardLimits::with_ticks_per_ms(1),
            ticks_per_ms: 1,
            phase: Arc::clone(&phase),
            legacy: None,
            smm: false,
        };
        Self {
            unit: PcrUnit::new(config),
            phase,
            registers: HashMap::from([(GLOBAL_CTRL, 0)]),
            entropy: Counting(0x1000),
            hidden: 0,
            broken: None,
            global_version: 2,
            block: abi::CPUID_BLOCK,
            rdrand: None,
            now: 0,
            patience: 1000,
            hypervisor: None,
            told: Vec::new(),
        }
    }

    /// Lets the host itself act.
    fn host<R>(&mut self, act: impl FnOnce(&mut PcrUnit, &mut Context<'_>) -> R) -> R {
        let mut cx = Context {
            now: Tsc(self.now),
            entropy: &mut self.entropy,
            audit: &mut NoAudit,
        };
        act(&mut self.unit, &mut cx)
    }

    /// The hypervisor holds this counter.
    fn hypervisors(&mut self, n: u8) {
        let counter = CounterId::Programmable(n);
        let cookie = Cookie::from_random(0xabc);
        let _ = self
            .host(|unit, cx| unit.reserve_for_hypervisor(counter, cookie, cx))
            .expect("it is free");
    }

    /// The hypervisor asks for so many counters.
    fn hypervisor_asks(&mut self, count: u8) {
        let request = Request::Reserve {
            wanted: Wanted::Any(count),
            cookie: Cookie::from_random(0xdef),
            lease_ms: None,
            event: None,
        };
        let _ = self
            .host(|unit, cx| unit.request(Layer::Hypervisor, request, cx))
            .expect("none is pending");
    }

    fn owner(&self, n: u8) -> Option<Layer> {
        let reservation = self.unit.bank().reservation(CounterId::Programmable(n));
        reservation.map(|reservation| reservation.owner)
    }

    fn layer(&self) -> Layer {
        self.phase.layer(true, false)
    }

    fn alias(&self, register: PcrRegister, cookie: u64, access: Access) -> Option<Verdict> {
        let (PcrRegister::Counter(counter)
        | PcrRegister::Select(counter)
        | PcrRegister::Overflow(counter)) = register
        else {
            return None;
        };
        let cookie = Cookie::new(cookie)?;
        Some(
            self.unit
                .check((self.layer(), cookie), counter, access, Tsc(0)),
        )
    }

    fn alias_value(&self, offset: u32, position: u8) -> u64 {
        let index = abi::MSR_BASE + offset + u32::from(position);
        self.registers.get(&index).copied().unwrap_or(0)
    }
}

impl Machine for Rig {
    fn cpuid(&mut self, leaf: u32, _: u32) -> Regs {
        let word = |text: &[u8; 4]| u32::from_le_bytes(*text);
        let counters = self.unit.bank().counters();
        let PerKind {
            programmable,
            fixed,
        } = PerKind::count(counters);
        let of_block = leaf.wrapping_sub(self.block);
        match (leaf, of_block) {
            (0, _) => Regs {
                eax: 0xd,
                ..Regs::default()
            },
            (1, _) => Regs {
                ecx: 1 << 31 | u32::from(self.rdrand.is_some()) << 30,
                ..Regs::default()
            },
            (0xa, _) => Regs {
                eax: self.global_version,
                ..Regs::default()
            },
            (_, 0) => Regs {
                eax: self.block + 2,
                ebx: word(b"Umpi"),
                ecx: word(b"reUm"),
                edx: word(b"pire"),
            },
            (_, 1) => Regs {
                ecx: abi::CPUID_FEATURES_ECX_PCR & !self.hidden,
                ..Regs::default()
            },
            (_, 2) => Regs {
                eax: abi::VERSION,
                ebx: BASE,
                ecx: self.unit.features() & !self.hidden,
                edx: u32::from_le_bytes([programmable, fixed, 48, 0]),
            },
            _ => Regs::default(),
        }
    }

    fn read(&mut self, msr: u32, cookie: u64) -> Result<u64, Fault> {
        if let Some(value) = self.registers.get(&msr) {
            return Ok(*value);
        }
        let layer = self.layer();
        let index = msr.wrapping_sub(BASE).wrapping_add(abi::MSR_BASE);
        let register = PcrRegister::decode(index).ok_or(Fault)?;
        let mut cx = Context {
            now: Tsc(self.now),
            entropy: &mut self.entropy,
            audit: &mut NoAudit,
        };
        let caller = Caller {
            layer,
            presented: cookie,
        };
        self.unit.read(register, caller, &mut cx).ok_or(Fault)
    }

    fn write(&mut self, msr: u32, cookie: u64, value: u64) -> Result<(), Fault> {
        if let Some(register) = self.registers.get_mut(&msr) {
            *register = value;
            return Ok(());
        }
        let layer = self.layer();
        let index = msr.wrapping_sub(BASE).wrapping_add(abi::MSR_BASE);
        let register = PcrRegister::decode(index).ok_or(Fault)?;
        if self.broken == Some(index - abi::MSR_BASE) {
            return Err(Fault);
        }
        if let Some(verdict) = self.alias(register, cookie, Access::Write) {
            assert_eq!(verdict, Verdict::Permit, "{register:?}");
            self.registers.insert(index, value);
            return Ok(());
        }
        let mut cx = Context {
            now: Tsc(self.now),
            entropy: &mut self.entropy,
            audit: &mut NoAudit,
        };
        let caller = Caller {
            layer,
            presented: cookie,
        };
        self.unit
            .write(register, value, caller, &mut cx)
            .map(drop)
            .ok_or(Fault)
    }

    fn rdrand(&mut self) -> Option<u64> {
        self.rdrand
    }

    /// A millisecond passes, in which the hypervisor may reply.
    fn wait(&mut self) -> bool {
        self.now += 1;
        let hypervisor = self.hypervisor;
        self.host(|unit, cx| {
            let _ = unit.tick(cx);
            while let Some(yields) = hypervisor
                && let Some(notice) = unit.next_notice(Layer::Hypervisor, cx.now)
            {
                if let (NoticeKind::Asked, Some(counter)) = (notice.kind, notice.counter) {
                    let reply = Reply { counter, yields };
                    let _ = unit.reply(Layer::Hypervisor, reply, cx);
                }
            }
        });
        self.patience = self.patience.saturating_sub(1);
        self.patience > 0
    }

    fn tell(&mut self, happening: Happening) {
        self.told.push(happening);
    }
}

const ANY: CounterRequest = CounterRequest {
    position: Position::Any,
    private: true,
    keep: false,
    yields: false,
    control: Control::INITIAL,
    drop_value: 0,
    select: 0x43_003c,
};

fn at(position: u8) -> CounterRequest {
    CounterRequest {
        position: Position::At(position),
        ..ANY
    }
}

fn reserve_all(rig: &mut Rig, requests: &[CounterRequest]) -> Vec<Outcome> {
    reserve_into(rig, requests, &mut Held::nothing())
}

fn reserve_into(rig: &mut Rig, requests: &[CounterRequest], held: &mut Held) -> Vec<Outcome> {
    let pcr = Pcr::find(rig).expect("reservations");
    let one = |wanted: (u8, &CounterRequest)| {
        let cookies = Cookies::draw(rig, &pcr, wanted.1.private).expect("cookies");
        reserve(rig, &pcr, wanted, cookies, held)
    };
    (0..).zip(requests).map(one).collect()
}

#[test]
fn counters_are_reserved_programmed_and_started() {
    let mut rig = Rig::new(4, 2);
    let fixed = CounterRequest {
        select: 3,
        drop_value: 9,
        ..at(33)
    };
    let outcomes = reserve_all(&mut rig, &[at(1), ANY, fixed]);
    let expected = [1, 3, 33].map(Outcome::Granted);
    assert_eq!(outcomes, expected);
    assert_eq!(rig.alias_value(abi::MSR_SELECT, 1), 0x43_003c);
    assert_eq!(rig.alias_value(abi::MSR_SELECT, 33), 3);
    assert_eq!(rig.registers[&GLOBAL_CTRL], 1 << 1 | 1 << 3 | 1 << 33);
    let reservation = rig.unit.bank().reservation(CounterId::Fixed(1));
    let reservation = reservation.expect("it is reserved");
    assert_eq!(
        (reservation.owner, reservation.drop_value),
        (Layer::Firmware, 9)
    );
    // Nobody without the cookie comes in, after the phase either.
    let pcr = Pcr::find(&mut rig).expect("reservations");
    assert!(end_phase(&mut rig, &pcr, abi::PHASE_END));
    assert_eq!(rig.layer(), Layer::GuestKernel);
    let stranger = rig.unit.check(
        (Layer::GuestKernel, Cookie::DEFAULT),
        CounterId::Programmable(1),
        Access::Write,
        Tsc(0),
    );
    assert_eq!(stranger, Verdict::Drop { read_as: 0 });
    assert!(!end_phase(&mut rig, &pcr, abi::PHASE_END), "it ends once");
}

#[test]
fn a_shared_counter_stays_everybodys() {
    let mut rig = Rig::new(2, 0);
    let shared = CounterRequest {
        private: false,
        ..at(0)
    };
    assert_eq!(reserve_all(&mut rig, &[shared]), [Outcome::Granted(0)]);
    let counter = CounterId::Programmable(0);
    let verdict = rig.unit.check(
        (Layer::GuestKernel, Cookie::DEFAULT),
        counter,
        Access::Write,
        Tsc(0),
    );
    assert_eq!(verdict, Verdict::Permit);
    assert!(rig.unit.bank().reservation(counter).is_some());
}

#[test]
fn an_isolated_counter_does_not_touch_shared_registers() {
    let mut rig = Rig::new(2, 0);
    let isolated = CounterRequest {
        control: Control::new(0xff).expect("modes alone"),
        ..at(1)
    };
    assert_eq!(reserve_all(&mut rig, &[isolated]), [Outcome::Granted(1)]);
    assert_eq!(rig.registers[&GLOBAL_CTRL], 0);
    // Where there is no global register nothing looks for one.
    let mut rig = Rig::new(2, 0);
    (rig.global_version, rig.registers) = (1, HashMap::new());
    assert_eq!(reserve_all(&mut rig, &[at(1)]), [Outcome::Granted(1)]);
}

#[test]
fn what_cannot_be_had_says_at_which_step() {
    let failed = Outcome::Failed;
    let mut rig = Rig::new(2, 0);
    let requests = [at(1), at(1), at(2), at(32), ANY, ANY];
    let expected = [
        Outcome::Granted(1),
        failed(Step::Reserve),
        failed(Step::Absent),
        failed(Step::Absent),
        Outcome::Granted(0),
        failed(Step::Reserve),
    ];
    assert_eq!(reserve_all(&mut rig, &requests), expected);
    let mut rig = Rig::new(0, 1);
    assert_eq!(reserve_all(&mut rig, &[ANY]), [failed(Step::Absent)]);
    // A counter that fails half-way is given back.
    let steps = [
        (abi::MSR_CONTROL, Step::Control),
        (abi::MSR_DROP_VALUE, Step::Control),
        (abi::MSR_ACCESS_KEY, Step::AccessKey),
        (abi::MSR_COUNTER, Step::Program),
        (abi::MSR_SELECT, Step::Program),
    ];
    for (offset, step) in steps {
        let mut rig = Rig::new(2, 0);
        rig.broken = Some(offset + 1);
        assert_eq!(reserve_all(&mut rig, &[at(1)]), [failed(step)]);
        assert!(rig.unit.bank().held().is_empty(), "{step:?}");
    }
}

/// Under a master the mailbox grants, also what is for everybody.
#[test]
fn a_master_is_asked_by_the_mailbox() {
    let mut rig = Rig::under(Scheme::SingleMaster, 2, 1);
    let shared = CounterRequest {
        private: false,
        ..at(32)
    };
    let strict = CounterRequest {
        drop_value: 5,
        control: Control::new(abi::CONTROL_INITIAL | abi::CONTROL_FAULT).expect("known bits"),
        ..at(0)
    };
    let outcomes = reserve_all(&mut rig, &[strict, at(0), ANY, ANY, shared]);
    let refused = Outcome::Failed(Step::Reserve);
    let expected = [
        Outcome::Granted(0),
        refused,
        Outcome::Granted(1),
        refused,
        Outcome::Granted(32),
    ];
    assert_eq!(outcomes, expected);
    let fixed = rig.unit.bank().reservation(CounterId::Fixed(0));
    assert!(fixed.is_some_and(|fixed| !fixed.is_private()));
    let granted = |position| News::Granted {
        position,
        waited: false,
    };
    let denied = |reason| News::Denied(Some(reason));
    let (taken, none_free) = (denied(Reason::Cookie), denied(Reason::NoneFree));
    let told: Vec<News> = rig.told.iter().map(|told| told.what).collect();
    let expected = [granted(0), taken, granted(1), none_free, granted(32)];
    assert_eq!(told, expected);
    let reservation = rig.unit.bank().reservation(CounterId::Programmable(0));
    let reservation = reservation.expect("it is granted");
    assert_eq!(
        (reservation.control, reservation.drop_value),
        (strict.control, 5)
    );
    assert_eq!(rig.alias_value(abi::MSR_SELECT, 0), 0x43_003c);
    assert_eq!(rig.registers[&GLOBAL_CTRL], 0b11 | 1 << 32);
    // A counter that fails half-way goes back by the mailbox.
    let mut rig = Rig::under(Scheme::SingleMaster, 2, 0);
    rig.broken = Some(abi::MSR_SELECT + 1);
    let failed = Outcome::Failed(Step::Program);
    assert_eq!(reserve_all(&mut rig, &[at(1)]), [failed]);
    assert!(rig.unit.bank().held().is_empty());
    // Without a mailbox there is nobody to ask; nor is there where a grantee cannot set
    // the access cookie.
    for hidden in [abi::FEATURE_MAILBOX, abi::FEATURE_GRANTEE] {
        let mut rig = Rig::under(Scheme::SingleMaster, 2, 0);
        rig.hidden = hidden;
        assert_eq!(reserve_all(&mut rig, &[at(1)]), [refused]);
        assert_eq!(rig.told, []);
    }
}

/// The hypervisor holds both counters. How long the firmware waits for its answer, what
/// it gets, and that nothing is pending afterwards.
#[test]
fn the_firmware_asks_and_waits_for_the_answer() {
    fn check(
        hypervisor: Option<bool>,
        priority: u8,
        patience: u32,
        request: CounterRequest,
        expected: (Outcome, News, u64),
    ) {
        let mut policy = Policy::default();
        policy.kernel.min.programmable = 0;
        policy.firmware.priority = priority;
        policy.grace_ms = 20;
        let mut rig = Rig::with_policy(Scheme::Interacting, policy, 2, 0);
        (0..2).for_each(|n| rig.hypervisors(n));
        (rig.hypervisor, rig.patience) = (hypervisor, patience);
        let outcome = reserve_all(&mut rig, &[request]);
        let what = rig.told.first().map(|told| told.what);
        assert_eq!(
            (outcome[0], what, rig.now),
            (expected.0, Some(expected.1), expected.2),
            "{hypervisor:?}, priority {priority}, patience {patience}"
        );
        assert_eq!(rig.told.len(), 1);
        let answer = rig.unit.answer(Layer::Firmware);
        assert_ne!(answer.outcome, arbiter::Outcome::Pending, "{hypervisor:?}");
        let granted = matches!(outcome[0], Outcome::Granted(_));
        let held = rig.unit.bank().held_by(Layer::Firmware).len();
        assert_eq!(held, u32::from(granted));
    }
    let granted = |position| {
        let what = News::Granted {
            position,
            waited: true,
        };
        (Outcome::Granted(position), what)
    };
    let denied = |reason| (Outcome::Failed(Step::Reserve), News::Denied(Some(reason)));
    let with = |(outcome, news), ms| (outcome, news, ms);
    check(Some(true), 0, 1000, at(0), with(granted(0), 1));
    check(Some(true), 0, 1000, ANY, with(granted(1), 1));
    check(
        Some(false),
        0,
        1000,
        at(0),
        with(denied(Reason::Refused), 1),
    );
    // The second is asked for when the first was refused.
    check(Some(false), 0, 1000, ANY, with(denied(Reason::Refused), 1));
    check(None, 0, 1000, at(0), with(denied(Reason::NoAnswer), 20));
    // Revoked after the grace.
    check(Some(false), 1, 1000, at(0), with(granted(0), 21));
    // Withdrawn.
    check(None, 0, 5, at(0), with(denied(Reason::Withdrawn), 5));
}

/// The hypervisor asks for counters of the firmware's, which replies as each counter is
/// configured, and tells what it lost.
#[test]
fn the_firmware_answers_who_asks() {
    fn check(requests: &[CounterRequest], asked: u8, owners: [Layer; 2], expected: &[News]) {
        let mut policy = Policy::default();
        policy.kernel.min.programmable = 0;
        let mut rig = Rig::with_policy(Scheme::Interacting, policy, 2, 0);
        let mut held = Held::nothing();
        let outcomes = reserve_into(&mut rig, requests, &mut held);
        assert_eq!(outcomes, [0, 1].map(Outcome::Granted));
        let pcr = Pcr::find(&mut rig).expect("reservations");
        answer_notices(&mut rig, &pcr, &mut held);
        assert_eq!(rig.told, [], "nobody asks");
        rig.hypervisor_asks(asked);
        answer_notices(&mut rig, &pcr, &mut held);
        let told: Vec<News> = rig.told.iter().map(|told| told.what).collect();
        assert_eq!(told, expected);
        let numbers = rig.told.iter().map(|told| told.number);
        assert!(numbers.zip([1, 0]).all(|(number, one)| number == one));
        assert_eq!([0, 1].map(|n| rig.owner(n)), owners.map(Some));
        let answer = rig.unit.answer(Layer::Hypervisor);
        assert_ne!(answer.outcome, arbiter::Outcome::Pending);
        // There is nothing left to hear.
        answer_notices(&mut rig, &pcr, &mut held);
        assert_eq!(rig.told.len(), expected.len());
    }
    let yields = |position| CounterRequest {
        yields: true,
        ..at(position)
    };
    let lends = |position| CounterRequest {
        control: Control::new(abi::CONTROL_INITIAL | abi::CONTROL_LEND).expect("known bits"),
        ..at(position)
    };
    let hypervisor = Some(Layer::Hypervisor);
    let [kept, yielded] = [News::Kept(hypervisor), News::Yielded(hypervisor)];
    let (ours, theirs) = (Layer::Firmware, Layer::Hypervisor);
    check(&[at(0), at(1)], 1, [ours, ours], &[kept, kept]);
    check(&[at(0), yields(1)], 1, [ours, theirs], &[yielded]);
    check(&[yields(0), at(1)], 1, [theirs, ours], &[kept, yielded]);
    check(
        &[yields(0), yields(1)],
        2,
        [theirs, theirs],
        &[yielded, yielded],
    );
    check(&[at(0), lends(1)], 1, [ours, theirs], &[yielded]);
}

#[test]
fn what_is_revoked_is_told() {
    let mut policy = Policy::default();
    policy.kernel.min.programmable = 0;
    policy.hypervisor.priority = 1;
    policy.grace_ms = 5;
    let mut rig = Rig::with_policy(Scheme::Interacting, policy, 1, 0);
    let mut held = Held::nothing();
    assert_eq!(
        reserve_into(&mut rig, &[at(0)], &mut held),
        [Outcome::Granted(0)]
    );
    rig.hypervisor_asks(1);
    let pcr = Pcr::find(&mut rig).expect("reservations");
    for _ in 0..6 {
        answer_notices(&mut rig, &pcr, &mut held);
        rig.wait();
    }
    answer_notices(&mut rig, &pcr, &mut held);
    let told: Vec<News> = rig.told.iter().map(|told| told.what).collect();
    let kept = News::Kept(Some(Layer::Hypervisor));
    assert_eq!(told, [kept, News::Lost(Some(Reason::Priority))]);
}

#[test]
fn policy_has_the_last_word() {
    let mut rig = Rig::new(3, 0);
    let mut config_policy = Policy::default();
    config_policy.kernel.min.programmable = 2;
    rig.unit = {
        let config = PcrConfig {
            counters: PerKind {
                programmable: 3,
                fixed: 0,
            },
            widths: PerKind {
                programmable: 48,
                fixed: 48,
            },
            policy: config_policy,
            scheme: Scheme::Independent,
            guard: GuardLimits::with_ticks_per_ms(1),
            ticks_per_ms: 1,
            phase: Arc::clone(&rig.phase),
            legacy: None,
            smm: false,
        };
        PcrUnit::new(config)
    };
    let outcomes = reserve_all(&mut rig, &[ANY, ANY, ANY]);
    let refused = Outcome::Failed(Step::Reserve);
    assert_eq!(outcomes, [Outcome::Granted(2), refused, refused]);
}

#[test]
fn reservations_are_found_by_cpuid_alone() {
    let found = |change: fn(&mut Rig)| {
        let mut rig = Rig::new(4, 3);
        change(&mut rig);
        Pcr::find(&mut rig).is_some()
    };
    assert!(found(|_| {}));
    assert!(found(|rig| rig.block = 0x4000_ff00), "any block will do");
    assert!(!found(|rig| rig.block = 0x4001_0000));
    assert!(!found(|rig| rig.hidden = abi::CPUID_FEATURES_ECX_PCR));
}

#[test]
fn cookies_come_from_the_hypervisor_or_the_processor() {
    let draw = |rig: &mut Rig, private: bool| {
        let pcr = Pcr::find(rig).expect("reservations");
        Cookies::draw(rig, &pcr, private).map(|cookies| (cookies.management, cookies.access))
    };
    let mut rig = Rig::new(4, 0);
    rig.rdrand = Some(0xdead);
    assert_eq!(draw(&mut rig, true), Some((0x1001, 0x1002)));
    assert_eq!(draw(&mut rig, false), Some((0x1003, 0)));
    // 48 bits, and never the default cookie.
    rig.entropy = Counting((1 << 48) - 1);
    assert_eq!(draw(&mut rig, false), Some((1, 0)));
    rig.hidden = abi::FEATURE_RANDOM;
    assert_eq!(draw(&mut rig, true), Some((0xdead, 0xdead)));
    rig.rdrand = Some(1 << 48);
    assert_eq!(draw(&mut rig, true), None, "a source that only says 0");
    rig.rdrand = None;
    assert_eq!(draw(&mut rig, true), None);
}
