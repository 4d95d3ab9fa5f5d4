//! Words that journals, the wire, audits and metrics have: they are for good.

use std::fmt::{Debug, Display};

use arbiter_host::{CounterKind, Fate, LeaseScope, OutsiderKind, Reason, Standing, What};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Every word is read and written as it is, and nothing else is: what is not known is kept.
fn check<T>(words: &str, other: impl Fn(String) -> T)
where
    T: Debug + Default + Display + PartialEq + Serialize + DeserializeOwned,
{
    let read = |word: &str| -> T {
        let json = serde_json::to_string(word).expect("JSON");
        let read: T = serde_json::from_str(&json).expect(word);
        assert_eq!(serde_json::to_string(&read).expect("JSON"), json);
        assert_eq!(read.to_string(), word);
        read
    };
    for word in words.split_whitespace() {
        assert_ne!(read(word), other(word.to_owned()), "{word} is known");
    }
    for word in ["", "of-tomorrow", "Holds", "no_cpus"] {
        assert_eq!(read(word), other(word.to_owned()));
    }
    assert_eq!(T::default(), other(String::new()));
    for wrong in ["1", "null", "[]", "{\"Other\":\"held\"}"] {
        assert!(serde_json::from_str::<T>(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn words_are_for_good() {
    check(
        "unknown-tenant wrong-number no-cpus no-such-cpu cpu-not-allowed no-such-counters \
         not-on-cpu too-long not-for-threads no-threads too-many-kinds more-than-there-is \
         priority no-guarantees must-be-preemptible no-whole-cpus too-many-leases queue-full \
         own-queue-full too-many-sets over-maximum kept held outside behind no-such-lease \
         foreign wrong-generation wanted leaving granted preempted revoked expired released \
         holder-gone threads-ended timed-out unclaimed barred wrong-request starting no-audit \
         audit-failed no-events foreign-thread not-opened too-many-events journal-failed \
         method-not-found invalid-parameter groups-below beyond-group group-empty nobody-came \
         above-ended too-many-below moved-away",
        Reason::Other,
    );
    check(
        "waits holds leaving spared renewed claimed broken mended cpus-gone cpus-back \
         threads-gone ended",
        What::Other,
    );
    check("holds short waits unclaimed", Standing::Other);
    check("programmable fixed", CounterKind::Other);
    check("cpu thread cgroup part", LeaseScope::Other);
    check("granted waits refused", Fate::Other);
    check("nmi-watchdog process hidden barred", OutsiderKind::Other);
}
