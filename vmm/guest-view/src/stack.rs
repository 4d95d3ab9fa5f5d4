//! The top of a program's stack, and the code that its words lead to: what chains of callers
//! can be found by with the files of the program.

use std::ops::RangeInclusive;

use guest_exit::Paging;

use crate::look::Look;
use crate::mapping::Mapping;
use crate::registers::{Mode, ProgramRegisters};
use crate::space::Space;
use crate::task::ProgramMemory;

/// Most bytes that are read for a copy of a stack, with its page tables.
const BUDGET: usize = 128 << 10;
/// Parts of a program's memory that the words of a stack are looked for in.
const REGIONS: usize = 64;
/// No program has anything below (`vm.mmap_min_addr`); words are mostly small numbers.
const LOWEST: u64 = 1 << 16;
/// Behind every program's memory, with page tables of five levels.
const HIGHEST: u64 = 1 << 56;
/// Bytes of a word.
const WORD: usize = 8;

impl Look<'_> {
    /// Copies the stack of `program`, which is at `at`, from its stack pointer on, as far as
    /// `to` has room; how many bytes there were. None of a program of 32 bits.
    #[must_use]
    pub fn stack(&self, program: ProgramMemory, at: &ProgramRegisters, to: &mut [u8]) -> usize {
        if at.mode != Mode::User {
            return 0;
        }
        let paging = Paging::long_mode(program.root, self.view.kernel.five_levels);
        Space::new(self.memory, paging, BUDGET).read_some(at.sp, to)
    }

    /// Calls `found` with each executable mapping that a word of `stack`, which is at `sp`,
    /// leads to: those that callers can be in, and maybe others. Words are where programs have
    /// them, at multiples of 8. They are looked for from the
    /// stack pointer on in at most 64 parts of the program's memory, mappings and what is
    /// between them, at 30 reads each, mostly.
    pub fn code(
        &self,
        program: ProgramMemory,
        (sp, stack): (u64, &[u8]),
        mut found: impl FnMut(&Mapping),
    ) {
        let Ok(layout) = &self.view.kernel.mappings else {
            return;
        };
        let own = sp..=sp.saturating_add(stack.len() as u64);
        let first = usize::from(sp.to_le_bytes()[0]).wrapping_neg() % WORD;
        let stack = stack.get(first..).unwrap_or_default();
        let nothing = RangeInclusive::new(1, 0);
        let mut known = [const { RangeInclusive::new(1, 0) }; REGIONS];
        let (mut regions, mut last) = (0, nothing);
        for word in stack.chunks_exact(WORD) {
            let word = word.try_into().map_or(0, u64::from_le_bytes);
            let is_elsewhere = !(LOWEST..HIGHEST).contains(&word) || own.contains(&word);
            if is_elsewhere || last.contains(&word) {
                continue;
            }
            let met = known[..regions].iter().find(|one| one.contains(&word));
            if let Some(met) = met {
                last = met.clone();
                continue;
            }
            if regions == REGIONS {
                return;
            }
            let (around, mapping) = layout.code(&self.space, program, word);
            mapping.iter().for_each(&mut found);
            known[regions] = around.clone();
            (regions, last) = (regions + 1, around);
        }
    }
}
