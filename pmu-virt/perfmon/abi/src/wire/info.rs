//! The documents (JSON) that FORMATS, LIST and MODEL return.
//!
//! A field that a peer does not know is ignored, so that fields can be added.

use serde::{Deserialize, Serialize};

/// A sampling format (FORMATS returns a list of them).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FormatInfo {
    /// Its UUID, as RFC 9562 writes it.
    pub uuid: String,
    pub name: String,
    /// `PFM_FMTFL_*`.
    pub flags: u32,
    /// Bytes of its argument, which follows `pfarg_ctx_t` at a creation.
    pub arg_size: u64,
    /// Messages that may wait in the queue of a context which uses it.
    pub queue_depth: u32,
    /// What it is for, one line.
    pub description: String,
}

impl FormatInfo {
    /// The UUID in its bytes; `None` if the text is none.
    #[must_use]
    pub fn uuid_bytes(&self) -> Option<[u8; 16]> {
        parse_uuid(&self.uuid)
    }
}

/// Writes a UUID as RFC 9562 does: `4d72bec0-0664-4143-82b4-d3fd27243c97`.
#[must_use]
pub fn uuid_text(uuid: [u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// Reads a UUID as RFC 9562 writes it.
fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let mut uuid = [0; 16];
    let groups: Vec<&str> = text.split('-').collect();
    let lengths = groups.iter().map(|group| group.len());
    if !lengths.eq([8, 4, 4, 4, 12])
        || !text
            .bytes()
            .all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
    {
        return None;
    }
    let digits = groups.concat();
    for (index, byte) in uuid.iter_mut().enumerate() {
        *byte = u8::from_str_radix(digits.get(2 * index..2 * index + 2)?, 16).ok()?;
    }
    Some(uuid)
}

/// What there is and who holds what (LIST).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineInfo {
    /// Process id of the VMM, in its own name space.
    pub pid: u32,
    /// The guest: name of its image.
    pub guest: String,
    /// Name of the counter backend.
    pub counters: String,
    /// `guest-first`, `host-first` or `shares`.
    pub policy: String,
    /// The vCPUs.
    pub vcpus: Vec<VcpuInfo>,
    pub cores: Vec<CoreInfo>,
    /// The contexts, in order of their creation.
    pub contexts: Vec<ContextInfo>,
}

/// What a vCPU does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VcpuState {
    /// Runs on a core, or waits there for an interrupt.
    Running,
    /// Waits for a core.
    Waiting,
    /// Off its core: a notification that blocks is outstanding.
    Blocked,
    /// Off its core: a tool has paused it.
    Paused,
    /// Has not been started, or waits for it again after an INIT.
    Offline,
    Ended,
}

/// A vCPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuInfo {
    pub vcpu: u32,
    /// What it does.
    pub state: VcpuState,
    /// The core that it is on.
    pub core: Option<u32>,
    /// The context that is attached to it, the oldest if there are several.
    pub context: Option<u64>,
    /// All contexts that are attached to it, the oldest first. A VMM that has one at
    /// most leaves them out.
    #[serde(default)]
    pub contexts: Vec<u64>,
    /// Whether it is halted: it runs or waits, and has nothing to do. Not there if
    /// nobody knows.
    #[serde(default)]
    pub halted: Option<bool>,
    /// Counters of its PMU that layers have reserved.
    #[serde(default)]
    pub reserved: Vec<ReservedInfo>,
}

/// A counter of a vCPU's PMU that a layer has reserved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReservedInfo {
    /// The counter: `PMC0`, `FIXED1`.
    pub counter: String,
    /// The layer: `firmware`, `hypervisor`, `guest kernel`, `guest user`, `host tool`.
    pub layer: String,
}

/// A core: a thread that runs vCPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoreInfo {
    pub core: u32,
    /// Its thread, in the VMM's name space.
    pub tid: u32,
    /// The vCPU that is on it.
    pub vcpu: Option<u32>,
    /// The context that is attached to it, the oldest if there are several.
    pub context: Option<u64>,
    /// All contexts that are attached to it, as those of a vCPU.
    #[serde(default)]
    pub contexts: Vec<u64>,
    /// Its physical counters that somebody holds.
    pub counters: Vec<HolderInfo>,
    /// How many physical counters nobody holds. Not there if nobody knows.
    #[serde(default)]
    pub free: Option<u32>,
}

