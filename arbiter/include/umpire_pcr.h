/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Umpire's counter reservations: constants of the guest ABI, docs/reference/pcr.md.
 * Generated from arbiter/src/abi/table.rs: do not edit.
 */
#ifndef UMPIRE_PCR_H
#define UMPIRE_PCR_H

/* CPUID */
#define UMPIRE_PCR_CPUID_BLOCK 0x40000100U /* first leaf of Umpire's block: EAX highest leaf, EBX, ECX, EDX the signature */
#define UMPIRE_PCR_CPUID_FEATURES 0x40000101U /* second leaf: what there is */
#define UMPIRE_PCR_CPUID_FEATURES_ECX_PCR 0x100U /* ECX of CPUID_FEATURES: counter reservations exist */
#define UMPIRE_PCR_CPUID_LEAF 0x40000102U /* leaf of the reservations: EAX version, EBX first MSR, ECX features, EDX sizes */
#define UMPIRE_PCR_VERSION 3U /* version of this ABI, in EAX of CPUID_LEAF */
#define UMPIRE_PCR_FEATURE_RANDOM 1U /* ECX: the MSR RANDOM exists */
#define UMPIRE_PCR_FEATURE_RDPMC 2U /* ECX: RDPMC takes a cookie */
#define UMPIRE_PCR_FEATURE_MAILBOX 4U /* ECX: the mailbox exists */
#define UMPIRE_PCR_FEATURE_LEGACY_MAP 8U /* ECX: legacy names are mapped once the firmware's phase is over */
#define UMPIRE_PCR_FEATURE_FIRMWARE 16U /* ECX: the machine started in the firmware's phase */
#define UMPIRE_PCR_FEATURE_SMM 32U /* ECX: code in SMM counts as firmware */
#define UMPIRE_PCR_FEATURE_REFUSAL 0x40U /* ECX: the MSR REFUSAL exists */
#define UMPIRE_PCR_FEATURE_GRANTEE 0x80U /* ECX: who was granted a counter sets its access cookie under every scheme */
#define UMPIRE_PCR_FEATURE_EVENT 0x100U /* ECX: a request may name an event */
#define UMPIRE_PCR_FEATURE_SMRAM 0x200U /* ECX: as its phase ends the firmware puts code into SMRAM (PHASE_SMRAM) */
#define UMPIRE_PCR_FEATURE_IBS 0x400U /* ECX: samplers have positions, POSITION_IBS_FETCH and POSITION_IBS_OP */

/* RDPMC */
#define UMPIRE_PCR_RDPMC_COOKIE 0x554d0000U /* ECX: this plus the position reads a counter with a cookie */

/* MSRs, from the first one on; n is a counter's position */
#define UMPIRE_PCR_MSR_BASE 0x554d6000U /* the first MSR of this version; drivers take it from CPUID */
#define UMPIRE_PCR_MSR_COUNT 0x1000U /* indices that belong to the block */
#define UMPIRE_PCR_MSR_MANAGEMENT_KEY 0U /* + n, W, management cookie: reserves, renews, hands over, gives back */
#define UMPIRE_PCR_MSR_ACCESS_KEY 0x40U /* + n, W, management cookie: sets the access cookie */
#define UMPIRE_PCR_MSR_CONTROL 0x80U /* + n, R; W with the management cookie: the control word */
#define UMPIRE_PCR_MSR_DROP_VALUE 0xc0U /* + n, R; W with the management cookie: what a dropped read yields */
#define UMPIRE_PCR_MSR_COUNTER 0x100U /* + n, RW, access cookie: the counter */
#define UMPIRE_PCR_MSR_SELECT 0x140U /* + n, RW, access cookie: its event select, or its four bits of FIXED_CTR_CTRL */
#define UMPIRE_PCR_MSR_OVERFLOW 0x180U /* + n, RW, access cookie: bit 0 tells an overflow, writing 1 clears it */
#define UMPIRE_PCR_MSR_STATUS 0x1c0U /* + n, R: who holds the counter */
#define UMPIRE_PCR_MSR_LEGACY_MAP 0x200U /* + i, R: position that the legacy registers of position i reach; all ones: none */
#define UMPIRE_PCR_MSR_RANDOM 0x240U /* R: 64 random bits */
#define UMPIRE_PCR_MSR_PHASE 0x241U /* R: layer of the reader; W: PHASE_END ends the firmware's phase */
#define UMPIRE_PCR_MSR_NOTICE_VECTOR 0x242U /* RW: interrupt vector for notices, 16 to 255; 0: none */
#define UMPIRE_PCR_MSR_REQUEST 0x243U /* W: asks for counters, gives them back */
#define UMPIRE_PCR_MSR_ANSWER 0x244U /* R: what became of the last request */
#define UMPIRE_PCR_MSR_GRANTED 0x245U /* R: the counters of the last answer, one bit for each position */
#define UMPIRE_PCR_MSR_NOTICE 0x246U /* R: takes the oldest notice; 0: none */
#define UMPIRE_PCR_MSR_REPLY 0x247U /* W: answers a notice that asks, with the counter's cookie */
#define UMPIRE_PCR_MSR_REFUSAL 0x248U /* R: the reason of the layer's last write to the block that raised #GP */
#define UMPIRE_PCR_MSR_IBS 0x280U /* + k, RW, access cookie of its sampler: MSR 0xc0011030 + k, but for IBSCTL */

