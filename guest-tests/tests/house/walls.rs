//! Walls inside of a crate: a type's methods stand together, its fields are its own, and
//! functions are short. There is no rule on the length of a file.

use std::collections::{BTreeMap, BTreeSet};

use super::parsed::{Crate, Function, Holds, Item, Place, Text, Type, Use, parsed, product};

/// How a type stands to the walls, as [`PARTS`] says.
type Measure = [usize; 5];

/// Methods, with the functions elsewhere that take it as `&mut`; the files that have such;
/// of these, how many call each other; fields that other files may use, of a type that
/// has methods which change it; places where functions of others use a private field.
const PARTS: [&str; 5] = [
    "methods",
    "files",
    "files in a circle",
    "fields not private",
    "uses of its fields elsewhere",
];
const MOST: Measure = [60, 2, 0, 0, 0];

/// A type with so many methods that change it is no record: it owns its fields.
const CHANGES: usize = 4;

/// Lines and arguments of a function.
const LARGEST: [usize; 2] = [70, 6];

/// Folders to which no wall applies, with the reason.
const EXEMPT: &[(&str, &str)] = &[(
    "vmm/emu/src/insn",
    "the instructions of a processor: a family a file, all of them functions of one `Core`",
)];

/// Types which are passed to whoever fills them in: functions that take one are its users.
const FILLED_IN: &[(&str, &str, &str)] = &[
    (
        "vmm/emu",
        "State",
        "the registers of a processor, which its instructions are about",
    ),
    (
        "pmu-virt",
        "Seat",
        "where a vCPU is: the core that it lends, or none; it owns nothing",
    ),
    (
        "pmu-virt/perfmon",
        "Control",
        "a structure of the guest's ABI, whose fields answers go into",
    ),
    (
        "pmu-virt/perfmon",
        "OverflowArg",
        "a structure of the guest's ABI, whose fields answers go into",
    ),
    (
        "pmu-virt/perfmon/cpc",
        "Event",
        "a structure of libcpc.h, whose fields counters are read into",
    ),
];

/// Traits of the language and of serde, by which a type is shown, converted, compared,
/// dropped or walked. What they do is no part of a type's own work.
const DERIVED: &[&str] = &[
    "Add",
    "AddAssign",
    "AsFd",
    "AsMut",
    "AsRawFd",
    "AsRef",
    "BitAnd",
    "BitAndAssign",
    "BitOr",
    "BitOrAssign",
    "Borrow",
    "Clone",
    "Debug",
    "Default",
    "Deref",
    "DerefMut",
    "Deserialize",
    "Display",
    "DoubleEndedIterator",
    "Drop",
    "Eq",
    "Error",
    "Extend",
    "From",
    "FromIterator",
    "FromStr",
    "Hash",
    "Index",
    "IndexMut",
    "Into",
    "IntoIterator",
    "Iterator",
    "LowerHex",
    "Not",
    "Ord",
    "PartialEq",
    "PartialOrd",
    "Serialize",
    "Sub",
    "SubAssign",
    "Sum",
    "TryFrom",
    "TryInto",
];

/// A function that counts as a method of a type.
struct Method<'a> {
    function: &'a Function,
    /// Where the value is while the function runs: `self`, an argument, what a wrapper holds.
    places: BTreeSet<Place>,
    /// Others than the type's own `impl`.
    foreign: bool,
}

/// What is known of the types of one crate.
struct Walls<'a> {
    types: BTreeMap<&'a Item, &'a Type>,
    methods: BTreeMap<&'a Item, Vec<Method<'a>>>,
    /// Functions of others that look at one.
    readers: BTreeMap<&'a Item, Vec<Method<'a>>>,
}

impl<'a> Walls<'a> {
    fn of(house: &'a Crate) -> Self {
        let types: BTreeMap<&Item, &Type> =
            house.types.iter().map(|one| (&one.item, one)).collect();
        let mut walls = Self {
            types,
            methods: BTreeMap::new(),
            readers: BTreeMap::new(),
        };
        for function in &house.functions {
            walls.count(function);
        }
        walls
    }

