//! What the server answers.

use fuse_abi::linux::{
    FUSE_ASYNC_READ, FUSE_NO_OPEN_SUPPORT, FUSE_WRITEBACK_CACHE, fuse_attr_out,
    fuse_batch_forget_in, fuse_entry_out, fuse_forget_in, fuse_forget_one, fuse_init_in,
    fuse_init_out, fuse_opcode, fuse_open_in, fuse_open_out, fuse_read_in, fuse_write_in,
    fuse_write_out,
};
use guest_files::{Errno, Input, Kind, Out};
use proptest::collection::vec;
use proptest::prelude::{Strategy, any, prop_assert, prop_oneof, proptest};
use sha2::{Digest, Sha256};
use zerocopy::IntoBytes;

use crate::requests::{Server, ask, first, raw, request, server};

const ROOT: u64 = 1;

fn look_up(server: &mut Server, folder: u64, name: &str) -> Result<fuse_entry_out, Errno> {
    let name = [name.as_bytes(), b"\0"].concat();
    let reply = ask(server, &request(fuse_opcode::FUSE_LOOKUP, folder, &name))?;
    Ok(first(&reply))
}

fn inputs(server: &mut Server) -> Vec<Input> {
    server.inputs(|| true).expect("nobody ends it")
}

/// The node at a path below the tree.
fn node(server: &mut Server, path: &str) -> u64 {
    let mut node = look_up(server, ROOT, "tree").expect("the tree").nodeid;
    for name in path.split('/') {
        node = look_up(server, node, name).expect("a name").nodeid;
        assert_ne!(node, 0, "{path}");
    }
    node
}

fn read(server: &mut Server, node: u64, offset: u64, size: u32) -> Result<Vec<u8>, Errno> {
    let wanted = fuse_read_in {
        offset,
        size,
        ..fuse_read_in::default()
    };
    ask(
        server,
        &request(fuse_opcode::FUSE_READ, node, wanted.as_bytes()),
    )
}

/// Names of a folder with their types, read with so much room at a time.
fn names(server: &mut Server, node: u64, size: u32, plus: bool) -> Vec<(String, u32)> {
    let opcode = if plus {
        fuse_opcode::FUSE_READDIRPLUS
    } else {
        fuse_opcode::FUSE_READDIR
    };
    let (mut names, mut offset) = (Vec::new(), 0);
    loop {
        let wanted = fuse_read_in {
            offset,
            size,
            ..fuse_read_in::default()
        };
        let reply = ask(server, &request(opcode, node, wanted.as_bytes())).expect("a folder");
        assert!(reply.len() <= size as usize);
        if reply.is_empty() {
            return names;
        }
        let mut rest = &reply[..];
        while !rest.is_empty() {
            if plus {
                rest = &rest[size_of::<fuse_entry_out>()..];
            }
            let half = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().expect("four"));
            offset = u64::from(half(8)) | u64::from(half(12)) << 32;
            let (len, kind) = (half(16) as usize, half(20));
            let name = String::from_utf8(rest[24..24 + len].to_vec()).expect("text");
            names.push((name, kind));
            rest = &rest[(24 + len).next_multiple_of(8)..];
        }
    }
}

#[test]
fn files_are_found_and_read() {
    let mut server = server();
    let library = node(&mut server, "usr/lib/libc.so.6");
    assert_eq!(read(&mut server, library, 9_990, 4096), Ok(vec![7; 10]));
    assert_eq!(read(&mut server, library, 10_000, 4096), Ok(vec![]));
    assert_eq!(read(&mut server, library, u64::MAX, u32::MAX), Ok(vec![]));
    let attributes = ask(
        &mut server,
        &request(fuse_opcode::FUSE_GETATTR, library, &[0; 16]),
    );
    let attributes: fuse_attr_out = first(&attributes.expect("it is there"));
    let attr = attributes.attr;
    assert_eq!((attr.size, attr.mode, attr.nlink), (10_000, 0o100_755, 1));
    let inputs = inputs(&mut server);
    assert_eq!(inputs.len(), 1);
    assert_eq!(inputs[0].path, b"/usr/lib/libc.so.6");
    assert_eq!(inputs[0].digest, Some(Sha256::digest([7; 10_000]).into()));
    assert!(!inputs[0].changed);
    // Who has no time for a file of any size has no inputs.
    assert!(server.inputs(|| false).is_none());
}

