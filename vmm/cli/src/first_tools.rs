//! `umpire run --stat` and `--record`: tools of the same process, which look at the guest from
//! its first instruction on.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use umpire_tools::find::VmChoice;
use umpire_tools::lifecycle::Starter;
use umpire_tools::record::{self, RecordOptions};
use umpire_tools::stat::{self, StatOptions};
use umpire_tools::targets::Selection;
use umpire_tools::{Completion, ToolError};
use vmm::config::RunConfig;
use vmm::machine::{Machine, Stopper};

use crate::config::StartTools;
use crate::exit::{ExitStatus, UserError};

/// The tools, a thread each, and what was wrong first.
pub(crate) struct FirstTools {
    threads: Vec<JoinHandle<()>>,
    failed: Arc<Mutex<Option<ToolError>>>,
}

impl FirstTools {
    /// Starts them. The last one that is ready lets the guest begin; one that fails ends
    /// the run.
    ///
    /// # Errors
    /// The host has no descriptor or thread left.
    pub(crate) fn start(
        tools: &StartTools,
        config: &RunConfig,
        machine: &mut Machine,
    ) -> Result<Self, UserError> {
        let mut threads = Self {
            threads: Vec::new(),
            failed: Arc::default(),
        };
        let Some(control) = config.control.as_ref().filter(|_| config.paused) else {
            return Ok(threads);
        };
        if tools.record.as_deref() == Some(Path::new("-")) {
            return Err(UserError::bad_input(
                "--record -: standard output is the guest's console; name a file",
            ));
        }
        let starter = if tools.paused {
            Starter::told(tools.count())
        } else {
            Starter::of(tools.count())
        };
        if tools.count() == 0 {
            starter.tell();
        }
        let selection = Selection {
            vm: VmChoice {
                control: Some(control.socket.clone()),
                vm: None,
            },
            ..Selection::default()
        };
        let stat = tools.stat.clone().map(|events| StatOptions {
            selection: selection.clone(),
            events,
            starter: starter.clone(),
            ..StatOptions::default()
        });
        let record = tools.record.clone().map(|output| RecordOptions {
            who: selection,
            output,
            ..RecordOptions::default()
        });
        if let Some(options) = stat {
            let counts = move || stat::run(&options);
            threads.spawn("stat", machine, counts)?;
        }
        if let Some(options) = record {
            let samples = move || record::run_with(&options, &starter);
            threads.spawn("record", machine, samples)?;
        }
        Ok(threads)
    }

    fn spawn(
        &mut self,
        name: &str,
        machine: &mut Machine,
        tool: impl FnOnce() -> Result<Completion, ToolError> + Send + 'static,
    ) -> Result<(), UserError> {
        let stopper: Stopper = machine.stopper().map_err(failed)?;
        let first = self.failed.clone();
        let tool = move || {
            if let Err(error) = tool() {
                // The other one fails because the run ends.
                lock(&first).get_or_insert(error);
                stopper.stop();
            }
        };
        let thread = Builder::new().name(name.to_owned()).spawn(tool);
        self.threads.push(thread.map_err(failed)?);
        Ok(())
    }

    /// Waits for their results, after the guest's end.
    ///
    /// # Errors
    /// One of them has failed.
    pub(crate) fn finish(self) -> Result<(), UserError> {
        let mut panicked = false;
        for thread in self.threads {
            panicked |= thread.join().is_err();
        }
        match lock(&self.failed).take() {
            Some(error) => Err(error.into()),
            None if panicked => Err(failed("a tool panicked; this is a bug in Umpire")),
            None => Ok(()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> UserError {
    UserError::with_status(error, ExitStatus::HOST_FAILURE)
}
