//! What `umpire pcr` prints for people.

use std::io::{self, Write};

use perfmon_abi::wire::pcr::{CounterRead, LayerInfo, PcrAct, PcrInfo, ReservationInfo};
use umpire_events::one_line;

use super::PcrListing;
use crate::table::indented;

/// Writes what there is, or in one line what was done.
pub(super) fn write(act: &PcrAct, vm: &PcrListing, out: &mut dyn Write) -> io::Result<()> {
    let numbers: Vec<u32> = vm.vcpus.iter().map(|info| info.vcpu).collect();
    let on = format!("on vCPU {}", ranges(&numbers));
    match act {
        PcrAct::Show => show(vm, out),
        PcrAct::Revoke {
            counter,
            grace_ms: 0,
        } => writeln!(out, "{counter} is revoked {on}"),
        PcrAct::Revoke { counter, grace_ms } => {
            writeln!(out, "{counter} will be revoked within {grace_ms} ms {on}")
        }
        PcrAct::Bar { layer } => writeln!(out, "the {layer} may reserve nothing {on}"),
        PcrAct::Unbar { layer } => writeln!(out, "the {layer} may reserve {on}"),
        PcrAct::Policy { shares } => {
            let layers: Vec<&str> = shares.iter().map(|share| share.layer.as_str()).collect();
            writeln!(out, "the policy of {} is set {on}", layers.join(" and "))
        }
        PcrAct::Scheme { scheme } => writeln!(out, "the scheme is {scheme} {on}"),
        PcrAct::Read { counter, .. } => vm.vcpus.iter().try_for_each(|info| {
            let on = format!("on vCPU {}", info.vcpu);
            match info.read {
                Some(CounterRead::Value(value)) => writeln!(out, "{counter} has {value} {on}"),
                Some(CounterRead::Faulted) => {
                    writeln!(out, "{counter} is not the hypervisor's to read {on}: #GP")
                }
                Some(CounterRead::Dropped) | None => {
                    writeln!(
                        out,
                        "{counter} is not the hypervisor's to read {on}: dropped"
                    )
                }
            }
        }),
    }
}

fn show(vm: &PcrListing, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "VM {} at {}", vm.pid, vm.socket.display())?;
    let mut rest = vm.vcpus.as_slice();
    while let Some(first) = rest.first() {
        let rules = |info: &PcrInfo| (info.scheme.clone(), info.grace_ms, info.layers.clone());
        let same = rest.iter().take_while(|info| rules(info) == rules(first));
        let (alike, others) = rest.split_at(same.count());
        let numbers: Vec<u32> = alike.iter().map(|info| info.vcpu).collect();
        writeln!(
            out,
            "  vCPU {}: scheme {}, {} ms to answer",
            ranges(&numbers),
            one_line(&first.scheme),
            first.grace_ms
        )?;
        let heads = [
            "LAYER",
            "MIN",
            "MAX",
            "MIN-FIXED",
            "MAX-FIXED",
            "PRIORITY",
            "LEASE",
            "MAY RESERVE",
        ];
        indented(&heads, first.layers.iter().map(layer).collect(), out)?;
        rest = others;
    }
    let of = |info: &PcrInfo| -> Vec<Vec<String>> {
        let rows = info.reservations.iter();
        rows.map(|held| reservation(info.vcpu, held)).collect()
    };
    let rows: Vec<Vec<String>> = vm.vcpus.iter().flat_map(of).collect();
    if rows.is_empty() {
        return writeln!(out, "  no counter is reserved");
    }
    let heads = [
        "VCPU",
        "COUNTER",
        "LAYER",
        "ACCESS",
        "LEASE LEFT",
        "REVOKED IN",
        "EVENT",
    ];
    indented(&heads, rows, out)
}

