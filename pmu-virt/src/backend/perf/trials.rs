//! What the kernel opens, found by asking once.

use pmu_model::{CountRequest, UnavailableReason};

use super::NAME;
use super::group::refused;
use super::plan::events;
use super::syscalls::{Errno, EventSpec, PerfSyscalls, uninterrupted};
use crate::backend::BackendEnv;

/// Answers that are remembered at most; a guest chooses what is asked.
const REMEMBERED: usize = 256;

/// Counters of one processor at most, fixed ones included.
const MOST_COUNTERS: usize = 32;

/// The kernel's answers so far.
#[derive(Debug, Default)]
pub(super) struct Trials {
    /// Whether it opens an event, alone.
    opening: Vec<(EventSpec, Result<(), Errno>)>,
    /// How often a hardware event fits into one group.
    fitting: Vec<(EventSpec, usize)>,
}

impl Trials {
    /// The best event for `request` that the kernel opens.
    pub(super) fn choose(
        &mut self,
        kernel: &mut dyn PerfSyscalls,
        request: &CountRequest,
        env: &BackendEnv,
    ) -> Result<EventSpec, UnavailableReason> {
        let mut refusal = UnavailableReason::Event {
            backend: NAME,
            event: request.event,
        };
        for event in events(request, env)? {
            match self.open(kernel, &event) {
                Ok(()) => return Ok(event),
                Err(errno) => refusal = refused(errno),
            }
        }
        Err(refusal)
    }

    fn open(&mut self, kernel: &mut dyn PerfSyscalls, spec: &EventSpec) -> Result<(), Errno> {
        if let Some((_, answer)) = self.opening.iter().find(|(tried, _)| tried == spec) {
            return *answer;
        }
        let answer = uninterrupted(|| kernel.open(spec, None)).map(|fd| kernel.close(fd));
        if !answer.is_err_and(Errno::is_transient) {
            remember(&mut self.opening, (*spec, answer));
        }
        answer
    }

    /// How often a hardware event fits into one group; the kernel tells only
    /// by refusing one more. `None` if it cannot be tried now.
    pub(super) fn fitting(
        &mut self,
        kernel: &mut dyn PerfSyscalls,
        spec: &EventSpec,
    ) -> Option<usize> {
        if let Some((_, fitting)) = self.fitting.iter().find(|(tried, _)| tried == spec) {
            return Some(*fitting);
        }
        let leader = uninterrupted(|| kernel.open(&EventSpec::LEADER, None)).ok()?;
        let mut events = Vec::new();
        let mut refusal = None;
        while events.len() < MOST_COUNTERS && refusal.is_none() {
            match uninterrupted(|| kernel.open(spec, Some(leader))) {
                Ok(event) => {
                    events.push(event);
                    // One that is disabled takes no room. With its leader off it still
                    // counts nothing.
                    refusal = uninterrupted(|| kernel.enable(event)).err();
                }
                Err(errno) => refusal = Some(errno),
            }
        }
        let fitting = events.len();
        events.into_iter().for_each(|event| kernel.close(event));
        kernel.close(leader);
        let out_of_counters = matches!(refusal, None | Some(Errno(libc::EINVAL | libc::ENOSPC)));
        if fitting == 0 || !out_of_counters {
            return None;
        }
        remember(&mut self.fitting, (*spec, fitting));
        Some(fitting)
    }
}

fn remember<T>(answers: &mut Vec<T>, answer: T) {
    if answers.len() >= REMEMBERED {
        answers.clear();
    }
    answers.push(answer);
}
