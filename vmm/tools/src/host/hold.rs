//! `umpire lease` and `umpire hog`: a lease for as long as a command runs, or until Ctrl-C.

use std::ffi::OsString;
use std::io::Write;
use std::time::{Duration, Instant};

use umpire_lease::{CallError, Keeper, Kept, News, Request, What};

use super::{HostOptions, text};
use crate::ToolError;
use crate::command::{CommandOutput, RunningCommand};
use crate::error::host;
use crate::wait::Waiter;

/// How long a holder looks for an arbiter that has gone away.
const COMES_BACK: Duration = Duration::from_secs(15);

/// What is held, and around what.
#[derive(Clone, Debug)]
pub struct HoldOptions {
    /// The arbiter.
    pub host: HostOptions,
    /// What is asked for.
    pub request: Request,
    /// Renews the lease in time, for as long as the command runs.
    pub renew: bool,
    /// The command; without one the lease is held until Ctrl-C or its end.
    pub command: Vec<OsString>,
}

const LEASE: usize = 0;

/// Holds the lease. Returns the status of the command, or 0.
///
/// # Errors
/// The lease cannot be had, or the command cannot be started.
pub fn hold(options: &HoldOptions, errors: &mut dyn Write) -> Result<u8, ToolError> {
    let waiter = Waiter::new().map_err(host("waiting"))?;
    let (path, request) = (options.host.path(), &options.request);
    let keeper = Keeper::acquire(&path, request, options.renew, Some(COMES_BACK))?;
    if let Some(connection) = keeper.connection() {
        waiter.add(connection, LEASE).map_err(host("waiting"))?;
    }
    let mut holder = Holder {
        options,
        waiter,
        keeper,
        errors,
    };
    if !holder.turn_comes()? {
        return Ok(130);
    }
    holder.greet();
    let command = RunningCommand::start(&options.command, &holder.waiter, CommandOutput::Own)?;
    let Some(mut command) = command else {
        holder.keep(None)?;
        return Ok(0);
    };
    let status = holder.keep(Some(&mut command));
    if status.is_err() {
        // It goes on without the lease.
        command.wait();
    }
    Ok(status?.unwrap_or(0))
}

/// Waits until Ctrl-C, or for so long.
///
/// # Errors
/// The host refuses.
pub fn pass_time(most: Option<Duration>) -> Result<(), ToolError> {
    let waiter = Waiter::new().map_err(host("waiting"))?;
    let until = most.map(|most| Instant::now() + most);
    while until.is_none_or(|until| Instant::now() < until) {
        if waiter.wait(until).map_err(host("waiting"))?.stop {
            break;
        }
    }
    Ok(())
}

struct Holder<'a> {
    options: &'a HoldOptions,
    waiter: Waiter,
    keeper: Keeper,
    errors: &'a mut dyn Write,
}

