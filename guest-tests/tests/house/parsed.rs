//! The product's code as `syn` reads it, without its tests: types, functions, and what
//! functions use. Names are followed through `use` as far as that needs no compiler.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::OnceLock;

use syn::spanned::Spanned;
use syn::visit::{self, Visit};

use super::sources::sources;

/// A module's path below its crate; empty for the root.
pub(crate) type Module = Vec<String>;

/// What a crate defines, by the module that has it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Item {
    pub(crate) module: Module,
    pub(crate) name: String,
}

impl fmt::Display for Item {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in &self.module {
            write!(out, "{part}::")?;
        }
        write!(out, "{}", self.name)
    }
}

/// A struct, an enum or a union outside of functions.
#[derive(Debug)]
pub(crate) struct Type {
    pub(crate) item: Item,
    pub(crate) file: String,
    pub(crate) fields: Vec<Field>,
}

#[derive(Debug)]
pub(crate) struct Field {
    pub(crate) name: String,
    pub(crate) public: bool,
    pub(crate) holds: Holds,
}

/// What a field or an argument holds, as far as the walls ask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Holds {
    Mutable(Item),
    Shared(Option<Item>),
    Other,
}

/// A variable and the fields behind it: `self.bank.0`.
pub(crate) type Place = Vec<String>;

/// What a function does with a value.
#[derive(Debug)]
pub(crate) enum Use {
    /// A method, with the places among its arguments.
    Method {
        receiver: Option<Place>,
        name: String,
        arguments: Vec<Place>,
    },
    Field {
        of: Place,
        name: String,
    },
    /// A function or an associated function by its path, `Self` written out.
    Path(Option<Item>, String),
    /// A structure's fields by their names, to make one or to take one apart.
    Fields(Item, Vec<String>),
}

#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) file: String,
    pub(crate) lines: usize,
    /// All but `self`; a tuple counts as its parts.
    pub(crate) arguments: usize,
    /// The type whose `impl` it stands in, and of which trait.
    pub(crate) of: Option<Item>,
    pub(crate) of_trait: Option<String>,
    pub(crate) changes_self: bool,
    pub(crate) takes: Vec<(String, Holds)>,
    pub(crate) uses: Vec<Use>,
}

#[derive(Debug, Default)]
pub(crate) struct Crate {
    pub(crate) folder: String,
    pub(crate) types: Vec<Type>,
    pub(crate) functions: Vec<Function>,
    /// Public items without a sentence, fields and variants aside.
    pub(crate) undocumented: Vec<String>,
}

/// A file of a crate by its path in the repository.
pub(crate) struct Text<'a> {
    pub(crate) path: &'a str,
    pub(crate) text: &'a str,
}

/// The crates of the product.
pub(crate) fn product() -> &'static [Crate] {
    static PRODUCT: OnceLock<Vec<Crate>> = OnceLock::new();
    PRODUCT.get_or_init(|| {
        let sources = sources();
        let mut crates: BTreeMap<&str, Vec<Text<'_>>> = BTreeMap::new();
        for source in &sources {
            // Harness and micro-guests are tests.
            if let Some((folder, _)) = source.path.split_once("/src/")
                && !folder.starts_with("guest-tests")
            {
                let text = Text {
                    path: &source.path,
                    text: &source.whole,
                };
                crates.entry(folder).or_default().push(text);
            }
        }
        let crates = crates.into_iter();
        crates
            .map(|(folder, texts)| parsed(folder, &texts))
            .collect()
    })
}

