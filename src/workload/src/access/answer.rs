//! The errors of the proxy, as `Status` objects of Kubernetes: clients print their message.
//! Pure.

use http::header::CONTENT_TYPE;
use http::{HeaderValue, Response, StatusCode};
use serde_json::json;
use tonic::body::Body;
use tonic::{Code, Status};

/// The remedy of a caller that is not let in.
const KUBECONFIG: &str = "`polisctl kubernetes kubeconfig` writes the access of a user";

/// A `Status` object that reports a failure.
pub(super) fn failure(code: StatusCode, reason: &str, message: &str) -> Response<Body> {
    let status = json!({
        "apiVersion": "v1",
        "kind": "Status",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code.as_u16(),
    });
    let mut response = Response::new(Body::new(status.to_string()));
    *response.status_mut() = code;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// The answer to a request that the server layer rejects.
pub(super) fn refusal(status: &Status) -> Response<Body> {
    let said = status.message();
    let (code, reason) = match status.code() {
        Code::Unauthenticated => (StatusCode::UNAUTHORIZED, "Unauthorized"),
        Code::PermissionDenied => (StatusCode::FORBIDDEN, "Forbidden"),
        Code::ResourceExhausted => (StatusCode::TOO_MANY_REQUESTS, "TooManyRequests"),
        Code::DeadlineExceeded => (StatusCode::GATEWAY_TIMEOUT, "Timeout"),
        _ => (StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable"),
    };
    let message = match status.code() {
        Code::Unauthenticated | Code::PermissionDenied => format!("{said}; {KUBECONFIG}"),
        _ => said.to_owned(),
    };
    failure(code, reason, &message)
}
