//! What a model's registers are, and what a guest asks for by a value.
//!
//! `cargo run -p pmu-model --example registers -- intel-v2 0x186 0x5300c0`

use pmu_model::{CountRequest, MsrIndex, PmuModel};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let model = PmuModel::parse(args.next().as_deref().unwrap_or("intel-v2"))?;
    let mut number = |or: u64| match args.next() {
        Some(text) => u64::from_str_radix(text.trim_start_matches("0x"), 16),
        None => Ok(or),
    };
    let (msr, value) = (u32::try_from(number(0x186)?)?, number(0x53_00c0)?);
    println!("{model}");
    for (first, last) in model.msr_ranges() {
        println!("  MSRs {first:#x} to {last:#x}");
    }
    let Some(register) = model.decode(MsrIndex(msr)) else {
        println!("{msr:#x} is none of them");
        return Ok(());
    };
    println!("{msr:#x} is {register:?}");
    if let Some(rule) = model.write_rule(register) {
        println!("  a write of {value:#x} leaves {:x?}", rule.accept(value));
    }
    let request = CountRequest::decode(model.events(), value);
    println!("  as a select it asks for {request}");
    Ok(())
}
