//! Which value in which register makes a counter count an event.

pub use perfmon::registers::{Need, need, program};

#[cfg(test)]
mod tests {
    use super::*;
    use perfmon::LogicalPmu;
    use pmu_model::PmuModel;
    use umpire_events::{LibraryError, NoTables, resolve};

    /// What `name` needs, and what decodes from the register it is put into.
    fn check(model: &str, name: &str, fixed: Option<u8>, programmable: bool) {
        let model = PmuModel::parse(model).unwrap();
        let pmu = LogicalPmu::new(model);
        let request = resolve(name, pmu.model(), &NoTables(LibraryError::TooLate))
            .unwrap()
            .request;
        let wanted = Need {
            fixed,
            programmable,
        };
        assert_eq!(need(&pmu, &request), wanted, "{name}");
        for pmc in pmu.pmcs() {
            let Some((found, value)) = program(&pmu, pmc.counter, &request) else {
                continue;
            };
            let counted = pmu.request(found, value).unwrap();
            assert_eq!(counted.event.known(), request.event.known(), "{name}");
            assert_eq!((counted.usr, counted.os), (request.usr, request.os));
            assert!(counted.can_advance());
        }
    }

    #[test]
    fn events_find_their_counters() {
        check("intel-v2", "cycles", Some(1), true);
        check("intel-v2", "instructions:u", Some(0), true);
        check("intel-v2", "ref-cycles", Some(2), false);
        check("intel-v2", "r100013c", None, true);
        check("intel-v5,fixed=0x6", "cycles", Some(1), true);
        check("intel-v5,fixed=0x6", "instructions", None, true);
        check("intel-v2", "branches", None, true);
        check("intel-v1", "cycles", None, true);
        check("amd-core", "cycles:k", None, true);
        check("amd-fam10h", "rc0", None, true);
    }
}
