//! Any bytes as what comes on connections: for fuzzers and for the test below. Nothing panics, and
//! however bytes are cut into pieces, the same calls come of them.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;

use arbiter_host::{BootTime, CpuSet, HostArbiter};
use umpire_service::{ClientSocket, Closer};
use varlink::sansio::serialize_reply;

use crate::config::{ArbiterConfig, PmuConfig};
use crate::connections::{Calls, Connection, End};
use crate::peer::Client;
use crate::room::OF_CONNECTION;
use crate::service::{ConnectionId, Service};

/// Three users: one may everything, one has a tenant, one has none.
const USERS: [u32; 3] = [0, 1000, 65534];
const POLICY: &str = r#"
grace-ms = 5
[[tenant]]
name = "root"
users = [0]
operator = true
[[tenant]]
name = "blue"
users = [1000]
whole-cpus = true
most-leases = 8
longest-ms = 50
"#;

/// The first byte says how long the pieces are in which the others come on a connection.
/// Returns how many calls came of them.
///
/// # Panics
/// The connection has made something else of them than they are.
pub fn connection(bytes: &[u8]) -> usize {
    let Some((&piece, bytes)) = bytes.split_first() else {
        return 0;
    };
    let (mut client, server) = UnixStream::pair().expect("sockets");
    server.set_nonblocking(true).expect("a socket");
    // So it is closed by this thread, where the kernel can do so.
    umpire_service::refuse_rights(&server);
    let socket = ClientSocket::new(server.into(), &Closer::new(1 << 20));
    let mut connection = Connection::new(socket, Client::default());
    // What a plain look at the bytes says: a call is what stands before a 0.
    let mut expected = bytes.split(|byte| *byte == 0).peekable();
    let (mut calls, mut ended) = (0, None);
    for piece in bytes.chunks(usize::from(piece).pow(2) + 1) {
        client.write_all(piece).expect("there is room");
        loop {
            let filled = connection.fill();
            assert_ne!(filled, Err(End::Closed), "it is open");
            let next = filled.and_then(|()| connection.next());
            match next {
                Ok(None) => break,
                Ok(Some(request)) => {
                    let call = expected.next().expect("a call is there");
                    let call = std::str::from_utf8(call).expect("text");
                    // Numbers that nobody looks at may be too large for a value.
                    if let Ok(plain) = serde_json::from_str::<serde_json::Value>(call) {
                        assert_eq!(plain["method"], *request.method);
                    }
                    calls += 1;
                }
                Err(end) => ended = Some(end),
            }
            assert!(connection.held() <= OF_CONNECTION + (16 << 10));
            if ended.is_some() {
                return calls;
            }
        }
    }
    // What is left is the beginning of a call.
    assert!(expected.next().is_some() && expected.peek().is_none());
    calls
}

/// The bytes are calls, each with a 0 behind it and a byte before it: whose it is, and how much
/// later. Returns how many were answered without an error.
///
/// # Panics
/// An answer cannot be sent, or is much longer than was thought.
pub fn requests(bytes: &[u8]) -> usize {
    let mut service = service();
    let (mut now, mut done) = (BootTime(1), 0);
    for message in bytes.split_inclusive(|byte| *byte == 0) {
        let Some((&whose, call)) = message.split_first() else {
            continue;
        };
        let user = USERS[usize::from(whose) % USERS.len()];
        let id = ConnectionId(u64::from(whose) % 6);
        now = BootTime(now.0 + u64::from(whose / 32) * 10_000_000);
        let mut calls = Calls::default();
        calls.add(call);
        match calls.next() {
            Ok(Some(request)) => {
                let client = Client {
                    pid: std::process::id(),
                    uid: user,
                    ..Client::default()
                };
                if !service.is_busy(id) {
                    service.call(id, &client, &request, now);
                }
            }
            Ok(None) => service.advance(now),
            Err(_) => service.gone(id, now),
        }
        let thought = service.waiting_bytes();
        let output = service.take();
        let replies = output.answers().iter().map(|answer| {
            let reply = serialize_reply(&answer.reply).expect("it can be sent");
            done += usize::from(answer.reply.error.is_none());
            reply.len()
        });
        // A character may need six in JSON; what is around an answer is short.
        let long: usize = replies.sum();
        assert!(
            long <= 6 * thought + 128 * output.answers().len(),
            "{long}, {thought}"
        );
        service.written(output.entries());
    }
    done
}

