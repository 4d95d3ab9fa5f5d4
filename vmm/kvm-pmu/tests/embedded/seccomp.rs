//! What the crate asks of the kernel, against the table of docs/guide/embedding.md, "Seccomp":
//! each call of a thread is read while it runs guests.

use std::collections::BTreeSet;
use std::os::fd::AsFd;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use iced_x86::code_asm::{CodeAssembler, byte_ptr, dr0, dr7, rax};
use kvm_pmu::{
    Exited, KickTarget, KvmPmu, KvmVcpu, SharedMemory, ThreadContext, TrapMode,
    install_kick_handler, kick_signal,
};
use pmu_virt::CorePmu;
use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _};

use super::can_run;
use super::sys::{self, Call, calls_of};
use super::vmm::{
    COUNTER, CYCLES, END, ENDBR64, GLOBAL, IDT, MAIN, PAUSE, SELECT, Vcpu, Vmm, Written, enable,
    read, report, spin_for, wrmsr,
};

const PAGE: &str = include_str!("../../../../docs/guide/embedding.md");

/// Names of what the page's table has, and of what else these tests ask for.
const NAMES: [(&str, Call); 56] = [
    ("openat", Call::System(libc::SYS_openat)),
    ("KVM_GET_API_VERSION", Call::Ioctl(0xae00)),
    ("KVM_CREATE_VM", Call::Ioctl(0xae01)),
    ("KVM_GET_VCPU_MMAP_SIZE", Call::Ioctl(0xae04)),
    ("KVM_GET_SUPPORTED_CPUID", Call::Ioctl(0xc008_ae05)),
    ("KVM_CREATE_VCPU", Call::Ioctl(0xae41)),
    ("KVM_SET_USER_MEMORY_REGION", Call::Ioctl(0x4020_ae46)),
    ("KVM_CREATE_IRQCHIP", Call::Ioctl(0xae60)),
    ("KVM_SET_MP_STATE", Call::Ioctl(0x4004_ae99)),
    ("clock_gettime", Call::System(libc::SYS_clock_gettime)),
    ("fcntl", Call::System(libc::SYS_fcntl)),
    ("ftruncate", Call::System(libc::SYS_ftruncate)),
    ("futex", Call::System(libc::SYS_futex)),
    ("getpid", Call::System(libc::SYS_getpid)),
    ("gettid", Call::System(libc::SYS_gettid)),
    ("memfd_create", Call::System(libc::SYS_memfd_create)),
    ("mmap", Call::System(libc::SYS_mmap)),
    ("mprotect", Call::System(libc::SYS_mprotect)),
    ("mremap", Call::System(libc::SYS_mremap)),
    ("munmap", Call::System(libc::SYS_munmap)),
    ("fstat", Call::System(libc::SYS_fstat)),
    ("pread64", Call::System(libc::SYS_pread64)),
    ("read", Call::System(libc::SYS_read)),
    ("rt_sigaction", Call::System(libc::SYS_rt_sigaction)),
    ("rt_sigprocmask", Call::System(libc::SYS_rt_sigprocmask)),
    ("rt_sigreturn", Call::System(libc::SYS_rt_sigreturn)),
    ("sched_yield", Call::System(libc::SYS_sched_yield)),
    ("statx", Call::System(libc::SYS_statx)),
    ("tgkill", Call::System(libc::SYS_tgkill)),
    ("timer_create", Call::System(libc::SYS_timer_create)),
    ("timer_delete", Call::System(libc::SYS_timer_delete)),
    ("timer_settime", Call::System(libc::SYS_timer_settime)),
    ("KVM_CHECK_EXTENSION", Call::Ioctl(0xae03)),
    ("KVM_ENABLE_CAP", Call::Ioctl(0x4068_aea3)),
    ("KVM_GET_CPUID2", Call::Ioctl(0xc008_ae91)),
    ("KVM_GET_DEBUGREGS", Call::Ioctl(0x8080_aea1)),
    ("KVM_GET_FPU", Call::Ioctl(0x81a0_ae8c)),
    ("KVM_GET_LAPIC", Call::Ioctl(0x8400_ae8e)),
    ("KVM_GET_MP_STATE", Call::Ioctl(0x8004_ae98)),
    ("KVM_GET_MSRS", Call::Ioctl(0xc008_ae88)),
    ("KVM_GET_REGS", Call::Ioctl(0x8090_ae81)),
    ("KVM_GET_SREGS", Call::Ioctl(0x8138_ae83)),
    ("KVM_GET_STATS_FD", Call::Ioctl(0xaece)),
    ("KVM_GET_TSC_KHZ", Call::Ioctl(0xaea3)),
    ("KVM_GET_VCPU_EVENTS", Call::Ioctl(0x8040_ae9f)),
    ("KVM_NMI", Call::Ioctl(0xae9a)),
    ("KVM_SET_DEBUGREGS", Call::Ioctl(0x4080_aea2)),
    ("KVM_SET_GUEST_DEBUG", Call::Ioctl(0x4048_ae9b)),
    ("KVM_SET_MSRS", Call::Ioctl(0x4008_ae89)),
    ("KVM_SET_REGS", Call::Ioctl(0x4090_ae82)),
    ("KVM_SET_SREGS", Call::Ioctl(0x4138_ae84)),
    ("KVM_SET_VCPU_EVENTS", Call::Ioctl(0x4040_aea0)),
    ("KVM_SIGNAL_MSI", Call::Ioctl(0x4020_aea5)),
    ("KVM_SMI", Call::Ioctl(0xaeb7)),
    ("KVM_X86_SET_MSR_FILTER", Call::Ioctl(0x4188_aec6)),
    ("KVM_SET_CPUID2", Call::Ioctl(0x4008_ae90)),
];

