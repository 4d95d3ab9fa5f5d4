//! `umpire man` and `umpire completions`: what a package installs beside the program, made
//! from the definitions of the command line.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use clap_complete::Shell;

use crate::exit::{ExitStatus, UserError, written};
use crate::flags::command;

/// `umpire man`: a page for the program and for each of its commands.
///
/// # Errors
/// The folder cannot be written to.
pub fn man(folder: &Path) -> Result<ExitStatus, UserError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |error: io::Error| UserError::bad_input(format!("{}: {error}", path.display()))
    };
    std::fs::create_dir_all(folder).map_err(failed(folder))?;
    let mut cli = command();
    cli.build();
    for (name, page) in pages(&cli, "") {
        let path = folder.join(format!("{name}.1"));
        let mut file = BufWriter::new(File::create(&path).map_err(failed(&path))?);
        page.render(&mut file).map_err(failed(&path))?;
        file.flush().map_err(failed(&path))?;
    }
    Ok(ExitStatus::SUCCESS)
}

/// The pages of a command and of those below it, by name.
fn pages(command: &clap::Command, above: &str) -> Vec<(String, clap_mangen::Man)> {
    let name = match above {
        "" => command.get_name().to_owned(),
        above => format!("{above}-{}", command.get_name()),
    };
    let below = command
        .get_subcommands()
        .filter(|below| !below.is_hide_set());
    let mut all: Vec<_> = below.flat_map(|below| pages(below, &name)).collect();
    let page = clap_mangen::Man::new(command.clone().name(name.clone())).section("1");
    all.push((name, page));
    all
}

/// `umpire completions`: a script that completes commands and options in a shell.
///
/// # Errors
/// Standard output cannot be written to.
pub fn completions(shell: Shell) -> Result<ExitStatus, UserError> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command(), "umpire", &mut script);
    written(io::stdout().lock().write_all(&script))?;
    Ok(ExitStatus::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_command_has_a_page_with_its_options_and_help() {
        let folder = tempfile::tempdir().expect("a folder");
        man(folder.path()).expect("a folder can be written to");
        let commands = command();
        for command in commands
            .get_subcommands()
            .filter(|command| !command.is_hide_set())
        {
            let path = folder
                .path()
                .join(format!("umpire-{}.1", command.get_name()));
            let page = std::fs::read_to_string(&path).expect("a page");
            assert!(page.contains(".SH NAME"), "{}", path.display());
        }
        let page = std::fs::read_to_string(folder.path().join("umpire-lease.1")).expect("a page");
        assert!(
            page.contains("best\\-effort") && page.contains("perf stat"),
            "{page}"
        );
    }

    #[test]
    fn shells_complete_commands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command(), "umpire", &mut script);
            let script = String::from_utf8(script).expect("text");
            assert!(script.contains("arbiterd") && script.contains("best-effort"));
        }
    }
}
