//! The sampling buffer of a context, and what the model says that it holds.

use std::sync::Arc;

use perfmon::{
    CompactFormat, DefaultFormat, DoubleFormat, Moment, Sampler, SamplingFormat, Setup as Made,
};
use perfmon_abi::compact::{Cursor, MAX_SAMPLE};
use perfmon_abi::parse::{Sample, double_header, oldest_full};
use perfmon_abi::{CompactArg, CompactHeader, DefaultArg, DefaultEntry, Record, consts as pfm};

use super::super::model::Model;
use super::super::model::format::{Asked, Double, Format, MOST, NUM_PMDS};
use super::super::model::puppet::Answer;
use super::spy::{Notes, Puppet, Spy};
use super::{Sampling, Setup};

pub(crate) struct Buffer {
    spy: Option<Arc<Spy>>,
    /// A reader of the compact format who looks often.
    reader: Cursor,
    read: usize,
}

impl Buffer {
    /// The buffer, the context's format, and the model's.
    pub(crate) fn new(setup: &Setup) -> (Self, Option<Sampler>, Option<Format>) {
        let (of, arg, format) = parts(&setup.sampling);
        let spy = of.map(|of| Arc::new(Spy::new(of)));
        let sampler = spy.clone().map(|spy| {
            let made = Made {
                ctx_flags: setup.flags,
                num_pmds: u16::try_from(NUM_PMDS).expect("few PMDs"),
                arg: &arg,
            };
            assert_eq!(arg.len(), spy.arg_size());
            spy.validate(&made).expect("it is valid");
            let size = spy.size(&made).expect("a size");
            let buffer = Box::new(vec![0; size]);
            Sampler::new(spy, &made, buffer).expect("a sampler")
        });
        let buffer = Buffer {
            spy,
            reader: Cursor::default(),
            read: 0,
        };
        (buffer, sampler, format)
    }

    pub(crate) fn compare(&mut self, model: &Model) {
        let Some(spy) = &self.spy else {
            return;
        };
        let notes = spy.notes();
        assert_eq!(notes.asked, model.asked);
        assert_eq!(notes.exits, 0);
        match model.format.as_ref().expect("a format") {
            Format::Puppet(_, given) if notes.buffer.is_empty() => assert_eq!(*given, 0),
            Format::Puppet(_, given) => assert_eq!(notes.buffer, given.to_le_bytes()),
            Format::Default(bytes) => assert_eq!(notes.buffer, *bytes),
            Format::Double(double) => same_halves(&notes.buffer, double),
            Format::Compact(compact) => {
                let header = CompactHeader::get(&notes.buffer);
                assert_eq!(header.sequence, compact.blocks);
                assert_eq!(header.samples, compact.samples.len() as u64);
                let (samples, lost) = follow(&mut self.reader, &notes);
                assert_eq!(lost, 0);
                assert_eq!(samples, written(&compact.samples[self.read..]));
                self.read = compact.samples.len();
            }
        }
    }

    /// The context is gone: its format was told once. Who reads the compact format
    /// only now has the end, and knows how much is missing.
    pub(crate) fn finish(&self, model: &Model) {
        let Some(spy) = &self.spy else {
            return;
        };
        let notes = spy.notes();
        assert_eq!(notes.exits, 1);
        if let Some(Format::Compact(compact)) = &model.format {
            let (samples, lost) = follow(&mut Cursor::default(), &notes);
            let lost = usize::try_from(lost).expect("a number of samples");
            assert_eq!(samples, written(&compact.samples[lost..]));
        }
    }
}

type Parts = (Option<Arc<dyn SamplingFormat>>, Vec<u8>, Option<Format>);

