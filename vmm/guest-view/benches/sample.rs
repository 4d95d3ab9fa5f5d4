//! What a sample costs with its task, a chain of 16 frames and what is mapped at each frame of
//! the program, by part, in a kernel of 4 MiB. A real guest's pages and tables are not all in
//! the processor's caches.

#[path = "../tests/linux/mod.rs"]
mod linux;

use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use guest_view::{Chain, GuestMemory, KernelView, Look, Search, Step};
use linux::{CALLED, CODE, ENTRY, HEAD, KSTACK, Linux, PROGRAM_ROOT, REGS, STACK};
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    MemoryRegionAddress,
};

/// Guest memory as a VMM has it.
struct Ram(GuestMemoryMmap);

impl GuestMemory for Ram {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        let Some(region) = self.0.find_region(GuestAddress(address)) else {
            return false;
        };
        let at = MemoryRegionAddress(address - region.start_addr().0);
        let found = region.get_slice(at, buffer.len());
        found.is_ok_and(|found| found.copy_to(buffer) == buffer.len())
    }
}

impl Ram {
    fn of(linux: &Linux) -> Option<Self> {
        let ranges = [(GuestAddress(0), linux.memory.len())];
        let memory = GuestMemoryMmap::from_ranges(&ranges).ok()?;
        memory.write_slice(&linux.memory, GuestAddress(0)).ok()?;
        Some(Self(memory))
    }
}

fn view(memory: &dyn GuestMemory) -> Option<KernelView> {
    let mut search = Search::new(std::iter::once(0..4 << 20));
    loop {
        match search.step(memory, 1024) {
            Step::Found(note) => return KernelView::of(memory, note, PROGRAM_ROOT).ok(),
            Step::Searching => {}
            Step::Done => return None,
        }
    }
}

fn sample(criterion: &mut Criterion) {
    let mut linux = Linux::new(true);
    // Six calls of the kernel above the entry, with the place where it is: 8 frames.
    let sp = KSTACK + 0x4000 - REGS - 7 * 32;
    for frame in 0..7 {
        let caller = if frame == 6 { ENTRY + 0x20 } else { CALLED + 9 };
        linux.word(sp + 32 * frame + 24, caller);
    }
    // As many of the program, in two mappings of its file.
    let bp = STACK + 0x810;
    for frame in 0..7 {
        let (at, last) = (bp + 0x40 * frame, frame == 6);
        linux.word(at, if last { 0 } else { at + 0x40 });
        linux.word(at + 8, if frame % 2 == 0 { CODE } else { HEAD } + 0x123);
    }
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
    let Some(memory) = Ram::of(&linux) else {
        return;
    };
    let Some(view) = view(&memory) else {
        return;
    };
    let mut chain = Chain::default();
    let at = linux.registers(CALLED + 9, sp, 0);
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