/// A crate from the texts of its files.
pub(crate) fn parsed(folder: &str, texts: &[Text<'_>]) -> Crate {
    let mut files = Vec::new();
    for Text { path, text } in texts {
        let file = syn::parse_file(text).unwrap_or_else(|error| panic!("{path}: {error}"));
        files.push((*path, module_of(path), file));
    }
    // `#[cfg(test)] mod name;` keeps a whole file out.
    let mut tests: BTreeSet<Module> = BTreeSet::new();
    for (_, module, file) in &files {
        for item in &file.items {
            if let syn::Item::Mod(inner) = item
                && for_tests(&inner.attrs)
            {
                tests.insert(child(module, &inner.ident.to_string()));
            }
        }
    }
    files.retain(|(_, module, _)| !tests.iter().any(|test| module.starts_with(test)));
    let mut scopes = Scopes::default();
    scopes.add(&Module::new(), &[]);
    for (_, module, file) in &files {
        scopes.add(module, &file.items);
    }
    let mut found = Crate {
        folder: folder.to_owned(),
        ..Crate::default()
    };
    for (path, module, file) in &files {
        let mut reader = Reader {
            scopes: &scopes,
            path,
            found: &mut found,
        };
        reader.items(module, &file.items);
    }
    found
}

/// The module whose text a file has.
fn module_of(path: &str) -> Module {
    let below = path.split_once("/src/").map_or(path, |(_, below)| below);
    let stems = below.split('/').map(|part| part.trim_end_matches(".rs"));
    let mut module: Module = stems.map(str::to_owned).collect();
    if matches!(below, "lib.rs" | "main.rs") {
        module.pop();
    }
    module
}

fn child(module: &[String], name: &str) -> Module {
    let mut module = module.to_vec();
    module.push(name.to_owned());
    module
}

pub(crate) fn for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else {
            return attribute.path().is_ident("test");
        };
        let condition: String = list.tokens.to_string().split_whitespace().collect();
        list.path.is_ident("cfg") && (condition == "test" || condition.starts_with("all(test,"))
    })
}

/// Names of a module: what it defines, and what it has from elsewhere.
#[derive(Debug, Default)]
struct Scope {
    defines: BTreeSet<String>,
    imports: BTreeMap<String, Vec<String>>,
    /// Modules all of whose names it has.
    all_of: Vec<Vec<String>>,
}

#[derive(Debug, Default)]
struct Scopes {
    modules: BTreeMap<Module, Scope>,
}

/// `use` in functions counts for the module.
struct Imports<'a>(&'a mut Scope);

impl Visit<'_> for Imports<'_> {
    fn visit_item_use(&mut self, item: &syn::ItemUse) {
        self.0.import(Vec::new(), &item.tree);
    }

    fn visit_item_mod(&mut self, _: &syn::ItemMod) {}
}

impl Scope {
    fn import(&mut self, mut before: Vec<String>, tree: &syn::UseTree) {
        match tree {
            syn::UseTree::Path(path) => {
                before.push(path.ident.to_string());
                self.import(before, &path.tree);
            }
            syn::UseTree::Name(name) => {
                let name = name.ident.to_string();
                if name == "self" {
                    let last = before.last().cloned().unwrap_or_default();
                    self.imports.insert(last, before);
                } else {
                    before.push(name.clone());
                    self.imports.insert(name, before);
                }
            }
            syn::UseTree::Rename(rename) => {
                before.push(rename.ident.to_string());
                self.imports.insert(rename.rename.to_string(), before);
            }
            syn::UseTree::Glob(_) => self.all_of.push(before),
            syn::UseTree::Group(group) => {
                for tree in &group.items {
                    self.import(before.clone(), tree);
                }
            }
        }
    }
}

impl Scopes {
    fn add(&mut self, module: &Module, items: &[syn::Item]) {
        let scope = self.modules.entry(module.clone()).or_default();
        for item in items {
            let name = match item {
                syn::Item::Struct(item) => &item.ident,
                syn::Item::Enum(item) => &item.ident,
                syn::Item::Union(item) => &item.ident,
                syn::Item::Fn(item) => &item.sig.ident,
                _ => continue,
            };
            scope.defines.insert(name.to_string());
        }
        for item in items {
            Imports(scope).visit_item(item);
        }
        for item in items {
            if let syn::Item::Mod(inner) = item
                && !for_tests(&inner.attrs)
                && let Some((_, items)) = &inner.content
            {
                self.add(&child(module, &inner.ident.to_string()), items);
            }
        }
    }

    /// What a path names as it is read in `module`; nothing for what another crate defines.
    fn find(&self, module: &[String], path: &[String], depth: usize) -> Option<Item> {
        // `use` may lead in a circle, which the compiler stands.
        if depth > 12 {
            return None;
        }
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => return self.find(&[], rest, depth + 1),
            "self" => return self.find(module, rest, depth + 1),
            "super" => return self.find(&module[..module.len().checked_sub(1)?], rest, depth + 1),
            _ => {}
        }
        let scope = self.modules.get(module)?;
        if rest.is_empty() && scope.defines.contains(first) {
            return Some(Item {
                module: module.to_vec(),
                name: first.clone(),
            });
        }
        let inner = child(module, first);
        if !rest.is_empty() && self.modules.contains_key(&inner) {
            return self.find(&inner, rest, depth + 1);
        }
        if let Some(from) = scope.imports.get(first)
            && from.as_slice() != path
        {
            let path: Vec<String> = from.iter().chain(rest).cloned().collect();
            return self.find(module, &path, depth + 1);
        }
        scope.all_of.iter().find_map(|from| {
            let path: Vec<String> = from.iter().chain(path).cloned().collect();
            self.find(module, &path, depth + 4)
        })
    }

    fn of_path(&self, module: &[String], path: &syn::Path) -> Option<Item> {
        self.find(module, &words(path), 0)
    }

    /// The type behind references and boxes.
    fn of_type(&self, module: &[String], kind: &syn::Type) -> Option<Item> {
        match kind {
            syn::Type::Path(path) => self.of_path(module, &path.path),
            syn::Type::Reference(reference) => self.of_type(module, &reference.elem),
            syn::Type::Paren(inner) => self.of_type(module, &inner.elem),
            syn::Type::Group(inner) => self.of_type(module, &inner.elem),
            _ => None,
        }
    }
}

