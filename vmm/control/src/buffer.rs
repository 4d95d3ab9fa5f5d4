//! Sampling buffers: memory that the VMM writes and the tool maps read-only.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;

use perfmon_abi::wire::{Errno, Refusal};
use pmu_virt::perfmon::SampleBuffer;

use crate::memory_file::MemoryFile;
use crate::sys::{Mapping, PAGE};

/// Counts the bytes of all buffers of a VM: of each from the moment that it is made until its
/// memory has been given back, whoever still has it mapped.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pool(Arc<Counted>);

#[derive(Debug, Default)]
struct Counted {
    bytes: AtomicU64,
    /// The VM ends. What tools have of its last samples stays theirs.
    over: AtomicBool,
}

/// A part of the pool, until it is dropped.
#[derive(Debug)]
struct Share {
    pool: Pool,
    bytes: u64,
}

impl Pool {
    /// The VM ends: from now on what goes stays with who has it mapped.
    pub(crate) fn end(&self) {
        self.0.over.store(true, Ordering::Relaxed);
    }

    /// Bytes in use.
    pub(crate) fn used(&self) -> u64 {
        self.0.bytes.load(Ordering::Relaxed)
    }

    /// Only one thread takes, so nobody takes between the look and the addition.
    /// Any gives back.
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
        self.0.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(Share {
            pool: self.clone(),
            bytes,
        })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.pool.0.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// What the memory of a buffer is.
#[derive(Debug)]
pub(crate) struct Memory {
    mapping: Mapping,
    file: Arc<MemoryFile>,
    share: Option<Share>,
}

impl Drop for Memory {
    /// Its share goes back last.
    fn drop(&mut self) {
        let pool = self.share.as_ref().map(|share| &share.pool);
        if pool.is_some_and(|pool| pool.0.over.load(Ordering::Relaxed)) {
            return;
        }
        if let Err(error) = self.file.cut() {
            log::warn!("the memory of a sampling buffer does not come back: {error}");
            std::mem::forget(self.share.take());
        }
    }
}

/// A buffer in a memory file. Nobody but this mapping writes it, and its memory goes when
/// this is dropped.
#[derive(Debug)]
pub(crate) struct SharedBuffer {
    memory: Option<Memory>,
    size: usize,
    /// Who gives the memory back.
    keeper: Option<Sender<Task>>,
}

impl SharedBuffer {
    /// A buffer of `size` bytes.
    ///
    /// # Errors
    /// ENOMEM: all buffers together would have more than `most` bytes, or the
    /// host has no memory or descriptor left. EINVAL: `size` is 0.
    pub(crate) fn new(
        size: usize,
        (pool, most): (&Pool, u64),
        keeper: Option<Sender<Task>>,
    ) -> Result<Self, Refusal> {
        let Some(whole) = size.checked_next_multiple_of(PAGE).filter(|_| size > 0) else {
            let reason = format!("a sampling buffer cannot have {size} bytes");
            return Err(Refusal::new(Errno::EINVAL, reason));
        };
        let share = pool.take(whole as u64, most)?;
        let none = |error| none(size, error);
        let file = MemoryFile::new("umpire-samples", whole as u64).map_err(none)?;
        // Before the seals: they refuse mappings that can write.
        let mapping = Mapping::new(file.file(), whole).map_err(none)?;
        file.seal().map_err(none)?;
        let memory = Memory {
            mapping,
            file: Arc::new(file),
            share: Some(share),
        };
        Ok(Self {
            memory: Some(memory),
            size,
            keeper,
        })
    }

    /// The file for tools, and how many bytes of it they are to look at.
    pub(crate) fn shared(&self) -> Option<(Arc<MemoryFile>, u64)> {
        Some((self.memory.as_ref()?.file.clone(), self.size as u64))
    }
}

/// There is none, and why.
pub(crate) fn none(size: usize, why: impl Display) -> Refusal {
    Refusal::new(
        Errno::ENOMEM,
        format!("no sampling buffer of {size} bytes: {why}"),
    )
}

impl SampleBuffer for SharedBuffer {
    fn bytes(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Some(memory) => &mut memory.mapping.bytes()[..self.size],
            // It has it until it is dropped.
            None => &mut [],
        }
    }
}

impl Drop for SharedBuffer {
    fn drop(&mut self) {
        if let (Some(memory), Some(keeper)) = (self.memory.take(), self.keeper.take()) {
            // Without its thread it goes here.
            let _ = keeper.send(Task::GiveBack(memory));
        }
    }
}

/// What the thread of buffers does.
#[derive(Debug)]
pub(crate) enum Task {
    /// Makes a buffer of so many bytes, within this limit for all, and reports it by this
    /// number.
    Make(u64, usize, u64, Sender<Task>),
    GiveBack(Memory),
}

#[cfg(test)]
mod tests;
