//! Event specifications: `pic0=cycles,pic1=instructions,sys` and back.
//!
//! Each item is an event, `picN=EVENT`, or an attribute for all counters or for one: `sys`,
//! `nouser1`, `cmask0=2`. Events are those of `umpire events`, and numbers.

use libc::{EINVAL, ERANGE};
use pmu_model::PmuModel;
use umpire_events::{NameTable, NamedRequest, NoTables, resolve};

use super::event::{Event, MAX_PIC};
use super::failure::{Failure, Subcode, fail};
use super::processor;

/// Bits of an event select (SDM vol. 3B, `IA32_PERFEVTSELx`; APM vol. 2, 13.2.1).
pub(crate) const USR: u64 = 1 << 16;
pub(crate) const OS: u64 = 1 << 17;
const EDGE: u64 = 1 << 18;
const INT: u64 = 1 << 20;
const ENABLE: u64 = 1 << 22;
const INVERT: u64 = 1 << 23;
/// Event select and unit mask.
const EVENT: u64 = 0xf_0000_ffff;
const UMASK: u32 = 8;
const CMASK: u32 = 24;

/// Attributes, with the bit that each stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attribute {
    Sys,
    NoUser,
    Edge(bool),
    Invert,
    /// Interrupt at overflow: `CPC_BIND_EMT_OVF` asks for it.
    Interrupt,
    CounterMask,
    UnitMask,
}

const ATTRIBUTES: [(&str, Attribute); 8] = [
    ("sys", Attribute::Sys),
    ("nouser", Attribute::NoUser),
    ("edge", Attribute::Edge(true)),
    ("noedge", Attribute::Edge(false)),
    ("inv", Attribute::Invert),
    ("int", Attribute::Interrupt),
    ("cmask", Attribute::CounterMask),
    ("umask", Attribute::UnitMask),
];

/// An item of a specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Item<'a> {
    Event(Option<usize>, &'a str),
    Attribute(Attribute, Option<usize>, &'a str, Option<&'a str>),
}

/// A word without the number behind it, and the number.
fn numbered(word: &str) -> (&str, Option<usize>) {
    let name = word.trim_end_matches(|digit: char| digit.is_ascii_digit());
    (name, word[name.len()..].parse().ok())
}

fn item(text: &str) -> Item<'_> {
    let (key, value) = match text.split_once('=') {
        Some((key, value)) => (key, Some(value)),
        None => (text, None),
    };
    let (word, number) = numbered(key.trim());
    if let ("pic", Some(number), Some(event)) = (word, number, value) {
        return Item::Event(Some(number), event.trim());
    }
    let attribute = ATTRIBUTES.iter().find(|(name, _)| *name == word);
    match attribute {
        Some((_, attribute)) => Item::Attribute(*attribute, number, key.trim(), value),
        None => Item::Event(None, text.trim()),
    }
}

/// A number as `strtoll` reads it with base 0.
fn number(text: &str) -> Option<u64> {
    let hexadecimal = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"));
    match (hexadecimal, text.strip_prefix('0')) {
        (Some(digits), _) => u64::from_str_radix(digits, 16).ok(),
        (None, Some("")) => Some(0),
        (None, Some(digits)) => u64::from_str_radix(digits, 8).ok(),
        (None, None) => text.parse().ok(),
    }
}

/// The event select of a request, as libpfm prints one; the rings are the attributes'.
fn select(named: &NamedRequest) -> u64 {
    (umpire_events::code_of(&named.request) | ENABLE) & !(USR | OS | INT)
}

fn event(
    text: &str,
    model: &PmuModel,
    names: &dyn NameTable,
    invalid: impl Fn(Subcode, &dyn std::fmt::Display) -> Failure,
) -> Result<u64, Failure> {
    // Longer ones are codes as `umpire events` prints them.
    if let Some(number) = number(text).filter(|number| number & !EVENT == 0) {
        return Ok(number | ENABLE);
    }
    let named =
        resolve(text, model, names).map_err(|error| invalid(Subcode::InvalidEvent, &error))?;
    // A code's own bits say nothing here; letters behind a code or a name would be lost.
    let both = named.request.usr && named.request.os;
    if !both && (umpire_events::extras(text).rings || !umpire_events::is_code(text)) {
        let reason = "say sys and nouser for the rings, behind the event";
        return Err(invalid(Subcode::InvalidAttribute, &reason));
    }
    let select = select(&named);
    let others = select & !(EVENT | EDGE | ENABLE | INVERT | 0xff << CMASK);
    if others != 0 {
        let reason = format!("no attribute stands for the bits {others:#x}");
        return Err(invalid(Subcode::InvalidAttribute, &reason));
    }
    Ok(select)
}

