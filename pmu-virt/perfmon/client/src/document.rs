//! The documents that a VM replies with.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;

use perfmon_abi::wire::{Errno, Refusal};
use serde::de::DeserializeOwned;

/// Most bytes of a document.
const MAX_DOCUMENT: u64 = 64 << 20;

/// A document (JSON), from a reply's payload or from the file that came in its
/// place.
///
/// # Errors
/// EIO: the file cannot be read. EPROTO: it is no such document.
pub fn document<T: DeserializeOwned>(payload: &[u8], file: Option<OwnedFd>) -> Result<T, Refusal> {
    let mut text = payload.to_vec();
    if let (true, Some(file)) = (payload.is_empty(), file) {
        let read = File::from(file).take(MAX_DOCUMENT).read_to_end(&mut text);
        read.map_err(|error| Refusal::new(Errno::EIO, format!("the reply's file: {error}")))?;
    }
    serde_json::from_slice(&text)
        .map_err(|error| Refusal::new(Errno::EPROTO, format!("the reply is malformed: {error}")))
}
