//! The doors: a call of a client, taken apart into what is asked for. The methods of the
//! interface stand in one table.

use arbiter_host::{
    Asker, BootTime, Caller, HostArbiter, Lease, LeaseId, Owner, Reason, Refusal, TenantId, Terms,
};
use serde::de::DeserializeOwned;
use serde_json::Value;
use umpire_lease::{self as wire, INTERFACE};

use super::ConnectionId;
use super::said::Denial;
use super::shown::Viewer;
use crate::config::{ArbiterConfig, Members, WATCHDOG};
use crate::convert;
use crate::groups::{Job, absolute};
use crate::peer::Client;
use crate::task::Ids;
use crate::unseen::is_unseen;

/// Most bytes of a label.
const MOST_LABEL: usize = 128;

/// A method of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    Acquire,
    Claim,
    Release,
    Renew,
    Revoke,
    List,
    Groups,
    Who,
    Explain,
    Report,
    Audit,
    Watch,
    Pardon,
}

const METHODS: [(&str, Method); 13] = [
    ("Acquire", Method::Acquire),
    ("Claim", Method::Claim),
    ("Release", Method::Release),
    ("Renew", Method::Renew),
    ("Revoke", Method::Revoke),
    ("List", Method::List),
    ("Groups", Method::Groups),
    ("Who", Method::Who),
    ("Explain", Method::Explain),
    ("Report", Method::Report),
    ("Audit", Method::Audit),
    ("Watch", Method::Watch),
    ("Pardon", Method::Pardon),
];

impl Method {
    /// The method of this interface's that is called so, without the interface's name.
    fn named(name: &str) -> Option<Self> {
        let mut known = METHODS.into_iter();
        known.find_map(|(known, method)| (known == name).then_some(method))
    }
}

/// Whose interface a method is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Called<'a> {
    /// This one's; a name that it does not have, as it was called.
    Own(Result<Method, &'a str>),
    /// Another interface's, perhaps.
    Foreign,
}

impl<'a> Called<'a> {
    /// `method`: with the interface's name.
    pub(crate) fn of(method: &'a str) -> Self {
        let name = method.strip_prefix(INTERFACE);
        match name.and_then(|name| name.strip_prefix('.')) {
            Some(name) => Called::Own(Method::named(name).ok_or(name)),
            None => Called::Foreign,
        }
    }

    /// Whether it is answered as well before what is due is done: it renews a lease, or changes
    /// nobody's.
    pub(crate) fn waits_for_nothing(self) -> bool {
        use Method::{Audit, Groups, List, Renew, Report, Who};
        match self {
            Called::Own(Ok(method)) => {
                matches!(method, Renew | List | Groups | Who | Report | Audit)
            }
            Called::Own(Err(_)) => false,
            Called::Foreign => true,
        }
    }

    /// Whether the caller is told more than once, or later, and so has to listen.
    pub(super) fn needs_a_listener(self) -> bool {
        use Method::{Acquire, Claim, Watch};
        matches!(self, Called::Own(Ok(Acquire | Claim | Watch)))
    }

    /// Its name for the metrics.
    pub(super) fn word(self) -> &'static str {
        let mut known = METHODS.into_iter();
        let name = known.find(|(_, method)| self == Called::Own(Ok(*method)));
        name.map_or("other", |(name, _)| name)
    }
}

/// What is asked for.
#[derive(Debug)]
pub(super) enum Call {
    Acquire(Box<wire::Request>),
    Claim(wire::ClaimIn),
    Release(wire::ReleaseIn),
    Renew(wire::RenewIn),
    Revoke(wire::RevokeIn),
    List,
    Groups,
    Who(wire::WhoIn),
    Explain(Box<wire::Request>),
    Report(wire::ReportIn),
    Audit(wire::AuditIn),
    Watch,
    Pardon(wire::PardonIn),
}

