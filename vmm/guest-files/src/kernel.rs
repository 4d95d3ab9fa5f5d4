//! The guest's kernel: what it has to have, and the modules that bring it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use thiserror::Error;

/// What a kernel has to be configured with, and the module that brings it where it is not built
/// in.
struct Need {
    option: &'static str,
    module: Option<&'static str>,
    why: &'static str,
}

const fn built_in(option: &'static str, why: &'static str) -> Need {
    let module = None;
    Need {
        option,
        module,
        why,
    }
}

const fn module(option: &'static str, module: &'static str, why: &'static str) -> Need {
    let module = Some(module);
    Need {
        option,
        module,
        why,
    }
}

const NEEDS: [Need; 21] = [
    module("VIRTIO", "virtio", "devices"),
    module("VIRTIO_MMIO", "virtio_mmio", "devices"),
    module("FUSE_FS", "fuse", "files of this machine"),
    module("VIRTIO_FS", "virtiofs", "files of this machine"),
    module("OVERLAY_FS", "overlay", "writes above these files"),
    built_in("ACPI", "finding the devices"),
    built_in("BINFMT_ELF", "programs"),
    built_in("BINFMT_SCRIPT", "scripts"),
    built_in("BLK_DEV_INITRD", "the first program"),
    built_in("DEVTMPFS", "/dev"),
    built_in("INET", "the loopback interface"),
    built_in("MODULES", "the modules above"),
    built_in("MULTIUSER", "a user for the program"),
    built_in("PROC_FS", "/proc"),
    built_in("SIGNALFD", "the first program"),
    built_in("SYSFS", "/sys"),
    built_in("TMPFS", "writes"),
    built_in("TMPFS_XATTR", "writes above files of this machine"),
    built_in("UNIX98_PTYS", "a terminal"),
    built_in("X86_64", "64-bit programs"),
    built_in("X86_IOPL_IOPERM", "the port to the host"),
];

/// Modules that others of the table depend on in some configurations.
const BELOW: [&str; 2] = ["virtio_ring", "dax"];

/// Larger than any of these files is.
const LARGEST: u64 = 256 << 20;

/// Why a kernel cannot be used.
#[derive(Debug, Error)]
pub enum KernelError {
    /// A file cannot be read.
    #[error("{path}: {error}", path = .path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// What it is made of is not there.
    #[error("the kernel's package has no {0}: a Debian package linux-image-… is needed")]
    Part(&'static str),
    /// The package's members are packed in a way that is not known.
    #[error("the kernel's package has {0}, and data.tar.xz, .zst or data.tar can be read")]
    Packed(String),
    /// The name of a file does not say which version it is.
    #[error(
        "{path}: its name does not say which kernel it is: `vmlinuz-VERSION` is needed, with \
         `config-VERSION` beside it and its modules in /lib/modules/VERSION, or a Debian package",
        path = .0.display()
    )]
    Unnamed(PathBuf),
    /// Options that it was built without.
    #[error("this kernel was built without {0}")]
    Without(String),
    /// A module that is not there.
    #[error("the kernel's module {0} is not there")]
    Module(String),
}

/// A kernel for guests, in memory.
#[derive(Clone, Debug)]
pub struct Kernel {
    image: Vec<u8>,
    /// In the order in which they are loaded.
    modules: Vec<Vec<u8>>,
}

/// What was found of a kernel.
#[derive(Default)]
struct Found {
    image: Option<Vec<u8>>,
    config: Option<Vec<u8>>,
    modules: BTreeMap<String, Vec<u8>>,
}

