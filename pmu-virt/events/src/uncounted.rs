//! What perf's users ask for by name, and no counter of a guest's counts.

/// What else has the figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measured {
    /// The time that the vCPU ran, which the VMM reports as `vm-run-ns`: what a clock of a
    /// task is, with the vCPU for the task.
    RunTime,
    /// The time that passes while somebody counts.
    WallTime,
}

/// Why nobody counts `event`, and what has its figure instead; none if it is not one of perf's
/// names for such.
pub(super) fn find(event: &str) -> Option<(&'static str, Option<Measured>)> {
    const TIME: &str = "a time that the VMM measures, and no event of a counter: umpire stat \
                        has it";
    const KERNEL: &str = "the guest's kernel counts this, and no PMU: use perf in the guest";
    const PERF_METRICS: &str =
        "needs the register PERF_METRICS, which no PMU model here has; slots has an event";
    const LATENCY: &str = "needs the load latency of PEBS, which no tool's context has";
    const TRANSACTIONS: &str = "counts in transactions, which no event select here can ask for";
    const HOST: &str = "perf reads this from the host it runs on: use perf there";
    let why = match event {
        "task-clock" | "cpu-clock" => return Some((TIME, Some(Measured::RunTime))),
        "duration_time" => return Some((TIME, Some(Measured::WallTime))),
        "context-switches" | "cs" | "page-faults" | "faults" | "minor-faults" | "major-faults"
        | "cpu-migrations" | "migrations" | "alignment-faults" | "emulation-faults"
        | "cgroup-switches" | "bpf-output" | "dummy" | "user_time" | "system_time" => KERNEL,
        "mem-loads" | "mem-loads-aux" | "mem-stores" => LATENCY,
        "cycles-t" | "cycles-ct" => TRANSACTIONS,
        "has_pmem" | "num_cores" | "num_cpus" | "num_cpus_online" | "num_dies" | "num_packages"
        | "smt_on" | "system_tsc_freq" | "core_wide" | "target_cpu" => HOST,
        _ if event.starts_with("topdown-") => PERF_METRICS,
        _ if event.starts_with("tx-") || event.starts_with("el-") => TRANSACTIONS,
        _ => return None,
    };
    Some((why, None))
}

/// Systems of tracepoints of a kernel for x86.
const SYSTEMS: &str = "\
    alarmtimer amd_cpu block bpf_test_run bpf_trace bridge btrfs cgroup clk compaction \
    context_tracking cpuhp csd devfreq devlink dma_fence drm error_report exceptions ext4 \
    f2fs fib fib6 filelock filemap ftrace fuse hugetlbfs hwmon hyperv i2c i915 initcall \
    intel_iommu io_uring iocost iomap iommu irq irq_matrix irq_vectors jbd2 kmem kvm kvmmmu \
    libata mce migrate mmap mmap_lock module msr napi neigh net netlink nfs nmi nvme oom \
    page_isolation pagemap power printk probe qdisc random ras raw_syscalls rcu sched scsi \
    signal skb smbus sock swiotlb sync_trace syscalls task tcp thermal timer tlb udp \
    virtio_gpu vmalloc vmscan vsock vsyscall wbt workqueue writeback x86_fpu xdp xen xfs \
    xhci-hcd";

/// Why nobody counts what `text` names, if it is a tracepoint or a breakpoint.
pub(super) fn traced(text: &str) -> Option<&'static str> {
    let (system, event) = text.split_once(':')?;
    if system == "mem" && !event.is_empty() && !event.starts_with(':') {
        return Some("a breakpoint of the kernel that perf runs on: use perf in the guest, or gdb");
    }
    let is_system = SYSTEMS.split(' ').any(|it| it == system)
        || system.starts_with("sdt_")
        || system.starts_with("probe_");
    let is_event = !event.is_empty() && !event.starts_with(':');
    (is_system && is_event)
        .then_some("a tracepoint of the kernel that perf runs on: use perf in the guest")
}

/// Why nobody counts the events of perf's PMU `pmu`; none if it is not one that perf has beside
/// that of the cores.
pub(super) fn foreign_pmu(pmu: &str) -> Option<&'static str> {
    const OUTSIDE: &str = "counts outside of a vCPU: on the host, use perf";
    const IBS: &str = "samples instructions and counts nothing: IBS is the guest's, and has \
                       registers of its own in contexts";
    const TRACE: &str = "traces and counts nothing";
    const KERNEL: &str = "the kernel's that perf runs on: use perf in the guest";
    let starts = |words: &[&str]| words.iter().any(|word| pmu.starts_with(word));
    match pmu {
        "msr" | "power" | "i915" | "amd_df" | "amd_l3" => Some(OUTSIDE),
        "cpu_atom" => Some("counts on cores of a second kind, and all vCPUs are of one"),
        "breakpoint" | "kprobe" | "uprobe" | "tracepoint" => Some(KERNEL),
        _ if starts(&[
            "uncore",
            "cstate_",
            "amd_umc",
            "amd_iommu",
            "hwmon",
            "drm_",
            "dmar",
        ]) =>
        {
            Some(OUTSIDE)
        }
        _ if starts(&["ibs_"]) => Some(IBS),
        _ if starts(&["intel_pt", "intel_bts"]) => Some(TRACE),
        _ => None,
    }
}
