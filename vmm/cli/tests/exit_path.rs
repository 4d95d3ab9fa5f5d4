//! The code of an exit lies where `exit_path.ld` puts it.

use std::fs;

use object::read::{Object, ObjectSection, ObjectSymbol};

#[test]
fn entry_and_exit_lie_together() {
    let program = fs::read(env!("CARGO_BIN_EXE_umpire")).unwrap();
    let program = object::File::parse(&*program).unwrap();
    let section = program.section_by_name(".text.exit_path").unwrap();
    for part in ["KvmPmu12before_entry", "KvmPmu9take_exit"] {
        let mut symbols = program.symbols();
        let found = symbols.find(|symbol| symbol.name().is_ok_and(|name| name.contains(part)));
        let found = found.and_then(|symbol| symbol.section_index());
        assert_eq!(found, Some(section.index()), "{part}");
    }
    // A pattern that takes in more than was meant spreads what belongs together.
    assert!(section.size() < 1 << 18, "{} bytes", section.size());
}
