//! Tests of what a report says of programs that were stripped.

use std::fs;

use perfmon_abi::compact::CallChain;

use crate::profile::program_tests::{Place, Program, START, mapped, thread, user};

/// An ELF file without its table of symbols.
fn stripped(mut elf: Vec<u8>) -> Vec<u8> {
    let word = |elf: &[u8], at: usize, bytes: usize| {
        let mut word = [0; 8];
        word[..bytes].copy_from_slice(&elf[at..at + bytes]);
        usize::try_from(u64::from_le_bytes(word)).unwrap()
    };
    let (sections, size, count) = (
        word(&elf, 0x28, 8),
        word(&elf, 0x3a, 2),
        word(&elf, 0x3c, 2),
    );
    for section in (0..count).map(|number| sections + number * size) {
        // SHT_SYMTAB becomes SHT_NULL.
        if word(&elf, section + 4, 4) == 2 {
            elf[section + 4] = 0;
        }
    }
    elf
}

/// Samples in these files, so many each, all of them this program without its symbols.
fn place(files: &[(&str, usize)]) -> Place {
    let program = Program::own();
    let mut records = vec![thread(1, 40, 40, "main")];
    for (number, (name, samples)) in (11..).zip(files) {
        records.push(mapped(number, name, ""));
        let sample = user(START + program.main, 1, number, CallChain::default());
        records.extend(vec![sample; *samples]);
    }
    let place = Place::new(&records);
    let bytes = stripped(fs::read(&program.file).unwrap());
    for (name, _) in files {
        let path = place.path("root").join(name.trim_start_matches('/'));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, &bytes).unwrap();
    }
    place
}

fn hints_of(place: &Place) -> Vec<String> {
    let (_, notes) = place.printed(&["--no-children"]);
    let root = place.path("root").display().to_string();
    notes
        .lines()
        .map(|line| line.replace(&root, "ROOT"))
        .collect()
}

#[test]
fn the_package_or_the_build_id_is_named() {
    let build_id = Program::own().build_id;
    let Some((first, rest)) = build_id.split_at_checked(2) else {
        eprintln!("not tested: this program has no build id");
        return;
    };
    let file = format!("usr/lib/debug/.build-id/{first}/{rest}.debug");
    let place = place(&[
        ("/usr/bin/prog", 2),
        ("/usr/lib/x/libc.so.6", 3),
        ("/opt/own", 1),
    ]);
    let unknown = |samples, name| {
        format!(
            "umpire: {samples} in no symbol of {name}, which was stripped: 'debuginfod-find \
             debuginfo {build_id}' finds its debug file, which belongs below ROOT as {file}"
        )
    };
    let expected = [
        unknown("3 samples are", "/usr/lib/x/libc.so.6"),
        unknown("2 samples are", "/usr/bin/prog"),
        unknown("1 sample is", "/opt/own"),
    ];
    assert_eq!(hints_of(&place), expected);
    let lists = place.path("root/var/lib/dpkg/info");
    fs::create_dir_all(&lists).unwrap();
    for (name, text) in [
        ("other.list", "/.\n/usr/bin/prog2\n/usr/bin\n"),
        ("shown.list", "/.\n/usr\n/usr/bin\n/usr/bin/prog\n"),
        ("libc6:amd64.list", "/lib/x/libc.so.6\n"),
        ("own.md5sums", "/opt/own\n"),
        ("else.list", "/usr/opt/own\n"),
    ] {
        fs::write(lists.join(name), text).unwrap();
    }
    let package = |samples, name, package| {
        format!(
            "umpire: {samples} samples are in no symbol of {name}, which was stripped: the \
             package {package} has its symbols: install it in the guest, or put its file {file} \
             below ROOT"
        )
    };
    let expected = [
        package(3, "/usr/lib/x/libc.so.6", "libc6-dbg"),
        package(2, "/usr/bin/prog", "shown-dbgsym"),
        unknown("1 sample is", "/opt/own"),
    ];
    assert_eq!(hints_of(&place), expected);
    // With its symbols there, nothing is left to say.
    let debug = place.path("root").join(&file);
    fs::create_dir_all(debug.parent().unwrap()).unwrap();
    fs::copy(Program::own().file, debug).unwrap();
    assert_eq!(hints_of(&place), [""; 0]);
}

#[test]
fn three_files_are_enough() {
    let files = ["/a", "/b", "/c", "/d"].map(|name| (name, 1));
    let hints = hints_of(&place(&files));
    assert_eq!(hints.len(), 3, "{hints:?}");
}

#[test]
fn names_of_packages_are_plain() {
    let place = place(&[("/usr/bin/prog", 1)]);
    let lists = place.path("root/var/lib/dpkg/info");
    fs::create_dir_all(&lists).unwrap();
    fs::write(lists.join("e\u{1b}[31m.list"), "/usr/bin/prog\n").unwrap();
    let hints = hints_of(&place);
    assert!(
        !hints[0].contains("dbgsym") && !hints[0].contains('\u{1b}'),
        "{hints:?}"
    );
}
