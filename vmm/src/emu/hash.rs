//! A number for a machine's state, the same on every host.

use std::hash::Hasher;

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// Bytes of memory that are taken at once.
const CHUNK: usize = 0x1_0000;

/// Mixes words. It is not made to withstand anybody who wants two states to look the same.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StateHasher(u64);

impl Hasher for StateHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 ^= self.0 >> 29;
    }
}

/// Takes in all bytes of `memory`, and where they are.
pub(super) fn hash_memory(memory: &GuestMemoryMmap, hash: &mut impl Hasher) {
    let mut bytes = vec![0; CHUNK];
    for region in memory.iter() {
        let (start, len) = (region.start_addr().0, region.len());
        hash.write_u64(start);
        let mut done = 0;
        while done < len {
            let room = usize::try_from(len - done).map_or(CHUNK, |left| left.min(CHUNK));
            let piece = &mut bytes[..room];
            // A region's bytes are all there.
            if memory.read_slice(piece, GuestAddress(start + done)).is_ok() {
                hash.write(piece);
            }
            done += room as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_byte_changes_the_number() {
        let ranges = [
            (GuestAddress(0), 0x2_0000),
            (GuestAddress(0x10_0000), 0x1000),
        ];
        let memory = GuestMemoryMmap::<()>::from_ranges(&ranges).expect("memory");
        let number = || {
            let mut hash = StateHasher::default();
            hash_memory(&memory, &mut hash);
            hash.finish()
        };
        let mut seen = vec![number()];
        for at in [0, 7, 0xffff, 0x1_0000, 0x1_ffff, 0x10_0fff] {
            memory.write_obj(1_u8, GuestAddress(at)).expect("inside");
            let found = number();
            assert!(!seen.contains(&found), "{at:#x}");
            seen.push(found);
        }
        assert_eq!(number(), number());
    }
}
