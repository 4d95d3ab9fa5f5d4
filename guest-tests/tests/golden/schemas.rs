//! Schemas of what commands print with `-j` (`docs/schemas`), held against what they print.

use std::fs;
use std::path::{Path, PathBuf};

use jsonschema::Validator;
use serde_json::{Deserializer, Value, json};

pub(crate) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/schemas")
}

pub(crate) fn schema(command: &str) -> Value {
    let path = folder().join(format!("{command}.json"));
    let text = fs::read_to_string(&path)
        .unwrap_or_else(|error| panic!("{} is missing: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every document in `text` is what the schema of `command` says, and nothing could be added to
/// the first one.
pub(crate) fn valid(command: &str, text: &str) {
    let validator = jsonschema::draft202012::new(&schema(command)).expect("a schema");
    let documents = Deserializer::from_str(text).into_iter::<Value>();
    let documents: Vec<Value> = documents.map(|one| one.expect("JSON")).collect();
    for document in &documents {
        if let Err(error) = validator.validate(document) {
            panic!(
                "{command}: {} of {document}: {error}",
                error.instance_path()
            );
        }
    }
    let first = documents
        .first()
        .unwrap_or_else(|| panic!("{command} says nothing"));
    no_key_is_missed(command, &validator, first);
}

/// A key that no schema names is refused, whichever object of `document` has it.
fn no_key_is_missed(command: &str, validator: &Validator, document: &Value) {
    let mut objects = Vec::new();
    places("", document, &mut objects);
    for place in objects {
        let mut with_more = document.clone();
        let object = with_more.pointer_mut(&place).and_then(Value::as_object_mut);
        object
            .expect("an object")
            .insert("no-such-key".to_owned(), json!({}));
        assert!(
            !validator.is_valid(&with_more),
            "{command}: anything goes at '{place}'"
        );
    }
}

/// Where the objects of a document are.
fn places(at: &str, value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(members) => {
            found.push(at.to_owned());
            for (key, member) in members {
                let key = key.replace('~', "~0").replace('/', "~1");
                places(&format!("{at}/{key}"), member, found);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                places(&format!("{at}/{index}"), item, found);
            }
        }
        _ => {}
    }
}
