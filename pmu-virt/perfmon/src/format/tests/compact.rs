//! The compact format, read by its cursor while it is written.

use perfmon_abi::compact::{Batch, CallChain, ChainEnd, Cursor, GuestPlace, ProgramStack};
use perfmon_abi::consts::{UMPIRE_COMPACT_FL_CHAIN, UMPIRE_COMPACT_FL_STACK_SHIFT};
use perfmon_abi::wire::Errno;
use perfmon_abi::{CompactArg, CompactHeader, Record};
use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};

use super::{Bench, Event, PMDS, event, moment, setup, survives_any_buffer};
use crate::bits::PmdBits;
use crate::format::common::has_room;
use crate::format::{CompactFormat, Control, OverflowArg, SamplingFormat};

fn arg(buf_size: usize, block_size: u32) -> Vec<u8> {
    CompactArg {
        buf_size: u64::try_from(buf_size).unwrap_or(u64::MAX),
        block_size,
        flags: 0,
    }
    .to_bytes()
}

fn bench(buf_size: usize, block_size: u32) -> Bench<CompactFormat> {
    Bench::new(CompactFormat, &arg(buf_size, block_size)).expect("a valid argument")
}

fn header(bench: &Bench<CompactFormat>) -> CompactHeader {
    CompactHeader::get(&bench.buffer)
}

fn follow(cursor: &mut Cursor, bench: &Bench<CompactFormat>) -> Batch {
    let mut copy = |offset: usize, to: &mut [u8]| {
        let from = bench.buffer.get(offset..offset + to.len());
        from.map(|from| to.copy_from_slice(from)).is_some()
    };
    let batch = cursor.follow(&mut copy).expect("a ring");
    assert_eq!(batch.damaged, []);
    batch
}

fn times(batch: &Batch) -> Vec<u64> {
    let of = |sample: &perfmon_abi::parse::Sample| sample.entry.map(|entry| entry.tstamp);
    batch.samples.iter().filter_map(of).collect()
}

#[test]
fn which_arguments_are_valid() {
    let with_flags = |buf_size: usize, flags| {
        let buf_size = u64::try_from(buf_size).unwrap_or(u64::MAX);
        let block_size = 0;
        CompactArg {
            buf_size,
            block_size,
            flags,
        }
        .to_bytes()
    };
    // With callers the least block has 5,288.
    let with_chains = 1152 + 2 * 5288;
    // The header with the writer's notes has 1,152 bytes, the least block 1,440.
    let least = 1152 + 2 * 1440;
    let table = [
        (arg(least, 0), Ok(2)),
        (arg(least - 1, 0), Err(Errno::EINVAL)),
        (arg(least, 1440), Ok(2)),
        (arg(least, 1424), Err(Errno::EINVAL)),
        (arg(1 << 20, 1408), Err(Errno::EINVAL)),
        (arg(1 << 20, 1420), Err(Errno::EINVAL)),
        (arg(1 << 20, 0), Ok(16)),
        (arg(8 << 20, 0), Ok(127)),
        (arg(8 << 20, 1 << 20), Ok(7)),
        (arg(8 << 20, (1 << 20) + 8), Err(Errno::EINVAL)),
        (with_flags(1 << 20, 3), Ok(16)),
        (with_flags(least, 1), Ok(2)),
        (with_flags(with_chains, 2), Ok(2)),
        (with_flags(with_chains - 1, 2), Err(Errno::EINVAL)),
        (with_flags(1 << 20, 4), Err(Errno::EINVAL)),
        (vec![0; 3], Err(Errno::EINVAL)),
    ];
    for (arg, expected) in table {
        let result = Bench::new(CompactFormat, &arg).map(|bench| header(&bench).blocks);
        assert_eq!(result, expected, "{arg:?}");
    }
}

#[test]
fn a_reader_that_keeps_up_loses_nothing_and_needs_no_restart() {
    let mut bench = bench(64 << 10, 0);
    let mut cursor = Cursor::default();
    assert_eq!(follow(&mut cursor, &bench), Batch::default());
    let mut read = 0;
    for round in 0..100_000u64 {
        let sample = event(4, &[(5, round * 3), (7, 1000 - round % 7)]);
        assert!(!bench.overflow(&sample).mask_monitoring);
        if round % 100 == 0 {
            let batch = follow(&mut cursor, &bench);
            assert_eq!(batch.lost, 0);
            for sample in batch.samples {
                let values = [(5, read * 3), (7, 1000 - read % 7)];
                assert_eq!(sample.values, values);
                read += 1;
                assert_eq!(sample.entry.map(|entry| entry.tstamp), Some(read));
            }
            assert_eq!(read, round + 1);
        }
    }
    assert!(header(&bench).sequence > 2 * u64::from(header(&bench).blocks));
}

