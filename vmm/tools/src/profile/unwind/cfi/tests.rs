//! Tables that no compiler makes.

use super::*;

/// Rules for the caller that are behind so many bytes of the stack.
fn behind(bytes: u8) -> Vec<u8> {
    // DW_CFA_def_cfa: rsp and that; DW_CFA_offset: the return address is below.
    vec![0x0c, 7, bytes, 0x90, 1]
}

fn entry(id: u32, rest: &[u8]) -> Vec<u8> {
    let length = u32::try_from(4 + rest.len()).unwrap();
    [&length.to_le_bytes(), &id.to_le_bytes(), rest].concat()
}

/// A table of functions: where each is, how long, and what to do.
fn cfi(functions: &[(u64, u64, Vec<u8>)]) -> Cfi {
    // Version 1, no augmentation, factors 1 and -8, register 16 is the return address.
    let mut bytes = entry(u32::MAX, &[1, 0, 1, 0x78, 16]);
    for (start, length, rules) in functions {
        let place = [start.to_le_bytes(), length.to_le_bytes()].concat();
        bytes.extend(entry(0, &[&place, rules.as_slice()].concat()));
    }
    let table = CfiTable {
        is_eh: false,
        bases: BaseAddresses::default(),
        bytes,
    };
    let mut places = Vec::new();
    let end = Instant::now() + Duration::from_secs(60);
    find_places(&table.debug(), (0, &table), end, &mut places).unwrap();
    let mut cfi = Cfi {
        segments: Vec::new(),
        tables: vec![table],
        places,
        time: PATIENCE,
    };
    cfi.sort();
    cfi
}

const ROOM: Room = Room {
    bytes: 0,
    time: Duration::from_secs(20),
};

#[test]
fn the_longest_of_several_functions_counts() {
    let mut cfi = cfi(&[
        (0x100, 0x40, behind(16)),
        (0x100, 8, behind(24)),
        (0x120, 0, behind(32)),
        (0x200, 8, behind(40)),
    ]);
    let mut check = |address, expected: Option<i64>| {
        let mut room = ROOM;
        let row = cfi.row(address, &mut UnwindContext::new(), &mut room);
        let bytes = row.unwrap().map(|row| match row.cfa {
            CfaRule::RegisterAndOffset { offset, .. } => offset,
            CfaRule::Expression(_) => -1,
        });
        assert_eq!(bytes, expected, "{address:#x}");
    };
    check(0x104, Some(16));
    check(0x110, Some(16));
    // Something without a length is in front of it.
    check(0x130, Some(16));
    check(0x140, None);
    check(0x207, Some(40));
}

/// Each row of this one takes as long as the rules of an entry can take.
#[test]
fn a_file_that_takes_long_is_given_up() {
    let mut rules = behind(8);
    // DW_CFA_same_value of many registers, DW_CFA_remember_state, DW_CFA_restore_state.
    rules.extend((0..100).flat_map(|register| [8, register]));
    rules.extend([0x0a, 0x0b].repeat(15_000));
    let mut cfi = cfi(&[(0, 1 << 40, rules)]);
    let (mut room, mut context) = (ROOM, UnwindContext::new());
    let began = Instant::now();
    let end = (0..1 << 20).find_map(|at| cfi.row(at, &mut context, &mut room).err());
    assert!(matches!(end, Some(NoCfi::TooLong)));
    assert!(room.time < ROOM.time);
    assert!(began.elapsed() < Duration::from_secs(60));
    // What is left to all files counts, too.
    cfi.time = PATIENCE;
    room.time = Duration::from_nanos(1);
    assert!(cfi.row(1, &mut context, &mut room).is_err());
}
