//! Puts together what L1 boots with: busybox, KVM's modules, init, and the command with its files.

use std::env;
use std::fs::{self, File};
use std::io::{BufWriter, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::cpio::Cpio;
use super::elf;
use super::error::L1Error;
use super::libraries::{Files, Libraries};
use super::packages::MODULES;
use super::run::{GUEST_OUT, Run, find_program};
use super::tool::capture;

const INIT: &str = include_str!("init.sh");

/// Stripping smaller programs saves less time than it takes.
const STRIP_FROM: u64 = 4 << 20;

/// Writes the initramfs for `run` and returns its stream. `kernel` and `busybox` are folders of the cache.
pub(crate) fn write<W: Write>(
    out: W,
    run: &Run,
    kernel: &Path,
    busybox: &Path,
) -> Result<W, L1Error> {
    let mut image = Initramfs {
        cpio: Cpio::new(BufWriter::new(out)),
        libraries: Libraries::of_host(),
    };
    add_merged_usr(&mut image.cpio)?;
    image.copy(&busybox.join("busybox"), Path::new("/l1/busybox"), 0o755)?;
    for module in MODULES {
        let name = format!("{module}.ko");
        image.copy(&kernel.join(&name), &Path::new("/l1").join(&name), 0o644)?;
    }
    image.cpio.bytes("l1/init", 0o755, INIT.as_bytes())?;
    image
        .cpio
        .bytes("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n")?;
    image.cpio.bytes("etc/group", 0o644, b"root:x:0:\n")?;
    image.add_run(run)?;
    let out = image.cpio.finish()?;
    out.into_inner()
        .map_err(|error| L1Error::file("write", "the initramfs")(error.into_error()))
}

/// Starts a guest's file system with the merged `/usr`, whatever this machine has.
pub(crate) fn add_merged_usr(cpio: &mut Cpio<impl Write>) -> Result<(), L1Error> {
    for folder in ["bin", "sbin", "lib", "lib64"] {
        cpio.directory(&format!("usr/{folder}"))?;
        cpio.symlink(folder, &format!("usr/{folder}"))?;
    }
    Ok(())
}

struct Initramfs<W: Write> {
    cpio: Cpio<W>,
    libraries: Libraries,
}

impl<W: Write> Initramfs<W> {
    fn add_run(&mut self, run: &Run) -> Result<(), L1Error> {
        let program = run.resolve()?;
        let cwd = env::current_dir().map_err(L1Error::file("find", "the working directory"))?;
        self.cpio.directory(&guest_name(&cwd)?)?;
        if run.out.is_some() {
            self.cpio.directory(GUEST_OUT)?;
        }
        self.cpio
            .bytes("l1/run", 0o644, &run.script(&program, &cwd))?;
        self.add_program(&program, &program)?;
        for (host, guest) in &run.files {
            let guest = std::path::absolute(guest).map_err(L1Error::file("place", guest))?;
            self.add(host, &guest)?;
        }
        for file in run.named_files() {
            self.add(&file, &file)?;
        }
        let cache = Path::new("/etc/ld.so.cache");
        if cache.is_file() {
            self.copy(cache, cache, 0o644)?;
        }
        Ok(())
    }

    /// Adds a file or, recursively, a directory.
    fn add(&mut self, host: &Path, guest: &Path) -> Result<(), L1Error> {
        let data = fs::metadata(host).map_err(L1Error::file("read", host))?;
        if data.is_dir() {
            self.cpio.directory(&guest_name(guest)?)?;
            for entry in fs::read_dir(host).map_err(L1Error::file("read", host))? {
                let entry = entry.map_err(L1Error::file("read", host))?;
                self.add_entry(&entry.path(), &guest.join(entry.file_name()))?;
            }
            return Ok(());
        }
        if !data.is_file() {
            return Err(L1Error::Archive {
                path: host.display().to_string(),
                reason: "it is neither a file nor a directory",
            });
        }
        if data.permissions().mode() & 0o111 != 0 {
            return self.add_program(host, guest);
        }
        self.copy(host, guest, data.permissions().mode())
    }

    /// Adds what a directory holds, as it is: links stay links, programs bring no libraries, sockets and
    /// devices are left out.
    fn add_entry(&mut self, host: &Path, guest: &Path) -> Result<(), L1Error> {
        let data = fs::symlink_metadata(host).map_err(L1Error::file("read", host))?;
        if data.is_symlink() {
            let target = fs::read_link(host).map_err(L1Error::file("read", host))?;
            return self.cpio.symlink(&guest_name(guest)?, &utf8(&target)?);
        }
        if data.is_file() {
            return self.copy(host, guest, data.permissions().mode());
        }
        if data.is_dir() {
            return self.add(host, guest);
        }
        Ok(())
    }

    /// Adds an executable file with what it needs to run: libraries, or the interpreter of a script.
    fn add_program(&mut self, host: &Path, guest: &Path) -> Result<(), L1Error> {
        if self.cpio.contains(&guest_name(guest)?) {
            return Ok(());
        }
        let mut start = Vec::new();
        let file = File::open(host).map_err(L1Error::file("read", host))?;
        let read = file.take(256).read_to_end(&mut start);
        read.map_err(L1Error::file("read", host))?;
        if elf::is_elf(&start) {
            return self.add_elf(host, guest);
        }
        self.copy(host, guest, 0o755)?;
        for interpreter in interpreters(&start) {
            // A script may name an interpreter that only L1 has (busybox); it fails there if not.
            let paths = env::var_os("PATH").unwrap_or_default();
            if let Ok(program) = find_program(interpreter.as_ref(), &paths) {
                self.add_program(&program, &program)?;
            }
        }
        Ok(())
    }

    fn add_elf(&mut self, host: &Path, guest: &Path) -> Result<(), L1Error> {
        let bytes = fs::read(host).map_err(L1Error::file("read", host))?;
        let dynamic = elf::parse(&bytes, host).unwrap_or_default();
        if dynamic.interpreter.is_none() {
            // A static program, or no program for this system at all (a kernel, also a 32-bit one):
            // its bytes stay as they are.
            return self.copy(host, guest, 0o755);
        }
        let mut files = Files::new();
        let program = std::path::absolute(host).map_err(L1Error::file("find", host))?;
        self.libraries.collect(&program, &mut files)?;
        for (name, place) in &files {
            self.copy(place, name, 0o755)?;
        }
        match stripped(host, bytes.len() as u64) {
            Some(small) => self.cpio.bytes(&guest_name(guest)?, 0o755, &small),
            None => self.cpio.bytes(&guest_name(guest)?, 0o755, &bytes),
        }
    }

    fn copy(&mut self, host: &Path, guest: &Path, mode: u32) -> Result<(), L1Error> {
        let mut file = File::open(host).map_err(L1Error::file("read", host))?;
        let length = file.metadata().map_err(L1Error::file("read", host))?.len();
        self.cpio.file(&guest_name(guest)?, mode, length, &mut file)
    }
}

/// A copy of the program without debug information. None where `strip` is missing or fails: the
/// program is then taken whole, which only takes longer.
pub(crate) fn stripped(program: &Path, size: u64) -> Option<Vec<u8>> {
    if size < STRIP_FROM {
        return None;
    }
    let copy = tempfile::NamedTempFile::new().ok()?;
    let mut command = Command::new("strip");
    command
        .arg("--strip-debug")
        .arg("-o")
        .arg(copy.path())
        .arg(program);
    capture(&mut command, "stripping", "").ok()?;
    fs::read(copy.path()).ok()
}

/// The programs in a script's first line: `#!/usr/bin/env -S bash -e` gives env and bash.
fn interpreters(start: &[u8]) -> Vec<String> {
    let Some(line) = start.strip_prefix(b"#!") else {
        return Vec::new();
    };
    let line = line.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let mut words = line.split_whitespace().map(str::to_owned);
    let Some(first) = words.next() else {
        return Vec::new();
    };
    let is_env = first.ends_with("/env");
    let second = words.find(|word| !word.starts_with('-') && !word.contains('='));
    let mut found = vec![first];
    found.extend(second.filter(|_| is_env));
    found
}

/// The archive's name for a path of a guest with the merged `/usr`.
pub(crate) fn guest_name(path: &Path) -> Result<String, L1Error> {
    let name = utf8(path)?;
    let name = name.trim_start_matches('/');
    let first = name.split('/').next().unwrap_or_default();
    let merged = ["bin", "sbin", "lib", "lib64"].contains(&first);
    Ok(if merged {
        format!("usr/{name}")
    } else {
        name.to_owned()
    })
}

fn utf8(path: &Path) -> Result<String, L1Error> {
    let text = path.to_str().map(str::to_owned);
    text.ok_or_else(|| L1Error::Archive {
        path: path.display().to_string(),
        reason: "its name is not UTF-8",
    })
}

/// Splits `HOST[:GUEST]`, the value of `--file`.
pub(crate) fn file_argument(value: &str) -> Result<(PathBuf, PathBuf), L1Error> {
    let refuse = |reason| L1Error::Argument {
        value: value.to_owned(),
        reason,
    };
    let (host, guest) = match value.split_once(':') {
        Some((host, guest)) => (host, guest),
        None => (value, value),
    };
    if host.is_empty() || guest.is_empty() {
        return Err(refuse("expected HOST or HOST:GUEST, two paths"));
    }
    if guest != host && !guest.starts_with('/') {
        return Err(refuse("the name in the guest must start with `/`"));
    }
    Ok((host.into(), guest.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_the_guest() {
        fn check(path: &str, expected: &str) {
            assert_eq!(guest_name(Path::new(path)).expect("UTF-8"), expected);
        }
        check(
            "/lib/x86_64-linux-gnu/libc.so.6",
            "usr/lib/x86_64-linux-gnu/libc.so.6",
        );
        check(
            "/lib64/ld-linux-x86-64.so.2",
            "usr/lib64/ld-linux-x86-64.so.2",
        );
        check("/usr/bin/env", "usr/bin/env");
        check("/library/x", "library/x");
        check("/bin", "usr/bin");
    }

    #[test]
    fn script_interpreters() {
        fn check(start: &str, expected: &[&str]) {
            assert_eq!(interpreters(start.as_bytes()), expected, "{start}");
        }
        check("", &[]);
        check("echo", &[]);
        check("#!", &[]);
        check("#!/bin/sh -e\nexec", &["/bin/sh"]);
        check("#! /usr/bin/env bash\n", &["/usr/bin/env", "bash"]);
        check("#!/usr/bin/env -S A=1 bash -e\n", &["/usr/bin/env", "bash"]);
    }

    #[test]
    fn file_arguments() {
        fn check(value: &str, expected: Result<(&str, &str), &str>) {
            match (file_argument(value), expected) {
                (Ok(found), Ok((host, guest))) => assert_eq!(found, (host.into(), guest.into())),
                (Err(found), Err(expected)) => {
                    assert!(found.to_string().contains(expected), "{found}");
                }
                (found, expected) => panic!("{found:?}, expected {expected:?}"),
            }
        }
        check("a/b", Ok(("a/b", "a/b")));
        check("a:/b", Ok(("a", "/b")));
        check(
            "a:b",
            Err("`a:b`: the name in the guest must start with `/`"),
        );
        check(":/b", Err("two paths"));
        check("", Err("two paths"));
    }
}
