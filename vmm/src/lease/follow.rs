//! What the guest may use follows what its VM's lease holds.

use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::thread::Builder;
use std::time::{Duration, Instant};

use arbiter::PerKind;
use umpire_lease::{Figure, News, What};
use vmm_control::{LeaseLine, WithinLine};

use super::tools::Tools;
use super::{VmLease, wait};
use crate::machine::LeaseLines;

/// Between two tries of what cannot be done now: to get a new lease for one that was taken
/// away, or to let the guest use all of it.
const TRIES: Duration = Duration::from_secs(1);
/// Between two reports of what the VM did, for the arbiter's metrics.
const REPORTS: Duration = Duration::from_secs(5);
/// Of the notice so much is left to the guest's layers, in percent: what is to be free at
/// its end must be so before.
const LEFT_TO_LAYERS: u32 = 75;

impl VmLease {
    /// Lets the guest behind these lines use what the lease holds, until this process ends.
    ///
    /// # Errors
    /// The host has no thread left.
    pub fn follow(self, lines: LeaseLines) -> io::Result<()> {
        let LeaseLines { guest, contexts } = lines;
        let within = contexts.within_line();
        within.tell(self.kept.lease().within);
        let mut tools = Tools::new(contexts, self.plan.clone());
        let mut follower = Follower {
            told: (self.wanted.lets(self.kept.lease().holds), None),
            lease: self,
            line: guest,
            within,
            refused: None,
            asks: None,
            silence: String::new(),
            reports: Instant::now(),
        };
        let body = move || {
            loop {
                follower.turn();
            }
        };
        Builder::new().name("lease".to_owned()).spawn(body)?;
        // The arbiter takes its time for these: the guest's lease is not to wait for them.
        let body = move || {
            loop {
                tools.turn();
            }
        };
        Builder::new().name("tool leases".to_owned()).spawn(body)?;
        Ok(())
    }
}

#[derive(Debug)]
struct Follower {
    lease: VmLease,
    line: LeaseLine,
    within: WithinLine,
    /// What the guest was told last, and until when its layers have time, if they have.
    told: (PerKind, Option<Instant>),
    /// When those vCPUs are told again that refused.
    refused: Option<Instant>,
    /// When the arbiter is asked again.
    asks: Option<Instant>,
    /// Why there is no lease, as it was logged.
    silence: String,
    /// When to report.
    reports: Instant,
}

impl Follower {
    fn turn(&mut self) {
        let kept = &mut self.lease.kept;
        while let Some(news) = kept.hear() {
            let id = kept.lease().id;
            match news {
                News::Event(event) => match event.what {
                    What::Renewed => {}
                    What::Holds | What::Spared | What::Mended | What::Claimed => {
                        log::info!("lease {id} {}", event.message);
                    }
                    _ => log::warn!("lease {id} {}", event.message),
                },
                // The guest counts on: with a journal the arbiter's successor gives it to
                // nobody else.
                News::Away => log::warn!("the arbiter has gone away; lease {id} is held on"),
                News::Back => log::info!("the arbiter is back, and lease {id} is held"),
                News::Lost(why) => log::warn!("lease {id} is lost: {why}"),
                News::NotRenewed(why) => log::warn!("lease {id} cannot be renewed now: {why}"),
            }
        }
        self.obey();
        self.hear_vcpus();
        if self.lease.kept.has_ended() {
            self.within.tell(None);
            if self.ask_again() {
                return;
            }
        }
        if self.reports <= Instant::now() {
            self.report();
        }
        let asks = self.asks.filter(|_| self.lease.kept.has_ended());
        let moments = [
            self.lease.kept.due(),
            self.refused,
            asks,
            Some(self.reports),
        ];
        let connection = self.lease.kept.connection();
        let line = Some(self.line.as_fd());
        wait(connection.into_iter().chain(line), moments);
    }

    /// Lets the guest use what the lease holds, or will hold after a notice.
    fn obey(&mut self) {
        let now = Instant::now();
        let kept = &self.lease.kept;
        let (holds, at) = match kept.leaves() {
            _ if kept.has_ended() => (0, None),
            Some((at, to)) => (to, Some(at)),
            None => (kept.lease().holds, None),
        };
        let lets = self.lease.wanted.lets(holds);
        let (told, until) = self.told;
        // The notice became shorter, or is over before its time.
        let sooner = until.filter(|until| *until > now);
        let sooner = sooner.is_some_and(|until| at.is_none_or(|at| at < until));
        if lets == told && !sooner {
            return;
        }
        let grace = at.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        let grace = (grace * LEFT_TO_LAYERS / 100).as_millis();
        self.line
            .tell(lets, u32::try_from(grace).unwrap_or(u32::MAX));
        self.told = (lets, at);
    }

    /// Vcpus that cannot let their guest use more are told again and again.
    fn hear_vcpus(&mut self) {
        let now = Instant::now();
        if let Some(why) = self.line.hear()
            && self.refused.is_none()
        {
            let why = why.reason;
            log::warn!("the guest cannot use all of its lease now: {why}");
        }
        if !self.line.is_refused() {
            self.refused = None;
        } else if self.refused.is_none_or(|at| at <= now) {
            if self.refused.is_some() {
                self.line.tell_again();
            }
            self.refused = Some(now + TRIES);
        }
    }

    /// Tells the arbiter what the VM did, for its metrics. Vcpus are asked for the next time.
    fn report(&mut self) {
        self.reports = Instant::now() + REPORTS;
        let now = self.line.figures();
        self.line.ask_figures();
        if self.lease.kept.connection().is_none() || now.exits == 0 {
            return;
        }
        let figure = |(name, count): (&str, u64)| Figure {
            name: name.to_owned(),
            count,
        };
        let figures = [
            ("exits", now.exits),
            ("traps", now.traps),
            ("rdpmc_traps", now.rdpmc_traps),
            ("pmis", now.pmis),
        ];
        let figures = figures.map(figure).to_vec();
        if let Err(error) = self.lease.kept.report(figures) {
            log::debug!("the arbiter does not take the VM's figures: {error}");
        }
    }

    /// The lease was taken away. The VM asks anew, and waits for its turn. Returns whether
    /// it has another lease now.
    fn ask_again(&mut self) -> bool {
        let now = Instant::now();
        if self.asks.is_some_and(|asks| now < asks) {
            return false;
        }
        self.asks = Some(now + TRIES);
        let plan = &self.lease.plan;
        let asked = plan.leases.places().and_then(|places| {
            let (wanted, request) = plan.request(&places, true);
            Ok((wanted, plan.leases.acquire(&request)?))
        });
        match asked {
            Ok((wanted, kept)) => {
                self.lease.wanted = wanted;
                self.lease.number.store(kept.lease().id, Ordering::Relaxed);
                self.within.tell(kept.lease().within);
                self.lease.kept = kept;
                self.silence.clear();
                true
            }
            Err(error) => {
                let why = error.to_string();
                if why != self.silence {
                    log::warn!("the guest has no counters, as there is no new lease: {why}");
                    self.silence = why;
                }
                false
            }
        }
    }
}
