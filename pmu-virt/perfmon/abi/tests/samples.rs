//! Sampling buffers: what is written is read back, and no bytes make a reader
//! panic, loop or allocate without bound.

use perfmon_abi::compact::{
    CallChain, ChainEnd, Cursor, GuestPlace, MAX_CHAIN, MAX_SAMPLE, MAX_STACK_NUMBERS, MOST_FRAMES,
    MOST_STACK, MOST_STACK_MAPPINGS, NextSample, ProgramFrame, ProgramStack, RecordError, decode,
    encode,
};
use perfmon_abi::parse::{
    Layout, ParseError, default_buffer, double_half, double_header, indices, oldest_full,
};
use perfmon_abi::{
    CompactBlock, CompactHeader, CompactLast, DefaultEntry, DefaultHeader, DoubleHeader, Record,
    consts,
};
use proptest::prelude::{Strategy, any, prop, prop_assert, prop_assert_eq, proptest};

fn layout() -> Layout {
    let mut layout = Layout::default();
    layout.insert(0, 4, [1 << 5, 1]);
    layout
}

/// A default buffer with this header, and `samples` behind it.
fn buffer(header: DefaultHeader, samples: &[u8]) -> Vec<u8> {
    [header.to_bytes(), samples.to_vec()].concat()
}

fn header(count: u64, end: usize, flags: u32) -> DefaultHeader {
    DefaultHeader {
        count,
        cur_offs: u64::try_from(end).unwrap_or(u64::MAX),
        version: consts::PFM_DFL_SMPL_VERSION,
        flags,
        ..DefaultHeader::default()
    }
}

fn entry(ovfl_pmd: u16) -> Vec<u8> {
    let entry = DefaultEntry {
        ovfl_pmd,
        ip: 0x1234,
        ..DefaultEntry::default()
    };
    entry.to_bytes()
}

