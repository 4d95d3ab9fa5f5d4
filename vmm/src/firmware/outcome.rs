//! Compares the counters that the firmware holds with those it was expected to
//! hold. CPUID announces the kernel's counters before the firmware runs, so a
//! difference means that CPUID is wrong.

use arbiter::{CounterSet, PerKind};

/// The counters that CPUID was made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Counters that the firmware was to hold when its phase ends.
    pub held: CounterSet,
    /// Counters that CPUID announces, where these are not all.
    pub announced: Option<PerKind>,
}

impl Expected {
    /// What is wrong, on one line, if the firmware holds others.
    #[must_use]
    pub fn compare(&self, held: CounterSet) -> Option<String> {
        if held == self.held {
            return None;
        }
        let announced = match self.announced {
            Some(counters) => format!(
                "{} programmable and {} fixed-function counters",
                counters.programmable, counters.fixed
            ),
            None => "every counter".to_owned(),
        };
        Some(format!(
            "the firmware holds {}, where --firmware-counter has it hold {}; CPUID announces \
             {announced} to the kernel, which may find too few or be told of too few: name what \
             the firmware reserves by --firmware-counter",
            names(held),
            names(self.held)
        ))
    }
}

fn names(counters: CounterSet) -> String {
    let names: Vec<String> = counters.iter().map(|counter| counter.to_string()).collect();
    if names.is_empty() {
        "no counter".to_owned()
    } else {
        names.join(", ")
    }
}

#[cfg(test)]
mod tests {
    use arbiter::CounterId;

    use super::*;

    #[test]
    fn a_difference_names_both_and_what_was_announced() {
        fn check(expected: &[u8], announced: Option<(u8, u8)>, held: &[u8], parts: &[&str]) {
            let set = |counters: &[u8]| -> CounterSet {
                let counters = counters.iter();
                counters.map(|n| CounterId::Programmable(*n)).collect()
            };
            let expected = Expected {
                held: set(expected),
                announced: announced.map(|(programmable, fixed)| PerKind {
                    programmable,
                    fixed,
                }),
            };
            let text = expected.compare(set(held));
            assert_eq!(text.is_some(), !parts.is_empty(), "{text:?}");
            let text = text.unwrap_or_default();
            assert!(!text.contains('\n'));
            for part in parts {
                assert!(text.contains(part), "no {part:?} in: {text}");
            }
        }
        check(&[], None, &[], &[]);
        check(&[3], Some((3, 3)), &[3], &[]);
        check(
            &[],
            None,
            &[1, 5],
            &["holds PMC1, PMC5", "hold no counter", "every counter"],
        );
        check(
            &[2, 3],
            Some((2, 3)),
            &[2],
            &["holds PMC2,", "hold PMC2, PMC3", "2 programmable and 3"],
        );
    }
}
