//! Which formats there are (§3.5.8, §3.5.9).

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use perfmon_abi::wire::{Errno, Refusal};

use super::{CompactFormat, DefaultFormat, DoubleFormat, SamplingFormat};

/// The formats of a machine. They can be added and removed while it runs; a
/// context keeps the format that it was made with.
#[derive(Debug, Default)]
pub struct FormatRegistry {
    formats: RwLock<Vec<Arc<dyn SamplingFormat>>>,
}

impl FormatRegistry {
    /// With the formats that every machine has: default, double, compact.
    #[must_use]
    pub fn with_builtin() -> Self {
        let formats: Vec<Arc<dyn SamplingFormat>> = vec![
            Arc::new(DefaultFormat),
            Arc::new(DoubleFormat),
            Arc::new(CompactFormat),
        ];
        FormatRegistry {
            formats: RwLock::new(formats),
        }
    }

    /// Adds a format (`pfm_register_buffer_fmt`).
    ///
    /// # Errors
    /// EINVAL: it has no name or no UUID. EBUSY: its UUID is taken.
    pub fn register(&self, format: Arc<dyn SamplingFormat>) -> Result<(), Refusal> {
        if format.name().is_empty() || format.uuid() == [0; 16] {
            let reason = "a sampling format needs a name and a UUID";
            return Err(Refusal::new(Errno::EINVAL, reason));
        }
        let mut formats = self.write();
        if formats.iter().any(|known| known.uuid() == format.uuid()) {
            let reason = "a sampling format with this UUID is registered already";
            return Err(Refusal::new(Errno::EBUSY, reason));
        }
        formats.push(format);
        Ok(())
    }

    /// Removes a format (`pfm_unregister_buffer_fmt`).
    ///
    /// # Errors
    /// EINVAL: there is no such format.
    pub fn unregister(&self, uuid: [u8; 16]) -> Result<(), Refusal> {
        let mut formats = self.write();
        let Some(at) = formats.iter().position(|known| known.uuid() == uuid) else {
            let reason = "no sampling format with this UUID is registered";
            return Err(Refusal::new(Errno::EINVAL, reason));
        };
        formats.remove(at);
        Ok(())
    }

    /// The format of a UUID.
    #[must_use]
    pub fn find(&self, uuid: [u8; 16]) -> Option<Arc<dyn SamplingFormat>> {
        let formats = self.read();
        formats.iter().find(|known| known.uuid() == uuid).cloned()
    }

    /// Every format, in the order of registration.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<dyn SamplingFormat>> {
        self.read().clone()
    }

    // No holder of the lock leaves anything half done.
    fn read(&self) -> RwLockReadGuard<'_, Vec<Arc<dyn SamplingFormat>>> {
        self.formats.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Arc<dyn SamplingFormat>>> {
        self.formats.write().unwrap_or_else(PoisonError::into_inner)
    }
}
