//! Which events may be counted: by a guest, and by tools of the host.
//!
//! A pure function of a request. Whoever asks for what is denied is told so
//! ([`UnavailableReason::Denied`]); it is never counted as 0.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

use pmu_model::{
    CountRequest, EventCode, EventFamily, FixedFunction, KnownEvent, UnavailableReason,
};
use serde::Deserialize;
use serde::de::{Deserializer, Error};

/// What is decided where no rule does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EventProfile {
    /// Cycles, instructions and branches, as CPUID leaf 0xA announces them, and what means the
    /// same to AMD; nothing of the last-level cache, which tells of others.
    Architectural,
    /// Every event but those that see beyond the core: the last-level cache, responses from
    /// beyond the core, the northbridge.
    Standard,
    /// Every event.
    #[default]
    All,
}

impl EventProfile {
    /// The names, for messages.
    pub const ALLOWED: &str = "architectural, standard or all";

    /// The profile of this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "architectural" => Some(EventProfile::Architectural),
            "standard" => Some(EventProfile::Standard),
            "all" => Some(EventProfile::All),
            _ => None,
        }
    }

    fn allows(self, event: &EventCode) -> bool {
        match self {
            EventProfile::All => true,
            EventProfile::Standard => !is_beyond_core(event),
            EventProfile::Architectural => matches!(
                event.known(),
                Some(
                    KnownEvent::CoreCycles
                        | KnownEvent::RefCycles
                        | KnownEvent::Instructions
                        | KnownEvent::Branches
                        | KnownEvent::MispredictedBranches
                )
            ),
        }
    }
}

/// Whether an event sees what others on the processor do. Intel: LONGEST_LAT_CACHE (2EH) and
/// OFF_CORE_RESPONSE (B7H, BBH; 2AH, 2BH from Alder Lake on), SDM vol. 3B and the event lists.
/// AMD: the northbridge's and L3's event selects (K8 and Family 10h BKDG, "NB Events").
fn is_beyond_core(event: &EventCode) -> bool {
    let cache = [KnownEvent::LlcReferences, KnownEvent::LlcMisses];
    let is_known = event.known().is_some_and(|event| cache.contains(&event));
    let EventCode::Selected { family, select, .. } = *event else {
        return is_known;
    };
    is_known
        || match family {
            EventFamily::AmdK7 => (0xe0..=0xff).contains(&select),
            EventFamily::AmdFam10h => matches!(select & 0xff, 0xe0..=0xff),
            EventFamily::AmdZen | EventFamily::AmdZen4 => false,
            // Of whatever generation.
            _ => matches!(select, 0x2e | 0xb7 | 0xbb | 0x2a | 0x2b),
        }
}

/// One rule: what it says of the requests that it fits. What is not named fits any.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct EventRule {
    action: Action,
    /// Event select, 0 to 0xfff.
    select: Option<Numbers<0xfff>>,
    /// Unit mask.
    umask: Option<Numbers<0xff>>,
    /// Bits of the unit mask that are looked at; all without it.
    umask_mask: Option<u8>,
    /// Counter mask.
    cmask: Option<Numbers<0xff>>,
    invert: Option<bool>,
    edge: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Action {
    Allow,
    Deny,
}

/// A number, or a range as "0xd0-0xd4".
#[derive(Clone, Debug, PartialEq, Eq)]
struct Numbers<const MOST: u16>(RangeInclusive<u16>);

impl<'de, const MOST: u16> Deserialize<'de> for Numbers<MOST> {
    fn deserialize<D: Deserializer<'de>>(source: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Given {
            One(u64),
            Words(String),
        }
        let number = |word: &str| {
            let word = word.trim();
            match word.strip_prefix("0x") {
                Some(digits) => u64::from_str_radix(digits, 16).ok(),
                None => word.parse().ok(),
            }
        };
        let wrong = || D::Error::custom(format!("give a number up to {MOST:#x}, or \"0xd0-0xd4\""));
        let (first, last) = match Given::deserialize(source).map_err(|_| wrong())? {
            Given::One(one) => (one, one),
            Given::Words(words) => {
                let (first, last) = words.split_once('-').unwrap_or((&words, &words));
                number(first).zip(number(last)).ok_or_else(wrong)?
            }
        };
        let small = |number: u64| u16::try_from(number).ok().filter(|number| *number <= MOST);
        match small(first).zip(small(last)) {
            Some((first, last)) if first <= last => Ok(Numbers(first..=last)),
            _ => Err(wrong()),
        }
    }
}

impl EventRule {
    /// Whether the request is one that the rule is about. Those without an event select are
    /// about no rule.
    fn fits(&self, request: &CountRequest) -> bool {
        let Some((select, umask)) = codes(&request.event) else {
            return false;
        };
        let mask = self.umask_mask.unwrap_or(u8::MAX);
        let has = |wanted: Option<&RangeInclusive<u16>>, number: u16| {
            wanted.is_none_or(|wanted| wanted.contains(&number))
        };
        has(self.select.as_ref().map(|one| &one.0), select)
            && has(self.umask.as_ref().map(|one| &one.0), (umask & mask).into())
            && has(self.cmask.as_ref().map(|one| &one.0), request.cmask.into())
            && self.invert.is_none_or(|invert| invert == request.invert)
            && self.edge.is_none_or(|edge| edge == request.edge)
    }
}

