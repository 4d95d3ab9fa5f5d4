//! Bytes as a PMU with its policy, and as operations on it.

use std::slice;

use arbiter::{Access, GuardLimits, Layer, PerKind, Policy, Scheme, Share, Ticks, abi};

/// What is played on.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) counters: PerKind,
    pub(crate) widths: PerKind,
    pub(crate) policy: Policy,
    pub(crate) scheme: Scheme,
    pub(crate) guard: GuardLimits,
    pub(crate) ticks_per_ms: u64,
    pub(crate) has_firmware: bool,
    pub(crate) legacy: Option<PerKind>,
}

/// Numbers that stand for cookies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Palette {
    /// What owners choose.
    pub(crate) secrets: [u64; 3],
    /// The guess of a layer that does not know them.
    pub(crate) guess: u64,
}

impl Default for Palette {
    fn default() -> Self {
        Palette {
            secrets: [0x1234_5678_9abc, 1, 0xffff_ffff_ffff],
            guess: 0x8000_0000_0000,
        }
    }
}

impl Palette {
    fn register(&self, choice: u8) -> u64 {
        // Mostly one and the same: it has to be right to get anywhere.
        match choice % 16 {
            0..=3 => 0,
            4..=10 => self.secrets[0],
            11 => self.secrets[1],
            12 => self.secrets[2],
            13 => self.guess,
            // Too wide, by one bit and by all.
            14 => 1 << 48 | self.secrets[0],
            _ => u64::MAX,
        }
    }

    /// A cookie as an access presents it: never too wide.
    fn cookie(&self, choice: u8) -> u64 {
        self.register(choice % 14)
    }
}

/// One operation.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Read {
        index: u32,
        layer: Layer,
        presented: u64,
    },
    Write {
        index: u32,
        value: u64,
        layer: Layer,
        presented: u64,
    },
    /// An access to an existing counter that presents a cookie.
    Access {
        position: u8,
        layer: Layer,
        cookie: u64,
        access: Access,
    },
    /// Time passes, and the unit looks at its deadlines.
    Wait { ticks: u64 },
    /// Another vCPU ends the firmware's phase.
    EndPhase,
    /// The machine is reset.
    Reset,
    /// The bits of a shared register, from names to counters and back.
    Names { bits: u64 },
    /// The hypervisor sets a counter aside.
    SetAside { position: u8, cookie: u64 },
    /// The layer that was asked last answers.
    Reply { yields: bool, presented: u64 },
    /// Whether there is an interrupt to raise.
    TakeNotice,
}

/// The operations that bytes say.
#[derive(Debug)]
pub(crate) struct Script<'a> {
    bytes: slice::Iter<'a, u8>,
    palette: Palette,
    counters: PerKind,
}

impl<'a> Script<'a> {
    pub(crate) fn new(bytes: &'a [u8], palette: Palette) -> Self {
        Script {
            bytes: bytes.iter(),
            palette,
            counters: PerKind {
                programmable: 1,
                fixed: 0,
            },
        }
    }

    /// The first bytes are what is played on; bytes that are missing are 0.
    pub(crate) fn setup(&mut self) -> Setup {
        let mut byte = || self.bytes.next().copied().unwrap_or(0);
        let counters = PerKind {
            programmable: 1 + byte() % 6,
            fixed: byte() % 4,
        };
        let shares = [(); 3].map(|()| {
            let (sizes, rest) = (byte(), byte());
            share(sizes, rest)
        });
        let [firmware, hypervisor, kernel] = shares;
        let flags = byte();
        let scheme = byte();
        let each = 1 + u64::from(byte() % 50);
        let setup = Setup {
            counters,
            widths: PerKind {
                programmable: 48,
                fixed: if flags & 1 == 0 { 40 } else { 64 },
            },
            policy: Policy {
                firmware,
                hypervisor,
                kernel,
                grace_ms: 10,
            },
            // The model knows one of them, and so that one comes most often.
            scheme: match scheme % 4 {
                0 | 1 => Scheme::Independent,
                2 => Scheme::Interacting,
                _ => Scheme::SingleMaster,
            },
            guard: GuardLimits {
                burst: u32::from(flags >> 1 & 3),
                forgive_after: Ticks(each),
                first_penalty: Ticks(7),
                longest_penalty: Ticks(100),
            },
            ticks_per_ms: 1 + u64::from(flags >> 3 & 3) * 5,
            has_firmware: flags & 0x20 == 0,
            legacy: (flags & 0x40 == 0).then_some(PerKind {
                programmable: byte() % 5,
                fixed: byte() % 4,
            }),
        };
        self.counters = counters;
        setup
    }

