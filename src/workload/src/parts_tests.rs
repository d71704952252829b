//! Which changes of the status are lines, and what the status says of them.

use super::*;

fn parts() -> (Parts, watch::Receiver<Status>, tokio::sync::mpsc::Receiver<String>) {
    let (lines, written) = Lines::channel();
    let status = watch::Sender::default();
    let seen = status.subscribe();
    (Parts::new(status, lines), seen, written)
}

fn said(written: &mut tokio::sync::mpsc::Receiver<String>) -> Vec<String> {
    std::iter::from_fn(|| written.try_recv().ok())
        .map(|line| line.split(" t=").next().unwrap().to_owned())
        .collect()
}

#[tokio::test]
async fn each_change_is_one_line_and_all_is_ready_last() {
    let (parts, status, mut written) = parts();
    parts.expect(&[Part::Certificates, Part::ApiServer]);
    assert_eq!(
        said(&mut written),
        [
            "POLIS workload part=certificates state=starting",
            "POLIS workload part=apiserver state=starting",
            "POLIS workload part=all state=starting",
        ]
    );
    parts.set(Part::Certificates, PartState::Ready);
    parts.set(Part::Certificates, PartState::Ready);
    assert_eq!(said(&mut written), ["POLIS workload part=certificates state=ready"]);
    parts.set(Part::ApiServer, PartState::Ready);
    assert_eq!(
        said(&mut written),
        ["POLIS workload part=apiserver state=ready", "POLIS workload part=all state=ready"]
    );
    assert_eq!(status.borrow().all(), Some(PartState::Ready));
    parts.fail(Part::ApiServer, "bind: in use");
    assert_eq!(
        said(&mut written),
        [
            "POLIS workload part=apiserver state=failed cause=\"bind: in use\"",
            "POLIS workload part=all state=failed cause=\"apiserver: bind: in use\"",
        ]
    );
    parts.none();
    assert_eq!(
        said(&mut written),
        [
            "POLIS workload part=certificates state=stopped",
            "POLIS workload part=apiserver state=stopped",
            "POLIS workload part=all state=stopped",
        ]
    );
    assert_eq!(status.borrow().all(), None);
}

#[tokio::test]
async fn all_parts_have_stopped_once_the_last_one_has() {
    let (parts, _status, mut written) = parts();
    parts.expect(&[Part::Certificates, Part::ApiServer]);
    parts.set(Part::Certificates, PartState::Ready);
    parts.set(Part::ApiServer, PartState::Ready);
    let _before = said(&mut written);
    parts.set(Part::ApiServer, PartState::Stopped);
    assert_eq!(said(&mut written), ["POLIS workload part=apiserver state=stopped"]);
    parts.none();
    assert_eq!(
        said(&mut written),
        ["POLIS workload part=certificates state=stopped", "POLIS workload part=all state=stopped",]
    );
}

#[tokio::test]
async fn a_second_role_leaves_the_parts_of_the_first_alone() {
    let (parts, status, mut written) = parts();
    parts.expect(&[Part::ApiServer]);
    parts.set(Part::ApiServer, PartState::Ready);
    let _before = said(&mut written);
    parts.expect(&[Part::ApiServer, Part::Kubelet]);
    assert!(status.borrow().is_ready(Part::ApiServer));
    assert_eq!(
        said(&mut written),
        ["POLIS workload part=kubelet state=starting", "POLIS workload part=all state=starting"]
    );
    parts.expect(&[Part::ApiServer]);
    assert_eq!(
        said(&mut written),
        ["POLIS workload part=kubelet state=stopped", "POLIS workload part=all state=ready"]
    );
}

#[tokio::test]
async fn a_node_that_cannot_serve_its_role_reports_the_reason() {
    let (parts, status, mut written) = parts();
    parts.unfit("no programs");
    parts.unfit("no programs");
    assert_eq!(said(&mut written), ["POLIS workload part=all state=failed cause=\"no programs\""]);
    assert!(status.borrow().parts.is_empty());
    parts.none();
    assert_eq!(said(&mut written), ["POLIS workload part=all state=stopped"]);
}

#[tokio::test]
async fn the_mesh_comes_and_goes_beside_the_parts_of_a_role() {
    let (parts, status, mut written) = parts();
    parts.set(Part::Mesh, PartState::Ready);
    parts.expect(&[Part::ApiServer]);
    let _before = said(&mut written);
    parts.set(Part::ApiServer, PartState::Ready);
    assert_eq!(status.borrow().all(), Some(PartState::Ready));
    parts.fail(Part::Mesh, "no device");
    assert_eq!(
        said(&mut written),
        [
            "POLIS workload part=apiserver state=ready",
            "POLIS workload part=all state=ready",
            "POLIS workload part=mesh state=failed cause=\"no device\"",
            "POLIS workload part=all state=failed cause=\"mesh: no device\"",
        ]
    );
    parts.none();
    parts.remove(Part::Mesh);
    parts.remove(Part::Mesh);
    assert_eq!(
        said(&mut written),
        [
            "POLIS workload part=apiserver state=stopped",
            "POLIS workload part=mesh state=stopped",
            "POLIS workload part=all state=stopped",
        ]
    );
    assert_eq!(status.borrow().all(), None);
}

