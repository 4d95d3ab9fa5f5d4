//! Debian's kernel headers, made to work wherever the cache is: modules for the Linux guest are
//! built against them.
//!
//! The packages expect to be installed: their Makefile names `/usr/src`, and `objtool` needs
//! libelf. Both are set right here, so that nothing has to be installed and the folder can move.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use debian_packages::{Apt, Package};

use super::error::L1Error;

/// The folder for `make -C`, relative to the set.
pub(crate) const BUILD: &str = "build";

/// Packages beside the kernel's own that belong to its headers, with libraries of their tools.
const PARTS: [&str; 4] = ["linux-headers-", "linux-kbuild-", "libelf1", "zlib1g"];
/// Where the libraries are unpacked to, and what they are called.
const LIBRARIES: [(&str, &str); 2] = [
    ("usr/lib/x86_64-linux-gnu", "libelf.so.1"),
    ("lib/x86_64-linux-gnu", "libz.so.1"),
];
/// Where Debian's builds of the kernel's tools are; one folder for each version.
const KBUILD: &str = "usr/lib";
const WRAPPER: &str = "#!/bin/sh\n\
    own=$(readlink -f \"$0\")\n\
    LD_LIBRARY_PATH=$(dirname \"$own\") exec \"$own.real\" \"$@\"\n";

/// The packages that `kernel`, an image package, is built against.
pub(crate) fn packages(apt: &Apt<'_>, kernel: &Package) -> Result<Vec<Package>, L1Error> {
    let name = kernel.name.replacen("linux-image-", "linux-headers-", 1);
    let all = apt.closure(&[&name], None)?;
    let wanted = |package: &Package| PARTS.iter().any(|part| package.name.starts_with(part));
    Ok(all.into_iter().filter(wanted).collect())
}

/// Moves the headers of `root`, where packages were unpacked, into the set `ready`.
pub(crate) fn take(root: &Path, ready: &Path, set: &'static str) -> Result<(), L1Error> {
    let missing = |file: &str| L1Error::PackageContent {
        set,
        file: file.to_owned(),
    };
    let sources = root.join("usr/src");
    let entries = fs::read_dir(&sources).map_err(L1Error::file("read", &sources))?;
    let mut names: Vec<String> = entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    let find = |end: &str| names.iter().find(|name| name.ends_with(end));
    let cloud = find("-cloud-amd64").ok_or_else(|| missing("Module.symvers"))?;
    let common = find("-common").ok_or_else(|| missing("include/linux"))?;
    let kbuild = root.join(KBUILD);
    let entries = fs::read_dir(&kbuild).map_err(L1Error::file("read", &kbuild))?;
    let names = entries.flatten().map(|entry| entry.file_name());
    let mut names = names.map(|name| name.to_string_lossy().into_owned());
    let tools = names.find(|name| name.starts_with("linux-kbuild-"));
    let tools = format!("{KBUILD}/{}", tools.ok_or_else(|| missing("objtool"))?);
    keep_x86(&sources.join(common).join("arch"))?;
    give_libraries(root, &root.join(&tools).join("tools/objtool"))?;
    let makefile = sources.join(cloud).join("Makefile");
    let text = format!("include $(dir $(lastword $(MAKEFILE_LIST)))../{common}/Makefile\n");
    fs::write(&makefile, text).map_err(L1Error::file("write", &makefile))?;
    for part in ["usr/src", &tools] {
        let place = ready.join("headers").join(part);
        let parent = place.parent().unwrap_or(ready);
        fs::create_dir_all(parent).map_err(L1Error::file("create", parent))?;
        fs::rename(root.join(part), &place).map_err(L1Error::file("rename to", &place))?;
    }
    let link = ready.join(BUILD);
    symlink(format!("headers/usr/src/{cloud}"), &link).map_err(L1Error::file("create", &link))
}

/// Removes other processors' headers.
fn keep_x86(arch: &Path) -> Result<(), L1Error> {
    let entries = fs::read_dir(arch).map_err(L1Error::file("read", arch))?;
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() && !path.ends_with("x86") {
            fs::remove_dir_all(&path).map_err(L1Error::file("remove", &path))?;
        }
    }
    Ok(())
}

