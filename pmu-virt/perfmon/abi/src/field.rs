//! How a structure lies in memory: natural alignment, little-endian, as in the
//! System V ABI for x86-64.

use thiserror::Error;

/// Bytes that are no whole structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{given} bytes, a {name} has {wanted}")]
pub struct BadLength {
    /// Its C name.
    pub name: &'static str,
    /// Bytes that came.
    pub given: usize,
    /// Bytes that it has.
    pub wanted: usize,
}

/// What a field of a structure can be.
pub trait Field: Sized {
    /// Bytes.
    const SIZE: usize;
    /// Alignment in bytes.
    const ALIGN: usize;
    /// Writes it to the beginning of `to`, which has at least `SIZE` bytes.
    fn put(&self, to: &mut [u8]);
    /// Reads it from the beginning of `from`, which has at least `SIZE` bytes.
    fn get(from: &[u8]) -> Self;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Field for $type {
            const SIZE: usize = size_of::<$type>();
            const ALIGN: usize = size_of::<$type>();
            fn put(&self, to: &mut [u8]) {
                to[..Self::SIZE].copy_from_slice(&self.to_le_bytes());
            }
            fn get(from: &[u8]) -> Self {
                let mut bytes = [0; size_of::<$type>()];
                bytes.copy_from_slice(&from[..Self::SIZE]);
                Self::from_le_bytes(bytes)
            }
        }
    )*};
}

integers!(u8, u16, u32, i32, u64, i64);

impl<T: Field + Copy + Default, const N: usize> Field for [T; N] {
    const SIZE: usize = N * T::SIZE;
    const ALIGN: usize = T::ALIGN;
    fn put(&self, to: &mut [u8]) {
        for (value, place) in self.iter().zip(to.chunks_exact_mut(T::SIZE)) {
            value.put(place);
        }
    }
    fn get(from: &[u8]) -> Self {
        let mut values = [T::default(); N];
        for (value, place) in values.iter_mut().zip(from.chunks_exact(T::SIZE)) {
            *value = T::get(place);
        }
        values
    }
}

/// `struct timespec`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timespec {
    /// Seconds.
    pub sec: i64,
    /// Nanoseconds, 0 to 999,999,999.
    pub nsec: i64,
}

impl Timespec {
    /// The time in nanoseconds; `None` if it is not normalised, negative, or
    /// longer than 2^64 ns.
    #[must_use]
    pub fn to_ns(self) -> Option<u64> {
        let nsec = u64::try_from(self.nsec)
            .ok()
            .filter(|&n| n < 1_000_000_000)?;
        let sec = u64::try_from(self.sec).ok()?;
        sec.checked_mul(1_000_000_000)?.checked_add(nsec)
    }

    /// A time of `ns` nanoseconds.
    #[must_use]
    pub fn from_ns(ns: u64) -> Self {
        Timespec {
            sec: i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX),
            nsec: i64::try_from(ns % 1_000_000_000).unwrap_or(0),
        }
    }
}

impl Field for Timespec {
    const SIZE: usize = 16;
    const ALIGN: usize = 8;
    fn put(&self, to: &mut [u8]) {
        self.sec.put(to);
        self.nsec.put(&mut to[8..]);
    }
    fn get(from: &[u8]) -> Self {
        Timespec {
            sec: i64::get(from),
            nsec: i64::get(&from[8..]),
        }
    }
}

/// One field of a structure, for the C header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FieldInfo {
    /// Its C name.
    pub name: &'static str,
    /// Its C type, with `[N]` behind it for an array.
    pub c_type: &'static str,
    /// Bytes from the beginning of the structure.
    pub offset: usize,
    /// Bytes.
    pub size: usize,
    /// What it means.
    pub text: &'static str,
}

/// A structure of the interface.
pub trait Record: Sized + Clone + Default {
    /// Its C name.
    const NAME: &'static str;
    /// What it is for.
    const TEXT: &'static str;
    /// Bytes, padding at its end included.
    const SIZE: usize;
    /// Its fields.
    const FIELDS: &'static [FieldInfo];
    /// Writes it to the beginning of `to`, which has at least `SIZE` bytes;
    /// padding becomes 0.
    fn put(&self, to: &mut [u8]);
    /// Reads it from the beginning of `from`, which has at least `SIZE` bytes.
    fn get(from: &[u8]) -> Self;

    /// Its bytes.
    fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; Self::SIZE];
        self.put(&mut bytes);
        bytes
    }

    /// The structure in exactly these bytes.
    ///
    /// # Errors
    /// Their number is another one.
    fn from_bytes(bytes: &[u8]) -> Result<Self, BadLength> {
        if bytes.len() != Self::SIZE {
            return Err(BadLength {
                name: Self::NAME,
                given: bytes.len(),
                wanted: Self::SIZE,
            });
        }
        Ok(Self::get(bytes))
    }

    /// A vector of structures.
    ///
    /// # Errors
    /// The bytes are no whole number of them.
    fn vector_from_bytes(bytes: &[u8]) -> Result<Vec<Self>, BadLength> {
        let whole = bytes.chunks_exact(Self::SIZE);
        if !whole.remainder().is_empty() {
            return Err(BadLength {
                name: Self::NAME,
                given: bytes.len(),
                wanted: Self::SIZE,
            });
        }
        Ok(whole.map(Self::get).collect())
    }

    /// The bytes of a vector of structures.
    fn vector_to_bytes(vector: &[Self]) -> Vec<u8> {
        let mut bytes = vec![0; Self::SIZE * vector.len()];
        for (record, place) in vector.iter().zip(bytes.chunks_exact_mut(Self::SIZE)) {
            record.put(place);
        }
        bytes
    }
}

/// The next multiple of `align`.
pub(crate) const fn aligned(offset: usize, align: usize) -> usize {
    offset.div_ceil(align) * align
}
