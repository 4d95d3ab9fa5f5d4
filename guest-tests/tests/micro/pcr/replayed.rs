//! The same script in a guest, in `umpire arbitrate`, and as a replay of what the guest
//! asked for: the same grants, the same denials.

use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use arbiter::{
    Ask, AskRecord, AskResult, Control, CounterId, Layer, NamedEvent, Policy, Scheme, Wanted, abi,
};
use arbiter_lab::script::{Action, End, Script as Steps, Setup as Machine, Trace, play};
use arbiter_lab::{Recorded, ReplaySetup, Replayed, recorded_results, replay};
use guest_tests::micro::{Lab, LabRun, Op, Script, Test};
use pmu_virt::PmuModel;
use vmm::config::{HypervisorCounters, PcrChoice};
use vmm::micro::MicroPcr;

use super::super::cores::tsc_khz;
use super::layers::planned;
use super::{KEY, OTHER_KEY, access_key, control, key, setup, single, with};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "pcr::a_guest_gets_what_arbitrate_says",
        run: as_played,
    },
    Test {
        name: "pcr::a_replay_gets_what_the_guest_got",
        run: as_replayed,
    },
];

/// A firmware that keeps three of six counters, and a kernel of higher priority.
const STEPS: &str = "
    0 firmware reserve 2
    0 firmware claim PMC1
    0 firmware lend PMC5
    0 firmware end-phase
    0 kernel reserve 2 lease 50
    0 kernel claim PMC0
    0 kernel reserve 7
    0 kernel claim PMC4
  300 kernel reserve 3
  600 kernel reserve 4
  900 kernel reserve PMC0
  900 kernel release PMC0
  900 kernel release PMC0
  900 kernel withdraw
  900 kernel reserve 1 event 0x76
";

fn policy() -> Policy {
    let mut policy = Policy::default();
    policy.kernel.priority = 1;
    policy.firmware.min.programmable = 1;
    policy.grace_ms = 50;
    policy
}

/// The cookie of a layer in the guest.
fn cookie(layer: Layer) -> u64 {
    match layer {
        Layer::Firmware => OTHER_KEY,
        _ => KEY,
    }
}

fn position(counter: CounterId) -> Result<u32> {
    Ok(counter.position().context("a position")?.into())
}

fn request(which: Wanted, lease_ms: Option<u32>, event: Option<NamedEvent>) -> Result<u64> {
    let lease = u64::from(lease_ms.unwrap_or(0)) / abi::REQUEST_LEASE_UNIT_MS;
    let which = match which {
        Wanted::Any(count) => abi::REQUEST_ANY | u64::from(count) << abi::REQUEST_WHICH_SHIFT,
        Wanted::This(counter) => {
            let position = u64::from(position(counter)?);
            abi::REQUEST_POSITION | position << abi::REQUEST_WHICH_SHIFT
        }
        Wanted::Held(_) => bail!("a guest cannot ask so"),
    };
    let event = event.map_or(0, NamedEvent::request_bits);
    Ok(abi::REQUEST_RESERVE | which | lease << abi::REQUEST_LEASE_SHIFT | event)
}

/// What the guest does for one step. It takes a #GP where `arbitrate` says so.
fn ops(action: Action, layer: Layer, end: End) -> Result<Vec<Op>> {
    let secret = cookie(layer);
    let faults = matches!(end, End::Faulted(_));
    let write = |msr, value| {
        if faults {
            Op::WriteGp(msr, value)
        } else {
            Op::Write(msr, value)
        }
    };
    // A test's few operations may live for ever.
    let presenting = |op| Op::With(secret, Box::leak(Box::new(op)));
    const REQUEST: u32 = single(abi::MSR_REQUEST);
    Ok(match action {
        Action::Reserve {
            wanted,
            lease_ms,
            event,
        } => {
            vec![presenting(write(
                REQUEST,
                request(wanted, lease_ms, event)?,
            ))]
        }
        Action::Claim(counter) => {
            let n = position(counter)?;
            let mut ops = vec![write(key(n), secret)];
            if !faults {
                ops.push(presenting(Op::Write(access_key(n), secret)));
            }
            ops
        }
        Action::Release(Some(counter)) => {
            let which = u64::from(position(counter)?) << abi::REQUEST_WHICH_SHIFT;
            let value = abi::REQUEST_RELEASE | abi::REQUEST_POSITION | which;
            vec![presenting(write(REQUEST, value))]
        }
        Action::Lend(counter, lends) => {
            let word = Control::INITIAL.with_lend(lends).bits();
            vec![presenting(write(control(position(counter)?), word))]
        }
        Action::Withdraw => vec![presenting(write(REQUEST, abi::REQUEST_WITHDRAW))],
        Action::EndPhase => vec![write(single(abi::MSR_PHASE), abi::PHASE_END)],
        other => anyhow::bail!("{other:?} is not for this guest"),
    })
}

