//! The scenario: acts and steps as data. The guest is assembled from it, and what
//! it says about itself is printed beside what the trap path decided.

use arbiter::{CounterId, PcrRegister, abi};
use pmu_virt::{EventFamily, PmuModel, Register};

use super::super::guest::msr_of;

const RINGS: u64 = 1 << 16 | 1 << 17;
const ENABLE: u64 = 1 << 22;
/// The counters of the firmware.
pub(super) const FIRMWARE_COUNTERS: u8 = 2;
/// Milliseconds that a holder is given before a revocation.
pub(super) const GRACE_MS: u32 = 20;
/// What a dropped read of the firmware's counter yields.
const DROPPED_READS: u64 = 12345;
/// Interrupt vector of the kernel's notices.
pub(super) const NOTICE_VECTOR: u8 = 0x50;
/// Wrong cookies in a row: more than are free of charge.
const GUESSES: u32 = 17;

/// A cookie that the guest keeps in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CookieName {
    /// `PCR_DEFAULT_COOKIE`.
    Default,
    /// The firmware's management cookie.
    Firmware,
    /// The access cookie that the firmware shares with its driver.
    Driver,
    /// The kernel's management cookie.
    Kernel,
    /// The access cookie that the kernel gives to its program.
    Program,
    /// One that nobody has.
    Wrong,
}

impl CookieName {
    /// Its place in the guest's memory.
    pub(super) fn index(self) -> u8 {
        self as u8
    }

    /// How it is called in the scenario.
    fn name(self) -> &'static str {
        match self {
            CookieName::Default => "the default cookie",
            CookieName::Firmware => "the firmware's own cookie",
            CookieName::Driver => "the driver's cookie",
            CookieName::Kernel => "the kernel's own cookie",
            CookieName::Program => "the program's cookie",
            CookieName::Wrong => "a guessed cookie",
        }
    }
}

/// What is written.
#[derive(Clone, Copy, Debug)]
pub(super) enum WrittenValue {
    Number(u64),
    /// A cookie of the guest's.
    Cookie(CookieName),
}

/// What a step does.
#[derive(Clone, Copy, Debug)]
pub(super) enum Action {
    /// Takes a cookie from `RANDOM` and keeps it.
    MakeCookie(CookieName),
    /// RDMSR.
    Read {
        msr: u32,
        /// In RSI.
        key: CookieName,
    },
    /// WRMSR.
    Write {
        msr: u32,
        value: WrittenValue,
        /// In RSI.
        key: CookieName,
    },
    /// One WRMSR, several times in a row.
    Repeat {
        msr: u32,
        value: u64,
        /// In RSI.
        key: CookieName,
        /// How often.
        times: u32,
    },
    /// RDPMC, at CPL 3.
    UserRdpmc {
        /// ECX.
        index: u32,
        /// In RSI.
        key: CookieName,
    },
    /// Halts until a notice has arrived.
    AwaitNotice,
}

/// One thing that the guest does.
#[derive(Clone, Debug)]
pub(super) struct Step {
    /// Who does it.
    pub(super) who: &'static str,
    /// What, in words.
    pub(super) says: String,
    /// What, for the assembler.
    pub(super) action: Action,
}

/// Steps under one heading.
#[derive(Clone, Debug)]
pub(super) struct Act {
    /// The heading.
    pub(super) title: &'static str,
    pub(super) steps: Vec<Step>,
}

/// Writes acts.
struct Author<'a> {
    model: &'a PmuModel,
    who: &'static str,
    steps: Vec<Step>,
}

fn base(offset: u32, n: u8) -> u32 {
    abi::MSR_BASE + offset + u32::from(n)
}

impl Author<'_> {
    fn step(&mut self, says: impl Into<String>, action: Action) {
        self.steps.push(Step {
            who: self.who,
            says: says.into(),
            action,
        });
    }

    fn write(&mut self, says: impl Into<String>, msr: u32, value: u64, key: CookieName) {
        let value = WrittenValue::Number(value);
        self.step(says, Action::Write { msr, value, key });
    }

    fn read(&mut self, says: impl Into<String>, msr: u32, key: CookieName) {
        self.step(says, Action::Read { msr, key });
    }

    fn cookie(&mut self, key: CookieName) {
        let says = format!("takes {} from RANDOM", key.name());
        self.step(says, Action::MakeCookie(key));
    }

    fn lock(&mut self, says: impl Into<String>, n: u8, new: CookieName, key: CookieName) {
        let action = Action::Write {
            msr: base(abi::MSR_MANAGEMENT_KEY, n),
            value: WrittenValue::Cookie(new),
            key,
        };
        self.step(says, action);
    }

    fn open(&mut self, says: impl Into<String>, n: u8, new: CookieName, key: CookieName) {
        let action = Action::Write {
            msr: base(abi::MSR_ACCESS_KEY, n),
            value: WrittenValue::Cookie(new),
            key,
        };
        self.step(says, action);
    }

    fn act(&mut self, title: &'static str) -> Act {
        Act {
            title,
            steps: std::mem::take(&mut self.steps),
        }
    }

    fn legacy_select(&self, n: u8) -> u32 {
        msr_of(self.model, |register| register == Register::Select(n))
    }

    fn legacy_counter(&self, n: u8) -> u32 {
        msr_of(self.model, |register| {
            let id = CounterId::Programmable(n);
            matches!(register, Register::Counter { counter, .. } if counter == id)
        })
    }
}

