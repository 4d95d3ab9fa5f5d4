//! Instructions of the system: control registers, MSRs, tables, system calls, ports.

use guest_exit::VmExit;
use iced_x86::{Instruction, Mnemonic, OpKind, Register};
use instruction_facts::is_canonical;

use super::core::{Core, Exec, Stepping, Trap, Width};
use super::far;
use super::interrupt::{Delivery, deliver};
use super::operand::{Linear, Use, get, linear, memory_seg, offset, read, set, used, write};
use super::segment::{self, is_real};
use super::x87;
use crate::entry::Entry;
use crate::flags::{Flags, ZF};
use crate::state::{
    AC, CR0_AM, CR0_CD, CR0_EM, CR0_ET, CR0_MP, CR0_NE, CR0_NW, CR0_PE, CR0_PG, CR0_TS, CR0_WP,
    CR4_DE, CR4_FSGSBASE, CR4_PAE, CR4_PCE, CR4_PGE, CR4_PSE, CR4_SMAP, CR4_SMEP, CR4_TSD, DR7_GD,
    EFER_LMA, EFER_LME, EFER_NXE, EFER_SCE, IF, IOPL, RF, Seg, Segment, Shadow, Table, VM,
};
use crate::stop::Missing;

/// Ticks that RDTSC and PAUSE take besides their own.
const RDTSC: i64 = 19;
const PAUSE: i64 = 63;
/// Ticks that INVLPG, MOV CR3 and all that drops translations take besides: thousands may go, each
/// time.
const FLUSH: i64 = 63;

/// The instructions that are here.
pub(super) const KNOWN: &[Mnemonic] = &[
    Mnemonic::Cli,
    Mnemonic::Sti,
    Mnemonic::Stac,
    Mnemonic::Clac,
    Mnemonic::Int,
    Mnemonic::Int1,
    Mnemonic::Int3,
    Mnemonic::Iret,
    Mnemonic::Iretd,
    Mnemonic::Iretq,
    Mnemonic::Syscall,
    Mnemonic::Sysret,
    Mnemonic::Sysretq,
    Mnemonic::Sysenter,
    Mnemonic::Sysexit,
    Mnemonic::Sysexitq,
    Mnemonic::Hlt,
    Mnemonic::Pause,
    Mnemonic::Cpuid,
    Mnemonic::Rdtsc,
    Mnemonic::Rdtscp,
    Mnemonic::Rdpid,
    Mnemonic::Rdpmc,
    Mnemonic::Rdmsr,
    Mnemonic::Wrmsr,
    Mnemonic::In,
    Mnemonic::Out,
    Mnemonic::Lgdt,
    Mnemonic::Lidt,
    Mnemonic::Sgdt,
    Mnemonic::Sidt,
    Mnemonic::Lldt,
    Mnemonic::Sldt,
    Mnemonic::Ltr,
    Mnemonic::Str,
    Mnemonic::Lmsw,
    Mnemonic::Smsw,
    Mnemonic::Clts,
    Mnemonic::Invlpg,
    Mnemonic::Invd,
    Mnemonic::Wbinvd,
    Mnemonic::Wbnoinvd,
    Mnemonic::Clflush,
    Mnemonic::Clflushopt,
    Mnemonic::Clwb,
    Mnemonic::Swapgs,
    Mnemonic::Rdfsbase,
    Mnemonic::Rdgsbase,
    Mnemonic::Wrfsbase,
    Mnemonic::Wrgsbase,
    Mnemonic::Lar,
    Mnemonic::Lsl,
    Mnemonic::Verr,
    Mnemonic::Verw,
    Mnemonic::Wait,
];

