//! Where firmware lies in guest memory. All addresses are guest-physical; the
//! identity map makes them linear ones too.
//!
//! | from | bytes | content |
//! |---|---|---|
//! | [`IMAGE`] | [`IMAGE_SIZE`] | the firmware itself; its first page can be a start-up vector |
//! | [`CONFIG`] | [`config::SIZE`](crate::config::SIZE) | the configuration area |
//! | [`PAGE_TABLES`] | [`PAGE_TABLES_SIZE`] | the identity map of the first 4 GiB |
//! | [`STACK`] | up to [`STACK_TOP`] | the stack at entry |
//! | [`GDT`] | [`GDT_SIZE`] | the descriptor table at entry |

/// First byte that belongs to firmware: a page that a start-up IPI can name.
pub const START: u64 = 0x8_0000;
/// The image: an ELF64 file's segments lie in it, a flat image begins here.
pub const IMAGE: u64 = START;
/// Bytes of the image, zeroed memory included.
pub const IMAGE_SIZE: u64 = 0x1_6000;
/// The configuration area.
pub const CONFIG: u64 = 0x9_6000;
/// PML4, page-directory-pointer table and four page directories, with 2 MiB pages.
pub const PAGE_TABLES: u64 = 0x9_8000;
/// Bytes of the page tables.
pub const PAGE_TABLES_SIZE: u64 = 0x6000;
/// Lowest byte of the stack at entry.
pub const STACK: u64 = 0x9_e000;
/// The stack pointer at entry.
pub const STACK_TOP: u64 = 0x9_f000;
/// The descriptor table at entry.
pub const GDT: u64 = STACK_TOP;
/// Bytes of the descriptor table.
pub const GDT_SIZE: u16 = 6 * 8;
/// First byte behind what belongs to firmware.
pub const END: u64 = 0x9_fc00;

/// Selector of 32-bit code, base 0, limit 4 GiB.
pub const CODE_32: u16 = 0x08;
/// Selector of 64-bit code; in CS at entry.
pub const CODE_64: u16 = 0x10;
/// Selector of data, base 0, limit 4 GiB; in DS, ES, FS, GS and SS at entry.
pub const DATA: u16 = 0x18;
/// Selector of the task state segment, two entries wide; in TR at entry, and the
/// kernel's as well.
pub const TASK: u16 = 0x20;

/// Start-up IPIs name a page below 1 MiB by its number: this is the image's first.
pub const START_UP_VECTOR: u8 = (IMAGE >> 12).to_le_bytes()[0];
/// The port for tests and for firmware that cannot go on: a written value V ends
/// the run with exit status V × 2 + 1.
pub const EXIT_PORT: u16 = 0xf4;
/// What is written there where the configuration is malformed.
pub const EXIT_MALFORMED: u32 = 0x46;
/// What is written there after an exception or a panic in the firmware.
pub const EXIT_CRASHED: u32 = 0x47;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    #[test]
    fn parts_follow_each_other() {
        assert_eq!(IMAGE + IMAGE_SIZE, CONFIG);
        assert_eq!(CONFIG + config::SIZE as u64, PAGE_TABLES);
        assert_eq!(PAGE_TABLES + PAGE_TABLES_SIZE, STACK);
        assert!(GDT + u64::from(GDT_SIZE) <= END);
        assert_eq!(IMAGE % 0x1000, 0);
        assert_eq!(u64::from(START_UP_VECTOR) << 12, IMAGE);
    }
}
