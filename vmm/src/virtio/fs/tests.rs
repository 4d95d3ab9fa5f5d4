//! Drivers of the file system device: one as it should be, and others.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use proptest::collection::vec;
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::super::queue::MOST_CHAINS;
use super::*;
use crate::virtio::{MOST_BYTES, MOST_PIECES};

const MEMORY: usize = 4 << 20;
const DESCRIPTORS: u64 = 0x1000;
const AVAILABLE: u64 = 0x4000;
const USED: u64 = 0x5000;
const REQUEST: u64 = 0x10_0000;
const REPLY: u64 = 0x20_0000;
const SIZE: u16 = 8;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Bits of the status: what a driver says when it is done.
const RUNS: u32 = 15;

#[derive(Debug, Clone, Default)]
struct Edges(Arc<AtomicU32>);

impl InterruptLine for Edges {
    fn raise(&self) -> io::Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

type Serve = Box<dyn FnMut(&[u8], &mut Vec<u8>) + Send>;

/// A machine with the device, and what became of its requests.
struct Bench {
    device: VirtioFs<Serve>,
    memory: GuestMemoryMmap,
    edges: Edges,
    asked: Arc<Mutex<Vec<Vec<u8>>>>,
}

/// Each request is answered by its bytes backwards, `times` over.
fn bench(times: usize) -> Bench {
    bench_of(move |request, reply| {
        for _ in 0..times {
            reply.extend(request.iter().rev());
        }
    })
}

fn bench_of(mut answer: impl FnMut(&[u8], &mut Vec<u8>) + Send + 'static) -> Bench {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("memory");
    let (edges, asked) = (Edges::default(), Arc::<Mutex<Vec<Vec<u8>>>>::default());
    let log = asked.clone();
    let serve: Serve = Box::new(move |request, reply| {
        log.lock().expect("nobody panics").push(request.to_vec());
        answer(request, reply);
    });
    let line = Box::new(edges.clone());
    Bench {
        device: VirtioFs::new("umpire", memory.clone(), line, serve),
        memory,
        edges,
        asked,
    }
}

impl Bench {
    fn load(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.device.load(offset, &mut data);
        u32::from_le_bytes(data)
    }

    fn store(&mut self, offset: u64, value: u32) {
        self.device.store(offset, &value.to_le_bytes());
    }

    /// As Linux's driver begins, with queue 1 alone.
    fn begin(&mut self) {
        for status in [0, 1, 3] {
            self.store(0x70, status);
        }
        self.store(0x24, 1);
        self.store(0x20, 1);
        self.store(0x70, 11);
        assert_eq!(self.load(0x70), 11, "version 1 is agreed upon");
        self.set_queue(SIZE.into(), [DESCRIPTORS, AVAILABLE, USED]);
        self.store(0x70, RUNS);
    }

    fn set_queue(&mut self, size: u32, [descriptors, available, used]: [u64; 3]) {
        let low = |value: u64| u32::try_from(value & 0xffff_ffff).expect("32 bits");
        self.store(0x30, 1);
        self.store(0x38, size);
        for (offset, address) in [(0x80, descriptors), (0x90, available), (0xa0, used)] {
            self.store(offset, low(address));
            self.store(offset + 4, low(address >> 32));
        }
        self.store(0x44, 1);
    }

    fn descriptor(&self, number: u16, address: u64, len: u32, flags: u16, next: u16) {
        let at = DESCRIPTORS + 16 * u64::from(number);
        let put = |at, bytes: &[u8]| self.memory.write_slice(bytes, GuestAddress(at));
        put(at, &address.to_le_bytes()).expect("memory");
        put(at + 8, &len.to_le_bytes()).expect("memory");
        put(at + 12, &flags.to_le_bytes()).expect("memory");
        put(at + 14, &next.to_le_bytes()).expect("memory");
    }

