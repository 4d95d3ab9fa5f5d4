//! Where in its guest a vCPU is, at a sample.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_view::{Chain, End, KernelView, Look, Mapping, Mode, Registers, Task};
use kvm_bindings::{kvm_regs, kvm_sregs};
use perfmon_abi::compact::{CallChain, ChainEnd, GuestPlace, MOST_FRAMES, ProgramFrame};
use pmu_virt::perfmon::Wish;

use super::agent::Moment;
use super::described::{Descriptions, News};
use super::{Ram, VmKernel, no_tasks};

/// How long a vCPU waits before it asks again for a kernel, or for its number there, and
/// before it makes sure that the kernel is still the one that runs.
const AGAIN: Duration = Duration::from_secs(1);
/// Tasks, and mappings, whose numbers a vCPU remembers.
const REMEMBERED: usize = 4096;

/// A vCPU's looks at its guest.
#[derive(Debug)]
pub(crate) struct VcpuLook {
    kernel: Arc<VmKernel>,
    apic_id: u32,
    /// The kernel, and which one that is.
    view: Option<Arc<KernelView>>,
    version: u64,
    /// It is looked with for the first time.
    is_new: bool,
    /// The kernel describes its tasks.
    has_tasks: bool,
    /// What the kernel calls the vCPU.
    processor: Option<u32>,
    /// Nobody is asked for what is missing before.
    next: Option<Instant>,
    chain: Chain,
    tasks: Numbers<Task>,
    mappings: Numbers<Mapping>,
    place: GuestPlace,
}

impl VcpuLook {
    pub(crate) fn new(kernel: Arc<VmKernel>, apic_id: u32) -> Self {
        Self {
            kernel,
            apic_id,
            view: None,
            version: 0,
            is_new: true,
            has_tasks: false,
            processor: None,
            next: None,
            chain: Chain::with_depth(MOST_FRAMES),
            tasks: Numbers::default(),
            mappings: Numbers::default(),
            place: GuestPlace::default(),
        }
    }

    /// What the last look found.
    pub(crate) fn place(&self) -> &GuestPlace {
        &self.place
    }

    /// Looks at the vCPU, which stands still. `tsc` reads its TSC.
    pub(crate) fn look(
        &mut self,
        wish: Wish,
        (regs, sregs): (&kvm_regs, &kvm_sregs),
        tsc: &dyn Fn() -> Option<u64>,
    ) {
        let at = registers(regs, sregs);
        self.look_at(wish, &at);
        if (self.view.is_none() || !self.has_tasks) && !is_elsewhere(&at) {
            self.ask_agent(&at, tsc);
        }
    }

    /// Leaves it to the agent in the guest, if there is one, to say what runs.
    fn ask_agent(&mut self, at: &Registers, tsc: &dyn Fn() -> Option<u64>) {
        let kernel = Arc::clone(&self.kernel);
        let Some((agent, tsc)) = kernel.agent_there().and_then(|agent| Some((agent, tsc()?)))
        else {
            return;
        };
        let runs = (at.mode != Mode::Kernel).then_some(at.rip);
        let frames = &mut self.place.chain.program;
        let addresses: Vec<u64> = runs
            .into_iter()
            .chain(frames.iter().map(|frame| frame.address))
            .collect();
        let apic_id = self.apic_id;
        let moment = |number| Moment {
            number,
            apic_id,
            tsc,
            addresses: addresses.clone(),
        };
        let count = 1 + addresses.len() as u64;
        let asks = |number| agent.ask(moment(number));
        let Some(number) = kernel.descriptions.reserve(count, asks) else {
            return;
        };
        let mut further = number + 1..;
        self.place.task = number;
        if runs.is_some() {
            self.place.mapping = further.next().unwrap_or(0);
        }
        for (frame, number) in frames.iter_mut().zip(further) {
            frame.mapping = number;
        }
    }

