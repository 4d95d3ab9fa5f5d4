//! Lines on COM1.

use core::fmt::{self, Write};

use super::sys;

/// Prints one line that begins with the firmware's name.
macro_rules! say {
    ($($word:tt)*) => {
        $crate::console::line(::core::format_args!($($word)*))
    };
}
pub(crate) use say;

struct Com1;

impl Write for Com1 {
    /// Umpire's UART takes each byte at once, so nobody waits for its line status.
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().for_each(sys::put_serial);
        Ok(())
    }
}

/// Prints one line.
pub(crate) fn line(text: fmt::Arguments<'_>) {
    // Com1 never fails.
    let _ = writeln!(Com1, "umpire-firmware: {text}");
}
