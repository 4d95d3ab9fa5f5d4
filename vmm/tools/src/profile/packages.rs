//! Who has the symbols of programs that were stripped.

use std::io::Read;

use super::names::Names;
use super::programs::{FileId, FileInfo};
use super::symfs::Folder;

/// Most files that are named.
const MOST_HINTS: usize = 3;
/// Where Debian and its descendants keep which package has which files: a list each.
const LISTS: &str = "/var/lib/dpkg/info";
/// Most lists, the longest one in bytes, and all of them together.
const MOST_LISTS: usize = 1 << 16;
const LONGEST_LIST: u64 = 16 << 20;
const MOST_BYTES: u64 = 512 << 20;
/// Folders that are below `/usr` in systems that put them together, and may still be listed
/// without it.
const MERGED: [&str; 6] = ["/bin/", "/sbin/", "/lib/", "/lib32/", "/lib64/", "/libx32/"];

/// For the files of `unnamed` that were stripped, the first ones: what has their symbols, a line
/// each. The number is that of the samples without a symbol.
pub(super) fn hints(names: &Names, unnamed: &[(FileId, u64)]) -> Vec<String> {
    let stripped = unnamed.iter().filter(|(file, _)| names.is_stripped(*file));
    let lines = stripped.filter_map(|(file, samples)| hint(names, *file, *samples));
    lines.take(MOST_HINTS).collect()
}

fn hint(names: &Names, file: FileId, samples: u64) -> Option<String> {
    let symfs = names.symfs.as_ref()?;
    let (info, others) = names.programs.file_and_others(file);
    let (folder, name) = symfs.place(info)?;
    let place = symfs.debug_place((info, &others));
    let package = package_of(folder, &name).map(|package| debug_package(&package));
    let below = folder.path().display();
    let what = match (package, &place) {
        (Some(package), Some(place)) => format!(
            "the package {package} has its symbols: install it in the guest, or put its file \
             {} below {below}",
            place.trim_start_matches('/')
        ),
        (Some(package), None) => {
            format!("the package {package} has its symbols: install it in the guest")
        }
        (None, Some(place)) => format!(
            "'debuginfod-find debuginfo {}' finds its debug file, which belongs below {below} as \
             {}",
            build_id_of(place),
            place.trim_start_matches('/')
        ),
        (None, None) => format!(
            "it has no build id, so no debug file is found for it: put a build with symbols \
             below {below}"
        ),
    };
    let samples = match samples {
        1 => "1 sample is".to_owned(),
        more => format!("{more} samples are"),
    };
    let whole = FileInfo::whole_name(info);
    Some(format!(
        "{samples} in no symbol of {whole}, which was stripped: {what}"
    ))
}

/// The build id in the name of a debug file.
fn build_id_of(place: &str) -> String {
    let digits = place.rsplit('/').take(2).collect::<Vec<&str>>();
    let digits: String = digits.into_iter().rev().collect();
    digits.trim_end_matches(".debug").to_owned()
}

/// The package that has the symbols of what is in `package`.
fn debug_package(package: &str) -> String {
    match package {
        // It is older than packages that are made by themselves.
        "libc6" => "libc6-dbg".to_owned(),
        _ => format!("{package}-dbgsym"),
    }
}

/// The package of the file `name` of a system of Debian's kind; none if there is no such list.
fn package_of(folder: &Folder, name: &str) -> Option<String> {
    let other = match name.strip_prefix("/usr") {
        Some(rest) => rest.to_owned(),
        None => format!("/usr{name}"),
    };
    let rest = name.strip_prefix("/usr").unwrap_or(name);
    let is_merged = MERGED.iter().any(|merged| rest.starts_with(merged));
    let lists = folder.list(LISTS, MOST_LISTS).ok()?;
    let mut left = MOST_BYTES;
    let mut text = Vec::new();
    for list in lists {
        let Some(package) = list.strip_suffix(".list") else {
            continue;
        };
        let Ok(file) = folder.file(&format!("{LISTS}/{list}")) else {
            continue;
        };
        text.clear();
        if file
            .take(LONGEST_LIST.min(left))
            .read_to_end(&mut text)
            .is_err()
        {
            continue;
        }
        left -= text.len() as u64;
        let mut lines = text.split(|byte| *byte == b'\n');
        let is_it = |line: &[u8]| line == name.as_bytes() || is_merged && line == other.as_bytes();
        if lines.any(is_it) {
            // The architecture is behind a colon.
            let package = package.split(':').next().unwrap_or(package);
            let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
            return (!package.is_empty() && package.bytes().all(plain)).then(|| package.to_owned());
        }
        if left == 0 {
            return None;
        }
    }
    None
}

#[cfg(test)]
mod tests;
