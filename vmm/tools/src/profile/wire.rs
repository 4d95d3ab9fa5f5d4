//! The bytes of a profile file.
//!
//! All numbers are little-endian. A file is
//!
//! | bytes | what |
//! |---|---|
//! | 8 | [`MAGIC`] |
//! | 4 | [`VERSION`] |
//! | 4 | length of the header in bytes, at most [`LONGEST_HEADER`] |
//! | as said | the header, JSON in UTF-8 |
//! | the rest | records |
//!
//! A record is a byte for its kind, a byte 0, two bytes for the length of what
//! follows, and that. A reader passes over kinds that it does not know, and
//! over bytes behind those that it knows: both can be added without another
//! version. The last record is the trailer, so that a file that was cut off
//! differs from a whole one.

use perfmon_abi::compact::{CallChain, ChainEnd, GuestPlace, MOST_FRAMES, ProgramFrame};
use perfmon_abi::wire::programs::Described;

use super::record::{LeftOut, Loss, LossKind, Record, Ring, Sample, Totals};

/// How a profile file begins: not as text does, and damaged by transfers that
/// change line ends.
pub const MAGIC: [u8; 8] = *b"\x89UMPIRE\n";

/// The version that is written, and the only one that is read.
pub const VERSION: u32 = 1;

/// The longest header; a longer one is damage.
pub const LONGEST_HEADER: u32 = 1 << 20;

/// Kind and length.
pub(super) const HEAD: usize = 4;

const SAMPLE: u8 = 1;
const LOSS: u8 = 2;
const TRAILER: u8 = 3;
/// A piece of the names of the guest's kernel, in the form of `/proc/kallsyms`. All pieces
/// are together, in front of the trailer.
const SYMBOLS: u8 = 4;
/// What a number in samples stands for: a [`Described`] in JSON.
pub(super) const DESCRIBED: u8 = 5;
/// How many samples were taken and left out.
const LEFT_OUT: u8 = 6;
const LEFT_OUT_LENGTH: usize = 16;

const SAMPLE_LENGTH: usize = 49;
const LOSS_LENGTH: usize = 25;
/// Totals, duration, and bytes of the symbols in front of it with their heads.
const TRAILER_LENGTH: usize = 48;
/// Bytes of the whole trailer.
pub(super) const WHOLE_TRAILER: usize = HEAD + TRAILER_LENGTH;
/// Most bytes of one piece of symbols.
const PIECE: usize = 60_000;
/// The longest symbols: those of a million addresses.
pub(super) const LONGEST_SYMBOLS: u64 = 256 << 20;

/// Flags of a sample.
const HAS_CR3: u8 = 1;
const HAS_RING: u8 = 1 << 1;
const USER: u8 = 1 << 2;
/// The numbers of task and mapping follow.
const HAS_TASK: u8 = 1 << 3;
/// A chain of callers follows.
const HAS_CHAIN: u8 = 1 << 4;

/// Most bytes of a name in a description: those of a path, each replaced at worst.
const LONGEST_NAME: usize = 3 * 4096;
/// Most digits of a build id: those of SHA-512.
const LONGEST_BUILD_ID: usize = 128;

/// Most numbers of a sample: task, mapping, and those of callers.
const MOST_NUMBERS: usize = 2 + MOST_FRAMES;
const SENSELESS: &str = "a description has numbers that make no sense";

/// `vcpu` of a loss that is not known to be one vCPU's.
const NO_VCPU: u32 = u32::MAX;

/// What the bytes of a record mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Decoded {
    /// A sample, a loss or a description, which was put in place of another record.
    Record,
    /// The end: what the writer wrote, and how long it sampled in nanoseconds.
    Trailer(Totals, u64),
    /// A piece of symbols.
    Symbols,
    /// Samples that were left out.
    LeftOut(LeftOut),
    /// A kind that this version does not know.
    Unknown,
    /// Bytes that no writer makes.
    Damaged(&'static str),
}

/// Appends `record`, but for a description that no reader would take.
pub(super) fn put_record(record: &Record, out: &mut Vec<u8>) {
    match record {
        Record::Sample(sample) => put_sample(sample, out),
        Record::Loss(loss) => put_loss(loss, out),
        Record::Described(described) => put_described(described, out),
    }
}

/// Appends how many samples were left out.
pub(super) fn put_left_out(left_out: LeftOut, out: &mut Vec<u8>) {
    put_head(LEFT_OUT, LEFT_OUT_LENGTH, out);
    out.extend(left_out.others.to_le_bytes());
    out.extend(left_out.unknown.to_le_bytes());
}

