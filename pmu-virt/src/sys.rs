//! What the standard library has no safe call for: `perf_event_open`, its
//! ioctls and its shared page.
//!
//! This module is the only place of the crate with `unsafe` code.

mod pages;
mod perf;
mod perf_page;

pub(crate) use pages::FreshPages;
pub(crate) use perf::HostPerf;
