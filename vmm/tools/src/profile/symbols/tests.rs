//! Tests of symbols.

use std::io::Write;

use proptest::prelude::*;

use super::*;

fn table(text: &str) -> SymbolTable {
    SymbolTable::new(parse(text.as_bytes()).unwrap(), 0)
}

/// `name+offset`, with the module.
fn shown(table: &SymbolTable, address: u64) -> String {
    match table.find(address) {
        None => "-".to_owned(),
        Some(found) => {
            let name = table.name(found.index);
            let module = table.module(found.index).map(|name| format!(" [{name}]"));
            format!("{name}+{:#x}{}", found.offset, module.unwrap_or_default())
        }
    }
}

#[test]
fn addresses_find_the_symbol_below() {
    let kallsyms = "\
0000000000000000 A fixed_percpu_data
ffffffff81000000 T _text
ffffffff81000000 T startup_64
ffffffff81000100 t local_function
ffffffff81000180 W weak_function
ffffffff81000180 t __alias
ffffffff81000200 T _etext
ffffffff81800000 D data
ffffffffc0000000 t first\t[one]
ffffffffc0000010 t second\t[one]
ffffffffc0010000 T third\t[two]
";
    let table = table(kallsyms);
    let check = |address: u64, expected: &str| assert_eq!(shown(&table, address), expected);
    check(0xffff_ffff_80ff_ffff, "-");
    check(0xffff_ffff_8100_0000, "startup_64+0x0");
    check(0xffff_ffff_8100_00ff, "startup_64+0xff");
    check(0xffff_ffff_8100_0100, "local_function+0x0");
    check(0xffff_ffff_8100_0183, "weak_function+0x3");
    // Data ends code, and is none.
    check(0xffff_ffff_8180_0000, "-");
    check(0xffff_ffff_c000_0011, "second+0x1 [one]");
    // Nobody knows what is between modules.
    check(0xffff_ffff_c000_1000, "-");
    check(0xffff_ffff_c001_0abc, "third+0xabc [two]");
    check(0xffff_ffff_c001_1000, "-");
    check(0, "-");
    check(u64::MAX, "-");
}

#[test]
fn sizes_leave_gaps_and_nest() {
    let raw = |address, size, name: &str| RawSymbol {
        address,
        size,
        name: name.to_owned(),
        module: None,
        rank: 0,
        code: true,
    };
    let table = SymbolTable::new(
        vec![
            raw(0x300, 0x10, "last"),
            raw(0x100, 0x100, "outer"),
            raw(0x120, 0x10, "inner"),
        ],
        0x1_0000,
    );
    let check = |address: u64, expected: &str| assert_eq!(shown(&table, address), expected);
    check(0x1_011f, "outer+0x1f");
    check(0x1_0120, "inner+0x0");
    check(0x1_0130, "outer+0x30");
    check(0x1_0200, "-");
    check(0x1_030f, "last+0xf");
    check(0x1_0310, "-");
    check(0x120, "-");
}

#[test]
fn an_offset_may_be_negative() {
    let raw = parse(b"ffffffff81000000 T f\n").unwrap();
    let table = SymbolTable::new(raw, 0u64.wrapping_sub(0xffff_ffff_8100_0000));
    assert_eq!(shown(&table, 0x10), "f+0x10");
}

