//! Where the configuration's fields lie, for both directions.

use arbiter::Control;

use super::fields::{bytes, put, u8_at, u16_at, u32_at, u64_at, zero};
use super::report::{self, NOT_TRIED};
use super::{
    Area, Config, ConfigError, CounterRequest, KernelEntry, MAGIC, MAX_COUNTERS, MAX_CPUS, Mode,
    Position, Protocol, SIZE, VERSION,
};

const AT_MAGIC: usize = 0x00;
const AT_VERSION: usize = 0x08;
const AT_LENGTH: usize = 0x0c;
const AT_CPUS: usize = 0x10;
const AT_COUNT: usize = 0x11;
const AT_PM_TIMER: usize = 0x12;
const AT_DELAY: usize = 0x14;
const HEADER_END: usize = 0x18;

const AT_PROTOCOL: usize = 0x40;
const AT_MODE: usize = 0x44;
const AT_CODE: usize = 0x48;
const AT_DATA: usize = 0x4a;
const AT_GDT_LIMIT: usize = 0x4c;
const GDT_LIMIT_END: usize = 0x4e;
const AT_GDT_BASE: usize = 0x50;
/// RIP, RSP, RAX, RBX, RSI, CR0, CR3, CR4, EFER.
const AT_REGISTERS: usize = 0x58;
const REGISTERS_END: usize = AT_REGISTERS + 9 * 8;

const AT_COUNTERS: usize = 0x100;
const COUNTER_SIZE: usize = 32;
const COUNTERS_END: usize = AT_COUNTERS + MAX_COUNTERS * COUNTER_SIZE;

/// A counter's fields, from its start.
const POSITION: usize = 0;
const FLAGS: usize = 1;
const FLAGS_END: usize = 2;
const CONTROL: usize = 8;
const DROP_VALUE: usize = 16;
const SELECT: usize = 24;

const FLAG_PRIVATE: u8 = 1 << 0;
const FLAG_KEEP: u8 = 1 << 1;
const FLAG_YIELD: u8 = 1 << 2;
const ANY: u8 = 0xff;

/// Control registers that tell the modes apart.
const CR0_PROTECTED: u64 = 1 << 0;
const CR0_PAGING: u64 = 1 << 31;
const EFER_LONG_MODE: u64 = 1 << 8 | 1 << 10;

impl Config {
    /// Writes the whole area, with the answer "not begun".
    pub fn write(&self, area: &mut Area) {
        area.fill(0);
        put(area, AT_MAGIC, &MAGIC);
        put(area, AT_VERSION, &VERSION.to_le_bytes());
        put(area, AT_LENGTH, &length().to_le_bytes());
        put(area, AT_CPUS, &[self.cpus]);
        let count = u8::try_from(self.counters().len()).unwrap_or(u8::MAX);
        put(area, AT_COUNT, &[count]);
        put(area, AT_PM_TIMER, &self.pm_timer.to_le_bytes());
        put(area, AT_DELAY, &self.delay_ms.to_le_bytes());
        write_entry(area, &self.kernel);
        for (number, counter) in self.counters().iter().enumerate() {
            write_counter(area, AT_COUNTERS + number * COUNTER_SIZE, counter);
        }
        let results = area.get_mut(report::AT_RESULTS..);
        results.unwrap_or_default().fill(NOT_TRIED);
    }

    /// Reads the configuration out of an area, and ignores the firmware's
    /// answer.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn parse(area: &Area) -> Result<Self, ConfigError> {
        let [magic, header] = [AT_MAGIC, HEADER_END];
        if bytes(area, magic) != MAGIC {
            return Err(ConfigError::Magic);
        }
        if u32_at(area, AT_VERSION) != VERSION {
            return Err(ConfigError::Version);
        }
        if u32_at(area, AT_LENGTH) != length() {
            return Err(ConfigError::Length);
        }
        let cpus = u8_at(area, AT_CPUS);
        if !(1..=MAX_CPUS).contains(&usize::from(cpus)) {
            return Err(ConfigError::Cpus);
        }
        let count = usize::from(u8_at(area, AT_COUNT));
        if count > MAX_COUNTERS {
            return Err(ConfigError::TooManyCounters);
        }
        let unused = AT_COUNTERS + count * COUNTER_SIZE;
        let gaps = [
            (header, AT_PROTOCOL),
            (GDT_LIMIT_END, AT_GDT_BASE),
            (REGISTERS_END, AT_COUNTERS),
            (unused, COUNTERS_END),
        ];
        if !gaps.iter().all(|&(from, to)| zero(area, from, to)) {
            return Err(ConfigError::Reserved);
        }
        let mut config = Config::new(cpus, u16_at(area, AT_PM_TIMER), read_entry(area)?);
        config.delay_ms = u32_at(area, AT_DELAY);
        for number in 0..count {
            config.push(read_counter(area, AT_COUNTERS + number * COUNTER_SIZE)?)?;
        }
        Ok(config)
    }
}

fn length() -> u32 {
    u32::try_from(SIZE).unwrap_or(u32::MAX)
}

