//! Bytes as a guest: its memory, page tables, descriptors, registers and code, and what it is
//! answered; also for `fuzz`.

use emu::{Answer, Cpu, Cpuid, EventTotals, Ram, Ring, Seg, Segment, State, Table, VmExit};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::sys::Guarded;

/// RAM from 0, and some of it behind a hole.
const LOW: u64 = 0x2_0000;
const HIGH: u64 = 0x8_0000;
const HIGH_LEN: u64 = 0x4000;

const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PD: u64 = 0x3000;
const PT: u64 = 0x4000;
const GDT: u64 = 0x5000;
const IDT: u64 = 0x6000;
const TSS: u64 = 0x7000;
const HANDLERS: u64 = 0x8000;
const STACK: u64 = 0xa000;
const CODE: u64 = 0xc000;
const DATA: u64 = 0x1_0000;

/// Ticks between two looks at what comes from outside.
const OUTSIDE: u64 = 100;

/// Ticks of a guest: most show in the first hundreds what they do, and loop in the others. Who is
/// played whole stops at such looks alone, so each is a multiple of them.
const TICKS: [u64; 4] = [2 * OUTSIDE, 3 * OUTSIDE, 6 * OUTSIDE, 15 * OUTSIDE];

/// What one instruction can take beyond a budget: the slowest function of x87, and the deliveries
/// behind it.
const BEYOND: u64 = 1280 + 64;
/// Stops of one instruction, which takes a tick when all are answered: an image of x87 or SSE at
/// a device, piece by piece.
const MOST_STOPS: u64 = 130;

/// Code that does something, for between bytes that are anything.
const SNIPPETS: [&[u8]; 48] = [
    &[0x48, 0x8b, 0x06],             // mov rax,[rsi]
    &[0x48, 0x89, 0x07],             // mov [rdi],rax
    &[0x48, 0x01, 0x47, 0x03],       // add [rdi+3],rax
    &[0xf0, 0x48, 0x0f, 0xb1, 0x0e], // lock cmpxchg [rsi],rcx
    &[0x0f, 0xc7, 0x0f],             // cmpxchg8b [rdi]
    &[0x48, 0xff, 0xc0],             // inc rax
    &[0x31, 0xc0],                   // xor eax,eax
    &[0x50],                         // push rax
    &[0x5b],                         // pop rbx
    &[0xe8, 1, 0, 0, 0],             // call +1
    &[0xc3],                         // ret
    &[0xeb, 1],                      // jmp +1
    &[0x74, 2],                      // je +2
    &[0xe2, 0xf8],                   // loop -8
    &[0xf3, 0xa4],                   // rep movsb
    &[0xf3, 0xaa],                   // rep stosb
    &[0xf3, 0xa6],                   // repe cmpsb
    &[0xec],                         // in al,dx
    &[0xef],                         // out dx,eax
    &[0x6c],                         // insb
    &[0x0f, 0x32],                   // rdmsr
    &[0x0f, 0x30],                   // wrmsr
    &[0x0f, 0x33],                   // rdpmc
    &[0xf4],                         // hlt
    &[0x0f, 0x05],                   // syscall
    &[0x48, 0x0f, 0x07],             // sysretq
    &[0x48, 0xcf],                   // iretq
    &[0xcd, 0x40],                   // int 40h
    &[0xcc],                         // int3
    &[0x0f, 0x20, 0xd8],             // mov rax,cr3
    &[0x0f, 0x22, 0xd8],             // mov cr3,rax
    &[0x0f, 0x20, 0xe0],             // mov rax,cr4
    &[0x0f, 0x22, 0xe0],             // mov cr4,rax
    &[0x0f, 0x01, 0x3e],             // invlpg [rsi]
    &[0x0f, 0x23, 0xf8],             // mov dr7,rax
    &[0x8e, 0xd8],                   // mov ds,eax
    &[0x8e, 0xd0],                   // mov ss,eax
    &[0xfb],                         // sti
    &[0xfa],                         // cli
    &[0x9c],                         // pushf
    &[0x9d],                         // popf
    &[0x0f, 0x01, 0xf8],             // swapgs
    &[0x0f, 0xa2],                   // cpuid
    &[0x0f, 0x31],                   // rdtsc
    &[0xf3, 0x90],                   // pause
    &[0xb9, 0x10, 0, 0, 0],          // mov ecx,16
    &[0xff, 0x2e],                   // jmp far [rsi]
    &[0xc6, 0x05, 4, 0, 0, 0, 0x90], // mov byte [rip+4],90h
];