    /// Makes a chain available, and says so.
    fn send(&mut self, head: u16) {
        let index: u16 = self
            .memory
            .read_obj(GuestAddress(AVAILABLE + 2))
            .expect("memory");
        let at = AVAILABLE + 4 + 2 * u64::from(index % SIZE);
        self.memory
            .write_obj(head, GuestAddress(at))
            .expect("memory");
        let next = index.wrapping_add(1);
        self.memory
            .write_obj(next, GuestAddress(AVAILABLE + 2))
            .expect("memory");
        self.store(0x50, 1);
    }

    fn used(&self) -> u16 {
        self.memory
            .read_obj(GuestAddress(USED + 2))
            .expect("memory")
    }

    fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let read = self.memory.read_slice(&mut bytes, GuestAddress(at));
        read.expect("memory");
        bytes
    }
}

#[test]
fn linux_finds_a_file_system_of_version_1() {
    let bench = bench(1);
    assert_eq!([0, 4, 8].map(|at| bench.load(at)), [0x7472_6976, 2, 26]);
    let mut tag = [0; 36];
    bench.device.load(0x100, &mut tag);
    assert!(tag.starts_with(b"umpire\0"));
    assert_eq!(bench.load(0x100 + 36), 1, "queues for requests");
    assert_eq!(bench.load(0xb0), u32::MAX, "no shared memory");
}

#[test]
fn a_request_is_answered_before_the_store_returns() {
    let mut bench = bench(1);
    bench.begin();
    bench
        .memory
        .write_slice(b"abcdef", GuestAddress(REQUEST))
        .expect("memory");
    bench.descriptor(0, REQUEST, 2, NEXT, 1);
    bench.descriptor(1, REQUEST + 2, 4, NEXT, 2);
    bench.descriptor(2, REPLY, 4, NEXT | WRITE, 5);
    bench.descriptor(5, REPLY + 0x1000, 100, WRITE, 0);
    bench.send(0);
    assert_eq!(*bench.asked.lock().expect("no panic"), [b"abcdef".to_vec()]);
    assert_eq!(bench.bytes(REPLY, 4), b"fedc");
    assert_eq!(bench.bytes(REPLY + 0x1000, 3), b"ba\0");
    assert_eq!(bench.used(), 1);
    assert_eq!(bench.bytes(USED + 4, 8), [0, 0, 0, 0, 6, 0, 0, 0]);
    assert_eq!(
        (bench.load(0x60), bench.edges.0.load(Ordering::Relaxed)),
        (1, 1)
    );
    bench.store(0x64, 1);
    assert_eq!(bench.load(0x60), 0);
    let written = bench.device.take_written();
    assert!(written.contains(&(REPLY..REPLY + 4)), "{written:x?}");
    assert!(
        written.contains(&(REPLY + 0x1000..REPLY + 0x1002)),
        "{written:x?}"
    );
    assert_eq!(bench.device.broken(), None);
}

#[test]
fn a_reply_without_room_is_one_of_an_error() {
    let mut bench = bench(50);
    bench.begin();
    let request: Vec<u8> = (0..40).collect();
    bench
        .memory
        .write_slice(&request, GuestAddress(REQUEST))
        .expect("memory");
    bench.descriptor(0, REQUEST, 40, NEXT, 1);
    bench.descriptor(1, REPLY, 100, WRITE, 0);
    bench.send(0);
    let mut error = vec![16, 0, 0, 0];
    error.extend((-libc::EIO).to_le_bytes());
    error.extend(&request[8..16]);
    assert_eq!(bench.bytes(REPLY, 16), error);
    assert_eq!((bench.used(), bench.device.broken()), (1, None));
}

