//! As much of HTTP/1.1 as a scraper needs: one GET of `/metrics` for each connection, in the
//! format that it asks for. Pure.

use std::borrow::Cow;

/// No request is longer.
const MOST_REQUEST: usize = 8 * 1024;
const MOST_HEADERS: usize = 64;

/// How metrics are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// The text format of Prometheus, 0.0.4.
    Plain,
}

impl Format {
    pub(crate) fn media_type(self) -> &'static str {
        match self {
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Format::Plain => "text/plain; version=0.0.4; charset=utf-8",
        }
    }

    /// A text in OpenMetrics, in this format.
    pub(crate) fn of(self, text: &str) -> Cow<'_, str> {
        match self {
            Format::OpenMetrics => text.into(),
            Format::Plain => plain(text).into(),
        }
    }

    /// What `Accept` asks for; OpenMetrics, if it does not matter.
    fn accepted<'a>(accept: impl Iterator<Item = &'a str>) -> Self {
        let [mut open, mut plain] = [Wanted::default(); 2];
        for range in accept.flat_map(|value| value.split(',')) {
            let mut parts = range.split(';').map(str::trim);
            let kind = parts.next().unwrap_or_default().to_ascii_lowercase();
            let (mut quality, mut version) = (1000, None);
            for (name, value) in parts.filter_map(|part| part.split_once('=')) {
                match name.trim().to_ascii_lowercase().as_str() {
                    "q" => quality = thousandths(value.trim()),
                    "version" => version = Some(value.trim().trim_matches('"')),
                    _ => {}
                }
            }
            let is_version = |known: [&str; 2]| version.is_none_or(|one| known.contains(&one));
            match kind.as_str() {
                "application/openmetrics-text" if is_version(["1.0.0", "0.0.1"]) => {
                    open.add(3, quality);
                }
                "text/plain" if is_version(["0.0.4", "1.0.0"]) => plain.add(3, quality),
                "application/*" => open.add(2, quality),
                "text/*" => plain.add(2, quality),
                "*/*" => {
                    open.add(1, quality);
                    plain.add(1, quality);
                }
                _ => {}
            }
        }
        if plain.worth() > open.worth() {
            Format::Plain
        } else {
            Format::OpenMetrics
        }
    }
}

/// How much a format is wanted: what names it most closely counts (RFC 9110, 12.5.1).
#[derive(Clone, Copy, Default)]
struct Wanted {
    closeness: u8,
    /// In thousandths.
    quality: u32,
}

impl Wanted {
    fn add(&mut self, closeness: u8, quality: u32) {
        if (closeness, quality) > (self.closeness, self.quality) {
            *self = Wanted { closeness, quality };
        }
    }

    fn worth(self) -> (u32, u8) {
        (self.quality, self.closeness)
    }
}

/// A quality: `0.25` is 250. What is none is 0.
fn thousandths(text: &str) -> u32 {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.len() != 1 || part.len() > 3 || !digits(whole) || !digits(part) {
        return 0;
    }
    let part = format!("{part:0<3}").parse().unwrap_or(0);
    (whole.parse().unwrap_or(0) * 1000 + part).min(1000)
}

/// A text in OpenMetrics, in the text format of Prometheus: there a family has the name of its
/// samples, and neither units nor an end.
fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut help = None;
    for line in text.lines() {
        let about = |what: &str| line.strip_prefix(what)?.split_once(' ');
        if let Some(found) = about("# HELP ") {
            help = Some(found);
        } else if let Some((name, kind)) = about("# TYPE ") {
            let (end, kind) = match kind {
                "counter" => ("_total", kind),
                "info" => ("_info", "gauge"),
                "stateset" => ("", "gauge"),
                "unknown" => ("", "untyped"),
                _ => ("", kind),
            };
            if let Some((_, help)) = help.take().filter(|(of, _)| *of == name) {
                plain.extend(["# HELP ", name, end, " ", help, "\n"]);
            }
            plain.extend(["# TYPE ", name, end, " ", kind, "\n"]);
        } else if !line.starts_with('#') {
            plain.extend([line, "\n"]);
        }
    }
    plain
}