impl Kernel {
    /// The kernel of a Debian package (`linux-image-…_amd64.deb`), checked.
    ///
    /// # Errors
    /// It is no such package, or lacks what the guest needs, by name.
    pub fn of_package(path: &Path) -> Result<Self, KernelError> {
        let at = |error| KernelError::File {
            path: path.to_owned(),
            error,
        };
        let file = fs::File::open(path).map_err(at)?;
        let mut members = ar::Archive::new(io::BufReader::new(file));
        while let Some(member) = members.next_entry() {
            let member = member.map_err(at)?;
            let name = String::from_utf8_lossy(member.header().identifier()).into_owned();
            let name = name.trim_end_matches('/');
            if !name.starts_with("data.tar") {
                continue;
            }
            let unpacked: Box<dyn Read + '_> = match name {
                "data.tar" => Box::new(member),
                "data.tar.xz" => Box::new(liblzma::read::XzDecoder::new(member)),
                "data.tar.zst" => Box::new(zstd(member).map_err(at)?),
                other => return Err(KernelError::Packed(other.to_owned())),
            };
            let found = find(unpacked).map_err(at)?;
            return found.check();
        }
        Err(KernelError::Part("data.tar"))
    }

    /// A kernel as it is installed: `vmlinuz-VERSION`, with `config-VERSION` in the same folder,
    /// and modules in `lib/modules/VERSION` of that folder, of the one above, or of this machine.
    ///
    /// # Errors
    /// A file is not there, or it lacks what the guest needs, by name.
    pub fn of_files(image: &Path) -> Result<Self, KernelError> {
        let read = |path: &Path| {
            fs::read(path).map_err(|error| KernelError::File {
                path: path.to_owned(),
                error,
            })
        };
        let name = image.file_name().unwrap_or_default().to_string_lossy();
        let version = name.strip_prefix("vmlinuz-");
        let version = version.ok_or_else(|| KernelError::Unnamed(image.to_owned()))?;
        let folder = image.parent().unwrap_or(Path::new(""));
        let mut found = Found {
            image: Some(read(image)?),
            config: Some(read(&folder.join(format!("config-{version}")))?),
            modules: BTreeMap::new(),
        };
        let above = folder.parent().unwrap_or(Path::new("/"));
        let roots = [folder, above, Path::new("/")];
        let modules = roots.map(|root| root.join("lib/modules").join(version).join("kernel"));
        // A kernel with all of it built in needs none.
        if let Some(modules) = modules.iter().find(|folder| folder.is_dir()) {
            for path in files_below(modules) {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                if let Some(module) = wanted_module(&name) {
                    let bytes = read(&path)?;
                    let unpacked = unpacked(&name, &bytes[..]);
                    let bytes = unpacked.map_err(|error| KernelError::File { path, error })?;
                    found.modules.insert(module, bytes);
                }
            }
        }
        found.check()
    }

    /// The kernel itself, as it is booted.
    #[must_use]
    pub fn image(&self) -> &[u8] {
        &self.image
    }

    pub(crate) fn modules(&self) -> &[Vec<u8>] {
        &self.modules
    }
}

/// Goes through a package's files, as long as any is missing that might come.
fn find(archive: impl Read) -> io::Result<Found> {
    let mut found = Found::default();
    let mut archive = tar::Archive::new(archive);
    for entry in archive.entries()? {
        let entry = entry?;
        let path = entry.path()?.into_owned();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let is_in = |folder: &str| path.components().any(|part| part.as_os_str() == folder);
        if is_in("boot") && name.starts_with("vmlinuz-") {
            found.image = Some(whole(entry)?);
        } else if is_in("boot") && name.starts_with("config-") {
            found.config = Some(whole(entry)?);
        } else if is_in("modules")
            && let Some(module) = wanted_module(&name)
        {
            found.modules.insert(module, unpacked(&name, entry)?);
        }
    }
    Ok(found)
}

/// The name of a module that guests may need, without its endings.
fn wanted_module(file: &str) -> Option<String> {
    let (name, _) = file.split_once(".ko")?;
    let name = name.replace('-', "_");
    let needs = NEEDS.iter().filter_map(|need| need.module);
    needs.chain(BELOW).any(|one| one == name).then_some(name)
}

/// A module's bytes, without its compression.
fn unpacked(name: &str, bytes: impl Read) -> io::Result<Vec<u8>> {
    match name.rsplit_once(".ko").map(|(_, ending)| ending) {
        Some(".xz") => whole(liblzma::read::XzDecoder::new(bytes)),
        Some(".zst") => whole(zstd(bytes)?),
        _ => whole(bytes),
    }
}

fn zstd<R: Read>(bytes: R) -> io::Result<impl Read> {
    ruzstd::decoding::StreamingDecoder::new(bytes).map_err(io::Error::other)
}

fn whole(from: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(LARGEST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Files of a folder and the folders in it; what cannot be read has none.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let (mut files, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(kind) if kind.is_file() => files.push(entry.path()),
                _ => {}
            }
        }
    }
    files.sort();
    files
}

impl Found {
    fn check(self) -> Result<Kernel, KernelError> {
        let image = self.image.ok_or(KernelError::Part("boot/vmlinuz-…"))?;
        let config = self.config.ok_or(KernelError::Part("boot/config-…"))?;
        let config = String::from_utf8_lossy(&config).into_owned();
        let lines: BTreeSet<&str> = config.lines().collect();
        let mut missing = Vec::new();
        let mut wanted = Vec::new();
        for need in &NEEDS {
            let has = |value| lines.contains(&*format!("CONFIG_{}={value}", need.option));
            match need.module {
                _ if has("y") => {}
                Some(module) if has("m") => wanted.push(module),
                _ => missing.push(format!("CONFIG_{} ({})", need.option, need.why)),
            }
        }
        if !missing.is_empty() {
            return Err(KernelError::Without(missing.join(", ")));
        }
        let mut order = Vec::new();
        for module in wanted {
            load_order(module, &self.modules, &mut order)?;
        }
        let modules = order.iter().filter_map(|name| self.modules.get(name));
        Ok(Kernel {
            image,
            modules: modules.cloned().collect(),
        })
    }
}

