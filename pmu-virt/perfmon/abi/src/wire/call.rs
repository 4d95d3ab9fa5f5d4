//! The commands of the specification, with their arguments.

use super::shape::Shape;
use super::{Errno, Refusal};
use crate::consts::{
    PFM_CREATE_CONTEXT, PFM_CREATE_EVTSETS, PFM_DELETE_EVTSETS, PFM_GET_CONFIG,
    PFM_GETINFO_EVTSETS, PFM_GETINFO_PMCS, PFM_GETINFO_PMDS, PFM_LOAD_CONTEXT, PFM_READ_PMDS,
    PFM_REGFL_READ_RESET, PFM_RESTART, PFM_SET_CONFIG, PFM_START, PFM_STOP, PFM_TRY_LOAD,
    PFM_UNLOAD_CONTEXT, PFM_WRITE_PMCS, PFM_WRITE_PMDS,
};
use crate::field::{BadLength, Record};
use crate::records::{
    Config, CtxArg, LoadArg, PmcArg, PmcInfo, PmdArg, PmdInfo, SetDesc, SetInfo, StartArg,
};

/// A command with its argument. A command that returns something returns it in
/// its argument, also when it fails: elements before the bad one are done, and
/// the bad one carries a return flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// 3.1.1, with the sampling format's own argument.
    Create(CtxArg, Vec<u8>),
    /// 3.1.2
    WritePmcs(Vec<PmcArg>),
    /// 3.1.3
    WritePmds(Vec<PmdArg>),
    /// 3.1.4
    ReadPmds(Vec<PmdArg>),
    /// 3.1.5
    Start(Option<StartArg>),
    /// 3.1.6
    Stop,
    /// 3.1.7
    Load(LoadArg),
    /// The same without waiting for owners of counters: EAGAIN while they are asked.
    TryLoad(LoadArg),
    /// 3.1.8
    Unload,
    /// 3.1.9
    Restart,
    /// 3.1.10
    CreateEvtsets(Vec<SetDesc>),
    /// 3.1.11
    DeleteEvtsets(Vec<SetDesc>),
    /// 3.1.12
    GetinfoEvtsets(Vec<SetInfo>),
    /// 3.1.13
    GetinfoPmcs(Vec<PmcInfo>),
    /// 3.1.14
    GetinfoPmds(Vec<PmdInfo>),
    /// 3.1.16
    SetConfig(Config),
    /// 3.1.17
    GetConfig(Config),
}

fn fault(error: BadLength) -> Refusal {
    Refusal::new(Errno::EFAULT, format!("the argument is not whole: {error}"))
}

fn one<T: Record>(bytes: &[u8]) -> Result<T, Refusal> {
    T::from_bytes(bytes).map_err(fault)
}

fn vector<T: Record>(bytes: &[u8]) -> Result<Vec<T>, Refusal> {
    T::vector_from_bytes(bytes).map_err(fault)
}

impl Call {
    /// Bytes that the argument of a command with `nargs` elements has; those of
    /// a sampling format come on top. Does not allocate.
    ///
    /// # Errors
    /// As [`Call::decode`], as far as they do not depend on the bytes.
    pub fn argument_bytes(command: u16, nargs: i32, arg_size_max: usize) -> Result<usize, Refusal> {
        Shape::of(command)?.bytes(nargs, arg_size_max)
    }