/// Appends symbols, in pieces, and returns how many bytes these have.
pub(super) fn put_symbols(text: &str, out: &mut Vec<u8>) -> u64 {
    let before = out.len();
    for piece in text.as_bytes().chunks(PIECE) {
        put_head(SYMBOLS, piece.len(), out);
        out.extend(piece);
    }
    (out.len() - before) as u64
}

/// How many bytes of symbols are in front of a trailer with these bytes; none if it is no
/// trailer, or one of a time before there were symbols.
pub(super) fn symbols_before(bytes: &[u8; WHOLE_TRAILER]) -> Option<u64> {
    let (start, payload) = bytes.split_first_chunk()?;
    let is_one = head(*start) == (TRAILER, TRAILER_LENGTH);
    let (_, last) = payload.split_last_chunk()?;
    Some(u64::from_le_bytes(*last)).filter(|_| is_one)
}

/// The text of the pieces that `bytes` are; none if they are something else.
pub(super) fn symbols_of(mut bytes: &[u8]) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    while let Some((start, rest)) = bytes.split_first_chunk() {
        let (kind, length) = head(*start);
        let (piece, behind) = rest.split_at_checked(length)?;
        if kind != SYMBOLS {
            return None;
        }
        text.extend_from_slice(piece);
        bytes = behind;
    }
    bytes.is_empty().then_some(text)
}

/// Appends the trailer, behind so many bytes of symbols.
pub(super) fn put_trailer(totals: &Totals, duration_ns: u64, symbols: u64, out: &mut Vec<u8>) {
    put_head(TRAILER, TRAILER_LENGTH, out);
    for number in [
        totals.samples,
        totals.lost,
        totals.throttled,
        totals.blind_ns,
        duration_ns,
        symbols,
    ] {
        out.extend(number.to_le_bytes());
    }
}

fn put_head(kind: u8, length: usize, out: &mut Vec<u8>) {
    // No caller has a longer one.
    let length = u16::try_from(length).unwrap_or(u16::MAX);
    out.extend([kind, 0]);
    out.extend(length.to_le_bytes());
}

fn put_sample(sample: &Sample, out: &mut Vec<u8>) {
    let before = out.len();
    put_head(SAMPLE, SAMPLE_LENGTH, out);
    for number in [
        sample.time_ns,
        sample.ip,
        sample.period,
        sample.cr3.unwrap_or(0),
    ] {
        out.extend(number.to_le_bytes());
    }
    for number in [sample.vm, sample.vcpu, sample.core] {
        out.extend(number.to_le_bytes());
    }
    for number in [sample.event, sample.set] {
        out.extend(number.to_le_bytes());
    }
    let cr3 = match sample.cr3 {
        Some(_) => HAS_CR3,
        None => 0,
    };
    let ring = match sample.ring {
        Some(Ring::Kernel) => HAS_RING,
        Some(Ring::User) => HAS_RING | USER,
        None => 0,
    };
    let guest = &sample.guest;
    let has = |flag, is| if is { flag } else { 0 };
    let task = has(HAS_TASK, (guest.task, guest.mapping) != (0, 0));
    let chain = has(HAS_CHAIN, !guest.chain.is_empty());
    out.push(cr3 | ring | task | chain);
    if task != 0 {
        out.extend(guest.task.to_le_bytes());
        out.extend(guest.mapping.to_le_bytes());
    }
    if chain != 0 {
        put_chain(&guest.chain, out);
    }
    let length = u16::try_from(out.len() - before - HEAD).unwrap_or(u16::MAX);
    out[before + 2..before + HEAD].copy_from_slice(&length.to_le_bytes());
}

/// For each part how many frames it has and why no more, then the frames.
fn put_chain(chain: &CallChain, out: &mut Vec<u8>) {
    let end = |end: Option<ChainEnd>| end.map_or(0, |end| end as u8);
    let kernel = &chain.kernel[..chain.kernel.len().min(MOST_FRAMES)];
    let program = &chain.program[..chain.program.len().min(MOST_FRAMES)];
    let count = |count: usize| u8::try_from(count).unwrap_or(u8::MAX);
    out.extend([count(kernel.len()), end(chain.kernel_end)]);
    out.extend([count(program.len()), end(chain.program_end)]);
    for address in kernel {
        out.extend(address.to_le_bytes());
    }
    for frame in program {
        out.extend(frame.address.to_le_bytes());
        out.extend(frame.mapping.to_le_bytes());
    }
}

