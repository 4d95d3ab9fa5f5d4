//! Accesses to counters: their verdict, and what follows a denied one.

use super::{Context, PcrUnit, record};
use crate::audit::Event;
use crate::cookie::Cookie;
use crate::guard::Penalty;
use crate::reason::Reason;
use crate::time::Tsc;
use crate::{Access, CounterId, Layer, Verdict};

impl PcrUnit {
    /// The verdict on an access to a counter or to its control at the time `now`.
    #[inline]
    pub fn check(
        &self,
        (layer, cookie): (Layer, Cookie),
        counter: CounterId,
        access: Access,
        now: Tsc,
    ) -> Verdict {
        if layer == Layer::GuestUser && self.is_deaf_to(cookie, now) {
            return self.bank.deny(layer, counter, access);
        }
        self.bank.check(layer, cookie, counter, access)
    }

    /// Whether a program's cookie counts as a wrong one without being compared.
    fn is_deaf_to(&self, cookie: Cookie, now: Tsc) -> bool {
        !cookie.is_default() && self.guard.is_deaf(now)
    }

    /// Records an access that [`PcrUnit::check`] did not permit, and counts its cookie
    /// if it was compared.
    #[cold]
    pub fn denied(
        &mut self,
        caller: (Layer, Cookie),
        counter: CounterId,
        access: Access,
        verdict: Verdict,
        cx: &mut Context<'_>,
    ) {
        let (layer, cookie) = caller;
        let reason = match self.bank.reservation(counter) {
            None => Reason::Unreserved,
            Some(reservation) if cookie.is_default() && reservation.is_private() => Reason::Held,
            Some(reservation) if !reservation.control.accesses(layer) => Reason::Layer,
            Some(_) => Reason::Cookie,
        };
        let event = match (verdict, access) {
            (Verdict::Permit, _) => return,
            (Verdict::Fault, _) => Event::Faulted(reason),
            (Verdict::Drop { .. }, Access::Write) => Event::DroppedWrite(reason),
            (Verdict::Drop { .. }, Access::Read | Access::Rdpmc) => Event::DroppedRead(reason),
        };
        record(cx, layer, Some(counter), event);
        // A cookie that was not compared is no guess.
        let was_compared = layer != Layer::GuestUser || !self.is_deaf_to(cookie, cx.now);
        if was_compared {
            self.guessed(reason, layer, cookie.is_default(), cx);
        }
    }

    /// Counts the cookie of something that was denied for `reason`, if it was compared
    /// and found wrong. Where the mode bits make every cookie of the layer wrong, none
    /// is compared and none counted, so a penalty never reveals that a cookie is
    /// right. The default cookie is no guess.
    pub(super) fn guessed(
        &mut self,
        reason: Reason,
        layer: Layer,
        is_default: bool,
        cx: &mut Context<'_>,
    ) {
        if is_default || reason != Reason::Cookie {
            return;
        }
        let event = match self.guard.wrong(layer, cx.now) {
            None => return,
            Some(Penalty::LockedOut(ticks)) => Event::LockedOut {
                ms: self.to_ms(ticks),
            },
            Some(Penalty::Deaf(ticks)) => Event::Deaf {
                ms: self.to_ms(ticks),
            },
        };
        record(cx, layer, None, event);
    }

    /// The end of the lock-out of the vCPU. `None` means that it may run at `now`.
    #[inline]
    pub fn locked_out_until(&self, now: Tsc) -> Option<Tsc> {
        self.guard.locked_out_until(now)
    }

    /// The number of wrong cookies so far.
    pub fn wrong_cookies(&self) -> u64 {
        self.guard.total()
    }
}
