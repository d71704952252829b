//! The authorities of Kubernetes are rotated under programs that go on running.

use std::sync::Arc;
use std::time::Duration;

use base64ct::{Base64UrlUnpadded, Encoding as _};
use ed25519_dalek::SigningKey;
use polis_base::files::{Group, Pair};
use polis_base::sys::clock;
use polis_control::consensus::client::{Client, User};
use polis_tests::{Story, story};
use polis_wire::pki::{
    Authorities, Certificate, KeySet, Namespace, Pin, ServiceAccounts, Turn, WorkerPurpose,
    certificate_pem, front_proxy_authority, key_pem, kubernetes_authority,
};
use polis_wire::rpc::testing::node_id;
use polis_workload::{Api, Part};
use serde_json::{Value, json};

use crate::access::of_an_owner;
use crate::certificates::shown;
use crate::world::{Controller, wait_until};

/// The stories of this file.
pub(crate) const STORIES: &[Story] =
    &[story!(threads other_authorities_sign_and_the_former_ones_end).takes(120)];

/// An API server reads its files again after a minute at the latest.
const PATIENCE: Duration = Duration::from_secs(180);

/// What every caller with a certificate may ask.
const ANYBODY: &str = "/api";
/// What pods trust.
const OF_PODS: &str = "/api/v1/namespaces/default/configmaps/kube-root-ca.crt";

/// Where a token is made, and where one is looked at.
const TOKENS: &str = "/api/v1/namespaces/default/serviceaccounts/default/token";
const REVIEWS: &str = "/apis/authentication.k8s.io/v1/tokenreviews";

/// What servers of aggregated APIs trust.
const OF_SERVERS: &str =
    "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication";

async fn other_authorities_sign_and_the_former_ones_end() {
    let controller = Controller::ready().await;
    let pki = Namespace::new(user(&controller), "");
    let authorities = [kubernetes_authority(), front_proxy_authority()];
    let [first, _] = known(&pki).await;

    // A part of a worker that was switched off before, and one that trusts the first authority.
    let former = controller.worker(WorkerPurpose::Kubelet, node_id(7)).await;
    let files = controller.site.data.pair("former", Group::Root);
    files.certificate.write(certificate_pem(&first.signing).as_bytes()).unwrap();
    let trusting =
        Api { ca: files.certificate.clone(), ..controller.api(WorkerPurpose::Kubelet.name()) };
    assert_eq!(status(&former).await, 200);
    let token = token(&controller).await;
    let pids = [Part::ApiServer, Part::Scheduler].map(|part| controller.pid(part));
    let manager = controller.pid(Part::ControllerManager);

    let tokens = ServiceAccounts::new(user(&controller), "");
    assert_eq!(tokens.rotate(1, clock::now()).await.unwrap(), Turn::Listed);
    assert_eq!(key_of(&self::token(&controller).await), key_of(&token), "it is listed alone");
    let listed = clock::now() + KeySet::LISTED;
    assert_eq!(tokens.rotate(1, listed).await.unwrap(), Turn::Begins);
    let next_token = self::token(&controller).await;
    assert_ne!(key_of(&next_token), key_of(&token), "the next key signs at once");
    for token in [&token, &next_token] {
        assert!(is_good(&controller, token).await, "both keys verify");
    }
    until("the controller manager signs with the next key, too", async || {
        controller.find(Part::ControllerManager).is_some_and(|pid| pid != manager)
    })
    .await;

    for authority in &authorities {
        assert!(pki.rotate(authority, 1, clock::now()).await.unwrap());
    }
    let [both, proxies] = known(&pki).await;
    until("the API server shows a certificate of the next authority", async || {
        shown(&controller, controller.site.api()).await.is_some_and(|der| both.signed(&der))
    })
    .await;
    assert_eq!(status(&former).await, 200, "it has not followed yet");
    assert_eq!(status(&trusting).await, 200, "the bridge leads to the next authority");
    assert_eq!(of_an_owner(&controller).await, 200);
    let follower = follows(&controller, &pki).await;
    assert_eq!(status(&follower).await, 200);
    // Every part of the node has followed.
    until("no certificate of a controller is of the first", async || {
        let mut kept = pki.kept_by_holders(&authorities[0], clock::now()).await.unwrap();
        kept.extend(pki.kept_by_holders(&authorities[1], clock::now()).await.unwrap());
        kept.iter().all(|kept| kept.issued.is_some() || kept.name.starts_with("kubelet"))
    })
    .await;
    assert_eq!((both.rotations, proxies.rotations), (1, 1));

    let manager = controller.pid(Part::ControllerManager);
    assert!(tokens.conclude().await.unwrap());
    for authority in &authorities {
        assert!(pki.conclude(authority, Pin::None).await.unwrap());
    }
    let [last, _] = known(&pki).await;
    until("the first authority opens nothing", async || status(&former).await == 401).await;
    until("the former key verifies no token", async || !is_good(&controller, &token).await).await;
    assert!(is_good(&controller, &next_token).await);
    until("pods trust the next one alone", async || {
        of_pods(&controller).await == last.trusted_pem()
    })
    .await;
    until("servers of aggregated APIs trust the next ones alone", async || {
        let text = of(&controller, OF_SERVERS).await.to_string();
        let pem = |der: &[u8]| certificate_pem(der).replace('\n', "\\n");
        text.contains(&pem(&last.signing)) && !text.contains(&pem(&first.signing))
    })
    .await;
    assert_eq!(status(&follower).await, 200);
    assert_eq!(of_an_owner(&controller).await, 200);
    let now = [Part::ApiServer, Part::Scheduler].map(|part| controller.pid(part));
    assert_eq!(now, pids, "they read their files again");
    assert_ne!(controller.pid(Part::ControllerManager), manager, "it reads them at its start");
    controller.stop().await;
}