    fn count(&mut self, function: &'a Function) {
        if let Some(of) = &function.of {
            let derived = function.of_trait.as_deref();
            if derived.is_some_and(|of| DERIVED.contains(&of)) {
                return;
            }
            let own = Place::from(["self".to_owned()]);
            self.add(of, function, own, false);
            if let Some((inner, field)) = self.wrapped(of) {
                let place = vec!["self".to_owned(), field.to_owned()];
                self.add_foreign(inner, function, place);
            }
        }
        for (name, holds) in &function.takes {
            let place = vec![name.clone()];
            match holds {
                Holds::Mutable(item) if function.of.as_ref() != Some(item) => {
                    self.add_foreign(item, function, place);
                }
                Holds::Shared(Some(item)) if function.of.as_ref() != Some(item) => {
                    let readers = self.readers.entry(item).or_default();
                    readers.push(Method {
                        function,
                        places: BTreeSet::from([place]),
                        foreign: true,
                    });
                }
                _ => {}
            }
        }
    }

    /// What a type wraps that holds nothing of its own: one `&mut T`, beside at most
    /// references to what it only reads.
    fn wrapped(&self, wrapper: &Item) -> Option<(&'a Item, &'a str)> {
        let fields = &self.types.get(wrapper)?.fields;
        let mut found = None;
        for field in fields {
            match &field.holds {
                Holds::Mutable(inner) if found.is_none() => {
                    found = Some((inner, field.name.as_str()));
                }
                Holds::Shared(_) => {}
                _ => return None,
            }
        }
        found
    }

    fn add_foreign(&mut self, of: &'a Item, function: &'a Function, place: Place) {
        let Some(known) = self.types.get(of) else {
            return;
        };
        // Beside the type a function may stand as its helper.
        let filled_in = FILLED_IN
            .iter()
            .any(|one| known.file.starts_with(one.0) && one.1 == of.name);
        if known.file != function.file && !filled_in {
            self.add(of, function, place, true);
        }
    }

    fn add(&mut self, of: &'a Item, function: &'a Function, place: Place, foreign: bool) {
        let methods = self.methods.entry(of).or_default();
        match methods.last_mut() {
            Some(last) if std::ptr::eq(last.function, function) => {
                last.places.insert(place);
            }
            _ => methods.push(Method {
                function,
                places: BTreeSet::from([place]),
                foreign,
            }),
        }
    }
}
impl Method<'_> {
    /// The names of those of `all` that this one calls.
    fn calls(&self, of: &Item, all: &BTreeMap<&str, BTreeSet<&str>>) -> BTreeSet<String> {
        let mut called = BTreeSet::new();
        for used in &self.function.uses {
            match used {
                Use::Method {
                    receiver,
                    name,
                    arguments,
                } => {
                    let on = receiver.iter().chain(arguments);
                    if on.into_iter().any(|place| self.places.contains(place)) {
                        called.insert(name.clone());
                    }
                }
                Use::Path(Some(item), name) if item == of || item.name == *name => {
                    called.insert(name.clone());
                }
                _ => {}
            }
        }
        called.retain(|name| all.contains_key(name.as_str()));
        called
    }

    /// How often it uses a private field of the type.
    fn touches(&self, known: &Type) -> usize {
        if self.function.file == known.file {
            return 0;
        }
        let mut touches = 0;
        for field in known.fields.iter().filter(|field| !field.public) {
            let uses = self.function.uses.iter();
            touches += uses
                .filter(|used| match used {
                    Use::Field { of, name } => *name == field.name && self.places.contains(of),
                    Use::Fields(item, names) => *item == known.item && names.contains(&field.name),
                    _ => false,
                })
                .count();
        }
        touches
    }
}

fn measure(walls: &Walls<'_>, of: &Item, methods: &[Method<'_>]) -> Measure {
    let mut standing: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for method in methods {
        let files = standing.entry(&method.function.name).or_default();
        files.insert(&method.function.file);
    }
    let mut edges: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for method in methods {
        let from = method.function.file.as_str();
        let to = edges.entry(from).or_default();
        for name in method.calls(of, &standing) {
            let files = &standing[name.as_str()];
            if !files.contains(from) {
                to.extend(files);
            }
        }
    }
    let changes = methods
        .iter()
        .filter(|method| !method.foreign && method.function.changes_self);
    let known = walls.types.get(of);
    let fields = known.map_or(&[][..], |known| &known.fields);
    let seen = fields.iter().filter(|field| field.public).count();
    let readers = walls.readers.get(of).into_iter().flatten();
    let touched = methods
        .iter()
        .filter(|method| method.foreign)
        .chain(readers);
    [
        methods.len(),
        edges.len(),
        circle(&edges),
        if changes.count() < CHANGES { 0 } else { seen },
        known.map_or(0, |known| touched.map(|method| method.touches(known)).sum()),
    ]
}

