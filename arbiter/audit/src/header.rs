//! The first line: what ran, and who arbitrated.

use arbiter::{Layer, Policy, Scheme, Share};
use serde::{Deserialize, Deserializer, Serialize};

use super::Word;

/// What the file calls itself.
pub const FORMAT: &str = "umpire-audit";

/// Version of the lines.
pub const VERSION: u64 = 1;

/// The first line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// [`FORMAT`].
    pub format: Word,
    /// [`VERSION`], of this crate's types.
    pub version: u64,
    /// Version of the program.
    #[serde(default)]
    pub umpire: Word,
    /// Wall-clock time from which all others are counted, by RFC 3339.
    #[serde(default)]
    pub started: String,
    /// The number of vCPUs.
    pub vcpus: u8,
    /// The PMU model with its properties.
    #[serde(default)]
    pub pmu: String,
    /// Programmable counters of a vCPU.
    pub programmable: u8,
    /// Fixed-function counters of a vCPU.
    pub fixed: u8,
    /// Who arbitrates, and how. Absent if the guest has no reservations.
    #[serde(flatten, deserialize_with = "arbitration")]
    pub arbitration: Option<Arbitration>,
}

/// What decides about requests, as options take it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Arbitration {
    /// [`Scheme::name`].
    pub scheme: Word,
    /// The share of each layer, as `--policy` takes it.
    pub policy: Vec<String>,
    /// How long an announced revocation waits, in milliseconds.
    pub grace_ms: u32,
    /// The machine starts in the firmware's phase.
    pub firmware: bool,
    /// The machine has SMM.
    pub smm: bool,
}

/// Reads who arbitrates; a header without a scheme says nothing of it. What is malformed is an
/// error, unlike with an `Option` that is flattened.
fn arbitration<'de, D: Deserializer<'de>>(header: D) -> Result<Option<Arbitration>, D::Error> {
    #[derive(Deserialize)]
    struct Members {
        scheme: Option<Word>,
        #[serde(default)]
        policy: Vec<String>,
        #[serde(default)]
        grace_ms: u32,
        #[serde(default)]
        firmware: bool,
        #[serde(default)]
        smm: bool,
    }
    let members = Members::deserialize(header)?;
    Ok(members.scheme.map(|scheme| Arbitration {
        scheme,
        policy: members.policy,
        grace_ms: members.grace_ms,
        firmware: members.firmware,
        smm: members.smm,
    }))
}

impl Arbitration {
    /// By `scheme` and `policy`, in a machine without firmware.
    #[must_use]
    pub fn of(scheme: Scheme, policy: &Policy) -> Self {
        let words = |layer| {
            let share = policy.share(layer)?;
            Some(share_words(layer, share))
        };
        Self {
            scheme: scheme.name().into(),
            policy: Policy::LAYERS.into_iter().filter_map(words).collect(),
            grace_ms: policy.grace_ms,
            firmware: false,
            smm: false,
        }
    }
}

/// The share of a layer as `--policy` takes it. What has no limit is left out.
pub(crate) fn share_words(layer: Layer, share: &Share) -> String {
    let mut words = vec![
        format!("min={}", share.min.programmable),
        format!("min-fixed={}", share.min.fixed),
        format!("priority={}", share.priority),
    ];
    let limits = [
        ("max", share.max.programmable),
        ("max-fixed", share.max.fixed),
    ];
    for (key, limit) in limits {
        if limit != u8::MAX {
            words.push(format!("{key}={limit}"));
        }
    }
    words.extend(share.lease_ms.map(|ms| format!("lease={ms}")));
    format!("{}:{}", layer.word(), words.join(","))
}
