//! `/proc/kallsyms` and `System.map`: `address type name [module]`, a line each.

use thiserror::Error;

use super::table::RawSymbol;

/// A text that is no table of symbols, or one without addresses. Prints as one
/// line without the file's name.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TextError {
    /// It is not text.
    #[error(
        "it is neither an ELF file nor text; give vmlinux, System.map or a copy of the guest's /proc/kallsyms"
    )]
    NotText,
    /// A line is of another form.
    #[error("line {line}: '{text}' is not of the form: address type name [module]")]
    Line {
        /// Its number, from 1.
        line: usize,
        /// How it begins.
        text: String,
    },
    /// The guest's kernel showed no addresses.
    #[error(
        "all addresses are 0: the guest's kernel hides them from programs without privilege; \
         copy /proc/kallsyms as root, after: sysctl kernel.kptr_restrict=1"
    )]
    Hidden,
    /// It is what Debian installs in place of a System.map.
    #[error(
        "it only says that the real System.map is in the package linux-image-VERSION-dbg; give \
         that one, or a copy of the guest's /proc/kallsyms"
    )]
    Placeholder,
    /// There is no code.
    #[error("it names no function")]
    NoCode,
}

/// How the file begins that Debian's kernel packages have for a System.map.
const PLACEHOLDER: &str = "ffffffffffffffff B The real System.map is in";

/// The symbols in `bytes`.
///
/// # Errors
/// [`TextError`] names the first line that cannot be used.
pub fn parse(bytes: &[u8]) -> Result<Vec<RawSymbol>, TextError> {
    // A name of other bytes hides none of the others.
    let text = String::from_utf8_lossy(bytes);
    if text.contains('\0') {
        return Err(TextError::NotText);
    }
    if text.starts_with(PLACEHOLDER) {
        return Err(TextError::Placeholder);
    }
    let mut symbols = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim_end();
        if line.is_empty() {
            continue;
        }
        let symbol = symbol(line).ok_or_else(|| {
            if line.contains(char::REPLACEMENT_CHARACTER) {
                return TextError::NotText;
            }
            TextError::Line {
                line: number + 1,
                text: umpire_events::one_line(&line.chars().take(60).collect::<String>()),
            }
        })?;
        symbols.extend(symbol);
    }
    if !symbols.iter().any(|symbol| symbol.code) {
        return Err(TextError::NoCode);
    }
    if symbols.iter().all(|symbol| symbol.address == 0) {
        Err(TextError::Hidden)
    } else {
        Ok(symbols)
    }
}

/// The symbol of a line; `Some(None)` for one that has no place in memory.
fn symbol(line: &str) -> Option<Option<RawSymbol>> {
    let mut words = line.split_ascii_whitespace();
    let address = words.next()?;
    let kind = words.next()?;
    let name = words.next()?;
    let module = match words.next() {
        None => None,
        Some(word) => Some(word.strip_prefix('[')?.strip_suffix(']')?),
    };
    let &[kind] = kind.as_bytes() else {
        return None;
    };
    let hexadecimal = address.bytes().all(|digit| digit.is_ascii_hexdigit());
    let letters_alone = !name.chars().any(char::is_control);
    if words.next().is_some() || !hexadecimal || !letters_alone {
        return None;
    }
    let address = u64::from_str_radix(address, 16).ok()?;
    if !kind.is_ascii_alphabetic() {
        return None;
    }
    // Types as nm(1) has them: a capital letter is a global symbol. Absolute
    // values and undefined symbols are no places.
    if matches!(kind, b'A' | b'a' | b'U' | b'u') {
        return Some(None);
    }
    Some(Some(RawSymbol {
        address,
        size: 0,
        name: name.to_owned(),
        module: module.map(str::to_owned),
        rank: match kind {
            b'T' => 2,
            b'W' | b'w' => 1,
            _ => 0,
        },
        code: matches!(kind, b'T' | b't' | b'W' | b'w'),
    }))
}
