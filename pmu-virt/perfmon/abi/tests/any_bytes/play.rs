//! Any bytes, taken for everything that a peer can send: they decode or are
//! refused, what was decoded is no larger than what came, and encoded and decoded
//! again it is the same.
//!
//! The fuzz target `wire` in `pmu-virt/fuzz` is made of this module as well.

use std::fmt::Debug;

use perfmon_abi::compact::{
    Cursor, MAX_CHAIN, MAX_SAMPLE, MAX_STACK_NUMBERS, MOST_STACK, NextSample, decode, encode,
};
use perfmon_abi::parse::{Layout, Sample, default_buffer, double_half, double_header, oldest_full};
use perfmon_abi::wire::info::{FormatInfo, MachineInfo, ModelInfo};
use perfmon_abi::wire::{
    Bound, Buffer, Call, Errno, Extension, Hello, MAX_PACKET, Refusal, Reply, Request, SystemWide,
};
use perfmon_abi::{
    CompactArg, CompactBlock, CompactHeader, CompactLast, Config, CtxArg, DefaultArg, DefaultEntry,
    DefaultHeader, DoubleHeader, LoadArg, Message, PmcArg, PmcInfo, PmdArg, PmdInfo, Record,
    SetDesc, SetInfo, StartArg, Timespec,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Plays bytes; the name of what they were taken for, and whether they were it.
pub(crate) fn run(bytes: &[u8]) -> (&'static str, bool) {
    let Some((&kind, rest)) = bytes.split_first() else {
        return ("nothing", false);
    };
    match kind % 16 {
        0 => ("request", request(rest)),
        1 => ("reply", reply(rest)),
        2 => ("framed request", request(&framed(Request::MAGIC, rest))),
        3 => ("framed reply", reply(&framed(Reply::MAGIC, rest))),
        4 | 5 => ("call", any_call(rest)),
        6 => ("extension", extension(rest)),
        7 => ("answer", answer(rest)),
        8 => ("document", document(rest)),
        9 => ("record", record(rest)),
        10 => ("samples", samples(rest)),
        11 => ("halves", halves(rest)),
        12 | 13 => ("ring", ring(rest)),
        _ => ("compact sample", compact_sample(rest)),
    }
}

/// The same bytes, with a number and a version in front that are right, and with
/// a right length where there is one of a request.
fn framed(magic: u32, rest: &[u8]) -> Vec<u8> {
    let mut packet = magic.to_le_bytes().to_vec();
    packet.extend(1u16.to_le_bytes());
    packet.extend(rest);
    if let (Some(length), true) = (packet.len().checked_sub(24), magic == Request::MAGIC) {
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        packet[20..24].copy_from_slice(&length.to_le_bytes());
    }
    packet
}

fn request(packet: &[u8]) -> bool {
    let Ok(request) = Request::decode(packet) else {
        return false;
    };
    assert!(packet.len() <= MAX_PACKET);
    // What does not fit into a reply is not encoded, though it is understood.
    if let Ok(again) = request.encode() {
        assert_eq!(again, packet);
    }
    call(request.command, request.nargs, request.payload, 4096);
    let refusal = Refusal::new(Errno::EBUSY, "the vCPU has a context");
    for refusal in [None, Some(&refusal)] {
        let reply = request.reply(request.payload, refusal);
        if let Ok(packet) = reply.encode() {
            assert!(packet.len() <= MAX_PACKET);
            let again = Reply::decode(&packet).expect("a reply that was encoded");
            assert_eq!(again, reply);
            assert_eq!(again.result().err().as_ref(), refusal);
        }
    }
    true
}

fn reply(packet: &[u8]) -> bool {
    let Ok(reply) = Reply::decode(packet) else {
        return false;
    };
    assert!(packet.len() <= MAX_PACKET);
    if let Ok(again) = reply.encode() {
        assert_eq!(again, packet);
    }
    assert_eq!(reply.result().is_ok(), reply.errno == 0);
    true
}

/// Command, number of elements and limit from the first bytes, an argument from
/// the others.
fn any_call(bytes: &[u8]) -> bool {
    let Some((&[command, nargs, limit, fill], payload)) = bytes.split_first_chunk() else {
        return false;
    };
    let command = u16::from(command % 20);
    let nargs = match nargs {
        0xff => i32::MAX,
        0xfe => i32::MIN,
        other => i32::from(other.cast_signed()),
    };
    let limit = usize::from(limit) << 6;
    let mut payload = payload.to_vec();
    // Of the right length, most of the time, without being told.
    if let (Ok(length), true) = (Call::argument_bytes(command, nargs, limit), fill < 0xc0) {
        let format = if command == 1 { usize::from(fill) } else { 0 };
        payload.resize(length + format, fill);
    }
    call(command, nargs, &payload, limit)
}

fn call(command: u16, nargs: i32, payload: &[u8], limit: usize) -> bool {
    let call = match Call::decode(command, nargs, payload, limit) {
        Ok(call) => call,
        Err(refusal) => {
            let errno = refusal.errno;
            assert!(matches!(
                errno,
                Errno::EFAULT | Errno::EINVAL | Errno::E2BIG
            ));
            assert!(!refusal.reason.is_empty() && !refusal.reason.contains('\n'));
            return false;
        }
    };
    assert_eq!(call.command(), command);
    let encoded = call.encode();
    // The argument of a command without one is ignored, whatever came.
    assert!(encoded.len() == payload.len() || encoded.is_empty());
    let again = Call::decode(command, call.nargs(), &encoded, limit);
    assert_eq!(again.as_ref(), Ok(&call));
    let mut same = call.clone();
    assert_eq!(same.take_reply(&call.encode_reply()), Ok(()));
    assert_eq!(same, call);
    // A reply that is not this command's changes nothing; one that is cannot
    // become larger than the request was.
    if same.take_reply(payload).is_err() {
        assert_eq!(same, call);
    }
    assert_eq!(same.encode().len(), encoded.len());
    true
}

fn extension(bytes: &[u8]) -> bool {
    let Some((&[low, high, nargs], payload)) = bytes.split_first_chunk() else {
        return false;
    };
    let command = u16::from_le_bytes([low, high & 1]);
    match Extension::decode(command, nargs.into(), payload) {
        Ok(extension) => {
            assert_eq!(extension.number(), command);
            true
        }
        Err(refusal) => {
            assert_eq!(refusal.errno, Errno::EINVAL);
            false
        }
    }
}

fn answer(bytes: &[u8]) -> bool {
    macro_rules! check {
        ($($type:ident)*) => {
            [$(
                $type::from_bytes(bytes).is_ok_and(|answer| {
                    assert_eq!(answer.to_bytes(), bytes);
                    true
                }),
            )*].contains(&true)
        };
    }
    check!(Hello Bound Buffer SystemWide)
}

/// JSON that a server sends.
fn document(bytes: &[u8]) -> bool {
    fn survives<T: Serialize + DeserializeOwned + PartialEq + Debug>(bytes: &[u8]) -> bool {
        let Ok(document) = serde_json::from_slice::<T>(bytes) else {
            return false;
        };
        let json = serde_json::to_vec(&document).expect("a document becomes JSON");
        let again: T = serde_json::from_slice(&json).expect("its JSON is a document");
        assert_eq!(again, document);
        true
    }
    let formats = survives::<Vec<FormatInfo>>(bytes);
    formats | survives::<MachineInfo>(bytes) | survives::<ModelInfo>(bytes)
}

fn record(bytes: &[u8]) -> bool {
    fn survives<T: Record + PartialEq + Debug>(bytes: &[u8]) -> bool {
        let Ok(vector) = T::vector_from_bytes(bytes) else {
            assert!(!bytes.len().is_multiple_of(T::SIZE));
            return false;
        };
        assert_eq!(vector.len() * T::SIZE, bytes.len());
        // Padding becomes 0, so the bytes need not be the same.
        let encoded = T::vector_to_bytes(&vector);
        assert_eq!(encoded.len(), bytes.len());
        assert_eq!(T::vector_from_bytes(&encoded).as_ref(), Ok(&vector));
        let one = T::from_bytes(bytes);
        assert_eq!(one.is_ok(), bytes.len() == T::SIZE);
        true
    }
    macro_rules! check {
        ($($type:ident)*) => { [$(survives::<$type>(bytes)),*].contains(&true) };
    }
    if let Some(&bytes) = bytes.first_chunk::<16>() {
        let time: Timespec = perfmon_abi::Field::get(&bytes);
        if let Some(ns) = time.to_ns() {
            assert_eq!(Timespec::from_ns(ns), time);
        }
    }
    !bytes.is_empty()
        && check!(
            CtxArg PmcArg PmdArg StartArg LoadArg SetDesc SetInfo PmcInfo PmdInfo Config Message
            DefaultArg DefaultHeader DefaultEntry DoubleHeader CompactArg CompactHeader
            CompactBlock CompactLast
        )
}

/// What samples contain, from the first byte; and the others.
fn layout(bytes: &[u8]) -> Option<(Layout, &[u8])> {
    let (&shape, rest) = bytes.split_first()?;
    let mut layout = Layout::default();
    for pmd in 0..4 {
        // All the same, or each its own; one is not known at all.
        let own = if shape & 0x80 == 0 { 0 } else { 1 << pmd };
        if pmd < 3 || shape & 0x40 == 0 {
            layout.insert(0, pmd, [u64::from(shape & 0x3f) ^ own, 0]);
        }
    }
    Some((layout, rest))
}

/// No more samples and values than bytes: each takes some, values 8.
fn are_bounded(samples: &[Sample], bytes: usize) {
    let values: usize = samples.iter().map(|sample| sample.values.len()).sum();
    assert!(samples.len() * 8 <= bytes && values * 8 <= bytes);
}

fn samples(bytes: &[u8]) -> bool {
    let Some((layout, bytes)) = layout(bytes) else {
        return false;
    };
    let samples = default_buffer(bytes, &layout);
    samples.is_ok_and(|samples| {
        are_bounded(&samples, bytes.len());
        true
    })
}

fn halves(bytes: &[u8]) -> bool {
    let Some((layout, bytes)) = layout(bytes) else {
        return false;
    };
    let Ok(header) = double_header(bytes) else {
        assert!((0..2).all(|half| double_half(bytes, half, &layout).is_err()));
        return false;
    };
    assert!(oldest_full(&header).is_none_or(|half| half < 2));
    assert!(double_half(bytes, 2, &layout).is_err());
    let half = |half| {
        double_half(bytes, half, &layout).is_ok_and(|samples| {
            are_bounded(&samples, bytes.len());
            true
        })
    };
    half(0) | half(1)
}

/// A ring that is read twice, and that changes between: the first half of the
/// bytes, then the second one, in between whatever the two make together.
fn ring(bytes: &[u8]) -> bool {
    let mut cursor = Cursor::default();
    let (first, second) = bytes.split_at(bytes.len() / 2);
    let mut torn = [first, &second[..second.len() / 2]].concat();
    torn.truncate(first.len());
    let mut any = false;
    for ring in [bytes, first, &torn, second, bytes] {
        let copied = std::cell::Cell::new(0usize);
        let batch = cursor.follow(&mut |at, to| {
            copied.set(copied.get() + 1);
            let from = at.checked_add(to.len()).and_then(|end| ring.get(at..end));
            from.inspect(|from| to.copy_from_slice(from)).is_some()
        });
        // Each block takes bytes of its own, so there are not many to look at.
        assert!(copied.get() <= 4 * ring.len() + 16);
        if let Ok(batch) = batch {
            let values: usize = batch.samples.iter().map(|it| it.values.len()).sum();
            assert!(batch.samples.len() * 3 <= ring.len() && values <= ring.len());
            any |= !batch.samples.is_empty();
        }
    }
    any
}

/// Bytes as one sample after another; each, encoded again, decodes to the same.
fn compact_sample(mut bytes: &[u8]) -> bool {
    let (mut last, mut of_pmds) = (CompactLast::default(), [0u64; 128]);
    let mut any = false;
    while !bytes.is_empty() {
        let (before, values_before) = (last, of_pmds);
        let Ok(sample) = decode(&mut bytes, &mut last, &mut of_pmds[..]) else {
            return any;
        };
        any = true;
        let values: Vec<u64> = sample.values.iter().map(|&(_, value)| value).collect();
        let of_stack = MAX_STACK_NUMBERS + sample.guest.stack.bytes.len();
        let mut room = vec![0; MAX_SAMPLE + MAX_CHAIN + of_stack];
        let (mut from, mut from_values) = (before, values_before);
        let next = NextSample {
            head: &last,
            values: &values,
            chain: &sample.guest.chain,
            stack: &sample.guest.stack,
            most_stack: MOST_STACK,
        };
        let len = encode(&next, &mut from, &mut from_values[..], &mut room);
        let len = len.expect("there is room for every sample");
        assert_eq!((from, from_values), (last, of_pmds));
        let (mut again, mut again_values) = (before, values_before);
        let mut encoded = &room[..len];
        let decoded = decode(&mut encoded, &mut again, &mut again_values[..]);
        assert_eq!(decoded.as_ref(), Ok(&sample));
        assert!(encoded.is_empty());
    }
    any
}
