//! Requests to a stand-in of a store, over TLS, which checks every signature, and which fails.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use polis_base::sys::clock;
use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use super::testing::{BUCKET, Fault, Store};
use super::*;

fn client(store: &Store) -> Client {
    Client {
        bucket: store.bucket("a/b/"),
        credentials: Store::credentials(),
        bundle: PathBuf::from("/nonexistent"),
        clock: clock::now,
    }
}

/// Puts a content in pieces of this length.
async fn put(client: &Client, key: &str, content: &[u8], piece: usize) -> Result<(), Error> {
    let (sender, pieces) = mpsc::channel(1);
    let feed = async {
        for piece in content.chunks(piece) {
            if sender.send(piece.to_vec()).await.is_err() {
                break;
            }
        }
        drop(sender);
    };
    let digest = Sha256::digest(content).into();
    let put = client.put(key, content.len() as u64, digest, pieces);
    tokio::join!(put, feed).0
}

async fn get(client: &Client, key: &str, size: u64) -> Result<Vec<u8>, Error> {
    let mut got = Vec::new();
    let mut sink = |bytes: &[u8]| {
        got.extend_from_slice(bytes);
        Ok(())
    };
    client.get(key, size, &mut sink).await?;
    Ok(got)
}

#[tokio::test]
async fn an_object_is_put_listed_and_fetched() {
    let store = Store::start("127.0.0.1");
    let client = client(&store);
    assert_eq!(client.list("", "").await.unwrap(), []);
    let content: Vec<u8> = (0..=255).cycle().take(3 << 20).collect();
    put(&client, "folder/one", &content, 100_000).await.unwrap();
    assert_eq!(store.with(|state| state.objects["a/b/folder/one"].clone()), content);
    assert_eq!(get(&client, "folder/one", content.len() as u64).await.unwrap(), content);
    // More than a page, and another one's beside them.
    store.with(|state| state.objects.insert("a/other".to_owned(), Vec::new()));
    for number in 0..7 {
        put(&client, &format!("folder/t{number}"), b"x", 1).await.unwrap();
    }
    let keys = |objects: Vec<Object>| {
        objects.into_iter().map(|object| object.key).collect::<Vec<_>>().join(" ")
    };
    let all = client.list("folder/", "").await.unwrap();
    assert_eq!(all[0], Object { key: "folder/one".to_owned(), size: content.len() as u64 });
    assert_eq!(keys(all).split(' ').count(), 8);
    let some = client.list("folder/", "folder/t4").await.unwrap();
    assert_eq!(keys(some), "folder/t5 folder/t6");
    assert_eq!(client.list("folder/t9", "").await.unwrap(), []);
    // Names that must be encoded.
    put(&client, "o d/d+ü&=", b"x", 1).await.unwrap();
    assert_eq!(get(&client, "o d/d+ü&=", 1).await.unwrap(), b"x");
}

