//! One hostile guest, all of it decided by its seed.
//!
//! A guest is a list of attacks in a loop. Before each one the guest stores the
//! address of the next in memory. Its exception handler trusts no register and
//! goes to that address, so one fault does not end the guest. An attack on the
//! tables in memory may still end it, as on any machine.

use anyhow::Result;
use iced_x86::code_asm::{CodeAssembler, dr7, eax, qword_ptr, rax, rsp};
use pmu_virt::{CounterId, EventFamily, MsrIndex, PmuModel, Register};
use vmm::micro::{BackendFactory, KERNEL_CODE, KERNEL_STACK, MicroGuest, SCRATCH, Start, assemble};

use super::rng::Rng;
use super::{Facts, accesses, handler, state};
use crate::micro::{ENDBR64, Written, step_backend, wrmsr};

/// Every model, and none. Where there is `INTEL_GLOBAL`'s first, the others of it take
/// turns with it.
pub const MODELS: [Option<&str>; 7] = [
    Some("intel-v1"),
    Some(INTEL_GLOBAL[0]),
    Some("amd-k7"),
    Some("amd-fam10h"),
    Some("amd-core"),
    Some("amd-perfmonv2"),
    None,
];

/// Intel's versions with global registers.
const INTEL_GLOBAL: [&str; 4] = ["intel-v2", "intel-v3", "intel-v4", "intel-v5,fixed=0x6"];

const ATTACKS: u32 = 24;
const CODE_STRIDE: u64 = 0x4_0000;
const HANDLER: u64 = 0x2_0000;
const DEBUG_HANDLER: u64 = 0x2_0800;
const RETURNING_HANDLER: u64 = 0x2_1000;
/// Each vCPU's slots: where to go on, and its IDTR image.
const SLOTS: u64 = SCRATCH + 0xe000;
const SLOT_STRIDE: u64 = 0x40;
/// Each vCPU's IDT.
const IDTS: u64 = SCRATCH + 0xc000;
const IDT_SIZE: u64 = 0x1000;
/// Page directories of the micro-guest's first and fourth GiB: everything there
/// is mapped, so that stores reach the holes and not only the RAM.
const PD_LOW: u64 = 0x3000;
const PD_HIGH: u64 = 0x4000;
const GIB: u64 = 1 << 30;

/// A guest and how it is to be run.
#[derive(Debug)]
pub struct HostileGuest {
    /// The seed that decided everything else.
    pub seed: u64,
    /// Memory, code and vCPUs.
    pub guest: MicroGuest,
    /// Name of its PMU model.
    pub model: Option<&'static str>,
    /// Its counters are stepped, not clocked.
    pub stepped: bool,
    /// Its code aims at the exit and reset ports too.
    pub may_end: bool,
    /// Its vCPUs.
    pub vcpus: u8,
}

