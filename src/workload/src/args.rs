//! The command lines of the API server, the controller manager and the scheduler. Pure.
//!
//! What this module does not do: touch files or processes (`component`).

use std::net::IpAddr;
use std::path::Path;

use super::credentials::{self, Purpose};
use super::site::Site;
use polis_base::files::{File, Pair};

/// How long etcd may take to answer a health check: it shares its disk with everything else.
const ETCD_PATIENCE: &str = "10s";

/// Megabytes of one audit log, how many of them are kept, and for how many days.
const AUDIT_SIZE: u32 = 16;
const AUDIT_FILES: u32 = 4;
const AUDIT_DAYS: u32 = 30;

/// A command line in the making.
struct Flags(Vec<String>);

impl Flags {
    fn add(&mut self, name: &str, value: impl std::fmt::Display) {
        self.0.push(format!("--{name}={value}"));
    }

    fn file(&mut self, name: &str, file: &File) {
        self.path(name, file.path());
    }

    fn path(&mut self, name: &str, path: &Path) {
        self.add(name, path.display());
    }

    fn pair(&mut self, certificate: &str, key: &str, pair: &Pair) {
        self.file(certificate, &pair.certificate);
        self.file(key, &pair.key);
    }
}

/// How long a leader among controller managers, or schedulers, leads without renewal: the
/// time until another controller takes over from a dead one. The program ends when it loses
/// its lease, so the default of 15 seconds makes every slow moment of an API server or a
/// disk a restart of both.
const LEASE: &str = "60s";
/// How long it tries to renew.
const RENEW: &str = "40s";
/// Between two tries.
const RETRY: &str = "5s";

/// The arguments of kube-apiserver; `advertise` is the address of the node.
pub(super) fn api_server(site: &Site, advertise: IpAddr) -> Vec<String> {
    let run = &site.run;
    let pair = |purpose: Purpose| purpose.pair(&site.data);
    let mut flags = Flags(Vec::new());

    flags.add("advertise-address", advertise);
    flags.add("bind-address", site.listen.ip());
    flags.add("secure-port", site.listen.port());
    flags.add("etcd-servers", format_args!("unix://{}", site.etcd.display()));
    flags.add("etcd-healthcheck-timeout", ETCD_PATIENCE);
    flags.add("etcd-readycheck-timeout", ETCD_PATIENCE);
    // etcd 3.5 does not know the call, and the server would ask for it again and again.
    flags.add("feature-gates", "EtcdRangeStream=false");

    flags.pair("tls-cert-file", "tls-private-key-file", &pair(Purpose::ApiServer));
    flags.add("tls-min-version", "VersionTLS13");
    flags.file("client-ca-file", &run.ca);
    flags.file("authentication-config", &run.authentication);
    flags.add("authorization-mode", "Node,RBAC");
    // Without it, a user who may make Services in one namespace could take over an external
    // address on every worker.
    flags.add("enable-admission-plugins", "NodeRestriction,DenyServiceExternalIPs");
    flags.file("admission-control-config-file", &run.admission);
    flags.file("encryption-provider-config", &run.encryption);
    flags.add("allow-privileged", true);

    flags.file("audit-policy-file", &run.audit_policy);
    flags.path("audit-log-path", &site.data.audit_log());
    flags.add("audit-log-maxsize", AUDIT_SIZE);
    flags.add("audit-log-maxbackup", AUDIT_FILES);
    flags.add("audit-log-maxage", AUDIT_DAYS);

    flags.file("kubelet-certificate-authority", &run.ca);
    let kubelet = pair(Purpose::KubeletClient);
    flags.pair("kubelet-client-certificate", "kubelet-client-key", &kubelet);
    // A kubelet's certificate names the node, whose address may change.
    flags.add("kubelet-preferred-address-types", "Hostname,InternalIP");

    // Proxies that name the user; and what the server itself shows as one, to servers of
    // aggregated APIs.
    flags.file("requestheader-client-ca-file", &run.front_proxy_ca);
    flags.add("requestheader-allowed-names", credentials::FRONT_PROXIES.join(","));
    flags.add("requestheader-username-headers", "X-Remote-User");
    flags.add("requestheader-group-headers", "X-Remote-Group");
    flags.add("requestheader-extra-headers-prefix", "X-Remote-Extra-");
    flags.pair("proxy-client-cert-file", "proxy-client-key-file", &pair(Purpose::FrontProxy));
    // Services of aggregated APIs and webhooks are reached at their pods.
    flags.add("enable-aggregator-routing", true);

    let issuer = format!("https://kubernetes.default.svc.{}", site.domain());
    // Its default names the node's address, which the server's certificate does not.
    flags.add("service-account-jwks-uri", format_args!("{issuer}/openid/v1/jwks"));
    flags.add("service-account-issuer", issuer);
    // The keys may change, and it would read files at its start only.
    flags.path("service-account-signing-endpoint", run.tokens.client());
    // Kubernetes would make the tokens of pods valid for a year, for clients of before 2021.
    flags.add("service-account-extend-token-expiration", false);
    flags.add("service-cluster-ip-range", site.networks.services);
    flags.add("profiling", false);
    flags.0
}

