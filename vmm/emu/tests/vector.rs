//! What of SSE no program of CPL 3 sees: when it is switched off, images, exceptions, devices.

use emu::{Answer, VmExit};
use iced_x86::Code;

use crate::guest::{Guest, Happened, PAGES, PRESENT, USER, WRITABLE};
use crate::system::{CODE, DATA, change, guest};

const MP_EM_TS: [u64; 3] = [1 << 1, 1 << 2, 1 << 3];
const OSFXSR: u64 = 1 << 9;
const OSXMMEXCPT: u64 = 1 << 10;

const UD: Happened = Happened::Fault(6, 0, 0);
const NM: Happened = Happened::Fault(7, 0, 0);
const GP: Happened = Happened::Fault(13, 0, 0);

/// With SSE switched on.
fn sse(code: &[u8]) -> Guest {
    let mut guest = guest(3, code);
    change(&mut guest, |state| {
        state.cr4 |= OSFXSR | OSXMMEXCPT;
        state.xmm = std::array::from_fn(|n| [n as u64 * 0x101 + 1, !(n as u64)]);
    });
    guest
}

/// What an instruction comes to with these bits of CR0 set, MP in their place, and these of CR4
/// clear.
fn under(code: &[u8], (set, clear): (u64, u64)) -> Happened {
    let [mp, ..] = MP_EM_TS;
    let mut guest = sse(code);
    change(&mut guest, |state| {
        state.cr0 = state.cr0 & !mp | set;
        state.cr4 &= !clear;
    });
    guest.one()
}

#[test]
fn it_is_there_when_it_is_switched_on() {
    let [mp, em, ts] = MP_EM_TS;
    // Set in CR0, cleared in CR4; what an instruction of XMM registers does then, and FXSAVE.
    let table = [
        (0, 0, Happened::Retired, Happened::Retired),
        (mp, 0, Happened::Retired, Happened::Retired),
        (ts, 0, NM, NM),
        (em, 0, UD, NM),
        (em | ts, 0, UD, NM),
        (0, OSFXSR, UD, Happened::Retired),
        (ts, OSFXSR, UD, NM),
        (0, OSXMMEXCPT, Happened::Retired, Happened::Retired),
    ];
    let vectors: [&[u8]; 9] = [
        &[0x0f, 0x28, 0xca],             // MOVAPS XMM1, XMM2
        &[0x0f, 0x28, 0x0e],             // MOVAPS XMM1, [RSI]
        &[0x0f, 0x11, 0x0e],             // MOVUPS [RSI], XMM1
        &[0x66, 0x0f, 0xfe, 0x0e],       // PADDD XMM1, [RSI]
        &[0x0f, 0x58, 0xca],             // ADDPS XMM1, XMM2
        &[0x67, 0x0f, 0x58, 0x0e],       // ADDPS XMM1, [ESI]
        &[0xf3, 0x48, 0x0f, 0x2a, 0xc8], // CVTSI2SS XMM1, RAX
        &[0x0f, 0xae, 0x1e],             // STMXCSR [RSI]
        &[0x66, 0x0f, 0xf7, 0xca],       // MASKMOVDQU XMM1, XMM2
    ];
    let images: [&[u8]; 2] = [&[0x0f, 0xae, 0x06], &[0x48, 0x0f, 0xae, 0x06]];
    // CRC32 EAX, EAX; MOVNTI [RSI], EAX; LFENCE.
    let others: [&[u8]; 3] = [
        &[0xf2, 0x0f, 0x38, 0xf1, 0xc0],
        &[0x0f, 0xc3, 0x06],
        &[0x0f, 0xae, 0xe8],
    ];
    for (set, clear, vector, image) in table {
        let of = |code: &[u8]| under(code, (set, clear));
        for code in vectors {
            assert_eq!(of(code), vector, "{code:02x?} {set:#x} {clear:#x}");
        }
        for code in images {
            assert_eq!(of(code), image, "{code:02x?} {set:#x} {clear:#x}");
        }
        for code in others {
            assert_eq!(of(code), Happened::Retired, "{code:02x?}");
        }
    }
}

