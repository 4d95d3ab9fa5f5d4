//! The PMU state across runs, and the accounting page that CPUID announces.

use std::path::Path;

use arbiter::abi;
use guest_tests::kernel::{Kernel, Protocol, Routines, exit, print, send_signal, spin_forever};
use guest_tests::umpire::{on_emu, skipped_without_kvm};
use iced_x86::IcedError;
use iced_x86::code_asm::{CodeAssembler, CodeLabel, dword_ptr, eax, ebx, ecx, edi, edx, esp};
use pmu_virt::{PmuModel, accounting};
use serde_json::Value;
use tempfile::TempDir;

use super::{run, run_command};

type Written = Result<(), IcedError>;

const SELECT0: u32 = 0xc001_0200;
const COUNTER0: u32 = 0xc001_0201;
const GLOBAL_STATUS: u32 = 0xc000_0300;
const GLOBAL_CONTROL: u32 = 0xc000_0301;
/// Core cycles at every CPL, with INT.
const CYCLES_INT: u32 = 0x53_0076;
const PMU: [&str; 4] = ["--cpu-vendor", "amd", "--pmu", "amd-perfmonv2"];

fn kernel(body: impl FnOnce(&mut CodeAssembler, &Routines) -> Written) -> Kernel {
    Kernel::new(Protocol::Multiboot, body).expect("a kernel")
}

fn write(a: &mut CodeAssembler, msr: u32, value: u64) -> Written {
    let half = |value: u64| u32::try_from(value & 0xffff_ffff).unwrap_or(0);
    a.mov(ecx, msr)?;
    a.mov(eax, half(value))?;
    a.mov(edx, half(value >> 32))?;
    a.wrmsr()
}

/// Counts past a wrap on counter 0, then stops everything and takes a snapshot.
fn count(a: &mut CodeAssembler) -> Written {
    write(a, GLOBAL_CONTROL, 0)?;
    write(a, COUNTER0, 0xffff_ffff_fff0)?;
    write(a, COUNTER0 + 2, 0x1234_5678_9abc)?;
    write(a, SELECT0, CYCLES_INT.into())?;
    write(a, SELECT0 + 4, 0x12_00c0)?;
    write(a, GLOBAL_CONTROL, 1)?;
    let mut again = a.create_label();
    a.set_label(&mut again)?;
    a.mov(ecx, GLOBAL_STATUS)?;
    a.rdmsr()?;
    a.test(eax, 1)?;
    a.je(again)?;
    write(a, GLOBAL_CONTROL, 0)?;
    a.mov(ecx, accounting::MSR_BASE)?;
    a.rdmsr()
}

/// Prints every register of the PMU, and the page's words of two counters.
fn dump(a: &mut CodeAssembler, routines: &Routines) -> Written {
    let model = PmuModel::parse("amd-perfmonv2").expect("a model");
    let page = accounting::MSR_BASE;
    let words = [(page + 1, page + 1), (page + 0x100, page + 0x107)];
    let ranges = model.msr_ranges().into_iter().chain(words);
    for msr in ranges.flat_map(|(first, last)| first..=last) {
        a.mov(ecx, msr)?;
        a.rdmsr()?;
        a.mov(ebx, eax)?;
        a.mov(eax, edx)?;
        a.call(routines.hex)?;
        a.mov(eax, ebx)?;
        a.call(routines.hex)?;
        print(a, "\n")?;
    }
    Ok(())
}

fn saved(file: &Path) -> Value {
    let text = std::fs::read_to_string(file).expect("the state's file");
    serde_json::from_str(&text).expect("JSON")
}

/// Nothing but the state itself may be left in its folder.
fn only_file(folder: &TempDir) -> bool {
    let entries = std::fs::read_dir(folder.path()).expect("a folder");
    entries.count() == 1
}

