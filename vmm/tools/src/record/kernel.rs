//! Names for the samples of the guest's kernel, out of its own memory.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use perfmon_abi::wire::kernel::KernelRequest;
use umpire_perfmon::Client;

use crate::Vm;
use crate::find::connect;
use crate::profile::symbols::{SymbolTable, parse};
use crate::profile::{Record, Ring};

/// Most addresses that are remembered. A kernel has not half as many instructions that a
/// profile hits more than once.
const MOST: usize = 1 << 20;
/// How long the VM is left alone after an answer without names.
const AGAIN: Duration = Duration::from_secs(1);

/// The addresses that need names, and who gives them.
#[derive(Debug)]
pub(super) struct KernelNames {
    socket: PathBuf,
    hits: BTreeSet<u64>,
    /// That of the last sample in the kernel.
    cr3: Option<u64>,
    /// Who asks already: the VM may end before this program does.
    early: Option<JoinHandle<Option<String>>>,
    /// What was answered.
    found: Option<String>,
    /// It was answered for a file before this one: modules may have come since.
    stale: bool,
    /// Nobody asks before.
    next: Instant,
}

impl KernelNames {
    pub(super) fn new(vm: &Vm) -> Self {
        Self {
            socket: vm.socket.clone(),
            hits: BTreeSet::new(),
            cr3: None,
            early: None,
            found: None,
            stale: false,
            next: Instant::now(),
        }
    }

    /// Takes note of what is in the kernel.
    pub(super) fn take(&mut self, records: &[Record]) {
        for record in records {
            let Record::Sample(sample) = record else {
                continue;
            };
            let room = MOST.saturating_sub(self.hits.len());
            let callers = sample.guest.chain.kernel.iter().copied();
            self.hits.extend(callers.take(room));
            if sample.ring != Some(Ring::Kernel) {
                continue;
            }
            if self.hits.len() < MOST {
                self.hits.insert(sample.ip);
            }
            // What runs before the kernel has neither its place nor its page tables.
            self.cr3 = sample.cr3.filter(|_| sample.ip >> 63 != 0).or(self.cr3);
        }
        self.ask_early();
    }

    /// Asks, or asks again after a while if the last answer had no names: a kernel that has
    /// just begun has not said yet where they are.
    fn ask_early(&mut self) {
        let answered = self.early.as_ref().is_some_and(JoinHandle::is_finished);
        if let Some(thread) = self.early.take_if(|_| answered) {
            self.found = thread.join().ok().flatten().or(self.found.take());
            self.stale = false;
        }
        let now = Instant::now();
        let is_found = self.found.is_some() && !self.stale;
        let waits = self.early.is_some() || is_found || now < self.next;
        let Some(cr3) = self.cr3.filter(|_| !waits) else {
            return;
        };
        self.next = now + AGAIN;
        let socket = self.socket.clone();
        let ask = move || ask(&connect(&socket).ok()?, cr3);
        // Without a thread the end has to do.
        self.early = Builder::new().name("names".to_owned()).spawn(ask).ok();
    }

    /// The symbols that the addresses need, in the form of `/proc/kallsyms`; nothing where
    /// nobody knows the kernel. Modules may have come since the first sample, so the VM is
    /// asked again while it is there.
    pub(super) fn text(&mut self, vm: &Vm) -> String {
        let now = self.cr3.and_then(|cr3| ask(&vm.client, cr3));
        let early = self.early.take();
        let early = early.and_then(|thread| thread.join().ok().flatten());
        let all = now.or(early).or_else(|| self.found.take());
        all.map_or_else(String::new, |all| needed(&all, &self.hits))
    }

    /// The same for a file that ends while the recording goes on: what was answered last, for
    /// samples are not to wait. From then on addresses are those of the next file.
    pub(super) fn text_of_file(&mut self, vm: &Vm) -> String {
        let hits = std::mem::take(&mut self.hits);
        if self.found.is_none()
            && let Some(thread) = self.early.take()
        {
            self.found = thread.join().ok().flatten();
        }
        if self.found.is_none() {
            self.found = self.cr3.and_then(|cr3| ask(&vm.client, cr3));
        }
        (self.stale, self.next) = (true, Instant::now());
        let all = self.found.as_deref().filter(|_| !hits.is_empty());
        all.map_or_else(String::new, |all| needed(all, &hits))
    }
}

/// Those of all symbols that these addresses need.
fn needed(all: &str, hits: &BTreeSet<u64>) -> String {
    let symbols = parse(all.as_bytes()).ok();
    symbols.map_or_else(String::new, |raw| {
        SymbolTable::new(raw, 0).of_addresses(hits)
    })
}

fn ask(client: &Client, cr3: u64) -> Option<String> {
    // Of a guest without Linux, or with an old one, nobody expects names.
    let kernel = client.kernel(&KernelRequest { cr3 });
    kernel.ok().map(|kernel| kernel.kallsyms)
}
