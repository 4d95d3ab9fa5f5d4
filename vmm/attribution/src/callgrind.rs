//! Functions and calls as Callgrind writes them, for `callgrind_annotate`, KCachegrind and harnesses
//! (Valgrind's manual, "Callgrind Format Specification").

use std::collections::BTreeMap;
use std::io::{self, Write};

use ahash::AHashMap;

use crate::counts::{CallEdge, Context, Contexts, Counts};

/// Names by numbers, the first time with the name: of what they are the names of, two may be the
/// same.
#[derive(Default)]
struct Names<'a> {
    known: AHashMap<(&'a str, &'a str), usize>,
    plain: bool,
}

impl<'a> Names<'a> {
    fn new(plain: bool) -> Self {
        Self {
            plain,
            ..Self::default()
        }
    }

    fn of(&mut self, place: &'a str, name: &'a str) -> String {
        if self.plain {
            return name.to_owned();
        }
        let next = self.known.len() + 1;
        match self.known.get(&(place, name)) {
            Some(number) => format!("({number})"),
            None => {
                self.known.insert((place, name), next);
                format!("({next}) {name}")
            }
        }
    }
}

/// What functions cost, and the calls between them: of all programs, or of a part.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Costs {
    /// Functions by their places among those of the counts, and instructions of their own.
    pub own: Vec<(usize, u64)>,
    /// In the order of callers.
    pub edges: Vec<CallEdge>,
}

impl Costs {
    /// Of all programs.
    #[must_use]
    pub fn of_all(counts: &Counts) -> Self {
        let functions = counts.functions.iter().flatten();
        Self {
            own: (0..).zip(functions.map(|function| function.own)).collect(),
            edges: counts.edges.clone(),
        }
    }

    /// Instructions of all of it.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.own.iter().map(|(_, own)| own).sum()
    }
}

/// Who called whom, for the costs of some threads and parts of programs.
#[derive(Debug)]
pub struct ContextCosts<'a> {
    nodes: &'a [Context],
    /// Instructions of each with all that it called.
    inclusive: Vec<u64>,
    /// The nodes of each root.
    of_root: Vec<Vec<usize>>,
}

impl<'a> ContextCosts<'a> {
    /// Those of a run.
    #[must_use]
    pub fn new(contexts: &'a Contexts) -> Self {
        let nodes = &contexts.nodes[..];
        // What a function has called comes behind it.
        let mut inclusive: Vec<u64> = nodes.iter().map(|node| node.own).collect();
        let mut of_root = vec![Vec::new(); contexts.roots.len()];
        for (place, node) in nodes.iter().enumerate().rev() {
            if let Some(caller) = node.caller.filter(|caller| *caller < place) {
                inclusive[caller] += inclusive[place];
            }
            if let Some(all) = of_root.get_mut(node.root) {
                all.push(place);
            }
        }
        Self {
            nodes,
            inclusive,
            of_root,
        }
    }

    /// What functions cost below these roots.
    #[must_use]
    pub fn below(&self, roots: impl IntoIterator<Item = usize>) -> Costs {
        let nodes = self.nodes;
        let mut own: BTreeMap<usize, u64> = BTreeMap::new();
        let mut edges: BTreeMap<(usize, usize), CallEdge> = BTreeMap::new();
        let all = roots.into_iter().filter_map(|root| self.of_root.get(root));
        for place in all.flatten().copied() {
            let node = &nodes[place];
            *own.entry(node.function).or_default() += node.own;
            let next = |caller: &usize| nodes.get(*caller)?.caller;
            let mut callers = std::iter::successors(node.caller, next);
            let caller = node.caller.and_then(|caller| nodes.get(caller));
            let Some(Context { function, .. }) = caller else {
                continue;
            };
            let edge = edges.entry((*function, node.function)).or_insert(CallEdge {
                caller: *function,
                callee: node.function,
                ..CallEdge::default()
            });
            edge.calls += node.calls;
            // What calls itself is counted once.
            if !callers.any(|caller| nodes[caller].function == node.function) {
                edge.inclusive += self.inclusive[place];
            }
        }
        Costs {
            own: own.into_iter().collect(),
            edges: edges.into_values().collect(),
        }
    }
}

/// The beginning of a profile.
#[derive(Debug, Clone, Default)]
pub struct ProfileHead<'a> {
    /// The process.
    pub pid: u64,
    /// The command line.
    pub command: &'a str,
    /// The number of the part, from 1 on.
    pub part: usize,
    /// The number of the thread in its process, from 1 on, of a profile of one thread.
    pub thread: Option<usize>,
    /// Why it was written, as Callgrind says it: `Program termination`.
    pub trigger: &'a str,
    /// Each name is written where it is needed, not by a number.
    pub plain_names: bool,
}

