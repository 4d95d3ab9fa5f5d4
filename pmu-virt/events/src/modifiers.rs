//! The letters behind an event's name, as perf has them (perf-list(1), EVENT MODIFIERS).

use super::error::EventError;

/// Every letter of perf's.
const LETTERS: &str = "ukhGHpPSWDeIbRX";

/// What the letters ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Modifiers {
    /// At CPL 1 to 3, and at CPL 0: no ring is named where neither is set.
    pub(super) user: bool,
    pub(super) kernel: bool,
    /// How many times `p` is there: how near a sample has to be.
    pub(super) precise: u8,
    /// A sample is to have the counts of the event's group (`S`).
    pub(super) reads: bool,
    /// The event's group may be broken up (`W`).
    pub(super) weak: bool,
}

/// Whether `text` can only be meant as letters of perf's.
pub(super) fn are_letters(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|letter| LETTERS.contains(letter))
}

/// Whether `text` is letters that a name of a table can have, whatever libpfm says: others mean
/// something else there, such as `e`, and one ring is a word of libpfm's.
pub(super) fn are_of_tables(text: &str) -> bool {
    let own = |letter| "ukGHpP".contains(letter);
    text.chars().all(own) && (text.contains(['G', 'H', 'p', 'P']) || text.len() > 1)
}

/// What the lists of letters ask for together. perf takes one list behind an event and one
/// behind its group, and unites them.
pub(super) fn parse(name: &str, lists: &[&str]) -> Result<Modifiers, EventError> {
    let mut found = Modifiers::default();
    let (mut hypervisor, mut guest, mut host) = (false, false, false);
    for list in lists {
        if list.is_empty() {
            return Err(refused(name, "there is no letter behind the last ':'"));
        }
        let mut seen = String::new();
        for letter in list.chars() {
            if seen.contains(letter) && letter != 'p' {
                return Err(EventError::Modifier {
                    name: name.to_owned(),
                    why: format!("{letter} is there twice"),
                });
            }
            seen.push(letter);
            match letter {
                'u' => found.user = true,
                'k' => found.kernel = true,
                'h' => hypervisor = true,
                'G' => guest = true,
                'H' => host = true,
                'p' => found.precise = found.precise.saturating_add(1),
                'S' => found.reads = true,
                'W' => found.weak = true,
                // The most precise there is.
                'P' => {}
                other => return Err(cannot_be_had(name, list, other)),
            }
        }
    }
    if found.precise > 3 {
        return Err(refused(name, "p is there more than three times"));
    }
    // x86 has no ring of a hypervisor, so beside others h adds nothing, as with perf.
    if hypervisor && !found.user && !found.kernel {
        return Err(refused(
            name,
            "h counts a hypervisor alone, and only the guest is counted here; leave it out",
        ));
    }
    if host && !guest {
        return Err(refused(
            name,
            "H counts the host, and only the guest is counted here; on the host, use perf",
        ));
    }
    Ok(found)
}

fn refused(name: &str, why: &str) -> EventError {
    EventError::Modifier {
        name: name.to_owned(),
        why: why.to_owned(),
    }
}

fn cannot_be_had(name: &str, list: &str, letter: char) -> EventError {
    let why = match letter {
        'D' => {
            "D pins an event to its counter, and here events take turns where counters are too \
             few; ask for fewer events, and none does"
        }
        'e' => {
            "e wants the PMU for itself, and the guest and other tools have counters beside \
             it; leave it out"
        }
        'I' => {
            "I leaves out the idle task, which the VMM does not tell from others; a halted vCPU \
             counts nothing anyway"
        }
        'b' => "b counts by a BPF program of the host's kernel, which sees no guest; leave it out",
        'R' => "R asks for the latency of retirement, which only PEBS of the host's perf has",
        'X' => "X keeps perf from regrouping events, which nobody does here; leave it out",
        _ => {
            return EventError::PlainAttribute {
                name: name.to_owned(),
                attribute: list.to_owned(),
                letter,
            };
        }
    };
    refused(name, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(lists: &[&str], expected: &str) {
        let found = match parse("x", lists) {
            Ok(found) => format!(
                "{}{}{}",
                if found.user { "u" } else { "" },
                if found.kernel { "k" } else { "" },
                "p".repeat(found.precise.into())
            ),
            Err(error) => error.to_string(),
        };
        let is = if expected.contains(' ') {
            found.contains(expected)
        } else {
            found == expected
        };
        assert!(is, "{lists:?}: {found}");
    }

    #[test]
    fn each_letter_means_something_or_is_refused() {
        check(&[], "");
        check(&["ku"], "uk");
        check(&["k", "u"], "uk");
        check(&["uhGHPSW"], "u");
        check(&["kppp"], "kppp");
        check(&["pp", "pp"], "p is there more than three times");
        check(&["kk"], "k is there twice");
        check(&["u", "u"], "u");
        check(&[""], "no letter behind");
        check(&["h"], "h counts a hypervisor alone");
        check(&["Hu"], "H counts the host");
        for letter in LETTERS.chars().filter(|it| "DeIbRX".contains(*it)) {
            check(&[&letter.to_string()], &format!("{letter} "));
        }
        check(&["uq"], "'q' is no modifier");
        assert!(are_letters("ukG") && !are_letters("ANY") && !are_letters(""));
    }
}
