use super::*;
use rustix::fs::ftruncate;
use std::os::fd::{AsRawFd, OwnedFd};

fn made(size: usize, pool: &Pool, most: u64) -> Result<SharedBuffer, Refusal> {
    SharedBuffer::new(size, (pool, most), None)
}

#[test]
fn the_tool_reads_what_is_written() {
    let pool = Pool::default();
    let mut buffer = made(5000, &pool, 8192).unwrap();
    assert_eq!((buffer.bytes().len(), pool.used()), (5000, 8192));
    buffer.bytes()[4999] = 9;
    let reader = buffer.shared().unwrap().0.reader().unwrap();
    let mut read = [0; 1];
    assert_eq!(rustix::io::pread(&reader, &mut read, 4999), Ok(1));
    assert_eq!(read, [9]);
    assert!(Mapping::new(&reader, 4096).is_err(), "it cannot be written");
}

#[test]
fn all_buffers_share_one_limit() {
    let pool = Pool::default();
    let refused = |size| made(size, &pool, 8192).map(drop).unwrap_err();
    let first = made(1, &pool, 8192).unwrap();
    assert_eq!(refused(4097).errno, Errno::ENOMEM);
    assert_eq!(refused(usize::MAX).errno, Errno::EINVAL);
    assert_eq!(refused(0).errno, Errno::EINVAL);
    drop(first);
    assert_eq!(pool.used(), 0);
    made(8192, &pool, 8192).unwrap();
}

/// Whoever keeps a descriptor keeps no memory: what counts for nobody is nobody's.
#[test]
fn what_goes_is_cut() {
    let pool = Pool::default();
    let buffer = made(3 * PAGE, &pool, 8 * PAGE as u64).unwrap();
    let (file, _) = buffer.shared().unwrap();
    let reader = file.reader().unwrap();
    drop(buffer);
    assert_eq!((file.left(), pool.used()), (0, 0));
    assert_eq!(rustix::io::pread(&reader, &mut [0; 1], 0), Ok(0));
}

#[test]
fn the_last_samples_of_a_vm_that_ends_stay() {
    let pool = Pool::default();
    let mut buffer = made(PAGE, &pool, 8 * PAGE as u64).unwrap();
    buffer.bytes()[7] = 7;
    let reader = buffer.shared().unwrap().0.reader().unwrap();
    pool.end();
    drop(buffer);
    let mut read = [0; 1];
    assert_eq!(rustix::io::pread(&reader, &mut read, 7), Ok(1));
    assert_eq!(read, [7]);
}

/// Root, and who runs the VMM, can open the file anew and cut it: their samples are lost, and
/// the VMM goes on.
#[test]
fn whoever_cuts_a_buffer_does_not_end_the_vmm() {
    let pool = Pool::default();
    let mut buffer = made(4 * PAGE, &pool, 8 * PAGE as u64).unwrap();
    let mut other = made(PAGE, &pool, 8 * PAGE as u64).unwrap();
    buffer.bytes().fill(1);
    other.bytes().fill(2);
    let reader = buffer.shared().unwrap().0.reader().unwrap();
    let again: OwnedFd = {
        let writable = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        let _ = rustix::fs::ioctl_setflags(&reader, rustix::fs::IFlags::empty());
        rustix::fs::fchmod(&reader, writable).unwrap();
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        let open = std::fs::OpenOptions::new().write(true).open(path);
        open.unwrap().into()
    };
    ftruncate(&again, PAGE as u64).unwrap();
    let write = std::thread::spawn(move || {
        buffer.bytes()[3 * PAGE..].fill(3);
        ftruncate(&again, 0).unwrap();
        buffer.bytes().fill(4);
        assert!(buffer.bytes().iter().all(|byte| *byte == 4));
    });
    write.join().unwrap();
    assert!(
        other.bytes().iter().all(|byte| *byte == 2),
        "others are whole"
    );
    other.bytes().fill(5);
}
