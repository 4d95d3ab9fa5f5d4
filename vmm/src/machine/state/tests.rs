use std::os::unix::fs::PermissionsExt as _;

use pmu_virt::{Caller, ClockBackend, Grant, Layer, MsrIndex, OwnerId, ReadOutcome};

use super::*;

const SELECT: MsrIndex = MsrIndex(0xc001_0200);

fn pmu(spec: &str) -> (VcpuPmu, CorePmu) {
    let model = PmuModel::parse(spec).expect(spec);
    let mut pmu = VcpuPmu::detached(OwnerId::default(), model, Grant::everything());
    let mut core = CorePmu::new(Box::new(ClockBackend::new()));
    pmu.attach(&mut core);
    (pmu, core)
}

fn saved((pmu, core): &mut (VcpuPmu, CorePmu)) -> PmuState {
    pmu.settle(Some(core)).expect("its own core");
    pmu.save().expect("settled")
}

fn states(specs: &[&str]) -> Vec<(VcpuId, PmuState)> {
    let state = |spec: &&str| saved(&mut pmu(spec));
    (0..).map(VcpuId).zip(specs.iter().map(state)).collect()
}

fn in_folder(test: impl FnOnce(&Path)) {
    let folder = tempfile::tempdir().expect("a folder");
    test(&folder.path().join("state.json"));
    let left = fs::read_dir(folder.path()).expect("a folder").flatten();
    let others: Vec<_> = left
        .map(|entry| entry.file_name())
        .filter(|name| name != "state.json")
        .collect();
    assert!(others.is_empty(), "left behind: {others:?}");
}

#[test]
fn what_is_written_is_restored() {
    in_folder(|path| {
        let mut saved = states(&["amd-core", "amd-core"]);
        let mut first = pmu("amd-core");
        let (pmu_of_1, core) = &mut first;
        pmu_of_1.wrmsr(core, SELECT, 0x53_0076, Caller::legacy(Layer::GuestKernel));
        saved[1].1 = self::saved(&mut first);
        saved.reverse();
        fs::write(path, "of before").expect("a file");
        write(path, 2, saved).expect("a folder that can be written");

        let read = SavedMachine::read(path, 2).expect("its own file");
        let mut second = pmu("amd-core");
        let (pmu_of_2, core) = &mut second;
        let restored = read.restore(VcpuId(1), pmu_of_2, Some(core));
        restored.expect("its own state");
        assert_eq!(self::saved(&mut second), self::saved(&mut first));
    });
}

/// A file that Umpire 0.1.0 wrote before there were versions 3 to 5 of Intel's PMU.
const OF_BEFORE: &str = include_str!("intel-v2.json");

#[test]
fn a_file_of_the_umpire_before_is_read() {
    in_folder(|path| {
        fs::write(path, OF_BEFORE).expect("a file");
        let read = SavedMachine::read(path, 1).expect("a file of before");
        let mut here = pmu("intel-v2,width=40,full-width=off");
        let (vcpu, core) = &mut here;
        let restored = read.restore(VcpuId(0), vcpu, Some(core));
        restored.expect("a state of before");
        for (msr, value) in [
            (0x186, 0x53_013c),
            (0xc1, 0x54),
            (0x38e, 1),
            (0x38f, 0x4_0000_000f),
            (0x38d, 0xb00),
            (0x30b, 0x64),
        ] {
            let kernel = Caller::legacy(Layer::GuestKernel);
            let read = vcpu.rdmsr(core, MsrIndex(msr), kernel).outcome;
            assert_eq!(read, ReadOutcome::Value(value), "{msr:#x}");
        }
        // And written as it was.
        let states = vec![(VcpuId(0), saved(&mut here))];
        write(path, 1, states).expect("a folder that can be written");
        assert_eq!(fs::read_to_string(path).expect("a file"), OF_BEFORE);
    });
}

#[test]
fn a_state_that_is_missing_leaves_the_file_of_before() {
    in_folder(|path| {
        fs::write(path, "of before").expect("a file");
        let error = write(path, 2, states(&["amd-core"])).expect_err("vCPU 1 is missing");
        assert!(error.to_string().contains("vCPU 1 did not stop"), "{error}");
        assert_eq!(fs::read_to_string(path).expect("a file"), "of before");
    });
}

