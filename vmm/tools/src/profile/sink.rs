//! What records are given to, one by one.

use std::io;

use super::record::Record;

/// Something that is made of records.
pub trait Sink {
    /// Takes the next record in.
    ///
    /// # Errors
    /// What it writes to takes no more.
    fn take(&mut self, record: &Record) -> io::Result<()>;
}
