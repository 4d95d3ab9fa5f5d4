//! §6.3.1: who has which half, and what is lost.

use perfmon_abi::consts::{
    PFM_DFL_SMPL_NO_HDR, PFM_DOUBLE_FMT_MASK_WHEN_FULL, PFM_DOUBLE_HALF_ACTIVE,
    PFM_DOUBLE_HALF_FREE, PFM_DOUBLE_HALF_FULL,
};
use perfmon_abi::parse::{Layout, double_half, double_header, oldest_full};
use perfmon_abi::wire::Errno;
use perfmon_abi::{DoubleHeader, Record};
use proptest::prelude::{any, prop, prop_assert_eq, proptest};

use super::{Bench, PMDS, arg, event, survives_any_buffer};
use crate::format::common::{has_room, is_full};
use crate::format::{Control, DoubleFormat};

const HEAD: usize = 112;
const MOST: usize = 40 + 8 * 8;
const MASK: u32 = PFM_DOUBLE_FMT_MASK_WHEN_FULL;
const FREE: u32 = PFM_DOUBLE_HALF_FREE;
const ACTIVE: u32 = PFM_DOUBLE_HALF_ACTIVE;
const FULL: u32 = PFM_DOUBLE_HALF_FULL;

/// Halves with room for `samples` of 40 bytes each.
fn bench(samples: usize, flags: u32) -> Bench<DoubleFormat> {
    let half = MOST + 40 * (samples - 1);
    Bench::new(DoubleFormat, &arg(HEAD + 2 * half, flags)).expect("a valid argument")
}

fn header(bench: &Bench<DoubleFormat>) -> DoubleHeader {
    double_header(&bench.buffer).expect("a header")
}

fn half_is_full() -> Control {
    Control {
        notify_user: true,
        ..has_room()
    }
}

/// Time stamps of the samples in a half.
fn times(bench: &Bench<DoubleFormat>, half: usize) -> Vec<u64> {
    let mut layout = Layout::default();
    layout.insert(0, 4, [0; 2]);
    let samples = double_half(&bench.buffer, half, &layout).expect("whole samples");
    let of = |sample: perfmon_abi::parse::Sample| sample.entry.map(|entry| entry.tstamp);
    samples.into_iter().filter_map(of).collect()
}

#[test]
fn which_arguments_are_valid() {
    assert_eq!((HEAD, usize::from(PMDS)), (DoubleHeader::SIZE, 8));
    let table = [
        (arg(HEAD + 2 * MOST, 0), Ok(())),
        (arg(HEAD + 2 * MOST, MASK | PFM_DFL_SMPL_NO_HDR), Ok(())),
        (arg(HEAD + 2 * MOST - 1, 0), Err(Errno::EINVAL)),
        (arg(4096, MASK << 1), Err(Errno::EINVAL)),
        (vec![1; 3], Err(Errno::EINVAL)),
    ];
    for (arg, expected) in table {
        let result = Bench::new(DoubleFormat, &arg).map(|_| ());
        assert_eq!(result, expected, "{arg:?}");
    }
    let odd = Bench::new(DoubleFormat, &arg(HEAD + 2 * MOST + 15, 0)).expect("valid");
    assert_eq!(header(&odd).half_size, 104, "a multiple of 8");
}

#[test]
fn halves_change_hands() {
    let mut bench = bench(2, 0);
    let sample = event(4, &[]);
    assert_eq!(bench.overflow(&sample), has_room());
    assert_eq!(bench.overflow(&sample), half_is_full());
    assert_eq!(header(&bench).state, [FULL, ACTIVE]);
    assert_eq!(oldest_full(&header(&bench)), Some(0));
    assert_eq!(bench.overflow(&sample), has_room());
    assert_eq!(times(&bench, 0), [1, 2], "the tool's half is not touched");
    assert!(!bench.restart(true).reset_ovfl_pmds);
    assert_eq!(header(&bench).state, [FREE, ACTIVE]);
    assert_eq!(bench.overflow(&sample), half_is_full());
    assert_eq!(header(&bench).state, [ACTIVE, FULL]);
    assert_eq!(times(&bench, 1), [3, 4]);
    assert_eq!(
        (header(&bench).filling, header(&bench).overflows),
        ([3, 2], 2)
    );
    assert_eq!(header(&bench).lost, 0);
}

