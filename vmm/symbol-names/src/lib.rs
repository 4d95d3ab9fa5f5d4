//! Names of C++ and Rust as their sources have them.
#![forbid(unsafe_code)]

use std::fmt::{self, Write};

use cpp_demangle::{DemangleOptions, ParseOptions, Symbol};

/// The longest name that is shown, in bytes. A short symbol can stand for one without end.
const LONGEST: usize = 1 << 14;
/// The longest symbol of C++ that is read, in bytes; LLVM has none of more.
const LONGEST_CPP: usize = 1 << 10;
/// How deep its parts may be in each other. What `cpp_demangle` cannot read it tries to read as
/// something else, on each level anew, so the time for a bad one doubles every few levels. One
/// in 200 of LLVM's symbols is deeper.
const DEEPEST: u32 = 48;
/// Words of expressions that double it on each level, and what stands for them in names while
/// these are read.
const TWICE: [(&str, &str); 4] = [("na", "$a"), ("nw", "$w"), ("dl", "$l"), ("da", "$d")];
/// How often what doubles the time may be in a symbol.
const MOST_TWICE: usize = 4;

/// What `symbol` is called in its source, if it is a name of C++ or Rust: without parameters
/// and without the hash that Rust puts behind names, as perf shows it.
#[must_use]
pub fn demangled(symbol: &str) -> Option<String> {
    named(symbol, Shown::Name)
}

/// The same with parameters, and with what compilers put behind the names of parts and copies of
/// functions: `[clone .cold]`. So functions that are not the same have mostly not the same name.
#[must_use]
pub fn demangled_whole(symbol: &str) -> Option<String> {
    let (symbol, part) = symbol.split_at(symbol.len() - part(symbol).len());
    let name = named(symbol, Shown::Whole)?;
    Some(if part.is_empty() {
        name
    } else {
        format!("{name} [clone {part}]")
    })
}

/// How much of a name of C++ is shown.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Shown {
    Name,
    Whole,
}

/// What a compiler has put behind a symbol: `.cold`, `.constprop.0`, `.llvm.1234`. Rust's symbols
/// have dots of their own.
fn part(symbol: &str) -> &str {
    const WORDS: [&str; 7] = [
        "cold",
        "part",
        "constprop",
        "isra",
        "llvm",
        "lto_priv",
        "clone",
    ];
    let mut start = symbol.len();
    let mut known = symbol.len();
    while let Some(dot) = symbol[..start].rfind('.') {
        let word = &symbol[dot + 1..start];
        if WORDS.contains(&word) {
            known = dot;
        } else if word.is_empty() || !word.bytes().all(|letter| letter.is_ascii_digit()) {
            break;
        }
        start = dot;
    }
    &symbol[known..]
}

fn named(symbol: &str, shown: Shown) -> Option<String> {
    if !symbol.starts_with("_Z") && !symbol.starts_with("_R") {
        return None;
    }
    let mut name = Limited(String::new());
    let written = match rustc_demangle::try_demangle(symbol) {
        Ok(rust) => write!(name, "{rust:#}"),
        Err(_) => return cpp(symbol, shown),
    };
    let Limited(name) = name;
    (written.is_ok() && is_shown(&name)).then_some(name)
}

/// The same of a name of C++, in bounded time.
fn cpp(symbol: &str, shown: Shown) -> Option<String> {
    if symbol.len() > LONGEST_CPP || arguments_of_conversions(symbol) > MOST_TWICE {
        return None;
    }
    let words = TWICE.iter().map(|(word, _)| symbol.matches(word).count());
    if words.sum::<usize>() <= MOST_TWICE {
        return parsed(symbol, shown);
    }
    // Mostly they are within names of the source.
    if symbol.contains('$') {
        return None;
    }
    let mut hidden = symbol.to_owned();
    for (word, stand_in) in TWICE {
        hidden = hidden.replace(word, stand_in);
    }
    let mut name = parsed(&hidden, shown)?;
    for (word, stand_in) in TWICE {
        name = name.replace(stand_in, word);
    }
    // One was partly in a name.
    (!name.contains('$')).then_some(name)
}

/// How many template parameters have arguments, where a conversion operator may be: it is tried
/// with and without them.
fn arguments_of_conversions(symbol: &str) -> usize {
    if !symbol.contains("cv") {
        return 0;
    }
    let before = symbol.match_indices("_I").map(|(at, _)| &symbol[..at]);
    let digit = |char: char| char.is_ascii_digit();
    before
        .filter(|before| before.trim_end_matches(digit).ends_with('T'))
        .count()
}

fn parsed(symbol: &str, shown: Shown) -> Option<String> {
    let options = ParseOptions::default().recursion_limit(DEEPEST);
    let cpp = Symbol::new_with_options(symbol.as_bytes(), &options).ok()?;
    let options = DemangleOptions::new().no_return_type();
    let options = match shown {
        Shown::Name => options.no_params(),
        Shown::Whole => options,
    };
    let mut name = Limited(String::new());
    let written = cpp.structured_demangle(&mut name, &options);
    let Limited(name) = name;
    (written.is_ok() && is_shown(&name)).then_some(name)
}