/// Who holds a physical counter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HolderInfo {
    /// The counter: `pmc0`, `fixed1`.
    pub counter: String,
    pub holder: Holder,
    /// The value of the register that selects what it counts.
    pub event: Option<u64>,
}

/// Who can hold a physical counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Holder {
    /// Nobody. [`CoreInfo::free`] counts these; they are not listed.
    Free,
    /// The PMU of the guest on this vCPU.
    Guest(u32),
    /// The context of this number.
    Context(u64),
    /// A layer below has reserved it. [`VcpuInfo::reserved`] lists what is reserved.
    Reserved,
}

/// What a context is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// A vCPU.
    Vcpu,
    Core,
}

/// State of a context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ContextState {
    /// Attached to nothing.
    Unloaded,
    /// Attached.
    Loaded,
    /// Attached, and waits for a restart.
    Masked,
    /// Attached, and others have its counters.
    Preempted,
    /// Nobody has its descriptor any more.
    Zombie,
}

/// A context.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextInfo {
    /// Its number; never used twice.
    pub id: u64,
    /// What it is for.
    pub scope: Scope,
    /// The vCPU or core that it is attached to.
    pub target: Option<u32>,
    pub state: ContextState,
    /// Whether monitoring is active.
    pub started: bool,
    /// `PFM_FL_*`.
    pub flags: u32,
    /// Process that created it, as the server's name space sees it.
    pub pid: u32,
    /// User who created it.
    pub uid: u32,
    /// Number of its event sets.
    pub sets: u32,
    /// The set that is active, or was last.
    pub active_set: u16,
    /// Name of its sampling format.
    pub format: Option<String>,
    /// Size of its sampling buffer in bytes.
    pub buffer_size: u64,
    /// Messages that nobody has read yet.
    pub unread: u32,
    /// Messages that were dropped because too many waited.
    pub dropped: u64,
}

/// The PMU as contexts see it (MODEL).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelInfo {
    /// Name of the guest's PMU model.
    pub model: String,
    /// Which table of event names its events are in.
    pub event_family: String,
    /// Name of the counter backend.
    pub counters: String,
    /// Programmable counters.
    pub programmable: u32,
    /// Fixed counters.
    pub fixed: u32,
    /// Which fixed counters these are, one bit for each; a VMM that does not say has the
    /// first ones.
    #[serde(default)]
    pub fixed_map: Option<u8>,
    /// Bits of a hardware counter.
    pub counter_width: u16,
    /// Frequency of the time stamp counter in kHz.
    pub tsc_khz: u64,
    /// Times of samples, and the TSC, are virtual: a clock of the VM's own, which PMD `tsc` tells
    /// at any time, and not the host's TSC. Left out where they are not.
    #[serde(default, skip_serializing_if = "is_false")]
    pub virtual_time: bool,
    /// The lease of a control group in which the VM runs, out of which leases for contexts are
    /// taken. Left out where they are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_within: Option<u64>,
    /// vCPUs of the VM.
    pub vcpus: u32,
    /// Cores that run them.
    pub cores: u32,
    /// The host CPU that each core is kept on; empty if they are kept on none.
    #[serde(default)]
    pub core_cpus: Vec<u32>,
    pub virtual_pmds: Vec<VirtualPmdInfo>,
    /// Events that somebody here counts, as far as their meaning is known. A VMM that does
    /// not say leaves it out.
    #[serde(default)]
    pub countable: Vec<CountableInfo>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes it so")]
fn is_false(is: &bool) -> bool {
    !*is
}

/// An event that can be counted, and how well.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CountableInfo {
    /// What it means: `core cycles`.
    pub event: String,
    /// The event select that asks for it at both rings; none if only a fixed counter has it.
    pub select: Option<u64>,
    /// `exact`, `hardware`, `derived`, `scaled` or `simulated`.
    pub provenance: String,
}

/// A PMD that stands for a quantity of the VMM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VirtualPmdInfo {
    /// Index of the PMD.
    pub pmd: u16,
    pub name: String,
    /// Its unit: `ns`, `bytes`, `count`, or empty.
    pub unit: String,
    /// What it is, one line.
    pub description: String,
}
