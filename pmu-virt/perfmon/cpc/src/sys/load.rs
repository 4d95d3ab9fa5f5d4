//! What is done as the library is loaded, and as the process forks.

use dlmalloc::GlobalDlmalloc;

use super::threads;
use crate::process;

/// Memory of the library's own. Calls are made in signal handlers, which may have interrupted
/// the program's malloc(3), but never this one: no signal comes while it works.
#[global_allocator]
static MEMORY: GlobalDlmalloc = GlobalDlmalloc;

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

extern "C" fn at_load() {
    threads::prepare();
    // SAFETY: nothing has been allocated yet. The functions have the signatures that
    // pthread_atfork asks for, and stay where they are: the library is never unloaded. Its
    // lock is taken before that of its memory.
    unsafe {
        dlmalloc::enable_alloc_after_fork();
        libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child));
    }
}

extern "C" fn before() {
    process::before_fork();
}

extern "C" fn in_parent() {
    process::after_fork(false);
}

extern "C" fn in_child() {
    process::after_fork(true);
}
