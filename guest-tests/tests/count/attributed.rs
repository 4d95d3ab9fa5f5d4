//! Who executed what, against the guest's own `perf`, whose counters are the same instructions
//! told apart by its kernel.

use std::fs;
use std::time::Duration;

use attribution::{Attribution, Counts, Kernel, Program, Start, find};
use guest_tests::linux::LinuxImage;
use vmm::count::{Image, Limits, Looks, Plan, Signals};

/// By which the guest's script says that the machine is to be kept as it is.
const SIGNALS: Signals = Signals {
    tag: "none",
    port: 0x7f0,
    ready: 1,
    done: 2,
};
const READY: &str = "workers";
/// Threads that exist when `perf` comes to them, and a tree of processes from its exec on. All of
/// it is one step, and so below one shell.
const MEASURED: &str = "mkfifo /tmp/go; workers /tmp/go & sleep 0.2; \
    perf stat --per-thread -x, -o /tmp/threads -e instructions:u -p $! & sleep 2; \
    echo >/tmp/go; wait; \
    perf stat -x, -o /tmp/tree -e instructions:u sh -c 'loops | loops; loops & wait; true'; \
    grep -h instructions /tmp/threads /tmp/tree";

/// Instructions of `loops`, and of a turn of a worker's loop.
const LOOPS: u64 = 2_000_004;
const TURN: u64 = 2;
const TURNS: u64 = 1_000_000;

/// The guest's console, and what was attributed in it.
fn run() -> (String, Counts) {
    let image = LinuxImage::fetch().expect("the guest's image");
    let script = format!("{READY}\n{MEASURED}\n");
    let guest = image.with_script(&script).expect("an initramfs");
    let kernel = fs::read(guest.kernel()).expect("the kernel");
    let initramfs = fs::read(guest.initrd()).expect("the first files");
    let plan = Plan {
        kernel: &kernel,
        initramfs: &initramfs,
        memory_mib: 512,
        signals: SIGNALS,
        engine: "attributed",
    };
    let folder = tempfile::tempdir().expect("a folder");
    let nobody = |_: &[u8], reply: &mut Vec<u8>| reply.clear();
    let limits = Limits::within(Duration::from_secs(300));
    let path = folder.path().join("snapshot");
    let image = Image::boot(&plan, &path, nobody, limits.clone(), |_| {}).expect("it boots");

    let registers = image.registers().expect("a processor");
    let memory = image.memory().expect("its memory");
    let view = find(&memory, registers.cr3).expect("its kernel");
    let kernel = Kernel::of(&view).expect("a kernel that says enough");
    // The shell of the step that is measured is the next one.
    let looks = Looks {
        places: kernel.places().to_vec(),
        observer: Box::new(Attribution::new(kernel, Start::First)),
    };
    let ran = image.run(nobody, limits, Some(looks)).expect("it runs");
    let observer = ran.observer.expect("it is given back");
    let attribution = Attribution::taken(observer).expect("the same");
    (ran.console, attribution.counts())
}

/// The counts of `perf stat -x,`: what each is of, and how many.
fn counted(console: &str) -> Vec<(String, u64)> {
    let lines = console
        .lines()
        .filter(|line| line.contains(",instructions:u,"));
    let counted = lines.map(|line| {
        let mut fields: Vec<&str> = line.split(',').collect();
        // The whole has no field for a thread.
        if fields.len() > 1 && fields[1].is_empty() {
            fields.insert(0, "");
        }
        let count = fields[1].parse();
        (fields[0].to_owned(), count.expect(line))
    });
    counted.collect()
}

/// A program with those that its processes have forked and executed.
fn below<'a>(counts: &'a Counts, root: &Program) -> Vec<&'a Program> {
    let mut pids = vec![root.pid];
    let mut found = Vec::new();
    for program in &counts.programs {
        let own = program.pid == root.pid && program.name == root.name;
        if own || pids.contains(&program.parent) {
            pids.push(program.pid);
            found.push(program);
        }
    }
    found
}

#[test]
fn threads_and_trees_are_those_of_perf() {
    let (console, counts) = run();
    println!("{console}\n{counts:#?}");
    let perf = counted(&console);

    let workers = |program: &&Program| program.name == "/usr/bin/workers";
    let workers = counts.programs.iter().find(workers).expect("the workers");
    assert_eq!(workers.threads.len(), 4);
    let mut before = Vec::new();
    for (thread, turns) in workers.threads.iter().skip(1).zip([1, 2, 3]) {
        let name = format!("workers-{}", thread.tid);
        let (_, of_perf) = perf.iter().find(|(of, _)| *of == name).expect(&name);
        let user = thread.user.instructions;
        let rest = of_perf - TURN * TURNS * turns;
        assert!(rest < 2_000, "{name}: {of_perf}");
        // What it executed before `perf` came is the same of each.
        before.push(user - of_perf);
    }
    assert!(before.iter().all(|one| *one == before[0]), "{before:?}");
    assert!(before[0] < 2_000, "{before:?}");

    let (_, of_perf) = perf.last().expect("the tree");
    let shell = counts.programs.iter().rfind(|program| {
        let named = program.name.ends_with("/sh");
        named && below(&counts, program).len() > 3
    });
    let tree = below(&counts, shell.expect("the shell"));
    let loops: Vec<u64> = tree
        .iter()
        .filter(|program| program.name == "/usr/bin/loops")
        .map(|program| program.user().instructions)
        .collect();
    assert_eq!(loops, [LOOPS; 3]);
    let sum: u64 = tree.iter().map(|program| program.user().instructions).sum();
    assert_eq!(sum, *of_perf, "the tree of {tree:#?}");

    let calls: u64 = counts.syscalls.iter().map(|call| call.instructions).sum();
    let rest = counts.rest;
    let rest = rest.exception_instructions + rest.interrupt_instructions + rest.start_instructions;
    assert_eq!(calls + rest, counts.kernel().instructions);
}