/// Executes one of [`KNOWN`].
pub(super) fn step(core: &mut Core, insn: &Instruction) -> Exec {
    match insn.mnemonic() {
        Mnemonic::Cli => set_interrupts(core, false),
        Mnemonic::Sti => set_interrupts(core, true),
        Mnemonic::Stac => set_alignment(core, true),
        Mnemonic::Clac => set_alignment(core, false),
        Mnemonic::Int => software(core, Delivery::Software(insn.immediate8())),
        Mnemonic::Int3 => software(core, Delivery::Software(3)),
        Mnemonic::Int1 => software(core, Delivery::Int1),
        Mnemonic::Iret | Mnemonic::Iretd | Mnemonic::Iretq => far::interrupt_return(core, insn),
        Mnemonic::Syscall => system_call(core),
        Mnemonic::Sysret | Mnemonic::Sysretq => system_return(core, insn),
        Mnemonic::Sysenter => system_enter(core),
        Mnemonic::Sysexit | Mnemonic::Sysexitq => system_exit(core, insn),
        Mnemonic::Hlt => {
            kernel_only(core)?;
            core.halted = true;
            Err(Trap::Leave)
        }
        Mnemonic::Pause => {
            core.spend(PAUSE);
            if core.stops_at_pause {
                core.paused = true;
                return Err(Trap::Leave);
            }
            Ok(())
        }
        Mnemonic::Cpuid => cpuid(core),
        Mnemonic::Rdtsc => {
            if core.state.cr4 & CR4_TSD != 0 {
                kernel_only(core)?;
            }
            read_time(core);
            Ok(())
        }
        Mnemonic::Rdtscp => {
            if core.state.cr4 & CR4_TSD != 0 {
                kernel_only(core)?;
            }
            read_time(core);
            core.set_reg(1, core.state.msrs.tsc_aux as u32);
            Ok(())
        }
        Mnemonic::Rdpid => {
            let value = core.state.msrs.tsc_aux & 0xffff_ffff;
            set(core, insn.op0_register(), value);
            Ok(())
        }
        Mnemonic::Rdpmc => {
            let index = core.reg::<u32>(1);
            if core.state.cr4 & CR4_PCE == 0 {
                kernel_only(core)?;
            }
            let value = core.answered(VmExit::Rdpmc { index })?;
            pair(core, value);
            Err(Trap::Leave)
        }
        Mnemonic::Rdmsr => read_msr(core),
        Mnemonic::Wrmsr => write_msr(core),
        Mnemonic::In | Mnemonic::Out => port(core, insn),
        Mnemonic::Lgdt | Mnemonic::Lidt => load_table(core, insn),
        Mnemonic::Sgdt => store_table(core, insn, core.state.gdtr),
        Mnemonic::Sidt => store_table(core, insn, core.state.idtr),
        Mnemonic::Lldt | Mnemonic::Ltr => load_system_segment(core, insn),
        Mnemonic::Sldt | Mnemonic::Str => store_selector(core, insn),
        Mnemonic::Lmsw => load_status_word(core, insn),
        Mnemonic::Smsw => write(core, insn, 0, core.state.cr0),
        Mnemonic::Clts => {
            kernel_only(core)?;
            core.state.cr0 &= !CR0_TS;
            Err(Trap::Leave)
        }
        Mnemonic::Wait => x87::wait(core),
        Mnemonic::Invlpg => invalidate_page(core, insn),
        Mnemonic::Invd | Mnemonic::Wbinvd | Mnemonic::Wbnoinvd => kernel_only(core),
        Mnemonic::Clflush | Mnemonic::Clflushopt | Mnemonic::Clwb => {
            let (seg, offset) = (memory_seg(core, insn), offset(core, insn));
            let at = used(core, seg, offset, 1, Use::Name)?;
            core.check_read(at.at, at.seg)
        }
        Mnemonic::Swapgs => {
            kernel_only(core)?;
            let mut gs = core.state.segment(Seg::Gs);
            std::mem::swap(&mut gs.base, &mut core.state.msrs.kernel_gs_base);
            core.state.set_segment(Seg::Gs, gs);
            Ok(())
        }
        Mnemonic::Rdfsbase | Mnemonic::Rdgsbase | Mnemonic::Wrfsbase | Mnemonic::Wrgsbase => {
            base_register(core, insn)
        }
        Mnemonic::Lar | Mnemonic::Lsl => load_rights(core, insn),
        Mnemonic::Verr | Mnemonic::Verw => verify(core, insn),
        _ => core.ud(),
    }
}

fn kernel_only(core: &mut Core) -> Exec {
    if core.state.cpl() == 0 {
        Ok(())
    } else {
        core.gp(0)
    }
}

/// EDX:EAX.
fn pair(core: &mut Core, value: u64) {
    core.set_reg(0, value as u32);
    core.set_reg(2, (value >> 32) as u32);
}

