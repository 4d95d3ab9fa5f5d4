//! Debian's kernels 6.1 and 6.12 and its newest, looked at from outside: whatever `guest-view` finds in their
//! memory has to be what they say themselves. On the processor in software, and in QEMU with what
//! that one lacks: page tables of five levels, and a processor that page-table isolation is for.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use guest_tests::linux::{Halted, InSoftware, LinuxImage, Watched};
use guest_view::{
    Chain, End, KernelView, Look, Mode, Path, Registers, Search, Step, Task, Unknown,
};

/// How often the guest is halted.
const SAMPLES: usize = 400;
const TIMEOUT: Duration = Duration::from_secs(600);
/// Where each x86-64 kernel is linked to begin. One of some 480 boots is there all the same.
const LINKED: u64 = 0xffff_ffff_8100_0000;

/// Everything that is compared goes out by the port; programs run on meanwhile.
const SCRIPT: &str = r#"
insmod /lib/modules/msr.ko
walk compute >/tmp/compute & echo $! >/tmp/compute.pid
walk kernel >/tmp/kernel & taskset 1 walk module >/tmp/module & sleep 1
mkdir -p /tmp/c && mount -t tmpfs c /tmp/c && mkdir -p /tmp/c/usr/bin && cp /usr/bin/walk /tmp/c/usr/bin
unshare -m sh -c 'cd /tmp/c && mount --move . / && exec chroot . /usr/bin/walk compute' >/tmp/inside & echo $! >/tmp/inside.pid
(cat /proc/kallsyms; echo '#maps'; cat /proc/$(cat /tmp/compute.pid)/maps) >/tmp/said
(echo '#walk'; cat /tmp/compute; echo '#pid'; cat /tmp/compute.pid) >>/tmp/said
(echo '#inside'; cat /tmp/inside.pid; grep ' /tmp/c ' /proc/self/mountinfo; echo '#files') >>/tmp/said
sed -n 's|.* r-xp [^/]*/|/|p' /proc/$(cat /tmp/compute.pid)/maps >/tmp/files
while read f; do echo $f $(hexdump -v -n 4096 -e '1/1 "%02x"' $f); done </tmp/files >>/tmp/said
echo '#end' >>/tmp/said
stty -F /dev/ttyS1 raw; cat /tmp/said >/dev/ttyS1
mkfifo /tmp/there /tmp/back
cat 0<>/tmp/there 1<>/tmp/back & cat 0<>/tmp/back 1<>/tmp/there & echo ping >/tmp/there
while :; do find /proc /sys >/dev/null 2>&1; done & while :; do true; done
"#;

/// What the guest has said of itself.
struct Said<'a> {
    symbols: &'a str,
    maps: &'a str,
    /// Where the functions of `walk` begin.
    walk: BTreeMap<u64, &'a str>,
    pid: u32,
    /// The program in a container, and the device of its root.
    inside: (u32, &'a str),
    /// Names of files, and in hexadecimal digits what each begins with.
    files: BTreeMap<&'a str, &'a str>,
}

impl<'a> Said<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let (symbols, rest) = text.split_once("#maps\n")?;
        let (maps, rest) = rest.split_once("#walk\n")?;
        let (walk, rest) = rest.split_once("#pid\n")?;
        let (pid, rest) = rest.split_once("#inside\n")?;
        let (inside, rest) = rest.split_once("#files\n")?;
        let (inside, mount) = inside.split_once('\n')?;
        let device = mount.split_whitespace().nth(2)?;
        let files = rest.lines().filter_map(|line| line.split_once(' '));
        let words: Vec<&str> = walk.strip_prefix("walk: ")?.split_whitespace().collect();
        let walk = words.chunks_exact(2).map(|pair| {
            let address = u64::from_str_radix(pair[1].strip_prefix("0x")?, 16).ok()?;
            Some((address, pair[0]))
        });
        Some(Self {
            symbols,
            maps,
            walk: walk.collect::<Option<_>>()?,
            pid: pid.trim().parse().ok()?,
            inside: (inside.trim().parse().ok()?, device),
            files: files.collect(),
        })
    }

    /// The GNU build id of a file, as `readelf --notes` finds it: behind 4 bytes of name, 20 of
    /// content, the kind, and the name.
    fn build_id(&self, file: &str) -> Option<&'a str> {
        let (_, rest) = self
            .files
            .get(file)?
            .split_once("040000001400000003000000474e5500")?;
        rest.get(..40)
    }

    /// The function of `walk` that has `address`, if it is one of those that print themselves.
    fn function(&self, address: u64) -> Option<&'a str> {
        let (start, name) = self.walk.range(..=address).next_back()?;
        (address - start < 0x100).then_some(*name)
    }
}

