//! What is left of the two 8259s: their masks. Linux does without ISA interrupts if it cannot
//! read back what it wrote there.

use serde::{Deserialize, Serialize};

/// What comes next to the data port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
enum Expects {
    Mask,
    /// Initialisation command words 2 to 4, of which some are left out.
    Icw2 {
        single: bool,
        icw4: bool,
    },
    Icw3 {
        icw4: bool,
    },
    Icw4,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Pic {
    mask: u8,
    expects: Expects,
    /// Which pins are level-triggered.
    levels: u8,
}

/// Both controllers. Nothing is ever pending in them.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct PicMasks([Pic; 2]);

#[derive(Debug, Clone, Copy)]
enum PicPort {
    Command,
    Data,
    Levels,
}

impl PicMasks {
    pub(crate) fn new() -> Self {
        let pic = Pic {
            mask: 0,
            expects: Expects::Mask,
            levels: 0,
        };
        Self([pic.clone(), pic])
    }

    fn decode(port: u16) -> Option<(usize, PicPort)> {
        Some(match port {
            0x20 => (0, PicPort::Command),
            0x21 => (0, PicPort::Data),
            0xa0 => (1, PicPort::Command),
            0xa1 => (1, PicPort::Data),
            0x4d0 => (0, PicPort::Levels),
            0x4d1 => (1, PicPort::Levels),
            _ => return None,
        })
    }

    /// None if it is no port of theirs.
    pub(crate) fn read(&self, port: u16) -> Option<u8> {
        let (at, port) = Self::decode(port)?;
        Some(match port {
            // IRR, ISR, or the answer to a poll.
            PicPort::Command => 0,
            PicPort::Data => self.0[at].mask,
            PicPort::Levels => self.0[at].levels,
        })
    }

    pub(crate) fn write(&mut self, port: u16, value: u8) -> Option<()> {
        /// Pins that are edges on every PC are so here: timer, keyboard, cascade; clock, FPU.
        const MAY_BE_LEVEL: [u8; 2] = [0xf8, 0xde];
        let (at, port) = Self::decode(port)?;
        let pic = &mut self.0[at];
        match port {
            PicPort::Command => pic.command(value),
            PicPort::Data => pic.data(value),
            PicPort::Levels => pic.levels = value & MAY_BE_LEVEL[at],
        }
        Some(())
    }
}

impl Pic {
    /// ICW1 unmasks all; OCW2 and OCW3 are about interrupts, of which there are none.
    fn command(&mut self, value: u8) {
        const ICW1: u8 = 1 << 4;
        if value & ICW1 != 0 {
            self.mask = 0;
            self.expects = Expects::Icw2 {
                single: value & 2 != 0,
                icw4: value & 1 != 0,
            };
        }
    }

    fn data(&mut self, value: u8) {
        let last = |icw4| if icw4 { Expects::Icw4 } else { Expects::Mask };
        self.expects = match self.expects {
            Expects::Mask => {
                self.mask = value;
                Expects::Mask
            }
            Expects::Icw2 { single, icw4 } if single => last(icw4),
            Expects::Icw2 { icw4, .. } => Expects::Icw3 { icw4 },
            Expects::Icw3 { icw4 } => last(icw4),
            Expects::Icw4 => Expects::Mask,
        };
    }
}