/// What a client has sent so far comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// It is not whole yet.
    More,
    /// The metrics; without them, if it was HEAD.
    Metrics {
        /// Whether the text itself is wanted.
        body: bool,
        /// How it is wanted.
        format: Format,
    },
    /// Something that there is not.
    Wrong {
        status: u16,
        /// What to do.
        what: &'static str,
        /// Whether that is wanted: not by HEAD, which has no text in its answer.
        body: bool,
    },
}

/// What `received` asks for.
pub(crate) fn asked(received: &[u8]) -> Heard {
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    let parsed = request.parse(received);
    let body = request.method != Some("HEAD");
    let wrong = |status, what| Heard::Wrong { status, what, body };
    match parsed {
        Ok(httparse::Status::Partial) if received.len() <= MOST_REQUEST => Heard::More,
        Ok(httparse::Status::Partial) => wrong(431, "the request is too long\n"),
        Err(httparse::Error::TooManyHeaders) => wrong(431, "the request has too many headers\n"),
        Err(_) => wrong(400, "this is no HTTP request\n"),
        Ok(httparse::Status::Complete(_)) => {
            let path = path_of(request.path.unwrap_or_default());
            match (request.method, path) {
                (Some("GET" | "HEAD"), "/metrics") => {
                    let headers = request.headers.iter();
                    let accept = headers.filter(|one| one.name.eq_ignore_ascii_case("accept"));
                    let accept = accept.filter_map(|one| std::str::from_utf8(one.value).ok());
                    Heard::Metrics {
                        body,
                        format: Format::accepted(accept),
                    }
                }
                (Some("GET" | "HEAD"), _) => wrong(404, "there is only /metrics\n"),
                _ => wrong(405, "only GET is served\n"),
            }
        }
    }
}

/// The path of what is asked for, which may be named with scheme and host before it (RFC 9112,
/// 3.2.2), and a query behind.
fn path_of(target: &str) -> &str {
    let scheme = target
        .get(..7)
        .filter(|scheme| scheme.eq_ignore_ascii_case("http://"));
    let path = match scheme {
        None => target,
        Some(_) => target[7..].find('/').map_or("/", |at| &target[7 + at..]),
    };
    path.split_once('?').map_or(path, |(path, _)| path)
}

