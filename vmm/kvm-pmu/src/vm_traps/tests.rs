//! Threads that play vCPUs.

use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::atomic::AtomicBool;
use std::thread::scope;

use vm_memory::GuestAddress;

use super::*;
use crate::sys::{SharedMemory, install_kick_handler, unnamed_file};
use crate::twice_mapped::TwiceMapped;

const HANDLER: u64 = 0x1010;
const ENDBR64: [u8; LONGEST] = [0xf3, 0x0f, 0x1e, 0xfa];

fn traps() -> (Arc<VmTraps>, Arc<TwiceMapped>) {
    let memory = Arc::new(TwiceMapped::new(&[(GuestAddress(0), 0x4000)]).unwrap());
    assert!(memory.bytes().write(HANDLER, &ENDBR64));
    let traps = VmTraps::new(TrapPlan::default(), Some(memory.clone()));
    (traps, memory)
}

fn endbr() -> Displaced {
    Displaced::of(ENDBR64).unwrap()
}

fn byte(memory: &TwiceMapped) -> u8 {
    memory.bytes().array::<1>(HANDLER).unwrap()[0]
}

/// Memory of huge pages, of which none can be protected in part; so often it was asked to.
#[derive(Debug)]
struct Huge(TwiceMapped, AtomicI32);

impl ProtectPages for Huge {
    fn protect(&self, _: u64, writable: bool) -> Result<(), PatchRefusal> {
        if writable {
            return Ok(());
        }
        self.1.fetch_add(1, Ordering::Relaxed);
        Err(PatchRefusal::Protect(libc::EINVAL))
    }

    fn bytes(&self) -> &dyn GuestBytes {
        self.0.for_vmm()
    }
}

/// Each try stops the whole VM.
#[test]
fn what_cannot_be_protected_is_tried_once() {
    let plain = TwiceMapped::new(&[(GuestAddress(0), 0x4000)]).unwrap();
    assert!(plain.bytes().write(HANDLER, &ENDBR64));
    let memory = Arc::new(Huge(plain, AtomicI32::new(0)));
    let traps = VmTraps::new(TrapPlan::default(), Some(memory.clone()));
    let refused = Err(PatchRefusal::Protect(libc::EINVAL));
    for id in 0..3 {
        let mut vcpu = VcpuTraps::new(traps.clone(), VcpuId(id));
        for _ in 0..3 {
            assert_eq!(vcpu.watch(HANDLER, endbr()), refused);
        }
    }
    assert_eq!(memory.1.load(Ordering::Relaxed), 1);
    // Later it may have other memory.
    traps.lock().refused[0].2 = Instant::now().checked_sub(PATCH_SPAN).unwrap();
    let mut vcpu = VcpuTraps::new(traps, VcpuId(0));
    assert_eq!(vcpu.watch(HANDLER, endbr()), refused);
    assert_eq!(memory.1.load(Ordering::Relaxed), 2);
}

/// Private memory is known for what it is, and nobody is stopped for that.
#[test]
fn private_memory_is_not_patched_and_stops_nobody() {
    install_kick_handler().unwrap();
    let shared = SharedMemory::new(|_, _| ());
    // A file that cannot be read is not mapped.
    let whole = unnamed_file(0x4000).unwrap();
    let path = format!("/proc/self/fd/{}", whole.as_raw_fd());
    let file = File::options().write(true).open(path).unwrap();
    let added = shared.add((0, 0x4000), (file.as_fd(), 0)).unwrap_err();
    assert!(
        added.to_string().contains("cannot be mapped again"),
        "{added}"
    );
    let traps = VmTraps::new(TrapPlan::default(), Some(Arc::new(shared)));
    let inside = VcpuTraps::new(traps.clone(), VcpuId(1));
    assert!(inside.enter(KickTarget::current()));
    let (waits, refused) = scope(|scope| {
        let look = || VcpuTraps::new(traps, VcpuId(0)).watch(HANDLER, endbr());
        let look = scope.spawn(look);
        let began = Instant::now();
        while !look.is_finished() && began.elapsed() < Duration::from_secs(2) {
            yield_now();
        }
        let waits = !look.is_finished();
        inside.leave();
        (waits, look.join().unwrap())
    });
    assert_eq!((waits, refused), (false, Err(PatchRefusal::NoProtection)));
}

