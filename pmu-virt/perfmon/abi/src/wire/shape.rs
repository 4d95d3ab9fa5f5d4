//! How many elements a command takes, and how large they are.

use super::{Errno, Refusal};
use crate::consts::{
    PFM_CREATE_CONTEXT, PFM_CREATE_EVTSETS, PFM_DELETE_EVTSETS, PFM_GET_CONFIG,
    PFM_GETINFO_EVTSETS, PFM_GETINFO_PMCS, PFM_GETINFO_PMDS, PFM_LOAD_CONTEXT, PFM_READ_PMDS,
    PFM_RESTART, PFM_SET_CONFIG, PFM_START, PFM_STOP, PFM_TRY_LOAD, PFM_UNLOAD_CONTEXT,
    PFM_WRITE_PMCS, PFM_WRITE_PMDS,
};
use crate::field::Record;
use crate::records::{
    Config, CtxArg, LoadArg, PmcArg, PmcInfo, PmdArg, PmdInfo, SetDesc, SetInfo, StartArg,
};

/// What `arg` and `nargs` of a command have to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    /// Both are ignored.
    Nothing,
    /// One structure of this many bytes, or none.
    Optional(usize),
    /// One structure.
    One(usize),
    /// One structure, with a format's argument behind it.
    Creation(usize),
    /// One structure or more.
    Vector(usize),
}

impl Shape {
    /// Of a command.
    ///
    /// # Errors
    /// There is no such command.
    pub(super) fn of(command: u16) -> Result<Self, Refusal> {
        Ok(match command {
            PFM_CREATE_CONTEXT => Shape::Creation(CtxArg::SIZE),
            PFM_WRITE_PMCS => Shape::Vector(PmcArg::SIZE),
            PFM_WRITE_PMDS | PFM_READ_PMDS => Shape::Vector(PmdArg::SIZE),
            PFM_START => Shape::Optional(StartArg::SIZE),
            PFM_STOP | PFM_UNLOAD_CONTEXT | PFM_RESTART => Shape::Nothing,
            PFM_LOAD_CONTEXT | PFM_TRY_LOAD => Shape::One(LoadArg::SIZE),
            PFM_CREATE_EVTSETS | PFM_DELETE_EVTSETS => Shape::Vector(SetDesc::SIZE),
            PFM_GETINFO_EVTSETS => Shape::Vector(SetInfo::SIZE),
            PFM_GETINFO_PMCS => Shape::Vector(PmcInfo::SIZE),
            PFM_GETINFO_PMDS => Shape::Vector(PmdInfo::SIZE),
            PFM_SET_CONFIG | PFM_GET_CONFIG => Shape::One(Config::SIZE),
            _ => return Err(Refusal::new(Errno::EINVAL, "there is no such command")),
        })
    }

    /// Bytes that an argument of `nargs` elements has, without a sampling
    /// format's argument.
    ///
    /// # Errors
    /// `nargs` is not valid for the command, or too large.
    pub(super) fn bytes(self, nargs: i32, arg_size_max: usize) -> Result<usize, Refusal> {
        let fault = |reason| Err(Refusal::new(Errno::EFAULT, reason));
        match (self, nargs) {
            (Shape::Nothing, _) | (Shape::Optional(_), 0) => Ok(0),
            (Shape::Optional(size) | Shape::One(size) | Shape::Creation(size), 1) => Ok(size),
            (Shape::Optional(_), _) => fault("the command takes 1 element or none"),
            (Shape::One(_), _) => fault("the command takes 1 element"),
            (Shape::Creation(_), _) => Err(Refusal::new(
                Errno::EINVAL,
                "contexts are created one at a time: the number of elements is 1",
            )),
            (Shape::Vector(size), _) => match usize::try_from(nargs) {
                Ok(0) | Err(_) => fault("the command takes 1 element or more"),
                Ok(count) if count > arg_size_max / size => {
                    fault("more elements than fit into cf_arg_size_max bytes")
                }
                Ok(count) => Ok(count * size),
            },
        }
    }
}
