//! N vCPUs on M threads: each thread is a core with a run queue.
//!
//! [`RunQueue`] decides and knows nothing of KVM or threads; [`CoreThread`] does
//! what it says. Cores share nothing but the [`CoreExchange`], where two of them
//! agree on a vCPU's migration.

mod core;
mod exchange;
mod pace;
mod queue;
mod report;
mod residents;

pub use self::core::{CoreEnd, CoreThread, pin};
pub use exchange::CoreExchange;
pub use pace::Pace;
pub use queue::{Action, RunQueue};
pub use report::{CoreReport, MigrationCost};

pub use crate::cores::{CorePlan, CpuList, CpuListError};
pub use crate::vcpu::Runnability;