#[test]
fn the_byte_is_there_while_a_vcpu_needs_it() {
    let (traps, memory) = traps();
    let mut first = VcpuTraps::new(traps.clone(), VcpuId(0));
    let mut second = VcpuTraps::new(traps.clone(), VcpuId(1));
    first.watch(HANDLER, endbr()).unwrap();
    assert_eq!(byte(&memory), OUT);
    let mut seen = [0; 8];
    assert!(traps.read(memory.bytes(), HANDLER - 2, &mut seen));
    assert_eq!(seen[2..6], ENDBR64);
    second.watch(HANDLER, endbr()).unwrap();
    first.unwatch();
    assert_eq!(byte(&memory), OUT);
    drop(second);
    assert_eq!(byte(&memory), ENDBR64[0]);
}

#[test]
fn an_old_patch_is_taken_over() {
    let (traps, memory) = traps();
    assert!(memory.bytes().write(HANDLER, &[OUT]));
    let mut vcpu = VcpuTraps::new(traps, VcpuId(0));
    vcpu.watch(HANDLER, endbr()).unwrap();
    vcpu.unwatch();
    assert_eq!(byte(&memory), ENDBR64[0]);
}

#[test]
fn what_changed_since_the_look_is_not_patched() {
    let (traps, memory) = traps();
    assert!(memory.bytes().write(HANDLER, &[0x50]));
    let mut vcpu = VcpuTraps::new(traps, VcpuId(0));
    let found = [0x50, 0x0f, 0x1e, 0xfa];
    let refused = Err(PatchRefusal::Instruction(found));
    assert_eq!(vcpu.watch(HANDLER, endbr()), refused);
    assert_eq!(byte(&memory), 0x50);
}

/// Two vCPUs with such a handler would otherwise end each other's `KVM_RUN` in turn.
#[test]
fn a_handler_that_is_not_patched_is_no_news() {
    let (traps, memory) = traps();
    assert!(memory.bytes().write(HANDLER, &[0x50]));
    let first = VcpuTraps::new(traps.clone(), VcpuId(0));
    let mut second = VcpuTraps::new(traps, VcpuId(1));
    second.watch(HANDLER, endbr()).unwrap_err();
    assert!(first.enter(KickTarget::current()));
}

#[test]
fn a_store_of_what_was_read_leaves_the_byte() {
    let (traps, memory) = traps();
    let mut vcpu = VcpuTraps::new(traps.clone(), VcpuId(0));
    vcpu.watch(HANDLER, endbr()).unwrap();
    assert!(traps.store(HANDLER - 1, &[7, OUT, 0x0f]));
    assert_eq!(
        memory.bytes().array(HANDLER - 1),
        Some([7, 0xf3, 0x0f, 0x1e])
    );
}

#[test]
fn a_write_opens_the_page_and_eight_end_it() {
    let (traps, memory) = traps();
    let mut vcpu = VcpuTraps::new(traps.clone(), VcpuId(0));
    for _ in 1..MOST_WRITES {
        vcpu.watch(HANDLER, endbr()).unwrap();
        assert!(!traps.written(Some(0x2000)));
        assert!(traps.written(Some(0x1000)));
        assert!(!traps.written(Some(0x1000)), "it is open");
        assert_eq!(byte(&memory), ENDBR64[0]);
        let refused = Err(PatchRefusal::JustWritten);
        assert_eq!(vcpu.watch(HANDLER, endbr()), refused);
        std::thread::sleep(QUIET);
    }
    vcpu.watch(HANDLER, endbr()).unwrap();
    assert!(traps.written(None));
    std::thread::sleep(QUIET);
    let refused = Err(PatchRefusal::Written(MOST_WRITES));
    assert_eq!(vcpu.watch(HANDLER, endbr()), refused);
}

