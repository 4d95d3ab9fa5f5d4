//! `umpire pcr`: who has reserved which counter of a running VM, and what an
//! administrator changes about it.

mod text;

use std::io::{self, Write};
use std::path::PathBuf;

pub use perfmon_abi::wire::pcr::{PcrAct, PcrInfo, PcrRequest, Presented, ShareChange};
use perfmon_abi::wire::{Errno, Refusal};
use serde::Serialize;

use crate::find::VmChoice;
use crate::numbers::Numbers;
use crate::{ToolError, note, vm};

/// What is to be shown or done, and where.
#[derive(Clone, Debug)]
pub struct PcrOptions {
    pub vm: VmChoice,
    /// These vCPUs; without a choice all.
    pub vcpus: Option<Numbers>,
    /// JSON: one object.
    pub json: bool,
    /// What is done to each of the vCPUs.
    pub act: PcrAct,
}

/// The reservations of a VM.
#[derive(Clone, Debug, Serialize)]
pub struct PcrListing {
    pub socket: PathBuf,
    /// The VM's process.
    pub pid: u32,
    /// Its vCPUs, as they are after an act. Those that have ended, or that the act
    /// did not concern, are not there.
    pub vcpus: Vec<PcrInfo>,
}

/// Does what is asked for, and prints on `out` what there is then; `notes` has a line
/// if some vCPUs could not be asked.
///
/// # Errors
/// There is no VM or vCPU, the VM refuses, or `out` cannot be written to.
pub fn run(
    options: &PcrOptions,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<(), ToolError> {
    let (socket, client, hello) = vm::meet(&options.vm)?;
    let count = hello.vcpus;
    let chosen = match &options.vcpus {
        Some(list) => list.below(count).map_err(|number| ToolError::NoTarget {
            what: "vCPU",
            number,
            count,
        })?,
        None => (0..count).collect(),
    };
    let vcpus = each(
        &chosen,
        |vcpu| {
            let act = options.act.clone();
            client.pcr(&PcrRequest { vcpu, act })
        },
        |vcpu, refusal| failed(&options.act, vcpu, refusal),
    )?;
    if options.act == PcrAct::Show && vcpus.len() < chosen.len() {
        let missing = chosen.len() - vcpus.len();
        note(notes, &format!("{missing} vCPUs have ended"));
    }
    let listing = PcrListing {
        socket,
        pid: hello.pid,
        vcpus,
    };
    print(&listing, options.json, out, |out| {
        text::write(&options.act, &listing, out)
    })
}

/// Prints a listing: as one JSON object, or as `text` has it. Somebody who reads no
/// further is no failure.
pub(crate) fn print(
    listing: &impl Serialize,
    json: bool,
    out: &mut dyn Write,
    text: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), ToolError> {
    let written = if json {
        let written = serde_json::to_writer(&mut *out, listing).map_err(io::Error::from);
        written.and_then(|()| writeln!(out))
    } else {
        text(out)
    };
    match written.and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(ToolError::Output(error)),
        _ => Ok(()),
    }
}

/// Asks each vCPU. One that has ended is passed over, and so is one on which nobody holds
/// the counter that is to be revoked, if there is another. `failed` says what was tried.
pub(crate) fn each<T>(
    vcpus: &[u32],
    ask: impl Fn(u32) -> Result<T, Refusal>,
    failed: impl Fn(u32, Refusal) -> ToolError,
) -> Result<Vec<T>, ToolError> {
    let (mut done, mut on): (Vec<T>, Vec<u32>) = (Vec::new(), Vec::new());
    let mut passed_over = None;
    for &vcpu in vcpus {
        match ask(vcpu) {
            Ok(info) => {
                done.push(info);
                on.push(vcpu);
            }
            Err(refusal) if matches!(refusal.errno, Errno::ESRCH | Errno::ENOENT) => {
                passed_over = passed_over.or(Some(failed(vcpu, refusal)));
            }
            Err(refusal) if done.is_empty() => return Err(failed(vcpu, refusal)),
            Err(refusal) => {
                let before = text::ranges(&on);
                let reason = format!("{} (it was done on vCPU {before})", refusal.reason);
                return Err(failed(vcpu, Refusal::new(refusal.errno, reason)));
            }
        }
    }
    match passed_over {
        Some(error) if done.is_empty() => Err(error),
        _ => Ok(done),
    }
}

fn failed(act: &PcrAct, vcpu: u32, refusal: Refusal) -> ToolError {
    let what = match act {
        PcrAct::Show => "asking for reservations".to_owned(),
        PcrAct::Revoke { counter, .. } => format!("revoking {counter}"),
        PcrAct::Bar { layer } => format!("barring the {layer}"),
        PcrAct::Unbar { layer } => format!("unbarring the {layer}"),
        PcrAct::Policy { .. } => "setting the policy".to_owned(),
        PcrAct::Scheme { scheme } => format!("setting the scheme {scheme}"),
        PcrAct::Read { counter, .. } => format!("reading {counter}"),
    };
    let refusal = match refusal.errno {
        Errno::ENOENT => with_hint(&refusal, "; umpire pcr shows what is reserved"),
        _ => refusal,
    };
    refused_on(vcpu, &what, refusal)
}

/// What was tried on a vCPU was refused.
pub(crate) fn refused_on(vcpu: u32, what: &str, refusal: Refusal) -> ToolError {
    let refusal = match refusal.errno {
        Errno::EPERM => with_hint(&refusal, "; the VM's --control-sys-gid says who may"),
        _ => refusal,
    };
    ToolError::refused(format!("vCPU {vcpu}: {what}"), refusal)
}

fn with_hint(refusal: &Refusal, hint: &str) -> Refusal {
    Refusal::new(refusal.errno, format!("{}{hint}", refusal.reason))
}
