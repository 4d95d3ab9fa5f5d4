//! Bytes as accesses to the chips of three CPUs; also for `fuzz`.

use irqchip::{Activity, Answer, Chips, Delivery, IoApicVersion, Line, Lint, Machine};

const CPUS: usize = 3;

/// How often something came about.
#[derive(Debug, Default)]
pub(crate) struct Reached {
    init: u32,
    sipi: u32,
    smi: u32,
    nmi: u32,
    vectors: u32,
    deadlines: u32,
    faults: u32,
    x2apic: u32,
}

impl Reached {
    #[allow(dead_code, reason = "fuzzing counts nothing")]
    pub(crate) fn add(&mut self, other: &Self) {
        self.init += other.init;
        self.sipi += other.sipi;
        self.smi += other.smi;
        self.nmi += other.nmi;
        self.vectors += other.vectors;
        self.deadlines += other.deadlines;
        self.faults += other.faults;
        self.x2apic += other.x2apic;
    }

    #[allow(dead_code, reason = "fuzzing counts nothing")]
    pub(crate) fn everything(&self) -> bool {
        let all = [
            self.init,
            self.sipi,
            self.smi,
            self.nmi,
            self.vectors,
            self.deadlines,
            self.faults,
            self.x2apic,
        ];
        all.iter().all(|count| *count > 10)
    }
}

struct Bytes<'a>(std::slice::Iter<'a, u8>);

impl Bytes<'_> {
    fn byte(&mut self) -> Option<u8> {
        self.0.next().copied()
    }

    /// A number of which few bits are set, or many.
    fn number(&mut self) -> Option<u64> {
        let len = self.byte()? % 9;
        let mut number = 0;
        for _ in 0..len {
            number = number << 8 | u64::from(self.byte()?);
        }
        Some(number)
    }

    /// A register and what is written to it.
    fn write(&mut self) -> Option<(u8, u64)> {
        let (register, number) = (self.register()?, self.number()?);
        // Half of the values are such that something comes of them.
        let lively = self.byte()? & 1 == 0;
        let value = match register {
            0x0f if lively => number & 0x1fff | 0x100,
            0x30 if lively => (number >> 40 & 3) << 32 | number & 0xc_cfff,
            0x32..=0x37 if lively => number & 0x7_07ff,
            0x08 | 0x0b | 0x38 | 0x3f if lively => number & 0xff,
            _ => number,
        };
        Some((register, value))
    }

    fn register(&mut self) -> Option<u8> {
        // Half of them are those that do something.
        const LIVELY: [u8; 8] = [0x0f, 0x30, 0x32, 0x35, 0x38, 0x0b, 0x08, 0x3f];
        let byte = self.byte()?;
        Some(match byte {
            0x80.. => LIVELY[usize::from(byte & 7)],
            _ => byte,
        })
    }
}

/// Plays accesses until the bytes end.
///
/// # Panics
///
/// What holds after each step does not.
pub(crate) fn run(bytes: &[u8]) -> Reached {
    let mut reached = Reached::default();
    let mut bytes = Bytes(bytes.iter());
    let start = bytes.byte().unwrap_or(0);
    let machine = Machine {
        cpus: CPUS,
        tsc_hz: [1, 1000, 2_000_000_000, u64::MAX][usize::from(start & 3)],
        apic_hz: [1, 1_000_000_000, u64::MAX][usize::from(start >> 2) % 3],
        physical_bits: 41,
        ioapic: match start & 0x80 {
            0 => IoApicVersion::V11,
            _ => IoApicVersion::V20,
        },
    };
    let mut chips = Chips::new(&machine).expect("there can be such a machine");
    let mut now = 0;
    while step(&mut chips, &mut now, &mut bytes, &mut reached).is_some() {
        if let Some(next) = chips.next_deadline() {
            assert!(next > now, "{next} at {now}");
        }
        for cpu in 0..CPUS {
            holds(&chips, cpu);
        }
    }
    reached
}

/// What is pending is in order, above CR8, and nothing that a CPU which waits cannot take.
fn holds(chips: &Chips, cpu: usize) {
    let pending: Vec<Delivery> = chips.pending(cpu).collect();
    assert!(pending.is_sorted(), "{pending:?}");
    for delivery in pending {
        let starts = matches!(delivery, Delivery::Init | Delivery::Sipi(_));
        match chips.activity(cpu) {
            Activity::WaitsForStartup => assert!(starts, "{delivery:?}"),
            Activity::Runs => assert!(!matches!(delivery, Delivery::Sipi(_))),
        }
        if let Delivery::Vector(vector) = delivery {
            assert!(vector >= 16 && vector >> 4 > chips.cr8(cpu));
        }
    }
}