fn layer(layer: &LayerInfo) -> Vec<String> {
    let limit = |most: Option<u8>| most.map_or("all".to_owned(), |most| most.to_string());
    vec![
        one_line(&layer.layer),
        layer.min.to_string(),
        limit(layer.max),
        layer.min_fixed.to_string(),
        limit(layer.max_fixed),
        layer.priority.to_string(),
        milliseconds(layer.lease_ms),
        if layer.barred { "no: barred" } else { "yes" }.to_owned(),
    ]
}

fn reservation(vcpu: u32, held: &ReservationInfo) -> Vec<String> {
    let revoked = match &held.revoked_for {
        Some(reason) => format!("{}: {}", milliseconds(held.revoked_in_ms), one_line(reason)),
        None => "-".to_owned(),
    };
    vec![
        vcpu.to_string(),
        one_line(&held.counter),
        one_line(&held.layer),
        if held.private { "private" } else { "shared" }.to_owned(),
        milliseconds(held.lease_left_ms),
        revoked,
        held.event.as_deref().map_or("-".to_owned(), one_line),
    ]
}

fn milliseconds(ms: Option<u32>) -> String {
    ms.map_or("-".to_owned(), |ms| format!("{ms} ms"))
}

/// Ascending numbers as options take them: `0-2,5`.
pub(super) fn ranges(numbers: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for &number in numbers {
        match parts.last_mut() {
            Some((_, last)) if last.checked_add(1) == Some(number) => *last = number,
            _ => parts.push((number, number)),
        }
    }
    let part = |(first, last): &(u32, u32)| {
        if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        }
    };
    parts.iter().map(part).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(vcpu: u32, scheme: &str, reservations: Vec<ReservationInfo>) -> PcrInfo {
        PcrInfo {
            vcpu,
            scheme: scheme.to_owned(),
            grace_ms: 100,
            layers: vec![LayerInfo {
                layer: "kernel".to_owned(),
                barred: vcpu == 2,
                min: 1,
                max: None,
                min_fixed: 0,
                max_fixed: Some(2),
                priority: 0,
                lease_ms: Some(500),
            }],
            reservations,
            read: None,
        }
    }

    #[test]
    fn reservations_in_words() {
        let held = ReservationInfo {
            counter: "PMC1".to_owned(),
            layer: "kernel".to_owned(),
            private: true,
            lease_left_ms: Some(300),
            revoked_in_ms: Some(20),
            revoked_for: Some("administrator".to_owned()),
            event: None,
        };
        let vm = PcrListing {
            socket: "vm1.sock".into(),
            pid: 71,
            vcpus: vec![
                info(0, "single", vec![held]),
                info(1, "single", Vec::new()),
                info(2, "single", Vec::new()),
            ],
        };
        let text = |act: &PcrAct| {
            let mut out = Vec::new();
            write(act, &vm, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let expected = "\
VM 71 at vm1.sock
  vCPU 0-1: scheme single, 100 ms to answer
  LAYER   MIN  MAX  MIN-FIXED  MAX-FIXED  PRIORITY  LEASE   MAY RESERVE
  kernel  1    all  0          2          0         500 ms  yes
  vCPU 2: scheme single, 100 ms to answer
  LAYER   MIN  MAX  MIN-FIXED  MAX-FIXED  PRIORITY  LEASE   MAY RESERVE
  kernel  1    all  0          2          0         500 ms  no: barred
  VCPU  COUNTER  LAYER   ACCESS   LEASE LEFT  REVOKED IN            EVENT
  0     PMC1     kernel  private  300 ms      20 ms: administrator  -
";
        assert_eq!(text(&PcrAct::Show), expected);
        let revoke = |grace_ms| PcrAct::Revoke {
            counter: "PMC1".to_owned(),
            grace_ms,
        };
        assert_eq!(text(&revoke(0)), "PMC1 is revoked on vCPU 0-2\n");
        assert_eq!(
            text(&revoke(7)),
            "PMC1 will be revoked within 7 ms on vCPU 0-2\n"
        );
        assert_eq!(ranges(&[0, 2, 3, 4, 9]), "0,2-4,9");
    }
}
