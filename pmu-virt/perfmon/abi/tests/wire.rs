//! What goes over the control socket: what is encoded decodes to the same, and
//! no bytes make the decoder panic.

use perfmon_abi::wire::{
    Bound, Buffer, Call, Errno, Extension, FrameError, Hello, MAX_PACKET, MAX_PAYLOAD, MAX_REASON,
    Refusal, Reply, Request, Subcode,
};
use perfmon_abi::{Config, CtxArg, LoadArg, PmcArg, PmdArg, Record, SetDesc, StartArg, consts};
use proptest::prelude::{Just, Strategy, any, prop, prop_assert, prop_assert_eq, proptest};

const LIMIT: usize = 4096;

fn errno(command: u16, nargs: i32, bytes: usize) -> Result<(), Errno> {
    Call::decode(command, nargs, &vec![0; bytes], LIMIT)
        .map(|_| ())
        .map_err(|refusal| refusal.errno)
}

#[test]
fn element_counts_and_lengths_give_the_errors_of_the_specification() {
    use perfmon_abi::consts as pfm;
    let (pmc, pmd, set) = (PmcArg::SIZE, PmdArg::SIZE, SetDesc::SIZE);
    let table = [
        (pfm::PFM_WRITE_PMCS, 1, pmc, Ok(())),
        (pfm::PFM_WRITE_PMCS, 0, 0, Err(Errno::EFAULT)),
        (pfm::PFM_WRITE_PMCS, -1, pmc, Err(Errno::EFAULT)),
        (pfm::PFM_WRITE_PMCS, i32::MAX, pmc, Err(Errno::EFAULT)),
        (pfm::PFM_WRITE_PMCS, i32::MIN, pmc, Err(Errno::EFAULT)),
        (pfm::PFM_WRITE_PMCS, 2, pmc, Err(Errno::EFAULT)),
        (pfm::PFM_WRITE_PMCS, 1, pmc + 1, Err(Errno::EFAULT)),
        (pfm::PFM_WRITE_PMDS, 64, LIMIT, Ok(())),
        (pfm::PFM_WRITE_PMDS, 65, 65 * pmd, Err(Errno::EFAULT)),
        (pfm::PFM_READ_PMDS, 0, pmd, Err(Errno::EFAULT)),
        (pfm::PFM_START, 0, 0, Ok(())),
        (pfm::PFM_START, 1, StartArg::SIZE, Ok(())),
        (pfm::PFM_START, 1, 0, Err(Errno::EFAULT)),
        (pfm::PFM_START, 0, StartArg::SIZE, Err(Errno::EFAULT)),
        (pfm::PFM_START, 2, 2 * StartArg::SIZE, Err(Errno::EFAULT)),
        (pfm::PFM_STOP, 7, 3, Ok(())),
        (pfm::PFM_UNLOAD_CONTEXT, -7, 0, Ok(())),
        (pfm::PFM_RESTART, 1, 100, Ok(())),
        (pfm::PFM_LOAD_CONTEXT, 1, LoadArg::SIZE, Ok(())),
        (pfm::PFM_LOAD_CONTEXT, 0, LoadArg::SIZE, Err(Errno::EFAULT)),
        (
            pfm::PFM_LOAD_CONTEXT,
            2,
            2 * LoadArg::SIZE,
            Err(Errno::EFAULT),
        ),
        (pfm::PFM_CREATE_EVTSETS, 1, set, Ok(())),
        (pfm::PFM_DELETE_EVTSETS, 0, set, Err(Errno::EFAULT)),
        (pfm::PFM_GETINFO_EVTSETS, 0, 0, Err(Errno::EFAULT)),
        (pfm::PFM_GETINFO_PMCS, 0, 0, Err(Errno::EFAULT)),
        (pfm::PFM_GETINFO_PMDS, -5, 0, Err(Errno::EFAULT)),
        (pfm::PFM_SET_CONFIG, 1, Config::SIZE, Ok(())),
        (pfm::PFM_SET_CONFIG, 2, Config::SIZE, Err(Errno::EFAULT)),
        (pfm::PFM_GET_CONFIG, 0, Config::SIZE, Err(Errno::EFAULT)),
        (pfm::PFM_CREATE_CONTEXT, 1, CtxArg::SIZE, Ok(())),
        (pfm::PFM_CREATE_CONTEXT, 1, CtxArg::SIZE + LIMIT, Ok(())),
        (
            pfm::PFM_CREATE_CONTEXT,
            1,
            CtxArg::SIZE + LIMIT + 1,
            Err(Errno::E2BIG),
        ),
        (
            pfm::PFM_CREATE_CONTEXT,
            1,
            CtxArg::SIZE - 1,
            Err(Errno::EFAULT),
        ),
        (pfm::PFM_CREATE_CONTEXT, 0, CtxArg::SIZE, Err(Errno::EINVAL)),
        (pfm::PFM_CREATE_CONTEXT, 2, CtxArg::SIZE, Err(Errno::EINVAL)),
        (0, 1, 8, Err(Errno::EINVAL)),
        (17, 1, 8, Err(Errno::EINVAL)),
        (0x100, 0, 0, Err(Errno::EINVAL)),
    ];
    for (command, nargs, bytes, expected) in table {
        assert_eq!(
            errno(command, nargs, bytes),
            expected,
            "command {command}, {nargs} elements in {bytes} bytes"
        );
    }
}

