//! What `step` counts of an instruction, by event code, and what it refuses.

use instruction_facts::{InstructionInfoFactory, decode};
use pmu_virt::{
    BackendEnv, ClockBackend, CombinedBackend, CountRequest, CounterBackend, EventCode,
    EventFamily, KnownEvent, Progress, Provenance, Reading, Retirement, Ring, SlotIndex,
    StepBackend, UnavailableReason,
};

const SLOT: SlotIndex = SlotIndex(0);

/// What `bytes` did, leading to the next instruction or, if it is a branch,
/// somewhere else.
fn retired(bytes: &[u8]) -> Retirement {
    let decoded = decode(bytes, 64, 0x1000, &mut InstructionInfoFactory::new());
    decoded.unwrap().facts.retire(0x5000, 0, 1)
}

/// The count of `event` after one instruction at CPL 0.
fn counted(event: EventCode, bytes: &[u8]) -> u64 {
    let mut backend = StepBackend::new();
    let request = CountRequest::plain(event, true, true);
    let is_sorted_by_us = matches!(event, EventCode::Selected { select: 0xcb, .. });
    let expected = if is_sorted_by_us {
        Provenance::Derived
    } else {
        Provenance::Exact
    };
    let programmed = backend.program(SLOT, &request);
    assert_eq!(programmed, Ok(expected), "{request}");
    backend.start(SLOT);
    backend.observe(&Progress::Retired {
        ring: Ring::Kernel,
        insn: retired(bytes),
    });
    match backend.read(SLOT) {
        Reading::Counted { value, .. } => value,
        Reading::Unavailable(reason) => panic!("{request}: {reason}"),
    }
}

fn selected(family: EventFamily, select: u16, umask: u8) -> EventCode {
    EventCode::Selected {
        family,
        select,
        umask,
    }
}

#[test]
fn classes_of_instructions_are_counted_by_their_codes() {
    use EventFamily::{AmdFam10h, AmdK7, AmdZen, AmdZen4, Intel};
    let call: &[u8] = &[0xe8, 0, 0, 0, 0];
    let ret: &[u8] = &[0xc3];
    let retf: &[u8] = &[0xcb];
    let fld1: &[u8] = &[0xd9, 0xe8];
    let paddb: &[u8] = &[0x0f, 0xfc, 0xc1];
    let addps: &[u8] = &[0x0f, 0x58, 0xc1];
    let movsb: &[u8] = &[0xf3, 0xa4];
    let all = [call, ret, retf, fld1, paddb, addps, movsb];
    let strings = EventCode::Meaning(KnownEvent::Strings);
    let calls = EventCode::Meaning(KnownEvent::Calls);
    let table: &[(EventCode, [u64; 7])] = &[
        (selected(Intel, 0xc4, 0x02), [1, 0, 0, 0, 0, 0, 0]),
        (selected(Intel, 0xc4, 0x08), [0, 1, 0, 0, 0, 0, 0]),
        (selected(AmdK7, 0xc8, 0), [0, 1, 0, 0, 0, 0, 0]),
        (selected(AmdZen4, 0xc8, 0), [0, 1, 0, 0, 0, 0, 0]),
        (selected(AmdK7, 0xcb, 0x0f), [0, 0, 0, 1, 1, 1, 0]),
        (selected(AmdK7, 0xcb, 0x0c), [0, 0, 0, 0, 0, 1, 0]),
        (selected(AmdFam10h, 0xcb, 0x07), [0, 0, 0, 1, 1, 1, 0]),
        (selected(AmdZen, 0xcb, 0x01), [0, 0, 0, 1, 0, 0, 0]),
        (selected(AmdZen, 0xcb, 0x02), [0, 0, 0, 0, 1, 0, 0]),
        (selected(AmdZen4, 0xcb, 0x04), [0, 0, 0, 0, 0, 1, 0]),
        (strings, [0, 0, 0, 0, 0, 0, 1]),
        (calls, [1, 0, 0, 0, 0, 0, 0]),
    ];
    for (event, expected) in table {
        let found = all.map(|bytes| counted(*event, bytes));
        assert_eq!(found, *expected, "{event}");
    }
}

