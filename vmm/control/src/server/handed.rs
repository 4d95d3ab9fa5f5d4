//! Files that went to clients with answers. A client can keep one for ever, so the VMM keeps
//! count, and cuts the oldest ones of whoever has most.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::memory_file::MemoryFile;

/// Most bytes of all of them, but for the last one, and most files. A client reads an answer
/// at once.
const MOST: u64 = 64 << 20;
const MOST_FILES: usize = 16;

/// The files that may still be read.
#[derive(Debug, Default)]
pub(super) struct Handed {
    of_users: BTreeMap<u32, Files>,
    bytes: u64,
    count: usize,
}

#[derive(Debug, Default)]
struct Files {
    files: VecDeque<Arc<MemoryFile>>,
    bytes: u64,
}

impl Handed {
    /// `user` has got this file, which is of no more use to the server.
    pub(super) fn add(&mut self, user: u32, file: &Arc<MemoryFile>) {
        let own = self.of_users.entry(user).or_default();
        // Several who wait may get the same answer.
        if own.files.iter().any(|it| Arc::ptr_eq(it, file)) {
            return;
        }
        own.files.push_back(file.clone());
        own.bytes += file.bytes();
        self.bytes += file.bytes();
        self.count += 1;
        let count = |files: &Files| files.files.len() as u64;
        while self.count > MOST_FILES && self.cut_one(file, count) {}
        while self.bytes > MOST && self.cut_one(file, |files| files.bytes) {}
    }

    /// Cuts the oldest file of who has most, but for `last`.
    fn cut_one(&mut self, last: &Arc<MemoryFile>, most: impl Fn(&Files) -> u64) -> bool {
        let users = self.of_users.iter_mut();
        let Some((&user, files)) = users.max_by_key(|(_, files)| most(files)) else {
            return false;
        };
        if files.files.front().is_none_or(|it| Arc::ptr_eq(it, last)) {
            return false;
        }
        let Some(oldest) = files.files.pop_front() else {
            return false;
        };
        files.bytes -= oldest.bytes();
        self.bytes -= oldest.bytes();
        self.count -= 1;
        if files.files.is_empty() {
            self.of_users.remove(&user);
        }
        // Another user who has it, too, may still read it, and loses it in its own turn.
        let mut others = self.of_users.values().flat_map(|files| &files.files);
        if !others.any(|file| Arc::ptr_eq(file, &oldest))
            && let Err(error) = oldest.cut()
        {
            log::warn!("the memory of an answer does not come back: {error}");
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(bytes: u64) -> Arc<MemoryFile> {
        Arc::new(MemoryFile::new("test", bytes).unwrap())
    }

    #[test]
    fn whoever_has_most_loses_the_oldest() {
        let mut handed = Handed::default();
        let others = file(MOST / 4);
        handed.add(7, &others);
        let files: Vec<_> = (0..8).map(|_| file(MOST / 8)).collect();
        for file in &files {
            handed.add(8, file);
            // Two clients have waited for it.
            handed.add(8, file);
        }
        let left = |file: &Arc<MemoryFile>| file.left() > 0;
        assert!(left(&others), "it is not the other one's fault");
        let kept: Vec<bool> = files.iter().map(left).collect();
        assert_eq!(kept, [false, false, true, true, true, true, true, true]);
        assert_eq!(handed.bytes, MOST);
    }

    #[test]
    fn nobody_loses_a_file_by_anothers_requests() {
        let mut handed = Handed::default();
        let shared = file(1 << 20);
        handed.add(7, &shared);
        handed.add(8, &shared);
        for _ in 0..2 * MOST_FILES {
            handed.add(8, &file(4096));
        }
        assert!(shared.left() > 0);
        for _ in 0..2 * MOST_FILES {
            handed.add(7, &file(4096));
        }
        assert_eq!(shared.left(), 0, "its last user has asked for more");
    }

    #[test]
    fn whoever_has_most_files_loses_the_oldest() {
        let mut handed = Handed::default();
        let others = file(1 << 20);
        handed.add(7, &others);
        let files: Vec<_> = (0..=MOST_FILES).map(|_| file(4096)).collect();
        files.iter().for_each(|file| handed.add(8, file));
        let left = |file: &&Arc<MemoryFile>| file.left() > 0;
        assert!(left(&&others));
        assert_eq!(files.iter().filter(left).count(), MOST_FILES - 1);
        assert!(!left(&&files[0]) && left(&&files[MOST_FILES]));
    }

    #[test]
    fn the_last_one_stays_however_large() {
        let mut handed = Handed::default();
        let files = [file(MOST / 2), file(MOST + 4096), file(MOST + 4096)];
        let left = |file: &Arc<MemoryFile>| file.left() > 0;
        handed.add(1, &files[0]);
        handed.add(2, &files[1]);
        assert!(left(&files[1]));
        handed.add(2, &files[2]);
        assert!(!left(&files[1]) && left(&files[2]));
        assert_eq!(handed.bytes, files[2].bytes() + files[0].bytes());
    }
}
