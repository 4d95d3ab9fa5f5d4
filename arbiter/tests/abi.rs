//! What is generated from the table of the ABI is up to date, and the table is
//! sound.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use arbiter::abi::{Entry, Group, TABLE, Width};

const BEGIN: &str = "<!-- constants: begin -->\n";
const END: &str = "<!-- constants: end -->\n";

fn path(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(relative)
}

fn number(value: u64, width: Width) -> String {
    match width {
        Width::Bits32 if value >= 0x1_0000 => format!("{:#x}_{:04x}", value >> 16, value & 0xffff),
        _ if value < 0x40 => value.to_string(),
        _ if value < 0x1_0000 => format!("{value:#x}"),
        _ => {
            let digits = format!("{value:x}");
            let groups = digits.as_bytes().rchunks(4).rev();
            let groups: Vec<_> = groups
                .map(|group| std::str::from_utf8(group).unwrap())
                .collect();
            format!("0x{}", groups.join("_"))
        }
    }
}

fn rust() -> String {
    let mut text = String::from(
        "//! Constants of the reservation ABI. Generated from `table.rs`: do not edit.\n//!\n\
         //! This file needs nothing but `core` and may be taken along by guest software.\n",
    );
    for group in TABLE {
        let ty = match group.width {
            Width::Bits32 => "u32",
            Width::Bits64 => "u64",
        };
        writeln!(text, "\n// {}.\n", group.title).unwrap();
        for Entry {
            name,
            value,
            meaning,
        } in group.entries
        {
            let value = number(*value, group.width);
            writeln!(
                text,
                "/// {}.\npub const {name}: {ty} = {value};",
                sentence(meaning)
            )
            .unwrap();
        }
    }
    text
}

fn sentence(meaning: &str) -> String {
    let mut characters = meaning.chars();
    match characters.next() {
        Some(first) => first.to_uppercase().chain(characters).collect(),
        _ => meaning.to_owned(),
    }
}

fn c() -> String {
    let mut text = String::from(
        "/* SPDX-License-Identifier: Apache-2.0 OR MIT */\n\
         /*\n * Umpire's counter reservations: constants of the guest ABI, docs/reference/pcr.md.\n \
         * Generated from arbiter/src/abi/table.rs: do not edit.\n */\n\
         #ifndef UMPIRE_PCR_H\n#define UMPIRE_PCR_H\n",
    );
    for Group {
        title,
        width,
        entries,
    } in TABLE
    {
        let suffix = match width {
            Width::Bits32 => "U",
            Width::Bits64 => "ULL",
        };
        writeln!(text, "\n/* {title} */").unwrap();
        for Entry {
            name,
            value,
            meaning,
        } in *entries
        {
            let value = match value {
                0..0x40 => value.to_string(),
                _ => format!("{value:#x}"),
            };
            writeln!(
                text,
                "#define UMPIRE_PCR_{name} {value}{suffix} /* {meaning} */"
            )
            .unwrap();
        }
    }
    text.push_str("\n#endif /* UMPIRE_PCR_H */\n");
    text
}

fn markdown() -> String {
    let mut text = String::new();
    for group in TABLE {
        writeln!(
            text,
            "### {}\n\n| name | value | meaning |\n|---|---|---|",
            group.title
        )
        .unwrap();
        for entry in group.entries {
            let (name, meaning) = (entry.name, entry.meaning);
            writeln!(text, "| `{name}` | {:#x} | {meaning} |", entry.value).unwrap();
        }
        text.push('\n');
    }
    text
}

fn check(relative: &str, expected: &str) {
    let path = path(relative);
    if std::env::var_os("UPDATE_ABI").is_some() {
        fs::write(&path, expected).unwrap();
        return;
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        found == expected,
        "{relative} is not what the table says; UPDATE_ABI=1 cargo test -p arbiter --test all abi::"
    );
}

#[test]
fn rust_constants_follow_the_table() {
    check("src/abi/constants.rs", &rust());
}

#[test]
fn the_c_header_follows_the_table() {
    check("include/umpire_pcr.h", &c());
}

#[test]
fn the_documentation_follows_the_table() {
    let text = fs::read_to_string(path("../docs/reference/pcr.md")).unwrap();
    let (before, rest) = text
        .split_once(BEGIN)
        .expect("docs/reference/pcr.md has the marker");
    let (_, after) = rest
        .split_once(END)
        .expect("docs/reference/pcr.md has the end marker");
    check(
        "../docs/reference/pcr.md",
        &format!("{before}{BEGIN}{}{END}{after}", markdown()),
    );
}

#[test]
fn names_are_unique_and_values_fit() {
    let mut names: Vec<_> = TABLE
        .iter()
        .flat_map(|group| group.entries.iter().map(move |entry| (group, entry)))
        .inspect(|(group, entry)| {
            assert!(
                group.width == Width::Bits64 || u32::try_from(entry.value).is_ok(),
                "{} needs more than 32 bits",
                entry.name
            );
        })
        .map(|(_, entry)| entry.name)
        .collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(all, names.len(), "a name is given twice");
}

/// The page around the generated tables.
fn prose() -> String {
    let text = fs::read_to_string(path("../docs/reference/pcr.md")).unwrap();
    let (before, rest) = text
        .split_once(BEGIN)
        .expect("docs/reference/pcr.md has the marker");
    let (_, after) = rest.split_once(END).expect("and its end");
    format!("{before}{after}")
}

