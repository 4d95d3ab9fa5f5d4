//! A Linux kernel that was found in a guest's memory: who it is, and its symbols.

use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use guest_exit::{GuestMemory, Paging};

use crate::btf::BtfError;
use crate::kallsyms;
use crate::kernel::Kernel;
use crate::module::Module;
use crate::note::Note;
use crate::paging::tables_of;
use crate::places::TaskPlaces;
use crate::space::Space;
use crate::symbols::Symbol;
use crate::unknown::Unknown;
use crate::unwind::OrcLookup;

/// Most bytes that are read, and as many that are kept: of the kernel, of all its modules,
/// and to find a processor. Debian's kernels take 20 MiB.
const KERNEL_BUDGET: usize = 256 << 20;
const MODULES_BUDGET: usize = 128 << 20;
const PROCESSORS_BUDGET: usize = 4 << 20;
/// Why a note leads to no kernel.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NoKernel {
    /// The note lacks what kernels have said since 6.0.
    #[error("the kernel {0} does not say where its symbols are; Linux 6.0 and later do")]
    Old(String),
    /// It describes other page tables than those that run.
    #[error("the note at {0:#x} is not that of the running kernel")]
    NotRunning(u64),
    /// Its symbols do not have the variable that would prove that the note is its own.
    #[error("the kernel {0} does not name its own data; one with CONFIG_KALLSYMS_ALL does")]
    Unproved(String),
    /// There are no symbols where it says.
    #[error("the kernel's symbols cannot be read")]
    Symbols,
}

/// A Linux kernel in a guest's memory: its symbols, its modules, and where it keeps what.
/// What it says was read once; a clone shares it.
#[derive(Clone)]
pub struct KernelView {
    pub(crate) kernel: Arc<Kernel>,
    modules: Arc<Modules>,
}

/// All modules at one moment.
#[derive(Default)]
struct Modules {
    /// In the kernel's order.
    listed: Vec<Arc<Module>>,
    /// Places in `listed`, by address.
    sorted: Vec<u32>,
}

impl fmt::Debug for KernelView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelView")
            .field("release", &self.release())
            .field("modules", &self.modules.listed.len())
            .finish_non_exhaustive()
    }
}

impl KernelView {
    /// The kernel that `note` is of; `cr3` is that of any vCPU that runs it, so that no
    /// program of the guest can pass for its kernel.
    ///
    /// Reads some 20 MiB of guest memory, and at most 384 MiB whatever is there: not for a
    /// vCPU's thread.
    ///
    /// # Errors
    /// It is no note of a kernel that runs, or the kernel is too old.
    pub fn of(memory: &dyn GuestMemory, note: Note, cr3: u64) -> Result<Self, NoKernel> {
        let old = || NoKernel::Old(note.release().unwrap_or("?").to_owned());
        let (paging, five_levels) = note.paging().ok_or_else(old)?;
        note.symbol("kallsyms_num_syms").ok_or_else(old)?;
        note.symbol("_stext").ok_or_else(old)?;
        let space = Space::new(memory, paging, KERNEL_BUDGET);
        let not_running = NoKernel::NotRunning(note.address);
        if !is_run_by(memory, &note, cr3) {
            return Err(not_running);
        }
        let symbols = kallsyms::read(&space, &note).ok_or(NoKernel::Symbols)?;
        // What the kernel has as its note is this one.
        let Some(own) = symbols.address("vmcoreinfo_note") else {
            return Err(NoKernel::Unproved(note.release().unwrap_or("?").to_owned()));
        };
        let own = space.u64(own).ok().and_then(|at| space.physical(at));
        if own != Some(note.address) {
            return Err(not_running);
        }
        let kernel = Kernel::read(&space, note, (paging, five_levels), symbols);
        let kernel = kernel.ok_or(NoKernel::Symbols)?;
        let view = Self {
            kernel: Arc::new(kernel),
            modules: Arc::default(),
        };
        Ok(view.refreshed(memory).unwrap_or(None).unwrap_or(view))
    }

    /// The kernel's release, as `uname -r` prints it.
    #[must_use]
    pub fn release(&self) -> &str {
        self.kernel.note.release().unwrap_or("?")
    }

    /// The note by which it was found.
    #[must_use]
    pub fn note(&self) -> &Note {
        &self.kernel.note
    }

    /// Where it switches, begins and replaces tasks.
    ///
    /// # Errors
    /// What it does not say.
    pub fn places(&self) -> Result<TaskPlaces, BtfError> {
        self.kernel.places.clone()
    }

    /// What cannot be known of this kernel, and why: unwind tables, tasks, mappings or
    /// modules.
    pub fn missing(&self) -> impl Iterator<Item = (&'static str, &BtfError)> {
        let kernel = &*self.kernel;
        [
            ("unwind tables", kernel.orc.as_ref().err()),
            ("tasks", kernel.tasks.as_ref().err()),
            ("mappings", kernel.mappings.as_ref().err()),
            ("modules", kernel.modules.as_ref().err()),
        ]
        .into_iter()
        .filter_map(|(what, why)| Some((what, why?)))
    }