/// `cpc_strtoevent`.
///
/// # Errors
/// What is wrong, and where.
pub(crate) fn parse(
    cpuver: i32,
    model: &PmuModel,
    names: &dyn NameTable,
    spec: &str,
) -> Result<Event, Failure> {
    let spec = Spec { model, names, spec };
    let mut pes = spec.placed()?;
    for select in pes.iter_mut().filter(|select| **select != 0) {
        *select |= USR;
    }
    spec.apply_attributes(&mut pes)?;
    spec.check(&pes)?;
    Ok(Event {
        cpuver,
        pes,
        ..Event::default()
    })
}

/// What `what` of a specification has wrong.
fn wrong(what: &str, subcode: Subcode, reason: &dyn std::fmt::Display) -> Failure {
    let errno = if subcode == Subcode::AttributeOutOfRange {
        ERANGE
    } else {
        EINVAL
    };
    fail(errno, subcode, format_args!("'{what}': {reason}"))
}

/// A specification, and the processor that it is for.
struct Spec<'a> {
    model: &'a PmuModel,
    names: &'a dyn NameTable,
    spec: &'a str,
}

impl<'a> Spec<'a> {
    fn texts(&self) -> impl Iterator<Item = &'a str> {
        let texts = self.spec.split(',').map(str::trim);
        texts.filter(|text| !text.is_empty())
    }

    fn pics(&self) -> usize {
        processor::pics(self.model)
    }

    fn no_such_pic(&self, what: &str) -> Failure {
        let last = self.pics().saturating_sub(1);
        let reason = format!("this processor has the counters 0 to {last}");
        wrong(what, Subcode::InvalidPicNumber, &reason)
    }

    /// The events on their counters: those that name one, then the others on what is free.
    fn placed(&self) -> Result<[u64; MAX_PIC], Failure> {
        let pics = self.pics();
        let mut pes = [0; MAX_PIC];
        let mut unplaced = Vec::new();
        for text in self.texts() {
            let Item::Event(place, name) = item(text) else {
                continue;
            };
            let select = event(name, self.model, self.names, |subcode, reason| {
                wrong(text, subcode, reason)
            })?;
            match place {
                Some(pic) if pic >= pics => return Err(self.no_such_pic(text)),
                Some(pic) if pes[pic] != 0 => {
                    let reason = "the counter has an event already";
                    return Err(wrong(text, Subcode::ConflictingRequests, &reason));
                }
                Some(pic) => pes[pic] = select,
                None => unplaced.push((text, select)),
            }
        }
        for (text, select) in unplaced {
            let free = (0..pics).find(|&pic| pes[pic] == 0);
            let Some(pic) = free else {
                let reason = format!("there are {pics} counters");
                return Err(wrong(text, Subcode::ResourceUnavailable, &reason));
            };
            pes[pic] = select;
        }
        if pes.iter().all(|select| *select == 0) {
            let reason = "it names no event; as in pic0=cycles,pic1=instructions";
            return Err(wrong(self.spec, Subcode::InvalidEvent, &reason));
        }
        Ok(pes)
    }

    /// Changes the selects of one counter or of all that count, as the attributes say.
    fn apply_attributes(&self, pes: &mut [u64; MAX_PIC]) -> Result<(), Failure> {
        for text in self.texts() {
            let Item::Attribute(attribute, number, key, value) = item(text) else {
                continue;
            };
            if number.is_some_and(|pic| pic >= self.pics()) {
                return Err(self.no_such_pic(text));
            }
            let (clear, set) = attribute_bits(attribute, value)
                .map_err(|(subcode, reason)| wrong(text, subcode, &format!("{key} {reason}")))?;
            let all = pes
                .iter_mut()
                .enumerate()
                .filter(|(_, select)| **select != 0);
            for (_, select) in all.filter(|(pic, _)| number.is_none_or(|number| number == *pic)) {
                *select = *select & !clear | set;
            }
        }
        Ok(())
    }

    /// Whether the processor counts what came of it.
    fn check(&self, pes: &[u64; MAX_PIC]) -> Result<(), Failure> {
        for (pic, select) in pes.iter().enumerate().filter(|(_, select)| **select != 0) {
            // With rings, so that the name has some.
            let code = format!("r{:x}", select | USR);
            resolve(&code, self.model, self.names).map_err(|error| {
                let what = format!("pic{pic} of {}", self.spec);
                wrong(&what, Subcode::InvalidAttribute, &error)
            })?;
        }
        Ok(())
    }
}

