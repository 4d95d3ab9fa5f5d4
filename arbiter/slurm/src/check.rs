//! What a node's Slurm lacks of what the arbiter and the plugin need.

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::plugin::SlurmVersion;
use crate::rule::{Confined, job_submit};
use crate::share::Share;

/// What was read on this node. An `Err` says why something could not be read.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The node's name.
    pub node: String,
    /// What `scontrol show config` prints.
    pub config: String,
    /// What `scontrol --oneliner show node NODE` prints.
    pub node_text: String,
    /// What `scontrol --oneliner show partition` prints.
    pub partitions: String,
    /// plugstack.conf.
    pub plugstack: Result<String, String>,
    /// job_submit.lua.
    pub job_submit: Result<String, String>,
    /// What the plugin was built for.
    pub plugin: Result<SlurmVersion, String>,
    /// Whether the library for C is where the plugin looks for it.
    pub library: Result<(), String>,
    /// What the arbiter has for jobs.
    pub share: Result<Share, String>,
    /// The arbiter's socket.
    pub socket: PathBuf,
    /// Whether control groups of version 2 are mounted whole.
    pub has_groups: bool,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// It is as it has to be.
    pub is_well: bool,
    /// What was found, and what to do about it.
    pub text: String,
}

/// The plugin's line of plugstack.conf.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PluginLine {
    /// Whether Slurm heeds what the plugin refuses.
    pub is_required: bool,
    /// The plugin's file.
    pub file: PathBuf,
    /// What it is told.
    pub words: Vec<String>,
}

impl PluginLine {
    /// The line that loads `umpire_spank.so`, if there is one.
    #[must_use]
    pub fn find(plugstack: &str) -> Option<Self> {
        plugstack.lines().find_map(|line| {
            let mut words = line.split('#').next()?.split_whitespace();
            let how = words.next()?;
            let file = PathBuf::from(words.next()?);
            (file.file_name()? == "umpire_spank.so").then(|| PluginLine {
                is_required: how == "required",
                file,
                words: words.map(str::to_owned).collect(),
            })
        })
    }

    /// What `key=` says, or `default`.
    #[must_use]
    pub fn word<'a>(&'a self, key: &str, default: &'a str) -> &'a str {
        let found = self.words.iter().rev().find_map(|word| {
            let (name, value) = word.split_once('=')?;
            (name == key).then_some(value)
        });
        found.unwrap_or(default)
    }
}

/// The value of a key of `scontrol show config`.
#[must_use]
pub fn config_value<'a>(config: &'a str, key: &str) -> Option<&'a str> {
    config.lines().find_map(|line| {
        let (name, value) = line.split_once('=')?;
        let value = value.trim();
        (name.trim().eq_ignore_ascii_case(key) && value != "(null)").then_some(value)
    })
}

/// The value of a key of a line of `scontrol --oneliner`.
fn line_value<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let mut words = line.split_whitespace();
    words.find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
}

fn confined(config: &str) -> Confined {
    let value = |key| config_value(config, key).unwrap_or_default().to_lowercase();
    let selects = value("SelectType");
    let by_cpu = selects.contains("cons_") && !value("SelectTypeParameters").is_empty();
    let tasks = value("TaskPlugin");
    let by_group = tasks.contains("cgroup") && value("ConstrainCores") == "yes";
    if by_cpu && (tasks.contains("affinity") || by_group) {
        Confined::Yes
    } else {
        Confined::No
    }
}

/// The partitions in which jobs share CPUs though none asks for that.
fn sharing(partitions: &str, confined: Confined) -> BTreeSet<&str> {
    let lines = partitions.lines();
    let shared = lines.filter(|line| {
        let how = line_value(line, "OverSubscribe").unwrap_or("NO");
        let (word, most) = how.split_once(':').unwrap_or((how, "4"));
        let most: u32 = most.parse().unwrap_or(4);
        match (word, confined) {
            ("EXCLUSIVE", _) => false,
            (_, Confined::No) => true,
            ("FORCE" | "YES", Confined::Yes) => most > 1,
            _ => false,
        }
    });
    shared
        .filter_map(|line| line_value(line, "PartitionName"))
        .collect()
}