/// A chain that no driver makes breaks the device, which does nothing more then.
#[test]
fn malformed_chains_break_the_device() {
    type Make = fn(&mut Bench);
    let cases: [(Broken, Make); 9] = [
        (Broken::Chain, |bench| {
            bench.descriptor(0, REQUEST, 8, NEXT, 0);
        }),
        (Broken::Chain, |bench| {
            bench.descriptor(0, REQUEST, 8, NEXT, SIZE);
        }),
        (Broken::Chain, |bench| {
            bench.descriptor(0, REPLY, 8, WRITE | NEXT, 1);
            bench.descriptor(1, REQUEST, 8, 0, 0);
        }),
        (Broken::Memory, |bench| {
            bench.descriptor(0, MEMORY as u64 - 4, 8, 0, 0);
        }),
        (Broken::Memory, |bench| {
            bench.descriptor(0, u64::MAX - 3, 8, WRITE, 0);
        }),
        (Broken::Size, |bench| {
            let bytes = u32::try_from(MOST_BYTES).expect("a size");
            bench.descriptor(0, REQUEST, bytes, NEXT, 1);
            bench.descriptor(1, REQUEST, 1, 0, 0);
        }),
        (Broken::NoRoom, |bench| {
            bench.descriptor(0, REQUEST, 8, NEXT, 1);
            bench.descriptor(1, REPLY, 7, WRITE, 0);
        }),
        // As many as the table has, which no memory is behind.
        (Broken::Size, |bench| {
            let pieces = u32::try_from(MOST_PIECES).expect("a number") + 1;
            for piece in 0..pieces {
                let at = 0x30_0000 + 16 * u64::from(piece);
                let next = u16::try_from(piece + 1).expect("small");
                bench
                    .memory
                    .write_obj(REQUEST, GuestAddress(at))
                    .expect("memory");
                bench
                    .memory
                    .write_obj(NEXT, GuestAddress(at + 12))
                    .expect("memory");
                bench
                    .memory
                    .write_obj(next, GuestAddress(at + 14))
                    .expect("memory");
            }
            bench.descriptor(0, 0x30_0000, 16 * pieces, INDIRECT, 0);
        }),
        (Broken::Heads, |bench| {
            bench
                .memory
                .write_obj(SIZE + 1, GuestAddress(AVAILABLE + 2))
                .expect("memory");
        }),
    ];
    for (number, (broken, make)) in cases.into_iter().enumerate() {
        let mut bench = bench(1);
        bench.begin();
        make(&mut bench);
        bench.send(0);
        assert_eq!(bench.device.broken(), Some(broken), "case {number}");
        assert_eq!(bench.load(0x70), RUNS | 64, "it says so");
        assert_eq!(bench.load(0x60) & 2, 2);
        let asked = bench.asked.lock().expect("no panic").len();
        bench.descriptor(0, REQUEST, 8, NEXT, 1);
        bench.descriptor(1, REPLY, 64, WRITE, 0);
        bench.send(0);
        assert_eq!(bench.asked.lock().expect("no panic").len(), asked);
    }
}

/// Each reply makes one more request available: that is no way to hold the machine up.
#[test]
fn replies_over_the_ring_do_not_go_on_for_ever() {
    let mut index = 1_u16;
    let mut bench = bench_of(move |_, reply| {
        index = index.wrapping_add(1);
        reply.extend([0, 0]);
        reply.extend(index.to_le_bytes());
    });
    bench.begin();
    bench.descriptor(0, REQUEST, 8, NEXT, 1);
    bench.descriptor(1, AVAILABLE, 4, WRITE, 0);
    bench.send(0);
    assert_eq!(bench.device.broken(), Some(Broken::Heads));
    let asked = bench.asked.lock().expect("no panic").len();
    assert_eq!(asked, usize::from(MOST_CHAINS));
}

#[test]
fn queues_that_cannot_be_break_the_device() {
    let end = MEMORY as u64;
    for (size, rings) in [
        (0, [DESCRIPTORS, AVAILABLE, USED]),
        (3, [DESCRIPTORS, AVAILABLE, USED]),
        (u32::from(MOST_CHAINS) * 2, [DESCRIPTORS, AVAILABLE, USED]),
        (u32::MAX, [DESCRIPTORS, AVAILABLE, USED]),
        (8, [DESCRIPTORS + 8, AVAILABLE, USED]),
        (8, [DESCRIPTORS, AVAILABLE + 1, USED]),
        (8, [DESCRIPTORS, AVAILABLE, USED + 2]),
        (8, [DESCRIPTORS, 0, USED]),
        (8, [end - 16, AVAILABLE, USED]),
        (8, [DESCRIPTORS, u64::MAX - 1, USED]),
        (8, [DESCRIPTORS, AVAILABLE, end]),
    ] {
        let mut bench = bench(1);
        bench.set_queue(size, rings);
        let found = bench.device.broken();
        assert_eq!(found, Some(Broken::Rings), "{size} {rings:x?}");
    }
}

