//! How long a vCPU was halted, from KVM's binary statistics.
//!
//! With the in-kernel irqchip a halted vCPU sleeps inside `KVM_RUN`; a clock
//! that runs from entry to exit must not count that time as unhalted.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use thiserror::Error;

use super::ioctl;
use crate::error::Errno;

/// The statistics that add up to halted time, in nanoseconds: asleep first, then
/// polling for the wake-up.
const HALTED: [&str; 3] = ["halt_wait_ns", "halt_poll_success_ns", "halt_poll_fail_ns"];

/// All of a vCPU's statistics are some kilobytes.
const LARGEST_BLOCK: usize = 64 << 10;

/// Why a vCPU's halted time cannot be read.
#[derive(Debug, Error)]
pub enum StatsError {
    /// KVM has no binary statistics (before Linux 5.14).
    #[error("KVM_GET_STATS_FD failed: {0}")]
    NoFd(Errno),
    /// The file did not hold what its header says.
    #[error("KVM's statistics file could not be read: {0}")]
    Unreadable(#[from] std::io::Error),
    /// A statistic is not there.
    #[error("KVM's statistics have no `{0}`")]
    Missing(&'static str),
    /// The statistics lie too far apart to be read at once.
    #[error("KVM's statistics of halted time are spread over {0} bytes")]
    Scattered(usize),
}

/// For how long a vCPU was halted since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Halted {
    /// Its thread slept.
    pub waited: Duration,
    /// Its thread polled for the wake-up.
    pub polled: Duration,
}

/// The open statistics of one vCPU.
#[derive(Debug)]
pub struct HaltStats {
    file: File,
    /// File offset of the first of them.
    start: u64,
    /// Where each is, from there.
    places: [usize; HALTED.len()],
    /// The part of the file that holds them all: one read serves them.
    block: Vec<u8>,
}

impl HaltStats {
    /// Finds the statistics of halted time in a vCPU's statistics file.
    ///
    /// # Errors
    /// [`StatsError`] where KVM has no such file or no such statistic.
    pub fn open(vcpu: &impl AsFd) -> Result<Self, StatsError> {
        Self::open_of(vcpu.as_fd())
    }

    fn open_of(vcpu: BorrowedFd<'_>) -> Result<Self, StatsError> {
        let file = File::from(ioctl::stats_fd(vcpu).map_err(StatsError::NoFd)?);
        let offsets = find_offsets(&file)?;
        let start = offsets.into_iter().min().unwrap_or(0);
        let places = offsets.map(|offset| usize::try_from(offset - start).unwrap_or(usize::MAX));
        let len = places.into_iter().max().unwrap_or(0).saturating_add(8);
        if len > LARGEST_BLOCK {
            return Err(StatsError::Scattered(len));
        }
        Ok(Self {
            file,
            start,
            places,
            block: vec![0; len],
        })
    }

    /// How long the vCPU was halted.
    ///
    /// # Errors
    /// The error of the read.
    pub fn halted(&mut self) -> Result<Halted, StatsError> {
        self.file.read_exact_at(&mut self.block, self.start)?;
        let [waited, success, fail] = self.places.map(|place| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&self.block[place..place + 8]);
            u64::from_le_bytes(bytes)
        });
        Ok(Halted {
            waited: Duration::from_nanos(waited),
            polled: Duration::from_nanos(success.wrapping_add(fail)),
        })
    }
}

/// Absolute file offsets of the [`HALTED`] statistics (KVM API,
/// `KVM_GET_STATS_FD`: header, then descriptors, then a block of u64).
fn find_offsets(file: &File) -> Result<[u64; HALTED.len()], StatsError> {
    let u32_at = |at: u64| -> Result<u32, StatsError> {
        let mut word = [0; 4];
        file.read_exact_at(&mut word, at)?;
        Ok(u32::from_le_bytes(word))
    };
    let (name_size, count) = (u32_at(4)?, u32_at(8)?);
    let (descriptors, data) = (u32_at(16)?, u32_at(20)?);
    let stride = 16 + u64::from(name_size);
    let mut found = [None; HALTED.len()];
    for index in 0..u64::from(count) {
        let at = u64::from(descriptors) + index * stride;
        let offset = u32_at(at + 8)?;
        let mut name = vec![0; usize::try_from(name_size).unwrap_or(0)];
        file.read_exact_at(&mut name, at + 16)?;
        let name = name.split(|&byte| byte == 0).next().unwrap_or(&[]);
        if let Some(slot) = HALTED.iter().position(|wanted| wanted.as_bytes() == name) {
            found[slot] = Some(u64::from(data) + u64::from(offset));
        }
    }
    let mut offsets = [0; HALTED.len()];
    for (slot, name) in HALTED.iter().enumerate() {
        offsets[slot] = found[slot].ok_or(StatsError::Missing(name))?;
    }
    Ok(offsets)
}
