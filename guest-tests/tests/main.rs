//! The integration tests of this crate: one program, because each one more is linked with all that
//! it tests once more. A file or folder beside this one is a module here.

mod arbiterd;
mod bad_input;
mod count;
mod cpc;
mod docs;
mod emu_hostile;
mod emu_linux;
mod events;
mod golden;
mod hostile;
mod hostile_clients;
mod house;
mod kernels;
mod l1;
mod linux;
mod linux_agent;
mod linux_arbiter;
mod linux_budget;
mod linux_debug;
mod linux_ibs;
mod linux_models;
mod linux_pcr;
mod linux_pebs;
mod linux_record;
mod linux_test_vmm;
mod linux_view;
mod msr;
mod pcr_lines;
mod perf_contract;
mod perfmon_tools;
mod slurm;
