//! Which events are lines, and how the file is followed.

use std::io::Write as _;
use std::os::unix::fs::symlink;

use polis_control::curator::audit;
use polis_runtime::logtree::Query;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

const PASSWORD: &str = "hunter2";

/// As the API server writes it.
fn event(id: &str) -> Value {
    json!({
        "kind": "Event", "apiVersion": "audit.k8s.io/v1", "level": "Metadata", "auditID": id,
        "stage": "ResponseComplete", "verb": "create",
        "requestURI": format!("/api/v1/namespaces/shop/secrets?dryRun={PASSWORD}"),
        "user": {"username": "polis:ann", "groups": ["polis:owners", "system:authenticated"]},
        "sourceIPs": ["192.0.2.9"], "userAgent": "kubectl/v1.37.2 (linux/amd64)",
        "objectRef": {
            "resource": "secrets", "namespace": "shop", "name": "key", "apiVersion": "v1",
        },
        "responseStatus": {"metadata": {}, "code": 201},
        "requestReceivedTimestamp": "2026-11-30T20:00:00.000001Z",
        "stageTimestamp": "2026-11-30T20:00:00.000002Z",
        "annotations": {"authorization.k8s.io/decision": "allow"},
    })
}

fn parsed(event: &Value) -> Event {
    serde_json::from_value(event.clone()).unwrap()
}

/// The file of an API server, and what is copied of it.
struct Place {
    _folder: TempDir,
    data: files::Kubernetes,
    tree: Tree,
    follower: Follower,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let data = files::Root::at(folder.path()).data.kubernetes;
        std::fs::create_dir_all(data.audit.path()).unwrap();
        let tree = Tree::new(None);
        let follower = Follower::new(data.clone(), tree.clone(), "root.audit");
        Self { _folder: folder, data, tree, follower }
    }

    fn write(&self, text: &str) {
        let path = self.data.audit_log();
        let mut file = File::options().create(true).append(true).open(path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
    }

    fn look(&mut self) -> Vec<String> {
        self.follower.look().unwrap();
        ids(&self.tree)
    }
}

/// The events with these numbers, a line each.
fn lines(ids: impl IntoIterator<Item = u32>, code: i32) -> String {
    let line = |id: u32| {
        let mut event = event(&id.to_string());
        event["responseStatus"]["code"] = json!(code);
        format!("{event}\n")
    };
    ids.into_iter().map(line).collect()
}

/// The numbers of the events that were copied; another line is there whole.
fn ids(tree: &Tree) -> Vec<String> {
    let shown = |body: &Body| match body.to_string().rsplit_once(" id=") {
        Some((_, id)) => id.to_owned(),
        None => body.to_string(),
    };
    tree.backlog(&Query::all()).iter().map(|entry| shown(&entry.body)).collect()
}

#[test]
fn a_line_says_who_did_what_and_is_for_the_readers_of_the_audit_log() {
    let mut place = Place::new();
    assert!(place.look().is_empty());
    place.write(&format!("{}\n", event("7")));
    place.look();
    let entries = place.tree.backlog(&Query::all());
    let [entry] = &entries[..] else { panic!("{entries:?}") };
    assert_eq!(
        entry.body.to_string(),
        "kubernetes: create secrets by=polis:ann namespace=shop name=key code=201 \
         from=192.0.2.9 agent=\"kubectl/v1.37.2 (linux/amd64)\" id=7"
    );
    assert!(audit::is_line(entry));
    assert_eq!((&*entry.name, entry.origin), ("root.audit", Origin::Program));
    // The serial line has programs from `Warning` on.
    assert_eq!(entry.body.severity(), Severity::Info);
}

#[test]
fn a_line_has_no_query_of_a_request() {
    let mut exec = event("1");
    exec["verb"] = json!("get");
    exec["stage"] = json!("ResponseStarted");
    exec["requestURI"] =
        json!(format!("/api/v1/namespaces/shop/pods/web/exec?command=login&command={PASSWORD}"));
    exec["objectRef"] = json!({"resource": "pods", "subresource": "exec", "name": "web"});
    exec["impersonatedUser"] = json!({"username": "bob"});
    let line = Body::Levelled(parsed(&exec).into_line()).to_string();
    assert!(line.starts_with("kubernetes: get pods/exec by=polis:ann as=bob name=web "), "{line}");
    assert!(line.contains(" stage=ResponseStarted ") && !line.contains(PASSWORD), "{line}");

    let mut path = event("2");
    path["verb"] = json!("get");
    path["requestURI"] = json!(format!("/metrics?token={PASSWORD}"));
    path.as_object_mut().unwrap().remove("objectRef");
    let line = Body::Levelled(parsed(&path).into_line()).to_string();
    assert!(line.starts_with("kubernetes: get /metrics by=polis:ann code=201 "), "{line}");
    assert!(!line.contains(PASSWORD), "{line}");
}

