//! Which files of this machine are seen.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use guest_files::{Given, Kind, Owner, Refusal, Tree, View, ViewError, ViewFile};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;

/// A folder, by its path without links.
fn folder() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().canonicalize().expect("its path");
    (folder, path)
}

fn view(folder: &Path) -> View {
    let given = Given {
        folder: folder.to_owned(),
        ..Given::default()
    };
    View::new(&given).expect("a view")
}

fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_encoded_bytes()
}

fn content(view: &mut View, path: &[u8]) -> Result<Vec<u8>, Refusal> {
    let file: ViewFile = view.open(path)?;
    let mut read = Vec::new();
    view.read(&file, 0, 1 << 20, &mut read)?;
    Ok(read)
}

#[test]
fn the_working_folder_is_the_users_and_the_system_is_roots() {
    let (_kept, path) = folder();
    let file = path.join("a");
    fs::write(&file, b"content").expect("room");
    fs::set_permissions(&file, PermissionsExt::from_mode(0o6755)).expect("mine");
    let mut view = view(&path);
    let a = view.stat(bytes(&file)).expect("given");
    assert_eq!((a.kind, a.size, a.owner), (Kind::File, 7, Owner::User));
    // No rights of somebody else come along.
    assert_eq!(a.mode, 0o755);
    assert_eq!(content(&mut view, bytes(&file)), Ok(b"content".to_vec()));
    // The time at which it was written here says nothing; that of a package's file does.
    assert_eq!(a.modified, None);
    let shell = view.stat(b"/usr/bin/dash").expect("given");
    let here = fs::metadata("/usr/bin/dash").expect("it is there");
    assert_eq!(shell.modified, u64::try_from(here.mtime()).ok());
    let usr = view.stat(b"/usr").expect("given");
    assert_eq!((usr.kind, usr.owner), (Kind::Folder, Owner::System));
    assert!(view.tmp_is_given() == path.starts_with("/tmp"));
}

