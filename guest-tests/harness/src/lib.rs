//! What the benches measure.

/// The sum of the squares of the numbers below `end`.
pub fn squares(end: u64) -> u64 {
    (0..end).fold(0, |sum, number| {
        std::hint::black_box(sum + number * number)
    })
}