fn find(guest: &impl Halted, registers: &[Registers]) -> KernelView {
    let mut search = Search::new(std::iter::once(0..guest.memory_bytes()));
    loop {
        match search.step(guest, 4096) {
            Step::Searching => {}
            Step::Done => panic!("no kernel was found"),
            Step::Found(note) => match KernelView::of(guest, note, registers[0].cr3) {
                Ok(view) => return view,
                Err(error) => println!("{error}"),
            },
        }
    }
}

/// Line by line, as `/proc/kallsyms` has them. Programs for BPF and trampolines that the kernel
/// made since are no symbols of its tables.
fn check_symbols(view: &KernelView, said: &Said<'_>) {
    let mut ours = String::new();
    for symbol in view.symbols() {
        let _ = writeln!(ours, "{symbol}");
    }
    let is_made = |line: &&str| line.ends_with("[bpf]") || line.contains("[__builtin__");
    let theirs = said.symbols.lines().filter(|line| !is_made(line));
    let different = ours
        .lines()
        .zip(theirs.clone())
        .find(|(ours, theirs)| ours != theirs);
    assert_eq!(different, None);
    let counts = (ours.lines().count(), theirs.count());
    assert_eq!(counts.0, counts.1);
    assert!(counts.0 > 50_000, "{} symbols", counts.0);
}

/// Every line of the program's `/proc/PID/maps`.
fn check_mappings(look: &Look<'_>, task: &Task, said: &Said<'_>) {
    let memory = task.memory.expect("a program");
    let mut ids = 0;
    let number = |text: &str| u64::from_str_radix(text, 16).expect("a number");
    for line in said.maps.lines() {
        let mut words = line.split_whitespace();
        let (start, end) = words
            .next()
            .and_then(|range| range.split_once('-'))
            .expect("a range");
        let rights = words.next().expect("rights");
        let (offset, device) = (
            words.next().expect("an offset"),
            words.next().expect("a device"),
        );
        let (inode, name) = (words.next().expect("an inode"), words.next());
        let found = look.mapping(memory, number(start));
        // Its page is not one of the program's own memory.
        if name == Some("[vsyscall]") {
            assert!(found.is_err(), "{line}");
            continue;
        }
        let found = found.unwrap_or_else(|error| panic!("{line}: {error}"));
        let place = (found.start, found.end);
        assert_eq!(place, (number(start), number(end)), "{line}");
        assert_eq!(found.is_vdso, name == Some("[vdso]"), "{line}");
        assert_eq!(found.is_executable, rights.contains('x'), "{line}");
        let Some(file) = found.file else {
            assert_eq!(inode, "0", "{line}");
            continue;
        };
        assert_eq!(found.offset, number(offset), "{line}");
        assert_eq!(file.inode.to_string(), inode, "{line}");
        if found.is_executable {
            let ours = look.build_id(memory, &found).map(|id| id.to_string());
            println!("{line}: build id {ours:?}");
            let theirs = said.build_id(name.unwrap_or(""));
            assert!(ours.is_none() || ours.as_deref() == theirs, "{theirs:?}");
            ids += u32::from(ours.is_some());
        }
        let ours = format!("{:02x}:{:02x}", file.device >> 20, file.device & 0xf_ffff);
        assert_eq!(ours, device, "{line}");
        let path = look.path(&file).expect("a path");
        let expected = Path {
            name: name.unwrap_or("").to_owned(),
            deleted: false,
            root: String::new(),
        };
        assert_eq!(path, expected, "{line}");
    }
    assert!(said.maps.lines().count() > 5, "{}", said.maps);
    // Of pages that no program has touched nothing is in memory.
    assert!(ids > 0, "{}", said.maps);
}

