//! Tests of `umpire annotate`.

use std::fs;

use perfmon_abi::compact::CallChain;
use proptest::prelude::*;

use super::*;
use crate::profile::program_tests::{Place, START, kernel, mapped, thread, user};
use crate::profile::test_elf::{OFFSET, elf};

/// push %rbp; mov %rsp,%rbp; call inner; pop %rbp; ret, and inner: nop; ret
const CODE: &[u8] = &[
    0x55, 0x48, 0x89, 0xe5, 0xe8, 2, 0, 0, 0, 0x5d, 0xc3, 0x90, 0xc3,
];
const ADDRESS: u64 = 0x40_1000;
const FUNCTIONS: &[(&str, u64, u64)] = &[("outer", ADDRESS, 11), ("inner", ADDRESS + 11, 2)];
/// Where the profile says that the kernel has `do_syscall_64`, and where its file has it.
const RUNNING: u64 = 0xffff_ffff_8100_2000;
const LINKED: u64 = 0xffff_ffff_8000_2000;

fn records() -> Vec<Record> {
    let at = |offset: u64| user(START + OFFSET + offset, 1, 11, CallChain::default());
    vec![
        thread(1, 40, 40, "prog"),
        mapped(11, "/usr/bin/prog", ""),
        at(4),
        at(4),
        // Within the same instruction.
        at(6),
        at(10),
        at(12),
        kernel(RUNNING + 4, 1, CallChain::default()),
    ]
}

fn place() -> Place {
    let place = Place::new(&records());
    fs::write(
        place.path("root/usr/bin/prog"),
        elf(ADDRESS, CODE, FUNCTIONS),
    )
    .unwrap();
    place
}

fn run(
    place: &Place,
    symbol: Option<&str>,
    change: impl FnOnce(&mut AnnotateOptions),
) -> Result<String, String> {
    let mut options = AnnotateOptions {
        profile: place.options().profile,
        symbol: symbol.map(str::to_owned),
        vmlinux: None,
        percent_limit: 0.0,
        syntax: Syntax::Att,
    };
    change(&mut options);
    let mut out = Vec::new();
    let end = annotate(&options, &mut out, &mut Vec::new());
    end.map(|()| String::from_utf8(out).unwrap())
        .map_err(|error| error.to_string())
}

#[test]
fn each_instruction_has_its_part() {
    let expected = "
         :
         : 0000000000401000 <outer>:
    0.00 :   401000:  push   %rbp
    0.00 :   401001:  mov    %rsp,%rbp
   75.00 :   401004:  call   0x40100b <inner>
    0.00 :   401009:  pop    %rbp
   25.00 :   40100a:  ret

";
    let text = run(&place(), Some("outer"), |_| {}).unwrap();
    assert!(text.ends_with(expected), "{text}");
    let head = " Percent |      Disassembly of /usr/bin/prog for cycles (4 samples, 66.67% of all \
                events, percent: local period)\n----";
    assert!(text.starts_with(head), "{text}");
    let text = run(&place(), Some("outer"), |options| {
        options.syntax = Syntax::Intel;
    });
    let text = text.unwrap();
    assert!(text.contains(" 401001:  mov    rbp,rsp\n"), "{text}");
}

#[test]
fn the_hottest_symbols_with_code_come_first() {
    let text = run(&place(), None, |_| {}).unwrap();
    let heads: Vec<&str> = text.lines().filter(|line| line.contains(">:")).collect();
    let expected = [
        "         : 0000000000401000 <outer>:",
        "         : 000000000040100b <inner>:",
    ];
    assert_eq!(heads, expected);
    assert!(
        text.ends_with(
            "# 1 more symbols are without code: no code of 'do_syscall_64' of [kernel.kallsyms]: \
             give --vmlinux FILE: the guest's kernel as an ELF file with its code\n"
        ),
        "{text}"
    );
    let text = run(&place(), None, |options| options.percent_limit = 20.0).unwrap();
    assert!(
        text.ends_with("\n# 2 more symbols have less than 20 % each\n"),
        "{text}"
    );
}

/// The kernel's file is that of a kernel that moved itself.
#[test]
fn code_of_the_kernel_is_found_by_its_symbols() {
    let place = place();
    let file = |functions: &[(&str, u64, u64)]| {
        fs::write(place.path("vmlinux"), elf(LINKED, CODE, functions)).unwrap();
        run(&place, Some("do_syscall_64"), |options| {
            options.vmlinux = Some(place.path("vmlinux"));
        })
    };
    let own = ("do_syscall_64", LINKED, 11);
    let text = file(&[own, ("clear_page", LINKED - 0x1000, 5)]).unwrap();
    assert!(
        text.contains("  100.00 : ffffffff80002004:  call   0xffffffff8000200b"),
        "{text}"
    );
    // Another kernel.
    let error = file(&[
        own,
        ("clear_page", LINKED - 0x2000, 5),
        ("_etext", LINKED + 0x5000, 5),
    ]);
    assert!(
        error.clone().unwrap_err().contains("--vmlinux"),
        "{error:?}"
    );
    // Other builds: one symbol is elsewhere, and another one is where this was.
    for functions in [
        &[("do_syscall_64", LINKED + 0x10, 11)][..],
        &[("other", LINKED, 11), ("clear_page", LINKED - 0x1000, 5)],
    ] {
        let error = file(functions);
        assert!(
            error.clone().unwrap_err().contains("a multiple of 2 MiB"),
            "{error:?}"
        );
    }
    // It has two names, and its file shows the other one.
    let alias = ("a_syscall", LINKED, 11);
    let text = file(&[alias, own, ("clear_page", LINKED - 0x1000, 5)]);
    assert!(text.unwrap().contains("<do_syscall_64>:"));
    // One out of a compressed kernel.
    let error = file(&[]).unwrap_err();
    assert!(error.contains("--kaslr-offset"), "{error}");
    let map = place.path("System.map");
    fs::write(&map, format!("{LINKED:016x} T do_syscall_64\n")).unwrap();
    let given = run(&place, Some("do_syscall_64"), |options| {
        options.vmlinux = Some(place.path("vmlinux"));
        options.profile.symbols = Some(map);
        options.profile.kaslr_offset = Some(RUNNING - LINKED);
    });
    assert!(given.unwrap().contains("<do_syscall_64>:"));
}