#[test]
fn sixteen_bytes_lie_on_their_boundary() {
    const AWAY: u64 = 0x7fff_ffff_f000;
    // MOVAPS of XMM1 and [RSI], [RSP]; PADDD XMM1, [RSI]; MOVUPS XMM1, [RSI].
    let codes: [(&[u8], bool); 5] = [
        (&[0x0f, 0x28, 0x0e], true),
        (&[0x0f, 0x29, 0x0e], true),
        (&[0x0f, 0x28, 0x0c, 0x24], true),
        (&[0x66, 0x0f, 0xfe, 0x0e], true),
        (&[0x0f, 0x10, 0x0e], false),
    ];
    for (code, strict) in codes {
        let stack = code.len() == 4 && code[2] == 0x0c;
        let at = |address: u64| {
            let mut guest = sse(code);
            change(&mut guest, |state| {
                state.r[6] = address;
                state.r[4] = address;
            });
            guest.one()
        };
        let outside = if stack { 12 } else { 13 };
        assert_eq!(at(DATA + 16), Happened::Retired, "{code:02x?}");
        let odd = if strict { GP } else { Happened::Retired };
        assert_eq!(at(DATA + 8), odd, "{code:02x?}");
        // The boundary comes first, where nothing is mapped and where no address is.
        let absent = at(AWAY + 8);
        assert_eq!(absent == GP, strict, "{code:02x?} {absent:?}");
        let canonical = Happened::Fault(outside, 0, 0);
        let both = if strict { &GP } else { &canonical };
        assert_eq!(&at(0x8000_0000_0008), both, "{code:02x?}");
        assert_eq!(at(0x8000_0000_0000), canonical, "{code:02x?}");
    }
}

#[test]
fn across_pages_of_which_one_is_absent() {
    let end = DATA + 0x1000;
    for away in [1, 4, 8, 12, 15] {
        // MOVUPS XMM1, [RSI]; MOVUPS [RSI], XMM1.
        for (code, access) in [([0x0f, 0x10, 0x0e], 4), ([0x0f, 0x11, 0x0e], 6)] {
            let mut guest = sse(&code);
            change(&mut guest, |state| state.r[6] = end - away);
            let before = guest.cpu.state().xmm;
            assert_eq!(guest.one(), Happened::Fault(14, access, end), "{away}");
            assert_eq!(guest.cpu.state().xmm, before);
            let mut bytes = [0xff; 16];
            guest.read(PAGES + 0x1ff0, &mut bytes);
            assert_eq!(bytes, [0; 16], "{away}");
        }
    }
    // Both are there, but not side by side.
    let mut guest = sse(&[0x0f, 0x11, 0x0e, 0x0f, 0x10, 0x16]);
    guest.map(end, PAGES + 0x8000, PRESENT | WRITABLE | USER);
    change(&mut guest, |state| state.r[6] = end - 5);
    assert_eq!(guest.one(), Happened::Retired);
    assert_eq!(guest.one(), Happened::Retired);
    assert_eq!(guest.cpu.state().xmm[2], guest.cpu.state().xmm[1]);
    let mut bytes = [0; 11];
    guest.read(PAGES + 0x8000, &mut bytes);
    assert_eq!(
        bytes,
        [0, 0, 0, 0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]
    );
}

#[test]
fn devices_see_halves() {
    // MOVUPS XMM1, [R8+16]; MOVUPS [R8+16], XMM1.
    let mut guest = sse(&[0x41, 0x0f, 0x10, 0x48, 0x10, 0x41, 0x0f, 0x11, 0x48, 0x10]);
    for (address, value) in [(0xfee0_0010, 7u64), (0xfee0_0018, 9)] {
        let VmExit::MmioRead { address: at, len } = guest.cpu.run(1) else {
            panic!("{:#x}", guest.cpu.state().rip);
        };
        assert_eq!((at, len), (address, 8));
        guest.cpu.answer(Answer::Mmio(value.to_le_bytes()));
    }
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
    assert_eq!(guest.cpu.state().xmm[1], [7, 9]);
    for (address, value) in [(0xfee0_0010, 7u64), (0xfee0_0018, 9)] {
        let data = value.to_le_bytes();
        let exit = VmExit::MmioWrite {
            address,
            data,
            len: 8,
        };
        assert_eq!(guest.cpu.run(1), exit);
    }
    assert_eq!(guest.cpu.run(1), VmExit::Budget);
}