/// A program in a container has its file's name there, which is not the root's.
fn check_inside(look: &Look<'_>, task: &Task, address: u64, said: &Said<'_>) {
    let memory = task.memory.expect("a program");
    let found = look.mapping(memory, address).expect("a mapping");
    let path = look.path(&found.file.expect("a file")).expect("a path");
    let expected = Path {
        name: "/usr/bin/walk".to_owned(),
        deleted: false,
        root: said.inside.1.to_owned(),
    };
    assert_eq!(path, expected);
}

/// What the samples came to.
#[derive(Debug, Default)]
struct Tally {
    samples: u32,
    unknown_tasks: u32,
    computing: u32,
    /// Of these, those whose chain is that of the source.
    walked: u32,
    kernel: u32,
    /// Of these, those whose chain leads to an entry or to a thread's first function.
    whole: u32,
    ends: BTreeMap<String, u32>,
    /// With functions of a module, and of these those whose chain goes on in the program.
    module: u32,
    through: u32,
    mapped: bool,
    /// The program in a container.
    inside: bool,
    /// In the kernel, with the place where the program entered it.
    entered: u32,
    /// Halted while the kernel changes the program's mappings.
    changing: u32,
    comms: BTreeMap<String, u32>,
}

impl Tally {
    fn add(&mut self, view: &KernelView, said: &Said<'_>, chain: &Chain, at: &Registers) {
        self.samples += 1;
        let functions: Vec<_> = chain
            .program()
            .iter()
            .map(|f| said.function(f.instruction()))
            .collect();
        if at.mode == Mode::User && functions[0].is_some() {
            // A function without a frame of its own hides its caller.
            self.computing += 1;
            let callers = [Some("middle"), Some("outer")];
            let whole = functions[1..].starts_with(&callers);
            self.walked += u32::from(whole && matches!(functions[0], Some("inner" | "leaf")));
        }
        let Some(end) = chain.kernel_end() else {
            return;
        };
        self.kernel += 1;
        self.whole += u32::from(matches!(end, End::Entry | End::Outermost));
        let names = chain
            .kernel()
            .iter()
            .map(|frame| view.symbol(frame.instruction()));
        let names: Vec<_> = names.collect();
        if !matches!(end, End::Entry) {
            let text = names.iter().map(|name| name.map_or("?", |name| name.name));
            let text: Vec<_> = text.collect();
            *self
                .ends
                .entry(format!("{end:?}: {}", text.join(" ")))
                .or_default() += 1;
        }
        let is_msr = |name: &Option<guest_view::Symbol<'_>>| {
            name.is_some_and(|name| name.module == Some("msr"))
        };
        if end == End::Entry && names.iter().any(is_msr) {
            // libc's function has no frame, and hides that its caller is `middle`.
            let last = names.last().copied().flatten().map(|name| name.name);
            let from_program = last == Some("entry_SYSCALL_64_after_hwframe");
            self.through += u32::from(from_program && functions.contains(&Some("outer")));
            self.module += 1;
        }
    }
}