    /// The same kernel with the modules that it has now; `None` where they are the same.
    /// Reads some hundred bytes for each module, and all of those that are new: not for a
    /// vCPU's thread.
    ///
    /// # Errors
    /// The list of modules cannot be read; it may be changing.
    pub fn refreshed(&self, memory: &dyn GuestMemory) -> Result<Option<Self>, Unknown> {
        let layout = self.kernel.modules.as_ref().map_err(|_| Unknown::Types)?;
        let space = Space::new(memory, self.kernel.paging, MODULES_BUDGET);
        let Some(listed) = layout.read(&space, &self.modules.listed)? else {
            return Ok(None);
        };
        let mut sorted: Vec<u32> = (0u32..).zip(&listed).map(|(place, _)| place).collect();
        sorted.sort_by_key(|place| listed[*place as usize].text.start);
        Ok(Some(Self {
            kernel: Arc::clone(&self.kernel),
            modules: Arc::new(Modules { listed, sorted }),
        }))
    }

    /// The guest still runs this kernel, as `cr3` of a vCPU shows: it was not started anew,
    /// nor another one in its place, which leaves the note where it was.
    #[must_use]
    pub fn is_current(&self, memory: &dyn GuestMemory, cr3: u64) -> bool {
        let note = &self.kernel.note;
        Note::read(memory, note.address).as_ref() == Some(note) && is_run_by(memory, note, cr3)
    }

    /// Every symbol of the kernel and its modules, in the order of `/proc/kallsyms`.
    pub fn symbols(&self) -> impl Iterator<Item = Symbol<'_>> {
        let modules = self.modules.listed.iter().flat_map(|module| {
            let symbols = module.symbols.iter();
            symbols.map(|symbol| module.named(symbol))
        });
        self.kernel.symbols.iter().chain(modules)
    }

    /// The symbol that has `address`: of those that begin at the same place the first.
    /// The kernel's own end where the next begins, since it knows no sizes.
    #[must_use]
    pub fn symbol(&self, address: u64) -> Option<Symbol<'_>> {
        if self.kernel.image.contains(&address) {
            return self.kernel.symbols.at(address);
        }
        let module = self.module(address)?;
        let found = module.symbols.at(address)?;
        (found.address >= module.text.start).then(|| module.named(found))
    }

    /// How many processors the kernel can have.
    #[must_use]
    pub fn processors(&self) -> u32 {
        u32::try_from(self.kernel.areas.len()).unwrap_or(u32::MAX)
    }

    /// The number that the kernel has given to the processor with this APIC id; `None` where
    /// it has not started it yet, or does not say. A number stays as long as the kernel runs,
    /// and is to be asked for once: it takes a read for each processor that there can be.
    #[must_use]
    pub fn processor(&self, memory: &dyn GuestMemory, apic_id: u32) -> Option<u32> {
        let space = Space::new(memory, self.kernel.paging, PROCESSORS_BUDGET);
        let (variable, bytes) = self.kernel.apic?;
        let is_it = |area: &u64| {
            let at = area.wrapping_add(variable);
            let found = match bytes {
                2 => space.array(at).map(u16::from_le_bytes).map(u32::from),
                _ => space.u32(at).ok(),
            };
            found == Some(apic_id)
        };
        let place = self.kernel.areas.iter().position(is_it)?;
        u32::try_from(place).ok()
    }

    fn module(&self, address: u64) -> Option<&Module> {
        let Modules { listed, sorted } = &*self.modules;
        let module = |place: &u32| &listed[*place as usize];
        let behind = sorted.partition_point(|place| module(place).text.start <= address);
        let found = module(sorted.get(behind.checked_sub(1)?)?);
        found.text.contains(&address).then(|| &**found)
    }

    /// What unwind tables say of the instruction at `address`.
    pub(crate) fn orc(&self, address: u64) -> OrcLookup {
        let kernel = &*self.kernel;
        let table = if kernel.code.iter().any(|code| code.contains(&address)) {
            kernel.orc.as_ref().ok()
        } else if let Some(module) = self.module(address) {
            module.orc.as_ref()
        } else {
            return OrcLookup::None;
        };
        match table.map(|table| table.find(address)) {
            None => OrcLookup::None,
            Some(None) => OrcLookup::Unknown,
            Some(Some(entry)) => OrcLookup::Entry(entry),
        }
    }
}

/// The page tables at `cr3`, or the kernel's beside those, lead to the kernel of `note`.
fn is_run_by(memory: &dyn GuestMemory, note: &Note, cr3: u64) -> bool {
    let Some(((paging, five_levels), start)) = note.paging().zip(note.symbol("_stext")) else {
        return false;
    };
    let place = |paging: Paging| Some(paging.map(memory, start)?.physical);
    let mut runs = tables_of(cr3)
        .map(|root| place(Paging::long_mode(root, five_levels)))
        .into_iter();
    place(paging).is_some_and(|here| runs.any(|there| there == Some(here)))
}

impl Module {
    fn named<'a>(&'a self, symbol: Symbol<'a>) -> Symbol<'a> {
        let module = Some(self.name.as_str());
        Symbol { module, ..symbol }
    }
}