/// A command, and an argument of the right length made of any bytes.
fn any_call() -> impl Strategy<Value = Call> {
    (1_u16..=16, 1_i32..=20, 0_usize..=64)
        .prop_flat_map(|(command, nargs, format)| {
            let count = if Call::argument_bytes(command, nargs, 1 << 20).is_ok() {
                nargs
            } else {
                1
            };
            let bytes = Call::argument_bytes(command, count, 1 << 20).unwrap_or(0);
            let creation = usize::from(command == 1) * format;
            let payload = prop::collection::vec(any::<u8>(), bytes + creation);
            (Just(command), Just(count), payload)
        })
        .prop_map(|(command, nargs, payload)| {
            Call::decode(command, nargs, &payload, 1 << 20).unwrap()
        })
}

proptest! {
    #[test]
    fn a_call_survives_the_wire(call in any_call(), other in any_call()) {
        let payload = call.encode();
        let again = Call::decode(call.command(), call.nargs(), &payload, 1 << 20);
        prop_assert_eq!(again.as_ref(), Ok(&call));
        let mut same = call.clone();
        prop_assert_eq!(same.take_reply(&call.encode_reply()), Ok(()));
        prop_assert_eq!(&same, &call);
        let mut kept = call.clone();
        if kept.take_reply(&other.encode_reply()).is_err() {
            prop_assert_eq!(kept, call);
        }
    }

    #[test]
    fn any_arguments_decode_or_are_refused(
        command in 0_u16..20,
        nargs in prop::num::i32::ANY,
        payload in prop::collection::vec(any::<u8>(), 0..512),
        limit in 0_usize..10_000,
    ) {
        if let Err(refusal) = Call::decode(command, nargs, &payload, limit) {
            prop_assert!(matches!(refusal.errno, Errno::EFAULT | Errno::EINVAL | Errno::E2BIG));
            prop_assert!(!refusal.reason.contains('\n'));
        }
        let _ = Extension::decode(command, nargs, &payload);
    }

    #[test]
    fn frames_survive_the_wire(
        command in any::<u16>(), id in any::<u32>(), context in any::<u32>(),
        number in any::<i32>(), errno in any::<u16>(), subcode in 0..12u16, payload in prop::collection::vec(any::<u8>(), 0..2000),
        reason in "\\PC{0,200}",
    ) {
        let request = Request { command, id, context, nargs: number, payload: &payload };
        let packet = request.encode().unwrap();
        prop_assert_eq!(Request::decode(&packet), Ok(request));
        let reply = Reply { command, id, context, errno: errno.into(), subcode: Subcode::from_number(subcode), payload: &payload, reason: &reason };
        let packet = reply.encode().unwrap();
        prop_assert_eq!(Reply::decode(&packet), Ok(reply));
    }

    #[test]
    fn any_packet_decodes_or_is_an_error(
        mut packet in prop::collection::vec(any::<u8>(), 0..200),
        truthful in any::<bool>(),
    ) {
        for magic in [Request::MAGIC, Reply::MAGIC] {
            if truthful && packet.len() >= 6 {
                packet[..4].copy_from_slice(&magic.to_le_bytes());
                packet[4..6].copy_from_slice(&1_u16.to_le_bytes());
            }
            let _ = Request::decode(&packet);
            let _ = Reply::decode(&packet);
        }
    }

    #[test]
    fn a_cut_packet_is_an_error(payload in prop::collection::vec(any::<u8>(), 0..100), cut in any::<prop::sample::Index>()) {
        let refusal = Refusal::new(Errno::EBUSY, "vCPU 0 has a context");
        let request = Request { command: 1, id: 2, context: 3, nargs: 4, payload: &payload };
        for packet in [request.encode().unwrap(), request.reply(&payload, Some(&refusal)).encode().unwrap()] {
            let end = cut.index(packet.len());
            prop_assert!(Request::decode(&packet[..end]).is_err());
            prop_assert!(Reply::decode(&packet[..end]).is_err());
        }
    }

    #[test]
    fn answers_survive_the_wire(words in any::<(u32, u32, u32, u32, u32)>(), generation in any::<u16>(), size in any::<u64>()) {
        let (pid, version, max_packet, vcpus, cores) = words;
        let hello = Hello { pid, version, max_packet, vcpus, cores };
        prop_assert_eq!(Hello::from_bytes(&hello.to_bytes()), Ok(hello));
        let bound = Bound { flags: pid, generation, buffer_size: size };
        prop_assert_eq!(Bound::from_bytes(&bound.to_bytes()), Ok(bound));
        let buffer = Buffer { size };
        prop_assert_eq!(Buffer::from_bytes(&buffer.to_bytes()), Ok(buffer));
        prop_assert!(Bound::from_bytes(&buffer.to_bytes()).is_err());
    }
}

