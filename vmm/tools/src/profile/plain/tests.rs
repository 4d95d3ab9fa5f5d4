//! What names look like where they could be taken for something else.

use proptest::prelude::*;

use super::*;
use crate::profile::output_tests::{any_name, unescaped};

#[test]
fn names_have_no_structure_and_most_stay_as_they_are() {
    let check = |name: &str, frame: &str| assert_eq!(folded(name), frame, "{name:?}");
    for clean in [
        "main",
        "Web Content",
        "kworker/0:1-events",
        "operator new(unsigned long)",
        "<alloc::vec::Vec<T> as Drop>::drop",
        "nft_do_chain [nf_tables]",
        r"C:\new\foo",
        "a.out 1b",
        "--x",
        "f_[z]",
        "é中",
    ] {
        check(clean, clean);
    }
    check("a;b 7", r"a\x3bb\x207");
    check("[T; 4]", r"\x5bT\x3b 4]");
    check("f 12.5", r"f\x2012.5");
    check("f 12.", r"f\x2012.");
    check("f .", r"f\x20.");
    check("f 1.2.3", "f 1.2.3");
    check("f 1 2", r"f 1\x202");
    check(" f ", r"\x20f\x20");
    check(" ", r"\x20");
    check("", "[no name]");
    check("[unknown]", r"\x5bunknown]");
    check("f_[k]", r"f_\x5bk]");
    check("# f", r"\x23 f");
    check("--", r"\x2d-");
    check("a\tb\nc\rd\0", r"a\x09b\x0ac\x0dd\x00");
    check("a\u{2028}", r"a\xe2\x80\xa8");
    check(r"\x3b", r"\x5cx3b");
}

#[test]
fn a_drawing_has_the_characters_themselves() {
    let line = to_draw(&format!("{} 7", folded(r"[u8; 4] \x3b 5")));
    assert!(!line.contains(';'), "{line}");
    assert_eq!(drawn(&line), r"\x5bu8; 4] \x5cx3b 5 7");
}

proptest! {
    #[test]
    fn every_name_can_be_read_again(name in any_name()) {
        let frame = folded(&name);
        prop_assert!(!frame.contains([';', '\n', '\r', '\t', '\0']));
        let read = if frame == NO_NAME { String::new() } else { unescaped(&frame) };
        prop_assert_eq!(&read, &name);
    }
}