/// Only what may be taken now, and was not before, has to be looked at.
fn set_interrupts(core: &mut Core, on: bool) -> Exec {
    let old = core.state.system_flags;
    if u64::from(core.state.cpl()) > (old & IOPL) >> 12 {
        return core.gp(0);
    }
    if !on {
        core.state.system_flags &= !IF;
        return Ok(());
    }
    if old & IF != 0 {
        return Ok(());
    }
    core.state.system_flags |= IF;
    core.state.shadow = Shadow::Sti;
    Err(Trap::Leave)
}

fn set_alignment(core: &mut Core, on: bool) -> Exec {
    if core.state.cpl() != 0 {
        return core.ud();
    }
    if on {
        core.state.system_flags |= AC;
    } else {
        core.state.system_flags &= !AC;
    }
    core.refresh();
    Ok(())
}

pub(super) fn software(core: &mut Core, delivery: Delivery) -> Exec {
    if delivery == Delivery::Int1 {
        // As a trap: B0 to B3 and BS are not its cause.
        core.state.dr6 &= !0xf;
    }
    deliver(core, delivery)?;
    core.stepping = Stepping::Never;
    Err(Trap::Leave)
}

fn read_time(core: &mut Core) {
    let time = core.now().wrapping_add(core.state.msrs.tsc_offset);
    core.spend(RDTSC);
    pair(core, time);
}

fn cpuid(core: &mut Core) -> Exec {
    let answer = core.cpuid.answer(core.reg::<u32>(0), core.reg::<u32>(1));
    for (number, value) in [
        (0, answer.eax),
        (3, answer.ebx),
        (1, answer.ecx),
        (2, answer.edx),
    ] {
        core.set_reg(number, value);
    }
    Ok(())
}

// System calls.

fn flat(selector: u16, attr: u16) -> Segment {
    Segment {
        selector,
        attr,
        limit: u32::MAX,
        base: 0,
    }
}

/// Flat code and stack of a privilege level, as system calls load them.
fn load_flat(core: &mut Core, code: u16, stack: u16, cpl: u16, long: bool) {
    let size = if long { 0xa09b } else { 0xc09b };
    let code = flat(code & !3 | cpl, size | cpl << 5);
    let stack = flat(stack & !3 | cpl, 0xc093 | cpl << 5);
    core.load_code(code);
    core.state.set_segment(Seg::Ss, stack);
    core.refresh();
}

fn system_call(core: &mut Core) -> Exec {
    let long = core.state.bits() == 64;
    if core.state.efer & EFER_SCE == 0 || (!long && !core.cpuid.is_amd()) {
        return core.ud();
    }
    if !long && !core.state.is_long() {
        return core.missing(Missing::LegacySyscall);
    }
    let msrs = core.state.msrs;
    let target = if long { msrs.lstar } else { msrs.cstar };
    core.entry = Entry::SystemCall;
    core.state.r[1] = core.state.rip;
    let flags = core.state.rflags();
    core.state.r[11] = flags & !RF;
    core.state.set_rflags(flags & !msrs.sfmask & !RF);
    core.state.rip = target;
    let selector = (msrs.star >> 32) as u16;
    load_flat(core, selector, selector.wrapping_add(8), 0, true);
    core.stepping = Stepping::Now;
    Err(Trap::Leave)
}

fn system_return(core: &mut Core, insn: &Instruction) -> Exec {
    if core.state.efer & EFER_SCE == 0 || core.state.bits() != 64 {
        return core.ud();
    }
    kernel_only(core)?;
    let long = insn.mnemonic() == Mnemonic::Sysretq;
    let target = core.state.r[1];
    let target = if long { target } else { target & 0xffff_ffff };
    // Intel checks before CPL changes; on AMD the fetch in CPL 3 faults.
    if long && !is_canonical(target) && !core.cpuid.is_amd() {
        return core.gp(0);
    }
    core.state.set_rflags(core.state.r[11] & !(RF | VM));
    core.state.rip = target;
    let base = (core.state.msrs.star >> 48) as u16;
    let code = if long { base.wrapping_add(16) } else { base };
    load_flat(core, code, base.wrapping_add(8), 3, long);
    core.stepping = Stepping::Now;
    Err(Trap::Leave)
}

