//! Requests and answers of FUSE in bytes. The structures are `fuse-abi`'s; here is what stands
//! around them.

use fuse_abi::linux::{fuse_in_header, fuse_opcode, fuse_out_header};
use rustix::io::Errno;
use zerocopy::{FromBytes, IntoBytes};

/// Bytes in front of an answer.
const OUT_HEADER: usize = size_of::<fuse_out_header>();

/// A request, as far as it is the same for all.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) opcode: u32,
    unique: u64,
    /// The node that it is about.
    pub(crate) node: u64,
    /// What is behind the header.
    pub(crate) body: &'a [u8],
}

impl<'a> Request<'a> {
    /// `None` if there is no whole header, or its length is not that of the bytes.
    pub(crate) fn read(bytes: &'a [u8]) -> Option<Self> {
        let (header, rest) = fuse_in_header::read_from_prefix(bytes).ok()?;
        let len = usize::try_from(header.len).ok()?;
        let body = rest.get(..len.checked_sub(size_of::<fuse_in_header>())?)?;
        Some(Self {
            opcode: header.opcode,
            unique: header.unique,
            node: header.nodeid,
            body,
        })
    }

    /// The structure that the body begins with, and what is behind it.
    pub(crate) fn take<T: FromBytes>(&self) -> Result<(T, &'a [u8]), Errno> {
        T::read_from_prefix(self.body).map_err(|_| Errno::INVAL)
    }

    /// The body as a name in a folder.
    pub(crate) fn name(&self) -> Result<&'a [u8], Errno> {
        let name = self.body.strip_suffix(b"\0").ok_or(Errno::INVAL)?;
        match name {
            b"" | b"." | b".." => Err(Errno::INVAL),
            name if name.iter().any(|byte| matches!(byte, 0 | b'/')) => Err(Errno::INVAL),
            name if name.len() > 255 => Err(Errno::NAMETOOLONG),
            name => Ok(name),
        }
    }

    /// Whether the guest waits for no answer.
    pub(crate) fn is_one_way(&self) -> bool {
        [
            fuse_opcode::FUSE_FORGET,
            fuse_opcode::FUSE_BATCH_FORGET,
            fuse_opcode::FUSE_INTERRUPT,
        ]
        .into_iter()
        .any(|one| one as u32 == self.opcode)
    }
}

/// An answer that is being written: room for its header, and the body behind.
#[derive(Debug)]
pub(crate) struct Reply<'a> {
    bytes: &'a mut Vec<u8>,
}

impl<'a> Reply<'a> {
    pub(crate) fn new(bytes: &'a mut Vec<u8>) -> Self {
        bytes.clear();
        bytes.resize(OUT_HEADER, 0);
        Self { bytes }
    }

    pub(crate) fn put(&mut self, part: &(impl IntoBytes + zerocopy::Immutable)) {
        self.bytes.extend_from_slice(part.as_bytes());
    }

    /// The body so far, to append to.
    pub(crate) fn body(&mut self) -> &mut Vec<u8> {
        self.bytes
    }

    /// Bytes of the body.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len() - OUT_HEADER
    }

    /// Writes the header: with an error, there is no body.
    pub(crate) fn end(self, request: &Request<'_>, outcome: Result<(), Errno>) {
        let error = match outcome {
            Ok(()) => 0,
            Err(errno) => {
                self.bytes.truncate(OUT_HEADER);
                -errno.raw_os_error()
            }
        };
        let header = fuse_out_header {
            len: u32::try_from(self.bytes.len()).unwrap_or(u32::MAX),
            error,
            unique: request.unique,
        };
        self.bytes[..OUT_HEADER].copy_from_slice(header.as_bytes());
    }
}