fn step(chips: &mut Chips, now: &mut u64, bytes: &mut Bytes, reached: &mut Reached) -> Option<()> {
    let what = bytes.byte()?;
    let cpu = usize::from(what >> 6);
    let answer = match what & 0xf {
        0 => {
            *now = now.saturating_add(bytes.number()?);
            chips.advance(*now);
            None
        }
        1 => {
            if let Some(next) = chips.next_deadline() {
                *now = next;
                chips.advance(next);
                reached.deadlines += 1;
            }
            None
        }
        2..=4 => {
            take(chips, cpu, reached);
            None
        }
        5 => {
            direct(chips, cpu, bytes)?;
            None
        }
        6 => chips.port_write(*now, port(bytes.byte()?), bytes.byte()?),
        7 => chips.port_read(*now, port(bytes.byte()?)),
        8 => {
            // The index is as often written as the data.
            let at = 0xfec0_0000 + [0, 0x10, 0x40, 3][usize::from(what >> 4 & 3)];
            chips.mmio_write(*now, cpu, at, 4, bytes.number()?)
        }
        9 => chips.mmio_read(*now, cpu, 0xfec0_0000 + u64::from(bytes.byte()?), what >> 4),
        10 => {
            let (register, value) = bytes.write()?;
            let at = 0xfee0_0000 + u64::from(register) * 16;
            chips.mmio_write(*now, cpu, at, 4, value)
        }
        11 => {
            let at = 0xfee0_0000 + u64::from(bytes.register()?) * 16;
            chips.mmio_read(*now, cpu, at + u64::from(what >> 4 & 3) * 2, what >> 4)
        }
        12 => {
            let (register, value) = bytes.write()?;
            chips.wrmsr(*now, cpu, 0x800 + u32::from(register), value)
        }
        13 => chips.rdmsr(*now, cpu, 0x800 + u32::from(bytes.register()?)),
        14 => {
            // Enabled, mostly; an APIC that is disabled shows little.
            let base = match bytes.byte()? {
                0 => bytes.number()?,
                1..8 => 0xfee0_0000,
                8..64 => 0xfee0_0c00,
                _ => 0xfee0_0800,
            };
            let answer = chips.wrmsr(*now, cpu, 0x1b, base);
            reached.x2apic += u32::from(answer == Some(Answer::Done) && base & 0x400 != 0);
            answer
        }
        _ => chips.wrmsr(*now, cpu, 0x6e0, now.saturating_add(bytes.number()?)),
    };
    reached.faults += u32::from(answer == Some(Answer::Gp));
    Some(())
}

fn port(byte: u8) -> u16 {
    const PORTS: [u16; 11] = [
        0x20, 0x21, 0x40, 0x41, 0x42, 0x43, 0x61, 0xa0, 0xa1, 0x4d0, 0x4d1,
    ];
    PORTS[usize::from(byte) % PORTS.len()]
}

fn take(chips: &mut Chips, cpu: usize, reached: &mut Reached) {
    let Some(first) = chips.pending(cpu).next() else {
        return;
    };
    let taken = chips.acknowledge(cpu, first);
    assert_eq!(taken, Some(first), "what is pending can be taken");
    let count = match first {
        Delivery::Init => &mut reached.init,
        Delivery::Sipi(_) => &mut reached.sipi,
        Delivery::Smi => &mut reached.smi,
        Delivery::Nmi => &mut reached.nmi,
        Delivery::Vector(_) => &mut reached.vectors,
    };
    *count += 1;
}

/// What a machine does beside registers.
fn direct(chips: &mut Chips, cpu: usize, bytes: &mut Bytes) -> Option<()> {
    let value = bytes.byte()?;
    match bytes.byte()? % 8 {
        0 => chips.raise(cpu, value),
        1 => chips.raise_nmi(cpu),
        2 => chips.pulse(cpu, Lint::Zero),
        3 => chips.pulse(cpu, Lint::One),
        4 => chips.set_line(value % 26, Line::Asserted),
        5 => chips.set_line(value % 26, Line::Deasserted),
        6 => chips.set_cr8(cpu, value),
        _ => {
            chips.mask_lvtpc(cpu);
            assert!(chips.lvtpc(cpu).is_none_or(|lvtpc| lvtpc & 1 << 16 != 0));
            chips.acknowledge(cpu, Delivery::Vector(value));
        }
    }
    Some(())
}
