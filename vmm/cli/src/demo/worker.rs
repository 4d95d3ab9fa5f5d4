//! The guest that counts the user's events while it works.
//!
//! It starts all counters, runs the same loop at CPL 0 and, if an event is
//! counted there, at CPL 3, stops them and reads each. A round of the loop is six instructions with a load, a store
//! and two conditional branches.

use iced_x86::code_asm::{CodeAssembler, dword_ptr, eax, ebx, r13, rcx, rsp};
use pmu_virt::{CounterId, EventCode, PmuModel, Register};
use vmm::devices::ports::TEST_EXIT;
use vmm::micro::{KERNEL_CODE, MicroError, MicroGuest, SCRATCH, Start, USER_CODE, assemble};

use super::guest::{PROGRAM_DONE, UD_VECTOR, Written, enter_program, msr_of, read_msr, write_msr};
use super::plan::Planned;

const ENABLE: u64 = 1 << 22;
/// Rounds at each ring: few, because every instruction may be a step of
/// milliseconds on a loaded machine.
const ROUNDS: u32 = 100;

/// The registers that start and stop the counters, and the values for it.
struct Switches {
    /// To be written before anything counts.
    before: Vec<(u32, u64)>,
    /// Start, in this order.
    start: Vec<(u32, u64)>,
    /// Stop, in this order.
    stop: Vec<(u32, u64)>,
    counters: Vec<u32>,
}

impl Switches {
    fn new(model: &PmuModel, events: &[Planned]) -> Self {
        let mut selects = Vec::new();
        let mut fixed = 0;
        let mut global = 0;
        for event in events {
            let request = &event.named.request;
            match (event.counter, request.event) {
                (CounterId::Programmable(n), _) => {
                    let msr = msr_of(model, |register| register == Register::Select(n));
                    selects.push((msr, request.encode().unwrap_or(0)));
                    global |= 1 << n;
                }
                (CounterId::Fixed(n), EventCode::Fixed(_)) => {
                    fixed |= request.encode_fixed().unwrap_or(0);
                    global |= 1 << (32 + n);
                }
                (CounterId::Fixed(_) | CounterId::Ibs(_), _) => {}
            }
        }
        if fixed != 0 {
            let msr = msr_of(model, |register| register == Register::FixedControl);
            selects.push((msr, fixed));
        }
        let counters = events.iter().map(|event| {
            msr_of(model, |register| {
                matches!(register, Register::Counter { counter, .. } if counter == event.counter)
            })
        });
        let counters = counters.collect();
        if model.has_global_control() {
            let msr = msr_of(model, |register| register == Register::GlobalControl);
            let mut before = vec![(msr, 0)];
            before.extend(selects);
            return Self {
                before,
                start: vec![(msr, global)],
                stop: vec![(msr, 0)],
                counters,
            };
        }
        Self {
            before: Vec::new(),
            stop: selects
                .iter()
                .map(|(msr, value)| (*msr, value & !ENABLE))
                .collect(),
            start: selects,
            counters,
        }
    }
}

/// The guest that counts `events` with `model`.
pub(super) fn guest(model: &PmuModel, events: &[Planned]) -> Result<MicroGuest, MicroError> {
    let switches = Switches::new(model, events);
    let user = events.iter().any(|event| event.named.request.usr);
    Ok(MicroGuest::new()
        .code(
            KERNEL_CODE,
            assemble(KERNEL_CODE, |a| kernel(a, &switches, user))?,
        )
        .code(USER_CODE, assemble(USER_CODE, program)?)
        .code(
            PROGRAM_DONE,
            assemble(PROGRAM_DONE, |a| done(a, &switches))?,
        )
        .handler(UD_VECTOR, PROGRAM_DONE)
        .start(Start::at(KERNEL_CODE, 0)))
}

fn kernel(a: &mut CodeAssembler, switches: &Switches, user: bool) -> Written {
    a.mov(r13, rsp)?;
    for (msr, value) in switches.before.iter().chain(&switches.start) {
        write_msr(a, *msr, *value)?;
    }
    work(a)?;
    if user {
        enter_program(a)
    } else {
        // Where no counter is for CPL 3, a KVM that cannot step there need not.
        a.ud2()
    }
}

fn program(a: &mut CodeAssembler) -> Written {
    work(a)?;
    a.ud2()
}

fn work(a: &mut CodeAssembler) -> Written {
    a.mov(rcx, SCRATCH)?;
    a.mov(ebx, ROUNDS)?;
    let mut again = a.create_label();
    let mut even = a.create_label();
    a.set_label(&mut again)?;
    a.mov(dword_ptr(rcx), ebx)?;
    a.mov(eax, dword_ptr(rcx))?;
    a.test(eax, 1)?;
    a.je(even)?;
    a.set_label(&mut even)?;
    a.dec(ebx)?;
    a.jne(again)
}

fn done(a: &mut CodeAssembler, switches: &Switches) -> Written {
    for (msr, value) in &switches.stop {
        write_msr(a, *msr, *value)?;
    }
    for msr in &switches.counters {
        read_msr(a, *msr)?;
    }
    a.mov(rsp, r13)?;
    a.xor(eax, eax)?;
    super::guest::out(a, TEST_EXIT)
}
