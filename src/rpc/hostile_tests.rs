//! Callers that mean harm, each beside one that does not.
