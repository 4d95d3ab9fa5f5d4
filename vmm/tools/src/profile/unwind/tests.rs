//! Callers by the tables of files: of a program that tells its own stack, and of any bytes.

use std::path::{Path, PathBuf};
use std::process::Command;

use perfmon_abi::compact::{CallChain, ChainEnd, GuestPlace, ProgramFrame, ProgramStack};
use perfmon_abi::wire::programs::{Described, MappingInfo};
use proptest::prelude::{Just, Strategy, any, prop, prop_assert, prop_oneof, proptest};

use super::{MOST_FRAMES, ProgramUnwinder, Programs, Symfs};
use crate::profile::test_elf::elf;

/// Bytes of a stack's copy.
const STACK: usize = 8192;
const SOURCE: &str = include_str!("program.c");

/// The program, compiled so that registers of frame pointers have something else in them.
fn compiled(folder: &Path, flags: &[&str]) -> Option<PathBuf> {
    let source = folder.join("program.c");
    std::fs::write(&source, SOURCE).unwrap();
    let program = folder.join("program");
    let mut command = Command::new("cc");
    command.args(["-O2", "-fomit-frame-pointer", "-w", "-o"]);
    let made = command.arg(&program).args(flags).arg(&source).output();
    match made {
        Ok(output) if output.status.success() => Some(program),
        Ok(output) => panic!("{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) => {
            println!("skipped: a C compiler (Debian: gcc and libc6-dev): {error}");
            None
        }
    }
}

/// What a program has told of itself.
struct Told {
    mappings: Vec<MappingInfo>,
    guest: GuestPlace,
}

fn run(program: &Path, argument: Option<&str>) -> Told {
    let output = Command::new(program).args(argument).output().unwrap();
    let divide = b"stack\n";
    let at = output
        .stdout
        .windows(6)
        .position(|part| part == divide)
        .unwrap();
    let text = std::str::from_utf8(&output.stdout[..at]).unwrap();
    let (first, maps) = text.split_once('\n').unwrap();
    let hex = |word: &str| u64::from_str_radix(word, 16).unwrap();
    let registers: Vec<u64> = first.split(' ').map(hex).collect();
    let mut mappings: Vec<MappingInfo> = Vec::new();
    for line in maps.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (start, end) = words[0].split_once('-').unwrap();
        if words[1].contains('x') {
            mappings.push(MappingInfo {
                number: mappings.len() as u64 + 1,
                start: hex(start),
                end: hex(end),
                offset: hex(words[2]),
                name: words.get(5).copied().unwrap_or("//anon").to_owned(),
                ..MappingInfo::default()
            });
        }
    }
    let ip = registers[0];
    let is_there = |one: &&MappingInfo| (one.start..one.end).contains(&ip);
    let mapping = mappings.iter().find(is_there).unwrap().number;
    let guest = GuestPlace {
        chain: CallChain {
            program: vec![ProgramFrame {
                address: ip,
                mapping,
            }],
            program_end: Some(ChainEnd::Broken),
            ..CallChain::default()
        },
        stack: ProgramStack {
            sp: registers[1],
            bp: Some(registers[2]),
            mappings: mappings.iter().map(|one| one.number).collect(),
            bytes: output.stdout[at + divide.len()..].to_vec(),
        },
        ..GuestPlace::default()
    };
    Told { mappings, guest }
}

fn unwinder(mappings: &[MappingInfo]) -> ProgramUnwinder {
    let mut unwinder = ProgramUnwinder::new(Symfs::open(&["/".into()]).unwrap().unwrap(), STACK);
    for one in mappings {
        unwinder.add(Described::Mapping(one.clone()));
    }
    unwinder
}

/// The functions of the chain that are in `program`, and why there are no more.
fn functions(told: &Told, program: &Path) -> (Vec<String>, Option<ChainEnd>) {
    let mut unwinder = unwinder(&told.mappings);
    let mut guest = told.guest.clone();
    assert!(unwinder.knows(&guest));
    unwinder.unwind(&mut guest);
    assert_eq!(
        guest.stack,
        ProgramStack::default(),
        "it is not needed any more"
    );
    let mut programs = Programs::default();
    for one in &told.mappings {
        programs.add(Described::Mapping(one.clone()));
    }
    let symfs = Symfs::open(&["/".into()]).unwrap().unwrap();
    let name = |frame: &ProgramFrame| {
        let (info, file) = programs.mapping(frame.mapping)?;
        if Path::new(&info.name) != program {
            return None;
        }
        let file = symfs.program((programs.file(file), &[]), 1 << 16).unwrap();
        let found = file.find(frame.address - info.start + info.offset)?;
        Some(file.name(found.index).to_owned())
    };
    let names = guest.chain.program.iter().filter_map(name).collect();
    (names, guest.chain.program_end)
}

/// Static or not, with tables for programs or for debuggers.
const KINDS: [&[&str]; 3] = [
    &[],
    &["-static"],
    &["-g", "-fno-asynchronous-unwind-tables", "-fno-exceptions"],
];