#[test]
fn a_line_has_the_impersonated_groups_and_no_other_group_hides_the_one_that_may_do_everything() {
    let mut event = event("1");
    let long = "g".repeat(2 * TEXT_MAX);
    event["impersonatedUser"] =
        json!({"username": "bob", "groups": ["a,system:b\nc", long, MASTERS]});
    let line = Body::Levelled(parsed(&event).into_line()).to_string();
    let first = "system:masters,a?system:b?c,";
    let rest = "g".repeat(TEXT_MAX - first.len());
    let expected = format!(" by=polis:ann as=bob as_groups={first}{rest} namespace=shop ");
    assert!(line.contains(&expected), "{line}");
}

#[test]
fn a_text_of_a_caller_is_neither_long_nor_another_field_or_line() {
    let mut refused = event("1");
    refused["user"] = json!({"username": "system:serviceaccount:shop:bot"});
    refused["responseStatus"]["code"] = json!(403);
    refused["userAgent"] = json!("x\" code=200 by=\"polis:ann");
    refused["objectRef"] = json!({
        "resource": "pods by=polis:ann code=200",
        "namespace": "a\nkubernetes:\u{2028}delete\u{a0}pods",
        "name": "n".repeat(4 * TEXT_MAX),
    });
    let line = Body::Levelled(parsed(&refused).into_line()).to_string();
    let expected = format!(
        "kubernetes: create pods?by=polis:ann?code=200 by=system:serviceaccount:shop:bot \
         namespace=a?kubernetes:?delete?pods name={} code=403 from=192.0.2.9 \
         agent=\"x? code=200 by=?polis:ann\" id=1",
        "n".repeat(TEXT_MAX)
    );
    assert_eq!(line, expected);
    assert_eq!(plain(&"ü".repeat(TEXT_MAX)), "ü".repeat(TEXT_MAX / 2));
}

#[test]
fn what_users_change_is_copied_and_of_the_own_programs_what_they_were_refused() {
    let (user, node) = (("polis:ann", "polis:owners"), ("system:node:n", "system:nodes"));
    let bot = ("system:serviceaccount:shop:bot", "system:serviceaccounts:shop");
    let job = ("system:serviceaccount:kube-system:job", "system:serviceaccounts:kube-system");
    for ((name, group), verb, resource, subresource, code, expected) in [
        (user, "create", "deployments", "", 201, true),
        (user, "delete", "pods", "", 200, true),
        (user, "list", "pods", "", 200, false),
        (user, "list", "pods", "", 403, true),
        (user, "get", "secrets", "", 200, true),
        (user, "watch", "configmaps", "", 200, true),
        (user, "create", "serviceaccounts", "token", 201, true),
        (user, "get", "pods", "exec", 101, true),
        (user, "get", "pods", "log", 200, false),
        (bot, "patch", "deployments", "", 200, true),
        (bot, "get", "pods", "", 200, false),
        (node, "patch", "nodes", "status", 200, false),
        (node, "get", "secrets", "", 200, false),
        (node, "get", "secrets", "", 403, true),
        (node, "get", "pods", "portforward", 101, true),
        (job, "create", "pods", "", 201, false),
        (job, "create", "pods", "", 403, true),
        (("system:anonymous", "system:unauthenticated"), "get", "pods", "", 401, true),
    ] {
        let mut event = event("1");
        event["user"] = json!({"username": name, "groups": [group]});
        event["verb"] = json!(verb);
        event["objectRef"] = json!({"resource": resource, "subresource": subresource});
        event["responseStatus"]["code"] = json!(code);
        let said = format!("{name} {verb} {resource} {subresource} {code}");
        assert_eq!(parsed(&event).is_copied(), expected, "{said}");
        // A program that impersonates a user counts as that user.
        event["impersonatedUser"] = json!({"username": "bob"});
        let expected = expected || !configuration::READS.contains(&verb) || resource == "secrets";
        assert_eq!(parsed(&event).is_copied(), expected, "{said} as bob");
    }
}

#[test]
fn a_file_is_read_from_its_end_and_another_one_that_takes_its_place_from_the_beginning() {
    let mut place = Place::new();
    place.write(&lines([0], 200));
    assert!(place.look().is_empty(), "the lines of an earlier run");
    // The API server may have written half of a line.
    let line = lines([1], 200);
    let (head, rest) = line.split_at(line.len() / 2);
    place.write(head);
    assert!(place.look().is_empty());
    place.write(rest);
    assert_eq!(place.look(), ["1"]);
    place.write(&lines([2], 200));
    let former = place.data.audit.path().join("audit-2026-11-30T20-00-00.000.log");
    std::fs::rename(place.data.audit_log(), former).unwrap();
    assert_eq!(place.look(), ["1", "2"], "no file has the name for a moment");
    place.write(&lines([3, 4], 200));
    assert_eq!(place.look(), ["1", "2", "3", "4"]);
    assert_eq!(place.look(), ["1", "2", "3", "4"]);
}