impl Call {
    pub(super) fn parse(method: Method, parameters: Value) -> Result<Self, Denial> {
        Ok(match method {
            Method::Acquire => {
                let wire::AcquireIn { request } = parsed(parameters)?;
                Call::Acquire(Box::new(request))
            }
            Method::Claim => Call::Claim(parsed(parameters)?),
            Method::Release => Call::Release(parsed(parameters)?),
            Method::Renew => Call::Renew(parsed(parameters)?),
            Method::Revoke => Call::Revoke(parsed(parameters)?),
            Method::List => {
                let wire::NoReply {} = parsed(parameters)?;
                Call::List
            }
            Method::Groups => {
                let wire::NoReply {} = parsed(parameters)?;
                Call::Groups
            }
            Method::Who => Call::Who(parsed(parameters)?),
            Method::Explain => {
                let wire::ExplainIn { request } = parsed(parameters)?;
                Call::Explain(Box::new(request))
            }
            Method::Report => Call::Report(parsed(parameters)?),
            Method::Audit => Call::Audit(parsed(parameters)?),
            Method::Watch => {
                let wire::NoReply {} = parsed(parameters)?;
                Call::Watch
            }
            Method::Pardon => Call::Pardon(parsed(parameters)?),
        })
    }
}

fn parsed<T: DeserializeOwned>(parameters: Value) -> Result<T, Denial> {
    let parsed = serde_json::from_value(parameters);
    parsed.map_err(|error| Denial::InvalidParameter(error.to_string()))
}

/// The lease that a call names, whatever else it says.
pub(super) fn named_lease(parameters: &Value) -> Option<LeaseId> {
    parameters.get("lease").and_then(Value::as_u64).map(LeaseId)
}

/// Who calls, and how.
#[derive(Debug)]
pub(crate) struct Calling<'a> {
    pub(crate) from: ConnectionId,
    pub(crate) client: &'a Client,
    /// The tenants of its user.
    pub(crate) tenants: Vec<TenantId>,
    pub(crate) caller: Caller,
    /// It takes more than one reply.
    pub(crate) more: bool,
    pub(crate) now: BootTime,
}

impl Calling<'_> {
    pub(super) fn viewer(&self) -> Viewer {
        Viewer::of(self.caller)
    }
}

/// For whom a client speaks that names `lease`: for the tenant by which it has asked for that one,
/// or for the lease's, if that is one of its user's. Its tenants come along.
pub(super) fn caller(
    config: &ArbiterConfig,
    arbiter: &HostArbiter,
    client: &Client,
    lease: Option<LeaseId>,
) -> (Caller, Vec<TenantId>) {
    let (tenants, operator) = config.tenants_of(client);
    let of_lease = lease.and_then(|id| arbiter.lease(id));
    let asked = of_lease.and_then(|lease| lease.owner.by);
    let asked = asked.filter(|by| by.uid == client.uid);
    let of_lease = of_lease.map(|lease| lease.owner.tenant);
    let mut named = asked.map(|by| by.tenant).into_iter().chain(of_lease);
    let tenant = named
        .find(|tenant| tenants.contains(tenant))
        .or(tenants.first().copied());
    let caller = Caller {
        tenant: tenant.unwrap_or(TenantId(u16::MAX)),
        uid: client.uid,
        operator,
    };
    (caller, tenants)
}

/// Those of its user's tenants that may do something.
fn tenants_that<'a>(
    config: &'a ArbiterConfig,
    calling: &'a Calling<'_>,
    may: impl Fn(&Members) -> bool + 'a,
) -> impl Iterator<Item = TenantId> + 'a {
    let tenants = calling.tenants.iter().copied();
    tenants.filter(move |tenant| config.allows(*tenant, &may))
}

/// Of its user's tenants the first that may ask in another's place. A name of a control group
/// (`for-cgroups`) lets nobody spend another tenant's counters: by it one asks in one's own.
fn asker(config: &ArbiterConfig, calling: &Calling<'_>) -> Option<TenantId> {
    tenants_that(config, calling, |members| members.for_others).next()
}

/// Of its user's tenants the first that may ask for a control group whoever runs there. By its
/// path alone that is decided, and nothing else: which group that is now is found out later.
fn by_name(config: &ArbiterConfig, calling: &Calling<'_>, path: Option<&str>) -> Option<TenantId> {
    let path = path?;
    let mut named = tenants_that(config, calling, |members| members.may_ask_for(path));
    named.next()
}

/// In whose name a user asks that names no tenant: that one is meant which may.
fn unnamed(config: &ArbiterConfig, calling: &Calling<'_>, path: Option<&str>) -> Option<TenantId> {
    let first = calling.tenants.first().copied();
    // An operator may ask for any in any case.
    let named = by_name(config, calling, path).filter(|_| !calling.caller.operator);
    named.or(first)
}

