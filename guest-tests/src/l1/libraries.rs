//! Finds the files that a program needs at run time: its loader and, transitively, its shared libraries.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::elf::{self, Dynamic};
use super::error::L1Error;

/// Where libraries are looked for, and below which root.
#[derive(Debug, Clone)]
pub(crate) struct Libraries {
    root: PathBuf,
    folders: Vec<PathBuf>,
}

/// The files of a program: name in the guest → file on this machine.
pub(crate) type Files = BTreeMap<PathBuf, PathBuf>;

impl Libraries {
    /// The libraries of this machine: `LD_LIBRARY_PATH`, the loader's configuration, its built-in folders.
    pub(crate) fn of_host() -> Self {
        let mut folders: Vec<PathBuf> = env::var_os("LD_LIBRARY_PATH")
            .map(|paths| env::split_paths(&paths).collect())
            .unwrap_or_default();
        folders.extend(configured(Path::new("/etc/ld.so.conf"), 0));
        Self::new(Path::new("/"), folders)
    }

    /// The libraries of unpacked packages below `root`.
    pub(crate) fn of_root(root: &Path) -> Self {
        Self::new(root, Vec::new())
    }

    fn new(root: &Path, mut folders: Vec<PathBuf>) -> Self {
        let builtin = [
            "/lib/x86_64-linux-gnu",
            "/usr/lib/x86_64-linux-gnu",
            "/lib64",
            "/usr/lib64",
            "/lib",
            "/usr/lib",
        ];
        folders.extend(builtin.map(PathBuf::from));
        Self {
            root: root.to_owned(),
            folders,
        }
    }

    /// The loader's search folders, on this machine's file system.
    pub(crate) fn folders(&self) -> impl Iterator<Item = PathBuf> {
        self.folders.iter().map(|folder| self.below_root(folder))
    }

    /// A program below the root, through that root's own loader and libraries.
    pub(crate) fn command(&self, program: &str) -> Command {
        let folders: Vec<PathBuf> = self.folders().filter(|path| path.is_dir()).collect();
        let mut path = OsString::new();
        for folder in &folders {
            if !path.is_empty() {
                path.push(":");
            }
            path.push(folder);
        }
        let loader = self.root.join("lib/x86_64-linux-gnu/ld-linux-x86-64.so.2");
        let mut command = Command::new(loader);
        command
            .arg("--library-path")
            .arg(path)
            .arg(self.root.join(program))
            // A library path or preload meant for this machine's programs must not reach that libc.
            .env_remove("LD_LIBRARY_PATH")
            .env_remove("LD_PRELOAD");
        command
    }

    /// Adds to `files` what the program at `program` (a name below the root) needs, itself not included.
    pub(crate) fn collect(&self, program: &Path, files: &mut Files) -> Result<(), L1Error> {
        let mut waiting = vec![program.to_owned()];
        while let Some(file) = waiting.pop() {
            let dynamic = self.dynamic(&file)?;
            if let Some(interpreter) = &dynamic.interpreter {
                let interpreter = PathBuf::from(interpreter);
                let place = self.exists(&interpreter).ok_or_else(|| L1Error::Library {
                    library: interpreter.display().to_string(),
                    needed_by: file.clone(),
                })?;
                files.insert(interpreter, place);
            }
            for library in &dynamic.needed {
                let found = self.find(library, &file, &dynamic)?;
                let place = self.below_root(&found);
                if files.insert(found.clone(), place).is_none() {
                    waiting.push(found);
                }
            }
        }
        Ok(())
    }

    fn dynamic(&self, file: &Path) -> Result<Dynamic, L1Error> {
        let place = self.below_root(file);
        let bytes = fs::read(&place).map_err(L1Error::file("read", &place))?;
        elf::parse(&bytes, &place)
    }

