//! The lines about contexts of a host's tools.

use serde::{Deserialize, Serialize};

use super::Word;

/// A decision about a host context.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextLine {
    /// Nanoseconds since the run began.
    pub time_ns: u64,
    /// Always that of a host's tool.
    pub layer: Word,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub core: Option<u16>,
    /// The vCPU on which the context is or was to be loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vcpu: Option<u32>,
    /// The number of the context.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<u32>,
    /// What was decided.
    pub event: Word,
    /// How firmly it was loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub standing: Option<Word>,
    /// The error that the tool got.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errno: Option<Word>,
    /// Why it was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// For how long it counted nothing, in nanoseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blind_ns: Option<u64>,
    /// How many decisions are missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
}

impl ContextLine {
    /// That `event` happened at `time_ns`, and nothing else.
    #[must_use]
    pub fn new(time_ns: u64, event: &'static str) -> Self {
        Self {
            time_ns,
            layer: arbiter::Layer::HostTool.word().into(),
            core: None,
            vcpu: None,
            context: None,
            event: event.into(),
            standing: None,
            errno: None,
            why: None,
            blind_ns: None,
            count: None,
        }
    }
}
