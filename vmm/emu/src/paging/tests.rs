//! Every permutation of what decides about an access in long mode, against a second walker: the
//! prose of SDM vol. 3A, 5.5 to 5.8, as a table.

use super::*;

const ROOT: u64 = 0x1000;
const POINTERS: u64 = 0x2000;
const DIRECTORY: u64 = 0x3000;
const TABLE: u64 = 0x4000;
const PAGE: u64 = 0x5000;
/// The first page of its large page, too.
const LINEAR: u64 = PAGE | 0x123;
/// Beyond the addresses of the default processor.
const RESERVED: u64 = 1 << 51;

const LEAF: u64 = PRESENT | WRITABLE | USER | ACCESSED | DIRTY | RESERVED | NO_EXECUTE;
const UPPER_ENTRY: u64 = PRESENT | WRITABLE | USER | ACCESSED | RESERVED | NO_EXECUTE;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
    Fetch,
}

/// An access, and what it is made under.
#[derive(Debug, Clone, Copy)]
struct World {
    access: Access,
    user: bool,
    /// RFLAGS.AC.
    open: bool,
    write_protect: bool,
    smep: bool,
    smap: bool,
    no_execute: bool,
}

impl World {
    const COUNT: u64 = 3 << 6;

    fn number(n: u64) -> Self {
        let bits = n / 3;
        let bit = |at: u64| bits >> at & 1 != 0;
        Self {
            access: [Access::Read, Access::Write, Access::Fetch][(n % 3) as usize],
            user: bit(0),
            open: bit(1),
            write_protect: bit(2),
            smep: bit(3),
            smap: bit(4),
            no_execute: bit(5),
        }
    }

    fn set(self) -> Set {
        match (self.user, self.access, self.open) {
            (true, Access::Read, _) => Set::UserRead,
            (true, Access::Write, _) => Set::UserWrite,
            (true, Access::Fetch, _) => Set::UserFetch,
            (false, Access::Read, false) => Set::KernelRead,
            (false, Access::Write, false) => Set::KernelWrite,
            (false, Access::Read, true) => Set::OpenRead,
            (false, Access::Write, true) => Set::OpenWrite,
            (false, Access::Fetch, _) => Set::KernelFetch,
        }
    }

    fn rules(self) -> Rules {
        Rules {
            tables: Tables::Long,
            cr3: ROOT,
            top: [0; 4],
            page_size: true,
            write_protect: self.write_protect,
            global: false,
            smep: self.smep,
            smap: self.smap,
            no_execute: self.no_execute,
            beyond: RESERVED,
            gigabyte_pages: true,
            pse36: 0,
        }
    }
}

/// Rows of SDM vol. 3A, 5.6.1: who does what to whose page, and what that takes.
#[rustfmt::skip]
const RIGHTS: [(Who, Access, Whose, &[Needs]); 12] = [
    (Who::Supervisor, Access::Read, Whose::Supervisor, &[]),
    (Who::Supervisor, Access::Read, Whose::User, &[Needs::Open]),
    (Who::Supervisor, Access::Write, Whose::Supervisor, &[Needs::Writable]),
    (Who::Supervisor, Access::Write, Whose::User, &[Needs::Open, Needs::Writable]),
    (Who::Supervisor, Access::Fetch, Whose::Supervisor, &[Needs::Executable]),
    (Who::Supervisor, Access::Fetch, Whose::User, &[Needs::Executable, Needs::NoSmep]),
    (Who::User, Access::Read, Whose::User, &[]),
    (Who::User, Access::Read, Whose::Supervisor, &[Needs::Never]),
    (Who::User, Access::Write, Whose::User, &[Needs::WritableAnyhow]),
    (Who::User, Access::Write, Whose::Supervisor, &[Needs::Never]),
    (Who::User, Access::Fetch, Whose::User, &[Needs::Executable]),
    (Who::User, Access::Fetch, Whose::Supervisor, &[Needs::Never]),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Supervisor,
    User,
}

/// A page is a user's if every entry that leads to it has U.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whose {
    Supervisor,
    User,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needs {
    Never,
    /// Without SMAP, or with AC.
    Open,
    /// W everywhere, or without CR0.WP.
    Writable,
    /// W everywhere.
    WritableAnyhow,
    /// NX nowhere.
    Executable,
    NoSmep,
}

