//! Heap sort, which calls its comparison by a pointer.

use core::hint::black_box;

use crate::Random;
use crate::sys::Memory;

type Less = fn(u32, u32) -> bool;

/// Sorts 4,096 numbers, up and down in turns.
pub(crate) fn heap(memory: &mut Memory, rounds: u64) -> u64 {
    let words = &mut memory.words()[..4096];
    let mut random = Random(99);
    let mut sum = 0u64;
    let orders: [Less; 2] = black_box([|a, b| a < b, |a, b| a > b]);
    for round in 0..rounds {
        for word in words.iter_mut() {
            *word = random.next();
        }
        sort(words, orders[(round & 1) as usize]);
        let middle = u64::from(words[words.len() / 2]);
        sum = sum.wrapping_mul(3).wrapping_add(middle);
    }
    sum
}

fn sort(words: &mut [u32], less: Less) {
    for at in (0..words.len() / 2).rev() {
        sift(words, at, less);
    }
    for end in (1..words.len()).rev() {
        words.swap(0, end);
        sift(&mut words[..end], 0, less);
    }
}

/// Lets the number at `at` sink to its place.
#[inline(never)]
fn sift(words: &mut [u32], mut at: usize, less: Less) {
    loop {
        let mut child = 2 * at + 1;
        if child >= words.len() {
            return;
        }
        if child + 1 < words.len() && less(words[child], words[child + 1]) {
            child += 1;
        }
        if !less(words[at], words[child]) {
            return;
        }
        words.swap(at, child);
        at = child;
    }
}
