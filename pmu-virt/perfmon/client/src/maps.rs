//! Where in this process a file is mapped, from `/proc/self/maps`.
//!
//! The kernel's own list is right also after `munmap`, `mremap` and a mapping
//! put on top of another. Nothing here allocates.

use std::ops::Range;
use std::os::fd::AsFd;

use rustix::fs::{CWD, Mode, OFlags, Stat, major, minor, openat};
use rustix::io::{Errno, read};

/// A file, as the list names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    /// Major and minor number of its device.
    pub device: (u32, u32),
    pub inode: u64,
}

impl FileId {
    /// Of the file with this status.
    #[must_use]
    pub fn of(stat: &Stat) -> Self {
        FileId {
            device: (major(stat.st_dev), minor(stat.st_dev)),
            inode: stat.st_ino,
        }
    }
}

/// Bytes of a line that tell all that is needed: two addresses, rights, offset,
/// device and number. The file's name follows.
const LINE: usize = 128;

fn number(text: Option<&[u8]>, radix: u32) -> Option<u64> {
    let text = std::str::from_utf8(text?).ok()?;
    u64::from_str_radix(text, radix).ok()
}

/// The mapping that a line tells of.
fn parse(line: &[u8]) -> Option<(Range<usize>, FileId)> {
    let mut words = line
        .split(|&byte| byte == b' ')
        .filter(|word| !word.is_empty());
    let mut addresses = words.next()?.split(|&byte| byte == b'-');
    let mut address = || usize::try_from(number(addresses.next(), 16)?).ok();
    let range = address()?..address()?;
    let mut device = words.nth(2)?.split(|&byte| byte == b':');
    let mut half = || u32::try_from(number(device.next(), 16)?).ok();
    let device = (half()?, half()?);
    let inode = number(words.next(), 10)?;
    Some((range, FileId { device, inode }))
}

/// Hands each mapping of a file to `found`, lowest address first.
///
/// # Errors
/// The list cannot be read: `/proc` is not mounted, for instance.
pub fn each(file: FileId, mut found: impl FnMut(Range<usize>)) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let list = openat(CWD, c"/proc/self/maps", flags, Mode::empty())?;
    let (mut line, mut length) = ([0; LINE], 0);
    let mut chunk = [0; 4096];
    loop {
        let read = read(list.as_fd(), &mut chunk)?;
        if read == 0 {
            return Ok(());
        }
        for &byte in &chunk[..read] {
            if byte == b'\n' {
                if let Some((range, id)) = parse(&line[..length])
                    && id == file
                {
                    found(range);
                }
                length = 0;
            } else if length < LINE {
                line[length] = byte;
                length += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{FileId, each, parse};
    use std::fs::File;

    #[test]
    fn lines_are_understood() {
        let check = |line: &str, expected| assert_eq!(parse(line.as_bytes()), expected, "{line}");
        let id = |device, inode| FileId { device, inode };
        check(
            "7f0c1000-7f0c5000 r--s 00000000 00:01 2057                 /memfd:x (deleted)",
            Some((0x7f0c_1000..0x7f0c_5000, id((0, 1), 2057))),
        );
        check(
            "ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0    [vsyscall]",
            Some((0xffff_ffff_ff60_0000..0xffff_ffff_ff60_1000, id((0, 0), 0))),
        );
        check(
            "1000-2000 r--p 0 fe:10a 9",
            Some((0x1000..0x2000, id((0xfe, 0x10a), 9))),
        );
        for bad in [
            "",
            "1000",
            "1000-",
            "x-y r 0 0:0 0",
            "1-2 r 0 0 1",
            "1-2 r 0 0:1 z",
        ] {
            check(bad, None);
        }
    }

    #[test]
    fn a_file_is_found_where_it_is_mapped_and_nowhere_else() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(12288).expect("a size");
        let id = |file: &File| FileId::of(&rustix::fs::fstat(file).expect("a status"));
        let find = |file: &File| {
            let mut found = Vec::new();
            each(id(file), |range| found.push(range)).expect("the list");
            found
        };
        assert_eq!(find(&file), []);
        let pages = crate::sys::Pages::map(std::os::fd::AsFd::as_fd(&file), 12288).expect("pages");
        let found = find(&file);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].len(), 12288);
        drop(pages);
        assert_eq!(find(&file), []);
    }
}
