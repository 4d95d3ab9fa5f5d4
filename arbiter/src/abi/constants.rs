//! Constants of the reservation ABI. Generated from `table.rs`: do not edit.
//!
//! This file needs nothing but `core` and may be taken along by guest software.

// CPUID.

/// First leaf of Umpire's block: EAX highest leaf, EBX, ECX, EDX the signature.
pub const CPUID_BLOCK: u32 = 0x4000_0100;
/// Second leaf: what there is.
pub const CPUID_FEATURES: u32 = 0x4000_0101;
/// ECX of CPUID_FEATURES: counter reservations exist.
pub const CPUID_FEATURES_ECX_PCR: u32 = 0x100;
/// Leaf of the reservations: EAX version, EBX first MSR, ECX features, EDX sizes.
pub const CPUID_LEAF: u32 = 0x4000_0102;
/// Version of this ABI, in EAX of CPUID_LEAF.
pub const VERSION: u32 = 3;
/// ECX: the MSR RANDOM exists.
pub const FEATURE_RANDOM: u32 = 1;
/// ECX: RDPMC takes a cookie.
pub const FEATURE_RDPMC: u32 = 2;
/// ECX: the mailbox exists.
pub const FEATURE_MAILBOX: u32 = 4;
/// ECX: legacy names are mapped once the firmware's phase is over.
pub const FEATURE_LEGACY_MAP: u32 = 8;
/// ECX: the machine started in the firmware's phase.
pub const FEATURE_FIRMWARE: u32 = 16;
/// ECX: code in SMM counts as firmware.
pub const FEATURE_SMM: u32 = 32;
/// ECX: the MSR REFUSAL exists.
pub const FEATURE_REFUSAL: u32 = 0x40;
/// ECX: who was granted a counter sets its access cookie under every scheme.
pub const FEATURE_GRANTEE: u32 = 0x80;
/// ECX: a request may name an event.
pub const FEATURE_EVENT: u32 = 0x100;
/// ECX: as its phase ends the firmware puts code into SMRAM (PHASE_SMRAM).
pub const FEATURE_SMRAM: u32 = 0x200;
/// ECX: samplers have positions, POSITION_IBS_FETCH and POSITION_IBS_OP.
pub const FEATURE_IBS: u32 = 0x400;

// RDPMC.

/// ECX: this plus the position reads a counter with a cookie.
pub const RDPMC_COOKIE: u32 = 0x554d_0000;

// MSRs, from the first one on; n is a counter's position.

/// The first MSR of this version; drivers take it from CPUID.
pub const MSR_BASE: u32 = 0x554d_6000;
/// Indices that belong to the block.
pub const MSR_COUNT: u32 = 0x1000;
/// + n, W, management cookie: reserves, renews, hands over, gives back.
pub const MSR_MANAGEMENT_KEY: u32 = 0;
/// + n, W, management cookie: sets the access cookie.
pub const MSR_ACCESS_KEY: u32 = 0x40;
/// + n, R; W with the management cookie: the control word.
pub const MSR_CONTROL: u32 = 0x80;
/// + n, R; W with the management cookie: what a dropped read yields.
pub const MSR_DROP_VALUE: u32 = 0xc0;
/// + n, RW, access cookie: the counter.
pub const MSR_COUNTER: u32 = 0x100;
/// + n, RW, access cookie: its event select, or its four bits of FIXED_CTR_CTRL.
pub const MSR_SELECT: u32 = 0x140;
/// + n, RW, access cookie: bit 0 tells an overflow, writing 1 clears it.
pub const MSR_OVERFLOW: u32 = 0x180;
/// + n, R: who holds the counter.
pub const MSR_STATUS: u32 = 0x1c0;
/// + i, R: position that the legacy registers of position i reach; all ones: none.
pub const MSR_LEGACY_MAP: u32 = 0x200;
/// R: 64 random bits.
pub const MSR_RANDOM: u32 = 0x240;
/// R: layer of the reader; W: PHASE_END ends the firmware's phase.
pub const MSR_PHASE: u32 = 0x241;
/// RW: interrupt vector for notices, 16 to 255; 0: none.
pub const MSR_NOTICE_VECTOR: u32 = 0x242;
/// W: asks for counters, gives them back.
pub const MSR_REQUEST: u32 = 0x243;
/// R: what became of the last request.
pub const MSR_ANSWER: u32 = 0x244;
/// R: the counters of the last answer, one bit for each position.
pub const MSR_GRANTED: u32 = 0x245;
/// R: takes the oldest notice; 0: none.
pub const MSR_NOTICE: u32 = 0x246;
/// W: answers a notice that asks, with the counter's cookie.
pub const MSR_REPLY: u32 = 0x247;
/// R: the reason of the layer's last write to the block that raised #GP.
pub const MSR_REFUSAL: u32 = 0x248;
/// + k, RW, access cookie of its sampler: MSR 0xc0011030 + k, but for IBSCTL.
pub const MSR_IBS: u32 = 0x280;

