//! `cpc_event_t`: what is counted, what was counted, and when.

/// Most counters of an LWP.
pub(crate) const MAX_PIC: usize = 8;

/// `cpc_event_t` of `libcpc.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Event {
    /// The processor that it is for.
    pub(crate) cpuver: i32,
    /// When the counters were read: nanoseconds of the monotonic clock.
    pub(crate) hrt: i64,
    /// Ticks of the time stamp counter for which the LWP ran.
    pub(crate) tsc: u64,
    /// The counters' values.
    pub(crate) pic: [u64; MAX_PIC],
    /// What each is to count: an event select, rings included; 0: nothing.
    pub(crate) pes: [u64; MAX_PIC],
}

impl Event {
    /// Counters that are to count something.
    pub(crate) fn used(&self) -> impl Iterator<Item = usize> + use<> {
        let pes = self.pes;
        (0..MAX_PIC).filter(move |&pic| pes[pic] != 0)
    }

    /// `cpc_event_accum`: adds counts and ticks, and keeps the later time.
    pub(crate) fn accumulate(&mut self, event: &Event) {
        for (sum, more) in self.pic.iter_mut().zip(event.pic) {
            *sum = sum.wrapping_add(more);
        }
        self.hrt = self.hrt.max(event.hrt);
        self.tsc = self.tsc.wrapping_add(event.tsc);
    }

    /// `cpc_event_diff`: counts and ticks since `before`. All else is as it is here.
    pub(crate) fn since(&self, before: &Event) -> Event {
        let mut diff = *self;
        for (count, before) in diff.pic.iter_mut().zip(before.pic) {
            *count = count.wrapping_sub(before);
        }
        diff.tsc = diff.tsc.wrapping_sub(before.tsc);
        diff
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{Strategy, any, prop_assert_eq, proptest};

    fn events() -> impl Strategy<Value = Event> {
        let arrays = any::<([u64; MAX_PIC], [u64; MAX_PIC])>();
        (any::<i32>(), any::<i64>(), any::<u64>(), arrays).prop_map(
            |(cpuver, hrt, tsc, (pic, pes))| Event {
                cpuver,
                hrt,
                tsc,
                pic,
                pes,
            },
        )
    }

    proptest! {
        #[test]
        fn a_difference_added_leads_back(before in events(), after in events()) {
            let diff = after.since(&before);
            prop_assert_eq!(diff.hrt, after.hrt);
            let mut sum = before;
            sum.accumulate(&diff);
            prop_assert_eq!(sum.pic, after.pic);
            prop_assert_eq!(sum.tsc, after.tsc);
            prop_assert_eq!(sum.hrt, before.hrt.max(after.hrt));
            prop_assert_eq!(sum.pes, before.pes);
        }
    }
}
