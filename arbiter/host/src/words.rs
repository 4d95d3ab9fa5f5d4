//! The words by which programs know what was decided: the same on the wire, in the audit and
//! in metrics. A word is never changed, and whoever reads one of a newer arbiter keeps it
//! (`Other`).

use std::fmt;

use serde::de::IntoDeserializer;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::lease::{Cause, Change, Lease};
use super::refusal::Refusal;
use super::terms::Scope;

/// Why something is not to be had, or is held or lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", remote = "Self")]
pub enum Reason {
    /// [`Refusal::UnknownTenant`].
    UnknownTenant,
    /// [`Refusal::WrongNumber`].
    WrongNumber,
    /// [`Refusal::NoCpus`].
    NoCpus,
    /// [`Refusal::NoSuchCpu`].
    NoSuchCpu,
    /// [`Refusal::CpuNotAllowed`].
    CpuNotAllowed,
    /// [`Refusal::NoSuchCounters`].
    NoSuchCounters,
    /// [`Refusal::NotOnCpu`].
    NotOnCpu,
    /// [`Refusal::TooLong`].
    TooLong,
    /// [`Refusal::NotForThreads`].
    NotForThreads,
    /// [`Refusal::NoThreads`].
    NoThreads,
    /// [`Refusal::TooManyKinds`].
    TooManyKinds,
    /// [`Refusal::MoreThanThereIs`].
    MoreThanThereIs,
    /// [`Refusal::Priority`].
    Priority,
    /// [`Refusal::NoGuarantees`].
    NoGuarantees,
    /// [`Refusal::MustBePreemptible`].
    MustBePreemptible,
    /// [`Refusal::NoWholeCpus`].
    NoWholeCpus,
    /// [`Refusal::TooManyLeases`].
    TooManyLeases,
    /// [`Refusal::QueueFull`].
    QueueFull,
    /// [`Refusal::OwnQueueFull`].
    OwnQueueFull,
    /// [`Refusal::TooManySets`].
    TooManySets,
    /// [`Refusal::OverMaximum`].
    OverMaximum,
    /// [`Refusal::Kept`].
    Kept,
    /// [`Refusal::Held`].
    Held,
    /// [`Refusal::Outside`].
    Outside,
    /// [`Refusal::Behind`].
    Behind,
    /// [`Refusal::GroupsBelow`].
    GroupsBelow,
    /// [`Refusal::BeyondGroup`].
    BeyondGroup,
    /// [`Refusal::TooManyBelow`].
    TooManyBelow,
    /// [`Refusal::NoSuchLease`].
    NoSuchLease,
    /// [`Refusal::Foreign`].
    Foreign,
    /// [`Refusal::WrongGeneration`].
    WrongGeneration,
    /// [`Refusal::Wanted`].
    Wanted,
    /// [`Refusal::Leaving`].
    Leaving,
    /// [`Cause::Granted`].
    Granted,
    /// [`Cause::Preempted`].
    Preempted,
    /// [`Cause::Revoked`].
    Revoked,
    /// [`Cause::Expired`].
    Expired,
    /// [`Cause::Released`].
    Released,
    /// [`Cause::HolderGone`].
    HolderGone,
    /// [`Cause::ThreadsEnded`].
    ThreadsEnded,
    /// [`Cause::GroupEmpty`].
    GroupEmpty,
    /// [`Cause::NobodyCame`].
    NobodyCame,
    /// [`Cause::AboveEnded`].
    AboveEnded,
    /// [`Cause::MovedAway`].
    MovedAway,
    /// [`Cause::TimedOut`].
    TimedOut,
    /// [`Cause::Unclaimed`].
    Unclaimed,
    /// [`Cause::Barred`]; and its user asks for something.
    Barred,
    /// The request makes no sense.
    WrongRequest,
    /// The service has just started, and does not know yet what is held.
    Starting,
    /// The service keeps no audit.
    NoAudit,
    /// What was to be in the audit cannot be written.
    AuditFailed,
    /// The service opens no perf events for the tenant.
    NoEvents,
    /// The thread of a perf event is not the caller's.
    ForeignThread,
    /// The kernel has not opened a perf event.
    NotOpened,
    /// The caller has as many perf events as it may have.
    TooManyEvents,
    /// The service cannot write its journal.
    JournalFailed,
    /// The service has no such method.
    MethodNotFound,
    /// The parameters of a call are not those of its method.
    InvalidParameter,
    /// A word of a newer arbiter; empty: there is none.
    #[serde(untagged)]
    Other(String),
}

/// What happened to a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", remote = "Self")]
pub enum What {
    /// [`Change::Waits`].
    Waits,
    /// [`Change::Holds`].
    Holds,
    /// [`Change::Announced`].
    Leaving,
    /// [`Change::Spared`].
    Spared,
    /// [`Change::Renewed`].
    Renewed,
    /// [`Change::Claimed`].
    Claimed,
    /// [`Change::Broken`].
    Broken,
    /// [`Change::Mended`].
    Mended,
    /// [`Change::CpusGone`].
    CpusGone,
    /// [`Change::CpusBack`].
    CpusBack,
    /// [`Change::ThreadsGone`].
    ThreadsGone,
    /// [`Change::Ended`].
    Ended,
    /// A word of a newer arbiter; empty: there is none.
    #[serde(untagged)]
    Other(String),
}