    fn op(&mut self) -> Option<Op> {
        let [kind, who, which, what] = [self.byte()?, self.byte()?, self.byte()?, self.byte()?];
        let layer = layer(who);
        let presented = self.palette.register(who >> 4);
        let position = self.any_position(which);
        Some(match kind % 26 {
            row @ 0..=8 => {
                let index = |row: u32| abi::MSR_BASE + row * 0x40 + u32::from(position);
                match u32::from(row) {
                    // Reserving is worth more than its share: the rest hangs on it.
                    0 | 1 => Op::Write {
                        index: index(0),
                        value: self.palette.secrets[0],
                        layer,
                        presented: 0,
                    },
                    row @ 2..=4 => Op::Write {
                        index: index(row - 1),
                        value: self.value(row - 1, what)?,
                        layer,
                        presented: self.palette.secrets[0],
                    },
                    row => Op::Write {
                        index: index(row % 4),
                        value: self.value(row % 4, what)?,
                        layer,
                        presented,
                    },
                }
            }
            9 => {
                let index = self.index(which)?;
                // Keys are of the palette alone: what is a secret stays known.
                let value = match index - abi::MSR_BASE {
                    0..0x80 => self.palette.register(what),
                    _ => u64::from(what),
                };
                Op::Write {
                    index,
                    value,
                    layer,
                    presented,
                }
            }
            25 => Op::Read {
                index: self.index(which)?,
                layer,
                presented,
            },
            10..=12 => Op::Access {
                position: self.existing(which),
                layer,
                cookie: self.palette.cookie(who >> 4),
                access: [Access::Read, Access::Write, Access::Rdpmc][usize::from(what % 3)],
            },
            13 | 14 => Op::Wait {
                ticks: u64::from(which) * if kind & 0x80 == 0 { 1 } else { 37 },
            },
            16..=20 => Op::Write {
                index: abi::MSR_BASE + abi::MSR_REQUEST,
                value: self.request(which)?,
                layer,
                presented,
            },
            24 => Op::Reply {
                yields: what & 1 != 0,
                presented,
            },
            21 => Op::Write {
                index: abi::MSR_BASE + abi::MSR_REPLY,
                value: u64::from(if what < 16 { what } else { 1 + what % 2 })
                    | u64::from(position) << 8,
                layer,
                presented,
            },
            22 => Op::TakeNotice,
            23 => Op::SetAside {
                position,
                cookie: self.palette.cookie(what),
            },
            _ => match which % 4 {
                0 => Op::EndPhase,
                1 => Op::Reset,
                2 => Op::Names {
                    bits: u64::from(what) | u64::from(what) << 30,
                },
                _ => Op::Write {
                    index: abi::MSR_BASE + abi::MSR_PHASE,
                    value: u64::from(what % 3),
                    layer,
                    presented,
                },
            },
        })
    }

    fn byte(&mut self) -> Option<u8> {
        self.bytes.next().copied()
    }

    /// Mostly a counter that there is.
    fn any_position(&self, choice: u8) -> u8 {
        match choice {
            0..224 => self.existing(choice),
            _ => choice % 64,
        }
    }

    fn existing(&self, choice: u8) -> u8 {
        let PerKind {
            programmable,
            fixed,
        } = self.counters;
        let n = choice % (programmable + fixed);
        match n.checked_sub(programmable) {
            None => n,
            Some(n) => 32 + n,
        }
    }

    /// An index of the block, and some beside it.
    fn index(&mut self, choice: u8) -> Option<u32> {
        let offset = match choice % 8 {
            0 => u32::from(self.byte()?) << 4 | u32::from(choice >> 3),
            1 => 0x240 + u32::from(choice >> 3),
            row => {
                let position = self.byte()?;
                (u32::from(row) + 2) % 9 * 0x40 + u32::from(self.any_position(position))
            }
        };
        Some(abi::MSR_BASE + offset)
    }

    /// A word for `REQUEST`, mostly one that makes sense.
    fn request(&mut self, which: u8) -> Option<u64> {
        let [what, lease] = [self.byte()?, self.byte()?];
        let word = match what % 8 {
            0..=2 => 1 | u64::from(which % 5) << 8,
            3 | 4 => 0x11 | u64::from(self.any_position(which)) << 8,
            5 | 6 => 0x12 | u64::from(self.any_position(which)) << 8,
            _ => 3,
        };
        // Leases of reserving ones, and some of others.
        let lease = if what & 0x18 == 0x18 { lease % 4 } else { 0 };
        let wild = if what & 0xe0 == 0xe0 {
            1 << (lease % 64)
        } else {
            0
        };
        Some(word | u64::from(lease) << 16 | wild)
    }

    /// A value for one of the four rows that are written with the management
    /// cookie.
    fn value(&mut self, row: u32, what: u8) -> Option<u64> {
        Some(match row {
            0 | 1 => self.palette.register(what),
            2 => {
                let [modes, wild] = [self.byte()?, self.byte()?];
                let modes = if what & 0x80 == 0 {
                    modes | 0x0f
                } else {
                    modes
                };
                let high = u64::from(what & 0xf) << 16 | u64::from(what >> 4 & 3) << 8;
                let lend = u64::from(what >> 6 & 1) << 24;
                // One in sixteen has one bit anywhere.
                let wild = if wild % 16 == 0 { 1 << (wild >> 2) } else { 0 };
                u64::from(modes) | high | lend | wild
            }
            _ => {
                [0, 1, 0xdead, 1 << 39, 1 << 40, 1 << 47, 1 << 48, u64::MAX][usize::from(what % 8)]
            }
        })
    }
}

impl Iterator for Script<'_> {
    type Item = Op;

    fn next(&mut self) -> Option<Op> {
        self.op()
    }
}

fn layer(choice: u8) -> Layer {
    match choice % 16 {
        0..=4 => Layer::Firmware,
        5..=7 => Layer::Hypervisor,
        8..=12 => Layer::GuestKernel,
        13 | 14 => Layer::GuestUser,
        _ => Layer::HostTool,
    }
}

fn share(sizes: u8, rest: u8) -> Share {
    let max = |bits: u8| if bits == 3 { u8::MAX } else { bits + 1 };
    Share {
        min: PerKind {
            programmable: sizes & 1,
            fixed: sizes >> 1 & 1,
        },
        max: PerKind {
            programmable: max(sizes >> 2 & 3),
            fixed: max(sizes >> 4 & 3),
        },
        priority: rest & 3,
        lease_ms: (rest & 4 != 0).then_some(1 + u32::from(rest >> 3)),
    }
}