/// The select that counts core cycles in both rings.
fn cycles(model: &PmuModel) -> u64 {
    let event = match model.events() {
        EventFamily::Intel => 0x3c,
        _ => 0x76,
    };
    event | RINGS | ENABLE
}

/// The whole scenario for a model with at least four programmable counters.
pub(super) fn acts(model: &PmuModel) -> Vec<Act> {
    let mut author = Author {
        model,
        who: "firmware",
        steps: Vec::new(),
    };
    let a = &mut author;
    let last = model.programmable() - 1;
    let acts = [
        firmware(a),
        greedy(a, last),
        discovery(a, last),
        rogue(a),
        fault(a),
        program(a),
        guessing(a),
        interacting(a),
    ];
    acts.into()
}

fn firmware(a: &mut Author<'_>) -> Act {
    a.who = "firmware";
    let cycles = cycles(a.model);
    a.cookie(CookieName::Firmware);
    a.cookie(CookieName::Driver);
    a.lock(
        "reserves PMC0",
        0,
        CookieName::Firmware,
        CookieName::Default,
    );
    a.open(
        "shuts legacy accesses out of PMC0",
        0,
        CookieName::Driver,
        CookieName::Firmware,
    );
    a.write(
        format!("has dropped reads of PMC0 yield {DROPPED_READS}"),
        base(abi::MSR_DROP_VALUE, 0),
        DROPPED_READS,
        CookieName::Firmware,
    );
    a.write(
        "keeps GLOBAL_CTRL and global status away from PMC0",
        base(abi::MSR_CONTROL, 0),
        abi::CONTROL_INITIAL & !(abi::CONTROL_GLOBAL_CTRL | abi::CONTROL_OVF_CLEAR),
        CookieName::Firmware,
    );
    a.write(
        "counts cycles on PMC0, as power management does",
        base(abi::MSR_SELECT, 0),
        cycles,
        CookieName::Driver,
    );
    a.act("The firmware reserves a counter and programs it")
}

fn greedy(a: &mut Author<'_>, last: u8) -> Act {
    a.who = "firmware";
    for n in 1..=last {
        a.lock(
            format!("wants PMC{n} too"),
            n,
            CookieName::Firmware,
            CookieName::Default,
        );
    }
    a.write(
        "lends PMC1 to whoever is short of one",
        base(abi::MSR_CONTROL, 1),
        abi::CONTROL_INITIAL | abi::CONTROL_LEND,
        CookieName::Firmware,
    );
    a.write(
        "ends its phase",
        abi::MSR_BASE + abi::MSR_PHASE,
        abi::PHASE_END,
        CookieName::Default,
    );
    a.write(
        "tries to end it again",
        abi::MSR_BASE + abi::MSR_PHASE,
        abi::PHASE_END,
        CookieName::Default,
    );
    a.act("A greedy firmware is held at its limit")
}

fn discovery(a: &mut Author<'_>, last: u8) -> Act {
    a.who = "kernel";
    a.cookie(CookieName::Kernel);
    for n in 0..=last {
        a.lock(
            format!("tries to lock PMC{n}"),
            n,
            CookieName::Kernel,
            CookieName::Default,
        );
    }
    a.read(
        "looks who has PMC0",
        base(abi::MSR_STATUS, 0),
        CookieName::Default,
    );
    a.lock(
        "gives the last one back",
        last,
        CookieName::Default,
        CookieName::Kernel,
    );
    a.act("The kernel discovers what is left by trying to set locks")
}