/// The keys of Kubernetes in etcd.
fn user(controller: &Controller) -> Client {
    controller.etcd.status.borrow().voter().unwrap().user(User::KubernetesPki)
}

/// A token of the service account of pods that name none.
async fn token(controller: &Controller) -> String {
    let wish =
        json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}});
    let answer = controller.create(TOKENS, &wish).await;
    assert_eq!(answer.status, 201, "{answer:?}");
    let made: Value = serde_json::from_slice(&answer.body).unwrap();
    made["status"]["token"].as_str().unwrap().to_owned()
}

/// The name of the key that signed a token, in its header.
fn key_of(token: &str) -> String {
    let header = Base64UrlUnpadded::decode_vec(token.split('.').next().unwrap()).unwrap();
    let header: Value = serde_json::from_slice(&header).unwrap();
    header["kid"].as_str().unwrap().to_owned()
}

/// Whether the API server takes a token.
async fn is_good(controller: &Controller, token: &str) -> bool {
    let review = json!({
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenReview",
        "spec": { "token": token },
    });
    let answer = controller.create(REVIEWS, &review).await;
    let reviewed: Value = serde_json::from_slice(&answer.body).unwrap();
    reviewed["status"]["authenticated"] == true
}

async fn known(pki: &Namespace<Client>) -> [Authorities; 2] {
    let of =
        async |authority: Arc<Certificate>| pki.authorities(&authority).await.unwrap().unwrap();
    [of(kubernetes_authority()).await, of(front_proxy_authority()).await]
}

/// The answer to a question that every caller with a certificate may ask.
async fn status(api: &Api) -> u16 {
    api.get(ANYBODY).await.unwrap().status
}

/// A part of another worker that has a certificate of the authority that signs.
async fn follows(controller: &Controller, pki: &Namespace<Client>) -> Api {
    let key = SigningKey::from_bytes(&[42; 32]);
    let public = key.verifying_key().to_bytes();
    let wish = WorkerPurpose::KubeProxy.certificate(node_id(8), None, public);
    let issued = pki.ensure(&wish, clock::now()).await.unwrap();
    let Pair { key: key_file, certificate } = controller.site.data.pair("follower", Group::Root);
    let [known, _] = known(pki).await;
    certificate.write(&known.chain_pem(&issued.der)).unwrap();
    key_file.write(key_pem(&key).as_bytes()).unwrap();
    controller.api("follower")
}

/// What the API server has for pods.
async fn of_pods(controller: &Controller) -> Vec<u8> {
    of(controller, OF_PODS).await["ca.crt"].as_str().unwrap_or_default().as_bytes().to_vec()
}

/// The values of a ConfigMap.
async fn of(controller: &Controller, path: &str) -> Value {
    let Ok(answer) = controller.master().get(path).await else { return Value::Null };
    let map: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    map["data"].clone()
}

/// Asks until it is so.
async fn until(what: &str, so: impl AsyncFn() -> bool) {
    wait_until(PATIENCE, what, so).await;
}
