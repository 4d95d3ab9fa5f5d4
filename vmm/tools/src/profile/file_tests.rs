//! Tests of the profile file.

use perfmon_abi::compact::{CallChain, ChainEnd, GuestPlace, MOST_FRAMES, ProgramFrame};
use perfmon_abi::wire::programs::{Described, MappingInfo, MomentInfo, TaskInfo};
use pmu_model::Provenance;
use proptest::prelude::*;

use super::*;

pub(super) fn header() -> Header {
    Header {
        umpire: "0.1.0".to_owned(),
        vm: 7,
        vm_name: "web".to_owned(),
        vcpus: 2,
        cores: 2,
        host: "a processor, Linux 6.1".to_owned(),
        command: ["umpire", "record", "-a"].map(str::to_owned).to_vec(),
        start_unix_ns: 1_700_000_000_000_000_000,
        start_tsc: 1000,
        tsc_khz: 2_000_000,
        virtual_time: false,
        events: vec![
            SampledEvent {
                name: "cycles".to_owned(),
                sampling: Sampling::Period(1000),
                provenance: Some(Provenance::Hardware),
            },
            SampledEvent {
                name: "instructions:u".to_owned(),
                sampling: Sampling::Frequency(99),
                provenance: Some(Provenance::Exact),
            },
        ],
        processes: Vec::new(),
        threads: Vec::new(),
    }
}

pub(super) fn file(records: &[Record]) -> Vec<u8> {
    let mut writer = ProfileWriter::new(Vec::new(), &header()).unwrap();
    for record in records {
        writer.write(record).unwrap();
    }
    writer.finish(5_000_000).unwrap()
}

/// All records, and how the file ended.
fn read(bytes: &[u8]) -> Result<(Vec<Record>, Ending), ProfileError> {
    let mut reader = ProfileReader::open(bytes)?;
    let mut records = Vec::new();
    while let Some(record) = reader.next_record()? {
        records.push(record.clone());
    }
    Ok((records, reader.ending().expect("the end was reached")))
}

fn chain() -> impl Strategy<Value = CallChain> {
    let part = |most| {
        (
            1u8..6,
            proptest::collection::vec(any::<(u64, u64)>(), 0..most),
        )
    };
    let part = |most| proptest::option::of(part(most));
    (part(MOST_FRAMES + 1), part(8)).prop_map(|(kernel, program)| {
        let mut chain = CallChain::default();
        if let Some((end, frames)) = kernel {
            chain.kernel_end = ChainEnd::of(end);
            chain.kernel = frames.into_iter().map(|(address, _)| address).collect();
        }
        if let Some((end, frames)) = program {
            chain.program_end = ChainEnd::of(end);
            let frame = |(address, mapping)| ProgramFrame { address, mapping };
            chain.program = frames.into_iter().map(frame).collect();
        }
        chain
    })
}

fn guest() -> impl Strategy<Value = GuestPlace> {
    let place =
        (any::<u64>(), any::<u64>(), chain()).prop_map(|(task, mapping, chain)| GuestPlace {
            task,
            mapping,
            chain,
            ..GuestPlace::default()
        });
    prop_oneof![Just(GuestPlace::default()), place]
}

pub(super) fn task(number: u64, comm: &str) -> Described {
    Described::Task(TaskInfo {
        number,
        pid: 40,
        tid: 41,
        comm: comm.to_owned(),
        process: "main".to_owned(),
        started_ns: 5,
        kernel: false,
        ..TaskInfo::default()
    })
}

pub(super) fn mapping(number: u64, name: &str) -> Described {
    Described::Mapping(MappingInfo {
        number,
        start: 0x40_0000,
        end: 0x50_0000,
        name: name.to_owned(),
        build_id: "00ff".to_owned(),
        ..MappingInfo::default()
    })
}

fn described() -> impl Strategy<Value = Record> {
    (1..u64::MAX, "\\PC{0,20}", any::<bool>()).prop_map(|(number, name, is_task)| {
        Record::Described(if is_task {
            task(number, &name)
        } else {
            mapping(number, &name)
        })
    })
}

fn sample() -> impl Strategy<Value = Record> {
    let ring = prop_oneof![Just(None), Just(Some(Ring::Kernel)), Just(Some(Ring::User))];
    (
        any::<[u64; 3]>(),
        any::<[u32; 3]>(),
        any::<Option<u64>>(),
        0u16..2,
        any::<u16>(),
        ring,
        guest(),
    )
        .prop_map(
            |([time_ns, ip, period], [vm, vcpu, core], cr3, event, set, ring, guest)| {
                Record::Sample(Sample {
                    time_ns,
                    ip,
                    period,
                    cr3,
                    vm,
                    vcpu,
                    core,
                    event,
                    set,
                    ring,
                    guest,
                })
            },
        )
}

