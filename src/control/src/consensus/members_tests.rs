//! Tests of the membership of etcd, with a member that is a socket.

use std::cell::Cell;

use futures::FutureExt as _;
use futures::future::join_all;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixListener;
use tokio::time::timeout;

use super::*;
use polis_base::files::Root;

/// The member 7, and the socket of its metrics.
fn member(root: Root) -> (Members, UnixListener) {
    root.create().unwrap();
    let sockets = root.ephemeral.consensus;
    let listener = UnixListener::bind(sockets.http()).unwrap();
    let status = Status { member: Some(MemberId(7)), ..Status::default() };
    let status = watch::channel(status).1;
    let members = Members::new(status, watch::Sender::new(false), Arc::default(), sockets);
    (members, listener)
}

#[tokio::test(start_paused = true)]
async fn all_callers_share_one_reading_of_the_metrics_for_a_second() {
    let directory = tempfile::tempdir().unwrap();
    let (members, listener) = member(Root::at(directory.path()));
    let read = Cell::new(0);
    let etcd = async {
        while let Ok((mut stream, _)) = listener.accept().await {
            read.set(read.get() + 1);
            let mut request = [0; 256];
            assert_ne!(stream.read(&mut request).await.unwrap(), 0);
            stream.write_all(b"HTTP/1.0 200 OK\r\n\r\n").await.unwrap();
        }
    };
    let story = async {
        let expected = BTreeSet::from([MemberId(7)]);
        for second in 1..=2 {
            let calls = (0..20).map(|_call| members.answering_lately());
            assert_eq!(join_all(calls).await, vec![expected.clone(); 20]);
            assert_eq!(read.get(), second);
            tokio::time::advance(SHOWN_FOR).await;
        }
        // A decision needs one of its own.
        for reading in 3..=4 {
            assert_eq!(members.answering().await.unwrap(), expected);
            assert_eq!(read.get(), reading);
        }
    };
    tokio::select! {
        // Each branch only waits.
        () = etcd => unreachable!("it serves without end"),
        () = story => {}
    }
}

#[tokio::test(start_paused = true)]
async fn callers_that_go_away_begin_one_reading_a_second_too() {
    let directory = tempfile::tempdir().unwrap();
    // It accepts, and does not answer.
    let (members, listener) = member(Root::at(directory.path()));
    let mut begun = 0;
    for second in 1..=2 {
        // Their last one ends before the second does.
        for _call in 0..9 {
            let call = timeout(SHOWN_FOR / 10, members.answering_lately());
            call.await.unwrap_err();
        }
        while listener.accept().now_or_never().is_some() {
            begun += 1;
        }
        assert_eq!(begun, second);
        tokio::time::advance(SHOWN_FOR).await;
    }
}

/// How etcd reports a change that it drops.
#[tokio::test(start_paused = true)]
async fn a_promotion_that_is_never_answered_is_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("etcd.sock");
    let _silent = UnixListener::bind(&socket).unwrap();
    let clients = Clients::connect(&socket).await.unwrap();
    let learner = Member {
        id: MemberId(1),
        name: "polis-a".to_owned(),
        peer_url: "https://polis-a:7834".to_owned(),
        learner: true,
    };
    let promoted = promote(&clients, &learner).await;
    assert!(matches!(promoted, Err(client::Error::Timeout { .. })), "{promoted:?}");
}
