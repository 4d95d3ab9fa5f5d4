//! On the host: an LWP is a vCPU of the VM that `UMPIRE_VCPU` names. Each has a perfmon2
//! context while an event is bound to it.

mod place;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use libc::{EACCES, EAGAIN, EINVAL, EIO, ENOSYS, ENOTSUP, ESRCH};
use perfmon::registers::{need, program};
use perfmon::{LogicalPmu, VirtualPmd};
use perfmon_abi::consts::{
    PFM_CREATE_CONTEXT, PFM_LOAD_CONTEXT, PFM_MSG_END, PFM_MSG_OVFL, PFM_PROV_LOST, PFM_READ_PMDS,
    PFM_REG_RETFL_PROV_MASK, PFM_REG_RETFL_PROV_SHIFT, PFM_REGFL_OVFL_NOTIFY, PFM_START,
    PFM_WRITE_PMCS, PFM_WRITE_PMDS,
};
use perfmon_abi::wire::info::{MachineInfo, ModelInfo, VcpuState};
use perfmon_abi::wire::{Errno, Extension, MAX_PACKET, NO_CONTEXT, Refusal, SystemWide};
use perfmon_abi::{CtxArg, LoadArg, Message, PmcArg, PmdArg, Record};
use pmu_model::{CounterId, PmuModel};
use rustix::net::{RecvFlags, SocketAddrUnix};
use umpire_events::{LibraryError, NoTables, resolve};
use umpire_perfmon::link::{ARGUMENT, Answer, Link, Packet, Question, inode};
use umpire_perfmon::messages::{self, Incoming};

use super::assign::assign;
use super::clock::now;
use super::event::{Event, MAX_PIC};
use super::failure::{Failure, Subcode, fail};
use super::lwp::{Bed, gone, invalid};
use super::processor;
use super::signals::signal_on;
pub(crate) use place::VcpuName;

/// How long a call waits for the VM, with signals blocked.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Where fixed counters begin in a set of counters.
const FIXED: usize = 32;

/// What one counter is programmed to.
#[derive(Clone, Copy, Debug, Default)]
struct Registers {
    pic: usize,
    pmc: u16,
    pmd: u16,
    value: u64,
}

/// What is kept of a vCPU.
#[derive(Debug, Default)]
struct Vcpu {
    bound: Option<Bound>,
    /// What the last event led to, for it comes back at every overflow.
    pes: [u64; MAX_PIC],
    registers: [Registers; MAX_PIC],
    used: usize,
}

/// What was bound to a vCPU of this VM: of the one that serves now, and no earlier one.
#[derive(Debug)]
struct Bound {
    /// None where events are counted in no ring.
    context: Option<Context>,
    /// Contexts that had been loaded on cores before.
    core_loads: u64,
}

/// A context that is loaded.
#[derive(Debug)]
struct Context {
    /// Is there until the end.
    fd: Option<OwnedFd>,
    /// The number of its socket.
    inode: u64,
    handle: u32,
    /// It was told of an overflow that nobody was signalled yet.
    overflowed: bool,
    /// Its vCPU has ended, and the last counts will never change.
    ended: bool,
}

impl Context {
    /// Its socket, unless the program closed it; the number may be another file's by now.
    fn socket(&self) -> Option<BorrowedFd<'_>> {
        let socket = self.fd.as_ref()?.as_fd();
        (inode(socket) == Some(self.inode)).then_some(socket)
    }

    /// Takes in what the VM has told so far. A message may come to be read by a sample, before
    /// the signal that tells of it.
    fn hear(&mut self) {
        let (mut overflowed, mut ended) = (false, false);
        match self.socket() {
            Some(socket) => {
                while let Ok(incoming) = messages::take(socket, RecvFlags::DONTWAIT) {
                    match incoming {
                        Incoming::Message(bytes) => match Message::get(&bytes).kind {
                            PFM_MSG_OVFL => overflowed = true,
                            PFM_MSG_END => ended = true,
                            _ => {}
                        },
                        Incoming::Empty => {}
                        Incoming::Closed => {
                            ended = true;
                            break;
                        }
                    }
                }
            }
            None => ended = true,
        }
        self.overflowed |= overflowed;
        self.ended |= ended;
    }
}