impl HostileGuest {
    /// The guest of `seed`. Models, backends, numbers of vCPUs and the use of
    /// the exit and reset ports take turns; the rest is random. With `emulated`
    /// KVM runs CPL 0 in its instruction emulator, so instructions that it
    /// lacks go to CPL 3.
    ///
    /// # Errors
    /// Code that cannot be assembled: a mistake in an attack.
    pub fn new(seed: u64, emulated: bool) -> Result<Self> {
        let turn = |from: u64, choices: u64| seed / from % choices;
        let may_end = turn(1, 2) == 1;
        let mut model = MODELS[usize::try_from(turn(2, 7))?];
        if model == Some(INTEL_GLOBAL[0]) {
            model = Some(INTEL_GLOBAL[usize::try_from(turn(112, 4))?]);
        }
        let stepped = turn(14, 2) == 1;
        let vcpus = 1 + u8::try_from(turn(28, 2))?;
        let pmu = model.map(PmuModel::parse).transpose()?;
        let pmu_msrs = match &pmu {
            Some(pmu) => pmu.msr_ranges(),
            None => pmu_virt::all_pmu_msr_ranges(),
        };
        let mut rng = Rng::new(seed);
        let deadly = rng.one_in(4);
        let patchable = turn(56, 2) == 1;
        let handlers: Vec<u64> = (0..vcpus.into())
            .filter(|_| patchable)
            .map(|vcpu: u64| KERNEL_CODE + vcpu * CODE_STRIDE + HANDLER)
            .collect();
        let mut guest = MicroGuest::new()
            .code(PD_LOW, large_pages(0))
            .code(PD_HIGH, large_pages(3 * GIB));
        for vcpu in 0..vcpus {
            let base = KERNEL_CODE + u64::from(vcpu) * CODE_STRIDE;
            let slot = SLOTS + u64::from(vcpu) * SLOT_STRIDE;
            let idt = IDTS + u64::from(vcpu) * IDT_SIZE;
            let facts = Facts {
                vcpu,
                pmu_msrs: pmu_msrs.clone(),
                start_counting: start_counting(pmu.as_ref(), stepped, &mut rng),
                deadly,
                may_end,
                emulated,
                idtr: slot + 8,
                handler: base + HANDLER,
                handlers: handlers.clone(),
                gp_gate: idt + 13 * 16,
            };
            let code = assemble(base, |a| code(a, &mut rng, &facts, slot))?;
            let stack = KERNEL_STACK - u64::from(vcpu) * 0x4000;
            let handler = assemble(base + HANDLER, |a| {
                if patchable {
                    a.db(&ENDBR64)?;
                }
                a.mov(rsp, stack)?;
                a.jmp(qword_ptr(slot))
            })?;
            // A breakpoint on a handler would raise #DB for ever.
            let debug = assemble(base + DEBUG_HANDLER, |a| {
                a.xor(eax, eax)?;
                a.mov(dr7, rax)?;
                a.jmp(base + HANDLER)
            })?;
            let returning = assemble(base + RETURNING_HANDLER, |a| a.iretq())?;
            for which in 0..handler::COPIES {
                let at = handler::copy_of(base + HANDLER, which);
                let copy = assemble(at, |a| handler::copy(a, base + HANDLER, which))?;
                guest = guest.code(at, copy);
            }
            let mut start = Start::at(base, 0);
            start.cr4 = if rng.one_in(2) { 1 << 8 } else { 0 };
            guest = guest
                .code(base, code)
                .code(base + HANDLER, handler)
                .code(base + DEBUG_HANDLER, debug)
                .code(base + RETURNING_HANDLER, returning)
                .code(idt, table(base))
                .code(slot + 8, idtr_image(idt))
                .start(start);
        }
        Ok(Self {
            seed,
            guest,
            model,
            stepped,
            may_end,
            vcpus,
        })
    }

    /// Makes its counter backend.
    #[must_use]
    pub fn backend(&self) -> BackendFactory {
        if self.stepped {
            step_backend
        } else {
            || Box::new(pmu_virt::ClockBackend::new())
        }
    }
}

impl std::fmt::Display for HostileGuest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "seed {} ({}, {}, {} vCPU(s), exit ports {})",
            self.seed,
            self.model.unwrap_or("no PMU"),
            if self.stepped { "step" } else { "clock" },
            self.vcpus,
            if self.may_end { "in" } else { "out" }
        )
    }
}

fn code(a: &mut CodeAssembler, rng: &mut Rng, facts: &Facts, slot: u64) -> Written {
    state::load_idtr(a, facts.idtr)?;
    guarded(a, slot, |a| accesses::open_apic(a, rng))?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    for &(msr, value) in &facts.start_counting {
        guarded(a, slot, |a| wrmsr(a, msr, value))?;
    }
    for _ in 0..ATTACKS {
        guarded(a, slot, |a| attack(a, rng, facts))?;
    }
    a.jmp(again)
}

/// `code`, with its end as the place to go on after an exception.
fn guarded(
    a: &mut CodeAssembler,
    slot: u64,
    code: impl FnOnce(&mut CodeAssembler) -> Written,
) -> Written {
    let mut next = a.create_label();
    a.lea(rax, qword_ptr(next))?;
    a.mov(qword_ptr(slot), rax)?;
    code(a)?;
    a.set_label(&mut next)?;
    a.nop()
}

