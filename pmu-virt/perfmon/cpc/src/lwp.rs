//! What becomes of an LWP's counters, whoever counts: bound, sampled, frozen after an overflow,
//! invalidated, released. Pure: a [`Bed`] has the counters.

use libc::{EAGAIN, EINVAL, ESRCH};
use pmu_model::PmuModel;

use super::event::{Event, MAX_PIC};
use super::failure::{Failure, Subcode, fail};
use super::processor;
use super::spec::{OS, USR};

/// `CPC_BIND_LWP_INHERIT`: LWPs that start later get the same.
pub(crate) const INHERIT: i32 = 0x1;
/// `CPC_BIND_EMT_OVF`: a signal at overflow.
pub(crate) const SIGNAL: i32 = 0x2;
/// What a counter reads on an LWP that has inherited it and is to preset it.
const FRESH: u64 = u64::MAX;

/// Whose counters count.
pub(crate) trait Bed: Send {
    /// The processor.
    fn model(&self) -> &PmuModel;

    /// Whether the counters can be used.
    ///
    /// # Errors
    /// EAGAIN: somebody counts system-wide. ENOSYS: there are none.
    fn access(&mut self) -> Result<(), Failure>;

    /// Has an LWP's counters count what `event` says, from its values on; if `signals`, the
    /// first overflow stops all of them and comes out of [`Bed::overflow`]. Only counters
    /// that count in some ring are there. Nothing is bound to the LWP.
    ///
    /// # Errors
    /// EAGAIN: somebody counts system-wide, or others have the counters. EACCES: the event
    /// is forbidden. ENOTSUP: it cannot be counted, or not like this.
    fn start(&mut self, lwp: usize, event: &Event, signals: bool) -> Result<(), Failure>;

    /// Reads them into `event`: time, ticks, and the values of those that count.
    ///
    /// # Errors
    /// EAGAIN: they have not counted all the time, and never will again.
    fn read(&mut self, lwp: usize, event: &mut Event) -> Result<(), Failure>;

    /// Gives them back.
    fn stop(&mut self, lwp: usize);

    /// An overflow of which a descriptor of ours tells: the LWP, and its program counter
    /// where that is not the calling thread's.
    fn overflow(&mut self, descriptor: i32) -> Option<(usize, Option<u64>)>;

    /// LWPs that have not started yet, and will inherit.
    ///
    /// # Errors
    /// Nobody can say.
    fn later(&mut self) -> Result<Vec<usize>, Failure>;

    /// Whether it signals overflows of events at the kernel's ring.
    fn signals_of_kernel(&self) -> bool;
}

/// What an LWP's counters do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing is bound.
    Unbound,
    /// They count.
    Counting,
    /// They stand still since an overflow, or as they were inherited.
    Frozen,
    /// They were taken, or went with their VM; `cpc_rele` or a bind comes next.
    Invalid(Subcode),
}

/// An LWP.
#[derive(Clone, Copy, Debug)]
struct Lwp {
    state: State,
    flags: i32,
    /// What is bound, with values that it had last.
    event: Event,
    /// It has not counted anything: it is signalled first.
    fresh: bool,
}

const UNBOUND: Lwp = Lwp {
    state: State::Unbound,
    flags: 0,
    event: Event {
        cpuver: 0,
        hrt: 0,
        tsc: 0,
        pic: [0; MAX_PIC],
        pes: [0; MAX_PIC],
    },
    fresh: false,
};

/// LWPs, and who counts for them.
pub(crate) struct Lwps {
    bed: Box<dyn Bed>,
    lwps: Vec<Lwp>,
}

/// A signal that an LWP is to get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Signal {
    pub(crate) lwp: usize,
    /// Its program counter, where that is not the calling thread's.
    pub(crate) pc: Option<u64>,
}

/// `event` without counters that count in no ring.
fn counting(event: &Event) -> Event {
    let mut counting = *event;
    let idle = counting
        .pes
        .iter_mut()
        .filter(|select| **select & (USR | OS) == 0);
    idle.for_each(|select| *select = 0);
    counting
}

impl Lwps {
    /// `count` LWPs, to which nothing is bound.
    pub(crate) fn new(bed: Box<dyn Bed>, count: usize) -> Self {
        Lwps {
            bed,
            lwps: vec![UNBOUND; count],
        }
    }

    pub(crate) fn model(&self) -> &PmuModel {
        self.bed.model()
    }

    /// Whether the counters can be used.
    pub(crate) fn access(&mut self) -> Result<(), Failure> {
        self.bed.access()
    }

