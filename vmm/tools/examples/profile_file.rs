//! Writes a profile and reads it back: samples of each vCPU.
//!
//! ```text
//! cargo run -p umpire-tools --example profile_file
//! ```

use std::collections::BTreeMap;
use std::error::Error;

use umpire_tools::profile::{
    Header, ProfileReader, ProfileWriter, Record, Sample, SampledEvent, Sampling,
};

fn main() -> Result<(), Box<dyn Error>> {
    let header = Header {
        vm: 1,
        vcpus: 2,
        cores: 1,
        tsc_khz: 2_000_000,
        events: vec![SampledEvent {
            name: "cycles".to_owned(),
            sampling: Sampling::Period(100_000),
            provenance: None,
        }],
        ..Header::default()
    };
    let mut writer = ProfileWriter::new(Vec::new(), &header)?;
    for number in 0..5 {
        writer.write(&Record::Sample(Sample {
            time_ns: u64::from(number) * 1_000,
            ip: 0xffff_ffff_8100_0000,
            period: 100_000,
            vm: 1,
            vcpu: number % 2,
            ..Sample::default()
        }))?;
    }
    let file = writer.finish(5_000)?;

    let mut reader = ProfileReader::open(file.as_slice())?;
    let mut samples: BTreeMap<u32, u32> = BTreeMap::new();
    while let Some(record) = reader.next_record()? {
        if let Record::Sample(sample) = record {
            *samples.entry(sample.vcpu).or_default() += 1;
        }
    }
    for (vcpu, count) in samples {
        println!("vCPU {vcpu}: {count} samples");
    }
    Ok(())
}
