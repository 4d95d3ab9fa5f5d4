//! A reader of the file that shares nothing with its writer: it plays the records back in the
//! order of time, as `perf.data-file-format.txt` and `perf_event_open(2)` describe them.

use std::collections::HashMap;

use super::{Frame, Line};

/// The records of a file, and the names of its events.
pub(super) struct PerfFile {
    events: HashMap<u64, String>,
    /// Kind, `misc`, and what is behind the head.
    records: Vec<(u32, u16, Vec<u8>)>,
    pub(super) build_ids: HashMap<String, Vec<u8>>,
    /// Times of the first sample and of the last one.
    pub(super) sampled_ns: Option<(u64, u64)>,
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn place(bytes: &[u8], at: usize) -> usize {
    usize::try_from(word(bytes, at)).unwrap()
}

/// A name and the NUL behind it.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap();
    String::from_utf8(bytes[..end].to_vec()).unwrap()
}

fn split(mut bytes: &[u8]) -> Vec<(u32, u16, Vec<u8>)> {
    let mut records = Vec::new();
    while !bytes.is_empty() {
        let size = usize::from(u16::from_le_bytes([bytes[6], bytes[7]]));
        let (record, rest) = bytes.split_at(size);
        let misc = u16::from_le_bytes([record[4], record[5]]);
        records.push((half(record, 0), misc, record[8..].to_vec()));
        bytes = rest;
    }
    records
}

impl PerfFile {
    pub(super) fn parse(bytes: &[u8]) -> Self {
        assert_eq!(&bytes[..8], b"PERFILE2");
        let (data, size) = (place(bytes, 40), place(bytes, 48));
        let mut section = data + size;
        let (mut events, mut build_ids) = (HashMap::new(), HashMap::new());
        let mut sampled_ns = None;
        for bit in (0..64).filter(|bit| word(bytes, 72) >> bit & 1 == 1) {
            let (at, length) = (place(bytes, section), place(bytes, section + 8));
            let feature = &bytes[at..at + length];
            section += 16;
            match bit {
                2 => {
                    for (kind, _, body) in split(feature) {
                        assert_eq!(kind, 67);
                        let id = body[4..4 + usize::from(body[24])].to_vec();
                        build_ids.insert(text(&body[28..]), id);
                    }
                }
                12 => events = names_of_events(feature),
                21 => sampled_ns = Some((word(feature, 0), word(feature, 8))),
                _ => {}
            }
        }
        Self {
            events,
            records: split(&bytes[data..data + size]),
            build_ids,
            sampled_ns,
        }
    }

    /// What programs have mapped: its name, whether it may be code, and its build id, which is
    /// empty where there is none.
    pub(super) fn mappings(&self) -> impl Iterator<Item = (String, bool, Vec<u8>)> {
        let mappings = self.records.iter().filter(|(kind, ..)| *kind == 10);
        mappings.map(|(_, misc, body)| {
            let length = match misc & 1 << 14 {
                0 => 0,
                _ => usize::from(body[32]),
            };
            let id = body[36..36 + length].to_vec();
            (text(&body[64..]), half(body, 56) & 4 != 0, id)
        })
    }

    /// All samples, by what was there before them.
    pub(super) fn lines(&self) -> Vec<Line> {
        let mut timed: Vec<_> = self.records.iter().map(|one| (time(one), one)).collect();
        timed.sort_by_key(|(time, _)| *time);
        let mut host = Host::default();
        let mut lines = Vec::new();
        for (time_ns, (kind, misc, body)) in timed {
            match kind {
                1 => host.kernel.push(Map::new(body, 32)),
                3 => host.comm(body),
                4 => host.exit(body),
                7 => host.fork(*misc, body),
                9 => lines.push(self.line(&mut host, time_ns, *misc, body)),
                10 => host.map(body),
                // Bytes of the kernel.
                20 => {}
                other => panic!("a record of kind {other}"),
            }
        }
        lines
    }

