//! tmp
use guest_tests::{
    l1::{Machine, Run},
    linux::{self, Image},
};
fn main() {
    let mut a = std::env::args().skip(1);
    let script = a.next().unwrap();
    let guest = Image::fetch().unwrap().with_script(&script).unwrap();
    let extra: Vec<String> = a.collect();
    let run = Run::new("target/debug/umpire")
        .args(["run", "--memory", "512", "--cmdline", linux::COMMAND_LINE])
        .args(extra)
        .arg("--kernel")
        .arg(guest.kernel())
        .arg("--initrd")
        .arg(guest.initrd());
    let o = Machine::new()
        .memory_mib(2048)
        .timeout(std::time::Duration::from_secs(180))
        .output(&run)
        .unwrap();
    println!(
        "{}\n---\n{}\n{:?}",
        String::from_utf8_lossy(&o.stdout),
        String::from_utf8_lossy(&o.stderr),
        o.outcome.end
    );
}
