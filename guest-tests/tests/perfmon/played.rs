//! Plays every row of the table of errors that only a server can show: a row
//! that nobody plays fails.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use guest_tests::micro::{Lab, Test};
use perfmon_abi::consts::{DEFAULT_FORMAT, PFM_FL_SYSTEM_WIDE};
use perfmon_abi::wire::{Call, Request};
use perfmon_abi::{Config, DefaultArg, LoadArg, Record};
use pmu_virt::CounterBackend;
use pmu_virt::perfmon::MAX_CONTEXTS;
use rustix::thread::set_thread_uid;
use umpire_perfmon::{CallError, Client, Errno};

use crate::bed::{Bed, CYCLES, RETURNS, clock, counter, guest, load, pmc};
use crate::cells::{BY_SERVER, ByServer, COMMANDS};
use crate::ibs::MODEL as IBS_MODEL;
use crate::limited::Limited;
use crate::raw::{Raw, request};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "played::every_error_of_the_server",
        run: every_row,
    },
    Test {
        name: "played::a_load_without_counters_left",
        run: no_counters,
    },
    Test {
        name: "played::commands_without_a_context",
        run: no_context,
    },
    Test {
        name: "played::nobody_serves",
        run: no_interface,
    },
];

/// A user who is nobody in particular.
const SOMEBODY_ELSE: u32 = 65_534;

type Outcome = Result<(), CallError>;

fn every_row(lab: &Lab) -> Result<()> {
    for row in BY_SERVER {
        let name = format!("{}: {}", row.command, row.when);
        let mut bed = Bed::new(clock)?;
        bed.model = IBS_MODEL;
        bed.control.access.mode = 0o666;
        let socket = bed.socket();
        let folder = socket.parent().context("a folder")?;
        std::fs::set_permissions(folder, Permissions::from_mode(0o755))?;
        let (played, _) = bed.run(lab, &guest(|_| Ok(()))?, |client, _| {
            play(row, client, &socket)
        })?;
        let Some(outcome) = played else {
            ensure!(
                row.when.contains("no counters are left"),
                "nobody plays {name}"
            );
            continue;
        };
        let errno = outcome.as_ref().err().map(|error| error.errno);
        ensure!(errno == row.outcome, "{name}: {outcome:?}");
    }
    Ok(())
}

fn create_buffer(client: &Client, size: u64) -> Outcome {
    let arg = DefaultArg {
        buf_size: size,
        buf_flags: 0,
    };
    let made = client.create(0, Some(DEFAULT_FORMAT), &arg.to_bytes());
    made.map(drop)
}

fn config(client: &Client, change: impl FnOnce(&mut Config)) -> Outcome {
    let mut get = Call::GetConfig(Config::default());
    client.ask(&mut get)?;
    if let Call::GetConfig(mut config) = get {
        change(&mut config);
        client.ask(&mut Call::SetConfig(config))?;
    }
    Ok(())
}

/// What `act` comes to for another user, by a connection of its own. A thread's
/// user is its own in Linux.
fn as_somebody_else(socket: &Path, act: fn(&Client) -> Outcome) -> Result<Outcome> {
    let act = move || -> Result<Outcome> {
        set_thread_uid(rustix::process::Uid::from_raw(SOMEBODY_ELSE))?;
        let client = Client::connect(socket)?;
        Ok(act(&client))
    };
    std::thread::scope(|scope| scope.spawn(act).join())
        .map_err(|_| anyhow::anyhow!("a thread panicked"))?
}

fn load_at(client: &Client, event: u64, pid: i32) -> Result<Outcome> {
    let context = counter(client, 0, event)?;
    Ok(client.call(&context, &mut Call::Load(LoadArg { pid, set: 0 })))
}

/// Has a context sample ops by cycles.
fn sample() -> Call {
    Call::WritePmcs(vec![pmc(5, 0x1000 | 1 << 17)])
}