#[test]
fn what_is_no_file_folder_or_link_is_not_there() {
    let (_kept, path) = folder();
    let pipe = path.join("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RWXU, 0).expect("a pipe");
    fs::write(path.join("b"), b"").expect("room");
    fs::create_dir(path.join("a")).expect("room");
    symlink("b", path.join("c")).expect("room");
    let mut view = view(&path);
    let listed = view.list(bytes(&path)).expect("a folder");
    let listed: Vec<_> = listed.iter().map(|one| (&one.name[..], one.kind)).collect();
    let expected = [
        (&b"a"[..], Kind::Folder),
        (b"b", Kind::File),
        (b"c", Kind::Link),
    ];
    assert_eq!(listed, expected);
    assert_eq!(view.stat(bytes(&pipe)), Err(Refusal::Missing));
    assert!(content(&mut view, bytes(&pipe)).is_err());
    assert_eq!(view.link(bytes(&path.join("c"))), Ok(b"b".to_vec()));
    assert_eq!(view.link(bytes(&path.join("b"))), Err(Refusal::Kind));
}

#[test]
fn links_are_followed_by_nobody() {
    let (_kept, path) = folder();
    let (_other, elsewhere) = folder();
    fs::write(elsewhere.join("secret"), b"secret").expect("room");
    fs::create_dir(path.join("inside")).expect("room");
    fs::write(path.join("inside/secret"), b"mine").expect("room");
    symlink(&elsewhere, path.join("out")).expect("room");
    symlink(elsewhere.join("secret"), path.join("file")).expect("room");
    let mut view = view(&path);
    for below in ["out/secret", "file"] {
        let path = path.join(below);
        assert!(content(&mut view, bytes(&path)).is_err(), "{below}");
    }
    let inside = path.join("inside/secret");
    assert_eq!(content(&mut view, bytes(&inside)), Ok(b"mine".to_vec()));
    // The folder becomes a link while the guest runs.
    fs::remove_dir_all(path.join("inside")).expect("mine");
    symlink(&elsewhere, path.join("inside")).expect("room");
    assert_eq!(content(&mut view, bytes(&inside)), Err(Refusal::Missing));
    // Nor does it help that the whole folder is another one now.
    let moved = path.with_extension("moved");
    fs::rename(&path, &moved).expect("mine");
    symlink(&elsewhere, &path).expect("room");
    assert_eq!(
        content(&mut view, bytes(&path.join("secret"))),
        Err(Refusal::Missing)
    );
    fs::remove_file(&path).expect("mine");
    fs::rename(&moved, &path).expect("mine");
}

#[test]
fn what_was_not_given_is_told_apart_from_what_is_not_there() {
    let (_kept, path) = folder();
    let (_other, elsewhere) = folder();
    let mut view = view(&path);
    assert_eq!(view.stat(bytes(&elsewhere)), Err(Refusal::Outside));
    assert_eq!(view.stat(b"/etc/shadow"), Err(Refusal::Outside));
    assert_eq!(view.stat(b"/no/such/file"), Err(Refusal::Missing));
    assert_eq!(view.stat(b"/usr/no/such/file"), Err(Refusal::Missing));
    let passwd = content(&mut view, b"/etc/passwd").expect("one of the guest");
    assert!(
        String::from_utf8(passwd)
            .expect("text")
            .contains("user:x:1000:1000")
    );
    let etc = view.list(b"/etc").expect("a folder");
    assert!(etc.iter().any(|one| one.name == b"passwd"));
    assert!(!etc.iter().any(|one| one.name == b"shadow"));
}

#[test]
fn a_program_brings_its_links_and_no_neighbours() {
    let (_kept, path) = folder();
    let (_other, elsewhere) = folder();
    fs::write(elsewhere.join("tool-1"), b"#!/bin/sh\n").expect("room");
    fs::write(elsewhere.join("neighbour"), b"").expect("room");
    symlink("tool-1", elsewhere.join("tool")).expect("room");
    let given = Given {
        folder: path,
        program: Some(elsewhere.join("tool")),
        with: Vec::new(),
    };
    let mut view = View::new(&given).expect("a view");
    let tool = elsewhere.join("tool");
    assert_eq!(view.link(bytes(&tool)), Ok(b"tool-1".to_vec()));
    let real = elsewhere.join("tool-1");
    assert_eq!(
        content(&mut view, bytes(&real)),
        Ok(b"#!/bin/sh\n".to_vec())
    );
    let neighbour = elsewhere.join("neighbour");
    assert_eq!(view.stat(bytes(&neighbour)), Err(Refusal::Outside));
    assert_eq!(view.list(bytes(&elsewhere)).map(|all| all.len()), Ok(2));
}

#[test]
fn a_program_of_the_system_changes_nothing() {
    let (_kept, path) = folder();
    let given = Given {
        folder: path.clone(),
        program: Some("/bin/sh".into()),
        with: Vec::new(),
    };
    let mut with = View::new(&given).expect("a view");
    let mut without = view(&path);
    for folder in [&b"/"[..], b"/bin", b"/usr/bin"] {
        assert_eq!(with.stat(folder), without.stat(folder));
        assert_eq!(with.list(folder).ok(), without.list(folder).ok());
    }
}

#[test]
fn what_cannot_be_given_is_refused_by_name() {
    let with = |path: &str| {
        View::new(&Given {
            folder: "/".into(),
            program: None,
            with: vec![path.into()],
        })
    };
    assert!(matches!(with("/"), Err(ViewError::Everything)));
    assert!(matches!(
        with("/proc/self"),
        Err(ViewError::Taken { taken: "/proc", .. })
    ));
    let error = with("/no/such/folder")
        .expect_err("it is not there")
        .to_string();
    assert!(
        error.starts_with("/no/such/folder: No such file"),
        "{error}"
    );
    assert!(with("/usr").is_ok());
}
