//! Plain tables for people.

use std::io::{self, Write};

use comfy_table::{Cell, CellAlignment, Table, presets};

/// `rows` as lines. A column is as wide as its widest cell, and two spaces are
/// between columns. A cell stands to the right where `right` says so of its column
/// and text.
pub fn lines(
    rows: Vec<Vec<String>>,
    right: impl Fn(usize, &str) -> bool,
) -> impl Iterator<Item = String> {
    let cell = |(column, text): (usize, String)| {
        let alignment = if right(column, &text) {
            CellAlignment::Right
        } else {
            CellAlignment::Left
        };
        Cell::new(text).set_alignment(alignment)
    };
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    for row in rows {
        table.add_row(row.into_iter().enumerate().map(cell));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    let lines: Vec<String> = table
        .lines()
        .map(|line| line.trim_end().to_owned())
        .collect();
    lines.into_iter()
}

/// Writes `rows` below `heads`, two spaces in, all cells to the left.
pub fn indented(heads: &[&str], rows: Vec<Vec<String>>, out: &mut dyn Write) -> io::Result<()> {
    let head = heads.iter().map(|head| (*head).to_owned()).collect();
    let rows = [head].into_iter().chain(rows).collect();
    lines(rows, |_, _| false).try_for_each(|line| writeln!(out, "  {line}"))
}

#[cfg(test)]
mod tests {
    use super::lines;

    #[test]
    fn columns_are_as_wide_as_they_must_be() {
        let rows = [
            ["a", "number", "what"],
            ["long \u{fffd}", "7", "\u{e4}"],
            ["", "12345678", ""],
        ];
        let rows = rows.map(|row| row.map(str::to_owned).to_vec()).to_vec();
        let found: Vec<String> = lines(rows, |column, _| column == 1).collect();
        let expected = [
            "a         number  what",
            "long \u{fffd}         7  \u{e4}",
            "        12345678",
        ];
        assert_eq!(found, expected);
    }
}
