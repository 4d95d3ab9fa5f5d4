//! Where what was fetched is kept.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Umpire's folder among the user's caches, as variables of the environment say: in
/// `XDG_CACHE_HOME`, else in `.cache` of `HOME`. One that is empty is not set; with neither there is
/// none.
#[must_use]
pub fn user_cache(variable: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let folder = |name| variable(name).filter(|value| !value.is_empty());
    let caches = match folder("XDG_CACHE_HOME") {
        Some(caches) => PathBuf::from(caches),
        None => Path::new(&folder("HOME")?).join(".cache"),
    };
    Some(caches.join("umpire"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_follows_the_environment() {
        fn check(variables: &[(&str, &str)], expected: Option<&str>) {
            let folder = user_cache(&|name| {
                let found = variables.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| OsString::from(value))
            });
            assert_eq!(folder.as_deref(), expected.map(Path::new), "{variables:?}");
        }
        let home = ("HOME", "/h");
        check(&[home], Some("/h/.cache/umpire"));
        check(&[home, ("XDG_CACHE_HOME", "/x")], Some("/x/umpire"));
        check(&[home, ("XDG_CACHE_HOME", "")], Some("/h/.cache/umpire"));
        check(&[("HOME", "")], None);
        check(&[], None);
    }
}
