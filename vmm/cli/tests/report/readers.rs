//! Lines of `umpire script` as programs of others read them.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use super::Place;

/// What this test knows the inside of.
const SPEEDSCOPE: &str = "speedscope@1.25.0";

/// A profile with callers, whose tasks have no name that is escaped.
const TASKS: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../guest-tests/golden/tasks.data"
);

/// The end of a command, or why it has none.
fn ended(command: &mut Command) -> Result<Output, String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .output()
        .map_err(|error| format!("{name}: {error}"))?;
    if output.status.success() {
        return Ok(output);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    let last = errors.lines().last().unwrap_or("it failed");
    Err(format!("{name}: {last}"))
}

/// An unpacked package of npm's.
fn package(folder: &Path, name: &str) -> Result<PathBuf, String> {
    ended(Command::new("node").arg("--version"))?;
    let limit = ["120", "npm", "pack", "--silent", name];
    let output = ended(Command::new("timeout").args(limit).current_dir(folder))?;
    let archive = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let words = ["-xzf", &archive];
    ended(Command::new("tar").args(words).current_dir(folder))?;
    Ok(folder.join("package"))
}

/// Threads and their stacks, as speedscope names them.
type Threads = BTreeSet<(String, Vec<String>)>;

/// What it should take from the samples of a script for programs.
fn expected(script: &str) -> Threads {
    let frame = |frame: &Value| match (&frame["ip"], &frame["symbol"]) {
        (Value::Null, _) => None,
        (_, Value::String(symbol)) => Some(symbol.clone()),
        _ => Some(format!("??? ({})", frame["dso"].as_str().unwrap())),
    };
    let lines = script
        .lines()
        .map(|line| -> Value { serde_json::from_str(line).unwrap() });
    let samples = lines.filter(|line| line["kind"] == "sample");
    let stack = |line: Value| {
        let task = match &line["comm"] {
            Value::String(comm) => {
                let number = |id: &str| match line[id].as_u64().unwrap() {
                    0 => String::new(),
                    number => format!(" {id}: {number}"),
                };
                format!("{comm}{}{}", number("pid"), number("tid"))
            }
            _ => "[unknown]".to_owned(),
        };
        let own = || vec![line.clone()];
        let chain = line["callchain"].as_array().cloned().unwrap_or_else(own);
        (task, chain.iter().filter_map(frame).collect())
    };
    samples.map(stack).collect()
}

#[test]
fn speedscope_reads_a_script() {
    let name = "speedscope_reads_a_script";
    let place = Place::new(&fs::read(TASKS).unwrap());
    let package = match package(place.0.path(), SPEEDSCOPE) {
        Ok(package) => package,
        Err(why) => {
            println!("skipped: {name}: no {SPEEDSCOPE}: {why}");
            return;
        }
    };
    let json = place.output("script -i @/umpire.data -j");
    let reader = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/report/speedscope.js");
    for fields in ["", " -F +vm,+vcpu,+ring,+cr3"] {
        let text = place.output(&format!("script -i @/umpire.data{fields}"));
        let path = place.path("text");
        fs::write(&path, &text).unwrap();
        let mut node = Command::new("timeout");
        let node = node.args(["60", "node", reader]).arg(&package);
        let output = ended(node.stdin(Stdio::from(fs::File::open(&path).unwrap())));
        let output = String::from_utf8(output.unwrap().stdout).unwrap();
        let mut found = Threads::new();
        for line in output.lines() {
            let (thread, stacks): (String, Vec<Vec<String>>) = serde_json::from_str(line).unwrap();
            found.extend(stacks.into_iter().map(|stack| (thread.clone(), stack)));
        }
        assert_eq!(found, expected(&json), "{text}");
    }
}
