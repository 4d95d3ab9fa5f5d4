//! The guest's kernel: Debian's, of one version, or another one that is named.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use debian_packages::{Apt, Package, Tools};
use guest_files::{Kernel, initramfs};
use rustix::fs::statvfs;
use umpire_count::inputs::digest;

use super::ended::failed;
use super::store::Store;
use crate::exit::{UserError, complain};

/// The package, so that runs of different machines have the same kernel.
const NAME: &str = "linux-image-6.1.0-56-cloud-amd64";
const VERSION: &str = "6.1.192-2";
const SHA256: &str = "sha256:e7d02b943971edcb8790e256c02cfab3bca6c3d37c1bf25392a57c71300615ee";
/// Debian's release that has it.
const RELEASE: &str = "bookworm";
/// How names of other versions begin.
const SERIES: &str = "linux-image-6.1.";

/// Room that apt takes meanwhile, in bytes: its lists, and the package. On a disk that fills up
/// apt-get waits for ever.
const ROOM: u64 = 160 << 20;

/// A kernel that is there, or whose machine is.
#[derive(Debug)]
pub(super) struct Choice {
    path: PathBuf,
    /// As an input is named.
    pub(super) digest: String,
    /// It is the one of [`SHA256`], and to be that before it is used.
    pinned: bool,
}

/// What a machine is booted from.
pub(super) struct Parts {
    pub(super) image: Vec<u8>,
    pub(super) initramfs: Vec<u8>,
}

/// The name of the package's file.
fn file_name() -> String {
    format!("{NAME}_{VERSION}_amd64.deb")
}

/// What to do without a network.
fn by_hand(store: &Store) -> String {
    let (name, folder) = (file_name(), store.kernels());
    format!(
        "without a network put {name} ({SHA256}) into {}, or name another one with --kernel",
        folder.display()
    )
}

/// The kernel that the options name, or the one that was fetched.
pub(super) fn choose(store: &Store, named: Option<&Path>) -> Result<Choice, UserError> {
    let Some(path) = named else {
        return Ok(Choice {
            path: store.kernels().join(file_name()),
            digest: SHA256.to_owned(),
            pinned: true,
        });
    };
    let unusable =
        |error: &dyn std::fmt::Display| failed(format!("--kernel {}: {error}", path.display()));
    let digest = if is_package(path) {
        digest(&fs::read(path).map_err(|error| unusable(&error))?)
    } else {
        // Its modules are files of their own.
        let parts = parts(path).map_err(|error| unusable(&error))?;
        digest(&[parts.image, parts.initramfs].concat())
    };
    Ok(Choice {
        path: path.to_owned(),
        digest,
        pinned: false,
    })
}

fn is_package(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "deb")
}

fn parts(path: &Path) -> Result<Parts, Box<dyn std::error::Error + Send + Sync>> {
    let kernel = if is_package(path) {
        Kernel::of_package(path)?
    } else {
        Kernel::of_files(path)?
    };
    Ok(Parts {
        initramfs: initramfs(&kernel)?,
        image: kernel.image().to_vec(),
    })
}

impl Choice {
    /// Its file.
    pub(super) fn file(&self) -> PathBuf {
        // A process elsewhere uses it too.
        std::path::absolute(&self.path).unwrap_or_else(|_| self.path.clone())
    }

    /// The kernel itself, and its first files.
    pub(super) fn load(&self, store: &Store) -> Result<Parts, UserError> {
        let unusable = |error: &dyn std::fmt::Display| {
            failed(format!("kernel {}: {error}", self.path.display()))
        };
        if !is_package(&self.path) {
            let parts = parts(&self.path).map_err(|error| unusable(&error))?;
            let found = digest(&[&parts.image[..], &parts.initramfs].concat());
            return same(&found, &self.digest)
                .map(|()| parts)
                .map_err(|error| unusable(&error));
        }
        let bytes = fs::read(&self.path).map_err(|error| {
            if !self.pinned {
                return unusable(&error);
            }
            let why = match error.kind() {
                std::io::ErrorKind::NotFound => "there is no kernel yet".to_owned(),
                _ => format!("{}: {error}", self.path.display()),
            };
            let by_hand = by_hand(store);
            failed(format!("{why}: run umpire count --fetch-kernel; {by_hand}"))
        })?;
        if self.pinned {
            check(&bytes, &self.path)?;
        } else {
            same(&digest(&bytes), &self.digest).map_err(|error| unusable(&error))?;
        }
        // What was checked is what is read: the file may be another one by now.
        let mut checked = tempfile::Builder::new();
        let mut checked = checked
            .suffix(".deb")
            .tempfile()
            .map_err(|error| unusable(&error))?;
        checked
            .write_all(&bytes)
            .map_err(|error| unusable(&error))?;
        parts(checked.path()).map_err(|error| unusable(&error))
    }
}

/// What is used is what was named among the inputs.
fn same(found: &str, named: &str) -> Result<(), &'static str> {
    let is_same = found == named;
    is_same.then_some(()).ok_or("it changed while it was used")
}

