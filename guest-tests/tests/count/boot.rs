//! Debian's kernel in the small machine: what it is after a boot does not depend on how often the
//! machine was kept in a file and gone on with from there.

use std::path::PathBuf;
use std::time::Duration;

use guest_files::{Errand, Errno, FileServer, Kernel, MemoryTree, Out, Sink, initramfs};
use vmm::count::{End, Image, Limits, Plan, Signals, boot_in_parts};

use super::fetched;

const SIGNALS: Signals = Signals {
    tag: count_init::TAG,
    port: count_init::PORT,
    ready: count_init::READY,
    done: count_init::DONE,
};
/// Virtual times of the boot, in nanoseconds: the kernel's first steps, its devices, its first
/// program.
const TIMES: [u64; 3] = [30_000_000, 170_000_000, 480_000_000];

/// Takes what the guest says, and keeps none of it.
#[derive(Debug)]
struct Nowhere;

impl Sink for Nowhere {
    fn take(&mut self, _: Out, _: &[u8]) -> Result<(), Errno> {
        Ok(())
    }
}

/// The package that `umpire count --fetch-kernel` leaves in the cache.
pub(super) fn package() -> PathBuf {
    fetched();
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || PathBuf::from(std::env::var_os("HOME").expect("a home")).join(".cache");
    let folder = cache.unwrap_or_else(home).join("umpire/count/kernel");
    let files = std::fs::read_dir(&folder).expect("the kernel's folder");
    let packages = files.map(|file| file.expect("a file").path());
    let mut packages = packages.filter(|path| path.extension().is_some_and(|it| it == "deb"));
    packages.next().expect("a kernel")
}

fn serve() -> impl FnMut(&[u8], &mut Vec<u8>) + Send + 'static {
    let mut files = FileServer::new(MemoryTree::default(), Nowhere, Errand::default());
    move |request: &[u8], reply: &mut Vec<u8>| files.answer(request, reply)
}

#[test]
fn debians_kernel_boots_in_parts_to_the_same_machine() {
    let kernel = Kernel::of_package(&package()).expect("a kernel");
    let initramfs = initramfs(&kernel).expect("a first program");
    let plan = Plan {
        kernel: kernel.image(),
        initramfs: &initramfs,
        memory_mib: 128,
        signals: SIGNALS,
        engine: "test",
    };
    let folder = tempfile::tempdir().expect("a folder");
    let in_parts = boot_in_parts(&plan, folder.path(), serve, &TIMES).expect("it boots");
    let path = folder.path().join("image");
    let image = Image::boot(&plan, &path, serve(), Limits::default(), |_| {});
    let image = image.expect("it boots");
    assert_eq!(image.state_hash().expect("a machine"), in_parts);

    // What it is gone on with for is its own: a job that is none fails the same each time.
    let run = || {
        let limits = Limits::within(Duration::from_secs(60));
        let ran = image.run(serve(), limits, None).expect("it begins");
        assert_eq!(ran.end, End::Done);
        (ran.instructions, ran.virtual_ns)
    };
    assert_eq!(run(), run());
}