/// `change` damages the file of one `amd-core` vCPU.
#[track_caller]
fn refused(change: impl FnOnce(&mut serde_json::Value), cpus: u8, expected: &str) {
    let change = |text: String| {
        let mut value = serde_json::from_str(&text).expect("JSON");
        change(&mut value);
        value.to_string()
    };
    refused_text(change, cpus, expected);
}

#[track_caller]
fn refused_text(change: impl FnOnce(String) -> String, cpus: u8, expected: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("state.json");
    write(&path, 1, states(&["amd-core"])).expect("a folder that can be written");
    let text = fs::read_to_string(&path).expect("a file");
    fs::write(&path, change(text)).expect("a file");
    let restored = SavedMachine::read(&path, cpus)
        .and_then(|saved| saved.restore(VcpuId(0), &mut pmu("amd-core").0, None));
    let error = restored.expect_err("a bad file").to_string();
    assert_eq!(error.lines().count(), 1);
    let said = error.replace(&path.display().to_string(), "FILE");
    assert_eq!(said, format!("--restore: {expected}"));
}

#[test]
fn foreign_and_newer_files_are_refused() {
    let foreign =
        |why| format!("FILE is no PMU state ({why}); give a file that --save-on-exit wrote");
    refused_text(
        |_| "[package]".to_owned(),
        1,
        &foreign("expected value at line 1 column 2"),
    );
    refused_text(
        |_| "{}".to_owned(),
        1,
        &foreign("it does not say that it is one"),
    );
    refused_text(
        |_| String::new(),
        1,
        &foreign("EOF while parsing a value at line 1 column 0"),
    );
    refused(
        |file| {
            file["version"] = 2.into();
            file["umpire"] = "9.0\u{1b}[2J".into();
            file["new-key"] = 1.into();
        },
        1,
        "FILE is in version 2 of the format, written by Umpire 9.0\\u{1b}[2J; this one reads \
         version 1 only, so restore it with that Umpire",
    );
}

#[test]
fn another_machine_is_told_what_to_do() {
    refused(
        |_| (),
        3,
        "FILE holds 1 vCPUs, this guest has 3; add --cpus 1",
    );
    let here = "amd-core,counters=6,fixed=0,width=48,fixed-width=0,full-width=off";
    for (saved, advice) in [
        ("amd-k7", "; add --pmu amd-k7"),
        ("intel-v2", "; add --cpu-vendor intel --pmu intel-v2"),
        ("amd-core2", "; this Umpire does not know that model"),
    ] {
        refused(
            |file| file["vcpus"][0]["pmu"]["model"] = saved.into(),
            1,
            &format!(
                "FILE, vCPU 0: it was saved from PMU model {saved}, this one is {here}{advice}"
            ),
        );
    }
}

#[test]
fn damaged_files_are_refused() {
    refused_text(
        |text| text.replace("\"umpire\"", "\"umpires\""),
        1,
        "FILE is damaged: unknown field `umpires`, expected one of `format`, `version`, `umpire`, \
         `vcpus` at line 4 column 11",
    );
    refused(
        |file| file["vcpus"][0]["vcpu"] = 1.into(),
        1,
        "FILE is damaged: its vCPUs are not numbered from 0",
    );
    refused(
        |file| file["vcpus"][0]["pmu"]["selects"][0] = "0x8000000000000000".into(),
        1,
        "FILE, vCPU 0: select 0 is 0x8000000000000000, of which the model has no bits \
         0x8000000000000000",
    );
}

#[test]
fn a_path_that_cannot_be_written_is_found_early() {
    fn check(path: &Path, expected: Result<(), &str>) {
        let found = probe(path).map_err(|error| error.to_string());
        assert_eq!(found, expected.map_err(str::to_owned), "{}", path.display());
    }
    in_folder(|path| {
        check(path, Ok(()));
        check(&path.join("more"), Err("there is no such folder"));
        check(path.parent().expect("a folder"), Err("it is not a file"));
        check(Path::new("/dev/null"), Err("it is not a file"));
        check(
            Path::new("/proc/state.json"),
            Err("there is no such folder"),
        );
        fs::write(path, "x").expect("a file");
        let read_only = fs::Permissions::from_mode(0o400);
        fs::set_permissions(path, read_only).expect("own file");
        // It is replaced, not written to.
        check(path, Ok(()));
    });
}
