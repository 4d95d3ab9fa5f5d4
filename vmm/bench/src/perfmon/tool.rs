//! A tool's ways: sampling formats, and commands that have to succeed.

use perfmon_abi::consts::{self, COMPACT_FORMAT, DEFAULT_FORMAT, DOUBLE_FORMAT};
use perfmon_abi::{
    CompactArg, CompactHeader, DefaultArg, DefaultHeader, DoubleHeader, LoadArg, Record,
};
use serde::Serialize;
use umpire_perfmon::{Call, Client, ContextHandle, Mapping};

use crate::error::BenchError;

/// A built-in sampling format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// One buffer, masked when it is full.
    Default,
    /// Two halves in turn.
    Double,
    /// Umpire's own, for high rates.
    Compact,
}

impl Format {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Default, Self::Double, Self::Compact];

    /// Name for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Double => "double",
            Self::Compact => "compact",
        }
    }

    pub(super) fn uuid(self) -> [u8; 16] {
        match self {
            Self::Default => DEFAULT_FORMAT,
            Self::Double => DOUBLE_FORMAT,
            Self::Compact => COMPACT_FORMAT,
        }
    }

    pub(super) fn argument(self, buf_size: u64) -> Vec<u8> {
        match self {
            Self::Default | Self::Double => DefaultArg {
                buf_size,
                buf_flags: 0,
            }
            .to_bytes(),
            Self::Compact => CompactArg {
                buf_size,
                ..CompactArg::default()
            }
            .to_bytes(),
        }
    }

    /// Samples in the buffer now, and samples that the format says are lost. Of
    /// the compact format: those that were ever written.
    pub(super) fn samples(self, buffer: &Mapping) -> Option<(u64, u64)> {
        Some(match self {
            Self::Default => (header::<DefaultHeader>(buffer)?.count, 0),
            Self::Double => {
                let header = header::<DoubleHeader>(buffer)?;
                // A half that was given back keeps its number until it is filled anew.
                let halves = header.state.iter().zip(header.count);
                let mine = halves.filter(|(state, _)| **state != consts::PFM_DOUBLE_HALF_FREE);
                (mine.map(|(_, count)| count).sum(), header.lost)
            }
            Self::Compact => (header::<CompactHeader>(buffer)?.samples, 0),
        })
    }
}

/// The header of a buffer.
pub(super) fn header<T: Record>(buffer: &Mapping) -> Option<T> {
    T::from_bytes(&buffer.copy(0, T::SIZE)?).ok()
}

fn name_of(command: u16) -> &'static str {
    let mut commands = consts::ALL.iter();
    let named = commands
        .find(|(_, number, text)| *number == u64::from(command) && text.starts_with("Command:"));
    named.map_or("a command", |(name, ..)| name)
}

/// A command that has to succeed.
pub(super) fn call(
    client: &Client,
    context: &ContextHandle,
    mut what: Call,
) -> Result<Call, BenchError> {
    let name = name_of(what.command());
    let done = client.call(context, &mut what);
    done.map(|()| what)
        .map_err(|refusal| BenchError::refused(name, refusal))
}

/// Attaches a context to a vCPU and lets it count.
pub(super) fn start(
    client: &Client,
    context: &ContextHandle,
    vcpu: usize,
) -> Result<(), BenchError> {
    let pid = i32::try_from(vcpu).unwrap_or(i32::MAX);
    call(client, context, Call::Load(LoadArg { pid, set: 0 }))?;
    call(client, context, Call::Start(None)).map(|_| ())
}

/// Detaches it.
pub(super) fn end(client: &Client, context: &ContextHandle) -> Result<(), BenchError> {
    call(client, context, Call::Unload).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_names() {
        assert_eq!(name_of(Call::Restart.command()), "PFM_RESTART");
        assert_eq!(name_of(Call::Stop.command()), "PFM_STOP");
        assert_eq!(name_of(u16::MAX), "a command");
    }
}
