//! The job, as it is read from the host.

use core::ffi::CStr;

use count_init::{End, Field, Step, fields};

use crate::boot::Host;
use crate::sys::{self, Errno, Pointers};

/// What is to be run.
pub(crate) struct Task {
    bytes: &'static [u8],
    pub(crate) arguments: Pointers,
    pub(crate) environment: Pointers,
    pub(crate) folder: &'static CStr,
    pub(crate) terminal: bool,
    pub(crate) bring_back: bool,
    pub(crate) tmp_is_given: bool,
}

impl Task {
    pub(crate) fn read(host: &Host) -> Result<Self, End> {
        let failed = |Errno(errno)| End::Failed {
            step: Step::Job,
            errno,
        };
        let file = sys::open_at(host.root.get(), c"job", sys::READ_ONLY).map_err(failed)?;
        let bytes = sys::read_whole(&file).map_err(failed)?;
        let invalid = || failed(sys::EINVAL);
        let (mut arguments, mut variables) = (0, 0);
        let mut folder = c"/";
        let (mut terminal, mut bring_back, mut tmp_is_given) = (false, false, false);
        for field in fields(bytes).map_err(|_| invalid())? {
            match field.map_err(|_| invalid())? {
                Field::Program(_) => {}
                Field::Argument(_) => arguments += 1,
                Field::Variable(_) => variables += 1,
                Field::Folder(path) => folder = path,
                Field::Terminal => terminal = true,
                Field::BringBack => bring_back = true,
                Field::TmpIsGiven => tmp_is_given = true,
            }
        }
        let mut job = Self {
            bytes,
            arguments: Pointers::new(arguments).map_err(failed)?,
            environment: Pointers::new(variables).map_err(failed)?,
            folder,
            terminal,
            bring_back,
            tmp_is_given,
        };
        for field in job.fields() {
            match field {
                Field::Argument(text) => job.arguments.push(text),
                Field::Variable(text) => job.environment.push(text),
                _ => {}
            }
        }
        Ok(job)
    }

    /// Where the program may be.
    pub(crate) fn programs(&self) -> impl Iterator<Item = &'static CStr> {
        self.fields().filter_map(|field| match field {
            Field::Program(path) => Some(path),
            _ => None,
        })
    }

    fn fields(&self) -> impl Iterator<Item = Field<'static>> + use<> {
        fields(self.bytes).into_iter().flatten().flatten()
    }
}