fn system_enter(core: &mut Core) -> Exec {
    let msrs = core.state.msrs;
    if core.state.is_long() && core.cpuid.is_amd() {
        return core.ud();
    }
    let selector = msrs.sysenter_cs as u16;
    if is_real(core) || selector & !3 == 0 {
        return core.gp(0);
    }
    core.entry = Entry::SystemEnter;
    let long = core.state.is_long();
    let mask = if long { u64::MAX } else { 0xffff_ffff };
    core.state.system_flags &= !(IF | VM | RF);
    core.state.rip = msrs.sysenter_eip & mask;
    core.state.r[4] = msrs.sysenter_esp & mask;
    load_flat(core, selector, selector.wrapping_add(8), 0, long);
    Err(Trap::Leave)
}

fn system_exit(core: &mut Core, insn: &Instruction) -> Exec {
    if core.state.is_long() && core.cpuid.is_amd() {
        return core.ud();
    }
    let selector = core.state.msrs.sysenter_cs as u16;
    if is_real(core) || selector & !3 == 0 || core.state.cpl() != 0 {
        return core.gp(0);
    }
    let long = insn.mnemonic() == Mnemonic::Sysexitq;
    let (mut target, mut stack) = (core.state.r[2], core.state.r[1]);
    if !long {
        target &= 0xffff_ffff;
        stack &= 0xffff_ffff;
    }
    if !is_canonical(target) || !is_canonical(stack) {
        return core.gp(0);
    }
    core.state.rip = target;
    core.state.r[4] = stack;
    let code = selector.wrapping_add(if long { 32 } else { 16 });
    load_flat(core, code, code.wrapping_add(8), 3, long);
    Err(Trap::Leave)
}

// Control and debug registers.

pub(super) fn move_control(core: &mut Core, insn: &Instruction) -> Exec {
    let (to, from) = (insn.op0_register(), insn.op1_register());
    if to.is_dr() || from.is_dr() {
        return move_debug(core, to, from);
    }
    kernel_only(core)?;
    if from.is_cr() {
        let value = match from.number() {
            0 => core.state.cr0,
            2 => core.state.cr2,
            3 => core.state.cr3,
            4 => core.state.cr4,
            8 => core.state.cr8,
            _ => return core.ud(),
        };
        set(core, to, value);
        return Ok(());
    }
    let value = get(core, from);
    match to.number() {
        0 => set_cr0(core, value)?,
        2 => core.state.cr2 = value,
        3 => set_cr3(core, value)?,
        4 => set_cr4(core, value)?,
        8 if value < 16 => {
            core.look_at_once |= core.state.cr8 != value;
            core.state.cr8 = value;
        }
        8 => return core.gp(0),
        _ => return core.ud(),
    }
    Err(Trap::Leave)
}

fn set_cr0(core: &mut Core, value: u64) -> Exec {
    const KNOWN: u64 =
        CR0_PE | CR0_MP | CR0_EM | CR0_TS | CR0_NE | CR0_WP | CR0_AM | CR0_NW | CR0_CD | CR0_PG;
    let wrong = value >> 32 != 0
        || value & (CR0_PG | CR0_PE) == CR0_PG
        || value & (CR0_NW | CR0_CD) == CR0_NW;
    if wrong {
        return core.gp(0);
    }
    let old = core.state.cr0;
    let mut efer = core.state.efer;
    if value & !old & CR0_PG != 0 {
        if efer & EFER_LME == 0 {
            if core.state.cr4 & CR4_PAE != 0 {
                core.state.pdptes = top_entries(core, core.state.cr3)?;
            }
        } else {
            let long_code = core.state.segment(Seg::Cs).is_long();
            if core.state.cr4 & CR4_PAE == 0 || long_code {
                return core.gp(0);
            }
            efer |= EFER_LMA;
        }
    }
    if old & !value & CR0_PG != 0 {
        if core.state.bits() == 64 {
            return core.gp(0);
        }
        efer &= !EFER_LMA;
    }
    core.state.cr0 = value & KNOWN | CR0_ET;
    core.state.efer = efer;
    if (old ^ value) & (CR0_PG | CR0_WP | CR0_PE) != 0 {
        drop_translations(core);
    }
    core.refresh_paging();
    Ok(())
}

