//! `docs/reference/perfmon.md` lists the registers; `UPDATE_DOCS=1` writes them there.

use std::fmt::Write;
use std::path::Path;

use perfmon::{LogicalPmu, PmdKind, VirtualPmd};
use perfmon_abi::{PmcInfo, PmdInfo};
use pmu_model::CounterId;

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
        let counter = described.counter;
        if let CounterId::Ibs(_) = counter {
            continue;
        }
        let pmc = pmc(&pmu, described.num);
        let pmd = pmd(&pmu, described.pmd);
        let _ = writeln!(
            page,
            "| PMC {}, PMD {} | {} | {:#x} | {:#x} | {:#018x} | {:#x} |",
            pmc.num, pmd.num, counter, pmc.index, pmc.def_value, pmc.rsvd_mask, pmd.index
        );
    }
}

/// What a model has with `ibs=on` beyond its counters.
fn samplers(page: &mut String) {
    const NAMES: [&str; 12] = [
        "IBSFETCHCTL",
        "IBSFETCHLINAD",
        "IBSFETCHPHYSAD",
        "IBSOPCTL",
        "IBSOPRIP",
        "IBSOPDATA",
        "IBSOPDATA2",
        "IBSOPDATA3",
        "IBSDCLINAD",
        "IBSDCPHYSAD",
        "IBSCTL",
        "IBSBRTARGET",
    ];
    let name = |index: u64| {
        let at = usize::try_from(index - 0xc001_1030).expect("a small number");
        NAMES[at]
    };
    let pmu = pmu("amd-core,ibs=on");
    let _ = writeln!(
        page,
        "\n`amd-core,ibs=on` has these as well; `amd-fam10h,ibs=on` has no PMD 63, and fewer bits for ops:\n"
    );
    let _ = writeln!(
        page,
        "| register | name | MSR | reserved bits | sampled by |"
    );
    let _ = writeln!(page, "|---|---|---|---|---|");
    for described in pmu.pmcs() {
        if let CounterId::Ibs(_) = described.counter {
            let PmcInfo {
                num,
                rsvd_mask,
                index,
                ..
            } = pmc(&pmu, described.num);
            let name = name(index);
            let _ = writeln!(
                page,
                "| PMC {num} | {name} | {index:#x} | {rsvd_mask:#018x} | |"
            );
        }
    }
    for described in pmu.pmds() {
        let (PmdKind::Sampler { pmc, .. } | PmdKind::Sample { pmc, .. }) = described.what else {
            continue;
        };
        let PmdInfo {
            num,
            rsvd_mask,
            index,
            ..
        } = pmd(&pmu, described.num);
        let name = name(index);
        let _ = writeln!(
            page,
            "| PMD {num} | {name} | {index:#x} | {rsvd_mask:#018x} | PMC {pmc} |"
        );
    }
}

fn tables() -> String {
    let mut page = String::new();
    counters(&mut page, "amd-core");
    samplers(&mut page);
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
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/perfmon.md");
    let page = std::fs::read_to_string(&path).expect("docs/reference/perfmon.md can be read");
    let (head, rest) = page.split_once(BEGIN).expect("the tables' begin is marked");
    let (listed, tail) = rest.split_once(END).expect("the tables' end is marked");
    let expected = tables();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        let page = format!("{head}{BEGIN}{expected}{END}{tail}");
        std::fs::write(&path, page).expect("docs/reference/perfmon.md can be written");
        return;
    }
    assert!(
        listed == expected,
        "docs/reference/perfmon.md is out of date; run this test with UPDATE_DOCS=1"
    );
}
