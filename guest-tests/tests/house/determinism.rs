//! What a guest of the emulator does depends on nothing of the host: no clock but the virtual one,
//! no address of the host's, no order of a hash map.

use std::collections::BTreeSet;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use super::sources::sources;

/// Whose code this is: the processor, its floating point, the interrupt controllers, and the room
/// that runs them.
const FOLDERS: [&str; 4] = [
    "vmm/emu/src/",
    "vmm/emu/fpu/src/",
    "vmm/irqchip/src/",
    "vmm/src/emu",
];

/// Names of what a host knows and another host does not. Waiting for the host is not among them:
/// that changes no state.
const HOSTS_OWN: [&str; 18] = [
    "Instant",
    "SystemTime",
    "UNIX_EPOCH",
    "ClockId",
    "clock_gettime",
    "gettimeofday",
    "_rdtsc",
    "__rdtscp",
    "RandomState",
    "DefaultHasher",
    "getrandom",
    "available_parallelism",
    "ThreadId",
    "env",
    // Addresses as numbers.
    "addr",
    "expose_provenance",
    "align_offset",
    "UserAddress",
];

/// What may be done with a map whose order is nobody's.
const OF_ONE_KEY: [&str; 15] = [
    "capacity",
    "clear",
    "contains",
    "contains_key",
    "entry",
    "get",
    "get_key_value",
    "get_mut",
    "insert",
    "is_empty",
    "len",
    "remove",
    "remove_entry",
    "reserve",
    "shrink_to_fit",
];

/// Methods whose value is a pointer.
const POINTERS: [&str; 7] = [
    "as_ptr",
    "as_mut_ptr",
    "as_raw",
    "get_host_address",
    "ptr_guard",
    "ptr_guard_mut",
    "cast",
];

/// A file, by its path and its text.
type File<'a> = (&'a str, &'a str);

/// The places of these files, all of one crate, at which the host shows.
fn found_in(files: &[File<'_>]) -> Vec<String> {
    let parsed: Vec<_> = files
        .iter()
        .map(|(path, text)| (*path, syn::parse_file(text).expect(path)))
        .collect();
    let mut maps = Maps::default();
    maps.types.extend(["HashMap", "HashSet"].map(str::to_owned));
    // An alias of an alias is found the second time.
    for _ in 0..2 {
        for (_, file) in &parsed {
            maps.visit_file(file);
        }
    }
    let mut found = Vec::new();
    for (path, file) in &parsed {
        let mut finder = Finder {
            path,
            maps: &maps,
            found: &mut found,
        };
        finder.visit_file(file);
    }
    found
}

/// Types that are hash maps, and fields, arguments and variables that are such.
#[derive(Debug, Default)]
struct Maps {
    types: BTreeSet<String>,
    names: BTreeSet<String>,
}

impl Maps {
    /// Whether it is a map, or leads to one.
    fn is_map(&self, of: &syn::Type) -> bool {
        match of {
            syn::Type::Reference(inner) => self.is_map(&inner.elem),
            syn::Type::Paren(inner) => self.is_map(&inner.elem),
            syn::Type::Path(path) => path.path.segments.last().is_some_and(|last| {
                self.types.contains(&last.ident.to_string()) || self.is_in(&last.arguments)
            }),
            _ => false,
        }
    }

    /// In a box, a cell, an option.
    fn is_in(&self, arguments: &syn::PathArguments) -> bool {
        let syn::PathArguments::AngleBracketed(inner) = arguments else {
            return false;
        };
        inner.args.iter().any(|one| match one {
            syn::GenericArgument::Type(one) => self.is_map(one),
            _ => false,
        })
    }

    fn add(&mut self, name: &syn::Ident) {
        self.names.insert(name.to_string());
    }
}

impl Visit<'_> for Maps {
    fn visit_item_type(&mut self, item: &syn::ItemType) {
        if self.is_map(&item.ty) {
            self.types.insert(item.ident.to_string());
        }
    }

    fn visit_field(&mut self, field: &syn::Field) {
        if let (Some(name), true) = (&field.ident, self.is_map(&field.ty)) {
            self.add(name);
        }
    }

    fn visit_pat_type(&mut self, typed: &syn::PatType) {
        if let (syn::Pat::Ident(name), true) = (&*typed.pat, self.is_map(&typed.ty)) {
            self.add(&name.ident);
        }
        visit::visit_pat_type(self, typed);
    }

    fn visit_local(&mut self, local: &syn::Local) {
        let made = local.init.as_ref().is_some_and(|init| {
            let syn::Expr::Call(call) = &*init.expr else {
                return false;
            };
            let syn::Expr::Path(path) = &*call.func else {
                return false;
            };
            let mut segments = path.path.segments.iter();
            segments.any(|part| self.types.contains(&part.ident.to_string()))
        });
        if let (syn::Pat::Ident(name), true) = (&local.pat, made) {
            self.add(&name.ident);
        }
        visit::visit_local(self, local);
    }
}

