//! What `umpire stat` prints.
