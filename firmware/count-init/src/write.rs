//! A job as the host writes it.

use alloc::vec::Vec;

use crate::job::{JobError, LONGEST, MAGIC};

/// What to run in the guest. Texts are bytes without a 0, paths are the guest's and absolute.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// Paths at which the program may be: one, or a name in each folder of PATH.
    pub programs: Vec<Vec<u8>>,
    /// Its arguments, its own name first.
    pub arguments: Vec<Vec<u8>>,
    /// Its environment, as `NAME=VALUE`.
    pub environment: Vec<Vec<u8>>,
    /// Its working directory.
    pub folder: Vec<u8>,
    /// Its output is a terminal.
    pub terminal: bool,
    /// What it changed is to come back.
    pub bring_back: bool,
    /// `/tmp` has files of the host.
    pub tmp_is_given: bool,
}

impl Job {
    /// The job in bytes, for the guest.
    ///
    /// # Errors
    /// A text has a 0 in it, or all of it is longer than 8 MiB.
    pub fn encode(&self) -> Result<Vec<u8>, JobError> {
        let mut job = MAGIC.to_vec();
        let texts = |tag: u8, of: &[Vec<u8>], job: &mut Vec<u8>| {
            of.iter().try_for_each(|text| put(job, tag, text))
        };
        texts(b'p', &self.programs, &mut job)?;
        texts(b'a', &self.arguments, &mut job)?;
        texts(b'e', &self.environment, &mut job)?;
        put(&mut job, b'd', &self.folder)?;
        let flags = [
            (b't', self.terminal),
            (b'b', self.bring_back),
            (b'm', self.tmp_is_given),
        ];
        for (tag, _) in flags.into_iter().filter(|(_, set)| *set) {
            put(&mut job, tag, b"")?;
        }
        if job.len() > LONGEST {
            return Err(JobError);
        }
        Ok(job)
    }
}

fn put(job: &mut Vec<u8>, tag: u8, text: &[u8]) -> Result<(), JobError> {
    if text.contains(&0) {
        return Err(JobError);
    }
    let len = u32::try_from(text.len()).map_err(|_| JobError)?;
    job.push(tag);
    job.extend_from_slice(&len.to_le_bytes());
    job.extend_from_slice(text);
    job.push(0);
    Ok(())
}
