//! A small profile for tests.

use pmu_virt::Provenance;
use umpire_tools::profile::{
    Header, Loss, LossKind, ProfileWriter, Record, Ring, Sample, SampledEvent, Sampling,
};

pub(crate) const KALLSYMS: &str = "\
ffffffff81000000 T _text
ffffffff81001000 t clear_page
ffffffff81002000 T do_idle
ffffffff81003000 T _etext
ffffffffc0000000 t nft_do_chain\t[nf_tables]
";

pub(crate) fn header() -> Header {
    Header {
        umpire: "0.1.0".to_owned(),
        vm: 7,
        vm_name: "web".to_owned(),
        vcpus: 2,
        cores: 1,
        host: "a processor, Linux 6.1".to_owned(),
        command: Vec::new(),
        start_unix_ns: 1_700_000_000_123_000_000,
        start_tsc: 1000,
        tsc_khz: 2_000_000,
        virtual_time: false,
        events: vec![SampledEvent {
            name: "cycles".to_owned(),
            sampling: Sampling::Period(1000),
            provenance: Some(Provenance::Hardware),
        }],
        processes: Vec::new(),
        threads: Vec::new(),
    }
}

/// A header with a second event.
pub(crate) fn two_events() -> Header {
    let mut header = header();
    header.events.push(SampledEvent {
        name: "instructions:u".to_owned(),
        sampling: Sampling::Frequency(99),
        provenance: Some(Provenance::Exact),
    });
    header
}

pub(crate) fn sample(time_ns: u64, ip: u64) -> Sample {
    Sample {
        time_ns,
        ip,
        period: 1000,
        cr3: Some(0x10_0001),
        vm: 7,
        vcpu: 0,
        ring: Some(Ring::Kernel),
        ..Sample::default()
    }
}

/// Seven samples and each kind of loss.
pub(crate) fn records() -> Vec<Record> {
    let kernel = |time, ip| sample(time, ip);
    let user = |time, ip, cr3| Sample {
        ring: Some(Ring::User),
        cr3: Some(cr3),
        vcpu: 1,
        ..sample(time, ip)
    };
    let loss = |time_ns, vcpu, kind| {
        Record::Loss(Loss {
            time_ns,
            vm: 7,
            vcpu,
            kind,
        })
    };
    vec![
        Record::Sample(kernel(1_000_000, 0xffff_ffff_8100_1010)),
        Record::Sample(kernel(2_000_000, 0xffff_ffff_8100_1fff)),
        Record::Sample(kernel(3_000_000, 0xffff_ffff_8100_2000)),
        loss(3_500_000, Some(0), LossKind::Full(4)),
        Record::Sample(kernel(4_000_000, 0xffff_ffff_c000_0123)),
        Record::Sample(kernel(5_000_000, 0xffff_ffff_dead_beef)),
        loss(5_500_000, None, LossKind::Throttled(2)),
        Record::Sample(user(6_000_000, 0x40_1000, 0x20_0002)),
        Record::Sample(user(1_234_567_890, 0x40_2000, 0x30_0003)),
        loss(1_300_000_000, Some(1), LossKind::Blind(1_500_000)),
    ]
}

/// The bytes of a whole file.
pub(crate) fn file(header: &Header, records: &[Record]) -> Vec<u8> {
    let mut writer = ProfileWriter::new(Vec::new(), header).unwrap();
    for record in records {
        writer.write(record).unwrap();
    }
    writer.finish(2_000_000_000).unwrap()
}