#[test]
fn an_image_comes_back() {
    // FXSAVE64 [RSI]; FXRSTOR64 [RSI].
    let mut guest = sse(&[0x48, 0x0f, 0xae, 0x06, 0x48, 0x0f, 0xae, 0x0e]);
    guest.bytes(PAGES + 0x1000, &[0xa5; 512]);
    change(&mut guest, |state| {
        state.mxcsr = 0x9fc0;
        state.x87[0] = 0x0123_00ff_3841_037f;
        state.x87[1] = 0x1234_5678_9abc;
        state.x87[2] = 0x2234_5678_9abc;
        state.x87[4] = 0x8000_0000_0000_0000;
        state.x87[5] = 0xbfff;
    });
    let before = guest.cpu.state().clone();
    assert_eq!(guest.one(), Happened::Retired);
    let at = PAGES + 0x1000;
    let words: Vec<u64> = (0..64).map(|n| guest.word(at + 8 * n)).collect();
    assert_eq!(words[..3], before.x87[..3]);
    assert_eq!(words[3], 0xffff_0000_9fc0);
    assert_eq!(words[4..20], before.x87[4..]);
    assert_eq!(words[20..52], before.xmm.concat());
    // The rest is the system's own.
    assert_eq!(words[52..], [0xa5a5_a5a5_a5a5_a5a5; 12]);
    change(&mut guest, |state| {
        state.xmm = [[0; 2]; 16];
        state.x87 = [0; 20];
        state.mxcsr = 0;
    });
    assert_eq!(guest.one(), Happened::Retired);
    let after = guest.cpu.state();
    assert_eq!(
        (after.xmm, after.x87, after.mxcsr),
        (before.xmm, before.x87, before.mxcsr)
    );
}

#[test]
fn an_image_that_cannot_be_is_refused() {
    // FXRSTOR [RSI] and LDMXCSR [RSI+24]: reserved bits of MXCSR.
    for code in [&[0x0f, 0xae, 0x0e][..], &[0x0f, 0xae, 0x56, 0x18]] {
        for bit in 16..32 {
            let mut guest = sse(code);
            guest.write(PAGES + 0x1000 + 24, 1 << bit | 0x1f80);
            let before = guest.cpu.state().clone();
            assert_eq!(guest.one(), GP, "{bit}");
            let after = guest.cpu.state();
            assert_eq!(
                (after.xmm, after.x87, after.mxcsr),
                (before.xmm, before.x87, before.mxcsr)
            );
        }
    }
    // FXSAVE off its boundary, and on two pages of which one is absent.
    for (away, happened) in [
        (0x1000 - 8, GP),
        (0x1000 - 0x1f0, Happened::Fault(14, 6, DATA + 0x100f)),
        (0x1000 - 0x10, Happened::Fault(14, 6, DATA + 0x11ef)),
        (0x1000 - 0x200, Happened::Retired),
    ] {
        let mut guest = sse(&[0x0f, 0xae, 0x06]);
        change(&mut guest, |state| state.r[6] = DATA + away);
        assert_eq!(guest.one(), happened, "{away:#x}");
        let written = guest.word((PAGES + 0x1000 + away) & !15) != 0;
        assert_eq!(written, happened == Happened::Retired);
    }
}

