//! What was decided about counters, when, for whom and why: the file of
//! `umpire run --audit` and the summary at the end of a run.
//!
//! A vCPU's thread notes decisions in a bounded table of its own ([`VcpuAuditor`]);
//! a thread beside it writes what is due. Neither a slow disk nor a guest that has
//! accesses denied as fast as it can makes a vCPU wait. Nothing that comes here
//! carries a cookie: [`arbiter::Event`] has no room for one.

mod auditors;
mod decisions;
mod line;
mod summary;
mod trail;
mod writer;

pub use auditors::{HostAuditor, VcpuAuditor};
pub use decisions::{Denied, Entry, Totals};
pub use line::Header;
pub use summary::{Holding, Summary};
pub use trail::AuditTrail;
pub use writer::AuditError;