fn check(package: &[u8], path: &Path) -> Result<(), UserError> {
    let found = digest(package);
    if found == SHA256 {
        return Ok(());
    }
    Err(failed(format!(
        "{}: it is {found}, and has to be {SHA256}: remove it, and run umpire count --fetch-kernel",
        path.display()
    )))
}

/// `umpire count --fetch-kernel`.
pub(super) fn fetch(store: &Store, interrupted: &AtomicBool) -> Result<(), UserError> {
    let place = store.kernels().join(file_name());
    if let Ok(bytes) = fs::read(&place)
        && check(&bytes, &place).is_ok()
    {
        complain(&format_args!("{} is there already", place.display()));
        return Ok(());
    }
    let unfetched = |error: &dyn std::fmt::Display| {
        failed(format!(
            "the kernel was not fetched: {error}; {}",
            by_hand(store)
        ))
    };
    let room = statvfs(store.kernels()).map_err(|error| unfetched(&error))?;
    let room = room.f_bavail.saturating_mul(room.f_frsize);
    if room < ROOM {
        let folder = store.kernels();
        return Err(unfetched(&format_args!(
            "{} has room for {} MiB, and it takes {} meanwhile: make room, or name another folder \
             with --cache",
            folder.display(),
            room >> 20,
            ROOM >> 20
        )));
    }
    let tools = Tools {
        say: |text| complain(&text),
        advice: "check the network and apt's sources",
        interrupted: Some(interrupted),
    };
    let work = store.partial().map_err(|error| unfetched(&error))?;
    let apt = Apt::prepare(work.path(), RELEASE, tools).map_err(|error| unfetched(&error))?;
    let package = Package {
        name: NAME.to_owned(),
        version: VERSION.to_owned(),
    };
    let debs = work.path().join("debs");
    if let Err(error) = apt.download(&[package], &debs) {
        return Err(unfetched(&other_version(&apt).unwrap_or(error.to_string())));
    }
    let found = fs::read_dir(&debs).map_err(|error| unfetched(&error))?;
    let found = found
        .flatten()
        .map(|entry| entry.path())
        .find(|path| is_package(path));
    let found = found.ok_or_else(|| unfetched(&"apt has left no package"))?;
    let bytes = fs::read(&found).map_err(|error| unfetched(&error))?;
    check(&bytes, &found)?;
    fs::rename(&found, &place).map_err(|error| unfetched(&error))?;
    complain(&format_args!("{} is there", place.display()));
    Ok(())
}

/// What the archive has instead, if it no longer has that version.
fn other_version(apt: &Apt<'_>) -> Option<String> {
    if let Ok(found) = apt.candidate(NAME)
        && found.version == VERSION
    {
        // It was something else.
        return None;
    }
    let all = apt.names(SERIES).ok()?;
    let fits = |name: &&String| {
        let number = name
            .strip_prefix(SERIES)
            .and_then(|rest| rest.strip_suffix("-cloud-amd64"));
        number.is_some_and(|number| number.contains('-'))
    };
    let newest = all.iter().filter(fits).max_by_key(|name| numbers(name))?;
    Some(format!(
        "the archive no longer has {NAME} {VERSION}, but {newest}, with which kernels' counts are \
         others; to have it: apt-get download {newest}, and --kernel with its file"
    ))
}

fn numbers(name: &str) -> Vec<u64> {
    let parts = name.split(|letter: char| !letter.is_ascii_digit());
    parts.filter_map(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flags::StoreFlags;

    #[test]
    fn what_is_missing_is_named_with_what_to_do() {
        let folder = tempfile::tempdir().expect("a folder");
        let flags = StoreFlags {
            cache: Some(folder.path().to_owned()),
            ..StoreFlags::default()
        };
        let store = Store::of(&flags).expect("a folder");
        let choice = choose(&store, None).expect("nothing is read yet");
        assert_eq!(choice.digest, SHA256);
        let missing = || choice.load(&store).err().expect("no kernel").to_string();
        let text = missing();
        for part in [
            "there is no kernel yet: run umpire count --fetch-kernel; without a network put",
            "linux-image-6.1.0-56-cloud-amd64_6.1.192-2_amd64.deb (sha256:e7d02b",
            "or name another one with --kernel",
        ] {
            assert!(text.contains(part), "{text}");
        }
        fs::write(store.kernels().join(file_name()), "something else").expect("room");
        let text = missing();
        assert!(text.contains(", and has to be sha256:e7d0"), "{text}");
        let error = |name: &str| {
            let path = folder.path().join(name);
            let error = choose(&store, Some(&path)).expect_err("no kernel");
            assert_eq!(error.status().code(), 125);
            error.to_string()
        };
        assert!(error("gone.deb").contains("gone.deb: No such file"));
        assert!(
            error("vmlinuz").contains("--kernel"),
            "{}",
            error("vmlinuz")
        );
    }
}