/// How often something came about.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct Reached {
    pub(crate) instructions: u64,
    pub(crate) users: u64,
    pub(crate) deliveries: u64,
    pub(crate) interrupts: u32,
    pub(crate) devices: u32,
    pub(crate) ports: u32,
    pub(crate) registers: u32,
    pub(crate) halts: u32,
    pub(crate) shutdowns: u32,
    pub(crate) unimplemented: u32,
}

impl Reached {
    #[allow(dead_code, reason = "fuzzing counts nothing")]
    pub(crate) fn add(&mut self, other: &Self) {
        self.instructions += other.instructions;
        self.users += other.users;
        self.deliveries += other.deliveries;
        self.interrupts += other.interrupts;
        self.devices += other.devices;
        self.ports += other.ports;
        self.registers += other.registers;
        self.halts += other.halts;
        self.shutdowns += other.shutdowns;
        self.unimplemented += other.unimplemented;
    }
}

/// A byte after the other; zeroes when there are no more.
#[derive(Clone)]
struct Input<'a>(std::slice::Iter<'a, u8>);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        self.0.next().copied().unwrap_or(0)
    }

    fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    fn below(&mut self, limit: u64) -> u64 {
        u64::from(self.word()) % limit
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::from(self.byte()) % all.len()]
    }

    /// A number that is something: small, negative, an address of the guest's, or any bits.
    fn number(&mut self) -> u64 {
        match self.byte() % 8 {
            0 => self.byte().into(),
            1 => !u64::from(self.byte()),
            2 => DATA + self.below(0x8000),
            3 => CODE + self.below(0x2000),
            4 => HIGH - 8 + self.below(HIGH_LEN + 16),
            5 => self.below(LOW),
            6 => 0x7fff_ffff_ff00 | u64::from(self.byte()),
            _ => (0..8).fold(0, |number, _| number << 8 | u64::from(self.byte())),
        }
    }

    /// An entry of a page table.
    fn entry(&mut self) -> u64 {
        // Accessed, dirty, large, global; no execution; reserved.
        let low = u64::from(self.word()) & 0x1ff;
        let never = u64::from(self.byte() & 1) << 63;
        let reserved = if self.byte() == 1 { 1 << 45 } else { 0 };
        let page = self.below(0xa0) << 12;
        page | low | never | reserved | u64::from(self.byte() & 3 != 0)
    }

    fn descriptor(&mut self) -> u64 {
        let attr = u64::from(self.word()) & 0xf0ff;
        let base = self.below(LOW);
        let present = u64::from(self.byte() & 7 != 0) << 47;
        let limit = self.one_of(&[0, 0x67, 0xffff, 0xf_ffff]);
        limit & 0xffff | base << 16 | attr << 40 | present | (limit >> 16) << 48
    }
}

/// How code runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Long(u8),
    Compatible,
    Protected,
    Real,
}

/// Nothing of the host is near.
fn ram() -> (Guarded, GuestMemoryMmap) {
    Guarded::new(&[(0, LOW), (HIGH, HIGH_LEN)])
}

struct World<'a> {
    cpu: Cpu,
    /// What it is answered.
    input: Input<'a>,
    wants_nmi: bool,
    reached: Reached,
    last: VmExit,
    totals: [EventTotals; 2],
    /// Behind the memory, which the processor has.
    _guarded: Guarded,
}

/// How a guest is played in parts: budgets, and after how many of them its code is forgotten. Only
/// one of these forgets at each of five hundred stops: to decode everything anew takes ten times as
/// long as to run it.
#[derive(Clone, Copy)]
struct Parts {
    budget: u64,
    forget_every: u32,
}

