//! N vCPUs on M threads: each thread is a core with a run queue.
//!
//! [`RunQueue`] decides and knows nothing of KVM or threads; [`CoreThread`] does
//! what it says. Cores share nothing but the [`CoreExchange`], where two of them
//! agree on a vCPU's migration.

mod core;
mod cpulist;
mod exchange;
mod hosted;
mod pace;
mod plan;
mod queue;
mod report;

pub use self::core::{CoreEnd, CoreThread};
pub use cpulist::{CpuList, CpuListError};
pub use exchange::CoreExchange;
pub use pace::Pace;
pub use plan::{CorePlan, pin};
pub use queue::{Action, RunQueue, Runnability};
pub use report::{CoreReport, MigrationCost};
