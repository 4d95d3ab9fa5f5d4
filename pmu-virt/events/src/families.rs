//! Which model's guest can use the events of a table.

use pmu_model::{EventFamily, ModelError, PmuModel, Vendor};

use super::error::EventError;
use super::table::{PmuTable, TableKind};
use super::text::one_of;

/// Tables of processors with Intel's architectural PMU, by name, with whose codes they have.
/// Those of a processor that no vocabulary is for belong to Intel's common one.
const INTEL: [(EventFamily, &[&str]); 4] = [
    (
        EventFamily::IntelNehalem,
        &["nhm", "nhm_ex", "wsm", "wsm_dp"],
    ),
    (
        EventFamily::IntelSkylake,
        &[
            "snb", "snb_ep", "ivb", "ivb_ep", "hsw", "hsw_ep", "bdw", "bdw_ep", "skl", "skx", "clx",
        ],
    ),
    (
        EventFamily::IntelIceLake,
        &["icl", "icx", "spr", "emr", "gnr", "adl_glc"],
    ),
    (
        EventFamily::Intel,
        &[
            ARCHITECTURAL,
            "coreduo",
            "core",
            "atom",
            "slm",
            "glm",
            "tmt",
            "knl",
            "knm",
            "adl_grt",
            "mtl",
        ],
    ),
];

/// The table of what every processor of Intel's has.
const ARCHITECTURAL: &str = "ix86arch";

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
/// Family 10h, and 15h has dispatch stalls where Zen has conditional branches (tables of
/// libpfm 4.13).
const OTHER_MEANINGS: [(&str, u8, &[u8]); 6] = [
    ("core", 0xc4, &[0x02, 0x08]),
    ("atom", 0xc4, &[0x02, 0x08]),
    ("amd64_fam11h", 0xcb, &[]),
    ("amd64_fam14h", 0xcb, &[]),
    ("amd64_fam16h", 0xcb, &[]),
    ("amd64_fam15h", 0xd1, &[]),
];

/// Whether a model reads `code` of `table` as another event.
pub(super) fn means_another(table: &str, code: u64) -> bool {
    let [select, umask, ..] = code.to_le_bytes();
    OTHER_MEANINGS.iter().any(|(start, event, umasks)| {
        let is_table = table == *start || start.contains('_') && table.starts_with(start);
        is_table && select == *event && (umasks.is_empty() || umasks.contains(&umask))
    })
}

/// Whose event codes this table has, or why no model has its events.
pub fn family_of(table: &PmuTable) -> Result<EventFamily, &'static str> {
    match table.kind {
        TableKind::Core => {}
        TableKind::Uncore => return Err("counts in a socket, outside of the cores"),
        TableKind::Software => return Err("is the operating system's, not a processor's"),
        TableKind::Other => return Err("is no processor core's"),
    }
    let intel = INTEL
        .iter()
        .find(|(_, names)| names.contains(&table.name.as_str()));
    let amd = || {
        AMD.iter()
            .find(|(start, _)| table.name.starts_with(start))
            .map(|(_, family)| *family)
    };
    intel
        .map(|(family, _)| *family)
        .or_else(amd)
        .ok_or("has registers that no PMU model here has")
}

/// Whether guests with `model` have the events of `table`, whose codes are `family`'s.
pub(super) fn reads(model: &PmuModel, table: &PmuTable, family: EventFamily) -> bool {
    let everywhere = table.name == ARCHITECTURAL && model.vendor() == Vendor::Intel;
    everywhere || model.events().covers(family)
}

/// The models whose guests can read event codes in the vocabulary of `family`.
pub fn models_of(family: EventFamily) -> Vec<PmuModel> {
    all_models()
        .into_iter()
        .filter(|model| model.events().covers(family))
        .collect()
}

/// The models of `family`, each with that vocabulary itself.
pub(super) fn processors_of(family: EventFamily) -> Vec<PmuModel> {
    let own = |model: PmuModel| model.with_events(family);
    models_of(family).into_iter().filter_map(own).collect()
}

/// The vocabularies that no model has by itself, each with the model that stands for it.
pub(super) fn processors() -> Vec<PmuModel> {
    let usual = PmuModel::default_for(Vendor::Intel);
    let of = |family| usual.clone().with_events(family);
    EventFamily::ALL
        .into_iter()
        .filter(|family| family.vendor() == Vendor::Intel && *family != EventFamily::Intel)
        .filter_map(of)
        .collect()
}

/// The model in lists: its name, and of [`processors`] what is to be given to `--pmu`.
pub(super) fn label(model: &PmuModel) -> &'static str {
    match (model.name(), model.events()) {
        ("intel-v2", EventFamily::IntelNehalem) => "intel-v2,events=nehalem",
        ("intel-v2", EventFamily::IntelSkylake) => "intel-v2,events=skylake",
        ("intel-v2", EventFamily::IntelIceLake) => "intel-v2,events=ice-lake",
        (name, _) => name,
    }
}

/// The model that `--pmu` of `umpire events` names, with properties or without; none if it
/// can only be a table.
pub(super) fn model_named(pmu: &str) -> Option<Result<PmuModel, EventError>> {
    match PmuModel::parse(pmu) {
        Ok(model) => Some(Ok(model)),
        Err(ModelError::UnknownModel { .. }) => None,
        Err(error) => Some(Err(EventError::Model(error))),
    }
}

/// Every model, with default properties.
pub(super) fn all_models() -> Vec<PmuModel> {
    PmuModel::names()
        .iter()
        .filter_map(|model| PmuModel::parse(model.name).ok())
        .collect()
}

/// Names of the models of `family`, for a message to a guest with `model`.
pub(super) fn model_names(family: EventFamily, model: &PmuModel) -> String {
    if family.vendor() == model.vendor() && !model.has_usual_events() {
        return format!("models with events={}", family.name());
    }
    let names: Vec<&str> = models_of(family).iter().map(PmuModel::name).collect();
    one_of(&in_short(&names))
}

/// The names, with three or more of Intel's versions in a row as `intel-v2 to intel-v5`.
pub(super) fn in_short(names: &[&str]) -> Vec<String> {
    let all = all_models();
    let place = |name: &&str| all.iter().position(|model| model.name() == *name);
    let is_next = |one: &&str, other: &&str| {
        let both_intel = one.starts_with("intel") && other.starts_with("intel");
        let next = place(one).map(|place| place + 1);
        both_intel && next.is_some() && next == place(other)
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
    if usual.events().covers(family) {
        return usual.with_events(family);
    }
    models_of(family).pop()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_models_that_can_be_given() {
        for model in all_models().into_iter().chain(processors()) {
            let again = PmuModel::parse(label(&model)).expect("a model");
            assert_eq!(again.to_string(), model.to_string());
        }
        assert_eq!(processors().len(), 3);
    }
}