/// All of them, which takes its time.
fn drop_translations(core: &mut Core) {
    core.tlb.clear();
    core.spend(FLUSH);
}

/// PAE's four entries, which are loaded with CR3 and not looked at again (SDM vol. 3A, 5.4.1).
fn top_entries(core: &mut Core, cr3: u64) -> Exec<[u64; 4]> {
    let reserved = 0x1e6 | u64::MAX << core.cpuid.physical_bits();
    let mut entries = [0; 4];
    for (entry, at) in entries.iter_mut().zip((cr3 & 0xffff_ffe0..).step_by(8)) {
        let offset = core.ram.offset_of(at);
        *entry = offset.map_or(u64::MAX, |offset| core.ram.load(offset));
        if *entry & 1 != 0 && *entry & reserved != 0 {
            return core.gp(0);
        }
    }
    Ok(entries)
}

/// Paging by PAE's tables.
fn has_top(core: &Core, cr4: u64) -> bool {
    core.state.cr0 & CR0_PG != 0 && !core.state.is_long() && cr4 & CR4_PAE != 0
}

fn set_cr3(core: &mut Core, value: u64) -> Exec {
    if value >> core.cpuid.physical_bits() != 0 {
        return core.gp(0);
    }
    if has_top(core, core.state.cr4) {
        core.state.pdptes = top_entries(core, value)?;
    }
    core.state.cr3 = value;
    core.tlb.clear_local();
    core.spend(FLUSH);
    core.refresh_paging();
    Ok(())
}

fn set_cr4(core: &mut Core, value: u64) -> Exec {
    let no_pae = value & CR4_PAE == 0 && core.state.is_long();
    if value & !core.cpuid.cr4_mask() != 0 || no_pae {
        return core.gp(0);
    }
    let changed = core.state.cr4 ^ value;
    if has_top(core, value) && changed & (CR4_PAE | CR4_PGE | CR4_PSE | CR4_SMEP) != 0 {
        core.state.pdptes = top_entries(core, core.state.cr3)?;
    }
    core.state.cr4 = value;
    if changed & (CR4_PAE | CR4_PGE | CR4_PSE | CR4_SMEP | CR4_SMAP) != 0 {
        drop_translations(core);
    }
    core.refresh_paging();
    Ok(())
}

fn move_debug(core: &mut Core, to: Register, from: Register) -> Exec {
    /// DR6.BD.
    const DETECTED: u64 = 1 << 13;
    let register = if to.is_dr() { to } else { from };
    let number = register.number();
    if matches!(number, 4 | 5) && core.state.cr4 & CR4_DE != 0 {
        return core.ud();
    }
    kernel_only(core)?;
    if core.state.dr7 & DR7_GD != 0 {
        core.state.dr6 |= DETECTED;
        return core.raise(1, None);
    }
    if from.is_dr() {
        let value = match number {
            0..=3 => core.state.dr[number],
            4 | 6 => core.state.dr6,
            _ => core.state.dr7,
        };
        set(core, to, value);
        return Ok(());
    }
    let value = get(core, from);
    if number >= 4 && value >> 32 != 0 {
        return core.gp(0);
    }
    match number {
        0..=3 => core.state.dr[number] = value,
        4 | 6 => core.state.dr6 = value & 0xe00f | 0xffff_0ff0,
        _ => core.state.dr7 = value & 0xffff_23ff | 0x400,
    }
    core.refresh();
    Err(Trap::Leave)
}

fn load_status_word(core: &mut Core, insn: &Instruction) -> Exec {
    kernel_only(core)?;
    let value = read(core, insn, 0)? & 0xf;
    // PE is never cleared by it.
    let kept = core.state.cr0 & !0xe;
    set_cr0(core, kept | value)?;
    Err(Trap::Leave)
}

// MSRs.

