//! BELL: signals for overflows without anything to read.

/// The number of the command. It takes no argument, and is for a context with
/// `PFM_FL_OVFL_NO_MSG`: the reply carries a socket, the same for everybody who asks. From
/// now on it stands for the empty records that the context's own descriptor would have. At
/// an overflow something arrives there, so that the kernel signals whoever asked for that
/// (`F_SETOWN`, `O_ASYNC`), and is taken away at once. EINVAL: the context has messages.
/// ENOMEM: the VMM has no descriptor for it, and goes on with empty records.
pub const BELL: u16 = 0x105;
