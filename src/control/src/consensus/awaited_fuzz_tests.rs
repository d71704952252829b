//! Fuzz target of the durations in the log of etcd.

use polis_fuzz::Target;

use super::go_duration;

#[test]
fn durations_of_etcd() {
    Target::new("control.etcd_durations")
        .samples(["1.5s", "2m3s", "1h0m0.5s"])
        .length_max(128)
        .run(|input| go_duration(&String::from_utf8_lossy(input)).is_some().into());
}
