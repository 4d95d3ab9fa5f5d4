//! Every error that the page of errors says only a server or the library can
//! show is shown by one.

#[expect(
    dead_code,
    reason = "the page says more about a cell than is played here"
)]
#[path = "../../../pmu-virt/tests/perfmon/cells.rs"]
mod cells;

use std::os::unix::fs::PermissionsExt;

use anyhow::{Context, Result, bail, ensure};
use cells::{BY_SERVER, ByServer, COMMANDS};
use guest_tests::micro::{Lab, Test};
use perfmon_abi::consts::{DEFAULT_FORMAT, PFM_FL_SYSTEM_WIDE};
use perfmon_abi::{Config, DefaultArg, LoadArg, Record};
use umpire_perfmon::{Call, CallError, Client, Errno};
use vmm::micro::BackendFactory;

use crate::bed::{Bed, CYCLES, clock, counter, load, pmc, two_hearts};
use crate::cc::Running;
use crate::known::{self, scarce};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "played::every_cell_of_the_server",
        run: every_cell,
    },
    Test {
        name: "played::nobody_serves",
        run: |_| nobody_serves(),
    },
    Test {
        name: "played::no_context",
        run: no_context,
    },
    Test {
        name: "played::no_memory_at_the_address",
        run: bad_address,
    },
    Test {
        name: "played::a_stranger",
        run: a_stranger,
    },
];

/// An event that neither `clock` nor the table of rates counts.
const NO_SUCH: u64 = 0x43_00c2;

/// How a cell is played, and on which counters.
enum Play {
    /// By a client.
    On(BackendFactory, fn(&Client) -> Result<(), CallError>),
    /// By a program that gives up its rights.
    Stranger,
}

