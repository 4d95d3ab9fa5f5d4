//! What can fail: an ioctl on a vCPU, or the timer of its thread.

use std::fmt;
use std::io;

use instruction_facts::Encoding;
use pmu_virt::NotSettled;
use serde::Serialize;
use thiserror::Error;

/// The number of a system call's error (`errno(3)`), whatever crate had it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub i32);

impl Errno {
    /// That of the last call which failed on this thread.
    #[must_use]
    pub fn last() -> Self {
        Self::from(io::Error::last_os_error())
    }

    pub(crate) fn if_negative(returned: i32) -> Result<(), Self> {
        if returned < 0 {
            Err(Self::last())
        } else {
            Ok(())
        }
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Errno({}: {self})", self.0)
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        io::Error::from(*self).fmt(f)
    }
}

impl std::error::Error for Errno {}

impl From<Errno> for io::Error {
    fn from(Errno(number): Errno) -> Self {
        Self::from_raw_os_error(number)
    }
}

impl From<io::Error> for Errno {
    /// EIO for one that no system call had.
    fn from(error: io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// Number of a vCPU; also its initial APIC ID. There may be gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct VcpuId(pub u32);

impl VcpuId {
    /// Its place in a list of all vCPUs that have no gaps.
    #[must_use]
    pub fn index(self) -> usize {
        // No wider than a pointer here.
        self.0 as usize
    }
}

impl fmt::Display for VcpuId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vCPU {}", self.0)
    }
}

/// An ioctl on a vCPU failed.
#[derive(Debug, Error)]
#[error("{id}: {ioctl} failed: {error}")]
pub struct VcpuError {
    id: VcpuId,
    ioctl: &'static str,
    error: Errno,
}

impl VcpuError {
    /// `ioctl` on vCPU `id` failed with `error`.
    #[must_use]
    pub fn new(id: VcpuId, ioctl: &'static str, error: Errno) -> Self {
        Self { id, ioctl, error }
    }

    /// True if KVM has given the whole machine up (EIO): one of its own checks
    /// failed, and it refuses every further ioctl.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        self.error.0 == libc::EIO
    }

    /// True if KVM cannot do it in the vCPU's present state (EBUSY).
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.error.0 == libc::EBUSY
    }

    /// True if KVM found the values themselves wrong (EINVAL).
    #[must_use]
    pub fn is_invalid(&self) -> bool {
        self.error.0 == libc::EINVAL
    }
}

/// A descriptor is not of what it is said to be, or cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum DescriptorError {
    /// Another file, or `/dev/kvm` itself.
    #[error("KvmVm::new: the descriptor is no VM's: KVM_CHECK_EXTENSION failed: {0}")]
    NoVm(Errno),
    /// Another file, or a vCPU of a VM that another process has made.
    #[error("KvmVcpu::new: the descriptor is not {0}'s: KVM_GET_REGS failed: {1}")]
    NoVcpu(VcpuId, Errno),
    /// The process has no more descriptors.
    #[error("a descriptor cannot be duplicated: {0} (limit of open files: `ulimit -n`)")]
    Duplicate(Errno),
    #[error("{0}: KvmVcpu::new: mmap of kvm_run failed: {1}")]
    Mapping(VcpuId, Errno),
}

/// A PMI could not be sent.
#[derive(Debug, Error)]
pub enum PmiError {
    /// A vCPU ioctl failed.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// `KVM_SIGNAL_MSI` failed.
    #[error("KVM_SIGNAL_MSI failed: {0}")]
    SignalMsi(Errno),
    /// KVM would take the low byte of the APIC's ID for another vCPU's.
    #[error(
        "no interrupt can name {0}: enable KVM_CAP_X2APIC_API with KVM_X2APIC_API_USE_32BIT_IDS \
         before vCPUs are made"
    )]
    LargeApicId(VcpuId),
}

/// Why a kick of a thread would not end a `KVM_RUN` there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum KickError {
    /// Nobody handles the signal: the first kick would end the process, or be lost.
    #[error("signal {0} has no handler: call install_kick_handler first")]
    NoHandler(i32),
    /// Somebody else has installed a handler since, and does not call the one that it replaced.
    #[error(
        "signal {0} has another handler than install_kick_handler's, which does not call that one \
         (the VMM's, or an older copy of kvm-pmu's in this process): install that one last, choose \
         another signal (install_kick_handler_of), or have yours call on_kick (own_kick_handler)"
    )]
    OtherHandler(i32),
    /// The VMM's own handler does not do what it has to.
    #[error("the VMM's own handler of signal {0} does not call on_kick")]
    NotCalled(i32),
    /// Overflows of perf events would end the process, or be lost, when the signal's queue is full.
    #[error(
        "SIGIO, which the kernel sends in place of signal {0} when the queue is full, does not come \
         to on_kick: call install_kick_handler last, or have the VMM's own handler call on_kick \
         (own_kick_handler)"
    )]
    Overflows(i32),
    /// The thread does not take the signal.
    #[error("this thread blocks signal {0}: unblock it in threads that run vCPUs")]
    Blocked(i32),
}

/// Why a vCPU cannot be entered on a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum EntryError {
    /// The thread has no counters.
    #[error("its thread has no counters, and nothing would count (ThreadContext::with_counters)")]
    NoCounters,
    /// The counters of the thread are not this vCPU's.
    #[error("its PMU is not on the counters of its thread (VcpuPmu::attach)")]
    NotAttached,
    /// The PMU was made for another vCPU.
    #[error("the PMU is that of {0} (KvmPmu::new)")]
    OtherVcpu(VcpuId),
}

/// The PMU could not be served: the host's fault, not the guest's.
#[derive(Debug, Error)]
pub enum KvmPmuError {
    /// A vCPU ioctl failed.
    #[error(transparent)]
    Vcpu(#[from] VcpuError),
    /// A PMI could not be sent.
    #[error("a PMI could not be sent: {0}")]
    Pmi(#[from] PmiError),
    /// The kick timer could not be made.
    #[error("timer_create failed: {0} (limit of pending signals: `ulimit -i`)")]
    Timer(Errno),
    /// A thread cannot run vCPUs: a kick would not end their `KVM_RUN`.
    #[error("this thread cannot run vCPUs: {0}")]
    Kick(#[from] KickError),
    /// The decoder of this build lacks instructions that the guest may execute, and would
    /// count them wrongly.
    #[error(
        "{id}: KvmPmu::new: its CPUID announces instructions that iced-x86 was built without: some \
         crate of this build has that one's feature {}",
        lacks.feature()
    )]
    Decoder {
        /// The vCPU.
        id: VcpuId,
        /// What is not decoded.
        lacks: Encoding,
    },
    /// A vCPU was to be entered on a thread that cannot count for it.
    #[error("{0}: enter: {1}")]
    Entry(VcpuId, EntryError),
    /// A vCPU left a thread that does not have its counts.
    #[error("leave_thread: {0}")]
    NotSettled(#[from] NotSettled),
}

impl KvmPmuError {
    /// True if KVM has given the whole machine up. A guest can lead KVM where its
    /// own checks fail; that ends the guest, and is no failure of ours.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        match self {
            Self::Vcpu(error) | Self::Pmi(PmiError::Vcpu(error)) => error.is_dead(),
            Self::Pmi(PmiError::SignalMsi(_) | PmiError::LargeApicId(_))
            | Self::Timer(_)
            | Self::Kick(_)
            | Self::Decoder { .. }
            | Self::Entry(..)
            | Self::NotSettled(_) => false,
        }
    }
}
