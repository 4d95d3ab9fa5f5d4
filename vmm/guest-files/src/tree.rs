//! A tree of files, as the server asks for them: by absolute paths of the guest, whose names are
//! neither empty nor `.` nor `..`. Nobody below follows a symbolic link; the guest does that.

use rustix::io::Errno;

/// Where files come from.
pub trait Tree {
    /// A file that is open for reading.
    type File;

    /// What there is at `path`.
    ///
    /// # Errors
    /// Why there is nothing.
    fn stat(&mut self, path: &[u8]) -> Result<Attributes, Refusal>;

    /// What is in the folder at `path`, in the order of the names' bytes.
    ///
    /// # Errors
    /// Why there is no such list.
    fn list(&mut self, path: &[u8]) -> Result<Vec<Listed>, Refusal>;

    /// Where the symbolic link at `path` leads.
    ///
    /// # Errors
    /// Why it does not.
    fn link(&mut self, path: &[u8]) -> Result<Vec<u8>, Refusal>;

    /// Opens the regular file at `path`.
    ///
    /// # Errors
    /// Why it cannot be opened.
    fn open(&mut self, path: &[u8]) -> Result<Self::File, Refusal>;

    /// Appends at most `len` bytes from `at` on to `into`: fewer only at the end of the file.
    ///
    /// # Errors
    /// Why it cannot be read.
    fn read(
        &mut self,
        file: &Self::File,
        at: u64,
        len: usize,
        into: &mut Vec<u8>,
    ) -> Result<(), Refusal>;

    /// Which file it is, and in which state.
    ///
    /// # Errors
    /// Why that cannot be found out.
    fn stamp(&mut self, file: &Self::File) -> Result<Stamp, Refusal>;
}

/// What a name stands for. Nothing else is given to guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A regular file.
    File,
    /// A directory.
    Folder,
    /// A symbolic link.
    Link,
}

/// Whose a file is in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Root.
    System,
    /// The user that the program runs as.
    User,
}

/// What the guest is told of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    /// What it is.
    pub kind: Kind,
    /// Bytes: of a link, of its text; of a folder, no matter.
    pub size: u64,
    /// Permission bits, as in `chmod`.
    pub mode: u16,
    /// Whose it is.
    pub owner: Owner,
    /// When its content changed last, in seconds of Unix, where that says something about the
    /// content; else the guest is told the time that all files have.
    pub modified: Option<u64>,
}

/// A name in a folder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Listed {
    /// The name.
    pub name: Vec<u8>,
    /// What it stands for.
    pub kind: Kind,
}

/// A state of a file on the host: another one when the content is another one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// Device and number.
    pub identity: [u64; 2],
    /// Bytes.
    pub size: u64,
    /// When content and attributes changed last, in ns.
    pub changed: [i128; 2],
}

/// Why something is not to be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such file.
    Missing,
    /// The host has it, but it was not given to the guest.
    Outside,
    /// It is of another kind.
    Kind,
    /// The host's kernel refuses.
    Host(Errno),
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        match errno {
            Errno::NOENT | Errno::NOTDIR | Errno::LOOP => Self::Missing,
            errno => Self::Host(errno),
        }
    }
}

impl Refusal {
    /// What the guest's kernel is told.
    #[must_use]
    pub fn errno(self) -> Errno {
        match self {
            Self::Missing | Self::Outside => Errno::NOENT,
            Self::Kind => Errno::INVAL,
            Self::Host(errno) => errno,
        }
    }
}
