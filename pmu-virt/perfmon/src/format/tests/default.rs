//! §3.6, with the examples of its figures.

use perfmon_abi::consts::{
    DEFAULT_FORMAT, PFM_DFL_SMPL_IIP_HDR, PFM_DFL_SMPL_NO_HDR, PFM_DFL_SMPL_VERSION,
};
use perfmon_abi::parse::{Layout, default_buffer};
use perfmon_abi::wire::Errno;
use perfmon_abi::{DefaultEntry, DefaultHeader, Record};
use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};

use super::{Bench, Event, PMDS, arg, event, survives_any_buffer};
use crate::format::common::{has_room, is_full};
use crate::format::{DefaultFormat, SamplingFormat};

/// The largest sample of a PMU with 8 PMDs, and the header.
const MOST: usize = 40 + 8 * 8;
const HEAD: usize = 40;

fn bench(size: usize, flags: u32) -> Bench<DefaultFormat> {
    Bench::new(DefaultFormat, &arg(size, flags)).expect("a valid argument")
}

fn header(bench: &Bench<DefaultFormat>) -> DefaultHeader {
    DefaultHeader::get(&bench.buffer)
}

#[test]
fn which_arguments_are_valid() {
    assert_eq!(
        (HEAD, MOST),
        (
            DefaultHeader::SIZE,
            DefaultEntry::SIZE + 8 * usize::from(PMDS)
        )
    );
    let (no, iip) = (PFM_DFL_SMPL_NO_HDR, PFM_DFL_SMPL_IIP_HDR);
    let table = [
        (arg(HEAD + MOST, 0), Ok(())),
        (arg(HEAD + MOST, no), Ok(())),
        (arg(HEAD + MOST, iip), Ok(())),
        (arg(HEAD + MOST - 1, 0), Err(Errno::EINVAL)),
        (arg(HEAD + MOST - 1, no), Err(Errno::EINVAL)),
        (arg(0, 0), Err(Errno::EINVAL)),
        (arg(4096, no | iip), Err(Errno::EINVAL)),
        (arg(4096, 4), Err(Errno::EINVAL)),
        (arg(4096, 1 << 31), Err(Errno::EINVAL)),
        (vec![], Err(Errno::EINVAL)),
        (vec![0; 15], Err(Errno::EINVAL)),
        (vec![0; 17], Err(Errno::EINVAL)),
    ];
    for (arg, expected) in table {
        let result = Bench::new(DefaultFormat, &arg).map(|bench| bench.buffer.len());
        assert_eq!(result.map(|_| ()), expected, "{arg:?}");
    }
    assert_eq!(bench(5000, 0).buffer.len(), 5000);
    assert_eq!(DefaultFormat.uuid(), DEFAULT_FORMAT);
    assert_eq!(DefaultFormat.arg_size(), 16);
}

#[test]
fn a_new_buffer_is_empty() {
    let expected = DefaultHeader {
        count: 0,
        cur_offs: 40,
        overflows: 0,
        buf_size: 4096,
        version: PFM_DFL_SMPL_VERSION,
        flags: PFM_DFL_SMPL_IIP_HDR,
    };
    assert_eq!(header(&bench(4096, PFM_DFL_SMPL_IIP_HDR)), expected);
}

#[test]
fn a_sample_has_its_header_and_then_the_pmds_in_ascending_order() {
    // Figure 3.28: PMD4 overflows, PMD5 and PMD7 are recorded.
    let mut bench = bench(4096, 0);
    assert_eq!(
        bench.overflow(&event(4, &[(5, 0x55), (7, 0x77)])),
        has_room()
    );
    let mut expected = DefaultEntry {
        pid: 42,
        tid: 1,
        ovfl_pmd: 4,
        set: 0,
        cpu: 2,
        last_reset_val: 1000u64.wrapping_neg(),
        tstamp: 1,
        ip: 0xffff_8000_0000_0001,
    }
    .to_bytes();
    expected.extend(0x55u64.to_le_bytes());
    expected.extend(0x77u64.to_le_bytes());
    assert_eq!(bench.buffer[40..96], expected);
    assert_eq!((header(&bench).count, header(&bench).cur_offs), (1, 96));
}

#[test]
fn simultaneous_overflows_make_consecutive_samples_with_one_time_stamp() {
    // Figure 3.29.
    let mut bench = bench(4096, 0);
    bench.overflow(&event(4, &[]));
    bench.same_interrupt(&event(5, &[(6, 66)]));
    bench.overflow(&event(4, &[]));
    let mut layout = Layout::default();
    layout.insert(0, 4, [0; 2]);
    layout.insert(0, 5, [1 << 6, 0]);
    let samples = default_buffer(&bench.buffer, &layout).expect("whole samples");
    let told = samples.iter().map(|sample| {
        let entry = sample.entry.unwrap_or_default();
        (entry.ovfl_pmd, entry.tstamp, sample.values.clone())
    });
    let expected = [(4, 1, vec![]), (5, 1, vec![(6, 66)]), (4, 2, vec![])];
    assert_eq!(told.collect::<Vec<_>>(), expected);
}

