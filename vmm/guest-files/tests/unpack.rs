//! What comes back: files as they were sent, and nothing outside of the folder, whatever is sent.

use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use guest_files::{UnpackError, Unpacked, unpack};
use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof};
use proptest::proptest;
use tar::{EntryType, Header};

const LIMIT: u64 = 1 << 20;

/// An entry of an archive, as anybody may write it.
#[derive(Clone, Debug)]
struct Sent {
    kind: EntryType,
    name: Vec<u8>,
    target: Vec<u8>,
    content: Vec<u8>,
    mode: u32,
}

fn sent(kind: EntryType, name: &str, target: &str, content: &[u8]) -> Sent {
    Sent {
        kind,
        name: name.into(),
        target: target.into(),
        content: content.to_vec(),
        mode: 0o4755,
    }
}

fn file(name: &str, content: &[u8]) -> Sent {
    sent(EntryType::Regular, name, "", content)
}

fn link(name: &str, target: &str) -> Sent {
    sent(EntryType::Symlink, name, target, b"")
}

/// In bytes, without what the crate `tar` would refuse to write.
fn archive(of: &[Sent]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for one in of {
        for (kind, text) in [(b'L', &one.name), (b'K', &one.target)] {
            if text.len() > 100 {
                let text = [&text[..], b"\0"].concat();
                put(
                    &mut bytes,
                    EntryType::new(kind),
                    b"././@LongLink",
                    b"",
                    &text,
                    0,
                );
            }
        }
        put(
            &mut bytes,
            one.kind,
            &one.name,
            &one.target,
            &one.content,
            one.mode,
        );
    }
    bytes.extend_from_slice(&[0; 1024]);
    bytes
}

fn put(to: &mut Vec<u8>, kind: EntryType, name: &[u8], target: &[u8], content: &[u8], mode: u32) {
    let mut header = Header::new_gnu();
    let gnu = header.as_gnu_mut().expect("it is one");
    let len = name.len().min(100);
    gnu.name[..len].copy_from_slice(&name[..len]);
    let len = target.len().min(100);
    gnu.linkname[..len].copy_from_slice(&target[..len]);
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_size(content.len() as u64);
    header.set_cksum();
    to.extend_from_slice(header.as_bytes());
    to.extend_from_slice(content);
    to.resize(to.len().next_multiple_of(512), 0);
}

/// A folder with a neighbour that nobody may touch.
struct Place {
    kept: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let kept = tempfile::tempdir().expect("a folder");
        fs::create_dir(kept.path().join("into")).expect("room");
        fs::create_dir(kept.path().join("neighbour")).expect("room");
        fs::write(kept.path().join("neighbour/file"), b"mine").expect("room");
        Self { kept }
    }

    fn target(&self) -> PathBuf {
        self.kept.path().join("into")
    }

    fn unpack(&self, of: &[Sent]) -> Result<Unpacked, UnpackError> {
        unpack(&archive(of)[..], &self.target(), LIMIT)
    }

    fn is_whole(&self) -> bool {
        let names = |path: &Path| fs::read_dir(path).map_or(0, Iterator::count);
        let neighbour = self.kept.path().join("neighbour");
        names(self.kept.path()) == 2
            && names(&neighbour) == 1
            && fs::read(neighbour.join("file")).is_ok_and(|bytes| bytes == b"mine")
    }
}

#[test]
fn files_folders_and_links_come_as_they_were_sent() {
    let place = Place::new();
    let long = "n".repeat(200);
    let all = [
        sent(EntryType::Directory, "work", "", b""),
        file("work/a", b"content"),
        file(&format!("work/{long}"), b""),
        link("work/b", "a"),
        link("work/deep/c", "../a"),
    ];
    let unpacked = place.unpack(&all).expect("a good archive");
    assert_eq!((unpacked.files, unpacked.bytes), (4, 7));
    assert!(unpacked.left_out.is_empty());
    let at = |name: &str| place.target().join("work").join(name);
    assert_eq!(fs::read(at("a")).ok(), Some(b"content".to_vec()));
    assert_eq!(fs::read(at("deep/c")).ok(), Some(b"content".to_vec()));
    assert!(at(&long).is_file());
    let mode = fs::metadata(at("a")).expect("it").permissions().mode();
    assert_eq!(mode & 0o7777, 0o755);
}

#[test]
fn what_is_there_is_replaced_and_not_written_through() {
    let place = Place::new();
    symlink("../neighbour/file", place.target().join("a")).expect("room");
    symlink("../neighbour", place.target().join("folder")).expect("room");
    let all = [file("a", b"new"), file("folder/file", b"new")];
    let unpacked = place.unpack(&all).expect("one of them can be");
    assert_eq!(unpacked.files, 1);
    assert_eq!(unpacked.left_out.len(), 1);
    assert_eq!(
        fs::read(place.target().join("a")).ok(),
        Some(b"new".to_vec())
    );
    assert!(place.is_whole());
}

