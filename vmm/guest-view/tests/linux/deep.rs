//! The small Linux as a VM has it in memory, 8 calls deep in the kernel and as many in its
//! program: for benchmarks.

use guest_view::{GuestMemory, KernelView, Registers, Search, Step};
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    MemoryRegionAddress,
};

use super::linux::{CALLED, CODE, ENTRY, HEAD, KSTACK, Linux, PROGRAM_ROOT, REGS, STACK};

/// Guest memory as a VMM reads it.
pub(crate) struct Ram(GuestMemoryMmap);

impl GuestMemory for Ram {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        let Some(region) = self.0.find_region(GuestAddress(address)) else {
            return false;
        };
        let at = MemoryRegionAddress(address - region.start_addr().0);
        let found = region.get_slice(at, buffer.len());
        found.is_ok_and(|found| found.copy_to(buffer) == buffer.len())
    }
}

impl Ram {
    pub(crate) fn of(linux: &Linux) -> Result<Self, String> {
        let ranges = [(GuestAddress(0), linux.memory.len())];
        let memory = GuestMemoryMmap::from_ranges(&ranges).map_err(|error| error.to_string())?;
        let written = memory.write_slice(&linux.memory, GuestAddress(0));
        written.map_err(|error| error.to_string())?;
        Ok(Self(memory))
    }
}

/// Where it is in the kernel: seven calls below an entry from the program, which is seven calls
/// deep in two mappings of its file.
pub(crate) fn deep(linux: &mut Linux) -> Registers {
    let sp = KSTACK + 0x4000 - REGS - 7 * 32;
    for frame in 0..7 {
        let caller = if frame == 6 { ENTRY + 0x20 } else { CALLED + 9 };
        linux.word(sp + 32 * frame + 24, caller);
    }
    let bp = STACK + 0x810;
    for frame in 0..7 {
        let (at, last) = (bp + 0x40 * frame, frame == 6);
        linux.word(at, if last { 0 } else { at + 0x40 });
        linux.word(at + 8, if frame % 2 == 0 { CODE } else { HEAD } + 0x123);
    }
    linux.registers(CALLED + 9, sp, 0)
}

pub(crate) fn view(memory: &dyn GuestMemory) -> Result<KernelView, String> {
    let mut search = Search::new(std::iter::once(0..4 << 20));
    loop {
        match search.step(memory, 1024) {
            Step::Found(note) => {
                let view = KernelView::of(memory, note, PROGRAM_ROOT);
                return view.map_err(|error| error.to_string());
            }
            Step::Searching => {}
            Step::Done => return Err("its kernel was not found".to_owned()),
        }
    }
}