fn loss() -> impl Strategy<Value = Record> {
    let kind = (0..3, any::<u64>()).prop_map(|(kind, amount)| match kind {
        0 => LossKind::Full(amount),
        1 => LossKind::Throttled(amount),
        _ => LossKind::Blind(amount),
    });
    let vcpu = proptest::option::of(0..u32::MAX);
    (any::<u64>(), any::<u32>(), vcpu, kind).prop_map(|(time_ns, vm, vcpu, kind)| {
        Record::Loss(Loss {
            time_ns,
            vm,
            vcpu,
            kind,
        })
    })
}

fn records() -> impl Strategy<Value = Vec<Record>> {
    proptest::collection::vec(
        prop_oneof![3 => sample(), 1 => loss(), 1 => described()],
        0..40,
    )
}

proptest! {
    #[test]
    fn what_is_written_is_read(records in records()) {
        let (read, ending) = read(&file(&records)).unwrap();
        prop_assert!(matches!(ending, Ending::Whole(ns) if ns >= 5_000_000));
        prop_assert_eq!(read, records);
    }

    /// Cut off anywhere, every whole record is read, and the loss is reported.
    #[test]
    fn a_part_is_read_as_far_as_it_goes(records in records(), cut in any::<prop::sample::Index>()) {
        let whole = file(&records);
        let cut = cut.index(whole.len());
        match read(&whole[..cut]) {
            Ok((read, ending)) => {
                prop_assert_eq!(ending, Ending::CutOff);
                prop_assert_eq!(read.as_slice(), &records[..read.len()]);
                let rest = cut + 52 - file(&read).len();
                let with_next = records.get(..=read.len());
                let size = with_next.map_or(52, |with_next| file(with_next).len() - file(&read).len());
                prop_assert!(rest < size, "{} bytes of {}", rest, size);
            }
            Err(error) => prop_assert!(
                matches!(error, ProfileError::Empty | ProfileError::NoHeader),
                "{}", error
            ),
        }
    }

    /// Whatever a file holds: no panic, an end, and no more memory than a record.
    #[test]
    fn any_bytes_are_read_to_an_end(
        bytes in proptest::collection::vec(any::<u8>(), 0..2000),
        headed in any::<bool>(),
    ) {
        let mut all = if headed { file(&[]) } else { Vec::new() };
        all.truncate(all.len().saturating_sub(44));
        all.extend(&bytes);
        if let Ok(mut reader) = ProfileReader::open(all.as_slice()) {
            let mut count = 0;
            while reader.next_record().unwrap().is_some() {
                count += 1;
            }
            prop_assert!(reader.ending().is_some());
            prop_assert!(count * 29 <= bytes.len());
        }
    }

    /// One changed byte never makes records out of nothing.
    #[test]
    fn a_changed_byte_is_survived(
        records in records(), at in any::<prop::sample::Index>(), to in any::<u8>(),
    ) {
        let mut bytes = file(&records);
        let at = at.index(bytes.len());
        bytes[at] = to;
        if let Ok((read, _)) = read(&bytes) {
            prop_assert!(read.len() <= bytes.len() / 29);
        }
    }

    /// Descriptions are found before the samples are read: those that a reader reaches.
    #[test]
    fn descriptions_are_found_first(
        records in records(), at in any::<prop::sample::Index>(), to in any::<u8>(),
    ) {
        let found = |bytes: &[u8]| {
            let mut found = Vec::new();
            reader::descriptions(std::io::Cursor::new(bytes), |one| found.push(one)).unwrap();
            found
        };
        let described = |records: Vec<Record>| -> Vec<Described> {
            let one = |record| match record { Record::Described(one) => Some(one), _ => None };
            records.into_iter().filter_map(one).collect()
        };
        let mut bytes = file(&records);
        prop_assert_eq!(found(&bytes), described(records));
        let at = at.index(bytes.len());
        bytes[at] = to;
        let found = found(&bytes);
        if let Ok((read, _)) = read(&bytes) {
            prop_assert!(found.starts_with(&described(read)));
        }
    }
}