#[tokio::test]
async fn a_store_behind_a_proxy_is_reached_through_a_tunnel_alone() {
    let store = Store::start("127.0.0.1");
    store.with(|state| state.objects.insert("a/b/one".to_owned(), b"x".to_vec()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut client = client(&store);
    let place = client.bucket.server.endpoint.clone();
    client.bucket.server.proxy = Some(Endpoint { host: "127.0.0.1".to_owned(), port });
    // A connection at a time; returns the requests for tunnels.
    let proxy = async {
        let (mut tcp, _from) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            assert!(tcp.read_buf(&mut head).await.unwrap() > 0);
        }
        tcp.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
        let mut to = TcpStream::connect((place.host.as_str(), place.port)).await.unwrap();
        // Either end may be the first to end it.
        let _ended = copy_bidirectional(&mut tcp, &mut to).await;
        String::from_utf8(head).unwrap()
    };
    let (listed, head) = tokio::join!(client.list("", ""), proxy);
    assert_eq!(listed.unwrap(), [Object { key: "one".to_owned(), size: 1 }]);
    assert!(head.starts_with(&format!("CONNECT {place} HTTP/1.1\r\n")), "{head}");
    assert!(!head.contains("snapshots") && !head.contains("AKIATEST"), "{head}");

    // Without the proxy, the store cannot be reached.
    drop(listener);
    let error = client.list("", "").await.unwrap_err();
    assert!(error.help().unwrap().contains("--no-proxy"), "{error}");
    assert!(error.to_string().contains("cannot connect to the proxy 127.0.0.1"), "{error}");
}

#[tokio::test]
async fn a_store_that_refuses_is_quoted_with_what_would_help() {
    let store = Store::start("127.0.0.1");
    let client = client(&store);
    let refused = |error: Error| (error.to_string(), error.help().unwrap_or_default());
    let other = Credentials::new("AKIATEST", "another secret".replace(' ', "-").as_str()).unwrap();
    let other = Client { credentials: other, ..client.clone() };
    let (said, help) = refused(other.list("", "").await.unwrap_err());
    assert!(said.contains("SignatureDoesNotMatch: said so (403"), "{said}");
    assert!(help.contains("--snapshot-credentials"), "{help}");
    let elsewhere = Bucket { name: "missing".to_owned(), ..client.bucket.clone() };
    let elsewhere = Client { bucket: elsewhere, ..client.clone() };
    let (said, help) = refused(put(&elsewhere, "one", b"x", 1).await.unwrap_err());
    assert!(said.contains("/missing/a/b refuses: NoSuchBucket"), "{said}");
    assert!(help.contains("make the bucket"), "{help}");
    let region = Bucket { region: "us-east-1".to_owned(), ..client.bucket.clone() };
    let (_, help) =
        refused(Client { bucket: region, ..client.clone() }.list("", "").await.unwrap_err());
    assert!(help.contains(",region=eu-test-1"), "{help}");
    store.with(|state| state.behind = Duration::from_secs(16 * 60));
    let (said, help) = refused(client.list("", "").await.unwrap_err());
    assert!(said.contains("RequestTimeTooSkewed") && help.contains("clock"), "{said} {help}");
    store.with(|state| state.behind = Duration::ZERO);
    store.with(|state| state.fault = Some(Fault::Refuses(503, "SlowDown", "")));
    let (said, help) = refused(put(&client, "one", b"x", 1).await.unwrap_err());
    assert!(said.contains("SlowDown") && help.is_empty(), "{said} {help}");
    let place = format!("https://{}/elsewhere", store.address);
    store.with(|state| state.fault = Some(Fault::Redirects(place)));
    let (said, help) = refused(client.list("", "").await.unwrap_err());
    assert!(said.contains("redirects to another address") && help.contains("region"), "{said}");
    store.with(|state| state.fault = None);
    client.list("", "").await.unwrap();
    let requests = store.with(|state| state.requests.clone());
    assert!(!requests.iter().any(|request| request.contains("elsewhere")), "{requests:?}");
}

#[tokio::test]
async fn nothing_is_kept_of_an_object_that_is_not_whole() {
    let store = Store::start("127.0.0.1");
    let client = client(&store);
    let content = vec![7; 1 << 20];
    // The line is cut.
    store.with(|state| state.fault = Some(Fault::CutsPut(70_000)));
    let lost = put(&client, "one", &content, 10_000).await.unwrap_err();
    assert!(matches!(lost, Error::Http { .. }), "{lost}");
    store.with(|state| state.fault = None);
    // The file changed after its checksum was taken.
    let (sender, pieces) = mpsc::channel(1);
    sender.try_send(vec![8; 5]).unwrap();
    let digest = Sha256::digest([7; 5]).into();
    let refused = client.put("one", 5, digest, pieces).await.unwrap_err();
    assert!(refused.to_string().contains("XAmzContentSHA256Mismatch"), "{refused}");
    // It has fewer or more bytes than it had.
    for size in [4, 6] {
        let (sender, pieces) = mpsc::channel(1);
        sender.try_send(vec![7; 5]).unwrap();
        drop(sender);
        let cut = client.put("one", size, digest, pieces).await.unwrap_err();
        assert!(matches!(cut, Error::Http { .. }), "{cut}");
    }
    assert_eq!(client.list("", "").await.unwrap(), []);
    put(&client, "one", &content, 10_000).await.unwrap();
    store.with(|state| state.fault = Some(Fault::CutsGet));
    get(&client, "one", content.len() as u64).await.unwrap_err();
    store.with(|state| state.fault = None);
    // Its size is another one than in the listing.
    for size in [content.len() as u64 - 1, content.len() as u64 + 1] {
        let unusable = get(&client, "one", size).await.unwrap_err();
        assert!(matches!(unusable, Error::Answer { .. }), "{unusable}");
    }
}

#[tokio::test]
async fn an_answer_that_is_not_one_of_a_store_is_refused() {
    let store = Store::start("127.0.0.1");
    let client = client(&store);
    let ok = |body: &str| {
        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
    };
    let listed = |key: &str, more: bool| {
        ok(&format!(
            "<ListBucketResult><IsTruncated>{more}</IsTruncated><Contents><Key>{key}</Key>\
             <Size>1</Size></Contents></ListBucketResult>"
        ))
    };
    let endless = "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>";
    for answer in [
        b"SSH-2.0-OpenSSH\r\n".to_vec(),
        b"HTTP/1.1 204 No\r\n\r\n".to_vec(),
        ok("<html/>"),
        ok(endless),
        ok(&"x".repeat(5 << 20)),
        listed("a/b/../../etc", true),
        listed("c/d", false),
        listed("", false),
    ] {
        store.with(|state| state.fault = Some(Fault::Answers(answer)));
        let error = client.list("x", "").await.unwrap_err();
        assert!(error.to_string().contains(BUCKET), "{error}");
    }
    store.with(|state| state.fault = None);
    // Another authority.
    let stranger = Store::start("127.0.0.1").bucket("").server.authorities;
    let mut bucket = client.bucket.clone();
    bucket.server.authorities = stranger;
    let wary = Client { bucket, ..client };
    let requests = store.with(|state| state.requests.len());
    let error = wary.list("", "").await.unwrap_err();
    assert!(error.to_string().contains("no TLS with"), "{error}");
    assert_eq!(store.with(|state| state.requests.len()), requests, "nothing was sent");
}

#[tokio::test]
async fn a_clock_from_long_ago_is_said_to_be_it() {
    let store = Store::start("127.0.0.1");
    let past = Client { clock: || SystemTime::UNIX_EPOCH, ..client(&store) };
    let error = past.list("", "").await.unwrap_err();
    assert!(error.help().unwrap().contains("clock"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_content_that_no_longer_moves_is_given_up() {
    let moved = Arc::<AtomicU64>::default();
    let waits = client::stands_still(Arc::clone(&moved));
    let moves = async {
        for _minute in 0..5 {
            tokio::time::sleep(Duration::from_secs(45)).await;
            moved.fetch_add(1, Ordering::Relaxed);
        }
    };
    let begun = tokio::time::Instant::now();
    tokio::join!(waits, moves);
    let took = begun.elapsed().as_secs();
    assert!((285..=345).contains(&took), "{took}");
}