    #[cfg(test)]
    pub(crate) fn change_bed(&mut self, bed: Box<dyn Bed>) {
        self.bed = bed;
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.lwps.len()
    }

    /// An LWP of this number, from now on; nothing is bound to it.
    pub(crate) fn grow(&mut self) -> usize {
        self.lwps.push(UNBOUND);
        self.lwps.len() - 1
    }

    /// `cpc_bind_event`. Without an event it only unbinds.
    ///
    /// # Errors
    /// Those of [`Bed::start`]; EINVAL: flags or event make no sense. What was bound is
    /// unbound all the same, unless the flags are wrong.
    pub(crate) fn bind(
        &mut self,
        lwp: usize,
        event: Option<&Event>,
        flags: i32,
    ) -> Result<(), Failure> {
        if flags & !(INHERIT | SIGNAL) != 0 {
            let reason = format_args!(
                "flags {flags:#x}: there are CPC_BIND_LWP_INHERIT and CPC_BIND_EMT_OVF"
            );
            return Err(fail(EINVAL, Subcode::InvalidFlags, reason));
        }
        self.release(lwp);
        let Some(event) = event else {
            return Ok(());
        };
        self.check(event)?;
        self.start(lwp, event, flags)?;
        if flags & INHERIT != 0 {
            let inherited = self.bed.later().and_then(|later| {
                let mut each = later.iter();
                let all = each.try_for_each(|child| self.inherit_from_start(lwp, *child));
                // If one cannot, nobody does.
                all.inspect_err(|_| later.iter().for_each(|child| self.release(*child)))
            });
            if inherited.is_err() {
                self.release(lwp);
            }
            inherited?;
        }
        Ok(())
    }

    fn check(&self, event: &Event) -> Result<(), Failure> {
        let here = processor::number(self.bed.model());
        if event.cpuver != here {
            let reason = format_args!(
                "the event is for processor {}, and this is {here}: cpc_strtoevent makes events",
                event.cpuver
            );
            return Err(fail(EINVAL, Subcode::InvalidEvent, reason));
        }
        if event.used().next().is_none() {
            let reason = format_args!("the event names nothing to count");
            return Err(fail(EINVAL, Subcode::InvalidEvent, reason));
        }
        Ok(())
    }

    fn start(&mut self, lwp: usize, event: &Event, flags: i32) -> Result<(), Failure> {
        self.bed.start(lwp, &counting(event), flags & SIGNAL != 0)?;
        self.lwps[lwp] = Lwp {
            state: State::Counting,
            flags,
            event: *event,
            fresh: false,
        };
        Ok(())
    }

    /// What `parent` has bound is bound to `child`, which has not started yet: from 0 on, or,
    /// with signals, so that its first event is an overflow.
    fn inherit_from_start(&mut self, parent: usize, child: usize) -> Result<(), Failure> {
        let Lwp { flags, event, .. } = self.lwps[parent];
        let fresh = flags & SIGNAL != 0;
        let first = if fresh { FRESH } else { 0 };
        let event = Event {
            pic: [first; MAX_PIC],
            ..event
        };
        self.release(child);
        self.start(child, &event, flags)?;
        self.lwps[child].fresh = fresh;
        Ok(())
    }

    /// What a thread that `parent` starts will inherit, if it does.
    pub(crate) fn legacy(&self, parent: usize) -> Option<(Event, i32)> {
        let parent = self.lwps.get(parent)?;
        let inherits = parent.state != State::Unbound && parent.flags & INHERIT != 0;
        inherits.then_some((parent.event, parent.flags))
    }

    /// The calling thread has started, and inherits. With signals its counters stand still,
    /// all ones: it gets the signal now.
    pub(crate) fn inherit_now(
        &mut self,
        lwp: usize,
        (event, flags): (Event, i32),
    ) -> Option<Signal> {
        let mut event = Event {
            pic: [0; MAX_PIC],
            ..event
        };
        if flags & SIGNAL == 0 {
            if self.start(lwp, &event, flags).is_err() {
                self.lwps[lwp] = Lwp {
                    state: State::Invalid(Subcode::ResourceUnavailable),
                    flags,
                    event,
                    fresh: false,
                };
            }
            return None;
        }
        event.pic = [FRESH; MAX_PIC];
        self.lwps[lwp] = Lwp {
            state: State::Frozen,
            flags,
            event,
            fresh: true,
        };
        Some(Signal { lwp, pc: None })
    }