fn listed(list: &str) -> BTreeSet<&str> {
    list.split(',').filter(|word| !word.is_empty()).collect()
}

struct Findings(Vec<Finding>);

impl Findings {
    /// Something that is not as it has to be.
    fn differs(&mut self, text: String) {
        let is_well = false;
        self.0.push(Finding { is_well, text });
    }

    /// Something that is well, or what to do.
    fn say(&mut self, is_well: bool, well: String, wrong: impl FnOnce() -> String) {
        let text = if is_well { well } else { wrong() };
        self.0.push(Finding { is_well, text });
    }
}

/// Compares what is there with what has to be.
#[must_use]
pub fn check(facts: &Facts) -> Vec<Finding> {
    let mut findings = Findings(Vec::new());
    let confined = confined(&facts.config);
    gres(facts, &mut findings);
    lua(facts, confined, &mut findings);
    plugin(facts, confined, &mut findings);
    unkillable(facts, &mut findings);
    findings.say(
        facts.has_groups,
        "control groups of version 2 are mounted".to_owned(),
        || {
            "control groups of version 2 are not mounted whole; a job's lease needs them: \
             mount -t cgroup2 none /sys/fs/cgroup/unified"
                .to_owned()
        },
    );
    findings.0
}

fn gres(facts: &Facts, findings: &mut Findings) {
    let share = match &facts.share {
        Ok(share) => *share,
        Err(why) => {
            findings.differs(format!("the arbiter has nothing for jobs: {why}"));
            return;
        }
    };
    // "pmc:4(S:0),gpu:2" is as the controller has it.
    let has = line_value(&facts.node_text, "Gres").unwrap_or("(null)");
    let has: BTreeSet<&str> = has
        .split(',')
        .map(|part| part.split('(').next().unwrap_or_default())
        .filter(|part| part.starts_with("pmc"))
        .collect();
    let wanted = share.gres();
    let node = &facts.node;
    findings.say(
        has == listed(&wanted),
        format!("node {node} has Gres={wanted}, as the arbiter has"),
        || {
            let has: Vec<&str> = has.into_iter().collect();
            format!(
                "node {node} has Gres={} and the arbiter has {wanted} for jobs; umpire slurm gres \
                 prints the lines, and slurmd has to be started anew",
                has.join(",")
            )
        },
    );
    for (key, prefix) in [("GresTypes", ""), ("AccountingStorageTRES", "gres/")] {
        let has = listed(config_value(&facts.config, key).unwrap_or_default());
        let names = wanted.split(',').filter_map(|part| part.split(':').next());
        let missing: Vec<String> = names
            .map(|name| format!("{prefix}{name}"))
            .filter(|name| !has.contains(name.as_str()))
            .collect();
        findings.say(missing.is_empty(), format!("{key} has them"), || {
            format!("slurm.conf: {key} lacks {}", missing.join(","))
        });
    }
}

fn lua(facts: &Facts, confined: Confined, findings: &mut Findings) {
    let plugins = listed(config_value(&facts.config, "JobSubmitPlugins").unwrap_or_default());
    findings.say(
        plugins.contains("lua"),
        "JobSubmitPlugins has lua".to_owned(),
        || "slurm.conf: JobSubmitPlugins lacks lua".to_owned(),
    );
    let command = match confined {
        Confined::Yes => "umpire slurm job-submit",
        Confined::No => "umpire slurm job-submit --unconfined",
    };
    let text = match &facts.job_submit {
        Ok(text) => text,
        Err(why) => {
            findings.differs(format!("job_submit.lua: {why}; {command} prints it"));
            return;
        }
    };
    let expected = job_submit(confined);
    let ours = expected.split("function slurm_job_submit").next();
    let has_rule = ours.is_some_and(|ours| text.contains(ours));
    findings.say(
        has_rule,
        "job_submit.lua has the rule".to_owned(),
        || format!("job_submit.lua has another rule than this Umpire and this slurm.conf; {command} prints it"),
    );
}

