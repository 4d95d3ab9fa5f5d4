//! Formats come and go while contexts are alive (§3.5.8, §3.5.9).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use perfmon_abi::consts::{COMPACT_FORMAT, DEFAULT_FORMAT, DOUBLE_FORMAT};
use perfmon_abi::wire::{Errno, Refusal};

use super::{arg, setup};
use crate::format::{Control, DefaultFormat, FormatRegistry, OverflowArg, Sampler, SamplingFormat};
use crate::moment::Moment;

/// A format without a buffer, made at run time; says when a context ends.
#[derive(Debug, Default)]
struct Counting {
    name: &'static str,
    handled: AtomicU32,
    ended: AtomicU32,
}

impl SamplingFormat for Counting {
    fn name(&self) -> &str {
        self.name
    }
    fn uuid(&self) -> [u8; 16] {
        [7; 16]
    }
    fn handler(&self, _: &mut [u8], _: &mut OverflowArg<'_>, _: &Moment) -> Result<(), Refusal> {
        self.handled.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
    fn exit(&self, _: &mut [u8]) {
        self.ended.fetch_add(1, Ordering::Relaxed);
    }
}

fn errno<T>(result: Result<T, Refusal>) -> Result<(), Errno> {
    result.map(|_| ()).map_err(|refusal| refusal.errno)
}

#[test]
fn every_machine_has_three_formats() {
    let registry = FormatRegistry::with_builtin();
    let names: Vec<_> = registry.all().iter().map(|f| f.name().to_owned()).collect();
    assert_eq!(names, ["default", "double", "compact"]);
    for uuid in [DEFAULT_FORMAT, DOUBLE_FORMAT, COMPACT_FORMAT] {
        let found = registry.find(uuid);
        assert_eq!(found.map(|format| format.uuid()), Some(uuid));
    }
    assert!(registry.find([0; 16]).is_none());
    let again = registry.register(Arc::new(DefaultFormat));
    assert_eq!(errno(again), Err(Errno::EBUSY));
}

#[test]
fn a_format_needs_a_name() {
    let registry = FormatRegistry::default();
    let nameless = registry.register(Arc::new(Counting::default()));
    assert_eq!(errno(nameless), Err(Errno::EINVAL));
}

#[test]
fn a_context_keeps_its_format_after_it_was_removed() {
    let registry = FormatRegistry::with_builtin();
    let format = Arc::new(Counting {
        name: "counting",
        ..Counting::default()
    });
    let added: Arc<dyn SamplingFormat> = Arc::<Counting>::clone(&format);
    assert_eq!(errno(registry.register(added)), Ok(()));
    let found = registry.find([7; 16]).expect("it was added");
    let sampler = Sampler::new(found, &setup(&[]), Box::new(Vec::new()));
    let mut sampler = sampler.expect("it has no buffer");
    assert_eq!(errno(registry.unregister([7; 16])), Ok(()));
    assert_eq!(errno(registry.unregister([7; 16])), Err(Errno::EINVAL));
    assert!(registry.find([7; 16]).is_none());
    // The context goes on with it, and so does one with another format.
    let mut arg = OverflowArg {
        ovfl_pmd: 0,
        active_set: 0,
        last_reset: 0,
        value: 0,
        eventid: 0,
        notify: false,
        smpl_pmds: crate::PmdBits::EMPTY,
        values: &[],
        guest: None,
        num_pmds: 8,
        control: Control::default(),
    };
    let buffer = sampler.buffer.bytes();
    let handled = sampler.format.handler(buffer, &mut arg, &super::moment(1));
    assert_eq!(errno(handled), Ok(()));
    assert_eq!(format.handled.load(Ordering::Relaxed), 1);
    assert_eq!(format.ended.load(Ordering::Relaxed), 0);
    drop(sampler);
    assert_eq!(format.ended.load(Ordering::Relaxed), 1);
    let sampled = super::Bench::new(DefaultFormat, &super::arg(4096, 0));
    assert!(sampled.is_ok());
}

#[test]
fn a_sampler_with_a_buffer_that_is_too_small_is_refused() {
    let arg = arg(4096, 0);
    let sampler = Sampler::new(
        Arc::new(DefaultFormat),
        &setup(&arg),
        Box::new(vec![0; 4095]),
    );
    assert_eq!(errno(sampler), Err(Errno::EINVAL));
}
