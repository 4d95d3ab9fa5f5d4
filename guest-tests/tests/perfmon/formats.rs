//! Sampling formats that a program which links the VMM brings along (§3.5.8).

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use guest_tests::micro::{Lab, Test};
use perfmon_abi::PmdArg;
use perfmon_abi::wire::{Errno, Refusal};
use pmu_virt::perfmon::{Control, Moment, OverflowArg, SamplingFormat, Setup};
use umpire_perfmon::Call;

use crate::bed::{Bed, CYCLES, clock, eventually, gate, guest, load, pmc, pmd};

pub(crate) const TESTS: &[Test] = &[Test {
    name: "formats::one_comes_and_goes_while_the_server_runs",
    run: comes_and_goes,
}];

const UUID: [u8; 16] = *b"counts overflows";
const PERIOD: u64 = 1_000_000;

/// Counts overflows in the first word of its buffer.
#[derive(Debug)]
struct Overflows;

impl SamplingFormat for Overflows {
    fn name(&self) -> &'static str {
        "overflows"
    }

    fn uuid(&self) -> [u8; 16] {
        UUID
    }

    fn size(&self, _: &Setup<'_>) -> Result<usize, Refusal> {
        Ok(8)
    }

    fn handler(
        &self,
        buffer: &mut [u8],
        arg: &mut OverflowArg<'_>,
        _: &Moment,
    ) -> Result<(), Refusal> {
        let (word, _) = buffer.split_first_chunk_mut().ok_or(Errno::EIO)?;
        *word = (u64::from_le_bytes(*word) + 1).to_le_bytes();
        arg.control = Control {
            reset_ovfl_pmds: true,
            ..Control::default()
        };
        Ok(())
    }
}

fn comes_and_goes(lab: &Lab) -> Result<()> {
    let bed = Bed::new(clock)?;
    let formats = bed.control.formats.clone();
    bed.run(lab, &guest(|a| gate(a, 2))?, |client, gates| {
        let create = || client.create(0, Some(UUID), &[]);
        let unknown = create().err().map(|error| error.errno);
        ensure!(unknown == Some(Errno::EINVAL), "{unknown:?}");
        formats.register(Arc::new(Overflows))?;
        let context = create()?;
        formats.unregister(UUID)?;
        ensure!(create().is_err(), "it is gone for new contexts");
        // This context keeps it.
        let from = PERIOD.wrapping_neg();
        let every = PmdArg {
            long_reset: from,
            short_reset: from,
            ..pmd(0, from)
        };
        client.call(&context, &mut Call::WritePmcs(vec![pmc(0, CYCLES)]))?;
        client.call(&context, &mut Call::WritePmds(vec![every]))?;
        let mapping = context.map_buffer()?;
        load(client, &context, 0)?;
        client.call(&context, &mut Call::Start(None))?;
        gates.open(1);
        eventually("overflows are counted", || {
            let bytes = mapping.copy(0, 8).context("a buffer of 8 bytes")?;
            let word = bytes.first_chunk().copied().map(u64::from_le_bytes);
            Ok(word >= Some(10))
        })
    })?;
    Ok(())
}
