//! The FPU in memory: FXSAVE's image, and those of FNSTENV and FNSAVE.

use super::{EXCEPTIONS, F80, INITIAL_CONTROL, TOP_SHIFT, X87};

/// Layout of FNSTENV's and FNSAVE's images (SDM vol. 1, figures 8-9 to 8-12). 64-bit code has
/// that of 32 bits in protected mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageFormat {
    Protected32,
    Protected16,
    Real32,
    Real16,
}

impl ImageFormat {
    /// Bytes of the environment.
    #[must_use]
    pub fn environment_len(self) -> usize {
        match self {
            Self::Protected32 | Self::Real32 => 28,
            Self::Protected16 | Self::Real16 => 14,
        }
    }

    /// Bytes of the state: the environment and the registers.
    #[must_use]
    pub fn state_len(self) -> usize {
        self.environment_len() + 80
    }
}

/// Bytes of FXSAVE's image that are the FPU's, MXCSR between them excepted.
pub const FXSAVE_LEN: usize = 160;

fn half(bytes: &[u8], at: usize) -> u16 {
    bytes
        .get(at..at + 2)
        .map_or(0, |two| u16::from_le_bytes([two[0], two[1]]))
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from(half(bytes, at)) | u32::from(half(bytes, at + 2)) << 16
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from(word(bytes, at)) | u64::from(word(bytes, at + 4)) << 32
}

/// The first bytes of a state, of FXSAVE or FNSAVE.
fn register(bytes: &[u8], at: usize) -> F80 {
    F80 {
        sig: long(bytes, at),
        se: half(bytes, at + 8),
    }
}

/// The low half of a word.
fn low(value: u64) -> u16 {
    let [a, b, ..] = value.to_le_bytes();
    u16::from_le_bytes([a, b])
}

impl X87 {
    /// Of the first [`FXSAVE_LEN`] bytes of FXSAVE's image. In the form with segments (no REX.W)
    /// pointers have 32 bits.
    #[must_use]
    pub fn of_fxsave(image: &[u8; FXSAVE_LEN], wide: bool) -> Self {
        let pointer = |at| {
            if wide {
                long(image, at)
            } else {
                u64::from(word(image, at))
            }
        };
        let mut x87 = Self {
            regs: [F80::default(); 8],
            ip: pointer(8),
            dp: pointer(16),
            control: half(image, 0) & 0x1f3f | 0x40,
            status: half(image, 2),
            opcode: half(image, 6) & 0x7ff,
            tags: image[4],
        };
        for i in 0..8 {
            x87.regs[x87.physical(i)] = register(image, 32 + 16 * usize::from(i));
        }
        x87.summarize();
        x87
    }

