//! Who gets the counters: tables, and properties against trying everything.

use pmu_virt::perfmon::{
    Claimed, ContextDemand, ContextId, GuestRoom, HostPolicy, NoRoom, Room, Standing, admit,
};
use pmu_virt::{Constraint, OwnerId, SlotIndex, SlotSet};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::{Just, proptest};
use proptest::prelude::{ProptestConfig, Strategy, any, prop_assert, prop_assert_eq, prop_oneof};
use proptest::sample::select;

const SHARES: HostPolicy = HostPolicy::Shares { host: None };

fn shares(host: u8) -> HostPolicy {
    HostPolicy::Shares { host: Some(host) }
}

/// A context of this many counters, each of which any slot can count.
fn claim(id: u32, vcpu: Option<u32>, sets: &[usize]) -> ContextDemand {
    let set = |counters: &usize| vec![Constraint::any(128); *counters];
    ContextDemand {
        context: ContextId(id),
        vcpu: vcpu.map(OwnerId),
        preemptible: false,
        standing: Standing::Firm,
        sets: ContextDemand::maximal(sets.iter().map(set)).expect("few sets"),
    }
}

fn preemptible(claim: ContextDemand, standing: Standing) -> ContextDemand {
    ContextDemand {
        preemptible: true,
        standing,
        ..claim
    }
}

/// Six slots, a guest that can use so many and uses so many now.
fn judge(
    policy: HostPolicy,
    (counters, now): (usize, usize),
    claims: &[ContextDemand],
    applicant: &ContextDemand,
) -> Result<Claimed, NoRoom> {
    let guest = GuestRoom {
        counters,
        kinds: vec![Constraint::any(6)],
        now: vec![Constraint::any(6); now],
        reserved: Vec::new(),
    };
    let room = Room {
        policy,
        slots: SlotSet::below(6),
        guest: &guest,
        claims,
    };
    admit(&room, applicant)
}

fn firm(preempts: &[u32]) -> Result<Claimed, ()> {
    Ok(Claimed {
        standing: Standing::Firm,
        preempts: preempts.iter().copied().map(ContextId).collect(),
    })
}

fn spare(preempts: &[u32]) -> Result<Claimed, ()> {
    Ok(Claimed {
        standing: Standing::Spare,
        preempts: preempts.iter().copied().map(ContextId).collect(),
    })
}

#[test]
fn a_table_of_policies() {
    use HostPolicy::{GuestFirst, HostFirst};
    let alone: [ContextDemand; 0] = [];
    let ours = |counters| claim(1, Some(0), &[counters]);
    let soft = |counters| preemptible(ours(counters), Standing::Firm);
    // Policy, counters that the guest can use and uses, the applicant.
    let table = [
        (GuestFirst, (4, 0), ours(2), firm(&[])),
        (GuestFirst, (4, 0), ours(3), Err(())),
        (GuestFirst, (4, 0), soft(3), spare(&[])),
        (GuestFirst, (4, 3), soft(3), spare(&[])),
        (GuestFirst, (4, 4), soft(3), Err(())),
        (GuestFirst, (6, 0), ours(1), Err(())),
        (GuestFirst, (6, 5), soft(1), spare(&[])),
        (GuestFirst, (0, 0), ours(6), firm(&[])),
        (GuestFirst, (0, 0), soft(7), Err(())),
        (HostFirst, (6, 6), ours(6), firm(&[])),
        (HostFirst, (6, 0), ours(7), Err(())),
        (SHARES, (6, 6), ours(3), firm(&[])),
        (SHARES, (6, 0), ours(4), Err(())),
        (SHARES, (6, 2), soft(4), spare(&[])),
        (SHARES, (6, 3), soft(4), Err(())),
        (SHARES, (2, 2), ours(4), firm(&[])),
        (shares(2), (6, 0), ours(2), firm(&[])),
        (shares(2), (6, 0), ours(3), Err(())),
        (shares(9), (6, 6), ours(6), firm(&[])),
        (shares(0), (6, 0), ours(1), Err(())),
        // A context that counts nothing needs no room.
        (GuestFirst, (6, 6), ours(0), firm(&[])),
    ];
    for (policy, guest, applicant, expected) in table {
        let found = judge(policy, guest, &alone, &applicant).map_err(|_| ());
        assert_eq!(found, expected, "{policy} {guest:?} {applicant:?}");
    }
}