fn is_shown(name: &str) -> bool {
    !name.is_empty() && !name.contains(char::is_control)
}

/// A text that takes no more than [`LONGEST`].
struct Limited(String);

impl Write for Limited {
    fn write_str(&mut self, more: &str) -> fmt::Result {
        if self.0.len() + more.len() > LONGEST {
            return Err(fmt::Error);
        }
        self.0.push_str(more);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::RecvTimeoutError;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_those_of_the_source() {
        let check = |symbol, expected: Option<&str>| {
            assert_eq!(demangled(symbol).as_deref(), expected, "{symbol}");
        };
        check(
            "_ZN3std2io5stdio6_print17h0123456789abcdefE",
            Some("std::io::stdio::_print"),
        );
        check("_RNvC6_123foo3bar", Some("123foo::bar"));
        check("_ZN5space3fooEibc", Some("space::foo"));
        check("_ZNSt6vectorIiSaIiEE9push_backERKi", {
            Some("std::vector<int, std::allocator<int> >::push_back")
        });
        check("_Z3fooi.cold", Some("foo"));
        check(
            "_ZN8namedata19handle_nada_dl_nwanEv",
            Some("namedata::handle_nada_dl_nwan"),
        );
        // Double and long, behind a name that ends with d, are one of the words.
        check("_Z8nadadldddl", Some("nadadldd"));
        check("_Z10nadadlnaddl", None);
        check("main", None);
        check("_Zebra", None);
        check("_ZN5space3fooEibc trailing", None);
    }

    #[test]
    fn a_whole_name_tells_functions_apart() {
        let check = |symbol, expected: &str| {
            assert_eq!(
                demangled_whole(symbol).as_deref(),
                Some(expected),
                "{symbol}"
            );
        };
        check("_Z3fooi", "foo(int)");
        check("_Z3food", "foo(double)");
        check("_Z7throweri.cold", "thrower(int) [clone .cold]");
        check(
            "_Z3fooi.part.0.constprop.1",
            "foo(int) [clone .part.0.constprop.1]",
        );
        check(
            "_ZN3std2io5stdio6_print17h0123456789abcdefE.llvm.42",
            "std::io::stdio::_print [clone .llvm.42]",
        );
        check(
            "_ZN50_$LT$std..io..Stdout$u20$as$u20$std..io..Write$GT$5write17h0123456789abcdefE",
            "<std::io::Stdout as std::io::Write>::write",
        );
        assert_eq!(demangled_whole("main"), None);
        assert_eq!(demangled_whole("part.cold"), None);
    }

    /// Each level of this one doubles its name.
    #[test]
    fn a_name_without_end_stays_as_it_is() {
        let mut symbol = "_Z1fI1A".to_owned();
        let names = "_0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ";
        symbol.push_str("1BIS_S_E");
        for level in names.chars().skip(1).take(30) {
            symbol.push_str(&format!("1BIS{level}_S{level}_E"));
        }
        symbol.push_str("Evv");
        assert!(demangled(&symbol).is_none_or(|name| name.len() <= LONGEST));
    }

    /// Each of them takes for ever where nothing bounds the time.
    #[test]
    fn bad_names_take_no_time() {
        let (to, from) = std::sync::mpsc::channel();
        let check = move |begin: &str, part: &str, times: usize| {
            let symbol = format!("{begin}{}{}", part.repeat(times), "Ss".repeat(300));
            for end in ["", "EEvv"] {
                let _ = demangled(&format!("{symbol}{end}"));
            }
            to.send(()).unwrap();
        };
        let all = std::thread::spawn(move || {
            for word in ["na", "nw", "dl", "da", "gsna", "naplnw", "nadl"] {
                for begin in ["_Z1fIX", "_Z1fIA", "_ZA", "_Z1fIDT"] {
                    check(begin, word, 45);
                }
            }
            check("_ZNcv", "T_I", 40);
            check("_ZNK1acvT_I", "T12_I", 40);
            check("_Z1fI", "LStI", 15);
            check("_Z1fI", "LStI", 5);
            check("_Z1fIXnananana", "StI", 5);
            check("_Z1fIXnananana", "L1aI", 4);
        });
        // The slowest takes 0.2 s where the compiler optimizes.
        let patience = std::time::Duration::from_secs(60);
        while !all.is_finished() {
            let next = from.recv_timeout(patience);
            assert_ne!(next, Err(RecvTimeoutError::Timeout), "it goes on");
        }
    }

    proptest! {
        #[test]
        fn anything_has_a_name_or_none(symbol in "_[ZR][A-Za-z0-9_.]{0,60}") {
            let name = demangled(&symbol);
            prop_assert!(name.is_none_or(|name| name.len() <= LONGEST));
        }
    }
}