/// The writes that start counter 0 of `pmu`.
fn start_counting(pmu: Option<&PmuModel>, stepped: bool, rng: &mut Rng) -> Vec<(u32, u64)> {
    const USR_OS_INT_EN: u64 = 0x53 << 16;
    const INSTRUCTIONS: u64 = 0xc0;
    const INTEL_CYCLES: u64 = 0x3c;
    const AMD_CYCLES: u64 = 0x76;
    let Some(pmu) = pmu else {
        return Vec::new();
    };
    let event = match (stepped, pmu.events()) {
        (true, _) => INSTRUCTIONS,
        (false, EventFamily::Intel) => INTEL_CYCLES,
        (false, _) => AMD_CYCLES,
    };
    let below = 1 + if stepped {
        rng.below(200)
    } else {
        rng.below(0x10_0000)
    };
    let msrs = pmu
        .msr_ranges()
        .into_iter()
        .flat_map(|(first, last)| first..=last);
    msrs.filter_map(|msr| {
        let value = match pmu.decode(MsrIndex(msr))? {
            Register::Counter {
                counter: CounterId::Programmable(0),
                ..
            } => 0u64.wrapping_sub(below.into()) & pmu.counter_mask(CounterId::Programmable(0)),
            Register::Select(0) => USR_OS_INT_EN | event,
            Register::GlobalControl => pmu.global_mask(),
            _ => return None,
        };
        Some((msr, value))
    })
    .collect()
}

type Attack = fn(&mut CodeAssembler, &mut Rng, &Facts) -> Written;

/// The attacks, and how often each is chosen.
const CHOICES: [(u32, Attack); 15] = [
    (6, accesses::read_msr),
    (10, accesses::write_msr),
    (5, accesses::port),
    (2, accesses::string_port),
    (6, accesses::memory),
    (4, accesses::read_counter),
    (4, accesses::local_apic),
    (4, state::user_code),
    (3, state::debug_registers),
    (2, state::trap_flag),
    (2, state::descriptor_tables),
    (3, state::interrupt),
    (2, state::control_registers),
    (2, state::odd_instruction),
    (2, state::random_bytes),
];

fn attack(a: &mut CodeAssembler, rng: &mut Rng, facts: &Facts) -> Written {
    if !facts.handlers.is_empty() && rng.one_in(6) {
        return handler::attack(a, rng, facts);
    }
    let total: u32 = CHOICES.iter().map(|(weight, _)| weight).sum();
    let mut at = rng.below(total);
    for (weight, attack) in CHOICES {
        if at < weight {
            return attack(a, rng, facts);
        }
        at -= weight;
    }
    Ok(())
}

/// A page directory that maps the GiB at `start` one to one for both rings.
fn large_pages(start: u64) -> Vec<u8> {
    const PRESENT_WRITE_USER_LARGE: u64 = 0x87;
    (0..512u64)
        .flat_map(|page| ((start + (page << 21)) | PRESENT_WRITE_USER_LARGE).to_le_bytes())
        .collect()
}

/// Exceptions go on at the next attack, NMIs and interrupts return.
fn table(base: u64) -> Vec<u8> {
    (0..256u64)
        .flat_map(|vector| {
            let handler = match vector {
                2 | 32.. => base + RETURNING_HANDLER,
                1 => base + DEBUG_HANDLER,
                _ => base + HANDLER,
            };
            gate(handler).to_le_bytes()
        })
        .collect()
}

/// A 64-bit interrupt gate that CPL 3 may call (SDM vol. 3A, 7.14.1).
fn gate(handler: u64) -> u128 {
    const KERNEL_CS: u64 = 0x08;
    const INTERRUPT_GATE_DPL3: u64 = 0xee00;
    let low = handler & 0xffff
        | KERNEL_CS << 16
        | INTERRUPT_GATE_DPL3 << 32
        | (handler >> 16 & 0xffff) << 48;
    u128::from(low) | u128::from(handler >> 32) << 64
}

fn idtr_image(idt: u64) -> Vec<u8> {
    let limit = 0xfffu16.to_le_bytes();
    [&limit[..], &idt.to_le_bytes()].concat()
}