#[test]
fn a_file_that_grows_faster_than_it_is_read_is_read_to_its_end_before_the_next_one() {
    let mut place = Place::new();
    place.look();
    place.follower.look_max = 1 << 20;
    let first = lines(0..1000, 200);
    let count = u32::try_from(4 * place.follower.look_max / first.len() + 1).unwrap() * 1000;
    place.follower.copier.done = Budget::new(2 * count);
    place.write(&lines(0..count, 200));
    let former = place.data.audit.path().join("audit-2026-11-30T20-00-00.000.log");
    place.look();
    std::fs::rename(place.data.audit_log(), former).unwrap();
    place.write(&lines([count], 200));
    let read = |place: &mut Place| {
        let before = place.follower.copier.done.left;
        place.follower.look().unwrap();
        before - place.follower.copier.done.left
    };
    // No budget gets anything back before the tenth look.
    let counts: Vec<_> = (0..7).map(|_| read(&mut place)).collect();
    assert!(counts.iter().take(3).all(|count| *count > 0), "{counts:?}");
    assert_eq!(2 * count - place.follower.copier.done.left, count + 1, "{counts:?}");
}

#[test]
fn a_line_that_is_no_event_or_too_long_is_counted() {
    let mut place = Place::new();
    place.look();
    place.write(&format!("{{\"x\":1}}\n{}\n{}", "x".repeat(3 * LINE_MAX), lines([1], 200)));
    assert_eq!(place.look(), ["1"], "the end of the long line is no line");
    let mut long = event("2");
    long["userAgent"] = json!("x".repeat(2 * LINE_MAX));
    place.write(&format!("{long}\n"));
    assert_eq!(place.look(), ["1"]);
    assert!(place.follower.line.capacity() < 4 * LINE_MAX);
    for _ in 0..REFILL_LOOKS {
        place.look();
    }
    let counts = "kubernetes: more requests are in the file of this controller alone \
                  done=0 accounts=0 refused=0 unreadable=3";
    assert_eq!(place.look(), ["1", counts]);
}

#[test]
fn a_flood_of_refusals_keeps_no_line_of_a_user_out() {
    let mut place = Place::new();
    place.look();
    place.write(&lines(0..REFUSED_MAX + 10, 401));
    place.write(&lines([1000], 201));
    let copied = place.look();
    assert_eq!(copied.len(), usize::try_from(REFUSED_MAX).unwrap() + 1);
    assert_eq!(copied.last().unwrap(), "1000");
    for _ in 0..REFILL_LOOKS {
        place.look();
    }
    let counts = place.look().pop().unwrap();
    assert!(counts.ends_with(" done=0 accounts=0 refused=10 unreadable=0"), "{counts}");
    place.write(&lines([2000, 2001, 2002], 403));
    let copied = place.look();
    assert_eq!(copied.last().unwrap(), "2001", "a part of the budget is back");
}

#[test]
fn a_pod_that_asks_without_end_keeps_no_line_of_a_user_out() {
    let mut place = Place::new();
    place.look();
    let mut asked = event("1");
    asked["user"]["username"] = json!("system:serviceaccount:shop:bot");
    asked["objectRef"] = json!({
        "resource": "selfsubjectaccessreviews", "apiGroup": "authorization.k8s.io",
    });
    place.follower.copier.done = Budget::new(1);
    place.follower.copier.accounts = Budget::new(3);
    place.write(&format!("{asked}\n").repeat(5));
    place.write(&lines([2], 201));
    let copied = place.look();
    assert_eq!(copied, ["1", "1", "1", "2"]);
}

#[test]
fn a_budget_fills_up_again_and_no_further() {
    let mut budget = Budget::new(REFUSED_MAX);
    let taken = (0..REFUSED_MAX + 5).filter(|_| budget.take()).count();
    assert_eq!(taken, usize::try_from(REFUSED_MAX).unwrap());
    assert_eq!(budget.refill(), 5);
    assert_eq!((budget.left, budget.left_out), (REFUSED_MAX / REFILL_PARTS, 0));
    for _ in 0..2 * REFILL_PARTS {
        assert_eq!(budget.refill(), 0);
    }
    assert_eq!(budget.left, REFUSED_MAX);
}

#[test]
fn a_link_in_place_of_the_file_is_not_followed() {
    let mut place = Place::new();
    let other = place.data.dir.path().join("other");
    std::fs::write(&other, lines([1], 200)).unwrap();
    symlink(&other, place.data.audit_log()).unwrap();
    place.follower.look().unwrap_err();
    std::fs::remove_file(place.data.audit_log()).unwrap();
    assert!(place.look().is_empty());
    symlink(&other, place.data.audit_log()).unwrap();
    place.follower.look().unwrap_err();
    assert!(ids(&place.tree).is_empty());
}

#[tokio::test]
async fn the_last_lines_are_copied_after_the_end() {
    let place = Place::new();
    let (ctx, handles) = Context::for_test();
    let (service, tree) = (Service { data: place.data.clone() }, ctx.logs().clone());
    let ends = async {
        while !handles.is_healthy() {
            tokio::task::yield_now().await;
        }
        place.write(&format!("{}{{}}\n", lines([1], 200)));
        handles.cancel().await;
    };
    let (ended, ()) = tokio::join!(service.run(ctx), ends);
    ended.unwrap();
    let counts = "kubernetes: more requests are in the file of this controller alone \
                  done=0 accounts=0 refused=0 unreadable=1";
    assert_eq!(ids(&tree), ["1", counts]);
}