/// Bits that an attribute clears, and those that it sets.
fn attribute_bits(
    attribute: Attribute,
    value: Option<&str>,
) -> Result<(u64, u64), (Subcode, &'static str)> {
    let field = |at: u32| {
        let value = value.and_then(number);
        let value = value.filter(|value| *value <= 0xff);
        let out = "takes a number from 0 to 255";
        let value = value.ok_or((Subcode::AttributeOutOfRange, out))?;
        Ok((0xff << at, value << at))
    };
    // As the manual page has it: present without a value is 1.
    let is_on = match value.map(number) {
        None | Some(Some(1)) => true,
        Some(Some(0)) => false,
        Some(_) if matches!(attribute, Attribute::CounterMask | Attribute::UnitMask) => true,
        Some(_) => return Err((Subcode::AttributeOutOfRange, "is 0 or 1")),
    };
    let bit = |bit: u64, is_set: bool| Ok((bit, if is_set { bit } else { 0 }));
    match attribute {
        Attribute::Sys => bit(OS, is_on),
        Attribute::NoUser => bit(USR, !is_on),
        Attribute::Edge(edge) => bit(EDGE, edge == is_on),
        Attribute::Invert => bit(INVERT, is_on),
        Attribute::Interrupt => Ok((0, 0)),
        Attribute::CounterMask => field(CMASK),
        Attribute::UnitMask => field(UMASK),
    }
}

/// Attributes in the order in which they are written.
const WRITTEN: [(&str, u64, u64); 4] = [
    ("sys", OS, OS),
    ("nouser", USR, 0),
    ("edge", EDGE, EDGE),
    ("inv", INVERT, INVERT),
];

/// `cpc_eventtostr`: a specification that stands for the same; `None` if there is no event.
pub(crate) fn write(event: &Event, model: &PmuModel) -> Option<String> {
    let used: Vec<usize> = event.used().collect();
    if used.is_empty() {
        return None;
    }
    let mut items: Vec<String> = used
        .iter()
        .map(|&pic| format!("pic{pic}={}", name(event.pes[pic], model)))
        .collect();
    for (word, mask, value) in WRITTEN {
        let has = |pic: &&usize| event.pes[**pic] & mask == value;
        let having: Vec<&usize> = used.iter().filter(has).collect();
        if having.len() == used.len() {
            items.push(word.to_owned());
        } else {
            items.extend(having.iter().map(|pic| format!("{word}{pic}")));
        }
    }
    let cmask = |pic: &usize| event.pes[*pic] >> CMASK & 0xff;
    let masked = used.iter().filter(|pic| cmask(pic) != 0);
    items.extend(masked.map(|pic| format!("cmask{pic}={}", cmask(pic))));
    Some(items.join(","))
}

/// A generic name where one means the same, else the number.
fn name(select: u64, model: &PmuModel) -> String {
    let number = select & EVENT;
    let tables = NoTables(umpire_events::LibraryError::TooLate);
    let means = |name: &&'static str| {
        let named = resolve(name, model, &tables);
        named.is_ok_and(|named| self::select(&named) == number | ENABLE)
    };
    let mut names = umpire_events::generic_names();
    match names.find(means) {
        Some(name) => name.to_owned(),
        None => format!("{number:#x}"),
    }
}

