//! Places command line, initrd and modules beside the kernel.

use super::ModuleRequest;
use super::error::BootError;
use super::image::Image;
use super::memory::{
    CMDLINE_SIZE, CMDLINE_START, GuestMemory, HOLE_START, MIB, MODULE_STRINGS_SIZE,
    MODULE_STRINGS_START, PAGE_SIZE, low_end, write,
};
use super::multiboot::LoadedModule;
use super::segments::Span;
use super::wire::{align_down, align_up};

/// Writes the command line with its terminator.
///
/// `limit` is the longest that the kernel takes, in bytes without the terminator.
pub(crate) fn cmdline(mem: &GuestMemory, text: &str, limit: usize) -> Result<(), BootError> {
    let limit = limit.min(CMDLINE_SIZE - 1);
    if text.len() > limit {
        return Err(BootError::CmdlineTooLong {
            len: text.len(),
            limit,
        });
    }
    Ok(write(
        mem,
        CMDLINE_START,
        &terminated(text, || "the kernel".into())?,
    )?)
}

/// Copies an initrd to the top of the memory below the hole.
///
/// `address_limit` is the highest address that the kernel takes.
pub(crate) fn initrd(
    mem: &GuestMemory,
    image: &Image,
    kernel: Span,
    address_limit: u64,
) -> Result<Span, BootError> {
    let low_end = low_end(mem)?;
    let top = low_end.min(address_limit.saturating_add(1));
    let first = align_up(kernel.end, PAGE_SIZE).unwrap_or(top);
    let start = top
        .checked_sub(image.len())
        .map(|start| align_down(start, PAGE_SIZE));
    let Some(start) = start.filter(|&start| start >= first) else {
        let advice = if top < low_end {
            format!("this kernel takes an initrd only below {top:#x}: make it smaller")
        } else {
            memory_advice(first, image.len())
        };
        return Err(no_room(image, top.saturating_sub(first), advice));
    };
    image.copy_to_guest(mem, start, 0, image.len(), "the content")?;
    Ok(Span {
        start,
        end: start + image.len(),
    })
}

/// Copies modules behind the kernel, each to a page of its own, and writes their strings.
///
/// A module's string begins with its file name, as QEMU and GRUB do it.
pub(crate) fn modules(
    mem: &GuestMemory,
    modules: &[(Image, &ModuleRequest)],
    kernel: Span,
) -> Result<Vec<LoadedModule>, BootError> {
    let low_end = low_end(mem)?;
    let mut next = kernel.end;
    let mut strings = Vec::new();
    let mut loaded = Vec::new();
    for (image, request) in modules {
        let start = align_up(next, PAGE_SIZE).unwrap_or(low_end);
        let end = start.saturating_add(image.len());
        if end > low_end {
            let room = low_end.saturating_sub(start);
            return Err(no_room(image, room, memory_advice(start, image.len())));
        }
        image.copy_to_guest(mem, start, 0, image.len(), "the content")?;
        loaded.push(LoadedModule {
            span: Span { start, end },
            string: MODULE_STRINGS_START + strings.len() as u64,
        });
        let text = with_name(image, &request.cmdline);
        strings.extend(terminated(&text, || image.path().display().to_string())?);
        if strings.len() > MODULE_STRINGS_SIZE {
            return Err(BootError::ModuleStringsTooLong {
                limit: MODULE_STRINGS_SIZE,
            });
        }
        next = end;
    }
    write(mem, MODULE_STRINGS_START, &strings)?;
    Ok(loaded)
}

/// A Multiboot string: the file's name, and what the user gave.
pub(crate) fn with_name(image: &Image, text: &str) -> String {
    let name = image.file_name();
    if text.is_empty() {
        name
    } else {
        format!("{name} {text}")
    }
}

fn terminated(text: &str, owner: impl FnOnce() -> String) -> Result<Vec<u8>, BootError> {
    if text.contains('\0') {
        return Err(BootError::CmdlineNul { owner: owner() });
    }
    Ok([text.as_bytes(), &[0]].concat())
}

fn memory_advice(start: u64, len: u64) -> String {
    let needs = start.saturating_add(len).saturating_add(PAGE_SIZE);
    if needs > HOLE_START {
        return "make it smaller: it must lie below 3 GiB".into();
    }
    format!("give --memory {} or more", needs.div_ceil(MIB))
}

