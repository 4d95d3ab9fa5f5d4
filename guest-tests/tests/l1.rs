//! The L1 machine and the Linux guest, for real: they boot, run, report and end as promised.
//!
//! The first run on a machine downloads Debian packages into the cache.

use std::time::Duration;

use guest_tests::l1::{self, End, Machine, Output, Run};
use guest_tests::linux::{self, LinuxImage};

fn shell(script: &str) -> Run {
    Run::new("sh").arg("-c").arg(script)
}

fn check(machine: &Machine, run: &Run, end: End) -> Output {
    let output = machine.output(run).expect("the machine works");
    let (out, err) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert_eq!(
        output.outcome.end, end,
        "{run:?}\n{out}\n{err}\n{}",
        output.outcome.console
    );
    output
}

#[test]
fn l1_forwards_streams_status_environment_and_files() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let (input, out) = (folder.path().join("input"), folder.path().join("out"));
    let bytes: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    std::fs::write(&input, &bytes).expect("written");
    let run = shell("cat \"$1\" >&2; printf '%s' \"$WORD\"; printf back >$UMPIRE_OUT/file; exit 7")
        .arg("sh")
        .arg(&input)
        .env("WORD", "it's $HOME")
        .out(&out);
    let output = check(&Machine::new(), &run, End::Exited(7));
    assert_eq!(output.stdout, b"it's $HOME");
    assert!(
        output.stderr == bytes,
        "{} bytes of stderr differ",
        output.stderr.len()
    );
    assert_eq!(
        std::fs::read(out.join("file")).expect("it came back"),
        b"back"
    );
    assert!(
        output
            .outcome
            .ready
            .is_some_and(|ready| ready < output.outcome.total)
    );
}

#[test]
fn l1_reports_a_signal_as_shells_do() {
    let output = check(&Machine::new(), &shell("kill -9 $$"), End::Exited(137));
    assert!(
        output.stderr.is_empty(),
        "{:?}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn l1_stops_a_command_at_the_time_out() {
    let machine = Machine::new().timeout(Duration::from_secs(30));
    let output = check(&machine, &shell("echo started; sleep 1000"), End::TimedOut);
    assert_eq!(output.stdout, b"started\n");
}

#[test]
fn l1_with_icount_has_one_processor() {
    let output = check(
        &Machine::new().icount(true),
        &Run::new("nproc"),
        End::Exited(0),
    );
    assert_eq!(output.stdout, b"1\n");
}

#[test]
fn l1_names_a_program_that_is_nowhere() {
    let error = Machine::new()
        .output(&Run::new("no-such-program"))
        .expect_err("nowhere");
    assert!(
        error
            .to_string()
            .starts_with("no-such-program: no such program"),
        "{error}"
    );
}

/// This test runs on both sides: here it starts itself in L1, there it talks to KVM.
#[test]
fn l1_has_a_working_kvm() {
    if l1::inside() {
        let kvm = kvm_ioctls::Kvm::new().expect("/dev/kvm opens");
        assert_eq!(kvm.get_api_version(), 12);
        let vcpu = kvm.create_vm().and_then(|vm| vm.create_vcpu(0));
        assert!(vcpu.is_ok(), "{vcpu:?}");
        println!("KVM answered");
        return;
    }
    let run = Run::this_test("l1::l1_has_a_working_kvm").expect("this test has a file");
    let output = check(&Machine::new(), &run, End::Exited(0));
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        stdout.contains("KVM answered") && stdout.contains("1 passed"),
        "{stdout}"
    );
}

#[test]
fn linux_guest_runs_its_script_and_powers_off() {
    let script = "uname -r\n# a remark\nperf stat -e task-clock spin -n 1000000\nfalse\nperf record -q -e cpu-clock -o /tmp/p spin 1\nperf report -i /tmp/p --stdio 2>&1\nprintf end";
    let guest = LinuxImage::fetch()
        .and_then(|image| image.with_script(script))
        .expect("an image");
    let console = guest.emulate(Duration::from_secs(120)).expect("it boots");
    let steps = linux::steps(&console);
    let status: Vec<_> = steps.iter().map(|step| step.status).collect();
    assert_eq!(
        status,
        [Some(0), Some(0), Some(1), Some(0), Some(0), Some(0)],
        "{console}"
    );
    let contains = |step: usize, text: &str| {
        assert!(
            steps[step].output.contains(text),
            "{text} is not in: {}",
            steps[step].output
        );
    };
    contains(0, "-cloud-amd64");
    contains(1, "spin: 1000000 iterations in ");
    contains(1, "msec task-clock");
    contains(4, "spin_hot");
    assert_eq!(steps[5].output, "end");
}
