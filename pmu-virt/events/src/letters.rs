//! Letters that are added to an event's name.

use super::modifiers;
use super::perf_form::split;
use super::resolve::is_plain;

/// The event's name `text` with the letters of its group besides, as perf unites them: the
/// rings of both are counted, and a sample is as near as either asks. What is wrong with the
/// name stays as it is, for `resolve` to say.
#[must_use]
pub fn with_letters(text: &str, letters: &str) -> String {
    let (head, own, mark) = match split(text) {
        Some(Ok(form)) => (text.strip_suffix(form.modifiers), form.modifiers, ""),
        Some(Err(_)) => return text.to_owned(),
        None if text.ends_with(':') => return text.to_owned(),
        None => match text.rsplit_once(':') {
            Some((head, last)) if is_list(head, last) => (Some(head), last, ":"),
            _ => (Some(text), "", ":"),
        },
    };
    let head = head.unwrap_or(text);
    let precise = |list: &str| list.matches('p').count();
    let (there, more) = (precise(own), precise(letters));
    let new = letters
        .chars()
        .filter(|it| *it != 'p' && !own.contains(*it));
    let nearer = "p".repeat(more.saturating_sub(there));
    let new: String = new.chain(nearer.chars()).collect();
    format!("{head}{mark}{own}{new}")
}

/// Whether `last` behind `head` is a list of perf's letters, not a word of libpfm's.
fn is_list(head: &str, last: &str) -> bool {
    let event = head.split(':').next().unwrap_or_default();
    if is_plain(event) && !head.contains("::") {
        modifiers::are_letters(last)
    } else {
        ["u", "k"].contains(&last) || modifiers::are_of_tables(last)
    }
}
