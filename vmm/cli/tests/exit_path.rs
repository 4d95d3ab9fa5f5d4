//! The code of an exit lies where `exit_path.ld` puts it.

use std::ffi::OsString;
use std::fs;

use object::read::{Object, ObjectSection, ObjectSymbol};

const SCRIPT: &str = include_str!("../exit_path.ld");

/// The names of functions in the linker's script, with `*` for any text.
fn patterns() -> Vec<&'static str> {
    let lines = SCRIPT.lines().map(str::trim);
    lines
        .filter_map(|line| line.strip_prefix("*(.text.")?.strip_suffix(')'))
        .collect()
}

/// Whether `name` is what `pattern` says.
fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else {
        return false;
    };
    for part in parts {
        let Some(at) = rest.find(part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    pattern.ends_with('*') || rest.is_empty()
}

/// The program as it is built for tests, for an optimised one has no function that is inlined
/// everywhere. `test.sh`, which puts another in its place, says where it is.
fn program() -> Vec<u8> {
    let path = std::env::var_os("UMPIRE_NOT_OPTIMISED");
    let path = path.unwrap_or_else(|| OsString::from(env!("CARGO_BIN_EXE_umpire")));
    fs::read(path).unwrap()
}

#[test]
fn a_pattern_takes_what_it_says() {
    assert!(matches("_ZN*6VcpuFd3run17h*", "_ZN1a6VcpuFd3run17habc"));
    assert!(matches("_ZN3vmm3run17h*", "_ZN3vmm3run17habc"));
    assert!(!matches("_ZN3vmm3run17h*", "_ZN3vmm4run217habc"));
    assert!(!matches("_ZN*3vmm*4gone17h*", "_ZN3vmm3run17habc"));
    assert!(!matches("_ZN3vmm", "_ZN3vmm3run17habc"));
}

/// What has moved or has another name would lie anywhere, and nobody would see it.
#[test]
fn every_pattern_is_a_function() {
    let program = program();
    let program = object::File::parse(&*program).unwrap();
    let names: Vec<&str> = program
        .symbols()
        .filter_map(|one| one.name().ok())
        .collect();
    let patterns = patterns();
    assert!(patterns.len() > 20, "only {} patterns", patterns.len());
    let gone = |pattern: &&&str| !names.iter().any(|name| matches(pattern, name));
    let gone: Vec<_> = patterns.iter().filter(gone).collect();
    assert!(gone.is_empty(), "no function is called {gone:#?}");
}

#[test]
fn entry_and_exit_lie_together() {
    let program = program();
    let program = object::File::parse(&*program).unwrap();
    let section = program.section_by_name(".text.exit_path").unwrap();
    for part in ["KvmPmu5enter", "KvmPmu9take_exit"] {
        let mut symbols = program.symbols();
        let found = symbols.find(|symbol| symbol.name().is_ok_and(|name| name.contains(part)));
        let found = found.and_then(|symbol| symbol.section_index());
        assert_eq!(found, Some(section.index()), "{part}");
    }
    // A pattern that takes in more than was meant spreads what belongs together.
    assert!(section.size() < 1 << 18, "{} bytes", section.size());
}