#[tokio::test]
async fn a_drain_is_reported_with_what_it_waits_for() {
    let (parts, status, mut written) = parts();
    parts.drain(State::Draining, "the end of shop/web");
    parts.drain(State::Draining, "the end of shop/web");
    parts.drain(State::Drained, "");
    assert_eq!(status.borrow().all(), None, "it is not a part");
    parts.none();
    assert_eq!(
        said(&mut written),
        [
            "POLIS drain state=draining cause=\"the end of shop/web\"",
            "POLIS drain state=drained",
            "POLIS drain state=none",
        ]
    );
}

#[tokio::test]
async fn a_part_that_waits_says_why_until_it_goes_on() {
    let (parts, status, mut written) = parts();
    parts.expect(&[Part::Node]);
    let _before = said(&mut written);
    assert_eq!(status.borrow().fault(Part::Node).as_deref(), Some("it is starting"));
    for why in ["no network", "no network", "no runtime"] {
        parts.wait(Part::Node, why);
    }
    assert_eq!(
        said(&mut written),
        [
            "POLIS workload part=node state=starting cause=\"no network\"",
            "POLIS workload part=node state=starting cause=\"no runtime\"",
        ]
    );
    let fault = status.borrow().fault(Part::Node);
    assert_eq!(fault.as_deref(), Some("it is starting: no runtime"));
    parts.set(Part::Node, PartState::Starting);
    assert_eq!(said(&mut written), [""; 0]);
    parts.wait(Part::Node, "no network");
    parts.set(Part::Node, PartState::Ready);
    assert!(status.borrow().waits.is_empty());
    parts.wait(Part::Node, "no network");
    parts.none();
    assert!(status.borrow().waits.is_empty());
}

#[tokio::test]
async fn what_a_machine_lacks_for_gvisor_is_one_line_until_it_is_revoked() {
    let (parts, status, mut written) = parts();
    parts.expect(&[Part::Node]);
    parts.set(Part::Node, PartState::Ready);
    let _before = said(&mut written);
    parts.gvisor(&[]);
    assert_eq!(said(&mut written), [""; 0], "it works, as it is expected to");
    let lacking = ["no filters", "no namespaces"].map(str::to_owned);
    let failed = "POLIS workload part=gvisor state=failed cause=\"no filters; no namespaces\"";
    for _run in 0..3 {
        parts.gvisor(&lacking);
    }
    assert_eq!(said(&mut written), [failed]);
    assert_eq!(status.borrow().all(), Some(PartState::Ready), "other pods run");
    parts.gvisor(&[]);
    assert_eq!(said(&mut written), ["POLIS workload part=gvisor state=ready"]);
    parts.gvisor(&lacking);
    parts.expect(&[Part::ApiServer]);
    let stopped = "POLIS workload part=gvisor state=stopped";
    let lines = said(&mut written);
    assert_eq!(lines.first().map(String::as_str), Some(failed));
    assert!(lines.iter().any(|line| line == stopped), "{lines:?}");
    let ends: [fn(&Parts); 2] = [Parts::none, |parts| parts.unfit("no programs")];
    for end in ends {
        parts.expect(&[Part::Node]);
        parts.gvisor(&lacking);
        let _before = said(&mut written);
        end(&parts);
        let lines = said(&mut written);
        assert!(lines.iter().any(|line| line == stopped), "{lines:?}");
    }
}

#[tokio::test]
async fn the_last_words_of_a_crash_loop_stay_until_the_part_is_ready() {
    let (parts, status, mut written) = parts();
    let said = |cause: &str| Some(format!("kubelet ends again and again: {cause}"));
    parts.expect(&[Part::Kubelet, Part::Dns]);
    parts.died(Part::Kubelet, "no swap");
    parts.set(Part::Kubelet, PartState::Starting);
    assert_eq!(status.borrow().crash_loop(), None, "once is an accident");
    parts.died(Part::Kubelet, "no swap");
    assert_eq!(status.borrow().crash_loop(), said("no swap"));
    parts.set(Part::Kubelet, PartState::Starting);
    assert_eq!(status.borrow().crash_loop(), said("no swap"));
    parts.died(Part::Kubelet, "no cgroup");
    assert_eq!(status.borrow().crash_loop(), said("no cgroup"));
    // A failed check is not a death.
    for _again in 0..3 {
        parts.fail(Part::Dns, "no answer");
        parts.set(Part::Dns, PartState::Starting);
    }
    assert_eq!(status.borrow().crash_loop(), said("no cgroup"));
    parts.set(Part::Kubelet, PartState::Ready);
    assert!(status.borrow().deaths.is_empty());
    parts.died(Part::Kubelet, "no swap");
    assert_eq!(status.borrow().crash_loop(), None, "the count begins anew");
    parts.none();
    assert!(status.borrow().deaths.is_empty());
    let failed = written_with(&mut written, "kubelet state=failed");
    assert_eq!(failed, 4, "each death is a line");
}

fn written_with(written: &mut tokio::sync::mpsc::Receiver<String>, what: &str) -> usize {
    said(written).iter().filter(|line| line.contains(what)).count()
}

#[tokio::test]
async fn a_waiter_continues_when_its_part_is_ready() {
    let (parts, _status, _written) = parts();
    parts.expect(&Part::CONTROLLER);
    let waiter = parts.ready(Part::ApiServer);
    parts.set(Part::ApiServer, PartState::Ready);
    assert_eq!(waiter.await, Ok(()));
}
