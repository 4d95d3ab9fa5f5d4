//! Every operation on a counter in every state: its result, the state that it
//! leaves, and the table under "Reserving" in `docs/reference/pcr.md`, row by row.

use arbiter::{Bank, Control, CounterId, CounterSet, Effects, Layer, Operation, Reason};

use super::fixture::{
    ACCESS, MANAGEMENT, OTHER, PMC0, Seen, control, cookie, look, reserve, sets_agree,
};

const INITIAL: u64 = 0x001f_00ff;
/// Another control word: the kernel alone manages, the global control does not reach.
const WORD: u64 = 0x010e_0304;

#[derive(Clone, Copy, Debug)]
enum Op {
    Manage(u64),
    SetAccess(u64),
    SetControl(u64),
    SetDropValue(u64),
}

const OPS: [Op; 10] = [
    Op::Manage(0),
    Op::Manage(MANAGEMENT),
    Op::Manage(ACCESS),
    Op::Manage(OTHER),
    Op::SetAccess(0),
    Op::SetAccess(ACCESS),
    Op::SetAccess(OTHER),
    Op::SetControl(WORD),
    Op::SetControl(INITIAL),
    Op::SetDropValue(77),
];

impl Op {
    fn operation(self) -> Operation {
        match self {
            Op::Manage(bits) => Operation::Manage(cookie(bits)),
            Op::SetAccess(bits) => Operation::SetAccess(cookie(bits)),
            Op::SetControl(bits) => Operation::SetControl(control(bits)),
            Op::SetDropValue(value) => Operation::SetDropValue(value),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    /// What the counter is; `None` for unreserved.
    before: Option<Seen>,
    op: Op,
    presented: u64,
    layer: Layer,
}

fn bank(before: Option<Seen>) -> Bank {
    let mut bank = Bank::new(2, 1);
    if let Some(seen) = before {
        let word = Control::new(seen.control).expect("a control word");
        reserve(&mut bank, PMC0, seen.owner, seen.access, word);
    }
    bank
}

/// Plans and applies; what must be there afterwards is `expected`.
fn check(case: Case, expected: Result<Option<Seen>, Reason>) {
    let Case {
        before,
        op,
        presented,
        layer,
    } = case;
    let mut bank = bank(before);
    let cookies = [0, MANAGEMENT, ACCESS, OTHER];
    assert_eq!(look(&bank, PMC0, &cookies), before, "{case:?}");
    let plan = bank.plan(layer, cookie(presented), PMC0, op.operation());
    assert_eq!(
        look(&bank, PMC0, &cookies),
        before,
        "a plan changes nothing"
    );
    assert_eq!(
        plan.as_ref().err(),
        expected.as_ref().err(),
        "{case:?}: {plan:?}"
    );
    let (Ok(change), Ok(after)) = (plan, expected) else {
        return;
    };
    let effects = bank.apply(change);
    assert_eq!(look(&bank, PMC0, &cookies), after, "{case:?}");
    assert_eq!(effects, expected_effects(before, after), "{case:?}");
    sets_agree(&bank);
    let others = [CounterId::Programmable(1), CounterId::Fixed(0)];
    for counter in others {
        assert!(bank.reservation(counter).is_none(), "{case:?}: {counter}");
    }
}

fn expected_effects(before: Option<Seen>, after: Option<Seen>) -> Effects {
    let word = |seen: Option<Seen>| seen.map_or(INITIAL, |seen| seen.control);
    let set = |member: bool| CounterSet::from_bits(u64::from(member));
    Effects {
        cleared: set(before.is_some() && after.is_none()),
        reach: set((word(before) ^ word(after)) & 0x001f_0000 != 0),
    }
}

/// "Reserving", in words of the page.
fn expected(case: Case) -> Result<Option<Seen>, Reason> {
    let Case {
        before,
        op,
        presented,
        layer,
    } = case;
    let Some(seen) = before else {
        return match (presented, op) {
            (0, Op::Manage(0)) => Ok(None),
            (0, Op::Manage(management)) => Ok(Some(Seen {
                owner: layer,
                management,
                access: 0,
                control: INITIAL,
                drop_value: 0,
                lease: None,
            })),
            _ => Err(Reason::Unreserved),
        };
    };
    let bit = ["firmware", "hypervisor", "guest kernel", "guest user"]
        .iter()
        .position(|name| *name == layer.to_string())
        .unwrap_or(1);
    if seen.control & 1 << bit == 0 {
        return Err(Reason::Layer);
    }
    if presented != MANAGEMENT {
        return Err(Reason::Cookie);
    }
    Ok(match op {
        Op::Manage(0) => None,
        Op::Manage(MANAGEMENT) => Some(seen),
        Op::Manage(management) => Some(Seen {
            management,
            owner: layer,
            ..seen
        }),
        Op::SetAccess(access) => Some(Seen { access, ..seen }),
        Op::SetControl(control) => Some(Seen { control, ..seen }),
        Op::SetDropValue(drop_value) => Some(Seen { drop_value, ..seen }),
    })
}

#[test]
fn every_operation_in_every_state() {
    let mut states = vec![None];
    for owner in Layer::ALL {
        for access in [0, ACCESS, MANAGEMENT] {
            for modes in 0..16 {
                for rest in [0x000f_00f0, 0x0105_0150] {
                    states.push(Some(Seen {
                        owner,
                        management: MANAGEMENT,
                        access,
                        control: rest | modes,
                        drop_value: 0,
                        lease: None,
                    }));
                }
            }
        }
    }
    let mut cases = 0;
    for before in &states {
        for op in OPS {
            for presented in [0, MANAGEMENT, ACCESS, OTHER] {
                for layer in Layer::ALL {
                    let case = Case {
                        before: *before,
                        op,
                        presented,
                        layer,
                    };
                    check(case, expected(case));
                    cases += 1;
                }
            }
        }
    }
    assert_eq!(cases, (1 + 5 * 3 * 16 * 2) * OPS.len() * 4 * 5);
}

/// The rows of the page, with what each of them means here.
#[test]
fn the_table_of_the_page_row_by_row() {
    let unreserved = None;
    let held = |management| {
        Some(Seen {
            owner: Layer::Firmware,
            management,
            access: 0,
            control: INITIAL,
            drop_value: 0,
            lease: None,
        })
    };
    let rows = [
        (
            "unreserved | 0 | a cookie",
            vec![(unreserved, 0, MANAGEMENT, Ok(held(MANAGEMENT)))],
        ),
        (
            "unreserved | 0 | 0",
            vec![(unreserved, 0, 0, Ok(unreserved))],
        ),
        (
            "reserved | the management cookie | the same",
            vec![(
                held(MANAGEMENT),
                MANAGEMENT,
                MANAGEMENT,
                Ok(held(MANAGEMENT)),
            )],
        ),
        (
            "reserved | the management cookie | another one",
            vec![(held(MANAGEMENT), MANAGEMENT, OTHER, Ok(held(OTHER)))],
        ),
        (
            "reserved | the management cookie | 0",
            vec![(held(MANAGEMENT), MANAGEMENT, 0, Ok(unreserved))],
        ),
        (
            "any | anything else |",
            vec![
                (unreserved, OTHER, OTHER, Err(Reason::Unreserved)),
                (unreserved, OTHER, 0, Err(Reason::Unreserved)),
                (held(MANAGEMENT), 0, OTHER, Err(Reason::Cookie)),
                (held(MANAGEMENT), 0, 0, Err(Reason::Cookie)),
                (held(MANAGEMENT), OTHER, MANAGEMENT, Err(Reason::Cookie)),
            ],
        ),
    ];
    for (_, cases) in &rows {
        for (before, presented, written, expected) in cases.iter().copied() {
            let case = Case {
                before,
                op: Op::Manage(written),
                presented,
                layer: Layer::Firmware,
            };
            check(case, expected);
        }
    }
    let page = include_str!("../../../docs/reference/pcr.md");
    let table: Vec<&str> = page
        .lines()
        .skip_while(|line| !line.starts_with("| the counter is |"))
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .filter_map(|line| line.trim_matches(['|', ' ']).rsplit_once('|'))
        .map(|(row, _outcome)| row.trim())
        .collect();
    let mut names: Vec<&str> = rows.iter().map(|(name, _)| *name).collect();
    // The last row is about what is no cookie at all; see the unit's tables.
    names.push("any | | bits 63:48 set");
    assert_eq!(table, names);
}

#[test]
fn a_counter_that_there_is_not_cannot_be_reserved() {
    let bank = Bank::new(2, 1);
    for counter in [
        CounterId::Programmable(2),
        CounterId::Programmable(u8::MAX),
        CounterId::Fixed(1),
        CounterId::Fixed(32),
    ] {
        for op in OPS {
            let plan = bank.plan(Layer::Firmware, cookie(0), counter, op.operation());
            assert_eq!(plan.err(), Some(Reason::NoCounter), "{counter} {op:?}");
        }
    }
}

#[test]
fn a_plan_that_came_too_late_does_nothing() {
    let mut reserved = Bank::new(1, 0);
    reserve(&mut reserved, PMC0, Layer::Firmware, 0, Control::INITIAL);
    let empty = Bank::new(1, 0);
    let plan = |bank: &Bank, presented, operation| {
        bank.plan(Layer::Firmware, cookie(presented), PMC0, operation)
            .expect("the owner may")
    };
    let mut taken = reserved.clone();
    let reserve = plan(&empty, 0, Operation::Manage(cookie(OTHER)));
    assert!(taken.apply(reserve).is_empty());
    let seen = look(&taken, PMC0, &[0, MANAGEMENT, OTHER]);
    assert_eq!(seen.map(|seen| seen.management), Some(MANAGEMENT));
    for op in OPS {
        let mut free = empty.clone();
        let change = plan(&reserved, MANAGEMENT, op.operation());
        assert!(free.apply(change).is_empty(), "{op:?}");
        assert!(free.reservation(PMC0).is_none(), "{op:?}");
        sets_agree(&free);
    }
}
