//! 128 bits as lanes of integers, and what is done lane by lane.

use super::X;

/// Integers that N of fill 128 bits, the lowest first.
pub(super) trait Lane<const N: usize>: Copy {
    fn split(x: X) -> [Self; N];
    fn join(lanes: [Self; N]) -> X;
}

macro_rules! lane {
    ($($one:ty, $bytes:literal, $lanes:literal;)*) => {$(
        impl Lane<$lanes> for $one {
            #[inline(always)]
            fn split(x: X) -> [Self; $lanes] {
                let mut lanes = [0; $lanes];
                let bytes = wide(x).to_le_bytes();
                for (lane, bytes) in lanes.iter_mut().zip(bytes.as_chunks::<$bytes>().0) {
                    *lane = <$one>::from_le_bytes(*bytes);
                }
                lanes
            }

            #[inline(always)]
            fn join(lanes: [Self; $lanes]) -> X {
                let mut bytes = [0; 16];
                for (bytes, lane) in bytes.as_chunks_mut::<$bytes>().0.iter_mut().zip(lanes) {
                    *bytes = lane.to_le_bytes();
                }
                narrow(u128::from_le_bytes(bytes))
            }
        }
    )*};
}

lane! {
    u8, 1, 16;
    i8, 1, 16;
    u16, 2, 8;
    i16, 2, 8;
    u32, 4, 4;
    i32, 4, 4;
    u64, 8, 2;
    i64, 8, 2;
}

#[inline(always)]
pub(super) fn wide(x: X) -> u128 {
    u128::from(x[0]) | u128::from(x[1]) << 64
}

#[inline(always)]
pub(super) fn narrow(value: u128) -> X {
    [value as u64, (value >> 64) as u64]
}

#[inline(always)]
pub(super) fn map<L: Lane<N>, const N: usize>(x: X, of: impl Fn(L) -> L) -> X {
    L::join(L::split(x).map(of))
}

#[inline(always)]
pub(super) fn zip<L: Lane<N>, const N: usize>(a: X, b: X, of: impl Fn(L, L) -> L) -> X {
    let (a, b) = (L::split(a), L::split(b));
    L::join(std::array::from_fn(|lane| of(a[lane], b[lane])))
}

macro_rules! compare {
    ($($name:ident, $one:ty, $mask:ty;)*) => {$(
        /// All ones where it holds.
        #[inline(always)]
        pub(super) fn $name(a: X, b: X, holds: impl Fn(&$one, &$one) -> bool) -> X {
            zip(a, b, |a: $one, b: $one| {
                <$one>::from(holds(&a, &b)).wrapping_neg()
            })
        }
    )*};
}

compare! {
    compare8, i8, i8;
    compare16, i16, i16;
    compare32, i32, i32;
    compare64, i64, i64;
}

/// Lanes of two values in turns, of the lower or the upper halves.
#[inline(always)]
pub(super) fn interleave<L: Lane<N>, const N: usize>(a: X, b: X, upper: bool) -> X {
    let (a, b) = (L::split(a), L::split(b));
    let first = if upper { N / 2 } else { 0 };
    L::join(std::array::from_fn(|lane| {
        let from = first + lane / 2;
        if lane % 2 == 0 { a[from] } else { b[from] }
    }))
}

/// Neighbours of one value, then of the other.
#[inline(always)]
pub(super) fn horizontal<L: Lane<N>, const N: usize>(a: X, b: X, of: impl Fn(L, L) -> L) -> X {
    let (a, b) = (L::split(a), L::split(b));
    L::join(std::array::from_fn(|lane| {
        let from = if lane < N / 2 { &a } else { &b };
        let at = lane % (N / 2) * 2;
        of(from[at], from[at + 1])
    }))
}

/// Lanes of half the width: one value's below, the other's above.
#[inline(always)]
pub(super) fn pack<W: Lane<N>, L: Lane<M>, const N: usize, const M: usize>(
    a: X,
    b: X,
    of: impl Fn(W) -> L,
) -> X {
    let (a, b) = (W::split(a), W::split(b));
    L::join(std::array::from_fn(|lane| {
        of(if lane < N { a[lane] } else { b[lane - N] })
    }))
}

/// The lowest lanes, each as a wider one.
#[inline(always)]
pub(super) fn widen<L: Lane<M>, W: Lane<N>, const M: usize, const N: usize>(
    x: X,
    of: impl Fn(L) -> W,
) -> X {
    let lanes = L::split(x);
    W::join(std::array::from_fn(|lane| of(lanes[lane])))
}

/// Lanes of one value or the other, by a bit each.
#[inline(always)]
pub(super) fn blend<L: Lane<N>, const N: usize>(a: X, b: X, bits: u8) -> X {
    let (a, b) = (L::split(a), L::split(b));
    L::join(std::array::from_fn(|lane| {
        if bits >> lane & 1 != 0 {
            b[lane]
        } else {
            a[lane]
        }
    }))
}

