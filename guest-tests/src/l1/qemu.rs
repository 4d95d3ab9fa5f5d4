//! The QEMU command of the L1 machine: which machine, and how its ports reach this process.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::libraries::Libraries;

/// What the user may choose about the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Memory in MiB.
    pub(crate) memory_mib: u32,
    /// Number of processors.
    pub(crate) smp: u32,
    /// One processor whose time advances with its instructions, so that it is repeatable.
    pub(crate) icount: bool,
    /// A run's time, counted from QEMU's start.
    pub(crate) timeout: Duration,
}

/// The channels of the guest; each is a socket whose other end QEMU inherits.
pub(crate) const CHANNELS: [&str; 5] = ["console", "status", "stdout", "stderr", "files"];

/// This process's ends of the channels, and QEMU's, which are closed here once QEMU runs.
#[derive(Debug)]
pub(crate) struct Channels {
    pub(crate) ours: [UnixStream; 5],
    pub(crate) theirs: [UnixStream; 5],
}

impl Channels {
    /// Makes the socket pairs.
    pub(crate) fn open() -> io::Result<Self> {
        let [a, b, c, d, e] = [(); 5].map(|()| UnixStream::pair());
        let (a, b, c, d, e) = (a?, b?, c?, d?, e?);
        Ok(Self {
            ours: [a.0, b.0, c.0, d.0, e.0],
            theirs: [a.1, b.1, c.1, d.1, e.1],
        })
    }

    /// The descriptors that QEMU must inherit.
    pub(crate) fn inherited(&self) -> [RawFd; 5] {
        self.theirs.each_ref().map(AsRawFd::as_raw_fd)
    }
}

/// QEMU from an unpacked root, started through that root's own loader and libraries.
pub(crate) fn command(root: &Path, args: Vec<OsString>) -> Command {
    let mut command = Libraries::of_root(root).command("usr/bin/qemu-system-x86_64");
    command
        .args(args)
        .env(
            "QEMU_MODULE_DIR",
            root.join("usr/lib/x86_64-linux-gnu/qemu"),
        )
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    command
}

/// QEMU's arguments.
pub(crate) fn arguments(
    shape: Shape,
    root: &Path,
    kernel: &Path,
    initramfs: RawFd,
    channels: [RawFd; 5],
) -> Vec<OsString> {
    let mut args = Args(Vec::new());
    args.words("-nodefaults -no-user-config -display none -no-reboot -machine q35");
    // The processor that L1's kvm-amd was measured on; QEMU warns about what TCG cannot emulate of it.
    args.words("-cpu EPYC,+svm,+npt");
    if shape.icount {
        args.words("-accel tcg,thread=single -icount shift=1,sleep=off -smp 1");
    } else {
        args.words(&format!("-accel tcg,thread=multi -smp {}", shape.smp));
    }
    args.words(&format!("-m {}", shape.memory_mib));
    for folder in ["usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"] {
        args.pair("-L", root.join(folder));
    }
    args.pair("-kernel", kernel);
    args.pair("-initrd", format!("/proc/self/fd/{initramfs}"));
    args.pair(
        "-append",
        // The kernel hands its last words to init, as variables. On a busy machine the timer is
        // late, and the kernel would take it for broken.
        format!(
            "rdinit=/l1/init console=ttyS0 panic=-1 tsc=reliable no_timer_check mitigations=off \
             nokaslr L1_SECONDS={}{}",
            shape.timeout.as_secs(),
            if shape.icount { " L1_ICOUNT=1" } else { "" }
        ),
    );
    args.words("-device virtio-serial-pci");
    for (name, fd) in CHANNELS.iter().zip(channels) {
        args.pair("-chardev", format!("socket,id={name},fd={fd}"));
        if *name == "console" {
            args.words("-serial chardev:console");
        } else {
            args.pair(
                "-device",
                format!("virtserialport,chardev={name},name={name}"),
            );
        }
    }
    args.0
}

struct Args(Vec<OsString>);

impl Args {
    fn words(&mut self, words: &str) {
        self.0.extend(words.split_whitespace().map(OsString::from));
    }

    fn pair(&mut self, option: &str, value: impl Into<OsString>) {
        self.0.push(option.into());
        self.0.push(value.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes() {
        fn check(memory_mib: u32, smp: u32, icount: bool, expected: &str) {
            let shape = Shape {
                memory_mib,
                smp,
                icount,
                timeout: Duration::from_secs(300),
            };
            let args = arguments(shape, Path::new("/q"), Path::new("/k"), 9, [3, 4, 5, 6, 7]);
            let line = args
                .join(&OsString::from(" "))
                .into_string()
                .expect("UTF-8");
            assert!(line.contains(expected), "{line}");
        }
        check(1536, 2, false, " -accel tcg,thread=multi -smp 2 -m 1536 ");
        check(
            512,
            4,
            true,
            " -accel tcg,thread=single -icount shift=1,sleep=off -smp 1 -m 512 ",
        );
        check(512, 1, false, " -kernel /k -initrd /proc/self/fd/9 ");
        check(
            512,
            1,
            false,
            "-chardev socket,id=console,fd=3 -serial chardev:console ",
        );
        check(
            512,
            1,
            false,
            "-chardev socket,id=files,fd=7 -device virtserialport,chardev=files,name=files",
        );
    }
}
