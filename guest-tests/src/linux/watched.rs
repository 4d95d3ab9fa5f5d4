//! A Linux guest in QEMU without KVM, whose memory and registers can be looked at at any time.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use guest_view::{GuestMemory, Mode, Registers};
use tempfile::TempDir;

use super::{Guest, Halted};
use crate::l1::tool::last_lines;
use crate::l1::{Cache, L1Error, Set, qemu_command, spawn_bound};

const MEMORY_MIB: u64 = 512;
/// For how long it runs before it is halted.
const BETWEEN: Duration = Duration::from_millis(3);
/// What QEMU's monitor ends every answer with.
const PROMPT: &[u8] = b"(qemu) ";

/// A guest that runs. It ends with this, and has to be dropped by the thread that started it.
#[derive(Debug)]
pub struct Watched {
    qemu: Child,
    monitor: UnixStream,
    memory: File,
    folder: TempDir,
}

impl Watched {
    /// Boots `guest` on `cpu`, one of QEMU's processors, with `options` for the kernel. What it
    /// writes to `/dev/ttyS1` is [`said`](Halted::said).
    ///
    /// # Errors
    /// QEMU cannot be had or started.
    pub fn start(guest: &Guest, cpu: &str, options: &str) -> Result<Self, L1Error> {
        let sets = Cache::of_user().fetch(&[Set::Qemu])?;
        let root = &sets[0].folder;
        let folder = tempfile::tempdir();
        let folder = folder.map_err(L1Error::file("create a folder in", std::env::temp_dir()))?;
        let place = |name: &str| folder.path().join(name);
        let file = place("memory");
        let (monitor, theirs) = UnixStream::pair().map_err(L1Error::file("connect", root))?;
        let mut command = qemu_command(root, Vec::new());
        for words in [
            "-nodefaults -no-user-config -display none -no-reboot -machine q35,memory-backend=m",
            "-accel tcg,thread=multi -smp 2 -serial chardev:console -serial chardev:said",
            "-mon chardev=monitor,mode=readline",
        ] {
            command.args(words.split(' '));
        }
        let chardev = |id: &str| format!("file,id={id},path={}", place(id).display());
        let backend = format!(
            "memory-backend-file,id=m,size={MEMORY_MIB}M,share=on,mem-path={}",
            file.display()
        );
        command
            .args(["-cpu", cpu, "-object", &backend])
            .args(["-m", &MEMORY_MIB.to_string()])
            .args([
                "-chardev",
                &chardev("said"),
                "-chardev",
                &chardev("console"),
            ])
            .arg("-chardev")
            .arg(format!("socket,id=monitor,fd={}", theirs.as_raw_fd()))
            .arg("-L")
            .arg(root.join("usr/share/qemu"))
            .arg("-L")
            .arg(root.join("usr/share/seabios"))
            .arg("-kernel")
            .arg(guest.kernel())
            .arg("-initrd")
            .arg(guest.initrd())
            .arg("-append")
            // On a busy machine the timer is late, and the kernel would take it for broken.
            .arg(format!(
                "console=ttyS0 loglevel=5 panic=-1 no_timer_check {options}"
            ))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let qemu = spawn_bound(&mut command, vec![theirs.as_raw_fd()]);
        let qemu = qemu.map_err(L1Error::file("start", root))?;
        drop(theirs);
        let timeout = monitor.set_read_timeout(Some(Duration::from_secs(30)));
        timeout.map_err(L1Error::file("set up the monitor of", root))?;
        let mut monitor = monitor;
        // Its greeting comes when there is a machine, and so the file of its memory.
        let greeted = answer(&mut monitor);
        let memory = greeted.and_then(|_| File::open(&file));
        Ok(Self {
            qemu,
            monitor,
            memory: memory.map_err(L1Error::file("open", file))?,
            folder,
        })
    }

    fn ask(&mut self, command: &str) -> io::Result<String> {
        writeln!(self.monitor, "{command}")?;
        answer(&mut self.monitor)
    }
}

