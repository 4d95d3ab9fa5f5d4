//! Names that somebody may have meant.

use super::code::raw_code;
use super::modifiers;
use super::table::{AttributeKind, NamedEvent};

/// At most this many are proposed.
const MOST: usize = 3;

/// How like a name what somebody typed is. Case does not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Likeness {
    /// How many letters differ.
    pub distance: usize,
    /// A letter in three differs at most.
    pub few_differ: bool,
    /// Of more than two letters, one is a part of the other.
    pub is_part: bool,
}

/// How like `name` somebody's `word` is.
#[must_use]
pub fn likeness(word: &str, name: &str) -> Likeness {
    let (word, name) = (word.to_lowercase(), name.to_lowercase());
    let distance = strsim::damerau_levenshtein(&word, &name);
    Likeness {
        distance,
        few_differ: distance <= (word.chars().count() / 3).max(1),
        is_part: word.len() > 2 && name.contains(&word) || name.len() > 2 && word.contains(&name),
    }
}

/// The candidates that are nearest to `wanted`, best first: a letter in four differs at most,
/// or the one begins with the other and has little more. Case does not matter. A name that only
/// shares a part is no help, so there may be none. Names of events are made of the same few words:
/// what [`likeness`] takes for other names would be too much here.
pub fn nearest<S: AsRef<str>>(
    wanted: &str,
    candidates: impl IntoIterator<Item = S>,
) -> Vec<String> {
    // A raw code begins with a small letter.
    let small = wanted.strip_prefix('R').map(|digits| format!("r{digits}"));
    if let Some(code) = small
        && matches!(raw_code(&code), Ok(Some(_)))
    {
        return vec![code];
    }
    let (given, wanted) = (wanted, wanted.to_lowercase());
    let length = wanted.chars().count();
    let tolerance = (length / 4).clamp(1, 3);
    let mut found: Vec<(usize, String)> = candidates
        .into_iter()
        .filter_map(|candidate| {
            let name = candidate.as_ref();
            let lower = name.to_lowercase();
            let distance = strsim::damerau_levenshtein(&wanted, &lower);
            let begins = lower.starts_with(&wanted) || wanted.starts_with(&lower);
            let (short, long) = match lower.chars().count() {
                other if other < length => (other, length),
                other => (length, other),
            };
            let part = begins && short > 2 && long <= 2 * short;
            // Of two letters, one that differs is half of them.
            let near = distance <= tolerance && short > distance * 2;
            // Nobody mistakes a name for itself.
            let same = name == given;
            ((near || part || distance == 0) && !same).then(|| (distance, name.to_owned()))
        })
        .collect();
    found.sort();
    found.dedup();
    found.truncate(MOST);
    found.into_iter().map(|(_, name)| name).collect()
}

/// The name among `events` that `wanted` is but for its case, dots, colons and underscores: other
/// lists of a processor's events part its words elsewhere. Modifiers behind it do not matter.
pub(super) fn respelled(wanted: &str, events: &[NamedEvent]) -> Option<String> {
    let plain = match wanted.rsplit_once(':') {
        Some((head, last)) if modifiers::are_letters(last) => head,
        _ => wanted,
    };
    let letters = |text: &str| -> String {
        let all = text.chars().filter(char::is_ascii_alphanumeric);
        all.map(|it| it.to_ascii_lowercase()).collect()
    };
    let wanted = letters(plain);
    events.iter().find_map(|event| {
        let rest = wanted.strip_prefix(&letters(&event.name))?;
        if rest.is_empty() {
            return Some(event.name.clone());
        }
        let masks = event.attributes.iter();
        let mut masks = masks.filter(|one| one.kind == AttributeKind::UnitMask);
        let mask = masks.find(|one| letters(&one.name) == rest)?;
        Some(format!("{}:{}", event.name, mask.name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_like_a_name() {
        let check = |word: &str, name: &str, expected: (usize, bool, bool)| {
            let found = likeness(word, name);
            let found = (found.distance, found.few_differ, found.is_part);
            assert_eq!(found, expected, "{word} {name}");
        };
        check("vcpsu", "vcpus", (1, true, false));
        check("Kernel", "kernel", (0, true, true));
        check("cpu", "vcpu-cores", (7, false, true));
        check("vcpu-cores", "cpu", (7, false, true));
        check("ab", "xab", (1, true, false));
        check("ab", "xyab", (2, false, false));
    }

    #[test]
    fn a_hint_is_near() {
        fn check(wanted: &str, candidates: &[&str], expected: &[&str]) {
            assert_eq!(nearest(wanted, candidates), expected, "{wanted}");
        }
        check("nosuch123", &["NO", "1", "2"], &[]);
        check("cyclesx", &["cycles", "NO"], &["cycles"]);
        check("instruction", &["instructions"], &["instructions"]);
        check("cy", &["cycles", "cyc"], &[]);
        check("cyc", &["cycles", "cyc", "CYC"], &["CYC", "cycles"]);
        check("cycels", &["cycles", "cycle"], &["cycles"]);
        // Hints that help nobody.
        check("ref-cycles", &["RECYCLEQ", "cpu-cycles"], &[]);
        check("duration_time", &["RAT"], &[]);
        check("syscalls", &["calls"], &[]);
        check("task-clock", &["LOCK"], &[]);
        check("mem", &["MEMORY_REQUESTS"], &[]);
        check("cs", &["ip", "tsc"], &[]);
        check("R1C2", &["rec"], &["r1C2"]);
        check("Rxc2", &["rec"], &[]);
    }
}
