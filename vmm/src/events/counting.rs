//! Who can count an event.

use pmu_virt::{CountRequest, EventCode, Provenance, backend, backend_names};
use serde::Serialize;

use super::code;
use super::resolve::NamedRequest;

/// A backend that can count an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BackendUse {
    /// The backend, as in `--counters`.
    pub backend: &'static str,
    /// How the count is obtained.
    pub provenance: String,
}

/// How a model counts an event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Use {
    /// The raw code, as `--event` takes it.
    pub code: String,
    /// The fixed counter that counts it; none for a programmable one.
    pub fixed: Option<u8>,
    /// What the code means, where that is known.
    pub event: Option<String>,
    /// The backends that can count it.
    pub backends: Vec<BackendUse>,
}

impl Use {
    pub(super) fn of_request(request: &CountRequest) -> Self {
        Self::with_code(code::printed(request), request)
    }

    pub(super) fn of_named(named: &NamedRequest) -> Self {
        Self::with_code(named.code, &named.request)
    }

    fn with_code(code: u64, request: &CountRequest) -> Self {
        Self {
            code: format!("r{code:x}"),
            fixed: match request.event {
                EventCode::Fixed(function) => Some(function.index()),
                _ => None,
            },
            event: request.event.known().map(|event| event.to_string()),
            backends: counters_of(request)
                .map(|(backend, provenance)| BackendUse {
                    backend,
                    provenance: provenance.to_string(),
                })
                .collect(),
        }
    }
}

/// The backends that can be made without anything of the host's and that can
/// count `request`.
pub fn counters_of(request: &CountRequest) -> impl Iterator<Item = (&'static str, Provenance)> {
    let named = backend_names().iter().filter(|one| one.name != "auto");
    named.filter_map(|one| {
        let provenance = backend(one.name).ok()?.can_count(request).ok()?;
        Some((one.name, provenance))
    })
}

/// Which of `usable` backends counts most of the requests; at a tie, the one
/// that comes first. None if there is no backend.
///
/// A guest has one backend so far. With a combination of several, this choice
/// is the combination's, counter by counter.
pub fn best_backend(requests: &[CountRequest], usable: &[&'static str]) -> Option<&'static str> {
    let counted = |name: &str| {
        let by = |request: &&CountRequest| counters_of(request).any(|(one, _)| one == name);
        requests.iter().filter(by).count()
    };
    // `max_by_key` takes the last of equals.
    usable
        .iter()
        .rev()
        .copied()
        .max_by_key(|name| counted(name))
}
