//! Questions to a kernel's description of its types.

use crate::linux::btf::Types;
use guest_view::{BitField, Btf, BtfError, Member};

fn types() -> Types {
    let mut types = Types::default();
    let int = types.int("int", 4);
    let number = types.typedef("number", int);
    let pointer = types.pointer();
    let row = types.array(number, 3);
    let table = types.array(row, 2);
    let deepest = types.structure("", 8, &[("first", int, 0), ("second", int, 32)]);
    let either = types.union("", 8, &[("", deepest, 0), ("whole", pointer, 0)]);
    let inner = types.structure("inner", 16, &[("a", int, 0), ("", either, 64)]);
    types.structure(
        "outer",
        64,
        &[
            ("x", number, 0),
            ("inner", inner, 64),
            ("table", table, 192),
            ("p", pointer, 384),
        ],
    );
    types.packed("bits", 8, &[("three", int, 3 << 24 | 5), ("word", int, 32)]);
    // The same name twice: once they agree, once they do not.
    types.structure("twice", 8, &[("same", int, 0), ("other", int, 32)]);
    types.structure("twice", 16, &[("same", int, 0), ("other", int, 64)]);
    types.enumeration("colour", &[("RED", 1), ("BLUE", 7)]);
    types.variable("counter", number);
    types
}

#[test]
fn members() {
    let btf = Btf::parse(types().bytes()).expect("BTF");
    let check = |of: &str, path: &str, expected: Result<(u32, u32), BtfError>| {
        let expected = expected.map(|(offset, size)| Member { offset, size });
        assert_eq!(btf.member(of, path), expected, "{of}.{path}");
    };
    let missing = |name: &str| Err(BtfError::Missing(name.to_owned()));
    check("outer", "x", Ok((0, 4)));
    check("outer", "inner", Ok((8, 16)));
    check("outer", "inner.a", Ok((8, 4)));
    check("outer", "inner.second", Ok((20, 4)));
    check("outer", "inner.whole", Ok((16, 8)));
    check("outer", "table", Ok((24, 24)));
    check("outer", "p", Ok((48, 8)));
    check("outer", "p.q", missing("outer.p.q"));
    check("outer", "second", missing("outer.second"));
    check("nothing", "x", missing("nothing.x"));
    check("out", "x", missing("out.x"));
    check("twice", "same", Ok((0, 4)));
    check(
        "twice",
        "other",
        Err(BtfError::Ambiguous("twice.other".to_owned())),
    );
    check("bits", "word", Ok((4, 4)));
    check(
        "bits",
        "three",
        Err(BtfError::Unexpected("bits.three".to_owned())),
    );
}

#[test]
fn other_questions() {
    let btf = Btf::parse(types().bytes()).expect("BTF");
    let three = BitField {
        offset: 5,
        width: 3,
    };
    assert_eq!(btf.bit_field("bits", "three"), Ok(three));
    assert!(matches!(
        btf.bit_field("bits", "word"),
        Err(BtfError::Unexpected(_))
    ));
    assert_eq!(btf.size_of("outer"), Ok(64));
    assert!(matches!(btf.size_of("twice"), Err(BtfError::Ambiguous(_))));
    assert_eq!(btf.enumerator("colour", "BLUE"), Ok(7));
    assert!(matches!(
        btf.enumerator("colour", "GREEN"),
        Err(BtfError::Missing(_))
    ));
    assert_eq!(btf.variable_size("counter"), Ok(4));
    assert!(matches!(
        btf.variable_size("colour"),
        Err(BtfError::Missing(_))
    ));
}

#[test]
fn damage() {
    let whole = types().bytes();
    for len in 0..whole.len() {
        assert_eq!(
            Btf::parse(whole[..len].to_vec()).err(),
            Some(BtfError::Damaged),
            "{len}"
        );
    }
    // A structure that holds itself, without a name.
    let mut types = Types::default();
    types.structure("endless", 8, &[("", 1, 0), ("", 1, 0)]);
    types.typedef("loop", 2);
    types.structure("looped", 8, &[("x", 2, 0)]);
    let btf = Btf::parse(types.bytes()).expect("BTF");
    assert!(matches!(
        btf.member("endless", "x"),
        Err(BtfError::Missing(_))
    ));
    assert_eq!(btf.member("looped", "x"), Err(BtfError::Damaged));
}

/// A kernel whose types have kinds that are not known yet says how long they are.
#[test]
fn kinds_of_later_kernels() {
    const LATER: u32 = 40;
    let mut types = Types::default();
    let int = types.int("int", 4);
    types.add("later", LATER << 24 | 3, 0, &[7, 8, 9, 10]);
    types.structure("behind", 8, &[("first", int, 0), ("second", int, 32)]);
    let damaged = |bytes| Btf::parse(bytes).err();
    assert_eq!(damaged(types.bytes()), Some(BtfError::Damaged));
    let mut layouts = [[0u8; 4]; LATER as usize + 1];
    // A word of its own, and one for each of three parts.
    layouts[LATER as usize] = [4, 4, 0, 0];
    let whole = types.with_layouts(Some(&layouts));
    let btf = Btf::parse(whole.clone()).expect("BTF");
    let second = Member { offset: 4, size: 4 };
    assert_eq!(btf.member("behind", "second"), Ok(second));
    let short = &layouts[..LATER as usize];
    let bytes = types.with_layouts(Some(short));
    assert_eq!(damaged(bytes), Some(BtfError::Damaged));
    layouts[LATER as usize] = [8, 4, 0, 0];
    let bytes = types.with_layouts(Some(&layouts));
    assert_eq!(damaged(bytes), Some(BtfError::Damaged));
    for len in 0..whole.len() {
        assert!(Btf::parse(whole[..len].to_vec()).is_err(), "{len}");
    }
}

/// More parts than 16 bits count.
#[test]
fn a_structure_of_very_many_members() {
    let mut types = Types::default();
    let int = types.int("int", 4);
    let names: Vec<String> = (0..0x1_0003).map(|index| format!("m{index}")).collect();
    let members = names.iter().zip(0u32..);
    let members: Vec<_> = members
        .map(|(name, index)| (name.as_str(), int, 32 * index))
        .collect();
    types.structure("long", 4 * 0x1_0003, &members);
    types.structure("behind", 4, &[("only", int, 0)]);
    let btf = Btf::parse(types.bytes()).expect("BTF");
    let first = Member { offset: 0, size: 4 };
    assert_eq!(btf.member("behind", "only"), Ok(first));
    let fifth = Member {
        offset: 16,
        size: 4,
    };
    assert_eq!(btf.member("long", "m4"), Ok(fifth));
}
