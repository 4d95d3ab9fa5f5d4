//! VMs that nobody gave a socket: tools find them by name, by process id, or because there
//! is one only.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use guest_tests::kernel::Kernel;
use guest_tests::umpire::{self, skipped_without_kvm};

/// A VM that ends with the test.
struct Named(Child);

impl Named {
    fn run(kernel: &Kernel, runtime: &Path, flags: &[&str]) -> Self {
        let child = Command::new(umpire::path())
            .env("XDG_RUNTIME_DIR", runtime)
            .args(["run", "--memory", "32", "--counters", "clock"])
            .arg("--kernel")
            .arg(kernel.path())
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("umpire can be started");
        Self(child)
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Status, standard output, standard error.
fn umpire(runtime: &Path, words: &[&str]) -> (i32, String, String) {
    let output = Command::new(umpire::path())
        .args(words)
        .env("XDG_RUNTIME_DIR", runtime)
        .env_remove("UMPIRE_PERFMON")
        .output()
        .expect("umpire can be started");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let status = output.status.code().unwrap_or(-1);
    (status, text(&output.stdout), text(&output.stderr))
}

fn await_listed(runtime: &Path, name: &str) {
    let began = Instant::now();
    while !umpire(runtime, &["ls"])
        .1
        .contains(&format!("/{name}.sock"))
    {
        assert!(began.elapsed() < Duration::from_secs(20), "{name} is there");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn by_name_by_number_or_the_only_one() {
    if skipped_without_kvm("by_name_by_number") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let runtime = folder.path();
    let kernel = guest_tests::vm::spinning();
    let web1 = Named::run(&kernel, runtime, &["--name", "web1"]);
    await_listed(runtime, "web1");
    let stat = ["stat", "-e", "vm-exits", "--for", "20ms"];
    let with = |more: &[&'static str]| [&stat[..], more].concat();
    // The only one needs no word.
    let (status, _, told) = umpire(runtime, &stat);
    assert_eq!(status, 0, "{told}");
    let unnamed = Named::run(&kernel, runtime, &[]);
    let pid = unnamed.0.id().to_string();
    await_listed(runtime, &pid);
    let (status, _, told) = umpire(runtime, &stat);
    assert_eq!((status, told.lines().count()), (2, 1), "{told}");
    assert!(
        told.contains("which VM? running are ") && told.contains("web1 ("),
        "{told}"
    );
    for vm in ["web1", &web1.0.id().to_string(), &pid] {
        let (status, _, told) = umpire(runtime, &[&stat[..], &["--vm", vm]].concat());
        assert_eq!(status, 0, "{vm}: {told}");
    }
    let (status, _, told) = umpire(runtime, &with(&["--vm", "web2"]));
    assert_eq!(status, 2, "{told}");
    assert!(told.contains("there is no VM web2; running are "), "{told}");
    let (status, listed, _) = umpire(runtime, &["ls", "--vm", "web1"]);
    assert!(status == 0 && listed.contains("web1.sock") && !listed.contains(&pid));
    // The name is taken; a VM that was killed leaves it to the next.
    let mut second = Named::run(&kernel, runtime, &["--name", "web1"]);
    assert_eq!(second.0.wait().expect("a status").code(), Some(2));
    drop(unnamed);
    let (status, _, told) = umpire(runtime, &stat);
    assert_eq!(status, 0, "{told}");
    drop(web1);
    let _again = Named::run(&kernel, runtime, &["--name", "web1"]);
    await_listed(runtime, "web1");
}

#[test]
fn nobody_is_served_where_none_is_wanted() {
    if skipped_without_kvm("nobody_is_served") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let kernel = guest_tests::vm::spinning();
    let flags = ["--control", "none", "--timeout", "1"];
    let mut vm = Named::run(&kernel, folder.path(), &flags);
    assert_eq!(vm.0.wait().expect("a status").code(), Some(124));
    assert!(!folder.path().join("umpire").exists());
}
