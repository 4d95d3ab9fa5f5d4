//! A reader's place in the ring.

use thiserror::Error;

use super::codec::{RecordError, decode};
use crate::consts::{PFM_MAX_PMDS, UMPIRE_COMPACT_MAX_BLOCK, UMPIRE_COMPACT_VERSION};
use crate::field::Record;
use crate::parse::Sample;
use crate::{CompactBlock, CompactHeader, CompactLast};

/// Why a ring cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum CompactError {
    /// Bytes that its header tells of could not be copied.
    #[error("the sampling buffer is too short for what its header says")]
    Short,
    /// Another format, or a later version of this.
    #[error("the sampling buffer has version {0:#x}, which is not known here")]
    Version(u32),
    /// Its header contradicts itself.
    #[error("the sampling buffer's header is damaged")]
    Header,
}

/// What a look at the ring has brought.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Samples, oldest first.
    pub samples: Vec<Sample>,
    /// Samples that were overwritten before they could be read.
    pub lost: u64,
    /// Numbers of blocks that hold something else than samples, and what was
    /// wrong with the first such bytes. What follows these in the block is among
    /// the lost samples of a later batch.
    pub damaged: Vec<(u64, RecordError)>,
}

/// Copies bytes of the ring, from an offset on. `false` if it has not so many.
type Copy<'a> = &'a mut dyn FnMut(usize, &mut [u8]) -> bool;

/// A reader's place in a ring that is written meanwhile.
#[derive(Clone, Debug)]
pub struct Cursor {
    /// The block to go on with; 0: the oldest that there is.
    block: u64,
    /// Bytes of it that were read, its header included.
    used: usize,
    /// Samples that were read or lost.
    samples: u64,
    last: CompactLast,
    of_pmds: [u64; PFM_MAX_PMDS as usize],
}

impl Default for Cursor {
    fn default() -> Self {
        Cursor {
            block: 0,
            used: 0,
            samples: 0,
            last: CompactLast::default(),
            of_pmds: [0; PFM_MAX_PMDS as usize],
        }
    }
}

impl Cursor {
    /// Reads what was written since the last call. `copy` is asked for bytes of
    /// the ring; it has to read memory that changes meanwhile, so it belongs to
    /// whoever has mapped it.
    ///
    /// # Errors
    /// See [`CompactError`].
    pub fn follow(&mut self, copy: Copy<'_>) -> Result<Batch, CompactError> {
        let mut batch = Batch::default();
        let mut header = read_header(copy)?;
        // A writer that is faster than this reader must not keep it here.
        for _ in 0..u64::from(header.blocks) * 2 {
            if header.sequence == 0 || self.block > header.sequence {
                break;
            }
            let oldest = header.sequence.saturating_sub(u64::from(header.blocks) - 1);
            if self.block < oldest.max(1) {
                self.go_to(oldest.max(1));
            }
            if !self.read_block(&header, copy, &mut batch)? {
                // It was overwritten, so what is left begins later.
                header = read_header(copy)?;
                self.go_to(self.block.saturating_add(1));
            } else if self.block < header.sequence {
                self.go_to(self.block.saturating_add(1));
            } else {
                break;
            }
        }
        Ok(batch)
    }

    fn go_to(&mut self, block: u64) {
        self.block = block;
        self.used = CompactBlock::SIZE;
        self.last = CompactLast::default();
        self.of_pmds.fill(0);
    }

    /// Reads what the present block has more than before; `false` if another one
    /// has taken its place.
    fn read_block(
        &mut self,
        header: &CompactHeader,
        copy: Copy<'_>,
        batch: &mut Batch,
    ) -> Result<bool, CompactError> {
        let size = u64::from(header.block_size);
        let place = (self.block - 1) % u64::from(header.blocks);
        let offset = place.checked_mul(size);
        let offset = offset.and_then(|offset| offset.checked_add(header.blocks_offs));
        let offset = offset.and_then(|offset| usize::try_from(offset).ok());
        let offset = offset.ok_or(CompactError::Header)?;
        let before: CompactBlock = read(copy, offset)?;
        if before.sequence != self.block {
            return Ok(false);
        }
        let used = usize::try_from(before.used.min(header.block_size));
        let used = used.map_err(|_| CompactError::Header)?;
        let mut bytes = vec![0; used.saturating_sub(self.used)];
        if !bytes.is_empty() && !copy(offset.saturating_add(self.used), &mut bytes) {
            return Err(CompactError::Short);
        }
        let after: CompactBlock = read(copy, offset)?;
        if after.sequence != self.block {
            return Ok(false);
        }
        if self.used == CompactBlock::SIZE {
            let missed = before.first.saturating_sub(self.samples);
            batch.lost = batch.lost.saturating_add(missed);
            self.samples = self.samples.max(before.first);
        }
        self.used = self.used.max(used);
        self.take(&bytes, batch);
        Ok(true)
    }

    fn take(&mut self, mut bytes: &[u8], batch: &mut Batch) {
        while !bytes.is_empty() {
            match decode(&mut bytes, &mut self.last, &mut self.of_pmds[..]) {
                Ok(sample) => {
                    self.samples = self.samples.saturating_add(1);
                    batch.samples.push(sample);
                }
                Err(error) => {
                    batch.damaged.push((self.block, error));
                    // What the writer adds to it cannot be read either.
                    self.used = usize::MAX;
                    return;
                }
            }
        }
    }
}

fn read<T: Record>(copy: Copy<'_>, offset: usize) -> Result<T, CompactError> {
    let mut bytes = vec![0; T::SIZE];
    if copy(offset, &mut bytes) {
        Ok(T::get(&bytes))
    } else {
        Err(CompactError::Short)
    }
}

fn read_header(copy: Copy<'_>) -> Result<CompactHeader, CompactError> {
    let header: CompactHeader = read(copy, 0)?;
    if header.version >> 16 != UMPIRE_COMPACT_VERSION >> 16 {
        return Err(CompactError::Version(header.version));
    }
    let size = usize::try_from(header.block_size).unwrap_or(usize::MAX);
    if header.blocks == 0
        || size < CompactBlock::SIZE
        || header.block_size > UMPIRE_COMPACT_MAX_BLOCK
    {
        return Err(CompactError::Header);
    }
    Ok(header)
}
