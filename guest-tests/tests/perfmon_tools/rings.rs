//! A guest of two rings: a program at CPL 3, and a kernel that it calls by UD2, which each KVM
//! hands on as it is. Its own tables and code lie where no Linux that it may have in its memory
//! has anything.

use std::io::Write;
use std::ops::Range;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use guest_tests::kernel::exit;
use guest_tests::micro::Written;
use guest_tests::umpire;
use guest_tests::vm::signal;
use iced_x86::code_asm::{CodeAssembler, ax, eax, qword_ptr, r14, rax, rbp, rcx, rdi, rsi, rsp};
use tempfile::{NamedTempFile, TempDir};
use vmm::micro::ElfImage;

/// How long anybody waits for anything: a recording may have to look for a kernel, and asks for
/// descriptions at its end.
pub(super) const PATIENCE: Duration = Duration::from_secs(40);

/// Memory is here, too, for both rings, all of it.
pub(super) const WINDOW: u64 = 0x80_0000_0000;
/// As [`WINDOW`], where kernels are: what runs below is none.
const HIGH: u64 = 0xffff_ff80_0000_0000;
/// Where the file is loaded: the data, and behind it the guest's own.
pub(super) const DATA: u64 = 0x100_0000;
const DATA_SIZE: usize = 4 << 20;
const OWN: u64 = DATA + DATA_SIZE as u64;
/// Page tables that have the window, and the same at 0 and where kernels are.
pub(super) const ROOT: u64 = OWN + 0x1000;
const WINDOW_TABLE: u64 = OWN + 0x2000;
const DIRECTORY: u64 = OWN + 0x3000;
const GDT: u64 = OWN + 0x4000;
const IDT: u64 = OWN + 0x5000;
const TSS: u64 = OWN + 0x6000;
const STACK: u64 = OWN + 0x8000;
/// 64 KiB for code, and 32 for what code keeps.
const CODE: u64 = OWN + 0x1_0000;
pub(super) const KEPT: u64 = OWN + 0x2_0000;
const OWN_SIZE: usize = 0x3_0000;
const KERNEL_CS: u64 = 0x10;
const USER_CS: i32 = 0x33;
const USER_SS: i32 = 0x2b;
const TSS_SELECTOR: u32 = 0x38;
/// The vector of UD2.
const CALL: u64 = 6;
/// Present, writable, for both rings.
const TABLE: u64 = 7;
const LARGE: u64 = 0x87;

/// Where the window is in page tables that are to have it.
pub(super) const WINDOW_ENTRY: (usize, u64) = (1, WINDOW_TABLE | TABLE);

/// What runs, and where.
pub(super) struct Program {
    /// Page tables, which have the window.
    pub(super) root: u64,
    pub(super) rip: u64,
    pub(super) rsp: u64,
    pub(super) rbp: u64,
    /// What UD2 leads to; it goes back by [`resume`].
    pub(super) kernel: u64,
}

/// Back to the program, behind its UD2.
pub(super) fn resume(a: &mut CodeAssembler) -> Written {
    a.add(qword_ptr(rsp), 2)?;
    a.iretq()
}

/// Code at `address`.
pub(super) fn code(address: u64, write: impl FnOnce(&mut CodeAssembler) -> Written) -> Vec<u8> {
    let mut a = CodeAssembler::new(64).expect("an assembler");
    write(&mut a).expect("instructions");
    a.assemble(address).expect("code")
}

/// Where code that `image` puts into the guest runs.
pub(super) const IN_WINDOW: u64 = WINDOW + CODE;
/// The same place, where kernels are.
pub(super) const IN_KERNEL: u64 = HIGH + CODE;

/// A kernel file with `data`, of which `copied` is copied to the same places from 0 on, in whole
/// pages; with `own`, code for [`IN_WINDOW`], and `kept`, for [`KEPT`].
pub(super) fn image(
    program: &Program,
    data: &[u8],
    copied: &[Range<usize>],
    (own, kept): (&[u8], &[u8]),
) -> NamedTempFile {
    let mut bytes = vec![0; DATA_SIZE + OWN_SIZE];
    bytes[..data.len()].copy_from_slice(data);
    let mut put = |address: u64, some: &[u8]| {
        let at = usize::try_from(address - DATA).expect("a place");
        bytes[at..at + some.len()].copy_from_slice(some);
    };
    put(ROOT, &(WINDOW_TABLE | TABLE).to_le_bytes());
    put(ROOT + 8, &(WINDOW_TABLE | TABLE).to_le_bytes());
    put(ROOT + 8 * 511, &(WINDOW_TABLE | TABLE).to_le_bytes());
    put(WINDOW_TABLE, &(DIRECTORY | TABLE).to_le_bytes());
    for page in 0..512u64 {
        put(DIRECTORY + 8 * page, &(page << 21 | LARGE).to_le_bytes());
    }
    let tss = WINDOW + TSS;
    let descriptor = [
        0x67 | (tss & 0xff_ffff) << 16 | 0x89 << 40 | (tss >> 24 & 0xff) << 56,
        tss >> 32,
    ];
    for (selector, word) in [
        (KERNEL_CS, 0x00af_9b00_0000_ffff),
        (0x18, 0x00cf_9300_0000_ffff),
        (0x28, 0x00cf_f300_0000_ffff),
        (0x30, 0x00af_fb00_0000_ffff),
        (u64::from(TSS_SELECTOR), descriptor[0]),
        (u64::from(TSS_SELECTOR) + 8, descriptor[1]),
    ] {
        put(GDT + selector, &u64::to_le_bytes(word));
    }
    put(TSS + 4, &(WINDOW + STACK).to_le_bytes());
    put(CODE, own);
    put(KEPT, kept);
    // Its code, and what exceptions and calls lead to.
    let start = code(OWN, |a| begin(a, program, copied));
    assert!(start.len() < 0xc00, "{}", start.len());
    put(OWN, &start);
    let failed = OWN + 0xc00;
    for vector in 0..32u64 {
        let handler = failed + 16 * vector;
        let status = u32::try_from(vector).expect("a vector") + 64;
        put(handler, &code(WINDOW + handler, |a| exit(a, status)));
        put(IDT + 16 * vector, &gate(WINDOW + handler));
    }
    put(IDT + 16 * CALL, &gate(program.kernel));
    put(GDT + 0x100, &[0xff, 0]);
    put(GDT + 0x102, &(WINDOW + GDT).to_le_bytes());
    put(GDT + 0x110, &[0xff, 0xf]);
    put(GDT + 0x112, &(WINDOW + IDT).to_le_bytes());
    let image = ElfImage {
        is_64: true,
        address: u32::try_from(DATA).expect("a place"),
        entry: u32::try_from(OWN).expect("a place"),
        bytes: &bytes,
        size: 0,
        note: &[],
    };
    let mut file = NamedTempFile::new().expect("a file");
    file.write_all(&image.file().expect("an image"))
        .expect("a file");
    file
}

