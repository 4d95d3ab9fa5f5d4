//! Guests that are nothing but noise: no panic, no end that does not come, bounded memory.

use emu::{Answer, Cpu, Cpuid, Ram, Segment, State, VmExit};
use vm_memory::{Bytes, GuestAddress};

use crate::oracle::Random;

const SIZE: u64 = 0x2_0000;

fn noise(random: &mut Random, ram: &Ram) {
    let memory = ram.memory();
    for at in (0..SIZE).step_by(8) {
        // Often an entry of a page table that leads somewhere.
        let value = if random.chance(2) {
            random.below(SIZE) & !0xfff | random.next() & 0x8000_0000_0000_01e7 | 1
        } else {
            random.next()
        };
        memory
            .write_slice(&value.to_le_bytes(), GuestAddress(at))
            .expect("memory");
    }
}

fn state(random: &mut Random) -> State {
    let mut state = State::long_mode(
        random.below(SIZE) & !0xfff,
        [0, 3][random.below(2) as usize],
    );
    for register in &mut state.r[..16] {
        *register = random.value();
    }
    state.rip = random.value() >> random.below(64);
    state.set_rflags(random.next() & !(1 << 17));
    if random.chance(2) {
        state = State {
            rip: state.rip & 0xffff,
            r: state.r,
            ..State::default()
        };
        if random.chance(2) {
            state.cr0 |= 1;
            // Paging outside of long mode: PSE, PAE.
            if random.chance(2) {
                state.cr0 |= 1 << 31;
                state.cr3 = random.below(SIZE) & !0x1f;
                state.cr4 |= random.next() & 0x30;
                state.pdptes = [0; 4].map(|_| random.below(SIZE) & !0xfff | 1);
            }
        }
    }
    if random.chance(3) {
        for segment in &mut state.segments {
            *segment = Segment {
                selector: random.next() as u16,
                attr: random.next() as u16,
                limit: random.next() as u32,
                base: random.value(),
            };
        }
    }
    if random.chance(3) {
        state.dr7 = random.next() & 0xffff_0fff;
        state.dr = [0; 4].map(|_| random.below(SIZE));
    }
    if !random.chance(3) {
        // OSFXSR, OSXMMEXCPT.
        state.cr4 |= 3 << 9;
        state.xmm = [[0; 2]; 16].map(|_| [random.lanes(), random.lanes()]);
        state.mxcsr = random.mxcsr() as u32;
        state.x87[0] = random.next();
    }
    state.gdtr.base = random.value();
    state.idtr.base = random.below(SIZE);
    state
}

fn answer(random: &mut Random, cpu: &mut Cpu, stop: VmExit) -> bool {
    match stop {
        VmExit::Shutdown | VmExit::Unimplemented { .. } => return false,
        VmExit::IoIn { len, .. } => {
            let bytes = random.next().to_le_bytes();
            cpu.io_data().copy_from_slice(&bytes[..len]);
        }
        VmExit::MmioRead { .. } => cpu.answer(Answer::Mmio(random.next().to_le_bytes())),
        VmExit::IoOut { .. } | VmExit::MmioWrite { .. } => {}
        VmExit::Rdmsr { .. } | VmExit::Rdpmc { .. } => cpu.answer(if random.chance(2) {
            Answer::MsrFault
        } else {
            Answer::Msr(random.next())
        }),
        VmExit::Wrmsr { .. } => cpu.answer(if random.chance(2) {
            Answer::MsrFault
        } else {
            Answer::Done
        }),
        VmExit::Budget | VmExit::Window | VmExit::Halted => {
            if cpu.can_interrupt() && random.chance(4) {
                return cpu.interrupt(random.next() as u8).is_none();
            }
            if cpu.can_nmi() && random.chance(8) {
                return cpu.nmi().is_none();
            }
        }
        other => panic!("{other:?} is no exit of the emulator"),
    }
    true
}

#[test]
fn noise_ends_and_panics_nowhere() {
    let worlds = std::env::var("EMU_RANDOM_WORLDS");
    let worlds = worlds.ok().and_then(|n| n.parse().ok()).unwrap_or(200);
    let mut random = Random(0x1357_9bdf_0246_8ace);
    for _ in 0..worlds {
        let ram = Ram::zeroed(SIZE).expect("memory");
        noise(&mut random, &ram);
        let mut cpu = Cpu::new(ram, Cpuid::implemented());
        for _ in 0..4 {
            let state = state(&mut random);
            cpu.set_state(state);
            for _ in 0..30 {
                let before = cpu.time();
                let stop = cpu.run(200);
                // A step of REP, PAUSE or RDTSC may take it beyond.
                let passed = cpu.time().wrapping_sub(before);
                assert!(passed < 200 + 128, "{passed} ticks of 200");
                if !answer(&mut random, &mut cpu, stop) {
                    break;
                }
            }
        }
    }
}
