//! The workflow of `docs/examples/count.yml`, as far as a machine without a runner can follow it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

use guest_tests::umpire;
use yaml_rust2::{Yaml, YamlLoader};

const WORKFLOW: &str = include_str!("../../../docs/examples/count.yml");

/// What the workflow's step runs, by its name.
fn step<'a>(workflow: &'a Yaml, name: &str) -> &'a str {
    let steps = workflow["jobs"]["count"]["steps"].as_vec().expect("steps");
    let step = steps
        .iter()
        .find(|step| step["name"].as_str() == Some(name));
    let step = step.unwrap_or_else(|| panic!("no step {name}"));
    step["run"].as_str().expect("a command")
}

/// Runs it as a runner's shell does, in `folder`, where `umpire` is on the PATH.
fn run(command: &str, folder: &Path) -> Output {
    let path = std::env::var("PATH").unwrap_or_default();
    let tools = umpire::path();
    let tools = tools.parent().expect("a folder").display();
    Command::new("bash")
        .args(["-e", "-o", "pipefail", "-c", command])
        .current_dir(folder)
        .env("PATH", format!("{tools}:{path}"))
        .env("GITHUB_STEP_SUMMARY", folder.join("summary.md"))
        .output()
        .expect("a shell")
}

#[test]
fn the_workflow_of_the_guide_finds_what_grew() {
    let workflow = YamlLoader::load_from_str(WORKFLOW).expect("YAML");
    let [workflow] = &workflow[..] else {
        panic!("one workflow");
    };
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    for folder in ["bench", "target/release"] {
        fs::create_dir_all(here.join(folder)).expect("room");
    }
    let bench = here.join("target/release/bench");
    let set = |program: &str| {
        // The link is made anew.
        let _ = fs::remove_file(&bench);
        symlink(program, &bench).expect("a link");
    };
    let fetched = run(step(workflow, "Kernel"), here);
    assert!(
        fetched.status.success(),
        "{}",
        String::from_utf8_lossy(&fetched.stderr)
    );
    set("/usr/bin/true");
    // The words of the workflow's own comment.
    let save = WORKFLOW
        .split('`')
        .nth(1)
        .expect("a command between backticks");
    let saved = run(save, here);
    assert!(
        saved.status.success(),
        "{}",
        String::from_utf8_lossy(&saved.stderr)
    );
    let count = step(workflow, "Count");
    let same = run(count, here);
    assert!(
        same.status.success(),
        "{}",
        String::from_utf8_lossy(&same.stderr)
    );
    set("/usr/bin/expr");
    // Of which the status is 2 without an argument: the program's, whatever the gate says.
    let failed = run(count, here);
    assert_eq!(failed.status.code(), Some(2));
    set("/usr/bin/env");
    let grown = run(count, here);
    let told = String::from_utf8_lossy(&grown.stderr).into_owned();
    assert_eq!(grown.status.code(), Some(123), "{told}");
    let text = |name: &str| fs::read_to_string(here.join(name)).expect(name);
    assert_eq!(text("status"), "gate 123\n");
    let summary = text("summary.md");
    for part in [
        "Within the threshold.",
        "**Failed**: more than 0.5 % more: instructions:u +",
    ] {
        assert!(summary.contains(part), "{summary}");
    }
    let now: serde_json::Value = serde_json::from_str(&text("now.json")).expect("JSON");
    assert_eq!(now["umpire-count"], 1);
}
