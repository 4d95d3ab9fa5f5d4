//! Lists in sentences.

use std::fmt;

/// `a, b and c`.
pub fn list<T: fmt::Display>(items: impl Iterator<Item = T>) -> String {
    let words: Vec<String> = items.map(|item| item.to_string()).collect();
    match words.split_last() {
        None => "nothing".to_owned(),
        Some((only, [])) => only.clone(),
        Some((last, rest)) => format!("{} and {last}", rest.join(", ")),
    }
}