/// Event select and unit mask; those of the same event for a fixed-function counter.
fn codes(event: &EventCode) -> Option<(u16, u8)> {
    match *event {
        EventCode::Selected { select, umask, .. } => Some((select, umask)),
        EventCode::Fixed(FixedFunction::Instructions) => Some((0xc0, 0)),
        EventCode::Fixed(FixedFunction::CoreCycles) => Some((0x3c, 0)),
        EventCode::Fixed(FixedFunction::RefCycles) => Some((0x3c, 1)),
        _ => None,
    }
}

/// Which events somebody may count: the first rule that fits decides, and the profile where
/// none does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventFilter {
    /// What no rule decides.
    #[serde(default)]
    pub profile: EventProfile,
    #[serde(default, rename = "rule")]
    rules: Vec<EventRule>,
}

impl EventFilter {
    /// Whether the request may be counted.
    ///
    /// # Errors
    /// It may not.
    pub fn check(&self, request: &CountRequest) -> Result<(), UnavailableReason> {
        // The kernel counts these of its own threads.
        if matches!(request.event, EventCode::Software(_)) {
            return Ok(());
        }
        let decides = self.rules.iter().find(|rule| rule.fits(request));
        let allows = match decides {
            Some(rule) => rule.action == Action::Allow,
            None => self.profile.allows(&request.event),
        };
        let event = request.event;
        allows
            .then_some(())
            .ok_or(UnavailableReason::Denied { event })
    }
}

/// The tools of some users.
#[cfg(feature = "toml")]
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolFilter {
    #[serde(default)]
    users: Vec<u32>,
    #[serde(default)]
    groups: Vec<u32>,
    #[serde(default)]
    profile: EventProfile,
    #[serde(default, rename = "rule")]
    rules: Vec<EventRule>,
}

/// A file of `--event-filter`.
#[cfg(feature = "toml")]
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct FilterFile {
    #[serde(default)]
    guest: EventFilter,
    #[serde(default)]
    tools: Vec<ToolFilter>,
}

/// Which events a VM's guest and the host's tools may count in it; a file says so with the feature
/// `toml`:
///
/// ```
/// # #[cfg(feature = "toml")] {
/// let filters = pmu_virt::EventFilters::parse(
///     r#"
///     [guest]
///     profile = "standard"              # what no rule decides
///     [[guest.rule]]                    # the first that fits decides
///     action = "deny"
///     select = 0xd1                     # or "0xd0-0xd4"
///     umask = 0x01                      # and umask-mask, cmask, invert, edge
///
///     [[tools]]                         # those of these users; others are as the guest
///     users = [0, 1001]
///     groups = [44]
///     profile = "all"
///     "#,
/// )?;
/// # let _ = filters;
/// # }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct EventFilters {
    guest: Arc<EventFilter>,
    tools: Vec<(Vec<u32>, Vec<u32>, Arc<EventFilter>)>,
}

/// A file that is none of filters.
#[cfg(feature = "toml")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FilterError(String);

impl EventFilters {
    /// One profile for all.
    #[must_use]
    pub fn of(profile: EventProfile) -> Self {
        EventFilters {
            guest: Arc::new(EventFilter {
                profile,
                rules: Vec::new(),
            }),
            tools: Vec::new(),
        }
    }

    /// What `text` says.
    ///
    /// # Errors
    /// What is wrong, with its line and column.
    #[cfg(feature = "toml")]
    pub fn parse(text: &str) -> Result<Self, FilterError> {
        let file: FilterFile = toml::from_str(text).map_err(|error| {
            let before = error.span().map_or("", |span| &text[..span.start]);
            let line = before.bytes().filter(|byte| *byte == b'\n').count() + 1;
            let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
            let message = error.message().lines().collect::<Vec<_>>().join("; ");
            FilterError(format!("{line}:{column}: {message}"))
        })?;
        let tools = file.tools.into_iter().map(|tool| {
            let filter = EventFilter {
                profile: tool.profile,
                rules: tool.rules,
            };
            (tool.users, tool.groups, Arc::new(filter))
        });
        Ok(EventFilters {
            guest: Arc::new(file.guest),
            tools: tools.collect(),
        })
    }

    /// What the guest may count.
    #[must_use]
    pub fn guest(&self) -> &Arc<EventFilter> {
        &self.guest
    }

    /// What a tool of this user in these groups may count: as the first section says that
    /// names it, or as the guest.
    #[must_use]
    pub fn tool(&self, user: u32, groups: &[u32]) -> &Arc<EventFilter> {
        let named = self.tools.iter().find(|(users, of, _)| {
            users.contains(&user) || groups.iter().any(|group| of.contains(group))
        });
        named.map_or(&self.guest, |(_, _, filter)| filter)
    }
}