/// What is wrong with a path is said when its group is looked for.
fn absolute_path(calling: &Calling<'_>, cgroup: Option<&str>) -> Option<String> {
    cgroup.and_then(|path| absolute(path, calling.client.cgroup.as_deref()).ok())
}

/// Whose doing a call is: of its user's tenants the one that it asks for, or the one that it
/// speaks for; where it asks in another's place, or for a control group by its name, the one that
/// may.
pub(super) fn doer(
    config: &ArbiterConfig,
    arbiter: &HostArbiter,
    calling: &Calling<'_>,
    parameters: &Value,
) -> Option<TenantId> {
    let Some(request) = parameters.get("request") else {
        let own = Some(calling.caller.tenant);
        return own.filter(|tenant| calling.tenants.contains(tenant));
    };
    if request.get("for_uid").is_some_and(|uid| !uid.is_null()) {
        return asker(config, calling).or(calling.tenants.first().copied());
    }
    let named = request.get("tenant").and_then(Value::as_str);
    let named = named.and_then(|name| arbiter.policy().named(name));
    let named = named.filter(|tenant| calling.tenants.contains(tenant));
    named.or_else(|| {
        let cgroup = request.get("cgroup").and_then(Value::as_str);
        unnamed(config, calling, absolute_path(calling, cgroup).as_deref())
    })
}

/// Whose lease a request is for.
///
/// # Errors
/// The client is of no such tenant, or its label is none.
pub(crate) fn owner(
    arbiter: &HostArbiter,
    calling: &Calling<'_>,
    request: &wire::Request,
) -> Result<Owner, Denial> {
    let Calling {
        client, tenants, ..
    } = calling;
    let policy = arbiter.policy();
    let tenant = match &request.tenant {
        None => tenants.first().copied(),
        Some(name) => {
            let tenant = policy.named(name).filter(|_| name != WATCHDOG);
            let may = |tenant: &_| calling.caller.operator || tenants.contains(tenant);
            let tenant = tenant.filter(may);
            if tenant.is_none() {
                let own = tenants.iter().filter_map(|id| policy.tenant(*id));
                let own: Vec<&str> = own.map(|tenant| tenant.name.as_str()).collect();
                return Err(Denial::wrong(format!(
                    "tenant '{name}' is not one of this user's; these are: {}",
                    if own.is_empty() {
                        "none".to_owned()
                    } else {
                        own.join(", ")
                    }
                )));
            }
            tenant
        }
    };
    let tenant = tenant.ok_or_else(|| no_tenant(arbiter, client))?;
    let mut label = request.label.clone().unwrap_or_default();
    if label.len() > MOST_LABEL || label.chars().any(is_unseen) {
        return Err(Denial::wrong(format!(
            "the label is of {MOST_LABEL} bytes at most, without control characters and others \
             that are not seen"
        )));
    }
    label.shrink_to_fit();
    Ok(Owner {
        tenant,
        uid: client.uid,
        pid: client.pid,
        label,
        by: None,
    })
}

/// Whose lease a request is for, which may be another's than the caller's: then tenant and limits
/// are those of that one.
///
/// # Errors
/// As [`owner`], or the caller may not ask for others.
pub(super) fn owner_or_job(
    config: &ArbiterConfig,
    arbiter: &HostArbiter,
    calling: &Calling<'_>,
    request: &wire::Request,
) -> Result<(Owner, Job), Denial> {
    let path = absolute_path(calling, request.cgroup.as_deref());
    let (uid, gid) = match (request.for_uid, request.for_gid) {
        (None, None) => {
            return own_or_named(config, arbiter, calling, request, path.as_deref());
        }
        (Some(uid), Some(gid)) => (uid, gid),
        _ => return Err(Denial::wrong("for_uid and for_gid: name both, or neither")),
    };
    let asks = asker(config, calling);
    let asks = asks.ok_or_else(|| not_for_others(by_name(config, calling, path.as_deref())))?;
    let here = |name, ids, number| {
        let here = calling.client.number_here(ids, number);
        here.map_err(|why| Denial::wrong(format!("{name} {number}: {why}")))
    };
    let uid = here("for_uid", Ids::Users, uid)?;
    let gid = here("for_gid", Ids::Groups, gid)?;
    let client = Client {
        uid,
        pid: calling.client.pid,
        groups: vec![gid],
        ..Client::default()
    };
    let (mut tenants, _) = config.tenants_of(&client);
    // Whoever runs there is of the tenants that have the group, too; what it has as a user comes
    // first.
    let there = Client {
        cgroup: path.map(String::into_bytes),
        ..client.clone()
    };
    let (of_group, _) = config.tenants_of(&there);
    let of_group = of_group.into_iter().filter(|id| !tenants.contains(id));
    tenants.extend(of_group.collect::<Vec<_>>());
    let caller = Caller {
        tenant: tenants.first().copied().unwrap_or(TenantId(u16::MAX)),
        uid,
        // Whoever is named, or named by a path, lends nobody the right to do everything.
        operator: false,
    };
    let job = Calling {
        client: &client,
        tenants,
        caller,
        ..*calling
    };
    let by = Some(Asker {
        tenant: asks,
        uid: calling.client.uid,
    });
    let owner = Owner {
        by,
        ..owner(arbiter, &job, request)?
    };
    Ok((owner, Job::Others { uid, gid }))
}

