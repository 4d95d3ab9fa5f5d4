//! The VMM's threads, as this process's name space numbers them.

use std::io::Write;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::read;

/// Bytes of the line of a thread's status that has its numbers, at all depths of name spaces.
const LINE: usize = 512;

/// What the process `vmm` itself calls its thread number `thread`, where both numbers are of
/// this process's name space; `None` if it has no such thread, or `/proc` does not tell.
/// Does not allocate.
#[must_use]
pub fn in_its_own_space(vmm: i32, thread: i32) -> Option<i32> {
    let mut path = [0; 64];
    write!(&mut path[..], "/proc/{vmm}/task/{thread}/status").ok()?;
    let length = path.iter().position(|&byte| byte == 0)?;
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = openat(CWD, &path[..length], flags, Mode::empty()).ok()?;
    // All groups of users are listed before it, of which there may be 65,536.
    let (mut line, mut length) = ([0; LINE], 0);
    let mut chunk = [0; 4096];
    while let Ok(got @ 1..) = read(&file, &mut chunk) {
        for &byte in &chunk[..got] {
            if byte == b'\n' {
                if line[..length].starts_with(b"NSpid:") {
                    return innermost(&line[..length]);
                }
                length = 0;
            } else if length < LINE {
                line[length] = byte;
                length += 1;
            }
        }
    }
    None
}

/// The last number of `NSpid`: a thread's number in its own process's name space. A name
/// is bytes, and no line of it: the kernel writes a newline there as `\n`.
fn innermost(status: &[u8]) -> Option<i32> {
    let mut lines = status.split(|&byte| byte == b'\n');
    let numbers = lines.find_map(|line| line.strip_prefix(b"NSpid:"))?;
    let mut words = numbers.split(u8::is_ascii_whitespace);
    let last = words.rfind(|word| !word.is_empty())?;
    std::str::from_utf8(last).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{in_its_own_space, innermost};

    #[test]
    fn the_last_number_is_its_own() {
        let check = |status: &[u8], expected| {
            let text = status.escape_ascii();
            assert_eq!(innermost(status), expected, "{text}");
        };
        check(b"Name:\tvcpu\nPid:\t7\nNSpid:\t7\nNSsid:\t1\n", Some(7));
        check(b"Name:\t\xff\xfe\nNSpid:\t412\t31\t2\n", Some(2));
        check(b"Name:\tNSpid:\t9\nNSpid:\t5\n", Some(5));
        for bad in [&b""[..], b"Pid:\t7\n", b"NSpid:\n", b"NSpid:\tx\n"] {
            check(bad, None);
        }
    }

    #[test]
    fn a_thread_of_this_process_is_known() {
        let own = std::process::id().cast_signed();
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        assert_eq!(in_its_own_space(own, thread), Some(thread));
        assert_eq!(in_its_own_space(own, 0), None);
        assert_eq!(in_its_own_space(-1, i32::MIN), None);
    }
}