/// Calls of any thread of a Rust program: memory of the allocator's, its stack, its messages and
/// its end, and whether a descriptor that it closes was open.
const ANY_THREAD: [&str; 3] = ["munmap", "mmap", "fcntl"];
const UNNAMED: [i64; 8] = [
    libc::SYS_brk,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_getrandom,
    libc::SYS_madvise,
    libc::SYS_rseq,
    libc::SYS_sigaltstack,
    libc::SYS_write,
];

/// What of the page's row of vCPUs no guest of these tests leads to, and what does.
const ELSEWHERE: [(&str, &str); 7] = [
    ("KVM_GET_FPU", "records with the registers of SSE"),
    (
        "KVM_GET_VCPU_EVENTS",
        "a #DB of the guest's at a breakpoint of ours",
    ),
    ("KVM_SET_VCPU_EVENTS", "the same"),
    ("KVM_SET_DEBUGREGS", "the same"),
    ("KVM_SET_SREGS", "an RDPMC at CPL 3, and the thread is left"),
    ("KVM_NMI", "a PMI, and the guest has changed its APIC ID"),
    ("KVM_SMI", "firmware with reservations"),
];

/// The names in the page's row that begins with `thread`.
fn row(thread: &str) -> BTreeSet<String> {
    let (_, section) = PAGE.split_once("## Seccomp").unwrap();
    let start = format!("| {thread} |");
    let row = section.lines().find_map(|line| line.strip_prefix(&start));
    let row = row.unwrap_or_else(|| panic!("the page has no row of {thread}"));
    let words = row.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let names = words.filter(|word| !word.is_empty()).map(str::to_owned);
    names.collect()
}

/// Whether `test` can run; says why not.
fn can_read_calls(test: &str) -> bool {
    let can = can_run(test);
    let tells = calls_of(|| ()).is_some();
    if can && !tells {
        println!("skipped: {test}: the kernel does not let a process read its calls (seccomp)");
    }
    can && tells
}

fn name(call: Call) -> String {
    let known = NAMES.iter().find(|(_, other)| *other == call);
    known.map_or_else(|| format!("{call:x?}"), |(name, _)| (*name).to_owned())
}

/// What of a vCPU goes to the thread that is to run it.
type Parts = (KvmVcpu, KvmPmu, Box<CorePmu>);

fn apart(vcpu: Vcpu) -> Parts {
    (vcpu.kvm, vcpu.pmu, vcpu.thread.into_counters().unwrap())
}

fn joined((kvm, pmu, counters): Parts) -> Vcpu {
    let thread = ThreadContext::new(pmu.tsc_khz()).unwrap();
    Vcpu {
        thread: thread.with_counters(Some(counters)),
        kvm,
        pmu,
        seen: Default::default(),
        kicks: 0,
        device: |_| {},
    }
}

/// A guest that counts, reads, spins until its handler is looked at again, and is left.
fn reads(a: &mut CodeAssembler) -> Written {
    enable(a)?;
    read(a)?;
    spin_for(a, 1 << 24)?;
    read(a)?;
    report(a, PAUSE)
}

/// One that uses a debug register besides.
fn debugs(a: &mut CodeAssembler) -> Written {
    a.mov(rax, MAIN + 0x700)?;
    a.mov(dr0, rax)?;
    a.mov(rax, 0x402u64)?;
    a.mov(dr7, rax)?;
    reads(a)
}

/// One that has an overflow, and takes it as `lvtpc` says.
fn overflows(a: &mut CodeAssembler, lvtpc: u32) -> Written {
    wrmsr(a, 0x80f, 0x1ff)?;
    wrmsr(a, 0x834, lvtpc)?;
    wrmsr(a, COUNTER, 0xfff0_0000)?;
    wrmsr(a, SELECT, CYCLES | 1 << 20)?;
    wrmsr(a, GLOBAL, 1)?;
    a.sti()?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.jmp(again)
}

