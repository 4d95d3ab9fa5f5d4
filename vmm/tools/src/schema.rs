//! The schemas of `docs/schemas` are those of the structures that commands print with `-j`.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

/// The words for how a number came about.
pub(crate) const PROVENANCE: [&str; 6] = [
    "exact",
    "hardware",
    "derived",
    "scaled",
    "simulated",
    "unavailable",
];

/// What the schema of `command` has of `T`, and of all that is in one, is what the structures
/// have. A field that is left out where it is none is never null, but where it says `x-null`.
pub(crate) fn check<T: JsonSchema>(command: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schemas");
    let text = fs::read_to_string(path.join(format!("{command}.json"))).expect("a schema");
    let file: Value = serde_json::from_str(&text).expect("JSON");
    let mut generator = SchemaSettings::draft2020_12()
        .for_serialize()
        .into_generator();
    generator.subschema_for::<T>();
    let mut flattened = BTreeSet::new();
    find_flattened(&file, false, &mut flattened);
    let definitions = generator.take_definitions(true);
    assert!(!definitions.is_empty(), "{command}: no structure");
    for (name, mut schema) in definitions {
        trim(&mut schema);
        if !flattened.contains(&name) {
            close(&mut schema);
        }
        assert_eq!(
            file["$defs"][&name], schema,
            "{command}: {name} is {schema:#}"
        );
    }
}

/// The definitions whose properties are among those of others.
fn find_flattened(value: &Value, within: bool, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(members) => {
            for (key, member) in members {
                if let ("$ref", true, Value::String(path)) = (key.as_str(), within, member) {
                    found.extend(path.rsplit('/').next().map(str::to_owned));
                }
                find_flattened(member, within && key == "anyOf" || key == "allOf", found);
            }
        }
        Value::Array(items) => items
            .iter()
            .for_each(|item| find_flattened(item, within, found)),
        _ => {}
    }
}

/// No other properties than these.
fn close(schema: &mut Value) {
    if let Some(members) = schema.as_object_mut()
        && members.contains_key("properties")
    {
        let word = if members.contains_key("allOf") {
            "unevaluatedProperties"
        } else {
            "additionalProperties"
        };
        members.insert(word.to_owned(), json!(false));
    }
}

/// Without what says nothing to whoever reads JSON.
fn trim(schema: &mut Value) {
    match schema {
        Value::Object(members) => {
            for word in ["format", "maximum", "default"] {
                members.remove(word);
            }
            if members.contains_key("const") {
                members.remove("type");
            }
            if let Some(Value::String(text)) = members.get_mut("description") {
                *text = text.replace('\n', " ");
            }
            properties(members);
            members.values_mut().for_each(trim);
        }
        Value::Array(items) => items.iter_mut().for_each(trim),
        _ => {}
    }
}

fn properties(members: &mut Map<String, Value>) {
    let required = members.get("required").cloned().unwrap_or(json!([]));
    let required = required.as_array().expect("a list");
    let Some(Value::Object(properties)) = members.get("properties").cloned() else {
        return;
    };
    let each = properties.into_iter().map(|(name, property)| {
        let property = match property {
            Value::Object(mut property) => {
                let is_null = property.remove("x-null").is_some();
                if !is_null && !required.contains(&json!(name)) {
                    without_null(&mut property);
                }
                Value::Object(property)
            }
            other => other,
        };
        (name, property)
    });
    let each = Value::Object(each.collect());
    members.insert("properties".to_owned(), each);
}

fn without_null(property: &mut Map<String, Value>) {
    if let Some(Value::Array(types)) = property.get_mut("type") {
        types.retain(|one| one != "null");
        if let [one] = &types[..] {
            let one = one.clone();
            property.insert("type".to_owned(), one);
        }
    }
    if let Some(Value::Array(one)) = property.get("anyOf")
        && let [Value::Object(one), null] = &one[..]
        && *null == json!({"type": "null"})
    {
        let one = one.clone();
        property.remove("anyOf");
        property.extend(one);
    }
}
