//! What a live guest leads to: rows of tools, files, and their shapes.

use guest_tests::umpire::skipped_without_kvm;
use guest_tests::vm::Vm;

use super::schemas::valid;
use super::shape::{shape, shapes_of_lines, without_numbers};
use super::{check, program, run};

pub(crate) const RATES: &str = "counters = 12\n\
    [event.cycles]\nrate = 2000\n\
    [event.instructions]\nrate = 500\n\
    [event.branches]\nrate = 100\n";

/// Words of rows that a tool's reader looks for.
const WORDS: [&str; 8] = [
    "event",
    "unit",
    "metric-unit",
    "provenance",
    "decision",
    "layer",
    "backend",
    "kind",
];

#[test]
fn what_a_live_guest_leads_to_has_its_shape() {
    if skipped_without_kvm("what_a_live_guest_leads_to_has_its_shape") {
        return;
    }
    let flags = [
        &["--audit", "audit.json", "--save-on-exit", "state.json"][..],
        &["--hypervisor-counters", "1"],
    ];
    let mut vm = Vm::boot(&program(), RATES, &flags.concat());
    let events = "cycles,{instructions,branches},vm-exits,branch-misses";
    let stat = |more: &[&str]| {
        let words = [&["stat", "-e", events], more, &["--for", "200ms"]].concat();
        let said = vm.printed(&words);
        if more.contains(&"-j") {
            valid("stat", &said);
        }
        said
    };
    for more in [
        &["-j", "--metric-only"][..],
        &["-j", "-I", "100"],
        &["-j", "-a"],
    ] {
        let _ = stat(more);
    }
    check("stat.shape", &shapes_of_lines(&stat(&["-j"]), &WORDS));
    check(
        "stat-per-vcpu.shape",
        &shapes_of_lines(&stat(&["-j", "--per-vcpu"]), &WORDS),
    );
    check(
        "stat-repeat.shape",
        &shapes_of_lines(&stat(&["-j", "-r", "2"]), &WORDS),
    );
    check("stat.csv", &without_numbers(&stat(&["-x", ";"])));
    check(
        "stat-repeat.csv",
        &without_numbers(&stat(&["-x", ",", "-r", "2", "-a"])),
    );
    for (name, tool) in [
        ("ls.shape", "ls"),
        ("pcr.shape", "pcr"),
        ("budget.shape", "budget"),
    ] {
        let said = vm.printed(&[tool, "-j"]);
        valid(tool, &said);
        check(name, &shapes_of_lines(&said, &WORDS));
    }
    let often = ["record", "-c", "1000000", "-e", "cycles,branches"];
    let _ = vm.printed(&[&often[..], &["-o", "a.data", "--for", "300ms"]].concat());
    let script = vm.printed(&["script", "-i", "a.data", "-j"]);
    valid("script", &script);
    let fields = ["-F", "vm,vcpu,core,time,period,event,set,ring,cr3,ip,sym"];
    let all = [&["script", "-i", "a.data", "-j"][..], &fields].concat();
    valid("script", &vm.printed(&all));
    valid("report", &vm.printed(&["report", "-i", "a.data", "-j"]));
    check("script.shape", &shapes_of_lines(&script, &WORDS));
    vm.stop();
    let read = |name| std::fs::read_to_string(vm.path(name)).expect("a file of the guest");
    check("audit.shape", &shapes_of_lines(&read("audit.json"), &WORDS));
    // What the file has is enough to play the run again: the same answers.
    let replayed = run(&[
        "arbitrate",
        "--scheme",
        "independent",
        "--replay",
        &vm.path("audit.json").display().to_string(),
    ]);
    let replayed = String::from_utf8_lossy(&replayed.stdout).into_owned();
    assert!(
        replayed.contains("independent, as recorded") && replayed.contains(" 0 unlike the run"),
        "{replayed}"
    );
    let state = serde_json::from_str(&read("state.json")).expect("JSON");
    check("state.shape", &format!("{}\n", shape(&state, &[])));
}
