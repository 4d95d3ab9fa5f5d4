//! A control group in the configuration: a path as `/proc/PID/cgroup` has it, in which `*`
//! stands for any part of one name.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// No name in the kernel's folders is longer.
const LONGEST_NAME: usize = 255;
/// Where the hierarchy is mounted beside those of version 1, and where it is alone.
const USUAL_MOUNTS: [&str; 2] = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];

/// One path, or many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CgroupRule {
    path: String,
    /// As the file has it, where TOML reads something else into it.
    escaped: Option<String>,
}

impl CgroupRule {
    /// `written`: the string as it is in the file, with its quotes.
    pub(crate) fn new(path: &str, written: &str) -> Self {
        let inner = written
            .strip_prefix('"')
            .and_then(|rest| rest.strip_suffix('"'));
        // An escaped backslash is one, whatever follows it.
        let has_escape = |inner: &str| inner.replace(r"\\", "").contains('\\');
        CgroupRule {
            path: path.to_owned(),
            escaped: inner.filter(|inner| has_escape(inner)).map(str::to_owned),
        }
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// The names that it is made of.
    fn names(&self) -> Vec<&[u8]> {
        let path = self.path.strip_prefix('/').unwrap_or(&self.path);
        if path.is_empty() {
            return Vec::new();
        }
        let path = path.strip_suffix('/').unwrap_or(path).as_bytes();
        path.split(|byte| *byte == b'/').collect()
    }

    /// Whether a control group is this one, or below it.
    pub(crate) fn covers(&self, cgroup: &[u8]) -> bool {
        let there = cgroup.split(|byte| *byte == b'/').skip(1);
        let mut there = there.filter(|name| !name.is_empty());
        let is_next = |name: &[u8]| there.next().is_some_and(|there| fits(name, there));
        self.impossible().is_none() && self.names().into_iter().all(is_next)
    }

    /// Why there can be no such control group.
    pub(crate) fn impossible(&self) -> Option<&'static str> {
        if !self.path.starts_with('/') {
            return Some("a path of a control group begins with '/', at the root of the hierarchy");
        }
        let names = self.names();
        if names.iter().any(|name| name.is_empty()) {
            return Some("a name in it is empty");
        }
        if names.iter().any(|name| matches!(*name, b"." | b"..")) {
            return Some("it has '.' or '..' for a name");
        }
        if names
            .iter()
            .any(|name| name.contains(&b'\n') || name.contains(&0))
        {
            return Some("it has a byte that no name of a control group has");
        }
        let least = |name: &&[u8]| name.iter().filter(|byte| **byte != b'*').count();
        let is_long = |name: &&[u8]| least(name) > LONGEST_NAME;
        names
            .iter()
            .any(is_long)
            .then_some("a name in it is longer than 255 bytes")
    }

    /// What may have been meant.
    pub(crate) fn hint(&self) -> String {
        if let Some(escaped) = &self.escaped {
            format!(
                "TOML reads escapes in \"…\"; a name with a backslash is written in single quotes: \
                 '{escaped}'"
            )
        } else if let Some(hint) = without_mount(&self.path) {
            hint
        } else if !self.path.starts_with('/') && !self.path.is_empty() {
            format!(
                "write '/{}', as /proc/PID/cgroup has it behind '0::'",
                self.path
            )
        } else {
            "write the path as /proc/PID/cgroup has it behind '0::' (systemd-cgls); * stands for \
             any part of a name"
                .to_owned()
        }
    }