#[test]
fn contexts_among_themselves() {
    use HostPolicy::HostFirst;
    let of_core = |id, counters| claim(id, None, &[counters]);
    let of_vcpu = |id, vcpu, counters| claim(id, Some(vcpu), &[counters]);
    let spares = |claim| preemptible(claim, Standing::Spare);
    let soft = |claim| preemptible(claim, Standing::Firm);
    let table = [
        (vec![of_core(1, 4)], of_vcpu(2, 0, 2), firm(&[])),
        (vec![of_core(1, 4)], of_vcpu(2, 0, 3), Err(())),
        // Preemptible ones that are firm make room, those that are spare do
        // anyway.
        (vec![soft(of_core(1, 4))], of_vcpu(2, 0, 3), firm(&[1])),
        (vec![spares(of_core(1, 4))], of_vcpu(2, 0, 3), firm(&[])),
        (
            vec![spares(of_core(1, 4))],
            spares(of_vcpu(2, 0, 7)),
            Err(()),
        ),
        // All of one vCPU count at a time, and all of the core.
        (vec![of_vcpu(1, 0, 4)], of_vcpu(2, 0, 2), firm(&[])),
        (vec![of_vcpu(1, 0, 4)], of_vcpu(2, 0, 3), Err(())),
        (vec![of_core(1, 4)], of_core(2, 3), Err(())),
        (
            vec![of_core(1, 2), of_vcpu(2, 0, 2)],
            of_vcpu(3, 0, 2),
            firm(&[]),
        ),
        (
            vec![of_core(1, 2), of_vcpu(2, 0, 2)],
            of_vcpu(3, 0, 3),
            Err(()),
        ),
        (
            vec![of_core(1, 2), of_vcpu(2, 0, 2), of_vcpu(3, 1, 3)],
            of_core(4, 2),
            Err(()),
        ),
        (
            vec![soft(of_vcpu(1, 0, 2)), of_vcpu(2, 0, 3)],
            of_vcpu(3, 0, 2),
            firm(&[1]),
        ),
        // Of two vCPUs only one counts at a time.
        (vec![of_vcpu(1, 0, 6)], of_vcpu(2, 1, 6), firm(&[])),
        (
            vec![of_vcpu(1, 0, 2), of_vcpu(2, 1, 3)],
            of_core(3, 3),
            firm(&[]),
        ),
        (
            vec![of_vcpu(1, 0, 2), of_vcpu(2, 1, 4)],
            of_core(3, 3),
            Err(()),
        ),
        // The oldest go first, and no more than have to.
        (
            vec![
                soft(of_vcpu(1, 0, 5)),
                soft(of_vcpu(2, 1, 3)),
                soft(of_vcpu(3, 2, 6)),
            ],
            of_core(4, 3),
            firm(&[1, 2, 3]),
        ),
        (
            vec![soft(of_vcpu(1, 0, 5)), soft(of_vcpu(2, 1, 3))],
            of_core(4, 3),
            firm(&[1]),
        ),
    ];
    for (claims, applicant, expected) in table {
        let found = judge(HostFirst, (6, 6), &claims, &applicant).map_err(|_| ());
        assert_eq!(found, expected, "{claims:?} {applicant:?}");
    }
}

#[test]
fn a_refusal_says_who_has_what() {
    let others = [claim(7, None, &[1, 3])];
    let refused = judge(SHARES, (6, 0), &others, &claim(8, Some(1), &[1, 2]));
    let full = refused.expect_err("there is no room");
    assert_eq!(
        full.to_string(),
        "no room: its largest event set needs 2 of 6 counters that can count it; --host-policy \
         shares keeps 3 for the guest, context 7 has 3"
    );
}

#[test]
fn sets_that_demand_less_do_not_count() {
    let of = |slots: &[u8]| -> Vec<Constraint> {
        let one = |slot: &u8| Constraint::slots([SlotIndex(*slot)].into_iter().collect());
        slots.iter().map(one).collect()
    };
    let sets = [of(&[1]), of(&[2, 1]), of(&[]), of(&[1, 2]), of(&[3])];
    assert_eq!(
        ContextDemand::maximal(sets),
        Some(vec![of(&[2, 1]), of(&[3])])
    );
    assert_eq!(
        ContextDemand::maximal((0..17).map(|slot| of(&[slot]))),
        None
    );
}

const SLOTS: u8 = 4;

