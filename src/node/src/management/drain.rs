//! The call `Drain`: holds a drain of this node for as long as the caller reads its
//! progress.

use std::time::Duration;

use futures::Stream;
use polis_proto::v1;
use polis_proto::v1::drain_progress::State as Reported;
use tonic::{Code, Status};

use polis_wire::rpc::REASON;
use polis_workload::drain::{Failure, Held, Progress, State, TIMEOUT_MAX};

/// The wish of a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) timeout: Duration,
    pub(super) force: bool,
}

/// Reads a request.
///
/// # Errors
///
/// INVALID_ARGUMENT for a deadline that is not allowed.
pub(super) fn asked(request: v1::DrainRequest) -> Result<Asked, Status> {
    let v1::DrainRequest { timeout_seconds, force } = request;
    let timeout = Duration::from_secs(timeout_seconds.into());
    if timeout.is_zero() || timeout > TIMEOUT_MAX {
        let text = format!(
            "timeout_seconds is {timeout_seconds}; allowed are 1 to {}",
            TIMEOUT_MAX.as_secs()
        );
        return Err(Status::invalid_argument(text));
    }
    Ok(Asked { timeout, force })
}

/// The answer of a node that has no pods.
pub(super) fn no_worker() -> impl Stream<Item = Result<v1::DrainProgress, Status>> + Send {
    let reported = v1::DrainProgress { state: Reported::NoWorker.into(), ..Default::default() };
    // The caller ends the stream, as that of a worker.
    futures::StreamExt::chain(futures::stream::iter([Ok(reported)]), futures::stream::pending())
}

/// Every change of the progress. The end of the stream ends the drain.
pub(super) fn progress(held: Held) -> impl Stream<Item = Result<v1::DrainProgress, Status>> + Send {
    futures::stream::unfold(Some((held, None)), |holds| async move {
        let (held, seen): (Held, Option<Progress>) = holds?;
        let next = match held.next(seen.as_ref()).await {
            Ok(next) => next,
            Err(taken) => {
                return Some((Err(failed(Code::Aborted, &taken.to_string(), "drain-taken")), None));
            }
        };
        match reported(&next, held.elapsed()) {
            Ok(reported) => Some((Ok(reported), Some((held, Some(next))))),
            Err(status) => Some((Err(status), None)),
        }
    })
}

fn reported(progress: &Progress, elapsed: Duration) -> Result<v1::DrainProgress, Status> {
    let Progress { state, pods, cause, .. } = progress;
    let state = match state {
        State::None | State::Draining => Reported::Draining,
        State::Drained => Reported::Drained,
        State::GivenUp => Reported::GivenUp,
        State::Failed(Failure::Unmanaged) => {
            return Err(failed(Code::FailedPrecondition, cause, "unmanaged-pods"));
        }
        State::Failed(Failure::Late) => {
            let text = format!(
                "{pods} pods are left after {} s; the node waits for {cause}",
                elapsed.as_secs()
            );
            return Err(failed(Code::DeadlineExceeded, &text, "drain"));
        }
    };
    Ok(v1::DrainProgress {
        state: state.into(),
        pods: u32::try_from(*pods).unwrap_or(u32::MAX),
        cause: cause.clone(),
        elapsed_seconds: elapsed.as_secs_f64(),
    })
}

fn failed(code: Code, text: &str, reason: &'static str) -> Status {
    let mut status = Status::new(code, text);
    status.metadata_mut().insert(REASON, tonic::metadata::MetadataValue::from_static(reason));
    status
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_a_second_to_a_day() {
        let seconds = |timeout_seconds| asked(v1::DrainRequest { timeout_seconds, force: false });
        assert_eq!(seconds(1).unwrap().timeout, Duration::from_secs(1));
        assert_eq!(seconds(86_400).unwrap().timeout, TIMEOUT_MAX);
        for wrong in [0, 86_401, u32::MAX] {
            let status = seconds(wrong).unwrap_err();
            assert_eq!(status.code(), Code::InvalidArgument);
            assert!(status.message().ends_with("allowed are 1 to 86400"), "{status}");
        }
    }

    #[test]
    fn a_drain_that_failed_is_an_error_with_a_word() {
        let failure = |failure| {
            let mut progress = Progress::default();
            progress.state = State::Failed(failure);
            progress.pods = 2;
            progress.cause = "shop/web: the budget web".to_owned();
            let status = reported(&progress, Duration::from_secs(9)).unwrap_err();
            let word = status.metadata().get(REASON).unwrap().to_str().unwrap().to_owned();
            (status.code(), word, status.message().to_owned())
        };
        let (code, word, _text) = failure(Failure::Unmanaged);
        assert_eq!((code, word.as_str()), (Code::FailedPrecondition, "unmanaged-pods"));
        let (code, word, text) = failure(Failure::Late);
        assert_eq!((code, word.as_str()), (Code::DeadlineExceeded, "drain"));
        assert_eq!(text, "2 pods are left after 9 s; the node waits for shop/web: the budget web");
    }
}
