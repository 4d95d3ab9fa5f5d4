//! A compressor: matches of text before, found by a hash of three bytes.

use crate::Random;
use crate::sys::Memory;

const LEN: usize = 1 << 15;
const HASHES: usize = 1 << 12;
/// Bytes of a match.
const LEAST: usize = 3;
const MOST: usize = 66;

const WORDS: [&[u8]; 12] = [
    b"counter ",
    b"the ",
    b"of ",
    b"overflow ",
    b"guest ",
    b"a ",
    b"is ",
    b"instruction ",
    b"interrupt ",
    b"and ",
    b"register, ",
    b"kernel. ",
];

/// Compresses a text.
pub(crate) fn compress(memory: &mut Memory, rounds: u64) -> u64 {
    let (words, bytes) = memory.halves();
    let (text, packed) = bytes.split_at_mut(LEN);
    write_text(text);
    let mut sum = 0u64;
    for round in 0..rounds {
        // What an earlier round has left is not looked for again, at another distance.
        text[(round as usize * 64) % LEN] ^= 1;
        for hash in &mut words[..HASHES] {
            *hash = round as u32 ^ u32::MAX;
        }
        let len = pack(text, packed, &mut words[..HASHES]);
        sum = sum.wrapping_mul(31).wrapping_add(len as u64);
    }
    sum
}

fn write_text(text: &mut [u8]) {
    let mut random = Random(17);
    let mut word: &[u8] = &[];
    for byte in text {
        if word.is_empty() {
            word = WORDS[random.below(12) as usize];
        }
        if let [first, rest @ ..] = word {
            *byte = *first;
            word = rest;
        }
    }
}

/// Literals below 128 as they are; a match as its length above that, and its distance.
#[inline(never)]
fn pack(text: &[u8], packed: &mut [u8], last: &mut [u32]) -> usize {
    let (mut at, mut out) = (0, 0);
    while at < text.len() {
        let found = find(text, at, last);
        match found {
            Some((from, len)) => {
                let [low, high] = ((at - from) as u16).to_le_bytes();
                packed[out] = (len - LEAST) as u8 | 0x80;
                packed[out + 1] = low;
                packed[out + 2] = high;
                out += 3;
                at += len;
            }
            None => {
                packed[out] = text[at] & 0x7f;
                out += 1;
                at += 1;
            }
        }
    }
    out
}

/// The last place of the same hash, if there is as much as a match there.
fn find(text: &[u8], at: usize, last: &mut [u32]) -> Option<(usize, usize)> {
    let rest = text.len() - at;
    if rest < LEAST {
        return None;
    }
    let three = [text[at], text[at + 1], text[at + 2]];
    let number = u32::from_le_bytes([three[0], three[1], three[2], 0]);
    let hash = (number.wrapping_mul(0x9e37_79b1) >> 20) as usize;
    let from = last[hash] as usize;
    last[hash] = at as u32;
    if from >= at {
        return None;
    }
    let most = rest.min(MOST);
    let mut len = 0;
    while len < most && text[from + len] == text[at + len] {
        len += 1;
    }
    (len >= LEAST).then_some((from, len))
}
