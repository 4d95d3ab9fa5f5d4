//! Names for addresses of a guest's kernel.
//!
//! Three files have them: the ELF file of the kernel (`vmlinux`), the
//! `System.map` beside it, and the text of the guest's own `/proc/kallsyms`.
//! The first two tell where the kernel was linked; a kernel that moved itself
//! (KASLR) runs elsewhere, by an offset that the caller gives. The third tells
//! where the kernel really is, its modules included.

mod elf;
mod load;
mod table;
mod text;

pub use elf::ElfError;
pub use load::{SymbolFileError, load};
pub use table::{Found, RawSymbol, SymbolIndex, SymbolTable};
pub use text::{TextError, parse};

#[cfg(test)]
mod tests;
