//! A machine that is saved, and gone on with as another one, does what it would have done.

use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryRegion};

use super::super::{NotRestored, Room, RoomState};
use super::{Stops, guest, nobody, room, run_to_its_end};
use crate::devices::GuestEnd;
use crate::vcpu::VcpuEnd;

/// All bytes of memory from `one` are in `other` as well.
fn copy_memory(one: &Room, other: &Room) {
    for region in one.memory().iter() {
        let start = region.start_addr();
        let mut bytes = vec![0; usize::try_from(region.len()).expect("it is mapped")];
        one.memory().read_slice(&mut bytes, start).expect("inside");
        other.memory().write_slice(&bytes, start).expect("the same");
    }
}

/// The hash of the end, and its time, when every so many-th turn ends in another machine.
fn end_in_others(every: u32) -> (u64, u64, u32) {
    let guest = guest();
    let make = || room(&guest, |control| Box::new(Stops(control.clone())));
    let (mut now, mut control) = make();
    let (mut turns, mut saves) = (0_u32, 0);
    loop {
        match now.run().end {
            VcpuEnd::Stopped => control.resume(),
            end => {
                assert_eq!(end, VcpuEnd::Guest(GuestEnd::TestExit(0)));
                return (now.state_hash(), now.now(), saves);
            }
        }
        turns += 1;
        if turns % every != 0 {
            continue;
        }
        let state = now.save().expect("it can go on");
        let text = serde_json::to_string(&state).expect("JSON");
        let read: RoomState = serde_json::from_str(&text).expect("as it was written");
        assert_eq!(read, state);
        let (mut next, its_control) = make();
        copy_memory(&now, &next);
        next.restore(&read).expect("the same parts");
        assert_eq!(next.state_hash(), now.state_hash(), "turn {turns}");
        assert_eq!(next.save().expect("it can go on"), state, "turn {turns}");
        (now, control) = (next, its_control);
        saves += 1;
    }
}

#[test]
fn a_saved_machine_goes_on_as_if_nothing_had_been() {
    let guest = guest();
    let (mut whole, control) = room(&guest, nobody);
    run_to_its_end(&mut whole, &control, None);
    for every in [2, 5] {
        let (hash, time, saves) = end_in_others(every);
        assert!(saves > 3, "{saves} times");
        assert_eq!((hash, time), (whole.state_hash(), whole.now()), "{every}");
    }
}

#[test]
fn a_state_of_another_machine_is_refused() {
    let guest = guest();
    let (mut one, _) = room(&guest, nobody);
    let state = one.save().expect("it can go on");
    let text = serde_json::to_string(&state).expect("JSON");
    let other = text.replace(r#""began":0"#, r#""began":7"#);
    assert_ne!(text, other);
    let other = serde_json::from_str(&other).expect("a state");
    assert!(matches!(one.restore(&other), Err(NotRestored::Parts)));
}
