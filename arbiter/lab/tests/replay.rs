//! A recorded run that is replayed under its own scheme and policy has the same answers.

use std::sync::Arc;

use arbiter::{
    Ask, AskRecord, Auditor, Caller, Context, Control, Cookie, CounterId, GuardLimits, Layer,
    NoEntropy, PcrConfig, PcrRegister, PcrUnit, PerKind, Phase, Policy, Record, Reply, Request,
    Scheme, Tsc, Wanted, abi,
};
use arbiter_lab::{Recorded, ReplaySetup, recorded_results, replay};
use proptest::prelude::*;

const NS_PER_MS: u64 = 1_000_000;
const COUNTERS: PerKind = PerKind {
    programmable: 3,
    fixed: 1,
};

/// The firmware's cookie; others are above it.
const SECRET: u64 = 77_123_456_700;

/// Keeps what layers ask for.
#[derive(Debug, Default)]
struct Recorder {
    now: u64,
    asks: Vec<Recorded>,
}

impl Auditor for Recorder {
    fn record(&mut self, _: &Record) {}

    fn asked(&mut self, ask: &AskRecord) {
        self.asks.push(Recorded {
            at_ns: self.now,
            vcpu: 0,
            ask: *ask,
        });
    }
}

/// One move of a random run: nanoseconds since the last, the layer, what it does, with
/// a counter, a small number, and one of three cookies.
type Move = (u64, usize, u8, u8, u8, u8);

/// Plays moves as real layers would make them, on a unit of its own.
fn record(setup: &ReplaySetup, moves: &[Move]) -> (Vec<Recorded>, u64) {
    let mut unit = PcrUnit::new(PcrConfig {
        counters: setup.counters,
        widths: COUNTERS,
        policy: setup.policy,
        scheme: setup.scheme,
        guard: GuardLimits::with_ticks_per_ms(NS_PER_MS),
        ticks_per_ms: NS_PER_MS,
        phase: Arc::new(Phase::new(setup.has_firmware)),
        legacy: None,
        smm: setup.smm,
    });
    let mut recorder = Recorder::default();
    let mut now = 0;
    for (after, layer, what, counter, number, key) in moves {
        let until = now + after;
        while let Some(Tsc(due)) = unit.deadline()
            && due <= until
        {
            now = now.max(due);
            act(&mut unit, &mut recorder, now, |unit, cx| {
                let _ = unit.tick(cx);
            });
        }
        now = until;
        let layer = Policy::LAYERS[layer % 3];
        let counter = CounterId::at_position([0, 1, 2, 32][usize::from(counter % 4)]).unwrap();
        // Components of a layer mostly share a cookie. Others know it by accident.
        let secrets = [0, 8, 16].map(|secret| SECRET + secret + u64::from(layer.code()));
        let presented = match key % 8 {
            0..5 => secrets[0],
            5 => secrets[1],
            6 => 0,
            _ => SECRET,
        };
        let cookie = Cookie::new(presented).unwrap();
        // Layers choose different cookies for what they reserve.
        let own = Cookie::from_random(secrets[usize::from(key % 8 == 5)]);
        let caller = Caller { layer, presented };
        act(&mut unit, &mut recorder, now, |unit, cx| {
            let made = match what % 10 {
                0 | 1 => Some(Request::Reserve {
                    wanted: Wanted::Any(number % 4 + 1),
                    cookie: own,
                    lease_ms: (number % 3 == 0).then_some(20),
                    event: None,
                }),
                2 => Some(Request::Reserve {
                    wanted: Wanted::This(counter),
                    cookie: own,
                    lease_ms: None,
                    event: None,
                }),
                3 => Some(Request::Release { counter, cookie }),
                4 => Some(Request::Withdraw { cookie }),
                _ => None,
            };
            if let Some(request) = made {
                let _ = unit.request(layer, request, cx);
                return;
            }
            let (register, value) = match what % 10 {
                5 => (PcrRegister::ManagementKey(counter), secrets[0]),
                6 => (PcrRegister::ManagementKey(counter), 0),
                7 => {
                    let control = Control::INITIAL.with_lend(number % 2 == 0);
                    (PcrRegister::Control(counter), control.bits())
                }
                8 if layer == Layer::Hypervisor => {
                    let yields = number % 2 == 0;
                    let _ = unit.reply(layer, Reply { counter, yields }, cx);
                    return;
                }
                8 => {
                    let yields = if number % 2 == 0 {
                        abi::REPLY_YIELD
                    } else {
                        abi::REPLY_REFUSE
                    };
                    let position = u64::from(counter.position().unwrap());
                    (
                        PcrRegister::Reply,
                        yields | position << abi::REPLY_POSITION_SHIFT,
                    )
                }
                _ if *number == 0 => (PcrRegister::Phase, abi::PHASE_END),
                _ => return,
            };
            let _ = unit.write(register, value, caller, cx);
        });
    }
    (recorder.asks, now)
}

fn act(
    unit: &mut PcrUnit,
    recorder: &mut Recorder,
    now: u64,
    run: impl FnOnce(&mut PcrUnit, &mut Context<'_>),
) {
    recorder.now = now;
    let cx = &mut Context {
        now: Tsc(now),
        entropy: &mut NoEntropy,
        audit: recorder,
    };
    run(unit, cx);
}

fn shares() -> impl Strategy<Value = Policy> {
    ([0..3_u8, 0..3, 0..3], 0..2_u8, prop::option::of(10..60_u32)).prop_map(
        |([firmware, hypervisor, kernel], least, lease)| {
            let mut policy = Policy {
                grace_ms: 15,
                ..Policy::default()
            };
            policy.firmware.priority = firmware;
            policy.hypervisor.priority = hypervisor;
            policy.kernel.priority = kernel;
            policy.kernel.min.programmable = least;
            policy.kernel.lease_ms = lease;
            policy
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn a_replay_under_the_same_scheme_has_the_same_answers(
        moves in prop::collection::vec(
            (0..30_000_000_u64, 0..3_usize, any::<u8>(), any::<u8>(), 0..12_u8, any::<u8>()), 1..80),
        scheme in prop::sample::select(&Scheme::ALL[..]),
        policy in shares(),
        (has_firmware, smm) in (any::<bool>(), any::<bool>()),
    ) {
        let mut setup = ReplaySetup {
            vcpus: 1, counters: COUNTERS, policy, scheme, has_firmware, smm,
            hypervisor_yields: false, end_ns: 0,
        };
        let (asks, end_ns) = record(&setup, &moves);
        setup.end_ns = end_ns;
        let recorded = recorded_results(&asks);
        let replayed = replay(&setup, &asks);
        prop_assert_eq!(recorded.len(), replayed.len());
        for ((ask, recorded), replayed) in asks.iter().zip(&recorded).zip(&replayed) {
            if ask.ask.ask != Ask::Answer {
                prop_assert_eq!(recorded.result, replayed.result, "{:?}", ask);
            }
        }
        // No cookie is in the trail.
        for ask in &asks {
            let text = format!("{:?}", ask.ask);
            prop_assert!(!text.contains("771234567"), "{}", text);
        }
    }
}
