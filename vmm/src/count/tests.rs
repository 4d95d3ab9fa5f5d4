//! Whole machines with kernels of some instructions: what they may do to end, and that nothing
//! of it is left behind.

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use iced_x86::IcedError;
use iced_x86::code_asm::{
    CodeAssembler, al, ax, byte_ptr, dword_ptr, dx, eax, ebx, ecx, edx, qword_ptr, rax, rbx, rcx,
};

use super::*;
use crate::boot::testing::ElfBuilder;

const SIGNALS: Signals = Signals {
    tag: "t",
    port: 0x7f0,
    ready: 1,
    done: 2,
};
const START: u64 = 0x10_0000;
/// Where kernels keep something that is no zero.
const KEPT: u64 = 0x20_0000;

type Serve = fn(&[u8], &mut Vec<u8>);
type Write = fn(&mut CodeAssembler) -> Result<(), IcedError>;

fn kernel(write: Write) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).expect("64 bits");
    write(&mut a).expect("instructions");
    let code = a.assemble(START).expect("code");
    let elf = ElfBuilder::elf64().entry(START);
    elf.segment(START, &code, code.len() as u64).build()
}

fn out(a: &mut CodeAssembler, port: u32, value: u32) -> Result<(), IcedError> {
    a.mov(eax, value)?;
    a.mov(edx, port)?;
    a.out(dx, al)
}

fn plan(kernel: &[u8]) -> Plan<'_> {
    Plan {
        kernel,
        initramfs: b"none",
        memory_mib: 16,
        signals: SIGNALS,
        engine: "test",
    }
}

fn nothing(_: &[u8], _: &mut Vec<u8>) {}

fn boot(kernel: &[u8], path: &Path) -> Result<Image, BootError> {
    let limits = Limits::within(Duration::from_secs(60));
    Image::boot(&plan(kernel), path, nothing, limits, |_| {})
}

/// How a run ends of a guest that does this once it is ready.
fn end(write: Write, limits: Limits) -> Ran<Serve> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("image");
    let image = boot(&kernel(write), &path).expect("it boots");
    let before = fs::read(&path).expect("it is there");
    let ran = image.run(nothing as Serve, limits, None);
    let ran = ran.expect("it begins");
    assert_eq!(fs::read(&path).expect("it is there"), before);
    ran
}

/// Is ready, then counts to a number that is in memory, and is done.
fn counts(a: &mut CodeAssembler) -> Result<(), IcedError> {
    a.mov(rbx, KEPT)?;
    a.mov(qword_ptr(rbx), 1000)?;
    a.mov(ecx, 7)?;
    out(a, 0x7f0, 1)?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.add(rcx, 1)?;
    a.cmp(rcx, qword_ptr(rbx))?;
    a.jb(again)?;
    // The next run finds what this one found.
    a.mov(qword_ptr(rbx), 5)?;
    out(a, 0x7f0, 2)?;
    a.hlt()
}

#[test]
fn each_run_goes_on_from_the_same_machine() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("image");
    let kernel = kernel(counts);
    let image = boot(&kernel, &path).expect("it boots");
    // Up to and with the first OUT.
    assert_eq!(image.booted(), 6);
    let run = |image: &Image| {
        let ran = image
            .run(nothing, Limits::default(), None)
            .expect("it runs");
        assert_eq!(ran.end, End::Done);
        (ran.instructions, ran.virtual_ns)
    };
    let first = run(&image);
    assert_eq!(first.0, [993 * 3 + 1 + 3, 0]);
    assert_eq!(run(&image), first);
    // Who comes later boots nothing.
    let mut boots = 0;
    let later = Image::boot(&plan(&kernel), &path, nothing, Limits::default(), |_| {
        boots += 1;
    });
    assert_eq!(run(&later.expect("it is there")), first);
    assert_eq!(boots, 0);
    let key = plan(&kernel).key();
    let opened = Image::open(&path, &key, SIGNALS).expect("it is there");
    assert_eq!(run(&opened), first);
    // Another kernel is another key, and takes the place.
    let other = self::kernel(|a| {
        a.nop()?;
        counts(a)
    });
    assert_ne!(plan(&other).key(), key);
    assert_eq!(boot(&other, &path).expect("it boots").booted(), 7);
}

