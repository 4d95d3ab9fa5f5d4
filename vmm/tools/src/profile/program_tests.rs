//! Tests of reports about programs: tasks, files, symbols, callers.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use clap::Parser;
use object::{Object, ObjectSegment, ObjectSymbol};
use perfmon_abi::compact::{CallChain, ChainEnd, GuestPlace, ProgramFrame};
use perfmon_abi::wire::programs::{Described, MappingInfo, TaskInfo};
use tempfile::TempDir;

use super::file_tests::header;
use super::test_elf::{OFFSET, elf};
use super::*;

const KERNEL: &str = "\
ffffffff81001000 t clear_page
ffffffff81002000 T do_syscall_64
ffffffff81003000 T _etext
ffffffffc0000000 t nft_do_chain\t[nf_tables]
";
pub(super) const CLEAR: u64 = 0xffff_ffff_8100_1010;
const SYSCALL: u64 = 0xffff_ffff_8100_2020;
const MODULE: u64 = 0xffff_ffff_c000_0123;
/// Where the program is mapped.
pub(super) const START: u64 = 0x5555_0000_0000;

pub(super) fn thread(number: u64, pid: u32, tid: u32, comm: &str) -> Record {
    Record::Described(Described::Task(TaskInfo {
        number,
        pid,
        tid,
        comm: comm.to_owned(),
        process: "main".to_owned(),
        started_ns: 5,
        kernel: false,
        ..TaskInfo::default()
    }))
}

pub(super) fn mapped(number: u64, name: &str, build_id: &str) -> Record {
    Record::Described(Described::Mapping(MappingInfo {
        number,
        start: START,
        end: START + (1 << 40),
        name: name.to_owned(),
        build_id: build_id.to_owned(),
        ..MappingInfo::default()
    }))
}

pub(super) fn kernel(ip: u64, task: u64, chain: CallChain) -> Record {
    Record::Sample(Sample {
        ip,
        period: 1000,
        vm: 7,
        ring: Some(Ring::Kernel),
        guest: GuestPlace {
            task,
            mapping: 0,
            chain,
            ..GuestPlace::default()
        },
        ..Sample::default()
    })
}

pub(super) fn user(ip: u64, task: u64, mapping: u64, chain: CallChain) -> Record {
    Record::Sample(Sample {
        ip,
        period: 1000,
        vm: 7,
        cr3: Some(0x1000),
        ring: Some(Ring::User),
        guest: GuestPlace {
            task,
            mapping,
            chain,
            ..GuestPlace::default()
        },
        ..Sample::default()
    })
}

/// Callers within mapping 11, then how it ended.
pub(super) fn chain(kernel: &[u64], program: &[u64], end: ChainEnd) -> CallChain {
    let frame = |&address: &u64| ProgramFrame {
        address,
        mapping: 11,
    };
    CallChain {
        kernel: kernel.to_vec(),
        kernel_end: (!kernel.is_empty()).then_some(ChainEnd::Entry),
        program: program.iter().map(frame).collect(),
        program_end: Some(end),
    }
}

/// This very program, with the symbol `main`: its file, build id, and the offset of `main` in it.
pub(super) struct Program {
    pub(super) file: PathBuf,
    pub(super) build_id: String,
    pub(super) main: u64,
}

/// A copy of this program that has the symbol `main` alone, where there is `strip`: each report
/// would read a hundred thousand others.
fn with_main_alone() -> PathBuf {
    let whole = std::env::current_exe().unwrap();
    let copy = whole.with_extension(format!("main-{}", std::process::id()));
    let mut strip = Command::new("strip");
    strip.args(["--keep-symbol=main", "-o"]).arg(&copy);
    if !strip.arg(&whole).status().is_ok_and(|it| it.success()) {
        return whole;
    }
    let file = whole.with_extension("main");
    fs::rename(copy, &file).unwrap();
    file
}

impl Program {
    pub(super) fn own() -> Self {
        static FILE: OnceLock<PathBuf> = OnceLock::new();
        let file = FILE.get_or_init(with_main_alone).clone();
        let bytes = fs::read(&file).unwrap();
        let elf = object::File::parse(&*bytes).unwrap();
        let main = elf.symbols().find(|one| one.name() == Ok("main")).unwrap();
        let segment = elf
            .segments()
            .find(|one| (one.address()..one.address() + one.size()).contains(&main.address()));
        let segment = segment.unwrap();
        let id = elf.build_id().unwrap().unwrap_or_default();
        Self {
            build_id: id.iter().map(|byte| format!("{byte:02x}")).collect(),
            main: main.address() - segment.address() + segment.file_range().0,
            file,
        }
    }
}

/// A command line of `umpire report`.
#[derive(Debug, clap::Parser)]
pub(super) struct ReportLine {
    #[command(flatten)]
    pub(super) options: ReportOptions,
}

/// A folder with a profile, the kernel's names and a guest's root.
pub(super) struct Place(TempDir);

impl Place {
    pub(super) fn new(records: &[Record]) -> Self {
        Self::with_events(1, records)
    }

