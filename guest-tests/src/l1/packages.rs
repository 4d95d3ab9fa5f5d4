//! The package sets that the machines are built from, and how each is unpacked.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use debian_packages::{Apt, Package, PackagesError, unpack};

use super::error::L1Error;
use super::headers;
use super::tool::say;

/// The Debian release that the machines are built from, whatever release this machine runs: the
/// behaviour of L1's KVM was measured with its backports' QEMU 10 and Linux 6.12.
pub(crate) const RELEASE: &str = "bookworm";
const BACKPORTS: &str = "bookworm-backports";
/// The release whose backports have the newest kernel of a guest.
const NEWEST_RELEASE: &str = "trixie";
const NEWEST_BACKPORTS: &str = "trixie-backports";
/// What depends on the newest cloud kernel of a suite, and what its parts are called.
const NEWEST_KERNEL: &str = "linux-image-cloud-amd64";
const KERNEL_PARTS: [&str; 3] = ["linux-image-", "linux-binary-", "linux-modules-"];

/// The kernel modules of L1's KVM, in the order in which they are loaded.
pub(crate) const MODULES: [&str; 3] = ["irqbypass", "kvm", "kvm-amd"];

/// The Linux guest's modules: the msr device.
pub(crate) const GUEST_MODULES: [&str; 1] = ["msr"];

/// A set of packages that is fetched and unpacked as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Set {
    /// QEMU 10 with every library it needs: a root folder.
    Qemu,
    /// L1's kernel: `vmlinuz`, and `irqbypass.ko`, `kvm.ko`, `kvm-amd.ko`.
    HypervisorKernel,
    /// A static busybox: `busybox`.
    Busybox,
    /// The Linux guest's kernel, unmodified: `vmlinuz`, its `msr.ko`, and in `build` its headers.
    /// They are one set, as modules fit the very version that they are built against.
    GuestKernel,
    /// The same of Linux 6.12, as the other kernel that the modules are for.
    NewGuestKernel,
    /// The newest kernel that Debian has for its cloud images now, without headers: versions come
    /// and go there, so its package's name says which it is.
    NewestGuestKernel,
    /// `perf` of the guest's kernel with every library it needs: a root folder.
    Perf,
    /// `gdb` without Python, with every library it needs: a root folder.
    Gdb,
}

impl Set {
    /// Every set.
    pub const ALL: [Set; 8] = [
        Set::Qemu,
        Set::HypervisorKernel,
        Set::Busybox,
        Set::GuestKernel,
        Set::NewGuestKernel,
        Set::Perf,
        Set::Gdb,
        Set::NewestGuestKernel,
    ];
    /// What L1 needs.
    pub const L1: [Set; 3] = [Set::Qemu, Set::HypervisorKernel, Set::Busybox];
    /// What the Linux guest needs.
    pub const LINUX_GUEST: [Set; 3] = [Set::GuestKernel, Set::Busybox, Set::Perf];

