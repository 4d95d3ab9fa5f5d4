//! `docs/perfmon.md` lists the registers; `UPDATE_DOCS=1` writes them there.

use std::fmt::Write;
use std::path::Path;

use perfmon::{LogicalPmu, VirtualPmd};
use perfmon_abi::{PmcInfo, PmdInfo};

use super::bench::pmu;

const BEGIN: &str = "<!-- registers: begin -->\n";
const END: &str = "<!-- registers: end -->";

/// What PFM_GETINFO_PMCS tells.
fn pmc(pmu: &LogicalPmu, num: u16) -> PmcInfo {
    let mut info = [PmcInfo {
        num,
        ..PmcInfo::default()
    }];
    assert_eq!(pmu.getinfo_pmcs(&mut info), Ok(()));
    info[0]
}

/// What PFM_GETINFO_PMDS tells.
fn pmd(pmu: &LogicalPmu, num: u16) -> PmdInfo {
    let mut info = [PmdInfo {
        num,
        ..PmdInfo::default()
    }];
    assert_eq!(pmu.getinfo_pmds(&mut info), Ok(()));
    info[0]
}

fn counters(page: &mut String, model: &str) {
    let pmu = pmu(model);
    let _ = writeln!(page, "\n`{model}`:\n");
    let _ = writeln!(
        page,
        "| register | counter | MSR of PMC | default | reserved bits | MSR of PMD |"
    );
    let _ = writeln!(page, "|---|---|---|---|---|---|");
    for described in pmu.pmcs() {
        let pmc = pmc(&pmu, described.num);
        let pmd = pmd(&pmu, described.pmd);
        let _ = writeln!(
            page,
            "| PMC {}, PMD {} | {} | {:#x} | {:#x} | {:#018x} | {:#x} |",
            pmc.num, pmd.num, described.counter, pmc.index, pmc.def_value, pmc.rsvd_mask, pmd.index
        );
    }
}

fn tables() -> String {
    let mut page = String::new();
    counters(&mut page, "amd-core");
    counters(&mut page, "intel-v2");
    let _ = writeln!(
        page,
        "\nVirtual PMDs (3.2.2), of type `PFM_REG_TYPE_VIRTUAL`; those of a core's context are the sum of what its vCPUs did while the core had them, and in a sample those of the vCPU that was sampled:\n"
    );
    let _ = writeln!(page, "| register | event | meaning |\n|---|---|---|");
    for which in VirtualPmd::ALL {
        let _ = writeln!(
            page,
            "| PMD {} | `{which}` | {} |",
            which.pmd(),
            which.text()
        );
    }
    page.push('\n');
    page
}

#[test]
fn the_page_lists_every_register() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/perfmon.md");
    let page = std::fs::read_to_string(&path).expect("docs/perfmon.md can be read");
    let (head, rest) = page.split_once(BEGIN).expect("the tables' begin is marked");
    let (listed, tail) = rest.split_once(END).expect("the tables' end is marked");
    let expected = tables();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        let page = format!("{head}{BEGIN}{expected}{END}{tail}");
        std::fs::write(&path, page).expect("docs/perfmon.md can be written");
        return;
    }
    assert!(
        listed == expected,
        "docs/perfmon.md is out of date; run this test with UPDATE_DOCS=1"
    );
}