    /// With so many of the events of [`header`].
    pub(super) fn with_events(events: usize, records: &[Record]) -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        fs::create_dir_all(place.path("root/usr/bin")).unwrap();
        fs::write(place.path("kallsyms"), KERNEL).unwrap();
        let mut header = header();
        header.events.truncate(events);
        let mut writer = ProfileWriter::new(Vec::new(), &header).unwrap();
        for record in records {
            writer.write(record).unwrap();
        }
        fs::write(place.path("umpire.data"), writer.finish(5).unwrap()).unwrap();
        place
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(super) fn options(&self) -> ReportOptions {
        self.options_with(&["--no-children"])
    }

    /// Those of a command line.
    pub(super) fn options_with(&self, words: &[&str]) -> ReportOptions {
        let path = |name| self.path(name).display().to_string();
        let (input, names, root) = (path("umpire.data"), path("kallsyms"), path("root"));
        let own = [
            "report",
            "-i",
            &input,
            "--symbols",
            &names,
            "--symfs",
            &root,
        ];
        let words = own.iter().chain(words);
        ReportLine::try_parse_from(words).unwrap().options
    }

    pub(super) fn report(&self, change: impl FnOnce(&mut ReportOptions)) -> String {
        let mut options = self.options();
        change(&mut options);
        let mut out = Vec::new();
        report(&options, &mut out, &mut Vec::new()).unwrap();
        String::from_utf8(out).unwrap()
    }

    /// What a command line prints, and what it says beside that.
    pub(super) fn printed(&self, words: &[&str]) -> (String, String) {
        let (mut out, mut notes) = (Vec::new(), Vec::new());
        report(&self.options_with(words), &mut out, &mut notes).unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (text(out), text(notes))
    }

    /// The lines of a report that are rows, with single spaces.
    pub(super) fn rows(&self, change: impl FnOnce(&mut ReportOptions)) -> Vec<String> {
        let text = self.report(change);
        let rows = text.lines().filter(|line| !line.starts_with('#'));
        rows.map(|row| row.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect()
    }

    pub(super) fn script(&self, fields: Option<&str>, json: bool) -> String {
        self.script_with(&[], fields, json)
    }

    /// Of samples that the words of a command line choose.
    pub(super) fn script_with(&self, words: &[&str], fields: Option<&str>, json: bool) -> String {
        let options = ScriptOptions {
            profile: self.options_with(words).profile,
            fields: fields
                .iter()
                .map(|fields| fields.parse().unwrap())
                .collect(),
            hide_call_graph: false,
            header: false,
            ns: false,
            json,
        };
        let mut out = Vec::new();
        script(&options, &mut out, &mut Vec::new()).unwrap();
        String::from_utf8(out).unwrap()
    }
}

/// Samples of two threads and one of nobody; `main` is where they say.
fn records(main: u64, build_id: &str) -> Vec<Record> {
    let none = CallChain::default;
    vec![
        // The numbers are told later, and twice.
        user(START + main, 1, 11, none()),
        user(START + main + 1, 2, 11, none()),
        thread(1, 40, 40, "main"),
        thread(2, 40, 40, "main"),
        mapped(11, "/usr/bin/prog", build_id),
        thread(3, 40, 41, "helper"),
        kernel(CLEAR, 3, none()),
        kernel(MODULE, 3, none()),
        user(0x1234, 3, 0, none()),
        user(0x1234, 0, 0, none()),
    ]
}

#[test]
fn samples_are_of_tasks_files_and_symbols() {
    let program = Program::own();
    let place = Place::new(&records(program.main, &program.build_id));
    fs::copy(&program.file, place.path("root/usr/bin/prog")).unwrap();
    let expected = [
        "33.33% 2 main prog [.] main",
        "16.67% 1 [unknown] [unknown] [.] [user cr3=0x1000]",
        "16.67% 1 helper [kernel.kallsyms] [k] clear_page",
        "16.67% 1 helper [nf_tables] [k] nft_do_chain",
        "16.67% 1 helper [unknown] [.] [unknown]",
    ];
    assert_eq!(place.rows(|_| {}), expected);
    let sorted = |keys: &str| place.rows(|options| options.sort = keys.parse().ok());
    assert_eq!(
        sorted("pid,tid"),
        [
            "50.00% 3 40:main 41:helper",
            "33.33% 2 40:main 40:main",
            "16.67% 1 [unknown] [unknown]"
        ]
    );
    assert_eq!(
        sorted("dso,vcpu"),
        [
            "33.33% 2 [unknown] 7/0",
            "33.33% 2 prog 7/0",
            "16.67% 1 [kernel.kallsyms] 7/0",
            "16.67% 1 [nf_tables] 7/0"
        ]
    );
    let json = place.report(|options| options.json = true);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let row = &json["events"][0]["rows"][0];
    assert_eq!(
        (&row["comm"], &row["dso"]),
        (&"main".into(), &"prog".into())
    );
    assert_eq!(row["symbol"], "main");
}

/// What is known without the guest's files, and what to do for more.
#[test]
fn without_files_the_symbols_of_programs_are_unknown() {
    let place = Place::new(&records(0x1000, ""));
    let text = place.report(|options| options.profile.symfs.clear());
    assert!(text.contains("# Hint: give --symfs DIR"), "{text}");
    let rows = place.rows(|options| options.profile.symfs.clear());
    assert_eq!(rows[0], "33.33% 2 main prog [.] [unknown]");
    let folded = place.report(|options| options.folded = true);
    let expected = "\
[unknown];[user cr3=0x1000] 1
helper;[unknown] 1
helper;clear_page_[k] 1
helper;nft_do_chain [nf_tables]_[k] 1
main;[unknown] 2
";
    assert_eq!(folded, expected);
}

#[test]
fn files_that_cannot_be_used_are_named_with_the_reason() {
    fn check(build_id: &str, deleted: bool, make: impl FnOnce(&Path), expected: &str) {
        let mut all = records(0x1000, build_id);
        for record in &mut all {
            if let Record::Described(Described::Mapping(mapping)) = record {
                mapping.deleted = deleted;
            }
        }
        let place = Place::new(&all);
        make(&place.path("root/usr/bin/prog"));
        let text = place.report(|_| {});
        let line = text.lines().find(|line| line.contains("/usr/bin/prog"));
        let line = line.unwrap_or_else(|| panic!("{text}"));
        assert!(
            line.starts_with("# Warning: symbols of /usr/bin/prog"),
            "{line}"
        );
        assert!(line.contains(expected), "{line}");
    }
    let own = |path: &Path| {
        fs::copy(Program::own().file, path).unwrap();
    };
    check("", false, |_| {}, "No such file");
    check("", true, own, "removed or replaced");
    check("00ff", false, own, "the guest ran 00ff");
    check(
        "",
        false,
        |path| fs::write(path, "text").unwrap(),
        "damaged ELF",
    );
    check(
        "",
        false,
        |path| fs::create_dir(path).unwrap(),
        "no regular file",
    );
    // Nothing leaves the folder: the link leads nowhere within it.
    let outside = Program::own().file;
    let link = |path: &Path| std::os::unix::fs::symlink(&outside, path).unwrap();
    check("", false, link, "No such file");
}

#[test]
fn no_name_leaves_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("root");
    fs::create_dir_all(root.join("etc")).unwrap();
    fs::write(folder.path().join("secret"), "").unwrap();
    fs::write(root.join("etc/inside"), "").unwrap();
    std::os::unix::fs::symlink("/etc/inside", root.join("link")).unwrap();
    std::os::unix::fs::symlink("../../..", root.join("etc/up")).unwrap();
    let symfs = symfs::Symfs::open(std::slice::from_ref(&root))
        .unwrap()
        .unwrap();
    for inside in ["/link", "link", "/etc/up/etc/inside", "/../../etc/inside"] {
        symfs.file(inside).unwrap();
    }
    for outside in [
        "/../secret",
        "../secret",
        "/etc/up/../secret",
        "/proc/self/exe",
        "",
    ] {
        symfs.file(outside).unwrap_err();
    }
}