/// Counts in memory and by the devices, until it is ready.
fn counts_long(a: &mut CodeAssembler) -> Result<(), IcedError> {
    let mut again = a.create_label();
    a.mov(rbx, KEPT)?;
    a.mov(ecx, 60_000)?;
    a.set_label(&mut again)?;
    a.add(dword_ptr(rbx), ecx)?;
    // Scratch register of COM1, index of the RTC, the PM timer.
    for port in [0x3ff, 0x70] {
        a.mov(eax, ecx)?;
        a.mov(edx, port)?;
        a.out(dx, al)?;
    }
    a.mov(edx, 0x608)?;
    a.in_(eax, dx)?;
    a.add(qword_ptr(rbx + 8), rax)?;
    a.dec(ecx)?;
    a.jnz(again)?;
    out(a, 0x7f0, 1)?;
    a.hlt()
}

#[test]
fn a_boot_in_parts_comes_to_the_same_machine() {
    let folder = tempfile::tempdir().expect("a folder");
    let kernel = kernel(counts_long);
    let plan = plan(&kernel);
    let hash = |times: &[u64]| {
        let hash = boot_in_parts(&plan, folder.path(), || nothing, times);
        hash.expect("it boots")
    };
    let whole = hash(&[]);
    assert_eq!(hash(&[30_000, 300_000, 400_000]), whole);
    assert_eq!(hash(&[1]), whole);
}

#[test]
fn two_that_boot_at_a_time_make_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("image");
    let kernel = kernel(counts);
    let writes = Mutex::new(0);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let progress = |step| {
                    if step == Progress::Writes {
                        *writes.lock().expect("no panic") += 1;
                    }
                };
                let limits = Limits::default();
                Image::boot(&plan(&kernel), &path, nothing, limits, progress).expect("there");
            });
        }
    });
    assert_eq!(*writes.lock().expect("no panic"), 1);
}

#[test]
fn what_a_guest_does_ends_its_run_and_nothing_else() {
    let ended = |write: Write| end(write, Limits::default()).end;
    let off = ended(|a| {
        out(a, 0x7f0, 1)?;
        // SLP_TYP 5 and SLP_EN.
        a.mov(eax, 5 << 10 | 1 << 13)?;
        a.mov(edx, 0x604)?;
        a.out(dx, ax)
    });
    assert_eq!(off, End::Done);
    let asleep = ended(|a| {
        out(a, 0x7f0, 1)?;
        a.cli()?;
        a.hlt()
    });
    assert_eq!(asleep, End::Asleep);
    let lost = ended(|a| {
        out(a, 0x7f0, 1)?;
        a.mov(rax, KEPT)?;
        a.lidt(qword_ptr(rax))?;
        a.ud2()
    });
    assert!(
        matches!(&lost, End::Lost(what) if what.contains("triple fault")),
        "{lost}"
    );
    let word = ended(|a| {
        out(a, 0x7f0, 1)?;
        out(a, 0x7f0, 9)
    });
    assert!(
        matches!(&word, End::Lost(what) if what.contains("said 9")),
        "{word}"
    );
    let panicked = ended(|a| {
        out(a, 0x7f0, 1)?;
        for byte in b"Kernel panic - not syncing: test\n" {
            out(a, 0x3f8, u32::from(*byte))?;
        }
        // As Linux restarts.
        out(a, 0xcf9, 6)
    });
    assert_eq!(
        panicked,
        End::Panicked("Kernel panic - not syncing: test".to_owned())
    );
    let broken = ended(|a| {
        out(a, 0x7f0, 1)?;
        // A queue is ready that lies nowhere.
        a.mov(ebx, 0xd000_0000_u32)?;
        a.mov(dword_ptr(rbx + 0x44), 1)?;
        let mut here = a.create_label();
        a.set_label(&mut here)?;
        a.jmp(here)
    });
    assert_eq!(broken, End::Broken(crate::virtio::Broken::Rings));
}

/// Executes for ever.
fn spins(a: &mut CodeAssembler) -> Result<(), IcedError> {
    out(a, 0x7f0, 1)?;
    let mut here = a.create_label();
    a.set_label(&mut here)?;
    a.jmp(here)
}

#[test]
fn a_run_that_never_ends_is_ended() {
    let limits = Limits::within(Duration::from_millis(200));
    assert_eq!(end(spins, limits).end, End::TimedOut);
    let limits = Limits::default();
    let interrupted = limits.interrupted.clone();
    let other = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(200));
        interrupted.store(true, Ordering::Relaxed);
    });
    assert_eq!(end(spins, limits).end, End::Interrupted);
    other.join().expect("no panic");
}