fn words(path: &syn::Path) -> Vec<String> {
    let segments = path.segments.iter();
    segments.map(|segment| segment.ident.to_string()).collect()
}

/// Where a function or a type stands.
struct Around<'a> {
    module: &'a Module,
    of: Option<Item>,
    of_trait: Option<String>,
}

/// Reads one file.
struct Reader<'a> {
    scopes: &'a Scopes,
    path: &'a str,
    found: &'a mut Crate,
}

impl Reader<'_> {
    fn items(&mut self, module: &Module, items: &[syn::Item]) {
        for item in items {
            if !for_tests(attributes(item)) {
                self.item(module, item);
            }
        }
    }

    fn item(&mut self, module: &Module, item: &syn::Item) {
        self.ask_for_doc(item);
        let around = Around {
            module,
            of: None,
            of_trait: None,
        };
        match item {
            syn::Item::Mod(inner) => {
                if let Some((_, items)) = &inner.content {
                    self.items(&child(module, &inner.ident.to_string()), items);
                }
            }
            syn::Item::Struct(item) => self.a_type(module, &item.ident, Some(&item.fields)),
            syn::Item::Enum(item) => self.a_type(module, &item.ident, None),
            syn::Item::Union(item) => self.a_type(module, &item.ident, None),
            syn::Item::Fn(item) => self.function(&around, &item.sig, &item.block),
            syn::Item::Trait(item) => self.a_trait(&around, item),
            syn::Item::Impl(item) => self.an_impl(module, item),
            _ => {}
        }
    }

    fn a_type(&mut self, module: &Module, name: &syn::Ident, fields: Option<&syn::Fields>) {
        let mut found = Vec::new();
        for (index, field) in fields.into_iter().flatten().enumerate() {
            let name = field.ident.as_ref();
            found.push(Field {
                name: name.map_or_else(|| index.to_string(), ToString::to_string),
                public: !matches!(field.vis, syn::Visibility::Inherited),
                holds: self.holds(module, &field.ty),
            });
        }
        self.found.types.push(Type {
            item: Item {
                module: module.clone(),
                name: name.to_string(),
            },
            file: self.path.to_owned(),
            fields: found,
        });
    }

    fn holds(&self, module: &Module, kind: &syn::Type) -> Holds {
        match kind {
            syn::Type::Reference(reference) if reference.mutability.is_some() => {
                let item = self.scopes.of_type(module, &reference.elem);
                item.map_or(Holds::Other, Holds::Mutable)
            }
            syn::Type::Reference(reference) => {
                Holds::Shared(self.scopes.of_type(module, &reference.elem))
            }
            _ => Holds::Other,
        }
    }

    fn a_trait(&mut self, around: &Around<'_>, item: &syn::ItemTrait) {
        for inner in &item.items {
            if let syn::TraitItem::Fn(function) = inner
                && let Some(block) = &function.default
                && !for_tests(&function.attrs)
            {
                self.function(around, &function.sig, block);
            }
        }
    }

    fn an_impl(&mut self, module: &Module, item: &syn::ItemImpl) {
        let of_trait = item.trait_.as_ref().and_then(|(_, path, _)| {
            let last = path.segments.last()?;
            Some(last.ident.to_string())
        });
        let around = Around {
            module,
            of: self.scopes.of_type(module, &item.self_ty),
            of_trait,
        };
        for inner in &item.items {
            let (visible, attributes, name) = match inner {
                syn::ImplItem::Fn(inner) => (&inner.vis, &inner.attrs, &inner.sig.ident),
                syn::ImplItem::Const(inner) => (&inner.vis, &inner.attrs, &inner.ident),
                syn::ImplItem::Type(inner) => (&inner.vis, &inner.attrs, &inner.ident),
                _ => continue,
            };
            if for_tests(attributes) {
                continue;
            }
            if around.of_trait.is_none() && open(visible) && !documented(attributes) {
                self.no_doc(name);
            }
            if let syn::ImplItem::Fn(function) = inner {
                self.function(&around, &function.sig, &function.block);
            }
        }
    }

    fn function(&mut self, around: &Around<'_>, signature: &syn::Signature, block: &syn::Block) {
        let mut arguments = 0;
        let mut takes = Vec::new();
        let mut changes_self = false;
        for input in &signature.inputs {
            match input {
                syn::FnArg::Receiver(receiver) => {
                    changes_self = receiver.reference.is_some() && receiver.mutability.is_some();
                }
                syn::FnArg::Typed(typed) => {
                    arguments += self.argument(around.module, &typed.pat, &typed.ty, &mut takes);
                }
            }
        }
        let mut body = Body {
            scopes: self.scopes,
            around,
            aliases: BTreeMap::new(),
            uses: Vec::new(),
        };
        body.visit_block(block);
        self.found.functions.push(Function {
            name: signature.ident.to_string(),
            file: self.path.to_owned(),
            lines: lines_of(signature) + lines_of(block) - 1,
            arguments,
            of: around.of.clone(),
            of_trait: around.of_trait.clone(),
            changes_self,
            takes,
            uses: body.uses,
        });
    }

    /// Adds what an argument holds; gives for how many it counts.
    fn argument(
        &self,
        module: &Module,
        pattern: &syn::Pat,
        kind: &syn::Type,
        takes: &mut Vec<(String, Holds)>,
    ) -> usize {
        if let syn::Type::Tuple(tuple) = kind {
            let patterns: Vec<&syn::Pat> = match pattern {
                syn::Pat::Tuple(names) => names.elems.iter().collect(),
                whole => vec![whole; tuple.elems.len()],
            };
            let parts = patterns.into_iter().zip(&tuple.elems);
            return parts
                .map(|(pattern, kind)| self.argument(module, pattern, kind, takes))
                .sum();
        }
        let name = match pattern {
            syn::Pat::Ident(name) => name.ident.to_string(),
            _ => "_".to_owned(),
        };
        takes.push((name, self.holds(module, kind)));
        1
    }

    fn ask_for_doc(&mut self, item: &syn::Item) {
        let (visible, name) = match item {
            syn::Item::Struct(item) => (&item.vis, &item.ident),
            syn::Item::Enum(item) => (&item.vis, &item.ident),
            syn::Item::Union(item) => (&item.vis, &item.ident),
            syn::Item::Fn(item) => (&item.vis, &item.sig.ident),
            syn::Item::Trait(item) => (&item.vis, &item.ident),
            syn::Item::Const(item) => (&item.vis, &item.ident),
            syn::Item::Static(item) => (&item.vis, &item.ident),
            syn::Item::Type(item) => (&item.vis, &item.ident),
            // A file says at its head what it is.
            syn::Item::Mod(item) if item.content.is_some() => (&item.vis, &item.ident),
            _ => return,
        };
        if !open(visible) {
            return;
        }
        if !documented(attributes(item)) {
            self.no_doc(name);
        }
        if let syn::Item::Trait(item) = item {
            for inner in &item.items {
                let (attributes, name) = match inner {
                    syn::TraitItem::Fn(inner) => (&inner.attrs, &inner.sig.ident),
                    syn::TraitItem::Const(inner) => (&inner.attrs, &inner.ident),
                    syn::TraitItem::Type(inner) => (&inner.attrs, &inner.ident),
                    _ => continue,
                };
                if !documented(attributes) {
                    self.no_doc(name);
                }
            }
        }
    }

    fn no_doc(&mut self, name: &syn::Ident) {
        let line = name.span().start().line;
        let place = format!("{}:{line}: {name} has no doc", self.path);
        self.found.undocumented.push(place);
    }
}