/// Writes a profile of these functions of `counts`: instructions by function, without lines.
///
/// # Errors
/// `to` cannot be written to.
pub fn write_callgrind(
    counts: &Counts,
    costs: &Costs,
    head: &ProfileHead<'_>,
    to: &mut dyn Write,
) -> io::Result<()> {
    let functions = counts.functions.as_deref().unwrap_or_default();
    let total = costs.total();
    let line = |text: &str| text.replace(char::is_control, " ");
    writeln!(to, "# callgrind format\nversion: 1\ncreator: umpire")?;
    let (pid, command, part) = (head.pid, line(head.command), head.part);
    writeln!(to, "pid: {pid}\ncmd: {command}\npart: {part}")?;
    if let Some(thread) = head.thread {
        writeln!(to, "thread: {thread}")?;
    }
    writeln!(to, "\n\ndesc: Trigger: {}\n", line(head.trigger))?;
    writeln!(to, "positions: line\nevents: Ir\nsummary: {total}\n")?;
    let [mut objects, mut names, mut files] = [(); 3].map(|()| Names::new(head.plain_names));
    let mut edges = costs.edges.iter().peekable();
    for (place, own) in &costs.own {
        let Some(function) = functions.get(*place) else {
            continue;
        };
        let object = &function.object;
        writeln!(to, "\nob={}", objects.of("", object))?;
        // callgrind_annotate tells functions of one name apart by the file of the source alone.
        writeln!(to, "fl={}", files.of("", object))?;
        writeln!(to, "fn={}", names.of(object, &function.name))?;
        writeln!(to, "0 {own}")?;
        // Both are in the order of the callers.
        while let Some(edge) = edges.next_if(|edge| edge.caller <= *place) {
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
    use crate::counts::{ContextRoot, Function};

    fn counts() -> Counts {
        let function = |object: &str, name: &str, own| Function {
            object: object.to_owned(),
            name: name.to_owned(),
            own,
            ..Function::default()
        };
        Counts {
            functions: Some(vec![
                function("/bin/a", "work", 70),
                function("/bin/a", "main", 20),
                function("/lib/c", "main", 10),
            ]),
            ..Counts::default()
        }
    }

    fn edge(caller: usize, callee: usize, calls: u64, inclusive: u64) -> CallEdge {
        CallEdge {
            caller,
            callee,
            calls,
            inclusive,
        }
    }

    fn text(counts: &Counts, costs: &Costs, head: &ProfileHead<'_>) -> String {
        let mut text = Vec::new();
        write_callgrind(counts, costs, head, &mut text).expect("memory");
        String::from_utf8(text).expect("text")
    }

    #[test]
    fn a_profile_is_as_callgrind_has_it() {
        let counts = Counts {
            edges: vec![edge(1, 0, 2, 70), edge(1, 2, 1, 10)],
            ..counts()
        };
        let head = ProfileHead {
            pid: 7,
            command: "/bin/a\nb",
            part: 1,
            trigger: "Program termination",
            ..ProfileHead::default()
        };
        let costs = Costs::of_all(&counts);
        let all = text(&counts, &costs, &head);
        let (found, body) = all.split_once("summary: 100\n").expect("a summary");
        let expected = "# callgrind format\nversion: 1\ncreator: umpire\n\
            pid: 7\ncmd: /bin/a b\npart: 1\n\n\ndesc: Trigger: Program termination\n\n\
            positions: line\nevents: Ir\n";
        assert_eq!(found, expected);
        let expected = "\n\nob=(1) /bin/a\nfl=(1) /bin/a\nfn=(1) work\n0 70\n\n\
            ob=(1)\nfl=(1)\nfn=(2) main\n0 20\n\
            cob=(1)\ncfi=(1)\ncfn=(1)\ncalls=2 0\n0 70\n\
            cob=(2) /lib/c\ncfi=(2) /lib/c\ncfn=(3) main\ncalls=1 0\n0 10\n\n\
            ob=(2)\nfl=(2)\nfn=(3)\n0 10\n\ntotals: 100\n";
        assert_eq!(body, expected);
        let plain = ProfileHead {
            thread: Some(2),
            plain_names: true,
            ..head
        };
        let all = text(&counts, &costs, &plain);
        assert!(all.contains("part: 1\nthread: 2\n"), "{all}");
        let expected = "\nob=/bin/a\nfl=/bin/a\nfn=main\n0 20\n\
            cob=/bin/a\ncfi=/bin/a\ncfn=work\ncalls=2 0\n0 70\n";
        assert!(all.contains(expected), "{all}");
    }

    #[test]
    fn parts_have_their_own_costs() {
        let node = |root, caller, function, own, calls| Context {
            root,
            caller,
            function,
            offset: 0,
            own,
            calls,
        };
        let contexts = Contexts {
            roots: vec![ContextRoot::default(); 2],
            nodes: vec![
                node(0, None, 1, 5, 0),
                node(1, None, 1, 20, 0),
                node(1, Some(1), 0, 30, 2),
                // It calls itself.
                node(1, Some(2), 0, 40, 3),
                node(1, Some(3), 2, 10, 1),
            ],
            ..Contexts::default()
        };
        let all = ContextCosts::new(&contexts);
        let costs = Costs {
            own: vec![(0, 70), (1, 20), (2, 10)],
            edges: vec![edge(0, 0, 3, 0), edge(0, 2, 1, 10), edge(1, 0, 2, 80)],
        };
        let found = all.below([1]);
        assert_eq!((found.total(), found), (100, costs));
        assert_eq!(all.below([0, 1]).total(), 105);
        assert_eq!(all.below([]), Costs::default());
    }
}
