//! Statements of the specification, one after the other: its section, its words, and a
//! context that has to do what they say.

use perfmon::{Context, LogicalPmu, Nanos, Phase};
use perfmon_abi::wire::{Call, Errno};
use perfmon_abi::{PmcArg, PmdArg, SetDesc, consts as pfm};
use pmu_model::{CounterId, PmuModel, Provenance};

use super::bench::{
    COUNTS, Known, MOMENT, Messages, call, context, info, launch, must, pmc, pmd, read, set, start,
};

const NOTIFY: u32 = pfm::PFM_REGFL_OVFL_NOTIFY;

/// A context with its queue.
struct Tool {
    context: Context,
    queue: Messages,
}

/// A period as a counter is loaded with it (3.4.1).
fn period(events: u64) -> u64 {
    events.wrapping_neg()
}

impl Tool {
    fn new(flags: u32) -> Self {
        Tool {
            context: context("amd-core", flags),
            queue: Messages::default(),
        }
    }

    /// A counter of a set: flags of its PMC, and periods first, short, long.
    fn counter(mut self, (set, num): (u16, u16), flags: u32, periods: [u64; 3]) -> Self {
        let control = PmcArg {
            flags,
            ..pmc(set, num, COUNTS)
        };
        let [first, short, long] = periods.map(period);
        let counter = PmdArg {
            short_reset: short,
            long_reset: long,
            ..pmd(set, num, first)
        };
        must(&mut self.context, Call::WritePmcs(vec![control]));
        must(&mut self.context, Call::WritePmds(vec![counter]));
        self
    }

    fn sets(mut self, sets: Vec<SetDesc>) -> Self {
        must(&mut self.context, Call::CreateEvtsets(sets));
        self
    }

    fn started(mut self, set: u16) -> Self {
        launch(&mut self.context, set);
        self
    }

    /// So many events at a counter of the active set, and what comes of them.
    fn count(&mut self, num: u16, events: u64) {
        self.context.count(num, events, Provenance::Exact);
        self.context.overflow(&MOMENT, &Known, &mut self.queue);
    }

    /// Time in which the active set counts, and what comes of it.
    fn pass(&mut self, ns: u64) {
        self.context.pass(Nanos(ns), true);
        self.context.expire();
    }

    fn left(&mut self, set: u16, num: u16) -> u64 {
        period(read(&mut self.context, set, num).0)
    }

    fn element(&mut self, set: u16, num: u16) -> PmdArg {
        match must(&mut self.context, Call::ReadPmds(vec![pmd(set, num, 0)])) {
            Call::ReadPmds(read) => read[0],
            other => unreachable!("{other:?}"),
        }
    }

    fn restart(&mut self) {
        must(&mut self.context, Call::Restart);
    }

    fn refused(&mut self, what: Call) -> Errno {
        let (outcome, _) = call(&mut self.context, what);
        outcome.expect_err("it is refused")
    }
}

/// A write of a PMD as §3.4.2 has it: just the long reset value.
fn long_reset(num: u16, events: u64) -> Call {
    Call::WritePmds(vec![PmdArg {
        long_reset: period(events),
        ..pmd(0, num, 0)
    }])
}

type Statement = (&'static str, &'static str, fn());