/// A guest whose gate moves all the time, or comes and goes, has the host change page
/// tables as often.
#[test]
fn a_guest_whose_handler_never_rests_is_not_patched() {
    let (traps, memory) = traps();
    let mut vcpu = VcpuTraps::new(traps.clone(), VcpuId(0));
    for round in 0..u64::from(MOST_PATCHES) {
        if round == 7 {
            traps.restore();
        }
        vcpu.watch(HANDLER, endbr()).unwrap();
        vcpu.watch(HANDLER, endbr()).unwrap();
        vcpu.unwatch();
    }
    for _ in 0..7 {
        vcpu.watch(HANDLER, endbr()).unwrap();
        assert_eq!(byte(&memory), OUT);
        vcpu.unwatch();
    }
    let refused = Err(PatchRefusal::TooOften(MOST_PATCHES));
    assert_eq!(vcpu.watch(HANDLER, endbr()), refused);
    assert_eq!(vcpu.watch(HANDLER, endbr()), refused);
    assert_eq!(byte(&memory), ENDBR64[0]);
}

/// A minute later it is patched again, unless it was given up meanwhile.
#[test]
fn a_guest_whose_handler_rests_again_is_patched() {
    let (traps, _) = traps();
    let mut vcpu = VcpuTraps::new(traps.clone(), VcpuId(0));
    vcpu.watch(HANDLER, endbr()).unwrap();
    traps.lock().patched = (Instant::now().checked_sub(PATCH_SPAN), MOST_PATCHES);
    vcpu.unwatch();
    vcpu.watch(HANDLER, endbr()).unwrap();
    assert_eq!(traps.lock().patched.1, 1);
}

#[test]
fn a_store_is_done_where_a_patch_is_or_was() {
    let (traps, memory) = traps();
    let mut vcpu = VcpuTraps::new(traps.clone(), VcpuId(0));
    assert!(!traps.store(HANDLER, &[1]), "nothing was ever patched");
    vcpu.watch(HANDLER, endbr()).unwrap();
    assert!(traps.store(HANDLER + 1, &[7, 8]));
    // Another vCPU's, which exited at the same time.
    assert!(traps.store(HANDLER, &[6]));
    assert!(!traps.store(0x4000, &[1]), "there is no memory");
    assert_eq!(memory.bytes().array(HANDLER), Some([6, 7, 8, 0xfa]));
}

#[test]
fn a_vcpu_looks_again_after_a_change() {
    let (traps, _) = traps();
    let mut first = VcpuTraps::new(traps.clone(), VcpuId(0));
    let mut second = VcpuTraps::new(traps, VcpuId(1));
    let thread = KickTarget::current();
    first.watch(HANDLER, endbr()).unwrap();
    assert!(first.enter(thread));
    first.leave();
    assert!(second.has_news());
    assert!(!second.enter(thread), "it has not seen the patch");
    second.unwatch();
    assert!(second.enter(thread));
}

/// Two vCPUs have failed to store to the page; the second one to look finds it open, and
/// knows why.
#[test]
fn a_page_that_another_vcpu_has_opened_is_news() {
    let (traps, _) = traps();
    let thread = KickTarget::current();
    let mut first = VcpuTraps::new(traps.clone(), VcpuId(0));
    first.watch(HANDLER, endbr()).unwrap();
    assert!(first.enter(thread));
    first.leave();
    assert!(!first.has_news());
    assert!(traps.written(Some(0x1000)), "the other one's");
    assert!(!traps.written(Some(0x1000)) && first.has_news());
}

/// vCPUs go in and out as fast as they can, two of them change the patch all the
/// time: nobody is inside during a change, and all come to their end.
#[test]
fn nobody_is_inside_during_a_change() {
    install_kick_handler().unwrap();
    let (traps, memory) = traps();
    let changing = AtomicBool::new(false);
    scope(|scope| {
        for id in 0..4 {
            let (traps, memory, changing) = (traps.clone(), &memory, &changing);
            scope.spawn(move || {
                let thread = KickTarget::current();
                let mut vcpu = VcpuTraps::new(traps.clone(), VcpuId(id));
                for round in 0..2000 {
                    while !vcpu.enter(thread) {
                        vcpu.unwatch();
                    }
                    let before = byte(memory);
                    assert!(!changing.load(Ordering::SeqCst));
                    assert_eq!(byte(memory), before);
                    vcpu.leave();
                    if id < 2 && round % 8 == 0 {
                        let mut state = traps.lock();
                        traps.change(&mut state, |_| {
                            changing.store(true, Ordering::SeqCst);
                            let flipped = byte(memory) ^ 0xff;
                            memory.bytes().write(HANDLER, &[flipped]);
                            changing.store(false, Ordering::SeqCst);
                        });
                    }
                }
            });
        }
    });
}

