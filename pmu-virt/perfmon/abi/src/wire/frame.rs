//! The headers of requests and replies.

use thiserror::Error;

use super::{Errno, MAX_PACKET, MAX_PAYLOAD, MAX_REASON, Refusal, Subcode, VERSION};

/// A packet is not a frame of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FrameError {
    /// Shorter than a header.
    #[error("a packet of {0} bytes has no header")]
    Short(usize),
    /// Longer than [`MAX_PACKET`].
    #[error("a packet of {0} bytes exceeds {MAX_PACKET}")]
    Long(usize),
    /// It does not begin with the magic number.
    #[error("the packet does not begin with this protocol's number but with {0:#010x}")]
    Magic(u32),
    /// The peer's version is another one.
    #[error("the peer speaks version {0} of the protocol, this is version {VERSION}")]
    Version(u16),
    /// The lengths in the header do not add up to the packet's.
    #[error("the header tells of {told} bytes behind it, there are {given}")]
    Length {
        /// What the header's lengths add up to.
        told: u64,
        /// Bytes behind the header.
        given: usize,
    },
    /// A reason that is not UTF-8, or is longer than [`MAX_REASON`].
    #[error("the reply's reason is no text of at most {MAX_REASON} bytes")]
    Reason,
}

/// A request. On the wire: magic u32, version u16, command u16, id u32, context
/// u32, nargs i32, length of the payload u32, payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// `PFM_*`, or an [`Extension`](super::Extension)'s number.
    pub command: u16,
    /// The client's choice; comes back in the reply.
    pub id: u32,
    /// Handle of a context, from BIND or a creation;
    /// [`NO_CONTEXT`](super::NO_CONTEXT) where none is meant.
    pub context: u32,
    /// Elements of the argument, as the caller of `perfmonctl` said.
    pub nargs: i32,
    /// The argument.
    pub payload: &'a [u8],
}

/// A reply. On the wire: magic u32, version u16, command u16, id u32, context
/// u32, errno u16, sub-code u16, lengths of payload and reason u32 each, payload, reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply<'a> {
    /// The request's.
    pub command: u16,
    /// The request's.
    pub id: u32,
    /// The request's; for BIND and a creation the new handle.
    pub context: u32,
    /// 0, or an error number.
    pub errno: i32,
    /// With an error: what exactly was wrong.
    pub subcode: Subcode,
    /// The argument as the command left it.
    pub payload: &'a [u8],
    /// With an error: what was wrong, one line.
    pub reason: &'a str,
}

/// The command of a packet, all words of its header, and what is behind them.
fn open<const WORDS: usize>(
    packet: &[u8],
    magic: u32,
) -> Result<(u16, [u32; WORDS], &[u8]), FrameError> {
    if packet.len() > MAX_PACKET {
        return Err(FrameError::Long(packet.len()));
    }
    let (head, rest) = packet
        .split_at_checked(4 * WORDS)
        .ok_or(FrameError::Short(packet.len()))?;
    let mut words = [0; WORDS];
    for (word, bytes) in words.iter_mut().zip(head.as_chunks().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    if words[0] != magic {
        return Err(FrameError::Magic(words[0]));
    }
    match (words[1] & 0xffff) as u16 {
        VERSION => Ok(((words[1] >> 16) as u16, words, rest)),
        version => Err(FrameError::Version(version)),
    }
}

/// The word of a header that has the version and `command`.
fn versioned(command: u16) -> u32 {
    u32::from(VERSION) | u32::from(command) << 16
}

fn length(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX)
}

impl<'a> Request<'a> {
    /// `PFRQ`.
    pub const MAGIC: u32 = u32::from_le_bytes(*b"PFRQ");
    /// Bytes of the header.
    pub const HEADER: usize = 24;

    /// The request in a packet.
    ///
    /// # Errors
    /// The packet is none.
    pub fn decode(packet: &'a [u8]) -> Result<Self, FrameError> {
        let (command, words, payload) = open(packet, Self::MAGIC)?;
        let [_, _, id, context, nargs, told] = words;
        let (told, given) = (u64::from(told), payload.len());
        if told != given as u64 {
            return Err(FrameError::Length { told, given });
        }
        Ok(Request {
            command,
            id,
            context,
            nargs: nargs.cast_signed(),
            payload,
        })
    }

