//! What the contexts of the control socket without a VM do.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};

use perfmon_abi::wire::{Call, Errno, Refusal};
use perfmon_abi::{
    CtxArg, DefaultArg, DefaultEntry, DefaultHeader, Message, PmcArg, PmdArg, Record, SetDesc,
    Timespec, consts as pfm,
};
use rustix::event::{PollFd, PollFlags, Timespec as Time, poll};
use rustix::fs::{MemfdFlags, fstat, ftruncate, memfd_create};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, send, socketpair};

use super::properties;

/// Samples that the default format takes before its buffer is full.
const SAMPLES: usize = 3;
/// vCPUs; the last one ends as soon as something is started on it.
pub const VCPUS: i32 = 3;
/// Counters.
pub(super) const COUNTERS: u16 = 4;
/// Virtual PMDs: exits, and the time that a vCPU ran.
const QUANTITIES: [u16; 2] = [64, 72];

#[derive(Debug)]
pub struct Context {
    pub flags: u32,
    pub inode: u64,
    pub generation: u16,
    pub loaded: Option<i32>,
    pub started: bool,
    pub masked: bool,
    end: OwnedFd,
    /// Both ends, once somebody has asked for it.
    bell: Option<(OwnedFd, OwnedFd)>,
    buffer: Option<(OwnedFd, u64)>,
    pmcs: BTreeMap<(u16, u16), PmcArg>,
    pmds: BTreeMap<(u16, u16), PmdArg>,
    sets: BTreeMap<u16, Set>,
    filled: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Set {
    description: SetDesc,
    runs: u64,
    switch_pmds: u64,
}

pub(super) fn refuse<T>(errno: Errno, reason: &'static str) -> Result<T, Refusal> {
    Err(Refusal::new(errno, reason))
}

/// A file in memory, which nobody executes where the kernel knows such files (6.3).
pub(super) fn memory_file(name: &str) -> OwnedFd {
    let create = |flags| memfd_create(name, MemfdFlags::CLOEXEC | flags);
    let made = create(MemfdFlags::NOEXEC_SEAL).or_else(|_| create(MemfdFlags::empty()));
    made.expect("a file")
}

impl Context {
    pub fn create(wanted: &mut CtxArg, argument: &[u8]) -> Result<(Self, Vec<OwnedFd>), Refusal> {
        let bad = pfm::PFM_FL_NOTIFY_BLOCK | pfm::PFM_FL_SYSTEM_WIDE;
        if wanted.flags & bad == bad {
            return refuse(Errno::EINVAL, "a core cannot be blocked");
        }
        let buffer = match wanted.format {
            none if none == [0; 16] => None,
            pfm::DEFAULT_FORMAT => {
                let Ok(argument) = DefaultArg::from_bytes(argument) else {
                    return refuse(Errno::EINVAL, "the format's argument is missing");
                };
                let file = memory_file("buffer");
                ftruncate(&file, argument.buf_size).expect("a size");
                Some((file, argument.buf_size))
            }
            _ => return refuse(Errno::EINVAL, "there is no such sampling format"),
        };
        let pair = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        );
        let (end, other) = pair.expect("a pair of sockets");
        let mut context = Context {
            flags: wanted.flags,
            inode: fstat(&other).expect("a status").st_ino,
            generation: 0,
            loaded: None,
            started: false,
            masked: false,
            end,
            bell: None,
            buffer,
            pmcs: BTreeMap::new(),
            pmds: BTreeMap::new(),
            sets: BTreeMap::from([(0, Set::default())]),
            filled: 0,
        };
        wanted.fd = -1;
        wanted.buffer_size = context.buffer_size();
        context.write_buffer(0);
        let mut descriptors = vec![other];
        descriptors.extend(context.buffer());
        Ok((context, descriptors))
    }

    pub fn buffer_size(&self) -> u64 {
        self.buffer.as_ref().map_or(0, |(_, size)| *size)
    }

    pub fn buffer(&self) -> Option<OwnedFd> {
        let (file, _) = self.buffer.as_ref()?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        Some(
            std::fs::File::open(path)
                .expect("a descriptor for reading")
                .into(),
        )
    }

    /// Whether nobody has the context's descriptor any more.
    pub fn is_closed(&self) -> bool {
        let mut polled = [PollFd::new(&self.end, PollFlags::RDHUP)];
        poll(&mut polled, Some(&Time::default())).expect("polled");
        polled[0]
            .revents()
            .intersects(PollFlags::HUP | PollFlags::RDHUP)
    }