#[test]
fn a_restored_guest_finds_its_registers_bit_for_bit() {
    if skipped_without_kvm("a_restored_guest") {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("pmu.json");
    let path = file.to_str().expect("a plain path");
    let first = kernel(|a, routines| {
        count(a)?;
        dump(a, routines)?;
        exit(a, 0)
    });
    let second = kernel(|a, routines| {
        dump(a, routines)?;
        exit(a, 0)
    });
    let flags = |more: &[&'static str]| [&PMU, more].concat();
    let with = |kernel: &Kernel, option: &[&str]| {
        let output = run(kernel, &[&flags(&[]), option].concat());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{told}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let before = with(&first, &["--save-on-exit", path]);
    assert!(only_file(&folder));
    let once = saved(&file);
    assert_eq!(once["vcpus"][0]["pmu"]["selects"][0], "0x530076");
    // Saved again by the second guest, which changed nothing.
    let after = with(&second, &["--restore", path, "--save-on-exit", path]);
    assert_eq!(after, before);
    assert_eq!(saved(&file), once);
    // And it makes a difference.
    assert_ne!(with(&second, &[]), before);
}

/// The counter overflowed before the state was saved; the record is of the call behind it, in
/// the next run.
#[test]
fn an_armed_pebs_counter_makes_its_record_after_a_restore() {
    if skipped_without_kvm("an_armed_pebs_counter") {
        return;
    }
    const PEBS: [&str; 4] = ["--cpu-vendor", "intel", "--pmu", "intel-v4,pebs=exact"];
    const AREA: u32 = 0x20_0000;
    const INDEX: u32 = AREA + 0x28;
    const BUFFER: u32 = 0x20_1000;
    const GLOBAL: u32 = 0x38f;
    /// Near calls at CPL 0, with the groups of the data configuration.
    const CALLS: u64 = 0x4_0042_02c4;
    let once = |a: &mut CodeAssembler, function: CodeLabel| {
        write(a, GLOBAL, 1)?;
        a.call(function)?;
        write(a, GLOBAL, 0)
    };
    // Registers, then the index, and how far from the call the record is.
    let dump = |a: &mut CodeAssembler, routines: &Routines| {
        for msr in [0x3f1, 0x3f2, 0x600, 0x186, 0xc1, 0x38e] {
            a.mov(ecx, msr)?;
            a.rdmsr()?;
            a.call(routines.hex)?;
            print(a, " ")?;
        }
        Ok(())
    };
    // It leaves where it was called from in EBX.
    let leave = |a: &mut CodeAssembler, function: &mut CodeLabel| {
        exit(a, 0)?;
        a.set_label(function)?;
        a.mov(ebx, dword_ptr(esp))?;
        a.ret()
    };
    let first = kernel(|a, routines| {
        let mut function = a.create_label();
        for (msr, value) in [
            (GLOBAL, 0),
            (0x600, AREA.into()),
            (0x3f1, 1),
            (0x3f2, 1),
            (0x186, CALLS),
            (0xc1, 0xffff_ffff),
        ] {
            write(a, msr, value)?;
        }
        once(a, function)?;
        dump(a, routines)?;
        leave(a, &mut function)
    });
    let second = kernel(|a, routines| {
        let mut function = a.create_label();
        dump(a, routines)?;
        let words = [BUFFER, BUFFER, BUFFER + 0x1000, BUFFER + 0x1000];
        for (word, at) in words.into_iter().zip((AREA + 0x20..).step_by(8)) {
            a.mov(dword_ptr(at), word)?;
        }
        once(a, function)?;
        a.mov(eax, dword_ptr(INDEX))?;
        a.call(routines.hex)?;
        print(a, " ")?;
        a.mov(eax, ebx)?;
        a.sub(eax, dword_ptr(BUFFER + 8))?;
        a.call(routines.hex)?;
        leave(a, &mut function)
    });
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("pmu.json");
    let path = file.to_str().expect("a plain path");
    let counters = ["--counters", if on_emu() { "emu" } else { "step" }];
    let with = |kernel: &Kernel, options: &[&str]| {
        let output = run(kernel, &[&PEBS[..], &counters, options].concat());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{told}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let before = with(&first, &["--save-on-exit", path]);
    assert_eq!(
        before,
        "00000001 00000001 00200000 004202c4 00000000 00000000 "
    );
    let expected = serde_json::json!({
        "enable": "0x1",
        "data-config": "0x1",
        "ds-area": "0x200000",
        "armed": ["PMC0"],
    });
    assert_eq!(saved(&file)["vcpus"][0]["pmu"]["pebs"], expected);
    // A record with memory, of an instruction of five bytes.
    let after = with(&second, &["--restore", path]);
    assert_eq!(after, format!("{before}00201040 00000005"));
}

#[test]
fn the_state_is_kept_however_the_run_ends() {
    if skipped_without_kvm("the_state_is_kept") {
        return;
    }
    let endless = kernel(|a, _| {
        write(a, COUNTER0, 5)?;
        print(a, "up")?;
        spin_forever(a)
    });
    let fault = kernel(|a, _| {
        write(a, COUNTER0, 5)?;
        a.ud2()
    });
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("pmu.json");
    let path = file.to_str().expect("a plain path");
    let check = |kernel: &Kernel, flags: &[&str], signal: Option<i32>, status: i32| {
        let _ = std::fs::remove_file(&file);
        let flags = [&PMU, flags, &["--save-on-exit", path]].concat();
        let mut child = run_command(kernel, &flags)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("umpire can be started");
        if let Some(signal) = signal {
            let mut up = [0; 2];
            let mut stdout = child.stdout.take().expect("a pipe");
            std::io::Read::read_exact(&mut stdout, &mut up).expect("the guest is up");
            send_signal(child.id(), signal).expect("the process is there");
        }
        assert_eq!(
            child.wait().expect("an end").code(),
            Some(status),
            "{flags:?}"
        );
        let state = saved(&file);
        let vcpus = state["vcpus"].as_array().expect("a list");
        assert_eq!(vcpus[0]["pmu"]["counters"][0]["value"], "0x5");
        assert!(only_file(&folder));
        vcpus.len()
    };
    assert_eq!(check(&endless, &["--timeout", "0.3"], None, 124), 1);
    assert_eq!(check(&endless, &[], Some(libc::SIGTERM), 130), 1);
    assert_eq!(check(&fault, &[], None, 6), 1);
    // The second processor never left its reset state.
    assert_eq!(
        check(&endless, &["--cpus", "2", "--timeout", "0.3"], None, 124),
        2
    );
    // On the processor in software no vCPUs share a core.
    if !on_emu() {
        let shared = ["--cpus", "3", "--cores", "2", "--timeout", "0.3"];
        assert_eq!(check(&endless, &shared, None, 124), 3);
    }
}

#[test]
fn a_pmi_that_the_floor_holds_back_is_pending_in_the_state() {
    if skipped_without_kvm("a_pmi_that_the_floor") {
        return;
    }
    const SVR: u32 = 0xfee0_00f0;
    const LVTPC: u32 = 0xfee0_0340;
    // A fixed interrupt, which waits in the APIC as interrupts are off.
    let kernel = kernel(|a, _| {
        for (register, value) in [(SVR, 0x1ff), (LVTPC, 0x40)] {
            a.mov(edi, register)?;
            a.mov(eax, value)?;
            a.mov(dword_ptr(edi), eax)?;
        }
        count(a)?;
        write(a, GLOBAL_STATUS + 2, 1)?;
        count(a)?;
        exit(a, 0)
    });
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("pmu.json");
    let path = file.to_str().expect("a plain path");
    let flags = ["--pmi-floor", "1000000", "--save-on-exit", path];
    let output = run(&kernel, &[&PMU[..], &flags].concat());
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    let pmu = &saved(&file)["vcpus"][0]["pmu"];
    assert_eq!(pmu["pending-pmi"], serde_json::json!(["PMC0"]));
}

#[test]
fn states_that_do_not_fit_are_refused_before_the_guest_starts() {
    if skipped_without_kvm("states_that_do_not_fit") {
        return;
    }
    let kernel = kernel(|a, _| {
        print(a, "started")?;
        exit(a, 0)
    });
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| {
        let path = folder.path().join(name);
        path.to_str().expect("a plain path").to_owned()
    };
    let output = run(
        &kernel,
        &[&PMU[..], &["--save-on-exit", &file("good")]].concat(),
    );
    assert_eq!(output.status.code(), Some(1));
    let text = std::fs::read_to_string(file("good")).expect("a file");
    std::fs::write(
        file("newer"),
        text.replace("\"version\": 1", "\"version\": 7"),
    )
    .expect("a file");
    std::fs::write(file("foreign"), "{\"vcpus\": []}").expect("a file");
    std::fs::write(file("cut"), &text[..text.len() / 2]).expect("a file");
    let check = |flags: &[&str], expected: &[&str]| {
        let output = run(&kernel, flags);
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flags:?}: {told}");
        assert_eq!(output.stdout, b"", "{flags:?}");
        assert_eq!(told.lines().count(), 1, "{told}");
        for part in expected {
            assert!(told.contains(part), "{flags:?}: no {part:?} in: {told}");
        }
    };
    let restore = |name: &str, expected: &[&str]| {
        check(&[&PMU[..], &["--restore", &file(name)]].concat(), expected);
    };
    restore("newer", &["version 7", "restore it with that Umpire"]);
    restore("foreign", &["is no PMU state", "--save-on-exit"]);
    restore("cut", &["is no PMU state", "EOF"]);
    restore("absent", &["--restore", "there is no such file"]);
    let good = file("good");
    check(
        &[&PMU[..], &["--cpus", "2", "--restore", &good]].concat(),
        &["holds 1 vCPUs, this guest has 2; add --cpus 1"],
    );
    check(
        &["--cpu-vendor", "amd", "--pmu", "amd-k7", "--restore", &good],
        &[
            "vCPU 0: it was saved from",
            "add --pmu amd-perfmonv2,counters=6",
        ],
    );
    check(
        &["--pmu", "none", "--restore", &good],
        &["--restore", "--pmu none"],
    );
    let nowhere = format!("{}/pmu.json", file("absent"));
    check(
        &["--save-on-exit", &nowhere],
        &["--save-on-exit", "there is no such folder"],
    );
    check(&["--save-on-exit", "/dev/null"], &["it is not a file"]);
}

/// Prints the four registers of CPUID leaves, one line each.
fn print_cpuid(leaves: &[u32]) -> Kernel {
    kernel(|a, routines| {
        for &leaf in leaves {
            a.mov(eax, leaf)?;
            a.cpuid()?;
            for register in [edx, ecx, ebx, eax] {
                a.push(register)?;
            }
            for _ in 0..4 {
                a.pop(eax)?;
                a.call(routines.hex)?;
                print(a, " ")?;
            }
            print(a, "\n")?;
        }
        exit(a, 0)
    })
}

#[test]
fn cpuid_announces_the_accounting_page_beside_kvms_own_leaves() {
    if skipped_without_kvm("cpuid_announces") {
        return;
    }
    const KVM_BASE: u32 = 0x4000_0000;
    let leaves = [KVM_BASE, accounting::CPUID_BASE, accounting::CPUID_FEATURES];
    let kernel = print_cpuid(&leaves);
    let told = |flags: &[&str]| {
        let output = run(&kernel, flags);
        assert_eq!(output.status.code(), Some(1), "{flags:?}");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let line = |registers: [u32; 4]| -> String {
        registers
            .iter()
            .map(|word| format!("{word:08x} "))
            .collect()
    };
    let with = told(&PMU);
    // "Umpi", "reUm", "pire".
    let head = |highest| line([highest, 0x6970_6d55, 0x6d55_6572, 0x6572_6970]);
    let page = |features| line([1, accounting::MSR_BASE, features, 6]);
    assert_eq!(with[1], head(abi::CPUID_LEAF));
    assert_eq!(with[2], page(1 | abi::CPUID_FEATURES_ECX_PCR));
    let off = told(&[&PMU[..], &["--pcr", "off"]].concat());
    assert_eq!(off[1], head(accounting::CPUID_FEATURES));
    assert_eq!(off[2], page(1));
    let kvm = (0x4b4d_564b, 0x564b_4d56, 0x4d);
    let words = format!("{:08x} {:08x} {:08x} ", kvm.0, kvm.1, kvm.2);
    assert!(with[0].ends_with(&words), "{with:?}");
    assert!(with[0].starts_with("400000"), "its own limit: {with:?}");

    // Intel's processors answer leaves that are not there as their last one.
    let without = told(&["--cpu-vendor", "amd", "--pmu", "none"]);
    assert_eq!(without[0], with[0]);
    for line in &without[1..] {
        assert_eq!(line, "00000000 00000000 00000000 00000000 ");
    }
}
