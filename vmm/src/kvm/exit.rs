//! What the guest gets for an exit.

/// What the guest gets for an exit. The bytes of an IN go into
/// [`KvmVcpu::io_data`](super::KvmVcpu::io_data).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// A WRMSR is done.
    Done,
    /// The bytes of a load.
    Mmio([u8; 8]),
    /// The value of an RDMSR.
    Msr(u64),
    /// #GP(0) for the RDMSR or WRMSR.
    MsrFault,
}