const NEVER: u32 = u32::MAX;

impl Parts {
    const WHOLE: Self = Self::new(u64::MAX, NEVER);

    const ALL: [Self; 16] = [
        Self::new(3, 16),
        Self::new(1, NEVER),
        Self::new(1, 37),
        Self::new(1, 64),
        Self::new(2, 23),
        Self::new(2, 61),
        Self::new(3, NEVER),
        Self::new(3, 8),
        Self::new(3, 40),
        Self::new(5, 4),
        Self::new(7, 5),
        Self::new(11, 3),
        Self::new(19, 2),
        Self::new(50, 1),
        Self::new(90, 1),
        Self::new(3, 1),
    ];

    const fn new(budget: u64, forget_every: u32) -> Self {
        Self {
            budget,
            forget_every,
        }
    }
}

/// Plays a guest twice: at once, and by small budgets with its code forgotten in between. The first
/// byte chooses how, and how long. Both come to the same end.
///
/// # Panics
/// They do not, or what holds after each run does not.
pub(crate) fn run(bytes: &[u8]) -> Reached {
    let (choice, bytes) = bytes.split_first().unwrap_or((&0, bytes));
    let choice = usize::from(*choice);
    let ticks = TICKS[choice / Parts::ALL.len() % TICKS.len()];
    let parts = Parts::ALL[choice % Parts::ALL.len()];
    let whole = end(bytes, Parts::WHOLE, ticks);
    let parts = end(bytes, parts, ticks);
    assert_eq!(whole.state, parts.state);
    assert_eq!(whole.totals, parts.totals);
    assert!(whole.memory == parts.memory, "memory differs");
    assert_eq!(whole.reached, parts.reached);
    whole.reached
}

struct End {
    state: State,
    totals: [EventTotals; 2],
    memory: Vec<u8>,
    reached: Reached,
}

fn end(bytes: &[u8], parts: Parts, ticks: u64) -> End {
    let mut world = World::new(bytes);
    world.play(parts, ticks);
    let [kernel, user] = &world.totals;
    let instructions = |of: &EventTotals| of.of(emu::EventClass::Instructions);
    world.reached.instructions = instructions(kernel) + instructions(user);
    world.reached.users = instructions(user);
    world.reached.deliveries = kernel.deliveries() + user.deliveries();
    let mut memory = vec![0; (LOW + HIGH_LEN) as usize];
    let (low, high) = memory.split_at_mut(LOW as usize);
    for (part, at) in [(low, 0), (high, HIGH)] {
        let read = world.cpu.ram().memory().read_slice(part, GuestAddress(at));
        read.expect("memory");
    }
    End {
        state: world.cpu.state().clone(),
        totals: world.totals,
        memory,
        reached: world.reached,
    }
}