impl Drop for Context {
    /// Closes the socket, but not the file of the program's that has its number.
    fn drop(&mut self) {
        if self.socket().is_none() {
            std::mem::forget(self.fd.take());
        }
    }
}

/// A VM.
pub(crate) struct Host {
    address: SocketAddrUnix,
    link: Link,
    packet: Box<Packet>,
    pmu: LogicalPmu,
    tsc_khz: u64,
    /// The VM says when its registers were read.
    has_clock: bool,
    vcpus: Vec<Vcpu>,
}

impl Host {
    /// The VM, and the number of its vCPU that is meant.
    ///
    /// # Errors
    /// ENOSYS: nobody serves it. ESRCH: it has no such vCPU. EACCES: this user may not.
    pub(crate) fn find(name: &VcpuName) -> Result<(Self, usize), Failure> {
        let path = name.socket()?;
        let address = SocketAddrUnix::new(&path).map_err(|_| {
            let reason = format_args!("{}: too long for a socket", path.display());
            fail(EINVAL, Subcode::BindFailed, reason)
        })?;
        let link = Link::connect(&address, TIMEOUT).map_err(|error| {
            let refusal = Refusal::from(error);
            let (errno, subcode) = match refusal.errno {
                Errno::EPERM => (EACCES, Subcode::RequiresPrivilege),
                Errno::ENOSYS => (ENOSYS, Subcode::BindFailed),
                errno => (errno.number(), Subcode::BindFailed),
            };
            let reason = format_args!("{}: {}", path.display(), refusal.reason);
            fail(errno, subcode, reason)
        })?;
        let host = Self::served(address, link)?;
        let count = host.count();
        if name.vcpu >= count {
            let reason = format_args!("the VM has no vCPU {}; there are {count}", name.vcpu);
            return Err(fail(ESRCH, Subcode::BindFailed, reason));
        }
        Ok((host, name.vcpu))
    }

    /// The VM at the other end of `link`.
    fn served(address: SocketAddrUnix, mut link: Link) -> Result<Self, Failure> {
        let mut packet = Box::new([0; MAX_PACKET]);
        let info: ModelInfo = document(&mut link, &mut packet, Extension::Model)?;
        let pmu = LogicalPmu::served(&info).map_err(|model| {
            let reason = format_args!("the VM has a PMU that this library does not know: {model}");
            fail(ENOSYS, Subcode::BindFailed, reason)
        })?;
        let mut vcpus = Vec::new();
        vcpus.resize_with(usize::try_from(info.vcpus).unwrap_or(0), Vcpu::default);
        Ok(Host {
            address,
            link,
            packet,
            pmu,
            tsc_khz: info.tsc_khz,
            has_clock: info
                .virtual_pmds
                .iter()
                .any(|it| it.pmd == VirtualPmd::Clock.pmd()),
            vcpus,
        })
    }

    /// How many vCPUs it has.
    pub(crate) fn count(&self) -> usize {
        self.vcpus.len()
    }

    /// A connection that works: of a VM that was started again, too, or after somebody has
    /// closed its descriptor.
    fn ensure_link(&mut self) -> Result<(), Failure> {
        if self.link.is_usable() {
            return Ok(());
        }
        let link = Link::connect(&self.address, TIMEOUT);
        let link = link.map_err(|error| refused(Refusal::from(error)))?;
        let again = Self::served(self.address.clone(), link)?;
        let promised = |host: &Host| {
            let model = host.pmu.model();
            (
                processor::number(model),
                processor::pics(model),
                host.count(),
            )
        };
        if promised(&again) != promised(self) {
            let reason = format_args!(
                "the VM was started again with another PMU or other vCPUs: start this program \
                 again, too"
            );
            return Err(fail(ESRCH, Subcode::BindFailed, reason));
        }
        // Contexts were those of the old one.
        *self = again;
        Ok(())
    }

