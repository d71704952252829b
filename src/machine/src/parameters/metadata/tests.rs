//! Questions to a server on loopback that answers with any bytes.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;
use polis_base::cause;

/// Bytes that a server writes, and whether it then closes the connection or stays silent.
pub(in crate::parameters) enum Answer {
    Whole(Vec<u8>),
    Silent(Vec<u8>),
}

/// An answer with a length.
pub(in crate::parameters) fn answer(status: u16, body: impl AsRef<[u8]>) -> Answer {
    let body = body.as_ref();
    let head = format!("HTTP/1.1 {status} Some\r\nContent-Length: {}\r\n\r\n", body.len());
    Answer::Whole([head.as_bytes(), body].concat())
}

/// The heads of the requests that a server got.
pub(in crate::parameters) type Heads = Arc<Mutex<Vec<String>>>;

/// Serves while the story goes on, a connection at a time, and returns what was asked for.
pub(in crate::parameters) async fn served<T>(
    respond: impl Fn(&str) -> Answer,
    story: impl AsyncFnOnce(SocketAddr, Heads) -> T,
) -> (T, Vec<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (address, heads) = (listener.local_addr().unwrap(), Heads::default());
    let serve = async {
        let mut silent = Vec::new();
        loop {
            let (mut stream, _from) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let Ok(byte) = stream.read_u8().await else { break };
                head.push(byte);
            }
            let head = String::from_utf8(head).unwrap();
            let answer = respond(&head);
            heads.lock().unwrap().push(head);
            let (Answer::Whole(bytes) | Answer::Silent(bytes)) = &answer;
            // The client may have had enough of it.
            let _written = stream.write_all(bytes).await;
            if matches!(answer, Answer::Silent(_)) {
                silent.push(stream);
            }
        }
    };
    let ended: T = tokio::select! {
        () = serve => unreachable!(),
        ended = story(address, Arc::clone(&heads)) => ended,
    };
    let heads = heads.lock().unwrap().clone();
    (ended, heads)
}

/// The result of one question to Hetzner, whose service is the plainest.
async fn plain(respond: impl Fn(&str) -> Answer) -> Result<Option<Vec<u8>>, String> {
    asked(Platform::Hetzner, respond).await.0
}

async fn asked(
    platform: Platform,
    respond: impl Fn(&str) -> Answer,
) -> (Result<Option<Vec<u8>>, String>, Vec<String>) {
    let story = async |address, _heads| ask(platform, address).await;
    let (answer, heads) = served(respond, story).await;
    (answer.map_err(|trouble| cause::line(&trouble)), heads)
}

fn whole(text: &str) -> Answer {
    Answer::Whole(text.as_bytes().to_vec())
}

#[tokio::test]
async fn each_cloud_is_asked_as_its_manual_says() {
    for (platform, line, header, encoded) in [
        (Platform::Ec2, "GET /latest/user-data HTTP/1.1", "x-aws-ec2-metadata-token: T==", false),
        (
            Platform::Gce,
            "GET /computeMetadata/v1/instance/attributes/user-data HTTP/1.1",
            "metadata-flavor: Google",
            false,
        ),
        (
            Platform::Azure,
            "GET /metadata/instance/compute/userData?api-version=2021-01-01&format=text HTTP/1.1",
            "metadata: true",
            true,
        ),
        (
            Platform::Oracle,
            "GET /opc/v2/instance/metadata/user_data HTTP/1.1",
            "authorization: Bearer Oracle",
            true,
        ),
        (Platform::Hetzner, "GET /hetzner/v1/userdata HTTP/1.1", "host: 127.0.0.1", false),
        (Platform::DigitalOcean, "GET /metadata/v1/user-data HTTP/1.1", "host: 127.0.0.1", false),
        (Platform::Vultr, "GET /latest/user-data HTTP/1.1", "host: 127.0.0.1", false),
        (Platform::OpenStack, "GET /openstack/latest/user_data HTTP/1.1", "host: 127.0.0.1", false),
    ] {
        let (found, heads) = asked(platform, |head| match head.starts_with("PUT ") {
            true => answer(200, "T==\n"),
            false if encoded => answer(200, "YWJ\r\njZA==\n"),
            false => answer(200, "abcd"),
        })
        .await;
        assert_eq!(found.unwrap().unwrap(), b"abcd", "{platform}");
        let last = heads.last().unwrap();
        assert!(last.starts_with(&format!("{line}\r\n")), "{platform}: {last}");
        let mut headers = last.lines().map(str::to_ascii_lowercase);
        assert!(headers.any(|it| it == header.to_ascii_lowercase()), "{platform}: {last}");
        assert_eq!(heads.len(), if platform == Platform::Ec2 { 2 } else { 1 }, "{platform}");
    }
}