#[test]
fn what_has_no_code_says_what_gives_it() {
    let check = |symbol, change: &dyn Fn(&mut AnnotateOptions), expected: &str| {
        let error = run(&place(), symbol, change).unwrap_err();
        assert!(error.contains(expected), "{error}");
        assert_eq!(error.lines().count(), 1);
    };
    check(Some("do_syscall_64"), &|_| {}, "give --vmlinux FILE");
    check(Some("nothing"), &|_| {}, "no sample of 'cycles'");
    let without = |options: &mut AnnotateOptions| options.profile.symfs.clear();
    check(Some("outer"), &without, "give --symfs DIR for symbols");
    let limit = |options: &mut AnnotateOptions| options.percent_limit = 99.0;
    check(None, &limit, "no symbol has 99 %");
    let event =
        |options: &mut AnnotateOptions| options.profile.samples.event = Some("x".to_owned());
    check(None, &event, "no event 'x'");
}

/// Another file has a symbol of the same name, and is not there.
#[test]
fn one_of_several_symbols_is_enough() {
    let mut records = records();
    records.insert(2, mapped(12, "/usr/bin/gone", ""));
    let hot = user(START + OFFSET + 4, 1, 12, CallChain::default());
    records.extend(vec![hot; 9]);
    let own = |file: &str| {
        let place = Place::new(&records);
        let program = elf(ADDRESS, CODE, FUNCTIONS);
        fs::write(place.path("root/usr/bin/prog"), &program).unwrap();
        fs::write(place.path("root/usr/bin/gone"), file_without_code(program)).unwrap();
        run(&place, Some("outer"), |_| {}).map(|text| text.contains(file))
    };
    assert_eq!(own("Disassembly of /usr/bin/prog"), Ok(true));
    assert_eq!(own("Disassembly of /usr/bin/gone"), Ok(false));
}

/// The same file, as a debug file has it: its section of code has nothing.
fn file_without_code(mut file: Vec<u8>) -> Vec<u8> {
    let sections = u64::from_le_bytes(file[0x28..0x30].try_into().unwrap());
    let kind = usize::try_from(sections).unwrap() + 64 + 4;
    file[kind..kind + 4].copy_from_slice(&object::elf::SHT_NOBITS.to_le_bytes());
    file
}

#[test]
fn a_debug_file_has_no_code() {
    let place = place();
    let file = file_without_code(elf(ADDRESS, CODE, FUNCTIONS));
    fs::write(place.path("root/usr/bin/prog"), file).unwrap();
    let error = run(&place, Some("outer"), |_| {}).unwrap_err();
    assert!(error.contains("no code at 0x401000"), "{error}");
}

/// The last instruction is cut off.
#[test]
fn a_symbol_that_is_longer_than_its_code_ends_there() {
    let place = place();
    let long = [("outer", ADDRESS, 1 << 40)];
    let file = elf(ADDRESS, &CODE[..5], &long);
    fs::write(place.path("root/usr/bin/prog"), file).unwrap();
    let text = run(&place, Some("outer"), |_| {}).unwrap();
    let expected = "
    0.00 :   401001:  mov    %rsp,%rbp
  100.00 :   401004:  (bad)

";
    assert!(text.ends_with(expected), "{text}");
}

#[test]
fn samples_behind_the_code_are_counted() {
    let code = Code {
        address: ADDRESS,
        bytes: vec![0x90],
        bitness: 64,
    };
    let one = Sum {
        samples: 1,
        events: 10,
    };
    let samples = BTreeMap::from([(0, one), (5, one), (6, one)]);
    let lines = listing::lines(&code, &samples, Syntax::Att, |_| None);
    let listing = Listing {
        symbol: "long",
        object: "prog",
        event: "cycles",
        sum: Sum {
            samples: 3,
            events: 30,
        },
        percent: 100.0,
        lines: &lines,
    };
    let mut out = Vec::new();
    listing.write(&mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    let expected = "
   33.33 :   401000:  nop
# 2 samples are behind the code that is shown

";
    assert!(text.ends_with(expected), "{text}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Damaged files give a report or an error.
    #[test]
    fn damaged_files_are_no_surprise(
        changes in proptest::collection::vec((0usize..1200, any::<u8>()), 0..12),
        end in 0usize..1200,
    ) {
        let place = place();
        let mut file = elf(ADDRESS, CODE, FUNCTIONS);
        for (at, byte) in changes {
            let at = at % file.len();
            file[at] = byte;
        }
        file.truncate(end.max(64));
        for name in ["root/usr/bin/prog", "vmlinux"] {
            fs::write(place.path(name), &file).unwrap();
        }
        for kaslr_offset in [None, Some(RUNNING - ADDRESS)] {
            let _ = run(&place, None, |options| {
                options.vmlinux = Some(place.path("vmlinux"));
                options.profile.kaslr_offset = kaslr_offset;
            });
        }
    }
}
