//! What a sample costs with its task and a chain of 16 frames, in a kernel of 4 MiB. A real
//! guest's pages and tables are not all in the processor's caches.

#[path = "../tests/linux/mod.rs"]
mod linux;

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use guest_view::{Chain, KernelView, Look, Search, Step};
use linux::{CALLED, CODE, ENTRY, KSTACK, Linux, PROGRAM_ROOT, REGS, STACK};

fn sample(criterion: &mut Criterion) {
    let mut linux = Linux::new(true);
    // 13 calls of the kernel above the entry, and three frames of the program: 17 with that.
    let sp = KSTACK + 0x4000 - REGS - 13 * 32;
    for frame in 0..13 {
        let caller = if frame == 12 {
            ENTRY + 0x20
        } else {
            CALLED + 9
        };
        linux.word(sp + 32 * frame + 24, caller);
    }
    let mut search = Search::new(std::iter::once(0..4 << 20));
    let note = loop {
        match search.step(&linux, 1024) {
            Step::Found(note) => break note,
            Step::Searching => {}
            Step::Done => return,
        }
    };
    let Ok(view) = KernelView::of(&linux, note, PROGRAM_ROOT) else {
        return;
    };
    let mut chain = Chain::default();
    let kernel = linux.registers(CALLED + 9, sp, 0);
    criterion.bench_function("task and a chain of 17 frames", |bencher| {
        bencher.iter(|| {
            let look = Look::at(&view, &linux);
            let task = look.task(0, &kernel);
            look.chain(task.as_ref().ok(), &kernel, &mut chain);
            assert_eq!(chain.kernel().len() + chain.program().len(), 17);
        });
    });
    let program = linux.registers(CODE, STACK + 0x800, STACK + 0x810);
    criterion.bench_function("task of a program, and its file", |bencher| {
        bencher.iter(|| {
            let look = Look::at(&view, &linux);
            let task = look.task(0, &program).ok();
            let memory = task.and_then(|task| task.memory);
            black_box(memory.map(|memory| look.mapping(memory, CODE)))
        });
    });
}

criterion_group!(benches, sample);
criterion_main!(benches);