/// A program of `name` with a function in each of two builds: what it is called, at 0x1000.
fn build(function: &str) -> Vec<u8> {
    elf(0x1000, &[0x90; 64], &[(function, 0x1000, 64)])
}

/// A sample in a mapping of each of `files`: name, root, device and inode.
fn samples_of(files: &[(&str, &str, u32, u64)]) -> Vec<Record> {
    let mut all = vec![thread(1, 40, 40, "main")];
    for (number, (name, root, device, inode)) in (11..).zip(files) {
        let Record::Described(Described::Mapping(mut mapping)) = mapped(number, name, "") else {
            unreachable!();
        };
        (mapping.device, mapping.inode) = (*device, *inode);
        mapping.root = (*root).to_owned();
        all.push(Record::Described(Described::Mapping(mapping)));
        all.push(user(START + OFFSET + 8, 1, number, CallChain::default()));
    }
    all
}

const DISK: u32 = 8 << 20 | 1;
const OVERLAY: u32 = 53;

/// Symbols of a report's rows, sorted, and its warnings, with `--symfs` of these below the
/// place.
fn symbols_with(place: &Place, symfs: &[(&str, &str)]) -> (Vec<String>, Vec<String>) {
    let change = |options: &mut ReportOptions| {
        let folder = |(of, dir): &(&str, &str)| {
            let dir = place.path(dir);
            match *of {
                "" => dir,
                of => format!("{of}={}", dir.display()).into(),
            }
        };
        options.profile.symfs = symfs.iter().map(folder).collect();
        options.sort = "symbol".parse().ok();
    };
    let mut symbols: Vec<String> = place
        .rows(change)
        .iter()
        .filter_map(|row| Some(row.rsplit_once(' ')?.1.to_owned()))
        .collect();
    symbols.sort();
    symbols.dedup();
    let text = place.report(change);
    let warnings = text.lines().filter(|line| line.starts_with("# Warning"));
    (symbols, warnings.map(str::to_owned).collect())
}

fn put(place: &Place, name: &str, function: &str) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let path = place.path(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, build(function)).unwrap();
    fs::metadata(path).unwrap().ino()
}