/// Puts the libraries beside `objtool`, and a script in front of it that sets their path.
fn give_libraries(root: &Path, folder: &Path) -> Result<(), L1Error> {
    for (from, name) in LIBRARIES {
        let (from, to) = (root.join(from).join(name), folder.join(name));
        fs::copy(&from, to).map_err(L1Error::file("copy", &from))?;
    }
    // A later one has a front for all processors, which starts what is beside it.
    let names = ["objtool.real-x86", "objtool"].map(|name| folder.join(name));
    let tool = names.iter().find(|tool| tool.exists());
    let tool = tool.unwrap_or(&names[1]).clone();
    let mut real = tool.clone().into_os_string();
    real.push(".real");
    fs::rename(&tool, real).map_err(L1Error::file("rename", &tool))?;
    fs::write(&tool, WRAPPER).map_err(L1Error::file("write", &tool))?;
    let executable = fs::Permissions::from_mode(0o755);
    fs::set_permissions(&tool, executable).map_err(L1Error::file("set the mode of", &tool))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OBJTOOL: &str = "usr/lib/linux-kbuild-6.1/tools/objtool";

    fn put(root: &Path, name: &str, text: &str) {
        let path = root.join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        fs::write(path, text).expect("written");
    }

    /// A root as the packages make it, less all that does not matter.
    fn unpacked(root: &Path) {
        let cloud = "usr/src/linux-headers-6.1.0-9-cloud-amd64";
        put(root, &format!("{cloud}/Makefile"), "include /usr/src/x\n");
        put(root, &format!("{cloud}/Module.symvers"), "");
        for arch in ["x86", "mips"] {
            let file = format!("usr/src/linux-headers-6.1.0-9-common/arch/{arch}/Makefile");
            put(root, &file, "");
        }
        put(root, &format!("{OBJTOOL}/objtool"), "binary");
        for (folder, name) in LIBRARIES {
            put(root, &format!("{folder}/{name}"), "library");
        }
    }

    #[test]
    fn headers_find_each_other_without_being_installed() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let (root, ready) = (folder.path().join("root"), folder.path().join("ready"));
        unpacked(&root);
        take(&root, &ready, "linux-6.1").expect("complete");
        let makefile = fs::read_to_string(ready.join("build/Makefile")).expect("follows the link");
        assert_eq!(
            makefile,
            "include $(dir $(lastword $(MAKEFILE_LIST)))../linux-headers-6.1.0-9-common/Makefile\n"
        );
        let common = ready.join("headers/usr/src/linux-headers-6.1.0-9-common/arch");
        assert!(common.join("x86/Makefile").exists());
        assert!(!common.join("mips").exists());
        let tools = ready.join("headers").join(OBJTOOL);
        assert_eq!(
            fs::read(tools.join("objtool.real")).expect("moved"),
            b"binary"
        );
        assert!(tools.join("libelf.so.1").exists());
    }

    #[test]
    fn a_front_for_all_processors_stays() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let (root, tools) = (folder.path(), folder.path().join(OBJTOOL));
        unpacked(root);
        put(root, &format!("{OBJTOOL}/objtool.real-x86"), "x86's");
        give_libraries(root, &tools).expect("complete");
        let text = |name| fs::read_to_string(tools.join(name)).expect("there");
        assert_eq!(text("objtool"), "binary");
        assert_eq!(text("objtool.real-x86"), WRAPPER);
        assert_eq!(text("objtool.real-x86.real"), "x86's");
    }

    #[test]
    fn incomplete_packages_are_named() {
        let folder = tempfile::tempdir().expect("temporary folder");
        put(folder.path(), "usr/src/linux-headers-6.1.0-9-common/x", "");
        let error = take(folder.path(), &folder.path().join("ready"), "linux-6.1");
        let text = error.expect_err("no headers").to_string();
        assert!(
            text.contains("package set `linux-6.1` has no file Module.symvers"),
            "{text}"
        );
    }
}