#[test]
fn flags_shorten_the_header() {
    let ip = 0xffff_8000_0000_0001u64.to_le_bytes();
    let value = 9u64.to_le_bytes();
    for (flags, expected) in [
        (PFM_DFL_SMPL_NO_HDR, value.to_vec()),
        (PFM_DFL_SMPL_IIP_HDR, [ip, value].concat()),
    ] {
        let mut bench = bench(4096, flags);
        bench.overflow(&event(4, &[(5, 9)]));
        let end = 40 + expected.len();
        assert_eq!(bench.buffer[40..end], expected);
        assert_eq!(header(&bench).cur_offs, u64::try_from(end).unwrap_or(0));
    }
}

#[test]
fn full_is_when_the_largest_sample_would_not_fit() {
    // Figure 3.30: room for two samples of 40 bytes before the largest one does
    // not fit any more.
    let mut bench = bench(HEAD + MOST + 79, 0);
    assert_eq!(bench.overflow(&event(4, &[])), has_room());
    assert_eq!(header(&bench).overflows, 0);
    assert_eq!(bench.overflow(&event(4, &[])), is_full(true));
    assert_eq!((header(&bench).overflows, header(&bench).count), (1, 2));
    let control = is_full(false);
    assert!(control.notify_user && control.mask_monitoring);
    assert!(!control.block_thread && !control.reset_ovfl_pmds);
}

#[test]
fn simultaneous_samples_beyond_the_end_are_lost_and_counted_once_as_full() {
    let mut bench = bench(HEAD + MOST, 0);
    let large = event(4, &[(0, 1), (1, 2), (2, 3), (3, 4)]);
    // 104 bytes: one sample of 72, after which 32 are left.
    assert_eq!(bench.overflow(&large), is_full(true));
    assert_eq!(bench.same_interrupt(&large), is_full(true));
    assert_eq!((header(&bench).count, header(&bench).overflows), (1, 1));
    // What fits is written, though the buffer is full.
    let mut roomy = super::Bench::new(DefaultFormat, &arg(HEAD + MOST + 8, 0)).expect("valid");
    roomy.overflow(&event(4, &[(0, 1)]));
    assert_eq!(roomy.same_interrupt(&event(5, &[])), is_full(true));
    assert_eq!((header(&roomy).count, header(&roomy).overflows), (2, 1));
}

#[test]
fn a_restart_resets_the_header_alone() {
    let mut bench = bench(HEAD + MOST, 0);
    bench.overflow(&event(4, &[]));
    let samples = bench.buffer[HEAD..].to_vec();
    let control = bench.restart(false);
    assert!(control.reset_ovfl_pmds && !control.mask_monitoring);
    assert_eq!((header(&bench).count, header(&bench).cur_offs), (0, 40));
    assert_eq!(header(&bench).overflows, 1, "it only ever grows");
    assert_eq!(bench.buffer[HEAD..], samples);
    // An active restart leaves the PMDs alone.
    bench.overflow(&event(4, &[]));
    assert!(!bench.restart(true).reset_ovfl_pmds);
    assert_eq!(header(&bench).count, 0);
}

#[test]
fn no_buffer_makes_it_panic() {
    survives_any_buffer(&DefaultFormat);
}

proptest! {
    #[test]
    fn every_sample_comes_out_as_it_went_in(
        size in HEAD + MOST..4096,
        events in prop::collection::vec((0u16..4, any::<[u64; 4]>()), 1..60),
    ) {
        let mut bench = bench(size, 0);
        let mut layout = Layout::default();
        let mut given = Vec::new();
        for (pmd, values) in events {
            // PMD n records n others.
            let values: Vec<_> = (4..4 + pmd).zip(values).collect();
            let words = values.iter().fold(0, |words, &(pmd, _)| words | 1u64 << pmd);
            layout.insert(0, pmd, [words, 0]);
            let control = bench.overflow(&Event { values: values.clone(), ..event(pmd, &[]) });
            given.push((pmd, bench.tsc, values));
            if control.mask_monitoring {
                prop_assert!(size - usize::try_from(header(&bench).cur_offs)? < MOST);
                break;
            }
        }
        let samples = default_buffer(&bench.buffer, &layout)?;
        let told: Vec<_> = samples.into_iter().map(|sample| {
            let entry = sample.entry.unwrap_or_default();
            (entry.ovfl_pmd, entry.tstamp, sample.values)
        }).collect();
        prop_assert_eq!(told, given);
    }
}