#[test]
fn exceptions_are_masked_or_raised() {
    const ONE: u64 = 0x3ff0_0000_0000_0000;
    // DIVSD XMM1, XMM2: 1/0.
    let of = |mxcsr: u32, cr4: u64| {
        let mut guest = sse(&[0xf2, 0x0f, 0x5e, 0xca]);
        change(&mut guest, |state| {
            state.cr4 = state.cr4 & !OSXMMEXCPT | cr4;
            state.mxcsr = mxcsr;
            state.xmm[1] = [ONE, 5];
            state.xmm[2] = [0, 6];
        });
        let happened = guest.one();
        let state = guest.cpu.state();
        (happened, state.mxcsr, state.xmm[1])
    };
    let infinity = [0x7ff0_0000_0000_0000, 5];
    let all = 0x1f80;
    assert_eq!(of(all, 0), (Happened::Retired, all | 4, infinity));
    let open = all & !0x200;
    let raised = (Happened::Fault(19, 0, 0), open | 4, [ONE, 5]);
    assert_eq!(of(open, OSXMMEXCPT), raised);
    assert_eq!(of(open, 0), (UD, open | 4, [ONE, 5]));
    // A flag that is set already raises nothing.
    let sticky = open | 0x3b;
    let again = (Happened::Fault(19, 0, 0), sticky | 4, [ONE, 5]);
    assert_eq!(of(sticky, OSXMMEXCPT), again);
    let masked = all & !0x80 | 1;
    assert_eq!(
        of(masked, OSXMMEXCPT),
        (Happened::Retired, masked | 4, infinity)
    );
}

#[test]
fn code_is_written_by_halves_and_wholes() {
    // MOVAPS [RSI], XMM1 over what follows, which becomes INC EAX.
    let mut guest = sse(&[0x0f, 0x29, 0x0e, 0x90, 0x90, 0x90]);
    guest.map(CODE, PAGES, PRESENT | WRITABLE | USER);
    change(&mut guest, |state| {
        state.r[6] = CODE;
        state.r[0] = 0;
        state.xmm[1][0] = u64::from_le_bytes([0x0f, 0x29, 0x0e, 0xff, 0xc0, 0x90, 0x90, 0x90]);
    });
    assert_eq!(guest.cpu.run(2), VmExit::Budget);
    assert_eq!(guest.cpu.state().r[0], 1);
}

#[test]
fn what_is_not_announced_is_told_once() {
    // VADDPS XMM1, XMM2, XMM3, twice; AESENC XMM1, XMM2; UD2, which nobody misses.
    let codes: [&[u8]; 4] = [
        &[0xc5, 0xe8, 0x58, 0xcb],
        &[0xc5, 0xe8, 0x58, 0xcb],
        &[0x66, 0x0f, 0x38, 0xdc, 0xca],
        &[0x0f, 0x0b],
    ];
    let mut guest = sse(&codes.concat());
    let start = guest.cpu.state().clone();
    let mut at = CODE;
    for code in codes {
        let mut state = start.clone();
        state.rip = at;
        guest.cpu.set_state(state);
        assert_eq!(guest.one(), UD, "{code:02x?}");
        at += code.len() as u64;
    }
    let told = guest.cpu.take_unannounced();
    let told: Vec<_> = told.iter().map(|one| (one.rip, one.code)).collect();
    assert_eq!(
        told,
        [
            (CODE, Code::VEX_Vaddps_xmm_xmm_xmmm128),
            (CODE + 8, Code::Aesenc_xmm_xmmm128)
        ]
    );
    assert!(guest.cpu.take_unannounced().is_empty());
}

/// CLFLUSH is checked as a load of a byte is (SDM vol. 2A), and loads nothing.
#[test]
fn flushing_a_line_asks_no_device() {
    const AWAY: u64 = 0x7fff_ffff_f000;
    // CLFLUSH [R8+16], CLFLUSH [RSP+RSI].
    let line = [0x41, 0x0f, 0xae, 0x78, 0x10];
    let stack = [0x0f, 0xae, 0x3c, 0x34];
    let at = |code: &[u8], address: u64| {
        let mut guest = sse(code);
        guest.map(DATA, PAGES + 0x1000, PRESENT | USER);
        change(&mut guest, |state| {
            state.r[8] = address;
            state.r[4] = address;
            state.r[6] = 0;
        });
        guest.one()
    };
    let device = sse(&[]).cpu.state().r[8];
    assert_eq!(at(&line, device), Happened::Retired);
    assert_eq!(at(&line, DATA), Happened::Retired);
    assert_eq!(at(&line, AWAY), Happened::Fault(14, 4, AWAY + 16));
    assert_eq!(at(&line, 0x8000_0000_0000), GP);
    assert_eq!(at(&stack, 0x8000_0000_0000), Happened::Fault(12, 0, 0));
}