    /// The command in a request. `arg_size_max` is `cf_arg_size_max`.
    ///
    /// # Errors
    /// EINVAL: no such command, or a creation with `nargs` other than 1. EFAULT:
    /// `nargs` is not what the command takes, is more than `arg_size_max`
    /// allows, or the bytes are not this many elements. E2BIG: a format's
    /// argument exceeds `arg_size_max`.
    pub fn decode(
        command: u16,
        nargs: i32,
        payload: &[u8],
        arg_size_max: usize,
    ) -> Result<Self, Refusal> {
        let shape = Shape::of(command)?;
        let bytes = shape.bytes(nargs, arg_size_max)?;
        let parts = match (payload.split_at_checked(bytes), shape) {
            (Some((_, format)), Shape::Creation(_)) if format.len() > arg_size_max => {
                return Err(Refusal::new(
                    Errno::E2BIG,
                    format!(
                        "the sampling format's argument has {} bytes, the most is {arg_size_max} (cf_arg_size_max)",
                        format.len()
                    ),
                ));
            }
            (parts, Shape::Creation(_) | Shape::Nothing) => parts,
            (parts, _) => parts.filter(|(_, more)| more.is_empty()),
        };
        let Some((argument, format)) = parts else {
            let came = payload.len();
            let reason = format!("{nargs} elements have {bytes} bytes, {came} came");
            return Err(Refusal::new(Errno::EFAULT, reason));
        };
        Ok(match command {
            PFM_CREATE_CONTEXT => Call::Create(one(argument)?, format.to_vec()),
            PFM_WRITE_PMCS => Call::WritePmcs(vector(argument)?),
            PFM_WRITE_PMDS => Call::WritePmds(vector(argument)?),
            PFM_READ_PMDS => Call::ReadPmds(vector(argument)?),
            PFM_START if argument.is_empty() => Call::Start(None),
            PFM_START => Call::Start(Some(one(argument)?)),
            PFM_STOP => Call::Stop,
            PFM_LOAD_CONTEXT => Call::Load(one(argument)?),
            PFM_TRY_LOAD => Call::TryLoad(one(argument)?),
            PFM_UNLOAD_CONTEXT => Call::Unload,
            PFM_RESTART => Call::Restart,
            PFM_CREATE_EVTSETS => Call::CreateEvtsets(vector(argument)?),
            PFM_DELETE_EVTSETS => Call::DeleteEvtsets(vector(argument)?),
            PFM_GETINFO_EVTSETS => Call::GetinfoEvtsets(vector(argument)?),
            PFM_GETINFO_PMCS => Call::GetinfoPmcs(vector(argument)?),
            PFM_GETINFO_PMDS => Call::GetinfoPmds(vector(argument)?),
            PFM_SET_CONFIG => Call::SetConfig(one(argument)?),
            PFM_GET_CONFIG => Call::GetConfig(one(argument)?),
            _ => return Err(Errno::EINVAL.into()),
        })
    }

    /// The command's number.
    #[must_use]
    pub fn command(&self) -> u16 {
        match self {
            Call::Create(..) => PFM_CREATE_CONTEXT,
            Call::WritePmcs(_) => PFM_WRITE_PMCS,
            Call::WritePmds(_) => PFM_WRITE_PMDS,
            Call::ReadPmds(_) => PFM_READ_PMDS,
            Call::Start(_) => PFM_START,
            Call::Stop => PFM_STOP,
            Call::Load(_) => PFM_LOAD_CONTEXT,
            Call::TryLoad(_) => PFM_TRY_LOAD,
            Call::Unload => PFM_UNLOAD_CONTEXT,
            Call::Restart => PFM_RESTART,
            Call::CreateEvtsets(_) => PFM_CREATE_EVTSETS,
            Call::DeleteEvtsets(_) => PFM_DELETE_EVTSETS,
            Call::GetinfoEvtsets(_) => PFM_GETINFO_EVTSETS,
            Call::GetinfoPmcs(_) => PFM_GETINFO_PMCS,
            Call::GetinfoPmds(_) => PFM_GETINFO_PMDS,
            Call::SetConfig(_) => PFM_SET_CONFIG,
            Call::GetConfig(_) => PFM_GET_CONFIG,
        }
    }

    /// Whether the command is for a context; the others ignore the descriptor.
    #[must_use]
    pub fn needs_context(command: u16) -> bool {
        !matches!(
            command,
            PFM_CREATE_CONTEXT
                | PFM_GETINFO_PMCS
                | PFM_GETINFO_PMDS
                | PFM_SET_CONFIG
                | PFM_GET_CONFIG
        )
    }

    /// Whether the command tells values and changes none.
    #[must_use]
    pub fn only_reads(&self) -> bool {
        let resets = |pmd: &PmdArg| pmd.flags & PFM_REGFL_READ_RESET != 0;
        match self {
            Call::ReadPmds(vector) => !vector.iter().any(resets),
            Call::GetinfoEvtsets(_) | Call::GetinfoPmcs(_) | Call::GetinfoPmds(_) => true,
            _ => false,
        }
    }

