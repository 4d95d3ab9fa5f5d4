//! Finds the Debian archive and its security archive among apt's own sources, in both of apt's formats.

/// One entry of apt's sources: an archive with some of its suites.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Source {
    /// Root of the archive.
    pub(crate) uri: String,
    /// Suites, such as `bookworm` and `bookworm-updates`.
    pub(crate) suites: Vec<String>,
    /// Components, such as `main`.
    pub(crate) components: Vec<String>,
    /// The text of `Signed-By`: a key file, a fingerprint or a whole key.
    pub(crate) signed_by: Option<String>,
    /// Whether apt takes the archive without a signature.
    pub(crate) trusted: bool,
}

/// Where Debian's packages come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mirror {
    /// The main archive; it also holds the backports.
    pub(crate) archive: Source,
    /// The security archive, where the machine uses one.
    pub(crate) security: Option<Source>,
}

impl Mirror {
    /// Picks the Debian archive and the security archive. Third-party archives are passed over.
    pub(crate) fn choose(sources: &[Source]) -> Option<Self> {
        let usable = |source: &&Source| {
            source.components.iter().any(|name| name == "main") && !source.uri.starts_with("cdrom:")
        };
        let score = |source: &Source| {
            let known = source.suites.iter().any(|suite| is_debian_suite(suite));
            let named = source
                .uri
                .split('/')
                .any(|part| part == "debian" || part.starts_with("debian."));
            let updates = source
                .suites
                .iter()
                .any(|suite| suite.ends_with("-updates"));
            u8::from(known) * (1 + 4 * u8::from(named) + 2 * u8::from(updates))
        };
        let archive = sources
            .iter()
            .filter(usable)
            .rev()
            .max_by_key(|source| score(source))
            .filter(|source| score(source) > 0)?;
        let security = sources.iter().filter(usable).find(|source| {
            let mut suites = source.suites.iter();
            suites.any(|suite| is_security_suite(suite))
        });
        Some(Self {
            archive: archive.clone(),
            security: security.cloned(),
        })
    }

    /// The sources of Debian `release`, its backports and its security updates, in apt's deb822 format.
    pub(crate) fn stanzas(&self, release: &str) -> String {
        let mut text = stanza(&self.archive, &format!("{release} {release}-backports"));
        if let Some(security) = &self.security {
            text.push('\n');
            text.push_str(&stanza(security, &format!("{release}-security")));
        }
        text
    }
}

/// Reads the one-line format (`sources.list`): `deb [options] URI SUITE COMPONENT…`.
pub(crate) fn parse_one_line(text: &str) -> Vec<Source> {
    text.lines().filter_map(parse_line).collect()
}

