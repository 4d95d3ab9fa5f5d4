//! Names of code that a program made while it ran, as its just-in-time compiler writes them for
//! perf: `/tmp/perf-PID.map`, a line `START SIZE NAME` for each function, in hexadecimal.
//!
//! The file is the guest's and not trusted.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use ahash::AHashMap;

use super::symbols::{Found, SymbolIndex};

/// The longest file that is read.
const LONGEST: u64 = 64 << 20;

/// How many bytes of all such files are read.
const MOST_BYTES: u64 = 256 << 20;

/// Reads such files: what is read of all of them together has an end, and one that several
/// processes have is read once.
#[derive(Debug)]
pub(super) struct CodeMaps {
    lines: usize,
    bytes: u64,
    /// By device and inode; why not, if it could not be read.
    known: HashMap<(u64, u64), Result<Arc<CodeMap>, String>>,
}

/// What a process has.
#[derive(Clone, Debug)]
pub(super) struct Made {
    pub(super) map: Arc<CodeMap>,
    /// Another process has it, too, and came first.
    pub(super) again: bool,
}

impl CodeMaps {
    /// At most so many lines are read.
    pub(super) fn new(lines: usize) -> Self {
        Self {
            lines,
            bytes: MOST_BYTES,
            known: HashMap::new(),
        }
    }

    /// The names in `file`.
    ///
    /// # Errors
    /// It cannot be read, or is longer than 64 MiB, or than what may still be read.
    pub(super) fn read(&mut self, file: &File) -> Result<Made, String> {
        let found = file.metadata().map_err(cannot)?;
        let place = (found.dev(), found.ino());
        if let Some(known) = self.known.get(&place) {
            let map = known.clone()?;
            return Ok(Made { map, again: true });
        }
        let map = self.read_new(file, found.len()).map(Arc::new);
        self.known.insert(place, map.clone());
        Ok(Made {
            map: map?,
            again: false,
        })
    }

    /// `length` is what it had a moment ago.
    fn read_new(&mut self, file: &File, length: u64) -> Result<CodeMap, String> {
        const TOO_LONG: &str = "it is longer than 64 MiB";
        if length > LONGEST {
            return Err(TOO_LONG.to_owned());
        }
        let most = LONGEST.min(self.bytes);
        let mut bytes = Vec::new();
        let read = file.take(most + 1).read_to_end(&mut bytes);
        let length = bytes.len() as u64;
        self.bytes -= length.min(self.bytes);
        read.map_err(cannot)?;
        if length > LONGEST {
            return Err(TOO_LONG.to_owned());
        }
        if length > most {
            return Err("such files have more than 256 MiB".to_owned());
        }
        let map = CodeMap::parse(&bytes, self.lines);
        self.lines -= map.lines.min(self.lines);
        Ok(map)
    }
}

fn cannot(error: io::Error) -> String {
    format!("it cannot be read there: {error}")
}

/// The functions of such a file.
#[derive(Debug, Default)]
pub(super) struct CodeMap {
    /// Apart from each other, ascending.
    pieces: Vec<CodePiece>,
    /// A function that was compiled again has its name once, one that is gone has none.
    names: Vec<Box<str>>,
    /// Lines that were read.
    lines: usize,
    /// Lines that say nothing.
    pub(super) bad_lines: usize,
    /// There were more lines than room.
    pub(super) is_cut: bool,
}

/// Addresses that one line is about, as far as no later one has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CodePiece {
    start: u64,
    end: u64,
    /// Where its function begins.
    function: u64,
    name: usize,
}

