//! Commands that only a socket needs.

use super::{Errno, Refusal};
use crate::field::{BadLength, Field};

/// A command of this protocol. None takes an argument: `nargs` is 0 and the
/// payload empty.
///
/// JSON that exceeds [`MAX_PAYLOAD`](super::MAX_PAYLOAD) comes in a memory file
/// instead, whose descriptor is with the reply; the payload is empty then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Extension {
    /// Asks who serves; the reply's payload is [`Hello`].
    Hello = 0x100,
    /// Names a context: its descriptor comes with the request (`SCM_RIGHTS`),
    /// the reply's context is a handle that is valid on this connection, its
    /// payload [`Bound`]. Bound again, a context keeps its handle. EBADF: not the
    /// descriptor of a context of this server.
    Bind = 0x101,
    /// Gives a handle back.
    Unbind = 0x102,
    /// Asks for the sampling buffer of a context; its descriptor comes with the
    /// reply, whose payload is [`Buffer`]. EINVAL: the context has none.
    GetBuffer = 0x103,
    /// Asks whether somebody counts on cores, whichever vCPU they run; the reply's payload
    /// is [`SystemWide`].
    SystemWide = 0x104,
    /// Asks for the sampling formats: JSON, a list of
    /// [`FormatInfo`](super::info::FormatInfo).
    Formats = 0x110,
    /// Asks what there is and who holds what: JSON,
    /// [`MachineInfo`](super::info::MachineInfo).
    List = 0x111,
    /// Asks for the PMU: JSON, [`ModelInfo`](super::info::ModelInfo).
    Model = 0x112,
}

impl Extension {
    /// Every one of them.
    pub const ALL: &[Extension] = &[
        Extension::Hello,
        Extension::Bind,
        Extension::Unbind,
        Extension::GetBuffer,
        Extension::SystemWide,
        Extension::Formats,
        Extension::List,
        Extension::Model,
    ];

    /// Its number.
    #[must_use]
    pub fn number(self) -> u16 {
        self as u16
    }

    /// The extension of this number; `None` if there is none.
    #[must_use]
    pub fn from_number(number: u16) -> Option<Self> {
        let all = Extension::ALL.iter().copied();
        all.into_iter().find(|it| it.number() == number)
    }

    /// The extension in a request.
    ///
    /// # Errors
    /// EINVAL: there is none of this number, or it came with an argument.
    pub fn decode(command: u16, nargs: i32, payload: &[u8]) -> Result<Self, Refusal> {
        let extension = Extension::from_number(command).ok_or_else(|| {
            Refusal::new(Errno::EINVAL, format!("there is no command {command:#x}"))
        })?;
        if nargs != 0 || !payload.is_empty() {
            return Err(Refusal::new(
                Errno::EINVAL,
                format!("command {command:#x} takes no argument"),
            ));
        }
        Ok(extension)
    }
}

macro_rules! answers {
    ($($text:literal $name:ident { $($field_text:literal $field:ident: $type:ty,)* })*) => {$(
        #[doc = $text]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name {
            $(#[doc = $field_text] pub $field: $type,)*
        }

        impl $name {
            /// Bytes on the wire: the fields in their order, nothing between them.
            pub const SIZE: usize = 0 $(+ <$type as Field>::SIZE)*;

            /// Its bytes.
            #[must_use]
            pub fn to_bytes(&self) -> Vec<u8> {
                let mut bytes = Vec::with_capacity(Self::SIZE);
                $(bytes.extend(self.$field.to_le_bytes());)*
                bytes
            }

            /// The answer in exactly these bytes.
            ///
            /// # Errors
            /// Their number is another one.
            pub fn from_bytes(bytes: &[u8]) -> Result<Self, BadLength> {
                if bytes.len() != Self::SIZE {
                    return Err(BadLength {
                        name: stringify!($name),
                        given: bytes.len(),
                        wanted: Self::SIZE,
                    });
                }
                let mut rest = bytes;
                $(
                    let (head, tail) = rest.split_at(<$type as Field>::SIZE);
                    let $field = <$type as Field>::get(head);
                    rest = tail;
                )*
                let _ = rest;
                Ok($name { $($field),* })
            }
        }
    )*};
}

answers! {
    "Who serves."
    Hello {
        "Process id of the VMM, in its own name space."
        pid: u32,
        "Version of the specification (`PFM_VERSION`)."
        version: u32,
        "Most bytes of a packet."
        max_packet: u32,
        "vCPUs of the VM."
        vcpus: u32,
        "Cores that run them."
        cores: u32,
    }

    "A context that was bound."
    Bound {
        "`PFM_FL_*` that it was created with."
        flags: u32,
        "Counts the times that it was loaded; messages of an earlier time are stale."
        generation: u16,
        "Size of its sampling buffer in bytes; 0: it has none."
        buffer_size: u64,
    }

    "A sampling buffer."
    Buffer {
        "Its size in bytes."
        size: u64,
    }

    "Contexts for cores (`PFM_FL_SYSTEM_WIDE`)."
    SystemWide {
        "Those that are attached."
        contexts: u32,
        "How many were attached so far, those that are gone included."
        loads: u64,
    }
}
