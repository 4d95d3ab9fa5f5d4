//! Names that somebody may have meant.

/// At most this many are proposed.
const MOST: usize = 3;

/// The candidates that are nearest to `wanted`, best first: few letters differ,
/// or the one is a part of the other. Case does not matter.
pub(super) fn nearest<S: AsRef<str>>(
    wanted: &str,
    candidates: impl IntoIterator<Item = S>,
) -> Vec<String> {
    let wanted = wanted.to_lowercase();
    // Every third letter may be wrong, and one at least.
    let tolerance = (wanted.chars().count() / 3).max(1);
    let mut found: Vec<(usize, String)> = candidates
        .into_iter()
        .filter_map(|candidate| {
            let name = candidate.as_ref();
            let lower = name.to_lowercase();
            let distance = strsim::damerau_levenshtein(&wanted, &lower);
            let part = lower.contains(&wanted) && wanted.len() > 2
                || wanted.contains(&lower) && lower.len() > 2;
            (distance <= tolerance || part).then(|| (distance, name.to_owned()))
        })
        .collect();
    found.sort();
    found.dedup();
    found.truncate(MOST);
    found.into_iter().map(|(_, name)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_three_letters_at_least() {
        fn check(wanted: &str, candidates: &[&str], expected: &[&str]) {
            assert_eq!(nearest(wanted, candidates), expected, "{wanted}");
        }
        check("nosuch123", &["NO", "1", "2"], &[]);
        check("cyclesx", &["cycles", "NO"], &["cycles"]);
        check("instruction", &["instructions"], &["instructions"]);
        check("cy", &["cycles", "cyc"], &["cyc"]);
    }
}
