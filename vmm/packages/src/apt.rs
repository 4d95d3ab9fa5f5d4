//! A private apt: own sources, lists and state below one folder, the system's mirror, keys and proxies.
//!
//! Its dpkg status is empty, so apt names *every* package that a program needs. What is unpacked from
//! them runs on any machine, whatever is installed there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::error::PackagesError;
use super::sources::{self, Mirror, Source};
use super::tool::Tools;

/// One version of one package.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Package {
    /// Name.
    pub name: String,
    /// Debian version.
    pub version: String,
}

/// apt with private folders.
#[derive(Debug)]
pub struct Apt<'a> {
    folder: PathBuf,
    tools: Tools<'a>,
}

impl<'a> Apt<'a> {
    /// Prepares the folders and fetches the package lists of `release`, its backports and its security updates.
    ///
    /// # Errors
    /// There is no apt, it knows no Debian archive, or that does not answer.
    pub fn prepare(folder: &Path, release: &str, tools: Tools<'a>) -> Result<Self, PackagesError> {
        let advice = tools.advice;
        let mirror = Mirror::choose(&system_sources(tools)?);
        let mirror = mirror.ok_or(PackagesError::NoDebianSource { advice })?;
        for name in ["state/lists/partial", "cache/archives/partial", "sources"] {
            let path = folder.join(name);
            fs::create_dir_all(&path).map_err(PackagesError::file("create", &path))?;
        }
        let mut dump = Command::new("apt-config");
        let dump = tools.capture(
            dump.env("LC_ALL", "C").arg("dump"),
            "reading apt's settings",
        )?;
        let texts = [
            ("status", String::new()),
            ("sources/own.sources", mirror.stanzas(release)),
            ("apt.conf", private_settings(&dump, folder)),
        ];
        for (name, text) in texts {
            let path = folder.join(name);
            fs::write(&path, text).map_err(PackagesError::file("write", &path))?;
        }
        let apt = Self {
            folder: folder.to_owned(),
            tools,
        };
        (tools.say)(&format!("fetching the package lists of Debian {release} …"));
        apt.run("apt-get", &["update"], "fetching the package lists")?;
        Ok(apt)
    }

    /// The packages called `roots` and all that they depend on, taken from the release `target` where it
    /// has them, else from wherever the newest version is.
    ///
    /// # Errors
    /// apt cannot resolve what they need.
    pub fn closure(
        &self,
        roots: &[&str],
        target: Option<&str>,
    ) -> Result<Vec<Package>, PackagesError> {
        let mut args = vec!["--simulate", "--no-install-recommends"];
        args.extend(
            target
                .iter()
                .flat_map(|release| ["--target-release", release]),
        );
        args.push("install");
        args.extend(roots);
        let plan = self.run("apt-get", &args, "resolving dependencies")?;
        Ok(parse_plan(&plan))
    }

    /// All package names that start with `prefix`.
    ///
    /// # Errors
    /// apt fails.
    pub fn names(&self, prefix: &str) -> Result<Vec<String>, PackagesError> {
        let names = self.run("apt-cache", &["pkgnames", prefix], "listing packages")?;
        Ok(names.lines().map(str::to_owned).collect())
    }

    /// Downloads `packages` into `into`; apt checks their hashes against the signed lists.
    ///
    /// # Errors
    /// No network, no room, or a package is gone.
    pub fn download(&self, packages: &[Package], into: &Path) -> Result<(), PackagesError> {
        fs::create_dir_all(into).map_err(PackagesError::file("create", into))?;
        let mut command = self.command("apt-get");
        command.current_dir(into).args(["--quiet", "download"]);
        command.args(
            packages
                .iter()
                .map(|package| format!("{}={}", package.name, package.version)),
        );
        (self.tools.say)(&format!("downloading {} packages …", packages.len()));
        self.tools.capture(&mut command, "downloading").map(drop)
    }

    /// The newest version of `name` outside the backports.
    ///
    /// # Errors
    /// There is none.
    pub fn candidate(&self, name: &str) -> Result<Package, PackagesError> {
        let plan = self.closure(&[name], None)?;
        let found = plan.into_iter().find(|package| package.name == name);
        found.ok_or_else(|| PackagesError::NoPackage {
            wanted: name.to_owned(),
            releases: "any of its releases".to_owned(),
        })
    }

    fn run(&self, program: &str, args: &[&str], label: &str) -> Result<String, PackagesError> {
        self.tools.capture(self.command(program).args(args), label)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env("APT_CONFIG", self.folder.join("apt.conf"))
            .env("LC_ALL", "C")
            .env("DEBIAN_FRONTEND", "noninteractive");
        command
    }
}

/// Unpacks every `.deb` of the folder `from` into `root`.
///
/// # Errors
/// There is no dpkg-deb, or it fails.
pub fn unpack(from: &Path, root: &Path, say: fn(&str)) -> Result<(), PackagesError> {
    let tools = Tools {
        say,
        advice: "it comes with Debian's dpkg",
        interrupted: None,
    };
    let entries = fs::read_dir(from).map_err(PackagesError::file("read", from))?;
    for entry in entries {
        let path = entry.map_err(PackagesError::file("read", from))?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            let mut command = Command::new("dpkg-deb");
            command.arg("--extract").arg(&path).arg(root);
            tools.capture(&mut command, "unpacking")?;
        }
    }
    Ok(())
}

