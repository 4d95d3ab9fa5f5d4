//! The Debian package: its files, its units, and what is in it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use guest_tests::umpire;
use serde_json::Value;
use tempfile::TempDir;

use super::c_library::library;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A target folder with the programs and libraries of this test's profile in place of a release.
fn target() -> TempDir {
    let target = tempfile::tempdir().expect("a folder");
    let release = target.path().join("release");
    fs::create_dir(&release).expect("a folder");
    let built = [
        umpire::path(),
        library().join("libumpire_lease.so"),
        umpire::built_beside("umpire-perfmon-c").join("libumpire_perfmon.so"),
        umpire::built_beside("umpire-cpc").join("libumpire_cpc.so"),
        umpire::agent(),
    ];
    for file in built {
        let name = file.file_name().expect("a name");
        symlink(&file, release.join(name)).expect("a link");
    }
    target
}

/// Runs the script that builds the package.
fn build(target: &TempDir, options: &[&str]) {
    let mut command = Command::new("timeout");
    command
        .arg("300")
        .arg(root().join("vmm/cli/debian/build.sh"));
    command.args(options).env("UMPIRE_BUILT", "1");
    succeeded(command.env("CARGO_TARGET_DIR", target.path()));
}

/// The output of a command that succeeds.
fn succeeded(command: &mut Command) -> String {
    let output = command.output();
    let Output {
        status,
        stdout,
        stderr,
    } = output.unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let errors = String::from_utf8_lossy(&stderr);
    assert!(status.success(), "{command:?}: {errors}");
    String::from_utf8(stdout).expect("text")
}

/// What cargo-deb reads of the manifest.
fn metadata() -> Value {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["metadata", "--no-deps", "--offline"]);
    cargo.args(["--format-version", "1"]).current_dir(root());
    let all: Value = serde_json::from_str(&succeeded(&mut cargo)).expect("JSON");
    let packages = all["packages"].as_array().expect("packages");
    let umpire = packages.iter().find(|package| package["name"] == "umpire");
    umpire.expect("umpire")["metadata"]["deb"].clone()
}

/// Files that a source of the package's list names; `*` stands for the rest of a name.
fn matching(source: &Path) -> usize {
    let name = source.file_name().and_then(|name| name.to_str());
    let (begins, ends) = match name.expect("a name").split_once('*') {
        None => return usize::from(source.is_file()),
        Some(parts) => parts,
    };
    let folder = source.parent().expect("a folder");
    let entries = fs::read_dir(folder).expect("a folder");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    names
        .filter_map(|name| name.into_string().ok())
        .filter(|name| name.starts_with(begins) && name.ends_with(ends))
        .count()
}

#[test]
fn every_file_of_the_package_is_there() {
    let target = target();
    build(&target, &["--stage"]);
    let deb = metadata();
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    // Pages link to each other, so they lie as they do in the repository.
    for folder in ["guide", "reference", "internals"] {
        let to = format!("usr/share/doc/umpire/docs/{folder}/");
        let mut assets = deb["assets"].as_array().expect("assets").iter();
        assert!(
            assets.any(|asset| text(&asset[1]) == to),
            "no pages go to {to}"
        );
    }
    let mut installed = Vec::new();
    for asset in deb["assets"].as_array().expect("assets") {
        let (source, to) = (text(&asset[0]), text(&asset[1]));
        let path = match source.strip_prefix("target/") {
            Some(built) => target.path().join(built),
            None => root().join("vmm/cli").join(&source),
        };
        assert!(matching(&path) > 0, "there is no {source}");
        let name = source.rsplit('/').next().unwrap_or_default();
        installed.push(if to.ends_with('/') {
            format!("/{to}{name}")
        } else {
            format!("/{to}")
        });
    }
    for file in deb["conf-files"].as_array().expect("files") {
        assert!(installed.contains(&text(file)), "{file} is not installed");
    }
    let units = root()
        .join("vmm/cli")
        .join(text(&deb["systemd-units"]["unit-scripts"]));
    let unit = text(&deb["systemd-units"]["unit-name"]);
    for name in [
        format!("{unit}.service"),
        format!("{unit}.socket"),
        "umpire.sysusers".to_owned(),
        format!("{unit}.tmpfile"),
    ] {
        assert!(units.join(&name).is_file(), "there is no {name}");
    }
}

