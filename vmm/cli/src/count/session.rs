//! One run: a machine that is ready, a program in it, and what became of both.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use attribution::{Attribution, Collect, Counts, Objects, Start};
use count_init::{ENDING_LEN, Ending};
use emu::NotAnnounced;
use guest_files::{Errand as Service, Errno, FileServer, Given, MemoryTree, Out, Sink, Tree, View};
use guest_view::KernelView;
use serde::{Deserialize, Serialize};
use umpire_count::Inputs;
use umpire_count::inputs::printable;
use vmm::count::{
    BootError, End, Image, Key, Limits, Looks, Met, Patience, Plan, Progress, Signals,
};

use super::ended::{failed, with_advice};
use super::files;
use super::job::Errand;
use super::kernel::Choice;
use super::store::{Store, StoredMachine};
use crate::exit::{UserError, complain};

/// The sources that count, in few digits: what is counted otherwise is another engine.
const ENGINE: &str = env!("UMPIRE_ENGINE");
/// What programs find: `vmm`'s machine is of this processor, whatever the host's is.
const PROCESSOR: &str = "x86-64-v2, one, of Umpire's emulator";

const SIGNALS: Signals = Signals {
    tag: count_init::TAG,
    port: count_init::PORT,
    ready: count_init::READY,
    done: count_init::DONE,
};

/// Bytes of a program's file that are looked at for its symbols.
const LARGEST_OBJECT: usize = 512 << 20;

/// What is kept beside a booted machine.
#[derive(Debug, Serialize, Deserialize)]
struct Known {
    /// What the machine was made of: a file under another's name is none.
    parts: String,
    key: Key,
    kernel: attribution::Kernel,
}

/// A machine that is ready for a program.
#[derive(Debug)]
pub(super) struct ReadyMachine {
    image: Image,
    kernel: attribution::Kernel,
}

/// What the machine is made of.
#[derive(Debug)]
pub(super) struct Shape<'a> {
    pub(super) kernel: &'a Choice,
    pub(super) memory_mib: u64,
    /// Functions of the programs are counted.
    pub(super) functions: bool,
    /// Also by the calls that led to them.
    pub(super) contexts: bool,
    /// What they and regions have.
    pub(super) collect: Collect,
}

impl Shape<'_> {
    /// What of it a run depends on.
    fn inputs(&self, inputs: &mut Inputs) {
        inputs.add("engine", ENGINE);
        inputs.add("kernel", &self.kernel.digest);
        inputs.add("memory", format!("{} MiB", self.memory_mib));
        inputs.add("processor", PROCESSOR);
        // Regions and functions are of this; all else is as without.
        if let Some(text) = collected(&self.collect) {
            inputs.add("collected", text);
        }
    }
}

impl ReadyMachine {
    /// The machine of the store; one that is not there is booted first.
    pub(super) fn of(store: &Store, shape: &Shape<'_>, limits: &Limits) -> Result<Self, UserError> {
        let parts = format!("{} {}", shape.kernel.digest, shape.memory_mib);
        let place = store.place(ENGINE, &parts);
        if let Some(known) = place.known::<Known>()
            && known.parts == parts
            && let Ok(image) = Image::open(&place.image(), &known.key, SIGNALS)
        {
            place.used();
            let kernel = known.kernel;
            return Ok(ReadyMachine { image, kernel });
        }
        let ready = boot(store, &place, shape, parts, limits)?;
        // What is too much goes later, and takes room until then.
        if let Err(error) = store.tidy(ENGINE, &place) {
            complain(&format_args!(
                "old booted machines cannot be removed: {error}"
            ));
        }
        Ok(ready)
    }
}

