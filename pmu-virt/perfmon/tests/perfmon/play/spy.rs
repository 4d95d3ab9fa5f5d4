//! A sampling format as it is, with somebody who looks at what it is told and at
//! what it leaves in the buffer.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use perfmon::{Control, Moment, OverflowArg, SamplingFormat, Setup};
use perfmon_abi::wire::{Errno, Refusal};

use super::super::model::format::Asked;
use super::super::model::puppet::Answer;

/// What was seen of a format.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    pub(crate) asked: Vec<Asked>,
    pub(crate) buffer: Vec<u8>,
    pub(crate) exits: usize,
}

#[derive(Debug)]
pub(crate) struct Spy {
    pub(crate) of: Arc<dyn SamplingFormat>,
    notes: Mutex<Notes>,
}

impl Spy {
    pub(crate) fn new(of: Arc<dyn SamplingFormat>) -> Self {
        Spy {
            of,
            notes: Mutex::default(),
        }
    }

    pub(crate) fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self, buffer: &[u8]) {
        buffer.clone_into(&mut self.notes().buffer);
    }
}

impl SamplingFormat for Spy {
    fn name(&self) -> &str {
        self.of.name()
    }
    fn uuid(&self) -> [u8; 16] {
        self.of.uuid()
    }
    fn arg_size(&self) -> usize {
        self.of.arg_size()
    }
    fn queue_depth(&self) -> usize {
        self.of.queue_depth()
    }
    fn only_set_0(&self) -> bool {
        self.of.only_set_0()
    }
    fn validate(&self, setup: &Setup<'_>) -> Result<(), Refusal> {
        self.of.validate(setup)
    }
    fn size(&self, setup: &Setup<'_>) -> Result<usize, Refusal> {
        self.of.size(setup)
    }
    fn init(&self, setup: &Setup<'_>, buffer: &mut [u8]) -> Result<(), Refusal> {
        let result = self.of.init(setup, buffer);
        self.look(buffer);
        result
    }

    fn handler(
        &self,
        buffer: &mut [u8],
        arg: &mut OverflowArg<'_>,
        moment: &Moment,
    ) -> Result<(), Refusal> {
        let pmds: Vec<u16> = arg.smpl_pmds.iter().collect();
        assert_eq!(pmds.len(), arg.values.len());
        let values = arg.values.iter().copied();
        self.notes().asked.push(Asked {
            pmd: arg.ovfl_pmd,
            set: arg.active_set,
            last: arg.last_reset,
            value: arg.value,
            eventid: arg.eventid,
            notify: arg.notify,
            values: pmds.into_iter().zip(values).collect(),
        });
        let result = self.of.handler(buffer, arg, moment);
        self.look(buffer);
        result
    }

    fn restart(
        &self,
        buffer: &mut [u8],
        active: bool,
        control: &mut Control,
    ) -> Result<(), Refusal> {
        let result = self.of.restart(buffer, active, control);
        self.look(buffer);
        result
    }

    fn exit(&self, buffer: &mut [u8]) {
        self.notes().exits += 1;
        self.of.exit(buffer);
    }
}

/// A format that answers as a script says. Its buffer counts the answers.
#[derive(Debug)]
pub(crate) struct Puppet {
    pub(crate) script: Vec<Answer>,
    pub(crate) only_set_0: bool,
}

impl Puppet {
    /// Bytes of its buffer.
    pub(crate) const SIZE: usize = 8;

    fn answer(&self, buffer: &mut [u8], control: &mut Control) -> Result<(), Refusal> {
        let given = buffer.first_chunk_mut().expect("a buffer of 8 bytes");
        let mut next = usize::from_le_bytes(*given);
        let answer = Answer::next(&self.script, &mut next);
        *given = next.to_le_bytes();
        *control = Control {
            notify_user: answer.notify,
            reset_ovfl_pmds: answer.reset,
            block_thread: answer.block,
            mask_monitoring: answer.mask,
        };
        if answer.fail {
            return Err(Refusal::new(Errno::EBUSY, "the script says so"));
        }
        Ok(())
    }
}

impl SamplingFormat for Puppet {
    fn name(&self) -> &'static str {
        "puppet"
    }
    fn uuid(&self) -> [u8; 16] {
        [9; 16]
    }
    fn only_set_0(&self) -> bool {
        self.only_set_0
    }
    fn size(&self, _: &Setup<'_>) -> Result<usize, Refusal> {
        Ok(Self::SIZE)
    }
    fn handler(
        &self,
        buffer: &mut [u8],
        arg: &mut OverflowArg<'_>,
        _: &Moment,
    ) -> Result<(), Refusal> {
        self.answer(buffer, &mut arg.control)
    }
    fn restart(&self, buffer: &mut [u8], _: bool, control: &mut Control) -> Result<(), Refusal> {
        self.answer(buffer, control)
    }
}
