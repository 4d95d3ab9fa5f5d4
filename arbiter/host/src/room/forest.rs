//! The control groups that have leases of one set of counters: a group is in another one, or in
//! none, and the one that is in none needs, while anything runs in it, the larger of what its
//! own leases hold and of what those of groups below it hold along one path, together. So a
//! lease below another is taken out of that one's, as long as it is not [`Beyond`] it.

use std::collections::{BTreeMap, BTreeSet};

use arbiter::PerKind;

use crate::ids::{GroupId, LeaseId, TenantId};
use crate::terms::Group;

/// Most unions of the sets that are asked for on one PMU.
pub(super) const MOST_UNIONS: usize = 64;

/// How many demands are confined to each union.
pub(super) type Need = [u8; MOST_UNIONS];

/// What one lease of a group holds there.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupShare {
    pub(super) lease: LeaseId,
    pub(super) tenant: TenantId,
    /// How many demands are confined to each union.
    pub(super) need: Need,
    pub(super) kinds: PerKind,
}

/// What a group that is in none needs at most.
#[derive(Clone, Debug)]
pub(super) struct Peak {
    pub(super) need: Need,
    /// What each tenant has of it at most.
    pub(super) tenants: Vec<(TenantId, PerKind)>,
}

/// More is held along a path than a group above has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beyond {
    /// A lease of the group above; `None`: it has none here.
    pub(super) above: Option<LeaseId>,
}

#[derive(Clone, Debug)]
struct Node {
    above: Vec<GroupId>,
    shares: Vec<GroupShare>,
}

impl Node {
    /// What its leases hold together, of what `of` says of one.
    fn own<const N: usize>(&self, of: &impl Fn(&GroupShare) -> [u8; N]) -> [u8; N] {
        let shares = self.shares.iter().map(of);
        shares.fold([0; N], sum)
    }
}

/// A group that is in none, by its id, and those in it.
type Tree = BTreeMap<GroupId, Node>;

#[derive(Clone, Debug, Default)]
pub(super) struct Forest {
    trees: BTreeMap<GroupId, (Tree, Peak)>,
}

impl Forest {
    /// A lease of `group` holds `share`, or holds it no more. Returns what groups that are in
    /// none needed before, and need now, as far as that is not the same.
    pub(super) fn change(
        &mut self,
        group: &Group,
        share: GroupShare,
        add: bool,
    ) -> (Vec<Peak>, Vec<Peak>) {
        let (mut nodes, before) = self.take(group);
        let node = nodes.entry(group.id).or_insert_with(|| Node {
            above: group.above.clone(),
            shares: Vec::new(),
        });
        node.shares.retain(|other| other.lease != share.lease);
        if add {
            node.shares.push(share);
        }
        if node.shares.is_empty() {
            nodes.remove(&group.id);
        }
        (before, self.plant(nodes))
    }

    /// Takes out the trees that the group is in, or that are in it.
    fn take(&mut self, group: &Group) -> (Tree, Vec<Peak>) {
        let root = group.chain().find(|id| self.trees.contains_key(id));
        let roots: Vec<GroupId> = match root {
            Some(root) => vec![root],
            None => {
                let is_in = |(root, (tree, _)): (&GroupId, &(Tree, Peak))| {
                    let above = tree.get(root).map(|node| &node.above);
                    above
                        .is_some_and(|above| above.contains(&group.id))
                        .then_some(*root)
                };
                self.trees.iter().filter_map(is_in).collect()
            }
        };
        let taken = roots.iter().filter_map(|root| self.trees.remove(root));
        let (mut nodes, mut peaks) = (Tree::new(), Vec::new());
        for (tree, peak) in taken {
            nodes.extend(tree);
            peaks.push(peak);
        }
        (nodes, peaks)
    }