    /// What rings for it.
    pub fn bell(&mut self) -> Result<OwnedFd, Refusal> {
        if self.flags & pfm::PFM_FL_OVFL_NO_MSG == 0 {
            return refuse(Errno::EINVAL, "it has messages");
        }
        let bell = self.bell.get_or_insert_with(|| {
            let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
            socketpair(family, SocketType::SEQPACKET, flags, None).expect("a pair of sockets")
        });
        Ok(bell.1.try_clone().expect("a duplicate"))
    }

    pub fn send_bytes(&self, bytes: &[u8]) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        send(&self.end, bytes, flags).expect("room for a message");
    }

    pub fn send(&self, kind: u32, generation: u16, pmds: u64) {
        let message = Message {
            kind,
            active_set: 0,
            generation,
            ovfl_pmds: [pmds, 0],
        };
        self.send_bytes(&message.to_bytes());
    }

    fn write_buffer(&mut self, count: usize) {
        let Some((file, size)) = &self.buffer else {
            return;
        };
        let step = self.step();
        let header = DefaultHeader {
            count: count as u64,
            cur_offs: (DefaultHeader::SIZE + count * step) as u64,
            overflows: self.filled,
            buf_size: *size,
            version: pfm::PFM_DFL_SMPL_VERSION,
            flags: 0,
        };
        rustix::io::pwrite(file, &header.to_bytes(), 0).expect("written");
        for index in 0..count {
            let entry = DefaultEntry {
                pid: 1,
                ip: 0x1000 + index as u64,
                tstamp: index as u64,
                ..DefaultEntry::default()
            };
            let entry = DefaultEntry {
                tid: self.loaded.unwrap_or(-1),
                last_reset_val: self.pmds.get(&(0, 0)).map_or(0, |pmd| pmd.short_reset),
                ..entry
            };
            let at = (DefaultHeader::SIZE + index * step) as u64;
            rustix::io::pwrite(file, &entry.to_bytes(), at).expect("written");
        }
    }

    /// Bytes of a sample.
    fn step(&self) -> usize {
        let pmds = self
            .pmcs
            .get(&(0, 0))
            .map_or(0, |pmc| pmc.smpl_pmds[0].count_ones());
        DefaultEntry::SIZE + 8 * usize::try_from(pmds).expect("a few")
    }

    fn count(&mut self) {
        if self.started && !self.masked {
            for place in self.pmcs.keys() {
                let pmd = self.pmds.entry(*place).or_default();
                pmd.value = pmd.value.wrapping_add(1000);
            }
        }
    }

    /// What sets do at a start.
    fn switch(&mut self) {
        let mut next = None;
        for set in self.sets.values_mut() {
            let flags = set.description.flags;
            if flags & pfm::PFM_SETFL_OVFL_SWITCH != 0 {
                set.switch_pmds = 1;
            }
            if flags & pfm::PFM_SETFL_EXPL_NEXT != 0 {
                next = Some(set.description.next);
            } else if flags & (pfm::PFM_SETFL_TIME_SWITCH | pfm::PFM_SETFL_OVFL_SWITCH) != 0 {
                set.runs += 2;
            }
        }
        if let Some(set) = next.and_then(|next| self.sets.get_mut(&next)) {
            set.runs += 1;
        }
    }

    /// The overflow at a start or restart.
    fn overflow(&mut self) {
        let notify = self
            .pmcs
            .values()
            .filter(|pmc| pmc.flags & pfm::PFM_REGFL_OVFL_NOTIFY != 0);
        let pmds = notify.fold(0, |bits, pmc| bits | 1 << pmc.num);
        if pmds == 0 {
            return;
        }
        if self.buffer.is_some() {
            self.filled += 1;
            self.write_buffer(SAMPLES);
        }
        self.masked = true;
        if let Some((hand, bell)) = &self.bell {
            send(hand, &[1], SendFlags::NOSIGNAL).expect("it rings");
            rustix::net::recv(bell, &mut [0; 1][..], RecvFlags::DONTWAIT).expect("one byte");
        } else if self.flags & pfm::PFM_FL_OVFL_NO_MSG != 0 {
            self.send_bytes(&[]);
        } else {
            self.send(pfm::PFM_MSG_OVFL, self.generation, pmds);
        }
    }

    fn unload(&mut self) {
        self.count();
        (self.loaded, self.started, self.masked) = (None, false, false);
    }

    pub fn command(&mut self, call: &mut Call) -> Result<(), Refusal> {
        match call {
            Call::WritePmcs(pmcs) => {
                for pmc in pmcs {
                    self.check(pmc.num, pmc.set, &mut pmc.flags)?;
                    self.pmcs.insert((pmc.set, pmc.num), *pmc);
                }
            }
            Call::WritePmds(pmds) => {
                for pmd in pmds {
                    self.check(pmd.num, pmd.set, &mut pmd.flags)?;
                    self.pmds.insert((pmd.set, pmd.num), *pmd);
                }
            }
            Call::ReadPmds(pmds) => {
                self.count();
                for pmd in pmds {
                    self.check(pmd.num, pmd.set, &mut pmd.flags)?;
                    let kept = self.pmds.entry((pmd.set, pmd.num)).or_default();
                    pmd.value = kept.value;
                    pmd.last_reset_val = kept.value;
                    pmd.flags |= pfm::PFM_PROV_EXACT << pfm::PFM_REG_RETFL_PROV_SHIFT;
                }
            }
            Call::Start(start) => {
                let set = start.map_or(0, |start| start.set);
                if self.loaded.is_none() {
                    return refuse(Errno::EBUSY, "the context is not loaded");
                }
                if !self.sets.contains_key(&set) {
                    return refuse(Errno::EINVAL, "there is no such set");
                }
                self.started = true;
                self.switch();
                self.overflow();
                if self.loaded == Some(VCPUS - 1) {
                    self.unload();
                    self.send(pfm::PFM_MSG_END, self.generation, 0);
                }
            }
            Call::Stop if self.loaded.is_none() => {
                return refuse(Errno::EBUSY, "the context is not loaded");
            }
            Call::Stop => {
                self.count();
                self.started = false;
            }
            Call::Load(_) | Call::CreateEvtsets(_) | Call::DeleteEvtsets(_)
                if self.loaded.is_some() =>
            {
                return refuse(Errno::EBUSY, "the context is loaded");
            }
            Call::Load(load) => {
                if !(0..VCPUS).contains(&load.pid) {
                    return refuse(Errno::ESRCH, "there are 3 vCPUs: 0 to 2");
                }
                let known = |id| self.sets.contains_key(&id);
                let chain = self.sets.values().map(|set| set.description);
                let mut next = chain.filter(|set| set.flags & pfm::PFM_SETFL_EXPL_NEXT != 0);
                if !known(load.set) || next.any(|set| !known(set.next)) {
                    return refuse(Errno::EINVAL, "a set is missing");
                }
                self.loaded = Some(load.pid);
                self.generation = self.generation.wrapping_add(1);
                self.sets.values_mut().for_each(|set| set.switch_pmds = 0);
                self.sets.entry(load.set).or_default().runs += 1;
            }
            Call::Unload | Call::Restart if self.loaded.is_none() => {
                return refuse(Errno::EBUSY, "the context is not loaded");
            }
            Call::Unload => self.unload(),
            Call::Restart => {
                self.masked = false;
                self.write_buffer(0);
                self.overflow();
            }
            Call::CreateEvtsets(sets) => {
                for set in sets {
                    self.sets.entry(set.id).or_default().description = *set;
                }
            }
            Call::DeleteEvtsets(sets) => {
                for set in sets {
                    if set.id == 0 || self.sets.remove(&set.id).is_none() {
                        set.flags |= pfm::PFM_SET_RETFL_NOSET;
                        return refuse(Errno::EINVAL, "there is no such set");
                    }
                }
            }
            Call::GetinfoEvtsets(infos) => {
                for info in infos {
                    info.flags &= !pfm::PFM_SET_RETFL_MASK;
                    if info.flags != 0 {
                        info.flags |= pfm::PFM_SET_RETFL_EINVAL;
                        return refuse(Errno::EINVAL, "set_flags is reserved");
                    }
                    let Some(set) = self.sets.get(&info.id) else {
                        info.flags |= pfm::PFM_SET_RETFL_NOSET;
                        return refuse(Errno::EINVAL, "there is no such set");
                    };
                    (info.flags, info.next) = (set.description.flags, set.description.next);
                    (info.runs, info.switch_pmds[0]) = (set.runs, set.switch_pmds);
                    info.act_duration = Timespec::from_ns(set.runs * 1_000_000);
                }
            }
            other => return properties::ask(other),
        }
        Ok(())
    }

    fn check(&self, num: u16, set: u16, flags: &mut u32) -> Result<(), Refusal> {
        *flags &= !(pfm::PFM_REG_RETFL_MASK | pfm::PFM_REG_RETFL_PROV_MASK);
        if num >= COUNTERS && !QUANTITIES.contains(&num) {
            *flags |= pfm::PFM_REG_RETFL_NOTAVAIL;
            return refuse(Errno::EINVAL, "there is no such register");
        }
        if !self.sets.contains_key(&set) {
            *flags |= pfm::PFM_REG_RETFL_NOSET;
            return refuse(Errno::EINVAL, "there is no such set");
        }
        Ok(())
    }
}
