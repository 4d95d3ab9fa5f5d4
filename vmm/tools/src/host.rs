//! `umpire leases`, `who`, `revoke`, `pardon`, `lease` and `hog`: the leases on this host's physical
//! counters.

mod hold;
mod text;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::path::PathBuf;

use serde::Serialize;
use umpire_lease::{
    Arbiter, CallError, ExplainIn, ExplainOut, GroupsOut, Lease, LeaseScope, LeasedGroup, NoReply,
    PardonIn, Place, Request, RevokeIn, RevokeOut, WhoIn, WhoOut,
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

/// A lease as `umpire leases -j` has it.
#[derive(Debug, Serialize)]
struct ListedLease<'a> {
    #[serde(flatten)]
    lease: &'a Lease,
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<&'a LeasedGroup>,
}

/// What `umpire who -j` prints.
#[derive(Debug, Serialize)]
struct ShownWho<'a> {
    #[serde(flatten)]
    answer: &'a WhoOut,
    /// Once each: a lease is shown on all of its CPUs.
    groups: &'a [LeasedGroup],
}

/// The control groups of those of these leases that are for one, as far as the caller may know
/// them. Where none is, nobody is asked.
fn groups_of<'a>(
    arbiter: &mut Arbiter,
    leases: impl Iterator<Item = &'a Lease>,
) -> Result<Vec<LeasedGroup>, ToolError> {
    let for_groups = leases.filter(|lease| lease.scope == LeaseScope::Cgroup);
    let shown: BTreeSet<u64> = for_groups.map(|lease| lease.id).collect();
    if shown.is_empty() {
        return Ok(Vec::new());
    }
    let GroupsOut { mut groups } = arbiter.call("Groups", &NoReply {})?;
    groups.retain(|group| shown.contains(&group.lease));
    Ok(groups)
}

/// `umpire leases`: who holds a lease, or waits for one.
///
/// # Errors
/// There is no arbiter, it refuses, or `out` cannot be written to.
pub fn leases(options: &HostOptions, out: &mut dyn Write) -> Result<(), ToolError> {
    let mut arbiter = options.connect()?;
    let leases = arbiter.leases()?;
    let groups = groups_of(&mut arbiter, leases.iter())?;
    let by_lease: BTreeMap<u64, &LeasedGroup> =
        groups.iter().map(|group| (group.lease, group)).collect();
    let listed = leases.iter().map(|lease| ListedLease {
        lease,
        group: by_lease.get(&lease.id).copied(),
    });
    let listed: Vec<ListedLease<'_>> = listed.collect();
    print(&listed, options.json, out, |out| {
        text::leases(&leases, &by_lease, out)
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
    let mut arbiter = options.connect()?;
    let WhoOut {
        mut places,
        outsiders,
    } = arbiter.call("Who", &WhoIn { cpu })?;
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
    let shown = places.iter().flat_map(|place| &place.leases);
    let groups = groups_of(&mut arbiter, shown)?;
    let answer = WhoOut { places, outsiders };
    let shown = ShownWho {
        answer: &answer,
        groups: &groups,
    };
    print(std::slice::from_ref(&shown), options.json, out, |out| {
        text::places(&answer, &groups, out)
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
