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
            let part = wanted.len() > 2 && (lower.contains(&wanted) || wanted.contains(&lower));
            (distance <= tolerance || part).then(|| (distance, name.to_owned()))
        })
        .collect();
    found.sort();
    found.dedup();
    found.truncate(MOST);
    found.into_iter().map(|(_, name)| name).collect()
}