/// The arguments of kube-controller-manager.
pub(super) fn controller_manager(site: &Site) -> Vec<String> {
    let mut flags = Flags(Vec::new());
    let server = Purpose::ControllerManagerServer.pair(&site.data);
    let address = site.controller_manager();
    component(&mut flags, site, &site.run.controller_manager, &server, address);
    flags.file("root-ca-file", &site.run.ca);
    flags.file("service-account-private-key-file", &site.run.service_account_key);
    flags.add("use-service-account-credentials", true);
    // The prefixes of pods are in the node records.
    flags.add("allocate-node-cidrs", false);
    // It would need the authority's private key.
    flags.add("controllers", "*,-certificatesigningrequest-signing-controller");
    // The default is below /usr, where it cannot make it, and kubelet's own is there on workers
    // only. No plugin is ever put there.
    flags.path("flex-volume-plugin-dir", site.run.flexvolume.path());
    flags.0
}

/// The arguments of kube-scheduler.
pub(super) fn scheduler(site: &Site) -> Vec<String> {
    let mut flags = Flags(Vec::new());
    let server = Purpose::SchedulerServer.pair(&site.data);
    component(&mut flags, site, &site.run.scheduler, &server, site.scheduler());
    flags.0
}

/// The options that the controller manager and the scheduler have in common.
fn component(
    flags: &mut Flags,
    site: &Site,
    kubeconfig: &File,
    server: &Pair,
    address: std::net::SocketAddr,
) {
    for name in ["kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig"] {
        flags.file(name, kubeconfig);
    }
    flags.add("bind-address", address.ip());
    flags.add("secure-port", address.port());
    flags.pair("tls-cert-file", "tls-private-key-file", server);
    flags.add("tls-min-version", "VersionTLS13");
    flags.file("client-ca-file", &site.run.ca);
    flags.file("requestheader-client-ca-file", &site.run.front_proxy_ca);
    flags.add("leader-elect", true);
    flags.add("leader-elect-lease-duration", LEASE);
    flags.add("leader-elect-renew-deadline", RENEW);
    flags.add("leader-elect-retry-period", RETRY);
    flags.add("profiling", false);
}

#[cfg(test)]
mod tests {
    use super::super::site::{live, with_networks};
    use super::*;

    fn shown(args: &[String]) -> String {
        args.join("\n")
    }

    #[test]
    fn the_api_server_uses_the_local_etcd_and_takes_users_from_certificates_and_proxies() {
        insta::assert_snapshot!(shown(&api_server(&live(), [192, 0, 2, 7].into())));
    }

    #[test]
    fn services_have_the_network_of_the_cluster() {
        let of = |site: &Site| api_server(site, [192, 0, 2, 7].into());
        let (default, own) = (of(&live()), of(&with_networks()));
        let changed: Vec<_> = own.iter().filter(|flag| !default.contains(*flag)).collect();
        assert_eq!(changed, ["--service-cluster-ip-range=172.24.0.0/16"]);
    }

    #[test]
    fn the_controller_manager_has_no_key_of_an_authority() {
        insta::assert_snapshot!(shown(&controller_manager(&live())));
    }

    #[test]
    fn the_scheduler_listens_on_loopback() {
        insta::assert_snapshot!(shown(&scheduler(&live())));
    }
}