/// The format, its argument, and what the model makes of it.
fn parts(sampling: &Sampling) -> Parts {
    let sized = |flags: u32, size: usize| {
        let arg = DefaultArg {
            buf_size: size as u64,
            buf_flags: flags,
        };
        arg.to_bytes()
    };
    match sampling {
        Sampling::None => (None, Vec::new(), None),
        Sampling::Puppet(script, only_set_0) => {
            let script: Vec<Answer> = script.iter().map(|&byte| Answer::of(byte)).collect();
            let puppet = Puppet {
                script: script.clone(),
                only_set_0: *only_set_0,
            };
            let format = Format::Puppet(script, 0);
            (Some(Arc::new(puppet)), Vec::new(), Some(format))
        }
        &Sampling::Default(flags, extra) => {
            let size = 40 + MOST + extra;
            let format = Format::default_format(flags, size);
            let arg = sized(flags, size);
            (Some(Arc::new(DefaultFormat)), arg, Some(format))
        }
        &Sampling::Double(flags, extra) => {
            let size = Double::HEADER + 2 * MOST + extra;
            let format = Format::double(flags, size);
            (
                Some(Arc::new(DoubleFormat)),
                sized(flags, size),
                Some(format),
            )
        }
        &Sampling::Compact(extra, blocks) => {
            let block = (24 + MAX_SAMPLE + extra).next_multiple_of(8);
            // The writer's notes take less than 2 KiB.
            let arg = CompactArg {
                buf_size: (2048 + blocks.max(2) * block) as u64,
                block_size: u32::try_from(block).expect("a small block"),
                flags: 0,
            };
            let format = Format::compact(block);
            (Some(Arc::new(CompactFormat)), arg.to_bytes(), Some(format))
        }
    }
}

fn same_halves(buffer: &[u8], model: &Double) {
    let header = double_header(buffer).expect("the header");
    assert_eq!(header.flags, model.flags);
    assert_eq!(header.buf_size, model.size as u64);
    assert_eq!(header.half_size, model.half_size() as u64);
    assert_eq!(header.overflows, model.overflows);
    assert_eq!(header.lost, model.lost);
    for (n, half) in model.halves.iter().enumerate() {
        let state = match (half.given, model.active == Some(n)) {
            (true, _) => pfm::PFM_DOUBLE_HALF_FULL,
            (false, true) => pfm::PFM_DOUBLE_HALF_ACTIVE,
            (false, false) => pfm::PFM_DOUBLE_HALF_FREE,
        };
        assert_eq!(header.state[n], state);
        assert_eq!(header.filling[n], half.filling);
        let bytes = half.samples.concat();
        let begin = Double::HEADER + n * model.half_size();
        let end = begin + bytes.len();
        assert_eq!(header.offs[n], begin as u64);
        assert_eq!(header.cur_offs[n], end as u64);
        assert_eq!(header.count[n], half.samples.len() as u64);
        assert_eq!(&buffer[begin..end], bytes);
    }
    let given = (0..2).filter(|&n| model.halves[n].given);
    let oldest = given.min_by_key(|&n| model.halves[n].filling);
    assert_eq!(oldest_full(&header), oldest);
}

/// Samples that a reader gets, and how many it has missed.
fn follow(reader: &mut Cursor, notes: &Notes) -> (Vec<Sample>, u64) {
    let batch = reader
        .follow(&mut |at, to| {
            let from = at
                .checked_add(to.len())
                .and_then(|end| notes.buffer.get(at..end));
            from.inspect(|from| to.copy_from_slice(from)).is_some()
        })
        .expect("a sound ring");
    assert_eq!(batch.damaged, []);
    (batch.samples, batch.lost)
}

fn written(samples: &[(Asked, Moment)]) -> Vec<Sample> {
    let sample = |(asked, moment): &(Asked, Moment)| Sample {
        ip: Some(moment.ip),
        entry: Some(DefaultEntry {
            pid: moment.vm,
            tid: moment.vcpu,
            ovfl_pmd: asked.pmd,
            set: asked.set,
            cpu: moment.core,
            last_reset_val: asked.last,
            tstamp: moment.tsc,
            ip: moment.ip,
        }),
        eventid: Some(asked.eventid),
        values: asked.values.clone(),
        ..Sample::default()
    };
    samples.iter().map(sample).collect()
}
