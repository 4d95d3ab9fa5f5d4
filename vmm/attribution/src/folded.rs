//! Chains of calls as `flamegraph.pl` and inferno take them: a line each, `program;outer;inner 12`.

use std::io::{self, Write};

use crate::counts::{Counts, PartEnd};

/// Writes the instructions of user code by the calls that led to them: first the name of the
/// program's file, then functions from the outermost on. What a program wanted to be forgotten is
/// left out.
///
/// # Errors
/// `to` cannot be written to.
pub fn write_folded(counts: &Counts, to: &mut dyn Write) -> io::Result<()> {
    let Some(contexts) = &counts.contexts else {
        return Ok(());
    };
    let functions = counts.functions.as_deref().unwrap_or_default();
    let programs = counts.programs.iter();
    let programs = programs.map(|program| program.name.rsplit('/').next().unwrap_or_default());
    let programs: Vec<String> = programs.map(frame).collect();
    let names: Vec<String> = functions.iter().map(|one| frame(&one.name)).collect();
    let mut line = String::new();
    let mut chain = Vec::new();
    for node in contexts.nodes.iter().filter(|node| node.own > 0) {
        let root = contexts.roots.get(node.root);
        let part = root.and_then(|root| contexts.parts.get(root.part));
        let Some(part) = part.filter(|part| part.end != PartEnd::Dropped) else {
            continue;
        };
        chain.clear();
        let mut at = Some(node);
        while let Some(one) = at {
            chain.push(one.function);
            at = one.caller.and_then(|caller| contexts.nodes.get(caller));
        }
        line.clear();
        line.push_str(programs.get(part.program).map_or("?", |name| name));
        for function in chain.iter().rev() {
            line.push(';');
            line.push_str(names.get(*function).map_or("?", |name| name));
        }
        writeln!(to, "{line} {}", node.own)?;
    }
    Ok(())
}

/// A name without what ends a frame or a line.
fn frame(name: &str) -> String {
    name.replace(';', ":").replace(char::is_control, " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counts::{Context, ContextRoot, Contexts, Function, Part, Program};

    #[test]
    fn a_chain_is_a_line() {
        let function = |name: &str| Function {
            name: name.to_owned(),
            ..Function::default()
        };
        let node = |root, caller, function, own| Context {
            root,
            caller,
            function,
            own,
            ..Context::default()
        };
        let root = |part| ContextRoot { part, thread: 0 };
        let part = |end| Part { program: 0, end };
        let counts = Counts {
            programs: vec![Program {
                name: "./target/a;b".to_owned(),
                ..Program::default()
            }],
            functions: Some(["_start", "main", "f<a, b>"].map(function).to_vec()),
            contexts: Some(Contexts {
                parts: vec![part(PartEnd::Dropped), part(PartEnd::Program)],
                roots: vec![root(0), root(1)],
                nodes: vec![
                    node(0, None, 0, 5),
                    node(1, None, 0, 7),
                    node(1, Some(1), 1, 0),
                    node(1, Some(2), 2, 9),
                ],
                ..Contexts::default()
            }),
            ..Counts::default()
        };
        let mut text = Vec::new();
        write_folded(&counts, &mut text).expect("memory");
        let expected = "a:b;_start 7\na:b;_start;main;f<a, b> 9\n";
        assert_eq!(String::from_utf8(text).expect("text"), expected);
    }
}