/// Adds a module behind those that it depends on.
fn load_order(
    name: &str,
    modules: &BTreeMap<String, Vec<u8>>,
    order: &mut Vec<String>,
) -> Result<(), KernelError> {
    let mut left = vec![name.to_owned()];
    while let Some(name) = left.last().cloned() {
        let missing = || KernelError::Module(name.clone());
        let below = depends(modules.get(&name).ok_or_else(missing)?);
        match below.into_iter().find(|one| !order.contains(one)) {
            // Modules that wait for each other cannot be loaded by anybody.
            Some(next) if left.contains(&next) => return Err(missing()),
            Some(next) => left.push(next),
            None => {
                left.pop();
                if !order.contains(&name) {
                    order.push(name);
                }
            }
        }
    }
    Ok(())
}

/// What a module says that it depends on: `depends=a,b` among the texts of its section `.modinfo`,
/// each of which ends with a 0.
fn depends(module: &[u8]) -> Vec<String> {
    const BEFORE: &[u8] = b"\0depends=";
    let at = module.windows(BEFORE.len()).position(|part| part == BEFORE);
    let Some(at) = at else { return Vec::new() };
    let list = &module[at + BEFORE.len()..];
    let end = list.iter().position(|byte| *byte == 0);
    let list = String::from_utf8_lossy(&list[..end.unwrap_or(0)]).replace('-', "_");
    let names = list.split(',').filter(|name| !name.is_empty());
    names.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

    use super::{Kernel, KernelError, NEEDS, load_order};

    fn module(depends: &str) -> Vec<u8> {
        format!("\x7fELF\0license=GPL\0depends={depends}\0name=x\0").into_bytes()
    }

    /// The options of the table, all as modules where they may be, without one.
    fn config(without: &str) -> String {
        let needs = NEEDS.iter().filter(|need| need.option != without);
        let line = |value, option| format!("CONFIG_{option}={value}\n");
        needs
            .map(|need| line(if need.module.is_some() { "m" } else { "y" }, need.option))
            .collect()
    }

    #[test]
    fn modules_come_behind_those_that_they_depend_on() {
        let modules = [
            ("a", module("b,c-d")),
            ("b", module("")),
            ("c_d", module("b")),
        ];
        let modules: BTreeMap<_, _> = modules.map(|(name, of)| (name.to_owned(), of)).into();
        let mut order = Vec::new();
        load_order("a", &modules, &mut order).expect("all are there");
        assert_eq!(order, ["b", "c_d", "a"]);
        let circle = [("a", module("b")), ("b", module("a"))];
        let circle: BTreeMap<_, _> = circle.map(|(name, of)| (name.to_owned(), of)).into();
        assert!(load_order("a", &circle, &mut Vec::new()).is_err());
    }

    #[test]
    fn an_installed_kernel_is_checked_by_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let put = |name: &str, content: &[u8]| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().expect("a parent")).expect("room");
            fs::write(path, content).expect("room");
        };
        let image = folder.path().join("vmlinuz-6.1-x");
        let below = "lib/modules/6.1-x/kernel/drivers";
        put("vmlinuz-6.1-x", b"a kernel");
        put("config-6.1-x", config("TMPFS").as_bytes());
        let error = Kernel::of_files(&image).unwrap_err().to_string();
        assert_eq!(error, "this kernel was built without CONFIG_TMPFS (writes)");
        put("config-6.1-x", config("").as_bytes());
        for name in ["virtio", "virtio_mmio", "fuse", "overlay"] {
            put(&format!("{below}/{name}.ko"), &module(""));
        }
        let error = Kernel::of_files(&image).unwrap_err();
        assert!(matches!(error, KernelError::Module(name) if name == "virtiofs"));
        put(&format!("{below}/virtiofs.ko"), &module("fuse"));
        let kernel = Kernel::of_files(&image).expect("all is there");
        assert_eq!(
            (kernel.image(), kernel.modules().len()),
            (&b"a kernel"[..], 5)
        );
        let unnamed = Kernel::of_files(&folder.path().join("vmlinuz"));
        assert!(matches!(unnamed, Err(KernelError::Unnamed(_))));
    }

    #[test]
    fn what_is_no_package_is_said_so() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("x.deb");
        for bytes in [
            &b""[..],
            b"no archive at all",
            b"!<arch>\n",
            b"!<arch>\nrest",
        ] {
            fs::write(&path, bytes).expect("room");
            assert!(Kernel::of_package(&path).is_err());
        }
    }
}
