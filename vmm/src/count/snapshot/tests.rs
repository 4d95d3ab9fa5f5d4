//! The file: what is written is read, and what was tampered with is refused.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;
use crate::count::Signals;
use crate::count::console::Console;
use crate::count::machine::{Parts, assemble, clock};
use crate::count::platform::{Connections, CountPlatform};
use crate::emu::{Lines, Nobody};
use crate::vcpu::VcpuControl;

const SIGNALS: Signals = Signals {
    tag: "t",
    port: 0x7f0,
    ready: 1,
    done: 2,
};
const MEMORY: [(GuestAddress, usize); 2] = [
    (GuestAddress(0), 3 << 20),
    (GuestAddress(0x1000_0000), 2 << 20),
];

fn key(text: &str) -> Key {
    serde_json::from_value(text.into()).expect("a key is a text")
}

/// A machine as it is made, with something in its memory, and what is kept of it.
fn machine() -> (GuestMemoryMmap, SavedGuest) {
    let memory = GuestMemoryMmap::from_ranges(&MEMORY).expect("memory");
    for (at, byte) in [
        (0x5000, 1_u8),
        (0x2f_ffff, 2),
        (0x1000_0000, 3),
        (0x101f_ffff, 4),
    ] {
        memory.write_obj(byte, GuestAddress(at)).expect("inside");
    }
    let (lines, control) = (Arc::<Lines>::default(), Arc::<VcpuControl>::default());
    let connections = Connections {
        memory: memory.clone(),
        lines: lines.clone(),
        clock: clock(),
        console: Console::default(),
        control: control.clone(),
    };
    let serve = |_: &[u8], _: &mut Vec<u8>| {};
    let platform = Arc::new(CountPlatform::new(connections, SIGNALS, serve));
    let mut room = assemble(Parts {
        memory: memory.clone(),
        start: None,
        platform: platform.clone(),
        lines,
        clock: clock(),
        control,
        outside: Box::new(Nobody),
    })
    .expect("a machine");
    let saved = SavedGuest {
        key: key("k"),
        room: room.save().expect("it can go on"),
        devices: platform.save().expect("they are there"),
        booted: 7,
    };
    (memory, saved)
}

fn all_bytes(memory: &GuestMemoryMmap) -> Vec<u8> {
    let mut all = Vec::new();
    for (start, len) in MEMORY {
        let mut bytes = vec![0; len];
        memory.read_slice(&mut bytes, start).expect("inside");
        all.extend(bytes);
    }
    all
}

#[test]
fn what_is_written_is_read_and_mapped_privately() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("image");
    let (memory, saved) = machine();
    // Of one who was killed.
    fs::write(folder.path().join("image.partial"), b"half").expect("room");
    write(&path, saved.clone(), &memory).expect("written");
    let about = fs::metadata(&path).expect("it is there");
    assert_eq!(about.permissions().mode() & 0o777, 0o600);
    // Four pages and the state of five MiB.
    assert!(
        about.blocks() * 512 < 256 << 10,
        "{} blocks",
        about.blocks()
    );
    let snapshot = Snapshot::open(&path, &key("k")).expect("as it was written");
    assert_eq!(snapshot.saved, saved);
    let mapped = snapshot.map().expect("mapped");
    assert_eq!(all_bytes(&mapped), all_bytes(&memory));
    mapped
        .write_obj(9_u8, GuestAddress(0x5000))
        .expect("inside");
    let again = Snapshot::open(&path, &key("k")).expect("nothing has changed it");
    assert_eq!(all_bytes(&again.map().expect("mapped")), all_bytes(&memory));
    let other = Snapshot::open(&path, &key("l")).expect_err("another key");
    assert!(matches!(other, SnapshotError::Other(_)), "{other}");
    let names: Vec<_> = fs::read_dir(folder.path()).expect("a folder").collect();
    assert_eq!(names.len(), 1, "{names:?}");
}

/// How a file is refused that was changed like this.
fn refusal(change: impl FnOnce(&Path, &mut Vec<u8>)) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("image");
    let (memory, saved) = machine();
    write(&path, saved, &memory).expect("written");
    let mut bytes = fs::read(&path).expect("it is there");
    change(&path, &mut bytes);
    if path.is_file() {
        fs::write(&path, bytes).expect("it is ours");
    }
    Snapshot::open(&path, &key("k"))
        .expect_err("it was changed")
        .to_string()
}

#[test]
fn what_was_tampered_with_is_refused_and_named() {
    let check = |expected: &str, change: fn(&Path, &mut Vec<u8>)| {
        let found = refusal(change);
        assert!(found.contains(expected), "{expected}: {found}");
    };
    check("another kind of file", |_, bytes| bytes[0] ^= 1);
    check("another version", |_, bytes| bytes[16] ^= 1);
    check("its header is damaged", |_, bytes| bytes[23] = 0xff);
    check("its state is damaged", |_, bytes| bytes[24] ^= 1);
    check("its state is damaged", |_, bytes| bytes[4096 + 100] ^= 1);
    check("its memory is damaged", |_, bytes| {
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
    });
    // Where there was a hole.
    check("its memory is damaged", |_, bytes| {
        let middle = bytes.len() - (1 << 20);
        bytes[middle] = 1;
    });
    check("cut off", |_, bytes| bytes.truncate(bytes.len() - 4096));
    check("cut off", |_, bytes| bytes.push(0));
    check("failed to fill", |_, bytes| bytes.truncate(30));
    check("others can read", |path, _| {
        let mode = fs::Permissions::from_mode(0o640);
        fs::set_permissions(path, mode).expect("it is ours");
    });
    check("cannot open", |path, _| {
        fs::remove_file(path).expect("it is ours");
        symlink("nowhere", path).expect("a link");
    });
    check("no snapshot", |path, _| {
        fs::remove_file(path).expect("it is ours");
    });
}
