//! Tests of the Workloads page.

use super::*;
use crate::snapshot::{PartState, PodState, Workloads};
use crate::theme::Mark;

/// An ordinary day with other workloads.
fn with(workloads: Option<Workloads>) -> Snapshot {
    Snapshot { workloads, ..samples::ordinary() }
}

fn page(snapshot: &Snapshot, columns: u16, rows: u16) -> String {
    screen(snapshot, &view(Page::Workloads, columns, rows), columns, rows)
}

#[test]
fn a_node_without_a_role_is_calm_and_names_the_command() {
    let snapshot = samples::ordinary();
    let (mark, _) = Page::Workloads.answer(&snapshot).unwrap();
    assert_eq!(mark, Mark::Idle);
    let shown = page(&snapshot, 80, 24);
    for role in ["kubernetes-controller", "kubernetes-worker"] {
        let command = format!("► polisctl node roles polis-8e9e05c5 --add {role}");
        assert!(shown.contains(&command), "{shown}");
    }
    // Where the cluster has a controller, another one is not the first step.
    let mut snapshot = samples::worker();
    snapshot.workloads = Some(Workloads::default());
    let shown = page(&snapshot, 80, 24);
    assert!(!shown.contains("kubernetes-controller"), "{shown}");
    assert!(shown.contains("--add kubernetes-worker"), "{shown}");
    let boot = screen(&snapshot, &view(Page::Boot, 80, 24), 80, 24);
    assert!(!boot.contains("Workloads F8"), "{boot}");
}

#[test]
fn an_image_that_cannot_carry_the_role_is_named_with_both_ways_out() {
    let snapshot = with(Some(samples::workloads::unfit()));
    let (mark, answer) = Page::Workloads.answer(&snapshot).unwrap();
    assert_eq!(
        (mark, &*answer),
        (Mark::Bad, "This node cannot serve its role: Kubernetes worker.")
    );
    insta::assert_snapshot!("workloads-unfit-80x24", page(&snapshot, 80, 24));
}

#[test]
fn an_ordinary_node_with_a_role_has_no_scroll_bar_on_its_first_page() {
    let workloads = samples::worker().workloads;
    let boot = screen(&with(workloads), &view(Page::Boot, 80, 24), 80, 24);
    assert!(boot.contains("Workloads F8 Serves: all 4 parts are ready."), "{boot}");
    let last = |row: &str| row.trim_matches('"').chars().last();
    let body = boot.lines().skip(3).take(20).collect::<Vec<_>>();
    assert!(body.iter().all(|row| last(row) == Some(' ')), "{boot}");
}

#[test]
fn the_answer_is_the_worst_of_parts_quotas_and_pods() {
    let answer = |change: &dyn Fn(&mut Workloads)| {
        let mut workloads = samples::worker().workloads.unwrap();
        change(&mut workloads);
        Page::Workloads.answer(&with(Some(workloads))).unwrap()
    };
    let good = "Serves: all 4 parts are ready. 5 pods, all well.";
    assert_eq!(answer(&|_| {}), (Mark::Good, good.to_owned()));
    let (mark, text) = answer(&|it| it.parts[1].state = PartState::Starting);
    assert_eq!(mark, Mark::Busy);
    assert!(text.starts_with("Starting: 3 of 4 parts ready, waiting for kubelet."), "{text}");
    let (mark, text) = answer(&|it| it.waits.push("a network for pods".to_owned()));
    assert_eq!(mark, Mark::Busy, "parts that are ready can wait too: {text}");
    assert!(text.contains("waiting for a network for pods"), "{text}");
    let (mark, text) = answer(&|it| it.parts[2].state = PartState::Failed);
    assert_eq!(mark, Mark::Bad);
    assert!(text.starts_with("1 of 4 parts has failed: kube-proxy."), "{text}");
    let unwell = |it: &mut Workloads| it.pods.as_mut().unwrap().pods[3].state = PodState::CrashLoop;
    let (mark, text) = answer(&unwell);
    assert_eq!(mark, Mark::Attention, "the node itself serves");
    assert!(text.ends_with("1 of 5 pods is not well: web/search-0."), "{text}");
    let full = |percent: u64| {
        answer(&move |it: &mut Workloads| {
            it.quotas[0].used = it.quotas[0].limit.div_ceil(100) * percent;
        })
    };
    let of_files = answer(&|it| it.quotas[0].files = it.quotas[0].files_limit);
    assert_eq!([full(84).0, full(86).0, full(96).0], [Mark::Good, Mark::Attention, Mark::Bad]);
    assert!(full(96).1.contains("The quota of pods, images, logs is 96 % full."));
    assert_eq!(of_files.0, Mark::Bad, "without files left, nothing can be written either");
}

