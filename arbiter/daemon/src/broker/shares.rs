//! How many events there may be: of each the arbiter has a descriptor, for as long as somebody has
//! it or could use it after its loss, and without descriptors it hears nobody else. Pure.

use std::fmt;

/// Events have one part in so many of the files that the arbiter may have open: connections,
/// threads and control groups need theirs, too.
const SHARE_OF_EVENTS: u64 = 4;
/// Of that a tenant, with all its users, and a user have one part in so many at most: nobody takes
/// the room of all others.
const SHARE_OF_TENANT: u64 = 2;
const SHARE_OF_USER: u64 = 4;
/// Most events that a user has, and most that it has lost and that are still looked at.
const MOST_EVENTS: usize = 1024;
const MOST_LOST: usize = 4096;

/// So many files may be open, for all, a tenant and a user.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shares {
    files: u64,
    of_all: usize,
    of_tenant: usize,
    of_user: usize,
}

/// So many there are: of all users, of one user and of a tenant that asks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Had {
    /// Files of all, of the tenant and of the user.
    pub(super) all: usize,
    pub(super) of_tenant: usize,
    pub(super) of_user: usize,
    /// Events that the user has, or that are being opened for it.
    pub(super) open: usize,
    /// Events that the user has lost.
    pub(super) lost: usize,
    /// Files of the user that are not closed yet.
    pub(super) closing: usize,
}

/// Why there is no room for one more event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoRoom {
    /// The user has so many.
    Open,
    /// The user has lost so many.
    Lost,
    /// Of the files the user has its share.
    User { share: usize, files: u64 },
    /// The tenant has.
    Tenant { share: usize, files: u64 },
    /// All have.
    All { share: usize, files: u64 },
    /// As many of the user's are not closed yet.
    Closing { share: usize },
}

impl Shares {
    /// Where this process may have so many `files` open.
    pub(super) fn of(files: u64) -> Self {
        let of_all = files / SHARE_OF_EVENTS;
        let number = |share| usize::try_from(share).unwrap_or(usize::MAX);
        Shares {
            files,
            of_all: number(of_all),
            of_tenant: number(of_all / SHARE_OF_TENANT),
            of_user: number(of_all / SHARE_OF_USER),
        }
    }

    /// Whether there is room for one more event, which takes `files` while it is opened.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn check(self, had: Had, takes: usize) -> Result<(), NoRoom> {
        let files = self.files;
        let full = |has: usize, share: usize| has.saturating_add(takes) > share;
        if had.open >= MOST_EVENTS {
            Err(NoRoom::Open)
        } else if had.lost >= MOST_LOST {
            Err(NoRoom::Lost)
        } else if full(had.of_user, self.of_user) {
            let share = self.of_user;
            Err(NoRoom::User { share, files })
        } else if full(had.of_tenant, self.of_tenant) {
            let share = self.of_tenant;
            Err(NoRoom::Tenant { share, files })
        } else if full(had.all, self.of_all) {
            let share = self.of_all;
            Err(NoRoom::All { share, files })
        } else if had.closing > self.of_user {
            let share = self.of_user;
            Err(NoRoom::Closing { share })
        } else {
            Ok(())
        }
    }
}

impl fmt::Display for NoRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const ENDS: &str = "give a lease back, and end the processes that asked for events which \
                            were lost; a minute later there is room";
        let (who, share, files) = match *self {
            NoRoom::Open => {
                return write!(
                    f,
                    "this user has {MOST_EVENTS} events; give a lease back first"
                );
            }
            NoRoom::Lost => {
                return write!(
                    f,
                    "{MOST_LOST} events that this user has lost could count still; end the \
                     processes that asked for them, and try again a minute later"
                );
            }
            NoRoom::Closing { share } => {
                return write!(
                    f,
                    "the kernel has not closed yet more than {share} files of this user; try again"
                );
            }
            NoRoom::User { share, files } => ("this user's events", share, files),
            NoRoom::Tenant { share, files } => ("the events of this tenant's users", share, files),
            NoRoom::All { share, files } => ("the events of all users", share, files),
        };
        write!(
            f,
            "{who}, with those that were lost, have the {share} files that they may of the {files} \
             which the arbiter may have open; {ENDS}, or have the operator raise its limit \
             (RLIMIT_NOFILE, LimitNOFILE of its unit)"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_user_and_no_tenant_has_the_room_of_all() {
        let check = |files, had: Had, expected: Result<(), &str>| {
            let said = Shares::of(files)
                .check(had, 2)
                .map_err(|why| why.to_string());
            match (said, expected) {
                (Ok(()), Ok(())) => {}
                (Err(said), Err(part)) => assert!(said.contains(part), "{part}: {said}"),
                (said, _) => panic!("{files} {had:?}: {said:?}"),
            }
        };
        let had = Had::default();
        let user = |of_user| Had { of_user, ..had };
        let tenant = |of_tenant| Had { of_tenant, ..had };
        let all = |all| Had { all, ..had };
        // Of 1,024 files events have 256.
        check(1024, had, Ok(()));
        check(1024, user(62), Ok(()));
        check(
            1024,
            user(63),
            Err("this user's events, with those that were lost, have the 64"),
        );
        check(1024, tenant(126), Ok(()));
        check(
            1024,
            tenant(127),
            Err("have the 128 files that they may of the 1024"),
        );
        check(1024, all(254), Ok(()));
        check(
            1024,
            all(255),
            Err("events of all users, with those that were lost, have the 256"),
        );
        // Where there are many files each user has so many events all the same.
        let (open, lost) = (Had { open: 1024, ..had }, Had { lost: 4096, ..had });
        check(1 << 20, open, Err("this user has 1024 events"));
        check(1 << 20, lost, Err("4096 events that this user has lost"));
        check(u64::MAX, user(1 << 40), Ok(()));
        check(8, had, Err("RLIMIT_NOFILE"));
        // What the kernel takes long to close has its number still.
        let closing = |closing| Had {
            closing,
            ..user(62)
        };
        check(1024, closing(64), Ok(()));
        check(1024, closing(65), Err("not closed yet more than 64 files"));
    }
}
