//! The few encodings of ACPI machine language that the DSDT needs (ACPI 6.5, chapter 20) and the
//! resource descriptors inside (chapter 6.4).

const NAME_OP: u8 = 0x08;
const BYTE_PREFIX: u8 = 0x0a;
const WORD_PREFIX: u8 = 0x0b;
const DWORD_PREFIX: u8 = 0x0c;
const SCOPE_OP: u8 = 0x10;
const BUFFER_OP: u8 = 0x11;
const PACKAGE_OP: u8 = 0x12;
const DEVICE_OP: [u8; 2] = [0x5b, 0x82];

/// An integer in its shortest form.
pub(super) fn integer(value: u32) -> Vec<u8> {
    match value.to_le_bytes() {
        [value @ 0..=1, 0, 0, 0] => vec![value],
        [value, 0, 0, 0] => vec![BYTE_PREFIX, value],
        [a, b, 0, 0] => vec![WORD_PREFIX, a, b],
        [a, b, c, d] => vec![DWORD_PREFIX, a, b, c, d],
    }
}

/// `Name (name, value)`
pub(super) fn name(name: [u8; 4], value: &[u8]) -> Vec<u8> {
    [&[NAME_OP], &name[..], value].concat()
}

/// `Scope (\name) { body }`
pub(super) fn root_scope(name: [u8; 4], body: &[u8]) -> Vec<u8> {
    sized(&[SCOPE_OP], &[b"\\", &name[..], body].concat())
}

/// `Device (name) { body }`
pub(super) fn device(name: [u8; 4], body: &[u8]) -> Vec<u8> {
    sized(&DEVICE_OP, &[&name[..], body].concat())
}

/// `Package () { elements }`; at most 255 elements.
pub(super) fn package(elements: &[Vec<u8>]) -> Vec<u8> {
    let count = u8::try_from(elements.len()).expect("a package of the DSDT has few elements");
    sized(&[PACKAGE_OP], &[&[count], &elements.concat()[..]].concat())
}

/// `ResourceTemplate () { descriptors }`, with the end tag added.
pub(super) fn resources(descriptors: &[Vec<u8>]) -> Vec<u8> {
    // End tag; a checksum of 0 says that there is none.
    let content = [&descriptors.concat()[..], &[0x79, 0]].concat();
    let len = u32::try_from(content.len()).expect("a resource template is short");
    sized(&[BUFFER_OP], &[integer(len), content].concat())
}

/// `EisaId ("PNPnnnn")` for a PNP number such as 0x0501.
pub(super) fn pnp_id(number: u16) -> Vec<u8> {
    // Three letters of 5 bits each, big-endian, then the number, big-endian.
    let letters = b"PNP"
        .iter()
        .fold(0u16, |all, letter| all << 5 | u16::from(letter - b'@'));
    let [[a, b], [c, d]] = [letters.to_be_bytes(), number.to_be_bytes()];
    vec![DWORD_PREFIX, a, b, c, d]
}

/// `IO (Decode16, base, base, 1, len)`
pub(super) fn io_ports(base: u16, len: u8) -> Vec<u8> {
    let [low, high] = base.to_le_bytes();
    let decode_16_bits = 1;
    let alignment = 1;
    vec![0x47, decode_16_bits, low, high, low, high, alignment, len]
}

/// `IRQNoFlags () { irq }`: edge-triggered, active high; `irq` is below 16.
pub(super) fn irq(irq: u8) -> Vec<u8> {
    let [low, high] = (1u16 << (irq & 15)).to_le_bytes();
    vec![0x22, low, high]
}

/// An opcode, the package length, the content. The length counts its own bytes, not the opcode.
fn sized(opcode: &[u8], content: &[u8]) -> Vec<u8> {
    let length = match content.len() {
        // One byte holds up to 63; two hold 4 bits in the first and 8 in the second.
        len @ 0..=62 => vec![len + 1],
        len @ 63..=4093 => vec![1 << 6 | (len + 2) & 0xf, (len + 2) >> 4],
        len => panic!("{len} bytes are more than an object of the DSDT has"),
    };
    let length: Vec<u8> = length
        .into_iter()
        .map(|byte| u8::try_from(byte).expect("bounded above"))
        .collect();
    [opcode, &length, content].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_take_the_shortest_form() {
        assert_eq!(integer(0), [0]);
        assert_eq!(integer(1), [1]);
        assert_eq!(integer(5), [0x0a, 5]);
        assert_eq!(integer(0x1234), [0x0b, 0x34, 0x12]);
        assert_eq!(integer(0x1234_5678), [0x0c, 0x78, 0x56, 0x34, 0x12]);
    }

    #[test]
    fn lengths_grow_to_two_bytes() {
        let length = |len: usize| sized(&[], &vec![0; len])[..2].to_vec();
        assert_eq!(length(62), [63, 0]);
        assert_eq!(length(63), [0x41, 0x04]);
        assert_eq!(length(0x100), [0x42, 0x10]);
        assert_eq!(length(4093), [0x4f, 0xff]);
    }

    #[test]
    fn identifiers_and_resources_match_the_specification() {
        assert_eq!(pnp_id(0x0501), [0x0c, 0x41, 0xd0, 0x05, 0x01]);
        assert_eq!(io_ports(0x3f8, 8), [0x47, 1, 0xf8, 3, 0xf8, 3, 1, 8]);
        assert_eq!(irq(4), [0x22, 0x10, 0]);
        assert_eq!(resources(&[]), [0x11, 5, 0x0a, 2, 0x79, 0]);
    }
}