impl fmt::Display for EventProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EventProfile::Architectural => "architectural",
            EventProfile::Standard => "standard",
            EventProfile::All => "all",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use EventFamily::{AmdFam10h, AmdZen, Intel};
    use pmu_model::SoftwareEvent;

    fn request(family: EventFamily, select: u16, umask: u8) -> CountRequest {
        let event = EventCode::Selected {
            family,
            select,
            umask,
        };
        CountRequest::plain(event, true, true)
    }

    fn fixed(function: FixedFunction) -> CountRequest {
        CountRequest::plain(EventCode::Fixed(function), true, true)
    }

    #[test]
    fn profiles_allow_what_cloud_users_know_them_for() {
        use EventProfile::{All, Architectural, Standard};
        for (request, least) in [
            (request(Intel, 0x3c, 0), Architectural),
            (request(Intel, 0xc5, 0), Architectural),
            (request(AmdZen, 0xc2, 0), Architectural),
            (fixed(FixedFunction::RefCycles), Architectural),
            (request(Intel, 0xc4, 0x20), Standard),
            (request(Intel, 0x2e, 0x41), All),
            (request(Intel, 0x2e, 0x01), All),
            (request(Intel, 0xb7, 0x01), All),
            (request(AmdZen, 0x64, 0x70), Standard),
            (request(AmdFam10h, 0x4e1, 0x07), All),
            (request(AmdFam10h, 0xe0, 0x07), All),
        ] {
            for profile in [Architectural, Standard, All] {
                let filters = EventFilters::of(profile);
                let allowed = filters.guest().check(&request).is_ok();
                let rank = |profile| {
                    [Architectural, Standard, All]
                        .iter()
                        .position(|p| *p == profile)
                };
                assert_eq!(
                    allowed,
                    rank(profile) >= rank(least),
                    "{profile}: {request}"
                );
            }
        }
        let software = EventCode::Software(SoftwareEvent::PageFaults);
        let software = CountRequest::plain(software, true, true);
        let strictest = EventFilters::of(Architectural);
        assert_eq!(strictest.guest().check(&software), Ok(()));
        let meaning = CountRequest::plain(EventCode::Meaning(KnownEvent::Strings), true, true);
        let event = meaning.event;
        let denied = strictest.guest().check(&meaning);
        assert_eq!(denied, Err(UnavailableReason::Denied { event }));
    }

    #[test]
    fn the_first_rule_that_fits_decides() {
        let filters = EventFilters::parse(
            "[guest]\nprofile = \"architectural\"\n\
             [[guest.rule]]\naction = \"deny\"\nselect = 0xc0\nedge = true\n\
             [[guest.rule]]\naction = \"deny\"\ncmask = \"2-0xff\"\n\
             [[guest.rule]]\naction = \"allow\"\nselect = \"0xd0-0xd4\"\numask = 1\numask-mask = 0x0f\n\
             [[guest.rule]]\naction = \"deny\"\nselect = 60\numask = 0\ninvert = false\n\
             [[tools]]\nusers = [7]\n[[tools]]\ngroups = [5]\nprofile = \"standard\"\n",
        )
        .unwrap();
        let check = |request: &CountRequest| filters.guest().check(request).is_ok();
        let plain = request(Intel, 0xc0, 0);
        for (request, allowed) in [
            (plain, true),
            (
                CountRequest {
                    edge: true,
                    ..plain
                },
                false,
            ),
            (CountRequest { cmask: 1, ..plain }, true),
            (CountRequest { cmask: 2, ..plain }, false),
            (request(Intel, 0xd2, 0x81), true),
            (request(Intel, 0xd2, 0x82), false),
            (request(Intel, 0xd5, 0x81), false),
            (request(Intel, 0x3c, 0), false),
            (fixed(FixedFunction::CoreCycles), false),
            (fixed(FixedFunction::Instructions), true),
            (request(Intel, 0x3c, 1), true),
        ] {
            assert_eq!(check(&request), allowed, "{request}");
        }
        let llc = request(Intel, 0x2e, 0x41);
        let tool = |user, groups: &[u32]| filters.tool(user, groups).profile;
        assert!(filters.tool(7, &[]).check(&llc).is_ok());
        assert_eq!(tool(8, &[1, 5]), EventProfile::Standard);
        assert_eq!(tool(8, &[1]), EventProfile::Architectural);
    }

    #[test]
    fn what_is_wrong_is_told_with_its_place() {
        for (text, what) in [
            (
                "[guest]\nprofile = \"none\"\n",
                "2:11: unknown variant `none`",
            ),
            ("[guest]\n[[guest.rule]]\nselect = 1\n", "2:"),
            ("[guests]\n", "1:2: unknown field `guests`"),
            (
                "[[tools]]\n[[tools.rule]]\naction = \"deny\"\nselect = 0x1000\n",
                "4:10: give a number up to 0xfff",
            ),
            (
                "[[tools]]\n[[tools.rule]]\naction = \"deny\"\numask = \"9-3\"\n",
                "4:9: give a number up to 0xff",
            ),
            ("guest = ", "1:9: "),
        ] {
            let error = EventFilters::parse(text).unwrap_err().to_string();
            assert!(error.starts_with(what), "{error}");
        }
    }
}
