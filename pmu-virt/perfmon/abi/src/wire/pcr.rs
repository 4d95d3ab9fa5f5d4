//! PCR: the counter reservations of a vCPU, shown and administered. Argument and
//! answer are documents (JSON).

use std::fmt;

use serde::{Deserialize, Serialize};

/// The number of the command. It has one argument (`nargs` 1): a [`PcrRequest`]. It
/// answers with a [`PcrInfo`], which is as of after the act.
pub const PCR: u16 = 0x113;

/// What is asked of one vCPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PcrRequest {
    pub vcpu: u32,
    /// What is to be done.
    pub act: PcrAct,
}

/// What an administrator does. A layer is `firmware`, `hypervisor` or `kernel`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum PcrAct {
    /// Nothing but the answer.
    Show,
    /// Takes a counter from its holder.
    Revoke {
        /// The counter: `PMC0`, `FIXED1`.
        counter: String,
        /// How long before that the holder is told, in milliseconds.
        grace_ms: u32,
    },
    /// Lets a layer reserve nothing more.
    Bar { layer: String },
    /// Lets a layer reserve again.
    Unbar { layer: String },
    /// Changes the shares of layers, all of them or none.
    Policy {
        /// One for each layer that changes.
        shares: Vec<ShareChange>,
    },
    /// Sets the scheme.
    Scheme {
        /// `single`, `independent` or `interacting`.
        scheme: String,
    },
    /// Reads a counter as the hypervisor.
    Read {
        /// The counter: `PMC0`, `FIXED1`.
        counter: String,
        /// The cookie that is presented.
        cookie: Presented,
    },
}

/// A cookie, of which nobody prints anything.
#[derive(Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Presented(pub u64);

impl fmt::Debug for Presented {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Presented")
    }
}

/// What changes of a layer's share. What is not there stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ShareChange {
    pub layer: String,
    /// Programmable counters that no other layer can take from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min: Option<u8>,
    /// Programmable counters that it may hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<u8>,
    /// `min` of fixed-function counters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_fixed: Option<u8>,
    /// `max` of fixed-function counters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_fixed: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<u8>,
    /// How long its reservations last, in milliseconds; 0: without end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u32>,
}

/// The counter reservations of a vCPU. No cookie is in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PcrInfo {
    pub vcpu: u32,
    /// `single`, `independent` or `interacting`.
    pub scheme: String,
    /// How long holders have to answer, in milliseconds.
    pub grace_ms: u32,
    /// The layers that can hold counters.
    pub layers: Vec<LayerInfo>,
    /// The counters that somebody holds.
    pub reservations: Vec<ReservationInfo>,
    /// What a counter was read as.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read: Option<CounterRead>,
}

/// A counter as the hypervisor reads it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CounterRead {
    /// The count.
    Value(u64),
    /// The access was dropped.
    Dropped,
    /// The access would have raised #GP.
    Faulted,
}

/// What a layer may hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerInfo {
    /// Its name.
    pub layer: String,
    /// Whether it may reserve nothing.
    pub barred: bool,
    /// Programmable counters that no other layer can take from it.
    pub min: u8,
    /// Programmable counters that it may hold; `None`: all.
    pub max: Option<u8>,
    /// `min` of fixed-function counters.
    pub min_fixed: u8,
    /// `max` of fixed-function counters.
    pub max_fixed: Option<u8>,
    pub priority: u8,
    /// How long its reservations last, in milliseconds; `None`: without end.
    pub lease_ms: Option<u32>,
}

/// A reserved counter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReservationInfo {
    /// The counter: `PMC0`, `FIXED1`.
    pub counter: String,
    /// The layer that holds it.
    pub layer: String,
    /// Whether accesses without a cookie are locked out.
    pub private: bool,
    /// Milliseconds until its lease ends; `None`: it has none.
    pub lease_left_ms: Option<u32>,
    /// Milliseconds until it is revoked; `None`: that was not announced.
    pub revoked_in_ms: Option<u32>,
    /// Why it is revoked: a reason as the audit names it.
    pub revoked_for: Option<String>,
    /// What it is programmed for; `None`: nothing.
    pub event: Option<String>,
}
