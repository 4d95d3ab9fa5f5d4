//! One name, one type: no two types of a crate share a name, so that a reader who meets one
//! knows which it is.

use std::collections::{BTreeMap, BTreeSet};

use super::parsed::{Crate, Text, parsed, product};

/// Names that more than one type of a crate has, with the modules.
fn shared(house: &Crate) -> BTreeMap<&str, BTreeSet<String>> {
    let mut found: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for one in &house.types {
        let all = found.entry(&one.item.name).or_default();
        all.insert(one.item.to_string());
    }
    found.retain(|_, all| all.len() > 1);
    found
}

#[test]
fn no_two_types_of_a_crate_share_a_name() {
    let mut wrong = Vec::new();
    for house in product() {
        for (name, all) in shared(house) {
            let all: Vec<String> = all.into_iter().collect();
            wrong.push(format!("{} {name}: {}", house.folder, all.join(", ")));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_shared_name_is_found() {
    let text = |path, text| Text { path, text };
    let house = parsed(
        "a",
        &[
            text("a/src/lib.rs", "struct T; fn f() { struct U; } mod b;"),
            text(
                "a/src/b.rs",
                "enum T {} #[cfg(test)] mod tests { struct U; } struct U;",
            ),
        ],
    );
    let found = shared(&house);
    let expected = BTreeSet::from(["T".to_owned(), "b::T".to_owned()]);
    assert_eq!(found, BTreeMap::from([("T", expected)]));
}
