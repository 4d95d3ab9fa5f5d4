//! What the firmware leaves in SMRAM: the code that an SMI leads to, and what it replies
//! to whom, where only code in SMM can read it.
//!
//! | from | content |
//! |---|---|
//! | 0 | the code (`src/guest/sys/smm.rs`) |
//! | [`BASE`] | first MSR of the reservations, 4 bytes |
//! | [`COUNTERS`] | a [`COUNTER_SIZE`] for each counter: its management cookie, 8 bytes, and its operation for `REPLY`, 4 bytes |
//! | [`ROWS`] | a row of 64 bytes for each CPU: the counter at each position, [`NONE`] if it is not the firmware's |

use arbiter::abi;

use crate::config::{MAX_COUNTERS, MAX_CPUS};

/// Bytes of all of it: whole pages.
pub const SIZE: usize = 0x2000;
/// Bytes for the code.
const CODE_SIZE: usize = 0x200;
/// Where the first MSR's index lies.
pub const BASE: usize = CODE_SIZE;
/// Where the counters lie.
pub const COUNTERS: usize = 0x400;
/// Bytes of a counter.
pub const COUNTER_SIZE: usize = 16;
/// Where the rows lie.
pub const ROWS: usize = 0x1000;
/// Bytes of a row: one for each position.
const ROW_SIZE: usize = 64;
/// No counter of the firmware's.
pub const NONE: u8 = 0xff;

/// The pages that become SMRAM's.
pub type Pages = [u8; SIZE];

const _: () = assert!(COUNTERS + MAX_COUNTERS * COUNTER_SIZE <= ROWS);
const _: () = assert!(ROWS + MAX_CPUS * ROW_SIZE <= SIZE);

/// Puts the code in, for reservations whose first MSR is `base`, and no counter yet.
/// False if there is no room for the code.
pub fn begin(pages: &mut Pages, code: &[u8], base: u32) -> bool {
    pages.fill(0);
    if code.len() > CODE_SIZE {
        return false;
    }
    put(pages, 0, code);
    put(pages, BASE, &base.to_le_bytes());
    let rows = pages.get_mut(ROWS..ROWS + MAX_CPUS * ROW_SIZE);
    rows.unwrap_or_default().fill(NONE);
    true
}

/// Says what is replied to who asks for counter `number`, and with which cookie.
pub fn put_counter(pages: &mut Pages, number: usize, management: u64, yields: bool) {
    if number < MAX_COUNTERS {
        let at = COUNTERS + number * COUNTER_SIZE;
        let reply = if yields {
            abi::REPLY_YIELD
        } else {
            abi::REPLY_REFUSE
        };
        put(pages, at, &management.to_le_bytes());
        put(pages, at + 8, &reply.to_le_bytes());
    }
}

/// Says that `cpu` has counter `number` at a position.
pub fn put_position(pages: &mut Pages, cpu: usize, position: u8, number: u8) {
    if cpu < MAX_CPUS && usize::from(position) < ROW_SIZE {
        let at = ROWS + cpu * ROW_SIZE + usize::from(position);
        put(pages, at, &[number]);
    }
}

/// The value of `PHASE` that ends the firmware's phase and has the pages at `address`,
/// the first byte of a page, become SMRAM's.
#[must_use]
pub fn end_of_phase(address: u64) -> u64 {
    let pages = SIZE as u64 / abi::PHASE_PAGE_SIZE;
    address | abi::PHASE_END | abi::PHASE_SMRAM | pages << abi::PHASE_PAGES_SHIFT
}

fn put(pages: &mut Pages, at: usize, value: &[u8]) {
    if let Some(place) = pages.get_mut(at..at + value.len()) {
        place.copy_from_slice(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_has_its_place() {
        let mut pages = [0xaa; SIZE];
        assert!(begin(&mut pages, &[1, 2, 3], 0x554d_6000));
        assert_eq!(pages[..4], [1, 2, 3, 0]);
        assert_eq!(pages[BASE..BASE + 5], [0x00, 0x60, 0x4d, 0x55, 0]);
        assert!(pages[ROWS..].iter().all(|&row| row == NONE));
        put_counter(&mut pages, 63, 0x1234, true);
        put_counter(&mut pages, 2, 0x0605_0403_0201, false);
        put_counter(&mut pages, 64, !0, true);
        let counter = &pages[COUNTERS + 2 * COUNTER_SIZE..][..COUNTER_SIZE];
        assert_eq!(counter, [1, 2, 3, 4, 5, 6, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        let last = &pages[COUNTERS + 63 * COUNTER_SIZE..][..COUNTER_SIZE + 8];
        assert_eq!(
            (&last[..2], last[8], &last[16..]),
            (&[0x34, 0x12][..], 1, &[0; 8][..])
        );
        put_position(&mut pages, 1, 5, 2);
        put_position(&mut pages, 63, 63, 63);
        put_position(&mut pages, 64, 0, 1);
        put_position(&mut pages, 0, 64, 1);
        assert_eq!((pages[ROWS + 64 + 5], pages[SIZE - 1]), (2, 63));
        let firmwares = pages[ROWS..].iter().filter(|&&row| row != NONE).count();
        assert_eq!(firmwares, 2);
        assert!(!begin(&mut pages, &[0; CODE_SIZE + 1], 0));
        assert_eq!(end_of_phase(0x8_3000), 0x8_3023);
    }
}