// Positions of samplers, where FEATURE_IBS is set.

/// Instruction fetches.
pub const POSITION_IBS_FETCH: u32 = 62;
/// Ops.
pub const POSITION_IBS_OP: u32 = 63;

// Cookies.

/// What legacy accesses present and an unreserved counter expects.
pub const DEFAULT_COOKIE: u64 = 0;
/// Bits of a cookie; all others of RSI must be 0.
pub const COOKIE_MASK: u64 = 0xffff_ffff_ffff;

// Layers, in STATUS, PHASE and notices.

/// Code in the firmware's phase, and SMM.
pub const LAYER_FIRMWARE: u64 = 0;
/// The hypervisor.
pub const LAYER_HYPERVISOR: u64 = 1;
/// CPL 0 after the firmware's phase.
pub const LAYER_KERNEL: u64 = 2;
/// CPL 1 to 3.
pub const LAYER_USER: u64 = 3;

// The control word.

/// The management cookie is valid in the firmware's layer.
pub const CONTROL_MANAGE_FIRMWARE: u64 = 1;
/// In the hypervisor's.
pub const CONTROL_MANAGE_HYPERVISOR: u64 = 2;
/// In the kernel's.
pub const CONTROL_MANAGE_KERNEL: u64 = 4;
/// In the user's.
pub const CONTROL_MANAGE_USER: u64 = 8;
/// The access cookie is valid in the firmware's layer.
pub const CONTROL_ACCESS_FIRMWARE: u64 = 16;
/// In the hypervisor's.
pub const CONTROL_ACCESS_HYPERVISOR: u64 = 32;
/// In the kernel's.
pub const CONTROL_ACCESS_KERNEL: u64 = 0x40;
/// In the user's.
pub const CONTROL_ACCESS_USER: u64 = 0x80;
/// A wrong cookie raises #GP; else the access is dropped.
pub const CONTROL_FAULT: u64 = 0x100;
/// Also for RDPMC at CPL 0.
pub const CONTROL_FAULT_RDPMC: u64 = 0x200;
/// The global control register reaches the counter.
pub const CONTROL_GLOBAL_CTRL: u64 = 0x1_0000;
/// Freezing on a PMI reaches it.
pub const CONTROL_FREEZE: u64 = 0x2_0000;
/// Global status shows its overflow, global registers clear it.
pub const CONTROL_OVF_CLEAR: u64 = 0x4_0000;
/// FIXED_CTR_CTRL reaches it.
pub const CONTROL_FIXED_CTRL: u64 = 0x8_0000;
/// IA32_PEBS_ENABLE reaches it.
pub const CONTROL_PEBS_ENABLE: u64 = 0x10_0000;
/// All of these: what several counters share reaches it.
pub const CONTROL_SHARED: u64 = 0x1f_0000;
/// The owner agrees to revocation when another layer is short.
pub const CONTROL_LEND: u64 = 0x100_0000;
/// Value of an unreserved counter.
pub const CONTROL_INITIAL: u64 = 0x1f_00ff;

