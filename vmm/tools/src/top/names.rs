//! Names for samples while a VM runs: symbols of a file, or those that the guest's own kernel
//! has in its memory, and the guest's tasks.

use std::path::{Path, PathBuf};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use perfmon_abi::wire::kernel::KernelRequest;

use crate::find::connect;
use crate::profile::names::Names;
use crate::profile::programs::Programs;
use crate::profile::symbols::{SymbolTable, parse};
use crate::profile::{Record, Ring, Sample};

/// How long the VM is left alone after an answer without names; twice as long each time.
const FIRST: Duration = Duration::from_secs(1);
/// Tasks and mappings that are kept; a VM keeps fewer.
const MOST_DESCRIBED: usize = 1 << 17;
/// At most so long. Where there are names, modules may still come.
const MOST: Duration = Duration::from_secs(60);

/// The names of what a guest runs, as far as they are known by now.
#[derive(Debug)]
pub(super) struct GuestNames {
    socket: PathBuf,
    names: Names,
    described: usize,
    /// The user gave the symbols.
    given: bool,
    /// The VM has told them.
    told: bool,
    /// Who asks the VM.
    asking: Option<JoinHandle<Option<SymbolTable>>>,
    /// Nobody asks before.
    next: Instant,
    pause: Duration,
}

impl GuestNames {
    /// Symbols of a file, or of the guest behind `socket`.
    pub(super) fn new(socket: &Path, given: Option<SymbolTable>) -> Self {
        Self {
            socket: socket.to_owned(),
            given: given.is_some(),
            told: false,
            names: Names::new(given.unwrap_or_default(), Programs::default(), None),
            described: 0,
            asking: None,
            next: Instant::now(),
            pause: FIRST,
        }
    }

    /// Takes in what the VM says of tasks and mappings. False: these are too many by now, and
    /// all were forgotten.
    pub(super) fn describe(&mut self, records: Vec<Record>) -> bool {
        for record in records {
            if let Record::Described(described) = record {
                self.described += 1;
                self.names.programs.add(described);
            }
        }
        let fits = self.described <= MOST_DESCRIBED;
        if !fits {
            self.described = 0;
            self.names.programs = Programs::default();
        }
        fits
    }

    /// Asks for the symbols that samples need.
    pub(super) fn look_for(&mut self, samples: &[Sample]) {
        if self.given {
            return;
        }
        self.take_answer();
        // What runs before the kernel has neither its place nor its page tables.
        let in_kernel = |sample: &&Sample| sample.ring == Some(Ring::Kernel);
        let mut high = samples
            .iter()
            .filter(in_kernel)
            .filter(|it| it.ip >> 63 != 0);
        let unnamed = high.find(|sample| self.names.kernel.find(sample.ip).is_none());
        if let Some(cr3) = unnamed.and_then(|sample| sample.cr3) {
            self.ask(cr3);
        }
    }

    /// Whether the kernel's symbols are here; asks for them if not.
    pub(super) fn are_there(&mut self, cr3: Option<u64>) -> bool {
        self.take_answer();
        let are_there = self.given || self.told;
        if let Some(cr3) = cr3.filter(|_| !are_there) {
            self.ask(cr3);
        }
        are_there
    }

    /// The names.
    pub(super) fn known(&mut self) -> &Names {
        self.take_answer();
        &self.names
    }

    fn take_answer(&mut self) {
        let answered = self.asking.as_ref().is_some_and(JoinHandle::is_finished);
        let Some(thread) = self.asking.take_if(|_| answered) else {
            return;
        };
        let pause = match thread.join() {
            Ok(Some(symbols)) => {
                (self.names.kernel, self.told) = (symbols, true);
                MOST
            }
            _ => self.pause,
        };
        self.pause = (pause * 2).min(MOST);
        self.next = Instant::now() + pause;
    }

    fn ask(&mut self, cr3: u64) {
        if self.asking.is_some() || Instant::now() < self.next {
            return;
        }
        let socket = self.socket.clone();
        let ask = move || {
            let kernel = connect(&socket).ok()?.kernel(&KernelRequest { cr3 });
            // Of a guest without Linux, or with an old one, nobody expects names.
            let raw = parse(kernel.ok()?.kallsyms.as_bytes()).ok()?;
            Some(SymbolTable::new(raw, 0))
        };
        // Without a thread there are no names.
        self.asking = Builder::new().name("names".to_owned()).spawn(ask).ok();
    }
}