    /// The packet of this request.
    ///
    /// # Errors
    /// The payload is longer than [`MAX_PAYLOAD`].
    pub fn encode(&self) -> Result<Vec<u8>, FrameError> {
        if self.payload.len() > MAX_PAYLOAD {
            return Err(FrameError::Long(Self::HEADER + self.payload.len()));
        }
        Ok([self.header().as_slice(), self.payload].concat())
    }

    /// The header alone, for who has the payload behind it already. A payload
    /// longer than [`MAX_PAYLOAD`] makes a request that nobody decodes.
    #[must_use]
    pub fn header(&self) -> [u8; Request::HEADER] {
        let words = [
            Self::MAGIC,
            versioned(self.command),
            self.id,
            self.context,
            self.nargs.cast_unsigned(),
            length(self.payload),
        ];
        let mut header = [0; Request::HEADER];
        header.copy_from_slice(words.map(u32::to_le_bytes).as_flattened());
        header
    }

    /// A reply to this request: the argument as the command left it, and why
    /// it was refused, if it was.
    #[must_use]
    pub fn reply<'r>(&self, payload: &'r [u8], refusal: Option<&'r Refusal>) -> Reply<'r> {
        Reply {
            command: self.command,
            id: self.id,
            context: self.context,
            errno: refusal.map_or(0, |refusal| refusal.errno.number()),
            subcode: refusal.map_or(Subcode::None, |refusal| refusal.subcode),
            payload,
            reason: refusal.map_or("", |refusal| &refusal.reason),
        }
    }
}

impl<'a> Reply<'a> {
    /// `PFRP`.
    pub const MAGIC: u32 = u32::from_le_bytes(*b"PFRP");
    /// Bytes of the header.
    pub const HEADER: usize = 28;

    /// The reply in a packet.
    ///
    /// # Errors
    /// The packet is none.
    pub fn decode(packet: &'a [u8]) -> Result<Self, FrameError> {
        let (command, words, rest) = open(packet, Self::MAGIC)?;
        let [_, _, id, context, errno, payload, reason] = words;
        let told = u64::from(payload) + u64::from(reason);
        let parts = usize::try_from(payload)
            .ok()
            .filter(|_| told == rest.len() as u64)
            .and_then(|payload| rest.split_at_checked(payload));
        let Some((payload, reason)) = parts else {
            return Err(FrameError::Length {
                told,
                given: rest.len(),
            });
        };
        if reason.len() > MAX_REASON {
            return Err(FrameError::Reason);
        }
        Ok(Reply {
            command,
            id,
            context,
            errno: (errno & 0xffff).cast_signed(),
            subcode: Subcode::from_number((errno >> 16) as u16),
            payload,
            reason: std::str::from_utf8(reason).map_err(|_| FrameError::Reason)?,
        })
    }

    /// The packet of this reply. A reason longer than [`MAX_REASON`] is cut, and an error
    /// number has 16 bits.
    ///
    /// # Errors
    /// The payload is longer than [`MAX_PAYLOAD`].
    pub fn encode(&self) -> Result<Vec<u8>, FrameError> {
        if self.payload.len() > MAX_PAYLOAD {
            return Err(FrameError::Long(Self::HEADER + self.payload.len()));
        }
        let mut end = self.reason.len().min(MAX_REASON);
        while !self.reason.is_char_boundary(end) {
            end -= 1;
        }
        let reason = &self.reason[..end];
        let words = [
            Self::MAGIC,
            versioned(self.command),
            self.id,
            self.context,
            self.errno.cast_unsigned() & 0xffff | u32::from(self.subcode.number()) << 16,
            length(self.payload),
            length(reason.as_bytes()),
        ];
        let header = words.map(u32::to_le_bytes);
        Ok([header.as_flattened(), self.payload, reason.as_bytes()].concat())
    }

    /// Whether the command was done, and if not, why. An error number that the
    /// interface does not know becomes `EPROTO`.
    ///
    /// # Errors
    /// It was refused.
    pub fn result(&self) -> Result<(), Refusal> {
        match self.errno {
            0 => Ok(()),
            number => Err(match Errno::from_number(number) {
                Some(errno) if self.reason.is_empty() => Refusal::from(errno).because(self.subcode),
                Some(errno) => Refusal::new(errno, self.reason.to_owned()).because(self.subcode),
                None => Refusal::new(
                    Errno::EPROTO,
                    format!(
                        "the peer answered with error {number}, which is none of the interface's"
                    ),
                ),
            }),
        }
    }
}