#[test]
fn a_reader_that_was_overtaken_knows_what_it_missed() {
    let mut bench = bench(1 << 14, 1440);
    let mut cursor = Cursor::default();
    for _ in 0..10 {
        bench.overflow(&event(4, &[]));
    }
    assert_eq!(times(&follow(&mut cursor, &bench)).len(), 10);
    for _ in 0..100_000 {
        bench.overflow(&event(4, &[]));
    }
    let batch = follow(&mut cursor, &bench);
    let seen = u64::try_from(batch.samples.len()).unwrap_or(0);
    assert!(batch.lost > 50_000 && seen > 1000);
    assert_eq!(batch.lost + seen, 100_000);
    assert_eq!(times(&batch).last(), Some(&100_010));
    // One that comes late has missed the beginning.
    let late = follow(&mut Cursor::default(), &bench);
    assert_eq!(late.lost + seen, 100_010);
    assert_eq!(times(&late), times(&batch));
}

#[test]
fn a_sample_of_a_loop_takes_a_few_bytes() {
    let mut bench = bench(1 << 20, 0);
    for _ in 0..10_000 {
        bench.overflow(&event(4, &[]));
    }
    // Flags, time and instruction pointer: three bytes, against 40.
    let per_block = (u64::from(header(&bench).block_size) - 64) / 3;
    assert!(header(&bench).sequence <= 10_000 / per_block + 1);
}

#[test]
fn a_full_block_notifies_and_a_restart_goes_on() {
    let mut bench = bench(1 << 14, 1440);
    let notified = |control: Control| {
        assert!(control.reset_ovfl_pmds && !control.mask_monitoring);
        control.notify_user
    };
    let mut blocks = 0;
    for _ in 0..5000 {
        let before = header(&bench).sequence;
        let told = notified(bench.overflow(&event(4, &[(6, 1)])));
        assert_eq!(told, header(&bench).sequence > before);
        blocks += u64::from(told);
    }
    assert_eq!(blocks + 1, header(&bench).sequence);
    assert_eq!(bench.restart(false), has_room());
    assert_eq!(bench.restart(true), Control::default());
}

#[test]
fn no_buffer_makes_it_panic() {
    survives_any_buffer(&CompactFormat);
}

proptest! {
    #[test]
    fn what_is_written_is_read_or_lost(
        steps in prop::collection::vec(
            (any::<bool>(), 0u16..4, 0u16..3, any::<[u64; 4]>(), 1usize..60), 1..60)
    ) {
        let mut bench = bench(1152 + 3 * 1440, 1440);
        let mut cursor = Cursor::default();
        let (mut given, mut read, mut lost) = (Vec::new(), Vec::new(), 0);
        for (look, pmd, set, values, times) in steps {
            for _ in 0..times {
                let values: Vec<_> = (60..60 + 3 * pmd).step_by(3).zip(values).collect();
                let sample = Event { set, values: values.clone(), ..event(pmd, &[]) };
                bench.overflow(&sample);
                given.push((bench.tsc, pmd, set, values));
            }
            if look {
                let batch = follow(&mut cursor, &bench);
                lost += batch.lost;
                read.extend(batch.samples);
            }
        }
        let batch = follow(&mut cursor, &bench);
        lost += batch.lost;
        read.extend(batch.samples);
        prop_assert_eq!(u64::try_from(read.len())? + lost, u64::try_from(given.len())?);
        for sample in read {
            let entry = sample.entry.unwrap_or_default();
            let at = usize::try_from(entry.tstamp - 1)?;
            let told = (entry.tstamp, entry.ovfl_pmd, entry.set, sample.values);
            prop_assert!(given.get(at) == Some(&told), "{:?}", told);
        }
    }
}

