//! Functions and calls as Callgrind writes them, for `callgrind_annotate` and KCachegrind
//! (Valgrind's manual, "Callgrind Format Specification").

use std::io::{self, Write};

use ahash::AHashMap;

use crate::counts::{CallEdge, Counts};

/// Names by numbers, the first time with the name: of what they are the names of, two may be the
/// same.
#[derive(Default)]
struct Names<'a>(AHashMap<(&'a str, &'a str), usize>);

impl<'a> Names<'a> {
    fn of(&mut self, place: &'a str, name: &'a str) -> String {
        let next = self.0.len() + 1;
        match self.0.get(&(place, name)) {
            Some(number) => format!("({number})"),
            None => {
                self.0.insert((place, name), next);
                format!("({next}) {name}")
            }
        }
    }
}

/// Writes the functions of `counts`, which the command `command` had: instructions by function,
/// without lines.
///
/// # Errors
/// `to` cannot be written to.
pub fn write_callgrind(counts: &Counts, command: &str, to: &mut dyn Write) -> io::Result<()> {
    let functions = counts.functions.as_deref().unwrap_or_default();
    let pid = counts.programs.first().map_or(0, |program| program.pid);
    let total: u64 = functions.iter().map(|function| function.own).sum();
    let command = command.replace(char::is_control, " ");
    writeln!(to, "# callgrind format\nversion: 1\ncreator: umpire")?;
    writeln!(to, "pid: {pid}\ncmd: {command}\npart: 1\n\n")?;
    writeln!(to, "desc: Trigger: Program termination\n")?;
    writeln!(to, "positions: line\nevents: Ir\nsummary: {total}\n")?;
    let (mut objects, mut names, mut files) = <(Names, Names, Names)>::default();
    let mut edges = counts.edges.iter().peekable();
    for (place, function) in functions.iter().enumerate() {
        let object = &function.object;
        writeln!(to, "\nob={}", objects.of("", object))?;
        // callgrind_annotate tells functions of one name apart by the file of the source alone.
        writeln!(to, "fl={}", files.of("", object))?;
        writeln!(to, "fn={}", names.of(object, &function.name))?;
        writeln!(to, "0 {}", function.own)?;
        // Both are in the order of the callers.
        while let Some(edge) = edges.next_if(|edge| edge.caller == place) {
            let CallEdge {
                callee,
                calls,
                inclusive,
                ..
            } = *edge;
            let Some(called) = functions.get(callee) else {
                continue;
            };
            writeln!(to, "cob={}", objects.of("", &called.object))?;
            writeln!(to, "cfi={}", files.of("", &called.object))?;
            writeln!(to, "cfn={}", names.of(&called.object, &called.name))?;
            writeln!(to, "calls={calls} 0\n0 {inclusive}")?;
        }
    }
    writeln!(to, "\ntotals: {total}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counts::Function;

    #[test]
    fn a_profile_is_as_callgrind_has_it() {
        let function = |object: &str, name: &str, own| Function {
            object: object.to_owned(),
            name: name.to_owned(),
            own,
            ..Function::default()
        };
        let counts = Counts {
            functions: Some(vec![
                function("/bin/a", "work", 70),
                function("/bin/a", "main", 20),
                function("/lib/c", "main", 10),
            ]),
            edges: vec![
                CallEdge {
                    caller: 1,
                    callee: 0,
                    calls: 2,
                    inclusive: 70,
                },
                CallEdge {
                    caller: 1,
                    callee: 2,
                    calls: 1,
                    inclusive: 10,
                },
            ],
            ..Counts::default()
        };
        let mut text = Vec::new();
        write_callgrind(&counts, "/bin/a\nb", &mut text).expect("memory");
        let text = String::from_utf8(text).expect("text");
        let (head, body) = text.split_once("summary: 100\n").expect("a summary");
        assert!(head.contains("cmd: /bin/a b\n"), "{head}");
        let expected = "\n\nob=(1) /bin/a\nfl=(1) /bin/a\nfn=(1) work\n0 70\n\n\
            ob=(1)\nfl=(1)\nfn=(2) main\n0 20\n\
            cob=(1)\ncfi=(1)\ncfn=(1)\ncalls=2 0\n0 70\n\
            cob=(2) /lib/c\ncfi=(2) /lib/c\ncfn=(3) main\ncalls=1 0\n0 10\n\n\
            ob=(2)\nfl=(2)\nfn=(3)\n0 10\n\ntotals: 100\n";
        assert_eq!(body, expected);
    }
}
