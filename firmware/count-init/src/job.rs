//! What is to be run, as the guest reads it.
//!
//! A job is [`MAGIC`], and behind it fields: a byte that says what it is, the length of its text
//! (four bytes, little-endian), the text, and a 0 that is not counted. So the guest passes texts
//! to its kernel where they lie.

use core::ffi::CStr;

/// The first bytes of a job, with its version.
pub(crate) const MAGIC: &[u8; 8] = b"umpjob1\n";

/// The longest job that the guest reads: Linux takes arguments and environment of 2 MiB at most.
pub(crate) const LONGEST: usize = 8 << 20;

/// A part of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Field<'a> {
    /// A path at which the program may be, tried in this order until one can be executed.
    Program(&'a CStr),
    /// An argument of the program, its own name first.
    Argument(&'a CStr),
    /// A variable of its environment, as `NAME=VALUE`.
    Variable(&'a CStr),
    /// Its working directory.
    Folder(&'a CStr),
    /// Its output is a terminal of 80 columns and 24 rows.
    Terminal,
    /// What it changed is to come back as an archive.
    BringBack,
    /// `/tmp` has files of the host, so that no file system of its own is mounted there.
    TmpIsGiven,
}

/// A job cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobError;

/// The fields of a job, in the order in which they were written.
///
/// # Errors
/// It does not begin as one. A field that is wrong is an error in its place, the last one.
pub fn fields(job: &[u8]) -> Result<impl Iterator<Item = Result<Field<'_>, JobError>>, JobError> {
    let rest = job.strip_prefix(MAGIC).ok_or(JobError)?;
    if job.len() > LONGEST {
        return Err(JobError);
    }
    Ok(Fields { rest })
}

struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<Field<'a>, JobError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = self.take().ok_or(JobError);
        if field.is_err() {
            self.rest = &[];
        }
        Some(field)
    }
}

impl<'a> Fields<'a> {
    fn take(&mut self) -> Option<Field<'a>> {
        let (&tag, rest) = self.rest.split_first()?;
        let (len, rest) = rest.split_first_chunk::<4>()?;
        let len = usize::try_from(u32::from_le_bytes(*len)).ok()?;
        let (text, rest) = rest.split_at_checked(len.checked_add(1)?)?;
        // A 0 within would end the text early.
        let text = CStr::from_bytes_with_nul(text).ok()?;
        self.rest = rest;
        Some(match tag {
            b'p' => Field::Program(text),
            b'a' => Field::Argument(text),
            b'e' => Field::Variable(text),
            b'd' => Field::Folder(text),
            b't' => Field::Terminal,
            b'b' => Field::BringBack,
            b'm' => Field::TmpIsGiven,
            _ => return None,
        })
    }
}