/// One name, two files: that of the guest's root and a container's, without build ids.
#[test]
fn two_files_of_one_name_are_not_taken_for_each_other() {
    let files = [
        ("/usr/bin/prog", "", DISK, 4711),
        ("/usr/bin/prog", "", OVERLAY, 99),
        ("/usr/bin/other", "", DISK, 4712),
    ];
    let place = Place::new(&samples_of(&files));
    put(&place, "root/usr/bin/prog", "of_root");
    put(&place, "root/usr/bin/other", "other");
    put(&place, "web/usr/bin/prog", "of_container");
    // Nothing says which of them is there.
    let (symbols, warnings) = symbols_with(&place, &[("", "root")]);
    assert_eq!(symbols, ["[unknown]", "other"]);
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    for (warning, expected) in warnings.iter().zip(["--symfs 8:1=DIR", "--symfs 0:53=DIR"]) {
        assert!(warning.contains("symbols of /usr/bin/prog"), "{warning}");
        assert!(warning.contains(expected), "{warning}");
    }
    // The container's folder is known; the root's need not be the other one's.
    let with = [("", "root"), ("0:53", "web")];
    let (symbols, warnings) = symbols_with(&place, &with);
    assert_eq!(symbols, ["of_container", "of_root", "other"]);
    assert_eq!(warnings, [""; 0]);
    // Either by itself.
    let (symbols, _) = symbols_with(&place, &[("0:53", "web")]);
    assert_eq!(symbols, ["[unknown]", "of_container"]);
}

/// A root that is mounted has the guest's inodes.
#[test]
fn the_inode_says_which_of_two_files_a_folder_has() {
    let first = Place::new(&[]);
    let inode = put(&first, "root/usr/bin/prog", "of_root");
    let files = [
        ("/usr/bin/prog", "", OVERLAY, inode + 1),
        ("/usr/bin/prog", "", DISK, inode),
    ];
    let all = samples_of(&files);
    let place = Place::new(&all);
    fs::copy(place.path("umpire.data"), first.path("umpire.data")).unwrap();
    let (symbols, warnings) = symbols_with(&first, &[("", "root")]);
    assert_eq!(symbols, ["[unknown]", "of_root"]);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("0:53"), "{warnings:?}");
}

/// One file that two sources know, and one that was replaced: there is one of that name.
#[test]
fn one_file_is_one() {
    let files = [
        ("/usr/bin/prog", "", DISK, 4711),
        ("/usr/bin/prog", "", DISK, 4711),
        ("/usr/bin/prog", "", 0, 0),
        ("/usr/bin/prog", "", DISK, 4710),
    ];
    let mut all = samples_of(&files);
    for record in &mut all {
        if let Record::Described(Described::Mapping(mapping)) = record {
            mapping.generation = u32::try_from(mapping.number).unwrap();
            mapping.deleted = mapping.inode == 4710;
        }
    }
    let place = Place::new(&all);
    put(&place, "root/usr/bin/prog", "of_root");
    let (symbols, warnings) = symbols_with(&place, &[("", "root")]);
    assert_eq!(symbols, ["[unknown]", "of_root"]);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("removed or replaced"), "{warnings:?}");
}

/// The VM has said that a name begins at a container's root.
#[test]
fn a_containers_files_are_not_the_roots() {
    let check = |root: &str, symfs: &[(&str, &str)], expected: &str, warning: &str| {
        let place = Place::new(&samples_of(&[("/usr/bin/prog", root, OVERLAY, 99)]));
        put(&place, "root/usr/bin/prog", "of_root");
        put(&place, "root/srv/db/usr/bin/prog", "of_db");
        put(&place, "web/usr/bin/prog", "of_web");
        let (symbols, warnings) = symbols_with(&place, symfs);
        assert_eq!(symbols, [expected], "{root} {symfs:?} {warnings:?}");
        assert_eq!(warnings.len(), usize::from(!warning.is_empty()));
        let all = warnings.concat();
        assert!(all.contains(warning), "{all}");
    };
    let root = ("", "root");
    check("0:53", &[root], "[unknown]", "--symfs 0:53=DIR");
    check("0:53", &[root, ("0:53", "web")], "of_web", "");
    check("0:53", &[("0:53", "web")], "of_web", "");
    check("0:53", &[root, ("0:53/", "web")], "of_web", "");
    check("0:53", &[root, ("0:5", "web")], "[unknown]", "0:53=DIR");
    check("0:53", &[root, ("0:54", "web")], "[unknown]", "0:53=DIR");
    check("8:2/web", &[root, ("8:2/web", "web")], "of_web", "");
    check(
        "8:2/web",
        &[root, ("8:2/we", "web")],
        "[unknown]",
        "8:2/web=DIR",
    );
    // Of the root's own file system its folder has the container's, too.
    check("/srv/db", &[root], "of_db", "");
    check("/srv/db", &[root, ("/srv/db", "web")], "of_web", "");
    check("/srv/gone", &[root], "[unknown]", "--symfs /srv/gone=DIR");
    check("/srv/gone", &[root, ("/srv/gone", "web")], "of_web", "");
    // Parts of the root, too: the longest path counts.
    check("", &[root, ("/usr", "web/usr")], "of_web", "");
    check(
        "",
        &[("/usr", "web/usr"), ("/usr/bin", "root/usr/bin")],
        "of_root",
        "",
    );
    check("", &[("/opt", "web")], "[unknown]", "give --symfs DIR");
    check("", &[("/", "root")], "of_root", "");
    check("", &[("/usr", "web")], "[unknown]", "No such file");
}

