//! Names of code that a program made while it ran, as its just-in-time compiler writes them for
//! perf: `/tmp/perf-PID.map`, a line `START SIZE NAME` for each function, in hexadecimal.
//!
//! The file is the guest's and not trusted.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};

use ahash::AHashMap;

use super::symbols::{Found, SymbolIndex};

/// The longest file that is read.
const LONGEST: u64 = 64 << 20;

/// The functions of such a file.
#[derive(Debug, Default)]
pub(super) struct CodeMap {
    /// Apart from each other, ascending.
    pieces: Vec<Piece>,
    /// A function that was compiled again has its name once.
    names: Vec<Box<str>>,
    /// Lines that say nothing.
    pub(super) bad_lines: usize,
    /// There were more lines than room.
    pub(super) is_cut: bool,
}

/// Addresses that one line is about, as far as no later one has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    start: u64,
    end: u64,
    /// Where its function begins.
    function: u64,
    name: usize,
}

impl CodeMap {
    /// Reads `file`, at most `most` lines.
    ///
    /// # Errors
    /// It cannot be read, or is longer than 64 MiB.
    pub(super) fn read(file: File, most: usize) -> io::Result<Self> {
        let mut bytes = Vec::new();
        file.take(LONGEST + 1).read_to_end(&mut bytes)?;
        if bytes.len() as u64 > LONGEST {
            return Err(io::Error::other("it is longer than 64 MiB"));
        }
        Ok(Self::parse(&bytes, most))
    }

    fn parse(bytes: &[u8], most: usize) -> Self {
        let mut map = Self::default();
        let mut pieces = BTreeMap::new();
        let mut known: AHashMap<Box<str>, usize> = AHashMap::new();
        let lines = bytes.split(|byte| *byte == b'\n');
        for (number, line) in lines.filter(|line| !line.is_empty()).enumerate() {
            if number == most {
                map.is_cut = true;
                break;
            }
            let Some((start, end, name)) = entry(line) else {
                map.bad_lines += 1;
                continue;
            };
            let names = &mut map.names;
            let name = *known.entry(name.into()).or_insert_with_key(|name| {
                names.push(name.clone());
                names.len() - 1
            });
            add(
                &mut pieces,
                Piece {
                    start,
                    end,
                    function: start,
                    name,
                },
            );
        }
        map.pieces = pieces.into_values().collect();
        map
    }

    /// How many functions have a name.
    pub(super) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// The function at `address`.
    pub(super) fn find(&self, address: u64) -> Option<Found> {
        let behind = self.pieces.partition_point(|piece| piece.start <= address);
        let piece = self.pieces.get(behind.checked_sub(1)?)?;
        (address < piece.end).then(|| Found {
            index: SymbolIndex::of(piece.name),
            offset: address - piece.function,
        })
    }

    /// The name of a function.
    pub(super) fn name(&self, symbol: SymbolIndex) -> &str {
        self.names.get(symbol.number()).map_or("", |name| name)
    }
}

/// Start, end and name of what a line says.
fn entry(line: &[u8]) -> Option<(u64, u64, String)> {
    let text = String::from_utf8_lossy(line);
    let (start, rest) = text.trim_ascii().split_once(' ')?;
    let (size, name) = rest.trim_ascii_start().split_once(' ')?;
    let name = name.trim_ascii_start();
    let number = |text: &str| {
        let digits = text.strip_prefix("0x").unwrap_or(text);
        let plain = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        u64::from_str_radix(digits, 16).ok().filter(|_| plain)
    };
    let (start, size) = (number(start)?, number(size)?);
    // A compiler that knows no size has named the first byte.
    let end = start.checked_add(size.max(1))?;
    let printable = |one: char| if one.is_control() { '?' } else { one };
    let name: String = name.chars().map(printable).collect();
    (!name.is_empty()).then_some((start, end, name))
}

/// Takes `new` in. What a later line says of an address counts; a function whose beginning it
/// has is gone, one that only has it within keeps the rest.
fn add(pieces: &mut BTreeMap<u64, Piece>, new: Piece) {
    let before = pieces.range(..new.start).next_back();
    if let Some(before) = before.map(|(_, before)| *before)
        && before.end > new.start
    {
        let head = Piece {
            end: new.start,
            ..before
        };
        pieces.insert(head.start, head);
        keep_behind(pieces, before, new.end);
    }
    let within = pieces.range(new.start..new.end).map(|(_, piece)| *piece);
    for old in within.collect::<Vec<Piece>>() {
        pieces.remove(&old.start);
        if old.function < old.start {
            keep_behind(pieces, old, new.end);
        }
    }
    pieces.insert(new.start, new);
}