    /// Reads what an LWP's context has counted.
    fn counted(&mut self, lwp: usize, event: &mut Event) -> Result<(), Failure> {
        let Some(bound) = &self.vcpus[lwp].bound else {
            // It was bound on a VM that is gone.
            return Err(gone());
        };
        let handle = bound.context.as_ref().map(|context| context.handle);
        let before = bound.core_loads;
        let (used, registers) = (self.vcpus[lwp].used, self.vcpus[lwp].registers);
        if self.system_wide()?.loads != before {
            return Err(invalid());
        }
        let Some(handle) = handle else {
            event.hrt = now();
            return Ok(());
        };
        let mut wanted = [PmdArg::default(); MAX_PIC + 2];
        let run_time = VirtualPmd::RunTime.pmd();
        wanted[0].num = run_time;
        // Where there is none, something that there is.
        wanted[1].num = if self.has_clock {
            VirtualPmd::Clock.pmd()
        } else {
            run_time
        };
        for (pmd, registers) in wanted[2..].iter_mut().zip(registers) {
            pmd.num = registers.pmd;
        }
        let read = self.read_pmds(handle, wanted, used + 2)?;
        if self.has_ended(lwp) {
            return Err(gone());
        }
        for (pmd, registers) in read[2..].iter().zip(&registers[..used]) {
            let how = (pmd.flags & PFM_REG_RETFL_PROV_MASK) >> PFM_REG_RETFL_PROV_SHIFT;
            if how == PFM_PROV_LOST {
                return Err(invalid());
            }
            event.pic[registers.pic] = pmd.value;
        }
        let ticks = |ns: u64| u128::from(ns) * u128::from(self.tsc_khz) / 1_000_000;
        event.tsc = match read[0].value {
            // Nobody knows.
            u64::MAX => 0,
            ns => u64::try_from(ticks(ns)).unwrap_or(u64::MAX),
        };
        let clock = i64::try_from(read[1].value).ok();
        event.hrt = clock.filter(|_| self.has_clock).unwrap_or_else(now);
        Ok(())
    }

    /// Whether the vCPU has ended since something was bound to it.
    fn has_ended(&mut self, lwp: usize) -> bool {
        let context = self.vcpus[lwp].bound.as_mut();
        let context = context.and_then(|bound| bound.context.as_mut());
        context.is_some_and(|context| {
            context.hear();
            context.ended
        })
    }

