//! How user code gets into the kernel.

/// How user code has got into the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry {
    /// SYSCALL.
    SystemCall,
    /// SYSENTER.
    SystemEnter,
    /// INT n and its like, by vector.
    Software(u8),
    /// An exception, by vector; a page fault, for one.
    Exception(u8),
    /// An interrupt or NMI, by vector.
    Interrupt(u8),
    /// A call through a gate, or something else that is none of the above.
    Other,
}