/* Positions of samplers, where FEATURE_IBS is set */
#define UMPIRE_PCR_POSITION_IBS_FETCH 62U /* instruction fetches */
#define UMPIRE_PCR_POSITION_IBS_OP 63U /* ops */

/* Cookies */
#define UMPIRE_PCR_DEFAULT_COOKIE 0ULL /* what legacy accesses present and an unreserved counter expects */
#define UMPIRE_PCR_COOKIE_MASK 0xffffffffffffULL /* bits of a cookie; all others of RSI must be 0 */

/* Layers, in STATUS, PHASE and notices */
#define UMPIRE_PCR_LAYER_FIRMWARE 0ULL /* code in the firmware's phase, and SMM */
#define UMPIRE_PCR_LAYER_HYPERVISOR 1ULL /* the hypervisor */
#define UMPIRE_PCR_LAYER_KERNEL 2ULL /* CPL 0 after the firmware's phase */
#define UMPIRE_PCR_LAYER_USER 3ULL /* CPL 1 to 3 */

/* The control word */
#define UMPIRE_PCR_CONTROL_MANAGE_FIRMWARE 1ULL /* the management cookie is valid in the firmware's layer */
#define UMPIRE_PCR_CONTROL_MANAGE_HYPERVISOR 2ULL /* in the hypervisor's */
#define UMPIRE_PCR_CONTROL_MANAGE_KERNEL 4ULL /* in the kernel's */
#define UMPIRE_PCR_CONTROL_MANAGE_USER 8ULL /* in the user's */
#define UMPIRE_PCR_CONTROL_ACCESS_FIRMWARE 16ULL /* the access cookie is valid in the firmware's layer */
#define UMPIRE_PCR_CONTROL_ACCESS_HYPERVISOR 32ULL /* in the hypervisor's */
#define UMPIRE_PCR_CONTROL_ACCESS_KERNEL 0x40ULL /* in the kernel's */
#define UMPIRE_PCR_CONTROL_ACCESS_USER 0x80ULL /* in the user's */
#define UMPIRE_PCR_CONTROL_FAULT 0x100ULL /* a wrong cookie raises #GP; else the access is dropped */
#define UMPIRE_PCR_CONTROL_FAULT_RDPMC 0x200ULL /* also for RDPMC at CPL 0 */
#define UMPIRE_PCR_CONTROL_GLOBAL_CTRL 0x10000ULL /* the global control register reaches the counter */
#define UMPIRE_PCR_CONTROL_FREEZE 0x20000ULL /* freezing on a PMI reaches it */
#define UMPIRE_PCR_CONTROL_OVF_CLEAR 0x40000ULL /* global status shows its overflow, global registers clear it */
#define UMPIRE_PCR_CONTROL_FIXED_CTRL 0x80000ULL /* FIXED_CTR_CTRL reaches it */
#define UMPIRE_PCR_CONTROL_PEBS_ENABLE 0x100000ULL /* IA32_PEBS_ENABLE reaches it */
#define UMPIRE_PCR_CONTROL_SHARED 0x1f0000ULL /* all of these: what several counters share reaches it */
#define UMPIRE_PCR_CONTROL_LEND 0x1000000ULL /* the owner agrees to revocation when another layer is short */
#define UMPIRE_PCR_CONTROL_INITIAL 0x1f00ffULL /* value of an unreserved counter */