#[test]
fn without_a_restart_it_cycles_in_its_own_half() {
    let mut bench = bench(2, 0);
    let sample = event(4, &[]);
    let controls: Vec<_> = (0..7).map(|_| bench.overflow(&sample)).collect();
    let notified: Vec<_> = controls.iter().map(|control| control.notify_user).collect();
    assert_eq!(notified, [false, true, false, false, false, false, false]);
    assert!(controls.iter().all(|control| !control.mask_monitoring));
    // 1 2 are the tool's; 3 4 and 5 6 were overwritten.
    assert_eq!((times(&bench, 0), times(&bench, 1)), (vec![1, 2], vec![7]));
    assert_eq!((header(&bench).lost, header(&bench).overflows), (4, 3));
    // A half that waits full goes to the tool with the next sample.
    bench.overflow(&sample);
    bench.restart(true);
    assert_eq!(header(&bench).state, [FREE, ACTIVE]);
    assert_eq!(bench.overflow(&sample), half_is_full());
    assert_eq!((times(&bench, 0), times(&bench, 1)), (vec![9], vec![7, 8]));
    assert_eq!(header(&bench).lost, 4);
}

#[test]
fn with_the_flag_it_saturates() {
    let mut bench = bench(2, MASK);
    let sample = event(4, &[]);
    let controls: Vec<_> = (0..4).map(|_| bench.overflow(&sample)).collect();
    assert_eq!(
        controls,
        [has_room(), half_is_full(), has_room(), is_full(true)]
    );
    assert_eq!(header(&bench).state, [FULL, FULL]);
    assert_eq!(bench.same_interrupt(&sample), is_full(true));
    assert_eq!(header(&bench).lost, 1);
    assert!(bench.restart(false).reset_ovfl_pmds);
    assert_eq!(header(&bench).state, [ACTIVE, FULL], "the older one");
    bench.restart(true);
    assert_eq!(header(&bench).state, [ACTIVE, FREE]);
    bench.restart(true);
    assert_eq!(header(&bench).state, [ACTIVE, FREE], "nothing to free");
}

#[test]
fn no_buffer_makes_it_panic() {
    survives_any_buffer(&DoubleFormat);
}

proptest! {
    /// Overflows, and restarts in between: each sample is read once, or lost.
    #[test]
    fn samples_are_conserved(
        room in 1usize..5, mask: bool, steps in prop::collection::vec(any::<bool>(), 1..200)
    ) {
        let mut bench = bench(room, if mask { MASK } else { 0 });
        let (mut read, mut masked) = (Vec::new(), false);
        let mut written = 0;
        for is_overflow in steps {
            if is_overflow && !masked {
                masked = bench.overflow(&event(4, &[])).mask_monitoring;
                written += 1;
            } else if let Some(half) = oldest_full(&header(&bench)) {
                read.extend(times(&bench, half));
                bench.restart(!masked);
                masked = false;
            }
        }
        let mut rest: Vec<_> = (0..2)
            .filter(|&half| header(&bench).state[half] != FREE)
            .map(|half| (header(&bench).filling[half], times(&bench, half)))
            .collect();
        rest.sort();
        read.extend(rest.into_iter().flat_map(|(_, times)| times));
        prop_assert_eq!(u64::try_from(read.len())? + header(&bench).lost, written);
        let mut sorted = read.clone();
        sorted.sort_unstable();
        sorted.dedup();
        prop_assert_eq!(&sorted, &read, "in order, and none twice");
        if mask {
            prop_assert_eq!(header(&bench).lost, 0);
        }
    }
}
