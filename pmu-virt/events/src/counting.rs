//! Who can count an event.

use pmu_model::{CountRequest, EventCode};
use serde::Serialize;

use super::code;
use super::resolve::NamedRequest;

/// Says which backends of this host can count an event.
pub type Backends<'a> = &'a dyn Fn(&CountRequest) -> Vec<BackendUse>;

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
    /// The raw code, as `--event` takes it; none for what no event select means.
    pub code: Option<String>,
    /// The fixed counter that counts it; none for a programmable one.
    pub fixed: Option<u8>,
    /// What the code means, where that is known.
    pub event: Option<String>,
    /// The backends that can count it.
    pub backends: Vec<BackendUse>,
}

impl Use {
    pub(super) fn of_request(request: &CountRequest, backends: Backends<'_>) -> Self {
        Self::with_code(Some(code::printed(request)), request, backends)
    }

    pub(super) fn of_named(named: &NamedRequest, backends: Backends<'_>) -> Self {
        Self::with_code(Some(named.code), &named.request, backends)
    }

    pub(super) fn without_code(request: &CountRequest, backends: Backends<'_>) -> Self {
        Self::with_code(None, request, backends)
    }

    fn with_code(code: Option<u64>, request: &CountRequest, backends: Backends<'_>) -> Self {
        Self {
            code: code.map(|code| format!("r{code:x}")),
            fixed: match request.event {
                EventCode::Fixed(function) => Some(function.index()),
                _ => None,
            },
            event: request.event.known().map(|event| event.to_string()),
            backends: backends(request),
        }
    }
}