#[test]
fn a_real_stack_leads_to_the_outermost_function() {
    for flags in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let Some(program) = compiled(folder.path(), flags) else {
            return;
        };
        let (names, end) = functions(&run(&program, None), &program);
        let expected = ["leaf", "middle", "outer", "main"];
        assert_eq!(names[..4], expected, "{flags:?}");
        assert_eq!(
            names.last().map(String::as_str),
            Some("_start"),
            "{flags:?}"
        );
        assert_eq!(end, Some(ChainEnd::Outermost), "{flags:?}");
    }
}

#[test]
fn a_signal_is_on_the_way() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compiled(folder.path(), &[]) else {
        return;
    };
    let (names, end) = functions(&run(&program, Some("signal")), &program);
    assert_eq!(
        names,
        ["leaf", "middle", "handler", "outer", "main", "_start"]
    );
    assert_eq!(end, Some(ChainEnd::Outermost));
}

#[test]
fn more_callers_than_there_is_room_for() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compiled(folder.path(), &[]) else {
        return;
    };
    let deep = run(&program, Some("deep"));
    let (names, end) = functions(&deep, &program);
    assert_eq!((names.len(), end), (MOST_FRAMES, Some(ChainEnd::Depth)));
    // The stack's copy ends before its callers do; or the stack does, which is another thing.
    let mut short = run(&program, None);
    let mut guest = short.guest.clone();
    guest.stack.bytes.truncate(400);
    let mut ends = Vec::new();
    for whole in [400, 408] {
        let mut unwinder = unwinder(&short.mappings);
        unwinder.stack = whole;
        short.guest = guest.clone();
        unwinder.unwind(&mut short.guest);
        let frames = short.guest.chain.program.len();
        assert!((1..4).contains(&frames), "{frames}");
        ends.push(short.guest.chain.program_end);
    }
    assert_eq!(ends, [Some(ChainEnd::Depth), Some(ChainEnd::Broken)]);
}

#[test]
fn what_is_not_known_breaks_the_chain() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compiled(folder.path(), &[]) else {
        return;
    };
    let check = |change: &dyn Fn(&mut Told), frames: usize, warning: Option<&str>| {
        let mut told = run(&program, None);
        change(&mut told);
        let mut unwinder = unwinder(&told.mappings);
        unwinder.unwind(&mut told.guest);
        let chain = &told.guest.chain;
        assert_eq!(chain.program.len(), frames);
        assert_eq!(chain.program_end, Some(ChainEnd::Broken));
        let warnings = unwinder.warnings();
        assert_eq!(
            warnings.len(),
            usize::from(warning.is_some()),
            "{warnings:?}"
        );
        let expected = warning.unwrap_or_default();
        assert!(
            warnings.iter().all(|line| line.contains(expected)),
            "{warnings:?}"
        );
    };
    // Nothing of its stack; a mapping that nobody has described.
    let without = |told: &mut Told| told.guest.stack = ProgramStack::default();
    check(
        &without,
        1,
        Some("1 samples of programs have no callers there"),
    );
    check(&|told| told.mappings.clear(), 1, None);
    let first = |told: &Told| told.guest.chain.program[0].mapping;
    let rename = |told: &mut Told, name: &str| {
        let number = first(told);
        let mut all = told.mappings.iter_mut();
        all.find(|one| one.number == number).unwrap().name = name.to_owned();
    };
    check(
        &|told| rename(told, "/gone"),
        1,
        Some("callers in /gone are not known: below /: it cannot be read there"),
    );
    let text = program.with_extension("c");
    let text = text.to_str().unwrap();
    check(&|told| rename(told, text), 1, Some("damaged ELF file"));
    check(&|told| rename(told, "[vdso]"), 1, None);
    let build = |told: &mut Told| {
        let number = first(told);
        let mut all = told.mappings.iter_mut();
        all.find(|one| one.number == number).unwrap().build_id = "0123".to_owned();
    };
    check(&build, 1, Some("and the guest ran 0123"));
}

#[test]
fn a_file_without_tables_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let flags = [
        "-nostdlib",
        "-static",
        "-fno-asynchronous-unwind-tables",
        "-Dmain=_start",
    ];
    let flags = [&flags[..], &["-Wl,--unresolved-symbols=ignore-all"]].concat();
    let Some(program) = compiled(folder.path(), &flags) else {
        return;
    };
    let name = program.to_str().unwrap();
    let mut guest = place(
        0x40_1000,
        ProgramStack {
            sp: 0x7000,
            bytes: vec![0; 64],
            ..ProgramStack::default()
        },
    );
    let mut unwinder = unwinder(&[mapping(name)]);
    unwinder.unwind(&mut guest);
    assert_eq!(guest.chain.program_end, Some(ChainEnd::Broken));
    let warnings = unwinder.warnings();
    assert!(warnings[0].contains("no unwind tables"), "{warnings:?}");
}