    fn find(&self, library: &str, user: &Path, dynamic: &Dynamic) -> Result<PathBuf, L1Error> {
        if library.contains('/') {
            let direct = PathBuf::from(library);
            return self
                .exists(&direct)
                .map(|_| direct)
                .ok_or_else(|| L1Error::Library {
                    library: library.to_owned(),
                    needed_by: user.to_owned(),
                });
        }
        let origin = user.parent().unwrap_or(Path::new("/")).to_string_lossy();
        let own = dynamic.paths.iter().map(|path| {
            PathBuf::from(
                path.replace("$ORIGIN", &origin)
                    .replace("${ORIGIN}", &origin),
            )
        });
        let folders = own.chain(self.folders.iter().cloned());
        let mut candidates = folders.map(|folder| folder.join(library));
        let found = candidates.find(|candidate| self.exists(candidate).is_some());
        found.ok_or_else(|| L1Error::Library {
            library: library.to_owned(),
            needed_by: user.to_owned(),
        })
    }

    /// The file on this machine, following links inside the root.
    fn exists(&self, name: &Path) -> Option<PathBuf> {
        let place = self.below_root(name);
        place.is_file().then_some(place)
    }

    /// Follows the absolute links of unpacked packages (`/lib64/ld-linux…`), which point below their root.
    fn below_root(&self, name: &Path) -> PathBuf {
        let join = |name: &Path| self.root.join(name.strip_prefix("/").unwrap_or(name));
        let place = join(name);
        match fs::read_link(&place) {
            Ok(target) if target.is_absolute() => join(&target),
            _ => place,
        }
    }
}

/// The folders in a loader configuration file, with its `include` lines followed.
fn configured(file: &Path, depth: usize) -> Vec<PathBuf> {
    // The loader works without this file; an unreadable one adds nothing. It has no encoding.
    let bytes = fs::read(file).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let mut folders = Vec::new();
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if let Some(pattern) = line.strip_prefix("include ") {
            if depth < 4 {
                let included = matching(Path::new(pattern.trim()));
                folders.extend(included.iter().flat_map(|file| configured(file, depth + 1)));
            }
        } else if line.starts_with('/') {
            folders.push(PathBuf::from(line));
        }
    }
    folders
}

/// The files that fit a pattern of the form `FOLDER/*.conf`, in order.
fn matching(pattern: &Path) -> Vec<PathBuf> {
    let (Some(folder), Some(name)) = (pattern.parent(), pattern.file_name()) else {
        return Vec::new();
    };
    let name = name.to_string_lossy();
    let Some((start, end)) = name.split_once('*') else {
        return vec![pattern.to_owned()];
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with(start) && name.ends_with(end)
        })
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(files: &Files) -> Vec<String> {
        let name = |path: &PathBuf| {
            path.file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned()
        };
        files.keys().map(name).collect()
    }

    #[test]
    fn this_test_brings_loader_and_libc() {
        let mut files = Files::new();
        let program = std::env::current_exe().expect("a test has a file");
        Libraries::of_host()
            .collect(&program, &mut files)
            .expect("it runs, so its libraries exist");
        let names = names(&files);
        for expected in ["ld-linux-x86-64.so.2", "libc.so.6"] {
            assert!(names.iter().any(|name| name == expected), "{names:?}");
        }
        assert!(files.values().all(|place| place.is_file()));
    }

    #[test]
    fn a_library_that_is_nowhere_is_named() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let program = std::env::current_exe().expect("a test has a file");
        fs::copy(program, folder.path().join("tool")).expect("copied");
        let error = Libraries::of_root(folder.path())
            .collect(Path::new("/tool"), &mut Files::new())
            .expect_err("an empty root has no loader");
        let text = error.to_string();
        assert!(
            text.starts_with("/tool: needs the shared library /lib64/ld-linux-x86-64.so.2"),
            "{text}"
        );
    }

    #[test]
    fn loader_configuration() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let write =
            |name: &str, text: &str| fs::write(folder.path().join(name), text).expect("written");
        let main = folder.path().join("ld.so.conf");
        write(
            "ld.so.conf",
            &format!(
                "/first # remark\ninclude {}/*.conf.d\nrelative\n",
                folder.path().display()
            ),
        );
        write("b.conf.d", "/third\n");
        write("a.conf.d", "/second\n");
        assert_eq!(
            configured(&main, 0),
            ["/first", "/second", "/third"].map(PathBuf::from)
        );
        write(
            "ld.so.conf",
            &format!("/again\ninclude {}\n", main.display()),
        );
        assert_eq!(
            configured(&main, 0).len(),
            5,
            "a file that includes itself ends"
        );
    }
}
