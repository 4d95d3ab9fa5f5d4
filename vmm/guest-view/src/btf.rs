//! BTF, a kernel's description of its own types (`Documentation/bpf/btf.rst`,
//! `include/uapi/linux/btf.h`): where members of its structures are.

use std::ops::Range;

use thiserror::Error;

const MAGIC: u16 = 0xeb9f;
const HEADER: usize = 24;
/// Bytes of a header that says where the lengths of kinds are, and of one of these.
const LONGER_HEADER: usize = 32;
const LAYOUT: usize = 4;
/// Most bytes of a kernel's BTF; Debian's 6.1 has about 5 MiB.
pub(crate) const MOST: usize = 64 << 20;
/// Typedefs and qualifiers that are followed, and structures within structures.
const DEEPEST: u32 = 32;
/// Members that are looked at for one question, those of unnamed members included.
const MOST_MEMBERS: usize = 1 << 16;

/// Kinds of types (`BTF_KIND_*`).
mod kind {
    pub(super) const INT: u32 = 1;
    pub(super) const PTR: u32 = 2;
    pub(super) const ARRAY: u32 = 3;
    pub(super) const STRUCT: u32 = 4;
    pub(super) const UNION: u32 = 5;
    pub(super) const ENUM: u32 = 6;
    pub(super) const TYPEDEF: u32 = 8;
    pub(super) const VOLATILE: u32 = 9;
    pub(super) const CONST: u32 = 10;
    pub(super) const RESTRICT: u32 = 11;
    pub(super) const FUNC_PROTO: u32 = 13;
    pub(super) const VAR: u32 = 14;
    pub(super) const DATASEC: u32 = 15;
    pub(super) const FLOAT: u32 = 16;
    pub(super) const DECL_TAG: u32 = 17;
    pub(super) const TYPE_TAG: u32 = 18;
    pub(super) const ENUM64: u32 = 19;
    pub(super) const LAST: u32 = 19;
}

/// Why a question to the kernel's types has no answer.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum BtfError {
    /// Magic number, version, sizes or a type's kind are not BTF's.
    #[error("the kernel's BTF is damaged")]
    Damaged,
    /// No type, member, variable or enumerator of that name.
    #[error("the kernel's BTF has no {0}")]
    Missing(String),
    /// Several types have that name, and give different answers.
    #[error("the kernel's BTF has several {0}")]
    Ambiguous(String),
    /// The member is a bit field, has another size, or the type has no size.
    #[error("{0} is not what it was in the kernels that are known")]
    Unexpected(String),
}

/// A member of a structure: bytes from its start, and how many it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// Bytes from the start of the structure.
    pub offset: u32,
    /// Bytes of the member.
    pub size: u32,
}

/// A bit field of a structure of at most 64 bits: bits from its start, and how many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BitField {
    /// Bits from the start of the structure.
    pub offset: u32,
    /// Number of bits.
    pub width: u32,
}

/// A kernel's types. Every question may take a walk through all of them.
#[derive(Debug)]
pub struct Btf {
    bytes: Vec<u8>,
    /// Where each type begins; type 1 is the first, and 0 is `void`.
    types: Vec<u32>,
    strings: usize,
}

/// One type.
#[derive(Clone, Copy)]
struct Type {
    at: usize,
    name: u32,
    info: u32,
    /// Size in bytes, or another type.
    third: u32,
}

impl Type {
    /// Of seven bits since 2026, before of five; the others were 0.
    fn kind(self) -> u32 {
        self.info >> 24 & 0x7f
    }

    /// Members, enumerators or parameters: 24 bits, where there were 16.
    fn len(self) -> usize {
        (self.info & 0xff_ffff) as usize
    }

    fn has_bit_fields(self) -> bool {
        self.info >> 31 != 0
    }
}

/// A member as it is written down.
#[derive(Clone, Copy)]
struct RawMember {
    name: u32,
    of: u32,
    bit: u32,
    /// 0 where it is no bit field.
    width: u32,
}

impl Btf {
    /// Takes the bytes between `__start_BTF` and `__stop_BTF`.
    ///
    /// # Errors
    /// [`BtfError::Damaged`]: they are no BTF.
    pub fn parse(bytes: Vec<u8>) -> Result<Self, BtfError> {
        let mut btf = Self {
            bytes,
            types: Vec::new(),
            strings: 0,
        };
        match btf.index() {
            Some(()) => Ok(btf),
            None => Err(BtfError::Damaged),
        }
    }