#[test]
fn no_name_leaves_the_folder() {
    let all = [
        file("../neighbour/file", b"x"),
        file("/etc/umpire-was-here", b"x"),
        file("a/../../neighbour/file", b"x"),
        link("out", "../neighbour"),
        link("absolute", "/etc"),
        link("here", "."),
        link("up", "here/.."),
        file("up/file", b"x"),
        sent(EntryType::Link, "hard", "../neighbour/file", b""),
        sent(EntryType::Char, "device", "", b""),
        sent(EntryType::Fifo, "pipe", "", b""),
    ];
    let place = Place::new();
    let unpacked = place.unpack(&all).expect("the rest");
    assert!(place.is_whole());
    // What was to be a link on the way is a folder of the archive's own.
    assert_eq!(
        fs::read(place.target().join("up/file")).ok(),
        Some(b"x".to_vec())
    );
    assert_eq!((unpacked.files, unpacked.left_out.len()), (2, 9));
}

#[test]
fn what_is_no_whole_archive_is_said_so() {
    let place = Place::new();
    let good = archive(&[file("a", &[0; 2000])]);
    for cut in [0, 1, 512, 600, 2559, 2560, 2561] {
        let cut = unpack(&good[..cut], &place.target(), LIMIT);
        assert!(cut.is_err());
    }
    let large = place.unpack(&[file("a", &vec![0; 600_000]), file("b", &vec![0; 600_000])]);
    assert!(matches!(large, Err(UnpackError::Large { limit: LIMIT })));
    let nowhere = unpack(&good[..], &place.target().join("missing"), LIMIT);
    assert!(matches!(nowhere, Err(UnpackError::Here { .. })));
}

fn any_name() -> impl Strategy<Value = Vec<u8>> {
    let part = prop_oneof![
        Just(b"a".to_vec()),
        Just(b"b".to_vec()),
        Just(b"neighbour".to_vec()),
        Just(b"file".to_vec()),
        Just(b"..".to_vec()),
        Just(b".".to_vec()),
        Just(b"".to_vec()),
        vec(1..=255u8, 1..3),
    ];
    vec(part, 1..6).prop_map(|parts| parts.join(&b'/'))
}

fn any_sent() -> impl Strategy<Value = Sent> {
    let kind = prop_oneof![
        Just(EntryType::Regular),
        Just(EntryType::Directory),
        Just(EntryType::Symlink),
        any::<u8>().prop_map(EntryType::new),
    ];
    (
        kind,
        any_name(),
        any_name(),
        vec(any::<u8>(), 0..9),
        any::<u32>(),
    )
        .prop_map(|(kind, name, target, content, mode)| Sent {
            kind,
            name,
            target,
            content,
            mode: mode & 0o7777,
        })
}

/// Every link below leads to a place below, by the way that the system goes.
fn links_stay(folder: &Path, root: &Path) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.into_iter().all(|entry| {
        let path = entry.path();
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => links_stay(&path, root),
            Ok(kind) if kind.is_symlink() => path
                .canonicalize()
                .map_or(true, |led| led.starts_with(root)),
            _ => true,
        }
    })
}

proptest! {
    #[test]
    fn nothing_leaves_the_folder(all in vec(any_sent(), 0..12)) {
        let place = Place::new();
        let _ = place.unpack(&all);
        prop_assert!(place.is_whole());
        let root = place.target().canonicalize().expect("it is there");
        prop_assert!(links_stay(&root, &root));
    }

    #[test]
    fn any_bytes_are_an_archive_or_not(
        mut bytes in vec(any::<u8>(), 0..3000),
        at in any::<prop::sample::Index>(),
    ) {
        let place = Place::new();
        let _ = unpack(&bytes[..], &place.target(), LIMIT);
        // A good one with one byte changed.
        let mut good = archive(&[file("a/b", b"content"), link("c", "a/b")]);
        let at = at.index(good.len());
        good[at] ^= bytes.pop().unwrap_or(1);
        let _ = unpack(&good[..], &place.target(), LIMIT);
        prop_assert!(place.is_whole());
    }

    #[test]
    fn content_comes_back_byte_by_byte(content in vec(any::<u8>(), 0..5000)) {
        let place = Place::new();
        let mut name = std::ffi::OsString::from("f");
        name.push(std::ffi::OsStr::from_bytes(b"\xff"));
        let mut one = file("", &content);
        one.name = name.as_bytes().to_vec();
        place.unpack(&[one]).expect("a good archive");
        prop_assert_eq!(fs::read(place.target().join(name)).ok(), Some(content));
        let mut rest = fs::File::create(place.target().join("x")).expect("room");
        rest.write_all(b"x").expect("the folder can be used");
    }
}