    /// Writes the FPU's part of FXSAVE's image; MXCSR and its mask stay. Reserved bytes are 0.
    pub fn to_fxsave(&self, image: &mut [u8; FXSAVE_LEN], wide: bool) {
        let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.control.to_le_bytes());
        put(2, &self.status.to_le_bytes());
        put(4, &[self.tags, 0]);
        put(6, &self.opcode.to_le_bytes());
        let pointer = |value: u64| if wide { value } else { value & 0xffff_ffff };
        put(8, &pointer(self.ip).to_le_bytes());
        put(16, &pointer(self.dp).to_le_bytes());
        for i in 0..8 {
            let at = 32 + 16 * usize::from(i);
            put(at, &self.register(i).to_bytes());
            put(at + 10, &[0; 6]);
        }
    }

    /// The tag word of FNSTENV: two bits a register.
    fn full_tags(&self) -> u16 {
        (0..8).fold(0, |word, n| {
            let tag = match self.tags >> n & 1 {
                0 => 3,
                _ => self.regs[n].tag(),
            };
            word | tag << (2 * n)
        })
    }

    /// The environment of FNSTENV, and the state behind it: all exceptions are masked.
    #[must_use]
    pub fn store_environment(&self, format: ImageFormat) -> (Vec<u8>, Self) {
        let mut image = Vec::with_capacity(format.state_len());
        let upper = |value: u64, shift: u32| low(value >> 16 << shift);
        let fields: [u16; 7] = match format {
            ImageFormat::Protected32 | ImageFormat::Protected16 => [
                self.control,
                self.status,
                self.full_tags(),
                low(self.ip),
                0,
                low(self.dp),
                0,
            ],
            ImageFormat::Real32 | ImageFormat::Real16 => [
                self.control,
                self.status,
                self.full_tags(),
                low(self.ip),
                upper(self.ip, 12) | self.opcode,
                low(self.dp),
                upper(self.dp, 12),
            ],
        };
        for (n, field) in fields.iter().enumerate() {
            image.extend(field.to_le_bytes());
            let high = match (format, n) {
                (ImageFormat::Protected16 | ImageFormat::Real16, _) => continue,
                // Reserved; processors store ones.
                (_, 0..=2) => 0xffff,
                (ImageFormat::Protected32, 3) => low(self.ip >> 16),
                (ImageFormat::Protected32, 4) => self.opcode,
                (ImageFormat::Protected32, 5) => low(self.dp >> 16),
                (ImageFormat::Protected32, _) => 0xffff,
                // 16 bits of the address from bit 16 on stand at bit 12 of the word.
                (_, 4) => low(self.ip >> 20) & 0xfff,
                (_, 6) => low(self.dp >> 20) & 0xfff,
                _ => 0,
            };
            image.extend(high.to_le_bytes());
        }
        let mut behind = *self;
        behind.control |= EXCEPTIONS;
        behind.summarize();
        (image, behind)
    }

    /// The state behind FLDENV. Bytes that are not there are 0.
    #[must_use]
    pub fn load_environment(&self, format: ImageFormat, image: &[u8]) -> Self {
        let step = if format.environment_len() == 28 { 4 } else { 2 };
        let field = |n: usize| half(image, n * step);
        let whole = |n: usize| match step {
            4 => u64::from(word(image, n * step)),
            _ => u64::from(field(n)),
        };
        let mut x87 = *self;
        x87.control = field(0) & 0x1f3f | 0x40;
        x87.status = field(1);
        let tags = field(2);
        x87.tags = (0..8).fold(0, |bits, n| bits | u8::from(tags >> (2 * n) & 3 != 3) << n);
        match format {
            ImageFormat::Protected32 => {
                x87.ip = whole(3);
                x87.opcode = half(image, 4 * step + 2) & 0x7ff;
                x87.dp = whole(5);
            }
            ImageFormat::Protected16 => {
                x87.ip = whole(3);
                x87.opcode = 0;
                x87.dp = whole(5);
            }
            ImageFormat::Real32 | ImageFormat::Real16 => {
                x87.ip = u64::from(field(3)) | (whole(4) >> 12 & 0xffff) << 16;
                x87.opcode = field(4) & 0x7ff;
                x87.dp = u64::from(field(5)) | (whole(6) >> 12 & 0xffff) << 16;
            }
        }
        x87.summarize();
        x87
    }

    /// The image of FNSAVE; the state behind it is FNINIT's.
    #[must_use]
    pub fn store_state(&self, format: ImageFormat) -> (Vec<u8>, Self) {
        let (mut image, _) = self.store_environment(format);
        for i in 0..8 {
            image.extend(self.register(i).to_bytes());
        }
        (image, self.initialized())
    }

    /// The state behind FRSTOR.
    #[must_use]
    pub fn load_state(&self, format: ImageFormat, image: &[u8]) -> Self {
        let mut x87 = self.load_environment(format, image);
        for i in 0..8 {
            let at = format.environment_len() + 10 * usize::from(i);
            x87.regs[x87.physical(i)] = register(image, at);
        }
        x87
    }

    /// Behind FNINIT: what registers hold stays.
    #[must_use]
    pub fn initialized(&self) -> Self {
        Self {
            regs: self.regs,
            control: INITIAL_CONTROL,
            ..Self::default()
        }
    }

    /// The FPU with TOP another, for a stack that moves.
    pub(super) fn turn(&mut self, by: u16) {
        let top = (self.status >> TOP_SHIFT).wrapping_add(by) & 7;
        self.status = self.status & !(7 << TOP_SHIFT) | top << TOP_SHIFT;
    }
}
