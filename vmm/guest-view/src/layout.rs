//! Where a kernel's structures have what is read of them, all of it by the kernel's BTF.

use crate::btf::{Btf, BtfError, Member};

/// Looks up members whose size is known.
#[derive(Clone, Copy)]
pub(crate) struct Types<'a>(pub(crate) &'a Btf);

impl Types<'_> {
    /// Bytes to `path` in `of`, a member of `size` bytes.
    pub(crate) fn at(self, of: &str, path: &str, size: u32) -> Result<u64, BtfError> {
        let found = self.0.member(of, path)?;
        if found.size != size {
            return Err(BtfError::Unexpected(format!("{of}.{path}")));
        }
        Ok(found.offset.into())
    }

    /// A pointer, or another word of the processor's.
    pub(crate) fn u64(self, of: &str, path: &str) -> Result<u64, BtfError> {
        self.at(of, path, 8)
    }

    /// A number of one, two, four or eight bytes: kernels make some smaller.
    pub(crate) fn number(self, of: &str, path: &str) -> Result<Member, BtfError> {
        let found = self.0.member(of, path)?;
        let right = matches!(found.size, 1 | 2 | 4 | 8);
        let unexpected = || BtfError::Unexpected(format!("{of}.{path}"));
        right.then_some(found).ok_or_else(unexpected)
    }

    /// A number of 32 bits.
    pub(crate) fn u32(self, of: &str, path: &str) -> Result<u64, BtfError> {
        self.at(of, path, 4)
    }
}
