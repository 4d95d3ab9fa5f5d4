//! The table of the reservation ABI: every constant, in one place.

/// The width of the register in which a constant is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// 32 bits: a CPUID register, an MSR index, ECX of RDPMC.
    Bits32,
    /// 64 bits: the value of an MSR, a cookie.
    Bits64,
}

/// One constant of the ABI.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The name in Rust. In C the prefix `UMPIRE_PCR_` stands before it.
    pub name: &'static str,
    pub value: u64,
    /// The meaning, in one line.
    pub meaning: &'static str,
}

/// A group of constants that belong together.
#[derive(Clone, Copy, Debug)]
pub struct Group {
    /// The title of the group.
    pub title: &'static str,
    /// The width of its constants.
    pub width: Width,
    /// The constants.
    pub entries: &'static [Entry],
}

const fn entry(name: &'static str, value: u64, meaning: &'static str) -> Entry {
    Entry {
        name,
        value,
        meaning,
    }
}

const fn bit(name: &'static str, bit: u32, meaning: &'static str) -> Entry {
    entry(name, 1 << bit, meaning)
}

/// Every constant of the ABI.
pub const TABLE: &[Group] = &[
    Group {
        title: "CPUID",
        width: Width::Bits32,
        entries: &[
            entry(
                "CPUID_BLOCK",
                0x4000_0100,
                "first leaf of Umpire's block: EAX highest leaf, EBX, ECX, EDX the signature",
            ),
            entry("CPUID_FEATURES", 0x4000_0101, "second leaf: what there is"),
            bit(
                "CPUID_FEATURES_ECX_PCR",
                8,
                "ECX of CPUID_FEATURES: counter reservations exist",
            ),
            entry(
                "CPUID_LEAF",
                0x4000_0102,
                "leaf of the reservations: EAX version, EBX first MSR, ECX features, EDX sizes",
            ),
            entry("VERSION", 3, "version of this ABI, in EAX of CPUID_LEAF"),
            bit("FEATURE_RANDOM", 0, "ECX: the MSR RANDOM exists"),
            bit("FEATURE_RDPMC", 1, "ECX: RDPMC takes a cookie"),
            bit("FEATURE_MAILBOX", 2, "ECX: the mailbox exists"),
            bit(
                "FEATURE_LEGACY_MAP",
                3,
                "ECX: legacy names are mapped once the firmware's phase is over",
            ),
            bit(
                "FEATURE_FIRMWARE",
                4,
                "ECX: the machine started in the firmware's phase",
            ),
            bit("FEATURE_SMM", 5, "ECX: code in SMM counts as firmware"),
            bit("FEATURE_REFUSAL", 6, "ECX: the MSR REFUSAL exists"),
            bit(
                "FEATURE_GRANTEE",
                7,
                "ECX: who was granted a counter sets its access cookie under every scheme",
            ),
            bit("FEATURE_EVENT", 8, "ECX: a request may name an event"),
            bit(
                "FEATURE_SMRAM",
                9,
                "ECX: as its phase ends the firmware puts code into SMRAM (PHASE_SMRAM)",
            ),
            bit(
                "FEATURE_IBS",
                10,
                "ECX: samplers have positions, POSITION_IBS_FETCH and POSITION_IBS_OP",
            ),
        ],
    },
    Group {
        title: "RDPMC",
        width: Width::Bits32,
        entries: &[entry(
            "RDPMC_COOKIE",
            0x554d_0000,
            "ECX: this plus the position reads a counter with a cookie",
        )],
    },
    Group {
        title: "MSRs, from the first one on; n is a counter's position",
        width: Width::Bits32,
        entries: &[
            entry(
                "MSR_BASE",
                0x554d_6000,
                "the first MSR of this version; drivers take it from CPUID",
            ),
            entry("MSR_COUNT", 0x1000, "indices that belong to the block"),
            entry(
                "MSR_MANAGEMENT_KEY",
                0x000,
                "+ n, W, management cookie: reserves, renews, hands over, gives back",
            ),
            entry(
                "MSR_ACCESS_KEY",
                0x040,
                "+ n, W, management cookie: sets the access cookie",
            ),
            entry(
                "MSR_CONTROL",
                0x080,
                "+ n, R; W with the management cookie: the control word",
            ),
            entry(
                "MSR_DROP_VALUE",
                0x0c0,
                "+ n, R; W with the management cookie: what a dropped read yields",
            ),
            entry("MSR_COUNTER", 0x100, "+ n, RW, access cookie: the counter"),
            entry(
                "MSR_SELECT",
                0x140,
                "+ n, RW, access cookie: its event select, or its four bits of FIXED_CTR_CTRL",
            ),
            entry(
                "MSR_OVERFLOW",
                0x180,
                "+ n, RW, access cookie: bit 0 tells an overflow, writing 1 clears it",
            ),
            entry("MSR_STATUS", 0x1c0, "+ n, R: who holds the counter"),
            entry(
                "MSR_LEGACY_MAP",
                0x200,
                "+ i, R: position that the legacy registers of position i reach; all ones: none",
            ),
            entry("MSR_RANDOM", 0x240, "R: 64 random bits"),
            entry(
                "MSR_PHASE",
                0x241,
                "R: layer of the reader; W: PHASE_END ends the firmware's phase",
            ),
            entry(
                "MSR_NOTICE_VECTOR",
                0x242,
                "RW: interrupt vector for notices, 16 to 255; 0: none",
            ),
            entry(
                "MSR_REQUEST",
                0x243,
                "W: asks for counters, gives them back",
            ),
            entry("MSR_ANSWER", 0x244, "R: what became of the last request"),
            entry(
                "MSR_GRANTED",
                0x245,
                "R: the counters of the last answer, one bit for each position",
            ),
            entry("MSR_NOTICE", 0x246, "R: takes the oldest notice; 0: none"),
            entry(
                "MSR_REPLY",
                0x247,
                "W: answers a notice that asks, with the counter's cookie",
            ),
            entry(
                "MSR_REFUSAL",
                0x248,
                "R: the reason of the layer's last write to the block that raised #GP",
            ),
            entry(
                "MSR_IBS",
                0x280,
                "+ k, RW, access cookie of its sampler: MSR 0xc0011030 + k, but for IBSCTL",
            ),
        ],
    },
    Group {
        title: "Positions of samplers, where FEATURE_IBS is set",
        width: Width::Bits32,
        entries: &[
            entry("POSITION_IBS_FETCH", 62, "instruction fetches"),
            entry("POSITION_IBS_OP", 63, "ops"),
        ],
    },
    Group {
        title: "Cookies",
        width: Width::Bits64,
        entries: &[
            entry(
                "DEFAULT_COOKIE",
                0,
                "what legacy accesses present and an unreserved counter expects",
            ),
            entry(
                "COOKIE_MASK",
                0xffff_ffff_ffff,
                "bits of a cookie; all others of RSI must be 0",
            ),
        ],
    },
    Group {
        title: "Layers, in STATUS, PHASE and notices",
        width: Width::Bits64,
        entries: &[
            entry("LAYER_FIRMWARE", 0, "code in the firmware's phase, and SMM"),
            entry("LAYER_HYPERVISOR", 1, "the hypervisor"),
            entry("LAYER_KERNEL", 2, "CPL 0 after the firmware's phase"),
            entry("LAYER_USER", 3, "CPL 1 to 3"),
        ],
    },
    Group {
        title: "The control word",
        width: Width::Bits64,
        entries: &[
            bit(
                "CONTROL_MANAGE_FIRMWARE",
                0,
                "the management cookie is valid in the firmware's layer",
            ),
            bit("CONTROL_MANAGE_HYPERVISOR", 1, "in the hypervisor's"),
            bit("CONTROL_MANAGE_KERNEL", 2, "in the kernel's"),
            bit("CONTROL_MANAGE_USER", 3, "in the user's"),
            bit(
                "CONTROL_ACCESS_FIRMWARE",
                4,
                "the access cookie is valid in the firmware's layer",
            ),
            bit("CONTROL_ACCESS_HYPERVISOR", 5, "in the hypervisor's"),
            bit("CONTROL_ACCESS_KERNEL", 6, "in the kernel's"),
            bit("CONTROL_ACCESS_USER", 7, "in the user's"),
            bit(
                "CONTROL_FAULT",
                8,
                "a wrong cookie raises #GP; else the access is dropped",
            ),
            bit("CONTROL_FAULT_RDPMC", 9, "also for RDPMC at CPL 0"),
            bit(
                "CONTROL_GLOBAL_CTRL",
                16,
                "the global control register reaches the counter",
            ),
            bit("CONTROL_FREEZE", 17, "freezing on a PMI reaches it"),
            bit(
                "CONTROL_OVF_CLEAR",
                18,
                "global status shows its overflow, global registers clear it",
            ),
            bit("CONTROL_FIXED_CTRL", 19, "FIXED_CTR_CTRL reaches it"),
            bit("CONTROL_PEBS_ENABLE", 20, "IA32_PEBS_ENABLE reaches it"),
            entry(
                "CONTROL_SHARED",
                0x001f_0000,
                "all of these: what several counters share reaches it",
            ),
            bit(
                "CONTROL_LEND",
                24,
                "the owner agrees to revocation when another layer is short",
            ),
            entry(
                "CONTROL_INITIAL",
                0x001f_00ff,
                "value of an unreserved counter",
            ),
        ],
    },
    Group {
        title: "STATUS",
        width: Width::Bits64,
        entries: &[
            bit("STATUS_RESERVED", 0, "the counter is reserved"),
            entry("STATUS_OWNER_SHIFT", 1, "shift of the owner's layer"),
            entry("STATUS_OWNER_MASK", 7, "mask of the owner's layer"),
            bit(
                "STATUS_PRIVATE",
                4,
                "the access cookie is not DEFAULT_COOKIE",
            ),
            bit("STATUS_LEASE", 5, "the reservation is a lease"),
            bit("STATUS_REVOKING", 6, "it will be revoked"),
            entry(
                "STATUS_REST_SHIFT",
                32,
                "shift of the milliseconds until then",
            ),
        ],
    },
    Group {
        title: "Other words",
        width: Width::Bits64,
        entries: &[
            entry(
                "PHASE_END",
                1,
                "written to PHASE: ends the firmware's phase",
            ),
            entry(
                "PHASE_SMRAM",
                2,
                "written to PHASE beside PHASE_END: these pages become SMRAM's from its entry on",
            ),
            entry("PHASE_PAGES_SHIFT", 4, "PHASE_SMRAM: shift of their number"),
            entry("PHASE_PAGES_MAX", 8, "PHASE_SMRAM: the most pages"),
            entry(
                "PHASE_PAGE_SIZE",
                0x1000,
                "PHASE_SMRAM: bytes of a page; the bits from there on are the address of the first",
            ),
            entry("OVERFLOW_CLEAR", 1, "written to OVERFLOW"),
            entry(
                "LEGACY_NONE",
                0xffff_ffff_ffff_ffff,
                "LEGACY_MAP: no counter has this legacy name",
            ),
        ],
    },
    Group {
        title: "REQUEST",
        width: Width::Bits64,
        entries: &[
            entry("REQUEST_RESERVE", 1, "operation: reserve"),
            entry("REQUEST_RELEASE", 2, "operation: give back"),
            entry(
                "REQUEST_WITHDRAW",
                3,
                "operation: withdraw the pending request, with its cookie",
            ),
            entry("REQUEST_OP_MASK", 0xf, "mask of the operation"),
            entry("REQUEST_ANY", 0x00, "as many programmable counters as told"),
            entry("REQUEST_POSITION", 0x10, "the counter at the position told"),
            entry("REQUEST_WHICH_SHIFT", 8, "shift of number or position"),
            entry("REQUEST_LEASE_SHIFT", 16, "shift of the lease"),
            entry(
                "REQUEST_LEASE_UNIT_MS",
                10,
                "unit of the lease in milliseconds",
            ),
            entry(
                "REQUEST_SELECT_SHIFT",
                32,
                "shift of bits 15:0 of the event select: event and unit mask",
            ),
            entry(
                "REQUEST_SELECT_HIGH_SHIFT",
                48,
                "shift of its bits 35:32, the event's upper ones (AMD)",
            ),
            bit("REQUEST_EDGE", 52, "edge, bit 18 of the event select"),
            bit("REQUEST_INV", 53, "invert, bit 23 of the event select"),
            entry("REQUEST_CMASK_SHIFT", 54, "shift of the counter mask"),
            bit("REQUEST_EVENT", 63, "the request names an event"),
        ],
    },
    Group {
        title: "ANSWER",
        width: Width::Bits64,
        entries: &[
            entry("ANSWER_NONE", 0, "nothing was asked"),
            entry("ANSWER_GRANTED", 1, "granted"),
            entry("ANSWER_REFUSED", 2, "refused, with a reason"),
            entry("ANSWER_PENDING", 3, "another layer is being asked"),
            entry("ANSWER_STATE_MASK", 0xf, "mask of the state"),
            entry("ANSWER_REASON_SHIFT", 8, "shift of the reason"),
            entry("ANSWER_NUMBER_SHIFT", 16, "shift of the request's number"),
        ],
    },
    Group {
        title: "NOTICE and REPLY",
        width: Width::Bits64,
        entries: &[
            entry("NOTICE_NONE", 0, "the queue is empty"),
            entry(
                "NOTICE_ASKED",
                1,
                "another layer is short: yield this counter?",
            ),
            entry("NOTICE_REVOKING", 2, "the counter will be revoked"),
            entry("NOTICE_REVOKED", 3, "the counter has been revoked"),
            entry("NOTICE_EXPIRED", 4, "its lease has ended"),
            entry("NOTICE_GRANTED", 5, "the pending request was granted"),
            entry("NOTICE_REFUSED", 6, "the pending request was refused"),
            entry(
                "NOTICE_CANCELLED",
                7,
                "what was asked or announced about the counter is off",
            ),
            entry(
                "NOTICE_TAKEN",
                8,
                "it has no physical counter (reason UNBACKED: none for its select): the count stands still",
            ),
            entry(
                "NOTICE_BACK",
                9,
                "the host's kernel has left it one again, and it counts on",
            ),
            entry("NOTICE_KIND_MASK", 0xf, "mask of the kind"),
            bit("NOTICE_LOST", 7, "notices before this one were lost"),
            entry("NOTICE_POSITION_SHIFT", 8, "shift of the position"),
            entry("NOTICE_LAYER_SHIFT", 16, "shift of the layer that wants it"),
            entry("NOTICE_REASON_SHIFT", 24, "shift of the reason"),
            entry("NOTICE_MS_SHIFT", 32, "shift of the milliseconds left"),
            entry("REPLY_YIELD", 1, "gives the counter back"),
            entry("REPLY_REFUSE", 2, "keeps it"),
            entry("REPLY_POSITION_SHIFT", 8, "shift of the position"),
        ],
    },
    Group {
        title: "Reasons",
        width: Width::Bits64,
        entries: &[
            entry("REASON_NONE", 0, "none"),
            entry("REASON_NONE_FREE", 1, "too few counters are free"),
            entry("REASON_MAXIMUM", 2, "the layer holds as many as it may"),
            entry(
                "REASON_MINIMUM",
                3,
                "another layer's minimum would not be left",
            ),
            entry("REASON_REFUSED", 4, "the holder refused to yield"),
            entry("REASON_NO_ANSWER", 5, "the holder did not answer in time"),
            entry("REASON_NO_COUNTER", 6, "the machine has no such counter"),
            entry("REASON_HELD", 7, "the counter is held by another layer"),
            entry("REASON_MALFORMED", 8, "the request makes no sense"),
            entry(
                "REASON_MASTER",
                9,
                "only the master reserves under this scheme",
            ),
            entry("REASON_WITHDRAWN", 10, "the request was withdrawn"),
            entry("REASON_PRIORITY", 11, "a layer of higher priority needs it"),
            entry("REASON_EXPIRED", 12, "the lease has ended"),
            entry("REASON_COOKIE", 13, "the cookie is wrong"),
            entry("REASON_LAYER", 14, "no cookie is valid in this layer"),
            entry("REASON_UNRESERVED", 15, "the counter is not reserved"),
            entry("REASON_LENT", 16, "the owner had agreed to it"),
            entry("REASON_PHASE", 17, "the firmware's phase is over"),
            entry("REASON_BUSY", 18, "an earlier request is pending"),
            entry(
                "REASON_UNBACKED",
                19,
                "no physical counter can be kept for it",
            ),
            entry(
                "REASON_ADMINISTRATOR",
                20,
                "the administrator of the host has revoked it, or barred the layer",
            ),
            entry(
                "REASON_BUDGET",
                21,
                "the host gives the guest fewer counters than before",
            ),
        ],
    },
];
