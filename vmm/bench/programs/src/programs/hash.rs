//! CRC-32 and SHA-256.

use core::hint::black_box;

use crate::Random;
use crate::sys::Memory;

/// Bytes of a message.
const LEN: usize = 1 << 14;

fn message(memory: &mut Memory) -> &mut [u8] {
    let mut random = Random(3);
    let message = &mut memory.bytes()[..LEN];
    for byte in message.iter_mut() {
        *byte = random.below(256) as u8;
    }
    message
}

/// Of ISO 3309, bits reversed: for each byte, what it adds.
const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut rest = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            rest = rest >> 1 ^ 0xedb8_8320 * (rest & 1);
            bit += 1;
        }
        table[byte] = rest;
        byte += 1;
    }
    table
};

/// CRC-32 by a table.
pub(crate) fn crc32(memory: &mut Memory, rounds: u64) -> u64 {
    let message = message(memory);
    let mut crc = u32::MAX;
    for _ in 0..rounds * 4 {
        for byte in message.iter() {
            crc = crc >> 8 ^ TABLE[usize::from(crc as u8 ^ byte)];
        }
    }
    (!crc).into()
}

/// FIPS 180-4, 4.2.2.
const K: [u32; 64] = [
    0x428a_2f98,
    0x7137_4491,
    0xb5c0_fbcf,
    0xe9b5_dba5,
    0x3956_c25b,
    0x59f1_11f1,
    0x923f_82a4,
    0xab1c_5ed5,
    0xd807_aa98,
    0x1283_5b01,
    0x2431_85be,
    0x550c_7dc3,
    0x72be_5d74,
    0x80de_b1fe,
    0x9bdc_06a7,
    0xc19b_f174,
    0xe49b_69c1,
    0xefbe_4786,
    0x0fc1_9dc6,
    0x240c_a1cc,
    0x2de9_2c6f,
    0x4a74_84aa,
    0x5cb0_a9dc,
    0x76f9_88da,
    0x983e_5152,
    0xa831_c66d,
    0xb003_27c8,
    0xbf59_7fc7,
    0xc6e0_0bf3,
    0xd5a7_9147,
    0x06ca_6351,
    0x1429_2967,
    0x27b7_0a85,
    0x2e1b_2138,
    0x4d2c_6dfc,
    0x5338_0d13,
    0x650a_7354,
    0x766a_0abb,
    0x81c2_c92e,
    0x9272_2c85,
    0xa2bf_e8a1,
    0xa81a_664b,
    0xc24b_8b70,
    0xc76c_51a3,
    0xd192_e819,
    0xd699_0624,
    0xf40e_3585,
    0x106a_a070,
    0x19a4_c116,
    0x1e37_6c08,
    0x2748_774c,
    0x34b0_bcb5,
    0x391c_0cb3,
    0x4ed8_aa4a,
    0x5b9c_ca4f,
    0x682e_6ff3,
    0x748f_82ee,
    0x78a5_636f,
    0x84c8_7814,
    0x8cc7_0208,
    0x90be_fffa,
    0xa450_6ceb,
    0xbef9_a3f7,
    0xc671_78f2,
];

/// FIPS 180-4, 5.3.3.
const START: [u32; 8] = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];

/// SHA-256 of whole blocks, without their padding.
pub(crate) fn sha256(memory: &mut Memory, rounds: u64) -> u64 {
    let message = message(memory);
    let mut state = START;
    for _ in 0..rounds {
        for block in message.chunks_exact(64) {
            compress(&mut state, block);
        }
    }
    u64::from(state[0]) << 32 | u64::from(state[7])
}

/// FIPS 180-4, 6.2.2.
#[inline(never)]
fn compress(state: &mut [u32; 8], block: &[u8]) {
    // The last 16 words of the schedule. What is cleared first is cleared by REP STOS.
    let mut w: [u32; 16] = core::array::from_fn(|t| {
        let at = 4 * t;
        u32::from_be_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
    });
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    // Of a length that the compiler does not know, or there would be no loop.
    for (t, k) in black_box(&K[..]).iter().enumerate() {
        if t >= 16 {
            w[t & 15] = next_word(&w, t);
        }
        let large1 = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let choice = e & f ^ !e & g;
        let one = h
            .wrapping_add(large1)
            .wrapping_add(choice)
            .wrapping_add(*k)
            .wrapping_add(w[t & 15]);
        let large0 = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let two = large0.wrapping_add(a & b ^ a & c ^ b & c);
        (h, g, f, e) = (g, f, e, d.wrapping_add(one));
        (d, c, b, a) = (c, b, a, one.wrapping_add(two));
    }
    for (sum, value) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *sum = sum.wrapping_add(value);
    }
}

/// FIPS 180-4, 6.2.2, step 1.
fn next_word(w: &[u32; 16], t: usize) -> u32 {
    let (a, b) = (w[(t - 15) & 15], w[(t - 2) & 15]);
    let small0 = a.rotate_right(7) ^ a.rotate_right(18) ^ a >> 3;
    let small1 = b.rotate_right(17) ^ b.rotate_right(19) ^ b >> 10;
    w[t & 15]
        .wrapping_add(small0)
        .wrapping_add(w[(t - 7) & 15])
        .wrapping_add(small1)
}
