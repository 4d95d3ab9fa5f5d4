//! Every error that the server itself has to give.

use anyhow::{Result, bail, ensure};
use guest_tests::micro::{Lab, Test};
use perfmon_abi::consts::{DEFAULT_FORMAT, PFM_FL_NOTIFY_BLOCK, PFM_FL_SYSTEM_WIDE};
use perfmon_abi::{Config, DefaultArg, LoadArg, PmcInfo, Record};
use umpire_perfmon::{Call, CallError, Client, Errno};

use crate::bed::{Bed, CYCLES, clock, counter, guest, load, pmd};

pub(crate) const TESTS: &[Test] = &[
    Test {
        name: "errors::of_creations",
        run: creations,
    },
    Test {
        name: "errors::of_loads",
        run: loads,
    },
    Test {
        name: "errors::of_the_configuration",
        run: configuration,
    },
];

/// The error, which is to be `expected`.
fn refused<T>(what: &str, result: Result<T, CallError>, expected: Errno) -> Result<()> {
    match result {
        Ok(_) => bail!("{what}: done, not refused with {}", expected.name()),
        Err(error) => {
            ensure!(error.errno == expected, "{what}: {error}");
            ensure!(!error.reason.is_empty(), "{what}: without a reason");
            Ok(())
        }
    }
}

fn with_client(lab: &Lab, tool: fn(&Client) -> Result<()>) -> Result<()> {
    let bed = Bed::new(clock)?;
    bed.run(lab, &guest(|_| Ok(()))?, |client, _| tool(client))?;
    Ok(())
}

fn default_buffer(size: u64) -> Vec<u8> {
    let arg = DefaultArg {
        buf_size: size,
        buf_flags: 0,
    };
    arg.to_bytes()
}

fn creations(lab: &Lab) -> Result<()> {
    with_client(lab, |client| {
        let both = PFM_FL_NOTIFY_BLOCK | PFM_FL_SYSTEM_WIDE;
        refused("flags", client.create(both, None, &[]), Errno::EINVAL)?;
        let unknown = client.create(0, Some([9; 16]), &[]);
        refused("unknown format", unknown, Errno::EINVAL)?;
        let short = client.create(0, Some(DEFAULT_FORMAT), &[0; 3]);
        refused("short argument", short, Errno::EINVAL)?;
        let long = client.create(0, Some(DEFAULT_FORMAT), &[0; 5000]);
        refused("long argument", long, Errno::E2BIG)?;
        let huge = client.create(0, Some(DEFAULT_FORMAT), &default_buffer(1 << 30));
        refused("huge buffer", huge, Errno::ENOMEM)?;
        // All buffers share the limit, and give back what they had.
        for _ in 0..2 {
            let large = default_buffer(40 << 20);
            let first = client.create(0, Some(DEFAULT_FORMAT), &large)?;
            let second = client.create(0, Some(DEFAULT_FORMAT), &large);
            refused("second buffer", second, Errno::ENOMEM)?;
            drop(first);
            crate::bed::eventually("the context is gone", || {
                Ok(client.list()?.contexts.is_empty())
            })?;
        }
        let mut many = Call::GetinfoPmcs(vec![PmcInfo::default(); 4096 / PmcInfo::SIZE + 1]);
        refused("long vector", client.ask(&mut many), Errno::EFAULT)
    })
}

fn loads(lab: &Lab) -> Result<()> {
    let mut bed = Bed::new(clock)?;
    bed.control.contexts_per_vcpu = 1;
    bed.run(lab, &guest(|_| Ok(()))?, |client, _| {
        let context = counter(client, 0, CYCLES)?;
        let at = |pid, set| Call::Load(LoadArg { pid, set });
        refused("vCPU 1", client.call(&context, &mut at(1, 0)), Errno::ESRCH)?;
        refused(
            "vCPU -1",
            client.call(&context, &mut at(-1, 0)),
            Errno::ESRCH,
        )?;
        refused("set 5", client.call(&context, &mut at(0, 5)), Errno::EINVAL)?;
        let unloaded = client.call(&context, &mut Call::Start(None));
        refused("start", unloaded, Errno::EBUSY)?;
        let unloaded = client.call(&context, &mut Call::Stop);
        refused("stop", unloaded, Errno::EBUSY)?;
        load(client, &context, 0)?;
        refused("again", client.call(&context, &mut at(0, 0)), Errno::EBUSY)?;
        let other = counter(client, 0, CYCLES)?;
        refused(
            "a second one",
            client.call(&other, &mut at(0, 0)),
            Errno::EBUSY,
        )?;
        let wide = counter(client, PFM_FL_SYSTEM_WIDE, CYCLES)?;
        refused("core 1", client.call(&wide, &mut at(1, 0)), Errno::ESRCH)?;
        load(client, &wide, 0)?;
        client.call(&context, &mut Call::Unload)?;
        load(client, &other, 0)?;
        let bad = Call::ReadPmds(vec![pmd(0, 0), pmd(99, 0)]);
        refused(
            "PMD 99",
            client.call(&other, &mut bad.clone()),
            Errno::EINVAL,
        )
    })?;
    Ok(())
}

fn configuration(lab: &Lab) -> Result<()> {
    with_client(lab, |client| {
        let mut get = Call::GetConfig(Config::default());
        client.ask(&mut get)?;
        let Call::GetConfig(config) = get else {
            bail!("another command came back");
        };
        ensure!(config.arg_size_max == 4096, "{config:?}");
        let set = |change: fn(&mut Config)| {
            let mut new = config;
            change(&mut new);
            client.ask(&mut Call::SetConfig(new))
        };
        refused("small", set(|new| new.arg_size_max = 4095), Errno::EINVAL)?;
        set(|new| new.sys_gid = 4_242_424)?;
        let wide = client.create(PFM_FL_SYSTEM_WIDE, None, &[]);
        refused("group", wide, Errno::EPERM)?;
        client.create(0, None, &[])?;
        set(|new| new.thread_gid = 4_242_424)?;
        client.create(PFM_FL_SYSTEM_WIDE, None, &[])?;
        refused("group", client.create(0, None, &[]), Errno::EPERM)?;
        set(|new| new.arg_size_max = 8192)?;
        let mut many = Call::GetinfoPmcs(vec![PmcInfo::default(); 4096 / PmcInfo::SIZE + 1]);
        client.ask(&mut many)?;
        Ok(())
    })
}
