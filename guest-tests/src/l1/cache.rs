//! The cache of unpacked package sets: filled once, atomically, and then used without a network.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use debian_packages::{Apt, Package, user_cache};

use super::error::L1Error;
use super::packages::Set;
use super::tool::{FETCHING, say};

const MANIFEST: &str = "packages.json";
const PARTIAL: &str = "partial-";

/// A folder that holds package sets, one folder each.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: PathBuf,
}

/// A package set that is in the cache.
#[derive(Debug, Clone)]
pub struct Cached {
    /// Name of the set.
    pub name: &'static str,
    /// Where it is.
    pub folder: PathBuf,
    /// What it was unpacked from.
    pub packages: Vec<Package>,
}

impl Cache {
    /// The user's cache: `$UMPIRE_CACHE`, else `$XDG_CACHE_HOME/umpire`, else `~/.cache/umpire`.
    pub fn of_user() -> Self {
        Self::in_folder(default_folder(&|name| env::var_os(name)))
    }

    /// A cache in another folder, which is created when it is filled.
    pub fn in_folder(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
        }
    }

    /// Where the cache is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What the cache holds now.
    ///
    /// # Errors
    /// A manifest that exists but cannot be read.
    pub fn list(&self) -> Result<Vec<Cached>, L1Error> {
        let sets = Set::ALL.iter().map(|set| self.find(*set));
        sets.filter_map(Result::transpose).collect()
    }

    /// Fetches what is missing of `sets` and returns them in that order.
    ///
    /// # Errors
    /// No apt, no network, no room; the message says what to do.
    pub fn fetch(&self, sets: &[Set]) -> Result<Vec<Cached>, L1Error> {
        if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
            return Err(L1Error::Architecture);
        }
        if self.missing(sets)?.is_empty() {
            return self.found(sets);
        }
        fs::create_dir_all(&self.folder).map_err(L1Error::file("create", &self.folder))?;
        let _lock = self.lock()?;
        // Another process may have fetched them while this one waited.
        let missing = self.missing(sets)?;
        if !missing.is_empty() {
            self.fill(&missing)?;
        }
        self.found(sets)
    }

    fn fill(&self, sets: &[Set]) -> Result<(), L1Error> {
        say(&format!("filling the cache {}", self.folder.display()));
        self.remove_partial()?;
        let work = tempfile::Builder::new()
            .prefix(PARTIAL)
            .tempdir_in(&self.folder)
            .map_err(L1Error::file("create a folder in", &self.folder))?;
        let mut prepared: Option<(&str, Apt<'_>)> = None;
        for set in sets {
            let release = set.release();
            let apt = match &prepared {
                Some((of, apt)) if *of == release => apt,
                _ => {
                    let folder = work.path().join(format!("apt-{release}"));
                    fs::create_dir_all(&folder).map_err(L1Error::file("create", &folder))?;
                    let apt = Apt::prepare(&folder, release, FETCHING)?;
                    &prepared.insert((release, apt)).1
                }
            };
            say(&format!("package set `{}`", set.name()));
            let packages = set.resolve(apt)?;
            let ready = set.build(apt, &packages, &work.path().join(set.name()))?;
            let manifest = ready.join(MANIFEST);
            let text = serde_json::to_string_pretty(&packages).unwrap_or_default();
            fs::write(&manifest, text).map_err(L1Error::file("write", &manifest))?;
            let place = self.folder.join(set.name());
            if place.exists() {
                // An older layout or a change by hand left it. It is not complete, so nobody uses
                // it.
                fs::remove_dir_all(&place).map_err(L1Error::file("remove", &place))?;
            }
            fs::rename(&ready, &place).map_err(L1Error::file("rename to", &place))?;
        }
        Ok(())
    }

    /// Removes the leftovers of a process that was killed while it filled the cache. The caller
    /// holds the lock.
    fn remove_partial(&self) -> Result<(), L1Error> {
        let read = || L1Error::file("read", &self.folder);
        for entry in fs::read_dir(&self.folder).map_err(read())? {
            let entry = entry.map_err(read())?;
            if entry.file_name().to_string_lossy().starts_with(PARTIAL) {
                let path = entry.path();
                fs::remove_dir_all(&path).map_err(L1Error::file("remove", &path))?;
            }
        }
        Ok(())
    }

    fn missing(&self, sets: &[Set]) -> Result<Vec<Set>, L1Error> {
        let mut missing = Vec::new();
        for set in sets {
            if self.find(*set)?.is_none() {
                missing.push(*set);
            }
        }
        Ok(missing)
    }

    fn found(&self, sets: &[Set]) -> Result<Vec<Cached>, L1Error> {
        let cached = |set: &Set| {
            self.find(*set)?.ok_or_else(|| L1Error::PackageContent {
                set: set.name(),
                file: MANIFEST.to_owned(),
            })
        };
        sets.iter().map(cached).collect()
    }

    fn find(&self, set: Set) -> Result<Option<Cached>, L1Error> {
        let folder = self.folder.join(set.name());
        let manifest = folder.join(MANIFEST);
        let here = |file: &&str| folder.join(file).exists();
        if !manifest.exists() || !set.required().iter().all(here) {
            return Ok(None);
        }
        let text = fs::read(&manifest).map_err(L1Error::file("read", &manifest))?;
        let packages = serde_json::from_slice(&text)
            .map_err(|error| L1Error::file("understand", &manifest)(error.into()))?;
        Ok(Some(Cached {
            name: set.name(),
            folder,
            packages,
        }))
    }

    /// Waits for the lock of the cache; it is released when the file is closed.
    fn lock(&self) -> Result<File, L1Error> {
        let path = self.folder.join("lock");
        let file = File::create(&path).map_err(L1Error::file("create", &path))?;
        if file.try_lock().is_err() {
            say("another process is filling the cache; waiting for it …");
            file.lock().map_err(L1Error::file("lock", &path))?;
        }
        Ok(file)
    }
}