/// Runs the steps in a guest.
fn run(lab: &Lab, steps: &Steps, trace: &Trace, pcr: MicroPcr) -> Result<LabRun> {
    let khz = tsc_khz(lab)?;
    let (mut kernel, mut at) = (Vec::new(), 0);
    for (step, end) in steps.steps().iter().zip(&trace.ends) {
        if step.at_ms > at {
            kernel.push(Op::Wait(u64::from(step.at_ms - at) * khz));
            at = step.at_ms;
        }
        let layer = step.layer.context("a layer")?;
        kernel.extend(ops(step.action, layer, *end)?);
    }
    let script = Script {
        name: "replayed",
        cr4: 0,
        kernel: &kernel,
        user: &[],
    };
    script.check(lab, &with(pcr))
}

/// What the guest asked for, with times from its first request on.
fn recorded(asks: &[(Instant, AskRecord)]) -> Result<(Vec<Recorded>, u64)> {
    let start = asks.first().context("a request")?.0;
    let ns = |at: Instant| u64::try_from((at - start).as_nanos());
    let one = |(at, ask): &(Instant, AskRecord)| {
        Ok(Recorded {
            at_ns: ns(*at)?,
            vcpu: 0,
            ask: *ask,
        })
    };
    let asks: Vec<Recorded> = asks.iter().map(one).collect::<Result<_>>()?;
    let end = asks.last().context("a request")?.at_ns;
    Ok((asks, end))
}

/// The results of what was asked for, without the lines that only answer.
fn results(asks: &[Recorded], results: &[Replayed]) -> Vec<(Ask, AskResult)> {
    let both = asks.iter().zip(results);
    let both = both.map(|(ask, one)| (ask.ask.ask, one.result));
    both.filter(|(ask, _)| !matches!(ask, Ask::Answer | Ask::Backed(_)))
        .collect()
}

fn agrees(end: &End, result: &AskResult) -> bool {
    match (end, result) {
        (End::Answered { outcome, .. }, AskResult::Answered(answer)) => *outcome == answer.outcome,
        (End::Faulted(said), AskResult::Faulted(reason)) => said == reason,
        (End::Done, AskResult::Done) => true,
        _ => false,
    }
}

fn replay_setup(lab_pcr: &MicroPcr, smm: bool, end_ns: u64) -> Result<ReplaySetup> {
    Ok(ReplaySetup {
        vcpus: 1,
        counters: PmuModel::parse(&setup().model)?.counts(),
        policy: lab_pcr.plan.policy,
        scheme: lab_pcr.plan.scheme,
        has_firmware: lab_pcr.firmware,
        smm,
        hypervisor_yields: false,
        end_ns,
    })
}