/// Taken or not; every other control transfer is none.
#[test]
fn conditional_branches_are_counted_by_each_identitys_code() {
    use EventFamily::{AmdZen, AmdZen4, IntelIceLake, IntelNehalem, IntelSkylake};
    let codes = [
        (IntelNehalem, 0xc4, 0x01),
        (IntelSkylake, 0xc4, 0x01),
        (IntelIceLake, 0xc4, 0x11),
        (AmdZen, 0xd1, 0x00),
        (AmdZen4, 0xd1, 0x00),
    ];
    let table: [(&[u8], u64); 12] = [
        (&[0x74, 0x10], 1),             // je
        (&[0x0f, 0x85, 0, 0, 0, 0], 1), // jne, near
        (&[0xe2, 0xfe], 1),             // loop
        (&[0xe1, 0xfe], 1),             // loope
        (&[0xe3, 0x00], 1),             // jrcxz
        (&[0xeb, 0x00], 0),             // jmp
        (&[0xff, 0xe0], 0),             // jmp rax
        (&[0xe8, 0, 0, 0, 0], 0),       // call
        (&[0xc3], 0),                   // ret
        (&[0x0f, 0x44, 0xc1], 0),       // cmove
        (&[0xcd, 0x80], 0),             // int
        (&[0xc7, 0xf8, 0, 0, 0, 0], 0), // xbegin
    ];
    for (family, select, umask) in codes {
        for (bytes, expected) in table {
            let found = counted(selected(family, select, umask), bytes);
            assert_eq!(found, expected, "{family:?} {bytes:x?}");
        }
    }
}

#[test]
fn mispredictions_and_half_of_sse_have_no_source() {
    let check = |event| {
        let request = CountRequest::plain(event, true, true);
        let reason = StepBackend::new().plan(&request).unwrap_err().reason;
        let expected = UnavailableReason::Event {
            backend: "step",
            event,
        };
        assert_eq!(reason, expected);
    };
    check(selected(EventFamily::AmdZen, 0xc3, 0));
    check(selected(EventFamily::AmdZen, 0xc9, 0));
    check(selected(EventFamily::Intel, 0xc5, 0));
    // K8 tells packed from scalar; `step` does not.
    check(selected(EventFamily::AmdK7, 0xcb, 0x04));
    check(selected(EventFamily::AmdK7, 0xcb, 0x08));
}

/// Where KVM does not stop at CPL 3, a count of it would be 0 forever.
#[test]
fn an_unseen_ring_is_refused_rather_than_counted_as_nothing() {
    let instructions = selected(EventFamily::AmdZen, 0xc0, 0);
    let check = |steps_cpl3, os, usr, expected: Result<Provenance, UnavailableReason>| {
        let env = BackendEnv {
            steps_cpl3,
            ..BackendEnv::default()
        };
        let mut backend = StepBackend::on(&env);
        let request = CountRequest::plain(instructions, os, usr);
        let plan = backend.plan(&request).map_err(|no| no.reason);
        let can = plan.map(|plan| plan.provenance);
        assert_eq!(can, expected, "{request}");
        let programmed = backend.program(SLOT, &request).map_err(|no| no.reason);
        assert_eq!(programmed, expected, "{request}");
    };
    let unseen = UnavailableReason::Unseen { backend: "step" };
    check(true, false, true, Ok(Provenance::Exact));
    check(false, true, false, Ok(Provenance::Exact));
    check(false, true, true, Ok(Provenance::Exact));
    check(false, false, true, Err(unseen));
    // Of several sources, the one that has the event says why not.
    let sources: Vec<Box<dyn CounterBackend>> = vec![
        Box::new(ClockBackend::new()),
        Box::new(StepBackend::on(&BackendEnv::default())),
    ];
    let user = CountRequest::plain(instructions, false, true);
    let no = CombinedBackend::new(sources).plan(&user).unwrap_err();
    assert_eq!(no.reason, unseen);
}
