//! Names for samples while a VM runs: those of a file, or those that the guest's own kernel
//! has in its memory.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use perfmon_abi::wire::kernel::KernelRequest;

use crate::find::connect;
use crate::profile::symbols::{SymbolTable, parse};
use crate::profile::{Ring, Sample};

/// How long the VM is left alone after an answer without names; twice as long each time.
const FIRST: Duration = Duration::from_secs(1);
/// At most so long. Where there are names, modules may still come.
const MOST: Duration = Duration::from_secs(60);

/// The symbols of a guest's kernel, as far as they are known by now.
#[derive(Debug)]
pub(super) struct Names {
    socket: PathBuf,
    symbols: Arc<SymbolTable>,
    /// The user gave them.
    given: bool,
    /// Who asks the VM.
    asking: Option<JoinHandle<Option<SymbolTable>>>,
    /// Nobody asks before.
    next: Instant,
    pause: Duration,
}

impl Names {
    /// Those of a file, or of the guest behind `socket`.
    pub(super) fn new(socket: &Path, given: Option<Arc<SymbolTable>>) -> Self {
        Self {
            socket: socket.to_owned(),
            given: given.is_some(),
            symbols: given.unwrap_or_default(),
            asking: None,
            next: Instant::now(),
            pause: FIRST,
        }
    }

    /// The symbols. Samples that these do not name make the VM be asked, which takes a while.
    pub(super) fn of(&mut self, samples: &[Sample]) -> &SymbolTable {
        if !self.given {
            self.take_answer();
            // What runs before the kernel has neither its place nor its page tables.
            let in_kernel = |sample: &&Sample| sample.ring == Some(Ring::Kernel);
            let high = samples.iter().rev().filter(in_kernel);
            let mut high = high.filter(|sample| sample.ip >> 63 != 0);
            let unnamed = high.find(|sample| self.symbols.find(sample.ip).is_none());
            if let Some(cr3) = unnamed.and_then(|sample| sample.cr3) {
                self.ask(cr3);
            }
        }
        &self.symbols
    }

    fn take_answer(&mut self) {
        let answered = self.asking.as_ref().is_some_and(JoinHandle::is_finished);
        let Some(thread) = self.asking.take_if(|_| answered) else {
            return;
        };
        self.pause = match thread.join() {
            Ok(Some(symbols)) => {
                self.symbols = Arc::new(symbols);
                MOST
            }
            _ => (self.pause * 2).min(MOST),
        };
        self.next = Instant::now() + self.pause;
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