/// What a row comes to; `None` if it is not played here.
fn play(row: &ByServer, client: &Client, socket: &Path) -> Result<Option<Outcome>> {
    let has = |word: &str| row.when.contains(word);
    Ok(Some(match row.command {
        "PFM_CREATE_CONTEXT" if has("carries the descriptors") => create_buffer(client, 1 << 16),
        "PFM_CREATE_CONTEXT" if has("UUID") => client.create(0, Some([7; 16]), &[]).map(drop),
        "PFM_CREATE_CONTEXT" if has("refuses its argument") => create_buffer(client, 1),
        "PFM_CREATE_CONTEXT" if has("cf_smpl_buf_size_max") => create_buffer(client, 1 << 30),
        "PFM_CREATE_CONTEXT" if has("as many contexts") => {
            let mut contexts = Vec::new();
            loop {
                match client.create(0, None, &[]) {
                    Ok(context) => contexts.push(context),
                    Err(error) => break Err(error),
                }
                ensure!(contexts.len() <= 4096, "there is no limit");
            }
        }
        "PFM_CREATE_CONTEXT" if has("cf_thread_gid") => {
            config(client, |config| config.thread_gid = 4_242_424)?;
            client.create(PFM_FL_SYSTEM_WIDE, None, &[])?;
            client.create(0, None, &[]).map(drop)
        }
        "PFM_LOAD_CONTEXT" if has("no such vCPU") => load_at(client, CYCLES, 1)?,
        "PFM_LOAD_CONTEXT" if has("as many contexts") => {
            let mut loaded = Vec::new();
            for _ in 0..MAX_CONTEXTS {
                let one = counter(client, 0, CYCLES)?;
                load(client, &one, 0)?;
                loaded.push(one);
            }
            load_at(client, CYCLES, 0)?
        }
        "PFM_LOAD_CONTEXT" if has("no source") => load_at(client, RETURNS, 0)?,
        "PFM_LOAD_CONTEXT" if has("core's context") => {
            let core = counter(client, PFM_FL_SYSTEM_WIDE, CYCLES)?;
            client.call(&core, &mut sample())?;
            client.call(&core, &mut Call::Load(LoadArg { pid: 0, set: 0 }))
        }
        "PFM_LOAD_CONTEXT" | "PFM_WRITE_PMCS" if has("sampler of IBS") => {
            let first = counter(client, 0, CYCLES)?;
            client.call(&first, &mut sample())?;
            load(client, &first, 0)?;
            let second = counter(client, 0, CYCLES)?;
            if row.states == "attached" {
                load(client, &second, 0)?;
                client.call(&second, &mut sample())
            } else {
                client.call(&second, &mut sample())?;
                client.call(&second, &mut Call::Load(LoadArg { pid: 0, set: 0 }))
            }
        }
        "PFM_WRITE_PMCS" if has("no source") => {
            let context = counter(client, 0, CYCLES)?;
            load(client, &context, 0)?;
            client.call(&context, &mut Call::WritePmcs(vec![pmc(1, RETURNS)]))
        }
        "PFM_SET_CONFIG" if has("root or runs") => config(client, |_| {}),
        "PFM_SET_CONFIG" if has("somebody else") => {
            as_somebody_else(socket, |client| config(client, |_| {}))?
        }
        "PFM_SET_CONFIG" if has("below a page") => config(client, |config| config.flags = 1),
        "PFM_GET_CONFIG" => as_somebody_else(socket, |client| {
            client.ask(&mut Call::GetConfig(Config::default()))
        })?,
        _ => return Ok(None),
    }))
}

/// Two counters, of which the guest's model has more: none is left by
/// `guest-first`.
fn no_counters(lab: &Lab) -> Result<()> {
    fn two() -> Box<dyn CounterBackend> {
        Box::new(Limited::clock(2))
    }
    let bed = Bed::new(two)?;
    bed.run(lab, &guest(|_| Ok(()))?, |client, _| {
        let outcome = load_at(client, CYCLES, 0)?;
        let errno = outcome.as_ref().err().map(|error| error.errno);
        ensure!(errno == Some(Errno::EBUSY), "{outcome:?}");
        Ok(())
    })?;
    Ok(())
}

fn no_context(lab: &Lab) -> Result<()> {
    let bed = Bed::new(clock)?;
    let socket = bed.socket();
    bed.run(lab, &guest(|_| Ok(()))?, |client, _| {
        let context = client.create(0, None, &[])?;
        let raw = Raw::connect(&socket)?;
        // With an argument that is right for the command.
        let calls = [
            Call::WritePmcs(vec![pmc(0, 0)]),
            Call::WritePmds(vec![crate::bed::pmd(0, 0)]),
            Call::ReadPmds(vec![crate::bed::pmd(0, 0)]),
            Call::Start(None),
            Call::Stop,
            Call::Load(LoadArg { pid: 0, set: 0 }),
            Call::Unload,
            Call::Restart,
            Call::CreateEvtsets(vec![perfmon_abi::SetDesc::default()]),
            Call::DeleteEvtsets(vec![perfmon_abi::SetDesc::default()]),
            Call::GetinfoEvtsets(vec![perfmon_abi::SetInfo::default()]),
        ];
        ensure!(calls.len() == COMMANDS.iter().filter(|it| it.of_context).count());
        for call in calls {
            let payload = call.encode();
            let request = Request {
                payload: &payload,
                context: 99,
                ..request(call.command(), call.nargs())
            };
            let told = raw.ask(&request, &[])?;
            ensure!(told.errno == Errno::EBADF.number(), "{call:?}: {told:?}");
        }
        drop(context);
        Ok(())
    })?;
    Ok(())
}

fn no_interface(_: &Lab) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let refused = Client::connect(folder.path().join("nothing")).map(drop);
    let errno = refused.as_ref().err().map(|error| error.errno);
    ensure!(errno == Some(Errno::ENOSYS), "{refused:?}");
    Ok(())
}