#[test]
fn the_errand_has_places_of_its_own() {
    let mut server = server();
    let job = look_up(&mut server, ROOT, "job").expect("the job").nodeid;
    assert_eq!(read(&mut server, job, 5, 100), Ok(b"to do".to_vec()));
    let stdin = look_up(&mut server, ROOT, "stdin").expect("it").nodeid;
    assert_eq!(read(&mut server, stdin, 0, 100), Ok(b"one line\n".to_vec()));
    // Neither is an input of the host.
    assert!(inputs(&mut server).is_empty());
}

#[test]
fn a_link_is_text() {
    let mut server = server();
    let bin = node(&mut server, "bin");
    let reply = ask(&mut server, &request(fuse_opcode::FUSE_READLINK, bin, b""));
    assert_eq!(reply, Ok(b"usr/bin".to_vec()));
    assert_eq!(inputs(&mut server)[0].kind, Kind::Link);
}

#[test]
fn folders_are_listed_in_pieces_of_any_size() {
    for plus in [false, true] {
        for size in [200, 400, 4096] {
            let mut server = server();
            let tree = look_up(&mut server, ROOT, "tree").expect("the tree").nodeid;
            let names = names(&mut server, tree, size, plus);
            let folders = ["dev", "proc", "sys", "usr"].map(|name| (name, 4));
            let expected = [&[(".", 4), ("..", 4), ("bin", 10)][..], &folders].concat();
            let names: Vec<_> = names
                .iter()
                .map(|(name, kind)| (&name[..], *kind))
                .collect();
            assert_eq!(names, expected);
        }
    }
}

#[test]
fn a_name_that_is_not_there_is_remembered_as_such() {
    let mut server = server();
    let usr = node(&mut server, "usr");
    let missing = look_up(&mut server, usr, "libz.so.1").expect("an answer");
    assert_eq!(missing.nodeid, 0);
    assert!(missing.entry_valid > 1 << 20);
    assert_eq!(server.missing_libraries(), [b"libz.so.1".to_vec()]);
    for wrong in ["", ".", "..", "a/b"] {
        assert_eq!(look_up(&mut server, usr, wrong).unwrap_err(), Errno::INVAL);
    }
    let long = "x".repeat(256);
    assert_eq!(
        look_up(&mut server, usr, &long).unwrap_err(),
        Errno::NAMETOOLONG
    );
}

#[test]
fn output_goes_to_the_sink_at_once_and_nothing_else_is_written() {
    let mut server = server();
    let out = look_up(&mut server, ROOT, "out")
        .expect("the folder")
        .nodeid;
    let stderr = look_up(&mut server, out, "stderr").expect("it").nodeid;
    let opened = ask(
        &mut server,
        &request(
            fuse_opcode::FUSE_OPEN,
            stderr,
            fuse_open_in::default().as_bytes(),
        ),
    );
    assert_eq!(first::<fuse_open_out>(&opened.expect("open")).open_flags, 1);
    let write = |bytes: &[u8], size: u32| {
        let header = fuse_write_in {
            size,
            ..fuse_write_in::default()
        };
        [header.as_bytes(), bytes].concat()
    };
    let said = request(fuse_opcode::FUSE_WRITE, stderr, &write(b"alas", 4));
    let reply: fuse_write_out = first(&ask(&mut server, &said).expect("taken"));
    assert_eq!(reply.size, 4);
    let lie = request(fuse_opcode::FUSE_WRITE, stderr, &write(b"alas", 5));
    assert_eq!(ask(&mut server, &lie), Err(Errno::INVAL));
    let program = node(&mut server, "usr/bin/true");
    let elsewhere = request(fuse_opcode::FUSE_WRITE, program, &write(b"alas", 4));
    assert_eq!(ask(&mut server, &elsewhere), Err(Errno::ROFS));
    let unlink = request(fuse_opcode::FUSE_UNLINK, program, b"x\0");
    assert_eq!(ask(&mut server, &unlink), Err(Errno::ROFS));
    let xattr = request(fuse_opcode::FUSE_GETXATTR, program, b"");
    assert_eq!(ask(&mut server, &xattr), Err(Errno::NOSYS));
    assert_eq!(server.into_sink().all, [(Out::Stderr, b"alas".to_vec())]);
}

