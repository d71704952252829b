//! The errors of calls to etcd.

use super::CALL_MAX;

/// The reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The server is down, the connection broke, or there is no leader.
    #[error("cannot {what}: etcd does not answer")]
    Unreachable {
        /// The call.
        what: &'static str,
        /// The text of the transport or of etcd.
        source: etcd_client::Error,
    },
    /// The answer did not come in time.
    #[error("cannot {what}: no answer from etcd within {CALL_MAX:?}")]
    Timeout {
        /// The call.
        what: &'static str,
    },
    /// Another leader was elected before the answer came: the write was lost, or it happened
    /// and the answer was lost.
    #[error("cannot {what}: the leader of etcd changed before it answered")]
    LeaderChanged {
        /// The call.
        what: &'static str,
    },
    /// The database has reached its quota; only reads and deletions still work.
    #[error("cannot {what}: the database of etcd is full")]
    Full {
        /// The call.
        what: &'static str,
    },
    /// The data of members differs; only reads still work.
    #[error("cannot {what}: the members of etcd have different data (`polisctl cluster status`)")]
    Corrupt {
        /// The call.
        what: &'static str,
    },
    /// etcd understood the call and rejected it.
    #[error("cannot {what}: etcd refuses")]
    Refused {
        /// The call.
        what: &'static str,
        /// The text of etcd.
        source: etcd_client::Error,
    },
    /// A stream ended that should not.
    #[error("{what} ended")]
    Ended {
        /// The stream.
        what: &'static str,
    },
}

impl Error {
    pub(in crate::consensus) fn new(what: &'static str, source: etcd_client::Error) -> Self {
        let etcd_client::Error::GRpcStatus(status) = &source else {
            return match source {
                etcd_client::Error::TransportError(_)
                | etcd_client::Error::IoError(_)
                | etcd_client::Error::WatchError(_)
                | etcd_client::Error::LeaseKeepAliveError(_) => Self::Unreachable { what, source },
                _ => Self::Refused { what, source },
            };
        };
        match status.code() {
            tonic::Code::Unavailable
            | tonic::Code::DeadlineExceeded
            | tonic::Code::Cancelled
            | tonic::Code::Aborted
            // A connection that breaks in the middle of an answer.
            | tonic::Code::Unknown
            | tonic::Code::Internal => Self::Unreachable { what, source },
            tonic::Code::ResourceExhausted if status.message().contains("space exceeded") => {
                Self::Full { what }
            }
            tonic::Code::DataLoss if status.message().contains("corrupt cluster") => {
                Self::Corrupt { what }
            }
            _ => Self::Refused { what, source },
        }
    }

    /// Whether the same call may succeed a little later.
    #[must_use]
    pub fn retriable(&self) -> bool {
        match self {
            Self::Unreachable { .. }
            | Self::Timeout { .. }
            | Self::LeaderChanged { .. }
            | Self::Ended { .. } => true,
            Self::Full { .. } | Self::Corrupt { .. } | Self::Refused { .. } => false,
        }
    }

    /// Whether the answer is larger than a message may be. The library that decodes messages
    /// says so with a code that etcd gives to other refusals, too.
    pub(super) fn too_large(&self) -> bool {
        self.says("message length too large")
    }

    /// Whether etcd's text contains this, for answers without a code of their own.
    pub(in crate::consensus) fn says(&self, text: &str) -> bool {
        match self {
            Self::Unreachable { source, .. } | Self::Refused { source, .. } => {
                matches!(source, etcd_client::Error::GRpcStatus(status) if status.message().contains(text))
            }
            Self::Timeout { .. }
            | Self::LeaderChanged { .. }
            | Self::Full { .. }
            | Self::Corrupt { .. }
            | Self::Ended { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_that_etcd_refuses_for_its_alarms_names_the_alarm() {
        let error = |code, text: &str| {
            let status = tonic::Status::new(code, text);
            Error::new("write", etcd_client::Error::GRpcStatus(status))
        };
        let corrupt = error(tonic::Code::DataLoss, "etcdserver: corrupt cluster");
        assert!(matches!(corrupt, Error::Corrupt { .. }), "{corrupt}");
        assert!(!corrupt.retriable());
        let full = "etcdserver: mvcc: database space exceeded";
        let full = error(tonic::Code::ResourceExhausted, full);
        assert!(matches!(full, Error::Full { .. }), "{full}");
        let other = error(tonic::Code::DataLoss, "another loss");
        assert!(matches!(other, Error::Refused { .. }), "{other}");
    }
}