    /// Whether there is such a control group below one of these folders.
    ///
    /// # Errors
    /// A folder cannot be read.
    pub(crate) fn is_there(&self, hierarchies: &[PathBuf]) -> io::Result<bool> {
        let names = self.names();
        for folder in hierarchies {
            if is_below(folder, &names)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// What is meant by a path that begins where the hierarchy is mounted, which is no part of a path
/// in it. `None`: it does not begin there.
pub(crate) fn without_mount(path: &str) -> Option<String> {
    let mut below = USUAL_MOUNTS
        .iter()
        .filter_map(|mount| path.strip_prefix(mount));
    let path = below.find(|path| path.starts_with('/'))?;
    Some(format!(
        "leave out where the hierarchy is mounted: '{path}'"
    ))
}

fn is_below(folder: &Path, names: &[&[u8]]) -> io::Result<bool> {
    let Some((name, rest)) = names.split_first() else {
        return Ok(true);
    };
    let entries = match fs::read_dir(folder) {
        // It is gone meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let is_it = is_folder && fits(name, entry.file_name().as_encoded_bytes());
        if is_it && is_below(&entry.path(), rest)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a name is like a pattern, in which `*` stands for any bytes.
fn fits(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut from) = (0, 0);
    // Where the last `*` was, and up to where it stands for the name.
    let mut star: Option<(usize, usize)> = None;
    while from < name.len() {
        if pattern.get(at) == Some(&b'*') {
            star = Some((at, from));
            at += 1;
        } else if pattern.get(at) == Some(&name[from]) {
            at += 1;
            from += 1;
        } else if let Some((before, stands)) = star {
            star = Some((before, stands + 1));
            at = before + 1;
            from = stands + 1;
        } else {
            return false;
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

/// Where the unified hierarchy is mounted, whole: proc_pid_mountinfo(5), of which the kernel's
/// files are below `root`.
///
/// # Errors
/// The mounts cannot be read.
pub fn hierarchies(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mounts = fs::read(root.join("proc/self/mountinfo"))?;
    let lines = mounts.split(|byte| *byte == b'\n');
    Ok(lines.filter_map(|line| hierarchy(root, line)).collect())
}

fn hierarchy(root: &Path, line: &[u8]) -> Option<PathBuf> {
    let mut words = line.split(|byte| *byte == b' ');
    let (from, at) = (words.nth(3)?, words.next()?);
    let kind = words.skip_while(|word| *word != b"-").nth(1)?;
    if kind != b"cgroup2" || from != b"/" {
        return None;
    }
    let path = PathBuf::from(std::ffi::OsString::from_vec(unescaped(at)));
    Some(root.join(path.strip_prefix("/").ok()?))
}

/// Spaces and the like are octal there: `\040`.
fn unescaped(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    let mut rest = text;
    while let Some((&first, others)) = rest.split_first() {
        let digits = others
            .get(..3)
            .and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match byte.filter(|_| first == b'\\') {
            Some(byte) => {
                plain.push(byte);
                rest = &others[3..];
            }
            None => {
                plain.push(first);
                rest = others;
            }
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(path: &str) -> CgroupRule {
        CgroupRule::new(path, &format!("'{path}'"))
    }

    #[test]
    fn rules_and_control_groups() {
        for (path, cgroup, right) in [
            ("/", &b"/"[..], true),
            ("/", b"/a/b", true),
            ("/a", b"/a", true),
            ("/a", b"/a/b", true),
            ("/a/", b"/a/b", true),
            ("/a/", b"/a", true),
            ("/a", b"/ab", false),
            ("/a/b", b"/a", false),
            ("/a", b"/", false),
            ("/a/*/c", b"/a/b/c/d", true),
            ("/a/*/c", b"/a/b/b/c", false),
            ("/a/*", b"/a", false),
            ("/*", b"/", false),
            ("/m/qemu-*.scope", b"/m/qemu-12-blue.scope/vcpu0", true),
            ("/m/qemu-*.scope", b"/m/qemu-.scope", true),
            ("/m/qemu-*.scope", b"/m/qemu-1.service", false),
            (
                r"/m/machine-qemu\x2d*\x2dblue.scope",
                br"/m/machine-qemu\x2d7\x2dblue.scope",
                true,
            ),
            (
                r"/m/machine-qemu\x2d*\x2dblue.scope",
                b"/m/machine-qemu-7-blue.scope",
                false,
            ),
            ("/a*b*c", b"/aXbYbZc", true),
            ("/a*b*c", b"/aXbYbZ", false),
            ("/a**", b"/a", true),
            ("/*", b"/B\xfcro", true),
            ("/a (deleted)", b"/a (deleted)", true),
            ("/a", b"/a (deleted)", false),
            ("", b"/a", false),
            ("a", b"/a", false),
            ("/a//b", b"/a//b", false),
            ("/a/../b", b"/a/../b", false),
            ("//", b"/", false),
        ] {
            assert_eq!(rule(path).covers(cgroup), right, "{path} {cgroup:?}");
        }
    }

    #[test]
    fn what_cannot_be_is_said_and_how_it_is_meant() {
        for (path, written, impossible, hint) in [
            (
                "machine.slice/blue",
                "\"machine.slice/blue\"",
                true,
                "'/machine.slice/blue'",
            ),
            ("/sys/fs/cgroup/a", "'/sys/fs/cgroup/a'", false, "'/a'"),
            (
                "/sys/fs/cgroup/unified/a",
                "'/sys/fs/cgroup/unified/a'",
                false,
                "'/a'",
            ),
            ("/a-b", r#""/a\x2db""#, false, r"'/a\x2db'"),
            ("/a-b", r#""/a\u002db""#, false, r"'/a\u002db'"),
            (r"/a\x2db", r#""/a\\x2db""#, false, "0::"),
            ("", "\"\"", true, "0::"),
            ("/a/./b", "'/a/./b'", true, "0::"),
            ("/a\nb", "\"\"\"/a\nb\"\"\"", true, "0::"),
        ] {
            let rule = CgroupRule::new(path, written);
            assert_eq!(rule.impossible().is_some(), impossible, "{path}");
            assert!(rule.hint().contains(hint), "{path}: {}", rule.hint());
        }
        assert!(
            rule(&format!("/{}", "x".repeat(256)))
                .impossible()
                .is_some()
        );
        assert_eq!(rule(&format!("/{}*", "x".repeat(255))).impossible(), None);
    }

    #[test]
    fn it_is_looked_for_where_the_hierarchy_is_mounted() {
        let root = tempfile::tempdir().expect("a folder");
        let group = root
            .path()
            .join(r"mnt/un ified/m.slice/qemu\x2d1.scope/vcpu");
        fs::create_dir_all(group).expect("folders");
        fs::create_dir_all(root.path().join("proc/self")).expect("a folder");
        let line = |kind: &str, from: &str, at: &str| {
            format!("30 23 0:26 {from} {at} rw,nosuid shared:4 - {kind} cgroup rw\n")
        };
        let mounts = [
            line("cgroup", "/", "/mnt/v1"),
            line("cgroup2", "/part", "/mnt/part"),
            line("cgroup2", "/", r"/mnt/un\040ified"),
        ];
        let mut mounts = mounts.concat().into_bytes();
        mounts.extend(b"1 2 0:3 / /B\xfcro rw - ext4 /dev/sd\xe9 rw\n");
        fs::write(root.path().join("proc/self/mountinfo"), mounts).expect("a file");
        let mounted = hierarchies(root.path()).expect("mounts");
        assert_eq!(mounted, [root.path().join("mnt/un ified")]);
        for (path, right) in [
            (r"/m.slice/qemu\x2d1.scope", true),
            ("/m.slice/*.scope/v*", true),
            ("/*/*/vcpu", true),
            ("/m.slice/qemu-1.scope", false),
            ("/m.slice/*.service", false),
            ("/", true),
        ] {
            assert_eq!(
                rule(path).is_there(&mounted).expect("folders"),
                right,
                "{path}"
            );
        }
    }
}