#[test]
fn a_guest_that_sends_files_for_ever_comes_to_an_end() {
    let mut server = server().with_largest_archive(1000);
    let out = look_up(&mut server, ROOT, "out")
        .expect("the folder")
        .nodeid;
    let files = look_up(&mut server, out, "files").expect("it").nodeid;
    let header = fuse_write_in {
        size: 600,
        ..fuse_write_in::default()
    };
    let body = [header.as_bytes(), &[0; 600]].concat();
    let write = request(fuse_opcode::FUSE_WRITE, files, &body);
    assert!(ask(&mut server, &write).is_ok());
    assert_eq!(ask(&mut server, &write), Err(Errno::NOSPC));
}

#[test]
fn the_guest_and_the_server_agree_on_what_both_can() {
    let asked = fuse_init_in {
        major: 7,
        minor: 37,
        max_readahead: 131_072,
        flags: FUSE_NO_OPEN_SUPPORT | FUSE_ASYNC_READ | FUSE_WRITEBACK_CACHE,
        ..fuse_init_in::default()
    };
    let reply = ask(
        &mut server(),
        &request(fuse_opcode::FUSE_INIT, 0, asked.as_bytes()),
    );
    let reply: fuse_init_out = first(&reply.expect("an agreement"));
    assert_eq!((reply.major, reply.minor), (7, 31));
    assert_eq!(reply.flags, FUSE_NO_OPEN_SUPPORT | FUSE_ASYNC_READ);
    assert_eq!((reply.max_readahead, reply.max_pages), (131_072, 256));
    let older = fuse_init_in { minor: 12, ..asked };
    let reply = ask(
        &mut server(),
        &request(fuse_opcode::FUSE_INIT, 0, older.as_bytes()),
    );
    assert_eq!(reply, Err(Errno::PROTO));
}

#[test]
fn forgotten_nodes_are_stale() {
    let mut server = server();
    let (usr, bin) = (node(&mut server, "usr"), node(&mut server, "bin"));
    let mut reply = vec![1];
    let one = fuse_forget_in { nlookup: 1 };
    server.answer(
        &request(fuse_opcode::FUSE_FORGET, usr, one.as_bytes()),
        &mut reply,
    );
    assert!(reply.is_empty());
    assert_eq!(look_up(&mut server, usr, "lib").unwrap_err(), Errno::STALE);
    // It says that there are more than there are.
    let batch = fuse_batch_forget_in {
        count: u32::MAX,
        dummy: 0,
    };
    let of = fuse_forget_one {
        nodeid: bin,
        nlookup: 1,
    };
    let body = [batch.as_bytes(), of.as_bytes()].concat();
    server.answer(
        &request(fuse_opcode::FUSE_BATCH_FORGET, 0, &body),
        &mut reply,
    );
    let link = request(fuse_opcode::FUSE_READLINK, bin, b"");
    assert_eq!(ask(&mut server, &link), Err(Errno::STALE));
}