fn put_described(described: &Described, out: &mut Vec<u8>) {
    let json = serde_json::to_vec(described).unwrap_or_default();
    if fault(described).is_none() && json.len() <= usize::from(u16::MAX) {
        put_head(DESCRIBED, json.len(), out);
        out.extend(json);
    }
}

/// What is wrong with a description, if something is. Names go to terminals, and numbers
/// are taken from each other.
fn fault(described: &Described) -> Option<&'static str> {
    let (number, names, sane) = match described {
        Described::Task(task) => (task.number, [&task.comm, &task.process, &task.root], true),
        Described::Mapping(mapping) => {
            let id = &mapping.build_id;
            let digits = id.bytes().all(|digit| digit.is_ascii_hexdigit());
            let whole = digits && id.len().is_multiple_of(2) && id.len() <= LONGEST_BUILD_ID;
            let sane = whole && mapping.start < mapping.end;
            let names = [&mapping.name, &mapping.build_id, &mapping.root];
            (mapping.number, names, sane)
        }
        Described::Moment(moment) => {
            let behind = moment.number.checked_add(moment.same.len() as u64);
            let sane = behind.is_some() && moment.same.len() <= MOST_NUMBERS;
            return (moment.number == 0 || !sane).then_some(SENSELESS);
        }
    };
    let bad = |name: &String| name.len() > LONGEST_NAME || name.chars().any(char::is_control);
    if names.into_iter().any(bad) {
        Some("a description has a name that is too long or has control characters")
    } else if number == 0 || !sane {
        Some(SENSELESS)
    } else {
        None
    }
}

fn put_loss(loss: &Loss, out: &mut Vec<u8>) {
    put_head(LOSS, LOSS_LENGTH, out);
    let (kind, amount) = match loss.kind {
        LossKind::Full(samples) => (0, samples),
        LossKind::Throttled(times) => (1, times),
        LossKind::Blind(ns) => (2, ns),
    };
    out.extend(loss.time_ns.to_le_bytes());
    out.extend(amount.to_le_bytes());
    out.extend(loss.vm.to_le_bytes());
    out.extend(loss.vcpu.unwrap_or(NO_VCPU).to_le_bytes());
    out.push(kind);
}

/// A record of this kind and length is a sample with callers: no other is so long.
pub(super) fn has_chain(kind: u8, length: usize) -> bool {
    kind == SAMPLE && length > SAMPLE_LENGTH + 16
}

/// The kind and the length of a record from its first bytes.
pub(super) fn head(bytes: [u8; HEAD]) -> (u8, usize) {
    let [kind, _, low, high] = bytes;
    (kind, usize::from(u16::from_le_bytes([low, high])))
}

/// What a record of `kind` with `payload` means, in a file of `events` events. One that is
/// for readers is put into `record`; a sample takes over the memory of the one before it.
pub(super) fn decode(kind: u8, payload: &[u8], events: usize, record: &mut Record) -> Decoded {
    let mut fields = FieldReader(payload);
    let decoded = match kind {
        SAMPLE => sample(&mut fields, events, record),
        LOSS => loss(&mut fields, record),
        TRAILER => trailer(&mut fields),
        SYMBOLS => Some(Decoded::Symbols),
        LEFT_OUT => left_out(&mut fields),
        DESCRIBED => Some(described(payload, record)),
        _ => Some(Decoded::Unknown),
    };
    decoded.unwrap_or(Decoded::Damaged("a record is too short for its kind"))
}

fn sample(fields: &mut FieldReader, events: usize, record: &mut Record) -> Option<Decoded> {
    let (time_ns, ip, period, cr3) = (fields.u64()?, fields.u64()?, fields.u64()?, fields.u64()?);
    let (vm, vcpu, core) = (fields.u32()?, fields.u32()?, fields.u32()?);
    let (event, set) = (fields.u16()?, fields.u16()?);
    let flags = fields.u8()?;
    if usize::from(event) >= events {
        return Some(Decoded::Damaged(
            "a sample is of an event that the header does not have",
        ));
    }
    let ring = match (flags & HAS_RING != 0, flags & USER != 0) {
        (false, _) => None,
        (true, false) => Some(Ring::Kernel),
        (true, true) => Some(Ring::User),
    };
    let mut guest = match record {
        Record::Sample(before) => std::mem::take(&mut before.guest),
        _ => GuestPlace::default(),
    };
    (guest.task, guest.mapping) = (0, 0);
    guest.chain.clear();
    if flags & HAS_TASK != 0 {
        (guest.task, guest.mapping) = (fields.u64()?, fields.u64()?);
    }
    if flags & HAS_CHAIN != 0
        && let Err(why) = chain(fields, &mut guest.chain)?
    {
        return Some(Decoded::Damaged(why));
    }
    *record = Record::Sample(Sample {
        time_ns,
        ip,
        period,
        cr3: (flags & HAS_CR3 != 0).then_some(cr3),
        vm,
        vcpu,
        core,
        event,
        set,
        ring,
        guest,
    });
    Some(Decoded::Record)
}