struct Finder<'a> {
    path: &'a str,
    maps: &'a Maps,
    found: &'a mut Vec<String>,
}

impl Finder<'_> {
    fn tell(&mut self, at: impl Spanned, what: &str) {
        let line = at.span().start().line;
        self.found.push(format!("{}:{line}: {what}", self.path));
    }

    /// The name of a field or variable that is a map.
    fn map(&self, expr: &syn::Expr) -> Option<String> {
        let name = match expr {
            syn::Expr::Reference(inner) => return self.map(&inner.expr),
            syn::Expr::Paren(inner) => return self.map(&inner.expr),
            syn::Expr::Field(field) => match &field.member {
                syn::Member::Named(name) => name.to_string(),
                syn::Member::Unnamed(_) => return None,
            },
            syn::Expr::Path(path) => path.path.get_ident()?.to_string(),
            _ => return None,
        };
        self.maps.names.contains(&name).then_some(name)
    }

    fn is_pointer(expr: &syn::Expr) -> bool {
        match expr {
            syn::Expr::Paren(inner) => Self::is_pointer(&inner.expr),
            syn::Expr::Cast(inner) => {
                matches!(*inner.ty, syn::Type::Ptr(_)) || Self::is_pointer(&inner.expr)
            }
            syn::Expr::MethodCall(call) => POINTERS.contains(&call.method.to_string().as_str()),
            syn::Expr::RawAddr(_) => true,
            syn::Expr::Try(inner) => Self::is_pointer(&inner.expr),
            _ => false,
        }
    }
}