#[test]
fn numbers_depend_on_the_path_alone() {
    let (mut one, mut other) = (server(), server());
    let usr = node(&mut one, "usr");
    let first = look_up(&mut one, usr, "bin").expect("it").attr.ino;
    let _ = (node(&mut other, "bin"), node(&mut other, "usr/lib"));
    let usr = node(&mut other, "usr");
    let second = look_up(&mut other, usr, "bin").expect("it").attr.ino;
    assert_eq!(first, second);
    let lib = look_up(&mut other, usr, "lib").expect("it").attr.ino;
    assert_ne!(first, lib);
}

fn any_request() -> impl Strategy<Value = Vec<u8>> {
    let node = prop_oneof![0..24u64, 60..70u64, any::<u64>()];
    let name = "[a-z]{0,3}|usr|bin|lib|tree|out|job|\\.\\.";
    let body = prop_oneof![
        vec(any::<u8>(), 0..100),
        name.prop_map(|name: String| [name.as_bytes(), b"\0"].concat()),
        (any::<u64>(), 0..200_000u64, any::<u32>()).prop_map(|(fh, offset, size)| {
            let wanted = fuse_read_in {
                fh,
                offset,
                size,
                ..fuse_read_in::default()
            };
            wanted.as_bytes().to_vec()
        }),
    ];
    (0..60u32, node, body).prop_map(|(opcode, node, body)| raw(opcode, node, &body))
}

proptest! {
    #[test]
    fn any_requests_are_answered(requests in vec(any_request(), 0..40)) {
        let mut server = server();
        let mut reply = Vec::new();
        for request in requests {
            server.answer(&request, &mut reply);
            prop_assert!(reply.is_empty() || reply.len() >= 16);
            prop_assert!(reply.len() <= (1 << 20) + (64 << 10));
            if !reply.is_empty() {
                let _ = ask(&mut server, &request);
            }
        }
    }

    #[test]
    fn any_bytes_are_no_harm(bytes in vec(any::<u8>(), 0..200)) {
        let mut reply = Vec::new();
        server().answer(&bytes, &mut reply);
        prop_assert!(reply.len() <= (1 << 20) + (64 << 10));
    }
}

#[test]
fn what_was_looked_for_is_remembered_with_the_first_answer() {
    let mut server = server();
    let bin = node(&mut server, "usr/bin");
    assert_eq!(
        look_up(&mut server, bin, "false")
            .expect("an answer")
            .nodeid,
        0
    );
    assert_eq!(
        look_up(&mut server, bin, "false")
            .expect("an answer")
            .nodeid,
        0
    );
    assert_ne!(
        look_up(&mut server, bin, "true").expect("an answer").nodeid,
        0
    );
    let library = node(&mut server, "usr/lib");
    assert_eq!(names(&mut server, library, 4096, true).len(), 3);
    let (looked, more) = server.looked();
    let looked: Vec<_> = looked
        .map(|one| {
            let path = String::from_utf8(one.path.clone()).expect("text");
            let size = one.found.map(|found| (found.kind, found.size));
            assert!(!one.changed, "{path}");
            (
                path,
                size.filter(|(kind, _)| *kind == Kind::File),
                one.found.is_some(),
                one.by_name,
            )
        })
        .collect();
    let expected = [
        ("/", None, true, true),
        ("/usr", None, true, true),
        ("/usr/bin", None, true, true),
        ("/usr/bin/false", None, false, true),
        ("/usr/bin/true", Some((Kind::File, 13)), true, true),
        ("/usr/lib", None, true, true),
        (
            "/usr/lib/libc.so.6",
            Some((Kind::File, 10_000)),
            true,
            false,
        ),
    ];
    let expected =
        expected.map(|(path, size, is_there, by_name)| (path.to_owned(), size, is_there, by_name));
    assert_eq!(looked, expected);
    assert!(!more);
    // Nothing of it was read, but the list of a folder.
    assert_eq!(inputs(&mut server).len(), 1);
}
