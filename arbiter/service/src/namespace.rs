//! The numbers that stand for several users and groups: `user_namespaces(7)`, "Unmapped user
//! and group IDs".

use std::fs;
use std::io::ErrorKind;
use std::sync::OnceLock;

/// What the kernel has for an overflow number where nobody has changed it.
const OVERFLOW: u32 = 65_534;

/// The user and the group that may be any that this process's namespace does not know. `None`:
/// it knows all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shared {
    pub(crate) user: Option<u32>,
    pub(crate) group: Option<u32>,
}

/// Those of this process: a namespace's map is written once, before programs run there.
pub(crate) fn shared_numbers() -> Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    *SHARED.get_or_init(|| Shared {
        user: of("uid"),
        group: of("gid"),
    })
}

fn of(kind: &str) -> Option<u32> {
    let map = fs::read(format!("/proc/self/{kind}_map"));
    let has_proc = || fs::exists("/proc/self").is_ok_and(|there| there);
    if map
        .as_ref()
        .is_err_and(|error| error.kind() == ErrorKind::NotFound)
        && has_proc()
    {
        // A kernel without user namespaces.
        return None;
    }
    let overflow = fs::read(format!("/proc/sys/kernel/overflow{kind}"));
    shared(map.ok().as_deref(), overflow.ok().as_deref())
}

/// By the bytes of the two files. Whoever cannot read its map cannot rely on the number.
fn shared(map: Option<&[u8]>, overflow: Option<&[u8]>) -> Option<u32> {
    let number =
        |text: &[u8]| -> Option<u64> { std::str::from_utf8(text).ok()?.trim().parse().ok() };
    let lengths = map
        .unwrap_or_default()
        .split(|byte| *byte == b'\n')
        .filter_map(|line| {
            let mut words = line
                .split(u8::is_ascii_whitespace)
                .filter(|word| !word.is_empty());
            number(words.nth(2)?)
        });
    // All numbers but the last, which is none.
    let is_whole = lengths.sum::<u64>() >= u64::from(u32::MAX);
    let overflow = overflow
        .and_then(number)
        .and_then(|number| u32::try_from(number).ok());
    (!is_whole).then_some(overflow.unwrap_or(OVERFLOW))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_namespace_that_knows_all_numbers_shares_none() {
        let check = |map: &str, overflow: Option<&str>, right| {
            let found = shared(Some(map.as_bytes()), overflow.map(str::as_bytes));
            assert_eq!(found, right, "{map:?}");
        };
        check("         0          0 4294967295\n", Some("65534\n"), None);
        check(
            "0 0 1000\n1000 1001 1\n1001 1000 4294966294\n",
            Some("65534"),
            None,
        );
        // A container's, whose own 65534 is not told from others.
        check(
            "         0     100000      65536\n",
            Some("65534\n"),
            Some(65_534),
        );
        check("0 1000 1\n", Some("99\n"), Some(99));
        check("0 1000 1\n", Some("\u{fffd}"), Some(65_534));
        check("", None, Some(65_534));
        assert_eq!(shared(None, None), Some(65_534));
    }
}