/// Lanes of one value or the other, by the sign of a third's.
#[inline(always)]
pub(super) fn blend_by<L: Lane<N> + PartialOrd + Default, const N: usize>(
    a: X,
    b: X,
    signs: X,
) -> X {
    let (a, b, signs) = (L::split(a), L::split(b), L::split(signs));
    L::join(std::array::from_fn(|lane| {
        if signs[lane] < L::default() {
            b[lane]
        } else {
            a[lane]
        }
    }))
}

/// Lanes by two bits each of a number.
#[inline(always)]
pub(super) fn pick<L: Copy>(from: [L; 4], order: u8) -> [L; 4] {
    std::array::from_fn(|lane| from[usize::from(order >> (2 * lane) & 3)])
}

/// The four words of a half, by two bits each of a number.
pub(super) fn shuffle_words(b: X, half: usize, order: u8) -> X {
    let mut result = b;
    let part = b[half];
    let words: [u16; 4] = std::array::from_fn(|at| (part >> (16 * at)) as u16);
    result[half] = pick(words, order)
        .into_iter()
        .rev()
        .fold(0, |sum, word| sum << 16 | u64::from(word));
    result
}

/// Products of neighbours, added.
#[inline(always)]
pub(super) fn multiply_add(a: X, b: X) -> X {
    let (a, b) = (i16::split(a), i16::split(b));
    let product = |at: usize| i32::from(a[at]) * i32::from(b[at]);
    i32::join(std::array::from_fn(|lane| {
        // -32768 squared twice is 2^31, which wraps.
        product(2 * lane).wrapping_add(product(2 * lane + 1))
    }))
}

/// Products of unsigned and signed bytes, neighbours added with saturation.
#[inline(always)]
pub(super) fn multiply_add_bytes(a: X, b: X) -> X {
    let (a, b) = (u8::split(a), i8::split(b));
    let product = |at: usize| i16::from(a[at]) * i16::from(b[at]);
    i16::join(std::array::from_fn(|lane| {
        product(2 * lane).saturating_add(product(2 * lane + 1))
    }))
}

/// Sums of absolute differences of bytes, of both halves.
#[inline(always)]
pub(super) fn differences(a: X, b: X) -> X {
    let (a, b) = (u8::split(a), u8::split(b));
    let sum = |from: usize| {
        (from..from + 8)
            .map(|at| u64::from(a[at].abs_diff(b[at])))
            .sum()
    };
    [sum(0), sum(8)]
}

/// MPSADBW: sums of absolute differences of four bytes of `b`, and each four of eleven of `a`.
#[inline(always)]
pub(super) fn differences_of_four(a: X, b: X, imm: u8) -> X {
    let (a, b) = (u8::split(a), u8::split(b));
    let (first, fixed) = (usize::from(imm >> 2 & 1) * 4, usize::from(imm & 3) * 4);
    u16::join(std::array::from_fn(|lane| {
        (0..4)
            .map(|at| u16::from(a[first + lane + at].abs_diff(b[fixed + at])))
            .sum()
    }))
}

/// PHMINPOSUW: the smallest of eight, and the first place where it is.
#[inline(always)]
pub(super) fn smallest(b: X) -> X {
    let lanes = u16::split(b);
    let mut best = (lanes[0], 0);
    for (at, lane) in (0u64..).zip(lanes) {
        if lane < best.0 {
            best = (lane, at);
        }
    }
    [u64::from(best.0) | best.1 << 16, 0]
}

/// Bytes of `a` by the low bits of those of `b`; 0 where these are negative.
#[inline(always)]
pub(super) fn shuffle(a: X, b: X) -> X {
    let (a, b) = (u8::split(a), u8::split(b));
    u8::join(b.map(|at| {
        if at & 0x80 == 0 {
            a[usize::from(at & 15)]
        } else {
            0
        }
    }))
}

/// PALIGNR: bytes from the middle of both, of which `a` is the upper.
#[inline(always)]
pub(super) fn align(a: X, b: X, by: u8) -> X {
    let (a, b) = (u8::split(a), u8::split(b));
    let by = usize::from(by);
    u8::join(std::array::from_fn(|lane| match lane + by {
        at @ 0..16 => b[at],
        at @ 16..32 => a[at - 16],
        _ => 0,
    }))
}

/// Shifts by bytes, to the right if `right`.
#[inline(always)]
pub(super) fn shift_bytes(a: X, by: u8, right: bool) -> X {
    match (by, right) {
        (16.., _) => [0; 2],
        (_, true) => narrow(wide(a) >> (8 * by)),
        (_, false) => narrow(wide(a) << (8 * by)),
    }
}

/// The sign of each lane, as bits.
#[inline(always)]
pub(super) fn signs<L: Lane<N> + PartialOrd + Default, const N: usize>(x: X) -> u64 {
    L::split(x)
        .into_iter()
        .enumerate()
        .map(|(lane, value)| u64::from(value < L::default()) << lane)
        .sum()
}
