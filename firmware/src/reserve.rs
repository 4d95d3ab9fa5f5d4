//! What firmware does with the counters of one vCPU.
//!
//! The machine is behind [`Machine`], so all of this is tested on the host. The
//! order is that of `docs/reference/pcr.md`: the management key comes first, because its
//! #GP shows that the counter is taken; the counter starts last. What cannot be
//! had by key the firmware asks for by the mailbox ([`mailbox`]).

pub mod mailbox;

use arbiter::guest::Discovery;
use arbiter::{Shared, abi};

use mailbox::{Happening, Held};

use crate::config::{CounterRequest, Outcome, Position, Step};

/// An access raised #GP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault;

/// EAX, EBX, ECX, EDX of a CPUID leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Regs {
    pub eax: u32,
    pub ebx: u32,
    pub ecx: u32,
    pub edx: u32,
}

/// The processor that the firmware runs on.
pub trait Machine {
    /// CPUID.
    fn cpuid(&mut self, leaf: u32, subleaf: u32) -> Regs;

    /// RDMSR with `cookie` in RSI.
    ///
    /// # Errors
    /// It raised #GP.
    fn read(&mut self, msr: u32, cookie: u64) -> Result<u64, Fault>;

    /// WRMSR with `cookie` in RSI.
    ///
    /// # Errors
    /// It raised #GP.
    fn write(&mut self, msr: u32, cookie: u64, value: u64) -> Result<(), Fault>;

    /// RDRAND; `None` if it had no number ready. Only called where CPUID has it.
    fn rdrand(&mut self) -> Option<u64>;

    /// Lets a moment pass. False once the firmware has waited for as long as it may.
    fn wait(&mut self) -> bool;

    /// Hears what has become of a counter, to tell it on.
    fn tell(&mut self, happening: Happening);
}

/// CPUID leaf 1, ECX: RDRAND.
const RDRAND: u32 = 1 << 30;
/// `IA32_PERF_GLOBAL_CTRL`, from architectural version 2 on.
const INTEL_GLOBAL_CTRL: u32 = 0x38f;
/// `PerfCntrGlobalCtl`, with PerfMonV2.
const AMD_GLOBAL_CTRL: u32 = 0xc000_0301;
/// Fixed-function counters begin at this position.
const FIXED: u8 = 32;

/// The reservations as CPUID describes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pcr {
    base: u32,
    features: u32,
    programmable: u8,
    fixed: u8,
    global_ctrl: Option<u32>,
}

impl Pcr {
    /// Reads CPUID. `None` if this machine has no reservations, or those of
    /// another version.
    pub fn find(machine: &mut impl Machine) -> Option<Self> {
        let found = Discovery::find(|leaf| {
            let regs = machine.cpuid(leaf, 0);
            [regs.eax, regs.ebx, regs.ecx, regs.edx]
        });
        let found = found.ok()?;
        Some(Self {
            base: found.base,
            features: found.features,
            programmable: found.programmable,
            fixed: found.fixed,
            global_ctrl: global_ctrl(machine),
        })
    }

    /// Programmable counters that can be reserved.
    #[must_use]
    pub fn programmable(&self) -> u8 {
        self.programmable
    }

    /// The first MSR.
    #[must_use]
    pub fn base(&self) -> u32 {
        self.base
    }

    /// Whether firmware can put code into SMRAM.
    #[must_use]
    pub fn has_smram(&self) -> bool {
        self.offers(abi::FEATURE_SMRAM)
    }

    /// Whether it has all of these: `abi::FEATURE_*`.
    fn offers(&self, features: u32) -> bool {
        self.features & features == features
    }

    fn has(&self, position: u8) -> bool {
        match position.checked_sub(FIXED) {
            None => position < self.programmable,
            Some(fixed) => fixed < self.fixed,
        }
    }

    fn msr(&self, offset: u32, position: u8) -> u32 {
        self.base + offset + u32::from(position)
    }
}

/// The register that starts and stops several counters at once, if there is one.
fn global_ctrl(machine: &mut impl Machine) -> Option<u32> {
    let [version, ..] = match machine.cpuid(0, 0).eax {
        0xa.. => machine.cpuid(0xa, 0).eax.to_le_bytes(),
        _ => [0; 4],
    };
    if version >= 2 {
        return Some(INTEL_GLOBAL_CTRL);
    }
    let has_leaf = machine.cpuid(0x8000_0000, 0).eax >= 0x8000_0022;
    let perfmon_v2 = has_leaf && machine.cpuid(0x8000_0022, 0).eax & 1 != 0;
    perfmon_v2.then_some(AMD_GLOBAL_CTRL)
}

