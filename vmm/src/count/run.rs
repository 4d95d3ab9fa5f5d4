//! One run of a job, from the snapshot on.

use emu::{NotAnnounced, Observer};

use super::end::{End, RunFailure};
use super::guest::{Guest, Stop};
use super::image::MachineImage;
use super::limits::{Limits, Pauses};

/// Who looks on.
#[derive(Debug)]
pub struct Looks {
    /// It is told what is executed.
    pub observer: Box<dyn Observer>,
    /// And when the guest's kernel comes to one of these linear addresses.
    pub places: Vec<u64>,
}

/// What is left of a run.
#[derive(Debug)]
pub struct JobRan<F> {
    /// How it ended.
    pub end: End,
    /// Who served files.
    pub serve: F,
    /// Who looked on, if somebody did.
    pub observer: Option<Box<dyn Observer>>,
    /// The last that the guest's kernel said on its console; mostly nothing.
    pub console: String,
    /// The first process that the guest's kernel ended for want of memory, in its words.
    pub out_of_memory: Option<String>,
    /// Instructions that raised #UD since the processor does not have them, each once.
    pub unannounced: Vec<NotAnnounced>,
    /// Instructions of the kernel and of programs, from the snapshot on, whoever executed them.
    pub instructions: [u64; 2],
    /// Virtual time from the snapshot on, in nanoseconds.
    pub virtual_ns: u64,
}

impl MachineImage {
    /// Runs one job from the snapshot on. `serve` answers requests for files; the first thing
    /// it is asked for is the job. `looks` changes nothing of the guest.
    ///
    /// # Errors
    /// [`RunFailure`]: nothing has run.
    pub fn run<F>(
        &self,
        serve: F,
        limits: Limits,
        looks: Option<Looks>,
    ) -> Result<JobRan<F>, RunFailure>
    where
        F: FnMut(&[u8], &mut Vec<u8>) + Send + 'static,
    {
        let memory = self.snapshot.map()?;
        let mut guest = Guest::new(memory, None, self.signals, serve, limits, Pauses::Never)?;
        guest.restore(&self.snapshot.saved)?;
        if let Some(Looks { observer, places }) = looks {
            guest.observe(Some(observer), &places);
        }
        let began = guest.now();
        let end = loop {
            match guest.run() {
                Stop::Paused => {}
                Stop::Ended(end) => break end,
                Stop::Ready => {
                    break End::Lost("its first program was ready a second time".to_owned());
                }
            }
        };
        let said = guest.said();
        let Some(serve) = guest.take_server() else {
            unreachable!("it is taken back once, here");
        };
        Ok(JobRan {
            end,
            serve,
            observer: guest.observe(None, &[]),
            console: String::from_utf8_lossy(&said.tail).into_owned(),
            out_of_memory: said.out_of_memory,
            unannounced: guest.unannounced().to_vec(),
            instructions: guest.executed(),
            virtual_ns: guest.now() - began,
        })
    }
}
