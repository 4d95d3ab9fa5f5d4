//! The guest's names where readers take characters for structure: a guest's program can be
//! called anything.

use std::fmt::Write;

/// Stands for an empty name: readers leave out what has none.
pub(super) const NO_NAME: &str = "[no name]";
/// Stand for characters of a name while a flame graph is made of collapsed stacks. They are
/// no characters of any text (Unicode, 23.7), and [`is_unseen`].
const SEMICOLON: &str = "\u{fdd0}";
const BLANK: &str = "\u{fdd1}";

/// `name`, or what stands for an empty one.
pub(super) fn named(name: &str) -> &str {
    if name.is_empty() { NO_NAME } else { name }
}

/// A name of the guest as a frame of collapsed stacks. Bytes that a reader would take for
/// something else are `\xNN`; so is a backslash before an x, which makes every name but the
/// empty one readable again. Most names are as they were.
pub(super) fn folded(name: &str) -> String {
    let mut frame = String::with_capacity(name.len());
    for (at, c) in name.char_indices() {
        let rest = &name[at + c.len_utf8()..];
        let is_first = at == 0;
        let is_taken = match c {
            ';' => true,
            // Ends are cut off, and a number behind the last frame is a count; which one is
            // last is the reader's choice (`--reverse`).
            ' ' => is_first || rest.is_empty() || is_number(rest),
            // Words in brackets are ours, and `_[k]` at the end says whose code it is.
            '[' => is_first || (name[..at].ends_with('_') && is_annotation(rest)),
            // A line that begins so is a comment.
            '#' => is_first,
            // These two alone part stacks (FlameGraph's chain graphs).
            '-' => is_first && matches!(rest, "" | "-"),
            '\\' => rest.starts_with('x'),
            _ => is_unseen(c),
        };
        push(&mut frame, c, is_taken);
    }
    named(&frame).to_owned()
}

/// The same text, with `\xNN` for what XML forbids or would change.
pub(super) fn visible(text: &str) -> String {
    let mut visible = String::with_capacity(text.len());
    for c in text.chars() {
        push(&mut visible, c, is_unseen(c));
    }
    visible
}

/// A line of collapsed stacks for a flame graph, whose texts have no such structure: once
/// [`drawn`], names have their own semicolons and blanks again.
pub(super) fn to_draw(line: &str) -> String {
    line.replace(r"\x3b", SEMICOLON).replace(r"\x20", BLANK)
}

/// What was drawn of such lines, as people see it.
pub(super) fn drawn(svg: &str) -> String {
    svg.replace(SEMICOLON, ";").replace(BLANK, " ")
}

/// Adds a character to `text`, as it is or as `\xNN`, a byte each.
pub(super) fn push(text: &mut String, c: char, escaped: bool) {
    if !escaped {
        text.push(c);
        return;
    }
    for byte in c.encode_utf8(&mut [0; 4]).bytes() {
        let _ = write!(text, "\\x{byte:02x}");
    }
}

/// Digits, perhaps with a point, as readers know counts.
fn is_number(text: &str) -> bool {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let mut digits = whole.bytes().chain(fraction.bytes());
    digits.all(|byte| byte.is_ascii_digit())
}

/// What is behind `_[` in an annotation of FlameGraph's.
fn is_annotation(rest: &str) -> bool {
    matches!(rest, "k]" | "w]" | "i]" | "j]")
}

/// It ends lines, is cut off as a blank, is a mark of byte order, or no character at all.
fn is_unseen(c: char) -> bool {
    let is_blank = c.is_whitespace() && c != ' ';
    let is_none = matches!(u32::from(c), 0xfdd0..=0xfdef) || u32::from(c) & 0xfffe == 0xfffe;
    c.is_control() || is_blank || is_none || c == '\u{feff}'
}

#[cfg(test)]
mod tests;