impl CodeMap {
    /// Reads at most `most` lines.
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
            map.lines += 1;
            let Some((start, end, name)) = entry(line) else {
                map.bad_lines += 1;
                continue;
            };
            let next = known.len();
            let name = *known.entry(name.into()).or_insert(next);
            add(
                &mut pieces,
                CodePiece {
                    start,
                    end,
                    function: start,
                    name,
                },
            );
        }
        map.pieces = pieces.into_values().collect();
        map.take_names(known);
        map
    }

    /// Takes the names that pieces have from those that lines had, which have numbers.
    fn take_names(&mut self, known: AHashMap<Box<str>, usize>) {
        const GONE: usize = usize::MAX;
        let mut kept = vec![GONE; known.len()];
        let mut next = 0;
        for piece in &mut self.pieces {
            let new = &mut kept[piece.name];
            if *new == GONE {
                *new = next;
                next += 1;
            }
            piece.name = *new;
        }
        self.names = vec![Box::default(); next];
        for (name, number) in known {
            if let Some(place) = self.names.get_mut(kept[number]) {
                *place = name;
            }
        }
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
fn add(pieces: &mut BTreeMap<u64, CodePiece>, new: CodePiece) {
    let before = pieces.range(..new.start).next_back();
    if let Some(before) = before.map(|(_, before)| *before)
        && before.end > new.start
    {
        let head = CodePiece {
            end: new.start,
            ..before
        };
        pieces.insert(head.start, head);
        keep_behind(pieces, before, new.end);
    }
    let within = pieces.range(new.start..new.end).map(|(_, piece)| *piece);
    for old in within.collect::<Vec<CodePiece>>() {
        pieces.remove(&old.start);
        if old.function < old.start {
            keep_behind(pieces, old, new.end);
        }
    }
    pieces.insert(new.start, new);
}

/// What `old` has from `start` on.
fn keep_behind(pieces: &mut BTreeMap<u64, CodePiece>, old: CodePiece, start: u64) {
    if old.end > start {
        pieces.insert(start, CodePiece { start, ..old });
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

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
        let said = |map: &CodeMap| (map.pieces.len(), map.bad_lines, map.lines, map.is_cut);
        assert_eq!(said(&map), (2, 6, 8, false));
        let map = CodeMap::parse(text.as_bytes(), 1);
        assert_eq!(said(&map), (1, 0, 1, true));
        let bytes = b"1000 10 \xff\xfe\n";
        assert_eq!(
            CodeMap::parse(bytes, 9).name(SymbolIndex::of(0)),
            "\u{fffd}\u{fffd}"
        );
    }

    #[test]
    fn a_function_that_is_gone_leaves_no_name() {
        let text: String = (0..1000)
            .map(|number| format!("1000 10 f{number}\n"))
            .collect();
        let map = CodeMap::parse(text.as_bytes(), 5000);
        assert_eq!((map.lines, map.pieces.len()), (1000, 1));
        assert_eq!(map.names, ["f999".into()]);
        let map = CodeMap::parse(b"2000 10 b\n1000 10 a\n2000 4 c\n1000 1 a\n", 9);
        assert_eq!(map.names, ["a".into(), "c".into()]);
        assert_eq!(
            map.find(0x2003).map(|found| map.name(found.index)),
            Some("c")
        );
    }

    fn file(text: &str) -> File {
        let file = tempfile::tempfile().unwrap();
        std::fs::write(format!("/proc/self/fd/{}", file.as_raw_fd()), text).unwrap();
        file
    }

    #[test]
    fn lines_take_room_whatever_they_say() {
        let mut maps = CodeMaps::new(10);
        let gone = "1000 10 f\n".repeat(4);
        // All are there at once, for a number of one that is gone is given again.
        let (first, bad, second) = (file(&gone), file(&"no\n".repeat(4)), file(&gone));
        assert!(!maps.read(&first).unwrap().map.is_cut);
        assert_eq!(maps.lines, 6);
        maps.read(&bad).unwrap();
        assert_eq!(maps.lines, 2);
        let last = maps.read(&second).unwrap().map;
        assert_eq!((last.lines, last.is_cut, maps.lines), (2, true, 0));
    }

    #[test]
    fn all_files_together_have_an_end() {
        let mut maps = CodeMaps::new(1000);
        maps.bytes = 100;
        let text = "1000 10 f\n".repeat(6);
        let (first, second) = (file(&text), file(&text));
        maps.read(&first).unwrap();
        assert_eq!((maps.bytes, maps.lines), (40, 994));
        let error = maps.read(&second).unwrap_err();
        assert_eq!(error, "such files have more than 256 MiB");
        assert_eq!((maps.bytes, maps.lines), (0, 994));
    }

    #[test]
    fn a_file_of_several_is_read_once() {
        let mut maps = CodeMaps::new(1000);
        let own = file("1000 10 f\n");
        let first = maps.read(&own).unwrap();
        let (bytes, lines) = (maps.bytes, maps.lines);
        let second = maps.read(&own.try_clone().unwrap()).unwrap();
        assert!(!first.again && second.again);
        assert!(Arc::ptr_eq(&first.map, &second.map));
        assert_eq!((maps.bytes, maps.lines), (bytes, lines));
        let long = file("");
        long.set_len(LONGEST + 1).unwrap();
        for _ in 0..3 {
            assert_eq!(maps.read(&long).unwrap_err(), "it is longer than 64 MiB");
        }
        assert_eq!(maps.bytes, bytes);
    }
}
