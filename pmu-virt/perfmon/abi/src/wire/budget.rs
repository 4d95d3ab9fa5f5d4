//! BUDGET: how many physical counters the guest of a vCPU may use at a time, shown and
//! set. Argument and answer are documents (JSON).

use serde::{Deserialize, Serialize};

/// The number of the command. It has one argument (`nargs` 1): a [`BudgetRequest`]. It
/// answers with a [`BudgetInfo`], which is as of after the change.
pub const BUDGET: u16 = 0x114;

/// In place of a number: as many as there are.
pub const ALL: u8 = u8::MAX;

/// What is asked of one vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BudgetRequest {
    pub vcpu: u32,
    /// What is changed; `None`: nothing but the answer.
    pub change: Option<BudgetChange>,
}

/// What changes. What is not there stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BudgetChange {
    /// Physical counters for programmable ones, or [`ALL`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub programmable: Option<u8>,
    /// Physical counters for fixed-function ones, or [`ALL`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fixed: Option<u8>,
    /// How long before they are taken the holders of reserved counters are told, in
    /// milliseconds.
    pub grace_ms: u32,
    /// So long; then it is as before. Without one for good.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub for_ms: Option<u64>,
}

/// What the guest of a vCPU may use, and what it does not get.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BudgetInfo {
    /// The vCPU's number.
    pub vcpu: u32,
    /// How often its budget was set while it ran.
    pub generation: u64,
    /// Of programmable counters.
    pub programmable: KindBudget,
    /// Of fixed-function counters.
    pub fixed: KindBudget,
    /// Milliseconds until it is as before; `None`: it lasts.
    pub ends_in_ms: Option<u64>,
}

/// One kind of counters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindBudget {
    /// Most that count at a time; `None`: all.
    pub most: Option<u8>,
    /// The same from the end on, for a budget that ends.
    pub later: Option<u8>,
    /// So many the VM's lease on the host's counters holds; `None`: there is no lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leased: Option<u8>,
    /// Counters of the PMU model.
    pub there: u8,
    /// Those that count now.
    pub counting: u8,
    /// Those that firmware or kernel have reserved.
    pub reserved: u8,
    /// Those that are enabled and do not count.
    pub lacking: Vec<LackingCounter>,
    /// Reserved ones that are to be taken.
    pub leaving: Vec<LeavingCounter>,
}

/// A counter that is enabled and does not count.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LackingCounter {
    /// The counter: `PMC0`, `FIXED1`.
    pub counter: String,
    pub reason: String,
}

/// A reserved counter that is to be taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeavingCounter {
    /// The counter: `PMC0`, `FIXED1`.
    pub counter: String,
    /// Milliseconds until then.
    pub in_ms: u32,
}
