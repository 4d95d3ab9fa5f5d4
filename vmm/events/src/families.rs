//! Which model's guest can use the events of a table.

use pmu_model::{EventFamily, PmuModel};

use super::table::{PmuTable, TableKind};
use super::text::one_of;

/// Tables of processors with Intel's architectural PMU, by name.
const INTEL: [&str; 32] = [
    "ix86arch", "coreduo", "core", "atom", "nhm", "nhm_ex", "wsm", "wsm_dp", "snb", "snb_ep",
    "ivb", "ivb_ep", "hsw", "hsw_ep", "bdw", "bdw_ep", "skl", "skx", "clx", "slm", "glm", "tmt",
    "knl", "knm", "icl", "icx", "spr", "emr", "gnr", "adl_glc", "adl_grt", "mtl",
];

/// Tables of AMD's processors, by the beginning of their names. Families 11h to
/// 16h are read in the vocabulary of the model with their number of counters and
/// their length of the event select; of the codes whose meaning `pmu-virt` knows,
/// those in [`OTHER_MEANINGS`] mean something else there.
const AMD: [(&str, EventFamily); 14] = [
    ("amd64_k7", EventFamily::AmdK7),
    ("amd64_k8", EventFamily::AmdK7),
    ("amd64_fam10h", EventFamily::AmdFam10h),
    ("amd64_fam11h", EventFamily::AmdFam10h),
    ("amd64_fam12h", EventFamily::AmdFam10h),
    ("amd64_fam14h", EventFamily::AmdFam10h),
    ("amd64_fam16h", EventFamily::AmdFam10h),
    ("amd64_fam15h", EventFamily::AmdZen),
    ("amd64_fam17h", EventFamily::AmdZen),
    ("amd64_fam18h", EventFamily::AmdZen),
    ("amd64_fam19h_zen3", EventFamily::AmdZen),
    ("amd64_fam19h_zen4", EventFamily::AmdZen4),
    ("amd64_fam1ah", EventFamily::AmdZen4),
    ("amd64_zen5", EventFamily::AmdZen4),
];

/// Codes that mean another event in these tables than to the model that reads
/// them: beginning of the table's name, event select, unit masks (none: all).
/// Core and Atom have mispredicted branches where later processors have near
/// calls and returns; families 11h, 14h and 16h sort MMX and SSE otherwise than
/// Family 10h (tables of libpfm 4.13).
const OTHER_MEANINGS: [(&str, u8, &[u8]); 5] = [
    ("core", 0xc4, &[0x02, 0x08]),
    ("atom", 0xc4, &[0x02, 0x08]),
    ("amd64_fam11h", 0xcb, &[]),
    ("amd64_fam14h", 0xcb, &[]),
    ("amd64_fam16h", 0xcb, &[]),
];

/// Whether a model reads `code` of `table` as another event.
pub(super) fn means_another(table: &str, code: u64) -> bool {
    let [select, umask, ..] = code.to_le_bytes();
    OTHER_MEANINGS.iter().any(|(start, event, umasks)| {
        let is_table = table == *start || start.contains('_') && table.starts_with(start);
        is_table && select == *event && (umasks.is_empty() || umasks.contains(&umask))
    })
}

/// The vocabulary of the models that have this table's events, or why no model
/// has them.
pub fn family_of(table: &PmuTable) -> Result<EventFamily, &'static str> {
    match table.kind {
        TableKind::Core => {}
        TableKind::Uncore => return Err("counts in a socket, outside of the cores"),
        TableKind::Software => return Err("is the operating system's, not a processor's"),
        TableKind::Other => return Err("is no processor core's"),
    }
    if INTEL.contains(&table.name.as_str()) {
        return Ok(EventFamily::Intel);
    }
    AMD.iter()
        .find(|(start, _)| table.name.starts_with(start))
        .map(|(_, family)| *family)
        .ok_or("has registers that no PMU model here has")
}

/// The models whose guests read event codes in the vocabulary of `family`.
pub fn models_of(family: EventFamily) -> Vec<PmuModel> {
    all_models()
        .into_iter()
        .filter(|model| model.events() == family)
        .collect()
}

/// Every model, with default properties.
pub(super) fn all_models() -> Vec<PmuModel> {
    PmuModel::names()
        .iter()
        .filter_map(|model| PmuModel::parse(model.name).ok())
        .collect()
}

/// Names of the models of `family`, for messages.
pub(super) fn model_names(family: EventFamily) -> String {
    let names: Vec<&str> = models_of(family).iter().map(PmuModel::name).collect();
    one_of(&in_short(&names))
}

/// The names, with three or more of Intel's versions in a row as `intel-v2 to intel-v5`.
pub(super) fn in_short(names: &[&str]) -> Vec<String> {
    let all = all_models();
    let place = |name: &&str| all.iter().position(|model| model.name() == *name);
    let is_next = |one: &&str, other: &&str| {
        let both_intel = one.starts_with("intel") && other.starts_with("intel");
        both_intel && place(one).map(|place| place + 1) == place(other)
    };
    let mut short = Vec::new();
    for run in names.chunk_by(is_next) {
        match run {
            [first, _, .., last] => short.push(format!("{first} to {last}")),
            few => short.extend(few.iter().map(|name| (*name).to_owned())),
        }
    }
    short
}

/// The model to describe the codes of `family` with: the vendor's usual one, if it has them.
pub(super) fn usual_of(family: EventFamily) -> Option<PmuModel> {
    let usual = PmuModel::default_for(family.vendor());
    if usual.events() == family {
        return Some(usual);
    }
    models_of(family).pop()
}
