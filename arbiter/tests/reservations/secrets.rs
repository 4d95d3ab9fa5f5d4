//! No cookie gets out: not by any register, verdict, record or time, and not by
//! `{:?}`.

use arbiter::{Bank, Caller, Control, CounterId, Layer, Operation};
use proptest::prelude::{ProptestConfig, any, prop, proptest};

use super::fixture::{MANAGEMENT, cookie};
use super::play::{Op, Palette, Script, World, registers};

/// Everything that comes out of a sequence of operations.
fn transcript(bytes: &[u8], palette: Palette) -> Vec<String> {
    let mut script = Script::new(bytes, palette);
    let mut world = World::new(&script.setup());
    let mut lines = Vec::new();
    for op in script {
        let step = world.step(&op);
        let unit = &world.unit;
        lines.push(format!(
            "{step:?} {:?} {:?} {}",
            unit.deadline(),
            world.locked_out_until(),
            unit.wrong_cookies(),
        ));
        for index in registers() {
            let read = Op::Read {
                index,
                layer: Layer::GuestKernel,
                presented: palette.guess,
            };
            lines.push(format!("{:?}", world.step(&read)));
        }
        // All state, as far as it tells of itself.
        lines.push(format!("{:?}", world.unit));
    }
    lines
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(150) })]

    /// A sequence is played with two sets of secrets and with equal wrong guesses. An
    /// observer of everything but the cookies sees no difference.
    #[test]
    fn nothing_depends_on_what_a_secret_is(
        bytes in prop::collection::vec(any::<u8>(), 0..600),
        secrets in prop::collection::hash_set(1_u64..1 << 48, 3),
    ) {
        let guess = Palette::default().guess;
        let secrets: Vec<u64> = secrets.into_iter().filter(|bits| *bits != guess).collect();
        let Ok(secrets) = <[u64; 3]>::try_from(secrets) else { return Ok(()) };
        let other = Palette { secrets, guess };
        assert_eq!(transcript(&bytes, Palette::default()), transcript(&bytes, other));
    }

    /// Cookies of many digits, none of which stands in anything that is printed.
    #[test]
    fn nothing_prints_a_cookie(
        bytes in prop::collection::vec(any::<u8>(), 0..600),
        secrets in [1_u64 << 40..1 << 48, 1_u64 << 40..1 << 48, 1_u64 << 40..1 << 48],
    ) {
        let palette = Palette { secrets, guess: Palette::default().guess };
        for line in transcript(&bytes, palette) {
            shows_none(&line, &secrets);
        }
    }
}

/// In decimal, hexadecimal, octal, binary, and as bytes in either order.
fn shows_none(text: &str, secrets: &[u64]) {
    let text = text.to_lowercase();
    for bits in secrets {
        let bytes = |bytes: [u8; 8]| format!("{bytes:?}");
        for digits in [
            format!("{bits}"),
            format!("{bits:x}"),
            format!("{bits:o}"),
            format!("{bits:b}"),
            bytes(bits.to_le_bytes()),
            bytes(bits.to_be_bytes()),
        ] {
            assert!(!text.contains(&digits), "{digits} in {text}");
        }
    }
}

#[test]
fn no_type_prints_a_cookie() {
    let secrets = [0x9abc_def0_1234, MANAGEMENT];
    let [access, management] = secrets.map(cookie);
    let counter = CounterId::Fixed(0);
    let mut bank = Bank::new(1, 1);
    let mut texts = vec![format!("{access:?} {management:?} {:#?}", Some(access))];
    for (presented, operation) in [
        (cookie(0), Operation::Manage(management)),
        (management, Operation::SetAccess(access)),
        (management, Operation::Manage(access)),
        (access, Operation::SetControl(Control::INITIAL)),
    ] {
        let change = bank.plan(Layer::Firmware, presented, counter, operation);
        let change = change.expect("the owner may");
        texts.push(format!("{operation:?} {change:?} {:#?}", change.kind));
        texts.push(format!("{:?}", bank.apply(change)));
        texts.push(format!("{bank:?} {:#?}", bank.reservation(counter)));
    }
    for presented in secrets {
        let layer = Layer::GuestKernel;
        let caller = Caller { layer, presented };
        texts.push(format!("{caller:?} {caller:#?}"));
    }
    // More than 48 bits is no cookie, and may be one with something above it.
    let presented = secrets[0] | 1 << 60;
    let layer = Layer::GuestKernel;
    texts.push(format!("{:?}", Caller { layer, presented }));
    for text in texts {
        shows_none(&text, &secrets);
        shows_none(&text, &[presented]);
    }
    assert_ne!(
        format!("{:?}", cookie(0)),
        format!("{access:?}"),
        "whether a cookie is set is no secret"
    );
}