fn constraint() -> impl Strategy<Value = Constraint> {
    let slots = vec(0..SLOTS, 1..4);
    let single =
        slots.prop_map(|slots| Constraint::slots(slots.into_iter().map(SlotIndex).collect()));
    let pair = Just(Constraint {
        paired: true,
        ..Constraint::any(usize::from(SLOTS))
    });
    prop_oneof![3 => single, 2 => Just(Constraint::any(4)), 1 => pair]
}

fn any_claim(id: u32) -> impl Strategy<Value = ContextDemand> {
    let standing = select(vec![Standing::Firm, Standing::Spare]);
    let sets = vec(vec(constraint(), 0..4), 1..3);
    (option::of(0u32..2), any::<bool>(), standing, sets).prop_map(
        move |(vcpu, preemptible, standing, sets)| ContextDemand {
            context: ContextId(id),
            vcpu: vcpu.map(OwnerId),
            preemptible,
            standing,
            sets,
        },
    )
}

/// One with so many sets, of one counter at most.
fn any_claim_of(sets: std::ops::Range<usize>) -> impl Strategy<Value = ContextDemand> {
    let sets = vec(vec(constraint(), 0..2), sets);
    (any_claim(9), sets).prop_map(|(claim, sets)| ContextDemand { sets, ..claim })
}

fn policy() -> impl Strategy<Value = HostPolicy> {
    let shares = option::of(0u8..6).prop_map(|host| HostPolicy::Shares { host });
    prop_oneof![
        Just(HostPolicy::GuestFirst),
        Just(HostPolicy::HostFirst),
        shares
    ]
}

/// Whether all have a place, by trying every way.
fn fits(wanted: &[Constraint], free: SlotSet) -> bool {
    let Some((first, rest)) = wanted.split_first() else {
        return true;
    };
    (0..SLOTS)
        .map(SlotIndex)
        .any(|slot| first.allows(slot, free) && fits(rest, free.difference(first.taken_at(slot))))
}

/// Whether `applicant` fits with whoever counts at the same time and `guest`, whichever
/// vCPU is there and whichever sets are active, by trying every way.
fn all_fit(
    applicant: &ContextDemand,
    staying: &[&ContextDemand],
    guest: &[Constraint],
    free: SlotSet,
) -> bool {
    let vcpus = match applicant.vcpu {
        Some(vcpu) => vec![Some(vcpu)],
        None => vec![None, Some(OwnerId(0)), Some(OwnerId(1))],
    };
    vcpus.into_iter().all(|vcpu| {
        let mut wanted = vec![guest.to_vec()];
        let counts = |claim: &&&ContextDemand| claim.vcpu.is_none() || claim.vcpu == vcpu;
        let others = staying.iter().filter(counts).copied();
        for claim in std::iter::once(applicant).chain(others) {
            let with = |so_far: &Vec<Constraint>| {
                let so_far = so_far.clone();
                let sets = claim.sets.iter();
                sets.map(move |set| [so_far.as_slice(), set].concat())
                    .collect::<Vec<_>>()
            };
            wanted = wanted.iter().flat_map(with).collect();
        }
        wanted.iter().all(|all| fits(all, free))
    })
}