impl<'a> World<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        let (guarded, memory) = ram();
        let mut input = Input(bytes.iter());
        let mode = input.one_of(&[
            Mode::Long(0),
            Mode::Long(3),
            Mode::Long(0),
            Mode::Long(3),
            Mode::Long(1),
            Mode::Compatible,
            Mode::Protected,
            Mode::Real,
        ]);
        let wants = input.byte();
        write_tables(&memory);
        write_descriptors(&memory);
        change_memory(&memory, &mut input);
        let state = registers(mode, &mut input);
        let code = code(&mut input);
        memory.write_slice(&code, GuestAddress(CODE)).expect("code");
        let ram = Ram::new(memory).expect("RAM");
        let mut cpu = Cpu::new(ram, Cpuid::implemented());
        cpu.set_state(state);
        cpu.want_window(wants & 1 != 0);
        World {
            cpu,
            input,
            wants_nmi: wants & 2 != 0,
            reached: Reached::default(),
            last: VmExit::Budget,
            totals: [EventTotals::default(); 2],
            _guarded: guarded,
        }
    }

    fn play(&mut self, parts: Parts, ticks: u64) {
        // Something comes from outside at these times.
        let mut next = OUTSIDE;
        let mut stops = 0;
        let mut until_forgotten = parts.forget_every;
        loop {
            let before = self.cpu.time();
            if before >= ticks {
                return;
            }
            let most = parts.budget.min(next.max(before + 1) - before);
            let stop = self.cpu.run(most);
            self.last = stop;
            let passed = self.cpu.time() - before;
            assert!(passed < most + BEYOND, "{passed} ticks of {most}");
            stops = if passed == 0 { stops + 1 } else { 0 };
            assert!(
                stops < MOST_STOPS,
                "no time passes at {:#x}: {stop:?}",
                self.cpu.state().rip
            );
            for (ring, sum) in [Ring::Kernel, Ring::User].into_iter().zip(&mut self.totals) {
                *sum += self.cpu.take_totals(ring);
            }
            until_forgotten -= 1;
            if until_forgotten == 0 {
                self.cpu.forget_code();
                until_forgotten = parts.forget_every;
            }
            let goes_on = match stop {
                VmExit::Budget if self.cpu.time() < next => true,
                VmExit::Budget => {
                    next += OUTSIDE;
                    self.look_outside()
                }
                stop => self.answer(stop),
            };
            if !goes_on {
                return;
            }
        }
    }

    fn look_outside(&mut self) -> bool {
        if self.wants_nmi && self.cpu.can_nmi() {
            self.reached.interrupts += 1;
            return self.cpu.nmi().is_none();
        }
        !self.cpu.can_interrupt() || self.interrupt()
    }

    fn interrupt(&mut self) -> bool {
        self.reached.interrupts += 1;
        let vector = self.input.byte();
        self.cpu.interrupt(vector).is_none()
    }

    fn answer(&mut self, stop: VmExit) -> bool {
        let bytes = u64::from(self.input.byte()).wrapping_mul(0x0101_0101_0101_0101);
        match stop {
            VmExit::Shutdown => {
                self.reached.shutdowns += 1;
                return false;
            }
            VmExit::Unimplemented { .. } => {
                self.reached.unimplemented += 1;
                return false;
            }
            VmExit::Halted => {
                self.reached.halts += 1;
                self.cpu.pass_to(self.cpu.time() + 10);
                return self.cpu.can_interrupt() && self.interrupt();
            }
            VmExit::Window => {
                self.cpu.want_window(false);
                return self.interrupt();
            }
            VmExit::IoIn { len, .. } => {
                self.reached.ports += 1;
                let bytes = bytes.to_le_bytes();
                self.cpu.io_data().copy_from_slice(&bytes[..len]);
            }
            VmExit::IoOut { .. } => self.reached.ports += 1,
            VmExit::MmioRead { .. } => {
                self.reached.devices += 1;
                self.cpu.answer(Answer::Mmio(bytes.to_le_bytes()));
            }
            VmExit::MmioWrite { .. } => self.reached.devices += 1,
            VmExit::Rdmsr { .. } | VmExit::Rdpmc { .. } => {
                self.reached.registers += 1;
                let known = bytes & 1 != 0;
                let answer = if known {
                    Answer::Msr(bytes)
                } else {
                    Answer::MsrFault
                };
                self.cpu.answer(answer);
            }
            VmExit::Wrmsr { .. } => {
                self.reached.registers += 1;
                let known = bytes & 1 != 0;
                self.cpu.answer(if known {
                    Answer::Done
                } else {
                    Answer::MsrFault
                });
            }
            other => panic!("{other:?} is no exit of the emulator"),
        }
        true
    }
}

fn write(memory: &GuestMemoryMmap, at: u64, value: u64) {
    memory.write_obj(value, GuestAddress(at)).expect("memory");
}

/// Identity for the lowest 2 MiB, devices included, again behind 2 MiB as one page, and in the
/// upper half.
fn write_tables(memory: &GuestMemoryMmap) {
    const ALL: u64 = 7;
    write(memory, PML4, PDPT | ALL);
    write(memory, PML4 + 8 * 256, PDPT | ALL);
    write(memory, PDPT, PD | ALL);
    write(memory, PD, PT | ALL);
    write(memory, PD + 8, 0x87);
    for page in 0..512 {
        // Handlers, tables and stack are the system's.
        let rights = if page << 12 < CODE { 3 } else { ALL };
        write(memory, PT + 8 * page, page << 12 | rights);
    }
}

