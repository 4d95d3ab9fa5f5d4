//! Any requests for files: each is answered by an error or a bounded answer.
#![no_main]

use guest_files::{Errand, Errno, FileServer, MemoryTree, Out, Sink};
use libfuzzer_sys::fuzz_target;

struct Nowhere;

impl Sink for Nowhere {
    fn take(&mut self, _: Out, _: &[u8]) -> Result<(), Errno> {
        Ok(())
    }
}

// A request is its length in a byte, and so many bytes behind a header's own length, which is
// right: wrong ones are no requests.
fuzz_target!(|data: &[u8]| {
    let mut tree = MemoryTree::default();
    tree.file("/usr/bin/true", &[1; 5000]);
    tree.symlink("/bin", "usr/bin");
    let errand = Errand {
        job: vec![2; 100],
        stdin: vec![3; 100],
    };
    let mut server = FileServer::new(tree, Nowhere, errand);
    let (mut rest, mut reply) = (data, Vec::new());
    while let Some((len, more)) = rest.split_first() {
        let (body, behind) = more.split_at(usize::from(*len).min(more.len()));
        rest = behind;
        let len = u32::try_from(body.len() + 4).unwrap_or(0);
        let request = [&len.to_le_bytes(), body].concat();
        server.answer(&request, &mut reply);
        assert!(reply.len() <= (1 << 20) + (64 << 10));
        if let Some(len) = reply.first_chunk() {
            assert_eq!(u32::from_le_bytes(*len) as usize, reply.len());
        }
    }
});