/// Reads apt's own sources, wherever its settings put them.
fn system_sources(tools: Tools<'_>) -> Result<Vec<Source>, PackagesError> {
    let setting = |name: &str| {
        let mut command = Command::new("apt-config");
        let text = tools.capture(command.args(["shell", "F", name]), "reading apt's settings")?;
        Ok(text.lines().find_map(shell_value).unwrap_or_default())
    };
    let (list, parts) = (
        setting("Dir::Etc::sourcelist/f")?,
        setting("Dir::Etc::sourceparts/d")?,
    );
    let mut files = vec![list];
    if let Ok(entries) = fs::read_dir(parts) {
        files.extend(entries.flatten().map(|entry| entry.path()));
        files.sort();
    }
    let mut found = Vec::new();
    for file in files {
        let extension = file.extension().and_then(|name| name.to_str());
        // A list may be absent or unreadable to this user; the other ones still count. Comments
        // are in any encoding.
        let bytes = fs::read(&file).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        match extension {
            Some("list") => found.extend(sources::parse_one_line(&text)),
            Some("sources") => found.extend(sources::parse_deb822(&text)),
            _ => {}
        }
    }
    Ok(found)
}

/// The path in a line such as `F='/etc/apt/sources.list'`.
fn shell_value(line: &str) -> Option<PathBuf> {
    let value = line.strip_prefix("F='")?.strip_suffix('\'')?;
    Some(PathBuf::from(value))
}

/// The system's settings (proxies, time-outs, …) without folders, hooks and architectures, plus our folders.
fn private_settings(dump: &str, folder: &Path) -> String {
    let dropped = ["Dir", "DPkg", "APT::Architecture", "APT::Default-Release"];
    let mut text = String::new();
    for line in dump.lines() {
        let name = line.split([' ', ';']).next().unwrap_or_default();
        let ours = dropped.iter().any(|prefix| name.starts_with(prefix));
        if !ours && !name.contains("-Invoke") {
            text.push_str(line);
            text.push('\n');
        }
    }
    let folder = folder.display();
    text.push_str(&format!(
        r#"Dir::Etc::main "/dev/null";
Dir::Etc::parts "/dev/null";
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "{folder}/sources";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State "{folder}/state";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}/cache";
APT::Architecture "amd64";
APT::Architectures "amd64";
APT::Sandbox::User "root";
APT::Update::Error-Mode "any";
Acquire::Languages "none";
Acquire::Retries "2";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled "false";
"#
    ));
    text
}

/// Reads the lines `Inst NAME (VERSION …)` of a simulated installation.
fn parse_plan(plan: &str) -> Vec<Package> {
    let package = |line: &str| {
        let mut words = line.strip_prefix("Inst ")?.split_whitespace();
        let name = words.next()?;
        let version = words.find_map(|word| word.strip_prefix('('))?;
        Some(Package {
            name: name.split(':').next()?.to_owned(),
            version: version.trim_end_matches(')').to_owned(),
        })
    };
    plan.lines().filter_map(package).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans() {
        fn check(plan: &str, expected: &[(&str, &str)]) {
            let found = parse_plan(plan);
            let found: Vec<_> = found
                .iter()
                .map(|p| (p.name.as_str(), p.version.as_str()))
                .collect();
            assert_eq!(found, expected, "{plan}");
        }
        check("", &[]);
        check("Reading package lists...\nConf libc6 (2.36 Debian)\n", &[]);
        check(
            "Inst libc6 (2.36-9+deb12u14 Debian:12.15/oldstable [amd64])",
            &[("libc6", "2.36-9+deb12u14")],
        );
        check(
            "Inst libc6:amd64 [2.31] (2.36 Debian:12.15/oldstable [amd64]) []",
            &[("libc6", "2.36")],
        );
        check("Inst x (1:2)\nInst broken", &[("x", "1:2")]);
    }

    #[test]
    fn settings_keep_proxies_and_drop_hooks_and_folders() {
        let dump = "Acquire::http::Proxy \"http://p.test:1\";\nDir \"/\";\nDir::State \"x\";\nAPT::Architectures:: \"i386\";\n\
                    APT::Update::Post-Invoke:: \"rm\";\nDPkg::Pre-Install-Pkgs:: \"x\";\nAPT::Default-Release \"sid\";\n";
        let settings = private_settings(dump, Path::new("/c"));
        let (kept, own) = settings
            .split_once("Dir::Etc::main")
            .expect("own settings follow");
        assert_eq!(kept, "Acquire::http::Proxy \"http://p.test:1\";\n");
        assert!(own.contains("Dir::State \"/c/state\";"));
    }

    #[test]
    fn shell_values() {
        assert_eq!(
            shell_value("F='/etc/apt/sources.list'"),
            Some("/etc/apt/sources.list".into())
        );
        assert_eq!(shell_value(""), None);
    }
}