/// Of instructions with MMX registers those of SSE's date and later ask for CR4.OSFXSR too, but
/// for PSHUFW and MOVNTQ (SDM vol. 3A, 13.1.4).
#[test]
fn mmx_is_there_when_it_is_switched_on() {
    let [mp, em, ts] = MP_EM_TS;
    // Set in CR0, cleared in CR4; what MMX does then, and what SSE does.
    let table = [
        (0, 0, Happened::Retired, Happened::Retired),
        (mp, 0, Happened::Retired, Happened::Retired),
        (ts, 0, NM, NM),
        (em, 0, UD, UD),
        (em | ts, 0, UD, UD),
        (0, OSFXSR, Happened::Retired, UD),
        (ts, OSFXSR, NM, UD),
    ];
    let plain: [&[u8]; 7] = [
        &[0x0f, 0x6f, 0xca],       // MOVQ MM1, MM2
        &[0x0f, 0x7f, 0x0e],       // MOVQ [RSI], MM1
        &[0x0f, 0xfc, 0xca],       // PADDB MM1, MM2
        &[0x0f, 0x6e, 0xc8],       // MOVD MM1, EAX
        &[0x0f, 0x77],             // EMMS
        &[0x0f, 0x70, 0xca, 0x1b], // PSHUFW MM1, MM2, 1Bh
        &[0x0f, 0xe7, 0x0e],       // MOVNTQ [RSI], MM1
    ];
    let later: [&[u8]; 12] = [
        &[0xf3, 0x0f, 0xd6, 0xca],       // MOVQ2DQ XMM1, MM2
        &[0xf2, 0x0f, 0xd6, 0xca],       // MOVDQ2Q MM1, XMM2
        &[0x0f, 0xe0, 0xca],             // PAVGB MM1, MM2
        &[0x0f, 0xc5, 0xc2, 0x01],       // PEXTRW EAX, MM2, 1
        &[0x0f, 0xc4, 0xc8, 0x01],       // PINSRW MM1, EAX, 1
        &[0x0f, 0xd7, 0xc2],             // PMOVMSKB EAX, MM2
        &[0x0f, 0xf7, 0xca],             // MASKMOVQ MM1, MM2
        &[0x0f, 0xd4, 0x0e],             // PADDQ MM1, [RSI]
        &[0x0f, 0xf4, 0xca],             // PMULUDQ MM1, MM2
        &[0x0f, 0x38, 0x00, 0xca],       // PSHUFB MM1, MM2
        &[0x0f, 0x3a, 0x0f, 0xca, 0x03], // PALIGNR MM1, MM2, 3
        &[0x0f, 0x2a, 0xca],             // CVTPI2PS XMM1, MM2
    ];
    for (set, clear, mmx, sse_too) in table {
        let of = |code: &[u8]| under(code, (set, clear));
        for code in plain {
            assert_eq!(of(code), mmx, "{code:02x?} {set:#x} {clear:#x}");
        }
        for code in later {
            assert_eq!(of(code), sse_too, "{code:02x?} {set:#x} {clear:#x}");
        }
    }
}

#[test]
fn an_image_is_loaded_from_its_beginning() {
    const AWAY: u64 = 0x7000_0000_0f00;
    // FXRSTOR [RSI]: both pages are absent, then one of them.
    for (from, address) in [
        (AWAY, AWAY),
        (DATA - 0x100, DATA - 0x100),
        (DATA + 0xf00, DATA + 0x10ff),
    ] {
        let mut guest = sse(&[0x0f, 0xae, 0x0e]);
        change(&mut guest, |state| state.r[6] = from);
        assert_eq!(guest.one(), Happened::Fault(14, 4, address));
    }
    // FXRSTOR [R8]: a device is asked for what is loaded, and in its order.
    let mut guest = sse(&[0x41, 0x0f, 0xae, 0x08]);
    for n in 0..4 {
        let address = 0xfee0_0000 + 8 * n;
        assert_eq!(guest.cpu.run(1), VmExit::MmioRead { address, len: 8 });
        guest.cpu.answer(Answer::Mmio([0; 8]));
    }
}