fn write_entry(area: &mut Area, entry: &KernelEntry) {
    let protocol: u32 = match entry.protocol {
        Protocol::Linux64 => 1,
        Protocol::Pvh => 2,
        Protocol::Multiboot => 3,
    };
    let mode: u32 = match entry.mode {
        Mode::Long => 64,
        Mode::Protected => 32,
    };
    put(area, AT_PROTOCOL, &protocol.to_le_bytes());
    put(area, AT_MODE, &mode.to_le_bytes());
    put(area, AT_CODE, &entry.code.to_le_bytes());
    put(area, AT_DATA, &entry.data.to_le_bytes());
    put(area, AT_GDT_LIMIT, &entry.gdt_limit.to_le_bytes());
    put(area, AT_GDT_BASE, &entry.gdt_base.to_le_bytes());
    let registers = [
        entry.rip, entry.rsp, entry.rax, entry.rbx, entry.rsi, entry.cr0, entry.cr3, entry.cr4,
        entry.efer,
    ];
    for (number, value) in registers.iter().enumerate() {
        put(area, AT_REGISTERS + number * 8, &value.to_le_bytes());
    }
}

fn read_entry(area: &Area) -> Result<KernelEntry, ConfigError> {
    let protocol = match u32_at(area, AT_PROTOCOL) {
        1 => Protocol::Linux64,
        2 => Protocol::Pvh,
        3 => Protocol::Multiboot,
        _ => return Err(ConfigError::Protocol),
    };
    let mode = match u32_at(area, AT_MODE) {
        64 => Mode::Long,
        32 => Mode::Protected,
        _ => return Err(ConfigError::Mode),
    };
    let register = |number: usize| u64_at(area, AT_REGISTERS + number * 8);
    let entry = KernelEntry {
        protocol,
        mode,
        code: u16_at(area, AT_CODE),
        data: u16_at(area, AT_DATA),
        gdt_base: u64_at(area, AT_GDT_BASE),
        gdt_limit: u16_at(area, AT_GDT_LIMIT),
        rip: register(0),
        rsp: register(1),
        rax: register(2),
        rbx: register(3),
        rsi: register(4),
        cr0: register(5),
        cr3: register(6),
        cr4: register(7),
        efer: register(8),
    };
    if fits(&entry) {
        Ok(entry)
    } else {
        Err(ConfigError::Entry)
    }
}

/// Whether the registers fit each other. Others would fault in the middle of a
/// switch of modes, where no message is possible.
fn fits(entry: &KernelEntry) -> bool {
    let low = |value: u64| u32::try_from(value).is_ok();
    let paging = entry.cr0 & CR0_PAGING != 0;
    let long = entry.efer & EFER_LONG_MODE == EFER_LONG_MODE;
    let selectors = [entry.code, entry.data];
    let inside = |selector: u16| selector & 7 == 0 && selector != 0 && selector < entry.gdt_limit;
    let all_low = [
        entry.rip,
        entry.rsp,
        entry.cr0,
        entry.cr3,
        entry.cr4,
        entry.gdt_base,
    ];
    all_low.into_iter().all(low)
        && entry.cr0 & CR0_PROTECTED != 0
        && selectors.into_iter().all(inside)
        && match entry.mode {
            Mode::Long => paging && long,
            Mode::Protected => {
                let general = [entry.rax, entry.rbx, entry.rsi];
                !paging && entry.efer == 0 && general.into_iter().all(low)
            }
        }
}

fn write_counter(area: &mut Area, at: usize, counter: &CounterRequest) {
    let position = match counter.position {
        Position::At(position) => position,
        Position::Any => ANY,
    };
    let flag = |on: bool, flag: u8| if on { flag } else { 0 };
    let flags = flag(counter.private, FLAG_PRIVATE)
        | flag(counter.keep, FLAG_KEEP)
        | flag(counter.yields, FLAG_YIELD);
    put(area, at + POSITION, &[position]);
    put(area, at + FLAGS, &[flags]);
    put(area, at + CONTROL, &counter.control.bits().to_le_bytes());
    put(area, at + DROP_VALUE, &counter.drop_value.to_le_bytes());
    put(area, at + SELECT, &counter.select.to_le_bytes());
}

fn read_counter(area: &Area, at: usize) -> Result<CounterRequest, ConfigError> {
    let position = match u8_at(area, at + POSITION) {
        ANY => Position::Any,
        position @ 0..64 => Position::At(position),
        _ => return Err(ConfigError::Position),
    };
    let flags = u8_at(area, at + FLAGS);
    if flags & !(FLAG_PRIVATE | FLAG_KEEP | FLAG_YIELD) != 0 {
        return Err(ConfigError::Flags);
    }
    if !zero(area, at + FLAGS_END, at + CONTROL) {
        return Err(ConfigError::Reserved);
    }
    Ok(CounterRequest {
        position,
        private: flags & FLAG_PRIVATE != 0,
        keep: flags & FLAG_KEEP != 0,
        yields: flags & FLAG_YIELD != 0,
        control: Control::new(u64_at(area, at + CONTROL)).ok_or(ConfigError::Control)?,
        drop_value: u64_at(area, at + DROP_VALUE),
        select: u64_at(area, at + SELECT),
    })
}
