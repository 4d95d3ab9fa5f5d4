//! A small ELF file for tests: code, symbols, and nothing else.

/// Where the code is in the file.
pub(super) const OFFSET: u64 = 0x200;

/// An ELF file for x86-64 with `code` at `address`, and functions by name, address and size.
pub(super) fn elf(address: u64, code: &[u8], functions: &[(&str, u64, u64)]) -> Vec<u8> {
    const SECTIONS: &[u8] = b"\0.text\0.symtab\0.strtab\0";
    let mut names = vec![0];
    let mut symbols = vec![0; 24];
    for (name, at, size) in functions {
        symbols.extend(u32::try_from(names.len()).unwrap().to_le_bytes());
        // A global function in section 1.
        symbols.extend([0x12, 0, 1, 0]);
        symbols.extend(at.to_le_bytes());
        symbols.extend(size.to_le_bytes());
        names.extend(name.bytes().chain([0]));
    }
    let strings = names.len() as u64;
    names.extend(SECTIONS);
    let size = code.len() as u64;
    let symbols_at = OFFSET + size;
    let names_at = symbols_at + symbols.len() as u64;
    let sections_at = names_at + names.len() as u64;

    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    // An executable for x86-64.
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [address, 64, sections_at] {
        file.extend(word.to_le_bytes());
    }
    file.extend([0; 4]);
    for half in [64u16, 56, 1, 64, 4, 3] {
        file.extend(half.to_le_bytes());
    }
    // One segment to be loaded, readable and executable.
    file.extend([1, 0, 0, 0, 5, 0, 0, 0]);
    for word in [OFFSET, address, address, size, size, 1] {
        file.extend(word.to_le_bytes());
    }
    file.resize(usize::try_from(OFFSET).unwrap(), 0);
    file.extend(code);
    file.extend(&symbols);
    file.extend(&names);

    // name, type, flags, address, offset, size, link and info, alignment, entry size
    let mut section = |name: u32, kind: u32, words: [u64; 7]| {
        file.extend(name.to_le_bytes());
        file.extend(kind.to_le_bytes());
        words
            .iter()
            .for_each(|word| file.extend(word.to_le_bytes()));
    };
    let name = |at: u64| u32::try_from(strings + at).unwrap();
    section(0, 0, [0; 7]);
    section(name(1), 1, [6, address, OFFSET, size, 0, 1, 0]);
    let link = 3 | 1 << 32;
    let bytes = symbols.len() as u64;
    section(name(7), 2, [0, 0, symbols_at, bytes, link, 8, 24]);
    let bytes = names.len() as u64;
    section(name(15), 3, [0, 0, names_at, bytes, 0, 1, 0]);
    file
}