/// The bytes of an answer. Without `body` only the length of `text` is told.
pub(crate) fn answer(status: u16, kind: &str, text: &str, body: bool) -> Vec<u8> {
    let reason = match status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        _ => "Request Header Fields Too Large",
    };
    let length = text.len();
    // RFC 9110, 15.5.6.
    let allow = if status == 405 {
        "Allow: GET, HEAD\r\n"
    } else {
        ""
    };
    let mut bytes = format!(
        "HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
         {allow}Connection: close\r\n\r\n"
    )
    .into_bytes();
    if body {
        bytes.extend_from_slice(text.as_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests() {
        let whole = "GET /metrics?x HTTP/1.1\r\nHost: a\r\n\r\n";
        for end in 0..whole.len() {
            assert_eq!(asked(&whole.as_bytes()[..end]), Heard::More, "{end}");
        }
        let check = |text: &str, expected| assert_eq!(asked(text.as_bytes()), expected, "{text:?}");
        let metrics = |body| Heard::Metrics {
            body,
            format: Format::OpenMetrics,
        };
        check(whole, metrics(true));
        check("HEAD /metrics HTTP/1.0\r\n\r\n", metrics(false));
        for target in ["http://127.0.0.1:9184/metrics", "HTTP://a/metrics?x=/b"] {
            check(&format!("GET {target} HTTP/1.1\r\n\r\n"), metrics(true));
        }
        let status = |text: &str, right| match asked(text.as_bytes()) {
            Heard::Wrong { status, body, .. } => {
                assert_eq!(status, right, "{text:?}");
                assert_eq!(body, !text.starts_with("HEAD"), "{text:?}");
            }
            other => panic!("{text:?}: {other:?}"),
        };
        status("HEAD / HTTP/1.1\r\n\r\n", 404);
        status("GET http://a HTTP/1.1\r\n\r\n", 404);
        let headers = "X-Of: a proxy\r\n".repeat(MOST_HEADERS + 1);
        status(&format!("GET /metrics HTTP/1.1\r\n{headers}\r\n"), 431);
        let refused = answer(405, "text/plain", "x", true);
        assert!(
            refused
                .windows(18)
                .any(|part| part == b"Allow: GET, HEAD\r\n")
        );
        status("GET / HTTP/1.1\r\n\r\n", 404);
        status("POST /metrics HTTP/1.1\r\n\r\n", 405);
        status("\0\0\0 hello", 400);
        status(&format!("GET /{}", "a".repeat(MOST_REQUEST)), 431);
    }

    #[test]
    fn a_scraper_gets_the_format_that_it_asks_for() {
        let check = |accept: &str, format| {
            let request = format!("GET /metrics HTTP/1.1\r\n{accept}\r\n");
            let asked = asked(request.as_bytes());
            assert_eq!(asked, Heard::Metrics { body: true, format }, "{accept:?}");
        };
        for accept in [
            "Accept: text/plain\r\n",
            "accept:text/plain;version=0.0.4\r\n",
            "ACCEPT: Text/Plain; Version=\"0.0.4\"; charset=utf-8\r\n",
            "Accept: text/*\r\n",
            "Accept: text/plain, */*;q=0.1\r\n",
            "Accept: text/plain, */*\r\n",
            "Accept: */*;q=0.1\r\nAccept: text/plain;q=0.2\r\n",
            "Accept: application/openmetrics-text;q=0.2, text/plain; q=0.3\r\n",
            "Accept: application/openmetrics-text;version=2.0.0, text/plain;q=0.3\r\n",
            "Accept: application/openmetrics-text;q=0, */*\r\n",
            "Accept: application/*;q=0.5, text/plain;q=0.501\r\n",
        ] {
            check(accept, Format::Plain);
        }
        for accept in [
            "",
            "Accept: */*\r\n",
            "Accept: \r\n",
            "Accept: application/json\r\n",
            "Accept: application/openmetrics-text\r\n",
            "Accept: text/plain, application/openmetrics-text\r\n",
            "Accept: text/plain;q=0, */*;q=0.1\r\n",
            "Accept: text/plain;q=x, application/openmetrics-text;q=0.1\r\n",
            "Accept: application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
             application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;q=0.3,\
             text/plain;version=0.0.4;q=0.2,*/*;q=0.1\r\n",
            "Accept: text/plain\u{ff}\r\n",
        ] {
            check(accept, Format::OpenMetrics);
        }
    }

    #[test]
    fn the_plain_format_has_the_names_of_its_samples() {
        let text = "# HELP a_seconds How long.\n# TYPE a_seconds counter\n# UNIT a_seconds seconds\n\
                    a_seconds_total{b=\"# x\"} 1.5\n# HELP c What.\n# TYPE c gauge\nc -1\n\
                    # HELP d Of.\n# TYPE d unknown\nd 2\n# HELP e Which.\n# TYPE e info\n\
                    e_info{f=\"g\"} 1\n# TYPE h histogram\nh_bucket{le=\"+Inf\"} 1\n# EOF\n";
        let expected = "# HELP a_seconds_total How long.\n# TYPE a_seconds_total counter\n\
                        a_seconds_total{b=\"# x\"} 1.5\n# HELP c What.\n# TYPE c gauge\nc -1\n\
                        # HELP d Of.\n# TYPE d untyped\nd 2\n# HELP e_info Which.\n\
                        # TYPE e_info gauge\ne_info{f=\"g\"} 1\n# TYPE h histogram\n\
                        h_bucket{le=\"+Inf\"} 1\n";
        assert_eq!(Format::Plain.of(text), expected);
        assert_eq!(Format::OpenMetrics.of(text), text);
    }
}