fn guaranteed(policy: HostPolicy, kind: &Constraint, counters: usize) -> usize {
    let slots = usize::try_from(kind.slots.len()).unwrap_or(0);
    let share = match policy {
        HostPolicy::GuestFirst => slots,
        HostPolicy::HostFirst => 0,
        HostPolicy::Shares { host: None } => slots - slots / 2,
        HostPolicy::Shares { host: Some(host) } => slots.saturating_sub(host.into()),
    };
    share.min(counters)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    /// Whoever is admitted has room beside whoever stays, and whoever is not
    /// has none, by trying everything.
    #[test]
    fn admission_is_right(
        policy in policy(),
        counters in 0usize..5,
        kinds in vec(constraint().prop_filter("one slot", |one| !one.paired), 0..3),
        now in vec(constraint(), 0..3),
        claims in (any_claim(1), any_claim(2), any_claim(3)),
        applicant in any_claim(9),
    ) {
        let free = SlotSet::below(SLOTS.into());
        let claims = [claims.0, claims.1, claims.2];
        let guest = GuestRoom { counters, kinds, now, reserved: Vec::new() };
        let room = Room { policy, slots: free, guest: &guest, claims: &claims };
        let found = admit(&room, &applicant);

        let rivals: Vec<&ContextDemand> = claims
            .iter()
            .filter(|claim| {
                let of = [claim.vcpu, applicant.vcpu];
                of.contains(&None) || of[0] == of[1]
            })
            .collect();
        let mut guarantees: Vec<Vec<Constraint>> = guest.kinds
            .iter()
            .map(|kind| vec![*kind; guaranteed(policy, kind, counters)])
            .collect();
        guarantees.push(vec![]);
        let beside = |stay: &dyn Fn(&ContextDemand) -> bool, guests: &[Vec<Constraint>]| {
            let staying = rivals.iter().copied().filter(|claim| stay(claim)).collect::<Vec<_>>();
            guests.iter().all(|guest| all_fit(&applicant, &staying, guest, free))
        };
        let hard = |claim: &ContextDemand| !claim.preemptible;
        let firm_and_hard = |claim: &ContextDemand| hard(claim) && claim.standing == Standing::Firm;
        let now = [guest.now.clone()];
        match found {
            Ok(Claimed { standing, preempts }) => {
                let may = |id: &ContextId| {
                    rivals.iter().any(|claim| claim.context == *id && claim.preemptible)
                };
                prop_assert!(preempts.iter().all(may));
                let stays = |claim: &ContextDemand| !preempts.contains(&claim.context);
                match standing {
                    Standing::Firm => {
                        let firm = |claim: &ContextDemand| stays(claim) && claim.standing == Standing::Firm;
                        prop_assert!(beside(&firm, &guarantees));
                    }
                    Standing::Spare => {
                        prop_assert!(applicant.preemptible);
                        prop_assert!(!beside(&firm_and_hard, &guarantees));
                        prop_assert!(beside(&stays, &now));
                    }
                }
            }
            Err(full) => {
                prop_assert!(!beside(&firm_and_hard, &guarantees));
                prop_assert!(!applicant.preemptible || !beside(&hard, &now));
                let most = applicant.sets.iter().map(|set| {
                    set.iter().map(|one| 1 + usize::from(one.paired)).sum()
                });
                prop_assert_eq!(full.needs, most.max().unwrap_or(0));
                prop_assert!(full.to_string().contains("--host-policy"));
            }
        }
    }

    /// With more contexts and sets than are judged one by one, whoever is firm still has
    /// room whichever sets are active.
    #[test]
    fn many_contexts_are_judged_safely(
        claims in vec(any_claim_of(3..6), 4..7),
        applicant in any_claim_of(1..6),
    ) {
        let free = SlotSet::below(SLOTS.into());
        let numbered = claims.into_iter().zip(1..).map(|(claim, id)| ContextDemand {
            context: ContextId(id),
            vcpu: claim.vcpu.filter(|vcpu| vcpu.0 == 0),
            standing: Standing::Firm,
            ..claim
        });
        let claims: Vec<ContextDemand> = numbered.collect();
        let guest = GuestRoom::default();
        let policy = HostPolicy::HostFirst;
        let room = Room { policy, slots: free, guest: &guest, claims: &claims };
        if let Ok(Claimed { standing: Standing::Firm, preempts }) = admit(&room, &applicant) {
            let staying: Vec<&ContextDemand> =
                claims.iter().filter(|claim| !preempts.contains(&claim.context)).collect();
            prop_assert!(all_fit(&applicant, &staying, &[], free));
        }
    }

    /// What is guaranteed is never denied, to neither side.
    #[test]
    fn shares_are_kept(
        slots in 1usize..12,
        host in option::of(0u8..12),
        counters in 0usize..12,
        wants in 0usize..12,
        used in 0usize..12,
    ) {
        let policy = HostPolicy::Shares { host };
        let guest = GuestRoom {
            counters,
            kinds: vec![Constraint::any(slots)],
            now: vec![Constraint::any(slots); used.min(counters).min(slots)],
            reserved: Vec::new(),
        };
        let room = Room {
            policy,
            slots: SlotSet::below(slots),
            guest: &guest,
            claims: &[],
        };
        let share = host.map_or(slots / 2, usize::from).min(slots);
        let applicant = claim(1, None, &[wants]);
        let found = admit(&room, &applicant);
        if wants <= share {
            prop_assert!(found.is_ok());
        }
        if found.is_ok() {
            prop_assert!(wants + counters.min(slots - share) <= slots);
        }
    }
}