#[tokio::test]
async fn ec2_gives_nothing_without_a_session() {
    let (found, heads) = asked(Platform::Ec2, |head| match head.starts_with("PUT ") {
        true => answer(403, "off"),
        false => answer(200, "abcd"),
    })
    .await;
    assert_eq!(found.unwrap_err(), "it answers 403 Forbidden to /latest/api/token");
    assert_eq!(heads.len(), 1, "{heads:?}");
    let put = heads[0].to_ascii_lowercase();
    assert!(put.starts_with("put /latest/api/token http/1.1\r\n"), "{put}");
    assert!(put.contains("\r\nx-aws-ec2-metadata-token-ttl-seconds: 60\r\n"), "{put}");
    for token in ["", "a\nb", "\u{7f}", &"t".repeat(1025)] {
        let (found, heads) = asked(Platform::Ec2, |_head| answer(200, token)).await;
        assert_eq!(found.unwrap_err(), "its session token is not text", "{token:?}");
        assert_eq!(heads.len(), 1);
    }
}

#[tokio::test]
async fn no_user_data_is_404_or_an_empty_body() {
    assert_eq!(plain(|_| answer(404, "no such key")).await, Ok(None));
    assert_eq!(plain(|_| answer(200, "")).await, Ok(None));
    assert_eq!(asked(Platform::Azure, |_| answer(200, "\n")).await.0, Ok(None));
}

#[tokio::test]
async fn an_answer_of_another_status_decides_nothing_and_no_redirect_is_followed() {
    for status in [206, 401, 429, 500, 503] {
        let trouble = plain(|_| answer(status, vec![b'x'; 100_000])).await.unwrap_err();
        assert!(trouble.starts_with(&format!("it answers {status}")), "{trouble}");
    }
    let moved = "HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n";
    let (trouble, heads) = asked(Platform::Hetzner, |_| whole(moved)).await;
    assert_eq!(trouble.unwrap_err(), "it answers 302 Found to /hetzner/v1/userdata");
    assert_eq!(heads.len(), 1, "{heads:?}");
}

#[tokio::test]
async fn user_data_has_a_bound_in_each_encoding() {
    let large = || vec![b'x'; PLAIN_MAX];
    assert_eq!(plain(|_| answer(200, large())).await, Ok(Some(large())));
    let more = [large(), vec![b'x']].concat();
    let too_large = "its answer is too large";
    assert_eq!(plain(|_| answer(200, &more)).await.unwrap_err(), too_large);
    let text = Base64::encode_string(&large());
    assert_eq!(asked(Platform::Azure, |_| answer(200, &text)).await.0, Ok(Some(large())));
    let text = Base64::encode_string(&more);
    assert_eq!(asked(Platform::Azure, |_| answer(200, &text)).await.0.unwrap_err(), too_large);
    let endless =
        || Answer::Whole([&b"HTTP/1.1 200 OK\r\n\r\n"[..], &vec![b'x'; 1 << 20]].concat());
    assert_eq!(plain(|_| endless()).await.unwrap_err(), too_large);
    for (length, is_too_large) in [("65536", false), ("65537", true), ("99999999999", true)] {
        // The length alone does not make an answer.
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\nabc");
        let trouble = plain(|_| whole(&head)).await.unwrap_err();
        assert_eq!(trouble == too_large, is_too_large, "{length}: {trouble}");
    }
}

#[tokio::test]
async fn a_body_in_chunks_is_put_together() {
    let head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    let good = format!("{head}2\r\nab\r\n2;ext=1\r\ncd\r\n0\r\n\r\n");
    assert_eq!(plain(|_| whole(&good)).await, Ok(Some(b"abcd".to_vec())));
    for bad in ["2\r\nab\r\n", "zz\r\nab\r\n0\r\n\r\n", "ffffffffffffffff\r\nab\r\n0\r\n\r\n"] {
        plain(|_| whole(&format!("{head}{bad}"))).await.unwrap_err();
    }
}

#[tokio::test]
async fn what_is_not_http_is_trouble() {
    let long = format!("HTTP/1.1 200 OK\r\nX: {}\r\n\r\nabcd", "y".repeat(100_000));
    let many = format!("HTTP/1.1 200 OK\r\n{}\r\nabcd", "X: y\r\n".repeat(1000));
    for noise in ["", "noise\r\n\r\n", "HTTP/1.1 200 OK\r\n", "SSH-2.0-x\r\n", &long, &many] {
        let start: String = noise.chars().take(20).collect();
        let trouble = plain(|_| whole(noise)).await.unwrap_err();
        assert!(trouble.starts_with("its answer cannot be read as HTTP"), "{start}: {trouble}");
    }
    let cut = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcd";
    assert!(plain(|_| whole(cut)).await.unwrap_err().starts_with("its answer breaks off"));
    let trouble = asked(Platform::Oracle, |_| answer(200, "polis-parameters-v1:YQ==")).await.0;
    assert_eq!(trouble.unwrap_err(), "its user data is not base64");
}

#[tokio::test(start_paused = true)]
async fn a_service_that_stays_silent_costs_a_bounded_time() {
    for bytes in ["", "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nab"] {
        let start = tokio::time::Instant::now();
        let trouble = plain(|_| Answer::Silent(bytes.into())).await.unwrap_err();
        assert_eq!(trouble, "it does not answer within 10 seconds");
        assert!(start.elapsed() <= ASK_MAX + Duration::from_millis(10), "{:?}", start.elapsed());
    }
}

#[tokio::test]
async fn a_port_without_a_service_refuses() {
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let trouble = ask(Platform::Hetzner, closed).await.unwrap_err();
    assert!(cause::line(&trouble).starts_with("cannot connect: "), "{trouble:?}");
}