/// The refusal of who may ask in nobody else's place. `by_name`: who of it may ask for this control
/// group in its own name.
fn not_for_others(by_name: Option<TenantId>) -> Denial {
    let why = match by_name {
        Some(_) => {
            "the policy lets this user ask for that control group in its own name (for-cgroups), \
             and in nobody else's; leave out for_uid and for_gid, or the operator can allow it \
             (for-others = true)"
        }
        None => {
            "the policy lets none of this user's tenants ask for others; the operator can allow it \
             (for-others = true)"
        }
    };
    Denial::from(wire::Refusal::of(Reason::Foreign, why))
}

/// The same, for whom who calls may ask in its own name: for itself, or for whoever runs in
/// control groups of these names.
fn own_or_named(
    config: &ArbiterConfig,
    arbiter: &HostArbiter,
    calling: &Calling<'_>,
    request: &wire::Request,
    path: Option<&str>,
) -> Result<(Owner, Job), Denial> {
    let mut owner = owner(arbiter, calling, request)?;
    if calling.caller.operator {
        return Ok((owner, Job::Anybody));
    }
    if request.tenant.is_none() {
        owner.tenant = unnamed(config, calling, path).unwrap_or(owner.tenant);
    }
    let may = |members: &Members| path.is_some_and(|path| members.may_ask_for(path));
    let job = if tenants_that(config, calling, may).any(|tenant| tenant == owner.tenant) {
        Job::Anybody
    } else {
        Job::Own(calling.client.uid)
    };
    Ok((owner, job))
}

/// Whether a user may have a lease of its own for a control group, beside those that the group
/// has. Beside one that somebody else has asked for it would lift what that one says to all that
/// runs there: whoever wants a part of it asks for a part.
///
/// # Errors
/// There is such a one, or it waits.
pub(super) fn may_stand_beside(
    arbiter: &HostArbiter,
    job: Job,
    owner: &Owner,
    terms: &Terms,
) -> Result<(), Denial> {
    let (Job::Own(_), Some(group)) = (job, terms.scope.group()) else {
        return Ok(());
    };
    let is_foreign = |lease: &&Lease| {
        let its = &lease.owner;
        its.by.is_some() || (its.uid, its.tenant) != (owner.uid, owner.tenant)
    };
    let of_group = arbiter.leased_groups().get(&group.id);
    let mut leases = of_group
        .into_iter()
        .flatten()
        .filter_map(|id| arbiter.lease(*id));
    match leases.find(is_foreign) {
        None => Ok(()),
        Some(lease) => Err(Denial::from(wire::Refusal::of(
            Reason::BeyondGroup,
            format!(
                "the control group has lease {} already, which another user or tenant has asked \
                 for, and what runs there has no more than that; ask from inside of it without \
                 naming it, for a part of that lease",
                lease.id.0
            ),
        ))),
    }
}

/// The client is of no tenant, as far as it is known.
fn no_tenant(arbiter: &HostArbiter, client: &Client) -> Denial {
    let mut refusal = convert::refusal(arbiter, &Refusal::UnknownTenant);
    if !client.unknown.is_empty() {
        refusal.message = format!("{} ({})", refusal.message, client.unknown);
    }
    refusal.into()
}