proptest! {
    /// The writer goes on between any two copies of the reader.
    #[test]
    fn a_writer_beside_the_reader_spoils_nothing(
        bursts in prop::collection::vec(0usize..600, 1..40), looks in 1usize..8
    ) {
        let mut bench = bench(1152 + 3 * 1440, 1440);
        let mut bursts = bursts.into_iter().cycle();
        let (mut cursor, mut read, mut lost) = (Cursor::default(), Vec::new(), 0);
        for look in 0..=looks {
            let last = look == looks;
            let mut copy = |offset: usize, to: &mut [u8]| {
                let times = bursts.next().filter(|_| !last).unwrap_or(0);
                for _ in 0..times {
                    let time = bench.tsc;
                    bench.overflow(&event(4, &[(5, time * 1_000_003)]));
                }
                to.copy_from_slice(&bench.buffer[offset..offset + to.len()]);
                true
            };
            let batch = cursor.follow(&mut copy)?;
            prop_assert!(batch.damaged.is_empty(), "{:?}", batch.damaged);
            lost += batch.lost;
            read.extend(batch.samples);
        }
        prop_assert_eq!(u64::try_from(read.len())? + lost, bench.tsc);
        for sample in read {
            let before = sample.entry.map_or(0, |entry| entry.tstamp - 1);
            prop_assert_eq!(sample.values, [(5, before * 1_000_003)]);
        }
    }
}

#[test]
fn a_sample_tells_of_the_guest_what_was_asked_for() {
    let place = GuestPlace {
        task: 5,
        mapping: 6,
        chain: CallChain {
            kernel: vec![7, 8],
            kernel_end: Some(ChainEnd::Outermost),
            ..CallChain::default()
        },
        stack: ProgramStack {
            sp: 9,
            bytes: vec![1; 32],
            ..ProgramStack::default()
        },
    };
    let with_stack = UMPIRE_COMPACT_FL_CHAIN | 16 << UMPIRE_COMPACT_FL_STACK_SHIFT;
    for flags in (0..4).chain([with_stack]) {
        let arg = CompactArg {
            buf_size: 1 << 16,
            block_size: 0,
            flags,
        };
        let mut bench = Bench::new(CompactFormat, &arg.to_bytes()).expect("a valid argument");
        for guest in [Some(&place), None] {
            let mut overflow = OverflowArg {
                ovfl_pmd: 4,
                active_set: 0,
                last_reset: 0,
                value: 0,
                eventid: 0,
                notify: false,
                smpl_pmds: PmdBits::EMPTY,
                values: &[],
                guest,
                num_pmds: PMDS,
                control: Control::default(),
            };
            let handled = CompactFormat.handler(&mut bench.buffer, &mut overflow, &moment(1));
            assert!(handled.is_ok());
        }
        let (task, chain) = (flags & 1 != 0, flags & 2 != 0);
        let expected = GuestPlace {
            task: if task { 5 } else { 0 },
            mapping: if task { 6 } else { 0 },
            chain: if chain {
                place.chain.clone()
            } else {
                CallChain::default()
            },
            // Not more of it than was asked for.
            stack: if flags == with_stack {
                ProgramStack {
                    bytes: vec![1; 16],
                    ..place.stack.clone()
                }
            } else {
                ProgramStack::default()
            },
        };
        let batch = follow(&mut Cursor::default(), &bench);
        let places: Vec<_> = batch
            .samples
            .into_iter()
            .map(|sample| sample.guest)
            .collect();
        assert_eq!(places, [expected, GuestPlace::default()]);
        let wish = CompactFormat.wish(&setup(&arg.to_bytes()));
        assert_eq!((wish.task, wish.chain), (task, chain));
        assert_eq!(wish.stack, usize::try_from(flags >> 16).unwrap_or(0));
    }
}

#[test]
fn a_stack_needs_callers_and_room() {
    let check = |buf_size, block_size, flags, expected: &str| {
        let arg = CompactArg {
            buf_size,
            block_size,
            flags,
        };
        let arg = arg.to_bytes();
        let refused = CompactFormat
            .validate(&setup(&arg))
            .map_err(|error| error.reason);
        match refused {
            Ok(()) => assert_eq!(expected, ""),
            Err(reason) => assert!(
                !expected.is_empty() && reason.contains(expected),
                "{reason}"
            ),
        }
    };
    let stack = |bytes: u32| bytes << UMPIRE_COMPACT_FL_STACK_SHIFT;
    let chain = UMPIRE_COMPACT_FL_CHAIN;
    check(1 << 20, 0, chain | stack(8192), "");
    check(1 << 20, 0, chain | stack(65_528), "");
    check(1 << 20, 0, stack(8192), "asks for 8192 bytes of the stack");
    check(1 << 20, 0, chain | stack(8190), "a multiple of 8");
    check(1 << 20, 8192, chain | stack(8192), "block_size is 8192");
    check(1 << 14, 0, chain | stack(8192), "16384");
}
