//! Sampling buffers: memory that the VMM writes and the tool maps read-only.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use perfmon_abi::wire::{Errno, Refusal};
use pmu_virt::perfmon::SampleBuffer;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::sys::{Mapping, PAGE};

/// Counts the bytes of all buffers of a VM.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pool(Arc<AtomicU64>);

/// A part of the pool, until it is dropped.
#[derive(Debug)]
struct Share {
    pool: Pool,
    bytes: u64,
}

impl Pool {
    /// Bytes in use.
    pub(crate) fn used(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Only the server takes, so nobody takes between the look and the addition.
    /// Threads of vCPUs give back.
    fn take(&self, bytes: u64, most: u64) -> Result<Share, Refusal> {
        let used = self.used();
        if used.checked_add(bytes).is_none_or(|sum| sum > most) {
            return Err(Refusal::new(
                Errno::ENOMEM,
                format!(
                    "a sampling buffer of {bytes} bytes beside {used} bytes of others exceeds \
                     {most} (cf_smpl_buf_size_max)"
                ),
            ));
        }
        self.0.fetch_add(bytes, Ordering::Relaxed);
        Ok(Share {
            pool: self.clone(),
            bytes,
        })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.pool.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A buffer in a memory file. The file is sealed: nobody but this mapping writes it,
/// and nobody changes its size.
#[derive(Debug)]
pub(crate) struct SharedBuffer {
    mapping: Mapping,
    size: usize,
    _share: Share,
}

impl SharedBuffer {
    /// A buffer of `size` bytes, and the file for the tool.
    ///
    /// # Errors
    /// ENOMEM: all buffers together would have more than `most` bytes, or the
    /// host has no memory or descriptor left. EINVAL: `size` is 0.
    pub(crate) fn new(
        size: usize,
        pool: &Pool,
        most: u64,
    ) -> Result<(Self, Arc<OwnedFd>), Refusal> {
        let none = |error: io::Error| {
            Refusal::new(
                Errno::ENOMEM,
                format!("no sampling buffer of {size} bytes: {error}"),
            )
        };
        let Some(whole) = size.checked_next_multiple_of(PAGE).filter(|_| size > 0) else {
            let reason = format!("a sampling buffer cannot have {size} bytes");
            return Err(Refusal::new(Errno::EINVAL, reason));
        };
        let share = pool.take(whole as u64, most)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("umpire-samples", flags)
            .map_err(io::Error::from)
            .map_err(none)?;
        ftruncate(&file, whole as u64)
            .map_err(io::Error::from)
            .map_err(none)?;
        // Before the seals: they refuse mappings that can write.
        let mapping = Mapping::new(&file, whole).map_err(none)?;
        let seals = SealFlags::GROW | SealFlags::SHRINK | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        fcntl_add_seals(&file, seals)
            .map_err(io::Error::from)
            .map_err(none)?;
        let buffer = Self {
            mapping,
            size,
            _share: share,
        };
        Ok((buffer, Arc::new(file)))
    }
}

impl SampleBuffer for SharedBuffer {
    fn bytes(&mut self) -> &mut [u8] {
        let size = self.size;
        &mut self.mapping.bytes()[..size]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::{Errno as Os, pread, pwrite};

    #[test]
    fn the_tool_reads_and_cannot_write() {
        let pool = Pool::default();
        let (mut buffer, file) = SharedBuffer::new(5000, &pool, 8192).unwrap();
        assert_eq!((buffer.bytes().len(), pool.used()), (5000, 8192));
        buffer.bytes()[4999] = 9;
        let mut read = [0; 1];
        assert_eq!(pread(&*file, &mut read, 4999), Ok(1));
        assert_eq!(read, [9]);
        assert_eq!(pwrite(&*file, &[1], 0), Err(Os::PERM));
        assert_eq!(ftruncate(&*file, 0), Err(Os::PERM));
        assert_eq!(ftruncate(&*file, 1 << 20), Err(Os::PERM));
        assert_eq!(
            fcntl_add_seals(&*file, SealFlags::WRITE),
            Err(Os::PERM),
            "it is sealed against further seals"
        );
        assert!(Mapping::new(&Arc::into_inner(file).unwrap(), 4096).is_err());
    }

    #[test]
    fn all_buffers_share_one_limit() {
        let pool = Pool::default();
        let refused = |size| SharedBuffer::new(size, &pool, 8192).map(drop).unwrap_err();
        let first = SharedBuffer::new(1, &pool, 8192).unwrap();
        assert_eq!(refused(4097).errno, Errno::ENOMEM);
        assert_eq!(refused(usize::MAX).errno, Errno::EINVAL);
        assert_eq!(refused(0).errno, Errno::EINVAL);
        drop(first);
        assert_eq!(pool.used(), 0);
        SharedBuffer::new(8192, &pool, 8192).unwrap();
    }
}