fn boot(
    store: &Store,
    place: &StoredMachine,
    shape: &Shape<'_>,
    parts: String,
    limits: &Limits,
) -> Result<ReadyMachine, UserError> {
    let files = shape.kernel.load(store)?;
    let plan = Plan {
        kernel: &files.image,
        initramfs: &files.initramfs,
        memory_mib: shape.memory_mib,
        signals: SIGNALS,
        engine: ENGINE,
    };
    let mut nobody = FileServer::new(MemoryTree::default(), Nowhere, Service::default());
    let serve = move |request: &[u8], reply: &mut Vec<u8>| nobody.answer(request, reply);
    complain(&"booting the machine, once for each kernel and size of memory …");
    let began = Instant::now();
    let mut told = began;
    let progress = |progress| {
        if let Progress::Boots { instructions } = progress
            && told.elapsed() >= Duration::from_secs(2)
        {
            told = Instant::now();
            let millions = instructions / 1_000_000;
            complain(&format_args!(
                "still booting: {millions} million instructions"
            ));
        }
    };
    let image = Image::boot(&plan, &place.image(), serve, limits.clone(), progress);
    let image = image.map_err(|error| {
        let said = match &error {
            BootError::Ended { said, .. } => last_words(said),
            _ => String::new(),
        };
        let error = with_advice(&error);
        failed(format!("the machine did not boot: {error}{said}"))
    })?;
    let known = Known {
        parts,
        key: plan.key(),
        kernel: described(&image)?,
    };
    place
        .know(&known)
        .map_err(|error| failed(format!("{}: {error}", place.image().display())))?;
    let seconds = began.elapsed().as_secs_f64();
    complain(&format_args!("booted in {seconds:.1} s"));
    let kernel = known.kernel;
    Ok(ReadyMachine { image, kernel })
}

/// What the guest's first program said on the console, if it failed.
fn last_words(said: &str) -> String {
    let mut lines = said.lines().rev();
    let line = lines.find(|line| line.starts_with("count-init: "));
    line.map_or_else(String::new, |line| format!(" ({line})"))
}

/// Where the kernel does what programs are told apart by.
fn described(image: &Image) -> Result<attribution::Kernel, UserError> {
    attribution::Kernel::of(&view_of(image)?).map_err(failed)
}

fn view_of(image: &Image) -> Result<KernelView, UserError> {
    let memory = image.memory().map_err(failed)?;
    let cr3 = image.registers().map(|state| state.cr3);
    let cr3 = cr3.ok_or_else(|| failed("the machine has no processor"))?;
    attribution::find(&memory, cr3).map_err(failed)
}

/// The files of programs, for their symbols: those that the guest has.
#[derive(Debug)]
struct Symbols(View);

impl Objects for Symbols {
    fn read(&mut self, path: &str) -> Option<Vec<u8>> {
        let Symbols(view) = self;
        let file = view.open(path.as_bytes()).ok()?;
        let length = usize::try_from(view.stamp(&file).ok()?.size).ok()?;
        let mut bytes = Vec::new();
        let read = view.read(&file, 0, length.min(LARGEST_OBJECT), &mut bytes);
        read.is_ok().then_some(bytes)
    }
}

/// Where a guest without a program writes to.
#[derive(Debug)]
struct Nowhere;

impl Sink for Nowhere {
    fn take(&mut self, _: Out, _: &[u8]) -> Result<(), Errno> {
        Err(Errno::IO)
    }
}

/// What a program says: its output goes on at once, the rest is kept.
#[derive(Debug)]
struct Said {
    patience: Patience,
    ending: Vec<u8>,
    files: Option<tempfile::SpooledTempFile>,
    /// The host takes no more.
    lost: Option<io::Error>,
    /// The limit that was met while somebody was waited for who reads.
    met: Option<Met>,
    /// Bytes of standard output and standard error that were taken.
    taken: [u64; 2],
    /// Whose reader went away.
    unread: [bool; 2],
}

impl Said {
    fn new(patience: Patience) -> Self {
        Said {
            patience,
            ending: Vec::new(),
            files: None,
            lost: None,
            met: None,
            taken: [0; 2],
            unread: [false; 2],
        }
    }

