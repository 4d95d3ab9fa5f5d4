//! What C sees: the calls of `perfmon.h`, and the functions of libc that mean
//! something else for a context.

#[allow(unsafe_code)]
mod sys;
