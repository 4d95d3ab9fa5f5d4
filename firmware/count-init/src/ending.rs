//! How a program ended, as the guest says it. The host takes it as it takes any bytes of a guest.

/// Bytes of an [`Ending`].
pub const ENDING_LEN: usize = 16;

const MAGIC: [u8; 4] = *b"end1";

/// The end of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ending {
    /// How the program ended.
    pub end: End,
    /// Processes that the guest's kernel killed since it had no memory left.
    pub killed_for_memory: u32,
}

/// How the program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With this status.
    Exited(u8),
    /// By this signal.
    Signalled(u8),
    /// It could not be executed.
    NotRun {
        /// Why.
        why: NotRun,
        /// Linux's number of the error.
        errno: u32,
    },
    /// The guest could not be made ready for it.
    Failed {
        /// What failed.
        step: Step,
        /// Linux's number of the error.
        errno: u32,
    },
}

macro_rules! codes {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $code:literal,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {
            $($(#[$doc])* $variant,)*
        }

        impl $name {
            fn code(self) -> u8 {
                match self { $(Self::$variant => $code,)* }
            }

            fn of_code(code: u8) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)* _ => None }
            }
        }
    };
}

codes! {
    /// Why a program could not be executed.
    NotRun {
        /// There is no such file.
        Missing = 1,
        /// It may not be executed, or is a directory.
        Denied = 2,
        /// It is a script, and its interpreter is not there.
        ScriptInterpreter = 3,
        /// The ELF file names an interpreter (the dynamic linker) that is not there.
        ElfInterpreter = 4,
        /// It is text without a line `#!`.
        NoInterpreterLine = 5,
        /// It is an ELF file for another processor, or damaged.
        OtherMachine = 6,
        /// Its working directory is not there.
        Folder = 7,
        /// Arguments and environment are too long.
        TooLong = 8,
        /// The guest has too little memory for it.
        Memory = 9,
        /// As the number of the error says.
        Other = 10,
    }
}

codes! {
    /// What the guest's first program was at when it failed.
    Step {
        /// Reading the job.
        Job = 1,
        /// Mounting `/tmp`.
        Tmp = 2,
        /// Opening standard input.
        Stdin = 3,
        /// Making pipes.
        Pipes = 4,
        /// Opening a terminal.
        Terminal = 5,
        /// Starting a process.
        Process = 6,
        /// Waiting for output and the end.
        Wait = 7,
    }
}

impl Ending {
    /// In bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; ENDING_LEN] {
        let (tag, detail, errno) = match self.end {
            End::Exited(status) => (1, status, 0),
            End::Signalled(signal) => (2, signal, 0),
            End::NotRun { why, errno } => (3, why.code(), errno),
            End::Failed { step, errno } => (4, step.code(), errno),
        };
        let mut bytes = [0; ENDING_LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = tag;
        bytes[5] = detail;
        bytes[8..12].copy_from_slice(&errno.to_le_bytes());
        bytes[12..].copy_from_slice(&self.killed_for_memory.to_le_bytes());
        bytes
    }

    /// Of bytes; `None` if they are no ending.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; ENDING_LEN] = bytes.try_into().ok()?;
        if bytes[..4] != MAGIC || bytes[6..8] != [0, 0] {
            return None;
        }
        let (errno, memory) = bytes[8..].split_first_chunk::<4>()?;
        let errno = u32::from_le_bytes(*errno);
        let killed_for_memory = u32::from_le_bytes(*memory.first_chunk()?);
        let detail = bytes[5];
        let end = match bytes[4] {
            1 if errno == 0 => End::Exited(detail),
            2 if errno == 0 && (1..=64).contains(&detail) => End::Signalled(detail),
            3 => End::NotRun {
                why: NotRun::of_code(detail)?,
                errno,
            },
            4 => End::Failed {
                step: Step::of_code(detail)?,
                errno,
            },
            _ => return None,
        };
        Some(Self {
            end,
            killed_for_memory,
        })
    }
}