/// The processor's own MSRs; the others are the caller's.
fn own_msr(core: &Core, index: u32) -> Option<u64> {
    let msrs = &core.state.msrs;
    Some(match index {
        0x10 => core.now().wrapping_add(msrs.tsc_offset),
        0x174 => msrs.sysenter_cs,
        0x175 => msrs.sysenter_esp,
        0x176 => msrs.sysenter_eip,
        0x277 => msrs.pat,
        0xc000_0080 => core.state.efer,
        0xc000_0081 => msrs.star,
        0xc000_0082 => msrs.lstar,
        0xc000_0083 => msrs.cstar,
        0xc000_0084 => msrs.sfmask,
        0xc000_0100 => core.state.segment(Seg::Fs).base,
        0xc000_0101 => core.state.segment(Seg::Gs).base,
        0xc000_0102 => msrs.kernel_gs_base,
        0xc000_0103 => msrs.tsc_aux,
        _ => return None,
    })
}

fn read_msr(core: &mut Core) -> Exec {
    kernel_only(core)?;
    let index = core.reg::<u32>(1);
    let value = match own_msr(core, index) {
        Some(value) => value,
        None => core.answered(VmExit::Rdmsr { index })?,
    };
    pair(core, value);
    Err(Trap::Leave)
}

/// Bits of PAT's eight fields are memory types.
fn is_pat(value: u64) -> bool {
    value
        .to_le_bytes()
        .iter()
        .all(|kind| matches!(kind, 0 | 1 | 4..=7))
}

fn write_msr(core: &mut Core) -> Exec {
    kernel_only(core)?;
    let index = core.reg::<u32>(1);
    let value = core.state.r[0] & 0xffff_ffff | core.state.r[2] << 32;
    let address = matches!(
        index,
        0x175 | 0x176 | 0xc000_0082 | 0xc000_0083 | 0xc000_0100..=0xc000_0102
    );
    // AMD's processors drop the upper half, Intel's have it reserved.
    let half = matches!(index, 0xc000_0084 | 0xc000_0103);
    let too_wide = half && value >> 32 != 0 && !core.cpuid.is_amd();
    if too_wide || address && !is_canonical(value) {
        return core.gp(0);
    }
    let now = core.now();
    let msrs = &mut core.state.msrs;
    match index {
        0x10 => {
            msrs.tsc_offset = value.wrapping_sub(now);
            core.look_at_once = true;
        }
        0x174 => msrs.sysenter_cs = value,
        0x175 => msrs.sysenter_esp = value,
        0x176 => msrs.sysenter_eip = value,
        0x277 if !is_pat(value) => return core.gp(0),
        0x277 => msrs.pat = value,
        0xc000_0080 => set_efer(core, value)?,
        0xc000_0081 => msrs.star = value,
        0xc000_0082 => msrs.lstar = value,
        0xc000_0083 => msrs.cstar = value,
        0xc000_0084 => msrs.sfmask = value & 0xffff_ffff,
        0xc000_0100 | 0xc000_0101 => {
            let seg = if index & 1 == 0 { Seg::Fs } else { Seg::Gs };
            let mut one = core.state.segment(seg);
            one.base = value;
            core.state.set_segment(seg, one);
        }
        0xc000_0102 => msrs.kernel_gs_base = value,
        0xc000_0103 => msrs.tsc_aux = value & 0xffff_ffff,
        _ => {
            core.answered(VmExit::Wrmsr { index, value })?;
        }
    }
    Err(Trap::Leave)
}

fn set_efer(core: &mut Core, value: u64) -> Exec {
    let known = core.cpuid.efer_mask() | EFER_LMA;
    let old = core.state.efer;
    let moves_lme = (old ^ value) & EFER_LME != 0 && core.state.cr0 & CR0_PG != 0;
    if value & !known != 0 || moves_lme {
        return core.gp(0);
    }
    core.state.efer = value & !EFER_LMA | old & EFER_LMA;
    if (old ^ value) & EFER_NXE != 0 {
        drop_translations(core);
    }
    core.refresh_paging();
    Ok(())
}

/// RDFSBASE and its like.
fn base_register(core: &mut Core, insn: &Instruction) -> Exec {
    if core.state.cr4 & CR4_FSGSBASE == 0 || core.state.bits() != 64 {
        return core.ud();
    }
    let register = insn.op0_register();
    let seg = match insn.mnemonic() {
        Mnemonic::Rdfsbase | Mnemonic::Wrfsbase => Seg::Fs,
        _ => Seg::Gs,
    };
    let mut one = core.state.segment(seg);
    if matches!(insn.mnemonic(), Mnemonic::Rdfsbase | Mnemonic::Rdgsbase) {
        set(core, register, one.base);
        return Ok(());
    }
    one.base = get(core, register);
    if !is_canonical(one.base) {
        return core.gp(0);
    }
    core.state.set_segment(seg, one);
    Ok(())
}