/// What readers refuse is not written, and not read.
#[test]
fn descriptions_that_make_no_sense_are_damage() {
    fn check(described: Described, expected: &str) {
        let written = file(&[Record::Described(described.clone())]);
        assert_eq!(written, file(&[]), "{described:?}");
        let mut bytes = file(&[]);
        bytes.truncate(bytes.len() - 52);
        let json = serde_json::to_vec(&described).unwrap();
        let [low, high] = u16::try_from(json.len()).unwrap().to_le_bytes();
        bytes.extend([5, 0, low, high]);
        bytes.extend(json);
        let text = read(&bytes).unwrap().1.to_string();
        assert!(text.contains(expected), "{text}");
    }
    check(task(1, "a\u{1b}[2J"), "control characters");
    check(task(0, "a"), "make no sense");
    check(mapping(1, "\n"), "control characters");
    check(mapping(1, &"x".repeat(20_000)), "too long");
    let Described::Mapping(one) = mapping(1, "/bin/true") else {
        return;
    };
    let odd = |change: fn(&mut MappingInfo)| {
        let mut one = one.clone();
        change(&mut one);
        check(Described::Mapping(one), "make no sense");
    };
    odd(|one| one.end = one.start);
    odd(|one| one.build_id = "../../etc".to_owned());
    odd(|one| one.build_id = "abc".to_owned());
    let moment = |number, count| {
        let same = vec![1; count];
        Described::Moment(MomentInfo { number, same })
    };
    check(moment(0, 1), "make no sense");
    check(moment(u64::MAX, 2), "make no sense");
    check(moment(1, 130), "make no sense");
}

#[test]
fn callers_that_make_no_sense_are_damage() {
    fn check(change: impl Fn(&mut [u8]), expected: &str) {
        let guest = GuestPlace {
            chain: CallChain {
                kernel: vec![1, 2],
                kernel_end: Some(ChainEnd::Entry),
                ..CallChain::default()
            },
            ..GuestPlace::default()
        };
        let sample = Record::Sample(Sample {
            guest,
            ..Sample::default()
        });
        let mut bytes = file(&[sample]);
        let at = file(&[]).len() - 52 + 4 + 49;
        change(&mut bytes[at..]);
        let text = read(&bytes).unwrap().1.to_string();
        assert!(text.contains(expected), "{text}");
    }
    check(|_| {}, "whole");
    check(|chain| chain[0] = 128, "more callers");
    check(|chain| chain[2] = 200, "more callers");
    check(|chain| chain[1] = 6, "unknown end");
    check(|chain| chain[1] = 0, "unknown end");
    check(|chain| chain[2] = 1, "unknown end");
    check(|chain| chain[0] = 3, "too short");
}

#[test]
fn other_files_are_refused_with_a_reason() {
    fn check(bytes: &[u8], expected: &str) {
        let text = read(bytes).unwrap_err().to_string();
        assert!(text.contains(expected), "{text}");
        assert!(!text.contains('\n'), "{text}");
    }
    check(b"", "empty");
    check(b"PERFILE2 and so on", "perf report");
    check(b"some text that is longer than a magic", "no profile");
    check(b"short", "no profile");
    check(&MAGIC[..5], "within the header");
    let mut bytes = file(&[]);
    bytes[8] = 9;
    check(&bytes, "version 9");
    let mut bytes = file(&[]);
    bytes[14] = 0x20;
    check(&bytes, "longer than 1 MiB");
    let mut bytes = file(&[]);
    bytes[16] = b'x';
    check(&bytes, "header is damaged");
    let mut named = header();
    named.events[0].name = "cy\u{1b}[2Jcles".to_owned();
    let bytes = ProfileWriter::new(Vec::new(), &named)
        .unwrap()
        .finish(0)
        .unwrap();
    check(&bytes, "control characters");
}

#[test]
fn a_header_that_no_reader_would_take_is_not_written() {
    let mut long = header();
    long.host = "x".repeat(1 << 20);
    let error = ProfileWriter::new(Vec::new(), &long).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
}

#[test]
fn kinds_and_fields_of_later_versions_are_passed_over() {
    let mut loss = Record::Loss(Loss {
        time_ns: 1,
        vm: 7,
        vcpu: None,
        kind: LossKind::Full(3),
    });
    let mut bytes = file(&[]);
    let trailer = bytes.split_off(bytes.len() - 52);
    bytes.extend([200, 0, 3, 0, 1, 2, 3]);
    let mut longer = Vec::new();
    wire::put_record(&loss, &mut longer);
    longer[2] += 5;
    longer.extend([9; 5]);
    bytes.extend(longer);
    let mut reader = ProfileReader::open(bytes.as_slice()).unwrap();
    assert_eq!(reader.next_record().unwrap(), Some(&mut loss));
    assert_eq!(reader.next_record().unwrap(), None);
    assert_eq!(
        (reader.unknown_records(), reader.ending()),
        (1, Some(Ending::CutOff))
    );
    // This trailer knows nothing of the loss.
    bytes.extend(trailer);
    let (_, ending) = read(&bytes).unwrap();
    assert!(
        ending
            .to_string()
            .contains("trailer tells of other records"),
        "{ending}"
    );
}