/// Nor does perf take the root's file for them: where no folder has a file, no other one has the
/// build id that perf is told, and else its name leads to that file alone.
#[test]
fn perf_gets_names_of_containers_files_that_lead_to_no_other_file() {
    let first = Place::new(&[]);
    let inode = put(&first, "root/usr/bin/twin", "twin");
    put(&first, "root/srv/db/usr/bin/prog", "of_db");
    put(&first, "root/usr/bin/prog", "of_root");
    let files = [
        ("/usr/bin/prog", "0:53", OVERLAY, 99),
        ("/usr/bin/prog", "/srv/db", DISK, 100),
        ("/usr/bin/twin", "", DISK, inode),
        ("/usr/bin/twin", "", OVERLAY, inode + 1),
        ("/usr/bin/own", "", DISK, 103),
    ];
    let place = Place::new(&samples_of(&files));
    fs::copy(place.path("umpire.data"), first.path("umpire.data")).unwrap();
    let check = |place: &Place, expected: &[&str], others: &[&str]| {
        let file = place.path("perf.data");
        place.report(|options| options.perf_data = Some(file.clone()));
        let bytes = fs::read(file).unwrap();
        // Numbers are in front of each.
        let has = |name: &str| {
            let name = format!("\0{name}\0");
            bytes.windows(name.len()).any(|at| at == name.as_bytes())
        };
        expected
            .iter()
            .for_each(|name| assert!(has(name), "{name}"));
        others.iter().for_each(|name| assert!(!has(name), "{name}"));
        // Three have a build id that begins so: in the records, and in the list of all.
        bytes.windows(4).filter(|at| at == b"ump:").count()
    };
    let names = ["/usr/bin/prog", "/usr/bin/twin", "/usr/bin/own"];
    let others = ["0:53/usr/bin/prog", "8:1/usr/bin/twin"];
    let vdso_and_kernel = 3;
    let count = check(&place, &names, &others);
    assert_eq!(count, 5 + 3 + vdso_and_kernel);
    let names = [
        "/usr/bin/prog",
        "/srv/db/usr/bin/prog",
        "/usr/bin/twin",
        "0:53/usr/bin/twin",
        "/usr/bin/own",
    ];
    let count = check(&first, &names, &["8:1/usr/bin/twin"]);
    assert_eq!(count, 3 + 3 + vdso_and_kernel);
}

/// A build that both have is the same, whichever file it is.
#[test]
fn a_build_id_makes_files_of_containers_equal() {
    let program = Program::own();
    let mut all = samples_of(&[("/usr/bin/prog", "0:53", OVERLAY, 99)]);
    for record in &mut all {
        match record {
            Record::Described(Described::Mapping(mapping)) => {
                mapping.build_id.clone_from(&program.build_id);
            }
            Record::Sample(sample) => sample.ip = START + program.main,
            _ => {}
        }
    }
    let place = Place::new(&all);
    fs::copy(&program.file, place.path("root/usr/bin/prog")).unwrap();
    let (symbols, warnings) = symbols_with(&place, &[("", "root")]);
    assert_eq!((symbols, warnings), (vec!["main".to_owned()], Vec::new()));
    put(&place, "root/usr/bin/prog", "of_root");
    let (symbols, warnings) = symbols_with(&place, &[("", "root")]);
    assert_eq!(symbols, ["[unknown]"]);
    assert!(warnings[0].contains("--symfs 0:53=DIR"), "{warnings:?}");
}

#[test]
fn folders_that_make_no_sense_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir_all(path("a=b")).unwrap();
    fs::create_dir_all(path("c")).unwrap();
    let open = |arguments: &[String]| {
        let arguments: Vec<PathBuf> = arguments.iter().map(PathBuf::from).collect();
        symfs::Symfs::open(&arguments).map_err(|error| error.to_string())
    };
    let dir = |name: &str| path(name).display().to_string();
    // A folder may be called so.
    assert!(open(&[dir("a=b")]).unwrap().is_some());
    assert!(open(&[]).unwrap().is_none());
    let web = format!("/srv/web={}", dir("c"));
    assert!(open(&[dir("c"), web.clone()]).unwrap().is_some());
    for (arguments, expected) in [
        (vec![dir("gone")], "gone: No such file"),
        (
            vec![format!("/srv/web={}", dir("gone"))],
            "gone: No such file",
        ),
        (vec![format!("web={}", dir("c"))], "No such file"),
        (vec!["/srv/web=".to_owned()], "No such file"),
        (vec![String::new()], "No such file"),
        (
            vec![dir("c"), dir("a=b")],
            "one folder for the guest's root",
        ),
        (vec![web.clone(), web], "one folder for /srv/web"),
    ] {
        let error = open(&arguments).unwrap_err();
        assert!(error.contains(expected), "{arguments:?}: {error}");
    }
}

pub(super) fn with_callers() -> Place {
    let program = Program::own();
    let main = START + program.main;
    let outer = |end| chain(&[], &[main + 1, 0x99], end);
    let through = chain(&[CLEAR, SYSCALL], &[main + 2, 0x99], ChainEnd::Outermost);
    let place = Place::new(&[
        thread(1, 40, 40, "prog"),
        mapped(11, "/usr/bin/prog", &program.build_id),
        user(main + 1, 1, 11, outer(ChainEnd::Outermost)),
        kernel(CLEAR, 1, through.clone()),
        kernel(CLEAR, 1, through),
        user(main + 1, 1, 11, chain(&[], &[main + 1], ChainEnd::Broken)),
    ]);
    fs::copy(&program.file, place.path("root/usr/bin/prog")).unwrap();
    place
}