    /// Hands bytes on, as long as there is patience with whoever reads them.
    fn put(&mut self, which: usize, out: impl AsFd, bytes: &[u8]) -> Result<(), Errno> {
        // In pieces, so that it is known how many were taken.
        for piece in bytes.chunks(4096) {
            match self.patience.write_all(&out, piece) {
                Ok(()) => self.taken[which] += piece.len() as u64,
                // The program gets what it would have got of that pipe.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {
                    self.unread[which] = true;
                    return Err(Errno::PIPE);
                }
                Err(error) => {
                    self.met = self.met.or(self.patience.is_over());
                    if self.met.is_some() {
                        return Err(Errno::IO);
                    }
                    let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                    self.lost.get_or_insert(error);
                    return Err(errno);
                }
            }
        }
        Ok(())
    }

    /// An input that no run before could know: when a reader went away, and the program was told.
    fn add_to(&self, inputs: &mut Inputs, notes: &mut Vec<String>) {
        for (which, name) in ["standard output", "standard error"]
            .into_iter()
            .enumerate()
        {
            if self.unread[which] {
                let taken = self.taken[which];
                let value = format!("a pipe whose reader went away after {taken} bytes");
                inputs.add(name, value);
                notes.push(format!(
                    "the reader of {name} went away, and when it does is chance: another run may \
                     count otherwise"
                ));
            }
        }
    }
}

impl Sink for Said {
    fn take(&mut self, out: Out, bytes: &[u8]) -> Result<(), Errno> {
        match out {
            Out::Stdout => self.put(0, io::stdout(), bytes),
            Out::Stderr => self.put(1, io::stderr(), bytes),
            Out::Status => {
                let room = ENDING_LEN.saturating_sub(self.ending.len());
                let some = bytes.get(..room.min(bytes.len())).unwrap_or_default();
                self.ending.extend_from_slice(some);
                Ok(())
            }
            Out::Files => {
                let files = self
                    .files
                    .get_or_insert_with(|| tempfile::SpooledTempFile::new(1 << 20));
                files.write_all(bytes).map_err(|error| {
                    let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                    self.lost.get_or_insert(error);
                    errno
                })
            }
        }
    }
}

/// What became of a run.
#[derive(Debug)]
pub(super) struct Ran {
    pub(super) end: End,
    /// How the program ended, if the guest said so.
    pub(super) ending: Option<Ending>,
    pub(super) counts: Counts,
    /// All that the run depends on.
    pub(super) inputs: Inputs,
    /// What is to be told of it, a line each.
    pub(super) notes: Vec<String>,
    /// What the program changed, a tar archive.
    pub(super) files: Option<tempfile::SpooledTempFile>,
    /// On the host.
    pub(super) elapsed: Duration,
}

impl ReadyMachine {
    /// Who looks on.
    fn looks(&self, shape: &Shape<'_>, given: &Given) -> Result<Looks, UserError> {
        let symbols = Box::new(Symbols(View::new(given).map_err(failed)?));
        let observer = Attribution::new(self.kernel, Start::First);
        let observer = observer.with_regions(shape.collect.clone());
        let observer = if shape.functions {
            let observer = observer.with_functions(view_of(&self.image)?, symbols);
            if shape.contexts {
                observer.with_contexts()
            } else {
                observer
            }
        } else {
            observer.with_files(symbols)
        };
        Ok(Looks {
            observer: Box::new(observer),
            places: self.kernel.places().to_vec(),
        })
    }

