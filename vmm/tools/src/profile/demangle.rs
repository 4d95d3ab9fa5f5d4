//! Names of C++ and Rust as their sources have them.

use std::fmt::{self, Write};

use cpp_demangle::{DemangleOptions, Symbol};

/// The longest name that is shown, in bytes. A short symbol can stand for one without end.
const LONGEST: usize = 1 << 14;

/// What `symbol` is called in its source, if it is a name of C++ or Rust: without parameters
/// and without the hash that Rust puts behind names, as perf shows it.
pub(super) fn demangled(symbol: &str) -> Option<String> {
    if !symbol.starts_with("_Z") && !symbol.starts_with("_R") {
        return None;
    }
    let mut name = Limited(String::new());
    let written = match rustc_demangle::try_demangle(symbol) {
        Ok(rust) => write!(name, "{rust:#}"),
        Err(_) => {
            let cpp = Symbol::new(symbol.as_bytes()).ok()?;
            let options = DemangleOptions::new().no_params().no_return_type();
            cpp.structured_demangle(&mut name, &options)
        }
    };
    let Limited(name) = name;
    (written.is_ok() && !name.is_empty() && !name.contains(char::is_control)).then_some(name)
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
        check("main", None);
        check("_Zebra", None);
        check("_ZN5space3fooEibc trailing", None);
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

    proptest! {
        #[test]
        fn anything_has_a_name_or_none(symbol in "_[ZR][A-Za-z0-9_.]{0,60}") {
            let name = demangled(&symbol);
            prop_assert!(name.is_none_or(|name| name.len() <= LONGEST));
        }
    }
}
