//! A source of names that holds what a test needs.

use crate::{
    Attribute, AttributeKind, EncodeError, Encoding, LibraryError, NameTable, NamedEvent, NoTables,
    PmuTable, TableKind,
};

/// Tables with a few events each. Codes are those of libpfm 4.13.
#[derive(Debug)]
pub(super) struct Fake {
    tables: Vec<PmuTable>,
}

/// Table, event, unit masks (the first is the default where marked so), codes
/// of `TABLE::EVENT` and of each unit mask.
type Row = (
    &'static str,
    &'static str,
    &'static [(&'static str, u64)],
    &'static [u64],
);

const ROWS: [Row; 20] = [
    (
        "skl",
        "INST_RETIRED",
        &[("ANY_P", 0x53_00c0), ("ALL", 0x53_01c0)],
        &[0x53_00c0],
    ),
    ("skl", "UNHALTED_REFERENCE_CYCLES", &[], &[0x53_0300]),
    ("skl", "OFFCORE_RESPONSE_0", &[], &[0x53_01b7, 0x18fff]),
    ("skl", "L2_RQSTS", &[("MISS", 0x53_3f24)], &[]),
    (
        "skl",
        "CPU_CLK_UNHALTED",
        &[("ANY", 0x73_003c)],
        &[0x53_003c],
    ),
    ("wsm", "INST_RETIRED", &[("ANY_P", 0x53_01c0)], &[0x53_01c0]),
    ("wsm", "UNHALTED_REFERENCE_CYCLES", &[], &[0x53_0300]),
    ("icl", "INST_RETIRED", &[("ANY", 0x53_0100)], &[0x53_0100]),
    (
        "icl",
        "TOPDOWN",
        &[("SLOTS", 0x53_0400), ("BACKEND_BOUND_SLOTS", 0x53_0200)],
        &[],
    ),
    (
        "glm",
        "CPU_CLK_UNHALTED",
        &[("REF", 0x53_0100), ("CORE", 0x53_0200)],
        &[],
    ),
    (
        "amd64_k8_revg",
        "DISPATCHED_FPU",
        &[("0xff", 0x53_ff00)],
        &[0x53_3f00],
    ),
    ("amd64_k8_revg", "RETIRED_INSTRUCTIONS", &[], &[0x53_00c0]),
    (
        "amd64_fam10h_barcelona",
        "RETIRED_INSTRUCTIONS",
        &[("h", 0x200_0050_00c0)],
        &[0x53_00c0],
    ),
    (
        "amd64_fam10h_barcelona",
        "MEMORY_CONTROLLER_REQUESTS",
        &[],
        &[0x1_0053_fff0],
    ),
    (
        "amd64_fam10h_barcelona",
        "DISPATCHED_FPU",
        &[
            ("OPS_ADD", 0x53_0100),
            ("OPS_MULTIPLY", 0x53_0200),
            ("OPS_STORE", 0x53_0400),
        ],
        &[],
    ),
    (
        "amd64_fam17h_zen1",
        "RETIRED_INSTRUCTIONS",
        &[],
        &[0x53_00c0],
    ),
    (
        "amd64_fam17h_zen2",
        "RETIRED_INSTRUCTIONS",
        &[],
        &[0x53_00c0],
    ),
    ("netburst", "GLOBAL_POWER_EVENTS", &[], &[0x2600_020f]),
    ("rapl", "RAPL_ENERGY_PKG", &[], &[2]),
    ("perf", "CYCLES", &[], &[0]),
];

impl Fake {
    pub(super) fn new() -> Self {
        let mut tables: Vec<PmuTable> = Vec::new();
        for (table, ..) in ROWS {
            if tables.iter().any(|known| known.name == table) {
                continue;
            }
            tables.push(PmuTable {
                name: table.to_owned(),
                description: format!("Processor {table}"),
                kind: match table {
                    "rapl" => TableKind::Uncore,
                    "perf" => TableKind::Software,
                    _ => TableKind::Core,
                },
                events: ROWS.iter().filter(|row| row.0 == table).count(),
                host: table == "amd64_fam17h_zen2",
            });
        }
        Self { tables }
    }
}

fn attribute(name: &str, kind: AttributeKind, default: bool) -> Attribute {
    Attribute {
        name: name.to_owned(),
        description: format!("About {name}"),
        kind,
        default,
    }
}

impl NameTable for Fake {
    fn missing(&self) -> Option<&LibraryError> {
        None
    }

    fn tables(&self) -> &[PmuTable] {
        &self.tables
    }

    fn events(&self, table: &str) -> Vec<NamedEvent> {
        let rows = ROWS.iter().filter(|row| row.0 == table);
        rows.map(|(_, event, masks, plain)| {
            let masks = masks.iter().map(|(name, code)| {
                attribute(name, AttributeKind::UnitMask, plain.first() == Some(code))
            });
            let modifiers = [
                attribute("u", AttributeKind::Flag, false),
                attribute("k", AttributeKind::Flag, false),
                attribute("c", AttributeKind::Number, false),
            ];
            NamedEvent {
                name: (*event).to_owned(),
                description: format!("Counts {}", event.to_lowercase()),
                alias_of: None,
                attributes: masks.chain(modifiers).collect(),
            }
        })
        .collect()
    }

    fn encode(&self, full_name: &str) -> Result<Encoding, EncodeError> {
        let (table, rest) = full_name.split_once("::").ok_or(EncodeError::Unknown)?;
        let mut words = rest.split(':');
        let event = words.next().unwrap_or_default();
        let (_, event, masks, plain) = ROWS
            .iter()
            .find(|row| row.0 == table && row.1.eq_ignore_ascii_case(event))
            .ok_or(EncodeError::Unknown)?;
        let mut codes = plain.to_vec();
        let mut written = format!("{table}::{event}");
        let mut rings = None;
        let mut masked = false;
        let mut changes = 0;
        for word in words {
            if let Some((name, code)) = masks.iter().find(|(name, _)| *name == word) {
                // Several unit masks add up.
                let before = if masked { codes[0] } else { 0 };
                codes = vec![before | code];
                masked = true;
                written.push_str(&format!(":{name}"));
            } else if let Some(count) = word.strip_prefix("c=") {
                let count: u8 = count.parse().map_err(|_| EncodeError::Attribute)?;
                changes |= u64::from(count) << 24;
            } else if let Some(bit) = ["e", "i"].iter().position(|flag| *flag == word) {
                changes |= [1 << 18, 1 << 23][bit];
            } else {
                let ring = match word {
                    "u" => 1 << 16,
                    "k" => 1 << 17,
                    _ => return Err(EncodeError::Attribute),
                };
                rings = Some(rings.unwrap_or(0) | ring);
            }
        }
        let first = codes.first_mut().ok_or(EncodeError::UnitMask)?;
        *first |= changes;
        if let Some(rings) = rings {
            *first = *first & !(0b11 << 16) | rings;
        }
        written.push_str(":k=1:u=1");
        Ok(Encoding {
            codes,
            full_name: written,
        })
    }
}

/// A machine without libpfm4.
pub(super) fn no_library() -> NoTables {
    NoTables(LibraryError::Missing("no such file".to_owned()))
}
