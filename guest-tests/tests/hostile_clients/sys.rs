//! A kernel of before Linux 6.16, for what this thread starts: it knows no SO_PASSRIGHTS, so
//! descriptors come.
#![allow(unsafe_code)]

use std::io;

const SO_PASSRIGHTS: u32 = 83;

/// Has the kernel refuse the option, as it does one that it does not know, to this thread and to
/// programs that it starts.
pub(crate) fn forget_passrights() -> io::Result<()> {
    let load = |offset| libc::sock_filter {
        code: 0x20, // BPF_LD | BPF_W | BPF_ABS
        jt: 0,
        jf: 0,
        k: offset,
    };
    let is = |k, jt, jf| libc::sock_filter {
        code: 0x15, // BPF_JMP | BPF_JEQ | BPF_K
        jt,
        jf,
        k,
    };
    let answer = |k| libc::sock_filter {
        code: 0x06, // BPF_RET | BPF_K
        jt: 0,
        jf: 0,
        k,
    };
    let number = |number: libc::c_long| u32::try_from(number).expect("a system call");
    let unknown = u32::try_from(libc::ENOPROTOOPT).expect("an error");
    let mut filter = [
        // seccomp_data: the number of the call, and behind it the third argument.
        load(0),
        is(number(libc::SYS_setsockopt), 1, 0),
        is(number(libc::SYS_getsockopt), 0, 3),
        load(32),
        is(SO_PASSRIGHTS, 0, 1),
        answer(libc::SECCOMP_RET_ERRNO | unknown),
        answer(libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: u16::try_from(filter.len()).expect("a short filter"),
        filter: filter.as_mut_ptr(),
    };
    let filter = libc::c_ulong::from(libc::SECCOMP_MODE_FILTER);
    // SAFETY: the kernel copies the program, which lives until the call is over.
    let done = unsafe { libc::prctl(libc::PR_SET_SECCOMP, filter, &raw const program) };
    if done == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