#[test]
fn bad_texts_are_named() {
    fn check(text: &[u8], expected: &str) {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
    check(b"", "names no function");
    check(b"ffffffff81000000 D data\n", "names no function");
    check(
        b"0000000000000000 T _text\n0000000000000000 t f\n",
        "kptr_restrict",
    );
    check(b"ffffffff81000000 T f\nhello\n", "line 2: 'hello'");
    check(b"ffffffff81000000 T f g\n", "line 1");
    check(b"ffffffff81000000 TT f\n", "line 1");
    check(b"+fffffff81000000 T f\n", "line 1");
    check(b"fffffffffffffffff T f\n", "line 1");
    check(b"f T \x1b[2J\n", "line 1");
    check(
        b"ffffffffffffffff B The real System.map is in the linux-image-6.1-dbg package\n",
        "linux-image-VERSION-dbg",
    );
    check(b"\xff\xfe", "neither an ELF file nor text");
    check(b"a\0b", "neither an ELF file nor text");
}

/// Lines as they come through a serial console.
#[test]
fn carriage_returns_and_empty_lines_do_not_matter() {
    assert_eq!(shown(&table("f0 T f\r\n\r\n\n"), 0xf1), "f+0x1");
}

/// This very program is an ELF file with symbols.
#[test]
fn an_elf_file_tells_its_functions() {
    let path = std::env::current_exe().unwrap();
    let table = load(&path, 0x1000).unwrap();
    assert!(table.len() > 100, "{}", table.len());
    let symbols = elf::read(&*std::fs::read(&path).unwrap()).unwrap();
    let main = symbols.iter().find(|one| one.name == "main").unwrap();
    let found = table.find(main.address + 0x1001).unwrap();
    assert_eq!((table.name(found.index), found.offset), ("main", 1));
}

#[test]
fn bad_files_are_named() {
    fn check(bytes: &[u8], expected: &str) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let error = load(file.path(), 0).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(error.starts_with(&file.path().display().to_string()));
    }
    check(b"\x7fELF and nothing", "damaged ELF file");
    check(b"no symbols\n", "line 1: 'no symbols'");
    let error = load(std::path::Path::new("/nonexistent"), 0).unwrap_err();
    assert!(error.to_string().contains("cannot be read"), "{error}");
}

/// What `find` must say: of the symbols that cover an address, the one that
/// begins last.
fn slow(raw: &[RawSymbol], address: u64) -> Option<u64> {
    let covers = |one: &&RawSymbol| one.address <= address && address < one.address + one.size;
    raw.iter().filter(covers).map(|one| one.address).max()
}

proptest! {
    #[test]
    fn lookup_agrees_with_a_search(
        symbols in proptest::collection::btree_map(0u64..200, 1u64..60, 0..20),
    ) {
        let raw: Vec<RawSymbol> = symbols.into_iter().map(|(address, size)| RawSymbol {
            address, size, name: format!("s{address}"), module: None, rank: 0, code: true,
        }).collect();
        let table = SymbolTable::new(raw.clone(), 0);
        for address in 0..270 {
            let found = table.find(address).map(|found| address - found.offset);
            prop_assert_eq!(found, slow(&raw, address), "at {}", address);
        }
    }

    #[test]
    fn any_text_is_read_or_refused(text in "[0-9a-f]{0,18}[ \t][TtDA?][ \t]\\PC{0,9}(\n\\PC{0,20})?") {
        let _ = parse(text.as_bytes());
    }

    #[test]
    fn any_elf_is_read_or_refused(
        at in any::<prop::sample::Index>(), with in proptest::collection::vec(any::<u8>(), 1..9),
    ) {
        // A small but whole ELF file, damaged near its beginning or end.
        let mut bytes = tiny_elf();
        let at = at.index(bytes.len());
        for (byte, new) in bytes[at..].iter_mut().zip(with) {
            *byte = new;
        }
        let _ = elf::read(&*bytes);
    }
}

