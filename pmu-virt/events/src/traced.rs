//! Tracepoints that no list here has.

use super::modifiers;

/// Why nobody counts what `text` names, which is no event here, if it can be a tracepoint: a
/// kernel has others with every version and module than [those that are known][known]. With
/// something `near`, a long word is rather misspelt.
///
/// [known]: super::uncounted::traced
pub(super) fn may_be(text: &str, near: bool) -> Option<&'static str> {
    let mut parts = text.split(':');
    let (system, event) = (parts.next()?, parts.next()?);
    let is_word = |word: &str| {
        let of_word =
            |it: char| it.is_ascii_lowercase() || it.is_ascii_digit() || "_-*?".contains(it);
        word.chars().all(of_word) && word.contains(|it: char| it.is_ascii_lowercase() || it == '*')
    };
    let is_traced = is_word(system)
        && is_word(event)
        && !modifiers::are_letters(event)
        && parts.all(modifiers::are_letters)
        && !(near && system.len() > 5);
    is_traced.then_some(
        "taken for a tracepoint of the kernel that perf runs on, as no event here is called so: \
         use perf in the guest",
    )
}
