//! `umpire ls`: running VMs, and who holds what in them.

mod text;

use std::io::{self, Write};
use std::path::PathBuf;

use perfmon_abi::wire::info::{FormatInfo, MachineInfo, ModelInfo};
use serde::Serialize;

pub(crate) use text::vcpu_state;

use crate::find::{connect, known_sockets};
use crate::{ToolError, note, refused};

/// A VM as it describes itself through its socket.
#[derive(Clone, Debug, Serialize)]
pub struct VmListing {
    pub socket: PathBuf,
    /// What there is and who holds what.
    pub machine: MachineInfo,
    /// Its PMU.
    pub model: ModelInfo,
    /// Its sampling formats.
    pub formats: Vec<FormatInfo>,
}

/// Which VMs are shown, and how.
#[derive(Clone, Debug, Default)]
pub struct LsOptions {
    /// Control sockets; without any those that can be found.
    pub sockets: Vec<PathBuf>,
    /// JSON, one object a line.
    pub json: bool,
}

/// Shows VMs on `out`; `notes` has a line if there is none.
///
/// # Errors
/// A socket that was named does not answer, or `out` cannot be written to.
pub fn run(
    options: &LsOptions,
    out: &mut dyn Write,
    notes: &mut dyn Write,
) -> Result<(), ToolError> {
    let named = !options.sockets.is_empty();
    let sockets = if named {
        options.sockets.clone()
    } else {
        known_sockets()
    };
    let mut failed = None;
    let mut shown = 0;
    for socket in sockets {
        match look(socket) {
            Ok(vm) => {
                shown += 1;
                let written = if options.json {
                    json(&vm, out)
                } else {
                    text::write(&vm, shown > 1, out)
                };
                match written {
                    Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                        return Ok(());
                    }
                    other => other.map_err(ToolError::Output)?,
                }
            }
            // A VM that ended badly leaves its socket: no news if nobody named it.
            Err(ToolError::Connect { .. }) if !named => {}
            Err(error) => failed = failed.or(Some(error)),
        }
    }
    match out.flush() {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            return Err(ToolError::Output(error));
        }
        _ => {}
    }
    if let Some(error) = failed {
        return Err(error);
    }
    if shown == 0 {
        note(
            notes,
            "no VM is running here; umpire run --name gives a VM its name, and arguments of \
             umpire ls are sockets of --control",
        );
    }
    Ok(())
}

fn look(socket: PathBuf) -> Result<VmListing, ToolError> {
    let client = connect(&socket)?;
    Ok(VmListing {
        machine: client.list().map_err(refused("asking for the VM"))?,
        model: client.model().map_err(refused("asking for the PMU"))?,
        formats: client.formats().map_err(refused("asking for formats"))?,
        socket,
    })
}

fn json(vm: &VmListing, out: &mut dyn Write) -> io::Result<()> {
    serde_json::to_writer(&mut *out, vm)?;
    writeln!(out)
}