/// An ELF64 file with a section of code and two symbols.
fn tiny_elf() -> Vec<u8> {
    fn put(bytes: &mut Vec<u8>, numbers: &[(u64, usize)]) {
        for (number, size) in numbers {
            bytes.extend(&number.to_le_bytes()[..*size]);
        }
    }
    let section = |name, kind, flags, place: [u64; 3], link: u64, entry| {
        let [address, offset, size] = place;
        [
            (name, 4),
            (kind, 4),
            (flags, 8),
            (address, 8),
            (offset, 8),
            (size, 8),
            (link, 4),
            (1, 4),
            (1, 8),
            (entry, 8),
        ]
    };
    let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    let strings = b"\0entry\0label\0";
    // Header 64, symbols 3 * 24, strings, five sections of 64.
    let (symbols_at, strings_at) = (64, 64 + 72);
    let sections_at = strings_at + strings.len() as u64;
    put(
        &mut bytes,
        &[
            (2, 2),
            (62, 2),
            (1, 4),
            (0x1000, 8),
            (0, 8),
            (sections_at, 8),
            (0, 4),
            (64, 2),
            (0, 2),
            (0, 2),
            (64, 2),
            (4, 2),
            (3, 2),
        ],
    );
    put(&mut bytes, &[(0, 8), (0, 8), (0, 8)]);
    put(
        &mut bytes,
        &[(1, 4), (0x12, 1), (0, 1), (1, 2), (0x1000, 8), (0x20, 8)],
    );
    put(
        &mut bytes,
        &[(7, 4), (0x10, 1), (0, 1), (1, 2), (0x1020, 8), (0, 8)],
    );
    bytes.extend(strings);
    put(&mut bytes, &section(0, 0, 0, [0; 3], 0, 0));
    put(&mut bytes, &section(0, 1, 6, [0x1000, 0, 0x40], 0, 0));
    put(&mut bytes, &section(0, 2, 0, [0, symbols_at, 72], 3, 24));
    put(
        &mut bytes,
        &section(0, 3, 0, [0, strings_at, strings.len() as u64], 0, 0),
    );
    bytes
}

#[test]
fn labels_in_code_are_symbols() {
    let table = SymbolTable::new(elf::read(&*tiny_elf()).unwrap(), 0);
    assert_eq!(shown(&table, 0x1001), "entry+0x1");
    assert_eq!(shown(&table, 0x1025), "label+0x5");
    let mut stripped = tiny_elf();
    let at = stripped.len() - 128;
    stripped[at + 4] = 0;
    assert_eq!(elf::read(&*stripped), Err(ElfError::Stripped));
}

/// What addresses need of a table gives them the same names.
#[test]
fn a_part_has_the_names_of_the_whole() {
    let kallsyms = "\
ffffffff81000000 T first
ffffffff81000100 t second
ffffffff81003000 D data
ffffffffc0000000 t begins\t[one]
ffffffffc0000010 t long\t[one]
ffffffffc0010000 T third\t[two]
";
    let whole = table(kallsyms);
    let addresses = [
        0xffff_ffff_8100_0000,
        0xffff_ffff_8100_2fff,
        0xffff_ffff_8100_3000,
        0xffff_ffff_c000_0020,
        0xffff_ffff_c001_0000,
        0x40_0000,
    ];
    let text = whole.of_addresses(&addresses.into());
    assert_eq!(text.lines().count(), 8);
    let part = table(&text);
    for address in addresses {
        assert_eq!(
            shown(&part, address),
            shown(&whole, address),
            "{address:#x}"
        );
    }
    assert_eq!(shown(&part, 0xffff_ffff_8100_3000), "-");
    assert_eq!(whole.of_addresses(&[].into()), "");
}

#[test]
fn a_name_that_is_no_text_hides_no_other() {
    let text = b"ffffffff81000000 T first\nffffffff81000100 t B\xfcro\nffffffff81000200 T third\n";
    let table = SymbolTable::new(parse(text).unwrap(), 0);
    let shown = |address| shown(&table, address);
    assert_eq!(shown(0xffff_ffff_8100_0001), "first+0x1");
    assert_eq!(shown(0xffff_ffff_8100_0102), "B\u{fffd}ro+0x2");
    assert_eq!(shown(0xffff_ffff_8100_0203), "third+0x3");
    assert!(matches!(parse(b"\x7fELF\0\xff"), Err(TextError::NotText)));
}
