//! The random numbers that vary sampling periods (§3.4.2).
//!
//! D. F. Carta, "Two fast implementations of the 'minimal standard' random
//! number generator", CACM 33(1), 1990: 16807 times the last number, modulo
//! 2^31 - 1, without a division. The numbers have 31 bits.

/// 2^31 - 1.
const MODULUS: u32 = 0x7fff_ffff;
const MULTIPLIER: u32 = 16807;

/// The number after `state`. A multiple of 2^31 - 1, 0 among them, would be
/// followed by itself for ever: it stands for 1. Every other 32-bit seed means
/// its remainder, so a seed's series is fixed.
pub(super) fn next(state: u32) -> u32 {
    let seed = if state.is_multiple_of(MODULUS) {
        1
    } else {
        state
    };
    // The product has 47 bits: `low` holds its lower 16 with what carries out of
    // them, `high` the rest, counted in units of 2^16.
    let low = MULTIPLIER * (seed & 0xffff);
    let high = MULTIPLIER * (seed >> 16);
    // 2^31 leaves the remainder 1, so bits from there on are added at the bottom.
    let sum = low + ((high & 0x7fff) << 16) + (high >> 15);
    if sum > MODULUS { sum - MODULUS } else { sum }
}

/// `base`, varied by the bits of `mask`: base + (random & mask), with the state
/// for the next time. A mask that reaches beyond 32 bits takes a second number
/// for the upper half.
pub(super) fn vary(base: u64, mask: u64, state: u32) -> (u64, u32) {
    let low = next(state);
    let (random, state) = if mask >> 32 == 0 {
        (u64::from(low), low)
    } else {
        let high = next(low);
        (u64::from(high) << 32 | u64::from(low), high)
    };
    (base.wrapping_add(random & mask), state)
}

#[cfg(test)]
mod tests {
    use super::{MODULUS, next, vary};
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

    #[test]
    fn from_1_comes_the_series_that_the_literature_prints() {
        let mut series = std::iter::successors(Some(1), |&state| Some(next(state)));
        let first: Vec<u32> = series.clone().skip(1).take(3).collect();
        assert_eq!(first, [16807, 282_475_249, 1_622_650_073]);
        // Park and Miller, CACM 31(10), 1988: the test of an implementation.
        assert_eq!(series.nth(10_000), Some(1_043_618_065));
    }

    #[test]
    fn no_seed_gets_stuck() {
        for seed in [0, MODULUS, 2 * MODULUS] {
            assert_eq!(next(seed), 16807);
        }
        assert_eq!(next(u32::MAX), 16807, "2^32 - 1 is 1, modulo 2^31 - 1");
    }

    #[test]
    fn a_wide_mask_takes_two_numbers() {
        assert_eq!(vary(100, 0xff, 1), (100 + (16807 & 0xff), 16807));
        let both = 282_475_249 << 32 | 16807;
        assert_eq!(vary(0, u64::MAX, 1), (both, 282_475_249));
        assert_eq!(vary(0, 1 << 32, 1), (both & 1 << 32, 282_475_249));
        assert_eq!(vary(7, 0, 1), (7, 16807));
        assert_eq!(vary(u64::MAX, 1, 1).0, 0, "it wraps");
    }

    proptest! {
        #[test]
        fn it_is_the_product_modulo_2_31_minus_1(seed in any::<u32>()) {
            let seed = if seed % MODULUS == 0 { 1 } else { seed };
            let product = u64::from(seed) * 16807 % u64::from(MODULUS);
            prop_assert_eq!(u64::from(next(seed)), product);
        }

        #[test]
        fn the_seed_decides_and_the_mask_bounds(
            base in any::<u64>(), mask in any::<u64>(), seed in any::<u32>()
        ) {
            prop_assert_eq!(vary(base, mask, seed), vary(base, mask, seed));
            let added = vary(base, mask, seed).0.wrapping_sub(base);
            prop_assert!(added & !mask == 0);
        }
    }
}
