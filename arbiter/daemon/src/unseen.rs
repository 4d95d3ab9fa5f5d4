//! Characters that people do not see, in names that others have chosen.

/// Whether a character is none that is seen, but does something to what stands around it: a control
/// character, one that formats text (of Unicode's category Cf: it may turn the order of what
/// follows, or make two names look the same), or an end of a line or paragraph.
pub(crate) fn is_unseen(one: char) -> bool {
    one.is_control()
        || matches!(
            one,
            '\u{ad}'
                | '\u{600}'..='\u{605}'
                | '\u{61c}'
                | '\u{6dd}'
                | '\u{70f}'
                | '\u{890}'..='\u{891}'
                | '\u{8e2}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{110bd}'
                | '\u{110cd}'
                | '\u{13430}'..='\u{1343f}'
                | '\u{1bca0}'..='\u{1bca3}'
                | '\u{1d173}'..='\u{1d17a}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::groups::{absolute, shown};

    /// Of all characters those that no terminal shows as they are, and no others that names are
    /// made of: neither letters nor what stands above them.
    #[test]
    fn characters_that_are_not_seen_are_in_no_path_and_no_message() {
        for one in (0..=u32::from(char::MAX)).filter_map(char::from_u32) {
            let path = format!("/a{one}b");
            let is_refused = absolute(&path, None).is_err();
            let is_shown = shown(path.as_bytes()).contains(one);
            let unseen = is_unseen(one);
            assert_eq!((is_refused, is_shown), (unseen, !unseen), "{one:?}");
            // The library prints by their numbers those that Unicode says are not seen.
            let is_right = one.escape_debug().count() > 1 && !one.is_alphanumeric();
            assert!(is_right || !unseen, "{one:?}");
        }
        let odd = "\u{7f}\u{ad}\u{61c}\u{200b}\u{200d}\u{200e}\u{2028}\u{2029}\u{202a}\u{202e}\u{2066}\
                   \u{2069}\u{feff}\u{fffb}\u{e0041}";
        assert!(odd.chars().all(is_unseen));
        assert!(!"Bu\u{308}ro \u{fffd}\u{1f600}".chars().any(is_unseen));
    }
}