/// Selectors: code and data of CPL 0, of 32 bits, of CPL 3, a task.
fn write_descriptors(memory: &GuestMemoryMmap) {
    let gdt = [
        0,
        0,
        0x00af_9b00_0000_ffff,
        0x00cf_9300_0000_ffff,
        0x00cf_9b00_0000_ffff,
        0x00cf_f300_0000_ffff,
        0x00af_fb00_0000_ffff,
        0x00cf_fb00_0000_ffff,
        0x0000_8900_0000_0067 | TSS << 16,
        0,
    ];
    for (slot, descriptor) in (0..).zip(gdt) {
        write(memory, GDT + 8 * slot, descriptor);
    }
    for vector in 0..256 {
        let to = HANDLERS + 16 * vector;
        let gate = to & 0xffff | 0x10 << 16 | 0x8e << 40 | (to >> 16) << 48;
        // Software may raise some of them.
        let gate = if vector % 4 == 0 {
            gate | 0x60 << 40
        } else {
            gate
        };
        write(memory, IDT + 16 * vector, gate);
        write(memory, IDT + 16 * vector + 8, 0);
        let handler = handler(vector);
        memory
            .write_slice(&handler, GuestAddress(to))
            .expect("memory");
    }
    write(memory, TSS + 4, STACK);
    write(memory, TSS + 0x24, STACK + 0x800);
    write(memory, TSS + 0x60, 0x68 << 48);
}

/// Goes on behind the first byte of what has faulted: Drops the error code; ADD [RSP],1; IRETQ.
fn handler(vector: u64) -> Vec<u8> {
    let mut code = Vec::new();
    if matches!(vector, 8 | 10..=14 | 17) {
        code.extend([0x48, 0x83, 0xc4, 8]);
    }
    if matches!(vector, 0 | 5..=14 | 17) {
        code.extend([0x48, 0x83, 0x04, 0x24, 1]);
    }
    code.extend([0x48, 0xcf]);
    code
}

/// The guest's own tables, not quite as they should be.
fn change_memory(memory: &GuestMemoryMmap, input: &mut Input<'_>) {
    for _ in 0..input.byte() % 24 {
        match input.byte() % 8 {
            0..=2 => {
                let at = PT + 8 * input.below(0xa0);
                write(memory, at, input.entry());
            }
            3 => {
                let table = input.one_of(&[PML4, PDPT, PD]);
                let slot = input.one_of(&[0, 1, 256, 511]);
                write(memory, table + 8 * slot, input.entry());
            }
            4 => {
                let slot = input.below(10);
                write(memory, GDT + 8 * slot, input.descriptor());
            }
            5 => {
                let (vector, to) = (input.below(32), input.number() & 0xf_ffff);
                let kind = input.one_of(&[0x8e, 0x8f, 0xee, 0xef, 0x85, 0x8c, 0x0e, 0x86]);
                let selector = u64::from(input.byte() & 0x7b);
                let stack = u64::from(input.byte() & 7);
                let gate = to & 0xffff | selector << 16 | stack << 32 | kind << 40;
                write(memory, IDT + 16 * vector, gate | (to >> 16) << 48);
            }
            6 => {
                let at = HANDLERS + input.below(0x1000);
                write(memory, at & !7, input.number());
            }
            _ => {
                let at = input.below(LOW / 8) * 8;
                write(memory, at, input.number());
            }
        }
    }
}

