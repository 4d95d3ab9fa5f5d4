//! Documents for clients (JSON): in the answer's packet, or in a file beside it.

use std::sync::Arc;

use perfmon_abi::wire::{Errno, MAX_PAYLOAD, Refusal};
use serde::Serialize;

use crate::memory_file::MemoryFile;

/// A document that can be sent to anybody, as often as one likes.
#[derive(Clone, Debug)]
pub(crate) enum Document {
    /// It fits into a packet.
    Short(Arc<[u8]>),
    /// It does not.
    Long(Arc<MemoryFile>),
}

impl Document {
    /// What `value` is in JSON.
    ///
    /// # Errors
    /// ENOMEM: the host has no memory for its file, or the process no descriptor.
    pub(crate) fn of(value: &impl Serialize) -> Result<Self, Refusal> {
        // Only maps with odd keys cannot be written; there is none.
        let text = serde_json::to_vec(value)
            .map_err(|error| Refusal::new(Errno::EIO, error.to_string()))?;
        if text.len() <= MAX_PAYLOAD {
            return Ok(Self::Short(text.into()));
        }
        match MemoryFile::of("umpire-answer", &text) {
            Ok(file) => Ok(Self::Long(Arc::new(file))),
            Err(error) => {
                let reason = format!("no memory file for the answer: {error}");
                Err(Refusal::new(Errno::ENOMEM, reason))
            }
        }
    }

    /// Whether it is all there: its file may have been cut, as somebody kept too many.
    pub(crate) fn is_whole(&self) -> bool {
        match self {
            Self::Short(_) => true,
            Self::Long(file) => !file.is_cut(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_long_for_a_packet_is_a_file() {
        let short = Document::of(&"x".repeat(MAX_PAYLOAD - 2)).unwrap();
        assert!(matches!(short, Document::Short(text) if text.len() == MAX_PAYLOAD));
        let Document::Long(file) = Document::of(&"x".repeat(MAX_PAYLOAD - 1)).unwrap() else {
            panic!("it does not fit");
        };
        assert_eq!(file.left(), MAX_PAYLOAD as u64 + 1);
    }
}