/// The lease of a call, if it is the caller's.
pub(super) fn own_lease(arbiter: &HostArbiter, caller: Caller, id: u64) -> Result<&Lease, Denial> {
    let id = LeaseId(id);
    arbiter.own(id, None, caller)?;
    let lease = arbiter.lease(id);
    lease.ok_or_else(|| Denial::wrong("there is no such lease"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use arbiter::CounterSet;
    use arbiter_host::{
        CpuSet, Demand, Group, GroupId, HostPmu, Outcome, PmuId, Scope, Terms, Waits,
    };

    use super::*;
    use crate::task::Life;

    /// A user of several tenants speaks for the one by which it has asked.
    #[test]
    fn who_asked_for_another_speaks_for_the_tenant_that_did() {
        const TEXT: &str = "[[tenant]]\nname = \"cluster\"\nusers = [7, 1000]\n\
             [[tenant]]\nname = \"prolog\"\nusers = [7]\nfor-others = true\n";
        let config = ArbiterConfig::parse(Path::new("test"), TEXT).expect("a configuration");
        let pmu = HostPmu {
            name: "cpu".to_owned(),
            counters: CounterSet::first(4, 0),
            domains: vec![CpuSet::from_iter([0])],
            for_threads: true,
        };
        let mut arbiter = HostArbiter::new(vec![pmu], config.policy.clone()).expect("it fits");
        let (now, mut out) = (BootTime(0), Vec::new());
        arbiter.set_online(CpuSet::from_iter([0]), now, &mut out);
        let owner = Owner {
            tenant: TenantId(0),
            uid: 1000,
            pid: 1,
            label: String::new(),
            by: Some(Asker {
                tenant: TenantId(1),
                uid: 7,
            }),
        };
        let demand = Demand {
            pmu: PmuId(0),
            counters: CounterSet::first(4, 0),
        };
        let terms = Terms {
            demands: vec![demand],
            at_least: 1,
            cpus: CpuSet::from_iter([0]),
            scope: Scope::Group(
                Group {
                    id: GroupId(2),
                    above: vec![GroupId(1)],
                    path: "/1/2".to_owned(),
                }
                .into(),
            ),
            guaranteed: false,
            priority: 0,
            preemptible: true,
            lasts: None,
            waits: Waits::No,
        };
        let asked = arbiter.request(owner, terms, now, &mut out);
        let Ok(Outcome::Granted { lease, .. }) = asked else {
            panic!("{asked:?}");
        };
        for (uid, right) in [(7, true), (1000, true), (8, false)] {
            let client = Client {
                uid,
                ..Client::default()
            };
            let (caller, _) = caller(&config, &arbiter, &client, Some(lease));
            assert_eq!(arbiter.own(lease, None, caller).is_ok(), right, "{uid}");
        }
    }

    /// By the name of a group it is decided who may ask for it, and whose tenant a job in it is.
    #[test]
    fn a_group_is_leased_by_its_name_where_the_policy_says_so() {
        const TEXT: &str = "[[tenant]]\nname = \"people\"\nusers = [7, 8]\n\
             [[tenant]]\nname = \"agents\"\nusers = [7]\n\
             for-cgroups = ['/system.slice/web-*.service', '/slurm']\n\
             [[tenant]]\nname = \"web\"\ncgroups = ['/system.slice/web-*.service']\n\
             [[tenant]]\nname = \"prolog\"\nusers = [5]\nfor-others = true\n\
             [[tenant]]\nname = \"admin\"\ncgroups = ['/admin']\noperator = true\n";
        let config = ArbiterConfig::parse(Path::new("test"), TEXT).expect("a configuration");
        let arbiter = HostArbiter::new(Vec::new(), config.policy.clone()).expect("it fits");
        let life = Life::of(std::process::id()).expect("it can be seen");
        let ask = |uid, cgroup: &str, tenant: Option<&str>, for_uid: Option<u32>| {
            let client = Client {
                uid,
                pid: std::process::id(),
                process: life.as_ref().map(|life| life.id),
                cgroup: Some(b"/system.slice/agent.service".to_vec()),
                ..Client::default()
            };
            let (caller, tenants) = caller(&config, &arbiter, &client, None);
            let calling = Calling {
                from: ConnectionId(1),
                client: &client,
                tenants,
                caller,
                more: false,
                now: BootTime(0),
            };
            let request = wire::Request {
                cgroup: Some(cgroup.to_owned()),
                tenant: tenant.map(str::to_owned),
                for_uid,
                for_gid: for_uid,
                ..wire::Request::default()
            };
            let asked = owner_or_job(&config, &arbiter, &calling, &request).ok()?;
            let (Owner { tenant, by, .. }, job) = asked;
            // What comes of it is that one's doing.
            let parameters = serde_json::json!({ "request": request });
            let doer = doer(&config, &arbiter, &calling, &parameters);
            assert_eq!(
                doer,
                Some(by.map_or(tenant, |by| by.tenant)),
                "{uid} {cgroup}"
            );
            let job = match job {
                Job::Anybody => "anybody",
                Job::Own(_) => "own",
                Job::Others { .. } => "others",
            };
            Some((tenant.0, by.map(|by| by.tenant.0), job))
        };
        let web = "/system.slice/web-shop.service";
        for (uid, cgroup, tenant, for_uid, right) in [
            (7, web, None, None, Some((1, None, "anybody"))),
            (
                7,
                &format!("{web}/workers"),
                None,
                None,
                Some((1, None, "anybody")),
            ),
            (7, web, Some("agents"), None, Some((1, None, "anybody"))),
            // For itself it may ask as any tenant of its user.
            (7, web, Some("people"), None, Some((0, None, "own"))),
            (
                7,
                "/system.slice/db.service",
                None,
                None,
                Some((0, None, "own")),
            ),
            (
                7,
                "/system.slice/web-shop.serviceX",
                None,
                None,
                Some((0, None, "own")),
            ),
            (8, web, None, None, Some((0, None, "own"))),
            // Below the caller's own group.
            (7, "web-shop.service", None, None, Some((0, None, "own"))),
            // By a name nobody asks in another's place, neither root's nor another tenant's.
            (7, web, None, Some(9), None),
            (7, web, Some("people"), Some(0), None),
            (7, "/slurm/job_1", None, Some(8), None),
            (7, "/slurm/job_1", None, Some(0), None),
            // Out of it, or with a name that it cannot have.
            (
                7,
                &format!("{web}/../db.service"),
                None,
                None,
                Some((0, None, "own")),
            ),
            (
                7,
                &format!("{web}/a\nb"),
                None,
                None,
                Some((0, None, "own")),
            ),
            (
                7,
                &format!("{web}{}", "/x".repeat(64)),
                None,
                None,
                Some((0, None, "own")),
            ),
            // Who may for others: the job's user's tenants come before those of its group.
            (
                5,
                "/slurm/job_1",
                None,
                Some(8),
                Some((0, Some(3), "others")),
            ),
            (5, web, None, Some(8), Some((0, Some(3), "others"))),
            (5, web, Some("web"), Some(8), Some((2, Some(3), "others"))),
            (5, web, None, Some(9), Some((2, Some(3), "others"))),
            (5, "/slurm/job_1", None, Some(9), None),
            (5, "/slurm/job_1", Some("web"), Some(8), None),
            // Root's job has the rights of no operator, nor has one in an operator's group.
            (5, web, Some("people"), Some(0), None),
            (5, "/admin", Some("people"), Some(9), None),
            (5, "/admin", None, Some(9), Some((4, Some(3), "others"))),
            (7, "/system.slice/db.service", None, Some(8), None),
            (8, web, None, Some(9), None),
        ] {
            assert_eq!(
                ask(uid, cgroup, tenant, for_uid),
                right,
                "{uid} {cgroup} {tenant:?} {for_uid:?}"
            );
        }
    }

    #[test]
    fn a_method_has_its_interface_and_a_dot_before_its_name() {
        let check = |method: &str, expected: Called<'_>, word: &str| {
            assert_eq!(Called::of(method), expected, "{method}");
            assert_eq!(Called::of(method).word(), word, "{method}");
        };
        check(
            "io.umpire.Arbiter.Renew",
            Called::Own(Ok(Method::Renew)),
            "Renew",
        );
        check(
            "io.umpire.Arbiter.renew",
            Called::Own(Err("renew")),
            "other",
        );
        check("io.umpire.Arbiter.", Called::Own(Err("")), "other");
        for foreign in [
            "io.umpire.ArbiterRenew",
            "io.umpire.Arbiter",
            "a.io.umpire.Arbiter.Renew",
            "org.varlink.service.GetInfo",
        ] {
            check(foreign, Called::Foreign, "other");
        }
    }
}
