//! What the log says of events that nobody counts: each once for a vCPU, with its
//! code and the reason.

use arbiter::CounterId;
use pmu_model::{CountRequest, OwnerId, UnavailableReason};

/// More are not named: a guest can ask for any number of events.
const MOST: usize = 64;

/// The events that the log has named for one vCPU.
#[derive(Debug, Default)]
pub(super) struct Uncounted {
    named: Vec<(CountRequest, UnavailableReason)>,
}

impl Uncounted {
    /// Names the event that `counter` selects, unless that was done before.
    pub(super) fn log(
        &mut self,
        owner: OwnerId,
        counter: CounterId,
        request: &CountRequest,
        reason: UnavailableReason,
    ) {
        if log::log_enabled!(log::Level::Info)
            && let Some(line) = self.line(owner, counter, request, reason)
        {
            log::info!("{line}");
        }
    }

    fn line(
        &mut self,
        owner: OwnerId,
        counter: CounterId,
        request: &CountRequest,
        reason: UnavailableReason,
    ) -> Option<String> {
        // As a tool prints a code: enabled, with the interrupt.
        let event = CountRequest {
            enabled: true,
            int: true,
            ..*request
        };
        if self.named.len() > MOST || self.named.contains(&(event, reason)) {
            return None;
        }
        self.named.push((event, reason));
        if self.named.len() > MOST {
            return Some(format!(
                "{owner}: further events that nobody counts are not named"
            ));
        }
        let code = event.encode().map(|code| format!(" (r{code:x})"));
        let code = code.unwrap_or_default();
        Some(format!(
            "{owner}: {counter} stays frozen on '{event}'{code}: {reason}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pmu_model::{EventCode, EventFamily, FixedFunction};

    fn select(select: u16, usr: bool) -> CountRequest {
        let event = EventCode::Selected {
            family: EventFamily::AmdZen,
            select,
            umask: 0,
        };
        CountRequest::plain(event, true, usr)
    }

    fn reason(request: &CountRequest) -> UnavailableReason {
        UnavailableReason::Event {
            backend: "clock",
            event: request.event,
        }
    }

    #[test]
    fn an_event_is_named_once_with_code_and_reason() {
        let mut uncounted = Uncounted::default();
        let mut line = |counter, request: &CountRequest, reason| {
            uncounted.line(OwnerId(1), counter, request, reason)
        };
        let (pmc0, pmc2) = (CounterId::Programmable(0), CounterId::Programmable(2));
        let both = select(0xc3, true);
        let first = line(pmc2, &both, reason(&both)).expect("a line");
        assert_eq!(
            first,
            "vCPU 1: PMC2 stays frozen on 'mispredicted branches' (r5300c3): the clock backend \
             cannot count mispredicted branches"
        );
        // Neither another counter nor another enable makes it news.
        let stopped = CountRequest {
            enabled: false,
            ..both
        };
        assert_eq!(line(pmc0, &stopped, reason(&both)), None);
        // Another ring and another reason do.
        let kernel = select(0xc3, false);
        let line_of_kernel = line(pmc2, &kernel, reason(&kernel)).expect("a line");
        assert!(line_of_kernel.contains("(r5200c3)"), "{line_of_kernel}");
        let busy = UnavailableReason::Busy { backend: "clock" };
        assert!(line(pmc2, &both, busy).is_some());
        // A fixed counter has no code.
        let fixed = CountRequest::plain(EventCode::Fixed(FixedFunction::Instructions), true, true);
        let fixed = line(CounterId::Fixed(0), &fixed, reason(&fixed)).expect("a line");
        assert!(fixed.contains("'instructions': "), "{fixed}");
    }

    #[test]
    fn a_guest_cannot_flood_the_log() {
        let mut uncounted = Uncounted::default();
        let lines = (0..1000).filter_map(|event| {
            let pmc0 = CounterId::Programmable(0);
            let request = select(event, true);
            uncounted.line(OwnerId(0), pmc0, &request, reason(&request))
        });
        let lines: Vec<String> = lines.collect();
        assert_eq!(lines.len(), MOST + 1);
        assert!(lines[MOST].ends_with("further events that nobody counts are not named"));
    }
}
