//! The firmware's mailbox on one vCPU: it asks for counters that it cannot reserve by
//! key, and answers layers that ask for the counters which it holds.

use arbiter::{Layer, Reason, abi};

use super::{Machine, Pcr};

/// What has become of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Happening {
    /// The counter, by its number in the configuration.
    pub number: u8,
    pub what: News,
}

/// What can become of a counter that the firmware asks for or holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    /// The request for it was granted, at this position.
    Granted {
        position: u8,
        /// Whether the answer took a while.
        waited: bool,
    },
    /// The request for it was refused.
    Denied(Option<Reason>),
    /// This layer was short, and has it now: by a reply, or as the counter may be lent.
    Yielded(Option<Layer>),
    /// This layer asked for it, and was refused.
    Kept(Option<Layer>),
    /// It was revoked, or its lease has ended.
    Lost(Option<Reason>),
}

/// The counters that the firmware holds on one vCPU. Not `Debug`: nobody prints cookies.
#[expect(missing_debug_implementations)]
pub struct Held {
    by_position: [Option<Counter>; POSITIONS],
}

const POSITIONS: usize = 64;

#[derive(Clone, Copy)]
struct Counter {
    number: u8,
    management: u64,
    yields: bool,
}

impl Held {
    /// Nothing.
    #[must_use]
    pub const fn nothing() -> Self {
        Self {
            by_position: [None; POSITIONS],
        }
    }

    pub(super) fn insert(&mut self, position: u8, number: u8, management: u64, yields: bool) {
        if let Some(place) = self.by_position.get_mut(usize::from(position)) {
            *place = Some(Counter {
                number,
                management,
                yields,
            });
        }
    }

    fn place(&mut self, position: u8) -> Option<&mut Option<Counter>> {
        self.by_position.get_mut(usize::from(position))
    }
}

/// A request for any programmable counter.
pub(super) const ANY_ONE: u64 = abi::REQUEST_ANY | 1 << abi::REQUEST_WHICH_SHIFT;

/// A request for the counter at a position.
pub(super) fn at(position: u8) -> u64 {
    abi::REQUEST_POSITION | u64::from(position) << abi::REQUEST_WHICH_SHIFT
}

/// The mailbox, and that a grantee sets its counter's access cookie, 0 included.
const NEEDED: u32 = abi::FEATURE_MAILBOX | abi::FEATURE_GRANTEE;

/// Asks for a counter, and waits for the answer for as long as the machine lets it. Who
/// asks the firmware meanwhile is answered.
pub(super) fn ask(
    machine: &mut impl Machine,
    pcr: &Pcr,
    (number, which): (u8, u64),
    management: u64,
    held: &mut Held,
) -> Option<u8> {
    if !pcr.offers(NEEDED) {
        return None;
    }
    let request = pcr.base() + abi::MSR_REQUEST;
    let reserve = abi::REQUEST_RESERVE | which;
    machine.write(request, management, reserve).ok()?;
    let mut waited = false;
    loop {
        let answer = machine.read(pcr.base() + abi::MSR_ANSWER, 0).ok()?;
        match answer & abi::ANSWER_STATE_MASK {
            abi::ANSWER_PENDING => {}
            abi::ANSWER_GRANTED => {
                let granted = machine.read(pcr.base() + abi::MSR_GRANTED, 0).ok()?;
                // None, if it was revoked already.
                let position = u8::try_from(granted.trailing_zeros()).ok();
                let position = position.filter(|at| usize::from(*at) < POSITIONS)?;
                let what = News::Granted { position, waited };
                machine.tell(Happening { number, what });
                return Some(position);
            }
            _ => {
                let what = News::Denied(reason(answer, abi::ANSWER_REASON_SHIFT));
                machine.tell(Happening { number, what });
                return None;
            }
        }
        waited = true;
        answer_notices(machine, pcr, held);
        if !machine.wait() {
            // Nothing is pending afterwards, and if it was granted a moment before the
            // answer says so.
            machine
                .write(request, management, abi::REQUEST_WITHDRAW)
                .ok()?;
        }
    }
}

/// Gives a counter back by the mailbox.
pub(super) fn give_back(machine: &mut impl Machine, pcr: &Pcr, position: u8, management: u64) {
    let release = abi::REQUEST_RELEASE | at(position);
    // It was granted by the mailbox, so there is one; a counter that was revoked
    // meanwhile needs no release.
    let _ = machine.write(pcr.base() + abi::MSR_REQUEST, management, release);
}

/// Takes the notices that wait on this vCPU, and replies to those that ask for a counter
/// of the firmware's: it yields or refuses, as that counter's configuration says.
pub fn answer_notices(machine: &mut impl Machine, pcr: &Pcr, held: &mut Held) {
    if !pcr.offers(abi::FEATURE_MAILBOX) {
        return;
    }
    while let Ok(notice) = machine.read(pcr.base() + abi::MSR_NOTICE, 0)
        && notice & abi::NOTICE_KIND_MASK != abi::NOTICE_NONE
    {
        hear(machine, pcr, held, notice);
    }
}

fn hear(machine: &mut impl Machine, pcr: &Pcr, held: &mut Held, notice: u64) {
    let [_, position, layer, ..] = notice.to_le_bytes();
    let Some(place) = held.place(position) else {
        return;
    };
    let Some(counter) = *place else {
        return;
    };
    let layer = Layer::ALL.into_iter().find(|one| one.code() == layer);
    let reason = reason(notice, abi::NOTICE_REASON_SHIFT);
    let what = match notice & abi::NOTICE_KIND_MASK {
        abi::NOTICE_ASKED => {
            let reply = if counter.yields {
                abi::REPLY_YIELD
            } else {
                abi::REPLY_REFUSE
            };
            let value = reply | u64::from(position) << abi::REPLY_POSITION_SHIFT;
            // The question may have lapsed since.
            let replied = machine.write(pcr.base() + abi::MSR_REPLY, counter.management, value);
            if replied.is_err() || counter.yields {
                // A notice tells the loss, if the counter was taken.
                return;
            }
            News::Kept(layer)
        }
        abi::NOTICE_REVOKED | abi::NOTICE_EXPIRED => {
            *place = None;
            match reason {
                Some(Reason::Lent) => News::Yielded(layer),
                other => News::Lost(other),
            }
        }
        _ => return,
    };
    let number = counter.number;
    machine.tell(Happening { number, what });
}

fn reason(word: u64, shift: u64) -> Option<Reason> {
    let code = word >> shift & 0xff;
    Reason::ALL.into_iter().find(|reason| reason.code() == code)
}
