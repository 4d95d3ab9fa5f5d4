//! What exactly was wrong, where the error number stands for several things.

macro_rules! subcodes {
    ($($text:literal $name:ident = $number:literal;)*) => {
        /// Says more than an error number. The kinds are those of `libcpc`.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Subcode {
            /// Nothing more is known.
            #[default]
            None = 0,
            $(#[doc = $text] $name = $number,)*
        }

        impl Subcode {
            /// Every one that says something.
            pub const ALL: &[Subcode] = &[$(Subcode::$name),*];

            /// Its number.
            #[must_use]
            pub fn number(self) -> u16 {
                self as u16
            }

            /// The one of this number; [`Subcode::None`] for one that this version lacks.
            #[must_use]
            pub fn from_number(number: u16) -> Self {
                match number { $($number => Subcode::$name,)* _ => Subcode::None }
            }
        }
    };
}

subcodes! {
    "The processor does not have the event." InvalidEvent = 1;
    "There is no such counter or register." InvalidPicNumber = 2;
    "There is no such attribute, or not for this event." InvalidAttribute = 3;
    "The value of an attribute is not possible." AttributeOutOfRange = 4;
    "No counter is left, or somebody has taken it." ResourceUnavailable = 5;
    "Nobody here counts the event." PicNotCapable = 6;
    "Flags that there are not." InvalidFlags = 7;
    "What was asked for does not go together." ConflictingRequests = 8;
    "The user may not." RequiresPrivilege = 9;
    "There is nothing to attach to, or it cannot be reached." BindFailed = 10;
    "The VM's event filter denies the event." NoHypervisorAccess = 11;
}
