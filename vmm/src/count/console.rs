//! What the guest's kernel says on its console, as far as anybody wants to know it.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use crate::sync::lock;

/// Bytes of the end that are kept.
const TAIL: usize = 16 << 10;
/// Bytes of a line that are looked at.
const LINE: usize = 512;

/// The console. All copies are one.
#[derive(Debug, Clone, Default)]
pub(super) struct Console(Arc<Mutex<KernelSaid>>);

/// What was said.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct KernelSaid {
    /// The last of it.
    pub(super) tail: Vec<u8>,
    /// The kernel's last word, if it has given up.
    pub(super) panic: Option<String>,
    /// What it ended for want of memory, the first time.
    pub(super) out_of_memory: Option<String>,
    line: Vec<u8>,
}

impl Console {
    /// What was said so far.
    pub(super) fn said(&self) -> KernelSaid {
        lock(&self.0).clone()
    }
}

impl KernelSaid {
    fn take(&mut self, byte: u8) {
        if byte == b'\n' {
            // Names in it are what programs gave themselves.
            let line = guest_view::printable(self.line.trim_ascii_end());
            self.line.clear();
            self.look_at(&line);
        } else if self.line.len() < LINE {
            self.line.push(byte);
        }
    }

    fn look_at(&mut self, line: &str) {
        let text = without_time(line);
        // How a line begins is the kernel's, and longer than the name of a process, which is in
        // some of them.
        if text.starts_with("Kernel panic - not syncing: ") {
            self.panic.get_or_insert_with(|| text.to_owned());
        } else if text.starts_with("Out of memory: Killed process ") {
            self.out_of_memory.get_or_insert_with(|| text.to_owned());
        }
    }
}

/// A line without the time that it begins with, in brackets.
fn without_time(line: &str) -> &str {
    let rest = line
        .strip_prefix('[')
        .and_then(|rest| rest.split_once("] "));
    match rest {
        Some((time, text)) if time.trim_start().parse::<f64>().is_ok() => text,
        _ => line,
    }
}

impl Write for Console {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut said = lock(&self.0);
        bytes.iter().for_each(|byte| said.take(*byte));
        said.tail.extend(bytes);
        if said.tail.len() > 2 * TAIL {
            let old = said.tail.len() - TAIL;
            said.tail.drain(..old);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_last_words_are_found_and_the_rest_is_bounded() {
        let mut console = Console::default();
        let noise = [b'x'; 4 * TAIL];
        for part in [
            b"[    1.0] Out of memory: Killed process 47 (true) total-vm:1kB\r\n".as_slice(),
            b"[    1.1] Out of memory: Killed process 48 (Kernel panic - )\n",
            b"Out of memory: Killed process 48 (\nKernel panic -) a\x1b[31m\n",
            &noise,
            b"\n[    2.0] Kernel panic - not ",
            b"syncing: Attempted to kill init!\n",
        ] {
            console.write_all(part).expect("it is memory");
        }
        let said = console.said();
        let killed = said.out_of_memory.expect("found");
        assert_eq!(
            killed,
            "Out of memory: Killed process 47 (true) total-vm:1kB"
        );
        let panic = said.panic.expect("found");
        assert_eq!(panic, "Kernel panic - not syncing: Attempted to kill init!");
        assert!((TAIL..=2 * TAIL).contains(&said.tail.len()));
        assert!(said.tail.ends_with(b"kill init!\n"));
    }
}