fn as_played(lab: &Lab) -> Result<()> {
    let steps: Steps = STEPS.parse()?;
    for scheme in Scheme::ALL {
        let machine = Machine {
            counters: PmuModel::parse(&setup().model)?.counts(),
            policy: policy(),
            scheme,
        };
        let trace = play(&steps, &machine);
        let mut pcr = MicroPcr {
            firmware: true,
            ..MicroPcr::default()
        };
        pcr.plan.scheme = scheme;
        pcr.plan.policy = policy();
        let ran = run(lab, &steps, &trace, pcr.clone())?;
        let vcpu = &ran.outcome.vcpus[0];
        let (asks, end_ns) = recorded(&vcpu.asks)?;
        let real = results(&asks, &recorded_results(&asks));
        ensure!(real.len() == trace.ends.len(), "{scheme}: {real:?}");
        for ((step, end), (ask, result)) in steps.steps().iter().zip(&trace.ends).zip(&real) {
            ensure!(
                agrees(end, result),
                "{scheme}, line {}: {end:?} by arbitrate, {result:?} in the guest for {ask:?}",
                step.line
            );
        }
        let owners = trace.owners.iter();
        let owned: Vec<_> = owners
            .filter_map(|(counter, owner)| Some((*counter, (*owner)?)))
            .collect();
        let held: Vec<_> = vcpu
            .holdings
            .iter()
            .map(|held| (held.counter, held.owner))
            .collect();
        ensure!(
            owned == held,
            "{scheme}: {owned:?} by arbitrate, {held:?} in the guest"
        );
        let smm = ran.outcome.smm;
        let replayed = replay(&replay_setup(&pcr, smm, end_ns)?, &asks);
        ensure!(results(&asks, &replayed) == real, "{scheme}: {replayed:?}");
    }
    Ok(())
}

/// The hypervisor holds two of six counters, and yields them where it is asked.
fn as_replayed(lab: &Lab) -> Result<()> {
    const REQUEST: u32 = single(abi::MSR_REQUEST);
    let any = |count: u64| abi::REQUEST_RESERVE | count << abi::REQUEST_WHICH_SHIFT;
    let kernel = [
        Op::With(KEY, Box::leak(Box::new(Op::Write(REQUEST, any(5))))),
        Op::With(KEY, Box::leak(Box::new(Op::Write(REQUEST, any(1))))),
        // A wrong cookie, and one of another component.
        Op::With(OTHER_KEY, Box::leak(Box::new(Op::WriteGp(key(5), 0)))),
        Op::With(OTHER_KEY, Box::leak(Box::new(Op::Write(REQUEST, any(2))))),
    ];
    let mut granted = Vec::new();
    for scheme in Scheme::ALL {
        let choice = PcrChoice {
            scheme,
            hypervisor: HypervisorCounters::Last(2),
            ..PcrChoice::default()
        };
        let pcr = planned(&choice, &[])?;
        let script = Script {
            name: "to be replayed",
            cr4: 0,
            kernel: &kernel,
            user: &[],
        };
        let ran = script.check(lab, &with(pcr.clone()))?;
        let (asks, end_ns) = recorded(&ran.outcome.vcpus[0].asks)?;
        let real = results(&asks, &recorded_results(&asks));
        let smm = ran.outcome.smm;
        let as_run = replay_setup(&pcr, smm, end_ns)?;
        for hypervisor_yields in [false, true] {
            let setup = ReplaySetup {
                hypervisor_yields,
                ..as_run
            };
            let replayed = results(&asks, &replay(&setup, &asks));
            ensure!(replayed == real, "{scheme}: {replayed:?} for {real:?}");
        }
        // Under another scheme the same requests end as they do in a run under it.
        let kernels = |all: &[(Ask, AskResult)]| -> Vec<AskResult> {
            let kernels = all
                .iter()
                .filter(|(ask, _)| matches!(ask, Ask::Reserve { .. }));
            kernels.map(|(_, result)| *result).collect()
        };
        let others = Scheme::ALL.map(|scheme| {
            let setup = ReplaySetup {
                scheme,
                hypervisor_yields: true,
                ..as_run
            };
            kernels(&results(&asks, &replay(&setup, &asks)))
        });
        granted.push((kernels(&real), others));
    }
    let real: Vec<_> = granted.iter().map(|(real, _)| real.clone()).collect();
    ensure!(real[1] != real[2], "the schemes should differ: {real:?}");
    for (_, others) in &granted {
        ensure!(others[..] == real[..], "{others:?} for {real:?}");
    }
    Ok(())
}
