//! As much of HTTP/1.1 as a scraper needs: one GET of `/metrics` for each connection. Pure.

/// No request is longer.
const MOST_REQUEST: usize = 8 * 1024;
const MOST_HEADERS: usize = 64;
/// The media type of OpenMetrics.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What a client has sent so far comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// It is not whole yet.
    More,
    /// The metrics; without them, if it was HEAD.
    Metrics {
        /// Whether the text itself is wanted.
        body: bool,
    },
    /// Something that there is not, by its status and what to do.
    Wrong(u16, &'static str),
}

/// What `received` asks for.
pub(crate) fn asked(received: &[u8]) -> Asked {
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    match request.parse(received) {
        Ok(httparse::Status::Partial) if received.len() <= MOST_REQUEST => Asked::More,
        Ok(httparse::Status::Partial) => Asked::Wrong(431, "the request is too long\n"),
        Err(_) => Asked::Wrong(400, "this is no HTTP request\n"),
        Ok(httparse::Status::Complete(_)) => {
            let path = request.path.unwrap_or_default();
            let path = path.split_once('?').map_or(path, |(path, _)| path);
            match (request.method, path) {
                (Some(method @ ("GET" | "HEAD")), "/metrics") => Asked::Metrics {
                    body: method == "GET",
                },
                (Some("GET" | "HEAD"), _) => Asked::Wrong(404, "there is only /metrics\n"),
                _ => Asked::Wrong(405, "only GET is served\n"),
            }
        }
    }
}

/// The bytes of an answer. `text` is `None` where only the length of it is told.
pub(crate) fn answer(status: u16, text: &str, body: bool) -> Vec<u8> {
    let (reason, kind) = match status {
        200 => ("OK", OPEN_METRICS),
        400 => ("Bad Request", "text/plain"),
        404 => ("Not Found", "text/plain"),
        405 => ("Method Not Allowed", "text/plain"),
        _ => ("Request Header Fields Too Large", "text/plain"),
    };
    let length = text.len();
    let mut bytes = format!(
        "HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n"
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
            assert_eq!(asked(&whole.as_bytes()[..end]), Asked::More, "{end}");
        }
        let check = |text: &str, expected| assert_eq!(asked(text.as_bytes()), expected, "{text:?}");
        check(whole, Asked::Metrics { body: true });
        check(
            "HEAD /metrics HTTP/1.0\r\n\r\n",
            Asked::Metrics { body: false },
        );
        let status = |text: &str, status| match asked(text.as_bytes()) {
            Asked::Wrong(found, _) => assert_eq!(found, status, "{text:?}"),
            other => panic!("{text:?}: {other:?}"),
        };
        status("GET / HTTP/1.1\r\n\r\n", 404);
        status("POST /metrics HTTP/1.1\r\n\r\n", 405);
        status("\0\0\0 hello", 400);
        status(&format!("GET /{}", "a".repeat(MOST_REQUEST)), 431);
    }
}
