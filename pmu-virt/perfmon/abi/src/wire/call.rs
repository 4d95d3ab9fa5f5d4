//! The commands of the specification, with their arguments.

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

/// A row is a command: what its argument is, its number, and where the specification has it.
macro_rules! calls {
    (
        $(some $some:ident($element:ty) = $of_some:ident, $some_doc:literal;)*
        $(given $given:ident($what:ty) = $of_given:ident, $given_doc:literal;)*
        $(asked $asked:ident($answer:ty) = $of_asked:ident, $asked_doc:literal;)*
        $(bare $bare:ident = $of_bare:ident, $bare_doc:literal;)*
    ) => {
        /// A command with its argument. A command that returns something returns it in
        /// its argument, also when it fails: elements before the bad one are done, and
        /// the bad one carries a return flag.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Call {
            /// 3.1.1, with the sampling format's own argument.
            Create(CtxArg, Vec<u8>),
            /// 3.1.5
            Start(Option<StartArg>),
            $(#[doc = $some_doc] $some(Vec<$element>),)*
            $(#[doc = $given_doc] $given($what),)*
            $(#[doc = $asked_doc] $asked($answer),)*
            $(#[doc = $bare_doc] $bare,)*
        }

        impl Shape {
            /// Of a command.
            ///
            /// # Errors
            /// There is no such command.
            fn of(command: u16) -> Result<Self, Refusal> {
                Ok(match command {
                    PFM_CREATE_CONTEXT => Shape::Creation(CtxArg::SIZE),
                    PFM_START => Shape::Optional(StartArg::SIZE),
                    $($of_some => Shape::Vector(<$element>::SIZE),)*
                    $($of_given => Shape::One(<$what>::SIZE),)*
                    $($of_asked => Shape::One(<$answer>::SIZE),)*
                    $($of_bare => Shape::Nothing,)*
                    _ => return Err(Refusal::new(Errno::EINVAL, "there is no such command")),
                })
            }
        }

        impl Call {
            /// The command with an argument of its [`Shape`].
            fn with(command: u16, argument: &[u8], format: &[u8]) -> Result<Self, Refusal> {
                Ok(match command {
                    PFM_CREATE_CONTEXT => Call::Create(one(argument)?, format.to_vec()),
                    PFM_START if argument.is_empty() => Call::Start(None),
                    PFM_START => Call::Start(Some(one(argument)?)),
                    $($of_some => Call::$some(vector(argument)?),)*
                    $($of_given => Call::$given(one(argument)?),)*
                    $($of_asked => Call::$asked(one(argument)?),)*
                    $($of_bare => Call::$bare,)*
                    _ => return Err(Errno::EINVAL.into()),
                })
            }

            /// The command's number.
            #[must_use]
            pub fn command(&self) -> u16 {
                match self {
                    Call::Create(..) => PFM_CREATE_CONTEXT,
                    Call::Start(_) => PFM_START,
                    $(Call::$some(_) => $of_some,)*
                    $(Call::$given(_) => $of_given,)*
                    $(Call::$asked(_) => $of_asked,)*
                    $(Call::$bare => $of_bare,)*
                }
            }

            /// Elements of the argument.
            #[must_use]
            pub fn nargs(&self) -> i32 {
                let count = match self {
                    Call::Create(..) => 1,
                    Call::Start(start) => usize::from(start.is_some()),
                    $(Call::$some(vector) => vector.len(),)*
                    $(Call::$given(_) => 1,)*
                    $(Call::$asked(_) => 1,)*
                    $(Call::$bare => 0,)*
                };
                i32::try_from(count).unwrap_or(i32::MAX)
            }

            /// The argument as a request carries it.
            #[must_use]
            pub fn encode(&self) -> Vec<u8> {
                match self {
                    Call::Create(context, format) => {
                        [context.to_bytes().as_slice(), format].concat()
                    }
                    Call::Start(Some(start)) => start.to_bytes(),
                    $(Call::$given(what) => what.to_bytes(),)*
                    other => other.encode_reply(),
                }
            }

            /// The argument as a reply carries it: what the command may have changed.
            /// Goes back also with an error.
            #[must_use]
            pub fn encode_reply(&self) -> Vec<u8> {
                match self {
                    Call::Create(context, _) => context.to_bytes(),
                    Call::Start(_) => Vec::new(),
                    $(Call::$some(vector) => Record::vector_to_bytes(vector),)*
                    $(Call::$given(_) => Vec::new(),)*
                    $(Call::$asked(answer) => answer.to_bytes(),)*
                    $(Call::$bare => Vec::new(),)*
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
                    Call::Create(context, _) => CtxArg::from_bytes(payload).map(|new| *context = new),
                    Call::Start(_) => expect_nothing(StartArg::NAME, payload),
                    $(Call::$some(vector) => replace(vector, payload),)*
                    $(Call::$given(_) => expect_nothing(<$what>::NAME, payload),)*
                    $(Call::$asked(answer) => {
                        <$answer>::from_bytes(payload).map(|new| *answer = new)
                    })*
                    $(Call::$bare => expect_nothing("command's reply", payload),)*
                }
            }
        }
    };
}

// One element or more, one that stays as it is, one that comes back changed, and none. A
// creation has more behind its element, and a start may have none.
calls! {
    some WritePmcs(PmcArg) = PFM_WRITE_PMCS, "3.1.2";
    some WritePmds(PmdArg) = PFM_WRITE_PMDS, "3.1.3";
    some ReadPmds(PmdArg) = PFM_READ_PMDS, "3.1.4";
    some CreateEvtsets(SetDesc) = PFM_CREATE_EVTSETS, "3.1.10";
    some DeleteEvtsets(SetDesc) = PFM_DELETE_EVTSETS, "3.1.11";
    some GetinfoEvtsets(SetInfo) = PFM_GETINFO_EVTSETS, "3.1.12";
    some GetinfoPmcs(PmcInfo) = PFM_GETINFO_PMCS, "3.1.13";
    some GetinfoPmds(PmdInfo) = PFM_GETINFO_PMDS, "3.1.14";
    given Load(LoadArg) = PFM_LOAD_CONTEXT, "3.1.7";
    given TryLoad(LoadArg) = PFM_TRY_LOAD,
        "The same without waiting for owners of counters: EAGAIN while they are asked.";
    given SetConfig(Config) = PFM_SET_CONFIG, "3.1.16";
    asked GetConfig(Config) = PFM_GET_CONFIG, "3.1.17";
    bare Stop = PFM_STOP, "3.1.6";
    bare Unload = PFM_UNLOAD_CONTEXT, "3.1.8";
    bare Restart = PFM_RESTART, "3.1.9";
}

/// What `arg` and `nargs` of a command have to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
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
    /// Bytes that an argument of `nargs` elements has, without a sampling
    /// format's argument.
    ///
    /// # Errors
    /// `nargs` is not valid for the command, or too large.
    fn bytes(self, nargs: i32, arg_size_max: usize) -> Result<usize, Refusal> {
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
        Self::with(command, argument, format)
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