fn words(values: &[u64]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

#[test]
fn headers_lie_as_documented() {
    fn offsets<T: Record>() -> Vec<usize> {
        let offsets = T::FIELDS.iter().map(|field| field.offset);
        offsets.chain([T::SIZE]).collect()
    }
    let default = [0, 8, 16, 24, 32, 36, 40];
    assert_eq!(offsets::<DefaultHeader>(), default);
    let double = [0, 4, 8, 16, 24, 32, 40, 56, 72, 88, 104, 112];
    assert_eq!(offsets::<DoubleHeader>(), double);
    let compact = [0, 4, 8, 16, 24, 28, 32, 40, 48];
    assert_eq!(offsets::<CompactHeader>(), compact);
    assert_eq!(offsets::<CompactBlock>(), [0, 8, 16, 20, 24]);
    assert_eq!(DefaultEntry::SIZE, 40);
}

#[test]
fn a_default_buffer_that_is_damaged_is_refused() {
    let whole = [entry(4), words(&[7, 8])].concat();
    let (no, iip) = (consts::PFM_DFL_SMPL_NO_HDR, consts::PFM_DFL_SMPL_IIP_HDR);
    let other = DefaultHeader {
        version: 2 << 16,
        ..header(0, 40, 0)
    };
    let table = [
        (buffer(header(1, 96, 0), &whole), Ok(1)),
        (buffer(header(0, 40, 0), &[]), Ok(0)),
        (buffer(header(2, 96, 0), &whole), Err(ParseError::Cut(1))),
        (buffer(header(1, 95, 0), &whole), Err(ParseError::Cut(0))),
        (buffer(header(1, 97, 0), &whole), Err(ParseError::Short)),
        (buffer(header(1, 39, 0), &whole), Err(ParseError::Short)),
        (vec![0; 39], Err(ParseError::Short)),
        (buffer(other, &[]), Err(ParseError::Version(2 << 16))),
        (
            buffer(header(1, 80, 0), &entry(5)),
            Err(ParseError::Unknown { set: 0, pmd: 5 }),
        ),
        (buffer(header(2, 72, no), &words(&[1, 2, 3, 4])), Ok(2)),
        (buffer(header(1, 64, iip), &words(&[1, 2, 3])), Ok(1)),
        (
            buffer(header(u64::MAX, 64, iip), &words(&[1, 2, 3])),
            Err(ParseError::Cut(1)),
        ),
    ];
    for (row, (bytes, expected)) in table.into_iter().enumerate() {
        let samples = default_buffer(&bytes, &layout());
        assert_eq!(samples.map(|samples| samples.len()), expected, "row {row}");
    }
}

#[test]
fn samples_tell_what_their_header_tells() {
    let whole = [entry(4), words(&[7, 8])].concat();
    let samples = default_buffer(&buffer(header(1, 96, 0), &whole), &layout());
    let sample = samples.unwrap_or_default().pop().unwrap_or_default();
    assert_eq!((sample.ip, sample.eventid), (Some(0x1234), None));
    assert_eq!(sample.values, [(5, 7), (64, 8)]);
    let bare = buffer(header(1, 56, consts::PFM_DFL_SMPL_NO_HDR), &words(&[7, 8]));
    let sample = default_buffer(&bare, &layout());
    let sample = sample.unwrap_or_default().pop().unwrap_or_default();
    assert_eq!((sample.ip, sample.entry), (None, None));
}

#[test]
fn without_headers_samples_have_to_be_alike() {
    let bytes = buffer(
        header(1, 64, consts::PFM_DFL_SMPL_IIP_HDR),
        &words(&[1, 2, 3]),
    );
    let mut several = layout();
    several.insert(1, 4, [1 << 5, 1]);
    assert!(default_buffer(&bytes, &several).is_ok(), "the same body");
    several.insert(1, 5, [0; 2]);
    assert_eq!(default_buffer(&bytes, &several), Err(ParseError::Ambiguous));
    let none = Layout::default();
    assert_eq!(default_buffer(&bytes, &none), Err(ParseError::Ambiguous));
    let mut empty = Layout::default();
    empty.insert(0, 4, [0; 2]);
    let bare = buffer(header(u64::MAX, 40, consts::PFM_DFL_SMPL_NO_HDR), &[]);
    assert_eq!(default_buffer(&bare, &empty), Err(ParseError::Empty));
}

#[test]
fn the_half_that_was_filled_first_is_freed_first() {
    let full = consts::PFM_DOUBLE_HALF_FULL;
    let active = consts::PFM_DOUBLE_HALF_ACTIVE;
    for (state, filling, expected) in [
        ([active, 0], [1, 0], None),
        ([full, active], [1, 2], Some(0)),
        ([active, full], [3, 2], Some(1)),
        ([full, full], [3, 2], Some(1)),
        ([full, full], [3, 4], Some(0)),
    ] {
        let header = DoubleHeader {
            state,
            filling,
            ..DoubleHeader::default()
        };
        assert_eq!(oldest_full(&header), expected);
    }
    assert_eq!(double_header(&[0; 111]), Err(ParseError::Short));
    assert_eq!(
        double_half(&[0; 112], 0, &layout()),
        Err(ParseError::Version(0))
    );
}

type Step = (CompactLast, Vec<u64>, CallChain, ProgramStack);

fn compact(steps: &[Step]) -> Vec<u8> {
    let (mut last, mut values) = (CompactLast::default(), [0u64; 128]);
    let mut bytes = Vec::new();
    for (sample, recorded, chain, stack) in steps {
        let mut to = vec![0; MAX_SAMPLE + MAX_CHAIN + MAX_STACK_NUMBERS + MOST_STACK];
        let next = NextSample {
            head: sample,
            values: recorded,
            chain,
            stack,
            most_stack: MOST_STACK,
        };
        let len = encode(&next, &mut last, &mut values[..], &mut to).expect("there is room");
        bytes.extend(&to[..len]);
    }
    bytes
}

#[test]
fn numbers_of_a_compact_sample_are_as_documented() {
    let first = CompactLast {
        tstamp: 300,
        ip: 1,
        set: 2,
        ovfl_pmd: 3,
        eventid: 4,
        smpl_pmds: [1 << 5, 0],
        ..CompactLast::default()
    };
    let second = CompactLast {
        tstamp: 299,
        ..first
    };
    let third = CompactLast {
        task: 130,
        mapping: 9,
        ..second
    };
    let chain = CallChain {
        kernel: vec![1, 4],
        kernel_end: Some(ChainEnd::Entry),
        program: vec![ProgramFrame {
            address: 3,
            mapping: 10,
        }],
        program_end: Some(ChainEnd::Broken),
    };
    let stack = ProgramStack {
        sp: 128,
        bp: Some(5),
        mappings: vec![4, 3],
        bytes: vec![0xaa, 0xbb],
    };
    let (none, empty) = (CallChain::default(), ProgramStack::default());
    let bytes = compact(&[
        (first, vec![u64::MAX], none.clone(), empty.clone()),
        (second, vec![0], none.clone(), empty.clone()),
        (third, vec![0], chain, empty),
        (third, vec![0], none, stack),
    ]);
    // 600 is 0x58 | 4 << 7; -1 folds to 1, 1 to 2; 130 is 0x82, 1.
    let expected = [
        0x9, 0xd8, 4, 2, 2, 3, 4, 32, 0, 1, 0, 1, 0, 2, 0x30, 0, 0, 0x82, 1, 9, 2, 2, 1, 4, 0, 6,
        1, 2, 0, 0x40, 0, 0, 0x80, 1, 1, 5, 2, 8, 1, 2, 0xaa, 0xbb, 0,
    ];
    assert_eq!(bytes, expected);
}

#[test]
fn bytes_that_are_no_sample_are_refused() {
    let endless = [[0x80; 10].as_slice(), &[0; 4]].concat();
    let big = [
        0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0,
    ];
    let wide_set = [1, 0, 0, 0x80, 0x80, 4, 0, 0];
    for (bytes, error) in [
        (&[][..], RecordError::Cut),
        (&[0, 0], RecordError::Cut),
        (&[0x80, 0, 0], RecordError::Flags(0x80)),
        // A stack that is cut off, and numbers of it that are too large.
        (&[0x40, 0, 0, 8, 0, 0, 2, 9], RecordError::Cut),
        (&[0x40, 0, 0, 8, 2, 0, 0, 0], RecordError::Number),
        (&[0x40, 0, 0, 8, 0, 0, 0, 0], RecordError::Number),
        (&[0x40, 0, 0, 8, 0, 65, 0, 0], RecordError::Number),
        (&[0x40, 0, 0, 8, 0, 0, 0xf9, 0xff, 3], RecordError::Number),
        (&[0x20, 0, 0, 1, 1, 0, 0], RecordError::Cut),
        // More frames than there can be, and an end that is none.
        (&[0x20, 0, 0, 0x80, 1, 1, 0, 0], RecordError::Number),
        (&[0x20, 0, 0, 0, 6, 0, 0], RecordError::Number),
        (&[8, 0, 0, 1, 0], RecordError::Cut),
        (&[&[0], endless.as_slice()].concat(), RecordError::Number),
        (&big, RecordError::Number),
        (&wide_set, RecordError::Number),
    ] {
        let (mut last, mut values) = (CompactLast::default(), [0u64; 128]);
        let mut rest = bytes;
        let result = decode(&mut rest, &mut last, &mut values[..]);
        assert_eq!(result, Err(error), "{bytes:x?}");
    }
}

#[test]
fn a_damaged_block_is_told_and_left_behind() {
    let ring = CompactHeader {
        version: consts::UMPIRE_COMPACT_VERSION,
        blocks_offs: 48,
        block_size: 64,
        blocks: 2,
        sequence: 1,
        ..CompactHeader::default()
    };
    let block = |sequence, first, bytes: &[u8]| {
        let header = CompactBlock {
            sequence,
            first,
            used: 24 + u32::try_from(bytes.len()).unwrap_or(0),
            count: 0,
        };
        let mut block = [header.to_bytes(), bytes.to_vec()].concat();
        block.resize(64, 0);
        block
    };
    // One sample, then something else.
    let mut buffer = [
        ring.to_bytes(),
        block(1, 0, &[0, 2, 2, 0xf0, 1]),
        vec![0; 64],
    ]
    .concat();
    let mut cursor = Cursor::default();
    let mut look = |buffer: &[u8]| {
        let mut copy = |offset: usize, to: &mut [u8]| {
            to.copy_from_slice(&buffer[offset..offset + to.len()]);
            true
        };
        let batch = cursor.follow(&mut copy).expect("the ring is whole");
        (batch.samples.len(), batch.lost, batch.damaged)
    };
    let damage = vec![(1, RecordError::Flags(0xf0))];
    assert_eq!(look(&buffer), (1, 0, damage));
    assert_eq!(look(&buffer), (0, 0, vec![]), "told once");
    // Two samples could not be read before the next block began.
    buffer[112..].copy_from_slice(&block(2, 3, &[0, 2, 2, 0, 2, 2]));
    CompactHeader {
        sequence: 2,
        ..ring
    }
    .put(&mut buffer);
    assert_eq!(look(&buffer), (2, 2, vec![]));
}

fn any_chain() -> impl Strategy<Value = CallChain> {
    let end = || (0..6u8).prop_map(ChainEnd::of);
    let frame = || proptest::prop_oneof![any::<u64>(), 0..9u64];
    let kernel = prop::collection::vec(frame(), 0..=MOST_FRAMES);
    let program = prop::collection::vec((frame(), frame()), 0..=MOST_FRAMES);
    (kernel, end(), program, end()).prop_map(|(kernel, kernel_end, program, program_end)| {
        let frame = |(address, mapping)| ProgramFrame { address, mapping };
        let chain = CallChain {
            kernel,
            kernel_end,
            program: program.into_iter().map(frame).collect(),
            program_end,
        };
        if chain.is_empty() {
            CallChain::default()
        } else {
            chain
        }
    })
}

fn any_stack() -> impl Strategy<Value = ProgramStack> {
    let mappings = prop::collection::vec(any::<u64>(), 0..=MOST_STACK_MAPPINGS);
    let bytes = prop::collection::vec(any::<u8>(), 1..200);
    let known = (any::<u64>(), any::<Option<u64>>(), mappings, bytes);
    let known = known.prop_map(|(sp, bp, mappings, bytes)| ProgramStack {
        sp,
        bp,
        mappings,
        bytes,
    });
    proptest::prop_oneof![proptest::prelude::Just(ProgramStack::default()), known]
}

fn any_sample() -> impl Strategy<Value = Step> {
    let words = any::<(u64, u64, u64, u64, [u64; 2])>();
    let small = any::<(i32, i32, u16, u16, u16)>();
    let values = prop::collection::vec(any::<u64>(), 128);
    let place = any::<(u64, u64)>();
    let guest = (any_chain(), any_stack());
    let all = (words, small, values, any::<bool>(), place, guest);
    all.prop_map(
        |(words, small, mut values, few, (task, mapping), (chain, stack))| {
            let (tstamp, ip, last_reset_val, eventid, mut smpl_pmds) = words;
            let (pid, tid, cpu, set, ovfl_pmd) = small;
            if few {
                smpl_pmds = smpl_pmds.map(|word| word & 0x11);
            }
            values.truncate(indices(smpl_pmds).count());
            let sample = CompactLast {
                tstamp,
                ip,
                last_reset_val,
                eventid,
                smpl_pmds,
                task,
                mapping,
                pid,
                tid,
                cpu,
                set,
                ovfl_pmd,
            };
            (sample, values, chain, stack)
        },
    )
}

proptest! {
    #[test]
    fn compact_samples_come_back(steps in prop::collection::vec(any_sample(), 0..8)) {
        let bytes = compact(&steps);
        let (mut last, mut values) = (CompactLast::default(), [0u64; 128]);
        let mut rest = bytes.as_slice();
        for (sample, recorded, chain, stack) in steps {
            let told = decode(&mut rest, &mut last, &mut values[..])?;
            prop_assert_eq!(last, sample);
            prop_assert_eq!(told.eventid, Some(sample.eventid));
            let guest = GuestPlace { task: sample.task, mapping: sample.mapping, chain, stack };
            prop_assert_eq!(told.guest, guest);
            let entry = told.entry.unwrap_or_default();
            prop_assert_eq!((entry.tstamp, entry.pid, entry.set), (sample.tstamp, sample.pid, sample.set));
            let pmds: Vec<_> = indices(sample.smpl_pmds).zip(recorded).collect();
            prop_assert_eq!(told.values, pmds);
        }
        prop_assert!(rest.is_empty());
    }

    #[test]
    fn a_sample_without_room_is_not_cut(
        (sample, values, chain, stack) in any_sample(),
        short in 1usize..9,
    ) {
        let whole = compact(&[(sample, values.clone(), chain.clone(), stack.clone())]).len();
        let (mut last, mut recorded) = (CompactLast::default(), [0u64; 128]);
        let mut room = vec![0; whole.saturating_sub(short)];
        let next = NextSample {
            head: &sample,
            values: &values,
            chain: &chain,
            stack: &stack,
            most_stack: MOST_STACK,
        };
        prop_assert_eq!(encode(&next, &mut last, &mut recorded[..], &mut room), None);
    }

    #[test]
    fn no_bytes_make_the_decoder_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let (mut last, mut values) = (CompactLast::default(), [0u64; 128]);
        let mut rest = bytes.as_slice();
        while decode(&mut rest, &mut last, &mut values[..]).is_ok() {}
    }

    #[test]
    fn no_ring_makes_the_cursor_panic_or_stay(
        mut bytes in prop::collection::vec(any::<u8>(), 0..400),
        block_size in 20u32..200,
        blocks in 0u32..5,
        sequence in 0u64..9,
        offs in 0u64..60,
        numbers in any::<[u64; 4]>(),
        known: bool,
    ) {
        if known && bytes.len() >= CompactHeader::SIZE {
            let header = CompactHeader {
                version: consts::UMPIRE_COMPACT_VERSION,
                blocks_offs: offs,
                block_size,
                blocks,
                sequence,
                ..CompactHeader::default()
            };
            header.put(&mut bytes);
            for (place, number) in (0..blocks.min(4)).zip(numbers) {
                let at = usize::try_from(offs)? + usize::try_from(place * block_size)?;
                if at >= CompactHeader::SIZE && bytes.len() >= at + CompactBlock::SIZE {
                    let block = CompactBlock {
                        sequence: number % 9,
                        first: number,
                        used: u32::try_from(number % 256)?,
                        count: 0,
                    };
                    block.put(&mut bytes[at..]);
                }
            }
        }
        let mut cursor = Cursor::default();
        for _ in 0..3 {
            let mut copy = |offset: usize, to: &mut [u8]| {
                let from = offset.checked_add(to.len()).and_then(|end| bytes.get(offset..end));
                from.map(|from| to.copy_from_slice(from)).is_some()
            };
            if let Ok(batch) = cursor.follow(&mut copy) {
                prop_assert!(batch.samples.len() <= bytes.len());
            }
        }
    }

    #[test]
    fn no_buffer_makes_a_parser_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..400), double: bool, half in 0usize..3
    ) {
        let mut bytes = bytes;
        let version = if double { 0 } else { 32 };
        if let Some(place) = bytes.get_mut(version..version + 4) {
            place.copy_from_slice(&(1u32 << 16).to_le_bytes());
        }
        let _ = default_buffer(&bytes, &layout());
        let _ = double_half(&bytes, half, &layout());
    }
}
