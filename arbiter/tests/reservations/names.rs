//! Legacy names around what firmware and hypervisor hold: every division of four
//! programmable and two fixed-function counters.

use arbiter::{Bank, CounterId, CounterSet, Layer, LegacyMap, PerKind};

use super::fixture::hold;

const HOLDERS: [Option<Layer>; 5] = [
    None,
    Some(Layer::Firmware),
    Some(Layer::Hypervisor),
    Some(Layer::HostTool),
    Some(Layer::GuestKernel),
];

fn bank(holders: &[Option<Layer>; 6]) -> Bank {
    let mut bank = Bank::new(4, 2);
    let counters: Vec<_> = bank.counters().iter().collect();
    for (counter, holder) in counters.into_iter().zip(holders) {
        if let Some(holder) = holder {
            hold(&mut bank, counter, *holder);
        }
    }
    bank
}

fn around(bank: &Bank, programmable: u8, fixed: u8) -> LegacyMap {
    let names = PerKind {
        programmable,
        fixed,
    };
    LegacyMap::around(bank, CounterSet::EMPTY, names)
}

/// The names that there are, and the counters behind them.
fn expected(holders: &[Option<Layer>; 6], named: u8, fixed: u8) -> Vec<(CounterId, CounterId)> {
    let left = (0..4)
        .zip(holders)
        .filter(|(_, holder)| matches!(holder, None | Some(Layer::GuestKernel | Layer::GuestUser)));
    let programmable = left
        .zip(0..named)
        .map(|((n, _), name)| (CounterId::Programmable(name), CounterId::Programmable(n)));
    let own_names = (0..fixed.min(2)).map(|n| (CounterId::Fixed(n), CounterId::Fixed(n)));
    programmable.chain(own_names).collect()
}

fn bits(counters: impl Iterator<Item = CounterId>) -> u64 {
    counters.collect::<CounterSet>().bits()
}

fn check(map: &LegacyMap, pairs: &[(CounterId, CounterId)]) {
    let everything = CounterSet::from_bits(u64::MAX);
    for name in everything.iter() {
        let behind = pairs.iter().find(|(known, _)| *known == name);
        let behind = behind.map(|(_, counter)| *counter);
        assert_eq!(map.counter(name), behind, "{name} in {pairs:?}");
        // Each bit by itself, there and back.
        let bit = bits([name].into_iter());
        let there = map.to_counters(bit);
        assert_eq!(there, bits(behind.into_iter()), "{name} in {pairs:?}");
        let back = map.to_names(there);
        assert_eq!(back, if behind.is_some() { bit } else { 0 }, "{name}");
        let names = pairs.iter().filter(|(_, counter)| *counter == name);
        let names = bits(names.map(|(name, _)| *name));
        assert_eq!(map.to_names(bit), names, "{name} in {pairs:?}");
    }
    // And all of them at once: bits do not get into each other's way.
    let names = bits(pairs.iter().map(|(name, _)| *name));
    let counters = bits(pairs.iter().map(|(_, counter)| *counter));
    assert_eq!(names.count_ones(), counters.count_ones(), "{pairs:?}");
    assert_eq!(map.to_counters(u64::MAX), counters);
    assert_eq!(map.to_names(u64::MAX), names);
}

#[test]
fn every_division_of_six_counters() {
    for choice in 0..HOLDERS.len().pow(6) {
        let holders = [0, 1, 2, 3, 4, 5].map(|n| HOLDERS[choice / 5_usize.pow(n) % 5]);
        // All names where holders differ, fewer of them for a part.
        let sizes: &[(u8, u8)] = match choice % 7 {
            0 => &[(4, 2), (0, 0), (1, 1), (3, 0), (5, 3), (u8::MAX, u8::MAX)],
            _ => &[(4, 2)],
        };
        let bank = bank(&holders);
        for (named, fixed) in sizes.iter().copied() {
            let map = around(&bank, named, fixed);
            check(&map, &expected(&holders, named, fixed));
        }
    }
}

#[test]
fn without_a_map_every_counter_has_its_own_name() {
    let all: Vec<_> = CounterSet::from_bits(u64::MAX)
        .iter()
        .map(|counter| (counter, counter))
        .collect();
    check(&LegacyMap::identity(), &all);
    let beyond = [CounterId::Programmable(32), CounterId::Fixed(32)];
    for name in beyond {
        assert_eq!(LegacyMap::identity().counter(name), None);
    }
}

#[test]
fn a_bank_of_the_largest_size_is_named_whole() {
    let bank = Bank::new(u8::MAX, u8::MAX);
    assert_eq!(bank.counters(), CounterSet::from_bits(u64::MAX).counters());
    let map = around(&bank, 32, 32);
    assert_eq!(map.to_counters(u64::MAX), bank.counters().bits());
}