/// What `old` has from `start` on.
fn keep_behind(pieces: &mut BTreeMap<u64, Piece>, old: Piece, start: u64) {
    if old.end > start {
        pieces.insert(start, Piece { start, ..old });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, address: u64, expected: Option<(&str, u64)>) {
        let map = CodeMap::parse(text.as_bytes(), 100);
        let found = map.find(address);
        let found = found.map(|found| (map.name(found.index), found.offset));
        assert_eq!(found, expected, "{text:?} at {address:#x}");
    }

    #[test]
    fn a_line_names_its_addresses() {
        let text = "1000 20 LazyCompile:*run app.js:3\n0x2000 0x10 plain\n3000 0 stub\n";
        check(text, 0xfff, None);
        check(text, 0x1000, Some(("LazyCompile:*run app.js:3", 0)));
        check(text, 0x101f, Some(("LazyCompile:*run app.js:3", 0x1f)));
        check(text, 0x1020, None);
        check(text, 0x2008, Some(("plain", 8)));
        check(text, 0x3000, Some(("stub", 0)));
        check(text, 0x3001, None);
        check(
            "1000 20 no end of line",
            0x1000,
            Some(("no end of line", 0)),
        );
        check("1000 20 bell\u{7}\r\n", 0x1000, Some(("bell?", 0)));
        check("1000 20   two  blanks", 0x1000, Some(("two  blanks", 0)));
        check(
            "ffffffffffffff00 ff last",
            0xffff_ffff_ffff_fff0,
            Some(("last", 0xf0)),
        );
    }

    #[test]
    fn what_is_later_counts() {
        let again = "1000 100 first\n1000 40 second\n";
        check(again, 0x1000, Some(("second", 0)));
        check(again, 0x1040, None);
        let within = "1000 100 interpreter\n1040 10 stub\n";
        check(within, 0x103f, Some(("interpreter", 0x3f)));
        check(within, 0x1040, Some(("stub", 0)));
        check(within, 0x1050, Some(("interpreter", 0x50)));
        let over = "1000 10 a\n1010 10 b\n1020 10 c\n1008 10 d\n";
        check(over, 0x1007, Some(("a", 7)));
        check(over, 0x1008, Some(("d", 0)));
        check(over, 0x1017, Some(("d", 0xf)));
        check(over, 0x1018, None);
        check(over, 0x1020, Some(("c", 0)));
        // What is left of one that has others within may be taken, too.
        let twice = "1000 100 a\n1010 10 b\n1018 10 c\n";
        check(twice, 0x1018, Some(("c", 0)));
        check(twice, 0x1028, Some(("a", 0x28)));
        let wide = "1000 10 a\n1020 10 b\n1000 100 all\n";
        check(wide, 0x1020, Some(("all", 0x20)));
    }

    #[test]
    fn a_name_is_one_however_often_it_was_compiled() {
        let map = CodeMap::parse(b"1000 10 f\n2000 10 f\n", 100);
        let index = |address| map.find(address).unwrap().index;
        assert_eq!(index(0x1000), index(0x200f));
    }

    #[test]
    fn lines_that_say_nothing_are_counted() {
        let text = "\n1000 10 good\n1000\n1000 10\n1000 10 \nx 10 name\n10 +1 name\n\
                    ffffffffffffffff ff behind the end\n2000 10 good\n";
        let map = CodeMap::parse(text.as_bytes(), 100);
        assert_eq!((map.len(), map.bad_lines, map.is_cut), (2, 6, false));
        let map = CodeMap::parse(text.as_bytes(), 1);
        assert_eq!((map.len(), map.bad_lines, map.is_cut), (1, 0, true));
        let bytes = b"1000 10 \xff\xfe\n";
        assert_eq!(
            CodeMap::parse(bytes, 9).name(SymbolIndex::of(0)),
            "\u{fffd}\u{fffd}"
        );
    }
}
