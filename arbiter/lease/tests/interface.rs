//! The messages in Rust are those of the interface's description: the same fields, of types
//! that take the same values.

use std::collections::BTreeSet;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use umpire_lease::{
    AcquireIn, AcquireOut, AuditIn, ClaimIn, Counters, DESCRIPTION, Event, ExplainIn, ExplainOut,
    Figure, INTERFACE, Lease, Leaving, ListOut, NoReply, Outsider, PardonIn, Place, Refusal,
    RefusedError, ReleaseIn, RenewIn, RenewOut, ReportIn, Request, RevokeIn, RevokeOut, WatchOut,
    WhoIn, WhoOut,
};
use varlink_parser::{IDL, VStruct, VStructOrEnum, VType, VTypeExt};

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

/// A value of a type of the interface.
fn value(idl: &IDL<'_>, of: &VTypeExt<'_>) -> Value {
    match of {
        VTypeExt::Option(of) => value(idl, of),
        VTypeExt::Array(of) => json!([value(idl, of)]),
        VTypeExt::Dict(of) => json!({ "key": value(idl, of) }),
        VTypeExt::Plain(VType::Bool) => json!(true),
        VTypeExt::Plain(VType::Int) => json!(7),
        VTypeExt::Plain(VType::Float) => json!(0.5),
        VTypeExt::Plain(VType::String) => json!("text"),
        VTypeExt::Plain(VType::Object) => json!({}),
        VTypeExt::Plain(VType::Typename(name)) => match &idl.typedefs[name].elt {
            VStructOrEnum::VStruct(of) => object(idl, of),
            VStructOrEnum::VEnum(of) => json!(of.elts[0]),
        },
        VTypeExt::Plain(VType::Struct(of)) => object(idl, of),
        VTypeExt::Plain(VType::Enum(of)) => json!(of.elts[0]),
    }
}

fn object(idl: &IDL<'_>, of: &VStruct<'_>) -> Value {
    let fields = of
        .elts
        .iter()
        .map(|field| (field.name.to_owned(), value(idl, &field.vtype)));
    Value::Object(fields.collect::<Map<_, _>>())
}

fn check<T: DeserializeOwned + Serialize>(idl: &IDL<'_>, name: &str, of: &VStruct<'_>) {
    let described: BTreeSet<String> = of.elts.iter().map(|field| field.name.to_owned()).collect();
    assert_eq!(fields::<T>(), described, "{name}");
    let full = object(idl, of);
    let taken: T =
        serde_json::from_value(full.clone()).unwrap_or_else(|error| panic!("{name}: {error}"));
    assert_eq!(serde_json::to_value(&taken).expect("JSON"), full, "{name}");
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
    check::<Figure>(&idl, "Figure", named("Figure"));
    let figures = idl.typedefs["Figure"].doc;
    for figure in umpire_lease::FIGURES {
        assert!(
            DESCRIPTION.contains(&format!("\"{figure}\"")),
            "{figure} {figures}"
        );
    }
    assert_eq!(idl.typedefs.len(), 9, "each type is checked");

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
    assert_eq!(idl.methods.len(), 12, "each method is checked");
    check::<RefusedError>(&idl, "Refused", &idl.errors["Refused"].parm);
}
