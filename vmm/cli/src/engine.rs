//! Which engine runs the guest of `umpire run`, and what this host says of KVM.

use std::fmt::Display;
use std::io::{IsTerminal, stdin};
use std::path::Path;

use umpire_lease::Request;
use vmm::config::{Engine, EngineChoice, ForeignOption, RunConfig};
use vmm::doctor::{self, Refusal};
use vmm::kvm::Host;
use vmm::machine::EngineFacts;
use vmm::probe::ProbeReport;

use crate::config::{Settings, StartTools};
use crate::exit::UserError;
use crate::lease::{AUDIT_OF_HOST, ArbiterChoice, Whom};

/// An engine that is ready to run a guest.
#[derive(Debug)]
pub(crate) enum Ready {
    /// KVM, which was looked at.
    Kvm(Box<(Host, ProbeReport)>),
    /// The processor in software; why, if nobody asked for it.
    Emu { because: Option<String> },
}

impl Ready {
    /// What a machine is made for.
    pub(crate) fn facts(&self) -> EngineFacts<'_> {
        match self {
            Self::Kvm(on) => EngineFacts::Kvm {
                host: &on.0,
                probes: &on.1,
            },
            Self::Emu { .. } => EngineFacts::Emu,
        }
    }

    /// What the user is told before the guest runs, if anything: that it is not on KVM, and
    /// what its time is.
    pub(crate) fn first_line(&self, config: &RunConfig) -> Option<String> {
        let Self::Emu { because } = self else {
            return None;
        };
        let real_time = config.engine.real_time == Some(true);
        let time = if real_time {
            "its time follows the host's clock"
        } else {
            "its time is virtual, a nanosecond for each instruction"
        };
        let engine = "the guest runs on the engine emu, a processor in software";
        match because {
            Some(because) => Some(format!("{engine}, as {because}; {time}")),
            None if real_time => Some(format!("{engine}; {time}")),
            None => None,
        }
    }
}

/// The engine that `settings` ask for, or the one that can be had. The configuration is then
/// complete for it.
///
/// # Errors
/// It cannot run here, or has not what was asked for.
pub(crate) fn ready(settings: &mut Settings) -> Result<Ready, UserError> {
    let ready = match settings.run.engine.choice {
        EngineChoice::Only(Engine::Kvm) => {
            fits(settings, Engine::Kvm).map_err(UserError::bad_input)?;
            kvm(&settings.run).map_err(UserError::bad_input)?
        }
        EngineChoice::Only(Engine::Emu) => {
            fits(settings, Engine::Emu).map_err(UserError::bad_input)?;
            Ready::Emu { because: None }
        }
        EngineChoice::Auto => either(settings)?,
    };
    let engine = &mut settings.run.engine;
    engine.choice = EngineChoice::Only(match ready {
        Ready::Kvm(_) => Engine::Kvm,
        Ready::Emu { .. } => Engine::Emu,
    });
    if engine.choice == EngineChoice::Only(Engine::Emu) {
        let usual = || engine.seed.is_none() && somebody_waits(&settings.tools);
        engine.real_time = Some(engine.real_time.unwrap_or_else(usual));
    }
    Ok(ready)
}

/// KVM where it can be used and nothing was asked for that it has not, else the other one.
fn either(settings: &Settings) -> Result<Ready, UserError> {
    let run = &settings.run;
    match (fits(settings, Engine::Kvm), fits(settings, Engine::Emu)) {
        (Err(one), Err(other)) => Err(UserError::bad_input(format!(
            "no engine has all that was asked for: {one}; {other}"
        ))),
        (Err(only), Ok(())) => Ok(Ready::Emu {
            because: Some(format!("{} is only there", only.what)),
        }),
        (Ok(()), Err(only)) => kvm(run).map_err(|refusal| {
            UserError::bad_input(format!(
                "{}; {} needs KVM: without it the engine emu runs the guest",
                sentence(&refusal),
                only.what
            ))
        }),
        (Ok(()), Ok(())) => Ok(match kvm(run) {
            Ok(ready) => ready,
            Err(refusal) => Ready::Emu {
                because: Some(format!("KVM cannot be used here ({})", sentence(&refusal))),
            },
        }),
    }
}

/// Without the full stop that it may end with.
fn sentence(text: &dyn Display) -> String {
    text.to_string().trim_end_matches('.').to_owned()
}

fn kvm(config: &RunConfig) -> Result<Ready, Refusal> {
    let host = doctor::open()?;
    let probes = doctor::check(&host)?;
    doctor::check_backends(&probes, &config.counters)?;
    Ok(Ready::Kvm(Box::new((host, probes))))
}

/// Whether `engine` has all that was asked for.
fn fits(settings: &Settings, engine: Engine) -> Result<(), ForeignOption> {
    settings.run.fits(engine)?;
    let foreign = match engine {
        Engine::Kvm => None,
        Engine::Emu => leased(&settings.arbiter, &settings.run),
    };
    foreign.map_or(Ok(()), Err)
}

/// What was asked for of physical counters, which the processor in software has none of.
fn leased(arbiter: &ArbiterChoice, config: &RunConfig) -> Option<ForeignOption> {
    let foreign = |what: String| {
        Some(ForeignOption {
            engine: Engine::Kvm,
            what,
            why: "the engine emu takes no physical counters, of which there could be a lease",
        })
    };
    match &arbiter.whom {
        Whom::Own(_) => foreign("--arbiter own".to_owned()),
        Whom::At(socket) => foreign(format!("--arbiter {}", socket.display())),
        _ if arbiter.fewer.is_some() => foreign("--arbiter-shortage".to_owned()),
        _ if arbiter.terms != Request::default() => foreign("--arbiter-terms".to_owned()),
        _ if config.audit.as_deref() == Some(Path::new(AUDIT_OF_HOST)) => {
            foreign(format!("--audit {AUDIT_OF_HOST}"))
        }
        Whom::Auto | Whom::Nobody => None,
    }
}

/// Whether somebody sits before the guest, or tools are to let it begin.
fn somebody_waits(tools: &StartTools) -> bool {
    stdin().is_terminal() || tools.paused
}
