//! Unpacks the payload of a bzImage on the host, as the kernel's own decompressor would.

use std::io::{self, Read};

use super::wire::u32_at;

/// How a kernel is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// `CONFIG_KERNEL_GZIP`
    Gzip,
    /// `CONFIG_KERNEL_XZ`, with the x86 branch filter
    Xz,
    /// `CONFIG_KERNEL_ZSTD`
    Zstd,
    /// `CONFIG_KERNEL_LZ4`, in LZ4's legacy frame
    Lz4,
    /// `CONFIG_KERNEL_LZMA`, the ".lzma" format
    Lzma,
    /// `CONFIG_KERNEL_BZIP2`
    Bzip2,
}

impl std::fmt::Display for Compression {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Zstd => "zstd",
            Self::Lz4 => "lz4",
            Self::Lzma => "lzma",
            Self::Bzip2 => "bzip2",
        })
    }
}

/// A reason why a payload could not be unpacked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UnpackError {
    /// No known magic number.
    #[error(
        "its payload begins with {0:02x?}, which is no compression known here \
         (gzip, xz, zstd, lz4, lzma, bzip2); give the vmlinux instead"
    )]
    Unknown(Vec<u8>),
    /// The decoder gave up.
    #[error("its {format} payload is damaged ({reason}); copy or build it again")]
    Damaged {
        /// The format by its magic number.
        format: Compression,
        /// The decoder's reason.
        reason: String,
    },
    /// More bytes came out than the guest has memory.
    #[error("its {format} payload unpacks to more than {limit} bytes; give more --memory")]
    TooLarge {
        /// The format by its magic number.
        format: Compression,
        /// The limit in bytes.
        limit: usize,
    },
}

/// Memory that a decoder may take for its dictionary, in bytes: `xz -9` needs 64 MiB and
/// `zstd -22` 128 MiB; the kernel's own options stay within that.
const DICTIONARY_LIMIT: u64 = 160 << 20;
/// Output of one block in LZ4's legacy frame.
const LZ4_BLOCK: usize = 8 << 20;

/// The formats by the first bytes of the payload.
const MAGIC: [(&[u8], Compression); 6] = [
    (b"\x1f\x8b", Compression::Gzip),
    (b"\xfd7zXZ\0", Compression::Xz),
    (b"\x28\xb5\x2f\xfd", Compression::Zstd),
    (b"\x02\x21\x4c\x18", Compression::Lz4),
    (b"\x5d\0\0", Compression::Lzma),
    (b"BZh", Compression::Bzip2),
];

/// Finds the compression by the first bytes.
pub(crate) fn detect(payload: &[u8]) -> Option<Compression> {
    MAGIC
        .iter()
        .find(|(magic, _)| payload.starts_with(magic))
        .map(|&(_, format)| format)
}

/// Unpacks a payload to at most `limit` bytes.
///
/// The kernel's build appends the unpacked size (4 bytes) to all formats but gzip; every decoder
/// here stops at the end of its own stream, so that these bytes play no role.
pub(crate) fn unpack(payload: &[u8], limit: usize) -> Result<(Compression, Vec<u8>), UnpackError> {
    let Some(format) = detect(payload) else {
        return Err(UnpackError::Unknown(
            payload.iter().copied().take(6).collect(),
        ));
    };
    let result = match format {
        Compression::Gzip => limited(flate2::bufread::GzDecoder::new(payload), limit),
        Compression::Bzip2 => limited(bzip2::bufread::BzDecoder::new(payload), limit),
        Compression::Xz => liblzma::stream::Stream::new_stream_decoder(DICTIONARY_LIMIT, 0)
            .map_err(io::Error::from)
            .and_then(|stream| {
                limited(
                    liblzma::bufread::XzDecoder::new_stream(payload, stream),
                    limit,
                )
            }),
        Compression::Lzma => liblzma::stream::Stream::new_lzma_decoder(DICTIONARY_LIMIT)
            .map_err(io::Error::from)
            .and_then(|stream| {
                limited(
                    liblzma::bufread::XzDecoder::new_stream(payload, stream),
                    limit,
                )
            }),
        Compression::Zstd => {
            ruzstd::decoding::StreamingDecoder::new_with_max_window_size(payload, DICTIONARY_LIMIT)
                .map_err(io::Error::other)
                .and_then(|decoder| limited(decoder, limit))
        }
        Compression::Lz4 => lz4_legacy(&payload[4..], limit),
    };
    match result {
        Ok(bytes) if bytes.len() > limit => Err(UnpackError::TooLarge { format, limit }),
        Ok(bytes) => Ok((format, bytes)),
        Err(error) => Err(UnpackError::Damaged {
            format,
            reason: error.to_string(),
        }),
    }
}

