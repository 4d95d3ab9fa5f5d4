//! `umpire leases`, `who`, `revoke`, `pardon`, `lease` and `hog`: the leases on this host's physical
//! counters.

mod hold;
mod text;

use std::io::{self, Write};
use std::path::PathBuf;

use serde::Serialize;
use umpire_lease::{
    Arbiter, CallError, ExplainIn, ExplainOut, GroupsOut, Lease, LeaseScope, NoReply, PardonIn,
    Place, Request, RevokeIn, RevokeOut, WhoIn, WhoOut,
};

pub use hold::{HoldOptions, hold, pass_time};

use crate::ToolError;

/// Which arbiter is asked, and in which form the answer is printed.
#[derive(Clone, Debug)]
pub struct HostOptions {
    /// The arbiter's socket; without one the environment names it, or it is the system's.
    pub socket: Option<PathBuf>,
    /// JSON: one object for each line.
    pub json: bool,
}

impl HostOptions {
    fn path(&self) -> PathBuf {
        let default = umpire_lease::default_socket;
        self.socket.clone().unwrap_or_else(default)
    }

    fn connect(&self) -> Result<Arbiter, ToolError> {
        Ok(Arbiter::connect(&self.path())?)
    }
}

impl From<CallError> for ToolError {
    fn from(error: CallError) -> Self {
        ToolError::Arbiter(error)
    }
}

fn print<T: Serialize>(
    items: &[T],
    json: bool,
    out: &mut dyn Write,
    text: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), ToolError> {
    let printed = if json {
        items.iter().try_for_each(|item| {
            serde_json::to_writer(&mut *out, item)?;
            writeln!(out)
        })
    } else {
        text(out)
    };
    match printed.and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(ToolError::Output(error)),
        _ => Ok(()),
    }
}

/// `umpire leases`: who holds a lease, or waits for one.
///
/// # Errors
/// There is no arbiter, it refuses, or `out` cannot be written to.
pub fn leases(options: &HostOptions, out: &mut dyn Write) -> Result<(), ToolError> {
    let mut arbiter = options.connect()?;
    let leases = arbiter.leases()?;
    let is_groups = |lease: &Lease| lease.scope == LeaseScope::Cgroup;
    let groups = if options.json || !leases.iter().any(is_groups) {
        Vec::new()
    } else {
        let GroupsOut { groups } = arbiter.call("Groups", &NoReply {})?;
        groups
    };
    print(&leases, options.json, out, |out| {
        text::leases(&leases, &groups, out)
    })
}

/// `umpire lease --cgroup`: a lease for what runs in a control group. It is the group's from then
/// on: nobody holds it.
///
/// # Errors
/// There is no arbiter, it refuses, or `out` cannot be written to.
pub fn lease_group(
    options: &HostOptions,
    request: &Request,
    out: &mut dyn Write,
) -> Result<(), ToolError> {
    let mut held = options.connect()?.acquire(request)?;
    held.wait()?;
    let lease = held.lease();
    let counters = text::counters(&lease.counters);
    let group = request.cgroup.as_deref().unwrap_or_default();
    let out_of = text::out_of(lease);
    let between = if out_of.is_empty() { "" } else { ", " };
    print::<()>(&[], false, out, |out| {
        writeln!(
            out,
            "lease {}: {} of {} counters ({counters}) on CPUs {} for control group {group}{between}{out_of}",
            lease.id, lease.holds, lease.wants, lease.cpus
        )
    })
}

/// `umpire who`: who holds which counters, CPU by CPU; of those of one VM or label, if
/// `name` is no CPU.
///
/// # Errors
/// There is no arbiter or no such CPU, or `out` cannot be written to.
pub fn who(
    options: &HostOptions,
    name: Option<&str>,
    out: &mut dyn Write,
) -> Result<(), ToolError> {
    let cpu = name.and_then(|name| name.parse().ok());
    let WhoOut {
        mut places,
        outsiders,
    } = options.connect()?.call("Who", &WhoIn { cpu })?;
    if let Some(name) = name.filter(|_| cpu.is_none()) {
        let is_named = |lease: &Lease| lease.label == name || lease.tenant == name;
        for place in &mut places {
            place.leases.retain(is_named);
        }
        places.retain(|place: &Place| !place.leases.is_empty());
        if places.is_empty() {
            return Err(ToolError::Input(format!(
                "nobody named '{name}' holds a counter; give a CPU, or a label or tenant of: \
                 umpire leases"
            )));
        }
    }
    let answer = WhoOut { places, outsiders };
    print(std::slice::from_ref(&answer), options.json, out, |out| {
        text::places(&answer, out)
    })
}

/// `umpire revoke`: takes a lease from its holder.
///
/// # Errors
/// There is no arbiter or no such lease, or the caller may not revoke it.
pub fn revoke(
    options: &HostOptions,
    lease: u64,
    grace_ms: Option<u64>,
    out: &mut dyn Write,
) -> Result<(), ToolError> {
    let revoked: RevokeOut = options
        .connect()?
        .call("Revoke", &RevokeIn { lease, grace_ms })?;
    print(
        std::slice::from_ref(&revoked),
        options.json,
        out,
        |out| match revoked.in_ms {
            0 => writeln!(out, "lease {lease} is revoked"),
            ms => writeln!(out, "lease {lease} was told, and holds nothing in {ms} ms"),
        },
    )
}

/// `umpire pardon`: lifts that a user is barred.
///
/// # Errors
/// There is no arbiter, the user is not barred, or the caller is no operator.
pub fn pardon(options: &HostOptions, uid: u32, out: &mut dyn Write) -> Result<(), ToolError> {
    let NoReply {} = options.connect()?.call("Pardon", &PardonIn { uid })?;
    print::<()>(&[], false, out, |out| {
        writeln!(out, "user {uid} may have leases and events again")
    })
}

/// What the running arbiter would do with a request.
///
/// # Errors
/// There is no arbiter, the request makes no sense, or `out` cannot be written to.
pub fn explain(
    options: &HostOptions,
    request: Request,
    out: &mut dyn Write,
) -> Result<(), ToolError> {
    let answer: ExplainOut = options.connect()?.call("Explain", &ExplainIn { request })?;
    print_explained(&answer, options.json, out)
}

/// Prints what would become of a request.
///
/// # Errors
/// `out` cannot be written to.
pub fn print_explained(
    answer: &ExplainOut,
    json: bool,
    out: &mut dyn Write,
) -> Result<(), ToolError> {
    print(std::slice::from_ref(answer), json, out, |out| {
        text::explained(answer, out)
    })
}
