//! Every rule of the registers, played; and the page that lists them.

use std::collections::BTreeSet;
use std::path::Path;

use crate::rules;

fn all() -> impl Iterator<Item = &'static rules::Rule> {
    rules::intel::RULES
        .iter()
        .chain(rules::intel_global::RULES)
        .chain(rules::intel_versions::RULES)
        .chain(rules::intel_pebs::RULES)
        .chain(rules::amd::RULES)
        .chain(rules::ibs::RULES)
}

#[test]
fn every_rule_holds() {
    for rule in all() {
        rules::check(rule);
    }
}

#[test]
fn rules_have_unique_names() {
    let names: BTreeSet<_> = all().map(|rule| rule.name).collect();
    assert_eq!(names.len(), all().count());
}

/// `docs/reference/registers.md` holds the same table; `UPDATE_DOCS=1` writes it there.
#[test]
fn the_page_lists_every_rule_as_it_is_tested() {
    const BEGIN: &str = "<!-- rules: begin -->\n";
    const END: &str = "<!-- rules: end -->";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/registers.md");
    let page = std::fs::read_to_string(&path).expect("docs/reference/registers.md can be read");
    let (head, rest) = page
        .split_once(BEGIN)
        .expect("the page marks the table's begin");
    let (table, tail) = rest
        .split_once(END)
        .expect("the page marks the table's end");
    let mut expected = String::from(
        "| rule | models | source | operations from reset on, with their outcomes |\n|---|---|---|---|\n",
    );
    for rule in all() {
        expected.push_str(&format!("{rule}\n"));
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        let page = format!("{head}{BEGIN}{expected}{END}{tail}");
        std::fs::write(&path, page).expect("docs/reference/registers.md can be written");
        return;
    }
    assert_eq!(
        table, expected,
        "docs/reference/registers.md is out of date; run this test with UPDATE_DOCS=1"
    );
}