impl Visit<'_> for Finder<'_> {
    fn visit_item_mod(&mut self, item: &syn::ItemMod) {
        if !super::parsed::for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_ident(&mut self, ident: &syn::Ident) {
        let name = ident.to_string();
        if HOSTS_OWN.contains(&name.as_str()) {
            self.tell(ident, &format!("{name} is the host's"));
        }
    }

    fn visit_expr_method_call(&mut self, call: &syn::ExprMethodCall) {
        let method = call.method.to_string();
        if let Some(map) = self.map(&call.receiver)
            && !OF_ONE_KEY.contains(&method.as_str())
        {
            self.tell(call, &format!("{map}.{method}: the order is the host's"));
        }
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_for_loop(&mut self, each: &syn::ExprForLoop) {
        if let Some(map) = self.map(&each.expr) {
            self.tell(each, &format!("for each of {map}: the order is the host's"));
        }
        visit::visit_expr_for_loop(self, each);
    }

    fn visit_expr_call(&mut self, call: &syn::ExprCall) {
        // A function that takes a map by its type is looked at itself; nobody knows what others do.
        for argument in &call.args {
            if let Some(map) = self.map(argument) {
                self.tell(call, &format!("{map} is handed on"));
            }
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_expr_cast(&mut self, cast: &syn::ExprCast) {
        let number = !matches!(*cast.ty, syn::Type::Ptr(_) | syn::Type::Infer(_));
        if number && Self::is_pointer(&cast.expr) {
            self.tell(cast, "an address of the host's as a number");
        }
        visit::visit_expr_cast(self, cast);
    }

    fn visit_macro(&mut self, one: &syn::Macro) {
        // Only the words of a macro are known.
        let words: String = one.tokens.to_string();
        if words.contains(":p}") || words.contains(":#p}") {
            self.tell(one, "an address of the host's as text");
        }
        for word in words.split(|letter: char| !letter.is_alphanumeric() && letter != '_') {
            if HOSTS_OWN[..14].contains(&word) {
                self.tell(one, &format!("{word} is the host's"));
            }
        }
        visit::visit_macro(self, one);
    }
}

#[test]
fn the_emulator_depends_on_nothing_of_the_host() {
    let sources = sources();
    let mut wrong = Vec::new();
    let mut files = 0;
    for folder in FOLDERS {
        let of_it: Vec<File<'_>> = sources
            .iter()
            .filter(|source| source.path.starts_with(folder))
            .map(|source| (source.path.as_str(), source.whole.as_str()))
            .collect();
        files += of_it.len();
        wrong.extend(found_in(&of_it));
    }
    assert!(files > 30, "only {files} files were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn what_is_planted_is_found() {
    let clean = "
        //! Instant.
        use std::collections::{BTreeMap, HashMap};
        type Map = HashMap<u64, u32>;
        struct Blocks { by_key: Map, pages: BTreeMap<u32, u32> }
        impl Blocks {
            fn find(&mut self, key: u64) -> Option<u32> {
                for page in self.pages.values() { self.by_key.insert(u64::from(*page), 1); }
                self.by_key.get(&key).copied()
            }
        }
        #[cfg(test)]
        mod tests { fn time() { std::time::Instant::now(); } }
    ";
    assert_eq!(found_in(&[("clean.rs", clean)]), Vec::<String>::new());
    let wrong = [
        ("use std::time::Instant;", 1),
        ("fn f() -> u64 { std::time::SystemTime::now().into() }", 1),
        ("fn f() { log::info!(\"{:?}\", Instant::now()); }", 1),
        ("fn f() { std::env::var(\"HOME\"); }", 1),
        ("fn f(one: &[u8]) -> u64 { one.as_ptr() as u64 }", 1),
        ("fn f(one: &u8) -> usize { one as *const u8 as usize }", 1),
        (
            "fn f(one: &u8) -> usize { std::ptr::from_ref(one).addr() }",
            1,
        ),
        ("fn f(one: &u8) { println!(\"{one:p}\"); }", 1),
        (
            "struct S { of: Map } type Map = HashSet<u8>; impl S { fn f(&self) { self.of.iter(); } }",
            1,
        ),
        ("fn f(all: &HashMap<u8, u8>) { for one in all {} }", 1),
        (
            "fn f() { let mut all = HashMap::new(); all.insert(1, 2); all.drain(); }",
            1,
        ),
        (
            "struct S { of: Option<Box<HashMap<u8, u8>>> } fn f(s: &S) { g(&s.of); }",
            1,
        ),
        (
            "fn f(all: HashMap<u8, u8>) { all.values(); all.retain(|_, _| true); }",
            2,
        ),
    ];
    for (text, times) in wrong {
        let found = found_in(&[("planted.rs", text)]);
        assert_eq!(found.len(), times, "{text}: {found:?}");
    }
    // A field is a map in other files as well.
    let kept = "struct S { of: HashMap<u8, u8> }";
    let used = "fn f(s: &S) { for one in &s.of {} }";
    assert_eq!(found_in(&[("kept.rs", kept), ("used.rs", used)]).len(), 1);
}
