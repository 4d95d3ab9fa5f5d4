//! What the server asks the VMM about the guest's kernel.

use std::fmt::Debug;
use std::sync::Arc;

use perfmon_abi::wire::kernel::KernelInfo;
use perfmon_abi::wire::programs::ProgramsInfo;

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

/// What a search has found.
pub(crate) type FoundKernel = Result<Arc<KernelInfo>, String>;
