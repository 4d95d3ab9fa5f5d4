//! Names of a guest as words of a line, which readers of `perf script` split by their rules.
//!
//! A guest's programs choose their names, so a name may look like what stands behind it. What a
//! reader could not tell apart is written as `\\xHH`, a byte each, and a backslash in front of
//! what looks so itself as `\\x5c`; anything else is as perf prints it.

use crate::profile::plain::push;

/// What stands for a name without a letter.
const UNNAMED: &str = "[unnamed]";

/// The name of a thread. Readers take it up to the first number that stands alone, `7` or `7/7`,
/// or up to the last in front of the time; a line that begins with `#` is a comment, one with
/// `{` is JSON, and one with a blank is no sample; `;` is between the frames of a collapsed stack.
pub(super) fn comm(name: &str) -> String {
    let first = name.chars().next();
    let last = name.len() - name.chars().next_back().map_or(0, char::len_utf8);
    written(name, |at, one, rest| match one {
        ' ' => at == 0 || at == last || begins_with_number(rest),
        '#' | '{' => at == 0 && first == Some(one),
        ';' => true,
        _ => false,
    })
}

/// The name of an event: one word.
pub(super) fn event(name: &str) -> String {
    written(name, |_, one, _| one == ' ')
}

/// A symbol. Readers pass one over that begins with a bracket.
pub(super) fn symbol(name: &str) -> String {
    written(name, |at, one, _| at == 0 && matches!(one, ' ' | '('))
}

/// What a symbol is in: one word between brackets.
pub(super) fn object(name: &str) -> String {
    written(name, |_, one, _| one == ' ')
}

/// The word at the beginning of `rest` has nothing but digits and what stands between numbers:
/// `7`, `7/7`, `1.5:`, and for inferno `/`.
fn begins_with_number(rest: &str) -> bool {
    let word = rest.split(char::is_whitespace).next().unwrap_or("");
    let part = |byte: u8| byte.is_ascii_digit() || b"/.:".contains(&byte);
    word.bytes().all(part)
        && word
            .bytes()
            .any(|byte| byte.is_ascii_digit() || byte == b'/')
}

/// `name` with some characters as bytes: those that end a line or a word for some reader, and
/// those of `escaped`, which gets the place of a character, the character and what is behind it.
fn written(name: &str, escaped: impl Fn(usize, char, &str) -> bool) -> String {
    if name.is_empty() {
        return UNNAMED.to_owned();
    }
    let mut out = String::with_capacity(name.len());
    for (at, one) in name.char_indices() {
        let rest = &name[at + one.len_utf8()..];
        let blank = one != ' ' && one.is_whitespace();
        let ends = one.is_control() || blank || one == '\u{feff}';
        let like_ours = one == '\\' && is_escape(rest);
        let is_escaped = ends || like_ours || escaped(at, one, rest);
        push(&mut out, one, is_escaped);
    }
    out
}

/// What is behind a backslash makes it one of ours.
fn is_escape(rest: &str) -> bool {
    let mut bytes = rest.bytes();
    let digits = [bytes.next(), bytes.next(), bytes.next()];
    let is_digit = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_hexdigit());
    digits[0] == Some(b'x') && is_digit(digits[1]) && is_digit(digits[2])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_misleads_is_escaped() {
        fn check(name: &str, expected: &str) {
            assert_eq!(comm(name), expected, "{name:?}");
        }
        for plain in [
            "bash",
            "a",
            "7",
            "kworker/0:1",
            "Web Content",
            "tmux: server",
            "C2 CompilerThre",
            "7/7 up",
            "pool-1-thread-2",
            "2nd 3rd",
            "a:b",
            "(sd-pam)",
            "x#",
            "x {",
            "\\n",
            "\\x",
            "größe",
        ] {
            check(plain, plain);
        }
        check("", "[unnamed]");
        check("tmux: server 5", r"tmux: server\x205");
        check("a 7/7 [000] 1.5: 3 b", r"a\x207/7 [000]\x201.5:\x203 b");
        check("a  5", r"a \x205");
        check("a / b", r"a\x20/ b");
        check(" a ", r"\x20a\x20");
        check(" ", r"\x20");
        check("#a", r"\x23a");
        check("{a", r"\x7ba");
        check("a;b", r"a\x3bb");
        check("a\nb\tc", r"a\x0ab\x09c");
        check("a\u{a0}5\u{2028}", r"a\xc2\xa05\xe2\x80\xa8");
        check(r"a\x20b", r"a\x5cx20b");
        assert_eq!(event("event 3"), r"event\x203");
        assert_eq!(
            object("/bin/my prog (deleted)"),
            r"/bin/my\x20prog\x20(deleted)"
        );
        assert_eq!(symbol("f(int (*)(char), long)"), "f(int (*)(char), long)");
        assert_eq!(
            symbol("(anonymous namespace)::f"),
            r"\x28anonymous namespace)::f"
        );
    }
}
