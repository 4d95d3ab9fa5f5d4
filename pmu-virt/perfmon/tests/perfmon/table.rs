//! The table of commands, states and errors: every case is played, no cell may
//! be empty, and the page is what the cases say.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

use perfmon_abi::consts as pfm;
use perfmon_abi::wire::Errno;

use super::cases::{ANY, Case, State, cases, in_state};
use super::cells::{BY_SERVER, ByServer, COMMANDS, Command, NEVER, NO_CONTEXT, NO_INTERFACE};

const STATES: [(State, &str); 5] = [
    (State::Unloaded, "unloaded"),
    (State::Loaded, "loaded"),
    (State::Started, "started"),
    (State::Masked, "masked"),
    (State::Notified, "notified"),
];

#[test]
fn every_case_comes_out_as_it_says() {
    for case in cases() {
        for &state in case.states {
            let mut context = in_state(state);
            let played = (case.play)(&mut context);
            let (command, when) = (case.command, case.when);
            assert_eq!(
                played,
                (case.outcome, case.flag),
                "{command}, {state:?}: {when}"
            );
        }
    }
}

/// The cases of a command.
fn of(command: &Command) -> impl Iterator<Item = &'static Case> {
    cases().filter(|case| case.command == command.name)
}

/// Errors that somebody shows for a command: cases here, a server, or both.
fn shown(command: &Command) -> BTreeSet<&'static str> {
    let mut shown: BTreeSet<_> = of(command)
        .filter_map(|case| case.outcome.err())
        .chain(by_server(command).filter_map(|it| it.outcome))
        .map(Errno::name)
        .collect();
    shown.insert(Errno::ENOSYS.name());
    if command.of_context {
        shown.insert(Errno::EBADF.name());
    }
    shown
}

fn by_server(command: &Command) -> impl Iterator<Item = &'static ByServer> {
    BY_SERVER.iter().filter(|it| it.command == command.name)
}

fn never(command: &Command) -> impl Iterator<Item = &'static (&'static str, Errno, &'static str)> {
    NEVER.iter().filter(|it| it.0 == command.name)
}

#[test]
fn no_error_is_without_a_case() {
    for command in COMMANDS {
        let never: BTreeSet<_> = never(command).map(|it| it.1.name()).collect();
        let claimed = command.listed.iter().chain(command.added);
        let claimed: BTreeSet<_> = claimed.map(|errno| errno.name()).collect();
        let shown = shown(command);
        let covered: BTreeSet<_> = shown.union(&never).copied().collect();
        assert_eq!(claimed, covered, "{}", command.name);
        assert!(shown.is_disjoint(&never), "{}", command.name);
    }
}

#[test]
fn no_state_is_without_a_case() {
    for command in COMMANDS {
        let played: BTreeSet<State> = of(command).flat_map(|case| case.states).copied().collect();
        let wanted: BTreeSet<State> = if command.of_context {
            STATES.iter().map(|it| it.0).collect()
        } else {
            ANY.iter().copied().collect()
        };
        assert_eq!(played, wanted, "{}", command.name);
        // Success is shown, too.
        let succeeds = of(command).any(|case| case.outcome.is_ok())
            || by_server(command).any(|it| it.outcome.is_none());
        assert!(succeeds, "{}", command.name);
    }
}

/// Every one of the interface's commands, and nothing else.
#[test]
fn the_commands_are_the_interfaces() {
    let numbered: Vec<&str> = (1..=16)
        .map(|number| {
            let is_command =
                |it: &&(&str, u64, &str)| it.1 == number && it.2.starts_with("Command");
            pfm::ALL.iter().find(is_command).expect("a command").0
        })
        .collect();
    let listed: Vec<&str> = COMMANDS.iter().map(|command| command.name).collect();
    assert_eq!(listed, numbered);
    let names = cases()
        .map(|case| case.command)
        .chain(BY_SERVER.iter().map(|it| it.command))
        .chain(NEVER.iter().map(|it| it.0));
    for name in names {
        assert!(listed.contains(&name), "{name}");
    }
}

fn name(outcome: Result<(), Errno>) -> &'static str {
    match outcome {
        Ok(()) => "ok",
        Err(errno) => errno.name(),
    }
}

