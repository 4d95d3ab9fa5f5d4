//! Tests of the names of code that programs made while they ran.

use std::fs;
use std::os::unix::fs::symlink;

use perfmon_abi::compact::{CallChain, ChainEnd};
use perfmon_abi::wire::programs::Described;

use super::program_tests::{Place, START, chain, mapped, thread, user};
use super::*;

/// Two processes, 40 and 50, that have the same memory without a file, and a file in memory.
fn place() -> Place {
    let none = CallChain::default;
    let mut memory = mapped(12, "/memfd:doublemapper", "");
    if let Record::Described(Described::Mapping(mapping)) = &mut memory {
        (mapping.deleted, mapping.inode) = (true, 9);
    }
    let place = Place::new(&[
        thread(1, 40, 41, "node"),
        thread(2, 50, 50, "other"),
        mapped(11, "//anon", ""),
        memory,
        user(
            START + 8,
            1,
            11,
            chain(&[], &[START + 8, START + 0x24], ChainEnd::Outermost),
        ),
        user(START + 9, 1, 12, none()),
        user(START + 0x80, 1, 11, none()),
        user(START + 8, 2, 11, none()),
    ]);
    fs::create_dir_all(place.path("root/tmp")).unwrap();
    place
}

fn names() -> String {
    format!(
        "{START:x} 10 ~run app.js:1\n{:x} 10 main loop\n",
        START + 0x20
    )
}

fn rows(place: &Place) -> Vec<String> {
    place.rows(|options| options.sort = "comm,dso,sym".parse().ok())
}

#[test]
fn each_process_has_its_own_names() {
    let place = place();
    let before = [
        "50.00% 2 node //anon [.] [unknown]",
        "25.00% 1 node memfd:doublemapper [.] [unknown]",
        "25.00% 1 other //anon [.] [unknown]",
    ];
    assert_eq!(rows(&place), before);
    fs::write(place.path("root/tmp/perf-40.map"), names()).unwrap();
    let after = [
        "50.00% 2 node [JIT] tid 40 [.] ~run app.js:1",
        "25.00% 1 node [JIT] tid 40 [.] [unknown]",
        "25.00% 1 other //anon [.] [unknown]",
    ];
    assert_eq!(rows(&place), after);
    let script = place.script(Some("ip,sym,symoff,dso,callchain"), false);
    assert!(
        script.contains("~run app.js:1+0x8 (/tmp/perf-40.map)"),
        "{script}"
    );
    assert!(
        script.contains("main loop+0x4 (/tmp/perf-40.map)"),
        "{script}"
    );
    let folded = place.report(|options| options.folded = true);
    assert!(folded.contains(";main loop;~run app.js:1"), "{folded}");
    let perf = place.path("out.perf").display().to_string();
    let (_, notes) = place.printed(&["--perf-data", &perf]);
    let said = notes.matches("umpire script has: perf reads /tmp/perf-PID.map of its own host");
    assert_eq!(said.count(), 1, "{notes}");
    fs::remove_file(place.path("root/tmp/perf-40.map")).unwrap();
    let (_, notes) = place.printed(&["--perf-data", &perf]);
    assert!(!notes.contains("perf-PID.map"), "{notes}");
    fs::write(place.path("root/tmp/perf-40.map"), names()).unwrap();
    let out = place.path("out.pb.gz");
    place.report(|options| options.pprof = Some(out.clone()));
    assert!(fs::metadata(out).unwrap().len() > 0);
}

/// The warnings of a report of `place` when its file of names is made by `make`.
fn warnings(make: impl FnOnce(&Place, std::path::PathBuf)) -> (usize, Vec<String>) {
    let place = place();
    make(&place, place.path("root/tmp/perf-40.map"));
    let text = place.report(|_| {});
    let named = text.matches("~run").count();
    let warnings = text.lines().filter(|line| line.starts_with("# Warning"));
    let root = place.path("root").display().to_string();
    (
        named,
        warnings.map(|line| line.replace(&root, "ROOT")).collect(),
    )
}

