//! The contexts of one vCPU, or of one core.

use perfmon::ContextId;

use super::AttachedContext;

/// Most contexts of a vCPU, and of a core.
///
/// perfmon2 has one for each thread and one for each CPU. Each of these costs time
/// at every exit while it is loaded, so there is a limit.
pub const MAX_CONTEXTS: usize = 16;

/// Contexts in the order in which they were loaded, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct ContextGroup(Vec<AttachedContext>);

impl ContextGroup {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &AttachedContext> {
        self.0.iter()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut AttachedContext> {
        self.0.iter_mut()
    }

    pub(crate) fn get(&self, id: ContextId) -> Option<&AttachedContext> {
        self.iter().find(|one| one.id() == id)
    }

    pub(crate) fn get_mut(&mut self, id: ContextId) -> Option<&mut AttachedContext> {
        self.iter_mut().find(|one| one.id() == id)
    }

    /// Adds the youngest.
    pub(crate) fn push(&mut self, hosted: AttachedContext) {
        self.0.push(hosted);
    }

    /// Takes one out; the others keep their order.
    pub(crate) fn remove(&mut self, id: ContextId) -> Option<Box<AttachedContext>> {
        let at = self.0.iter().position(|one| one.id() == id)?;
        Some(Box::new(self.0.remove(at)))
    }

    /// Their names, as a refusal lists them.
    pub(crate) fn names(&self) -> String {
        let names: Vec<String> = self.iter().map(|one| one.id().to_string()).collect();
        names.join(", ")
    }
}
