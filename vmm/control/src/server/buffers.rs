//! Makes sampling buffers and gives their memory back, on a thread of its own: it takes the
//! kernel a while to find so much memory, and nobody else is to wait for that.

use std::io;
use std::sync::mpsc::{Sender, channel};
use std::thread::Builder;

use perfmon_abi::wire::Refusal;

use crate::buffer::{Pool, SharedBuffer, Task, none};
use crate::job::{Outbox, Report};

/// Makes buffers. What was dropped before somebody asks is given back before that.
#[derive(Debug)]
pub(super) struct BufferKeeper {
    pool: Pool,
    outbox: Outbox,
    /// Its thread, once it was needed. It ends after the last buffer.
    tasks: Option<Sender<Task>>,
}

impl BufferKeeper {
    /// Its reports go to `outbox`.
    pub(super) fn new(outbox: Outbox) -> Self {
        Self {
            pool: Pool::default(),
            outbox,
            tasks: None,
        }
    }

    /// Whether there is room for a buffer of `size` bytes now; some may be about to come back.
    pub(super) fn has_room(&self, size: usize, most: u64) -> bool {
        self.pool.used().saturating_add(size as u64) <= most
    }

    /// Has a buffer of `size` bytes made, while all together have no more than `most`;
    /// [`Report::Buffer`] has it, or why there is none, by this number.
    ///
    /// # Errors
    /// ENOMEM: there is no thread for it.
    pub(super) fn make(&mut self, number: u64, size: usize, most: u64) -> Result<(), Refusal> {
        let tasks = match &self.tasks {
            Some(tasks) => tasks.clone(),
            None => self.start().map_err(|error| none(size, error))?,
        };
        let sent = tasks.send(Task::Make(number, size, most, tasks.clone()));
        sent.map_err(|_| none(size, "the thread that makes them has failed"))
    }

    fn start(&mut self) -> io::Result<Sender<Task>> {
        let (tasks, todo) = channel();
        let (pool, outbox) = (self.pool.clone(), self.outbox.clone());
        let work = move || {
            for task in todo {
                match task {
                    Task::Make(number, size, most, keeper) => {
                        let made = SharedBuffer::new(size, (&pool, most), Some(keeper));
                        outbox.send(Report::Buffer(number, made));
                    }
                    Task::GiveBack(memory) => drop(memory),
                }
            }
        };
        Builder::new()
            .name("control-buffers".to_owned())
            .spawn(work)?;
        self.tasks = Some(tasks.clone());
        Ok(tasks)
    }

    /// The VM ends: its last samples stay with who has them mapped.
    pub(super) fn end(&self) {
        self.pool.end();
    }
}
