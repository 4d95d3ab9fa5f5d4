//! Instructions on the host's processor.

#[allow(
    unsafe_code,
    reason = "code of our making runs in a child, and its signals are caught"
)]
mod sys;

pub(crate) use sys::{Case, DATA_LEN, Fx, HostFpu, Outcome, in_process, run};
