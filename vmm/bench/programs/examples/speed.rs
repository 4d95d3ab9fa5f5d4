//! Millions of instructions a second on `emu`, and for each the host's nanoseconds:
//! `cargo run --release -p bench-programs --example speed [TURNS [LENGTH [PROGRAM]]]`. `umpire bench
//! emu` compares.
#![allow(clippy::print_stdout, reason = "it is a program")]

use bench_programs::{FLOATING, PROGRAMS, image, run_in_emu};
use emu::EventClass;

#[allow(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
fn main() {
    let number = |at| std::env::args().nth(at)?.parse::<u64>().ok();
    let (turns, length) = (number(1).unwrap_or(3), number(2).unwrap_or(10));
    let only = std::env::args().nth(3);
    let image = image().expect("the programs; they need the target x86_64-unknown-none");
    let mut logarithms = 0.0;
    for program in PROGRAMS.iter().chain(&FLOATING) {
        if only.as_ref().is_some_and(|name| name != program.name) {
            continue;
        }
        let run = || run_in_emu(image, program, program.rounds * length).expect(program.name);
        let runs = (0..turns).map(|_| run());
        let best = runs.min_by_key(|run| run.time).expect("a turn");
        let instructions = best.rounds.of(EventClass::Instructions) as f64;
        let speed = instructions / best.time.as_secs_f64() / 1e6;
        if PROGRAMS.contains(program) {
            logarithms += speed.ln();
        }
        println!(
            "{:16} {speed:6.0} million a second, {:.2} ns; {:.0} million",
            program.name,
            1e3 / speed,
            instructions / 1e6
        );
    }
    if only.is_none() {
        let mean = (logarithms / PROGRAMS.len() as f64).exp();
        println!("geometric mean of integers {mean:6.0}");
    }
}