fn service() -> Service {
    let config = ArbiterConfig::parse(Path::new("policy"), POLICY).expect("a policy");
    let config = ArbiterConfig {
        pmus: PmuConfig::stated(4, 3).into_iter().collect(),
        ..config
    };
    let pmus = config.host_pmus(&(0..4).collect::<CpuSet>());
    let arbiter = HostArbiter::new(pmus, config.policy.clone()).expect("it fits");
    Service::new(arbiter, config)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Something like a call, of parts that matter.
    fn call() -> impl Strategy<Value = Vec<u8>> {
        let text = prop_oneof![
            Just(r#"{"method":"io.umpire.Arbiter.Acquire","parameters":{"request":{"counters":[{}]}}}"#.to_owned()),
            (0u64..4, 0u64..3).prop_map(|(lease, keep)| format!(
                r#"{{"method":"io.umpire.Arbiter.Release","parameters":{{"lease":{lease},"keep":{keep}}}}}"#
            )),
            (0u64..4).prop_map(|lease| format!(
                r#"{{"method":"io.umpire.Arbiter.Renew","parameters":{{"lease":{lease}}}}}"#
            )),
            "[A-Z][a-z]{3,6}".prop_map(|name| format!(r#"{{"method":"io.umpire.Arbiter.{name}"}}"#)),
            Just(r#"{"method":"org.varlink.service.GetInfo","more":true}"#.to_owned()),
            Just(r#"{"method":"io.umpire.Arbiter.Who","parameters":{}}"#.to_owned()),
            "\\PC{0,30}",
        ];
        text.prop_map(String::into_bytes)
    }

    proptest! {
        #[test]
        fn whatever_comes_is_taken_or_refused(
            parts in proptest::collection::vec((any::<u8>(), call()), 0..40),
            noise in proptest::collection::vec(any::<u8>(), 0..60),
        ) {
            let mut bytes = Vec::new();
            for (whose, call) in &parts {
                bytes.push((*whose).max(1));
                bytes.extend_from_slice(call);
                bytes.push(0);
            }
            requests(&bytes);
            bytes.extend(&noise);
            requests(&bytes);
            connection(&bytes);
            connection(&noise);
        }
    }

    /// What the fuzzer has found: bytes that are no text, where nobody looked at them.
    #[test]
    fn a_call_is_text() {
        let call = b"\x03{\"method\":\"a.B\",\"other\":\"\xf0t\"}\0{\"method\":\"a.B\"}\0";
        assert_eq!(connection(call), 0);
        assert_eq!(connection(&call[call.len() - 18..]), 1);
    }

    /// They reach what they are for.
    #[test]
    fn calls_are_answered() {
        let call =
            br#"{"method":"io.umpire.Arbiter.Acquire","parameters":{"request":{"counters":[{}]}}}"#;
        let calls = [&b"\x03"[..], call, b"\0\x03", call, b"\0"].concat();
        assert_eq!(requests(&calls), 2);
        for piece in [0, 1, 200] {
            let calls = [&[piece][..], call, b"\0", call, b"\0", call].concat();
            assert_eq!(connection(&calls), 2);
        }
    }

    #[test]
    fn a_call_that_is_too_long_ends_its_connection() {
        let long =
            |length: usize| [&[255][..], &vec![b' '; length], b"{\"method\":\"a.B\"}\0"].concat();
        assert_eq!(connection(&long(OF_CONNECTION - 17)), 1);
        assert_eq!(connection(&long(OF_CONNECTION)), 0);
    }
}