// Ports.

/// Whether the running code may use ports (SDM vol. 1, 19.5.2).
pub(super) fn check_port(core: &mut Core, port: u16, width: u8) -> Exec {
    let flags = core.state.system_flags;
    let free = u64::from(core.state.cpl()) <= (flags & IOPL) >> 12 && flags & VM == 0;
    if free || is_real(core) {
        return Ok(());
    }
    let task = core.state.segment(Seg::Tr);
    if task.limit < 0x67 {
        return core.gp(0);
    }
    let map = core.system_load::<u16>(task.base.wrapping_add(0x66))?;
    let at = map.wide() + u64::from(port / 8);
    if at + 1 > u64::from(task.limit) {
        return core.gp(0);
    }
    let bits = core.system_load::<u16>(task.base.wrapping_add(at))?;
    let mask = (1u16 << width) - 1;
    if bits >> (port % 8) & mask == 0 {
        Ok(())
    } else {
        core.gp(0)
    }
}

fn port(core: &mut Core, insn: &Instruction) -> Exec {
    let is_in = insn.mnemonic() == Mnemonic::In;
    let (value_at, port_at) = if is_in { (0, 1) } else { (1, 0) };
    let port = match insn.op_kind(port_at) {
        OpKind::Register => core.state.r[2] as u16,
        _ => u16::from(insn.immediate8()),
    };
    let register = insn.op_register(value_at);
    let width = register.size() as u8;
    check_port(core, port, width)?;
    if is_in {
        let value = core.port_in(port, width)?;
        set(core, register, value);
    } else {
        let value = get(core, register) as u32;
        core.port_out(port, width, value)?;
    }
    Err(Trap::Leave)
}

// Tables.

fn load_table(core: &mut Core, insn: &Instruction) -> Exec {
    kernel_only(core)?;
    let at = linear(core, insn, false)?;
    let limit = core.load::<u16>(at.at, at.seg)?;
    let behind = core.beyond(at.at, 2);
    let long = core.state.bits() == 64;
    let base = if long {
        core.load::<u64>(behind, at.seg)?
    } else {
        let base = core.load::<u32>(behind, at.seg)?.wide();
        let short = matches!(
            insn.code(),
            iced_x86::Code::Lgdt_m1632_16 | iced_x86::Code::Lidt_m1632_16
        );
        if short { base & 0xff_ffff } else { base }
    };
    if long && !is_canonical(base) {
        return core.gp(0);
    }
    let table = Table { base, limit };
    if insn.mnemonic() == Mnemonic::Lgdt {
        core.state.gdtr = table;
    } else {
        core.state.idtr = table;
    }
    Ok(())
}

fn store_table(core: &mut Core, insn: &Instruction, table: Table) -> Exec {
    let Linear { at, seg } = linear(core, insn, true)?;
    let behind = core.beyond(at, 2);
    if core.state.bits() == 64 {
        core.check_write(behind, 8, seg)?;
        core.store(at, seg, table.limit)?;
        core.store(behind, seg, table.base)
    } else {
        core.check_write(behind, 4, seg)?;
        core.store(at, seg, table.limit)?;
        core.store(behind, seg, table.base as u32)
    }
}

