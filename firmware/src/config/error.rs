//! What can be wrong with a configuration area.

use core::fmt;

/// The area is malformed. Displays as a few words, which firmware can print.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConfigError {
    /// It does not begin with the magic bytes.
    Magic,
    /// It is of another version.
    Version,
    /// Its length field is wrong.
    Length,
    /// The number of CPUs is 0 or too large.
    Cpus,
    /// More counters than there is room for.
    TooManyCounters,
    /// The boot protocol is unknown.
    Protocol,
    /// The mode is neither 64 nor 32 bits.
    Mode,
    /// Control registers or addresses that do not fit the mode.
    Entry,
    /// A position that no counter has.
    Position,
    /// Flags of a counter that have no meaning.
    Flags,
    /// A control word with bits that must be 0.
    Control,
    /// Bytes that must be 0.
    Reserved,
}

impl ConfigError {
    /// Every one, for tests.
    pub const ALL: [Self; 12] = [
        Self::Magic,
        Self::Version,
        Self::Length,
        Self::Cpus,
        Self::TooManyCounters,
        Self::Protocol,
        Self::Mode,
        Self::Entry,
        Self::Position,
        Self::Flags,
        Self::Control,
        Self::Reserved,
    ];

    /// The words.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Magic => "it does not begin with UMPIREFW",
            Self::Version => "its version is not 1",
            Self::Length => "its length is not 8192",
            Self::Cpus => "the number of CPUs is not 1 to 64",
            Self::TooManyCounters => "it has more than 64 counters",
            Self::Protocol => "the boot protocol is unknown",
            Self::Mode => "the kernel's mode is neither 64 nor 32",
            Self::Entry => "the kernel's registers do not fit its mode",
            Self::Position => "a counter's position is neither 0 to 63 nor 255",
            Self::Flags => "a counter has unknown flags",
            Self::Control => "a control word has bits that must be 0",
            Self::Reserved => "bytes that must be 0 are not",
        }
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words())
    }
}

impl core::error::Error for ConfigError {}
