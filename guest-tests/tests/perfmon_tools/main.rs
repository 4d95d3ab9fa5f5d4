//! `umpire stat`, `record`, `report` and `ls` beside a running VM, through the
//! real programs. Counts are declared by `sim`, so what must come out is known.

mod bad_input;
mod counts;
mod samples;
mod vm;