impl Holder<'_> {
    fn tell(&mut self, what: &str) {
        let _ = writeln!(self.errors, "umpire: {what}");
    }

    /// Waits until the lease holds something. Returns whether it does.
    fn turn_comes(&mut self) -> Result<bool, ToolError> {
        loop {
            while let Some(news) = self.hear()? {
                if self.keeper.has_ended() {
                    return Err(ToolError::Arbiter(CallError::Other(news)));
                }
                if self.keeper.lease().holds == 0 {
                    self.tell(&news);
                }
            }
            if self.keeper.lease().holds > 0 {
                return Ok(true);
            }
            let woken = self.waiter.wait(self.keeper.due());
            if woken.map_err(host("waiting"))?.stop {
                return Ok(false);
            }
        }
    }

    fn greet(&mut self) {
        let lease = self.keeper.lease();
        let text = format!(
            "lease {}: {} of {} counters ({}) on CPUs {}",
            lease.id,
            lease.holds,
            lease.wants,
            text::counters(&lease.counters),
            lease.cpus
        );
        let out_of = text::out_of(lease);
        let between = if out_of.is_empty() { "" } else { ", " };
        let text = format!("{text}{between}{out_of}");
        self.tell(&text);
        if let Some(warning) = unpinned(&self.options.command) {
            self.tell(&warning);
        }
    }

    /// Keeps the lease until the command, or without one the lease, has ended.
    fn keep(&mut self, command: Option<&mut RunningCommand>) -> Result<Option<u8>, ToolError> {
        let mut command = command;
        loop {
            if let Some(command) = &mut command
                && let Some(status) = command.status()?
            {
                return Ok(Some(status));
            }
            while let Some(news) = self.hear()? {
                self.tell(&news);
            }
            if command.is_none() && self.keeper.has_ended() {
                return Ok(None);
            }
            let ends = command.as_ref().and_then(|command| command.due());
            let until = [self.keeper.due(), ends].into_iter().flatten().min();
            let woken = self.waiter.wait(until).map_err(host("waiting"))?;
            match &mut command {
                Some(command) => command.hear(&woken),
                None if woken.stop => return Ok(None),
                None => {}
            }
        }
    }

    /// What has happened to the lease, in words.
    fn hear(&mut self) -> Result<Option<String>, ToolError> {
        while let Some(news) = self.keeper.hear() {
            let id = self.keeper.lease().id;
            return Ok(Some(match news {
                News::Event(event) if event.what == What::Renewed => continue,
                News::Event(event) => format!("lease {id} {}", event.message),
                News::Away => {
                    format!("the arbiter has gone away; lease {id} is claimed when it is back")
                }
                News::Back => {
                    if let Some(connection) = self.keeper.connection() {
                        let added = self.waiter.add(connection, LEASE);
                        added.map_err(host("waiting"))?;
                    }
                    format!("lease {id} is held again")
                }
                News::Lost(why) => format!("lease {id} is lost: {why}"),
                News::NotRenewed(why) => format!("lease {id} cannot be renewed now: {why}"),
            }));
        }
        Ok(None)
    }
}

/// Why the counts of a `perf` command may be of a part of its time, lease or not.
fn unpinned(command: &[OsString]) -> Option<String> {
    let mut words = command.iter().map(|word| word.to_string_lossy());
    let program = words.next()?;
    if program.rsplit('/').next() != Some("perf") {
        return None;
    }
    if !matches!(words.next().as_deref(), Some("stat" | "record" | "top")) {
        return None;
    }
    let mut events = Vec::new();
    while let Some(word) = words.next() {
        if word == "-e" || word == "--event" {
            events.extend(words.next().map(|list| list.into_owned()));
        } else if let Some(list) = word.strip_prefix("--event=") {
            events.push(list.to_owned());
        } else if let Some(list) = word.strip_prefix("-e") {
            events.push(list.to_owned());
        } else if word == "--" {
            break;
        }
    }
    let is_pinned = |list: &String| {
        let list = list.replace(['{', '}'], "");
        list.split(',').all(|event| {
            event
                .rsplit_once(':')
                .is_some_and(|(_, modifiers)| modifiers.contains('D'))
        })
    };
    (events.is_empty() || !events.iter().all(is_pinned)).then(|| {
        "these events are not pinned, so the kernel may let others have the counters now and \
         then, lease or not; pin them: -e cycles:D"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_that_are_not_pinned_are_warned_of() {
        for (command, warned) in [
            ("perf stat -e cycles:D true", false),
            (
                "perf stat -e cycles:uD,{instructions:D,branches:D} true",
                false,
            ),
            ("/usr/bin/perf stat --event=cycles true", true),
            ("perf stat -ecycles:D,instructions:u true", true),
            ("perf stat true", true),
            ("perf list", false),
            ("make -e x", false),
            ("perf stat -e cycles:D -- make -e x", false),
        ] {
            let words: Vec<OsString> = command.split(' ').map(OsString::from).collect();
            assert_eq!(unpinned(&words).is_some(), warned, "{command}");
        }
    }
}
