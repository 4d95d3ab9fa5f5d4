//! Files of this machine that a program has read or looked for, as inputs of its run.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use guest_files::{FileServer, Given, Input, Kind, Looked, Sink, View};
use umpire_count::Inputs;
use umpire_count::inputs::printable;
use vmm::count::{Met, Patience};

/// What the program has read and looked for are inputs. The limit that ended it, if one did: a run
/// that met one is none to compare with, and its files may be of any size.
pub(super) fn add_all<S: Sink>(
    server: &mut FileServer<View, S>,
    given: &Given,
    patience: &Patience,
    inputs: &mut Inputs,
    notes: &mut Vec<String>,
) -> Option<Met> {
    let Some(read) = server.inputs(|| patience.is_over().is_none()) else {
        return patience.is_over();
    };
    add_read(&read, given, inputs, notes);
    add_looked(server, &read, &given.folder, inputs, notes);
    None
}

/// Files, folders and links that the program has read are inputs.
fn add_read(read: &[Input], given: &Given, inputs: &mut Inputs, notes: &mut Vec<String>) {
    // What was executed is what the links on the way lead to.
    let program = given.program.as_ref();
    let program = program.and_then(|path| fs::canonicalize(path).ok());
    for input in read {
        let is_program = program.as_deref() == Some(path_of(input));
        let (name, value) = described_file(input, is_program, &given.folder);
        if input.changed {
            let path = printable(&input.path);
            notes.push(format!(
                "{path} changed while the program ran: its counts are of parts of both"
            ));
        }
        inputs.add(name, value);
    }
}

/// What the program was told of names is an input, whether it read what is there or not: that
/// there is nothing, what it is, its size and its rights. What came along with a list of a folder
/// is one input a folder.
fn add_looked<S: Sink>(
    server: &FileServer<View, S>,
    read: &[Input],
    folder: &Path,
    inputs: &mut Inputs,
    notes: &mut Vec<String>,
) {
    let files = read.iter().filter(|input| input.kind == Kind::File);
    let files: BTreeSet<&[u8]> = files.map(|input| &*input.path).collect();
    let mut listed: BTreeMap<&[u8], Vec<u8>> = BTreeMap::new();
    let (names, more) = server.looked();
    // What leads to the working folder is named by that.
    let leads = |path: &[u8]| folder.starts_with(Path::new(OsStr::from_bytes(path)));
    for looked in names.filter(|one| !leads(&one.path)) {
        let value = described_name(looked, files.contains(&*looked.path));
        if looked.by_name {
            inputs.add(format!("name {}", shown(&looked.path, folder)), value);
        } else {
            let end = looked.path.iter().rposition(|byte| *byte == b'/');
            let (parent, name) = looked.path.split_at(end.unwrap_or(0));
            let all = listed.entry(parent).or_default();
            for part in [name, b"\0", value.as_bytes(), b"\0"] {
                all.extend_from_slice(part);
            }
        }
        if looked.changed {
            let path = printable(&looked.path);
            notes.push(format!("{path} became another one while the program ran"));
        }
    }
    for (parent, all) in listed {
        let name = format!("names in {}", shown(parent, folder));
        inputs.add(name, umpire_count::inputs::digest(&all));
    }
    if more {
        let told = "the program looked for more names than are kept: not all are inputs";
        inputs.add("names", told);
        notes.push(told.to_owned());
    }
}

/// What the program was told of a name; the size of a file that it read is in that one's digest.
fn described_name(looked: &Looked, was_read: bool) -> String {
    let Some(found) = &looked.found else {
        return "nothing".to_owned();
    };
    let (what, size) = match found.kind {
        Kind::File if was_read => ("file", None),
        Kind::File => ("file", Some(found.size)),
        Kind::Link => ("link", Some(found.size)),
        Kind::Folder => ("directory", None),
    };
    let size = size.map_or_else(String::new, |size| format!(" of {size} bytes"));
    let time = found.modified;
    let time = time.map_or_else(String::new, |time| format!(", changed at {time}"));
    format!("{what}{size}, mode {:o}{time}", found.mode)
}