#[test]
fn a_file_of_very_many_segments_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut file = elf(0x40_1000, &[0xc3; 64], &[]);
    let segments = file[64..120].repeat(1025);
    let at = file.len() as u64;
    file[32..40].copy_from_slice(&at.to_le_bytes());
    file[56..58].copy_from_slice(&1025u16.to_le_bytes());
    file.extend(segments);
    let name = folder.path().join("many");
    std::fs::write(&name, file).unwrap();
    let mut unwinder = unwinder(&[mapping(name.to_str().unwrap())]);
    let bytes = vec![0; 64];
    let stack = ProgramStack {
        sp: 0x7000,
        bytes,
        ..ProgramStack::default()
    };
    let mut guest = place(0x40_0210, stack);
    unwinder.unwind(&mut guest);
    assert_eq!(guest.chain.program_end, Some(ChainEnd::Broken));
    let warnings = unwinder.warnings();
    assert!(
        warnings[0].contains("more than 1024 segments"),
        "{warnings:?}"
    );
}

/// An agent says later what the number of a mapping stands for, and no stack comes with it.
#[test]
fn the_first_frame_keeps_its_number() {
    let mut unwinder = unwinder(&[]);
    let mut guest = place(0x40_1000, ProgramStack::default());
    guest.chain.program[0].mapping = 77;
    assert!(unwinder.knows(&guest), "nothing is waited for");
    unwinder.unwind(&mut guest);
    let (address, mapping) = (0x40_1000, 77);
    assert_eq!(guest.chain.program, [ProgramFrame { address, mapping }]);
    let warnings = unwinder.warnings();
    assert!(warnings[0].contains("came without a stack"), "{warnings:?}");
}

/// All of a file, mapped at 0x40_0000.
fn mapping(name: &str) -> MappingInfo {
    MappingInfo {
        number: 1,
        start: 0x40_0000,
        end: 0x4000_0000,
        name: name.to_owned(),
        ..MappingInfo::default()
    }
}

fn place(address: u64, stack: ProgramStack) -> GuestPlace {
    let mapping = 1;
    GuestPlace {
        chain: CallChain {
            program: vec![ProgramFrame { address, mapping }],
            program_end: Some(ChainEnd::Outermost),
            ..CallChain::default()
        },
        stack,
        ..GuestPlace::default()
    }
}

thread_local! {
    /// This test's own program, whose tables any stack is unwound by.
    static OWN: std::cell::RefCell<ProgramUnwinder> = {
        let name = std::env::current_exe().unwrap();
        std::cell::RefCell::new(unwinder(&[mapping(name.to_str().unwrap())]))
    };
}

proptest! {
    #[test]
    fn any_stack_ends(
        ip in 0x40_0000u64..0x400_0000,
        sp in prop_oneof![Just(0x7000u64), any::<u64>()],
        bp in prop_oneof![Just(None), any::<u64>().prop_map(Some), (0u64..2048).prop_map(|at| Some(0x7000 + at * 8))],
        words in prop::collection::vec(
            prop_oneof![0x40_0000u64..0x400_0000, (0u64..2048).prop_map(|at| 0x7000 + at * 8), any::<u64>()],
            0..1024,
        ),
    ) {
        let bytes = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut guest = place(ip, ProgramStack { sp, bp, mappings: vec![1], bytes });
        OWN.with_borrow_mut(|own| own.unwind(&mut guest));
        let chain = guest.chain;
        prop_assert!((1..=MOST_FRAMES).contains(&chain.program.len()));
        prop_assert!(chain.program_end.is_some());
    }
}

/// Whatever is in a file, it is read in no time and breaks nothing but chains.
#[test]
fn damaged_files_break_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let Some(program) = compiled(folder.path(), &[]) else {
        return;
    };
    let told = run(&program, None);
    let own = first_file(&told);
    let whole = std::fs::read(&program).unwrap();
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        usize::try_from(state >> 33).unwrap() % below.max(1)
    };
    let mut right = 0;
    for round in 0..400 {
        let mut bytes = whole.clone();
        for _ in 0..=round % 32 {
            let at = random(bytes.len());
            bytes[at] = u8::try_from(random(256)).unwrap();
        }
        if round % 8 == 7 {
            bytes.truncate(random(whole.len()));
        }
        let name = folder.path().join("damaged");
        std::fs::write(&name, bytes).unwrap();
        let mut mappings = told.mappings.clone();
        for one in mappings.iter_mut().filter(|one| one.name == own) {
            one.name = name.to_str().unwrap().to_owned();
        }
        let mut guest = told.guest.clone();
        unwinder(&mappings).unwind(&mut guest);
        assert!(guest.chain.program.len() <= MOST_FRAMES && guest.chain.program_end.is_some());
        right += u32::from(guest.chain.program_end == Some(ChainEnd::Outermost));
    }
    assert!((20..400).contains(&right), "{right} were as good as whole");
}

fn first_file(told: &Told) -> String {
    let first = told.guest.chain.program[0].mapping;
    let mut all = told.mappings.iter();
    all.find(|one| one.number == first).unwrap().name.clone()
}