#[test]
fn each_unwell_pod_has_its_reason_and_comes_before_those_that_are_well() {
    let shown = page(&samples::failing(), 120, 40);
    let at = |text: &str| shown.find(text).unwrap_or_else(|| panic!("no {text:?} on\n{shown}"));
    let well = at("kube-system/dns-9xk2p");
    for reason in [
        "└ container app: Error, exit status 1",
        "└ container indexer: OOMKilled, exit status 137",
        "└ no container has started",
        "└ the scheduler ended with status 1",
    ] {
        assert!(at(reason) < well, "{reason:?} is below\n{shown}");
    }
}

#[test]
fn pods_that_are_not_known_are_not_left_out_in_silence() {
    let mut workloads = samples::worker().workloads.unwrap();
    workloads.pods = None;
    let unlisted = "The pods are not known: containerd has not listed them.";
    let shown = page(&with(Some(workloads.clone())), 80, 24);
    assert!(shown.contains(unlisted), "{shown}");
    // A node that is to run none, or that cannot, has none to list.
    let controller = vec!["Kubernetes controller".to_owned()];
    let controller = with(Some(Workloads { roles: controller, ..workloads }));
    for snapshot in [controller, with(Some(samples::workloads::unfit()))] {
        assert!(!page(&snapshot, 80, 24).contains("not known"), "{:?}", snapshot.workloads);
    }
}

#[test]
fn a_condition_that_is_too_long_for_the_answer_is_whole_below_it() {
    let mut workloads = samples::worker().workloads.unwrap();
    let short = "a network for pods: no agent has written one".to_owned();
    workloads.waits = vec![short.clone()];
    let shown = page(&with(Some(workloads.clone())), 240, 67);
    assert_eq!(shown.matches(&short).count(), 1, "{shown}");
    let long = format!("a network for pods: {} and that was the reason", "a word ".repeat(14));
    workloads.waits = vec![long.clone()];
    let shown = page(&with(Some(workloads)), 240, 67);
    assert!(shown.contains(&format!("► Waiting for {long}.")), "{shown}");
}

#[test]
fn pods_that_are_left_out_are_counted() {
    let mut workloads = samples::worker().workloads.unwrap();
    workloads.pods.as_mut().unwrap().total = 1_250;
    let shown = page(&with(Some(workloads)), 120, 40);
    assert!(shown.contains("1,245 more: `kubectl get pods --all-namespaces`"), "{shown}");
}

#[test]
fn pods_that_are_left_out_of_a_list_without_a_well_one_are_not_called_well() {
    let mut workloads = samples::worker().workloads.unwrap();
    let pods = workloads.pods.as_mut().unwrap();
    pods.total = 500;
    pods.pods.iter_mut().for_each(|pod| pod.state = PodState::Waiting);
    let of =
        |workloads: &Workloads| Page::Workloads.answer(&with(Some(workloads.clone()))).unwrap().1;
    let text = of(&workloads);
    assert!(text.contains(" At least 5 of 500 pods are not well: "), "{text}");
    // Behind one that is well there is none that is not.
    workloads.pods.as_mut().unwrap().pods[4].state = PodState::Running;
    let text = of(&workloads);
    assert!(text.contains(" 4 of 500 pods are not well: "), "{text}");
    assert!(!text.contains("At least"), "{text}");
}