#[test]
fn a_boot_that_fails_leaves_nothing_behind() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("image");
    let failed = |kernel: &[u8]| match boot(kernel, &path) {
        Err(error) => error.to_string(),
        Ok(image) => panic!("{image:?}"),
    };
    let asleep = failed(&kernel(|a| {
        a.cli()?;
        a.hlt()
    }));
    assert!(asleep.contains("did not get so far"), "{asleep}");
    let panicked = failed(&kernel(|a| {
        for byte in b"no init\nKernel panic - not syncing: x\n" {
            out(a, 0x3f8, u32::from(*byte))?;
        }
        out(a, 0xcf9, 6)
    }));
    assert!(
        panicked.contains("Kernel panic - not syncing: x"),
        "{panicked}"
    );
    let none = failed(b"no kernel at all, and shorter than any");
    assert!(none.contains("kernel"), "{none}");
    let limits = Limits::within(Duration::from_millis(100));
    let never = kernel(|a| {
        let mut here = a.create_label();
        a.set_label(&mut here)?;
        a.jmp(here)
    });
    let slow = Image::boot(&plan(&never), &path, nothing, limits, |_| {});
    let slow = slow.expect_err("it never ends").to_string();
    assert!(slow.contains("time was over"), "{slow}");
    let left: Vec<_> = fs::read_dir(folder.path()).expect("a folder").collect();
    // The lock, which the next one takes.
    assert_eq!(left.len(), 1, "{left:?}");
    let nowhere = folder.path().join("none/image");
    let error = boot(&kernel(counts), &nowhere)
        .expect_err("no folder")
        .to_string();
    assert!(error.contains("cannot lock"), "{error}");
}

#[test]
fn what_the_guest_asks_for_is_served_and_taken_back() {
    // The tag, read from the device's configuration, byte by byte to a port.
    let reads: Write = |a| {
        out(a, 0x7f0, 1)?;
        a.mov(ebx, 0xd000_0000_u32)?;
        a.mov(al, byte_ptr(rbx + 0x100))?;
        a.mov(edx, 0x3f8)?;
        a.out(dx, al)?;
        out(a, 0x7f0, 2)?;
        a.hlt()
    };
    let ran = end(reads, Limits::default());
    assert_eq!((ran.console.as_str(), ran.end), ("t", End::Done));
    let asked = Arc::new(Mutex::new(0));
    let count = asked.clone();
    let folder = tempfile::tempdir().expect("a folder");
    let image = boot(&kernel(counts), &folder.path().join("image")).expect("it boots");
    let serve = move |_: &[u8], _: &mut Vec<u8>| *count.lock().expect("no panic") += 1;
    let ran = image.run(serve, Limits::default(), None).expect("it runs");
    drop(ran.serve);
    assert_eq!(
        Arc::into_inner(asked).map(|it| it.into_inner().ok()),
        Some(Some(0))
    );
}

#[test]
fn who_waits_for_a_lock_is_ended_by_limits() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("image");
    let held = fs::File::create(folder.path().join("image.lock")).expect("room");
    held.lock().expect("nobody else has it");
    let mut waits = 0;
    let kernel = kernel(counts);
    let limits = Limits::within(Duration::from_millis(300));
    let boot = Image::boot(&plan(&kernel), &path, nothing, limits, |step| {
        assert_eq!(step, Progress::Waits);
        waits += 1;
    });
    let error = boot.expect_err("it is locked").to_string();
    assert!(error.contains("time was over"), "{error}");
    assert_eq!(waits, 1);
}

#[test]
fn who_writes_to_a_reader_that_takes_nothing_is_ended_by_limits() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let limits = Limits::within(Duration::from_millis(200));
    let much = vec![7; 1 << 20];
    let error = limits.patience().write_all(&writer, &much);
    let kind = error.expect_err("nobody reads").kind();
    assert_eq!(kind, std::io::ErrorKind::TimedOut);
    limits.interrupted.store(true, Ordering::Relaxed);
    let error = limits.patience().write_all(&writer, &much);
    let kind = error.expect_err("nobody reads").kind();
    assert_eq!(kind, std::io::ErrorKind::Interrupted);
    drop(reader);
    let nobody = Limits::default().patience().write_all(&writer, b"x");
    let kind = nobody.expect_err("nobody can read").kind();
    assert_eq!(kind, std::io::ErrorKind::BrokenPipe);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let read = std::thread::spawn(move || {
        let (mut all, mut reader) = (Vec::new(), reader);
        std::io::Read::read_to_end(&mut reader, &mut all).map(|_| all)
    });
    let written = Limits::default().patience().write_all(&writer, &much);
    written.expect("it is read");
    drop(writer);
    assert_eq!(read.join().expect("no panic").expect("read"), much);
}
