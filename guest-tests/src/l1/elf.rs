//! Reads what the dynamic loader would read of an ELF file: interpreter, needed libraries, search paths.

use std::path::Path;

use object::LittleEndian;
use object::elf::{DT_NEEDED, DT_RPATH, DT_RUNPATH, ELFMAG, FileHeader64, PT_INTERP};
use object::read::elf::{Dyn, FileHeader, ProgramHeader};

use super::error::L1Error;

/// The dynamic linking information of one program or library.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Dynamic {
    /// The dynamic loader (`PT_INTERP`); static programs and libraries have none.
    pub(crate) interpreter: Option<String>,
    /// Libraries by name (`DT_NEEDED`).
    pub(crate) needed: Vec<String>,
    /// Search paths (`DT_RPATH` and `DT_RUNPATH`), split, with `$ORIGIN` as written.
    pub(crate) paths: Vec<String>,
}

/// Whether these bytes start as an ELF file does.
pub(crate) fn is_elf(bytes: &[u8]) -> bool {
    bytes.starts_with(&ELFMAG)
}

/// Parses an x86-64 ELF file; `path` serves for errors only.
pub(crate) fn parse(bytes: &[u8], path: &Path) -> Result<Dynamic, L1Error> {
    read(bytes).map_err(|reason| L1Error::Elf {
        path: path.to_owned(),
        reason,
    })
}

fn read(bytes: &[u8]) -> Result<Dynamic, String> {
    let text = |error: object::Error| error.to_string();
    let header = FileHeader64::<LittleEndian>::parse(bytes).map_err(text)?;
    let endian = header.endian().map_err(text)?;
    if header.e_machine.get(endian) != object::elf::EM_X86_64 {
        return Err("it is built for another processor than x86-64".to_owned());
    }
    let mut dynamic = Dynamic::default();
    let sections = header.sections(endian, bytes).map_err(text)?;
    for segment in header.program_headers(endian, bytes).map_err(text)? {
        if segment.p_type(endian) == PT_INTERP {
            let name = segment
                .data(endian, bytes)
                .map_err(|()| "its interpreter's name lies outside the file".to_owned())?;
            let name = name.strip_suffix(&[0]).unwrap_or(name);
            dynamic.interpreter = Some(String::from_utf8_lossy(name).into_owned());
        }
    }
    let Some((entries, strings)) = sections.dynamic(endian, bytes).map_err(text)? else {
        return Ok(dynamic);
    };
    let strings = sections.strings(endian, bytes, strings).map_err(text)?;
    for entry in entries {
        let tag = entry.tag(endian);
        if ![DT_NEEDED, DT_RPATH, DT_RUNPATH].contains(&tag) {
            continue;
        }
        let value = entry.string(endian, strings).map_err(text)?;
        let value = String::from_utf8_lossy(value).into_owned();
        if tag == DT_NEEDED {
            dynamic.needed.push(value);
        } else {
            let paths = value.split(':').filter(|path| !path.is_empty());
            dynamic.paths.extend(paths.map(str::to_owned));
        }
    }
    Ok(dynamic)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_test_needs_libc_through_the_loader() {
        let path = std::env::current_exe().expect("a test has a file");
        let bytes = std::fs::read(&path).expect("readable");
        assert!(is_elf(&bytes));
        let dynamic = parse(&bytes, &path).expect("the linker wrote it");
        assert_eq!(
            dynamic.interpreter.as_deref(),
            Some("/lib64/ld-linux-x86-64.so.2")
        );
        assert!(
            dynamic.needed.iter().any(|name| name == "libc.so.6"),
            "{dynamic:?}"
        );
    }

    #[test]
    fn broken_files_are_named() {
        fn check(bytes: &[u8], expected: &str) {
            let error = parse(bytes, Path::new("/x/tool")).expect_err("not usable");
            let text = error.to_string();
            assert!(
                text.starts_with("/x/tool: not a usable ELF file: ") && text.contains(expected),
                "{text}"
            );
        }
        let whole = std::fs::read(std::env::current_exe().expect("file")).expect("readable");
        let mut other = whole.clone();
        other[18] = 183; // EM_AARCH64
        check(&other, "another processor");
        check(b"", "");
        check(b"#!/bin/sh\n", "");
        check(&whole[..64], "");
        check(&whole[..whole.len() / 2], "");
    }
}