fn rogue(a: &mut Author<'_>) -> Act {
    a.who = "rogue driver";
    let (select, counter) = (a.legacy_select(0), a.legacy_counter(0));
    a.write(
        "clobbers PMC0's event select",
        select,
        RINGS | ENABLE | 0xc0,
        CookieName::Default,
    );
    a.write("clobbers PMC0's count", counter, 0, CookieName::Default);
    a.read("reads PMC0", counter, CookieName::Default);
    a.who = "power driver";
    a.read(
        "reads PMC0 with the cookie that the firmware gave it",
        base(abi::MSR_COUNTER, 0),
        CookieName::Driver,
    );
    a.read(
        "finds the event select as it was",
        base(abi::MSR_SELECT, 0),
        CookieName::Driver,
    );
    a.act("A rogue component of the kernel clobbers, and is dropped")
}

fn fault(a: &mut Author<'_>) -> Act {
    a.who = "power driver";
    let (select, counter) = (a.legacy_select(0), a.legacy_counter(0));
    let control = abi::CONTROL_INITIAL & !(abi::CONTROL_GLOBAL_CTRL | abi::CONTROL_OVF_CLEAR);
    a.write(
        "has wrong cookies fault from now on",
        base(abi::MSR_CONTROL, 0),
        control | abi::CONTROL_FAULT,
        CookieName::Firmware,
    );
    a.who = "rogue driver";
    a.write(
        "clobbers again",
        select,
        RINGS | ENABLE | 0xc0,
        CookieName::Default,
    );
    a.read("reads PMC0", counter, CookieName::Default);
    a.act("The owner chooses fault instead of drop")
}

fn program(a: &mut Author<'_>) -> Act {
    a.who = "kernel";
    let cycles = cycles(a.model);
    a.write(
        "counts cycles on its PMC2",
        a.legacy_select(2),
        cycles,
        CookieName::Default,
    );
    a.who = "user program";
    let legacy = |index| Action::UserRdpmc {
        index,
        key: CookieName::Default,
    };
    let with_cookie = |index: u32| Action::UserRdpmc {
        index: abi::RDPMC_COOKIE + index,
        key: CookieName::Program,
    };
    a.step("works, and reads PMC2 by RDPMC", legacy(2));
    a.who = "kernel";
    a.cookie(CookieName::Program);
    a.open(
        "makes PMC2 private",
        2,
        CookieName::Program,
        CookieName::Kernel,
    );
    a.who = "user program";
    a.step("reads PMC2 without the cookie", legacy(2));
    a.step("reads PMC2 with it", with_cookie(2));
    a.step("tries the firmware's PMC0", legacy(0));
    a.act("A user program reads by RDPMC")
}

fn guessing(a: &mut Author<'_>) -> Act {
    a.who = "rogue driver";
    let msr = base(abi::MSR_MANAGEMENT_KEY, 0);
    let (key, times) = (CookieName::Wrong, GUESSES);
    a.step(
        format!("guesses PMC0's cookie {times} times"),
        Action::Repeat {
            msr,
            value: 0,
            key,
            times,
        },
    );
    a.act("Guessing costs time, and only the one who guesses")
}

fn interacting(a: &mut Author<'_>) -> Act {
    a.who = "kernel";
    let at = |register: PcrRegister| {
        // Single registers: found by what they are.
        (abi::MSR_BASE..abi::MSR_BASE + abi::MSR_COUNT)
            .find(|msr| PcrRegister::decode(*msr) == Some(register))
            .unwrap_or_default()
    };
    let reserve = |count: u64| abi::REQUEST_RESERVE | count << abi::REQUEST_WHICH_SHIFT;
    a.write(
        format!("wants its notices at vector {NOTICE_VECTOR:#x}"),
        at(PcrRegister::NoticeVector),
        NOTICE_VECTOR.into(),
        CookieName::Default,
    );
    a.write(
        "asks for two counters: one is free, the firmware lends PMC1",
        at(PcrRegister::Request),
        reserve(2),
        CookieName::Kernel,
    );
    a.read(
        "looks at the answer",
        at(PcrRegister::Answer),
        CookieName::Default,
    );
    a.read(
        "looks what it got",
        at(PcrRegister::Granted),
        CookieName::Default,
    );
    a.write(
        "asks for one more: only the firmware's PMC0 is left",
        at(PcrRegister::Request),
        reserve(1),
        CookieName::Kernel,
    );
    a.read(
        "looks at the answer",
        at(PcrRegister::Answer),
        CookieName::Default,
    );
    a.step("halts until it is told", Action::AwaitNotice);
    a.read(
        "takes the notice",
        at(PcrRegister::Notice),
        CookieName::Default,
    );
    a.read(
        "looks what it got",
        at(PcrRegister::Granted),
        CookieName::Default,
    );
    a.act("Layers interact: a loan, and a revocation with notice")
}
