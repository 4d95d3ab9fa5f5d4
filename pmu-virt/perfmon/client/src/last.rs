//! What is left of contexts when their VM has ended: counts can still be read.
//!
//! Nothing here allocates or takes a lock, so it may run in a signal handler.

use std::cmp::Ordering;
use std::os::fd::{AsFd, BorrowedFd};

use perfmon_abi::consts::{
    PFM_GETINFO_EVTSETS, PFM_LOAD_CONTEXT, PFM_PROV_NOT_COUNTED, PFM_READ_PMDS,
    PFM_REG_RETFL_EINVAL, PFM_REG_RETFL_MASK, PFM_REG_RETFL_NOSET, PFM_REG_RETFL_NOTAVAIL,
    PFM_REG_RETFL_PROV_MASK, PFM_REG_RETFL_PROV_SHIFT, PFM_REGFL_READ_RESET, PFM_RESTART,
    PFM_SET_RETFL_EINVAL, PFM_SET_RETFL_MASK, PFM_SET_RETFL_NOSET, PFM_START, PFM_STOP,
    PFM_TRY_LOAD, PFM_UNLOAD_CONTEXT,
};
use perfmon_abi::wire::last::{COUNT_AT, Header, PACKET, PLACES_AT, Place};
use perfmon_abi::wire::{Errno, Refusal, Subcode};
use perfmon_abi::{PmdArg, Record, SetInfo};
use rustix::io::pread;

/// The last counts of a context, in the file that its VM has left.
#[derive(Debug)]
pub struct LastCounts<'a> {
    file: BorrowedFd<'a>,
    /// Where they begin.
    base: u64,
    header: Header,
}

fn refuse<T>(errno: Errno, reason: &'static str) -> Result<T, Refusal> {
    Err(Refusal::new(errno, reason))
}

impl<'a> LastCounts<'a> {
    /// Those of the context that had this handle on the connection whose last packet
    /// `file` came with; `None` if there are none.
    #[must_use]
    pub fn of(file: &'a impl AsFd, handle: u32) -> Option<Self> {
        let file = file.as_fd();
        let (mut begin, mut count) = ([0; PACKET.len()], [0; 8]);
        read_at(file, 0, &mut begin)?;
        read_at(file, COUNT_AT, &mut count)?;
        (begin == PACKET).then_some(())?;
        let place = find(u64::from_le_bytes(count), |index| {
            let mut bytes = [0; Place::SIZE];
            let at = index.checked_mul(Place::SIZE as u64)?;
            read_at(file, PLACES_AT.checked_add(at)?, &mut bytes)?;
            let place = Place::decode(&bytes);
            Some((place.handle.cmp(&handle.into()), place))
        })?;
        let mut bytes = [0; Header::SIZE];
        read_at(file, place.at, &mut bytes)?;
        Some(LastCounts {
            file,
            base: place.at,
            header: Header::decode(&bytes),
        })
    }

    /// Answers a command on the context as for one that is detached, its elements in
    /// `vector`. What is left can be read, and nothing else.
    ///
    /// # Errors
    /// Those of the command; EBUSY: the context is detached, or what is left cannot be
    /// changed; ESRCH: no vCPU or core is left. ENOSYS: nobody serves this command.
    pub fn answer(&self, command: u16, vector: &mut [u8]) -> Result<(), Refusal> {
        match command {
            PFM_READ_PMDS => each(vector, |pmd| self.read_pmd(pmd)),
            PFM_GETINFO_EVTSETS => each(vector, |set| self.read_set(set)),
            PFM_START | PFM_STOP | PFM_RESTART | PFM_UNLOAD_CONTEXT => refuse(
                Errno::EBUSY,
                "the VM has ended, and the context is attached to nothing",
            ),
            PFM_LOAD_CONTEXT | PFM_TRY_LOAD => refuse(Errno::ESRCH, "the VM has ended"),
            _ => refuse(
                Errno::ENOSYS,
                "the VM has ended: what its contexts counted can be read, and no more",
            ),
        }
    }

