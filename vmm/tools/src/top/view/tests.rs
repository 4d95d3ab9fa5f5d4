use std::time::Duration;

use proptest::prelude::{ProptestConfig, any, proptest};
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::super::frame::{Frame, Section};
use super::super::keys::KeyPress;
use super::super::state::State;
use super::*;

fn section(title: &str, rows: usize) -> Section {
    Section {
        title: title.to_owned(),
        head: "HEAD".to_owned(),
        rows: (0..rows).map(|row| format!("{title}{row}")).collect(),
        marked: None,
    }
}

/// What is on a screen of so many columns and lines.
fn shown(frame: &Frame, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    let drawn = terminal.draw(|screen| draw(frame, screen.area(), screen.buffer_mut()));
    drawn.unwrap();
    let text = terminal.backend().to_string();
    text.lines()
        .map(|line| line.trim_matches('"').trim_end().to_owned())
        .collect()
}

fn check(sections: Vec<Section>, size: (u16, u16), expected: &[&str]) {
    let frame = Frame {
        head: "umpire top".to_owned(),
        sections,
        foot: "q quit".to_owned(),
    };
    assert_eq!(shown(&frame, size.0, size.1), expected);
}

#[test]
fn sections_share_the_screen() {
    let two = || vec![section("a", 1), section("b", 9)];
    check(
        two(),
        (20, 12),
        &[
            "umpire top",
            "",
            "a",
            "HEAD",
            "a0",
            "",
            "b",
            "HEAD",
            "b0",
            "b1",
            "... 7 more",
            "q quit",
        ],
    );
    check(
        two(),
        (6, 8),
        &["umpire", "a", "HEAD", "a0", "b", "HEAD", "... 9", "q quit"],
    );
    check(two(), (20, 5), &["umpire top", "a", "HEAD", "b", "q quit"]);
    check(two(), (20, 3), &["umpire top", "a", "b"]);
    check(two(), (20, 1), &["umpire top"]);
    check(Vec::new(), (4, 2), &["umpi", ""]);
}

#[test]
fn the_chosen_row_is_seen() {
    let mut many = section("a", 9);
    many.marked = Some(7);
    check(
        vec![many],
        (20, 9),
        &[
            "umpire top",
            "",
            "a",
            "HEAD",
            "a5",
            "a6",
            "a7",
            "... 6 more",
            "q quit",
        ],
    );
}

#[test]
fn text_has_every_line() {
    let frame = Frame {
        head: "umpire top".to_owned(),
        sections: vec![section("a", 2), section("b", 0)],
        foot: String::new(),
    };
    assert_eq!(text(&frame, 8), "umpire t\n\na\nHEAD\na0\na1\n\nb\nHEAD\n");
}

/// A state with so many VMs, keys pressed.
fn crowded(vms: u8, keys: &[u8]) -> State {
    use super::super::frame::tests::reading;
    let mut state = State::new(Duration::from_secs(1));
    for id in 0..vms {
        let name = format!("vm{id}\u{1f600}");
        state.answer(id.into(), &name, reading(), Duration::ZERO);
    }
    for key in super::super::keys::keys(keys) {
        if key != KeyPress::Interrupt {
            state.key(key);
        }
    }
    state
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn any_size_can_be_drawn(
        width in 1u16..200,
        height in 1u16..80,
        vms in 0u8..9,
        keys in proptest::collection::vec(any::<u8>(), 0..12),
    ) {
        let state = crowded(vms, &keys);
        shown(&Frame::of_screen(&state, "noon"), width, height);
        text(&Frame::whole(&state, "noon"), width);
    }
}
