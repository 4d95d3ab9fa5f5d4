//! Errors of the library for programs in C: nobody serves, no context, no memory,
//! no permission. What each command prints is compared with the table of errors.

use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result, bail, ensure};
use guest_tests::micro::{Lab, Test};
use umpire_perfmon::Errno;

use crate::bed::{Bed, clock, two_hearts};
use crate::cc::{Running, compiled};
use crate::cells::COMMANDS;

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "c_errors::nobody_serves",
        run: |_| nobody_serves(),
    },
    Test {
        name: "c_errors::no_context",
        run: no_context,
    },
    Test {
        name: "c_errors::no_memory_at_the_address",
        run: bad_address,
    },
    Test {
        name: "c_errors::a_stranger",
        run: a_stranger,
    },
];

/// What each command printed.
fn errors(how: &str, socket: Option<String>) -> Result<Vec<(String, i32)>> {
    let socket = socket.unwrap_or_else(|| "/nonexistent/socket".to_owned());
    let said = Running::start("errors", &[how], &[("UMPIRE_PERFMON", socket)])?.join()?;
    let line = |line: &str| {
        let (name, number) = line.split_once(' ')?;
        Some((name.to_owned(), number.parse().ok()?))
    };
    let told: Option<Vec<_>> = said.lines().map(line).collect();
    let told = told.with_context(|| format!("what {how} printed: {said}"))?;
    ensure!(told.len() == COMMANDS.len(), "{told:?}");
    Ok(told)
}

/// Runs `errors` beside a guest, at a socket of this mode.
fn errors_with(lab: &Lab, how: &str, mode: u32) -> Result<Vec<(String, i32)>> {
    compiled("errors")?;
    let mut bed = Bed::new(clock)?;
    bed.control.access.mode = mode;
    let socket = bed.socket();
    let folder = socket.parent().context("a folder")?;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755))?;
    let (told, _) = bed.run(lab, &two_hearts()?, |_, _| {
        errors(how, Some(socket.display().to_string()))
    })?;
    Ok(told)
}

fn expect(told: &[(String, i32)], command: &str, expected: Option<Errno>) -> Result<()> {
    let number = expected.map_or(0, Errno::number);
    match told.iter().find(|it| it.0 == command) {
        Some((_, is)) => ensure!(*is == number, "{command}: {is}, not {number}: {told:?}"),
        None => bail!("{command} is not in {told:?}"),
    }
    Ok(())
}

fn nobody_serves() -> Result<()> {
    let told = errors("nobody", None)?;
    COMMANDS
        .iter()
        .try_for_each(|command| expect(&told, command.name, Some(Errno::ENOSYS)))
}

fn no_context(lab: &Lab) -> Result<()> {
    for how in ["closed", "file"] {
        let told = errors_with(lab, how, 0o600)?;
        for command in COMMANDS.iter().filter(|command| command.of_context) {
            expect(&told, command.name, Some(Errno::EBADF)).with_context(|| how.to_owned())?;
        }
    }
    Ok(())
}

/// Commands that take no argument do not look at one.
fn bad_address(lab: &Lab) -> Result<()> {
    let told = errors_with(lab, "address", 0o600)?;
    for command in COMMANDS {
        let expected = match command.name {
            "PFM_STOP" | "PFM_RESTART" | "PFM_UNLOAD_CONTEXT" => Errno::EBUSY,
            _ => Errno::EFAULT,
        };
        expect(&told, command.name, Some(expected))?;
        let listed = command.listed.iter().chain(command.added);
        ensure!(
            listed.clone().any(|errno| *errno == expected),
            "{}",
            command.name
        );
    }
    Ok(())
}

/// Somebody who is neither root nor the user who runs the VM.
fn a_stranger(lab: &Lab) -> Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "only root can become somebody else: run this test as root"
    );
    let told = errors_with(lab, "stranger", 0o666)?;
    expect(&told, "PFM_GET_CONFIG", None)?;
    expect(&told, "PFM_SET_CONFIG", Some(Errno::EPERM))?;
    expect(&told, "PFM_CREATE_CONTEXT", None)?;
    // A socket of mode 0600 lets nobody else in.
    let told = errors_with(lab, "stranger", 0o600)?;
    COMMANDS
        .iter()
        .try_for_each(|command| expect(&told, command.name, Some(Errno::EPERM)))
}
