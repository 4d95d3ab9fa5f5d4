//! The lines about what layers asked for.

use arbiter::{
    Ask, AskResult, CounterId, CounterSet, EventRoom, Layer, NamedEvent, Outcome, Policy,
    Presented, Reason, Wanted,
};
use serde::Serialize;

use super::super::decisions::{AskEntry, AuditTime};
use super::layer_word;
use crate::kvm::VcpuId;

/// Something that a layer asked for, or the later answer to it.
#[derive(Debug, Default, Serialize)]
pub(in super::super) struct AskLine {
    time_ns: AuditTime,
    vcpu: u8,
    layer: &'static str,
    event: &'static str,
    request: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    what: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    counter: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    any: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    held: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    elsewhere: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_ms: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    select: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    rooms: Vec<RoomLine>,
    #[serde(skip_serializing_if = "Option::is_none")]
    yields: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    control: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cookie: Option<&'static str>,
    result: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    counters: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    number: Option<u16>,
}

/// Room for what a layer asks for, where physical counters differ.
#[derive(Debug, Serialize)]
struct RoomLine {
    layer: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    select: Option<String>,
    more: u8,
    #[serde(skip_serializing_if = "is_none")]
    elsewhere: u8,
    instead_of: Vec<String>,
}

impl RoomLine {
    fn new(layer: Layer, room: EventRoom) -> Self {
        Self {
            layer: layer_word(layer),
            select: room.event.map(select),
            more: room.more,
            elsewhere: room.elsewhere,
            instead_of: names(room.instead_of),
        }
    }
}

impl AskLine {
    pub(in super::super) fn new(vcpu: VcpuId, entry: &AskEntry) -> Self {
        let ask = &entry.ask;
        let mut line = Self {
            time_ns: entry.time,
            vcpu: vcpu.0,
            layer: layer_word(ask.layer),
            request: entry.number,
            cookie: cookie_word(ask.presented),
            ..Self::default()
        };
        line.describe(&ask.ask);
        line.close(&ask.result);
        line
    }

    fn describe(&mut self, ask: &Ask) {
        let name = |counter: CounterId| Some(counter.to_string());
        self.event = "requested";
        self.what = Some(match *ask {
            Ask::Reserve {
                wanted,
                lease_ms,
                event,
            } => {
                self.lease_ms = lease_ms;
                self.select = event.map(select);
                match wanted {
                    Wanted::Any(count) => self.any = Some(count),
                    Wanted::Held(count) => self.held = Some(count),
                    Wanted::This(counter) => self.counter = name(counter),
                }
                "reserve"
            }
            Ask::Release(counter) => {
                self.counter = name(counter);
                "release"
            }
            Ask::Withdraw => "withdraw",
            Ask::Reply(reply) => {
                self.counter = name(reply.counter);
                self.yields = Some(reply.yields);
                "reply"
            }
            Ask::Key {
                counter,
                gives_back,
            } => {
                self.counter = name(counter);
                if gives_back { "key-release" } else { "key" }
            }
            Ask::Control(counter, control) => {
                self.counter = name(counter);
                self.control = Some(format!("{:#x}", control.bits()));
                "control"
            }
            Ask::EndPhase => "end-phase",
            Ask::SetAside(counter) => {
                self.counter = name(counter);
                "set-aside"
            }
            Ask::Backed(most) => {
                self.any = Some(most.programmable);
                self.elsewhere = (most.elsewhere > 0).then_some(most.elsewhere);
                self.counters = Some(names(most.fixed));
                let rooms = most.rooms.into_iter().flatten().zip(Policy::LAYERS);
                let known = rooms.filter_map(|(room, layer)| Some(RoomLine::new(layer, room?)));
                self.rooms = known.collect();
                "backed"
            }
            Ask::Administered => "administered",
            Ask::Answer => {
                self.event = "answered";
                self.cookie = None;
                self.what = None;
                return;
            }
        });
    }

    fn close(&mut self, result: &AskResult) {
        self.result = match *result {
            AskResult::Done => "done",
            AskResult::Faulted(reason) => {
                self.reason = Some(Reason::name(reason));
                "faulted"
            }
            AskResult::Answered(answer) => {
                self.number = Some(answer.number);
                match answer.outcome {
                    Outcome::Nothing => "done",
                    Outcome::Granted(counters) => {
                        self.counters = Some(names(counters));
                        "granted"
                    }
                    Outcome::Refused(reason) => {
                        self.reason = Some(Reason::name(reason));
                        "refused"
                    }
                    Outcome::Pending => "pending",
                }
            }
        };
    }
}

#[allow(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde passes a reference"
)]
fn is_none(counters: &u8) -> bool {
    *counters == 0
}

fn select(event: NamedEvent) -> String {
    format!("{:#x}", event.select())
}

fn names(set: CounterSet) -> Vec<String> {
    set.iter().map(|counter| counter.to_string()).collect()
}

/// Whose cookie was presented. Nothing here knows the cookie.
fn cookie_word(presented: Presented) -> Option<&'static str> {
    match presented {
        Presented::Nothing => None,
        Presented::Of(layer) => Some(layer_word(layer)),
        Presented::Wrong => Some("wrong"),
    }
}
