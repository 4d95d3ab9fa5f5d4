//! The guest's TSC, without asking KVM each time: the host's and an offset.

use std::cell::Cell;

/// Ticks for which an offset is taken as it is: a tenth of a second, about. Guests write
/// their TSC when they boot, without an exit.
const FRESH: u64 = 1 << 28;
/// By so many ticks at most KVM's answer is late: the way back from an ioctl. Offsets that
/// differ by no more are the same.
const LATE: u64 = 1 << 18;

/// How far a vCPU's TSC is ahead of the host's.
#[derive(Debug, Default)]
pub(crate) struct GuestTsc {
    known: Cell<Option<Offset>>,
}

#[derive(Debug, Clone, Copy)]
struct Offset {
    /// Guest's minus host's: never too large, so that nothing is of the future.
    ahead: u64,
    /// The host's, when KVM was asked last.
    asked: u64,
}

impl GuestTsc {
    /// The guest's TSC now; `host` is the host's. If it is time, `ask` reads the guest's
    /// from KVM.
    pub(crate) fn read<E>(
        &self,
        host: impl Fn() -> u64,
        ask: impl FnOnce() -> Result<u64, E>,
    ) -> Result<u64, E> {
        let now = host();
        let known = self.known.get();
        if let Some(known) = known.filter(|known| now.wrapping_sub(known.asked) < FRESH) {
            return Ok(now.wrapping_add(known.ahead));
        }
        let guest = ask()?;
        let asked = host();
        let ahead = guest.wrapping_sub(asked);
        // Of answers that came more or less late, the earliest is the best.
        let best = known.filter(|known| known.ahead.wrapping_sub(ahead) < LATE);
        let ahead = best.map_or(ahead, |known| known.ahead);
        self.known.set(Some(Offset { ahead, asked }));
        Ok(asked.wrapping_add(ahead))
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// A host whose TSC is `now`, and a guest that is `ahead`; KVM's answer is `late`.
    fn read(tsc: &GuestTsc, now: &Cell<u64>, ahead: u64, late: u64) -> u64 {
        let ask = || {
            let guest = now.get().wrapping_add(ahead);
            now.set(now.get() + late);
            Ok::<_, Infallible>(guest)
        };
        tsc.read(|| now.get(), ask)
            .unwrap_or_else(|never| match never {})
    }

    #[test]
    fn kvm_is_asked_now_and_then_and_nothing_is_of_the_future() {
        let (tsc, now) = (GuestTsc::default(), Cell::new(1_000));
        let check = |passed: u64, ahead: u64, late: u64, behind: u64| {
            now.set(now.get() + passed);
            let found = read(&tsc, &now, ahead, late);
            assert_eq!(now.get().wrapping_add(ahead).wrapping_sub(found), behind);
        };
        let behind = 0u64.wrapping_sub(500);
        check(0, behind, 9_000, 9_000);
        check(10, behind, 0, 9_000);
        // A better answer, then a worse one.
        check(FRESH, behind, 2_000, 2_000);
        check(FRESH, behind, 50_000, 2_000);
        // The guest has written its TSC, ahead and back.
        check(FRESH, 1 << 40, 3_000, 3_000);
        check(FRESH, 7, 4_000, 4_000);
    }
}
