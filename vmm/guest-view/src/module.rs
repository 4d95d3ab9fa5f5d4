//! Modules of a kernel: where their code is, their symbols and their unwind tables
//! (`include/linux/module.h`, `kernel/module/kallsyms.c`).

use std::ops::Range;
use std::sync::Arc;

use crate::btf::{Btf, BtfError, Member};
use crate::bytes::u32_at;
use crate::layout::Types;
use crate::orc::{Format, Table};
use crate::space::Space;
use crate::symbols::{self, LONGEST, SymbolTable};
use crate::text::visible;
use crate::unknown::Unknown;

/// Most modules.
const MOST: usize = 4096;
/// Most bytes of the names of a module's symbols.
const MOST_TEXT: usize = 32 << 20;
/// Most bytes of a module's code.
const MOST_CODE: u64 = 1 << 30;
/// Bytes of an `Elf64_Sym`.
const SYMBOL: usize = 24;

/// A loaded module.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) name: String,
    /// Where its code is.
    pub(crate) text: Range<u64>,
    pub(crate) symbols: SymbolTable,
    pub(crate) orc: Option<Table>,
    seen: Seen,
    /// What it took of the budget.
    cost: usize,
}

/// What tells one load of a module from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    address: u64,
    name: [u8; 56],
    base: u64,
    size: u32,
    symtab: u64,
    count: u32,
    strtab: u64,
    typetab: u64,
    orc: (u32, u64, u64),
}

/// Where a kernel keeps its modules.
#[derive(Debug)]
pub(crate) struct ModuleLayout {
    head: u64,
    list: u64,
    name: u64,
    state: u64,
    unformed: u32,
    base: u64,
    size: u64,
    kallsyms: u64,
    symtab: u64,
    count: u64,
    strtab: u64,
    typetab: u64,
    orc: Option<OrcMembers>,
}

#[derive(Debug)]
struct OrcMembers {
    format: Format,
    count: u64,
    addresses: u64,
    entries: u64,
}

impl ModuleLayout {
    /// By the kernel's types; `head` is its variable `modules`.
    pub(crate) fn of(btf: &Btf, head: u64, orc: Option<Format>) -> Result<Self, BtfError> {
        const MODULE: &str = "module";
        const KALLSYMS: &str = "mod_kallsyms";
        let types = Types(btf);
        // Since 6.4 code has memory of its own; before, it is the first part of all that stays.
        let (base, size) = match types.u64(MODULE, "core_layout.base") {
            Ok(base) => (base, types.u32(MODULE, "core_layout.size")?),
            Err(_) => {
                let first = types.0.member(MODULE, "mem")?.offset;
                let number = btf.enumerator("mod_mem_type", "MOD_TEXT")?;
                let at = number.checked_mul(btf.size_of("module_memory")?);
                let at = at.and_then(|at| at.checked_add(first));
                let at = at.ok_or(BtfError::Damaged)?;
                let of = |name| types.0.member("module_memory", name);
                let (base, size) = (of("base")?, of("size")?);
                let of = |part: Member| u64::from(at) + u64::from(part.offset);
                (of(base), of(size))
            }
        };
        let members = |format| {
            Ok::<_, BtfError>(OrcMembers {
                format,
                count: types.u32(MODULE, "arch.num_orcs")?,
                addresses: types.u64(MODULE, "arch.orc_unwind_ip")?,
                entries: types.u64(MODULE, "arch.orc_unwind")?,
            })
        };
        Ok(Self {
            head,
            list: types.at(MODULE, "list", 16)?,
            name: types.at(MODULE, "name", 56)?,
            state: types.u32(MODULE, "state")?,
            unformed: btf.enumerator("module_state", "MODULE_STATE_UNFORMED")?,
            base,
            size,
            kallsyms: types.u64(MODULE, "kallsyms")?,
            symtab: types.u64(KALLSYMS, "symtab")?,
            count: types.u32(KALLSYMS, "num_symtab")?,
            strtab: types.u64(KALLSYMS, "strtab")?,
            typetab: types.u64(KALLSYMS, "typetab")?,
            orc: orc.map(members).transpose()?,
        })
    }

    /// The modules that are loaded now, in the kernel's order; those that `before` has are
    /// not read again. `None` where nothing has changed.
    pub(crate) fn read(
        &self,
        space: &Space<'_>,
        before: &[Arc<Module>],
    ) -> Result<Option<Vec<Arc<Module>>>, Unknown> {
        let seen = self.list(space)?;
        if seen.iter().eq(before.iter().map(|module| &module.seen)) {
            return Ok(None);
        }
        // One that cannot be read is there without symbols, or each refresh would be news.
        let module = |seen: &Seen| match before.iter().find(|module| module.seen == *seen) {
            Some(known) => space.charge(known.cost).then(|| Arc::clone(known)),
            None => {
                let read = self.module(space, *seen);
                Some(Arc::new(read.unwrap_or_else(|| Module::unread(*seen))))
            }
        };
        let modules = seen.iter().filter_map(module).collect();
        // One that was unloaded meanwhile has left its memory to others.
        space.forget();
        if self.list(space)? != seen {
            return Err(Unknown::Inconsistent("modules"));
        }
        Ok(Some(modules))
    }

