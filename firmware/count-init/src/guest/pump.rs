//! Carries what programs write to the host, until the one that counts has ended.

use count_init::End;

use crate::boot::Host;
use crate::sys::{self, Child, Errno, Fd, Poll, Reaped};

/// Bytes that are carried at once: what a pipe holds.
const PIECE: usize = 64 * 1024;

/// Until the child has ended. Whoever is left then is killed, as they write to nobody any more;
/// what they had written before comes out as well.
pub(crate) fn carry(
    host: &Host,
    mut from: [Option<Fd>; 2],
    children: &Fd,
    child: Child,
) -> Result<End, Errno> {
    let to = [host.stdout.get(), host.stderr.get()];
    let ended = loop {
        let mut wait = [
            Poll::read(from[0].as_ref()),
            Poll::read(from[1].as_ref()),
            Poll::read(Some(children)),
        ];
        sys::poll(&mut wait)?;
        let [out, error, ended] = wait.each_ref().map(Poll::is_ready);
        for (number, ready) in [out, error].into_iter().enumerate() {
            if ready {
                carry_once(&mut from[number], to[number]);
            }
        }
        if ended {
            sys::take_signal(children)?;
            if let Some(end) = reap(child)? {
                break end;
            }
        }
    };
    sys::kill_all();
    while sys::reap_one_waiting().is_ok() {}
    for (number, from) in from.iter_mut().enumerate() {
        while from.is_some() {
            carry_once(from, to[number]);
        }
    }
    Ok(ended)
}

/// Carries one piece. At the end, and where the host takes no more, our end is closed: who goes on
/// writing gets SIGPIPE, as from any reader that goes away.
fn carry_once(from: &mut Option<Fd>, to: i32) {
    let Some(open) = from else { return };
    let mut bytes = [0; PIECE];
    let carried = match sys::read(open.get(), &mut bytes) {
        Ok(read @ 1..) => sys::write_all(to, &bytes[..read]),
        // A terminal that nobody holds any more is EIO.
        Ok(_) | Err(_) => Err(sys::EINVAL),
    };
    if carried.is_err() {
        *from = None;
    }
}

/// Takes all that have ended, strangers too, for whom we became the parent.
fn reap(child: Child) -> Result<Option<End>, Errno> {
    let mut end = None;
    while let Some(Reaped { who, status }) = sys::reap()? {
        if who == child {
            end = Some(status);
        }
    }
    Ok(end)
}