    /// Does a command, whose argument is these structures.
    fn command<T: Record>(
        &mut self,
        handle: u32,
        command: u16,
        argument: &[T],
    ) -> Result<Answer<'_>, Failure> {
        for (place, one) in self.packet[ARGUMENT..].chunks_mut(T::SIZE).zip(argument) {
            one.put(place);
        }
        let question = Question {
            context: handle,
            nargs: i32::try_from(argument.len()).unwrap_or(0),
            length: argument.len() * T::SIZE,
            ..Question::plain(command)
        };
        ask(&mut self.link, &mut self.packet, question)
    }

    /// Who counts on cores.
    fn system_wide(&mut self) -> Result<SystemWide, Failure> {
        let question = Question::plain(Extension::SystemWide.number());
        let answer = ask(&mut self.link, &mut self.packet, question)?;
        SystemWide::from_bytes(answer.reply.payload).map_err(|_| malformed())
    }

    /// How many contexts have been loaded on cores; none counts there now.
    fn core_loads(&mut self) -> Result<u64, Failure> {
        match self.system_wide()? {
            there if there.contexts > 0 => Err(invalid()),
            there => Ok(there.loads),
        }
    }

    /// What registers become, so that they count what `event` says.
    fn plan(&mut self, lwp: usize, event: &Event) -> Result<(), Failure> {
        if self.vcpus[lwp].pes == event.pes {
            return Ok(());
        }
        let model = self.pmu.model();
        let all = (0..u32::from(model.programmable())).fold(0, |all, counter| all | 1 << counter);
        let mut requests = Vec::new();
        let mut wants = Vec::new();
        for pic in event.used() {
            let code = format!("r{:x}", event.pes[pic]);
            let named = resolve(&code, model, &NoTables(LibraryError::TooLate));
            let named = named.map_err(|error| {
                fail(
                    ENOTSUP,
                    Subcode::InvalidEvent,
                    format_args!("pic{pic}: {error}"),
                )
            })?;
            let need = need(&self.pmu, &named.request);
            let fixed = need
                .fixed
                .map_or(0, |fixed| 1 << (FIXED + usize::from(fixed)));
            wants.push(fixed | if need.programmable { all } else { 0 });
            if wants.last() == Some(&0) {
                let reason = format_args!("pic{pic}: no counter of the VM's PMU has the event");
                return Err(fail(ENOTSUP, Subcode::PicNotCapable, reason));
            }
            requests.push((pic, named.request));
        }
        let counters = assign(&wants).ok_or_else(|| {
            let reason =
                format_args!("the VM's PMU has no counters for all of these events at once");
            fail(ENOTSUP, Subcode::ResourceUnavailable, reason)
        })?;
        let mut registers = [Registers::default(); MAX_PIC];
        for (index, ((pic, request), counter)) in requests.iter().zip(counters).enumerate() {
            let number = |number: usize| u8::try_from(number).unwrap_or(u8::MAX);
            let counter = match counter.checked_sub(FIXED) {
                Some(fixed) => CounterId::Fixed(number(fixed)),
                None => CounterId::Programmable(number(counter)),
            };
            let Some((pmc, value)) = program(&self.pmu, counter, request) else {
                let reason = format_args!("pic{pic}: {counter} cannot count it");
                return Err(fail(ENOTSUP, Subcode::PicNotCapable, reason));
            };
            registers[index] = Registers {
                pic: *pic,
                pmc: pmc.num,
                pmd: pmc.pmd,
                value,
            };
        }
        let vcpu = &mut self.vcpus[lwp];
        vcpu.registers = registers;
        vcpu.used = requests.len();
        vcpu.pes = event.pes;
        Ok(())
    }

    /// A context for a vCPU, loaded and started.
    fn load(&mut self, lwp: usize, event: &Event, signals: bool) -> Result<Context, Failure> {
        let answer = self.command(NO_CONTEXT, PFM_CREATE_CONTEXT, &[CtxArg::default()])?;
        let handle = answer.reply.context;
        let [fd, _] = answer.descriptors;
        let fd = fd.ok_or_else(malformed)?;
        let context = Context {
            inode: inode(fd.as_fd()).ok_or_else(malformed)?,
            fd: Some(fd),
            handle,
            overflowed: false,
            ended: false,
        };
        if let Some(socket) = context.socket().filter(|_| signals) {
            signal_on(socket)?;
        }
        let vcpu = &self.vcpus[lwp];
        let (used, registers) = (vcpu.used, vcpu.registers);
        let flags = if signals { PFM_REGFL_OVFL_NOTIFY } else { 0 };
        let pmcs = registers.map(|it| PmcArg {
            num: it.pmc,
            flags,
            value: it.value,
            ..PmcArg::default()
        });
        let pmds = registers.map(|it| pmd(it.pmd, event.pic[it.pic]));
        self.command(handle, PFM_WRITE_PMCS, &pmcs[..used])?;
        self.command(handle, PFM_WRITE_PMDS, &pmds[..used])?;
        let pid = i32::try_from(lwp).unwrap_or(i32::MAX);
        self.command(handle, PFM_LOAD_CONTEXT, &[LoadArg { pid, set: 0 }])?;
        self.command::<LoadArg>(handle, PFM_START, &[])?;
        Ok(context)
    }

    fn read_pmds<const N: usize>(
        &mut self,
        handle: u32,
        mut pmds: [PmdArg; N],
        used: usize,
    ) -> Result<[PmdArg; N], Failure> {
        let answer = self.command(handle, PFM_READ_PMDS, &pmds[..used])?;
        let read = answer.reply.payload.chunks_exact(PmdArg::SIZE);
        if read.len() != used {
            return Err(malformed());
        }
        for (pmd, bytes) in pmds.iter_mut().zip(read) {
            *pmd = PmdArg::get(bytes);
        }
        Ok(pmds)
    }
}

fn pmd(num: u16, value: u64) -> PmdArg {
    PmdArg {
        num,
        value,
        ..PmdArg::default()
    }
}

impl Bed for Host {
    fn model(&self) -> &PmuModel {
        self.pmu.model()
    }

    fn access(&mut self) -> Result<(), Failure> {
        self.ensure_link()?;
        self.core_loads().map(drop)
    }

    fn start(&mut self, lwp: usize, event: &Event, signals: bool) -> Result<(), Failure> {
        self.ensure_link()?;
        self.plan(lwp, event)?;
        let core_loads = self.core_loads()?;
        let context = match self.vcpus[lwp].used {
            0 => None,
            _ => Some(self.load(lwp, event, signals)?),
        };
        self.vcpus[lwp].bound = Some(Bound {
            context,
            core_loads,
        });
        Ok(())
    }