// STATUS.

/// The counter is reserved.
pub const STATUS_RESERVED: u64 = 1;
/// Shift of the owner's layer.
pub const STATUS_OWNER_SHIFT: u64 = 1;
/// Mask of the owner's layer.
pub const STATUS_OWNER_MASK: u64 = 7;
/// The access cookie is not DEFAULT_COOKIE.
pub const STATUS_PRIVATE: u64 = 16;
/// The reservation is a lease.
pub const STATUS_LEASE: u64 = 32;
/// It will be revoked.
pub const STATUS_REVOKING: u64 = 0x40;
/// Shift of the milliseconds until then.
pub const STATUS_REST_SHIFT: u64 = 32;

// Other words.

/// Written to PHASE: ends the firmware's phase.
pub const PHASE_END: u64 = 1;
/// Written to PHASE beside PHASE_END: these pages become SMRAM's from its entry on.
pub const PHASE_SMRAM: u64 = 2;
/// PHASE_SMRAM: shift of their number.
pub const PHASE_PAGES_SHIFT: u64 = 4;
/// PHASE_SMRAM: the most pages.
pub const PHASE_PAGES_MAX: u64 = 8;
/// PHASE_SMRAM: bytes of a page; the bits from there on are the address of the first.
pub const PHASE_PAGE_SIZE: u64 = 0x1000;
/// Written to OVERFLOW.
pub const OVERFLOW_CLEAR: u64 = 1;
/// LEGACY_MAP: no counter has this legacy name.
pub const LEGACY_NONE: u64 = 0xffff_ffff_ffff_ffff;

// REQUEST.

/// Operation: reserve.
pub const REQUEST_RESERVE: u64 = 1;
/// Operation: give back.
pub const REQUEST_RELEASE: u64 = 2;
/// Operation: withdraw the pending request, with its cookie.
pub const REQUEST_WITHDRAW: u64 = 3;
/// Mask of the operation.
pub const REQUEST_OP_MASK: u64 = 15;
/// As many programmable counters as told.
pub const REQUEST_ANY: u64 = 0;
/// The counter at the position told.
pub const REQUEST_POSITION: u64 = 16;
/// Shift of number or position.
pub const REQUEST_WHICH_SHIFT: u64 = 8;
/// Shift of the lease.
pub const REQUEST_LEASE_SHIFT: u64 = 16;
/// Unit of the lease in milliseconds.
pub const REQUEST_LEASE_UNIT_MS: u64 = 10;
/// Shift of bits 15:0 of the event select: event and unit mask.
pub const REQUEST_SELECT_SHIFT: u64 = 32;
/// Shift of its bits 35:32, the event's upper ones (AMD).
pub const REQUEST_SELECT_HIGH_SHIFT: u64 = 48;
/// Edge, bit 18 of the event select.
pub const REQUEST_EDGE: u64 = 0x10_0000_0000_0000;
/// Invert, bit 23 of the event select.
pub const REQUEST_INV: u64 = 0x20_0000_0000_0000;
/// Shift of the counter mask.
pub const REQUEST_CMASK_SHIFT: u64 = 54;
/// The request names an event.
pub const REQUEST_EVENT: u64 = 0x8000_0000_0000_0000;

// ANSWER.

/// Nothing was asked.
pub const ANSWER_NONE: u64 = 0;
/// Granted.
pub const ANSWER_GRANTED: u64 = 1;
/// Refused, with a reason.
pub const ANSWER_REFUSED: u64 = 2;
/// Another layer is being asked.
pub const ANSWER_PENDING: u64 = 3;
/// Mask of the state.
pub const ANSWER_STATE_MASK: u64 = 15;
/// Shift of the reason.
pub const ANSWER_REASON_SHIFT: u64 = 8;
/// Shift of the request's number.
pub const ANSWER_NUMBER_SHIFT: u64 = 16;