/* STATUS */
#define UMPIRE_PCR_STATUS_RESERVED 1ULL /* the counter is reserved */
#define UMPIRE_PCR_STATUS_OWNER_SHIFT 1ULL /* shift of the owner's layer */
#define UMPIRE_PCR_STATUS_OWNER_MASK 7ULL /* mask of the owner's layer */
#define UMPIRE_PCR_STATUS_PRIVATE 16ULL /* the access cookie is not DEFAULT_COOKIE */
#define UMPIRE_PCR_STATUS_LEASE 32ULL /* the reservation is a lease */
#define UMPIRE_PCR_STATUS_REVOKING 0x40ULL /* it will be revoked */
#define UMPIRE_PCR_STATUS_REST_SHIFT 32ULL /* shift of the milliseconds until then */

/* Other words */
#define UMPIRE_PCR_PHASE_END 1ULL /* written to PHASE: ends the firmware's phase */
#define UMPIRE_PCR_PHASE_SMRAM 2ULL /* written to PHASE beside PHASE_END: these pages become SMRAM's from its entry on */
#define UMPIRE_PCR_PHASE_PAGES_SHIFT 4ULL /* PHASE_SMRAM: shift of their number */
#define UMPIRE_PCR_PHASE_PAGES_MAX 8ULL /* PHASE_SMRAM: the most pages */
#define UMPIRE_PCR_PHASE_PAGE_SIZE 0x1000ULL /* PHASE_SMRAM: bytes of a page; the bits from there on are the address of the first */
#define UMPIRE_PCR_OVERFLOW_CLEAR 1ULL /* written to OVERFLOW */
#define UMPIRE_PCR_LEGACY_NONE 0xffffffffffffffffULL /* LEGACY_MAP: no counter has this legacy name */

/* REQUEST */
#define UMPIRE_PCR_REQUEST_RESERVE 1ULL /* operation: reserve */
#define UMPIRE_PCR_REQUEST_RELEASE 2ULL /* operation: give back */
#define UMPIRE_PCR_REQUEST_WITHDRAW 3ULL /* operation: withdraw the pending request, with its cookie */
#define UMPIRE_PCR_REQUEST_OP_MASK 15ULL /* mask of the operation */
#define UMPIRE_PCR_REQUEST_ANY 0ULL /* as many programmable counters as told */
#define UMPIRE_PCR_REQUEST_POSITION 16ULL /* the counter at the position told */
#define UMPIRE_PCR_REQUEST_WHICH_SHIFT 8ULL /* shift of number or position */
#define UMPIRE_PCR_REQUEST_LEASE_SHIFT 16ULL /* shift of the lease */
#define UMPIRE_PCR_REQUEST_LEASE_UNIT_MS 10ULL /* unit of the lease in milliseconds */
#define UMPIRE_PCR_REQUEST_SELECT_SHIFT 32ULL /* shift of bits 15:0 of the event select: event and unit mask */
#define UMPIRE_PCR_REQUEST_SELECT_HIGH_SHIFT 48ULL /* shift of its bits 35:32, the event's upper ones (AMD) */
#define UMPIRE_PCR_REQUEST_EDGE 0x10000000000000ULL /* edge, bit 18 of the event select */
#define UMPIRE_PCR_REQUEST_INV 0x20000000000000ULL /* invert, bit 23 of the event select */
#define UMPIRE_PCR_REQUEST_CMASK_SHIFT 54ULL /* shift of the counter mask */
#define UMPIRE_PCR_REQUEST_EVENT 0x8000000000000000ULL /* the request names an event */

/* ANSWER */
#define UMPIRE_PCR_ANSWER_NONE 0ULL /* nothing was asked */
#define UMPIRE_PCR_ANSWER_GRANTED 1ULL /* granted */
#define UMPIRE_PCR_ANSWER_REFUSED 2ULL /* refused, with a reason */
#define UMPIRE_PCR_ANSWER_PENDING 3ULL /* another layer is being asked */
#define UMPIRE_PCR_ANSWER_STATE_MASK 15ULL /* mask of the state */
#define UMPIRE_PCR_ANSWER_REASON_SHIFT 8ULL /* shift of the reason */
#define UMPIRE_PCR_ANSWER_NUMBER_SHIFT 16ULL /* shift of the request's number */

