//! The server layer on loopback, with real certificates.
