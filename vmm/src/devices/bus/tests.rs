//! Tests of the port dispatch.

use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proptest::prelude::*;

use super::super::time::tests::FixedTime;
use super::*;

#[derive(Clone, Default)]
struct Screen(Arc<Mutex<Vec<u8>>>);

impl Write for Screen {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(buf);
        Ok(buf.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Broken;

impl Write for Broken {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn bus_with(console: Box<dyn Write + Send>) -> (PortBus, EventFd) {
    let (mut parts, irq) = PlatformParts::with_console(console).unwrap();
    parts.time = Box::new(FixedTime {
        elapsed: Duration::from_secs(1),
        unix: 1_795_247_889,
    });
    (PortBus::new(parts), irq)
}

fn bus() -> PortBus {
    bus_with(Box::new(io::sink())).0
}

fn read(bus: &mut PortBus, port: u16, size: u8) -> u32 {
    let mut data = [0; 4];
    bus.read(port, size, &mut data[..usize::from(size)]);
    u32::from_le_bytes(data)
}

#[test]
fn the_map_is_sorted_and_disjoint() {
    for pair in port_map().windows(2) {
        assert!(pair[0].ports.end() < pair[1].ports.start(), "{pair:?}");
    }
}

#[test]
fn reads_at_reset() {
    fn check(port: u16, size: u8, expected: u32) {
        assert_eq!(read(&mut bus(), port, size), expected, "{port:#x}/{size}");
    }
    check(0x3fd, 1, 0x60); // line status: transmitter empty
    check(0x64, 1, 0);
    check(0x92, 1, 2);
    check(0xcf8, 4, 0);
    check(0xcf8, 1, 0xff); // only a 32-bit access reaches the address register
    check(0xcf8, 2, 0x00ff); // 0xcf9 is the reset control
    check(0xcfc, 4, 0xffff_ffff);
    check(0x600, 4, 0);
    check(0x604, 2, 1);
    check(0x608, 4, 3_579_545);
    check(0x606, 4, 3_579_545 << 16);
    check(0x5ff, 2, 0x00ff); // starts below the block
    check(0x70, 1, 0xff);
    check(0xf4, 1, 0xff);
    check(0x2f8, 1, 0xff); // no COM2
    check(0xffff, 2, 0xffff); // wraps to port 0, where nothing is either
}

#[test]
fn writes_and_what_they_lead_to() {
    use DeviceOutcome::{Continue, Exit};
    fn check(port: u16, data: &[u8], expected: DeviceOutcome) {
        let size = u8::try_from(data.len()).unwrap();
        let got = bus().write(port, size, data);
        assert_eq!(got, expected, "{port:#x} {data:x?}");
    }
    check(0xf4, &[0x10], Exit(GuestEnd::TestExit(0x10)));
    check(0xf4, &[1, 2], Exit(GuestEnd::TestExit(0x201)));
    check(0xf4, &[1, 2, 3, 4], Exit(GuestEnd::TestExit(0x0403_0201)));
    check(0xf5, &[1], Continue);
    check(0x604, &[0, 0x34], Exit(GuestEnd::PowerOff));
    check(0x604, &[0, 0x14], Continue);
    check(
        0x64,
        &[0xfe],
        Exit(GuestEnd::Reset(ResetSource::KeyboardController)),
    );
    check(0x64, &[0xd1], Continue);
    check(
        0xcf9,
        &[0x06],
        Exit(GuestEnd::Reset(ResetSource::ResetControl)),
    );
    check(0xcf9, &[0x02], Continue);
    check(0xcf8, &[0, 6, 0, 0x80], Continue); // an address, not a reset
    check(
        0x92,
        &[1],
        Exit(GuestEnd::Reset(ResetSource::SystemControlA)),
    );
    check(0x92, &[2], Continue);
    check(0x80, &[1], Continue);
    check(0xffff, &[1, 2, 3, 4], Continue);
    check(0x80, &[], Continue);
}

#[test]
fn the_pci_probe_of_a_guest_finds_the_mechanism_but_no_device() {
    let mut bus = bus();
    let _ = bus.write(0xcf8, 4, &0x8000_0000u32.to_le_bytes());
    assert_eq!(read(&mut bus, 0xcf8, 4), 0x8000_0000);
    assert_eq!(read(&mut bus, 0xcfc, 4), 0xffff_ffff);
    assert_eq!(read(&mut bus, 0xcfe, 2), 0xffff);
}

#[test]
fn com2_is_there_where_it_is_asked_for() {
    let screen = Screen::default();
    let (mut parts, _irq) = PlatformParts::with_console(Box::new(io::sink())).unwrap();
    let irq = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    parts.com2 = Some((Box::new(irq.try_clone().unwrap()), Box::new(screen.clone())));
    let mut with = PortBus::new(parts);
    assert_eq!(with.write(0x2f8, 1, b"agent"), DeviceOutcome::Continue);
    assert_eq!(screen.0.lock().unwrap().as_slice(), b"agent");
    // The guest wants interrupts for what it receives.
    let _ = with.write(0x2f9, 1, &[1]);
    assert_eq!(with.enqueue_agent(&[7; 100]), 64);
    assert_eq!(irq.read().unwrap(), 1);
    assert_eq!(read(&mut with, 0x2f8, 1), 7);
    assert_eq!(with.unclaimed(), 0);

    let mut without = bus();
    assert_eq!(read(&mut without, 0x2fd, 1), 0xff);
    assert_eq!(without.write(0x2f8, 1, b"x"), DeviceOutcome::Continue);
    assert_eq!((without.enqueue_agent(b"x"), without.unclaimed()), (0, 2));
}

#[test]
fn string_output_is_element_by_element() {
    let screen = Screen::default();
    let (mut bus, _irq) = bus_with(Box::new(screen.clone()));
    assert_eq!(bus.write(0x3f8, 1, b"hello"), DeviceOutcome::Continue);
    assert_eq!(screen.0.lock().unwrap().as_slice(), b"hello");

    // The second element resets, the third is never written.
    let end = bus.write(0x64, 1, &[0x20, 0xfe, 0x20]);
    assert_eq!(
        end,
        DeviceOutcome::Exit(GuestEnd::Reset(ResetSource::KeyboardController))
    );

    let mut data = [0; 8];
    bus.read(0x608, 4, &mut data);
    assert_eq!(data[..4], data[4..]);
}

#[test]
fn rtc_through_its_ports() {
    let mut bus = bus();
    let _ = bus.write(0x70, 1, &[0x09]);
    assert_eq!(read(&mut bus, 0x71, 1), 0x26);
}

#[test]
fn input_respects_the_fifo_and_raises_the_interrupt() {
    let (mut bus, irq) = bus_with(Box::new(io::sink()));
    let _ = bus.write(0x3f9, 1, &[0x01]); // enable "data available"
    assert_eq!(bus.com1.free(), 64);
    assert_eq!(bus.enqueue(&[b'x'; 100]), 64);
    assert_eq!(bus.enqueue(b"y"), 0);
    assert_eq!(bus.enqueue(b""), 0);
    assert_eq!(irq.read().unwrap(), 1);
    let mut data = [0; 64];
    bus.read(0x3f8, 1, &mut data);
    assert_eq!((data, bus.com1.free()), ([b'x'; 64], 64));
}

#[test]
fn a_broken_console_is_counted_not_fatal() {
    let (mut bus, _irq) = bus_with(Box::new(Broken));
    assert_eq!(bus.write(0x3f8, 1, b"abc"), DeviceOutcome::Continue);
    assert_eq!(bus.com1.lost(), 3);
}

proptest! {
    #[test]
    fn no_access_panics(
        accesses in prop::collection::vec(
            (any::<bool>(), any::<u16>(), any::<u8>(), prop::collection::vec(any::<u8>(), 0..16)),
            1..64,
        ),
        claimed in prop::collection::vec((any::<bool>(), 0usize..64, 0u16..12, 0u8..9, any::<u64>()), 1..64),
    ) {
        let mut bus = bus();
        for (write, port, size, mut data) in accesses {
            if write {
                let _ = bus.write(port, size, &data);
            } else {
                bus.read(port, size, &mut data);
            }
        }
        for (write, entry, offset, size, value) in claimed {
            let entry = &port_map()[entry % port_map().len()];
            let port = entry.ports.start().wrapping_add(offset);
            let mut data = value.to_le_bytes();
            if write {
                let _ = bus.write(port, size, &data);
            } else {
                bus.read(port, size, &mut data);
            }
            bus.enqueue(&data);
        }
    }
}