    /// Elements of the argument.
    #[must_use]
    pub fn nargs(&self) -> i32 {
        let count = match self {
            Call::Create(..)
            | Call::Load(_)
            | Call::TryLoad(_)
            | Call::SetConfig(_)
            | Call::GetConfig(_) => 1,
            Call::Start(start) => usize::from(start.is_some()),
            Call::Stop | Call::Unload | Call::Restart => 0,
            Call::WritePmcs(vector) => vector.len(),
            Call::WritePmds(vector) | Call::ReadPmds(vector) => vector.len(),
            Call::CreateEvtsets(vector) | Call::DeleteEvtsets(vector) => vector.len(),
            Call::GetinfoEvtsets(vector) => vector.len(),
            Call::GetinfoPmcs(vector) => vector.len(),
            Call::GetinfoPmds(vector) => vector.len(),
        };
        i32::try_from(count).unwrap_or(i32::MAX)
    }

    /// The argument as a request carries it.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Call::Create(context, format) => [context.to_bytes().as_slice(), format].concat(),
            Call::Start(Some(start)) => start.to_bytes(),
            Call::Load(load) | Call::TryLoad(load) => load.to_bytes(),
            Call::SetConfig(config) => config.to_bytes(),
            other => other.encode_reply(),
        }
    }

    /// The argument as a reply carries it: what the command may have changed.
    /// Goes back also with an error.
    #[must_use]
    pub fn encode_reply(&self) -> Vec<u8> {
        match self {
            Call::Start(_)
            | Call::Stop
            | Call::Load(_)
            | Call::TryLoad(_)
            | Call::Unload
            | Call::Restart
            | Call::SetConfig(_) => Vec::new(),
            Call::Create(context, _) => context.to_bytes(),
            Call::WritePmcs(vector) => Record::vector_to_bytes(vector),
            Call::WritePmds(vector) | Call::ReadPmds(vector) => Record::vector_to_bytes(vector),
            Call::CreateEvtsets(vector) | Call::DeleteEvtsets(vector) => {
                Record::vector_to_bytes(vector)
            }
            Call::GetinfoEvtsets(vector) => Record::vector_to_bytes(vector),
            Call::GetinfoPmcs(vector) => Record::vector_to_bytes(vector),
            Call::GetinfoPmds(vector) => Record::vector_to_bytes(vector),
            Call::GetConfig(config) => config.to_bytes(),
        }
    }

    /// Takes over what a reply says that the command made of its argument. An
    /// empty payload changes nothing: the command was refused before the
    /// argument was looked at.
    ///
    /// # Errors
    /// The reply's payload is not this command's; the argument is unchanged.
    pub fn take_reply(&mut self, payload: &[u8]) -> Result<(), BadLength> {
        if payload.is_empty() {
            return Ok(());
        }
        match self {
            Call::Start(_) => expect_nothing("pfarg_start_t", payload),
            Call::Load(_) | Call::TryLoad(_) => expect_nothing("pfarg_load_t", payload),
            Call::SetConfig(_) => expect_nothing("pfarg_config_t", payload),
            Call::Stop | Call::Unload | Call::Restart => expect_nothing("command's reply", payload),
            Call::Create(context, _) => CtxArg::from_bytes(payload).map(|new| *context = new),
            Call::WritePmcs(vector) => replace(vector, payload),
            Call::WritePmds(vector) | Call::ReadPmds(vector) => replace(vector, payload),
            Call::CreateEvtsets(vector) | Call::DeleteEvtsets(vector) => replace(vector, payload),
            Call::GetinfoEvtsets(vector) => replace(vector, payload),
            Call::GetinfoPmcs(vector) => replace(vector, payload),
            Call::GetinfoPmds(vector) => replace(vector, payload),
            Call::GetConfig(config) => Config::from_bytes(payload).map(|new| *config = new),
        }
    }
}

fn expect_nothing(name: &'static str, payload: &[u8]) -> Result<(), BadLength> {
    Err(BadLength {
        name,
        given: payload.len(),
        wanted: 0,
    })
}

fn replace<T: Record>(vector: &mut Vec<T>, payload: &[u8]) -> Result<(), BadLength> {
    let wanted = vector.len() * T::SIZE;
    if payload.len() != wanted {
        return Err(BadLength {
            name: T::NAME,
            given: payload.len(),
            wanted,
        });
    }
    *vector = T::vector_from_bytes(payload)?;
    Ok(())
}