fn registers(mode: Mode, input: &mut Input<'_>) -> State {
    let mut state = match mode {
        Mode::Long(cpl) => long(cpl),
        Mode::Compatible => {
            let mut state = long(3);
            load(&mut state, Seg::Cs, 0x3b, 0xc0fb);
            state
        }
        Mode::Protected => {
            let mut state = State::default();
            state.cr0 |= 1;
            for seg in [Seg::Es, Seg::Ss, Seg::Ds, Seg::Fs, Seg::Gs] {
                load(&mut state, seg, 0x18, 0xc093);
            }
            load(&mut state, Seg::Cs, 0x20, 0xc09b);
            state
        }
        Mode::Real => State::default(),
    };
    if mode == Mode::Real {
        for seg in [Seg::Es, Seg::Cs, Seg::Ss, Seg::Ds, Seg::Fs, Seg::Gs] {
            let one = Segment {
                selector: 0,
                base: 0,
                ..state.segment(seg)
            };
            state.set_segment(seg, one);
        }
    }
    state.gdtr = Table {
        base: GDT,
        limit: 0x4f,
    };
    state.idtr = Table {
        base: if mode == Mode::Real { 0 } else { IDT },
        limit: 0xfff,
    };
    for register in &mut state.r[..16] {
        *register = input.number();
    }
    if input.byte() & 7 != 0 {
        state.r[4] = STACK - 8 * u64::from(input.byte());
    }
    if input.byte() & 3 != 0 {
        state.r[1] &= 0xff;
        state.r[6] = DATA + input.below(0x8000);
        state.r[7] = DATA + input.below(0x8000);
    }
    state.rip = CODE;
    state.set_rflags(u64::from(input.word()) & !(1 << 14) | 2 | input.one_of(&[0, 1 << 18, 0]));
    // What the processor does without a look at what it announces: WP, SMEP, SMAP, PCE, TSD, DE.
    state.cr0 ^= u64::from(input.byte() & 1) << 16;
    for bit in [2, 3, 7, 8, 20, 21] {
        state.cr4 |= u64::from(input.byte() & 1) << bit;
    }
    state.efer ^= u64::from(input.byte() & 1) << 11;
    if input.byte() & 7 == 0 {
        state.dr = [0; 4].map(|_| input.number());
        state.dr7 = (u64::from(input.word()) << 16 | u64::from(input.word())) & 0xffff_2bff | 0x400;
    }
    state.msrs.lstar = HANDLERS + 16 * u64::from(input.byte());
    state.msrs.star = 0x10 << 32 | 0x20 << 48;
    state
}

/// Anything, or snippets with a bit of it.
fn code(input: &mut Input<'_>) -> Vec<u8> {
    let parts = usize::from(input.byte());
    let anything = input.byte() % 64;
    let mut code = Vec::new();
    for _ in 0..parts {
        let choice = input.byte();
        if choice % 64 < anything {
            code.extend([input.byte(), input.byte(), input.byte()]);
        } else {
            code.extend(SNIPPETS[usize::from(choice) % SNIPPETS.len()]);
        }
    }
    // Back to the start: what comes behind is zeroes, and who walks there decodes 64 instructions
    // to execute one, which faults.
    let back = i32::try_from(code.len() + 5).expect("some hundred bytes");
    code.push(0xe9);
    code.extend((-back).to_le_bytes());
    code
}

fn long(cpl: u8) -> State {
    let mut state = State::long_mode(PML4, cpl);
    let (code, data) = if cpl == 3 { (0x33, 0x2b) } else { (0x10, 0x18) };
    for seg in [Seg::Es, Seg::Ss, Seg::Ds, Seg::Fs, Seg::Gs] {
        let one = Segment {
            selector: data,
            ..state.segment(seg)
        };
        state.set_segment(seg, one);
    }
    let cs = Segment {
        selector: code,
        ..state.segment(Seg::Cs)
    };
    state.set_segment(Seg::Cs, cs);
    let task = Segment {
        selector: 0x40,
        attr: 0x8b,
        limit: 0x67,
        base: TSS,
    };
    state.set_segment(Seg::Tr, task);
    state
}

fn load(state: &mut State, seg: Seg, selector: u16, attr: u16) {
    let one = Segment {
        selector,
        attr,
        limit: u32::MAX,
        base: 0,
    };
    state.set_segment(seg, one);
}
