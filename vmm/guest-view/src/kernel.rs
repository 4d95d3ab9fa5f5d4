//! What a kernel says of itself, and does not change as long as it runs.

use std::ops::Range;

use guest_exit::Paging;

use crate::btf::{self, Btf, BtfError};
use crate::layout::Types;
use crate::mapping::MappingLayout;
use crate::module::ModuleLayout;
use crate::note::Note;
use crate::orc;
use crate::places::TaskPlaces;
use crate::space::Space;
use crate::symbols::SymbolTable;
use crate::task::TaskLayout;

/// Most processors (`CONFIG_NR_CPUS` of x86 is 8192 at most).
const MOST_PROCESSORS: u32 = 8192;

/// Functions that take the place of a caller, whose address a tracer then keeps in lists of
/// its own: of kretprobes, with `CONFIG_RETHOOK` and without, and of the function graph.
const TRAMPOLINES: [&str; 3] = [
    "arch_rethook_trampoline",
    "__kretprobe_trampoline",
    "return_to_handler",
];

/// What does not change as long as a kernel runs.
pub(crate) struct Kernel {
    pub(crate) note: Note,
    pub(crate) paging: Paging,
    pub(crate) five_levels: bool,
    pub(crate) symbols: SymbolTable,
    /// The image, from its first instruction on.
    pub(crate) image: Range<u64>,
    pub(crate) code: [Range<u64>; 2],
    /// Of [`TRAMPOLINES`], those that it has.
    pub(crate) trampolines: Vec<Range<u64>>,
    pub(crate) orc: Result<orc::Table, BtfError>,
    pub(crate) tasks: Result<TaskLayout, BtfError>,
    pub(crate) places: Result<TaskPlaces, BtfError>,
    pub(crate) mappings: Result<MappingLayout, BtfError>,
    pub(crate) modules: Result<ModuleLayout, BtfError>,
    /// Where the per-CPU variables of each processor are; none in a kernel for one processor.
    pub(crate) areas: Vec<u64>,
    /// Of each processor's local APIC: the per-CPU variable, and its bytes.
    pub(crate) apic: Option<(u64, u32)>,
}

impl Kernel {
    /// Reads all of it; `None` where the symbols are no kernel's.
    pub(crate) fn read(
        space: &Space<'_>,
        note: Note,
        (paging, five_levels): (Paging, bool),
        symbols: SymbolTable,
    ) -> Option<Self> {
        let range = |start, end| Some(symbols.address(start)?..symbols.address(end)?);
        let image = range("_stext", "_end")?;
        let text = range("_stext", "_etext")?;
        let init = range("_sinittext", "_einittext").unwrap_or(0..0);
        let types = types(space, &symbols);
        let of = |ask: &dyn Fn(&Btf) -> Result<_, BtfError>| {
            types.as_ref().map_err(Clone::clone).and_then(ask)
        };
        let format = of(&orc::Format::of);
        let table = format.clone().and_then(|format| {
            let missing = || BtfError::Missing("ORC table".to_owned());
            orc_table(space, &symbols, format).ok_or_else(missing)
        });
        let format = table
            .as_ref()
            .map_or(format.ok(), |table| Some(table.format()));
        let with = types.as_ref().map_err(Clone::clone);
        let tasks = with
            .clone()
            .and_then(|btf| TaskLayout::of(Types(btf), &symbols));
        let places = with
            .clone()
            .and_then(|btf| TaskPlaces::of(Types(btf), &symbols));
        let mappings = with
            .clone()
            .and_then(|btf| MappingLayout::of(btf, &symbols));
        let modules = with.clone().and_then(|btf| {
            let head = symbols.address("modules");
            let head = head.ok_or_else(|| BtfError::Missing("modules".to_owned()))?;
            ModuleLayout::of(btf, head, format)
        });
        let apic = symbols.address("x86_cpu_to_apicid");
        let bytes = with.and_then(|btf| btf.variable_size("x86_cpu_to_apicid"));
        let bytes = bytes.ok().filter(|bytes| matches!(bytes, 2 | 4));
        Some(Self {
            note,
            paging,
            five_levels,
            image,
            code: [text, init],
            trampolines: TRAMPOLINES
                .iter()
                .filter_map(|name| symbols.range(name))
                .collect(),
            orc: table,
            tasks,
            places,
            mappings,
            modules,
            areas: areas(space, &symbols).unwrap_or_default(),
            apic: apic.zip(bytes),
            symbols,
        })
    }
}

/// The kernel's description of its types.
fn types(space: &Space<'_>, symbols: &SymbolTable) -> Result<Btf, BtfError> {
    let missing = || BtfError::Missing("types".to_owned());
    let start = symbols.address("__start_BTF").ok_or_else(missing)?;
    let end = symbols.address("__stop_BTF").ok_or_else(missing)?;
    let bytes = end
        .checked_sub(start)
        .and_then(|len| usize::try_from(len).ok());
    let bytes = bytes.filter(|len| *len <= btf::MOST);
    let bytes = bytes.and_then(|len| space.bytes(start, len));
    Btf::parse(bytes.ok_or(BtfError::Damaged)?)
}

fn orc_table(space: &Space<'_>, symbols: &SymbolTable, format: orc::Format) -> Option<orc::Table> {
    let part = |start, end| Some((symbols.address(start)?, symbols.address(end)?));
    let (addresses, end) = part("__start_orc_unwind_ip", "__stop_orc_unwind_ip")?;
    let (entries, _) = part("__start_orc_unwind", "__stop_orc_unwind")?;
    let count = usize::try_from(end.checked_sub(addresses)? / 4).ok()?;
    orc::Table::read(space, format, addresses, entries, count).map(orc::Table::of_kernel)
}

/// `__per_cpu_offset`, which is written once, before the kernel has a note.
fn areas(space: &Space<'_>, symbols: &SymbolTable) -> Option<Vec<u64>> {
    let count = space.u32(symbols.address("nr_cpu_ids")?).ok()?;
    let count = count.min(MOST_PROCESSORS) as usize;
    let bytes = space.bytes(symbols.address("__per_cpu_offset")?, 8 * count)?;
    let words = bytes.chunks_exact(8);
    let words = words.map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
    Some(words.collect())
}