/// One that halts until an overflow wakes it.
fn halts(a: &mut CodeAssembler) -> Written {
    wrmsr(a, 0x80f, 0x1ff)?;
    wrmsr(a, 0x834, 0x40)?;
    wrmsr(a, COUNTER, 0xff00_0000)?;
    wrmsr(a, SELECT, CYCLES | 1 << 20)?;
    wrmsr(a, GLOBAL, 1)?;
    a.sti()?;
    a.hlt()?;
    report(a, END)
}

/// In x2APIC mode, with handlers of an NMI and of vector 0x40 that report the end.
fn with_interrupts(vmm: &Vmm, vcpu: &Vcpu) {
    const INTERRUPT: u64 = MAIN + 0x1000;
    let gate = INTERRUPT & 0xffff | 8 << 16 | 0x8e00 << 32 | (INTERRUPT >> 16) << 48;
    for vector in [2, 0x40] {
        vmm.put(IDT + 16 * vector, &gate.to_le_bytes());
    }
    vmm.code(INTERRUPT, 64, |a| report(a, END));
    let mut sregs = vcpu.kvm.get_sregs().unwrap();
    sregs.apic_base |= 1 << 10;
    vcpu.kvm.set_sregs(&sregs).unwrap();
}

/// What a thread asks for that runs this guest to its end with `run`, which is kicked once.
fn asks(
    mode: TrapMode,
    guest: &dyn Fn(&mut CodeAssembler) -> Written,
    run: fn(&mut Vcpu, &Vmm),
) -> Vec<Call> {
    let vmm = Vmm::with_split_irqchip(mode).loaded(ENDBR64, guest);
    let vcpu = vmm.started(0, MAIN, None);
    with_interrupts(&vmm, &vcpu);
    let parts = apart(vcpu);
    let (tell, told) = channel();
    let kicker = std::thread::spawn(move || {
        let target: KickTarget = told.recv().unwrap();
        std::thread::sleep(Duration::from_millis(2));
        target.kick();
    });
    let asked = calls_of(|| {
        let mut vcpu = joined(parts);
        tell.send(vcpu.thread.target()).unwrap();
        run(&mut vcpu, &vmm);
        vcpu.leave();
        drop(vcpu);
    });
    kicker.join().unwrap();
    asked.expect("the kernel tells").1
}

fn to_the_end(vcpu: &mut Vcpu, vmm: &Vmm) {
    vcpu.reports(vmm);
}

/// Leaves the thread after each exit that is the PMU's.
fn with_pauses(vcpu: &mut Vcpu, vmm: &Vmm) {
    while let Exited::Pmu(_) = vcpu.enter(vmm).unwrap().run().unwrap() {
        let thread = &mut vcpu.thread;
        vcpu.pmu.leave_thread(&mut vcpu.kvm, thread).unwrap();
    }
}

/// What a thread asks for whose vCPU has the handler patched while another one is in the guest.
fn asks_beside_another() -> Vec<Call> {
    const OTHER: u64 = MAIN + 0x800;
    const FLAG: u64 = 0x1_6000;
    let vmm = Vmm::with(TrapMode::Auto, ENDBR64, reads);
    vmm.code(OTHER, 64, |a| {
        report(a, PAUSE)?;
        let mut again = a.create_label();
        a.set_label(&mut again)?;
        a.cmp(byte_ptr(FLAG), 0)?;
        a.je(again)?;
        report(a, END)
    });
    let parts = apart(vmm.started(0, MAIN, None));
    std::thread::scope(|scope| {
        let (tell, told) = channel();
        let shared = &vmm;
        scope.spawn(move || {
            let mut other = shared.started(1, OTHER, None);
            other.reports(shared);
            tell.send(()).unwrap();
            other.reports(shared)
        });
        told.recv().unwrap();
        std::thread::sleep(Duration::from_millis(10));
        let asked = calls_of(|| {
            let mut vcpu = joined(parts);
            vcpu.reports(&vmm);
            vcpu.leave();
            drop(vcpu);
        });
        vmm.put(FLAG, &[1]);
        asked.expect("the kernel tells").1
    })
}

/// Rounds of all guests: on a busy machine a kick may come late, or a lock be free.
const ROUNDS: usize = 8;