/// Where its kernel begins.
fn check(guest: &mut impl Halted) -> u64 {
    let text = guest.said("#end\n", TIMEOUT);
    let said = Said::parse(&text).expect("what the script says");
    let registers = guest.halt_later().expect("registers");
    let view = find(guest, &registers);
    println!("{view:?}: {:?}", view.missing().collect::<Vec<_>>());
    assert_eq!(view.missing().count(), 0);
    check_symbols(&view, &said);
    assert!(view.refreshed(guest).expect("the modules").is_none());
    let mut tally = Tally::default();
    let mut chain = Chain::default();
    let mut halts = 0;
    // What is seldom is looked for longer: a share of nine samples says little.
    while halts < SAMPLES || (tally.module < 20 && halts < 4 * SAMPLES) {
        halts += 1;
        let registers = guest.halt_later().expect("registers");
        for (apic_id, at) in (0u32..).zip(&registers) {
            let cpu = view.processor(guest, apic_id).expect("a processor");
            let look = Look::at(&view, guest);
            let task = look.task(cpu, at);
            look.chain(task.as_ref().ok(), at, &mut chain);
            tally.add(&view, &said, &chain, at);
            let Ok(task) = task else {
                tally.unknown_tasks += 1;
                continue;
            };
            *tally.comms.entry(task.process.to_string()).or_default() += 1;
            assert!(!task.is_kernel || task.memory.is_none(), "{task:?}");
            // Registers of another task would lead elsewhere in this one's memory.
            if let (Some(memory), Some(frame)) = (task.memory, chain.program().first()) {
                match look.mapping(memory, frame.address) {
                    // It was halted while its kernel changes the mappings, which is seen.
                    Err(Unknown::Inconsistent(_)) if at.mode == Mode::Kernel => {
                        tally.changing += 1;
                    }
                    mapping => {
                        let is_code = mapping.is_ok_and(|mapping| mapping.is_executable);
                        assert!(is_code, "{frame:?}: {mapping:?} in {task:?}");
                    }
                }
                tally.entered += u32::from(at.mode == Mode::Kernel);
            }
            let in_walk = at.mode == Mode::User && said.function(at.rip).is_some();
            if task.tgid == said.inside.0 && in_walk {
                check_inside(&look, &task, at.rip, &said);
                tally.inside = true;
            }
            if task.tgid == said.pid && !tally.mapped {
                check_mappings(&look, &task, &said);
                tally.mapped = true;
            }
        }
    }
    println!("{tally:#?}");
    let most = |part: u32, whole: u32| part * 100 >= whole * 90;
    assert!(tally.inside, "the program in a container");
    assert!(tally.mapped && tally.comms.contains_key("walk"));
    assert!(tally.comms.contains_key("cat"), "two that wake each other");
    assert!(tally.entered > 100, "programs in the kernel");
    assert!(tally.unknown_tasks * 100 <= tally.samples, "tasks");
    assert!(tally.changing * 100 <= tally.samples, "mappings");
    assert!(
        tally.computing > 20 && most(tally.walked, tally.computing),
        "programs"
    );
    assert!(
        tally.kernel > 100 && most(tally.whole, tally.kernel),
        "the kernel"
    );
    assert!(
        tally.module > 5 && most(tally.through, tally.module),
        "the module"
    );
    assert!(view.is_current(guest, registers[0].cr3));
    let mut symbols = view.symbols();
    let text = symbols.find(|symbol| symbol.name == "_text" && symbol.module.is_none());
    text.expect("the kernel's own symbol").address
}

/// The kernel unpacks itself there, and moves.
fn in_qemu(image: &LinuxImage, cpu: &str, options: &str) {
    let guest = image.with_script(SCRIPT).expect("the initramfs");
    let boot = || check(&mut Watched::start(&guest, cpu, options).expect("QEMU"));
    let mut text = boot();
    // It may be there by chance. It has to move when it boots again.
    if text == LINKED {
        println!("the kernel did not move, once");
        text = boot();
    }
    assert!(
        text > 1 << 63 && text != LINKED,
        "the kernel did not move: {text:#x}"
    );
}

fn in_software(image: &LinuxImage) {
    let guest = image.with_script(SCRIPT).expect("the initramfs");
    check(&mut InSoftware::start(&guest, ""));
}

/// Programs have page tables of their own.
#[test]
fn linux_6_1_isolated() {
    let image = LinuxImage::fetch().expect("the guest's image");
    in_qemu(&image, "EPYC", "pti=on");
}

/// Page tables have five levels.
#[test]
fn linux_6_12_five_levels() {
    let image = LinuxImage::fetch_newer().expect("the guest's image");
    in_qemu(&image, "max", "");
}

#[test]
fn linux_6_1() {
    in_software(&LinuxImage::fetch().expect("the guest's image"));
}

/// That of today, which prints its version.
#[test]
fn the_newest_linux() {
    in_software(&LinuxImage::fetch_newest().expect("the guest's image"));
}