    /// The folder's name in the cache.
    pub fn name(self) -> &'static str {
        match self {
            Set::Qemu => "qemu-10",
            Set::HypervisorKernel => "linux-6.12",
            Set::Busybox => "busybox",
            Set::GuestKernel => "linux-6.1",
            Set::NewGuestKernel => "linux-6.12-guest",
            Set::NewestGuestKernel => "linux-newest-guest",
            Set::Perf => "perf-6.1",
            Set::Gdb => "gdb",
        }
    }

    /// The Debian release that it comes from, or whose backports it comes from.
    pub(crate) fn release(self) -> &'static str {
        match self {
            Set::NewestGuestKernel => NEWEST_RELEASE,
            _ => RELEASE,
        }
    }

    /// Files without which a set is of an older layout, and fetched anew.
    pub(crate) fn required(self) -> &'static [&'static str] {
        match self {
            Set::HypervisorKernel => &["vmlinuz", "kvm-amd.ko"],
            Set::GuestKernel | Set::NewGuestKernel => {
                &["vmlinuz", "msr.ko", "build/Module.symvers"]
            }
            Set::NewestGuestKernel => &["vmlinuz", "msr.ko"],
            Set::Busybox => &["busybox"],
            Set::Qemu | Set::Perf | Set::Gdb => &[],
        }
    }

    /// The exact packages of this set that the archive offers now.
    pub(crate) fn resolve(self, apt: &Apt<'_>) -> Result<Vec<Package>, L1Error> {
        match self {
            Set::Qemu => Ok(apt.closure(&["qemu-system-x86"], Some(BACKPORTS))?),
            Set::Perf => Ok(apt.closure(&["linux-perf"], None)?),
            Set::Gdb => Ok(apt.closure(&["gdb-minimal"], None)?),
            Set::Busybox => Ok(vec![apt.candidate("busybox-static")?]),
            Set::HypervisorKernel => Ok(vec![kernel(apt, "linux-image-6.12.")?]),
            Set::GuestKernel | Set::NewGuestKernel => {
                let prefix = match self {
                    Set::GuestKernel => "linux-image-6.1.",
                    _ => "linux-image-6.12.",
                };
                let kernel = kernel(apt, prefix)?;
                let mut packages = headers::packages(apt, &kernel)?;
                packages.insert(0, kernel);
                Ok(packages)
            }
            Set::NewestGuestKernel => {
                let all = apt.closure(&[NEWEST_KERNEL], Some(NEWEST_BACKPORTS))?;
                let parts = newest_kernel(all);
                let has = |part: &str| parts.iter().any(|found| found.name.starts_with(part));
                if has(KERNEL_PARTS[0]) {
                    return Ok(parts);
                }
                Err(PackagesError::NoPackage {
                    wanted: NEWEST_KERNEL.to_owned(),
                    releases: format!("{NEWEST_RELEASE} and {NEWEST_BACKPORTS}"),
                }
                .into())
            }
        }
    }

    /// Downloads `packages`, unpacks them below `work` and returns the folder that goes into the cache.
    pub(crate) fn build(
        self,
        apt: &Apt<'_>,
        packages: &[Package],
        work: &Path,
    ) -> Result<PathBuf, L1Error> {
        let (debs, root, ready) = (work.join("debs"), work.join("root"), work.join("ready"));
        for folder in [&root, &ready] {
            fs::create_dir_all(folder).map_err(L1Error::file("create", folder))?;
        }
        apt.download(packages, &debs)?;
        say("unpacking …");
        unpack(&debs, &root, say)?;
        match self {
            Set::Qemu | Set::Perf | Set::Gdb => {
                prune(&root)?;
                return Ok(root);
            }
            Set::Busybox => self.take(
                &root,
                |name| name.ends_with("bin/busybox"),
                &ready.join("busybox"),
            )?,
            Set::GuestKernel | Set::NewGuestKernel => {
                self.take_kernel(&root, &ready)?;
                self.take_modules(&root, &GUEST_MODULES, &ready)?;
                headers::take(&root, &ready, self.name())?;
            }
            Set::NewestGuestKernel => {
                self.take_kernel(&root, &ready)?;
                self.take_modules(&root, &GUEST_MODULES, &ready)?;
            }
            Set::HypervisorKernel => {
                self.take_kernel(&root, &ready)?;
                self.take_modules(&root, &MODULES, &ready)?;
            }
        }
        Ok(ready)
    }

    fn take_modules(self, root: &Path, modules: &[&str], ready: &Path) -> Result<(), L1Error> {
        for module in modules {
            let (plain, packed) = (format!("/{module}.ko"), format!("/{module}.ko.xz"));
            let fits = |name: &str| name.ends_with(&plain) || name.ends_with(&packed);
            self.take(root, fits, &ready.join(format!("{module}.ko")))?;
        }
        Ok(())
    }

    fn take_kernel(self, root: &Path, ready: &Path) -> Result<(), L1Error> {
        // In `/boot`, or beside its modules.
        let kernel = |name: &str| name.contains("/vmlinuz-") || name.ends_with("/vmlinuz");
        self.take(root, kernel, &ready.join("vmlinuz"))
    }

    /// Copies the file whose path fits, unpacking xz.
    fn take(self, root: &Path, fits: impl Fn(&str) -> bool, place: &Path) -> Result<(), L1Error> {
        let Some(found) = find(root, &fits)? else {
            let file = place.file_name().unwrap_or_default();
            return Err(L1Error::PackageContent {
                set: self.name(),
                file: file.to_string_lossy().into_owned(),
            });
        };
        let source = fs::File::open(&found).map_err(L1Error::file("read", &found))?;
        let mut target = fs::File::create(place).map_err(L1Error::file("create", place))?;
        let copied = if found.extension().is_some_and(|extension| extension == "xz") {
            io::copy(&mut liblzma::read::XzDecoder::new(source), &mut target)
        } else {
            io::copy(&mut &source, &mut target)
        };
        copied.map_err(L1Error::file("unpack", &found)).map(drop)
    }
}

/// The newest cloud kernel package whose name starts with `prefix`.
fn kernel(apt: &Apt<'_>, prefix: &str) -> Result<Package, L1Error> {
    let names = apt.names(prefix)?;
    let newest = newest_cloud_kernel(&names).ok_or_else(|| PackagesError::NoPackage {
        wanted: format!("{prefix}*-cloud-amd64"),
        releases: format!("{RELEASE} and {BACKPORTS}"),
    })?;
    Ok(apt.candidate(newest)?)
}

