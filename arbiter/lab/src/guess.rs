//! Guessing a cookie: how long it takes, by its width, against the arbiter's guard.
//!
//! The registers take cookies of 48 bits. A narrower one is a cookie of which the
//! guesser knows the upper bits, so the arbiter compares it as it compares any other.

use std::sync::Arc;

use arbiter::{
    Access, Caller, Context, Cookie, CounterId, Event, GuardLimits, Layer, NoEntropy, PcrConfig,
    PcrRegister, PcrUnit, PerKind, Phase, Policy, Record, Request, Scheme, Tsc, Verdict, Wanted,
    abi,
};

use crate::random::Stream;

/// Who guesses, and what.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GuessPlan {
    /// Bits of the cookie that the guesser does not know, 1 to 48.
    pub bits: u8,
    /// A program guesses by RDPMC; else a kernel guesses a management cookie of the
    /// firmware.
    pub program: bool,
    /// What one guess costs the guesser, in microseconds.
    pub guess_us: u64,
    /// Guesses after which it gives up.
    pub most: u64,
}

/// What a guesser achieved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Guessed {
    /// Cookies that were compared.
    pub guesses: u64,
    /// Virtual time that this took, in seconds.
    pub seconds: f64,
    /// It found the cookie.
    pub found: bool,
    /// Part of the time for which the guard kept the vCPU off its core, or compared no
    /// cookie.
    pub penalty_share: f64,
}

const COUNTER: CounterId = CounterId::Programmable(3);
const MICROS_PER_MS: u64 = 1000;

/// Has a guesser try cookies one after the other, from a random one on. It waits while
/// the guard would not compare what it presents, so no guess is lost.
pub fn guess_cookies(plan: &GuessPlan, seed: u64) -> Guessed {
    let mut stream = Stream::new(seed, 102, plan.bits.into());
    let mask = u64::MAX >> (64 - u32::from(plan.bits.clamp(1, 48)));
    let secret = stream.bits() & mask;
    let start = stream.bits() & mask;
    let known = stream.bits() & abi::COOKIE_MASK & !mask;
    let with = |low: u64| known | low;
    let mut unit = victim(with(secret), plan.program);
    let (mut now, mut penalty, mut guesses, mut found) = (0_u64, 0_u64, 0_u64, false);
    while guesses < plan.most && guesses <= mask && !found {
        let guess = with(start.wrapping_add(guesses) & mask);
        guesses += 1;
        now += plan.guess_us;
        let mut records: Vec<Record> = Vec::new();
        let cx = &mut Context {
            now: Tsc(now),
            entropy: &mut NoEntropy,
            audit: &mut records,
        };
        found = present(&mut unit, guess, plan.program, cx);
        for record in &records {
            if let Event::Deaf { ms } | Event::LockedOut { ms } = record.event {
                let wait = u64::from(ms) * MICROS_PER_MS;
                now += wait;
                penalty += wait;
            }
        }
    }
    Guessed {
        guesses,
        seconds: now as f64 / 1e6,
        found,
        penalty_share: penalty as f64 / (now as f64).max(1.0),
    }
}

/// A unit with one counter whose cookie is `secret`: the firmware's, or the kernel's.
fn victim(secret: u64, program: bool) -> PcrUnit {
    let counters = PerKind {
        programmable: 4,
        fixed: 0,
    };
    let mut unit = PcrUnit::new(PcrConfig {
        counters,
        widths: PerKind {
            programmable: 48,
            fixed: 48,
        },
        policy: Policy::default(),
        scheme: Scheme::Independent,
        guard: GuardLimits::with_ticks_per_ms(MICROS_PER_MS),
        ticks_per_ms: MICROS_PER_MS,
        phase: Arc::new(Phase::new(!program)),
        legacy: None,
        smm: false,
    });
    let cx = &mut Context {
        now: Tsc(0),
        entropy: &mut NoEntropy,
        audit: &mut arbiter::NoAudit,
    };
    let layer = if program {
        Layer::GuestKernel
    } else {
        Layer::Firmware
    };
    let request = Request::Reserve {
        wanted: Wanted::This(COUNTER),
        cookie: Cookie::from_random(secret),
        lease_ms: None,
        event: None,
    };
    let _ = unit.request(layer, request, cx);
    if !program {
        let _ = unit.write(
            PcrRegister::Phase,
            abi::PHASE_END,
            Caller::legacy(layer),
            cx,
        );
    }
    unit
}

/// Presents one guess. True if it was right.
fn present(unit: &mut PcrUnit, guess: u64, program: bool, cx: &mut Context<'_>) -> bool {
    if !program {
        let caller = Caller {
            layer: Layer::GuestKernel,
            presented: guess,
        };
        // A right one would be handed over to the kernel with the same cookie: renewed.
        return unit
            .write(PcrRegister::ManagementKey(COUNTER), guess, caller, cx)
            .is_some();
    }
    let Some(cookie) = Cookie::new(guess) else {
        return false;
    };
    let caller = (Layer::GuestUser, cookie);
    let verdict = unit.check(caller, COUNTER, Access::Rdpmc, cx.now);
    unit.denied(caller, COUNTER, Access::Rdpmc, verdict, cx);
    verdict == Verdict::Permit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_guesser_ends_with_a_hit_within_the_space() {
        for program in [false, true] {
            for seed in 0..20 {
                let plan = GuessPlan {
                    bits: 8,
                    program,
                    guess_us: 10,
                    most: u64::MAX,
                };
                let guessed = guess_cookies(&plan, seed);
                assert!(guessed.found, "{program} {seed}");
                assert!((1..=256).contains(&guessed.guesses));
                // 16 are free; later ones cost penalties.
                assert_eq!(
                    guessed.penalty_share > 0.0,
                    guessed.guesses > 17,
                    "{guessed:?}"
                );
            }
        }
    }

    #[test]
    fn a_guesser_that_gives_up_has_found_nothing() {
        let plan = GuessPlan {
            bits: 48,
            program: true,
            guess_us: 10,
            most: 1000,
        };
        let guessed = guess_cookies(&plan, 1);
        assert!(!guessed.found && guessed.guesses == 1000);
    }
}