fn plugin(facts: &Facts, confined: Confined, findings: &mut Findings) {
    let plugstack = match &facts.plugstack {
        Ok(text) => text,
        Err(why) => {
            findings.differs(format!("plugstack.conf: {why}"));
            return;
        }
    };
    let by_cores = match confined {
        Confined::Yes => "cores",
        Confined::No => "all",
    };
    let sharing: Vec<&str> = sharing(&facts.partitions, confined).into_iter().collect();
    let sharing = sharing.join(",");
    let Some(line) = PluginLine::find(plugstack) else {
        findings.differs(format!(
            "plugstack.conf does not load the plugin: required /PATH/umpire_spank.so socket={} \
             cpus={by_cores} shared={sharing}",
            facts.socket.display()
        ));
        return;
    };
    findings.say(
        line.is_required,
        "plugstack.conf requires the plugin".to_owned(),
        || "plugstack.conf has the plugin as optional: Slurm ignores what it refuses; write required".to_owned(),
    );
    let slurm = config_value(&facts.config, "SLURM_VERSION").and_then(|text| text.parse().ok());
    let file = line.file.display();
    match (&facts.plugin, slurm) {
        (Err(why), _) => findings.differs(format!("{file}: {why}")),
        (Ok(_), None) => {
            findings.differs("scontrol does not say which Slurm this is".to_owned());
        }
        (Ok(plugin), Some(slurm)) => findings.say(
            plugin.fits(slurm),
            format!("the plugin is for Slurm {plugin}, and this is {slurm}"),
            || format!("{file} is for Slurm {plugin}, and this is {slurm}: build it anew"),
        ),
    }
    findings.say(
        facts.library.is_ok(),
        "the library is there".to_owned(),
        || facts.library.clone().err().unwrap_or_default(),
    );
    let socket = line
        .word("socket", "/run/umpire/arbiter")
        .replace("%n", &facts.node);
    let asked = facts.socket.display().to_string();
    findings.say(
        socket == asked,
        format!("the plugin asks the arbiter at {socket}"),
        || format!("plugstack.conf: the plugin asks the arbiter at {socket}, and this is that at {asked}"),
    );
    findings.say(
        line.word("cpus", "all") == by_cores,
        format!("cpus={by_cores} is true here"),
        || format!("plugstack.conf: write cpus={by_cores}: slurm.conf has tasks run on {by_cores}"),
    );
    let has = line.word("shared", "");
    findings.say(
        listed(has) == listed(&sharing),
        format!("shared={sharing} are the partitions where jobs share CPUs"),
        || format!("plugstack.conf: shared={has} is to be shared={sharing}, by OverSubscribe of the partitions"),
    );
}

/// Slurm drains the node of a step that has not ended so long after it was cancelled, and cannot
/// cancel one that waits for counters: 45 s, and four calls of a second each (`MOST_WAIT_S` in
/// wish.h).
fn unkillable(facts: &Facts, findings: &mut Findings) {
    const LEAST_S: u32 = 60;
    let text = config_value(&facts.config, "UnkillableStepTimeout").unwrap_or_default();
    let word = text.split_whitespace().next().unwrap_or_default();
    let time_s = word.parse().unwrap_or(0);
    findings.say(
        time_s >= LEAST_S,
        format!("UnkillableStepTimeout={time_s} is longer than a step waits for counters"),
        || {
            format!(
                "slurm.conf: UnkillableStepTimeout={word} is to be {LEAST_S} or more: a cancelled \
                 step that waits for counters may drain its node"
            )
        },
    );
}

#[cfg(test)]
mod tests;
