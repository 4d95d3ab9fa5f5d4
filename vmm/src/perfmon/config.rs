//! `--control` and the options beside it, checked.

use std::path::PathBuf;

use super::socket::Access;

/// `--control-connections` without a word.
pub const DEFAULT_CONNECTIONS: u64 = 64;
/// Overflows of one context in a second without `--sampling-rate-max`.
pub const DEFAULT_RATE: u64 = 100_000;

/// `--host-policy`: who gets counters that guest and tools both want.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostPolicyChoice {
    /// Tools get what the guest's model leaves.
    #[default]
    GuestFirst,
    /// Tools get what they ask for.
    HostFirst,
    /// Tools may have this many counters, the guest the others; `None`: half.
    Shares(Option<u8>),
}

impl HostPolicyChoice {
    pub(crate) const ALLOWED: &'static str =
        "guest-first, host-first, shares, or shares:host=N with N counters for tools";

    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text {
            "guest-first" => Some(Self::GuestFirst),
            "host-first" => Some(Self::HostFirst),
            "shares" => Some(Self::Shares(None)),
            other => {
                let number = other.strip_prefix("shares:host=")?;
                // Not "+1" nor "01".
                let host: u8 = number.parse().ok()?;
                (host.to_string() == number).then_some(Self::Shares(Some(host)))
            }
        }
    }
}

impl std::fmt::Display for HostPolicyChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::GuestFirst => f.write_str("guest-first"),
            Self::HostFirst => f.write_str("host-first"),
            Self::Shares(None) => f.write_str("shares"),
            Self::Shares(Some(host)) => write!(f, "shares:host={host}"),
        }
    }
}

/// How host tools are served.
#[derive(Clone, Debug)]
pub struct ControlConfig {
    /// The socket.
    pub socket: PathBuf,
    /// Who may connect.
    pub access: Access,
    /// Most connections at a time.
    pub connections: usize,
    /// Who gets counters that guest and tools both want.
    pub policy: HostPolicyChoice,
    /// Most overflows of one context in a second.
    pub rate: u64,
}

impl ControlConfig {
    /// The defaults, at this socket.
    #[must_use]
    pub fn at(socket: PathBuf) -> Self {
        Self {
            socket,
            access: Access {
                mode: 0o600,
                group: None,
            },
            connections: usize::try_from(DEFAULT_CONNECTIONS).unwrap_or(usize::MAX),
            policy: HostPolicyChoice::default(),
            rate: DEFAULT_RATE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies() {
        fn check(text: &str, expected: Option<HostPolicyChoice>) {
            let parsed = HostPolicyChoice::parse(text);
            assert_eq!(parsed, expected, "{text}");
            if let Some(parsed) = parsed {
                assert_eq!(parsed.to_string(), text);
            }
        }
        check("guest-first", Some(HostPolicyChoice::GuestFirst));
        check("host-first", Some(HostPolicyChoice::HostFirst));
        check("shares", Some(HostPolicyChoice::Shares(None)));
        check("shares:host=3", Some(HostPolicyChoice::Shares(Some(3))));
        check("shares:host=+3", None);
        check("shares:host=", None);
        check("shares:host=256", None);
        check("fair", None);
    }
}