    fn line(&self, host: &mut Host, time_ns: u64, misc: u16, body: &[u8]) -> Line {
        let (pid, tid) = (half(body, 16), half(body, 20));
        let ip = word(body, 8);
        let thread = host.thread(pid, tid);
        let in_kernel = misc & 7 == 1;
        let mut frames = Vec::new();
        let mut frame = |ip: u64, in_kernel: bool| {
            let maps = if in_kernel {
                &host.kernel
            } else {
                &host.spaces[thread.space]
            };
            // What came last is there.
            let found = maps.iter().rfind(|map| map.start <= ip && ip < map.end);
            let dso = found.map_or("[unknown]", |map| &map.name);
            frames.push(Frame::new(ip, "", dso));
        };
        match body.len() {
            48 => frame(ip, in_kernel),
            _ => {
                let mut kernel = in_kernel;
                for number in 0..place(body, 48) {
                    match word(body, 56 + 8 * number) {
                        0xffff_ffff_ffff_ff80 => kernel = true,
                        0xffff_ffff_ffff_fe00 => kernel = false,
                        address => frame(address, kernel),
                    }
                }
            }
        }
        assert_eq!(frames[0].ip, ip);
        Line {
            time_ns,
            comm: thread.comm,
            pid,
            tid,
            cpu: half(body, 32),
            period: word(body, 40),
            event: self.events[&word(body, 0)].clone(),
            frames,
        }
    }
}

/// A sample has its time in a place of its own, all others have it behind all else.
fn time((kind, _, body): &(u32, u16, Vec<u8>)) -> u64 {
    match kind {
        9 => word(body, 24),
        _ => word(body, body.len() - 24),
    }
}

fn names_of_events(feature: &[u8]) -> HashMap<u64, String> {
    let attributes = usize::try_from(half(feature, 4)).unwrap();
    let mut at = 8;
    let mut events = HashMap::new();
    for _ in 0..half(feature, 0) {
        at += attributes;
        let (ids, length) = (half(feature, at), half(feature, at + 4));
        let behind = at + 8 + usize::try_from(length).unwrap();
        assert_eq!(ids, 1);
        events.insert(word(feature, behind), text(&feature[at + 8..behind]));
        at = behind + 8;
    }
    events
}

/// All that a reader knows at a moment.
#[derive(Default)]
struct Host {
    threads: HashMap<u32, Thread>,
    spaces: Vec<Vec<Map>>,
    kernel: Vec<Map>,
}

#[derive(Clone)]
struct Thread {
    pid: u32,
    comm: String,
    space: usize,
}

struct Map {
    start: u64,
    end: u64,
    name: String,
}

impl Map {
    /// `name_at` is where the name is; the kernel's has that of a symbol behind it.
    fn new(body: &[u8], name_at: usize) -> Self {
        let name = text(&body[name_at..]);
        let name = name
            .strip_suffix("]_text")
            .map_or(name.clone(), |name| format!("{name}]"));
        Self {
            start: word(body, 8),
            end: word(body, 8) + word(body, 16),
            name,
        }
    }
}

impl Host {
    /// Known by its number alone, whatever process a record names.
    fn thread(&mut self, pid: u32, tid: u32) -> Thread {
        if let Some(known) = self.threads.get(&tid) {
            return known.clone();
        }
        let space = if pid == tid {
            self.spaces.push(Vec::new());
            self.spaces.len() - 1
        } else {
            self.thread(pid, pid).space
        };
        let new = Thread {
            pid,
            comm: format!(":{tid}"),
            space,
        };
        self.threads.insert(tid, new.clone());
        new
    }

    fn comm(&mut self, body: &[u8]) {
        let mut thread = self.thread(half(body, 0), half(body, 4));
        thread.comm = text(&body[8..]);
        self.threads.insert(half(body, 4), thread);
    }

    fn exit(&mut self, body: &[u8]) {
        let ended = self.threads.get(&half(body, 8));
        assert_eq!(ended.map(|thread| thread.pid), Some(half(body, 0)));
    }

    fn fork(&mut self, misc: u16, body: &[u8]) {
        let (pid, parent, tid) = (half(body, 0), half(body, 4), half(body, 8));
        assert!(misc & 1 << 13 != 0 || pid == parent, "mappings of another");
        self.threads.remove(&tid);
        self.thread(pid, tid);
    }

    fn map(&mut self, body: &[u8]) {
        let space = self.thread(half(body, 0), half(body, 4)).space;
        self.spaces[space].push(Map::new(body, 64));
    }
}
