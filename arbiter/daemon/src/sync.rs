//! Syncs of files, on a thread of their own. A sync takes as long as the disk wants, and
//! the disk then interrupts the CPU that serves it: nobody who asks for a counter waits for
//! that, and it is done about once a second however much is written.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::Duration;

/// Between two syncs of a file.
const PACE: Duration = Duration::from_secs(1);

/// Has files put on the disk, one at a time.
#[derive(Debug)]
pub(crate) struct Syncer {
    files: SyncSender<Arc<File>>,
    failures: Receiver<io::Error>,
}

impl Syncer {
    /// # Errors
    /// There is no thread for it.
    pub(crate) fn new() -> io::Result<Self> {
        Syncer::with(PACE, File::sync_data)
    }

    /// The same with a pace and a sync of the caller's choice.
    fn with(
        pace: Duration,
        sync: impl Fn(&File) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        // A file is taken when the thread waits for one: none queue up at a slow disk.
        let (files, to_sync) = sync_channel::<Arc<File>>(0);
        let (failed, failures) = sync_channel(1);
        thread::Builder::new()
            .name("sync".to_owned())
            .spawn(move || {
                for file in to_sync {
                    if let Err(error) = sync(&file) {
                        // Of several that nobody has asked for, one will do.
                        let _ = failed.try_send(error);
                    }
                    thread::sleep(pace);
                }
            })?;
        Ok(Syncer { files, failures })
    }

    /// Has the disk take what was written to `file` so far. Returns at once: `false` if that
    /// is to be tried again, since another sync goes on, or was just done.
    ///
    /// # Errors
    /// Its thread has ended.
    pub(crate) fn sync(&self, file: &Arc<File>) -> io::Result<bool> {
        match self.files.try_send(file.clone()) {
            Ok(()) => Ok(true),
            Err(TrySendError::Full(_)) => Ok(false),
            Err(TrySendError::Disconnected(_)) => Err(io::Error::other("its thread has ended")),
        }
    }

    /// Why an earlier sync failed, once.
    pub(crate) fn failure(&self) -> Option<io::Error> {
        self.failures.try_recv().ok()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};
    use std::time::Instant;

    use super::*;

    /// One whose syncs all fail.
    pub(crate) fn failing() -> Syncer {
        let broken = |_: &File| Err(io::Error::other("the disk is broken"));
        Syncer::with(Duration::ZERO, broken).expect("a thread")
    }

    /// Asks until `what` says so.
    pub(crate) fn until<T>(mut what: impl FnMut() -> Option<T>) -> T {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            if let Some(there) = what() {
                return there;
            }
            assert!(Instant::now() < until, "it never comes");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_slow_disk_holds_nobody_up() {
        let disk = Arc::new(Mutex::new(()));
        let synced = Arc::new(AtomicUsize::new(0));
        let (slow, count) = (disk.clone(), synced.clone());
        let syncer = Syncer::with(Duration::ZERO, move |_| {
            drop(slow.lock().expect("not poisoned"));
            count.fetch_add(1, Ordering::Relaxed);
            Ok(())
        });
        let syncer = syncer.expect("a thread");
        let file = Arc::new(tempfile::tempfile().expect("a file"));
        let busy = disk.lock().expect("not poisoned");
        until(|| syncer.sync(&file).expect("taken").then_some(()));
        // The disk does not answer: nobody waits for it, and nothing queues up.
        for _ in 0..100 {
            assert!(!syncer.sync(&file).expect("not taken"));
        }
        assert_eq!(synced.load(Ordering::Relaxed), 0);
        drop(busy);
        until(|| syncer.sync(&file).expect("taken").then_some(()));
        until(|| (synced.load(Ordering::Relaxed) == 2).then_some(()));
        assert!(syncer.failure().is_none());
    }

    #[test]
    fn a_sync_that_fails_is_told_once() {
        let syncer = failing();
        let file = Arc::new(tempfile::tempfile().expect("a file"));
        until(|| syncer.sync(&file).expect("taken").then_some(()));
        let why = until(|| syncer.failure());
        assert_eq!(why.to_string(), "the disk is broken");
        assert!(syncer.failure().is_none());
    }
}
