//! Processes whose own FPUs differ: results are the same, and the FPU stays as it was.

use emu_fpu::sse::{Op, execute};
use emu_fpu::x87::{Access, Insn, X87};

use crate::native::{HostFpu, in_process};
use crate::random::Random;
use crate::sse::{Elements, operands};

const SSE: usize = 20_000;
const STEPS: usize = 20_000;

/// Results of both halves, of guests' controls of any kind.
fn results(all: &mut [u64]) {
    let mut random = Random(7);
    let (sse, x87) = all.split_at_mut(3 * SSE);
    for (n, result) in sse.chunks_exact_mut(3).enumerate() {
        let op = Op::ALL[n % Op::ALL.len()];
        let (a, b) = operands(&mut random, Elements::Doubles);
        let mxcsr = random.next() as u32 & 0xffff;
        let outcome = execute(op, a, b, random.next() as u8, mxcsr);
        result.copy_from_slice(&[outcome.value[0], outcome.value[1], outcome.flags.into()]);
    }
    let mut state = X87::default();
    for result in x87 {
        let insn = loop {
            let bytes = random.next().to_le_bytes();
            let insn = Insn::new(0xd8 | bytes[1] & 7, bytes[2]);
            let known = insn.filter(|insn| insn.access().is_some());
            if let Some(insn) = known {
                break insn;
            }
        };
        let mut operand = [0; 10];
        operand[..8].copy_from_slice(&random.double().to_le_bytes());
        operand[8..].copy_from_slice(&(0x3ff0_u16 + random.below(32) as u16).to_le_bytes());
        if insn.access() == Some(Access::Load(2)) {
            operand[..2].copy_from_slice(&(0x40 | random.next() as u16 & 0xf3f).to_le_bytes());
        }
        let done = state.execute(insn, operand, random.next());
        state = done.x87;
        let mut image = [0; 160];
        state.to_fxsave(&mut image, true);
        *result = image
            .iter()
            .chain(done.store.iter().flatten())
            .fold(0, |hash: u64, byte| {
                (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
            });
    }
}

#[test]
fn results_are_the_same_whatever_the_hosts_fpu() {
    let of = |control, status, mxcsr| {
        in_process(
            HostFpu::new(control, status, mxcsr),
            3 * SSE + STEPS,
            results,
        )
    };
    let plain = of(0x37f, 0, 0x1f80);
    assert!(plain.iter().any(|result| *result != 0));
    // Every flag set, towards +∞ and with 24 digits, DAZ and FTZ.
    assert!(plain == of(0x87f, 0x3f, 0xdfff));
    // Every exception unmasked: one that reached the host would be a SIGFPE.
    assert!(plain == of(0x340, 0, 0x0000));
    // An exception of the host's own x87 that waits; a waiting instruction would meet it.
    assert!(plain == of(0x340, 0x8081, 0x2000));
}
