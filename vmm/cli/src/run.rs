//! `umpire run`: boots a guest kernel with a virtual PMU.

use std::fs;
use std::io::{self, Write, stderr, stdout};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::{Access, access};
use rustix::net::SocketAddrUnix;
use umpire_tools::find::socket_folder;
use vmm::config::RunConfig;
use vmm::machine::{self, EngineFacts, Machine, RunEnd};
use vmm::vcpu::{PmuLog, VcpuEnd};

use crate::config::{self, Settings};
use crate::engine;
use crate::exit::{ExitStatus, UserError, complain};
use crate::first_tools::FirstTools;
use crate::flags::RunFlags;
use crate::lease;
use crate::logging;

/// Runs the guest to its end, and gives the status to end with.
///
/// # Errors
/// The flags or the configuration file cannot be used, this host cannot run the
/// guest, or it failed in the middle.
pub fn run(flags: &RunFlags) -> Result<u8, UserError> {
    let mut settings = config::load(flags)?;
    if settings.tools.count() > 0 {
        // libpfm4 is to be asked before there are threads.
        let _ = umpire_events::names();
    }
    logging::start(&settings.log)?;
    let engine = engine::ready(&mut settings)?;
    let Settings {
        run: mut config,
        arbiter,
        tools,
        ..
    } = settings;
    prepare_socket(&mut config)?;
    let lease = match engine.facts() {
        EngineFacts::Kvm { host, .. } => lease::take(&arbiter, host, &mut config)?,
        EngineFacts::Emu => None,
    };
    if let Some(line) = engine.first_line(&config) {
        let _ = writeln!(stderr(), "umpire: {line}");
    }
    let console = Box::new(stdout());
    let machine = Machine::build(engine.facts(), &config, console, |_| Box::new(PmuLog));
    let mut machine = machine.map_err(UserError::bad_input)?;
    let lines = machine.take_lease_lines();
    if let Some((lease, lines)) = lease.zip(lines) {
        let failed = |error| format!("no thread for the VM's lease: {error}");
        let followed = lease.follow(lines);
        followed.map_err(|error| UserError::bad_input(failed(error)))?;
    }
    let failed = |error| UserError::with_status(error, ExitStatus::HOST_FAILURE);
    let audit = machine.audit();
    let tools = FirstTools::start(&tools, &config, &mut machine)?;
    let end = machine::run(machine, &config);
    let counted = tools.finish();
    let (summary, written) = audit.finish();
    if summary.decisions() > 0 {
        let _ = write!(stderr(), "umpire: {summary}");
    }
    let end = match (end, written) {
        (Ok(end), Ok(())) => end,
        (Ok(_), Err(error)) => return Err(UserError::with_status(error, ExitStatus::HOST_FAILURE)),
        (Err(failure), written) => {
            // Why the run failed comes last; what it left is incomplete besides.
            if let Err(error) = written {
                complain(&error);
            }
            return Err(failed(failure));
        }
    };
    counted?;
    if !end.is_success() {
        complain(&end);
    } else {
        log::info!("{end}");
    }
    Ok(exit_code(&end))
}

/// Makes the folder of this user's VMs, if the socket is to be there. A guest that needs no
/// tools runs without, and no tool finds it.
fn prepare_socket(config: &mut RunConfig) -> Result<(), UserError> {
    let Some((socket, own)) = config
        .control
        .as_ref()
        .map(|one| &one.socket)
        .zip(socket_folder())
    else {
        return Ok(());
    };
    if socket.parent() != Some(&own) {
        return Ok(());
    }
    let failed = match make_folder(&own) {
        Ok(()) if SocketAddrUnix::new(socket).is_err() => "its path is too long".to_owned(),
        Ok(()) => return Ok(()),
        Err(error) => error.to_string(),
    };
    let why = format!(
        "there can be no socket for host tools in {}: {failed}; give --control SOCKET, or \
         --control none",
        own.display()
    );
    let unnamed = own.join(format!("{}.sock", std::process::id()));
    if config.paused || *socket != unnamed {
        return Err(UserError::bad_input(why));
    }
    log::warn!("{why}");
    config.control = None;
    Ok(())
}

/// Makes a folder for sockets, one level, or looks whether there can be any in it. Others
/// reach the socket of the host's arbiter in root's; each socket has its own mode.
fn make_folder(folder: &Path) -> io::Result<()> {
    match fs::create_dir(folder) {
        Ok(()) => fs::set_permissions(folder, fs::Permissions::from_mode(0o755)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            Ok(access(folder, Access::WRITE_OK | Access::EXEC_OK)?)
        }
        Err(error) => Err(error),
    }
}

/// The process exit status that says how a run ended.
fn exit_code(end: &RunEnd) -> u8 {
    match end {
        RunEnd::Guest(_, VcpuEnd::Guest(end)) => end.exit_status(),
        RunEnd::Guest(_, VcpuEnd::TripleFault { .. } | VcpuEnd::Stuck(_) | VcpuEnd::Asleep) => {
            ExitStatus::GUEST_FAILURE.code()
        }
        // Apart from what the guest did wrong: scripts find our bugs by it.
        RunEnd::Guest(_, VcpuEnd::Unimplemented { .. }) => ExitStatus::UNIMPLEMENTED.code(),
        RunEnd::Guest(_, VcpuEnd::Stopped) | RunEnd::Interrupted => ExitStatus::INTERRUPTED.code(),
        RunEnd::TimedOut => ExitStatus::TIMED_OUT.code(),
    }
}
