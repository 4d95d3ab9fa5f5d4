//! What the server asks the VMM about the guest's kernel.

use std::fmt::Debug;

use perfmon_abi::wire::Refusal;
use perfmon_abi::wire::kernel::KernelInfo;
use perfmon_abi::wire::programs::ProgramsInfo;

use crate::document::Document;

/// Who can say what a guest's kernel is.
pub trait GuestKernel: Send + Sync + Debug {
    /// The kernel that runs with `cr3`. Takes up to some seconds.
    ///
    /// # Errors
    /// Why there is none that can be known.
    fn find(&self, cr3: u64) -> Result<KernelInfo, String>;

    /// What samples have met in the guest, behind the first `since` descriptions. At once.
    fn programs(&self, since: u64) -> ProgramsInfo;
}

/// What a search has found: the answer to all who ask.
pub(crate) type FoundKernel = Result<Document, Refusal>;