fn newest_cloud_kernel(names: &[String]) -> Option<&str> {
    let numbers = |name: &str| -> Vec<u64> {
        let parts = name.split(|letter: char| !letter.is_ascii_digit());
        parts.filter_map(|part| part.parse().ok()).collect()
    };
    let kernels = names.iter().map(String::as_str);
    let kernels = kernels.filter_map(|name| Some((name, name.strip_suffix("-cloud-amd64")?)));
    // Meta packages (`linux-image-6.12-cloud-amd64`) have only the two numbers of the series.
    let kernels = kernels.filter(|(_, release)| numbers(release).len() > 2);
    let newest = kernels.max_by_key(|(_, release)| numbers(release));
    newest.map(|(name, _)| name)
}

/// Of what a kernel depends on its own packages: one with all of it, or since 6.17 or so
/// three, and the one that depends on them.
fn newest_kernel(all: Vec<Package>) -> Vec<Package> {
    let is_part = |package: &Package| {
        let rests = KERNEL_PARTS.map(|part| package.name.strip_prefix(part));
        let mut rests = rests.into_iter().flatten();
        rests.any(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
    };
    all.into_iter().filter(is_part).collect()
}

/// Removes what no program reads: manuals, documentation, translations.
fn prune(root: &Path) -> Result<(), L1Error> {
    for name in [
        "doc",
        "man",
        "locale",
        "info",
        "lintian",
        "bash-completion",
        "perl",
        "python3",
    ] {
        let path = root.join("usr/share").join(name);
        if path.exists() {
            fs::remove_dir_all(&path).map_err(L1Error::file("remove", &path))?;
        }
    }
    Ok(())
}

/// The first regular file below `folder` whose path fits.
fn find(folder: &Path, fits: &impl Fn(&str) -> bool) -> Result<Option<PathBuf>, L1Error> {
    let read = || L1Error::file("read", folder);
    for entry in fs::read_dir(folder).map_err(read())? {
        let entry = entry.map_err(read())?;
        let kind = entry.file_type().map_err(read())?;
        let path = entry.path();
        if kind.is_dir() {
            if let Some(found) = find(&path, fits)? {
                return Ok(Some(found));
            }
        } else if kind.is_file() && fits(&path.to_string_lossy()) {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_kernels() {
        fn check(names: &[&str], expected: Option<&str>) {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            assert_eq!(newest_cloud_kernel(&names), expected);
        }
        check(&[], None);
        check(&["linux-image-6.12-cloud-amd64"], None);
        check(
            &[
                "linux-image-6.12.9+deb12-cloud-amd64",
                "linux-image-6.12.117+deb12-cloud-amd64",
            ],
            Some("linux-image-6.12.117+deb12-cloud-amd64"),
        );
        check(
            &[
                "linux-image-6.12.90+deb12.1-cloud-amd64",
                "linux-image-6.12.90+deb12-cloud-amd64",
            ],
            Some("linux-image-6.12.90+deb12.1-cloud-amd64"),
        );
        check(
            &[
                "linux-image-6.1.0-9-cloud-amd64",
                "linux-image-6.1.0-56-cloud-amd64",
                "linux-image-6.1.0-99-amd64",
            ],
            Some("linux-image-6.1.0-56-cloud-amd64"),
        );
        check(
            &[
                "linux-image-6.1.0-9-cloud-amd64-dbg",
                "linux-image-6.1.0-9-cloud-amd64-unsigned",
            ],
            None,
        );
    }

    #[test]
    fn parts_of_the_newest_kernel() {
        let package = |name: &str| Package {
            name: name.to_owned(),
            version: "1".to_owned(),
        };
        let names =
            |names: &[&str]| -> Vec<Package> { names.iter().map(|one| package(one)).collect() };
        let all = names(&[
            "linux-base",
            "linux-base-7.3.4+deb13-cloud-amd64",
            "linux-binary-7.3.4+deb13-cloud-amd64",
            "kmod",
            "linux-modules-7.3.4+deb13-cloud-amd64",
            "linux-image-7.3.4+deb13-cloud-amd64",
            "linux-image-cloud-amd64",
        ]);
        let expected = [2, 4, 5].map(|at| all[at].clone());
        assert_eq!(newest_kernel(all), expected);
        let all = names(&["linux-image-6.12.9+deb13-cloud-amd64", "linux-base"]);
        assert_eq!(newest_kernel(all.clone()), all[..1]);
    }

    #[test]
    fn files_are_found_and_unpacked() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let deep = folder.path().join("a/b");
        fs::create_dir_all(&deep).expect("folders");
        fs::write(deep.join("vmlinuz-6.1"), "kernel").expect("written");
        let place = folder.path().join("vmlinuz");
        Set::GuestKernel
            .take_kernel(&folder.path().join("a"), folder.path())
            .expect("found");
        assert_eq!(fs::read(&place).expect("readable"), b"kernel");
        let error = Set::Busybox.take(
            folder.path(),
            |name| name.ends_with("bin/busybox"),
            &folder.path().join("busybox"),
        );
        let text = error.expect_err("not there").to_string();
        assert!(
            text.contains("package set `busybox` has no file busybox"),
            "{text}"
        );
    }
}
