//! Finding events by a word or a pattern with wildcards.

/// What is looked for; case does not matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    lower: String,
    glob: bool,
}

impl Pattern {
    /// A word that a name or a description contains; or, with `*` (anything)
    /// or `?` (one letter), the form of a whole name.
    pub fn new(text: &str) -> Self {
        Self {
            lower: text.to_lowercase(),
            glob: text.contains(['*', '?']),
        }
    }

    /// Whether a name is of this form, or contains the word.
    pub fn finds_name(&self, name: &str) -> bool {
        let name = name.to_lowercase();
        if self.glob {
            matches(&self.lower, &name)
        } else {
            name.contains(&self.lower)
        }
    }

    /// Whether a description contains the word; one of a form is of names alone.
    pub fn finds_text(&self, text: &str) -> bool {
        !self.glob && text.to_lowercase().contains(&self.lower)
    }
}

/// `*` stands for any letters or none, `?` for one. Linear in the product of
/// the lengths, for any pattern.
fn matches(pattern: &str, text: &str) -> bool {
    let text: Vec<char> = text.chars().collect();
    // reach[n]: the pattern so far takes the first n letters.
    let mut reach = vec![false; text.len() + 1];
    reach[0] = true;
    for letter in pattern.chars() {
        if letter == '*' {
            for n in 1..reach.len() {
                reach[n] |= reach[n - 1];
            }
        } else {
            for n in (1..reach.len()).rev() {
                reach[n] = reach[n - 1] && (letter == '?' || letter == text[n - 1]);
            }
            reach[0] = false;
        }
    }
    reach[text.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_forms() {
        fn check(pattern: &str, name: &str, expected: bool) {
            assert_eq!(
                Pattern::new(pattern).finds_name(name),
                expected,
                "{pattern} {name}"
            );
        }
        check("inst", "INST_RETIRED", true);
        check("retired", "INST_RETIRED", true);
        check("cache", "INST_RETIRED", false);
        check("", "INST_RETIRED", true);
        check("inst*", "INST_RETIRED", true);
        check("*inst", "INST_RETIRED", false);
        check("*retired*", "INST_RETIRED", true);
        check("inst?retired", "INST_RETIRED", true);
        check("inst??retired", "INST_RETIRED", false);
        check("*", "", true);
        check("?", "", false);
        check("a*b*c", "aXbYbZc", true);
        check("a*b*c", "aXcYb", false);
        assert!(Pattern::new("Retired").finds_text("Instructions retired"));
        assert!(!Pattern::new("*retired").finds_text("Instructions retired"));
    }

    #[test]
    fn many_wildcards_cost_little() {
        let pattern = "*a".repeat(200);
        assert!(!Pattern::new(&pattern).finds_name(&"a".repeat(199)));
        assert!(Pattern::new(&pattern).finds_name(&"a".repeat(5000)));
    }
}