/// The cells, by words of `when` that no other cell of the command has.
const PLAYS: &[(&str, &str, Play)] = &[
    (
        "PFM_CREATE_CONTEXT",
        "carries the descriptors",
        Play::On(clock, |client| {
            let made = client.create(0, Some(DEFAULT_FORMAT), &default_buffer(8192))?;
            assert!(made.buffer.is_some_and(|buffer| buffer.size == 8192));
            Ok(())
        }),
    ),
    (
        "PFM_CREATE_CONTEXT",
        "has the UUID",
        Play::On(clock, |client| {
            client.create(0, Some([9; 16]), &[]).map(drop)
        }),
    ),
    (
        "PFM_CREATE_CONTEXT",
        "refuses its argument",
        Play::On(clock, |client| {
            client
                .create(0, Some(DEFAULT_FORMAT), &default_buffer(41))
                .map(drop)
        }),
    ),
    (
        "PFM_CREATE_CONTEXT",
        "`cf_smpl_buf_size_max`",
        Play::On(clock, |client| {
            let large = default_buffer(40 << 20);
            let _first = client.create(0, Some(DEFAULT_FORMAT), &large)?;
            client.create(0, Some(DEFAULT_FORMAT), &large).map(drop)
        }),
    ),
    (
        "PFM_CREATE_CONTEXT",
        "as many contexts",
        Play::On(clock, |client| {
            let mut contexts = Vec::new();
            loop {
                assert!(contexts.len() < 100_000, "contexts without end");
                contexts.push(client.create(0, None, &[]).inspect_err(|_| {
                    assert!(contexts.len() >= 1024, "{} contexts", contexts.len());
                })?);
            }
        }),
    ),
    (
        "PFM_CREATE_CONTEXT",
        "`cf_thread_gid`",
        Play::On(clock, |client| {
            configure(client, |config| config.sys_gid = 4_242_424)?;
            let wide = client.create(PFM_FL_SYSTEM_WIDE, None, &[]).map(drop);
            assert_eq!(wide.map_err(|error| error.errno), Err(Errno::EPERM));
            configure(client, |config| {
                (config.sys_gid, config.thread_gid) = (u32::MAX, 4_242_424);
            })?;
            client.create(PFM_FL_SYSTEM_WIDE, None, &[])?;
            client.create(0, None, &[]).map(drop)
        }),
    ),
    (
        "PFM_LOAD_CONTEXT",
        "no such vCPU",
        Play::On(clock, |client| {
            for flags in [0, PFM_FL_SYSTEM_WIDE] {
                let context = client.create(flags, None, &[])?;
                let refused = attach(client, &context, 2);
                assert_eq!(refused.map_err(|error| error.errno), Err(Errno::ESRCH));
                let refused = attach(client, &context, -1);
                assert_eq!(refused.map_err(|error| error.errno), Err(Errno::ESRCH));
            }
            attach(client, &client.create(0, None, &[])?, i32::MAX)
        }),
    ),
    (
        "PFM_LOAD_CONTEXT",
        "has a context already",
        Play::On(clock, |client| {
            let (one, other) = (client.create(0, None, &[])?, client.create(0, None, &[])?);
            attach(client, &one, 1)?;
            attach(client, &other, 1)
        }),
    ),
    (
        "PFM_LOAD_CONTEXT",
        "no counters are left",
        Play::On(scarce, |client| {
            let context = client.create(0, None, &[])?;
            client.call(&context, &mut Call::WritePmcs(vec![pmc(0, CYCLES)]))?;
            attach(client, &context, 0)
        }),
    ),
    (
        "PFM_LOAD_CONTEXT",
        "no source of the host counts",
        Play::On(clock, |client| {
            let context = client.create(0, None, &[])?;
            client.call(&context, &mut Call::WritePmcs(vec![pmc(0, NO_SUCH)]))?;
            attach(client, &context, 0)
        }),
    ),
    (
        "PFM_WRITE_PMCS",
        "no source of the host counts",
        Play::On(clock, |client| {
            let context = client.create(0, None, &[])?;
            attach(client, &context, 0)?;
            client.call(&context, &mut Call::WritePmcs(vec![pmc(0, CYCLES)]))?;
            client.call(&context, &mut Call::WritePmcs(vec![pmc(0, NO_SUCH)]))
        }),
    ),
    (
        "PFM_SET_CONFIG",
        "root or runs the VMM",
        Play::On(clock, |client| {
            configure(client, |config| config.arg_size_max = 8192)
        }),
    ),
    ("PFM_SET_CONFIG", "somebody else", Play::Stranger),
    (
        "PFM_SET_CONFIG",
        "below a page",
        Play::On(clock, |client| {
            for change in [
                (|config: &mut Config| config.smpl_buf_size_max = 4095) as fn(&mut Config),
                |config| config.flags = 1,
            ] {
                let refused = configure(client, change);
                assert_eq!(refused.map_err(|error| error.errno), Err(Errno::EINVAL));
            }
            configure(client, |config| config.arg_size_max = 4095)
        }),
    ),
    (
        "PFM_GET_CONFIG",
        "anybody asks",
        Play::On(clock, |client| {
            client.ask(&mut Call::GetConfig(Config::default()))
        }),
    ),
];

fn default_buffer(size: u64) -> Vec<u8> {
    let arg = DefaultArg {
        buf_size: size,
        buf_flags: 0,
    };
    arg.to_bytes()
}

fn attach(
    client: &Client,
    context: &umpire_perfmon::ContextHandle,
    pid: i32,
) -> Result<(), CallError> {
    client.call(context, &mut Call::Load(LoadArg { pid, set: 0 }))
}

fn configure(client: &Client, change: fn(&mut Config)) -> Result<(), CallError> {
    let mut get = Call::GetConfig(Config::default());
    client.ask(&mut get)?;
    let Call::GetConfig(mut config) = get else {
        unreachable!("the client answers with the command that it was asked for");
    };
    change(&mut config);
    client.ask(&mut Call::SetConfig(config))
}

