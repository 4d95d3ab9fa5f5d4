//! What a context is told by those who have I/O, and what it asks of them.

use std::fmt::Debug;

use perfmon_abi::Message;
use perfmon_abi::compact::GuestPlace;
use pmu_model::Ring;

use pmu_model::VirtualPmd;

/// Quantities of the VMM behind virtual PMDs.
pub trait Quantities {
    /// The present value; `None` where this host cannot tell it.
    fn read(&self, which: VirtualPmd) -> Option<u64>;

    /// Where in its guest the vCPU is, at an overflow of a context with such a
    /// [`Wish`](crate::Wish); `None` where this VMM cannot tell it.
    fn guest(&self) -> Option<&GuestPlace> {
        None
    }
}

/// The vCPU at an overflow.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// TSC of the host; unique per core.
    pub tsc: u64,
    /// Instruction pointer of the guest.
    pub ip: u64,
    pub ring: Ring,
    /// Its CR3: tells guest processes apart.
    pub cr3: u64,
    /// The VM: process id of the VMM.
    pub vm: i32,
    /// Number of the vCPU.
    pub vcpu: i32,
    /// Number of the core.
    pub core: u16,
}

impl Moment {
    /// What a virtual PMD tells of it; `None` for those that are of no moment.
    #[must_use]
    pub fn value(&self, which: VirtualPmd) -> Option<u64> {
        match which {
            VirtualPmd::Ring => Some(match self.ring {
                Ring::Kernel => 0,
                Ring::User => 3,
            }),
            VirtualPmd::Cr3 => Some(self.cr3),
            VirtualPmd::Ip => Some(self.ip),
            VirtualPmd::Tsc => Some(self.tsc),
            _ => None,
        }
    }
}

/// The message queue of a context. Its other end is the tool's descriptor.
pub trait MessageQueue: Send + Debug {
    /// Messages that were not read yet.
    fn waiting(&self) -> usize;
    /// Appends a message; `None` wakes and signals without one. Must not block;
    /// a reader who is gone is no error.
    fn post(&mut self, message: Option<&Message>);
}

/// Memory that the tool can map, read-only.
pub trait SampleBuffer: Send + Debug {
    /// All of it. Nobody else writes it.
    fn bytes(&mut self) -> &mut [u8];
}

impl SampleBuffer for Vec<u8> {
    fn bytes(&mut self) -> &mut [u8] {
        self
    }
}
