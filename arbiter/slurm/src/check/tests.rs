use super::{Facts, PluginLine, check, config_value};
use crate::{Confined, Share, SlurmVersion, job_submit};

const CONFIG: &str = "Configuration data as of 2026-11-27T16:00:00\n\
    AccountingStorageTRES   = cpu,mem,gres/pmc,gres/pmcfixed\n\
    GresTypes               = gpu,pmc,pmcfixed\n\
    JobSubmitPlugins        = lua\n\
    SelectType              = select/cons_tres\n\
    SelectTypeParameters    = CR_CORE\n\
    SLURM_VERSION           = 22.05.8\n\
    TaskPlugin              = task/affinity\n\
    UnkillableStepTimeout   = 60 sec\n";
const PARTITIONS: &str = "PartitionName=own Default=YES OverSubscribe=NO State=UP\n\
    PartitionName=shared OverSubscribe=FORCE:4 State=UP\n\
    PartitionName=whole OverSubscribe=EXCLUSIVE State=UP\n\
    PartitionName=may OverSubscribe=YES:2 State=UP\n";
const PLUGSTACK: &str = "# plugins\noptional /usr/lib/x11.so\n\
    required /usr/lib/umpire/umpire_spank.so socket=/run/umpire/%n cpus=cores shared=may,shared\n";

fn well() -> Facts {
    Facts {
        node: "n1".to_owned(),
        config: CONFIG.to_owned(),
        node_text: "NodeName=n1 Arch=x86_64 Gres=gpu:2,pmc:3(S:0),pmcfixed:2(S:0) State=IDLE"
            .to_owned(),
        partitions: PARTITIONS.to_owned(),
        plugstack: Ok(PLUGSTACK.to_owned()),
        job_submit: Ok(job_submit(Confined::Yes)),
        plugin: Ok(SlurmVersion::from_number(0x16_05_02)),
        library: Ok(()),
        share: Ok(Share {
            programmable: 3,
            fixed: 2,
        }),
        socket: "/run/umpire/n1".into(),
        has_groups: true,
    }
}

/// What is wrong, in order.
fn wrong(facts: &Facts) -> Vec<String> {
    let findings = check(facts).into_iter();
    let wrong = findings.filter(|finding| !finding.is_well);
    wrong.map(|finding| finding.text).collect()
}

#[test]
fn a_node_that_is_well_has_nothing_wrong() {
    assert_eq!(wrong(&well()), [""; 0]);
    assert_eq!(check(&well()).len(), 13);
}

#[test]
fn what_differs_is_named_with_what_to_do() {
    let with = |change: fn(&mut Facts)| {
        let mut facts = well();
        change(&mut facts);
        facts
    };
    let cases: [(Facts, &str); 16] = [
        (
            with(|facts| facts.node_text = "NodeName=n1 Gres=pmc:4".to_owned()),
            "the arbiter has pmc:3,pmcfixed:2",
        ),
        (
            with(|facts| facts.node_text = "NodeName=n1 Gres=(null)".to_owned()),
            "umpire slurm gres",
        ),
        (
            with(|facts| facts.share = Err("no arbiter listens".to_owned())),
            "no arbiter listens",
        ),
        (
            with(|facts| facts.config = CONFIG.replace("gpu,pmc,", "gpu,")),
            "GresTypes lacks pmc",
        ),
        (
            with(|facts| facts.config = CONFIG.replace(",gres/pmcfixed", "")),
            "lacks gres/pmcfixed",
        ),
        (
            with(|facts| facts.config = CONFIG.replace("= lua", "= (null)")),
            "JobSubmitPlugins lacks lua",
        ),
        (
            with(|facts| facts.job_submit = Err("No such file".to_owned())),
            "umpire slurm job-submit prints it",
        ),
        (
            with(|facts| facts.job_submit = Ok(job_submit(Confined::No))),
            "another rule",
        ),
        (
            with(|facts| facts.plugstack = Ok(String::new())),
            "socket=/run/umpire/n1 cpus=cores shared=may,shared",
        ),
        (
            with(|facts| facts.plugstack = Ok(PLUGSTACK.replace("required", "optional"))),
            "write required",
        ),
        (
            with(|facts| facts.plugin = Ok(SlurmVersion::from_number(0x17_02_01))),
            "is for Slurm 23.02.1, and this is 22.05.8",
        ),
        (
            with(|facts| facts.library = Err("libumpire_lease.so is nowhere".to_owned())),
            "is nowhere",
        ),
        (
            with(|facts| facts.plugstack = Ok(PLUGSTACK.replace("%n", "n2"))),
            "this is that at /run/umpire/n1",
        ),
        (
            with(|facts| facts.plugstack = Ok(PLUGSTACK.replace("may,shared", "shared"))),
            "is to be shared=may,shared",
        ),
        (with(|facts| facts.has_groups = false), "mount -t cgroup2"),
        (
            with(|facts| facts.config = CONFIG.replace("60 sec", "59 sec")),
            "UnkillableStepTimeout=59 is to be 60",
        ),
    ];
    for (facts, expected) in cases {
        let wrong = wrong(&facts);
        assert!(
            wrong.len() == 1 && wrong[0].contains(expected),
            "{expected}: {wrong:?}"
        );
    }
}

#[test]
fn where_tasks_roam_no_cpu_is_a_jobs_own() {
    let mut facts = well();
    facts.config = CONFIG.replace("task/affinity", "task/none");
    let said = wrong(&facts).join("\n");
    assert!(
        said.contains("--unconfined") && said.contains("write cpus=all"),
        "{said}"
    );
    assert!(said.contains("shared=may,own,shared"), "{said}");
    // Control groups confine where they are told to.
    facts.config = CONFIG.replace("task/affinity", "task/cgroup") + "ConstrainCores = yes\n";
    assert_eq!(wrong(&facts), [""; 0]);
}

#[test]
fn lines_of_slurm_are_read_as_it_writes_them() {
    assert_eq!(config_value(CONFIG, "selecttype"), Some("select/cons_tres"));
    assert_eq!(config_value("Prolog = (null)\n", "Prolog"), None);
    let line = PluginLine::find(PLUGSTACK).expect("the plugin");
    assert_eq!(line.word("cpus", "all"), "cores");
    assert_eq!(
        line.word("library", "libumpire_lease.so"),
        "libumpire_lease.so"
    );
    assert_eq!(
        PluginLine::find("# required /x/umpire_spank.so\nrequired /x/other.so\n"),
        None
    );
}