/// Puts the callers into `chain`, which is empty, or says what is wrong with them.
fn chain(fields: &mut FieldReader, chain: &mut CallChain) -> Option<Result<(), &'static str>> {
    let (kernel, kernel_end) = (usize::from(fields.u8()?), fields.u8()?);
    let (program, program_end) = (usize::from(fields.u8()?), fields.u8()?);
    if kernel > MOST_FRAMES || program > MOST_FRAMES {
        return Some(Err("a sample has more callers than are recorded"));
    }
    let end = |count: usize, end: u8| match (count, end) {
        // Frames that end nowhere are no part of a chain.
        (0, 0) => Some(None),
        (_, end) => ChainEnd::of(end).map(Some),
    };
    let ends = (end(kernel, kernel_end), end(program, program_end));
    let (Some(kernel_end), Some(program_end)) = ends else {
        return Some(Err("a chain of callers has an unknown end"));
    };
    (chain.kernel_end, chain.program_end) = (kernel_end, program_end);
    let address = |[address]: [u64; 1]| address;
    chain.kernel.extend(fields.rows(kernel)?.map(address));
    let frame = |[address, mapping]: [u64; 2]| ProgramFrame { address, mapping };
    chain.program.extend(fields.rows(program)?.map(frame));
    Some(Ok(()))
}

fn described(payload: &[u8], record: &mut Record) -> Decoded {
    let Ok(described) = serde_json::from_slice::<Described>(payload) else {
        return Decoded::Damaged("a description is not of the form that descriptions have");
    };
    match fault(&described) {
        Some(why) => Decoded::Damaged(why),
        None => {
            *record = Record::Described(described);
            Decoded::Record
        }
    }
}

fn loss(fields: &mut FieldReader, record: &mut Record) -> Option<Decoded> {
    let (time_ns, amount) = (fields.u64()?, fields.u64()?);
    let (vm, vcpu) = (fields.u32()?, fields.u32()?);
    let kind = match fields.u8()? {
        0 => LossKind::Full(amount),
        1 => LossKind::Throttled(amount),
        2 => LossKind::Blind(amount),
        _ => return Some(Decoded::Damaged("a loss has an unknown cause")),
    };
    *record = Record::Loss(Loss {
        time_ns,
        vm,
        vcpu: (vcpu != NO_VCPU).then_some(vcpu),
        kind,
    });
    Some(Decoded::Record)
}

fn left_out(fields: &mut FieldReader) -> Option<Decoded> {
    Some(Decoded::LeftOut(LeftOut {
        others: fields.u64()?,
        unknown: fields.u64()?,
    }))
}

fn trailer(fields: &mut FieldReader) -> Option<Decoded> {
    let totals = Totals {
        samples: fields.u64()?,
        lost: fields.u64()?,
        throttled: fields.u64()?,
        blind_ns: fields.u64()?,
        // They have a record of their own.
        left_out: LeftOut::default(),
    };
    Some(Decoded::Trailer(totals, fields.u64()?))
}

/// Takes numbers from the front of some bytes; none where they run out.
struct FieldReader<'a>(&'a [u8]);

impl<'a> FieldReader<'a> {
    /// So many rows of N numbers each.
    fn rows<const N: usize>(
        &mut self,
        count: usize,
    ) -> Option<impl ExactSizeIterator<Item = [u64; N]> + use<'a, N>> {
        let (rows, rest) = self.0.split_at_checked(count * N * 8)?;
        self.0 = rest;
        let (numbers, _) = rows.as_chunks::<8>();
        let (rows, _) = numbers.as_chunks::<N>();
        Some(rows.iter().map(|row| row.map(u64::from_le_bytes)))
    }

    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take().map(u8::from_le_bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
}