/// A path as inputs name it: the working folder is an input of its own, and what is in it may lie
/// anywhere.
fn shown(path: &[u8], folder: &Path) -> String {
    let path = Path::new(OsStr::from_bytes(path));
    let shown = match path.strip_prefix(folder) {
        Ok(below) => Path::new(".").join(below),
        Err(_) => path.to_owned(),
    };
    printable(shown.as_os_str().as_bytes())
}

fn path_of(input: &Input) -> &Path {
    Path::new(OsStr::from_bytes(&input.path))
}

/// A file, folder or link that the program has read: its name among the inputs, and its value.
fn described_file(input: &Input, is_program: bool, folder: &Path) -> (String, String) {
    let path = path_of(input);
    let name = path.file_name().unwrap_or_default().as_bytes();
    let kind = match input.kind {
        Kind::Folder => "directory",
        Kind::Link => "link",
        Kind::File if is_program => "program",
        Kind::File if name.windows(3).any(|part| part == b".so") => "library",
        Kind::File => "file",
    };
    let mut value = match &input.digest {
        Some(digest) => umpire_count::inputs::text(digest),
        None => "gone at the end".to_owned(),
    };
    if input.changed {
        value.push_str(", changed meanwhile");
    }
    (format!("{kind} {}", shown(&input.path, folder)), value)
}

#[cfg(test)]
mod tests {
    use guest_files::{Attributes, Owner};

    use super::*;

    #[test]
    fn files_are_named_by_what_they_are() {
        fn check(path: &str, kind: Kind, is_program: bool, expected: &str) {
            let input = Input {
                path: path.as_bytes().to_vec(),
                kind,
                size: 1,
                digest: Some([0x1f; 32]),
                changed: false,
            };
            let (name, value) = described_file(&input, is_program, Path::new("/w"));
            assert_eq!(name, expected);
            assert!(value.starts_with("sha256:1f1f"), "{value}");
        }
        check("/usr/bin/gzip", Kind::File, true, "program /usr/bin/gzip");
        check("/w/a/gzip", Kind::File, true, "program ./a/gzip");
        check(
            "/usr/lib/libc.so.6",
            Kind::File,
            false,
            "library /usr/lib/libc.so.6",
        );
        check("/w/words", Kind::File, false, "file ./words");
        check("/w", Kind::Folder, false, "directory ./");
        check("/bin", Kind::Link, false, "link /bin");
    }

    #[test]
    fn a_changed_file_is_another_input() {
        let input = |digest, changed| Input {
            path: b"/x".to_vec(),
            kind: Kind::File,
            size: 1,
            digest,
            changed,
        };
        let value = |input| described_file(&input, false, Path::new("/w")).1;
        assert_eq!(value(input(None, false)), "gone at the end");
        assert!(value(input(Some([0; 32]), true)).ends_with(", changed meanwhile"));
    }

    #[test]
    fn what_is_told_of_a_name_is_its_value() {
        let looked = |found| Looked {
            path: b"/w/x".to_vec(),
            found,
            by_name: true,
            changed: false,
        };
        let found = |kind, modified| {
            looked(Some(Attributes {
                kind,
                size: 7,
                mode: 0o640,
                owner: Owner::User,
                modified,
            }))
        };
        let check = |looked: &Looked, was_read, expected: &str| {
            assert_eq!(described_name(looked, was_read), expected);
        };
        check(&looked(None), false, "nothing");
        check(&found(Kind::File, None), false, "file of 7 bytes, mode 640");
        // What a file has is in its digest.
        check(
            &found(Kind::File, Some(9)),
            true,
            "file, mode 640, changed at 9",
        );
        check(&found(Kind::Folder, None), false, "directory, mode 640");
        check(&found(Kind::Link, None), false, "link of 7 bytes, mode 640");
    }
}