    fn read_pmd(&self, pmd: &mut PmdArg) -> Result<(), Refusal> {
        pmd.flags &= !(PFM_REG_RETFL_MASK | PFM_REG_RETFL_PROV_MASK);
        let bad = |pmd: &mut PmdArg, flag, subcode, reason| {
            pmd.flags |= flag;
            Err(Refusal::new(Errno::EINVAL, reason).because(subcode))
        };
        if self.set(pmd.set).is_none() {
            let reason = "there is no such event set";
            return bad(pmd, PFM_REG_RETFL_NOSET, Subcode::None, reason);
        }
        let Some(of_first) = self.pmd(0, pmd.num) else {
            let reason = "there is no such PMD";
            let subcode = Subcode::InvalidPicNumber;
            return bad(pmd, PFM_REG_RETFL_NOTAVAIL, subcode, reason);
        };
        match pmd.flags {
            0 => {}
            PFM_REGFL_READ_RESET => {
                let reason = "the VM has ended, and what is left of the context cannot be reset";
                return refuse(Errno::EBUSY, reason);
            }
            _ => {
                let reason = "reg_flags has bits that are not defined";
                return bad(pmd, PFM_REG_RETFL_EINVAL, Subcode::None, reason);
            }
        }
        let found = if pmd.set == 0 || u64::from(pmd.num) >= self.header.shared {
            of_first
        } else {
            self.pmd(pmd.set, pmd.num).unwrap_or(PmdArg {
                flags: PFM_PROV_NOT_COUNTED << PFM_REG_RETFL_PROV_SHIFT,
                ..PmdArg::default()
            })
        };
        pmd.value = found.value;
        pmd.last_reset_val = found.last_reset_val;
        pmd.ovflsw_thres = found.ovflsw_thres;
        pmd.flags = found.flags;
        Ok(())
    }

    fn read_set(&self, info: &mut SetInfo) -> Result<(), Refusal> {
        info.flags &= !PFM_SET_RETFL_MASK;
        if info.flags != 0 {
            info.flags |= PFM_SET_RETFL_EINVAL;
            return refuse(Errno::EINVAL, "set_flags has bits that are not defined");
        }
        match self.set(info.id) {
            Some(found) => *info = found,
            None => {
                info.flags |= PFM_SET_RETFL_NOSET;
                return refuse(Errno::EINVAL, "there is no such event set");
            }
        }
        Ok(())
    }

    fn set(&self, id: u16) -> Option<SetInfo> {
        find(self.header.sets, |index| {
            let mut bytes = [0; SetInfo::SIZE];
            self.read(self.header.set_at(index)?, &mut bytes)?;
            let set = SetInfo::get(&bytes);
            Some((set.id.cmp(&id), set))
        })
    }

    fn pmd(&self, set: u16, num: u16) -> Option<PmdArg> {
        find(self.header.pmds, |index| {
            let mut bytes = [0; PmdArg::SIZE];
            self.read(self.header.pmd_at(index)?, &mut bytes)?;
            let pmd = PmdArg::get(&bytes);
            Some(((pmd.set, pmd.num).cmp(&(set, num)), pmd))
        })
    }

    fn read(&self, at: u64, to: &mut [u8]) -> Option<()> {
        read_at(self.file, self.base.checked_add(at)?, to)
    }
}

/// Of `count` records in order, the one that `look` finds equal.
fn find<T>(count: u64, look: impl Fn(u64) -> Option<(Ordering, T)>) -> Option<T> {
    let (mut from, mut to) = (0, count);
    while from < to {
        let middle = from + (to - from) / 2;
        match look(middle)? {
            (Ordering::Equal, found) => return Some(found),
            (Ordering::Less, _) => from = middle + 1,
            (Ordering::Greater, _) => to = middle,
        }
    }
    None
}

/// Does something with each element, until one is refused.
fn each<T: Record>(
    vector: &mut [u8],
    mut act: impl FnMut(&mut T) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    for bytes in vector.chunks_exact_mut(T::SIZE) {
        let mut element = T::get(bytes);
        let done = act(&mut element);
        element.put(bytes);
        done?;
    }
    Ok(())
}

fn read_at(file: BorrowedFd<'_>, at: u64, to: &mut [u8]) -> Option<()> {
    (pread(file, &mut *to, at) == Ok(to.len())).then_some(())
}