fn entries(prefix: &str) -> impl Iterator<Item = &'static Entry> {
    let all = TABLE.iter().flat_map(|group| group.entries);
    let prefix = prefix.to_owned();
    all.filter(move |entry| entry.name.starts_with(&prefix))
}

fn value(name: &str) -> u64 {
    let mut all = entries(name).filter(|entry| entry.name == name);
    all.next()
        .unwrap_or_else(|| panic!("{name} is in the table"))
        .value
}

/// The rows of the table below `heading` whose first cell `read` takes, with their second.
fn rows<T>(heading: &str, read: impl Fn(&str) -> Option<T>) -> Vec<(T, String)> {
    let text = prose();
    let (_, rest) = text.split_once(heading).expect(heading);
    let section = rest.split("\n## ").next().unwrap_or(rest);
    let cells = section.lines().filter_map(|line| {
        let mut cells = line.strip_prefix("| ")?.split(" | ");
        Some((read(cells.next()?)?, cells.next()?.to_owned()))
    });
    cells.collect()
}

#[test]
fn the_page_describes_every_feature() {
    let read = |cell: &str| cell.strip_prefix("ECX bit ")?.parse().ok();
    let told = rows("\n## Finding it\n", read);
    let told: Vec<u64> = told
        .into_iter()
        .map(|(bit, _): (u32, _)| 1 << bit)
        .collect();
    let there: Vec<u64> = entries("FEATURE_").map(|entry| entry.value).collect();
    assert_eq!(told, there);
}

#[test]
fn the_page_names_the_present_version() {
    let version = value("VERSION");
    let text = prose();
    for told in [
        format!("version of this ABI: {version} "),
        format!("EAX is {version}?"),
    ] {
        assert!(text.contains(&told), "docs/reference/pcr.md lacks '{told}'");
    }
}

#[test]
fn the_page_describes_every_bit_of_the_control_word() {
    let bits = |cell: &str| {
        let (high, low) = cell.split_once(':').unwrap_or((cell, cell));
        Some(low.parse::<u32>().ok()?..=high.parse::<u32>().ok()?)
    };
    let told = rows("\n## The control word\n", bits);
    let mut described = 0;
    for (bits, name) in told {
        let name = name.trim_matches('`').trim_end_matches('*').to_owned();
        for (bit, entry) in bits.zip(entries(&format!("CONTROL_{name}"))) {
            assert_eq!(entry.value, 1 << bit, "{}", entry.name);
            described |= entry.value;
        }
    }
    let one_bit = entries("CONTROL_").filter(|entry| entry.value.is_power_of_two());
    let all = one_bit.fold(0, |all, entry| all | entry.value);
    assert_eq!(described, all);
    // Words that consist of such bits.
    let shared = entries("CONTROL_").filter(|entry| entry.meaning.ends_with("reaches it"));
    let named = value("CONTROL_GLOBAL_CTRL") | value("CONTROL_OVF_CLEAR");
    let shared = shared.fold(named, |all, entry| all | entry.value);
    assert_eq!(value("CONTROL_SHARED"), shared);
    let modes = entries("CONTROL_MANAGE").chain(entries("CONTROL_ACCESS"));
    let modes = modes.fold(0, |all, entry| all | entry.value);
    assert_eq!(value("CONTROL_INITIAL"), modes | shared);
    let (first, last) = (shared.trailing_zeros(), shared.ilog2());
    for told in [
        format!("The initial value is {:#010x}:", modes | shared),
        format!("The write of {modes:#010x} to `CONTROL` clears bits {first} to {last}."),
    ] {
        assert!(
            prose().contains(&told),
            "docs/reference/pcr.md lacks '{told}'"
        );
    }
}

/// Every hexadecimal offset of a register that the page's programs use, and every register.
#[test]
fn the_page_has_the_registers_where_they_are() {
    let offset = |cell: &str| {
        let digits = cell.strip_prefix("0x")?.get(..3)?;
        u64::from_str_radix(digits, 16).ok()
    };
    let told = rows("\n## MSRs\n", offset);
    for (offset, name) in &told {
        let name = name.trim_matches('`');
        assert_eq!(value(&format!("MSR_{name}")), *offset, "{name}");
    }
    let there = entries("MSR_").filter(|entry| !matches!(entry.name, "MSR_BASE" | "MSR_COUNT"));
    assert_eq!(told.len(), there.count());
    let text = prose();
    let used = text.match_indices("MSR base + 0x").map(|(at, found)| {
        let digits = &text[at + found.len()..][..3];
        u64::from_str_radix(digits, 16).expect("an offset")
    });
    let used: Vec<u64> = used.collect();
    let driver = [
        "MANAGEMENT_KEY",
        "ACCESS_KEY",
        "CONTROL",
        "COUNTER",
        "SELECT",
        "COUNTER",
    ];
    let mut driver: Vec<u64> = driver.map(|name| value(&format!("MSR_{name}"))).into();
    driver.push(value("MSR_MANAGEMENT_KEY"));
    assert_eq!(used, driver);
    let cookie = format!("ECX = {:#x} + n", value("RDPMC_COOKIE"));
    assert_eq!(text.matches(&cookie).count(), 2, "'{cookie}'");
}
