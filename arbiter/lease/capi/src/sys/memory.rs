//! The caller's memory: structures with a size, texts and lists.

use std::ffi::{CStr, OsStr, c_char};
use std::mem::{MaybeUninit, size_of};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::slice;

use crate::failure::Failure;

fn wrong(text: impl Into<String>) -> Failure {
    Failure::new(libc::EINVAL, text)
}

/// The size that a structure of the caller says that it has, which is its first field.
fn size_of_theirs<T>(structure: *const T) -> Result<usize, Failure> {
    if structure.is_null() {
        return Err(wrong("a structure is NULL"));
    }
    // SAFETY: by the header every structure begins with its size, and is whole.
    let size = unsafe { structure.cast::<usize>().read() };
    if size < size_of::<usize>() {
        return Err(wrong("the size of a structure is not set"));
    }
    Ok(size)
}

/// A structure of the caller. What it does not have is 0; what it has beyond ours must be.
/// `T` has to be valid with every byte 0 and with whatever C may leave there.
pub(super) fn copy_in<T: Copy>(theirs: *const T) -> Result<T, Failure> {
    let size = size_of_theirs(theirs)?;
    // SAFETY: by the header so many bytes are there and initialised.
    let bytes = unsafe { slice::from_raw_parts(theirs.cast::<u8>(), size) };
    let (known, more) = bytes.split_at(size.min(size_of::<T>()));
    if more.iter().any(|byte| *byte != 0) {
        let text = "a structure has fields that this version of the library does not know";
        return Err(Failure::new(libc::E2BIG, text));
    }
    let mut ours = MaybeUninit::<T>::zeroed();
    // SAFETY: `known` is no longer than `T`, and the two do not overlap. The caller of this
    // function knows that `T` is valid then: numbers and raw pointers are.
    unsafe {
        ours.as_mut_ptr()
            .cast::<u8>()
            .copy_from_nonoverlapping(known.as_ptr(), known.len());
        Ok(ours.assume_init())
    }
}

/// Fills in a structure of the caller, as much as it has, but for its size.
pub(super) fn copy_out<T>(theirs: *mut T, ours: T) -> Result<(), Failure> {
    let size = size_of_theirs(theirs)?.min(size_of::<T>());
    let head = size_of::<usize>();
    // SAFETY: by the header so many bytes may be written there, and `ours` has as many. The
    // two do not overlap, since `ours` is ours.
    unsafe {
        let from = (&raw const ours).cast::<u8>().add(head);
        from.copy_to_nonoverlapping(theirs.cast::<u8>().add(head), size - head);
    }
    Ok(())
}

/// A C string that may be absent.
fn bytes<'a>(text: *const c_char) -> Option<&'a [u8]> {
    // SAFETY: by the header it is NULL or a C string, which lasts for the call.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_bytes())
}

/// A text that may be absent.
pub(super) fn text(name: &str, text: *const c_char) -> Result<Option<String>, Failure> {
    let text = bytes(text).map(|bytes| std::str::from_utf8(bytes).map(str::to_owned));
    text.transpose()
        .map_err(|_| wrong(format!("{name} is not UTF-8")))
}

/// A path that may be absent.
pub(super) fn path(text: *const c_char) -> Option<PathBuf> {
    bytes(text).map(|bytes| OsStr::from_bytes(bytes).into())
}

/// So many values.
pub(super) fn list<T: Copy>(name: &str, first: *const T, count: usize) -> Result<Vec<T>, Failure> {
    if count == 0 {
        return Ok(Vec::new());
    }
    if first.is_null() {
        return Err(wrong(format!(
            "there are {count} {name}, and the list is NULL"
        )));
    }
    // SAFETY: by the header so many values are there.
    Ok(unsafe { slice::from_raw_parts(first, count) }.to_vec())
}

/// So many texts.
pub(super) fn texts(
    name: &str,
    first: *const *const c_char,
    count: usize,
) -> Result<Vec<String>, Failure> {
    let texts = list(name, first, count)?
        .into_iter()
        .map(|one| text(name, one)?.ok_or_else(|| wrong(format!("one of the {name} is NULL"))));
    texts.collect()
}
