//! A kernel's code: a few lines of assembler around COM1 and the test exit.

use std::path::PathBuf;

use anyhow::Result;
use iced_x86::code_asm::{
    AsmRegister64, CodeAssembler, CodeLabel, al, byte_ptr, dx, eax, ebp, ecx, edi, edx, esi,
    qword_ptr, rdi,
};
use tempfile::NamedTempFile;

use vmm::micro::ElfImage;

use crate::micro::Written;

/// Where a kernel is loaded.
pub const BASE: u32 = 0x10_0000;
/// Code begins behind the Multiboot header.
const CODE: u32 = BASE + 0x40;
/// Bytes in memory: code, and what the kernel builds behind it.
const SIZE: u32 = 0x1_0000;
const COM1: u32 = 0x3f8;
const TEST_EXIT: u32 = 0xf4;

/// How a kernel wants to be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// Multiboot v1: ELF32, protected mode.
    Multiboot,
    /// PVH: ELF64 with Xen's note, protected mode.
    Pvh,
    /// Linux's 64-bit entry: ELF64, long mode.
    Linux64,
}

impl Protocol {
    fn bitness(self) -> u32 {
        if self == Self::Linux64 { 64 } else { 32 }
    }
}

/// A kernel file, gone when this is dropped.
#[derive(Debug)]
pub struct Kernel {
    file: NamedTempFile,
}

/// Routines that a kernel may call; EAX, ECX, EDX and ESI are theirs.
#[derive(Debug, Clone, Copy)]
pub struct Routines {
    /// Prints EAX as eight hexadecimal digits.
    pub hex: CodeLabel,
    /// Prints the string at ESI, up to its NUL.
    pub text: CodeLabel,
}

impl Kernel {
    /// A kernel whose first instruction is the first of `body`.
    ///
    /// # Errors
    /// An operand that no instruction has, or no temporary file.
    pub fn new(
        protocol: Protocol,
        body: impl FnOnce(&mut CodeAssembler, &Routines) -> Written,
    ) -> Result<Self> {
        let file = NamedTempFile::new()?;
        std::fs::write(file.path(), Self::image(protocol, body)?)?;
        Ok(Self { file })
    }

    /// The bytes of such a kernel's file.
    ///
    /// # Errors
    /// An operand that no instruction has.
    pub fn image(
        protocol: Protocol,
        body: impl FnOnce(&mut CodeAssembler, &Routines) -> Written,
    ) -> Result<Vec<u8>> {
        let mut a = CodeAssembler::new(protocol.bitness())?;
        let mut routines = Routines {
            hex: a.create_label(),
            text: a.create_label(),
        };
        body(&mut a, &routines)?;
        a.set_label(&mut routines.hex)?;
        hex(&mut a)?;
        a.set_label(&mut routines.text)?;
        text(&mut a)?;
        let mut bytes = match protocol {
            Protocol::Multiboot => multiboot_header(),
            Protocol::Pvh | Protocol::Linux64 => Vec::new(),
        };
        bytes.resize((CODE - BASE) as usize, 0);
        bytes.extend(a.assemble(CODE.into())?);
        let image = ElfImage {
            is_64: protocol != Protocol::Multiboot,
            address: BASE,
            entry: CODE,
            bytes: &bytes,
            size: SIZE,
            note: &match protocol {
                Protocol::Pvh => pvh_note(),
                _ => Vec::new(),
            },
        };
        Ok(image.file()?)
    }

    /// Where its file is.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.file.path().to_owned()
    }
}

/// Flags: modules on page boundaries, memory information (Multiboot
/// Specification 0.6.96, 3.1.1).
fn multiboot_header() -> Vec<u8> {
    const MAGIC: u32 = 0x1bad_b002;
    const FLAGS: u32 = 3;
    let sum = 0u32.wrapping_sub(MAGIC).wrapping_sub(FLAGS);
    [MAGIC, FLAGS, sum]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect()
}

