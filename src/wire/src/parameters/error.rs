//! The errors of node parameters, with the next step for the operator.

use std::fmt;
use std::io;

use polis_base::trapdoor::{Code, Report, code};

use super::Loaded;
use super::source::{BYTES_MAX, Source};

/// Why node parameters that are there cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The bytes cannot be read.
    #[error("cannot read the node parameters")]
    Unreadable(#[source] io::Error),
    /// More bytes than any sensible parameters have.
    #[error("the node parameters are too large; allowed are {BYTES_MAX} bytes")]
    TooLarge,
    /// Not a protocol buffers message, or cut short.
    #[error(
        "the node parameters are damaged or cut short; allowed is a whole message NodeParameters"
    )]
    Malformed(#[source] prost::DecodeError),
    /// Text whose first word announces parameters, and that does not decode.
    #[error(
        "the node parameters are not base64 behind `polis-parameters-v1:`; allowed is the base64 (RFC 4648, \
             with padding) of the file that polisctl writes"
    )]
    NotBase64,
    /// A message inside ends before it is complete.
    #[error(
        "the node parameters are cut short: field {field} says {missing} bytes, fewer follow; \
         allowed is a whole message NodeParameters"
    )]
    Truncated {
        /// The field whose message is incomplete.
        field: &'static str,
        /// Its length as written.
        missing: u64,
    },
    /// A field that this version does not know.
    #[error("the node parameters have an unknown field number {number} in {}; allowed are {allowed}",
        if message.is_empty() { "NodeParameters" } else { message })]
    UnknownField {
        /// The path of the message that has it, empty at the top.
        message: String,
        /// Its number.
        number: u32,
        /// The numbers of the known fields of that message.
        allowed: String,
    },
    /// Neither member of the `oneof` is set.
    #[error(
        "the node parameters set neither cluster_bootstrap nor cluster_register; allowed is one \
         of them"
    )]
    NothingChosen,
    /// Both members of the `oneof` are set.
    #[error(
        "the node parameters set both cluster_bootstrap and cluster_register; allowed is one of \
         them"
    )]
    BothChosen,
    /// The owner's public key.
    #[error(transparent)]
    OwnerKey(FieldError),
    /// The register ticket.
    #[error(transparent)]
    Ticket(FieldError),
    /// The authority of the cluster to register with.
    #[error(transparent)]
    CaCertificate(FieldError),
    /// Any other field.
    #[error(transparent)]
    Field(FieldError),
}

/// A field whose value is not allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// Where it is, for example `network.interfaces[0].mtu`.
    pub path: String,
    /// Its number in its message.
    pub number: u16,
    /// Its value, printable and shortened.
    pub value: String,
    /// The allowed values.
    pub allowed: String,
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, value, allowed, .. } = self;
        write!(f, "{path} is {value}; allowed is {allowed}")
    }
}

impl std::error::Error for FieldError {}

impl Error {
    /// The code of this cause, with the number of the field as its detail.
    #[must_use]
    pub fn code(&self) -> Code {
        let field = |code: Code, error: &FieldError| code.with_detail(error.number);
        match self {
            Self::Unreadable(error) => code::PARAMETERS_UNREADABLE.with_error(error),
            Self::TooLarge => code::PARAMETERS_TOO_LARGE,
            Self::Malformed(_) | Self::NotBase64 | Self::Truncated { .. } => {
                code::PARAMETERS_MALFORMED
            }
            Self::UnknownField { number, .. } => code::PARAMETERS_UNKNOWN_FIELD
                .with_detail(u16::try_from(*number).unwrap_or(u16::MAX)),
            Self::NothingChosen => code::PARAMETERS_NOTHING_CHOSEN,
            Self::BothChosen => code::PARAMETERS_BOTH_CHOSEN,
            Self::OwnerKey(error) => field(code::PARAMETERS_OWNER_KEY, error),
            Self::Ticket(error) => field(code::PARAMETERS_TICKET, error),
            Self::CaCertificate(error) => field(code::PARAMETERS_CA_CERTIFICATE, error),
            Self::Field(error) => field(code::PARAMETERS_FIELD, error),
        }
    }

    /// The next step for the operator.
    fn next(&self, from: Source) -> String {
        let next = self.code().help().replace("{place}", &from.place());
        match self {
            Self::Field(error) => next.replace("{field}", &error.path),
            _ => next,
        }
    }

    /// The report of the trapdoor.
    #[must_use]
    pub fn report(&self, from: Source, tried: Vec<String>) -> Report {
        Report { tried, next: self.next(from), ..Report::from_error(self.code(), self) }
    }
}

/// The report of the trapdoor when a machine that needs parameters has not found any; the
/// cluster manager calls it, because it decides whether they are needed.
#[must_use]
pub fn absent(loaded: &Loaded) -> Report {
    let cause = "this machine has no node parameters".to_owned();
    Report {
        tried: loaded.tried.clone(),
        // The places come first: the serial line has room for the beginning alone.
        next: format!(
            "Put node parameters at {}, in fw_cfg, in an SMBIOS OEM string, on a disk labelled \
             cidata or config-2, or in the user data of a cloud, then reboot. `polisctl parameters \
             bootstrap` (a new cluster) and `polisctl parameters register` (one that runs) write \
             them.",
            Source::Esp.place(),
        ),
        ..Report::new(code::PARAMETERS_ABSENT, vec![cause])
    }
}