fn no_room(image: &Image, room: u64, advice: String) -> BootError {
    BootError::NoRoom {
        role: image.role(),
        path: image.path().to_owned(),
        len: image.len(),
        room,
        advice,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::boot::memory::create;

    const KERNEL: Span = Span {
        start: MIB,
        end: 2 * MIB + 1,
    };

    fn image(len: usize) -> Image {
        Image::from_bytes("initrd", Path::new("folder/file"), vec![0xa5; len])
    }

    fn check_initrd(len: usize, limit: u64, expected: Result<u64, &str>) {
        let mem = create(4).expect("memory");
        match (initrd(&mem, &image(len), KERNEL, limit), expected) {
            (Ok(span), Ok(start)) => {
                assert_eq!(
                    span,
                    Span {
                        start,
                        end: start + len as u64
                    }
                );
                let mut back = vec![0; len];
                mem.read_slice(&mut back, GuestAddress(start))
                    .expect("inside");
                assert!(back.iter().all(|&byte| byte == 0xa5));
            }
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (result, expected) => panic!("{result:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn an_initrd_lies_as_high_as_it_may() {
        check_initrd(1, u64::MAX, Ok(4 * MIB - 0x1000));
        check_initrd(0x1001, u64::MAX, Ok(4 * MIB - 0x2000));
        check_initrd(1, 3 * MIB - 1, Ok(3 * MIB - 0x1000));
        check_initrd(0x1f_f000, u64::MAX, Ok(2 * MIB + 0x1000));
        check_initrd(0x1f_f001, u64::MAX, Err("give --memory 5 or more"));
        check_initrd(0x20_0000, 3 * MIB - 1, Err("only below 0x300000"));
        check_initrd(1, 0, Err("only below 0x1"));
    }

    #[test]
    fn modules_follow_the_kernel_page_by_page() {
        let mem = create(4).expect("memory");
        let request = |text: &str| ModuleRequest {
            path: "folder/file".into(),
            cmdline: text.into(),
        };
        let (plain, with_text) = (request(""), request("a=b"));
        let list = [(image(0x1001), &plain), (image(5), &with_text)];
        let loaded = modules(&mem, &list, KERNEL).expect("loaded");
        let spans: Vec<_> = loaded
            .iter()
            .map(|module| (module.span.start, module.span.end))
            .collect();
        assert_eq!(spans, [(0x20_1000, 0x20_2001), (0x20_3000, 0x20_3005)]);
        let text: [u8; 14] = mem
            .read_obj(GuestAddress(loaded[0].string))
            .expect("inside");
        assert_eq!(&text, b"file\0file a=b\0");
        assert_eq!(loaded[1].string, loaded[0].string + 5);
    }

    #[test]
    fn modules_and_strings_are_bounded() {
        let mem = create(4).expect("memory");
        let request = |text: String| ModuleRequest {
            path: "folder/file".into(),
            cmdline: text,
        };
        let check = |len: usize, text: String, part: &str| {
            let request = request(text);
            let error = modules(&mem, &[(image(len), &request)], KERNEL).expect_err(part);
            assert!(error.to_string().contains(part), "{error}");
        };
        check(0x20_0000, String::new(), "give --memory 5");
        check(1, "x".repeat(MODULE_STRINGS_SIZE), "they share 61440 bytes");
        check(
            1,
            "a\0b".into(),
            "the command line of folder/file contains a NUL byte",
        );
    }

    #[test]
    fn the_command_line_is_bounded_by_kernel_and_area() {
        let mem = create(4).expect("memory");
        let check = |len: usize, limit: usize, fits: bool| {
            let result = cmdline(&mem, &"x".repeat(len), limit);
            assert_eq!(result.is_ok(), fits, "{len} of {limit}");
        };
        check(0, 0, true);
        check(2047, 2047, true);
        check(2048, 2047, false);
        check(CMDLINE_SIZE - 1, usize::MAX, true);
        check(CMDLINE_SIZE, usize::MAX, false);
        assert!(matches!(
            cmdline(&mem, "a\0", 99),
            Err(BootError::CmdlineNul { .. })
        ));
        cmdline(&mem, "quiet", 99).expect("written");
        let text: [u8; 6] = mem.read_obj(GuestAddress(CMDLINE_START)).expect("inside");
        assert_eq!(&text, b"quiet\0");
    }
}