/// Reads to the end, or to one byte more than the limit.
fn limited(reader: impl Read, limit: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reader
        .take((limit as u64).saturating_add(1))
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// LZ4's legacy frame behind its magic number: blocks of a 4-byte length and their data, each
/// unpacking to 8 MiB except the last.
fn lz4_legacy(mut rest: &[u8], limit: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut block = vec![0; LZ4_BLOCK];
    // Four bytes at the end are the unpacked size, not the length of a further block.
    while rest.len() > 4 && bytes.len() <= limit {
        let len = u32_at(rest, 0)
            .and_then(|len| usize::try_from(len).ok())
            .unwrap_or(usize::MAX);
        let data = len
            .checked_add(4)
            .and_then(|end| rest.get(4..end))
            .ok_or_else(|| io::Error::other("a block reaches beyond the payload"))?;
        let count = lz4_flex::block::decompress_into(data, &mut block).map_err(io::Error::other)?;
        bytes.extend_from_slice(&block[..count]);
        rest = &rest[4 + len..];
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{ProptestConfig, any, proptest};

    use super::*;
    use crate::boot::testing::{FORMATS, compress};

    /// Compressible, but not trivially; longer than two LZ4 blocks.
    fn sample(len: usize) -> Vec<u8> {
        (0..len)
            .map(|i| u8::try_from(((i / 7) ^ (i >> 9)) & 0xff).expect("one byte"))
            .collect()
    }

    #[test]
    fn every_format_unpacks_with_and_without_the_appended_size() {
        let data = sample(2 * LZ4_BLOCK + 12345);
        for format in FORMATS {
            let mut payload = compress(format, &data);
            for _ in 0..2 {
                let (found, unpacked) = unpack(&payload, data.len()).expect("unpacked");
                assert_eq!(found, format);
                assert!(unpacked == data, "{format}");
                payload.extend(u32::try_from(data.len()).expect("short").to_le_bytes());
            }
        }
    }

    #[test]
    fn bombs_stop_at_the_limit() {
        let data = vec![0; 4 << 20];
        for format in FORMATS {
            let error = unpack(&compress(format, &data), 1 << 20).expect_err("too large");
            assert!(
                matches!(error, UnpackError::TooLarge { .. }),
                "{format}: {error}"
            );
        }
    }

    #[test]
    fn truncation_and_foreign_content_are_errors() {
        let data = sample(1 << 20);
        for format in FORMATS {
            let payload = compress(format, &data);
            let error = unpack(&payload[..payload.len() / 2], 1 << 24).expect_err("truncated");
            assert!(
                matches!(error, UnpackError::Damaged { .. }),
                "{format}: {error}"
            );
        }
        let lzo = unpack(b"\x89LZO\0\r\n\x1a\n", 1 << 20).expect_err("not supported");
        assert!(
            lzo.to_string().contains("[89, 4c, 5a, 4f, 00, 0d]"),
            "{lzo}"
        );
        assert!(matches!(unpack(b"", 1), Err(UnpackError::Unknown(_))));
    }

    #[test]
    fn absurd_dictionaries_are_refused() {
        let mut payload = compress(Compression::Lzma, b"small");
        payload[1..5].copy_from_slice(&u32::MAX.to_le_bytes());
        payload[1] = 0;
        payload[2] = 0;
        assert!(matches!(
            unpack(&payload, 1 << 20),
            Err(UnpackError::Damaged { .. })
        ));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn damaged_payloads_never_panic(
            format in 0..FORMATS.len(),
            damage in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..8),
            cut in any::<proptest::sample::Index>(),
        ) {
            let mut payload = compress(FORMATS[format], &sample(5000));
            for (index, value) in damage {
                let at = index.index(payload.len());
                payload[at] = value;
            }
            payload.truncate(cut.index(payload.len()) + 1);
            if let Ok((_, bytes)) = unpack(&payload, 10_000) {
                assert!(bytes.len() <= 10_000);
            }
        }
    }
}
