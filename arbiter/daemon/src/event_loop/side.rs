//! What the one thread serves beside the varlink socket: metrics, events of holders, and
//! the audit.

use std::io;

use super::{ACCEPTS, Arbiterd, now};
use crate::audit::unix_ms;
use crate::broker::{Broker, Turn};
use crate::connections::{MOST_CALLS, is_passing};
use crate::metrics::Open;
use crate::scrape::Scrapers;
use crate::service::{ConnectionId, Output};

impl Arbiterd {
    /// Writes what was decided to the audit.
    pub(super) fn audit(&mut self, output: &mut Output) {
        let Some(trail) = &mut self.trail else {
            return;
        };
        trail.share_among(self.service.config().members.len());
        let kept = trail.append(std::mem::take(&mut output.records), unix_ms());
        self.service.metrics().audited(kept.written, kept.lost);
        if kept.lost > 0 {
            output.unaudited();
        }
    }

    /// Has the audit put on the disk: at the end of the service with a wait for it, else
    /// without.
    pub(super) fn sync_audit(&mut self, ends: bool) {
        let Some(trail) = &mut self.trail else {
            return;
        };
        let synced = if ends { trail.finish() } else { trail.sync() };
        if let Err(error) = synced {
            log::error!(
                "the audit does not get to the disk: {error}; its last records are lost if the \
                 host ends; see to the disk"
            );
            self.service.metrics().audit_not_synced();
        }
    }

    pub(super) fn accept_holders(&mut self) {
        for _ in 0..ACCEPTS {
            let most = self.service.config().connections_per_user;
            let Some(broker) = &mut self.broker else {
                return;
            };
            let id = self.next;
            match broker.accept(id, most) {
                Ok(true) => self.next += 1,
                Ok(false) => {
                    self.service.metrics().connection_refused();
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if is_passing(&error) => continue,
                Err(error) => return self.pause_incoming(&error),
            }
            if broker.watch(id, &self.epoll).is_err() {
                broker.leave(id);
            }
        }
    }

    /// Opens events for who asks: a few, before others have their turn.
    pub(super) fn broker(&mut self, id: u64) {
        for _ in 0..MOST_CALLS {
            let Some(broker) = &mut self.broker else {
                return;
            };
            let Some(user) = broker.user(id) else {
                return;
            };
            if let Err(until) = self.rates.take(user, now().0) {
                // What it sends on stays with the kernel.
                self.paused.insert(ConnectionId(id), until);
                return self.listen(ConnectionId(id), false);
            }
            let turn = broker.turn(id, &self.service, now().0);
            self.rates.charge(user, broker.take_looks(), now().0);
            self.hear();
            match turn {
                Turn::Answered => {}
                Turn::Quiet => return,
                // It has one request at a time.
                Turn::Opens => return self.listen(ConnectionId(id), false),
                Turn::Ended => return self.leave_holder(id),
            }
        }
    }

    /// Hands over the events that the kernel has opened meanwhile.
    pub(super) fn hand_over(&mut self) {
        let Some(broker) = &mut self.broker else {
            return;
        };
        let go_on = broker.opened(&self.service, now().0);
        self.hear();
        for id in go_on {
            // What it has sent since is there, and is reported.
            self.listen(ConnectionId(id), true);
        }
    }

    /// The service hears what has become of events.
    pub(super) fn hear(&mut self) {
        let told = self.broker.as_mut().map(Broker::take_told);
        for told in told.into_iter().flatten() {
            self.service.hear(told);
        }
    }

    pub(super) fn leave_holder(&mut self, id: u64) {
        self.ready.remove(&ConnectionId(id));
        self.paused.remove(&ConnectionId(id));
        if let Some(broker) = &mut self.broker {
            broker.leave(id);
        }
    }

    pub(super) fn accept_scrapers(&mut self) {
        for _ in 0..ACCEPTS {
            let Some(scrapers) = &mut self.scrapers else {
                return;
            };
            let id = self.next;
            match scrapers.accept(id, now().0, &self.epoll) {
                Ok(true) => self.next += 1,
                Ok(false) => {
                    self.service.metrics().connection_refused();
                    continue;
                }
                Err(error) if is_passing(&error) && error.kind() != io::ErrorKind::WouldBlock => {
                    continue;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => return self.pause_incoming(&error),
            }
            self.scrape(id);
        }
    }

    /// Goes on with who asks for the metrics.
    pub(super) fn scrape(&mut self, id: u64) {
        let open = Open {
            varlink: self.connections.len(),
            metrics: self.scrapers.as_ref().map_or(0, Scrapers::len),
            events: self.broker.as_ref().map_or(0, Broker::connections),
            descriptors: self.broker.as_ref().map_or(0, Broker::descriptors),
        };
        let Some(scrapers) = &mut self.scrapers else {
            return;
        };
        let service = &mut self.service;
        scrapers.turn(id, now().0, || service.render(open));
    }
}
