//! What runs already, as `/proc` tells it.

use std::fs;
use std::path::Path;

use crate::guest::{Guest, Started};
use crate::records::{Ids, Mapped, MappedFile};

/// `PF_KTHREAD` of the kernel's flags of a task (`include/linux/sched.h`).
const KERNEL_THREAD: u64 = 0x0020_0000;

/// It is known how things are at the end only, so that nothing is said of an earlier moment.
const LATER: u64 = u64::MAX;

/// Everything that runs, as far as it does not end meanwhile; to be settled at its end. `tick`
/// is that of `/proc`, in ns. `between` is called before each process.
pub(crate) fn guest(proc: &Path, tick: u64, mut between: impl FnMut()) -> Guest {
    let mut guest = Guest::default();
    for pid in numbers(proc) {
        between();
        let process = proc.join(pid.to_string());
        for tid in numbers(&process.join("task")) {
            let thread = process.join("task").join(tid.to_string());
            let stat = fs::read(thread.join("stat")).unwrap_or_default();
            if let Some((comm, started)) = stat_of(&String::from_utf8_lossy(&stat), tick) {
                guest.start(LATER, Ids { pid, tid }, comm, started);
            }
        }
        let maps = fs::read(process.join("maps")).unwrap_or_default();
        for mapped in String::from_utf8_lossy(&maps).lines().filter_map(mapping) {
            guest.map(LATER, pid, mapped);
        }
    }
    guest
}

/// The names of a folder that are numbers.
fn numbers(folder: &Path) -> Vec<u32> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter_map(|name| name.parse().ok()).collect()
}

/// The name, and when and as what the thread began, of its `stat`.
fn stat_of(text: &str, tick: u64) -> Option<(&str, Started)> {
    // A name may contain parentheses and spaces.
    let (name, rest) = text.rsplit_once(") ")?;
    let (_, comm) = name.split_once(" (")?;
    let field = |number: usize| rest.split(' ').nth(number - 3)?.parse::<u64>().ok();
    let started = Started {
        ns: field(22)?.saturating_mul(tick),
        kernel: field(9)? & KERNEL_THREAD != 0,
    };
    Some((comm, started))
}

/// The executable memory that a line of `maps` tells.
fn mapping(line: &str) -> Option<Mapped> {
    let mut fields = line.splitn(6, ' ');
    let (range, rights, offset) = (fields.next()?, fields.next()?, fields.next()?);
    let (device, inode) = (fields.next()?, fields.next()?);
    let name = fields.next().unwrap_or_default().trim_start();
    if rights.as_bytes().get(2) != Some(&b'x') {
        return None;
    }
    let number = |digits| u64::from_str_radix(digits, 16).ok();
    let (start, end) = range.split_once('-')?;
    let (start, end) = (number(start)?, number(end)?);
    let (major, minor) = device.split_once(':')?;
    let part = |digits| u32::from_str_radix(digits, 16).ok();
    Some(Mapped {
        start,
        length: end.checked_sub(start)?,
        offset: number(offset)?,
        file: MappedFile {
            device: part(major)? << 20 | part(minor)? & 0xf_ffff,
            inode: inode.parse().ok()?,
            name: match name {
                // As perf calls it.
                "" => "//anon".to_owned(),
                name => name.to_owned(),
            },
        },
    })
}

/// The kernel's numbers of its processors and their APIC ids, of `/proc/cpuinfo`.
pub(crate) fn processors(cpuinfo: &str) -> Vec<(u32, u32)> {
    let of = |part: &str, name: &str| {
        let mut lines = part.lines().filter_map(|line| line.split_once(':'));
        let (_, value) = lines.find(|(key, _)| key.trim() == name)?;
        value.trim().parse().ok()
    };
    let parts = cpuinfo.split("\n\n");
    parts
        .filter_map(|part| Some((of(part, "processor")?, of(part, "apicid")?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_proc_are_read() {
        let stat = "12 (a) b (c) S 2 0 0 0 -1 2129984 0 0 0 0 0 0 0 0 20 0 1 0 345 0 0";
        let (comm, started) = stat_of(stat, 10_000_000).expect("a thread");
        assert_eq!(comm, "a) b (c");
        assert_eq!(started.ns, 3_450_000_000);
        assert!(started.kernel);
        for bad in ["", "12 (a", "12 (a) S 2", "12 (a) S x 0 0 0 -1 x 0 0 0"] {
            assert!(stat_of(bad, 1).is_none(), "{bad}");
        }

        let line = "55d0-55f0 r-xp 00002000 fd:01 1234                   /usr/bin/with space";
        let found = mapping(line).expect("a mapping");
        assert_eq!(
            (found.start, found.length, found.offset),
            (0x55d0, 0x20, 0x2000)
        );
        assert_eq!(
            (found.file.device, found.file.inode),
            (0xfd << 20 | 1, 1234)
        );
        assert_eq!(found.file.name, "/usr/bin/with space");
        let anon = mapping("1000-2000 rwxp 00000000 00:00 0 ").expect("a mapping");
        assert_eq!(anon.file.name, "//anon");
        for bad in [
            "",
            "1-2 r--p 0 0:0 0",
            "2-1 r-xp 0 0:0 0",
            "1 r-xp 0 0:0 0",
            "1-2 r-xp 0",
        ] {
            assert_eq!(mapping(bad), None, "{bad}");
        }
    }

    #[test]
    fn processors_have_apic_ids() {
        let text = "processor\t: 0\ncore id\t\t: 0\napicid\t\t: 4\ninitial apicid\t: 5\n\n\
                    processor\t: 1\napicid\t\t: 6\n\n";
        assert_eq!(processors(text), [(0, 4), (1, 6)]);
        assert_eq!(processors("nonsense"), []);
    }

    #[test]
    fn this_process_is_found() {
        let guest = guest(Path::new("/proc"), 10_000_000, || {});
        let pid = std::process::id();
        let thread = guest
            .thread(LATER, Ids { pid, tid: pid })
            .expect("this process");
        assert!(!thread.kernel && thread.memory != 0);
        let own = std::env::current_exe().expect("a program");
        let mappings = guest.mappings(thread.memory, 0);
        let names: Vec<_> = mappings.map(|(_, file)| file.name.as_str()).collect();
        assert!(names.contains(&&*own.to_string_lossy()), "{names:?}");
    }
}
