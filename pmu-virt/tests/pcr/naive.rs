//! The reservations of a PMU a second time, naively: one record per counter, and
//! every rule of `docs/reference/pcr.md` spelled out for each of them.

use super::machine::{A, M, X};
use arbiter::abi;
use pmu_virt::Layer;

/// A register, by what it is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Reg {
    Counter(u8),
    Select(u8),
    FixedCtrl,
    Ctrl,
    Status,
    Clear,
    Set,
    InUse,
    Alias(u8),
    AliasSelect(u8),
    AliasOverflow(u8),
    Management(u8),
    Access(u8),
    Control(u8),
    DropValue(u8),
    Reserved(u8),
    Map(u8),
    Phase,
}

/// What an access comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    Value(u64),
    Done,
    Gp,
    Absent,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Owner {
    layer: Layer,
    management: u64,
    pub(crate) access: u64,
    pub(crate) control: u64,
    drop_value: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counter {
    select: u64,
    count: u64,
    overflowed: bool,
    /// Its bit of global control.
    enabled: bool,
    owner: Option<Owner>,
}

/// `intel-v2`, `intel-v4` or `amd-perfmonv2`, counting reference cycles at CPL 0.
#[derive(Debug)]
pub(crate) struct Naive {
    amd: bool,
    programmable: u8,
    fixed: u8,
    counters: [Counter; 64],
    pub(crate) phase_over: bool,
    /// Names that are shown once the phase is over.
    visible: Option<(u8, u8)>,
    /// By name, the position.
    names: Option<Vec<(u8, u8)>>,
    pub(crate) freeze: bool,
    /// `intel-v4`.
    newer: bool,
    /// Bits of its status that belong to no counter.
    indicators: u64,
    pub(crate) pending: u64,
    /// Wrong cookies presented.
    pub(crate) wrong: u64,
}

const MASK: u64 = (1 << 48) - 1;

impl Naive {
    pub(crate) fn new(amd: bool, firmware: bool, visible: Option<(u8, u8)>) -> Self {
        let (programmable, fixed) = if amd { (6, 0) } else { (4, 3) };
        let mut naive = Naive {
            amd,
            programmable,
            fixed,
            counters: [Counter::default(); 64],
            phase_over: !firmware,
            visible,
            names: None,
            freeze: false,
            newer: false,
            indicators: 0,
            pending: 0,
            wrong: 0,
        };
        for n in 0..programmable {
            naive.counters[usize::from(n)].enabled = true;
        }
        naive.rename();
        naive
    }

    /// The same as `intel-v4`.
    pub(crate) fn version_4(self) -> Self {
        Naive {
            newer: true,
            ..self
        }
    }

    fn rename(&mut self) {
        let (Some((programmable, fixed)), true) = (self.visible, self.phase_over) else {
            return;
        };
        let mut names = Vec::new();
        for position in 0..self.programmable {
            let taken = self
                .owner(position)
                .is_some_and(|owner| matches!(owner.layer, Layer::Firmware | Layer::Hypervisor));
            let name = u8::try_from(names.len()).expect("there are few");
            if !taken && name < programmable {
                names.push((name, position));
            }
        }
        names.extend((32..32 + fixed.min(self.fixed)).map(|n| (n, n)));
        self.names = Some(names);
    }

    pub(crate) fn positions(&self) -> Vec<u8> {
        (0..self.programmable).chain(32..32 + self.fixed).collect()
    }

    /// Names with the positions behind them.
    fn named(&self) -> Vec<(u8, u8)> {
        match &self.names {
            Some(names) => names.clone(),
            None => self.positions().into_iter().map(|n| (n, n)).collect(),
        }
    }

    fn exists(&self, position: u8) -> bool {
        self.positions().contains(&position)
    }

    fn at(&self, position: u8) -> &Counter {
        &self.counters[usize::from(position)]
    }

    fn at_mut(&mut self, position: u8) -> &mut Counter {
        &mut self.counters[usize::from(position)]
    }

    pub(crate) fn owner(&self, position: u8) -> Option<Owner> {
        self.at(position).owner
    }

    fn control(&self, position: u8) -> u64 {
        self.owner(position)
            .map_or(0x1f_00ff, |owner| owner.control)
    }

    fn reaches(&self, position: u8, bit: u64) -> bool {
        self.control(position) & bit != 0
    }

    /// Names whose counters a shared register of `bit` reaches.
    fn reached(&self, bit: u64) -> Vec<(u8, u8)> {
        let reaches = |(_, position): &(u8, u8)| self.reaches(*position, bit);
        self.named().into_iter().filter(reaches).collect()
    }

    /// `None`: let through.
    fn denied(&mut self, layer: Layer, cookie: u64, position: u8, rdpmc: bool) -> Option<Seen> {
        let Some(owner) = self.owner(position) else {
            return (cookie != 0).then_some(Seen::Value(0));
        };
        let in_layer = owner.control >> (4 + layer.code()) & 1 == 1;
        if cookie == owner.access && in_layer {
            return None;
        }
        // Where no cookie is valid, none is a guess.
        self.wrong += u64::from(cookie != 0 && in_layer);
        let fault = if rdpmc && layer != Layer::GuestUser && layer != Layer::Hypervisor {
            1 << 9
        } else {
            1 << 8
        };
        Some(if owner.control & fault != 0 {
            Seen::Gp
        } else {
            Seen::Value(owner.drop_value)
        })
    }

    pub(crate) fn read(&mut self, reg: Reg, layer: Layer, cookie: u64) -> Seen {
        let bits = |names: Vec<(u8, u8)>, is_set: &dyn Fn(u8) -> bool| {
            let set = names.iter().filter(|(_, position)| is_set(*position));
            Seen::Value(set.map(|(name, _)| 1 << name).sum())
        };
        match reg {
            Reg::Counter(name) | Reg::Select(name) => {
                let position = match self.named().into_iter().find(|(n, _)| *n == name) {
                    Some((_, position)) => position,
                    None => return Seen::Absent,
                };
                let denied = self.denied(layer, 0, position, false);
                let counter = *self.at(position);
                denied.unwrap_or(Seen::Value(match reg {
                    Reg::Counter(_) => counter.count,
                    _ => counter.select,
                }))
            }
            Reg::FixedCtrl => {
                let reached = self.reached(abi::CONTROL_FIXED_CTRL).into_iter();
                let fields = reached.filter(|(name, _)| *name >= 32);
                Seen::Value(
                    fields
                        .map(|(n, p)| self.at(p).select << (4 * (n - 32)))
                        .sum(),
                )
            }
            Reg::Ctrl => bits(self.reached(abi::CONTROL_GLOBAL_CTRL), &|p| {
                self.at(p).enabled
            }),
            Reg::Status => match bits(self.reached(abi::CONTROL_OVF_CLEAR), &|p| {
                self.at(p).overflowed
            }) {
                Seen::Value(counters) => Seen::Value(counters | self.indicators),
                other => other,
            },
            Reg::InUse if self.newer => {
                let reached = self.reached(abi::CONTROL_OVF_CLEAR);
                let int = |p: u8| self.at(p).select & if p < 32 { 1 << 20 } else { 8 } != 0;
                let pmi = reached.iter().any(|(_, p)| int(*p));
                let used = |p: u8| self.at(p).select & if p < 32 { 0xff } else { 3 } != 0;
                let used = reached.iter().filter(|(_, p)| used(*p));
                let used: u64 = used.map(|(name, _)| 1u64 << name).sum();
                Seen::Value(used | u64::from(pmi) << 63)
            }
            Reg::InUse => Seen::Absent,
            Reg::Set if !self.amd && !self.newer => Seen::Absent,
            Reg::Clear | Reg::Set => Seen::Value(0),
            Reg::Alias(p) | Reg::AliasSelect(p) | Reg::AliasOverflow(p) => {
                if !self.exists(p) || cookie > MASK {
                    return Seen::Gp;
                }
                let denied = self.denied(layer, cookie, p, false);
                let counter = *self.at(p);
                denied.unwrap_or(Seen::Value(match reg {
                    Reg::Alias(_) => counter.count,
                    Reg::AliasSelect(_) => counter.select,
                    _ => u64::from(counter.overflowed),
                }))
            }
            Reg::Control(p) if self.exists(p) => Seen::Value(self.control(p)),
            Reg::DropValue(p) if self.exists(p) => {
                Seen::Value(self.owner(p).map_or(0, |owner| owner.drop_value))
            }
            Reg::Reserved(p) if self.exists(p) => Seen::Value(match self.owner(p) {
                None => 0,
                Some(owner) => {
                    1 | u64::from(owner.layer.code()) << 1 | u64::from(owner.access != 0) << 4
                }
            }),
            Reg::Map(name) => {
                let found = self.named().into_iter().find(|(n, _)| *n == name);
                Seen::Value(found.map_or(u64::MAX, |(_, position)| u64::from(position)))
            }
            Reg::Phase => Seen::Value(u64::from(layer.code())),
            _ => Seen::Gp,
        }
    }

    pub(crate) fn rdpmc(&mut self, n: u8, layer: Layer) -> Seen {
        match self.named().into_iter().find(|(name, _)| *name == n) {
            Some((_, position)) => {
                let denied = self.denied(layer, 0, position, true);
                denied.unwrap_or(Seen::Value(self.at(position).count))
            }
            None => Seen::Gp,
        }
    }

    pub(crate) fn rdpmc_with(&mut self, position: u8, layer: Layer, cookie: u64) -> Seen {
        if !self.exists(position) || cookie > MASK {
            return Seen::Gp;
        }
        let denied = self.denied(layer, cookie, position, true);
        denied.unwrap_or(Seen::Value(self.at(position).count))
    }

    pub(crate) fn write(&mut self, reg: Reg, value: u64, layer: Layer, cookie: u64) -> Seen {
        match reg {
            Reg::Counter(name) | Reg::Select(name) => {
                let Some((_, position)) = self.named().into_iter().find(|(n, _)| *n == name) else {
                    return Seen::Absent;
                };
                match self.denied(layer, 0, position, false) {
                    Some(Seen::Gp) => Seen::Gp,
                    Some(_) => Seen::Done,
                    None => match reg {
                        Reg::Counter(_) => self.write_legacy_count(position, value),
                        _ => self.write_select(position, value),
                    },
                }
            }
            Reg::FixedCtrl => self.write_fixed(value),
            Reg::Ctrl => self.write_bits(value, abi::CONTROL_GLOBAL_CTRL, |counter, bit| {
                counter.enabled = bit;
            }),
            Reg::Set if !self.amd && !self.newer => Seen::Absent,
            Reg::InUse if !self.newer => Seen::Absent,
            Reg::Clear | Reg::Set => self.write_status(reg, value),
            Reg::Status if self.amd => Seen::Done,
            Reg::Alias(p) | Reg::AliasSelect(p) | Reg::AliasOverflow(p) => {
                if !self.exists(p) || cookie > MASK {
                    return Seen::Gp;
                }
                match self.denied(layer, cookie, p, false) {
                    Some(Seen::Gp) => Seen::Gp,
                    Some(_) => Seen::Done,
                    None => self.write_alias(reg, p, value),
                }
            }
            Reg::Management(p) | Reg::Access(p) | Reg::Control(p) | Reg::DropValue(p)
                if self.exists(p) =>
            {
                self.manage(reg, p, value, layer, cookie)
            }
            Reg::Phase => {
                if value != 1 || self.phase_over {
                    return Seen::Gp;
                }
                self.phase_over = true;
                self.rename();
                Seen::Done
            }
            _ => Seen::Gp,
        }
    }

    fn write_status(&mut self, reg: Reg, value: u64) -> Seen {
        let set = matches!(reg, Reg::Set);
        // LBR_FRZ to OvfBuffer; CondChgd can be cleared.
        let indicators = 0b1_1111 << 58 | u64::from(!set) << 63;
        let of_nobody = match (self.amd, self.newer) {
            (false, true) => indicators,
            (false, false) => 0b11 << 62,
            (true, _) => 0,
        };
        let change: fn(&mut Counter, bool) = if set {
            |counter, bit| counter.overflowed |= bit
        } else {
            |counter, bit| counter.overflowed &= !bit
        };
        let of_counters = value & !of_nobody;
        let seen = self.write_bits(of_counters, abi::CONTROL_OVF_CLEAR, change);
        if seen == Seen::Done && self.newer {
            let bits = value & of_nobody;
            self.indicators = if set {
                self.indicators | bits
            } else {
                self.indicators & !bits
            };
        }
        seen
    }

    fn write_legacy_count(&mut self, position: u8, value: u64) -> Seen {
        // The tests write through AMD's counters, which cut, and through Intel's
        // full-width names, which fault.
        if !self.amd && value > MASK {
            return Seen::Gp;
        }
        self.at_mut(position).count = value & MASK;
        Seen::Done
    }

    fn write_select(&mut self, position: u8, value: u64) -> Seen {
        let allowed = match (self.amd, position) {
            (true, _) => 0x30f_ffd7_ffff,
            (false, 0..32) if self.newer => 0xffff_ffff,
            (false, 0..32) => 0xffdf_ffff,
            (false, _) if self.newer => 0xf,
            (false, _) => 0xb,
        };
        if !self.amd && value & !allowed != 0 {
            return Seen::Gp;
        }
        self.at_mut(position).select = value & allowed;
        Seen::Done
    }

    fn write_alias(&mut self, reg: Reg, position: u8, value: u64) -> Seen {
        match reg {
            Reg::AliasSelect(_) => return self.write_select(position, value),
            Reg::Alias(_) if value <= MASK => self.at_mut(position).count = value,
            Reg::AliasOverflow(_) if value <= 1 => {
                self.at_mut(position).overflowed &= value == 0;
            }
            _ => return Seen::Gp,
        }
        Seen::Done
    }

    fn write_fixed(&mut self, value: u64) -> Seen {
        let names = self.named().into_iter().filter(|(name, _)| *name >= 32);
        let field = if self.newer { 0xf } else { 0xb };
        let allowed: u64 = names.map(|(name, _)| field << (4 * (name - 32))).sum();
        if value & !allowed != 0 {
            return Seen::Gp;
        }
        for (name, position) in self.reached(abi::CONTROL_FIXED_CTRL) {
            if name >= 32 {
                self.at_mut(position).select = value >> (4 * (name - 32)) & 0xf;
            }
        }
        Seen::Done
    }

    fn write_bits(&mut self, value: u64, control: u64, set: fn(&mut Counter, bool)) -> Seen {
        let names = self.named();
        let allowed: u64 = names.iter().map(|(name, _)| 1 << name).sum();
        if !self.amd && value & !allowed != 0 {
            return Seen::Gp;
        }
        for (name, position) in self.reached(control) {
            set(self.at_mut(position), value >> name & 1 == 1);
        }
        Seen::Done
    }

    fn manage(&mut self, reg: Reg, p: u8, value: u64, layer: Layer, cookie: u64) -> Seen {
        let makes_sense = match reg {
            Reg::Control(_) => value & !0x11f_03ff == 0,
            _ => value <= MASK,
        };
        if !makes_sense || cookie > MASK {
            return Seen::Gp;
        }
        let Some(owner) = self.owner(p) else {
            let Reg::Management(_) = reg else {
                return Seen::Gp;
            };
            if cookie != 0 {
                return Seen::Gp;
            }
            if value != 0 {
                self.at_mut(p).owner = Some(Owner {
                    layer,
                    management: value,
                    access: 0,
                    control: 0x1f_00ff,
                    drop_value: 0,
                });
            }
            return Seen::Done;
        };
        if cookie != owner.management || owner.control >> layer.code() & 1 == 0 {
            let in_layer = owner.control >> layer.code() & 1 == 1;
            self.wrong += u64::from(cookie != 0 && in_layer);
            return Seen::Gp;
        }
        let mut next = owner;
        match reg {
            Reg::Management(_) if value == 0 => {
                let counter = self.at_mut(p);
                *counter = Counter {
                    enabled: counter.enabled,
                    ..Counter::default()
                };
                self.pending &= !(1 << p);
                return Seen::Done;
            }
            Reg::Management(_) if value != owner.management => {
                (next.management, next.layer) = (value, layer);
            }
            Reg::Access(_) => next.access = value,
            Reg::Control(_) => next.control = value,
            Reg::DropValue(_) => next.drop_value = value,
            _ => {}
        }
        self.at_mut(p).owner = Some(next);
        Seen::Done
    }

    pub(crate) fn run(&mut self, ticks: u64) {
        let mut freezes = false;
        let named: Vec<u8> = self.named().into_iter().map(|(_, p)| p).collect();
        for p in self.positions() {
            let counter = *self.at(p);
            let is_frozen = self.indicators >> 59 & 1 == 1
                && self.reaches(p, abi::CONTROL_FREEZE)
                && named.contains(&p);
            let (on, int) = match p {
                0..32 => {
                    let event = if self.amd { 0x76 } else { 0x13c };
                    let counts = counter.select & 0xffff == event;
                    let on = counts && counter.select >> 17 & 1 == 1;
                    (
                        on && counter.select >> 22 & 1 == 1,
                        counter.select >> 20 & 1 == 1,
                    )
                }
                // A clock has no instructions.
                _ => (p > 32 && counter.select & 1 == 1, counter.select & 8 != 0),
            };
            let is_held_back = !counter.enabled && self.reaches(p, abi::CONTROL_GLOBAL_CTRL);
            if !on || is_held_back || is_frozen {
                continue;
            }
            let sum = counter.count + ticks;
            self.at_mut(p).count = sum & MASK;
            if sum > MASK {
                self.at_mut(p).overflowed = true;
                self.pending |= u64::from(int) << p;
                freezes |= int && self.reaches(p, abi::CONTROL_FREEZE);
            }
        }
        if freezes && self.freeze && self.newer {
            self.indicators |= 1 << 59;
        } else if freezes && self.freeze {
            for (_, p) in self.reached(abi::CONTROL_GLOBAL_CTRL) {
                if self.reaches(p, abi::CONTROL_FREEZE) {
                    self.at_mut(p).enabled = false;
                }
            }
        }
    }
}

/// Cookies that the tests use: right ones, wrong ones, one that is none.
pub(crate) const COOKIES: [u64; 5] = [0, M, A, X, 1 << 48];