#[test]
fn callers_have_rows_and_trees() {
    let place = with_callers();
    let rows = place.rows(|options| options.no_children = false);
    let expected = [
        "100.00% 50.00% 2 prog prog [.] main",
        "75.00% 0.00% 0 prog prog [.] [unknown]",
        "50.00% 50.00% 2 prog [kernel.kallsyms] [k] clear_page",
        "50.00% 0.00% 0 prog [kernel.kallsyms] [k] do_syscall_64",
    ];
    assert_eq!(rows, expected);
    let text = place.report(|options| {
        options.children = true;
        options.call_graph = "caller".parse().ok();
    });
    let expected = "
   100.00%  50.00%        2  prog     prog               [.] main
            |
            |--50.00%--main
            |          do_syscall_64
            |          clear_page
            |
            |--25.00%--[unknown]
            |          main
            |
             --25.00%--[broken chain]
                       main

";
    assert!(text.contains(expected), "{text}");
    let text = place.report(|options| options.call_graph = "callee".parse().ok());
    let expected = "
            |
            ---clear_page
               do_syscall_64
               main
               [unknown]

";
    assert!(text.contains(expected), "{text}");
    let expected = "
            |
            ---main
               |
               |--25.00%--[unknown]
               |
                --25.00%--[broken chain]

";
    assert!(text.contains(expected), "{text}");
    let json = place.report(|options| {
        options.json = true;
        options.no_children = false;
        options.call_graph = "caller".parse().ok();
    });
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let row = &json["events"][0]["rows"][0];
    assert_eq!(
        (&row["children"], &row["overhead"]),
        (&100.0.into(), &50.0.into())
    );
    assert_eq!(row["chains"][0]["then"][0]["symbol"], "do_syscall_64");
}

#[test]
fn stacks_have_callers() {
    let place = with_callers();
    let expected = "\
prog;[unknown];main 1
prog;[unknown];main;do_syscall_64_[k];clear_page_[k] 2
prog;main 1
";
    assert_eq!(place.report(|options| options.folded = true), expected);
    let path = place.path("out.json");
    place.report(|options| options.firefox = Some(path.clone()));
    let text = fs::read_to_string(path).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let thread = &json["threads"][0];
    assert_eq!(
        (&thread["pid"], &thread["tid"]),
        (&"40".into(), &"40".into())
    );
    assert_eq!(thread["processName"], "main");
    assert!(text.contains("do_syscall_64"));
}

/// A program's chain breaks in nearly every sample, so only single chains say so; one of the
/// kernel should not.
#[test]
fn what_a_broken_chain_lacks_has_a_row_in_the_kernel_alone() {
    let mut in_kernel = chain(&[CLEAR, SYSCALL], &[], ChainEnd::NoProgram);
    (in_kernel.kernel_end, in_kernel.program_end) = (Some(ChainEnd::Broken), None);
    let place = Place::new(&[
        thread(1, 40, 40, "prog"),
        mapped(11, "/usr/bin/prog", ""),
        kernel(CLEAR, 1, in_kernel),
        user(0x99, 1, 11, chain(&[], &[0x99, 0x98], ChainEnd::Broken)),
    ]);
    let rows = place.rows(|options| options.children = true);
    let expected = [
        "50.00% 50.00% 1 prog [kernel.kallsyms] [k] clear_page",
        "50.00% 50.00% 1 prog prog [.] [unknown]",
        "50.00% 0.00% 0 prog [kernel.kallsyms] [k] do_syscall_64",
        "50.00% 0.00% 0 prog [unknown] [.] [broken chain]",
    ];
    assert_eq!(rows, expected);
    let expected = "\
prog;[broken chain];do_syscall_64_[k];clear_page_[k] 1
prog;[unknown];[unknown] 1
";
    assert_eq!(place.report(|options| options.folded = true), expected);
    let firefox = place.path("out.json");
    place.report(|options| options.firefox = Some(firefox.clone()));
    let text = fs::read_to_string(firefox).unwrap();
    assert_eq!(text.matches("[broken chain]").count(), 1, "{text}");
    let tree = place.report(|options| options.call_graph = "callee".parse().ok());
    assert_eq!(tree.matches("[broken chain]").count(), 2, "{tree}");
}

#[test]
fn a_script_has_callers() {
    let place = with_callers();
    let text = place.script(None, false);
    let expected = format!(
        "prog    40/40    [000]     0.000000:       1000 cycles:
\tffffffff81001010 clear_page+0x10 ([kernel.kallsyms])
\tffffffff81002020 do_syscall_64+0x20 ([kernel.kallsyms])
\t{:>16x} main+0x2 (/usr/bin/prog)
\t              99 [unknown] (/usr/bin/prog)

",
        START + Program::own().main + 2
    );
    assert!(text.contains(&expected), "{text}");
    assert!(
        text.contains("#                 [broken chain]\n"),
        "{text}"
    );
    let text = place.script(Some("comm,tid,sym"), false);
    let expected = "prog    40\n\tclear_page\n\tdo_syscall_64\n\tmain\n\t[unknown]\n\n";
    assert!(text.contains(expected), "{text}");
    let text = place.script(Some("-callchain,-pid,-symoff,+vm,+vcpu,+ring"), false);
    let expected = "            prog    40 vm=7 vcpu=0 ring=kernel [000]     0.000000:       1000 \
                    cycles:  ffffffff81001010 clear_page ([kernel.kallsyms])\n";
    assert!(text.contains(expected), "{text}");
    let json = place.script(None, true);
    let line: serde_json::Value = serde_json::from_str(json.lines().nth(1).unwrap()).unwrap();
    assert_eq!((&line["comm"], &line["pid"]), (&"prog".into(), &40.into()));
    assert_eq!(line["callchain"][2]["symbol"], "main");
    assert_eq!(line["callchain"][2]["dso"], "/usr/bin/prog");
}