    /// All that are on the kernel's list.
    fn list(&self, space: &Space<'_>) -> Result<Vec<Seen>, Unknown> {
        let mut found = Vec::new();
        let mut at = self.head;
        for _ in 0..MOST {
            // `next` is the first of the two pointers of a `struct list_head`.
            at = space.u64(at)?;
            if at == self.head {
                return Ok(found);
            }
            found.extend(self.look(space, at.wrapping_sub(self.list))?);
        }
        Err(Unknown::TooMany("modules"))
    }

    /// The module at `address`; `None` while it is being set up.
    fn look(&self, space: &Space<'_>, address: u64) -> Result<Option<Seen>, Unknown> {
        let at = |offset: u64| address.wrapping_add(offset);
        if space.u32(at(self.state))? == self.unformed {
            return Ok(None);
        }
        let names = space.u64(at(self.kallsyms))?;
        let in_names = |offset: u64| names.wrapping_add(offset);
        let orc = match &self.orc {
            Some(orc) => (
                space.u32(at(orc.count))?,
                space.u64(at(orc.addresses))?,
                space.u64(at(orc.entries))?,
            ),
            None => (0, 0, 0),
        };
        let name = at(self.name);
        Ok(Some(Seen {
            address,
            name: space.array(name).ok_or(Unknown::Unmapped(name))?,
            base: space.u64(at(self.base))?,
            size: space.u32(at(self.size))?,
            symtab: space.u64(in_names(self.symtab))?,
            count: space.u32(in_names(self.count))?,
            strtab: space.u64(in_names(self.strtab))?,
            typetab: space.u64(in_names(self.typetab))?,
            orc,
        }))
    }

    fn module(&self, space: &Space<'_>, seen: Seen) -> Option<Module> {
        let before = space.left();
        let name = seen.name.split(|byte| *byte == 0).next()?;
        let size = u64::from(seen.size);
        let code = seen.base..seen.base.checked_add(size)?;
        if size > MOST_CODE {
            return None;
        }
        let orc = self.orc.as_ref().and_then(|orc| {
            let (count, addresses, entries) = seen.orc;
            let count = usize::try_from(count).ok()?;
            Table::read(space, orc.format, addresses, entries, count)
        });
        Some(Module {
            name: visible(name),
            text: code,
            symbols: symbols_of(space, &seen)?,
            orc,
            seen,
            cost: before - space.left(),
        })
    }
}

impl Module {
    /// One of which nothing can be said but that it is there.
    fn unread(seen: Seen) -> Self {
        let name = seen.name.split(|byte| *byte == 0).next();
        Self {
            name: visible(name.unwrap_or_default()),
            text: 0..0,
            symbols: SymbolTable::default(),
            orc: None,
            seen,
            cost: 0,
        }
    }
}

fn symbols_of(space: &Space<'_>, seen: &Seen) -> Option<SymbolTable> {
    let count = usize::try_from(seen.count).ok()?;
    if count > symbols::MOST {
        return None;
    }
    let raw = space.bytes(seen.symtab, SYMBOL * count)?;
    let kinds = space.bytes(seen.typetab, count)?;

    let last = raw
        .chunks_exact(SYMBOL)
        .map(|symbol| u32_at(symbol, 0))
        .max();
    let last = last.unwrap_or(0) as usize;
    // The last name ends in its own time.
    let mut text = vec![0; last.checked_add(LONGEST)?.min(MOST_TEXT)];
    let read = space.read_some(seen.strtab, &mut text);
    text.truncate(read);
    let mut table = SymbolTable::default();
    for (symbol, kind) in raw.chunks_exact(SYMBOL).zip(kinds) {
        let rest = text.get(u32_at(symbol, 0) as usize..)?;
        let rest = &rest[..rest.len().min(LONGEST)];
        let name = rest.split(|byte| *byte == 0).next()?;
        // Also one that is not kept was looked at.
        space.charge(SYMBOL + name.len()).then_some(())?;
        let address = u64::from(u32_at(symbol, 8)) | u64::from(u32_at(symbol, 12)) << 32;
        // The first has no name, as in every ELF file.
        if !name.is_empty() && kind.is_ascii_alphabetic() {
            table.push(space, address, kind, &visible(name))?;
        }
    }
    table.sort();
    Some(table)
}
