//! `--host-policy`: guests or host contexts first, and what a context may rely
//! on under it.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Who comes first at the physical counters of a core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HostPolicy {
    /// Host contexts get what the guest cannot use.
    #[default]
    GuestFirst,
    /// Host contexts get what they ask for.
    HostFirst,
    /// Both are guaranteed a part.
    Shares {
        /// Counters that host contexts may always have; half of them if none
        /// is said.
        host: Option<u8>,
    },
}

impl HostPolicy {
    /// How many of `slots` counters are the guest's, if it can use so many.
    pub(crate) fn guest_share(self, slots: usize) -> usize {
        match self {
            HostPolicy::GuestFirst => slots,
            HostPolicy::HostFirst => 0,
            HostPolicy::Shares { host } => {
                let host = host.map_or(slots / 2, usize::from);
                slots.saturating_sub(host)
            }
        }
    }

    /// Whether firm contexts are placed before the guest.
    pub(crate) fn places_hosts_first(self) -> bool {
        self != HostPolicy::GuestFirst
    }
}

/// What a loaded context may rely on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Each of its sets has room, whatever the guest counts.
    Firm,
    /// It has what the guest and firm contexts leave over.
    Spare,
}

impl fmt::Display for HostPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HostPolicy::GuestFirst => f.write_str("guest-first"),
            HostPolicy::HostFirst => f.write_str("host-first"),
            HostPolicy::Shares { host: None } => f.write_str("shares"),
            HostPolicy::Shares { host: Some(host) } => write!(f, "shares:host={host}"),
        }
    }
}

/// Words that are no policy.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "'{words}' is no policy for host contexts; use guest-first, host-first, shares or shares:host=N \
     with N from 0 to 255"
)]
pub struct HostPolicyError {
    words: String,
}

impl FromStr for HostPolicy {
    type Err = HostPolicyError;

    fn from_str(words: &str) -> Result<Self, HostPolicyError> {
        let shares = words.strip_prefix("shares:host=");
        match (words, shares.map(str::parse)) {
            ("guest-first", _) => Ok(HostPolicy::GuestFirst),
            ("host-first", _) => Ok(HostPolicy::HostFirst),
            ("shares", _) => Ok(HostPolicy::Shares { host: None }),
            (_, Some(Ok(host))) => Ok(HostPolicy::Shares { host: Some(host) }),
            _ => Err(HostPolicyError {
                words: words.to_owned(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::HostPolicy;

    #[test]
    fn words_are_read_as_they_are_written() {
        for words in [
            "guest-first",
            "host-first",
            "shares",
            "shares:host=0",
            "shares:host=255",
        ] {
            let policy: HostPolicy = words.parse().expect(words);
            assert_eq!(policy.to_string(), words);
        }
        for words in [
            "",
            "Guest-first",
            "shares:",
            "shares:host=",
            "shares:host=256",
            "shares:host=-1",
        ] {
            let error = words.parse::<HostPolicy>().expect_err(words);
            assert!(
                error
                    .to_string()
                    .starts_with(&format!("'{words}' is no policy"))
            );
        }
    }

    #[test]
    fn shares_add_up() {
        for slots in 0..20 {
            assert_eq!(HostPolicy::GuestFirst.guest_share(slots), slots);
            assert_eq!(HostPolicy::HostFirst.guest_share(slots), 0);
            for host in [None, Some(0), Some(3), Some(200)] {
                let guest = HostPolicy::Shares { host }.guest_share(slots);
                let host = host.map_or(slots / 2, usize::from);
                assert_eq!(guest, slots - host.min(slots));
            }
        }
    }
}