    fn index(&mut self) -> Option<()> {
        let magic = u16::from_le_bytes([*self.bytes.first()?, *self.bytes.get(1)?]);
        let header = self.u32_at(4)? as usize;
        if magic != MAGIC || self.bytes[2] != 1 || header < HEADER || self.bytes.len() > MOST {
            return None;
        }
        let part = |at: Option<u32>, len: Option<u32>| {
            let start = header.checked_add(at? as usize)?;
            let end = start.checked_add(len? as usize)?;
            (end <= self.bytes.len()).then_some((start, end))
        };
        let (mut at, end) = part(self.u32_at(8), self.u32_at(12))?;
        let (strings, last) = part(self.u32_at(16), self.u32_at(20))?;
        let layouts = if header < LONGER_HEADER {
            0..0
        } else {
            let (start, end) = part(self.u32_at(24), self.u32_at(28))?;
            start..end
        };
        // Every string ends inside.
        if strings == last || self.bytes[last - 1] != 0 {
            return None;
        }
        self.bytes.truncate(last.max(end).max(layouts.end));
        self.strings = strings;
        while at < end {
            let found = self.at(at)?;
            self.types.push(u32::try_from(at).ok()?);
            let each = match found.kind() {
                kind::INT | kind::VAR | kind::DECL_TAG => 4,
                kind::ARRAY => 12,
                kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => 12 * found.len(),
                kind::ENUM | kind::FUNC_PROTO => 8 * found.len(),
                0 => return None,
                kind::LAST.. => self.layout(&layouts, found)?,
                _ => 0,
            };
            at = at.checked_add(12 + each)?;
        }
        (at == end).then_some(())
    }

    /// Bytes behind the head of a type of a later kind, as the kernel itself says.
    fn layout(&self, layouts: &Range<usize>, found: Type) -> Option<usize> {
        let at = layouts.start + LAYOUT * found.kind() as usize;
        let both = self.bytes[..layouts.end].get(at..at + 2)?;
        Some(usize::from(both[0]) + usize::from(both[1]) * found.len())
    }

    /// The member `path` of the structure or union `name`; dots lead into structures, and
    /// unnamed members are as if their members were the outer one's.
    ///
    /// # Errors
    /// There is none, several structures disagree, or it is a bit field.
    pub fn member(&self, name: &str, path: &str) -> Result<Member, BtfError> {
        let what = || format!("{name}.{path}");
        self.agreed(name, &what, |found, left| {
            let (bit, of, width) = self.follow(found, path, left).ok_or(None)?;
            if width != 0 || bit % 8 != 0 {
                return Err(Some(BtfError::Unexpected(what())));
            }
            let size = self.size(of).ok_or(Some(BtfError::Damaged))?;
            let offset = bit / 8;
            Ok(Member { offset, size })
        })
    }

    /// The bit field `member` of the structure `name`.
    ///
    /// # Errors
    /// There is none, several structures disagree, or it is no bit field.
    pub fn bit_field(&self, name: &str, member: &str) -> Result<BitField, BtfError> {
        let what = || format!("{name}.{member}");
        self.agreed(name, &what, |found, left| {
            let (offset, _, width) = self.follow(found, member, left).ok_or(None)?;
            if width == 0 {
                return Err(Some(BtfError::Unexpected(what())));
            }
            Ok(BitField { offset, width })
        })
    }

    /// Bytes of the structure or union `name`.
    ///
    /// # Errors
    /// There is none, or several have different sizes.
    pub fn size_of(&self, name: &str) -> Result<u32, BtfError> {
        self.agreed(name, &|| name.to_owned(), |found, _| Ok(found.third))
    }

    /// Bytes of the variable `name`. BTF names per-CPU variables alone.
    ///
    /// # Errors
    /// There is none, or its type has no size.
    pub fn variable_size(&self, name: &str) -> Result<u32, BtfError> {
        let mut all = self.all().filter(|found| found.kind() == kind::VAR);
        let found = all.find(|found| self.is_called(found.name, name));
        let found = found.ok_or_else(|| BtfError::Missing(name.to_owned()))?;
        self.size(found.third).ok_or(BtfError::Damaged)
    }

    /// The value of the enumerator `name` of the enumeration `of`.
    ///
    /// # Errors
    /// There is none.
    pub fn enumerator(&self, of: &str, name: &str) -> Result<u32, BtfError> {
        let mut all = self.all().filter(|found| found.kind() == kind::ENUM);
        let found = all.find(|found| self.is_called(found.name, of));
        let value = found.and_then(|found| {
            (0..found.len()).find_map(|index| {
                let at = found.at + 12 + 8 * index;
                let named = self.is_called(self.u32_at(at)?, name);
                named.then(|| self.u32_at(at + 4)).flatten()
            })
        });
        value.ok_or_else(|| BtfError::Missing(format!("{of}.{name}")))
    }

