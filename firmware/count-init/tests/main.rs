//! Jobs and endings come out as they went in, and any bytes are read or refused.

use count_init::{End, Ending, Field, Job, NotRun, Step, fields};
use proptest::collection::vec;
use proptest::prelude::{Strategy, any, prop, prop_assert, prop_assert_eq, proptest};

fn text() -> impl Strategy<Value = Vec<u8>> {
    vec(1..=255u8, 0..40)
}

fn job() -> impl Strategy<Value = Job> {
    let texts = || vec(text(), 0..5);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (texts(), texts(), texts(), text(), flags).prop_map(
        |(programs, arguments, environment, folder, flags)| Job {
            programs,
            arguments,
            environment,
            folder,
            terminal: flags.0,
            bring_back: flags.1,
            tmp_is_given: flags.2,
        },
    )
}

fn read(bytes: &[u8]) -> Job {
    let mut job = Job::default();
    for field in fields(bytes).expect("a job") {
        match field.expect("a field") {
            Field::Program(text) => job.programs.push(text.to_bytes().to_vec()),
            Field::Argument(text) => job.arguments.push(text.to_bytes().to_vec()),
            Field::Variable(text) => job.environment.push(text.to_bytes().to_vec()),
            Field::Folder(text) => job.folder = text.to_bytes().to_vec(),
            Field::Terminal => job.terminal = true,
            Field::BringBack => job.bring_back = true,
            Field::TmpIsGiven => job.tmp_is_given = true,
        }
    }
    job
}

proptest! {
    #[test]
    fn a_job_is_read_as_it_was_written(job in job()) {
        prop_assert_eq!(read(&job.encode().expect("no text has a 0")), job);
    }

    #[test]
    fn a_job_that_is_cut_short_is_no_other_job(job in job(), cut in any::<prop::sample::Index>()) {
        let bytes = job.encode().expect("no text has a 0");
        let cut = cut.index(bytes.len());
        if let Ok(fields) = fields(&bytes[..cut]) {
            let read: Vec<_> = fields.collect();
            let whole = read.iter().all(Result::is_ok);
            prop_assert!(!whole || read.len() < self::fields(&bytes).expect("a job").count());
        }
    }

    #[test]
    fn any_bytes_are_a_job_or_not(bytes in vec(any::<u8>(), 0..200)) {
        let whole = [b"umpjob1\n".to_vec(), bytes].concat();
        let read = fields(&whole).expect("it begins as one").count();
        prop_assert!(read <= whole.len());
    }

    #[test]
    fn any_bytes_are_an_ending_or_not(mut bytes in vec(any::<u8>(), 16), tag in 0..6u8) {
        bytes[..4].copy_from_slice(b"end1");
        bytes[4] = tag;
        bytes[6..8].fill(0);
        if let Some(ending) = Ending::decode(&bytes) {
            prop_assert_eq!(&ending.encode()[..], &bytes[..]);
        }
    }
}

#[test]
fn an_ending_comes_out_as_it_went_in() {
    let (errno, why, step) = (8, NotRun::NoInterpreterLine, Step::Terminal);
    for end in [
        End::Exited(0),
        End::Exited(255),
        End::Signalled(9),
        End::NotRun { why, errno },
        End::Failed { step, errno },
    ] {
        let ending = Ending {
            end,
            killed_for_memory: 3,
        };
        assert_eq!(Ending::decode(&ending.encode()), Some(ending));
    }
    assert_eq!(Ending::decode(b"end1"), None);
}

#[test]
fn a_text_with_a_0_is_refused() {
    let arguments = vec![b"a\0b".to_vec()];
    let job = Job {
        arguments,
        ..Job::default()
    };
    assert!(job.encode().is_err());
}
