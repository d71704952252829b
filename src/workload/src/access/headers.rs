//! The headers of forwarded requests: removes those that the caller must not set, and adds the
//! identity of the caller. Pure.
//!
//! Invariants:
//! - A header of the caller that authenticates a user is never forwarded, in any spelling.
//! - No user has the name of a component to which a binding gives rights.
//! - The HTTP library alone frames a body, so both ends agree on its length.

use std::net::IpAddr;

use http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_LENGTH, EXPECT, FORWARDED, HOST, SEC_WEBSOCKET_PROTOCOL, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri};
use polis_wire::rpc::{Caller, Peer, Role};

use crate::credentials::KUBELET_CLIENT;

/// The name of the caller.
const USER: HeaderName = HeaderName::from_static("x-remote-user");
/// The group of its role.
const GROUP: HeaderName = HeaderName::from_static("x-remote-group");
/// Every header by which a proxy names a user begins so.
const REMOTE: &str = "x-remote-";
/// Every header by which a user acts as another one begins so.
const IMPERSONATE: &str = "impersonate-";
/// The address of the caller, which the API server puts into its audit log.
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const FORWARDED_BY_OTHERS: [&str; 2] = ["x-forwarded-", "x-real-ip"];
/// A token in the place of a protocol of a WebSocket.
const TOKEN_PROTOCOL: &str = "base64url.bearer.authorization.k8s.io.";

/// The headers that concern one connection, besides those that `Connection` names.
const HOP_BY_HOP: [HeaderName; 5] = [CONNECTION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE];
const HOP_BY_HOP_OLD: [&str; 2] = ["keep-alive", "proxy-"];

/// The identity of the caller, as the API server receives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Who {
    user: HeaderValue,
    group: HeaderValue,
    address: HeaderValue,
}

impl Who {
    /// Whether the user is an owner of the cluster.
    pub(super) fn is_owner(&self) -> bool {
        self.group == group(Role::Owner)
    }

    /// A user of the cluster; `None` for another caller, and for a user with the name of a
    /// component, who would have the rights of that.
    pub(super) fn of(caller: &Caller) -> Option<Self> {
        let Peer::User { name, role } = &caller.peer else { return None };
        let user = format!("polis:{name}");
        if user == KUBELET_CLIENT {
            return None;
        }
        Some(Self {
            user: HeaderValue::from_str(&user).ok()?,
            group: HeaderValue::from_static(group(*role)),
            address: address(caller.address.ip())?,
        })
    }
}

fn address(address: IpAddr) -> Option<HeaderValue> {
    HeaderValue::from_str(&address.to_string()).ok()
}

/// The group of a role in Kubernetes.
pub(super) fn group(role: Role) -> &'static str {
    match role {
        Role::Owner => "polis:owners",
        Role::Operator => "polis:operators",
        Role::Viewer => "polis:viewers",
    }
}

/// Whether a request or an answer asks for another protocol on its connection.
pub(super) fn upgrades(headers: &HeaderMap) -> bool {
    headers.contains_key(UPGRADE) && tokens(headers).any(|token| token == "upgrade")
}

/// The names in `Connection`, in lower case.
fn tokens(headers: &HeaderMap) -> impl Iterator<Item = String> {
    headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|token| token.trim().to_ascii_lowercase())
}

/// The path of a request at the API server; `None` where it has none, such as `CONNECT`.
pub(super) fn path(method: &Method, uri: &Uri) -> Option<Uri> {
    if *method == Method::CONNECT {
        return None;
    }
    let path = uri.path_and_query().filter(|path| path.as_str().starts_with('/'))?;
    Some(Uri::from(path.clone()))
}

/// Whether a request is for the log of a container from now on: its answer may begin at any time.
pub(super) fn follows_a_log(path: &Uri) -> bool {
    let parts: Vec<_> = path.path().trim_start_matches('/').split('/').collect();
    let is_log = matches!(parts[..], ["api", "v1", "namespaces", _, "pods", _, "log"]);
    // As the API server reads a switch.
    let follows = |pair: &str| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        name == "follow" && value != "0" && !value.eq_ignore_ascii_case("false")
    };
    is_log && path.query().unwrap_or_default().split('&').any(follows)
}