    /// What `ask` says of every structure and union of that name, if all agree; `Err(None)`
    /// is one that has no answer.
    fn agreed<T: PartialEq + Copy>(
        &self,
        name: &str,
        what: &dyn Fn() -> String,
        ask: impl Fn(Type, &mut usize) -> Result<T, Option<BtfError>>,
    ) -> Result<T, BtfError> {
        let is_one = |found: &Type| {
            matches!(found.kind(), kind::STRUCT | kind::UNION) && self.is_called(found.name, name)
        };
        let (mut answer, mut left) = (None, MOST_MEMBERS);
        for found in self.all().filter(is_one) {
            match ask(found, &mut left) {
                Ok(now) if answer.is_none_or(|before| before == now) => answer = Some(now),
                Ok(_) => return Err(BtfError::Ambiguous(what())),
                Err(Some(error)) => return Err(error),
                Err(None) => {}
            }
        }
        answer.ok_or_else(|| BtfError::Missing(what()))
    }

    /// Bit, type and width of the member at `path`.
    fn follow(&self, mut of: Type, path: &str, left: &mut usize) -> Option<(u32, u32, u32)> {
        let mut bit = 0u32;
        let mut parts = path.split('.').peekable();
        loop {
            let found = self.find(of, parts.next()?, DEEPEST, left)?;
            bit = bit.checked_add(found.bit)?;
            if parts.peek().is_none() {
                return Some((bit, found.of, found.width));
            }
            of = self.plain(found.of)?;
        }
    }

    /// The member of that name, also in an unnamed member.
    fn find(&self, of: Type, name: &str, deep: u32, left: &mut usize) -> Option<RawMember> {
        if !matches!(of.kind(), kind::STRUCT | kind::UNION) || deep == 0 {
            return None;
        }
        for index in 0..of.len() {
            *left = left.checked_sub(1)?;
            let member = self.raw_member(of, index)?;
            if self.is_called(member.name, name) {
                return Some(member);
            }
            if self.is_called(member.name, "") && member.width == 0 {
                let inner = self.plain(member.of)?;
                if let Some(found) = self.find(inner, name, deep - 1, left) {
                    let bit = found.bit.checked_add(member.bit)?;
                    return Some(RawMember { bit, ..found });
                }
            }
        }
        None
    }

    fn raw_member(&self, of: Type, index: usize) -> Option<RawMember> {
        let at = of.at + 12 + 12 * index;
        let place = self.u32_at(at + 8)?;
        let (bit, width) = if of.has_bit_fields() {
            (place & 0xff_ffff, place >> 24)
        } else {
            (place, 0)
        };
        Some(RawMember {
            name: self.u32_at(at)?,
            of: self.u32_at(at + 4)?,
            bit,
            width,
        })
    }

    /// Bytes of a type.
    fn size(&self, id: u32) -> Option<u32> {
        let mut id = id;
        let mut times = 1u32;
        for _ in 0..DEEPEST {
            let found = self.plain(id)?;
            let one = match found.kind() {
                kind::PTR => 8,
                kind::INT
                | kind::STRUCT
                | kind::UNION
                | kind::ENUM
                | kind::ENUM64
                | kind::FLOAT => found.third,
                kind::ARRAY => {
                    times = times.checked_mul(self.u32_at(found.at + 20)?)?;
                    id = self.u32_at(found.at + 12)?;
                    continue;
                }
                _ => return None,
            };
            return times.checked_mul(one);
        }
        None
    }

    /// The type behind typedefs and qualifiers.
    fn plain(&self, mut id: u32) -> Option<Type> {
        for _ in 0..DEEPEST {
            let at = *self.types.get((id as usize).checked_sub(1)?)?;
            let found = self.at(at as usize)?;
            match found.kind() {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    id = found.third;
                }
                _ => return Some(found),
            }
        }
        None
    }

    fn all(&self) -> impl Iterator<Item = Type> {
        let at = |at: &u32| self.at(*at as usize);
        self.types.iter().filter_map(at)
    }

    fn at(&self, at: usize) -> Option<Type> {
        Some(Type {
            at,
            name: self.u32_at(at)?,
            info: self.u32_at(at + 4)?,
            third: self.u32_at(at + 8)?,
        })
    }

    /// The string at `offset` is `name`.
    fn is_called(&self, offset: u32, name: &str) -> bool {
        let start = self.strings.saturating_add(offset as usize);
        let end = start.saturating_add(name.len());
        self.bytes.get(start..end) == Some(name.as_bytes()) && self.bytes.get(end) == Some(&0)
    }

    fn u32_at(&self, at: usize) -> Option<u32> {
        let bytes = self.bytes.get(at..at.checked_add(4)?)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    }
}
