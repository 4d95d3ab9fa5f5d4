//! The configuration area: what is written is read back, and what is malformed
//! is named.

use arbiter::{Control, abi};
use firmware::config::{
    Area, Config, ConfigError, CounterRequest, KernelEntry, MAX_COUNTERS, Mode, Outcome, Position,
    Protocol, Report, SIZE, State, Step,
};
use proptest::prelude::{Strategy, any, prop_assert, prop_assert_eq, proptest};
use proptest::sample::select;

fn linux() -> KernelEntry {
    KernelEntry {
        protocol: Protocol::Linux64,
        mode: Mode::Long,
        code: 0x10,
        data: 0x18,
        gdt_base: 0x500,
        gdt_limit: 0x2f,
        rip: 0x100_0000,
        rsp: 0x1_0000,
        rax: 0,
        rbx: 0,
        rsi: 0x7000,
        cr0: 0x8000_0031,
        cr3: 0x9000,
        cr4: 0x20,
        efer: 0x500,
    }
}

fn pvh() -> KernelEntry {
    KernelEntry {
        protocol: Protocol::Pvh,
        mode: Mode::Protected,
        rbx: 0x8000,
        rsi: 0,
        cr0: 0x11,
        cr3: 0,
        cr4: 0,
        efer: 0,
        ..linux()
    }
}

const COUNTER: CounterRequest = CounterRequest {
    position: Position::At(3),
    private: true,
    keep: false,
    yields: false,
    control: Control::INITIAL,
    drop_value: 7,
    select: 0x43_003c,
};

fn config() -> Config {
    let mut config = Config::new(4, 0x608, linux());
    config.push(COUNTER).expect("room");
    config
}

fn written(config: &Config) -> Area {
    let mut area = [0xaa; SIZE];
    config.write(&mut area);
    area
}

#[test]
fn malformed_areas_are_named() {
    fn check(at: usize, bytes: &[u8], expected: ConfigError) {
        let mut area = written(&config());
        area[at..at + bytes.len()].copy_from_slice(bytes);
        assert_eq!(Config::parse(&area), Err(expected), "{at:#x}: {bytes:x?}");
    }
    check(0, b"u", ConfigError::Magic);
    check(8, &[2], ConfigError::Version);
    check(0xc, &[1], ConfigError::Length);
    check(0x10, &[0], ConfigError::Cpus);
    check(0x10, &[65], ConfigError::Cpus);
    check(0x11, &[65], ConfigError::TooManyCounters);
    check(0x18, &[1], ConfigError::Reserved);
    check(0x3f, &[1], ConfigError::Reserved);
    check(0x40, &[0], ConfigError::Protocol);
    check(0x40, &[4], ConfigError::Protocol);
    check(0x44, &[16], ConfigError::Mode);
    check(0x4e, &[1], ConfigError::Reserved);
    // A mode and registers of the other one.
    check(0x44, &[32], ConfigError::Entry);
    // Selectors: null, of a local table, beyond the limit.
    check(0x48, &[0], ConfigError::Entry);
    check(0x48, &[0x14], ConfigError::Entry);
    check(0x4a, &[0x30], ConfigError::Entry);
    // RIP, RSP and CR3 above 4 GiB; paging and protection off; no long mode.
    check(0x5c, &[1], ConfigError::Entry);
    check(0x64, &[1], ConfigError::Entry);
    check(0x8c, &[1], ConfigError::Entry);
    check(0x83, &[0], ConfigError::Entry);
    check(0x80, &[0x30], ConfigError::Entry);
    check(0x98, &[0, 0], ConfigError::Entry);
    check(0xa0, &[1], ConfigError::Reserved);
    check(0xff, &[1], ConfigError::Reserved);
    check(0x100, &[64], ConfigError::Position);
    check(0x100, &[254], ConfigError::Position);
    check(0x101, &[8], ConfigError::Flags);
    check(0x102, &[1], ConfigError::Reserved);
    check(0x108, &[0, 4], ConfigError::Control);
    check(0x10a, &[0x20], ConfigError::Control);
    // Behind the last counter.
    check(0x120, &[1], ConfigError::Reserved);
    check(0x8ff, &[1], ConfigError::Reserved);
}

#[test]
fn errors_say_what_is_wrong_in_one_line() {
    for error in ConfigError::ALL {
        let text = error.to_string();
        assert!(text.len() > 10 && !text.contains('\n'), "{text}");
    }
}