#[test]
fn what_is_saved_goes_on() {
    let mut first = bench(1);
    first.begin();
    first.descriptor(0, REQUEST, 8, NEXT, 1);
    first.descriptor(1, REPLY, 64, WRITE, 0);
    first.send(0);
    let text = serde_json::to_string(&first.device.save()).expect("JSON");
    let mut second = bench(2);
    let all = first.bytes(0, MEMORY);
    second
        .memory
        .write_slice(&all, GuestAddress(0))
        .expect("memory");
    let state = serde_json::from_str(&text).expect("as it was");
    second.device.restore(&state).expect("possible");
    assert_eq!(second.device.save(), state);
    assert_eq!((second.load(0x60), second.load(0x70)), (1, RUNS));
    second.send(0);
    assert_eq!((second.used(), second.device.broken()), (2, None));
}

/// A driver that does anything, and mostly something near to what makes sense.
#[derive(Debug, Clone)]
enum Deed {
    Store(u64, u32),
    Load(u64),
    Descriptor(u16, u64, u32, u16, u16),
    Send(u16),
    Index(u16),
    Begin,
}

fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => (0..MEMORY as u64).boxed(),
        2 => Just(DESCRIPTORS),
        1 => Just(USED),
        1 => MEMORY as u64 - 64..MEMORY as u64 + 64,
        1 => any::<u64>(),
    ]
}

fn deed() -> impl Strategy<Value = Deed> {
    let register = prop_oneof![(0..0x40_u64).prop_map(|it| it * 4), 0..0x1200_u64];
    let len = prop_oneof![0..200_u32, any::<u32>()];
    prop_oneof![
        1 => (register.clone(), prop_oneof![0..16_u32, any::<u32>()])
            .prop_map(|(at, value)| Deed::Store(at, value)),
        1 => register.prop_map(Deed::Load),
        6 => (0..SIZE + 1, address(), len, 0..8_u16, 0..SIZE + 1)
            .prop_map(|(n, at, len, flags, next)| Deed::Descriptor(n, at, len, flags, next)),
        6 => (0..SIZE + 1).prop_map(Deed::Send),
        1 => any::<u16>().prop_map(Deed::Index),
        2 => Just(Deed::Begin),
    ]
}

proptest! {
    #[test]
    fn no_driver_brings_the_device_down(deeds in vec(deed(), 0..60)) {
        let mut bench = bench(1);
        for deed in deeds {
            let before = bench.asked.lock().expect("no panic").len();
            match deed {
                Deed::Store(at, value) => bench.store(at, value),
                Deed::Load(at) => { bench.load(at); }
                Deed::Descriptor(n, at, len, flags, next) => {
                    bench.descriptor(n, at, len, flags, next);
                }
                Deed::Send(head) => bench.send(head),
                Deed::Index(index) => bench.memory
                    .write_obj(index, GuestAddress(AVAILABLE + 2)).expect("memory"),
                Deed::Begin => {
                    // Whatever it was, a reset makes it a device as at first.
                    bench.store(0x70, 0);
                    bench.memory.write_obj(0_u32, GuestAddress(AVAILABLE)).expect("memory");
                    bench.begin();
                }
            }
            let asked = bench.asked.lock().expect("no panic").len() - before;
            prop_assert!(asked <= MOST_CHAINS.into(), "{asked} requests at once");
            for written in bench.device.take_written() {
                prop_assert!(written.end <= MEMORY as u64, "{written:x?}");
            }
        }
    }
}
