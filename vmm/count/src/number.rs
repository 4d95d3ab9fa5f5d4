//! How counts and changes are written.

use std::cmp::Ordering;

/// Digits with a comma between thousands.
#[must_use]
pub fn grouped(count: u64) -> String {
    umpire_events::grouped(&count.to_string())
}

/// A difference with its sign: `+1,000`, `-3`, `0`.
#[must_use]
pub fn signed(before: u64, now: u64) -> String {
    let sign = match now.cmp(&before) {
        Ordering::Less => "-",
        Ordering::Equal => "",
        Ordering::Greater => "+",
    };
    format!("{sign}{}", grouped(now.abs_diff(before)))
}

/// A change in percent, to the last of three digits, with its sign: `+1.000 %`. A change that is
/// less than that digit is not 0: `<+0.001 %`. What was not there before is `new`.
#[must_use]
pub fn percent(before: u64, now: u64) -> String {
    const DIGITS: u128 = 1000;
    let difference = u128::from(now.abs_diff(before));
    if difference == 0 {
        return "0 %".to_owned();
    }
    if before == 0 {
        return "new".to_owned();
    }
    let sign = if now < before { '-' } else { '+' };
    let before = u128::from(before);
    // Rounded to the nearest; a half goes away from 0.
    let thousandths = (difference * 100 * DIGITS * 2 + before) / (before * 2);
    if thousandths == 0 {
        return format!("<{sign}0.001 %");
    }
    let (whole, part) = (thousandths / DIGITS, thousandths % DIGITS);
    format!("{sign}{whole}.{part:03} %")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_grouped() {
        for (count, expected) in [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (1_234_567, "1,234,567"),
        ] {
            assert_eq!(grouped(count), expected);
        }
    }

    #[test]
    fn changes() {
        fn check(before: u64, now: u64, expected: [&str; 2]) {
            let found = [signed(before, now), percent(before, now)];
            assert_eq!(found, expected, "{before} to {now}");
        }
        check(0, 0, ["0", "0 %"]);
        check(0, 5, ["+5", "new"]);
        check(5, 0, ["-5", "-100.000 %"]);
        check(1_000_000, 1_005_000, ["+5,000", "+0.500 %"]);
        check(3, 4, ["+1", "+33.333 %"]);
        check(3, 5, ["+2", "+66.667 %"]);
        check(1_000_000, 1_000_001, ["+1", "<+0.001 %"]);
        check(1_000_000, 999_999, ["-1", "<-0.001 %"]);
        check(
            1,
            u64::MAX,
            [
                "+18,446,744,073,709,551,614",
                "+1844674407370955161400.000 %",
            ],
        );
    }
}