    /// Looks at the vCPU by itself.
    fn look_at(&mut self, wish: Wish, at: &Registers) {
        (self.place.task, self.place.mapping) = (0, 0);
        self.place.chain.clear();
        self.place.stack.clear();
        let is_elsewhere = is_elsewhere(at);
        self.kernel.looks();
        self.follow();
        let kernel = Arc::clone(&self.kernel);
        let ram = Ram(&kernel.memory);
        let asks = self.may_ask();
        if asks {
            self.view.take_if(|view| !view.is_current(&ram, at.cr3));
        }
        let Some(view) = self.view.clone().filter(|_| !is_elsewhere) else {
            if asks {
                let news = if is_elsewhere {
                    News::Elsewhere
                } else {
                    News::Kernel(at.cr3, self.version)
                };
                kernel.descriptions.tell(news);
            }
            return;
        };
        if self.processor.is_none() && (asks || self.is_new) {
            self.is_new = false;
            self.processor = view.processor(&ram, self.apic_id);
        }
        let look = Look::at(&view, &ram);
        let task = self.processor.and_then(|cpu| look.task(cpu, at).ok());
        let descriptions = &kernel.descriptions;
        if let Some(task) = &task {
            self.place.task = self.tasks.of(task, descriptions, News::Task);
        }
        let memory = task.as_ref().and_then(|task| task.memory);
        let (mappings, has_tasks) = (&mut self.mappings, self.has_tasks);
        let mut mapping = |address| {
            let Some(program) = memory else {
                // The agent will know.
                return (!has_tasks).then_some((0, true));
            };
            let found = look.mapping(program, address).ok()?;
            let news = |number, mapping| News::Mapping(number, program, mapping);
            Some((mappings.of(&found, descriptions, news), found.is_executable))
        };
        if at.mode != Mode::Kernel {
            self.place.mapping = mapping(at.rip).map_or(0, |(number, _)| number);
        }
        if wish.chain {
            look.chain(task.as_ref(), at, &mut self.chain);
            told(&self.chain, mapping, &mut self.place.chain);
        }
        if let (1.., Some(at), Some(program)) = (wish.stack, self.chain.registers(), memory)
            && wish.chain
        {
            let stack = &mut self.place.stack;
            (stack.sp, stack.bp) = (at.sp, at.bp);
            stack.bytes.resize(wish.stack, 0);
            let len = look.stack(program, &at, &mut stack.bytes);
            stack.bytes.truncate(len);
            let (mappings, numbers) = (&mut stack.mappings, &mut self.mappings);
            look.code(program, (at.sp, &stack.bytes), |found| {
                let news = |number, mapping| News::Mapping(number, program, mapping);
                let number = numbers.of(found, descriptions, news);
                if number != 0 {
                    mappings.push(number);
                }
            });
        }
    }

    /// Takes the kernel that is the present one.
    fn follow(&mut self) {
        let Some((version, view)) = self.kernel.newer(self.version) else {
            return;
        };
        let missing = view.as_ref().map(|view| no_tasks(view));
        *self = Self {
            has_tasks: missing.is_some_and(|why| why.is_none()),
            view,
            version,
            next: self.next,
            ..Self::new(Arc::clone(&self.kernel), self.apic_id)
        };
    }

    fn may_ask(&mut self) -> bool {
        let now = Instant::now();
        let may = self.next.is_none_or(|next| next <= now);
        if may {
            self.next = Some(now + AGAIN);
        }
        may
    }
}

/// Neither a kernel before it has page tables of its own is where it will be, nor what starts
/// another one.
fn is_elsewhere(at: &Registers) -> bool {
    at.mode == Mode::Kernel && at.rip >> 63 == 0
}

/// Numbers that things have got.
#[derive(Debug)]
struct Numbers<T>(HashMap<T, u64>);

impl<T> Default for Numbers<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T: Copy + Eq + Hash> Numbers<T> {
    /// The number of `thing`, which is announced if it has none; 0 where it cannot be.
    fn of(&mut self, thing: &T, to: &Descriptions, news: impl FnOnce(u64, T) -> News) -> u64 {
        if let Some(number) = self.0.get(thing).filter(|number| to.is_kept(**number)) {
            return *number;
        }
        let Some(number) = to.announce(|number| news(number, *thing)) else {
            return 0;
        };
        if self.0.len() >= REMEMBERED {
            self.0.clear();
        }
        self.0.insert(*thing, number);
        number
    }
}

fn registers(regs: &kvm_regs, sregs: &kvm_sregs) -> Registers {
    let mode = match (sregs.ss.dpl, sregs.cs.l) {
        (0, _) => Mode::Kernel,
        (_, 0) => Mode::User32,
        _ => Mode::User,
    };
    Registers {
        rip: regs.rip,
        rsp: regs.rsp,
        rbp: regs.rbp,
        rdx: regs.rdx,
        rdi: regs.rdi,
        r10: regs.r10,
        r13: regs.r13,
        cr3: sregs.cr3,
        mode,
    }
}

/// `chain` as samples tell it. `mapping` is the number of what is mapped at an address, and
/// whether it may be executed: where it may not, what a frame pointer led to is no caller.
fn told(chain: &Chain, mut mapping: impl FnMut(u64) -> Option<(u64, bool)>, to: &mut CallChain) {
    let kernel = chain.kernel().iter().map(guest_view::Frame::instruction);
    to.kernel.extend(kernel);
    to.kernel_end = chain.kernel_end().map(end);
    to.program_end = chain.program_end().map(end);
    for frame in chain.program() {
        let address = frame.instruction();
        let found = mapping(address);
        if frame.guessed && !found.is_some_and(|(_, is_executable)| is_executable) {
            to.program_end = Some(ChainEnd::Broken);
            break;
        }
        let mapping = found.map_or(0, |(number, _)| number);
        to.program.push(ProgramFrame { address, mapping });
    }
}

fn end(of: End) -> ChainEnd {
    match of {
        End::Outermost => ChainEnd::Outermost,
        End::Entry => ChainEnd::Entry,
        End::Depth => ChainEnd::Depth,
        End::NoProgram => ChainEnd::NoProgram,
        _ => ChainEnd::Broken,
    }
}