/// Generic names of events that the processor has, with their event selects.
pub(crate) fn names(model: &PmuModel) -> impl Iterator<Item = (&'static str, u64)> {
    let tables = NoTables(umpire_events::LibraryError::TooLate);
    let has = move |name| Some((name, select(&resolve(name, model, &tables).ok()?)));
    umpire_events::generic_names().filter_map(has)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};
    use umpire_perfmon::c_calls;

    fn parsed(model: &str, spec: &str) -> Result<(Event, PmuModel), Failure> {
        let model = PmuModel::parse(model).unwrap();
        let cpuver = processor::number(&model);
        let tables = NoTables(umpire_events::LibraryError::TooLate);
        Ok((parse(cpuver, &model, &tables, spec)?, model))
    }

    /// What `spec` becomes, and that this stands for the same.
    fn check(model: &str, spec: &str, canonical: &str, pes: &[u64]) {
        let (event, pmu) = parsed(model, spec).unwrap_or_else(|_| panic!("{}", c_calls::text()));
        assert_eq!(event.pes[..pes.len()], *pes, "{spec}: {:x?}", event.pes);
        assert!(event.pes[pes.len()..].iter().all(|select| *select == 0));
        assert_eq!(event.pic, [0; MAX_PIC]);
        let text = write(&event, &pmu).unwrap();
        assert_eq!(text, canonical);
        assert_eq!(parsed(model, &text).unwrap().0, event, "{text}");
    }

    fn refuse(model: &str, spec: &str, subcode: Subcode, says: &str) {
        let failure = parsed(model, spec).expect_err(spec);
        assert_eq!(failure.subcode, subcode, "{spec}: {}", c_calls::text());
        assert!(c_calls::text().contains(says), "{}", c_calls::text());
    }

    #[test]
    fn specifications_and_back() {
        let two = "pic0=cycles,pic1=instructions";
        check("amd-core", two, two, &[0x41_0076, 0x41_00c0]);
        check(
            "intel-v2",
            "cycles,instructions",
            two,
            &[0x41_003c, 0x41_00c0],
        );
        check("amd-core", "pic1=cycles", "pic1=cycles", &[0, 0x41_0076]);
        check(
            "amd-core",
            "pic1=cycles,instructions",
            "pic0=instructions,pic1=cycles",
            &[0x41_00c0, 0x41_0076],
        );
        let rings = "pic0=cycles,pic1=cycles,sys1,nouser1";
        check("amd-core", rings, rings, &[0x41_0076, 0x42_0076]);
        let all = "pic0=cycles,pic1=instructions,sys";
        check("amd-core", all, all, &[0x43_0076, 0x43_00c0]);
        check("amd-core", "pic0=0x76", "pic0=cycles", &[0x41_0076]);
        check("amd-core", "pic0=118", "pic0=cycles", &[0x41_0076]);
        check("amd-core", "0166", "pic0=cycles", &[0x41_0076]);
        check(
            "amd-core",
            "r5300c0,sys",
            "pic0=instructions,sys",
            &[0x43_00c0],
        );
        check(
            "amd-core",
            "pic0=0x29,umask0=7,cmask=0x10,inv,edge",
            "pic0=0x729,edge,inv,cmask0=16",
            &[0x10c5_0729],
        );
        check(
            "amd-core",
            "pic0=cycles,sys=1,noedge,int",
            "pic0=cycles,sys",
            &[0x43_0076],
        );
        check(
            "intel-v2",
            "pic0=ref-cycles",
            "pic0=ref-cycles",
            &[0x41_0300],
        );
    }

    #[test]
    fn refusals_say_what_is_wrong() {
        use Subcode::{
            AttributeOutOfRange, ConflictingRequests, InvalidAttribute, InvalidEvent,
            InvalidPicNumber, ResourceUnavailable,
        };
        refuse(
            "amd-core",
            "pic0=EC_ref,pic1=EC_hit",
            InvalidEvent,
            "EC_ref",
        );
        refuse("amd-core", "", InvalidEvent, "no event");
        refuse("amd-core", "sys", InvalidEvent, "no event");
        refuse("amd-core", "pic6=cycles", InvalidPicNumber, "0 to 5");
        refuse("amd-core", "cycles,sys6", InvalidPicNumber, "0 to 5");
        refuse(
            "amd-core",
            "pic0=cycles,pic0=cycles",
            ConflictingRequests,
            "already",
        );
        refuse(
            "amd-k7",
            "cycles,cycles,cycles,cycles,cycles",
            ResourceUnavailable,
            "4",
        );
        refuse("amd-core", "cycles,cmask=256", AttributeOutOfRange, "255");
        refuse("amd-core", "cycles,cmask", AttributeOutOfRange, "255");
        refuse("amd-core", "cycles,sys=2", AttributeOutOfRange, "0 or 1");
        for rings in ["cycles:k", "r76:u", "cpu/event=0x76/k", "cpu/cycles/u"] {
            refuse("amd-core", rings, InvalidAttribute, "nouser");
        }
        refuse("amd-core", "cycles,pc", InvalidEvent, "pc");
        refuse("intel-v2", "ref-cycles,inv", InvalidAttribute, "pic0");
        refuse(
            "intel-v2",
            "pic0=0x10000003c",
            InvalidAttribute,
            "in_tx (bit 32",
        );
    }

    proptest! {
        #[test]
        fn whatever_was_understood_is_written_and_understood_again(
            model in proptest::sample::select(vec!["amd-core", "amd-k7", "intel-v2", "intel-v5"]),
            selects in proptest::collection::vec(1u64..0xffff, 1..4),
            words in proptest::collection::vec(
                ("(sys|nouser|edge|inv|cmask|umask)[0-3]?", any::<u8>()), 0..4,
            ),
        ) {
            let mut items: Vec<String> = selects.iter().map(|it| format!("{it:#x}")).collect();
            items.extend(words.iter().map(|(word, value)| {
                if word.contains("mask") { format!("{word}={value}") } else { word.clone() }
            }));
            if let Ok((event, pmu)) = parsed(model, &items.join(",")) {
                let text = write(&event, &pmu).unwrap();
                let again = parsed(model, &text);
                prop_assert!(again.is_ok(), "{}: {}", text, c_calls::text());
                prop_assert_eq!(again.unwrap().0, event);
            }
        }

        #[test]
        fn no_text_is_too_odd(text in "[a-z0-9=,:]{0,20}|\\PC*") {
            let _ = parsed("amd-core", &text);
        }
    }
}
