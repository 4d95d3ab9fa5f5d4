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
         /*\n * Umpire's counter reservations: constants of the guest ABI, docs/pcr.md.\n \
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
        "{relative} is not what the table says; UPDATE_ABI=1 cargo test -p arbiter --test abi"
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
    let text = fs::read_to_string(path("../docs/pcr.md")).unwrap();
    let (before, rest) = text.split_once(BEGIN).expect("docs/pcr.md has the marker");
    let (_, after) = rest
        .split_once(END)
        .expect("docs/pcr.md has the end marker");
    check(
        "../docs/pcr.md",
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