/// perf itself shows the same symbols, and the callers.
#[test]
fn perf_opens_the_file() {
    let place = with_callers();
    let file = place.path("perf.data");
    place.report(|options| options.perf_data = Some(file.clone()));
    let kallsyms = fs::read_to_string(place.path("perf.data.kallsyms")).unwrap();
    assert!(
        kallsyms.starts_with("ffffffff81000000 T _text\n"),
        "{kallsyms}"
    );
    let perf = |words: &[&str]| {
        let mut perf = std::process::Command::new("perf");
        let perf = perf.args(words).arg("-i").arg(&file);
        let perf = perf.arg("--kallsyms").arg(place.path("perf.data.kallsyms"));
        perf.arg("--symfs").arg(place.path("root")).output()
    };
    let columns = ["report", "--stdio", "-g", "none", "--percent-limit", "0"];
    let sort = ["--sort", "comm,dso,sym", "--children"];
    let output = match perf(&[&columns[..], &sort].concat()) {
        Ok(output) => output,
        Err(error) => {
            println!("skipped: perf_opens_the_file: perf cannot be run: {error}");
            return;
        }
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let rows: Vec<String> = text
        .lines()
        .filter(|line| line.contains('%') && !line.starts_with('#'))
        .map(|row| row.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    let all = format!("{text}{}", String::from_utf8_lossy(&output.stderr));
    for row in [
        "50.00% 50.00% prog [kernel.kallsyms] [k] clear_page",
        "50.00% 0.00% prog [kernel.kallsyms] [k] do_syscall_64",
        "100.00% 50.00% prog prog [.] main",
    ] {
        assert!(rows.iter().any(|one| one == row), "{row}: {all}");
    }
    assert!(text.contains("of event 'cycles'"), "{all}");
}

#[test]
fn names_of_rust_are_those_of_the_source_unless_raw_ones_are_asked_for() {
    const RAW: &str = "_ZN4core3fmt5Write9write_str17h0123456789abcdefE";
    let place = Place::new(&[
        thread(1, 40, 40, "prog"),
        mapped(11, "/usr/bin/prog", ""),
        user(START + OFFSET, 1, 11, CallChain::default()),
    ]);
    let file = elf(0x40_1000, &[0xc3], &[(RAW, 0x40_1000, 1)]);
    fs::write(place.path("root/usr/bin/prog"), file).unwrap();
    let rows = |demangle: bool| place.rows(|options| options.profile.no_demangle = !demangle);
    assert_eq!(
        rows(true),
        ["100.00% 1 prog prog [.] core::fmt::Write::write_str"]
    );
    assert_eq!(rows(false), [format!("100.00% 1 prog prog [.] {RAW}")]);
    let script = place.script(Some("sym"), true);
    let line: serde_json::Value = serde_json::from_str(&script).unwrap();
    assert_eq!(line["symbol"], "core::fmt::Write::write_str");
}

#[test]
fn two_profiles_are_compared() {
    let program = Program::own();
    let old = Place::new(&records(program.main, &program.build_id));
    let new = with_callers();
    fs::copy(&program.file, old.path("root/usr/bin/prog")).unwrap();
    let options = DiffOptions {
        old: old.path("umpire.data"),
        new: new.path("umpire.data"),
        profile: old.options().profile,
        sort: None,
        percent_limit: 0.0,
        percentage: Percentage::Absolute,
    };
    let mut out = Vec::new();
    diff(&options, &mut out, &mut Vec::new()).unwrap();
    let text = String::from_utf8(out).unwrap();
    let expected = "\
# Event 'cycles'
#
# Baseline  Delta Abs  Shared Object      Symbol
";
    assert!(text.starts_with(expected), "{text}");
    let rows: Vec<String> = text
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|row| row.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    let expected = [
        "16.67% +33.33% [kernel.kallsyms] [k] clear_page",
        "16.67% -16.67% [nf_tables] [k] nft_do_chain",
        "16.67% -16.67% [unknown] [.] [unknown]",
        "16.67% -16.67% [unknown] [.] [user cr3=0x1000]",
        "33.33% +16.67% prog [.] main",
    ];
    assert_eq!(rows, expected, "{text}");
}

/// Samples of threads with such names, and of nobody; each a millisecond behind the one before.
fn threads() -> Place {
    let none = CallChain::default;
    let mut all = vec![
        thread(1, 40, 40, "main"),
        thread(2, 40, 41, "worker"),
        thread(3, 50, 50, "sh"),
        mapped(11, "/usr/bin/prog", ""),
        user(START + OFFSET, 1, 11, none()),
        user(START + OFFSET + 1, 2, 11, none()),
        kernel(CLEAR, 2, none()),
        kernel(MODULE, 3, none()),
        user(0x1234, 3, 0, none()),
        user(0x1234, 0, 0, none()),
    ];
    let samples = all.iter_mut().filter_map(|record| match record {
        Record::Sample(sample) => Some(sample),
        _ => None,
    });
    for (sample, ms) in samples.zip(0..) {
        sample.time_ns = ms * 1_000_000;
        sample.vcpu = (ms == 3).into();
    }
    let place = Place::new(&all);
    let file = elf(0x40_1000, &[0xc3; 4], &[("main", 0x40_1000, 4)]);
    fs::write(place.path("root/usr/bin/prog"), file).unwrap();
    place
}

/// Options of `profile` as somebody types them.
fn chosen(words: &[&str]) -> SampleChoice {
    #[derive(clap::Parser)]
    struct Typed {
        #[command(flatten)]
        samples: SampleChoice,
    }
    let words = ["umpire"].iter().chain(words);
    let typed: Typed = clap::Parser::try_parse_from(words).unwrap();
    typed.samples
}

/// Every reader of a profile has the same filters; what no sample is gets a line.
#[test]
fn samples_are_chosen_by_task_code_and_time() {
    fn check(place: &Place, words: &[&str], expected: &[u64], notes: &[&str]) {
        let options = ScriptOptions {
            profile: ProfileChoice {
                samples: chosen(words),
                ..place.options().profile
            },
            fields: Vec::new(),
            hide_call_graph: false,
            header: false,
            ns: false,
            json: true,
        };
        let (mut out, mut said) = (Vec::new(), Vec::new());
        script(&options, &mut out, &mut said).unwrap();
        let lines = out.split(|byte| *byte == b'\n');
        let lines = lines.filter(|line| !line.is_empty());
        let times = lines.map(|line| {
            let line: serde_json::Value = serde_json::from_slice(line).unwrap();
            line["time_ns"].as_u64().unwrap() / 1_000_000
        });
        assert_eq!(times.collect::<Vec<_>>(), expected, "{words:?}");
        let said = String::from_utf8(said).unwrap();
        let said: Vec<&str> = said.lines().collect();
        let notes: Vec<String> = notes.iter().map(|note| format!("umpire: {note}")).collect();
        assert_eq!(said, notes, "{words:?}");
        // The report is of as many.
        let text = place.report(|all| all.profile = options.profile.clone());
        let samples = format!("# Samples: {} of event", expected.len());
        assert!(text.contains(&samples), "{words:?}: {text}");
        for note in notes {
            let note = note.replace("umpire: ", "# Warning: ");
            assert!(text.contains(&note), "{words:?}: {text}");
        }
    }
    let place = threads();
    let main = format!("0x{:x}", START + OFFSET);
    for (words, expected) in [
        (&[][..], &[0, 1, 2, 3, 4, 5][..]),
        (&["--comms", "main"], &[0]),
        (&["--comm=sh,main"], &[0, 3, 4]),
        (&["-cworker"], &[1, 2]),
        (&["--comms", "[unknown]"], &[5]),
        (&["--pid", "40"], &[0, 1, 2]),
        (&["--tid", "41,50-59"], &[1, 2, 3, 4]),
        (&["--dsos", "prog"], &[0, 1]),
        (&["--dso", "/usr/bin/prog,[nf_tables]"], &[0, 1, 3]),
        (&["-d", "nf_tables"], &[3]),
        (&["-d", "[kernel.kallsyms]"], &[2]),
        (&["-d", "[kernel]"], &[2]),
        (&["-d", "[unknown]"], &[4, 5]),
        (&["-S", "main,clear_page"], &[0, 1, 2]),
        (&["-S", &main], &[0, 1]),
        (&["-S", "0xffffffff81001010"], &[2]),
        (&["--symbol-filter", "_"], &[2, 3]),
        (&["-C", "1"], &[3]),
        (&["--cpu", "0", "-d", "[nf_tables]"], &[]),
        (&["--time", "0.001,0.002"], &[1, 2]),
        (&["--time", ",0.001 0.005,"], &[0, 1, 5]),
        (&["--time", "20%/2"], &[1]),
        (&["--time", "60%-100%"], &[3, 4, 5]),
        (&["--comms", "worker", "-S", "main"], &[1]),
    ] {
        check(&place, words, expected, &[]);
    }
    let comms = "--comms: no sample is of a thread 'workre'; the nearest is 'worker'";
    check(&place, &["--comms", "workre,main"], &[0], &[comms]);
    let dsos = "--dsos: no sample is in 'prg'; the nearest is 'prog'";
    check(&place, &["--dsos", "prg"], &[], &[dsos]);
    let symbol = "--symbol: no sample is in a symbol 'clear'; the nearest is 'clear_page'";
    check(&place, &["-S", "clear"], &[], &[symbol]);
    let symbol = "--symbol: no sample is in a symbol 'qqqq'";
    check(&place, &["-S", "qqqq", "-c", "sh"], &[], &[symbol]);
    let part = "--symbol-filter: no sample is in a symbol with 'qq'";
    check(&place, &["--symbol-filter", "qq"], &[], &[part]);
    // Who is not known is no process 0.
    let pid = "--pid: no sample is of such a process";
    check(&place, &["--pid", "0"], &[], &[pid]);
    let tid = "--tid: no sample is of such a thread";
    check(&place, &["--tid", "7"], &[], &[tid]);
    let time = "--time: no sample was taken then; they are from 0.000000000 to 0.005000000 \
                seconds";
    check(&place, &["--time", "1,2"], &[], &[time]);
}
