//! Requests for PCR, BUDGET and PAUSE: each goes to the thread of its vCPU as a job, and its
//! answer comes back from there.

use std::collections::BTreeMap;

use perfmon_abi::wire::budget::{BUDGET, BudgetRequest};
use perfmon_abi::wire::pause::{PAUSE, PauseRequest};
use perfmon_abi::wire::pcr::PcrRequest;
use perfmon_abi::wire::{Errno, Refusal, Request};
use serde::de::DeserializeOwned;

use super::answer::{Answer, ConnectionId, RequestId};
use crate::dispatcher::JobDispatcher;
use crate::job::{Administered, Administration, INSPECTION, Target, Work};

/// Requests that wait for their vCPU, by their number. A connection has one at most.
#[derive(Debug, Default)]
pub(super) struct AdminRequests {
    waiting: BTreeMap<u64, RequestId>,
    last: u64,
}

impl AdminRequests {
    /// Sends a request to its vCPU. `may` says whether its peer may change anything.
    pub(super) fn request(
        &mut self,
        id: RequestId,
        request: &Request<'_>,
        may: Result<(), Refusal>,
        dispatcher: &JobDispatcher,
    ) -> Result<(), Refusal> {
        let (vcpu, what) = match request.command {
            BUDGET => {
                let BudgetRequest { vcpu, change } = decode(request)?;
                (vcpu, Administration::Budget(change))
            }
            PAUSE => {
                let PauseRequest { vcpu, paused } = decode(request)?;
                (vcpu, Administration::Pause(paused))
            }
            _ => {
                let PcrRequest { vcpu, act } = decode(request)?;
                (vcpu, Administration::Pcr(act))
            }
        };
        if !what.only_looks() {
            may?;
        }
        let number = usize::try_from(vcpu).unwrap_or(usize::MAX);
        let count = dispatcher.vcpus();
        if number >= count {
            let reason = format!("there is no vCPU {vcpu}: the VM has {count}");
            return Err(Refusal::new(Errno::ESRCH, reason));
        }
        self.last += 1;
        self.waiting.insert(self.last, id);
        let work = Work::Administer(self.last, Box::new(what));
        dispatcher.post(INSPECTION, Target::Vcpu(number), work);
        Ok(())
    }

    /// A request came back; without a result its vCPU has ended. The answer, if
    /// somebody still waits for it.
    pub(super) fn done(
        &mut self,
        number: u64,
        target: Target,
        result: Option<Result<Administered, Refusal>>,
    ) -> Option<(RequestId, Answer)> {
        let request = self.waiting.remove(&number)?;
        let answer = match result {
            Some(Ok(info)) => Answer::json(&info),
            Some(Err(refusal)) => refusal.into(),
            None => Refusal::new(Errno::ESRCH, format!("{target} has ended")).into(),
        };
        Some((request, answer))
    }

    /// A connection has ended.
    pub(super) fn forget(&mut self, connection: ConnectionId) {
        self.waiting
            .retain(|_, request| request.connection != connection);
    }
}

pub(super) fn decode<T: DeserializeOwned>(request: &Request<'_>) -> Result<T, Refusal> {
    let malformed = |why: String| {
        let command = request.command;
        let reason = format!("the argument of command {command:#x} is not one request: {why}");
        Refusal::new(Errno::EINVAL, reason)
    };
    if request.nargs != 1 {
        return Err(malformed(format!("nargs is {}", request.nargs)));
    }
    serde_json::from_slice(request.payload).map_err(|error| malformed(error.to_string()))
}