/// The most files each of which leads to every other one.
fn circle(edges: &BTreeMap<&str, BTreeSet<&str>>) -> usize {
    let reached = |from: &str| {
        let mut reached: BTreeSet<&str> = BTreeSet::new();
        let mut left = vec![from];
        while let Some(file) = left.pop() {
            for next in &edges[file] {
                if reached.insert(next) {
                    left.push(next);
                }
            }
        }
        reached
    };
    let all: BTreeMap<&str, BTreeSet<&str>> =
        edges.keys().map(|file| (*file, reached(file))).collect();
    let back = |file: &str| {
        let there = all[file].iter();
        there.filter(|other| all[**other].contains(file)).count()
    };
    let most = edges.keys().map(|file| back(file)).max().unwrap_or(0);
    if most > 1 { most } else { 0 }
}

/// The types of a crate by their names. Of two with one name, the larger figures count.
fn measures(house: &Crate) -> BTreeMap<String, Measure> {
    let walls = Walls::of(house);
    let mut found: BTreeMap<String, Measure> = BTreeMap::new();
    for (of, methods) in &walls.methods {
        if walls.types.get(of).is_some_and(|of| exempt(&of.file)) {
            continue;
        }
        let one = measure(&walls, of, methods);
        let all = found.entry(of.name.clone()).or_default();
        *all = larger(*all, one);
    }
    found
}

fn larger<const N: usize>(one: [usize; N], other: [usize; N]) -> [usize; N] {
    std::array::from_fn(|part| one[part].max(other[part]))
}

fn exempt(path: &str) -> bool {
    EXEMPT.iter().any(|(folder, _)| path.starts_with(folder))
}