/// Whether a request is to be made as another user.
pub(super) fn impersonates(headers: &HeaderMap) -> bool {
    headers.keys().any(|name| name.as_str().replace('_', "-").starts_with(IMPERSONATE))
}

/// The headers of a request as `who`, to the server `host`.
pub(super) fn request(from: &HeaderMap, who: &Who, host: &HeaderValue) -> HeaderMap {
    let upgrade = upgrades(from).then(|| from.get(UPGRADE).cloned()).flatten();
    let named: Vec<_> = tokens(from).collect();
    let mut headers = HeaderMap::with_capacity(from.len() + 4);
    for (name, value) in from {
        if is_for_one_hop(name, &named) || is_for_us(name) {
            continue;
        }
        if *name == SEC_WEBSOCKET_PROTOCOL {
            headers.extend(without_token(value).map(|value| (name.clone(), value)));
            continue;
        }
        headers.append(name.clone(), value.clone());
    }
    headers.insert(HOST, host.clone());
    headers.insert(USER, who.user.clone());
    headers.insert(GROUP, who.group.clone());
    headers.insert(FORWARDED_FOR, who.address.clone());
    let_upgrade(&mut headers, upgrade);
    headers
}

/// The headers of an answer.
pub(super) fn response(status: StatusCode, from: &HeaderMap) -> HeaderMap {
    let switches = status == StatusCode::SWITCHING_PROTOCOLS;
    let upgrade = from.get(UPGRADE).filter(|_| switches).cloned();
    let named: Vec<_> = tokens(from).collect();
    let kept = from.iter().filter(|(name, _)| !is_for_one_hop(name, &named));
    let mut headers: HeaderMap = kept.map(|(name, value)| (name.clone(), value.clone())).collect();
    let_upgrade(&mut headers, upgrade);
    headers
}

fn let_upgrade(headers: &mut HeaderMap, protocol: Option<HeaderValue>) {
    if let Some(protocol) = protocol {
        headers.insert(CONNECTION, HeaderValue::from_static("Upgrade"));
        headers.insert(UPGRADE, protocol);
    }
}

fn is_for_one_hop(name: &HeaderName, named: &[String]) -> bool {
    HOP_BY_HOP.contains(name)
        || HOP_BY_HOP_OLD.iter().any(|start| name.as_str().starts_with(start))
        || named.iter().any(|named| named == name.as_str())
}

/// Whether only this proxy may set a header of a request.
fn is_for_us(name: &HeaderName) -> bool {
    // Some servers turn underscores into dashes.
    let plain = name.as_str().replace('_', "-");
    *name == AUTHORIZATION
        || *name == HOST
        || *name == CONTENT_LENGTH
        // The server layer has answered it already.
        || *name == EXPECT
        || *name == FORWARDED
        || plain.starts_with(REMOTE)
        || FORWARDED_BY_OTHERS.iter().any(|start| plain.starts_with(start))
}

