//! What this host's KVM really does, found by running tiny guests: the probes are `kvm-pmu`'s.

pub use kvm_pmu::{
    GuestStep, HandlerOut, HostRefusal, ProbeError, ProbeReport, ProtectedStore, RdpmcBehaviour,
    probe,
};
