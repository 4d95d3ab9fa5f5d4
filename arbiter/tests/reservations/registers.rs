//! Every index of the block, against the table of MSRs in `docs/reference/pcr.md`.

use arbiter::{CounterId, IbsKind, Layer, PcrRegister, abi};

use super::play::{Op, Outcome, Script, World};

const PAGE: &str = include_str!("../../../docs/reference/pcr.md");

/// A row of the page's table.
#[derive(Debug)]
struct Row {
    first: u32,
    per_counter: bool,
    length: u32,
    name: String,
    readable: bool,
    writable: bool,
    cookie_to_read: bool,
    cookie_to_write: bool,
}

/// The table of MSRs. A row without an offset goes on about the one above.
fn rows() -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::new();
    let lines = PAGE
        .lines()
        .skip_while(|line| !line.starts_with("| offset |"))
        .skip(2)
        .take_while(|line| line.starts_with('|'));
    for line in lines {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, offset, name, access, cookie, ..] = cells[..] else {
            panic!("a row of five cells: {line}");
        };
        if !offset.is_empty() {
            let digits = offset.trim_start_matches("0x");
            let (digits, per_counter, length) = match digits.split_once(' ') {
                // Registers of samplers are not by position.
                Some((digits, "+ k")) => (digits, false, 0x10),
                Some((digits, _)) => (digits, true, 0x40),
                None => (digits, false, 1),
            };
            rows.push(Row {
                first: u32::from_str_radix(digits, 16).expect("an offset"),
                per_counter,
                length,
                name: name.trim_matches('`').to_owned(),
                readable: false,
                writable: false,
                cookie_to_read: false,
                cookie_to_write: false,
            });
        }
        let row = rows.last_mut().expect("the first row has an offset");
        let takes = cookie != "none";
        if access.contains('R') {
            row.readable = true;
            row.cookie_to_read = takes;
        }
        if access.contains('W') {
            row.writable = true;
            row.cookie_to_write = takes;
        }
    }
    rows
}

/// The page's name of a register, from the one in the code.
fn name(register: PcrRegister) -> (String, Option<CounterId>) {
    let (counter, debug) = match register {
        PcrRegister::ManagementKey(counter)
        | PcrRegister::AccessKey(counter)
        | PcrRegister::Control(counter)
        | PcrRegister::DropValue(counter)
        | PcrRegister::Counter(counter)
        | PcrRegister::Select(counter)
        | PcrRegister::Overflow(counter)
        | PcrRegister::Status(counter)
        | PcrRegister::LegacyMap(counter) => (Some(counter), format!("{register:?}")),
        other => (None, format!("{other:?}")),
    };
    let camel = debug.split('(').next().unwrap_or_default();
    let mut name = String::new();
    for letter in camel.chars() {
        if letter.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_uppercase());
    }
    (name, counter)
}

fn check(index: u32, expected: Option<(&Row, Option<CounterId>)>) {
    let register = PcrRegister::decode(index);
    let expected = expected.map(|(row, counter)| (row, (row.name.clone(), counter)));
    let found = register.map(name);
    assert_eq!(
        found,
        expected.as_ref().map(|(_, named)| named.clone()),
        "{index:#x}"
    );
    let (Some(register), Some((row, _))) = (register, expected) else {
        return;
    };
    assert_eq!(register.takes_cookie(false), row.cookie_to_read, "{row:?}");
    assert_eq!(register.takes_cookie(true), row.cookie_to_write, "{row:?}");
}