/// #PF's error code; `None` if the access is allowed. The entries are those of the way, the
/// uppermost first.
fn expected(world: World, way: &[u64]) -> Option<u32> {
    let mut code = 0;
    if world.access == Access::Write {
        code |= 1 << 1;
    }
    if world.user {
        code |= 1 << 2;
    }
    if world.access == Access::Fetch && (world.no_execute || world.smep) {
        code |= 1 << 4;
    }
    // From above: what is not present ends the walk before anything of it is looked at.
    for entry in way {
        if entry & PRESENT == 0 {
            return Some(code);
        }
        let reserved = entry & RESERVED != 0 || entry & NO_EXECUTE != 0 && !world.no_execute;
        if reserved {
            return Some(code | 1 | 1 << 3);
        }
    }
    let each = |bit: u64| way.iter().all(|entry| entry & bit != 0);
    let none = |bit: u64| way.iter().all(|entry| entry & bit == 0);
    let who = if world.user {
        Who::User
    } else {
        Who::Supervisor
    };
    let whose = if each(USER) {
        Whose::User
    } else {
        Whose::Supervisor
    };
    let row = RIGHTS
        .iter()
        .find(|row| (row.0, row.1, row.2) == (who, world.access, whose));
    let (.., needs) = row.expect("a row of each kind");
    let met = needs.iter().all(|need| match need {
        Needs::Never => false,
        Needs::Open => !world.smap || world.open,
        Needs::Writable => each(WRITABLE) || !world.write_protect,
        Needs::WritableAnyhow => each(WRITABLE),
        Needs::Executable => none(NO_EXECUTE),
        Needs::NoSmep => !world.smep,
    });
    (!met).then_some(code | 1)
}

/// Those of `bits` that `number` chooses.
fn chosen(bits: u64, number: u64) -> u64 {
    let places = (0..64).filter(|at| bits >> at & 1 != 0);
    let chosen = places.enumerate().filter(|(n, _)| number >> n & 1 != 0);
    chosen.map(|(_, at)| 1 << at).sum()
}

struct Tried {
    ram: Ram,
    count: u64,
    allowed: u64,
}

impl Tried {
    fn new() -> Self {
        let mut ram = Ram::zeroed(0x10_000).expect("memory");
        let open = PRESENT | WRITABLE | USER | ACCESSED;
        ram.store(ROOT, POINTERS | open);
        ram.store(POINTERS, DIRECTORY | open);
        Self {
            ram,
            count: 0,
            allowed: 0,
        }
    }

    /// Each access by these entries; `at` says where they are, the uppermost first.
    fn way(&mut self, at: &[u64], entries: &[u64], physical: u64) {
        for n in 0..World::COUNT {
            let world = World::number(n);
            for (at, entry) in at.iter().zip(entries) {
                self.ram.store(*at, *entry);
            }
            let walked = walk(&self.ram, &world.rules(), LINEAR, world.set());
            if let Ok(mapped) = &walked {
                mapped.mark(&mut self.ram);
            }
            let told = walked.map(|mapped| mapped.physical);
            let right = expected(world, entries).map_or(Ok(physical), Err);
            assert_eq!(told, right, "{world:?} {entries:x?}");
            // A in each entry that was used, D in the last one behind a write; none by a fault.
            for (n, (at, entry)) in at.iter().zip(entries).enumerate() {
                let mut after = *entry;
                if right.is_ok() {
                    after |= ACCESSED;
                    if n + 1 == entries.len() && world.access == Access::Write {
                        after |= DIRTY;
                    }
                }
                assert_eq!(self.ram.load::<u64>(*at), after, "{world:?} {entries:x?}");
            }
            self.count += 1;
            self.allowed += u64::from(right.is_ok());
        }
    }
}

#[test]
fn every_permutation_of_two_levels() {
    let mut tried = Tried::new();
    let of = |bits: u64| (0..1u64 << bits.count_ones()).map(move |n| chosen(bits, n));
    let table = DIRECTORY + 8 * (LINEAR >> 21 & 0x1ff);
    let page = TABLE + 8 * (LINEAR >> 12 & 0x1ff);
    for above in of(UPPER_ENTRY) {
        for leaf in of(LEAF) {
            let entries = [above | TABLE, leaf | PAGE];
            tried.way(&[table, page], &entries, LINEAR);
        }
    }
    // PS: the upper entry is the last one, and has D.
    for leaf in of(LEAF) {
        tried.way(&[table], &[leaf | LARGE], LINEAR);
    }
    assert_eq!(tried.count, 192 * (64 * 128 + 128));
    // Neither all nor none.
    assert!(tried.allowed > tried.count / 100);
}