/* NOTICE and REPLY */
#define UMPIRE_PCR_NOTICE_NONE 0ULL /* the queue is empty */
#define UMPIRE_PCR_NOTICE_ASKED 1ULL /* another layer is short: yield this counter? */
#define UMPIRE_PCR_NOTICE_REVOKING 2ULL /* the counter will be revoked */
#define UMPIRE_PCR_NOTICE_REVOKED 3ULL /* the counter has been revoked */
#define UMPIRE_PCR_NOTICE_EXPIRED 4ULL /* its lease has ended */
#define UMPIRE_PCR_NOTICE_GRANTED 5ULL /* the pending request was granted */
#define UMPIRE_PCR_NOTICE_REFUSED 6ULL /* the pending request was refused */
#define UMPIRE_PCR_NOTICE_CANCELLED 7ULL /* what was asked or announced about the counter is off */
#define UMPIRE_PCR_NOTICE_TAKEN 8ULL /* it has no physical counter (reason UNBACKED: none for its select): the count stands still */
#define UMPIRE_PCR_NOTICE_BACK 9ULL /* the host's kernel has left it one again, and it counts on */
#define UMPIRE_PCR_NOTICE_KIND_MASK 15ULL /* mask of the kind */
#define UMPIRE_PCR_NOTICE_LOST 0x80ULL /* notices before this one were lost */
#define UMPIRE_PCR_NOTICE_POSITION_SHIFT 8ULL /* shift of the position */
#define UMPIRE_PCR_NOTICE_LAYER_SHIFT 16ULL /* shift of the layer that wants it */
#define UMPIRE_PCR_NOTICE_REASON_SHIFT 24ULL /* shift of the reason */
#define UMPIRE_PCR_NOTICE_MS_SHIFT 32ULL /* shift of the milliseconds left */
#define UMPIRE_PCR_REPLY_YIELD 1ULL /* gives the counter back */
#define UMPIRE_PCR_REPLY_REFUSE 2ULL /* keeps it */
#define UMPIRE_PCR_REPLY_POSITION_SHIFT 8ULL /* shift of the position */

/* Reasons */
#define UMPIRE_PCR_REASON_NONE 0ULL /* none */
#define UMPIRE_PCR_REASON_NONE_FREE 1ULL /* too few counters are free */
#define UMPIRE_PCR_REASON_MAXIMUM 2ULL /* the layer holds as many as it may */
#define UMPIRE_PCR_REASON_MINIMUM 3ULL /* another layer's minimum would not be left */
#define UMPIRE_PCR_REASON_REFUSED 4ULL /* the holder refused to yield */
#define UMPIRE_PCR_REASON_NO_ANSWER 5ULL /* the holder did not answer in time */
#define UMPIRE_PCR_REASON_NO_COUNTER 6ULL /* the machine has no such counter */
#define UMPIRE_PCR_REASON_HELD 7ULL /* the counter is held by another layer */
#define UMPIRE_PCR_REASON_MALFORMED 8ULL /* the request makes no sense */
#define UMPIRE_PCR_REASON_MASTER 9ULL /* only the master reserves under this scheme */
#define UMPIRE_PCR_REASON_WITHDRAWN 10ULL /* the request was withdrawn */
#define UMPIRE_PCR_REASON_PRIORITY 11ULL /* a layer of higher priority needs it */
#define UMPIRE_PCR_REASON_EXPIRED 12ULL /* the lease has ended */
#define UMPIRE_PCR_REASON_COOKIE 13ULL /* the cookie is wrong */
#define UMPIRE_PCR_REASON_LAYER 14ULL /* no cookie is valid in this layer */
#define UMPIRE_PCR_REASON_UNRESERVED 15ULL /* the counter is not reserved */
#define UMPIRE_PCR_REASON_LENT 16ULL /* the owner had agreed to it */
#define UMPIRE_PCR_REASON_PHASE 17ULL /* the firmware's phase is over */
#define UMPIRE_PCR_REASON_BUSY 18ULL /* an earlier request is pending */
#define UMPIRE_PCR_REASON_UNBACKED 19ULL /* no physical counter can be kept for it */
#define UMPIRE_PCR_REASON_ADMINISTRATOR 20ULL /* the administrator of the host has revoked it, or barred the layer */
#define UMPIRE_PCR_REASON_BUDGET 21ULL /* the host gives the guest fewer counters than before */

#endif /* UMPIRE_PCR_H */