#[test]
fn what_was_restored_is_patched_again_after_the_next_look() {
    let (traps, memory) = traps();
    let mut vcpu = VcpuTraps::new(traps.clone(), VcpuId(0));
    vcpu.watch(HANDLER, endbr()).unwrap();
    traps.restore();
    assert_eq!(byte(&memory), ENDBR64[0]);
    assert!(!vcpu.enter(KickTarget::current()), "it has to look");
    vcpu.watch(HANDLER, endbr()).unwrap();
    assert_eq!(byte(&memory), OUT);
    traps.give_up(PatchRefusal::Stepped);
    assert_eq!(byte(&memory), ENDBR64[0]);
    assert_eq!(vcpu.watch(HANDLER, endbr()), Err(PatchRefusal::Stepped));
}

/// A kernel that crashed has stopped the second vCPU; the first runs the one that saves it.
#[test]
fn a_handler_that_a_vcpu_has_left_is_the_guests() {
    let (traps, memory) = traps();
    const OTHER: u64 = 0x3010;
    assert!(memory.bytes().write(OTHER, &ENDBR64));
    let mut first = VcpuTraps::new(traps.clone(), VcpuId(0));
    let mut second = VcpuTraps::new(traps.clone(), VcpuId(1));
    first.watch(HANDLER, endbr()).unwrap();
    second.watch(HANDLER, endbr()).unwrap();
    first.abandon(HANDLER);
    assert_eq!(byte(&memory), ENDBR64[0]);
    assert!(!traps.is_patched(HANDLER));
    assert!(second.has_news());
    let refused = Err(PatchRefusal::Abandoned);
    assert_eq!(second.watch(HANDLER, endbr()), refused);
    first.watch(OTHER, endbr()).unwrap();
    assert!(traps.is_patched(OTHER));
    assert_eq!(second.watch(HANDLER, endbr()), refused);
    // It follows, and both come back.
    second.watch(OTHER, endbr()).unwrap();
    first.abandon(OTHER);
    first.watch(HANDLER, endbr()).unwrap();
    second.abandon(OTHER);
    second.watch(HANDLER, endbr()).unwrap();
    assert_eq!(byte(&memory), OUT);
}

/// One that nobody else has comes back as before.
#[test]
fn a_handler_that_all_have_left_is_not_remembered() {
    let (traps, memory) = traps();
    let mut first = VcpuTraps::new(traps.clone(), VcpuId(0));
    let mut second = VcpuTraps::new(traps.clone(), VcpuId(1));
    first.watch(HANDLER, endbr()).unwrap();
    first.abandon(HANDLER);
    assert_eq!(byte(&memory), ENDBR64[0]);
    second.watch(HANDLER, endbr()).unwrap();
    assert_eq!(byte(&memory), OUT);
    // Nor is it when whoever left it is gone.
    first.watch(HANDLER, endbr()).unwrap();
    first.abandon(HANDLER);
    drop(first);
    second.watch(HANDLER, endbr()).unwrap();
    assert_eq!(byte(&memory), OUT);
}

#[test]
fn few_handlers_are_remembered() {
    let (traps, memory) = traps();
    let mut first = VcpuTraps::new(traps.clone(), VcpuId(0));
    let mut second = VcpuTraps::new(traps.clone(), VcpuId(1));
    for round in 0..3 * MOST_ABANDONED as u64 {
        let at = 0x2000 + 16 * round;
        assert!(memory.bytes().write(at, &ENDBR64));
        first.watch(at, endbr()).unwrap();
        second.watch(at, endbr()).unwrap();
        first.abandon(at);
    }
    assert_eq!(traps.lock().abandoned.len(), MOST_ABANDONED);
}
