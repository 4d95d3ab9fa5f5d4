//! The server from outside: requests in bytes, as a guest sends them.

mod requests;
mod server;
mod unpack;
mod view;