/// The page's row `thread` against what `round` finds that is asked for.
fn check(
    thread: &str,
    of_any_vmm: &[&str],
    elsewhere: &[&str],
    mut round: impl FnMut() -> Vec<Vec<Call>>,
) {
    let page = row(thread);
    let mut asked = BTreeSet::new();
    for _ in 0..ROUNDS {
        let calls = round().into_iter().flatten();
        let is_unnamed = |call: &Call| matches!(call, Call::System(n) if UNNAMED.contains(n));
        asked.extend(calls.filter(|call| !is_unnamed(call)).map(name));
        let lacks = asked.difference(&page).map(String::as_str);
        let lacks: Vec<_> = lacks
            .filter(|name| !of_any_vmm.contains(name) && !ANY_THREAD.contains(name))
            .collect();
        assert!(
            lacks.is_empty(),
            "the page's row of {thread} lacks {lacks:?}"
        );
        let mut unneeded = page.difference(&asked);
        if unneeded.all(|name| elsewhere.contains(&name.as_str())) {
            return;
        }
    }
    let unneeded: Vec<_> = page.difference(&asked).collect();
    panic!("nothing of {thread} needs some of {unneeded:?}, but for {elsewhere:?}");
}

/// A call that waits to be read would be interrupted by a kick, as no ioctl of KVM's is but KVM_RUN.
fn handle_kicks() {
    install_kick_handler().unwrap();
    sys::restart_calls(kick_signal());
}

/// A vCPU's thread asks for what the page's row says, and for no more.
#[test]
fn a_vcpus_thread_asks_for_what_the_page_says() {
    if !can_read_calls("a_vcpus_thread_asks_for_what_the_page_says") {
        return;
    }
    handle_kicks();
    let (auto, breakpoint) = (TrapMode::Auto, TrapMode::Breakpoint);
    let round = || {
        vec![
            asks(auto, &reads, to_the_end),
            asks(auto, &reads, with_pauses),
            asks(auto, &|a| overflows(a, 0x40), to_the_end),
            asks(auto, &|a| overflows(a, 0x400), to_the_end),
            asks(auto, &halts, to_the_end),
            asks(breakpoint, &reads, to_the_end),
            asks(breakpoint, &debugs, to_the_end),
            asks_beside_another(),
        ]
    };
    // The signal's return is of whoever kicks.
    let elsewhere = ELSEWHERE.map(|(name, _)| name);
    check("vCPUs", &["rt_sigreturn"], &elsewhere, round);
}

/// So does the thread that makes the VM, its memory and its vCPUs, and restores handlers.
#[test]
fn the_vms_thread_asks_for_what_the_page_says() {
    if !can_read_calls("the_vms_thread_asks_for_what_the_page_says") {
        return;
    }
    handle_kicks();
    let of_any_vmm = [
        "KVM_CREATE_IRQCHIP",
        "KVM_CREATE_VCPU",
        "KVM_CREATE_VM",
        "KVM_GET_API_VERSION",
        "KVM_GET_SREGS",
        "KVM_GET_SUPPORTED_CPUID",
        "KVM_GET_VCPU_MMAP_SIZE",
        "KVM_SET_CPUID2",
        "KVM_SET_MP_STATE",
        "KVM_SET_REGS",
        "KVM_SET_SREGS",
        "KVM_SET_USER_MEMORY_REGION",
        "openat",
        // To wait for the vCPU's thread.
        "futex",
        // Of the context, which these tests make here and give up again.
        "getpid",
        "gettid",
        "rt_sigaction",
        "rt_sigprocmask",
        "timer_create",
        "timer_delete",
    ];
    // A thread that was started by one that tells what it asks would tell, too.
    let (give, given) = channel::<(Arc<Vmm>, Parts)>();
    let (back, ran) = channel();
    let ran = Mutex::new(ran);
    let runner = std::thread::spawn(move || {
        for (vmm, parts) in given {
            let mut vcpu = joined(parts);
            vcpu.reports(&vmm);
            vcpu.leave();
            back.send(apart(vcpu)).unwrap();
        }
    });
    let make = |shared: bool| {
        let asked = calls_of(|| {
            let mut vmm = Vmm::new(TrapMode::Auto);
            if shared {
                let shared = Arc::new(SharedMemory::new(|_, _| ()));
                vmm = vmm.in_shared(shared.clone());
                // Of a slot that nobody has, by its descriptor.
                let region = vmm.memory.for_vmm().iter().next().unwrap();
                let file = region.file_offset().unwrap().file().as_fd();
                shared.add((1 << 32, 0x1000), (file, 0)).unwrap();
            }
            let vmm = Arc::new(vmm.loaded(ENDBR64, reads));
            let parts = apart(vmm.started(0, MAIN, None));
            give.send((vmm.clone(), parts)).unwrap();
            let parts = ran.lock().unwrap().recv().unwrap();
            vmm.traps.restore();
            drop(parts);
        });
        asked.expect("the kernel tells").1
    };
    let round = || vec![make(false), make(true)];
    check("that of the VM", &of_any_vmm, &[], round);
    drop(give);
    runner.join().unwrap();
}
