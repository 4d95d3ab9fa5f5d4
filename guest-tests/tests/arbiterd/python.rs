//! A client that others wrote: Python's `varlink`.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::fixture::Daemon;

const SCRIPT: &str = r#"
import sys, varlink
with varlink.Client(address="unix:" + sys.argv[1]) as client:
    with client.open("org.varlink.service") as service:
        info = service.GetInfo()
        assert "io.umpire.Arbiter" in info["interfaces"], info
    interface = client.get_interface("io.umpire.Arbiter")
    for name in ["Acquire", "Claim", "Release", "Renew", "Revoke", "List", "Who", "Explain", "Watch", "Report", "Audit"]:
        assert name in interface.members, name
    with client.open("io.umpire.Arbiter") as arbiter, client.open("io.umpire.Arbiter") as other:
        request = {"counters": [{"kind": "programmable", "count": 3}], "cpus": "0", "label": "snake"}
        lease = arbiter.Acquire(request)["lease"]
        assert lease["holds"] == 3 and lease["state"] == "holds", lease
        listed = other.List()["leases"]
        assert [one["label"] for one in listed] == ["snake"], listed
        try:
            other.Acquire(request)
            raise SystemExit("it was granted twice")
        except varlink.VarlinkError as error:
            assert error.error() == "io.umpire.Arbiter.Refused", error
            refusal = error.parameters()["refusal"]
            assert refusal["reason"] == "held" and refusal["held_by"][0]["id"] == lease["id"], refusal
        other.Release(lease["id"], lease["generation"])
        assert other.List()["leases"] == []
        stream = other.Acquire(request, _more=True)
        assert next(stream)["lease"]["holds"] == 3
        second = arbiter.List()["leases"][0]
        arbiter.Revoke(second["id"], 50)
        events = [reply["event"]["what"] for reply in stream]
        assert events == ["leaving", "ended"], events
print("done")
"#;

/// A Python that other users can run, too: the system's, where there is one. Somebody's own may
/// be in a folder that is closed to them.
pub(crate) fn python3() -> &'static str {
    const SYSTEM: &str = "/usr/bin/python3";
    if Path::new(SYSTEM).exists() {
        SYSTEM
    } else {
        "python3"
    }
}

/// A Python that has the package, or why there is none.
pub(crate) fn python(folder: &Path, package: &str) -> Result<PathBuf, String> {
    let run = |command: &mut Command| {
        let output = command.output().map_err(|error| error.to_string())?;
        let errors = String::from_utf8_lossy(&output.stderr);
        let last = errors.lines().last().unwrap_or_default().to_owned();
        if output.status.success() {
            Ok(())
        } else {
            Err(last)
        }
    };
    let site = folder.join("site");
    run(Command::new("python3")
        .args(["-m", "pip", "install", "--quiet", "--target"])
        .arg(&site)
        .arg(package))?;
    Ok(site)
}

#[test]
fn a_client_that_others_wrote_works() {
    let daemon = Daemon::start();
    let site = match python(daemon.folder.path(), "varlink") {
        Ok(site) => site,
        Err(why) => {
            println!("skipped: a_client_that_others_wrote_works: no varlink for Python: {why}");
            return;
        }
    };
    let mut command = Command::new("timeout");
    command
        .args(["60", "python3", "-c", SCRIPT])
        .arg(daemon.socket());
    let output = command.env("PYTHONPATH", site).output().expect("python3");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "done\n");
}