#[test]
fn a_frame_of_another_protocol_is_named() {
    let request = Request {
        command: 1,
        id: 1,
        context: 0,
        nargs: 0,
        payload: b"abc",
    };
    let good = request.encode().unwrap();
    let with = |at: usize, byte: u8| {
        let mut packet = good.clone();
        packet[at] = byte;
        Request::decode(&packet).map(|_| ())
    };
    assert!(matches!(with(0, b'X'), Err(FrameError::Magic(_))));
    assert_eq!(with(4, 9), Err(FrameError::Version(9)));
    assert_eq!(with(20, 9), Err(FrameError::Length { told: 9, given: 3 }));
    assert_eq!(Request::decode(&[]), Err(FrameError::Short(0)));
    let long = vec![0; MAX_PACKET + 1];
    assert_eq!(Request::decode(&long), Err(FrameError::Long(long.len())));
    assert!(matches!(Reply::decode(&good), Err(FrameError::Short(27))));
}

#[test]
fn the_largest_payload_fits_into_request_and_reply() {
    let payload = vec![7; MAX_PAYLOAD];
    let request = Request {
        command: 1,
        id: 1,
        context: 0,
        nargs: 0,
        payload: &payload,
    };
    assert!(request.encode().unwrap().len() <= MAX_PACKET);
    let long = "\u{e9}".repeat(MAX_REASON);
    let refusal = Refusal::new(Errno::EBUSY, format!("x{long}"));
    let packet = request.reply(&payload, Some(&refusal)).encode().unwrap();
    assert!(packet.len() <= MAX_PACKET);
    let reply = Reply::decode(&packet).unwrap();
    assert!(refusal.reason.starts_with(reply.reason));
    assert_eq!(reply.reason.len(), MAX_REASON - 1);
    assert_eq!(reply.result().unwrap_err().errno, Errno::EBUSY);
    let payload = vec![7; MAX_PAYLOAD + 1];
    assert!(
        Request {
            payload: &payload,
            ..request
        }
        .encode()
        .is_err()
    );
}

#[test]
fn error_numbers_are_those_of_this_system() {
    for &errno in Errno::ALL {
        assert_eq!(Errno::from_number(errno.number()), Some(errno));
        let os = std::io::Error::from_raw_os_error(errno.number()).to_string();
        assert!(os.contains(&format!("(os error {})", errno as i32)));
        assert!(!os.contains("Unknown"), "{errno}: {os}");
    }
    assert_eq!(Errno::EBUSY.number(), 16);
    assert_eq!(Errno::from_number(0), None);
    let odd = Reply {
        command: 1,
        id: 1,
        context: 0,
        errno: 9999,
        subcode: Subcode::None,
        payload: &[],
        reason: "",
    };
    assert_eq!(odd.result().unwrap_err().errno, Errno::EPROTO);
}

#[test]
fn extensions_have_numbers_of_their_own_and_no_arguments() {
    for &extension in Extension::ALL {
        assert!(extension.number() >= 0x100);
        assert_eq!(Extension::decode(extension.number(), 0, &[]), Ok(extension));
        assert!(Extension::decode(extension.number(), 1, &[]).is_err());
        assert!(Extension::decode(extension.number(), 0, &[1]).is_err());
    }
    assert!(Extension::decode(0x1ff, 0, &[]).is_err());
}

#[test]
fn programs_in_c_have_a_constant_for_each_sub_code() {
    let constants = consts::ALL.iter();
    let subcodes = constants.filter(|(name, ..)| name.starts_with("PFM_SUBCODE_"));
    let numbers: Vec<u64> = subcodes.map(|(_, number, _)| *number).collect();
    let all = [&[Subcode::None], Subcode::ALL].concat();
    let expected: Vec<u64> = all.iter().map(|it| it.number().into()).collect();
    assert_eq!(numbers, expected);
}