    /// Puts groups back, each below the outermost that it is in.
    fn plant(&mut self, nodes: Tree) -> Vec<Peak> {
        let there: BTreeSet<GroupId> = nodes.keys().copied().collect();
        let mut trees: BTreeMap<GroupId, Tree> = BTreeMap::new();
        for (id, node) in nodes {
            let outermost = node.above.iter().find(|above| there.contains(above));
            let root = outermost.copied().unwrap_or(id);
            trees.entry(root).or_default().insert(id, node);
        }
        let mut peaks = Vec::new();
        for (root, tree) in trees {
            let peak = peak(root, &tree);
            peaks.push(peak.clone());
            self.trees.insert(root, (tree, peak));
        }
        peaks
    }

    /// Where the leases of `group`, those of groups below it, and of those between it and one
    /// above, are together more of a kind than that one's, if there is any above.
    pub(super) fn beyond(&self, group: &Group) -> Option<Beyond> {
        let root = group.chain().find(|id| self.trees.contains_key(id));
        let tree = root.and_then(|root| self.trees.get(&root));
        let Some((tree, _)) = tree.filter(|_| root != Some(group.id)) else {
            return Some(Beyond { above: None });
        };
        let through =
            |(id, node): &(&GroupId, &Node)| **id == group.id || node.above.contains(&group.id);
        let below: Vec<_> = tree.iter().filter(through).collect();
        let mut above = group
            .above
            .iter()
            .filter_map(|id| Some((id, tree.get(id)?)));
        let short = above.find(|(above, node)| {
            let has = node.own(&of_kinds);
            let paths = below
                .iter()
                .map(|(id, node)| path(tree, **above, **id, node, &of_kinds));
            paths
                .fold([0; 2], most)
                .iter()
                .zip(has)
                .any(|(asked, has)| *asked > has)
        });
        short.map(|(_, node)| Beyond {
            above: node.shares.first().map(|share| share.lease),
        })
    }
}

/// What a tree needs, each way of needing it by itself.
fn peak(root: GroupId, tree: &Tree) -> Peak {
    let shares = tree.values().flat_map(|node| &node.shares);
    let tenants: BTreeSet<TenantId> = shares.map(|share| share.tenant).collect();
    let of_tenant = |tenant: TenantId| {
        let kinds = neediest(root, tree, |share| {
            if share.tenant == tenant {
                of_kinds(share)
            } else {
                [0; 2]
            }
        });
        let kinds = PerKind {
            programmable: kinds[0],
            fixed: kinds[1],
        };
        (tenant, kinds)
    };
    Peak {
        need: neediest::<MOST_UNIONS>(root, tree, |share| share.need),
        tenants: tenants.into_iter().map(of_tenant).collect(),
    }
}

/// The larger of what the outermost group's own leases hold, and of what those along a path
/// below it do.
fn neediest<const N: usize>(
    root: GroupId,
    tree: &Tree,
    of: impl Fn(&GroupShare) -> [u8; N],
) -> [u8; N] {
    let own = tree.get(&root).map_or([0; N], |node| node.own(&of));
    let below = tree.iter().filter(|(id, _)| **id != root);
    let paths = below.map(|(id, node)| path(tree, root, *id, node, &of));
    paths.fold(own, most)
}

/// What is held along the path from below `above` to a group below it.
fn path<const N: usize>(
    tree: &Tree,
    above: GroupId,
    id: GroupId,
    node: &Node,
    of: &impl Fn(&GroupShare) -> [u8; N],
) -> [u8; N] {
    if id == above {
        return [0; N];
    }
    let between = node
        .above
        .iter()
        .skip_while(|other| **other != above)
        .skip(1);
    let between = between.filter_map(|other| tree.get(other));
    between.map(|node| node.own(of)).fold(node.own(of), sum)
}

fn of_kinds(share: &GroupShare) -> [u8; 2] {
    [share.kinds.programmable, share.kinds.fixed]
}

fn sum<const N: usize>(one: [u8; N], other: [u8; N]) -> [u8; N] {
    std::array::from_fn(|at| one[at].saturating_add(other[at]))
}

fn most<const N: usize>(one: [u8; N], other: [u8; N]) -> [u8; N] {
    std::array::from_fn(|at| one[at].max(other[at]))
}
