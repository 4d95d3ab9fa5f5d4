//! The compact format: which sample begins a block (`perfmon_abi::compact`).

use std::collections::BTreeMap;

use perfmon::Moment;

use super::format::{Asked, GO_ON};
use super::puppet::Answer;
use super::words;

#[derive(Clone, Debug, Default)]
pub(crate) struct Compact {
    block: usize,
    /// Bytes of the present block that samples take.
    used: usize,
    pub(crate) blocks: u64,
    pub(crate) samples: Vec<(Asked, Moment)>,
    /// The sample before, and the last value of each PMD, in this block.
    before: Option<(Asked, Moment)>,
    values: BTreeMap<u16, u64>,
}

impl Compact {
    const BLOCK_HEADER: usize = 24;

    pub(super) fn new(block: usize) -> Self {
        Compact {
            block,
            blocks: 1,
            ..Compact::default()
        }
    }

    pub(super) fn handle(&mut self, asked: &Asked, moment: &Moment) -> Answer {
        let mut notify = false;
        if Self::BLOCK_HEADER + self.used + self.length(asked, moment) > self.block {
            notify = true;
            self.blocks += 1;
            self.used = 0;
            self.before = None;
            self.values.clear();
        }
        self.used += self.length(asked, moment);
        self.values.extend(asked.values.iter().copied());
        self.before = Some((asked.clone(), *moment));
        self.samples.push((asked.clone(), *moment));
        Answer { notify, ..GO_ON }
    }

    /// Bytes that the sample takes in this block.
    fn length(&self, asked: &Asked, moment: &Moment) -> usize {
        let nothing = Asked {
            pmd: 0,
            set: 0,
            last: 0,
            value: 0,
            eventid: 0,
            notify: false,
            values: Vec::new(),
        };
        let number = |value: u64| (64 - value.leading_zeros()).div_ceil(7).max(1) as usize;
        let difference = |new: u64, old: u64| {
            let signed = new.wrapping_sub(old).cast_signed();
            let folded = if signed < 0 {
                // -1 is 1, -2 is 3.
                (-1 - signed).cast_unsigned() * 2 + 1
            } else {
                signed.cast_unsigned() * 2
            };
            number(folded)
        };
        let place = |at: &Moment| {
            [
                at.vm.cast_unsigned(),
                at.vcpu.cast_unsigned(),
                at.core.into(),
            ]
        };
        let (old, at) = match &self.before {
            Some((asked, moment)) => (asked, (moment.tsc, moment.ip, place(moment))),
            None => (&nothing, (0, 0, [0; 3])),
        };
        let mut length = 1 + difference(moment.tsc, at.0) + difference(moment.ip, at.1);
        let source = |of: &Asked| [of.set.into(), of.pmd.into(), of.eventid];
        if source(asked) != source(old) {
            length += source(asked).map(number).iter().sum::<usize>();
        }
        if place(moment) != at.2 {
            let parts = place(moment).map(|part| number(part.into()));
            length += parts.iter().sum::<usize>();
        }
        if asked.last != old.last {
            length += difference(asked.last, old.last);
        }
        let body = |of: &Asked| words(&of.values.iter().map(|&(pmd, _)| pmd).collect());
        if body(asked) != body(old) {
            length += body(asked).map(number).iter().sum::<usize>();
        }
        for &(pmd, value) in &asked.values {
            length += difference(value, self.values.get(&pmd).copied().unwrap_or(0));
        }
        length
    }
}
