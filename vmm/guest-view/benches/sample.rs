//! What a sample costs with its task, a chain of 16 frames and what is mapped at each frame of
//! the program, by part, in a kernel of 4 MiB. A real guest's pages and tables are not all in
//! the processor's caches.

#[path = "../tests/linux/deep.rs"]
mod deep;
#[path = "../tests/linux/mod.rs"]
mod linux;

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use deep::{Ram, deep, view};
use guest_view::{Chain, GuestMemory, Look};
use linux::{CODE, Kind, Linux, STACK};

fn sample(criterion: &mut Criterion) {
    let mut linux = Linux::new(Kind::V6_12);
    let at = deep(&mut linux);
    // Three more pages of its stack: numbers, what is nowhere, the stack itself, and code.
    for page in 1..4u64 {
        let entry = (0x2_3000 + page * 0x1000) | 7;
        let at = usize::try_from(0x9008 + 8 * page).unwrap_or(0);
        linux.memory[at..at + 8].copy_from_slice(&entry.to_le_bytes());
        for at in (0..0x1000).step_by(8) {
            let word = match at / 8 % 4 {
                0 => at,
                1 => STACK + at,
                2 => 0x5000_0000 + at,
                _ => CODE + at,
            };
            let at = usize::try_from(0x2_3000 + page * 0x1000 + at).unwrap_or(0);
            linux.memory[at..at + 8].copy_from_slice(&word.to_le_bytes());
        }
    }
    let memory = Ram::of(&linux).expect("memory");
    let view = view(&memory).expect("a kernel");
    let mut chain = Chain::default();
    criterion.bench_function("a read of 8 bytes", |bencher| {
        let mut word = [0; 8];
        bencher.iter(|| memory.read(black_box(0x3_2000), black_box(&mut word)));
    });
    criterion.bench_function("a look", |bencher| {
        bencher.iter(|| {
            black_box(Look::at(&view, &memory));
        });
    });
    criterion.bench_function("with the task", |bencher| {
        bencher.iter(|| Look::at(&view, &memory).task(0, &at));
    });
    criterion.bench_function("with the task and 16 frames", |bencher| {
        bencher.iter(|| {
            let look = Look::at(&view, &memory);
            let task = look.task(0, &at).ok();
            look.chain(task.as_ref(), &at, &mut chain);
            assert_eq!((chain.kernel().len(), chain.program().len()), (8, 8));
        });
    });
    let mut stack = vec![0; 8192];
    criterion.bench_function("with the task, 16 frames and 8 KiB of stack", |bencher| {
        bencher.iter(|| {
            let look = Look::at(&view, &memory);
            let task = look.task(0, &at).ok();
            look.chain(task.as_ref(), &at, &mut chain);
            let program = task.and_then(|task| task.memory);
            let (Some(program), Some(at)) = (program, chain.registers()) else {
                return;
            };
            let len = look.stack(program, &at, &mut stack);
            let mut mappings = 0;
            look.code(program, (at.sp, &stack[..len]), |_| mappings += 1);
            assert_eq!((len, mappings), (stack.len(), 2));
        });
    });
    criterion.bench_function("with the task, 16 frames and 2 mappings", |bencher| {
        bencher.iter(|| {
            let look = Look::at(&view, &memory);
            let task = look.task(0, &at).ok();
            look.chain(task.as_ref(), &at, &mut chain);
            let program = task.and_then(|task| task.memory);
            for frame in chain.program() {
                let mapping = program.map(|program| look.mapping(program, frame.instruction()));
                assert!(mapping.is_some_and(|mapping| mapping.is_ok()));
            }
        });
    });
}

criterion_group!(benches, sample);
criterion_main!(benches);