#[test]
fn the_package_installs_what_an_operator_needs() {
    let name = "the_package_installs_what_an_operator_needs";
    let there = Command::new("cargo").args(["deb", "--version"]).output();
    if !there.is_ok_and(|output| output.status.success()) {
        println!("skipped: {name}: cargo-deb is missing; run `cargo install cargo-deb`");
        return;
    }
    let target = target();
    let deb = target.path().join("umpire.deb");
    build(&target, &["--fast", "-o", &deb.display().to_string()]);
    let listed = succeeded(Command::new("dpkg-deb").arg("-c").arg(&deb));
    for file in [
        "./usr/bin/umpire",
        "./usr/lib/x86_64-linux-gnu/libumpire_lease.so",
        "./usr/include/umpire_lease.h",
        "./usr/lib/x86_64-linux-gnu/libumpire_perfmon.so",
        "./usr/include/perfmon.h",
        "./usr/lib/x86_64-linux-gnu/libumpire_cpc.so",
        "./usr/include/libcpc.h",
        "./usr/include/umpire_regions.h",
        "./usr/lib/umpire/umpire-agent",
        "./etc/umpire/arbiter.toml",
        "/systemd/system/umpire-arbiterd.service",
        "/systemd/system/umpire-arbiterd.socket",
        "./usr/lib/sysusers.d/umpire.conf",
        "./usr/lib/tmpfiles.d/umpire-arbiterd.conf",
        "./usr/share/man/man1/umpire-arbiterd.1.gz",
        "./usr/share/bash-completion/completions/umpire",
        "./usr/share/zsh/vendor-completions/_umpire",
        "./usr/share/fish/vendor_completions.d/umpire.fish",
        "./usr/share/doc/umpire/copyright",
        "./usr/share/doc/umpire/docs/reference/arbiterd.md",
        "./usr/share/doc/umpire/docs/schemas/stat.json",
    ] {
        assert!(listed.contains(file), "{file} is not in:\n{listed}");
    }
    let [files, control] = ["files", "control"].map(|name| target.path().join(name));
    succeeded(Command::new("dpkg-deb").arg("-x").arg(&deb).arg(&files));
    succeeded(Command::new("dpkg-deb").arg("-e").arg(&deb).arg(&control));
    let read = |name: &str| fs::read_to_string(control.join(name)).expect("a file");
    assert_eq!(read("conffiles").trim(), "/etc/umpire/arbiter.toml");
    let script = read("postinst");
    let user = script.find("systemd-sysusers").expect("a user is made");
    let folder = script.find("systemd-tmpfiles").expect("a folder is made");
    let start = script.find("deb-systemd-invoke").expect("it is started");
    assert!(user < start && folder < start, "{script}");
    for named in ["systemd-sysusers", "systemd-tmpfiles"] {
        let line = script.lines().find(|line| line.contains(named));
        let mut words = line.unwrap_or_default().split(' ');
        let file = words.find(|word| word.ends_with(".conf")).expect("a file");
        assert!(
            listed.contains(&format!(".d/{file}")),
            "{file} is not installed"
        );
    }

    // What is installed works.
    let umpire = files.join("usr/bin/umpire");
    succeeded(Command::new(&umpire).arg("--version"));
    let config = files.join("etc/umpire/arbiter.toml");
    let mut check = Command::new(&umpire);
    check.args(["arbiterd", "--check-config", "--config"]);
    succeeded(check.arg(config));
    let program = target.path().join("program.c");
    let text = "#include <umpire_lease.h>\nint main(void) { return umpire_lease_fd(0) != -1; }\n";
    fs::write(&program, text).expect("a file");
    let binary = target.path().join("program");
    let libraries = files.join("usr/lib/x86_64-linux-gnu");
    let mut cc = Command::new("cc");
    cc.arg("-I").arg(files.join("usr/include")).arg(&program);
    cc.arg("-L").arg(&libraries).arg("-lumpire_lease");
    succeeded(cc.arg("-o").arg(&binary));
    succeeded(Command::new(&binary).env("LD_LIBRARY_PATH", &libraries));
    units_are_valid(name, &files);
}

/// systemd takes the units as they are installed below `files`.
fn units_are_valid(name: &str, files: &Path) {
    let folder = ["usr/lib", "lib"].map(|lib| files.join(lib).join("systemd/system"));
    let folder = folder.iter().find(|folder| folder.is_dir());
    let folder = folder.expect("units are installed");
    let service = folder.join("umpire-arbiterd.service");
    let text = fs::read_to_string(&service).expect("a unit");
    let program = files.join("usr/bin/umpire").display().to_string();
    fs::write(&service, text.replace("/usr/bin/umpire", &program)).expect("a file");
    let mut command = Command::new("systemd-analyze");
    let output = command.args(["verify", "--man=no"]).arg(&service).output();
    let Ok(output) = output else {
        println!("skipped: {name}: systemd-analyze is missing");
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!said.contains("umpire-arbiterd"), "{said}");
}