    /// `cpc_take_sample`.
    ///
    /// # Errors
    /// EINVAL: nothing is bound. EAGAIN: what was bound is invalid.
    pub(crate) fn sample(&mut self, lwp: usize) -> Result<Event, Failure> {
        let Lwp {
            state,
            event,
            fresh,
            ..
        } = &mut self.lwps[lwp];
        match state {
            State::Unbound => Err(fail(
                EINVAL,
                Subcode::BindFailed,
                format_args!("nothing is bound: cpc_bind_event comes first"),
            )),
            State::Invalid(Subcode::BindFailed) => Err(gone()),
            State::Invalid(_) => Err(invalid()),
            // It has no counters yet.
            State::Frozen if *fresh => Ok(*event),
            State::Counting | State::Frozen => {
                let mut now = *event;
                let read = self.bed.read(lwp, &mut now);
                if *state == State::Counting {
                    *event = now;
                }
                if let Err(failure) = read
                    && failure.errno == EAGAIN
                {
                    *state = State::Invalid(failure.subcode);
                    self.bed.stop(lwp);
                }
                read.map(|()| *event)
            }
        }
    }

    /// `cpc_rele`.
    pub(crate) fn release(&mut self, lwp: usize) {
        if self.lwps[lwp].state != State::Unbound {
            self.bed.stop(lwp);
            self.lwps[lwp] = UNBOUND;
        }
    }

    /// `cpc_count_usr_events`, `cpc_count_sys_events`: has the counters count in the rings of
    /// `bit`, or not any more. Counts go on from where they are.
    ///
    /// # Errors
    /// EINVAL: nothing is bound, or signals and the kernel's ring do not go together here.
    /// EAGAIN: what was bound is, or becomes, invalid.
    pub(crate) fn count_in(&mut self, lwp: usize, bit: u64, on: bool) -> Result<(), Failure> {
        let before = self.lwps[lwp].event;
        let mut event = self.sample(lwp)?;
        let flags = self.lwps[lwp].flags;
        if bit == OS && on && flags & SIGNAL != 0 && !self.bed.signals_of_kernel() {
            let reason = format_args!("overflows of system events are not signalled here");
            return Err(fail(EINVAL, Subcode::ConflictingRequests, reason));
        }
        for select in event.pes.iter_mut().filter(|select| **select != 0) {
            *select = if on { *select | bit } else { *select & !bit };
        }
        // The signal of one that has just overflowed is on its way, and freezes them.
        let overflowed = |pic: usize| flags & SIGNAL != 0 && event.pic[pic] < before.pic[pic];
        if self.lwps[lwp].state == State::Frozen || event.used().any(overflowed) {
            self.lwps[lwp].event = event;
            return Ok(());
        }
        let fresh = self.lwps[lwp].fresh;
        self.bed.stop(lwp);
        let restarted = self.start(lwp, &event, flags);
        self.lwps[lwp].fresh = fresh;
        restarted.map_err(|failure| {
            self.lwps[lwp].state = State::Invalid(failure.subcode);
            if failure.errno == ESRCH {
                // The VM has ended just now.
                return gone();
            }
            failure
        })
    }

    /// A descriptor of ours tells of something: the signal that somebody is to get.
    pub(crate) fn overflow(&mut self, descriptor: i32) -> Option<Signal> {
        let (lwp, pc) = self.bed.overflow(descriptor)?;
        let Lwp {
            state,
            flags,
            event,
            fresh,
        } = self.lwps.get_mut(lwp)?;
        if *state != State::Counting || *flags & SIGNAL == 0 {
            return None;
        }
        // Where it fails, the next sample says so.
        if self.bed.read(lwp, event).is_err() {
            return None;
        }
        if std::mem::take(fresh) {
            event.pic = [FRESH; MAX_PIC];
        }
        *state = State::Frozen;
        Some(Signal { lwp, pc })
    }
}

/// What was bound was taken away.
pub(crate) fn invalid() -> Failure {
    let reason = format_args!(
        "the counters were taken by somebody who counts system-wide: cpc_rele, wait, bind again"
    );
    fail(EAGAIN, Subcode::ResourceUnavailable, reason)
}

/// The VM that had what was bound is gone, or that vCPU of it.
pub(crate) fn gone() -> Failure {
    let reason = format_args!(
        "the VM has ended since the bind, or was started again, or does not answer: cpc_rele, \
         wait, bind again"
    );
    fail(EAGAIN, Subcode::BindFailed, reason)
}

#[cfg(test)]
mod tests;