/// How many lines something spans.
fn lines_of(spanned: &impl Spanned) -> usize {
    let span = spanned.span();
    span.end().line - span.start().line + 1
}

fn open(visible: &syn::Visibility) -> bool {
    matches!(visible, syn::Visibility::Public(_))
}

fn documented(attributes: &[syn::Attribute]) -> bool {
    let mut attributes = attributes.iter();
    attributes.any(|attribute| attribute.path().is_ident("doc"))
}

fn attributes(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        syn::Item::Union(item) => &item.attrs,
        _ => &[],
    }
}

/// What a function's body uses.
struct Body<'a> {
    scopes: &'a Scopes,
    around: &'a Around<'a>,
    /// Other names of a place: `let this = &mut *self`.
    aliases: BTreeMap<String, Place>,
    uses: Vec<Use>,
}

impl Body<'_> {
    fn place(&self, expression: &syn::Expr) -> Option<Place> {
        match expression {
            syn::Expr::Paren(inner) => self.place(&inner.expr),
            syn::Expr::Group(inner) => self.place(&inner.expr),
            syn::Expr::Reference(inner) => self.place(&inner.expr),
            syn::Expr::Unary(inner) if matches!(inner.op, syn::UnOp::Deref(_)) => {
                self.place(&inner.expr)
            }
            syn::Expr::Path(path) => {
                let name = path.path.get_ident()?.to_string();
                let alias = self.aliases.get(&name);
                Some(alias.cloned().unwrap_or_else(|| vec![name]))
            }
            syn::Expr::Field(field) => {
                let mut place = self.place(&field.base)?;
                place.push(member(&field.member));
                Some(place)
            }
            _ => None,
        }
    }

    fn item(&self, path: &syn::Path) -> Option<Item> {
        if path.is_ident("Self") {
            return self.around.of.clone();
        }
        self.scopes.of_path(self.around.module, path)
    }
}

