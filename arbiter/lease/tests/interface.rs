//! The messages in Rust are those of the interface's description: the same fields, of types
//! that take the same values.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use umpire_lease::{
    AcquireIn, AcquireOut, AuditIn, ClaimIn, CounterKind, Counters, DESCRIPTION, Event, ExplainIn,
    ExplainOut, Fate, Figure, GroupsOut, INTERFACE, Lease, LeaseScope, LeasedGroup, Leaving,
    ListOut, NoReply, Outsider, PardonIn, Place, Refusal, RefusedError, ReleaseIn, RenewIn,
    RenewOut, ReportIn, Request, RevokeIn, RevokeOut, WatchOut, WhoIn, WhoOut,
};
use varlink_parser::{IDL, VEnum, VStruct, VStructOrEnum, VType, VTypeExt};

/// The fields of a message, as its deserializer names them to whoever has another.
fn fields<T: DeserializeOwned>() -> BTreeSet<String> {
    let error = match serde_json::from_value::<T>(json!({ "no such field": 1 })) {
        Ok(_) => panic!("it takes any field"),
        Err(error) => error.to_string(),
    };
    let (_, expected) = error.split_once(", ").expect("what it expected");
    expected
        .split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

/// A value of a type of the interface; of an enumeration its word at `turn`, round and round.
fn value(idl: &IDL<'_>, of: &VTypeExt<'_>, turn: usize) -> Value {
    match of {
        VTypeExt::Option(of) => value(idl, of, turn),
        VTypeExt::Array(of) => json!([value(idl, of, turn)]),
        VTypeExt::Dict(of) => json!({ "key": value(idl, of, turn) }),
        VTypeExt::Plain(VType::Bool) => json!(true),
        VTypeExt::Plain(VType::Int) => json!(7),
        VTypeExt::Plain(VType::Float) => json!(0.5),
        VTypeExt::Plain(VType::String) => json!("text"),
        VTypeExt::Plain(VType::Object) => json!({}),
        VTypeExt::Plain(VType::Typename(name)) => match &idl.typedefs[name].elt {
            VStructOrEnum::VStruct(of) => object(idl, of, turn),
            VStructOrEnum::VEnum(of) => word(of, turn),
        },
        VTypeExt::Plain(VType::Struct(of)) => object(idl, of, turn),
        VTypeExt::Plain(VType::Enum(of)) => word(of, turn),
    }
}

fn word(of: &VEnum<'_>, turn: usize) -> Value {
    json!(of.elts[turn % of.elts.len()])
}

fn object(idl: &IDL<'_>, of: &VStruct<'_>, turn: usize) -> Value {
    let fields = of
        .elts
        .iter()
        .map(|field| (field.name.to_owned(), value(idl, &field.vtype, turn)));
    Value::Object(fields.collect::<Map<_, _>>())
}

/// No enumeration has more words.
const TURNS: usize = 4;

fn check<T: DeserializeOwned + Serialize + Debug>(idl: &IDL<'_>, name: &str, of: &VStruct<'_>) {
    let described: BTreeSet<String> = of.elts.iter().map(|field| field.name.to_owned()).collect();
    assert_eq!(fields::<T>(), described, "{name}");
    for turn in 0..TURNS {
        let full = object(idl, of, turn);
        let taken: T =
            serde_json::from_value(full.clone()).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(serde_json::to_value(&taken).expect("JSON"), full, "{name}");
        // A word of an enumeration is known; "text" is none of those that are strings.
        let unknown = format!("{taken:?}").replace(r#"Other("text")"#, "");
        assert!(!unknown.contains("Other("), "{name}: {unknown}");
    }
}

/// The words of the enumerations in a type, by the names of their fields.
fn words_in<'a>(of: &VStruct<'a>, found: &mut BTreeMap<&'a str, Vec<&'a str>>) {
    for field in &of.elts {
        let mut of = &field.vtype;
        while let VTypeExt::Option(of_one) | VTypeExt::Array(of_one) | VTypeExt::Dict(of_one) = of {
            of = of_one;
        }
        match of {
            VTypeExt::Plain(VType::Enum(of)) => {
                found.insert(field.name, of.elts.clone());
            }
            VTypeExt::Plain(VType::Struct(of)) => words_in(of, found),
            _ => {}
        }
    }
}

/// Known words as they are written.
fn written<T: Serialize>(known: &[T]) -> Vec<String> {
    let word = |word| match serde_json::to_value(word) {
        Ok(Value::String(word)) => word,
        other => panic!("{other:?} is no word"),
    };
    known.iter().map(word).collect()
}

#[test]
fn enumerations_are_as_described() {
    let idl = IDL::try_from(DESCRIPTION).expect("the description is varlink");
    let mut found = BTreeMap::new();
    for typedef in idl.typedefs.values() {
        match &typedef.elt {
            VStructOrEnum::VStruct(of) => words_in(of, &mut found),
            VStructOrEnum::VEnum(_) => panic!("{} is an enumeration", typedef.name),
        }
    }
    for method in idl.methods.values() {
        words_in(&method.input, &mut found);
        words_in(&method.output, &mut found);
    }
    assert!(found.values().all(|words| words.len() <= TURNS));
    // Whoever adds a word adds it here, too.
    let kind = |kind: CounterKind| match kind {
        CounterKind::Programmable | CounterKind::Fixed => kind,
        CounterKind::Other(word) => panic!("{word}"),
    };
    let scope = |scope: LeaseScope| match scope {
        LeaseScope::Cpu | LeaseScope::Thread | LeaseScope::Cgroup | LeaseScope::Part => scope,
        LeaseScope::Other(word) => panic!("{word}"),
    };
    let fate = |fate: Fate| match fate {
        Fate::Granted | Fate::Waits | Fate::Refused => fate,
        Fate::Other(word) => panic!("{word}"),
    };
    let kinds = [CounterKind::Programmable, CounterKind::Fixed].map(kind);
    let scopes = [
        LeaseScope::Cpu,
        LeaseScope::Thread,
        LeaseScope::Cgroup,
        LeaseScope::Part,
    ]
    .map(scope);
    let fates = [Fate::Granted, Fate::Waits, Fate::Refused].map(fate);
    let known = [
        ("kind", written(&kinds)),
        ("scope", written(&scopes)),
        ("outcome", written(&fates)),
    ];
    let found: BTreeMap<&str, Vec<String>> = found
        .into_iter()
        .map(|(name, words)| (name, words.into_iter().map(str::to_owned).collect()))
        .collect();
    assert_eq!(found, BTreeMap::from(known));
}

#[test]
fn messages_are_as_described() {
    let idl = IDL::try_from(DESCRIPTION).expect("the description is varlink");
    assert_eq!(idl.name, INTERFACE);
    let named = |name: &str| match &idl.typedefs[name].elt {
        VStructOrEnum::VStruct(of) => of.as_ref(),
        VStructOrEnum::VEnum(_) => panic!("{name} is an enumeration"),
    };
    check::<Counters>(&idl, "Counters", named("Counters"));
    check::<Request>(&idl, "Request", named("Request"));
    check::<Leaving>(&idl, "Leaving", named("Leaving"));
    check::<Lease>(&idl, "Lease", named("Lease"));
    check::<Event>(&idl, "Event", named("Event"));
    check::<Place>(&idl, "Place", named("Place"));
    check::<Outsider>(&idl, "Outsider", named("Outsider"));
    check::<Refusal>(&idl, "Refusal", named("Refusal"));
    check::<LeasedGroup>(&idl, "LeasedGroup", named("LeasedGroup"));
    check::<Figure>(&idl, "Figure", named("Figure"));
    let figures = idl.typedefs["Figure"].doc;
    for figure in umpire_lease::FIGURES {
        assert!(
            DESCRIPTION.contains(&format!("\"{figure}\"")),
            "{figure} {figures}"
        );
    }
    assert_eq!(idl.typedefs.len(), 10, "each type is checked");

    let method = |name: &str| &idl.methods[name];
    check::<AcquireIn>(&idl, "Acquire", &method("Acquire").input);
    check::<AcquireOut>(&idl, "Acquire", &method("Acquire").output);
    check::<ClaimIn>(&idl, "Claim", &method("Claim").input);
    check::<AcquireOut>(&idl, "Claim", &method("Claim").output);
    check::<ReleaseIn>(&idl, "Release", &method("Release").input);
    check::<NoReply>(&idl, "Release", &method("Release").output);
    check::<RenewIn>(&idl, "Renew", &method("Renew").input);
    check::<RenewOut>(&idl, "Renew", &method("Renew").output);
    check::<RevokeIn>(&idl, "Revoke", &method("Revoke").input);
    check::<RevokeOut>(&idl, "Revoke", &method("Revoke").output);
    check::<NoReply>(&idl, "List", &method("List").input);
    check::<ListOut>(&idl, "List", &method("List").output);
    check::<NoReply>(&idl, "Groups", &method("Groups").input);
    check::<GroupsOut>(&idl, "Groups", &method("Groups").output);
    check::<WhoIn>(&idl, "Who", &method("Who").input);
    check::<WhoOut>(&idl, "Who", &method("Who").output);
    check::<ExplainIn>(&idl, "Explain", &method("Explain").input);
    check::<ExplainOut>(&idl, "Explain", &method("Explain").output);
    check::<NoReply>(&idl, "Watch", &method("Watch").input);
    check::<WatchOut>(&idl, "Watch", &method("Watch").output);
    check::<ReportIn>(&idl, "Report", &method("Report").input);
    check::<NoReply>(&idl, "Report", &method("Report").output);
    check::<AuditIn>(&idl, "Audit", &method("Audit").input);
    check::<NoReply>(&idl, "Audit", &method("Audit").output);
    check::<PardonIn>(&idl, "Pardon", &method("Pardon").input);
    check::<NoReply>(&idl, "Pardon", &method("Pardon").output);
    assert_eq!(idl.methods.len(), 13, "each method is checked");
    check::<RefusedError>(&idl, "Refused", &idl.errors["Refused"].parm);
}