/// How a lease stands.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", remote = "Self")]
pub enum Standing {
    /// It holds all that it asked for.
    Holds,
    /// It holds some of that.
    Short,
    /// It holds nothing yet, or not any more.
    Waits,
    /// It is of before a restart, and its owner has not come back.
    Unclaimed,
    /// A word of a newer arbiter; empty: there is none.
    #[serde(untagged)]
    Other(String),
}

/// Which counters are asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", remote = "Self")]
pub enum CounterKind {
    /// Those that count any event.
    Programmable,
    /// Those of one event each.
    Fixed,
    /// A word of somebody newer; empty: there is none.
    #[serde(untagged)]
    Other(String),
}

/// When the counters of a lease are needed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", remote = "Self")]
pub enum LeaseScope {
    /// [`Scope::Cpu`].
    Cpu,
    /// [`Scope::Thread`].
    Thread,
    /// [`Scope::Group`].
    Cgroup,
    /// [`Scope::Part`], for more than threads.
    Part,
    /// A word of somebody newer; empty: there is none.
    #[serde(untagged)]
    Other(String),
}

/// What would become of a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", remote = "Self")]
pub enum Fate {
    /// It would hold something.
    Granted,
    /// It would wait.
    Waits,
    /// It would be refused.
    Refused,
    /// A word of a newer arbiter; empty: there is none.
    #[serde(untagged)]
    Other(String),
}

/// Who has counters, or may, and has no lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", remote = "Self")]
pub enum OutsiderKind {
    /// The kernel's NMI watchdog.
    NmiWatchdog,
    Process,
    /// Processes that cannot be looked at.
    Hidden,
    /// A user who gets nothing any more.
    Barred,
    /// A word of a newer arbiter; empty: there is none.
    #[serde(untagged)]
    Other(String),
}

/// The word itself, in JSON too, and no word.
macro_rules! words {
    ($($name:ident)*) => {$(
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                $name::serialize(self, serializer)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                // What is no word says so, and is none of a newer arbiter.
                let word = String::deserialize(deserializer)?;
                $name::deserialize(word.into_deserializer())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                $name::serialize(self, f)
            }
        }

        impl Default for $name {
            fn default() -> Self {
                $name::Other(String::new())
            }
        }
    )*};
}

words! { Reason What Standing CounterKind LeaseScope Fate OutsiderKind }

impl Refusal {
    /// The word for it.
    pub fn reason(&self) -> Reason {
        match self {
            Refusal::UnknownTenant => Reason::UnknownTenant,
            Refusal::WrongNumber { .. } => Reason::WrongNumber,
            Refusal::NoCpus => Reason::NoCpus,
            Refusal::NoSuchCpu { .. } => Reason::NoSuchCpu,
            Refusal::CpuNotAllowed { .. } => Reason::CpuNotAllowed,
            Refusal::NoSuchCounters { .. } => Reason::NoSuchCounters,
            Refusal::NotOnCpu { .. } => Reason::NotOnCpu,
            Refusal::TooLong { .. } => Reason::TooLong,
            Refusal::NotForThreads { .. } => Reason::NotForThreads,
            Refusal::NoThreads => Reason::NoThreads,
            Refusal::TooManyKinds => Reason::TooManyKinds,
            Refusal::MoreThanThereIs { .. } => Reason::MoreThanThereIs,
            Refusal::Priority { .. } => Reason::Priority,
            Refusal::NoGuarantees => Reason::NoGuarantees,
            Refusal::MustBePreemptible => Reason::MustBePreemptible,
            Refusal::NoWholeCpus => Reason::NoWholeCpus,
            Refusal::TooManyLeases { .. } => Reason::TooManyLeases,
            Refusal::QueueFull { .. } => Reason::QueueFull,
            Refusal::OwnQueueFull { .. } => Reason::OwnQueueFull,
            Refusal::TooManySets { .. } => Reason::TooManySets,
            Refusal::OverMaximum { .. } => Reason::OverMaximum,
            Refusal::Kept { .. } => Reason::Kept,
            Refusal::Held { .. } => Reason::Held,
            Refusal::Outside { .. } => Reason::Outside,
            Refusal::Behind { .. } => Reason::Behind,
            Refusal::GroupsBelow { .. } => Reason::GroupsBelow,
            Refusal::BeyondGroup { .. } => Reason::BeyondGroup,
            Refusal::TooManyBelow { .. } | Refusal::TooManyThreadsBelow { .. } => {
                Reason::TooManyBelow
            }
            Refusal::NoSuchLease => Reason::NoSuchLease,
            Refusal::Foreign { .. } => Reason::Foreign,
            Refusal::WrongGeneration { .. } => Reason::WrongGeneration,
            Refusal::Wanted { .. } => Reason::Wanted,
            Refusal::Leaving { .. } => Reason::Leaving,
        }
    }
}

