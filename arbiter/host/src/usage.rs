//! How much of the counters' time each tenant has had, so that those who wait are served
//! by their shares.

use super::ids::{BootTime, TenantId};
use super::policy::HostPolicy;

/// What one tenant has had.
#[derive(Clone, Copy, Debug, Default)]
struct Account {
    /// Counters that it holds, each CPU's by itself.
    holds: u64,
    /// Leases that it has, or waits for.
    leases: u64,
    /// Counters times nanoseconds, for each share of the tenant.
    had: u128,
    settled: BootTime,
}

/// The accounts of all tenants.
#[derive(Clone, Debug, Default)]
pub(crate) struct Usage {
    accounts: Vec<Account>,
    shares: Vec<u128>,
}

impl Usage {
    /// Counts by the shares of `policy` from now on.
    pub(crate) fn set_policy(&mut self, policy: &HostPolicy, now: BootTime) {
        for tenant in 0..self.accounts.len() {
            self.settle(tenant, now);
        }
        self.accounts
            .resize(policy.tenants.len(), Account::default());
        let shares = policy
            .tenants
            .iter()
            .map(|tenant| u128::from(tenant.share.max(1)));
        self.shares = shares.collect();
    }

    /// The number of leases that the tenant has, or waits for.
    pub(crate) fn leases(&self, tenant: TenantId) -> usize {
        let account = self.accounts.get(usize::from(tenant.0));
        account.map_or(0, |account| {
            usize::try_from(account.leases).unwrap_or(usize::MAX)
        })
    }

    /// What the tenant has had for each of its shares: whoever has less is served first.
    pub(crate) fn had(&self, tenant: TenantId, now: BootTime) -> u128 {
        let at = usize::from(tenant.0);
        self.accounts
            .get(at)
            .map_or(0, |account| account.had + self.since(at, account, now))
    }

    fn since(&self, tenant: usize, account: &Account, now: BootTime) -> u128 {
        u128::from(now.since(account.settled).0) * u128::from(account.holds) / self.shares[tenant]
    }

    fn settle(&mut self, tenant: usize, now: BootTime) {
        let mut account = self.accounts[tenant];
        account.had += self.since(tenant, &account, now);
        account.settled = now;
        self.accounts[tenant] = account;
    }

    /// A lease of the tenant is there, or waits. Who was away has no claim to the time in
    /// which it wanted nothing.
    pub(crate) fn came(&mut self, tenant: TenantId, now: BootTime) {
        let at = usize::from(tenant.0);
        self.settle(at, now);
        if self.accounts[at].leases == 0 {
            let active = (0u16..).map(TenantId).zip(&self.accounts);
            let active = active.filter(|(_, account)| account.leases > 0);
            if let Some(least) = active.map(|(id, _)| self.had(id, now)).min() {
                self.accounts[at].had = self.accounts[at].had.max(least);
            }
        }
        self.accounts[at].leases += 1;
    }

    /// It is not there any more.
    pub(crate) fn left(&mut self, tenant: TenantId) {
        self.accounts[usize::from(tenant.0)].leases -= 1;
    }

    /// The tenant holds `now_holds` counters where it held `held`.
    pub(crate) fn changed(&mut self, tenant: TenantId, held: u64, holds: u64, now: BootTime) {
        let at = usize::from(tenant.0);
        self.settle(at, now);
        self.accounts[at].holds = self.accounts[at].holds + holds - held;
    }
}