#[test]
fn a_file_of_names_is_not_trusted() {
    let none: Vec<String> = Vec::new();
    let good = |_: &Place, path| fs::write(path, names()).unwrap();
    assert_eq!(warnings(good), (1, none.clone()));
    let bad = |_: &Place, path| fs::write(path, format!("{}no\nlines\n", names())).unwrap();
    let said = "# Warning: ROOT/tmp/perf-40.map: 2 of its lines are not START SIZE NAME, and \
                were passed over";
    assert_eq!(warnings(bad), (1, vec![said.to_owned()]));
    let outside = |place: &Place, path| {
        fs::write(place.path("names"), names()).unwrap();
        symlink(place.path("names"), path).unwrap();
    };
    assert_eq!(warnings(outside), (0, none.clone()));
    let up = |place: &Place, path| {
        fs::write(place.path("names"), names()).unwrap();
        symlink("../../names", path).unwrap();
    };
    assert_eq!(warnings(up), (0, none.clone()));
    let within = |place: &Place, path| {
        fs::write(place.path("root/names"), names()).unwrap();
        symlink("../../../names", path).unwrap();
    };
    assert_eq!(warnings(within), (1, none));
    let folder = |_: &Place, path| fs::create_dir(path).unwrap();
    let said = "# Warning: ROOT/tmp/perf-40.map: it is no regular file; what process 40 made has \
                no names";
    assert_eq!(warnings(folder), (0, vec![said.to_owned()]));
    let long = |_: &Place, path| {
        fs::File::create(path)
            .unwrap()
            .set_len((64 << 20) + 1)
            .unwrap();
    };
    let (named, said) = warnings(long);
    assert_eq!(named, 0);
    assert!(said[0].contains("longer than 64 MiB"), "{said:?}");
}

/// Links of a guest to one file: each process has its names, and what is wrong is said once.
#[test]
fn one_file_of_two_processes_is_read_once() {
    let place = place();
    let text = format!("{}no\n", names());
    fs::write(place.path("root/tmp/perf-40.map"), text).unwrap();
    symlink("perf-40.map", place.path("root/tmp/perf-50.map")).unwrap();
    let all = rows(&place).join("\n");
    assert!(all.contains("node [JIT] tid 40 [.] ~run"), "{all}");
    assert!(all.contains("other [JIT] tid 50 [.] ~run"), "{all}");
    let said = place.report(|_| {});
    assert_eq!(said.matches("1 of its lines").count(), 1, "{said}");
}

#[test]
fn what_was_made_is_in_no_file_for_annotate() {
    let place = place();
    fs::write(place.path("root/tmp/perf-40.map"), names()).unwrap();
    let options = AnnotateOptions {
        profile: place.options().profile,
        symbol: Some("~run app.js:1".to_owned()),
        vmlinux: None,
        percent_limit: 1.0,
        syntax: Syntax::Att,
    };
    let error = annotate(&options, &mut Vec::new(), &mut Vec::new()).unwrap_err();
    assert!(error.to_string().contains("it is in no file"), "{error}");
}

/// A container's process writes the number that it has there, and where its root is.
#[test]
fn a_container_has_its_own_number_and_root() {
    let task = |number, pid, inner_pid, root: &str| {
        let mut task = thread(number, pid, pid, "node");
        if let Record::Described(Described::Task(info)) = &mut task {
            (info.inner_pid, info.root) = (inner_pid, root.to_owned());
        }
        task
    };
    let mut records = vec![mapped(11, "//anon", "")];
    for (number, pid, inner_pid, root) in [
        (1, 40, 7, "0:53"),
        (2, 50, 7, "/var/lib/machines/web"),
        (3, 7, 0, ""),
        (4, 60, 8, ""),
    ] {
        records.push(task(number, pid, inner_pid, root));
        records.push(user(START + 8, number, 11, CallChain::default()));
    }
    let place = Place::new(&records);
    for (folder, number, name) in [
        ("box", 7, "of_box"),
        ("root/var/lib/machines/web", 7, "of_web"),
        ("root", 7, "of_root"),
        ("root", 8, "of_namespace"),
        // Another one's, which has the number by chance.
        ("root", 40, "of_nobody"),
    ] {
        let folder = place.path(folder).join("tmp");
        fs::create_dir_all(&folder).unwrap();
        let text = format!("{START:x} 10 {name}\n");
        fs::write(folder.join(format!("perf-{number}.map")), text).unwrap();
    }
    let rows = |with_box: bool| {
        let mut rows = place.rows(|options| {
            options.sort = "pid,dso,sym".parse().ok();
            if with_box {
                let folder = format!("0:53={}", place.path("box").display());
                options.profile.symfs.push(folder.into());
            }
        });
        rows.sort();
        rows
    };
    let expected = [
        "25.00% 1 40:main [JIT] tid 40 [.] of_box",
        "25.00% 1 50:main [JIT] tid 50 [.] of_web",
        "25.00% 1 60:main [JIT] tid 60 [.] of_namespace",
        "25.00% 1 7:main [JIT] tid 7 [.] of_root",
    ];
    assert_eq!(rows(true), expected);
    assert_eq!(rows(false)[0], "25.00% 1 40:main //anon [.] [unknown]");
}
