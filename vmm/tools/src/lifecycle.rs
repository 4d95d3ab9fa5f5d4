//! `umpire pause`, `resume` and `stop`, and tools that let a VM go on when everything counts.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use perfmon_abi::wire::pause::PauseRequest;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use umpire_perfmon::Client;

use crate::error::host;
use crate::find::{VmChoice, name_of};
use crate::pcr::{each, refused_on};
use crate::{ToolError, Vm, Waiter, note, vm};

/// How long a VM may take to end.
const PATIENCE: Duration = Duration::from_secs(15);

/// Keeps the vCPUs of a VM out of their guest, or lets them go on. All of them have left it
/// when this returns.
///
/// # Errors
/// There is no VM, or it refuses.
pub fn pause(choice: &VmChoice, paused: bool, notes: &mut dyn Write) -> Result<(), ToolError> {
    let (socket, client, hello) = vm::meet(choice)?;
    set_paused(&client, hello.vcpus, paused)?;
    let what = if paused { "is paused" } else { "runs" };
    note(
        notes,
        &format!("VM {} ({}) {what}", name_of(&socket), hello.pid),
    );
    Ok(())
}

fn set_paused(client: &Client, vcpus: u32, paused: bool) -> Result<(), ToolError> {
    let numbers: Vec<u32> = (0..vcpus).collect();
    let request = |vcpu| PauseRequest {
        vcpu,
        paused: Some(paused),
    };
    let what = if paused {
        "pausing it"
    } else {
        "letting it go on"
    };
    each(
        &numbers,
        |vcpu| client.pause(&request(vcpu)),
        |vcpu, refusal| refused_on(vcpu, what, refusal),
    )?;
    Ok(())
}

/// Ends a VM as SIGTERM does, and waits until it has ended.
///
/// # Errors
/// There is no VM, this user may not, or it has not ended in time.
pub fn stop(choice: &VmChoice, notes: &mut dyn Write) -> Result<(), ToolError> {
    let (socket, client, _) = vm::meet(choice)?;
    let server = client.server();
    let pid = server.map_err(host("asking who serves the socket"))?.pid;
    let process = pidfd_open(pid, PidfdFlags::empty());
    let process = process.map_err(|error| host("watching the VM")(error.into()))?;
    // It still serves, so what was opened is the VM, and not a later process of its number.
    let hello = client.hello();
    hello.map_err(|refusal| ToolError::refused("asking for the VM", refusal))?;
    let title = format!("VM {} ({})", name_of(&socket), Pid::as_raw(Some(pid)));
    pidfd_send_signal(&process, Signal::TERM).map_err(|error| {
        let error = std::io::Error::from(error);
        ToolError::Input(format!("{title} cannot be stopped: {error}"))
    })?;
    let waiter = Waiter::new().map_err(host("waiting for the VM"))?;
    waiter
        .add(&process, 0)
        .map_err(host("waiting for the VM"))?;
    let until = Instant::now() + PATIENCE;
    loop {
        let woken = waiter
            .wait(Some(until))
            .map_err(host("waiting for the VM"))?;
        if woken.ready.contains(&0) {
            note(notes, &format!("{title} has ended"));
            return Ok(());
        }
        if woken.stop || until <= Instant::now() {
            return Err(ToolError::Input(format!(
                "{title} was told to end, and has not yet: is anybody reading its console?"
            )));
        }
    }
}

/// What tools do when everything that they were asked for counts.
#[derive(Clone, Debug, Default)]
pub struct Starter(Option<Arc<Countdown>>);

#[derive(Debug)]
struct Countdown {
    /// Tools that are not ready yet.
    left: AtomicUsize,
    /// The last one lets the VM go on; else it says that somebody may.
    resumes: bool,
}

impl Starter {
    /// The last of so many tools lets the VM go on.
    #[must_use]
    pub fn of(tools: usize) -> Self {
        Self::new(tools, true)
    }

    /// The last of so many tools says on standard error that the VM may go on.
    #[must_use]
    pub fn told(tools: usize) -> Self {
        Self::new(tools, false)
    }

    fn new(tools: usize, resumes: bool) -> Self {
        Self(Some(Arc::new(Countdown {
            left: AtomicUsize::new(tools),
            resumes,
        })))
    }

    /// Says that the VM may go on.
    pub fn tell(&self) {
        note(
            &mut std::io::stderr(),
            "paused; umpire resume lets the guest begin",
        );
    }

    /// The VM waits for tools, or is with them from its first instruction.
    pub(crate) fn is_waited_for(&self) -> bool {
        self.0.is_some()
    }

    /// Everything counts.
    pub(crate) fn ready(&self, vm: &Vm) -> Result<(), ToolError> {
        match &self.0 {
            Some(down) if down.left.fetch_sub(1, Ordering::AcqRel) == 1 => {
                if down.resumes {
                    return set_paused(&vm.client, vm.model.vcpus, false);
                }
                self.tell();
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
