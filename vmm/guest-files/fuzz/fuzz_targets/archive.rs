//! Any archive of changed files: nothing appears beside the folder that it is unpacked into.
#![no_main]

use std::fs;

use guest_files::unpack;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let place = tempfile::tempdir().expect("a folder");
    let into = place.path().join("into");
    fs::create_dir(&into).expect("room");
    fs::write(place.path().join("neighbour"), b"mine").expect("room");
    // A header's sum is of all its bytes: it is made right, or nothing would ever be read.
    let mut archive = data.to_vec();
    for header in archive.chunks_exact_mut(512) {
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        if sum != 8 * u32::from(b' ') {
            header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        } else {
            header[148..156].fill(0);
        }
    }
    let _ = unpack(&archive[..], &into, 1 << 16);
    assert_eq!(fs::read_dir(place.path()).expect("it").count(), 2);
    assert_eq!(
        fs::read(place.path().join("neighbour")).expect("it"),
        b"mine"
    );
});