    fn read(&mut self, lwp: usize, event: &mut Event) -> Result<(), Failure> {
        // The VM, or the context: somebody may have closed its descriptor.
        self.counted(lwp, event).map_err(|failure| {
            if failure.errno == ESRCH || !self.link.is_usable() {
                return gone();
            }
            failure
        })
    }

    fn stop(&mut self, lwp: usize) {
        // Closing its last descriptor ends it.
        self.vcpus[lwp].bound = None;
    }

    fn overflow(&mut self, descriptor: i32) -> Option<(usize, Option<u64>)> {
        let mut vcpus = self.vcpus.iter_mut().enumerate();
        let (lwp, context) = vcpus.find_map(|(lwp, vcpu)| {
            let context = vcpu.bound.as_mut()?.context.as_mut()?;
            let number = context.fd.as_ref()?.as_raw_fd();
            (number == descriptor).then_some((lwp, context))
        })?;
        context.hear();
        if !std::mem::take(&mut context.overflowed) {
            return None;
        }
        let handle = context.handle;
        let ip = self.read_pmds(handle, [pmd(VirtualPmd::Ip.pmd(), 0)], 1);
        Some((lwp, ip.ok().map(|[ip]| ip.value)))
    }

    fn later(&mut self) -> Result<Vec<usize>, Failure> {
        let machine: MachineInfo = document(&mut self.link, &mut self.packet, Extension::List)?;
        let offline = machine
            .vcpus
            .iter()
            .filter(|vcpu| vcpu.state == VcpuState::Offline);
        let numbers = offline.filter_map(|vcpu| usize::try_from(vcpu.vcpu).ok());
        Ok(numbers.filter(|&vcpu| vcpu < self.count()).collect())
    }

    fn signals_of_kernel(&self) -> bool {
        true
    }
}

fn malformed() -> Failure {
    fail(
        EIO,
        Subcode::BindFailed,
        format_args!("the VM's reply is malformed"),
    )
}

fn ask<'p>(
    link: &mut Link,
    packet: &'p mut Packet,
    question: Question<'_>,
) -> Result<Answer<'p>, Failure> {
    let answer = link
        .exchange(question, packet)
        .map_err(|error| refused(Refusal::from(error)))?;
    match answer.reply.errno {
        0 => Ok(answer),
        number => {
            let errno = Errno::from_number(number).unwrap_or(Errno::EPROTO);
            Err(meaning(errno, answer.reply.subcode, answer.reply.reason))
        }
    }
}

fn document<T: serde::de::DeserializeOwned>(
    link: &mut Link,
    packet: &mut Packet,
    what: Extension,
) -> Result<T, Failure> {
    let answer = ask(link, packet, Question::plain(what.number()))?;
    let [file, _] = answer.descriptors;
    umpire_perfmon::document(answer.reply.payload, file).map_err(refused)
}

fn refused(refusal: Refusal) -> Failure {
    meaning(refusal.errno, refusal.subcode, &refusal.reason)
}

/// What an error of perfmon2 is to a program for `libcpc`. A VMM of before has no sub-codes.
fn meaning(errno: Errno, subcode: Subcode, reason: &str) -> Failure {
    let (number, usual) = match errno {
        Errno::EINVAL if subcode == Subcode::NoHypervisorAccess => (EACCES, subcode),
        Errno::EBUSY | Errno::EAGAIN => (EAGAIN, Subcode::ResourceUnavailable),
        Errno::EINVAL if matches!(subcode, Subcode::None | Subcode::PicNotCapable) => {
            (ENOTSUP, Subcode::PicNotCapable)
        }
        Errno::EINVAL => (EINVAL, subcode),
        Errno::EPERM => (EACCES, Subcode::RequiresPrivilege),
        Errno::ECONNRESET | Errno::ENOSYS | Errno::EBADF => (ESRCH, Subcode::BindFailed),
        errno => (errno.number(), Subcode::BindFailed),
    };
    let subcode = if subcode == Subcode::None {
        usual
    } else {
        subcode
    };
    fail(number, subcode, format_args!("{reason}"))
}

#[cfg(test)]
mod tests;
