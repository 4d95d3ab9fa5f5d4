//! Decisions about counters, with their time, layer and reason: the file of
//! `umpire run --audit` and the summary at the end of a run.
//!
//! A vCPU's thread notes decisions in a bounded table of its own ([`VcpuAuditor`]).
//! Another thread writes what is due. Neither a slow disk nor a guest that has
//! accesses denied as fast as it can makes a vCPU wait. No record here carries a
//! cookie: [`arbiter::Event`] has no room for one. The lines that go into the file are
//! those of [`umpire_audit`], which readers of it have too.

mod auditors;
mod decisions;
mod line;
mod summary;
mod trail;
mod writer;

pub use auditors::{HostAuditor, VcpuAuditor};
pub use decisions::{Denied, Totals};
pub use line::header_now;
pub use summary::{Holding, Summary};
pub use trail::AuditTrail;
pub use writer::{AuditError, AuditOut};