const STATEMENTS: &[Statement] = &[
    (
        "3.1.2",
        "each PMC register is initialized with a default value, chosen such that nothing is measured",
        || {
            let mut tool = Tool::new(0).started(0);
            assert!(tool.context.wanted().is_empty());
            assert_eq!(tool.left(0, 0), 0, "for counting PMDs it is 0 (3.1.3)");
        },
    ),
    (
        "3.1.4",
        "for a detached context the command returns the value the register had when it was detached",
        || {
            let mut tool = Tool::new(0).counter((0, 1), 0, [5000, 1, 1]).started(0);
            tool.count(1, 77);
            tool.context.detached();
            assert_eq!(tool.left(0, 1), 4923);
        },
    ),
    (
        "3.1.4",
        "reg_last_reset_val is the value of reg_short_reset or reg_long_reset, or the random one",
        || {
            let mut tool = Tool::new(0)
                .counter((0, 2), NOTIFY, [10, 20, 30])
                .started(0);
            assert_eq!(tool.element(0, 2).last_reset_val, period(10));
            tool.count(2, 10);
            tool.restart();
            assert_eq!(tool.element(0, 2).last_reset_val, period(30));
        },
    ),
    (
        "3.1.5",
        "only valid for a context that is attached (EBUSY is the only error that fits)",
        || {
            let mut tool = Tool::new(pfm::PFM_FL_SYSTEM_WIDE);
            assert_eq!(tool.refused(Call::Start(None)), Errno::EBUSY);
            assert_eq!(
                tool.refused(start(7)),
                Errno::EBUSY,
                "whatever the set that it names"
            );
        },
    ),
    (
        "3.1.5",
        "specifying a set with this command overrides the one of PFM_LOAD_CONTEXT",
        || {
            let mut tool = Tool::new(0).sets(vec![set(4, 0, 0, 0), set(9, 0, 0, 0)]);
            tool.context.attached(4);
            must(&mut tool.context, start(9));
            assert_eq!(tool.context.active_set(), 9);
            must(&mut tool.context, Call::Stop);
            must(&mut tool.context, Call::Start(None));
            assert_eq!(tool.context.active_set(), 9, "the last active set");
        },
    ),
    (
        "3.1.5",
        "until monitoring is activated no set switching occurs",
        || {
            let mut tool = Tool::new(0).sets(vec![
                set(0, pfm::PFM_SETFL_TIME_SWITCH, 0, 300_000),
                set(1, 0, 0, 0),
            ]);
            tool.context.attached(0);
            tool.pass(900_000);
            assert_eq!(tool.context.active_set(), 0);
            must(&mut tool.context, Call::Start(None));
            tool.pass(300_000);
            assert_eq!(tool.context.active_set(), 1);
        },
    ),
    (
        "3.1.6",
        "only valid for a context that is attached; no more set switching occurs",
        || {
            let mut tool = Tool::new(0).sets(vec![
                set(0, pfm::PFM_SETFL_TIME_SWITCH, 0, 300_000),
                set(1, 0, 0, 0),
            ]);
            assert_eq!(tool.refused(Call::Stop), Errno::EBUSY);
            let mut tool = tool.started(0);
            must(&mut tool.context, Call::Stop);
            tool.pass(900_000);
            assert_eq!(tool.context.active_set(), 0);
            tool.context.detached();
            assert_eq!(tool.refused(Call::Stop), Errno::EBUSY);
        },
    ),
    (
        "3.1.7",
        "the sanity of the chain of sets is verified when the context is attached",
        || {
            let tool = Tool::new(0).sets(vec![set(2, pfm::PFM_SETFL_EXPL_NEXT, 3, 0)]);
            let refused = tool.context.prepare_load(0).map_err(|it| it.errno);
            assert_eq!(
                refused,
                Err(Errno::EINVAL),
                "also of a set that is not named"
            );
            let tool = tool.sets(vec![set(3, 0, 0, 0)]);
            assert_eq!(tool.context.prepare_load(0), Ok(()));
        },
    ),
    (
        "3.1.8",
        "the context must already be attached for this command to succeed",
        || assert_eq!(Tool::new(0).refused(Call::Unload), Errno::EBUSY),
    ),
    (
        "3.1.9",
        "a non-overflowed PMD keeps its value unless reg_reset_pmds of an overflowed one names it",
        || {
            let mut tool = Tool::new(0)
                .counter((0, 0), NOTIFY, [10, 20, 30])
                .counter((0, 1), 0, [1000, 2000, 3000])
                .counter((0, 2), 0, [1000, 2000, 3000]);
            let names = PmcArg {
                flags: NOTIFY,
                reset_pmds: [1 << 2, 0],
                ..pmc(0, 0, COUNTS)
            };
            must(&mut tool.context, Call::WritePmcs(vec![names]));
            let mut tool = tool.started(0);
            tool.count(1, 1);
            tool.count(2, 1);
            tool.count(0, 10);
            tool.restart();
            let left = [0, 1, 2].map(|num| tool.left(0, num));
            assert_eq!(left, [30, 999, 3000]);
        },
    ),
    (
        "3.1.9",
        "time-based switching is stopped until PFM_RESTART: the restarted set is the same",
        || {
            let timed = set(0, pfm::PFM_SETFL_TIME_SWITCH, 0, 500_000);
            let mut tool = Tool::new(0)
                .sets(vec![timed, set(1, 0, 0, 0)])
                .counter((0, 0), NOTIFY, [10, 20, 30])
                .started(0);
            tool.pass(200_000);
            tool.count(0, 10);
            tool.pass(5_000_000);
            tool.restart();
            assert_eq!(tool.context.active_set(), 0);
            assert_eq!(info(&mut tool.context, 0).timeout.to_ns(), Some(300_000));
        },
    ),
    (
        "3.1.10",
        "set_id_next may name a set that has not been created yet; the timeout is rounded up",
        || {
            let timed = pfm::PFM_SETFL_TIME_SWITCH | pfm::PFM_SETFL_EXPL_NEXT;
            let mut tool = Tool::new(0);
            let made = must(
                &mut tool.context,
                Call::CreateEvtsets(vec![set(3, timed, 60_000, 1)]),
            );
            let Call::CreateEvtsets(made) = made else {
                unreachable!("the command stays the same")
            };
            assert!(made[0].timeout.to_ns() >= Some(1));
        },
    ),
    (
        "3.1.12",
        "the number of runs is incremented by PFM_LOAD_CONTEXT even though monitoring never starts",
        || {
            let mut tool = Tool::new(0).sets(vec![set(6, 0, 0, 0)]);
            tool.context.attached(6);
            tool.context.detached();
            tool.context.attached(6);
            assert_eq!(info(&mut tool.context, 6).runs, 2, "it is cumulative");
            assert_eq!(info(&mut tool.context, 0).runs, 0);
        },
    ),
    (
        "3.1.12",
        "set_act_duration leaves out what was stopped or masked",
        || {
            let mut tool = Tool::new(0)
                .counter((0, 0), NOTIFY, [10, 20, 30])
                .started(0);
            tool.pass(1000);
            must(&mut tool.context, Call::Stop);
            tool.pass(1000);
            must(&mut tool.context, Call::Start(None));
            tool.count(0, 10);
            tool.pass(1000);
            tool.restart();
            tool.pass(1000);
            let duration = info(&mut tool.context, 0).act_duration;
            assert_eq!(duration.to_ns(), Some(2000));
        },
    ),
    (
        "3.1.12",
        "set_switch_pmds is reset when the context is attached",
        || {
            let switches = set(0, pfm::PFM_SETFL_OVFL_SWITCH, 0, 0);
            let mut tool = Tool::new(0).sets(vec![switches, set(1, 0, 0, 0)]);
            let trigger = PmdArg {
                ovflsw_thres: 1,
                ..pmd(0, 3, period(10))
            };
            must(&mut tool.context, Call::WritePmcs(vec![pmc(0, 3, COUNTS)]));
            must(&mut tool.context, Call::WritePmds(vec![trigger]));
            let mut tool = tool.started(0);
            tool.count(3, 10);
            assert_eq!(tool.context.active_set(), 1);
            assert_eq!(info(&mut tool.context, 0).switch_pmds, [1 << 3, 0]);
            tool.context.detached();
            tool.context.attached(0);
            assert_eq!(info(&mut tool.context, 0).switch_pmds, [0, 0]);
        },
    ),
    (
        "3.4.2",
        "PFM_WRITE_PMDS on the overflowed PMD with a new reg_long_reset, then PFM_RESTART resets it so",
        || {
            let mut tool = Tool::new(0)
                .counter((0, 1), NOTIFY, [500, 500, 500])
                .started(0);
            // A tool that draws its periods by itself never stops.
            for drawn in [481, 522, 3, 1_000_000, 1] {
                let left = tool.left(0, 1);
                tool.count(1, left);
                assert_eq!(tool.context.phase(), Phase::Masked);
                must(&mut tool.context, long_reset(1, drawn));
                assert_eq!(tool.element(0, 1).value, 0, "what was written (3.1.3)");
                tool.restart();
                assert_eq!(tool.left(0, 1), drawn);
                assert_eq!(tool.element(0, 1).last_reset_val, period(drawn));
                let due = tool.context.wanted()[0].until.map(u64::from);
                assert_eq!(due, Some(drawn), "somebody waits for it");
            }
            assert_eq!(tool.queue.0.len(), 5, "a message for each");
        },
    ),
    (
        "3.4.2",
        "so does each of several that overflowed at once, and what only one of them names",
        || {
            let mut tool = Tool::new(0)
                .counter((0, 0), NOTIFY, [10, 20, 30])
                .counter((0, 1), 0, [10, 20, 30])
                .counter((0, 2), 0, [70, 80, 90]);
            let names = PmcArg {
                reset_pmds: [1 << 2, 0],
                ..pmc(0, 1, COUNTS)
            };
            must(&mut tool.context, Call::WritePmcs(vec![names]));
            let mut tool = tool.started(0);
            tool.context.count(0, 10, Provenance::Exact);
            tool.context.count(1, 10, Provenance::Exact);
            tool.count(2, 5);
            must(&mut tool.context, long_reset(1, 41));
            must(&mut tool.context, long_reset(2, 91));
            tool.restart();
            let left = [0, 1, 2].map(|num| tool.left(0, num));
            assert_eq!(left, [30, 41, 91]);
        },
    ),
    (
        "3.4.2",
        "a new seed that is written between them draws the number that the restart adds",
        || {
            let mut tool = Tool::new(0)
                .counter((0, 0), NOTIFY | pfm::PFM_REGFL_RANDOM, [10, 20, 30])
                .started(0);
            tool.count(0, 10);
            let drawn = PmdArg {
                long_reset: period(100_000),
                random_mask: 0xffff,
                random_seed: 1,
                ..pmd(0, 0, 0)
            };
            must(&mut tool.context, Call::WritePmds(vec![drawn]));
            tool.restart();
            assert_eq!(tool.left(0, 0), 100_000 - 16807, "Carta's second number");
        },
    ),
    (
        "3.4.2",
        "also of the set that the tool was told of, where it has chosen another one meanwhile",
        || {
            for write_first in [true, false] {
                let mut tool = Tool::new(0)
                    .sets(vec![set(1, 0, 0, 0)])
                    .counter((0, 1), NOTIFY, [10, 20, 30])
                    .counter((1, 1), NOTIFY, [400, 500, 600])
                    .started(0);
                tool.count(1, 10);
                let mut steps = [long_reset(1, 41), start(1)];
                if !write_first {
                    steps.reverse();
                }
                for step in steps {
                    must(&mut tool.context, step);
                }
                tool.restart();
                assert_eq!([tool.left(0, 1), tool.left(1, 1)], [41, 400]);
                // It goes on there.
                must(&mut tool.context, Call::Stop);
                must(&mut tool.context, start(0));
                tool.count(1, 41);
                assert_eq!(tool.context.phase(), Phase::Masked, "{write_first}");
            }
        },
    ),
    (
        "3.4.2, 6.2.2",
        "a read that resets, between them, leaves the restart what it has to reset",
        || {
            let mut tool = Tool::new(0)
                .counter((0, 1), NOTIFY, [10, 20, 30])
                .started(0);
            tool.count(1, 10);
            let reads = PmdArg {
                flags: pfm::PFM_REGFL_READ_RESET,
                ..pmd(0, 1, 0)
            };
            must(&mut tool.context, Call::ReadPmds(vec![reads]));
            must(&mut tool.context, long_reset(1, 77));
            tool.restart();
            assert_eq!(tool.left(0, 1), 77);
        },
    ),
    (
        "3.4.2",
        "each write of an overflowed PMD counts, the last one and its long reset value above all",
        || {
            let mut tool = Tool::new(0)
                .counter((0, 1), NOTIFY, [10, 20, 30])
                .started(0);
            tool.count(1, 10);
            for drawn in [5, 6, 7] {
                must(&mut tool.context, long_reset(1, drawn));
                // What the control says may change as well.
                let control = PmcArg {
                    flags: NOTIFY,
                    ..pmc(0, 1, COUNTS)
                };
                must(&mut tool.context, Call::WritePmcs(vec![control]));
                must(&mut tool.context, Call::Stop);
                must(&mut tool.context, Call::Start(None));
            }
            tool.restart();
            assert_eq!(tool.left(0, 1), 7);
            assert_eq!(tool.refused(Call::Restart), Errno::EBUSY, "once is enough");
        },
    ),
    (
        "3.7.7",
        "a write between two turns of a set leaves what overflowed last to the next turn",
        || {
            let switches = pfm::PFM_SETFL_OVFL_SWITCH;
            let mut tool = Tool::new(0).sets(vec![set(0, switches, 0, 0), set(1, switches, 0, 0)]);
            let periods = |id, short: u64| PmdArg {
                ovflsw_thres: 1,
                short_reset: period(short),
                ..pmd(id, 0, period(10))
            };
            for id in [0, 1] {
                must(&mut tool.context, Call::WritePmcs(vec![pmc(id, 0, COUNTS)]));
                must(
                    &mut tool.context,
                    Call::WritePmds(vec![periods(id, 40 + u64::from(id))]),
                );
            }
            let mut tool = tool.started(0);
            tool.count(0, 10);
            assert_eq!(tool.context.active_set(), 1);
            let shorter = PmdArg {
                value: 0,
                ..periods(0, 33)
            };
            must(&mut tool.context, Call::WritePmds(vec![shorter]));
            tool.count(0, 10);
            assert_eq!(tool.context.active_set(), 0);
            assert_eq!(tool.left(0, 0), 33, "or it would never switch again");
        },
    ),
    (
        "3.4.2",
        "a write while nothing has overflowed leaves the restart nothing to reset",
        || {
            let mut tool = Tool::new(0)
                .counter((0, 0), NOTIFY, [10, 20, 30])
                .counter((0, 1), 0, [500, 20, 30])
                .started(0);
            tool.count(0, 10);
            must(
                &mut tool.context,
                Call::WritePmds(vec![pmd(0, 1, period(7))]),
            );
            tool.restart();
            assert_eq!(tool.left(0, 1), 7);
        },
    ),
    (
        "3.4.3",
        "in case of simultaneous overflows by multiple counters, only one notification is generated",
        || {
            let mut tool = Tool::new(0)
                .counter((0, 3), NOTIFY, [10, 20, 30])
                .counter((0, 14), NOTIFY, [10, 20, 30])
                .started(0);
            tool.context.count(3, 10, Provenance::Exact);
            tool.count(14, 11);
            let told: Vec<_> = tool.queue.0.iter().flatten().collect();
            assert_eq!(told.len(), 1);
            assert_eq!(told[0].ovfl_pmds, [1 << 3 | 1 << 14, 0]);
        },
    ),
    (
        "3.4.3",
        "when the flag is not set, the counter simply wraps around on overflow",
        || {
            let mut tool = Tool::new(0).counter((0, 0), 0, [10, 20, 30]).started(0);
            tool.count(0, 14);
            assert_eq!(tool.context.phase(), Phase::Loaded);
            assert_eq!(tool.element(0, 0).value, 4);
            assert!(tool.queue.0.is_empty());
        },
    ),
    (
        "3.3.7",
        "with PFM_FL_OVFL_NO_MSG no message is generated, and PFM_RESTART is necessary all the same",
        || {
            let mut tool = Tool::new(pfm::PFM_FL_OVFL_NO_MSG)
                .counter((0, 0), NOTIFY, [10, 20, 30])
                .started(0);
            tool.count(0, 10);
            assert_eq!(tool.queue.0, [None], "whoever asked for a signal gets one");
            assert_eq!(tool.context.phase(), Phase::Masked);
            must(&mut tool.context, long_reset(0, 12));
            tool.restart();
            assert_eq!(tool.left(0, 0), 12);
        },
    ),
    (
        "3.7.7",
        "a switch during PFM_RESTART resets what overflowed last in the new set, with the long value",
        || {
            let switches = pfm::PFM_SETFL_OVFL_SWITCH;
            let mut tool = Tool::new(0).sets(vec![set(0, switches, 0, 0), set(1, switches, 0, 0)]);
            for id in [0, 1] {
                let control = PmcArg {
                    flags: NOTIFY,
                    ..pmc(id, 0, COUNTS)
                };
                let counter = PmdArg {
                    ovflsw_thres: 1,
                    long_reset: period(40 + u64::from(id)),
                    ..pmd(id, 0, period(10))
                };
                must(&mut tool.context, Call::WritePmcs(vec![control]));
                must(&mut tool.context, Call::WritePmds(vec![counter]));
            }
            let mut tool = tool.started(0);
            tool.count(0, 10);
            assert_eq!(tool.context.active_set(), 0, "not before the restart");
            tool.restart();
            assert_eq!(tool.context.active_set(), 1);
            tool.count(0, 10);
            tool.restart();
            assert_eq!(tool.context.active_set(), 0);
            assert_eq!([tool.left(0, 0), tool.left(1, 0)], [40, 41]);
        },
    ),
    (
        "6.2.1",
        "PFM_REGFL_NO_64BIT_EMUL is ignored for non counting PMD registers",
        || {
            let mut context = context("amd-core,ibs=on", 0);
            let control = PmcArg {
                flags: pfm::PFM_REGFL_NO_64BIT_EMUL | NOTIFY,
                ..pmc(0, 4, 1 << 48 | 0x20)
            };
            must(&mut context, Call::WritePmcs(vec![control]));
        },
    ),
];