#[test]
fn every_index_of_the_block_is_what_the_page_says() {
    let rows = rows();
    assert_eq!(rows.len(), 19, "{rows:#?}");
    let base = 0x554d_6000;
    for offset in 0..0x1000 {
        let index = base + offset;
        assert!(PcrRegister::contains(index), "{index:#x}");
        let row = rows
            .iter()
            .find(|row| (row.first..row.first + row.length).contains(&offset));
        let expected = row.map(|row| {
            let n = u8::try_from(offset - row.first).expect("at most 63");
            let counter = match n {
                0..32 => CounterId::Programmable(n),
                32..62 => CounterId::Fixed(n - 32),
                62 => CounterId::Ibs(IbsKind::Fetch),
                _ => CounterId::Ibs(IbsKind::Op),
            };
            (row, row.per_counter.then_some(counter))
        });
        check(index, expected);
    }
    for index in [0, 1, base - 1, base + 0x1000, base + 0x1001, u32::MAX] {
        assert!(!PcrRegister::contains(index), "{index:#x}");
        check(index, None);
    }
}

#[test]
fn the_generated_constants_are_the_offsets_of_the_page() {
    let offsets = [
        ("MANAGEMENT_KEY", abi::MSR_MANAGEMENT_KEY),
        ("ACCESS_KEY", abi::MSR_ACCESS_KEY),
        ("CONTROL", abi::MSR_CONTROL),
        ("DROP_VALUE", abi::MSR_DROP_VALUE),
        ("COUNTER", abi::MSR_COUNTER),
        ("SELECT", abi::MSR_SELECT),
        ("OVERFLOW", abi::MSR_OVERFLOW),
        ("STATUS", abi::MSR_STATUS),
        ("LEGACY_MAP", abi::MSR_LEGACY_MAP),
        ("RANDOM", abi::MSR_RANDOM),
        ("PHASE", abi::MSR_PHASE),
        ("NOTICE_VECTOR", abi::MSR_NOTICE_VECTOR),
        ("REQUEST", abi::MSR_REQUEST),
        ("ANSWER", abi::MSR_ANSWER),
        ("GRANTED", abi::MSR_GRANTED),
        ("NOTICE", abi::MSR_NOTICE),
        ("REPLY", abi::MSR_REPLY),
        ("REFUSAL", abi::MSR_REFUSAL),
        ("IBS", abi::MSR_IBS),
    ];
    let page: Vec<_> = rows()
        .into_iter()
        .map(|row| (row.name, row.first))
        .collect();
    let constants = offsets.map(|(name, offset)| (name.to_owned(), offset));
    assert_eq!(page, constants);
}

/// Aliases belong to the PMU; the unit answers #GP to them and keeps quiet.
#[test]
fn a_register_refuses_the_wrong_direction_and_changes_nothing() {
    for row in rows() {
        let is_alias = ["COUNTER", "SELECT", "OVERFLOW", "IBS"].contains(&row.name.as_str());
        let index = abi::MSR_BASE + row.first;
        let setup = Script::new(&[], Default::default()).setup();
        let mut world = World::new(&setup);
        let (layer, presented) = (Layer::Firmware, 0);
        if is_alias || !row.readable {
            let read = Op::Read {
                index,
                layer,
                presented,
            };
            let step = world.step(&read);
            assert_eq!(step.outcome, Outcome::Fault, "{row:?}");
            assert_eq!(step.records, [], "{row:?}");
        }
        if is_alias || !row.writable {
            for value in [0, 1, u64::MAX] {
                let write = Op::Write {
                    index,
                    value,
                    layer,
                    presented,
                };
                let step = world.step(&write);
                assert_eq!(step.outcome, Outcome::Fault, "{row:?}");
                assert_eq!(step.records, [], "{row:?}");
            }
        }
        assert!(world.unit.bank().held().is_empty());
    }
}

#[test]
fn rdpmc_with_a_cookie_has_sixty_four_names() {
    for n in 0..64 {
        let counter = PcrRegister::rdpmc(0x554d_0000 + u32::from(n));
        assert_eq!(counter.and_then(CounterId::position), Some(n));
    }
    for ecx in [
        0,
        1,
        0x4000_0000,
        0x554c_ffff,
        0x554d_0040,
        0x554d_0100,
        0x554d_6000,
        u32::MAX,
    ] {
        assert_eq!(PcrRegister::rdpmc(ecx), None, "{ecx:#x}");
    }
}
