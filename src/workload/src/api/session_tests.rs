//! What requests of one session share, and long lists.

use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::super::record;
use super::super::tests::{asked, trusted};
use super::*;

#[tokio::test]
async fn checks_share_a_connection_until_it_ends_or_its_certificate_is_refused() {
    const EMPTY: &str = "Content-Length: 0\r\n\r\n";
    let base = tempfile::tempdir().unwrap();
    let (site, acceptor) = trusted(base.path()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let connections = std::cell::Cell::new(0);
    // The heads of the answers on each connection.
    let heads: [&[&str]; 3] = [
        &["503 No\r\n", "200 OK\r\n", "401 No\r\n"],
        &["200 OK\r\nConnection: close\r\n"],
        &["200 OK\r\n"],
    ];
    let serve = async {
        for heads in heads {
            let (tcp, _from) = listener.accept().await.unwrap();
            let mut tls = acceptor.accept(tcp).await.unwrap();
            connections.set(connections.get() + 1);
            for head in heads {
                let mut bytes = vec![0; 4096];
                let length = tls.read(&mut bytes).await.unwrap();
                assert!(bytes[..length].starts_with(b"GET /readyz "));
                let answer = format!("HTTP/1.1 {head}{EMPTY}");
                tls.write_all(answer.as_bytes()).await.unwrap();
            }
            let _lost = tls.shutdown().await;
        }
    };
    let checks = Session::new(&Api { address, ca: site.run.ca.clone(), client: None });
    let story = async {
        for (status, count) in [(503, 1), (200, 1), (401, 1), (200, 2), (200, 3)] {
            match checks.check("/readyz").await {
                Ok(()) => assert_eq!(status, 200),
                Err(Error::Refused { status: said, .. }) => assert_eq!(said, status),
                Err(other) => panic!("{other}"),
            }
            assert_eq!(connections.get(), count, "{status}");
        }
    };
    tokio::join!(serve, story);
}

#[tokio::test]
async fn a_session_that_was_closed_makes_another_connection() {
    let base = tempfile::tempdir().unwrap();
    let (site, acceptor) = trusted(base.path()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let session = Session::new(&Api { address, ca: site.run.ca.clone(), client: None });
    let serve = async {
        for _connection in 0..2 {
            let (tcp, _from) = listener.accept().await.unwrap();
            let mut tls = acceptor.accept(tcp).await.unwrap();
            let mut bytes = vec![0; 4096];
            assert!(tls.read(&mut bytes).await.unwrap() > 0);
            tls.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await.unwrap();
            // No other request comes.
            assert!(matches!(tls.read(&mut bytes).await, Ok(0) | Err(_)));
        }
    };
    let story = async {
        for _pass in 0..2 {
            session.check("/readyz").await.unwrap();
            session.close();
        }
    };
    tokio::join!(serve, story);
}

#[tokio::test]
async fn a_request_that_a_kept_connection_ends_before_it_takes_fails_at_once() {
    let base = tempfile::tempdir().unwrap();
    let (site, acceptor) = trusted(base.path()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let checks = Session::new(&Api { address, ca: site.run.ca.clone(), client: None });
    let serve = async {
        let (tcp, _from) = listener.accept().await.unwrap();
        let mut tls = acceptor.accept(tcp).await.unwrap();
        let mut bytes = vec![0; 4096];
        let _length = tls.read(&mut bytes).await.unwrap();
        tls.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await.unwrap();
        tls
    };
    let (mut server, checked) = tokio::join!(serve, checks.check("/readyz"));
    checked.unwrap();
    let open = checks.take().unwrap();
    // As when the server closes it right behind the look at whether it lives.
    server.shutdown().await.unwrap();
    // The runtime learns of it.
    tokio::task::yield_now().await;
    let request = checks.api.prepared(Method::GET, "/readyz", &[], Vec::new()).unwrap();
    let asked = checks.over_kept(open, request, ANSWER_MAX);
    let asked = timeout(Duration::from_secs(5), asked).await;
    assert!(matches!(asked, Ok(Err(Error::Http { .. }))));
}

#[tokio::test]
async fn long_objects_are_listed_a_few_at_a_time_and_one_alone_may_be_longer() {
    // Six objects of 1 MiB, and one that is longer than an answer of several.
    let lengths = [1, 1, 1, 1, 1, 1, 5].map(|mib: usize| mib << 20);
    let answer = |path: &str| {
        let number = |name: &str| {
            let value = path.split(['?', '&']).find_map(|part| part.strip_prefix(name));
            value.map_or(0, |value| value.parse::<usize>().unwrap())
        };
        let (from, limit) = (number("continue="), number("limit="));
        let to = lengths.len().min(from + limit);
        let objects = (from..to).map(|object| json!([object, "x".repeat(lengths[object])]));
        let rest = if to < lengths.len() { to.to_string() } else { String::new() };
        let items = objects.collect::<Vec<_>>();
        json!({"items": items, "metadata": {"continue": rest}}).to_string()
    };
    let found = asked(answer, async |api| {
        Session::new(api).list("/pods", JSON, 50, |one| one[0].as_u64()).await
    });
    assert_eq!(found.await.unwrap(), [0, 1, 2, 3, 4, 5, 6]);
}

#[tokio::test]
async fn an_object_that_is_nested_deeply_is_listed() {
    let answer = |_path: &str| {
        let record = record(200);
        format!(r#"{{"items":[{{"metadata":{{"managedFields":{record},"name":"a"}}}}]}}"#)
    };
    let found = asked(answer, async |api| {
        Session::new(api).list("/pods", JSON, 50, |one| one["metadata"].get("name").cloned()).await
    });
    assert_eq!(found.await.unwrap(), ["a"]);
}
