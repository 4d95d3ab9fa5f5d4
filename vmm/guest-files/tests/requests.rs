//! Requests in bytes, and answers taken apart.

use fuse_abi::linux::{fuse_in_header, fuse_opcode, fuse_out_header};
use guest_files::{Errand, Errno, FileServer, MemoryTree, Out, Sink};
use zerocopy::{FromBytes, IntoBytes};

/// Keeps what the guest says, until it is more than it takes.
#[derive(Debug, Default)]
pub(crate) struct Said {
    pub(crate) all: Vec<(Out, Vec<u8>)>,
    pub(crate) closed: bool,
}

impl Sink for Said {
    fn take(&mut self, out: Out, bytes: &[u8]) -> Result<(), Errno> {
        if self.closed {
            return Err(Errno::PIPE);
        }
        self.all.push((out, bytes.to_vec()));
        Ok(())
    }
}

pub(crate) type Server = FileServer<MemoryTree, Said>;

/// A tree with a program, its library, and a link.
pub(crate) fn server() -> Server {
    let mut tree = MemoryTree::default();
    tree.file("/usr/bin/true", b"\x7fELF and more");
    tree.file("/usr/lib/libc.so.6", &[7; 10_000]);
    tree.symlink("/bin", "usr/bin");
    let errand = Errand {
        job: b"what to do".to_vec(),
        stdin: b"one line\n".to_vec(),
    };
    FileServer::new(tree, Said::default(), errand)
}

pub(crate) fn request(opcode: fuse_opcode, node: u64, body: &[u8]) -> Vec<u8> {
    raw(opcode as u32, node, body)
}

pub(crate) fn raw(opcode: u32, node: u64, body: &[u8]) -> Vec<u8> {
    let len = size_of::<fuse_in_header>() + body.len();
    let header = fuse_in_header {
        len: u32::try_from(len).expect("a short request"),
        opcode,
        unique: 77,
        nodeid: node,
        ..fuse_in_header::default()
    };
    [header.as_bytes(), body].concat()
}

/// The body of the answer, or its error.
pub(crate) fn ask(server: &mut Server, request: &[u8]) -> Result<Vec<u8>, Errno> {
    let mut reply = Vec::new();
    server.answer(request, &mut reply);
    let (header, body) = fuse_out_header::read_from_prefix(&reply).expect("a header");
    assert_eq!(usize::try_from(header.len), Ok(reply.len()));
    assert_eq!(header.unique, 77);
    match header.error {
        0 => Ok(body.to_vec()),
        error => {
            assert!(body.is_empty());
            Err(Errno::from_raw_os_error(-error))
        }
    }
}

/// The structure that an answer begins with.
pub(crate) fn first<T: FromBytes>(body: &[u8]) -> T {
    T::read_from_prefix(body).expect("a whole structure").0
}
