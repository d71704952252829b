//! Why a request to a store failed, and what would help.

use http::StatusCode;

use super::xml::Refusal;
use crate::outside;

/// Why a request failed. Every message names the bucket.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no connection.
    #[error(transparent)]
    Connect(#[from] outside::Error),
    /// The connection was lost, or the store does not speak HTTP.
    #[error("the exchange with {url} failed")]
    Http {
        /// The bucket.
        url: String,
        /// The cause.
        source: anyhow::Error,
    },
    /// The store took too long.
    #[error("{url} has not answered within {seconds} seconds")]
    Silent {
        /// The bucket.
        url: String,
        /// The limit.
        seconds: u64,
    },
    /// The store refused.
    #[error("{url} refuses: {}", said(*status, refusal))]
    Refused {
        /// The bucket.
        url: String,
        /// The status of HTTP.
        status: StatusCode,
        /// Its reason.
        refusal: Refusal,
    },
    /// The store sends the caller to another place, where it does not go.
    #[error("{url} redirects to another address, which is not followed: {}", said(*status, refusal))]
    Elsewhere {
        /// The bucket.
        url: String,
        /// The status of HTTP.
        status: StatusCode,
        /// Its reason.
        refusal: Refusal,
    },
    /// The answer is not one of S3.
    #[error("the answer of {url} cannot be used: {why}")]
    Answer {
        /// The bucket.
        url: String,
        /// Its fault.
        why: String,
    },
    /// The received bytes cannot be kept.
    #[error("cannot keep what {url} sends")]
    Keep {
        /// The bucket.
        url: String,
        /// The cause.
        source: std::io::Error,
    },
}

/// The words of a store, as the end of a sentence.
fn said(status: StatusCode, refusal: &Refusal) -> String {
    let Refusal { code, message, .. } = refusal;
    let words: Vec<_> = [code, message].into_iter().filter(|word| !word.is_empty()).collect();
    match words[..] {
        [] => status.to_string(),
        [code] => format!("{code} ({status})"),
        [code, message, ..] => format!("{code}: {message} ({status})"),
    }
}

impl Error {
    /// The remedy for a person; `None`: nothing but wait.
    #[must_use]
    pub fn help(&self) -> Option<String> {
        match self {
            Self::Connect(outside::Error::Handshake { .. }) => Some(
                "the certificate of the store must name its host and be of a public authority, or \
                 of one in `,ca=FILE` behind the target"
                    .to_owned(),
            ),
            Self::Connect(outside::Error::Proxy { .. } | outside::Error::Tunnel { .. }) => Some(
                "check the proxy of the cluster, and that it lets the nodes reach the store: \
                 `polisctl cluster configure --proxy` sets another, with `--no-proxy` for servers \
                 that are reached without it"
                    .to_owned(),
            ),
            Self::Connect(_) | Self::Silent { .. } | Self::Http { .. } => {
                Some("check that the store is up, and that the nodes may reach it".to_owned())
            }
            Self::Elsewhere { refusal, .. } => Some(region(refusal)),
            Self::Refused { status, refusal, .. } => refused(*status, refusal),
            Self::Answer { .. } => Some(
                "check that the endpoint is that of an S3-compatible store, and not of its \
                 console or of a proxy"
                    .to_owned(),
            ),
            Self::Keep { .. } => None,
        }
    }
}

fn refused(status: StatusCode, refusal: &Refusal) -> Option<String> {
    let help = match (&*refusal.code, status.as_u16()) {
        ("RequestTimeTooSkewed", _) => {
            "the clock of the sender and that of the store differ by more than 15 minutes: name \
             time servers for the cluster, and check the clock of the machine"
        }
        ("InvalidAccessKeyId" | "SignatureDoesNotMatch" | "ExpiredToken", _) => {
            "the store does not know this key: `polisctl cluster configure --snapshot-credentials \
             FILE` sets another"
        }
        (
            "AuthorizationHeaderMalformed"
            | "PermanentRedirect"
            | "IllegalLocationConstraintException",
            _,
        ) => {
            return Some(region(refusal));
        }
        ("NoSuchBucket", _) => "make the bucket, or name another one as the target",
        ("XAmzContentSHA256Mismatch", _) => {
            "the file changed while it was sent; the next attempt reads it again"
        }
        ("EntityTooLarge", _) => "the store takes no object of this size in one request",
        ("AccessDenied", _) | (_, 403) => {
            "the key needs the rights s3:ListBucket on the bucket and s3:PutObject below the \
             prefix, to fetch also s3:GetObject"
        }
        (_, 404) => "check the name of the bucket and the endpoint",
        (_, 429 | 500..) => return None,
        _ => "see the manual of the store for this code",
    };
    Some(help.to_owned())
}

fn region(refusal: &Refusal) -> String {
    match &*refusal.region {
        "" => "name the endpoint and the region of the bucket: `,region=REGION` behind the target"
            .to_owned(),
        region => format!(
            "the bucket is in the region {region}: name its endpoint there, and `,region={region}` \
             behind the target"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(status: u16, code: &str, region: &str) -> Error {
        Error::Refused {
            url: "s3+https://store:443/bucket".to_owned(),
            status: StatusCode::from_u16(status).unwrap(),
            refusal: Refusal {
                code: code.to_owned(),
                message: String::new(),
                region: region.to_owned(),
            },
        }
    }

    #[test]
    fn a_refusal_says_what_would_help() {
        for (error, said) in [
            (refusal(403, "RequestTimeTooSkewed", ""), "clock"),
            (refusal(403, "InvalidAccessKeyId", ""), "--snapshot-credentials"),
            (refusal(403, "AccessDenied", ""), "s3:PutObject"),
            (refusal(403, "", ""), "s3:PutObject"),
            (refusal(404, "NoSuchBucket", ""), "make the bucket"),
            (refusal(400, "AuthorizationHeaderMalformed", "eu-central-1"), ",region=eu-central-1"),
            (refusal(400, "AuthorizationHeaderMalformed", ""), ",region=REGION"),
            (refusal(400, "Odd", ""), "manual"),
        ] {
            let help = error.help().unwrap();
            assert!(help.contains(said), "{error}: {help}");
        }
        assert_eq!(refusal(503, "SlowDown", "").help(), None);
        let text = refusal(503, "SlowDown", "").to_string();
        assert_eq!(text, "s3+https://store:443/bucket refuses: SlowDown (503 Service Unavailable)");
    }
}
