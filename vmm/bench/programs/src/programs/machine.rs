//! Calls, and a machine that is interpreted.

use core::hint::black_box;

use crate::sys::{self, Memory};

/// Fibonacci's numbers by their definition.
pub(crate) fn calls(_: &mut Memory, rounds: u64) -> u64 {
    (0..rounds).fold(0, |sum, _| sum + u64::from(fibonacci(black_box(20))))
}

#[inline(never)]
fn fibonacci(n: u32) -> u32 {
    if n < 2 {
        return n;
    }
    // Or one of the two calls becomes a loop.
    black_box(fibonacci(n - 1)) + fibonacci(n - 2)
}

/// What the machine does; an operand is the byte behind it.
const PUSH: u8 = 0;
const ADD: u8 = 1;
const MULTIPLY: u8 = 2;
const XOR: u8 = 3;
const LOAD: u8 = 4;
const STORE: u8 = 5;
const SHIFT: u8 = 6;
const BACK_IF: u8 = 7;
const END: u8 = 8;

/// `a = (a * 5 + i) ^ a >> 7`, for `i` from its start down to 1.
const CODE: [u8; 26] = [
    LOAD, 0, PUSH, 5, MULTIPLY, LOAD, 1, ADD, LOAD, 0, SHIFT, 7, XOR, STORE, 0, // a
    LOAD, 1, PUSH, 255, ADD, STORE, 1, // i - 1
    LOAD, 1, BACK_IF, END,
];

/// Runs the byte code above.
pub(crate) fn interpret(_: &mut Memory, rounds: u64) -> u64 {
    (0..rounds).fold(0, |sum, round| {
        sum ^ run(black_box(&CODE), round | 1, 4_000)
    })
}

#[inline(never)]
fn run(code: &[u8], start: u64, count: u64) -> u64 {
    let mut stack = [0u64; 8];
    let mut variables = [start, count];
    let (mut at, mut top) = (0usize, 0usize);
    loop {
        let operation = code[at];
        let operand = code.get(at + 1).copied().unwrap_or(0);
        at += 1;
        match operation {
            PUSH => {
                // The operand has a sign.
                stack[top & 7] = i64::from(operand as i8) as u64;
                top += 1;
                at += 1;
            }
            ADD | MULTIPLY | XOR => {
                top -= 1;
                let (a, b) = (stack[(top - 1) & 7], stack[top & 7]);
                stack[(top - 1) & 7] = match operation {
                    ADD => a.wrapping_add(b),
                    MULTIPLY => a.wrapping_mul(b),
                    _ => a ^ b,
                };
            }
            LOAD => {
                stack[top & 7] = variables[usize::from(operand & 1)];
                top += 1;
                at += 1;
            }
            STORE => {
                top -= 1;
                variables[usize::from(operand & 1)] = stack[top & 7];
                at += 1;
            }
            SHIFT => {
                stack[(top - 1) & 7] >>= operand & 63;
                at += 1;
            }
            BACK_IF => {
                top -= 1;
                if stack[top & 7] != 0 {
                    at = 0;
                }
            }
            _ => return variables[0],
        }
    }
}

/// A system call each round.
pub(crate) fn system_calls(_: &mut Memory, rounds: u64) -> u64 {
    (0..rounds).fold(0, |sum, _| sum.wrapping_add(sys::parent()))
}

/// What a machine does without a program.
pub(crate) fn nothing(_: &mut Memory, _: u64) -> u64 {
    0
}