#[test]
fn damage_is_told_with_its_place() {
    fn check(change: impl Fn(&mut Vec<u8>), expected: &str) {
        let loss = Record::Loss(Loss {
            time_ns: 1,
            vm: 7,
            vcpu: Some(1),
            kind: LossKind::Blind(3),
        });
        let mut bytes = file(&[loss]);
        change(&mut bytes);
        let text = read(&bytes).unwrap().1.to_string();
        assert!(text.contains(expected), "{text}");
    }
    check(|_| {}, "whole");
    check(|bytes| bytes.truncate(bytes.len() - 1), "without a trailer");
    check(
        |bytes| bytes.truncate(bytes.len() - 52),
        "without a trailer",
    );
    check(|bytes| bytes.push(0), "behind the trailer");
    let at = file(&[]).len() - 52;
    check(
        |bytes| bytes[at + 28] = 9,
        &format!("at byte {at}: a loss has an unknown cause"),
    );
    check(|bytes| bytes[at] = 1, "too short for its kind");
}

/// They are told behind the records, maybe several times, and no trailer has to know of them.
#[test]
fn samples_that_were_left_out_are_counted() {
    let mut writer = ProfileWriter::new(Vec::new(), &header()).unwrap();
    let left_out = |others, unknown| LeftOut { others, unknown };
    for (others, unknown) in [(0, 0), (5, 0), (2, 3)] {
        writer.write_left_out(left_out(others, unknown)).unwrap();
    }
    assert_eq!(writer.totals().left_out, left_out(7, 3));
    writer.write_symbols("0000000000001000 T here\n").unwrap();
    let bytes = writer.finish(9).unwrap();
    let mut reader = ProfileReader::open(&bytes[..]).unwrap();
    assert!(reader.next_record().unwrap().is_none());
    assert_eq!(reader.ending(), Some(Ending::Whole(9)));
    assert_eq!(reader.totals().left_out, left_out(7, 3));
    assert_eq!(reader.unknown_records(), 0);
    let words = reader.totals().left_out.words();
    let expected = "7 samples of others and 3 of unknown tasks left out";
    assert_eq!(words.as_deref(), Some(expected));
    assert_eq!(left_out(0, 0).words(), None);
    // Nothing is written where there is nothing to tell.
    let without = ProfileWriter::new(Vec::new(), &header()).unwrap();
    assert_eq!(file(&[]), without.finish(5_000_000).unwrap());
    let json = serde_json::to_value(Totals::default()).unwrap();
    assert_eq!(json.as_object().map(|fields| fields.len()), Some(4));
}

#[test]
fn an_event_that_was_never_counted_has_no_provenance() {
    let mut header = header();
    header.events[1].provenance = None;
    let written = ProfileWriter::new(Vec::new(), &header).unwrap();
    let bytes = written.finish(1).unwrap();
    assert!(!String::from_utf8_lossy(&bytes).contains("null"));
    assert_eq!(ProfileReader::open(&bytes[..]).unwrap().header(), &header);
    assert_eq!(header.events[1].how(), "it was never counted");
}

/// Names behind the records: a reader of records passes over them, and they are found from
/// the file's end.
#[test]
fn symbols_are_found_from_the_end() {
    use std::io::Cursor;

    use super::reader::symbols;

    let found = |bytes: &[u8]| symbols(&mut Cursor::new(bytes)).unwrap();
    let long = "ffffffff81000000 t a_function\n".repeat(5000);
    for text in ["", "ffffffff81000000 t a\n", &long] {
        let mut writer = ProfileWriter::new(Vec::new(), &header()).unwrap();
        let sample = file(&[]);
        writer.write_symbols(text).unwrap();
        let bytes = writer.finish(7).unwrap();
        assert_eq!(read(&bytes).unwrap(), (Vec::new(), Ending::Whole(7)));
        assert_eq!(found(&bytes), text.as_bytes());
        assert!(found(&sample).is_empty());
        // Whatever is cut off or changed, there are none, or less of them.
        assert!(found(&bytes[..bytes.len() - 1]).is_empty());
        assert!(found(&bytes[1..]).len() <= text.len());
    }
    assert!(found(b"").is_empty() && found(&[0; 60]).is_empty());
}