// NOTICE and REPLY.

/// The queue is empty.
pub const NOTICE_NONE: u64 = 0;
/// Another layer is short: yield this counter?.
pub const NOTICE_ASKED: u64 = 1;
/// The counter will be revoked.
pub const NOTICE_REVOKING: u64 = 2;
/// The counter has been revoked.
pub const NOTICE_REVOKED: u64 = 3;
/// Its lease has ended.
pub const NOTICE_EXPIRED: u64 = 4;
/// The pending request was granted.
pub const NOTICE_GRANTED: u64 = 5;
/// The pending request was refused.
pub const NOTICE_REFUSED: u64 = 6;
/// What was asked or announced about the counter is off.
pub const NOTICE_CANCELLED: u64 = 7;
/// It has no physical counter (reason UNBACKED: none for its select): the count stands still.
pub const NOTICE_TAKEN: u64 = 8;
/// The host's kernel has left it one again, and it counts on.
pub const NOTICE_BACK: u64 = 9;
/// Mask of the kind.
pub const NOTICE_KIND_MASK: u64 = 15;
/// Notices before this one were lost.
pub const NOTICE_LOST: u64 = 0x80;
/// Shift of the position.
pub const NOTICE_POSITION_SHIFT: u64 = 8;
/// Shift of the layer that wants it.
pub const NOTICE_LAYER_SHIFT: u64 = 16;
/// Shift of the reason.
pub const NOTICE_REASON_SHIFT: u64 = 24;
/// Shift of the milliseconds left.
pub const NOTICE_MS_SHIFT: u64 = 32;
/// Gives the counter back.
pub const REPLY_YIELD: u64 = 1;
/// Keeps it.
pub const REPLY_REFUSE: u64 = 2;
/// Shift of the position.
pub const REPLY_POSITION_SHIFT: u64 = 8;

// Reasons.

/// None.
pub const REASON_NONE: u64 = 0;
/// Too few counters are free.
pub const REASON_NONE_FREE: u64 = 1;
/// The layer holds as many as it may.
pub const REASON_MAXIMUM: u64 = 2;
/// Another layer's minimum would not be left.
pub const REASON_MINIMUM: u64 = 3;
/// The holder refused to yield.
pub const REASON_REFUSED: u64 = 4;
/// The holder did not answer in time.
pub const REASON_NO_ANSWER: u64 = 5;
/// The machine has no such counter.
pub const REASON_NO_COUNTER: u64 = 6;
/// The counter is held by another layer.
pub const REASON_HELD: u64 = 7;
/// The request makes no sense.
pub const REASON_MALFORMED: u64 = 8;
/// Only the master reserves under this scheme.
pub const REASON_MASTER: u64 = 9;
/// The request was withdrawn.
pub const REASON_WITHDRAWN: u64 = 10;
/// A layer of higher priority needs it.
pub const REASON_PRIORITY: u64 = 11;
/// The lease has ended.
pub const REASON_EXPIRED: u64 = 12;
/// The cookie is wrong.
pub const REASON_COOKIE: u64 = 13;
/// No cookie is valid in this layer.
pub const REASON_LAYER: u64 = 14;
/// The counter is not reserved.
pub const REASON_UNRESERVED: u64 = 15;
/// The owner had agreed to it.
pub const REASON_LENT: u64 = 16;
/// The firmware's phase is over.
pub const REASON_PHASE: u64 = 17;
/// An earlier request is pending.
pub const REASON_BUSY: u64 = 18;
/// No physical counter can be kept for it.
pub const REASON_UNBACKED: u64 = 19;
/// The administrator of the host has revoked it, or barred the layer.
pub const REASON_ADMINISTRATOR: u64 = 20;
/// The host gives the guest fewer counters than before.
pub const REASON_BUDGET: u64 = 21;