fn default_folder(variable: &dyn Fn(&str) -> Option<OsString>) -> PathBuf {
    let folder = |name| variable(name).filter(|value| !value.is_empty());
    let own = folder("UMPIRE_CACHE").map(PathBuf::from);
    let found = own.or_else(|| user_cache(variable));
    found.unwrap_or_else(|| env::temp_dir().join("umpire"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_follows_the_environment() {
        fn check(variables: &[(&str, &str)], expected: &str) {
            let folder = default_folder(&|name| {
                let found = variables.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| OsString::from(value))
            });
            assert_eq!(folder, Path::new(expected), "{variables:?}");
        }
        let home = ("HOME", "/h");
        check(&[home], "/h/.cache/umpire");
        check(&[home, ("XDG_CACHE_HOME", "/x")], "/x/umpire");
        check(
            &[home, ("XDG_CACHE_HOME", "/x"), ("UMPIRE_CACHE", "/u")],
            "/u",
        );
        check(&[home, ("UMPIRE_CACHE", "")], "/h/.cache/umpire");
    }

    #[test]
    fn leftovers_go_and_sets_stay() {
        let folder = tempfile::tempdir().expect("temporary folder");
        for name in ["partial-abc/apt", "busybox"] {
            fs::create_dir_all(folder.path().join(name)).expect("created");
        }
        Cache::in_folder(folder.path())
            .remove_partial()
            .expect("removable");
        let left: Vec<_> = fs::read_dir(folder.path())
            .expect("readable")
            .flatten()
            .collect();
        assert_eq!(left.len(), 1);
        assert_eq!(left[0].file_name(), "busybox");
    }

    #[test]
    fn a_set_counts_only_with_its_manifest_and_files() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let cache = Cache::in_folder(folder.path());
        let set = folder.path().join(Set::Busybox.name());
        fs::create_dir(&set).expect("empty folder");
        assert!(cache.list().expect("readable").is_empty());
        fs::write(
            set.join(MANIFEST),
            r#"[{"name":"busybox-static","version":"1:1.35"}]"#,
        )
        .expect("written");
        // A set of an older layout lacks a file, and is fetched anew.
        assert!(cache.list().expect("readable").is_empty());
        fs::write(set.join("busybox"), "").expect("written");
        let listed = cache.list().expect("readable");
        assert_eq!(
            (listed.len(), listed[0].packages[0].version.as_str()),
            (1, "1:1.35")
        );
        let offline = cache.fetch(&[Set::Busybox]).expect("no network needed");
        assert_eq!(offline[0].folder, set);
        fs::write(set.join(MANIFEST), "{").expect("written");
        let error = cache.list().expect_err("broken manifest").to_string();
        assert!(error.contains("cannot understand"), "{error}");
    }
}