/// Reads the deb822 format (`*.sources`): stanzas of `Field: value` lines with continuation lines.
pub(crate) fn parse_deb822(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    let mut fields: Vec<(String, String)> = Vec::new();
    for line in text.lines().chain([""]) {
        if line.starts_with('#') {
            continue;
        }
        if line.trim().is_empty() {
            sources.extend(from_fields(&std::mem::take(&mut fields)));
        } else if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = fields.last_mut() {
                value.push('\n');
                value.push_str(line);
            }
        } else if let Some((name, value)) = line.split_once(':') {
            fields.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    sources
}

fn parse_line(line: &str) -> Option<Source> {
    let line = line.split('#').next().unwrap_or_default().trim();
    let rest = line.strip_prefix("deb")?;
    let rest = rest.strip_prefix([' ', '\t'])?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(inner) => inner.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split_whitespace().map(str::to_owned);
    let mut source = Source {
        uri: words.next()?,
        suites: vec![words.next()?],
        components: words.collect(),
        ..Source::default()
    };
    for option in options.split_whitespace() {
        match option.split_once('=') {
            Some(("signed-by", value)) => source.signed_by = Some(value.to_owned()),
            Some(("trusted", value)) => source.trusted = is_yes(value),
            _ => {}
        }
    }
    Some(source)
}

/// One stanza may name several archives; each becomes a source of its own.
fn from_fields(fields: &[(String, String)]) -> Vec<Source> {
    let field = |wanted: &str| {
        let found = fields.iter().find(|(name, _)| name == wanted);
        found.map(|(_, value)| value.as_str())
    };
    let words = |wanted: &str| -> Vec<String> {
        let value = field(wanted).unwrap_or_default();
        value.split_whitespace().map(str::to_owned).collect()
    };
    let disabled = field("enabled").is_some_and(|value| !is_yes(value));
    if disabled || !words("types").iter().any(|kind| kind == "deb") {
        return Vec::new();
    }
    let source = |uri| Source {
        uri,
        suites: words("suites"),
        components: words("components"),
        signed_by: field("signed-by").map(str::to_owned),
        trusted: field("trusted").is_some_and(is_yes),
    };
    words("uris").into_iter().map(source).collect()
}

fn stanza(source: &Source, suites: &str) -> String {
    let uri = &source.uri;
    let mut text = format!("Types: deb\nURIs: {uri}\nSuites: {suites}\nComponents: main\n");
    if let Some(key) = &source.signed_by {
        text.push_str(&format!("Signed-By: {key}\n"));
    }
    if source.trusted {
        text.push_str("Trusted: yes\n");
    }
    text
}

fn is_yes(value: &str) -> bool {
    ["yes", "true", "with", "on", "enable", "1"].contains(&value.to_ascii_lowercase().as_str())
}

fn is_security_suite(suite: &str) -> bool {
    suite.strip_suffix("-security").is_some_and(is_debian_suite)
        || suite.strip_suffix("/updates").is_some_and(is_debian_suite)
}

fn is_debian_suite(suite: &str) -> bool {
    const SUITES: [&str; 11] = [
        "oldoldstable",
        "oldstable",
        "stable",
        "testing",
        "unstable",
        "sid",
        "bullseye",
        "bookworm",
        "trixie",
        "forky",
        "duke",
    ];
    SUITES.contains(&suite)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::slice::from_ref;

    fn source(uri: &str, suites: &str, components: &str) -> Source {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect();
        Source {
            uri: uri.to_owned(),
            suites: words(suites),
            components: words(components),
            ..Source::default()
        }
    }

    fn signed(mut source: Source, key: &str) -> Source {
        source.signed_by = Some(key.to_owned());
        source
    }

    #[test]
    fn one_line_format() {
        fn check(text: &str, expected: &[Source]) {
            assert_eq!(parse_one_line(text), expected, "{text}");
        }
        let plain = source("http://m.test/debian", "bookworm", "main");
        check("deb http://m.test/debian bookworm main", from_ref(&plain));
        check("# deb http://m.test/debian bookworm main", &[]);
        check("deb-src http://m.test/debian bookworm main", &[]);
        check(
            "deb\thttp://m.test/debian\tbookworm main # ours",
            from_ref(&plain),
        );
        check("deb http://m.test/debian", &[]);
        check("deb [unclosed http://m.test/debian bookworm main", &[]);
        check(
            "\ndeb [ arch=amd64 signed-by=/k.gpg ] http://m.test/debian bookworm main\n",
            &[signed(plain.clone(), "/k.gpg")],
        );
        let trusted = Source {
            trusted: true,
            ..plain
        };
        check(
            "deb [trusted=yes] http://m.test/debian bookworm main",
            &[trusted],
        );
    }

    #[test]
    fn deb822_format() {
        fn check(text: &str, expected: &[Source]) {
            assert_eq!(parse_deb822(text), expected, "{text}");
        }
        let plain = source(
            "http://m.test/debian",
            "trixie trixie-updates",
            "main contrib",
        );
        let stanza = "Types: deb\n# a remark\nURIs: http://m.test/debian\nSuites: trixie trixie-updates\nComponents: main\n contrib\n";
        check(stanza, from_ref(&plain));
        check(&format!("{stanza}Enabled: no\n"), &[]);
        check(&stanza.replace("deb\n", "deb-src\n"), &[]);
        check(
            &format!("{stanza}Signed-By:\n -----BEGIN\n key\n\n{stanza}"),
            &[signed(plain.clone(), "\n -----BEGIN\n key"), plain.clone()],
        );
        let both = stanza.replace("URIs: ", "URIs: http://n.test/debian ");
        let other = Source {
            uri: "http://n.test/debian".into(),
            ..plain.clone()
        };
        check(&both, &[other, plain]);
        check("nonsense\n continued\n", &[]);
    }

    #[test]
    fn choice_of_the_archive() {
        fn check(sources: &[Source], expected: Option<(&str, Option<&str>)>) {
            let mirror = Mirror::choose(sources);
            let found = mirror.as_ref().map(|mirror| {
                let security = mirror.security.as_ref().map(|source| source.uri.as_str());
                (mirror.archive.uri.as_str(), security)
            });
            assert_eq!(found, expected, "{sources:?}");
        }
        let main = source("http://m.test/debian", "bookworm", "main");
        let security = source("http://m.test/debian-security", "bookworm-security", "main");
        let vendor = source("http://vendor.test", "bookworm", "main");
        let packages = source("http://docker.test/linux/debian", "bookworm", "stable");
        let nodes = source("http://node.test/x", "nodistro", "main");
        let local = source("http://mirror.test/apt", "stable stable-updates", "main");
        let disc = source("cdrom:[Debian]", "bookworm", "main");
        check(&[], None);
        check(&[nodes.clone(), packages.clone(), disc], None);
        check(
            &[vendor.clone(), main.clone(), security.clone()],
            Some((&main.uri, Some(&security.uri))),
        );
        check(
            &[security.clone(), nodes, local.clone(), vendor],
            Some((&local.uri, Some(&security.uri))),
        );
        check(&[security], None);
        check(&[packages, main.clone()], Some((&main.uri, None)));
    }

    #[test]
    fn stanzas_keep_key_and_trust() {
        let archive = signed(source("http://m.test/debian", "trixie", "main"), "/k.gpg");
        let security = Source {
            trusted: true,
            ..source("http://s.test/", "x-security", "main")
        };
        let mirror = Mirror {
            archive,
            security: Some(security),
        };
        assert_eq!(
            mirror.stanzas("bookworm"),
            "Types: deb\nURIs: http://m.test/debian\nSuites: bookworm bookworm-backports\nComponents: main\nSigned-By: /k.gpg\n\n\
             Types: deb\nURIs: http://s.test/\nSuites: bookworm-security\nComponents: main\nTrusted: yes\n"
        );
    }
}
