//! Makes BTF, as `Documentation/bpf/btf.rst` has it.
#![allow(
    dead_code,
    clippy::cast_possible_truncation,
    reason = "all of it is small"
)]

#[derive(Default)]
pub(crate) struct Types {
    types: Vec<u8>,
    strings: Vec<u8>,
    count: u32,
}

/// Name, type, and bits from the start.
pub(crate) type Member<'a> = (&'a str, u32, u32);

impl Types {
    fn name(&mut self, name: &str) -> u32 {
        if self.strings.is_empty() {
            self.strings.push(0);
        }
        if name.is_empty() {
            return 0;
        }
        let at = self.strings.len() as u32;
        self.strings.extend(name.bytes());
        self.strings.push(0);
        at
    }

    /// A type of whatever kind, with what is behind its head.
    pub(crate) fn add(&mut self, name: &str, info: u32, third: u32, rest: &[u32]) -> u32 {
        let name = self.name(name);
        for word in [name, info, third].iter().chain(rest) {
            self.types.extend(word.to_le_bytes());
        }
        self.count += 1;
        self.count
    }

    pub(crate) fn int(&mut self, name: &str, bytes: u32) -> u32 {
        self.add(name, 1 << 24, bytes, &[bytes * 8])
    }

    pub(crate) fn pointer(&mut self) -> u32 {
        self.add("", 2 << 24, 0, &[])
    }

    pub(crate) fn typedef(&mut self, name: &str, of: u32) -> u32 {
        self.add(name, 8 << 24, of, &[])
    }

    pub(crate) fn array(&mut self, of: u32, count: u32) -> u32 {
        self.add("", 3 << 24, 0, &[of, of, count])
    }

    pub(crate) fn structure(&mut self, name: &str, bytes: u32, members: &[Member<'_>]) -> u32 {
        self.compound(4, 0, name, bytes, members)
    }

    pub(crate) fn union(&mut self, name: &str, bytes: u32, members: &[Member<'_>]) -> u32 {
        self.compound(5, 0, name, bytes, members)
    }

    /// With bit fields: a place is `width << 24 | bit`.
    pub(crate) fn packed(&mut self, name: &str, bytes: u32, members: &[Member<'_>]) -> u32 {
        self.compound(4, 1, name, bytes, members)
    }

    fn compound(
        &mut self,
        kind: u32,
        flag: u32,
        name: &str,
        bytes: u32,
        members: &[Member<'_>],
    ) -> u32 {
        let names = members.iter().map(|member| self.name(member.0));
        let names: Vec<u32> = names.collect();
        let all = names.iter().zip(members);
        let words = all.flat_map(|(name, (_, of, place))| [*name, *of, *place]);
        let words: Vec<u32> = words.collect();
        let info = flag << 31 | kind << 24 | members.len() as u32;
        self.add(name, info, bytes, &words)
    }

    pub(crate) fn enumeration(&mut self, name: &str, values: &[(&str, u32)]) -> u32 {
        let names = values.iter().map(|value| self.name(value.0));
        let names: Vec<u32> = names.collect();
        let words = names.iter().zip(values);
        let words: Vec<u32> = words.flat_map(|(name, value)| [*name, value.1]).collect();
        self.add(name, 6 << 24 | values.len() as u32, 4, &words)
    }

    pub(crate) fn variable(&mut self, name: &str, of: u32) -> u32 {
        self.add(name, 14 << 24, of, &[1])
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.with_layouts(None)
    }

    /// With the lengths of kinds, of each four bytes.
    pub(crate) fn with_layouts(&self, layouts: Option<&[[u8; 4]]>) -> Vec<u8> {
        let mut bytes = vec![0x9f, 0xeb, 1, 0];
        let (types, strings) = (self.types.len() as u32, self.strings.len() as u32);
        let header = if layouts.is_some() { 32 } else { 24 };
        for word in [header, 0, types, types, strings] {
            bytes.extend(u32::to_le_bytes(word));
        }
        let layouts = layouts.map(|layouts| {
            let layouts = layouts.concat();
            for word in [types + strings, layouts.len() as u32] {
                bytes.extend(word.to_le_bytes());
            }
            layouts
        });
        bytes.extend(&self.types);
        bytes.extend(&self.strings);
        bytes.extend(layouts.unwrap_or_default());
        bytes
    }
}
