//! Says which encodings the decoder of this build knows.

use instruction_facts::Encoding;

fn main() {
    for encoding in [Encoding::Vex, Encoding::Evex, Encoding::Xop] {
        println!("{encoding:?} {}", encoding.is_decoded());
    }
}