/// `XEN_ELFNOTE_PHYS32_ENTRY`.
fn pvh_note() -> Vec<u8> {
    let words = [4, 4, 18, u32::from_le_bytes(*b"Xen\0"), CODE];
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn hex(a: &mut CodeAssembler) -> Written {
    let (mut again, mut decimal) = (a.create_label(), a.create_label());
    a.mov(esi, eax)?;
    a.mov(ecx, 8)?;
    a.mov(edx, COM1)?;
    a.set_label(&mut again)?;
    a.rol(esi, 4)?;
    a.mov(eax, esi)?;
    a.and(eax, 0xf)?;
    a.cmp(eax, 10)?;
    a.jb(decimal)?;
    a.add(eax, i32::from(b'a' - b'0' - 10))?;
    a.set_label(&mut decimal)?;
    a.add(eax, i32::from(b'0'))?;
    a.out(dx, al)?;
    a.dec(ecx)?;
    a.jne(again)?;
    a.ret()
}

fn text(a: &mut CodeAssembler) -> Written {
    let (mut again, mut end) = (a.create_label(), a.create_label());
    a.mov(edx, COM1)?;
    a.set_label(&mut again)?;
    a.mov(al, byte_ptr(esi))?;
    a.test(al, al)?;
    a.je(end)?;
    a.out(dx, al)?;
    a.inc(esi)?;
    a.jmp(again)?;
    a.set_label(&mut end)?;
    a.ret()
}

/// Prints a fixed text; changes EAX and EDX.
///
/// # Errors
/// Never in practice; the assembler's signature.
pub fn print(a: &mut CodeAssembler, text: &str) -> Written {
    a.mov(edx, COM1)?;
    text.bytes().try_for_each(|byte| {
        a.mov(eax, u32::from(byte))?;
        a.out(dx, al)
    })
}

/// Counts in EAX in how many places of memory, from `start` up to 640 KiB, 8 bytes are
/// those of `value`; changes EBP and EDI.
///
/// # Errors
/// Never in practice; the assembler's signature.
pub fn count_low(a: &mut CodeAssembler, start: u32, value: AsmRegister64) -> Written {
    let (mut again, mut other) = (a.create_label(), a.create_label());
    a.mov(edi, start)?;
    a.mov(ebp, 0)?;
    a.set_label(&mut again)?;
    a.cmp(qword_ptr(rdi), value)?;
    a.jne(other)?;
    a.inc(ebp)?;
    a.set_label(&mut other)?;
    a.add(edi, 8)?;
    a.cmp(edi, 0xa_0000)?;
    a.jb(again)?;
    a.mov(eax, ebp)
}

/// Writes `value` to the byte port `port`; changes EAX and EDX.
///
/// # Errors
/// Never in practice; the assembler's signature.
pub fn put(a: &mut CodeAssembler, port: u16, value: u8) -> Written {
    a.mov(eax, u32::from(value))?;
    a.mov(edx, u32::from(port))?;
    a.out(dx, al)
}

/// Ends the run with process exit status `value` × 2 + 1.
///
/// # Errors
/// Never in practice; the assembler's signature.
pub fn exit(a: &mut CodeAssembler, value: u32) -> Written {
    a.mov(eax, value)?;
    a.mov(edx, TEST_EXIT)?;
    a.out(dx, eax)?;
    a.hlt()
}

/// Goes on for ever.
///
/// # Errors
/// Never in practice; the assembler's signature.
pub fn spin_forever(a: &mut CodeAssembler) -> Written {
    let mut here = a.create_label();
    a.set_label(&mut here)?;
    a.pause()?;
    a.jmp(here)
}

/// Halts for ever.
///
/// # Errors
/// Never in practice; the assembler's signature.
pub fn halt_forever(a: &mut CodeAssembler) -> Written {
    let mut here = a.create_label();
    a.set_label(&mut here)?;
    a.hlt()?;
    a.jmp(here)
}