/// The protocols of a WebSocket without tokens; `None` if nothing is left.
fn without_token(value: &HeaderValue) -> Option<HeaderValue> {
    let text = value.to_str().ok()?;
    let kept: Vec<_> =
        text.split(',').map(str::trim).filter(|one| !one.starts_with(TOKEN_PROTOCOL)).collect();
    HeaderValue::from_str(&kept.join(", ")).ok().filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn who() -> Who {
        let peer = Peer::User { name: "ann".to_owned(), role: Role::Operator };
        let address = ([192, 0, 2, 9], 5000).into();
        Who::of(&Caller { peer, address, certificate: None }).unwrap()
    }

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let pair = |(name, value): &(&str, &str)| {
            (name.parse::<HeaderName>().unwrap(), value.parse::<HeaderValue>().unwrap())
        };
        pairs.iter().map(pair).collect()
    }

    fn passed_on(pairs: &[(&str, &str)]) -> Vec<String> {
        let host = HeaderValue::from_static("api");
        let headers = request(&headers(pairs), &who(), &host);
        let line = |(name, value): (&HeaderName, &HeaderValue)| {
            format!("{name}: {}", value.to_str().unwrap())
        };
        let mut lines: Vec<_> = headers.iter().map(line).collect();
        lines.sort();
        lines
    }

    const ALWAYS: [&str; 4] = [
        "host: api",
        "x-forwarded-for: 192.0.2.9",
        "x-remote-group: polis:operators",
        "x-remote-user: polis:ann",
    ];

    #[test]
    fn a_request_as_another_user_is_known_in_any_spelling() {
        for name in ["Impersonate-User", "impersonate_group", "IMPERSONATE-EXTRA-x"] {
            assert!(impersonates(&headers(&[(name, "a")])), "{name}");
        }
        assert!(!impersonates(&headers(&[("accept", "impersonate-user")])));
        assert!(!who().is_owner());
    }

    #[test]
    fn the_caller_cannot_say_who_it_is() {
        let smuggled = [
            ("X-Remote-User", "polis:owner"),
            ("x-remote-group", "system:masters"),
            ("x-remote-group", "polis:owners"),
            ("X-Remote-Extra-Scopes", "all"),
            ("X-Remote-Uid", "1"),
            ("X_Remote_User", "polis:owner"),
            ("x-remote_group", "polis:owners"),
            ("Authorization", "Bearer abc"),
            ("Proxy-Authorization", "Basic abc"),
            ("X-Forwarded-For", "10.0.0.1"),
            ("X-Real-Ip", "10.0.0.1"),
            ("Forwarded", "for=10.0.0.1"),
            ("Host", "elsewhere"),
            ("Connection", "x-remote-user, close"),
        ];
        assert_eq!(passed_on(&smuggled), ALWAYS);
    }

    #[test]
    fn the_library_alone_says_how_long_a_body_is() {
        let framed = [
            ("Content-Length", "5"),
            ("Transfer-Encoding", "chunked"),
            ("Expect", "100-continue"),
            ("Keep-Alive", "timeout=5"),
        ];
        assert_eq!(passed_on(&framed), ALWAYS);
    }

    #[test]
    fn what_kubernetes_reads_is_passed_on() {
        let read = [
            ("Accept", "application/json"),
            ("Impersonate-User", "eve"),
            ("X-Stream-Protocol-Version", "v4.channel.k8s.io"),
            ("X-Stream-Protocol-Version", "v3.channel.k8s.io"),
        ];
        let lines = passed_on(&read);
        assert_eq!(lines.len(), ALWAYS.len() + read.len(), "{lines:?}");
    }

    #[test]
    fn an_upgrade_is_passed_on_and_nothing_else_of_the_connection() {
        let asked =
            [("Connection", "keep-alive, Upgrade, x-own"), ("Upgrade", "SPDY/3.1"), ("X-Own", "1")];
        let lines = passed_on(&asked);
        assert!(lines.contains(&"connection: Upgrade".to_owned()), "{lines:?}");
        assert!(lines.contains(&"upgrade: SPDY/3.1".to_owned()), "{lines:?}");
        assert!(!lines.iter().any(|line| line.starts_with("x-own")), "{lines:?}");
        assert_eq!(passed_on(&[("Upgrade", "h2c")]), ALWAYS, "nothing asks for it");
        let answer = headers(&[("Connection", "Upgrade"), ("Upgrade", "websocket"), ("A", "b")]);
        let switched = response(StatusCode::SWITCHING_PROTOCOLS, &answer);
        assert!(upgrades(&switched) && switched.len() == 3, "{switched:?}");
        assert_eq!(response(StatusCode::OK, &answer).len(), 1);
    }

    #[test]
    fn a_token_in_the_place_of_a_protocol_is_removed() {
        let protocol = |text: &str| {
            let lines = passed_on(&[("Sec-WebSocket-Protocol", text)]);
            lines.into_iter().find(|line| line.starts_with("sec-websocket-protocol"))
        };
        let token = format!("{TOKEN_PROTOCOL}YWJj");
        assert_eq!(
            protocol(&format!("{token}, v5.channel.k8s.io")).as_deref(),
            Some("sec-websocket-protocol: v5.channel.k8s.io")
        );
        assert_eq!(protocol(&token), None);
    }

    #[test]
    fn a_request_has_a_path_of_the_api_server_or_none() {
        let path = |method: Method, uri: &str| {
            path(&method, &uri.parse().unwrap()).map(|uri| uri.to_string())
        };
        assert_eq!(path(Method::GET, "/api?a=b").as_deref(), Some("/api?a=b"));
        let absolute = path(Method::GET, "http://10.0.0.1/api");
        assert_eq!(absolute.as_deref(), Some("/api"), "no other server is asked");
        assert_eq!(path(Method::CONNECT, "10.0.0.1:22"), None);
        assert_eq!(path(Method::OPTIONS, "*"), None);
    }

    #[test]
    fn only_the_log_of_a_container_is_followed() {
        let follows = |uri: &str| follows_a_log(&uri.parse().unwrap());
        let log = "/api/v1/namespaces/shop/pods/web-1/log";
        assert!(follows(&format!("{log}?container=a&follow=true")));
        assert!(follows(&format!("{log}?follow&tailLines=0")));
        for uri in [
            log.to_owned(),
            format!("{log}?follow=false"),
            format!("{log}?follow=0&container=follow"),
            "/api/v1/namespaces/shop/pods/web-1/exec?follow=true".to_owned(),
            "/api/v1/namespaces/shop/services/web/proxy/log?follow=true".to_owned(),
        ] {
            assert!(!follows(&uri), "{uri}");
        }
    }

    #[test]
    fn only_users_are_named() {
        let caller = |peer| Caller { peer, address: ([192, 0, 2, 9], 1).into(), certificate: None };
        assert_eq!(Who::of(&caller(Peer::None)), None);
        assert_eq!(Who::of(&caller(Peer::Key([1; 32]))), None);
        let node = polis_wire::identity::NodeId::from_public_key(&[1; 32]);
        assert_eq!(Who::of(&caller(Peer::Node(node))), None);
        let viewer = |name: &str| Peer::User { name: name.to_owned(), role: Role::Viewer };
        assert_eq!(Who::of(&caller(viewer("a\nX-Remote-Group: b"))), None);
        // The API server calls kubelets under this name, and may do everything there.
        assert_eq!(Who::of(&caller(viewer("apiserver-kubelet-client"))), None);
    }

    proptest! {
        #[test]
        fn whatever_headers_come_the_api_server_sees_one_user_and_one_group(
            pairs in prop::collection::vec(
                ("[xX]-?[rR]emote[-_][a-zA-Z-]{1,12}|[cC]onnection|[a-z-]{1,12}", "[ -~]{0,20}"),
                0..20,
            ),
        ) {
            let pairs: Vec<_> = pairs.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
            let parsed: HeaderMap = pairs
                .iter()
                .filter_map(|(n, v)| Some((n.parse::<HeaderName>().ok()?, v.parse().ok()?)))
                .collect();
            let told = request(&parsed, &who(), &HeaderValue::from_static("api"));
            let remote: Vec<_> =
                told.iter().filter(|(name, _)| name.as_str().starts_with(REMOTE)).collect();
            prop_assert_eq!(remote.len(), 2);
            prop_assert_eq!(told.get(USER), Some(&who().user));
            prop_assert_eq!(told.get(GROUP), Some(&who().group));
            prop_assert!(!told.contains_key(AUTHORIZATION));
        }
    }
}