    /// Runs a program.
    pub(super) fn run(
        &self,
        errand: Errand,
        shape: &Shape<'_>,
        limits: &Limits,
    ) -> Result<Ran, UserError> {
        let began = Instant::now();
        let mut inputs = Inputs::default();
        errand.inputs(&mut inputs);
        shape.inputs(&mut inputs);
        let view = View::new(&errand.given).map_err(failed)?;
        let mut job = errand.job;
        job.tmp_is_given = view.tmp_is_given();
        let job = job.encode().map_err(|_| {
            failed("the program's arguments and environment have more than 8 MiB, or a 0 in them")
        })?;
        let stdin = errand.stdin;
        let patience = limits.patience();
        let said = Said::new(patience.clone());
        let server = FileServer::new(view, said, Service { job, stdin });
        let server = server.with_largest_archive(shape.memory_mib << 20);
        let server = Arc::new(Mutex::new(server));
        let serve = serve(server.clone());
        let looks = self.looks(shape, &errand.given)?;
        let ran = self
            .image
            .run(serve, limits.clone(), Some(looks))
            .map_err(failed)?;
        let elapsed = began.elapsed();
        let counts = ran.observer.and_then(Attribution::taken);
        let counts = counts.map(|one| one.counts()).unwrap_or_default();
        drop(ran.serve);
        let server = Arc::into_inner(server).ok_or_else(|| failed("files are still served"))?;
        let mut server = server.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut notes = Vec::new();
        let late = files::add_all(
            &mut server,
            &errand.given,
            &patience,
            &mut inputs,
            &mut notes,
        );
        notes.extend(missing(&server));
        notes.extend(ran.out_of_memory.map(|_| {
            "the guest had no memory left, and its kernel killed a process; --memory gives it more"
                .to_owned()
        }));
        let unknown = ran.unannounced.iter();
        notes.extend(unknown.map(|one| not_announced(one, &counts)));
        let said = server.into_sink();
        said.add_to(&mut inputs, &mut notes);
        if let Some(error) = said.lost {
            return Err(failed(format!(
                "the program's output cannot be written: {}",
                with_advice(&error)
            )));
        }
        Ok(Ran {
            // The program was told of an error, and may have ended by that.
            end: said.met.or(late).map_or(ran.end, End::from),
            ending: Ending::decode(&said.ending),
            counts,
            inputs,
            notes,
            files: said.files,
            elapsed,
        })
    }
}

/// What regions and functions have, where that is not all of the program.
fn collected(collect: &Collect) -> Option<String> {
    let Collect {
        instrumented,
        collected,
        toggles,
    } = collect;
    let on = |on: &bool| if *on { "yes" } else { "no" };
    (*collect != Collect::default()).then(|| {
        let (instrumented, collected) = (on(instrumented), on(collected));
        let functions = toggles.join(", ");
        format!("--instr-atstart {instrumented}, --collect-atstart {collected}, in {functions:?}")
    })
}

/// Answers the guest's requests for files.
fn serve(
    server: Arc<Mutex<FileServer<View, Said>>>,
) -> impl FnMut(&[u8], &mut Vec<u8>) + Send + 'static {
    move |request, reply| {
        let server = server.lock();
        server
            .unwrap_or_else(PoisonError::into_inner)
            .answer(request, reply);
    }
}

/// An instruction that the processor does not have: where it is, and what to build for.
fn not_announced(one: &NotAnnounced, counts: &Counts) -> String {
    let (code, rip) = (one.code, one.rip);
    let needs = code.cpuid_features();
    let place = counts.undefined.iter().find(|it| it.address == rip);
    let place = place.map_or_else(String::new, |it| {
        let place = format!(" in {} of {}", it.function, it.object);
        printable(place.as_bytes())
    });
    format!(
        "a program executed {code:?} at {rip:#x}{place}, which needs {needs:?}, and the processor is \
         an x86-64-v2: if it ended by that, build it for x86-64-v2"
    )
}

/// What the program did not find.
fn missing<S: Sink>(server: &FileServer<View, S>) -> Vec<String> {
    let mut notes = Vec::new();
    let libraries = server.missing_libraries();
    if !libraries.is_empty() {
        notes.push(format!(
            "libraries that were not found: {}",
            listed(&libraries)
        ));
    }
    if !server.outside().is_empty() {
        notes.push(format!(
            "the program looked for what it was not given: {}; --with gives it",
            listed(server.outside())
        ));
    }
    notes
}

/// The first ten: programs may look for any number.
fn listed(names: &[Vec<u8>]) -> String {
    const MOST: usize = 10;
    let some: Vec<_> = names
        .iter()
        .take(MOST)
        .map(|name| printable(name))
        .collect();
    let more = match names.len().saturating_sub(MOST) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    some.join(", ") + &more
}