#[test]
fn there_is_room_for_every_counter() {
    let mut config = config();
    for _ in 1..MAX_COUNTERS {
        config.push(COUNTER).expect("room");
    }
    assert_eq!(config.push(COUNTER), Err(ConfigError::TooManyCounters));
    assert_eq!(Config::parse(&written(&config)), Ok(config));
}

#[test]
fn a_fresh_area_has_no_answer() {
    let mut area = written(&config());
    let report = Report::of(&area);
    assert_eq!(report.state(), State::NotBegun);
    assert_eq!(report.answered(), 0);
    assert_eq!(report.outcome(3, 0), Outcome::NotTried);
    assert_eq!(report.cookies(0), (0, 0));
    // Numbers of nobody.
    assert_eq!(report.outcome(64, 0), Outcome::NotTried);
    assert_eq!(report.outcome(0, 64), Outcome::NotTried);
    assert_eq!(report.cookies(64), (0, 0));
    let mut report = Report::of(&mut area);
    report.set_answered(64);
    report.set_outcome(64, 0, Outcome::Granted(0));
    report.set_cookies(64, 1, 1);
    assert_eq!(area, written(&config()));
}

fn counter() -> impl Strategy<Value = CounterRequest> {
    let position =
        proptest::option::of(0u8..64).prop_map(|at| at.map_or(Position::Any, Position::At));
    let control = any::<u64>().prop_map(|bits| {
        let known = abi::CONTROL_INITIAL | abi::CONTROL_FAULT | abi::CONTROL_FAULT_RDPMC;
        Control::new(bits & (known | abi::CONTROL_LEND)).expect("known bits")
    });
    let flags = any::<(bool, bool, bool)>();
    (position, flags, control, any::<u64>(), any::<u64>()).prop_map(
        |(position, (private, keep, yields), control, drop_value, select)| CounterRequest {
            position,
            private,
            keep,
            yields,
            control,
            drop_value,
            select,
        },
    )
}

fn step() -> impl Strategy<Value = Outcome> {
    let steps = [
        Step::Reserve,
        Step::Control,
        Step::AccessKey,
        Step::Program,
        Step::Absent,
    ];
    let fixed = steps.map(Outcome::Failed).into_iter().chain([
        Outcome::NotTried,
        Outcome::Yielded,
        Outcome::Lost,
    ]);
    let granted = (0..64).map(Outcome::Granted);
    select(fixed.chain(granted).collect::<Vec<_>>())
}

proptest! {
    #[test]
    fn what_is_written_is_read(
        cpus in 1u8..=64,
        pm_timer: u16,
        delay_ms: u32,
        long: bool,
        rip: u32,
        counters in proptest::collection::vec(counter(), 0..=MAX_COUNTERS),
    ) {
        let entry = KernelEntry { rip: rip.into(), ..if long { linux() } else { pvh() } };
        let mut config = Config::new(cpus, pm_timer, entry);
        config.delay_ms = delay_ms;
        for counter in counters {
            config.push(counter).expect("room");
        }
        prop_assert_eq!(Config::parse(&written(&config)), Ok(config));
    }

    #[test]
    fn an_answer_changes_no_question(
        cpu in 0usize..64,
        number in 0usize..64,
        outcome in step(),
        management: u64,
        access: u64,
    ) {
        let mut area = written(&config());
        let mut report = Report::of(&mut area);
        report.set_state(State::Done);
        report.set_answered(cpu);
        report.set_outcome(cpu, number, outcome);
        report.set_cookies(number, management, access);
        let report = Report::of(&area);
        prop_assert_eq!(report.state(), State::Done);
        prop_assert_eq!(report.answered(), 1 << cpu);
        prop_assert_eq!(report.outcome(cpu, number), outcome);
        prop_assert_eq!(report.cookies(number), (management, access));
        prop_assert_eq!(Config::parse(&area), Ok(config()));
    }

    /// Any bytes are an error or a configuration that is written as it was read.
    #[test]
    fn any_bytes_are_read_without_harm(
        damage in proptest::collection::vec((0usize..0x900, any::<u8>()), 0..40),
        header: bool,
        noise: u8,
    ) {
        let mut area = if header { written(&config()) } else { [noise; SIZE] };
        for (at, byte) in damage {
            area[at] = byte;
        }
        if let Ok(config) = Config::parse(&area) {
            prop_assert!(header);
            prop_assert_eq!(&written(&config)[..0x900], &area[..0x900]);
        }
        let report = Report::of(&area);
        let _ = (report.state(), report.answered(), report.outcome(0, 0), report.cookies(0));
    }
}
