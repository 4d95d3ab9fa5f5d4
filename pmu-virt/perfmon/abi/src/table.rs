//! From a table of structures to types, layouts and descriptions.

use crate::field::{FieldInfo, aligned};

/// Defines structures: the Rust type, its bytes, and what the C header says.
macro_rules! records {
    ($($text:literal $rust:ident = $c_name:literal {
        $($field_text:literal $field:ident: $type:ty = $c_type:literal $c_field:literal,)*
    })*) => {$(
        #[doc = $text]
        #[doc = concat!("\n\n`", $c_name, "` in C.")]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $rust {
            $(#[doc = $field_text] pub $field: $type,)*
        }

        impl $rust {
            const LAYOUT: (&'static [usize], usize) = {
                const SIZES: &[(usize, usize)] = &[$((<$type as Field>::SIZE, <$type as Field>::ALIGN)),*];
                const OFFSETS: ([usize; SIZES.len()], usize) = layout(SIZES);
                (&OFFSETS.0, OFFSETS.1)
            };
        }

        impl Record for $rust {
            const NAME: &'static str = $c_name;
            const TEXT: &'static str = $text;
            const SIZE: usize = Self::LAYOUT.1;
            const FIELDS: &'static [FieldInfo] = {
                const NAMES: &[(&str, &str, usize, &str)] =
                    &[$(($c_field, $c_type, <$type as Field>::SIZE, $field_text)),*];
                const INFOS: [FieldInfo; NAMES.len()] = infos(NAMES, $rust::LAYOUT.0);
                &INFOS
            };
            fn put(&self, to: &mut [u8]) {
                to[..Self::SIZE].fill(0);
                let mut offsets = Self::LAYOUT.0.iter();
                $(if let Some(&at) = offsets.next() { self.$field.put(&mut to[at..]); })*
            }
            fn get(from: &[u8]) -> Self {
                let mut offsets = Self::LAYOUT.0.iter().copied();
                $(let $field = <$type as Field>::get(&from[offsets.next().unwrap_or(0)..]);)*
                $rust { $($field),* }
            }
        }
    )*

        /// Every structure: C name, bytes, meaning, fields.
        pub const ALL: &[(&str, usize, &str, &[FieldInfo])] =
            &[$(($c_name, <$rust as Record>::SIZE, $text, <$rust as Record>::FIELDS)),*];
    };
}

pub(crate) const fn layout<const N: usize>(sizes: &[(usize, usize)]) -> ([usize; N], usize) {
    let (mut offsets, mut at, mut most, mut index) = ([0; N], 0, 1, 0);
    while index < N {
        let (size, align) = sizes[index];
        at = aligned(at, align);
        offsets[index] = at;
        at += size;
        if align > most {
            most = align;
        }
        index += 1;
    }
    (offsets, aligned(at, most))
}

pub(crate) const fn infos<const N: usize>(
    names: &[(&'static str, &'static str, usize, &'static str)],
    offsets: &[usize],
) -> [FieldInfo; N] {
    let none = FieldInfo {
        name: "",
        c_type: "",
        offset: 0,
        size: 0,
        text: "",
    };
    let (mut infos, mut index) = ([none; N], 0);
    while index < N {
        let (name, c_type, size, text) = names[index];
        infos[index] = FieldInfo {
            name,
            c_type,
            offset: offsets[index],
            size,
            text,
        };
        index += 1;
    }
    infos
}