fn flag_name(case: &Case) -> &'static str {
    let of_set = case.command.ends_with("EVTSETS");
    match case.flag {
        0 => "",
        pfm::PFM_REG_RETFL_NOTAVAIL => "`PFM_REG_RETFL_NOTAVAIL`",
        pfm::PFM_REG_RETFL_EINVAL if of_set => "`PFM_SET_RETFL_EINVAL`",
        pfm::PFM_REG_RETFL_NOSET if of_set => "`PFM_SET_RETFL_NOSET`",
        pfm::PFM_REG_RETFL_EINVAL => "`PFM_REG_RETFL_EINVAL`",
        pfm::PFM_REG_RETFL_NOSET => "`PFM_REG_RETFL_NOSET`",
        other => unreachable!("one return flag at a time, not {other:#x}"),
    }
}

/// Outcomes of a command in a state: success first, then by name.
fn cell(command: &Command, state: State) -> String {
    let here = of(command).filter(|case| case.states.contains(&state));
    let mut outcomes: BTreeSet<_> = here
        .map(|case| (case.outcome.is_err(), name(case.outcome)))
        .collect();
    let applies = |it: &&ByServer| match it.states {
        "unloaded" => state == State::Unloaded,
        "attached" => state != State::Unloaded,
        _ => true,
    };
    outcomes.extend(
        by_server(command)
            .filter(applies)
            .map(|it| match it.outcome {
                Some(errno) => (true, errno.name()),
                None => (false, "ok"),
            }),
    );
    let outcomes: Vec<_> = outcomes.into_iter().map(|it| it.1).collect();
    outcomes.join(", ")
}

fn states(command: &Command, case: &Case) -> String {
    if !command.of_context || case.states.len() == STATES.len() {
        return "any".to_owned();
    }
    if case.states.len() == STATES.len() - 1 && !case.states.contains(&State::Unloaded) {
        return "attached".to_owned();
    }
    let here = STATES.iter().filter(|it| case.states.contains(&it.0));
    here.map(|it| it.1).collect::<Vec<_>>().join(", ")
}

fn page() -> String {
    let mut page = String::from(include_str!("errors_head.md"));
    let columns: Vec<_> = STATES.iter().map(|it| it.1).collect();
    let _ = writeln!(page, "| command | {} | zombie |", columns.join(" | "));
    let _ = writeln!(page, "|---|---|---|---|---|---|---|");
    for command in COMMANDS.iter().filter(|command| command.of_context) {
        let cells: Vec<String> = STATES.iter().map(|it| cell(command, it.0)).collect();
        let zombie = Errno::EBADF.name();
        let _ = writeln!(
            page,
            "| `{}` | {} | {zombie} |",
            command.name,
            cells.join(" | ")
        );
    }
    let _ = writeln!(
        page,
        "\n| command without a context | outcomes |\n|---|---|"
    );
    for command in COMMANDS.iter().filter(|command| !command.of_context) {
        let cell = cell(command, State::Unloaded);
        let _ = writeln!(page, "| `{}` | {cell} |", command.name);
    }
    for command in COMMANDS {
        let _ = writeln!(page, "\n## {} ({})\n", command.name, command.section);
        let _ = writeln!(page, "| outcome | states | return flag | when | shown by |");
        let _ = writeln!(page, "|---|---|---|---|---|");
        for case in of(command) {
            let _ = writeln!(
                page,
                "| {} | {} | {} | {} | core |",
                name(case.outcome),
                states(command, case),
                flag_name(case),
                case.when
            );
        }
        for it in by_server(command) {
            let outcome = it.outcome.map_or("ok", Errno::name);
            let _ = writeln!(
                page,
                "| {outcome} | {} |  | {} | server |",
                it.states, it.when
            );
        }
        if command.of_context {
            let _ = writeln!(page, "| EBADF | any |  | {NO_CONTEXT} | server |");
        }
        let _ = writeln!(page, "| ENOSYS | any |  | {NO_INTERFACE} | library |");
        for (_, errno, why) in never(command) {
            let _ = writeln!(page, "\n{} is never given: {why}.", errno.name());
        }
    }
    page
}

/// `docs/reference/perfmon-errors.md` is generated; `UPDATE_DOCS=1` writes it.
#[test]
fn the_page_is_what_the_cases_say() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/perfmon-errors.md");
    let expected = page();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, expected).expect("docs/reference/perfmon-errors.md can be written");
        return;
    }
    let page =
        std::fs::read_to_string(&path).expect("docs/reference/perfmon-errors.md can be read");
    assert!(
        page == expected,
        "docs/reference/perfmon-errors.md is out of date; run this test with UPDATE_DOCS=1"
    );
}
