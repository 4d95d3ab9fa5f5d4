//! Cuts a guest's console log into the steps of its script.

/// One command of the script, with what it printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// The script's line.
    pub command: String,
    /// Its output, both streams, lines separated by `\n`.
    pub output: String,
    /// Its exit status; none if the guest ended before the command did.
    pub status: Option<u8>,
}

/// The steps in a console log, in order.
pub fn steps(console: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let mut open = false;
    for line in console.lines() {
        let line = line.trim_end_matches('\r');
        if let Some(command) = begin(line) {
            steps.push(Step {
                command: command.to_owned(),
                output: String::new(),
                status: None,
            });
            open = true;
        } else if let Some(step) = steps.last_mut().filter(|_| open) {
            if let Some(status) = end(line) {
                step.status = status;
                open = false;
                // The newline that precedes each end marker is init's, not the command's.
                let length = step.output.trim_end_matches('\n').len();
                step.output.truncate(length);
            } else {
                step.output.push_str(line);
                step.output.push('\n');
            }
        }
    }
    steps
}

fn begin(line: &str) -> Option<&str> {
    let (_, command) = line.strip_prefix("#### begin ")?.split_once(": ")?;
    Some(command)
}

fn end(line: &str) -> Option<Option<u8>> {
    let (_, status) = line.strip_prefix("#### end ")?.split_once(": status ")?;
    Some(status.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs() {
        fn check(console: &str, expected: &[(&str, &str, Option<u8>)]) {
            let found = steps(console);
            let found: Vec<_> = found
                .iter()
                .map(|step| (step.command.as_str(), step.output.as_str(), step.status))
                .collect();
            assert_eq!(found, expected, "{console}");
        }
        check("", &[]);
        check("[ 0.0] boot\n#### done\n", &[]);
        check(
            "boot\n#### begin 1: echo a; echo b\na\nb\n\n#### end 1: status 0\nbetween\n#### begin 2: false\n\n#### end 2: status 1\n#### done\n",
            &[("echo a; echo b", "a\nb", Some(0)), ("false", "", Some(1))],
        );
        check(
            "#### begin 1: x: y\r\nout\r\n\r\n#### end 1: status 139\r\n",
            &[("x: y", "out", Some(139))],
        );
        check("#### begin 1: hang\npart", &[("hang", "part\n", None)]);
        check("#### end 1: status 0\n#### begin broken\n", &[]);
    }
}
