//! Whatever a guest writes anywhere: no panic, and no more reads than promised.

mod play;

use proptest::prelude::*;

/// The harness is no use if it does not get anywhere.
#[test]
fn what_is_not_changed_is_found() {
    for start in [0, 1, 5] {
        // Nothing is changed; the registers of a call chain in the kernel, then as they are.
        let mut bytes = vec![start];
        bytes.extend([0; 8]);
        bytes.extend([0, 17, 1, 1, 1, 1, 1, 1, 1, 1]);
        let reached = play::run(&bytes);
        assert!(reached.kernel && reached.task, "{reached:?}");
        assert!(reached.kernel_frames > 0, "{reached:?}");
    }
    let reached = play::run(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 16, 1, 1, 1, 1, 1, 1, 1, 1, 1]);
    assert!(reached.path && reached.build_id, "{reached:?}");
    assert!(reached.program_frames > 1, "{reached:?}");
}

/// Inputs that are the same every time, and what they come to.
#[test]
fn changes_reach_what_they_are_for() {
    let mut state = 1u64;
    let mut byte = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        (state >> 56) as u8
    };
    let [mut kernels, mut tasks, mut paths, mut deep] = [0; 4];
    for _ in 0..2000 {
        let bytes: Vec<u8> = (0..200).map(|_| byte()).collect();
        let reached = play::run(&bytes);
        kernels += u32::from(reached.kernel);
        tasks += u32::from(reached.task);
        paths += u32::from(reached.path);
        deep += u32::from(reached.kernel_frames > 1);
    }
    let counts = (kernels, tasks, paths, deep);
    assert!(
        kernels > 1000 && tasks > 500 && paths > 100 && deep > 200,
        "{counts:?}"
    );
    assert!(kernels < 1900 && tasks < kernels, "{counts:?}");
}

/// Memory changes while it is looked at: what was checked is another when it is used.
#[test]
fn memory_that_changes_during_a_look() {
    for (calm, expected) in [
        (3, 0..100),
        (30, 100..390),
        (300, 300..400),
        (10_000, 390..401),
    ] {
        let [mut kernels, mut tasks, mut paths, mut deep] = [0; 4];
        for seed in 0..400 {
            let reached = play::restless(seed, calm);
            kernels += u32::from(reached.kernel);
            tasks += u32::from(reached.task);
            paths += u32::from(reached.path);
            deep += u32::from(reached.kernel_frames > 1);
        }
        let counts = (calm, kernels, tasks, paths, deep);
        assert!(expected.contains(&kernels), "{counts:?}");
        if calm >= 30 {
            assert!(tasks > 100 && paths > 100 && deep > 100, "{counts:?}");
        }
    }
}

/// A kernel lies about where its structures have what.
#[test]
fn types_that_cannot_be() {
    for kind in crate::linux::Kind::ALL {
        let (kernels, tasks) = play::extreme_types(kind);
        assert!(kernels > 1000, "{kernels}");
        assert!(tasks > 500 && tasks < kernels, "{tasks} of {kernels}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn any_memory(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        play::run(&bytes);
    }

    #[test]
    fn any_changes_during_a_look(seed: u64, calm in 1u64..2000) {
        play::restless(seed, calm);
    }

    #[test]
    fn any_types(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        play::types(&bytes);
    }
}