#[test]
fn types_have_walls() {
    let mut wrong = Vec::new();
    for house in product() {
        for (name, is) in measures(house) {
            for (part, what) in PARTS.iter().enumerate() {
                if is[part] > MOST[part] {
                    let (is, most) = (is[part], MOST[part]);
                    wrong.push(format!(
                        "{} {name}: {is} {what}, at most {most}",
                        house.folder
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn functions_are_short() {
    let mut wrong = Vec::new();
    for function in product().iter().flat_map(|house| &house.functions) {
        let [lines, arguments] = [function.lines, function.arguments];
        let is_short = lines <= LARGEST[0] && arguments <= LARGEST[1];
        if !is_short && !exempt(&function.file) {
            wrong.push(format!(
                "{} {}: {lines} lines, {arguments} arguments",
                function.file, function.name
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The names of fields and variants may say enough.
#[test]
fn public_items_have_docs() {
    let wrong: Vec<&str> = product()
        .iter()
        .flat_map(|house| &house.undocumented)
        .map(String::as_str)
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_missing_wall_is_found() {
    let check = |files: &[(&str, &str)], expected: Measure| {
        let texts: Vec<Text<'_>> = files
            .iter()
            .map(|(path, text)| Text { path, text })
            .collect();
        let found = measures(&parsed("a", &texts));
        assert_eq!(found.get("T"), Some(&expected), "{files:?}");
    };
    let t = "pub struct T { a: u8 } impl T { pub fn new() -> Self { T { a: 0 } } }";
    check(&[("a/src/t.rs", t)], [1, 1, 0, 0, 0]);
    // What a derived trait does is nobody's work, what another trait does is.
    check(
        &[
            ("a/src/t.rs", t),
            (
                "a/src/u.rs",
                "use crate::t::T; impl From<u8> for T { fn from(a: u8) -> T { T::new() } }",
            ),
            (
                "a/src/v.rs",
                "use crate::t::T; impl Run for T { fn run(&mut self) {} }",
            ),
        ],
        [2, 2, 0, 0, 0],
    );
    // Calls by `self`, by path, in a closure, in a macro and by another name.
    for back in [
        "self.one()",
        "Self::one(self)",
        "super::T::one(self)",
        "let f = || self.one();",
        "println!(\"{}\", self.one())",
        "let this = &mut *self; this.one()",
    ] {
        let second = format!("use super::T; impl T {{ fn two(&mut self) {{ {back} }} }}");
        check(
            &[
                (
                    "a/src/lib.rs",
                    "pub struct T; impl T { fn one(&mut self) { self.two() } }",
                ),
                ("a/src/b.rs", &second),
            ],
            [2, 2, 2, 0, 0],
        );
    }
    // One direction is none.
    check(
        &[
            (
                "a/src/lib.rs",
                "pub struct T; impl T { fn one(&mut self) {} }",
            ),
            (
                "a/src/b.rs",
                "use super::T; impl T { fn two(&mut self) { self.one() } }",
            ),
        ],
        [2, 2, 0, 0, 0],
    );
    // Three files, of which two are in a circle through a function that is no method.
    check(
        &[
            (
                "a/src/lib.rs",
                "pub struct T { a: u8 } impl T { fn one(&mut self) { b::two(self) } }",
            ),
            (
                "a/src/b.rs",
                "use crate::T; pub fn two(t: &mut T) { t.one(); t.a = 1; }",
            ),
            (
                "a/src/c.rs",
                "use crate::*; fn three((t, n): (&mut T, u8)) {}",
            ),
        ],
        [3, 3, 2, 0, 1],
    );
    // A wrapper, and who is none since it has something of its own.
    check(
        &[
            (
                "a/src/lib.rs",
                "pub struct T { a: u8 } impl T { fn one(&mut self) {} }",
            ),
            (
                "a/src/b.rs",
                "struct W<'a>(&'a mut crate::T, &'a u8); impl W<'_> { fn two(&self) { self.0.a; } }",
            ),
            (
                "a/src/c.rs",
                "struct V<'a> { t: &'a mut crate::T, n: u8 } impl V<'_> { fn three(&self) {} }",
            ),
        ],
        [2, 2, 0, 0, 1],
    );
    // Another type of the name, a function for tests, and code beside the type.
    check(
        &[
            (
                "a/src/lib.rs",
                "pub struct T { pub a: u8 } impl T { fn one(&mut self) {} } fn f(t: &mut T) { t.a = 1; }",
            ),
            (
                "a/src/b.rs",
                "struct T; fn two(t: &mut T) {} #[cfg(test)] fn three(t: &mut crate::T) {}",
            ),
            ("a/src/c.rs", "use other::T; fn four(t: &mut T) {}"),
        ],
        [1, 1, 0, 0, 0],
    );
    // Who has four methods that change it shows no field.
    check(
        &[(
            "a/src/lib.rs",
            "pub struct T { pub a: u8, b: u8 } impl T { fn a(&mut self) {} fn b(&mut self) {}
             fn c(&mut self) {} fn d(&mut self) {} }",
        )],
        [4, 1, 0, 1, 0],
    );
}

#[test]
fn a_long_function_is_found() {
    let body = "let a = 1;\n".repeat(80);
    let text = format!(
        "pub fn f(a: u8, (b, c): (u8, u8)) {{\n{body}}}\n#[cfg(test)] mod tests {{ fn g() {{}} }}"
    );
    let path = "a/src/lib.rs";
    let found = parsed("a", &[Text { path, text: &text }]);
    let [function] = &found.functions[..] else {
        panic!("{:?}", found.functions);
    };
    assert_eq!((function.lines, function.arguments), (82, 3));
}

#[test]
fn an_item_without_a_doc_is_found() {
    let text = "//! Crate.
        pub fn a() {}
        fn own() {}
        pub(crate) fn near() {}
        #[derive(Debug)] pub struct B { pub field: u8 }
        /// Said.
        pub enum Said { Variant }
        impl B { pub fn c() {} pub const D: u8 = 1; fn own() {} /** Said. */ pub fn said() {} }
        impl From<u8> for B { fn from(_: u8) -> B { B { field: 1 } } }
        /// Said.
        pub trait Told { fn e(); /// Said.
            fn said(); }
        pub mod inner { pub type F = u8; }
        #[cfg(test)] mod tests { pub fn own() {} }";
    let path = "a/src/lib.rs";
    let found = parsed("a", &[Text { path, text }]).undocumented;
    let names = found.iter().filter_map(|one| one.split(' ').nth(1));
    let names: Vec<&str> = names.collect();
    assert_eq!(names, ["a", "B", "c", "D", "e", "inner", "F"], "{found:#?}");
}
