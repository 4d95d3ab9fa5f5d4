//! The guest's kernel, as its memory shows it.

use std::fmt::Write;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use guest_view::{GuestMemory, KernelView, Search, Step};
use perfmon_abi::wire::kernel::KernelInfo;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_control::GuestKernel;

use crate::kvm::KvmVm;
use crate::sync::lock;

/// Most notes that are tried. A guest has one, and crashed kernels leave some.
const MOST_NOTES: usize = 16;
/// Pages of one step of a search; there is nobody to make room for between two.
const PAGES: usize = 1 << 16;

/// The memory of a VM that `guest_view` reads.
struct Ram<'a>(&'a GuestMemoryMmap);

impl GuestMemory for Ram<'_> {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        self.0.read_slice(buffer, GuestAddress(address)).is_ok()
    }
}

/// The kernel of a VM's guest. What was found serves until the guest has another one.
#[derive(Debug)]
pub(crate) struct VmKernel {
    vm: Arc<KvmVm>,
    found: Mutex<Option<KernelView>>,
}

impl VmKernel {
    pub(crate) fn new(vm: Arc<KvmVm>) -> Self {
        Self {
            vm,
            found: Mutex::default(),
        }
    }

    /// The kernel that runs with `cr3`, with the modules that it has now.
    fn view(&self, cr3: u64) -> Result<KernelView, String> {
        let ram = Ram(self.vm.memory());
        let mut found = lock(&self.found);
        if let Some(view) = found.take().filter(|view| view.is_current(&ram, cr3)) {
            // A list that is being changed is as it was.
            let view = view.refreshed(&ram).ok().flatten().unwrap_or(view);
            return Ok(found.insert(view).clone());
        }
        let view = search(&ram, cr3)?;
        Ok(found.insert(view).clone())
    }
}

impl GuestKernel for VmKernel {
    fn find(&self, cr3: u64) -> Result<KernelInfo, String> {
        let view = self.view(cr3)?;
        let mut kallsyms = String::new();
        for symbol in view.symbols() {
            // It always succeeds.
            let _ = writeln!(kallsyms, "{symbol}");
        }
        Ok(KernelInfo {
            release: view.release().to_owned(),
            kallsyms,
        })
    }
}

fn search(ram: &Ram<'_>, cr3: u64) -> Result<KernelView, String> {
    let ranges = ram.0.iter().map(|region| -> Range<u64> {
        let start = region.start_addr().0;
        start..start.saturating_add(region.len())
    });
    let mut search = Search::new(ranges);
    let mut why = "no Linux kernel that says where its symbols are was found in its memory; \
                   Linux 6.0 and later do"
        .to_owned();
    let mut notes = 0;
    while notes < MOST_NOTES {
        match search.step(ram, PAGES) {
            Step::Searching => {}
            Step::Found(note) => match KernelView::of(ram, note, cr3) {
                Ok(view) => return Ok(view),
                Err(error) => (why, notes) = (error.to_string(), notes + 1),
            },
            Step::Done => break,
        }
    }
    Err(why)
}