fn every_cell(lab: &Lab) -> Result<()> {
    for cell in BY_SERVER {
        let (command, when) = (cell.command, cell.when);
        let mut plays = PLAYS
            .iter()
            .filter(|play| play.0 == command && when.contains(play.1));
        let (_, _, play) = plays
            .next()
            .with_context(|| format!("{command}, {when}: nobody plays it"))?;
        ensure!(plays.next().is_none(), "{command}, {when}: two play it");
        let outcome = match play {
            Play::On(backend, play) => with_client(lab, *backend, *play)?,
            Play::Stranger => stranger(lab, command)?,
        };
        ensure!(
            outcome == cell.outcome,
            "{command}, {when}: {outcome:?} instead of {:?}",
            cell.outcome
        );
    }
    for (command, when, _) in PLAYS {
        let is = |cell: &&ByServer| cell.command == *command && cell.when.contains(when);
        ensure!(
            BY_SERVER.iter().any(|cell| is(&cell)),
            "{command}, {when}: no cell"
        );
    }
    Ok(())
}

fn with_client(
    lab: &Lab,
    backend: BackendFactory,
    play: fn(&Client) -> Result<(), CallError>,
) -> Result<Option<Errno>> {
    let guest = two_hearts()?;
    known::measure(lab, &guest)?;
    let bed = Bed::new(backend)?;
    let (outcome, _) = bed.run(lab, &guest, |client, gates| {
        gates.alive(0)?;
        gates.alive(1)?;
        match play(client) {
            Ok(()) => Ok(None),
            Err(error) => {
                ensure!(!error.reason.is_empty(), "{error}: without a reason");
                ensure!(!error.reason.contains('\n'), "{error}: several lines");
                Ok(Some(error.errno))
            }
        }
    })?;
    Ok(outcome)
}

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

/// Runs `errors` beside a guest, at a socket that everybody may use.
fn errors_with(lab: &Lab, how: &str) -> Result<Vec<(String, i32)>> {
    let mut bed = Bed::new(clock)?;
    bed.control.access.mode = 0o666;
    let folder = bed.socket();
    let folder = folder.parent().context("a folder")?;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755))?;
    let (told, _) = bed.run(lab, &two_hearts()?, |_, _| {
        errors(how, Some(bed.socket().display().to_string()))
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
        let told = errors_with(lab, how)?;
        for command in COMMANDS.iter().filter(|command| command.of_context) {
            expect(&told, command.name, Some(Errno::EBADF)).with_context(|| how.to_owned())?;
        }
    }
    Ok(())
}

/// Commands that take no argument do not look at one.
fn bad_address(lab: &Lab) -> Result<()> {
    let told = errors_with(lab, "address")?;
    for command in COMMANDS {
        let expected = match command.name {
            "PFM_STOP" => Errno::EINVAL,
            "PFM_RESTART" => Errno::EBUSY,
            "PFM_UNLOAD_CONTEXT" => {
                expect(&told, command.name, None)?;
                continue;
            }
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

/// What a command comes to for somebody who is neither root nor the VM's user.
fn stranger(lab: &Lab, command: &str) -> Result<Option<Errno>> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "only root can become somebody else: run this test as root"
    );
    let told = errors_with(lab, "stranger")?;
    let found = told
        .iter()
        .find(|it| it.0 == command)
        .context("the command")?;
    match found.1 {
        0 => Ok(None),
        number => Ok(Some(Errno::from_number(number).context("an error")?)),
    }
}

fn a_stranger(lab: &Lab) -> Result<()> {
    let told_at_0666 = stranger(lab, "PFM_GET_CONFIG")?;
    ensure!(told_at_0666.is_none(), "{told_at_0666:?}");
    // A socket of mode 0600 lets nobody else in.
    let bed = Bed::new(clock)?;
    let folder = bed.socket();
    let folder = folder.parent().context("a folder")?;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755))?;
    let (told, _) = bed.run(lab, &two_hearts()?, |client, _| {
        let told = errors("stranger", Some(bed.socket().display().to_string()))?;
        let context = counter(client, 0, CYCLES)?;
        load(client, &context, 0)?;
        Ok(told)
    })?;
    expect(&told, "PFM_GET_CONFIG", Some(Errno::EPERM))?;
    expect(&told, "PFM_CREATE_CONTEXT", Some(Errno::EPERM))
}