/// An interrupt gate.
fn gate(handler: u64) -> [u8; 16] {
    let low = (handler & 0xffff) | KERNEL_CS << 16 | 0x8e00 << 32 | (handler >> 16 & 0xffff) << 48;
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&low.to_le_bytes());
    bytes[8..].copy_from_slice(&(handler >> 32).to_le_bytes());
    bytes
}

/// From the entry to the program.
fn begin(a: &mut CodeAssembler, program: &Program, copied: &[Range<usize>]) -> Written {
    let mut there = a.create_label();
    a.mov(rax, ROOT)?;
    a.mov(iced_x86::code_asm::cr3, rax)?;
    a.lea(rax, qword_ptr(there))?;
    a.mov(rcx, WINDOW)?;
    a.add(rax, rcx)?;
    a.jmp(rax)?;
    a.set_label(&mut there)?;
    a.mov(rsp, WINDOW + STACK)?;
    a.mov(rax, WINDOW + GDT + 0x100)?;
    a.lgdt(qword_ptr(rax))?;
    a.lidt(qword_ptr(rax + 0x10))?;
    a.mov(eax, TSS_SELECTOR)?;
    a.ltr(ax)?;
    for range in copied {
        a.mov(rsi, WINDOW + DATA + range.start as u64)?;
        a.mov(rdi, WINDOW + range.start as u64)?;
        a.mov(rcx, (range.end - range.start) as u64 / 8)?;
        a.rep().movsq()?;
    }
    a.mov(rax, program.root)?;
    a.mov(iced_x86::code_asm::cr3, rax)?;
    a.mov(rbp, program.rbp)?;
    a.push(USER_SS)?;
    a.mov(rax, program.rsp)?;
    a.push(rax)?;
    a.push(2)?;
    a.push(USER_CS)?;
    a.mov(rax, program.rip)?;
    a.push(rax)?;
    a.xor(r14, r14)?;
    a.iretq()
}

/// A VM that counts by the clock.
pub(super) struct Guest {
    child: Child,
    folder: TempDir,
    _kernel: NamedTempFile,
}

impl Guest {
    pub(super) fn boot(kernel: NamedTempFile, flags: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let told = std::fs::File::create(folder.path().join("told")).expect("a file");
        let child = Command::new(umpire::path())
            .current_dir(folder.path())
            .args(["run", "--memory", "32", "--timeout", "120"])
            .args(["--counters", "clock", "--control", "vm.sock", "--kernel"])
            .arg(kernel.path())
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(told)
            .spawn()
            .expect("umpire can be started");
        let vm = Self {
            child,
            folder,
            _kernel: kernel,
        };
        let began = Instant::now();
        let socket = vm.path("vm.sock").display().to_string();
        while !vm.run(&["ls", &socket]).status.success() {
            assert!(began.elapsed() < PATIENCE, "the VM serves its socket");
            std::thread::sleep(Duration::from_millis(20));
        }
        vm
    }

    pub(super) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(umpire::path());
        command.args(words).current_dir(self.folder.path());
        command.env("UMPIRE_PERFMON", self.folder.path().join("vm.sock"));
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        command.stderr(Stdio::piped());
        command
    }

    pub(super) fn run(&self, words: &[&str]) -> Output {
        self.command(words).output().expect("umpire can be started")
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A line of the process's status, in KiB.
    pub(super) fn kib(&self, name: &str) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).expect("a process");
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let number = line.and_then(|line| line.split_whitespace().next());
        number.expect(name).parse().expect("a number")
    }
}

impl Guest {
    /// Ends it as `kill` does; its status.
    pub(super) fn stop(&mut self) -> Option<i32> {
        signal(&self.child, "-TERM");
        self.child.wait().expect("an end").code()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let ended = self.child.try_wait();
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let told = std::fs::read_to_string(self.path("told"));
            println!("the VM: {ended:?}, {told:?}");
        }
    }
}

/// It went well, and has said so in a few lines without anything for a terminal.
pub(super) fn printed(what: &str, output: &Output) -> String {
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{what}: {:?}: {told}",
        output.status
    );
    assert!(told.lines().count() <= 40, "{what}: {told}");
    let text = String::from_utf8(output.stdout.clone()).expect("text");
    for text in [&text, &*told] {
        let strange = |char: char| char.is_control() && !"\t\n".contains(char);
        assert!(!text.contains(strange), "{what}: {text:?}");
    }
    text
}
