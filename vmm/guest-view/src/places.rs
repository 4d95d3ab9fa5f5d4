//! Where a kernel switches, begins and replaces tasks, for who waits for it there.

use serde::{Deserialize, Serialize};

use crate::btf::BtfError;
use crate::layout::Types;
use crate::symbols::SymbolTable;

/// Functions of a kernel by their addresses, and members of its structures by the bytes before
/// them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskPlaces {
    /// `__switch_to(prev, next)`: from one `struct task_struct` to another.
    pub switch: u64,
    /// `wake_up_new_task(task)`: the running task has made another one.
    pub begin: u64,
    /// `setup_new_exec(bprm)`: the running task has become another program, as its
    /// `struct linux_binprm` says; it has new memory already, and a new name.
    pub exec: u64,
    /// `do_exit`: the running task ends, for whatever reason.
    pub exit: u64,
    /// `task_struct.pid`: 32 bits.
    pub pid: u64,
    /// `task_struct.tgid`: 32 bits.
    pub tgid: u64,
    /// `task_struct.comm`: 16 bytes.
    pub comm: u64,
    /// `task_struct.mm`.
    pub mm: u64,
    /// `linux_binprm.filename`: where the path is, as it was given.
    pub filename: u64,
}

impl TaskPlaces {
    pub(crate) fn of(types: Types<'_>, symbols: &SymbolTable) -> Result<Self, BtfError> {
        const TASK: &str = "task_struct";
        let function = |name: &str| {
            let found = symbols.address(name);
            found.ok_or_else(|| BtfError::Missing(name.to_owned()))
        };
        Ok(Self {
            switch: function("__switch_to")?,
            begin: function("wake_up_new_task")?,
            exec: function("setup_new_exec")?,
            exit: function("do_exit")?,
            pid: types.u32(TASK, "pid")?,
            tgid: types.u32(TASK, "tgid")?,
            comm: types.at(TASK, "comm", 16)?,
            mm: types.u64(TASK, "mm")?,
            filename: types.u64("linux_binprm", "filename")?,
        })
    }
}