fn load_system_segment(core: &mut Core, insn: &Instruction) -> Exec {
    if is_real(core) {
        return core.ud();
    }
    kernel_only(core)?;
    let is_task = insn.mnemonic() == Mnemonic::Ltr;
    let selector = read(core, insn, 0)? as u16;
    if selector & !3 == 0 {
        if is_task {
            return core.gp(0);
        }
        let none = Segment {
            selector,
            ..Segment::default()
        };
        core.state.set_segment(Seg::Ldtr, none);
        return Ok(());
    }
    if selector & 4 != 0 {
        return core.gp(u32::from(selector & !3));
    }
    let long = core.state.is_long();
    let found = segment::find(core, selector, if long { 16 } else { 8 })?;
    let kind = if is_task { 9 } else { 2 };
    if found.is_segment() || found.kind() != kind {
        return core.gp(found.error());
    }
    if !found.is_present() {
        return core.raise(11, Some(found.error()));
    }
    let mut loaded = found.segment();
    if long {
        loaded.base |= segment::high_base(core, found)?;
        if !is_canonical(loaded.base) {
            return core.gp(found.error());
        }
    }
    if is_task {
        // It is busy now.
        segment::mark_busy(core, found)?;
        loaded.attr |= 2;
        core.state.set_segment(Seg::Tr, loaded);
    } else {
        core.state.set_segment(Seg::Ldtr, loaded);
    }
    Err(Trap::Leave)
}

fn store_selector(core: &mut Core, insn: &Instruction) -> Exec {
    if is_real(core) {
        return core.ud();
    }
    let seg = if insn.mnemonic() == Mnemonic::Str {
        Seg::Tr
    } else {
        Seg::Ldtr
    };
    let selector = core.state.segment(seg).selector;
    write(core, insn, 0, u64::from(selector))
}

fn invalidate_page(core: &mut Core, insn: &Instruction) -> Exec {
    kernel_only(core)?;
    // The segment's limit and rights are not asked: only CPL faults.
    let base = core.segment_base(memory_seg(core, insn));
    let mut at = base.wrapping_add(offset(core, insn));
    if core.state.bits() != 64 {
        at &= 0xffff_ffff;
    }
    core.tlb.clear_page(at);
    core.spend(FLUSH);
    core.flushed = true;
    Err(Trap::Leave)
}

// What a selector allows.

fn found_for(core: &mut Core, selector: u16) -> Exec<Option<segment::Descriptor>> {
    if selector & !3 == 0 {
        return Ok(None);
    }
    match segment::find(core, selector, 8) {
        Ok(found) => Ok(Some(found)),
        // Beyond the table is an answer; a page that is not there is a fault.
        Err(Trap::Fault) if core.fault.vector == 13 => Ok(None),
        Err(trap) => Err(trap),
    }
}

fn set_zf(core: &mut Core, on: bool) {
    let bits = core.state.flags.bits() & !ZF;
    core.state.flags = Flags::from_bits(bits | if on { ZF } else { 0 });
}

fn load_rights(core: &mut Core, insn: &Instruction) -> Exec {
    if is_real(core) {
        return core.ud();
    }
    let selector = read(core, insn, 1)? as u16;
    let limit_wanted = insn.mnemonic() == Mnemonic::Lsl;
    let found = found_for(core, selector)?;
    let cpl = core.state.cpl();
    let long = core.state.is_long();
    let value = found.and_then(|found| {
        let system = match found.kind() {
            2 | 9 | 11 => true,
            12 => !limit_wanted,
            1 | 3 => !long,
            4 | 5 => !long && !limit_wanted,
            _ => false,
        };
        let valid = found.is_segment() || system;
        let conforming = found.is_code() && found.is_conforming();
        let open = conforming || found.dpl() >= cpl.max((selector & 3) as u8);
        let value = if limit_wanted {
            u64::from(found.segment().limit)
        } else {
            found.low >> 32 & 0x00ff_ff00
        };
        (valid && open).then_some(value)
    });
    if let Some(value) = value {
        set(core, insn.op0_register(), value);
    }
    set_zf(core, value.is_some());
    Ok(())
}

fn verify(core: &mut Core, insn: &Instruction) -> Exec {
    if is_real(core) {
        return core.ud();
    }
    let selector = read(core, insn, 0)? as u16;
    let for_write = insn.mnemonic() == Mnemonic::Verw;
    let found = found_for(core, selector)?;
    let cpl = core.state.cpl();
    let allowed = found.is_some_and(|found| {
        let conforming = found.is_code() && found.is_conforming();
        let open = conforming || found.dpl() >= cpl.max((selector & 3) as u8);
        let kind = if for_write {
            found.is_writable_data()
        } else {
            found.is_segment() && (!found.is_code() || found.kind() & 2 != 0)
        };
        kind && open
    });
    set_zf(core, allowed);
    Ok(())
}