impl Cause {
    /// The word for it.
    pub fn reason(self) -> Reason {
        match self {
            Cause::Granted => Reason::Granted,
            Cause::Preempted { .. } => Reason::Preempted,
            Cause::Revoked { .. } => Reason::Revoked,
            Cause::Expired => Reason::Expired,
            Cause::Released => Reason::Released,
            Cause::HolderGone => Reason::HolderGone,
            Cause::ThreadsEnded => Reason::ThreadsEnded,
            Cause::GroupEmpty => Reason::GroupEmpty,
            Cause::NobodyCame => Reason::NobodyCame,
            Cause::AboveEnded => Reason::AboveEnded,
            Cause::MovedAway => Reason::MovedAway,
            Cause::TimedOut => Reason::TimedOut,
            Cause::Unclaimed => Reason::Unclaimed,
            Cause::Barred => Reason::Barred,
        }
    }
}

impl Change {
    /// The word for it.
    pub fn what(&self) -> What {
        match self {
            Change::Waits { .. } => What::Waits,
            Change::Holds { .. } => What::Holds,
            Change::Announced { .. } => What::Leaving,
            Change::Spared { .. } => What::Spared,
            Change::Renewed { .. } => What::Renewed,
            Change::Claimed { .. } => What::Claimed,
            Change::Broken { .. } => What::Broken,
            Change::Mended { .. } => What::Mended,
            Change::CpusGone { .. } => What::CpusGone,
            Change::CpusBack { .. } => What::CpusBack,
            Change::ThreadsGone { .. } => What::ThreadsGone,
            Change::Ended { .. } => What::Ended,
        }
    }

    /// Why, if there is more to say than what happened.
    pub fn reason(&self) -> Option<Reason> {
        match self {
            Change::Waits { why, .. } => Some(why.reason()),
            Change::Holds { why, .. } | Change::Ended { why, .. } => Some(why.reason()),
            Change::Announced { departure, .. } => Some(departure.why.reason()),
            Change::Spared { .. }
            | Change::Renewed { .. }
            | Change::Claimed { .. }
            | Change::Broken { .. }
            | Change::Mended { .. }
            | Change::CpusGone { .. }
            | Change::CpusBack { .. }
            | Change::ThreadsGone { .. } => None,
        }
    }
}

impl Scope {
    /// The word for it.
    pub fn word(&self) -> LeaseScope {
        match self {
            Scope::Cpu => LeaseScope::Cpu,
            Scope::Part(part) if part.with_others => LeaseScope::Part,
            Scope::Thread(_) | Scope::Part(_) => LeaseScope::Thread,
            Scope::Group(_) => LeaseScope::Cgroup,
        }
    }
}

impl Lease {
    /// How it stands.
    pub fn standing(&self) -> Standing {
        if self.claim_by.is_some() {
            Standing::Unclaimed
        } else if !self.is_short() {
            Standing::Holds
        } else if self.holds > 0 {
            Standing::Short
        } else {
            Standing::Waits
        }
    }
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::json;

    use super::*;

    /// `word` is that of `known`.
    fn check<T: Serialize + DeserializeOwned + PartialEq + fmt::Debug + fmt::Display>(
        known: T,
        word: &str,
        other: fn(String) -> T,
    ) {
        let read = |value| serde_json::from_value::<T>(value);
        assert_eq!(known.to_string(), word);
        assert_eq!(serde_json::to_value(&known).unwrap(), json!(word));
        assert_eq!(read(json!(word)).unwrap(), known);
        assert_eq!(
            serde_json::from_str::<T>(&format!("\"{word}\"")).unwrap(),
            known
        );
        let newer = other("of-tomorrow".to_owned());
        assert_eq!(read(json!("of-tomorrow")).unwrap(), newer);
        assert_eq!(serde_json::to_value(&newer).unwrap(), json!("of-tomorrow"));
        for none in [json!(1), json!(null), json!([word]), json!({ word: null })] {
            let error = read(none.clone()).expect_err("it is no word").to_string();
            assert!(error.contains("expected a string"), "{none}: {error}");
        }
    }

    #[test]
    fn a_word_is_a_string() {
        check(Reason::HolderGone, "holder-gone", Reason::Other);
        check(What::CpusBack, "cpus-back", What::Other);
        check(Standing::Short, "short", Standing::Other);
        check(CounterKind::Fixed, "fixed", CounterKind::Other);
        check(LeaseScope::Cpu, "cpu", LeaseScope::Other);
        check(Fate::Refused, "refused", Fate::Other);
        check(
            OutsiderKind::NmiWatchdog,
            "nmi-watchdog",
            OutsiderKind::Other,
        );
    }
}
