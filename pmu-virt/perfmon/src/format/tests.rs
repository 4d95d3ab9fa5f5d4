//! The built-in formats, each driven as a context drives it.

mod compact;
mod default;
mod double;
mod registry;

use perfmon_abi::wire::Errno;
use perfmon_abi::{DefaultArg, Record};
use pmu_model::Ring;

use super::{Control, OverflowArg, SamplingFormat, Setup};
use crate::bits::PmdBits;
use crate::moment::Moment;

/// PMDs of the PMU that the tests assume.
const PMDS: u16 = 8;

/// A format with its buffer.
#[derive(Debug)]
struct Bench<F> {
    format: F,
    buffer: Vec<u8>,
    tsc: u64,
}

/// What overflows: PMD and set, whether it notifies, and what is recorded.
#[derive(Clone, Debug)]
struct Event {
    pmd: u16,
    set: u16,
    notify: bool,
    values: Vec<(u16, u64)>,
}

fn event(pmd: u16, values: &[(u16, u64)]) -> Event {
    Event {
        pmd,
        set: 0,
        notify: true,
        values: values.to_vec(),
    }
}

fn setup(arg: &[u8]) -> Setup<'_> {
    Setup {
        ctx_flags: 0,
        num_pmds: PMDS,
        arg,
    }
}

fn moment(tsc: u64) -> Moment {
    Moment {
        tsc,
        ip: 0xffff_8000_0000_0000 + tsc,
        ring: Ring::Kernel,
        cr3: 0,
        vm: 42,
        vcpu: 1,
        core: 2,
    }
}

impl<F: SamplingFormat> Bench<F> {
    /// As PFM_CREATE_CONTEXT does it.
    fn new(format: F, arg: &[u8]) -> Result<Self, Errno> {
        let setup = setup(arg);
        let errno = |refusal: perfmon_abi::wire::Refusal| refusal.errno;
        format.validate(&setup).map_err(errno)?;
        let mut buffer = vec![0; format.size(&setup).map_err(errno)?];
        format.init(&setup, &mut buffer).map_err(errno)?;
        Ok(Bench {
            format,
            buffer,
            tsc: 0,
        })
    }

    /// One overflow at a new time.
    fn overflow(&mut self, event: &Event) -> Control {
        self.tsc += 1;
        self.same_interrupt(event)
    }

    /// One more at the same time.
    fn same_interrupt(&mut self, event: &Event) -> Control {
        let values: Vec<u64> = event.values.iter().map(|&(_, value)| value).collect();
        let smpl_pmds: PmdBits = event.values.iter().map(|&(pmd, _)| pmd).collect();
        let mut arg = OverflowArg {
            ovfl_pmd: event.pmd,
            active_set: event.set,
            last_reset: 1000u64.wrapping_neg(),
            value: 3,
            eventid: 0,
            notify: event.notify,
            smpl_pmds,
            values: &values,
            guest: None,
            num_pmds: PMDS,
            control: Control::default(),
        };
        let handled = self
            .format
            .handler(&mut self.buffer, &mut arg, &moment(self.tsc));
        assert!(handled.is_ok());
        arg.control
    }

    fn restart(&mut self, active: bool) -> Control {
        let mut control = Control::default();
        let restarted = self.format.restart(&mut self.buffer, active, &mut control);
        assert!(restarted.is_ok());
        control
    }
}

fn arg(buf_size: usize, buf_flags: u32) -> Vec<u8> {
    let buf_size = u64::try_from(buf_size).unwrap_or(u64::MAX);
    DefaultArg {
        buf_size,
        buf_flags,
    }
    .to_bytes()
}

/// Buffers that are too short for anything end in an error, not in a panic.
fn survives_any_buffer<F: SamplingFormat>(format: &F) {
    for len in [0, 1, 39, 40, 47, 48, 112, 200, 4000] {
        for fill in [0, 1, 0x7f, 0xff] {
            let mut buffer = vec![fill; len];
            let mut arg = OverflowArg {
                ovfl_pmd: 1,
                active_set: 0,
                last_reset: 0,
                value: 0,
                eventid: 0,
                notify: true,
                smpl_pmds: PmdBits::EMPTY,
                values: &[7; 3],
                guest: None,
                num_pmds: PMDS,
                control: Control::default(),
            };
            let _ = format.handler(&mut buffer, &mut arg, &moment(1));
            let _ = format.restart(&mut buffer, false, &mut Control::default());
            format.exit(&mut buffer);
        }
    }
}