impl Halted for Watched {
    fn memory_bytes(&self) -> u64 {
        MEMORY_MIB << 20
    }

    fn said(&mut self, end: &str, timeout: Duration) -> String {
        let start = Instant::now();
        let text = |name: &str| {
            let bytes = fs::read(self.folder.path().join(name)).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        };
        while start.elapsed() < timeout && matches!(self.qemu.try_wait(), Ok(None)) {
            let said = text("said");
            if said.ends_with(end) {
                return said;
            }
            thread::sleep(Duration::from_millis(100));
        }
        panic!("{}", last_lines(&text("console"), 30));
    }

    fn halt_later(&mut self) -> io::Result<Vec<Registers>> {
        self.ask("cont")?;
        thread::sleep(BETWEEN);
        self.ask("stop")?;
        let text = self.ask("info registers -a")?;
        let found: Option<Vec<_>> = text.split("CPU#").skip(1).map(registers).collect();
        found.ok_or_else(|| io::Error::other(format!("no registers: {text}")))
    }
}

impl GuestMemory for Watched {
    fn read(&self, address: u64, buffer: &mut [u8]) -> bool {
        // Behind its end a file has no bytes.
        self.memory.read_exact_at(buffer, address).is_ok()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // Both fail only for a process that is gone already.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

fn answer(monitor: &mut UnixStream) -> io::Result<String> {
    let mut found = Vec::new();
    let mut part = [0; 4096];
    while !found.ends_with(PROMPT) {
        match monitor.read(&mut part)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => found.extend_from_slice(&part[..read]),
        }
    }
    Ok(String::from_utf8_lossy(&found).into_owned())
}

/// As `info registers` prints those of one processor.
fn registers(text: &str) -> Option<Registers> {
    let number = |name: &str| {
        let (_, rest) = text.split_once(name)?;
        let digits = rest.trim_start();
        let end = digits.find(|c: char| !c.is_ascii_hexdigit());
        u64::from_str_radix(&digits[..end?], 16).ok()
    };
    // Real mode has selectors that look like any.
    let level = number("CPL=")?;
    let cs = u16::try_from(number("CS =")?).ok()?;
    Some(Registers {
        rip: number("RIP=")?,
        rsp: number("RSP=")?,
        rbp: number("RBP=")?,
        rdx: number("RDX=")?,
        rdi: number("RDI=")?,
        r10: number("R10=")?,
        r13: number("R13=")?,
        cr3: number("CR3=")?,
        mode: if level == 0 {
            Mode::Kernel
        } else {
            Mode::of_cs(cs)
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_of_a_processor() {
        let text = "0\r\n\r\nCPU#0\r\nRAX=0000000000000000 RBX=1 RCX=2 RDX=00000000ffffffff\r\n\
                    RSI=5 RDI=0000000000000006 RBP=0000000000000007 RSP=00007ffd151e7c68\r\n\
                    R8 =0 R9 =0 R10=00007fb2b0782f08 R11=0\r\nR12=0 R13=0000000000000009 R14=0\r\n\
                    RIP=0000562c7213218e RFL=00000287 [--S--PC] CPL=3 II=0 A20=1 SMM=0 HLT=0\r\n\
                    CS =0033 0000000000000000 ffffffff 00affb00 DPL=3 CS64 [-RA]\r\n\
                    CR0=80050033 CR2=0 CR3=0000000017e01000 CR4=001006f0\r\n";
        let found = text
            .split("CPU#")
            .skip(1)
            .map(registers)
            .collect::<Option<Vec<_>>>();
        let expected = Registers {
            rip: 0x562c_7213_218e,
            rsp: 0x7ffd_151e_7c68,
            rbp: 7,
            rdx: 0xffff_ffff,
            rdi: 6,
            r10: 0x7fb2_b078_2f08,
            r13: 9,
            cr3: 0x17e0_1000,
            mode: Mode::User,
        };
        assert_eq!(found, Some(vec![expected]));
    }
}