#[test]
fn the_specification_is_kept() {
    for (section, words, play) in STATEMENTS {
        println!("{section}: {words}");
        play();
    }
}

/// Bits of an event select that mean something of their own to a tool of the host. What a
/// context does not count is refused where it is attached, which is not tested here.
#[test]
fn a_tool_of_the_host_stands_outside_of_the_guest() {
    const GUEST: u64 = 1 << 40;
    const HOST: u64 = 1 << 41;
    const ADAPTIVE: u64 = 1 << 34;
    let asked = |model: &str, bits: u64| {
        let pmu = LogicalPmu::new(PmuModel::parse(model).expect("a model"));
        let of_first = |pmc: &&perfmon::PmcDescription| pmc.counter == CounterId::Programmable(0);
        let pmc = pmu.pmcs().iter().find(of_first).expect("a PMC");
        let plain = pmu.request(pmc, pmc.accept(COUNTS)).expect("a request");
        let request = pmu.request(pmc, pmc.accept(COUNTS | bits));
        let request = request.expect("a request");
        (
            request.counts_like(&plain),
            request.can_advance(),
            request.is_for_host_alone(),
        )
    };
    // Model, bits; as without them, counts, asks for the host alone.
    let plain = (true, true, false);
    for (model, bits, expected) in [
        ("amd-core", GUEST, plain),
        ("amd-core", HOST | GUEST, plain),
        ("amd-core", HOST, (false, true, true)),
        ("amd-fam10h", GUEST, plain),
        ("amd-fam10h", HOST, (false, true, true)),
        ("amd-perfmonv2", GUEST | HOST, plain),
        // They have no such bits, which keep their default.
        ("amd-k7", HOST, plain),
        ("intel-v2", GUEST | HOST, plain),
        // The interrupt bit is set whatever is written, pin control changes nothing.
        ("intel-v2", 1 << 20, plain),
        ("intel-v2", 1 << 19, plain),
        // in_tx and in_tx_cp, and what PEBS records: no model has them for a context.
        ("intel-v2", 0b111 << 32, plain),
        ("intel-v5,pebs=exact", ADAPTIVE, plain),
        // Other bits are the event's.
        ("amd-core", 1 << 34, (false, true, false)),
        ("intel-v2", 1 << 23 | 2 << 24, (false, true, false)),
        ("intel-v3", 1 << 21, (false, true, false)),
        ("amd-core", 1 << 18, (false, true, false)),
    ] {
        assert_eq!(asked(model, bits), expected, "{model} {bits:#x}");
    }
    // What MODEL and PFM_GETINFO_PMCS say of the bit that is PEBS's.
    let pmu = super::bench::pmu("intel-v5,pebs=exact");
    assert_eq!(pmu.pmcs()[0].reserved & ADAPTIVE, ADAPTIVE);
}
