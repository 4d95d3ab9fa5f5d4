//! The shape of JSON: keys and kinds of values, without what differs from run to run.

use std::collections::BTreeSet;

use serde_json::Value;

/// A value's shape in one line. Numbers are `n`, strings `s` but for those under
/// a key of `words`, which are fixed; of a list each different shape once.
pub(crate) fn shape(value: &Value, words: &[&str]) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(_) => "bool".to_owned(),
        Value::Number(_) => "n".to_owned(),
        Value::String(_) => "s".to_owned(),
        Value::Array(items) => {
            let shapes: BTreeSet<String> = items.iter().map(|item| shape(item, words)).collect();
            format!("[{}]", Vec::from_iter(shapes).join(" | "))
        }
        Value::Object(members) => {
            let member = |(key, value): (&String, &Value)| match value {
                Value::String(text) if words.contains(&key.as_str()) => format!("{key}: {text:?}"),
                _ => format!("{key}: {}", shape(value, words)),
            };
            let members: Vec<String> = members.iter().map(member).collect();
            format!("{{{}}}", members.join(", "))
        }
    }
}

/// The shapes of lines of JSON, each once.
pub(crate) fn shapes_of_lines(text: &str, words: &[&str]) -> String {
    let shape = |line| {
        let value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
        shape(&value, words)
    };
    let shapes: BTreeSet<String> = text.lines().map(shape).collect();
    let mut all = Vec::from_iter(shapes).join("\n");
    all.push('\n');
    all
}

/// Text with `n` for every number, so that what is around them can be compared.
pub(crate) fn without_numbers(text: &str) -> String {
    let mut out = String::new();
    let mut in_number = false;
    for letter in text.chars() {
        let goes_on = in_number && letter == '.';
        if letter.is_ascii_digit() {
            if !in_number {
                out.push('n');
            }
            in_number = true;
        } else if !goes_on {
            in_number = false;
            out.push(letter);
        }
    }
    out
}