/// The two cookies of a counter. Not `Debug`: nobody prints them.
#[derive(Clone, Copy, PartialEq, Eq)]
#[expect(missing_debug_implementations)]
pub struct Cookies {
    /// Grants the management of the counter.
    pub management: u64,
    /// Grants the use of the counter; [`abi::DEFAULT_COOKIE`] if everybody may
    /// use it.
    pub access: u64,
}

impl Cookies {
    /// New ones for a counter. `None` if there is no source of random numbers.
    ///
    /// The hypervisor's source comes first, because it works on every host.
    /// RDRAND may not: some KVMs interpret guest kernels and lack it.
    pub fn draw(machine: &mut impl Machine, pcr: &Pcr, private: bool) -> Option<Self> {
        let rdrand = machine.cpuid(1, 0).ecx & RDRAND != 0;
        let mut one = || {
            // A cookie of 0, or a RDRAND without a number, is rare; many in a
            // row mean that the source does not work.
            (0..64).find_map(|_| {
                let word = if pcr.offers(abi::FEATURE_RANDOM) {
                    machine.read(pcr.base() + abi::MSR_RANDOM, 0).ok()?
                } else if rdrand {
                    machine.rdrand()?
                } else {
                    return None;
                };
                Some(word & abi::COOKIE_MASK).filter(|&cookie| cookie != abi::DEFAULT_COOKIE)
            })
        };
        let management = one()?;
        let access = if private { one()? } else { abi::DEFAULT_COOKIE };
        Some(Self { management, access })
    }
}

/// Reserves, programs and starts one counter on this vCPU, and notes it in `held`.
///
/// For *any* it takes the last programmable counter that is free: kernels
/// prefer the first ones. If there is none it asks by the mailbox.
pub fn reserve(
    machine: &mut impl Machine,
    pcr: &Pcr,
    (number, request): (u8, &CounterRequest),
    cookies: Cookies,
    held: &mut Held,
) -> Outcome {
    let (candidates, which) = match request.position {
        Position::At(position) if !pcr.has(position) => return Outcome::Failed(Step::Absent),
        Position::At(position) => (position..position + 1, mailbox::at(position)),
        Position::Any if pcr.programmable == 0 => return Outcome::Failed(Step::Absent),
        Position::Any => (0..pcr.programmable, mailbox::ANY_ONE),
    };
    let key = |position| pcr.msr(abi::MSR_MANAGEMENT_KEY, position);
    let management = cookies.management;
    let taken = candidates.rev().find(|&position| {
        let by_key = machine.write(key(position), abi::DEFAULT_COOKIE, management);
        by_key.is_ok()
    });
    let position = match taken {
        Some(position) => position,
        None => match mailbox::ask(machine, pcr, (number, which), management, held) {
            Some(position) => position,
            None => return Outcome::Failed(Step::Reserve),
        },
    };
    match set_up(machine, pcr, position, request, cookies) {
        Ok(()) => {
            held.insert(position, number, management, request.yields);
            Outcome::Granted(position)
        }
        Err(step) => {
            // A master takes it back by the mailbox alone. The counter was ours a
            // moment ago; if it no longer is, there is nothing to give back.
            if machine.write(key(position), management, 0).is_err() {
                mailbox::give_back(machine, pcr, position, management);
            }
            Outcome::Failed(step)
        }
    }
}

fn set_up(
    machine: &mut impl Machine,
    pcr: &Pcr,
    position: u8,
    request: &CounterRequest,
    cookies: Cookies,
) -> Result<(), Step> {
    let Cookies { management, access } = cookies;
    let mut write = |offset: u32, cookie: u64, value: u64, step: Step| {
        machine
            .write(pcr.msr(offset, position), cookie, value)
            .map_err(|Fault| step)
    };
    let control = request.control.bits();
    write(abi::MSR_CONTROL, management, control, Step::Control)?;
    let drop_value = request.drop_value;
    write(abi::MSR_DROP_VALUE, management, drop_value, Step::Control)?;
    write(abi::MSR_ACCESS_KEY, management, access, Step::AccessKey)?;
    write(abi::MSR_COUNTER, access, 0, Step::Program)?;
    write(abi::MSR_SELECT, access, request.select, Step::Program)?;
    match pcr.global_ctrl {
        Some(register) if request.control.reached_by(Shared::GlobalControl) => machine
            .read(register, 0)
            .and_then(|enabled| machine.write(register, 0, enabled | 1 << position))
            .map_err(|Fault| Step::Program),
        _ => Ok(()),
    }
}

/// Ends the firmware's phase, on all vCPUs, by this value of `PHASE`. False if the machine
/// did not start in that phase, or refuses.
pub fn end_phase(machine: &mut impl Machine, pcr: &Pcr, value: u64) -> bool {
    pcr.offers(abi::FEATURE_FIRMWARE)
        && machine.write(pcr.base() + abi::MSR_PHASE, 0, value).is_ok()
}