fn member(member: &syn::Member) -> String {
    match member {
        syn::Member::Named(name) => name.to_string(),
        syn::Member::Unnamed(index) => index.index.to_string(),
    }
}

impl<'ast> Visit<'ast> for Body<'_> {
    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        let arguments = call.args.iter().filter_map(|argument| self.place(argument));
        let used = Use::Method {
            receiver: self.place(&call.receiver),
            name: call.method.to_string(),
            arguments: arguments.collect(),
        };
        self.uses.push(used);
        visit::visit_expr_method_call(self, call);
    }

    fn visit_expr_field(&mut self, field: &'ast syn::ExprField) {
        if let Some(of) = self.place(&field.base) {
            let name = member(&field.member);
            self.uses.push(Use::Field { of, name });
        }
        visit::visit_expr_field(self, field);
    }

    fn visit_expr_path(&mut self, path: &'ast syn::ExprPath) {
        let mut words = words(&path.path);
        if let Some(name) = words.pop() {
            let module = self.around.module;
            let before = match words.as_slice() {
                [] => self.scopes.find(module, std::slice::from_ref(&name), 0),
                [own] if own == "Self" => self.around.of.clone(),
                words => self.scopes.find(module, words, 0).or_else(|| {
                    let whole = [words, std::slice::from_ref(&name)].concat();
                    self.scopes.find(module, &whole, 0)
                }),
            };
            self.uses.push(Use::Path(before, name));
        }
    }

    fn visit_expr_struct(&mut self, made: &'ast syn::ExprStruct) {
        if let Some(item) = self.item(&made.path) {
            let names = made.fields.iter().map(|field| member(&field.member));
            self.uses.push(Use::Fields(item, names.collect()));
        }
        visit::visit_expr_struct(self, made);
    }

    fn visit_pat_struct(&mut self, taken: &'ast syn::PatStruct) {
        if let Some(item) = self.item(&taken.path) {
            let names = taken.fields.iter().map(|field| member(&field.member));
            self.uses.push(Use::Fields(item, names.collect()));
        }
        visit::visit_pat_struct(self, taken);
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        if let syn::Pat::Ident(name) = &local.pat
            && let Some(begin) = &local.init
            && let Some(place) = self.place(&begin.expr)
        {
            self.aliases.insert(name.ident.to_string(), place);
        }
        visit::visit_local(self, local);
    }

    /// `write!(out, "{}", self.name())`: expressions with commas, most of the time.
    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        type Listed = syn::punctuated::Punctuated<syn::Expr, syn::Token![,]>;
        if let Ok(listed) = call.parse_body_with(Listed::parse_terminated) {
            // The expressions do not live as long as the file.
            let mut inner = Body {
                scopes: self.scopes,
                around: self.around,
                aliases: self.aliases.clone(),
                uses: Vec::new(),
            };
            for expression in &listed {
                inner.visit_expr(expression);
            }
            self.uses.append(&mut inner.uses);
        }
    }

    // Items inside of a function: their names are the module's, their code is the function's.
    fn visit_item_use(&mut self, _: &'ast syn::ItemUse) {}
}
