//! The certificates of a controller: their names, issuers, subjects and hosts. Pure.
//!
//! Both authorities and the service-account key have their private halves in etcd; every
//! other key stays on its node.

use std::net::Ipv4Addr;
use std::sync::Arc;

use super::site::Site;
use polis_base::files::{Group, Kubernetes, Pair};
use polis_wire::identity::NodeId;
use polis_wire::pki::{self, Certificate, Host, Issuer, KubernetesSubject, Mode, Template};

/// The common name of the API server as a client of servers of aggregated APIs.
const FRONT_PROXY: &str = "front-proxy-client";

/// The common name of the proxy for users of Polis.
const AUTH_PROXY: &str = "polis-auth-proxy";

/// The common names of the proxies that the API servers accept user names from.
pub(super) const FRONT_PROXIES: [&str; 2] = [FRONT_PROXY, AUTH_PROXY];

/// The common name of the API server as a client of kubelets.
pub(super) const KUBELET_CLIENT: &str = "polis:apiserver-kubelet-client";

/// The name of this node as the one that applies the cluster's own objects.
pub(super) const RECONCILER: &str = "polis:reconciler";

/// The group to which Kubernetes grants everything.
pub(super) const MASTERS: &str = "system:masters";

/// The purpose of one certificate of a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The API server serves with it.
    ApiServer,
    /// The API server calls kubelets with it.
    KubeletClient,
    /// The controller manager calls the API server with it.
    ControllerManager,
    /// The controller manager serves its health with it.
    ControllerManagerServer,
    /// The scheduler calls the API server with it.
    Scheduler,
    /// The scheduler serves its health with it.
    SchedulerServer,
    /// This node applies the cluster's own objects with it.
    Reconciler,
    /// The API server calls servers of aggregated APIs with it.
    FrontProxy,
    /// The proxy for users of Polis calls the API server with it.
    AuthProxy,
}

impl Purpose {
    /// All of them.
    pub(super) const ALL: [Self; 9] = [
        Self::ApiServer,
        Self::KubeletClient,
        Self::ControllerManager,
        Self::ControllerManagerServer,
        Self::Scheduler,
        Self::SchedulerServer,
        Self::Reconciler,
        Self::FrontProxy,
        Self::AuthProxy,
    ];

    /// The name of its files, and the beginning of its name in etcd.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::ApiServer => "apiserver",
            Self::KubeletClient => "apiserver-kubelet",
            Self::ControllerManager => "controller-manager",
            Self::ControllerManagerServer => "controller-manager-server",
            Self::Scheduler => "scheduler",
            Self::SchedulerServer => "scheduler-server",
            Self::Reconciler => "reconciler",
            Self::FrontProxy => "front-proxy",
            Self::AuthProxy => "auth-proxy",
        }
    }

    /// The group of the program that reads its files; root's where the node itself does.
    fn group(self) -> Group {
        match self {
            Self::ApiServer | Self::KubeletClient | Self::FrontProxy => Group::ApiServer,
            Self::ControllerManager | Self::ControllerManagerServer => Group::ControllerManager,
            Self::Scheduler | Self::SchedulerServer => Group::Scheduler,
            Self::Reconciler | Self::AuthProxy => Group::Root,
        }
    }

    /// Its files.
    pub(super) fn pair(self, data: &Kubernetes) -> Pair {
        data.pair(self.name(), self.group())
    }

    /// The authority that signs it.
    pub(super) fn authority(self) -> Arc<Certificate> {
        match self {
            Self::FrontProxy | Self::AuthProxy => front_proxy_authority(),
            Self::ApiServer
            | Self::KubeletClient
            | Self::ControllerManager
            | Self::ControllerManagerServer
            | Self::Scheduler
            | Self::SchedulerServer
            | Self::Reconciler => authority(),
        }
    }

    fn template(self, site: &Site, node: NodeId, names: &[Host]) -> Template {
        let client = |user| Template::KubernetesClient { subject: subject(user, None) };
        let server =
            |user, hosts| Template::KubernetesServer { subject: subject(user, None), hosts };
        let local = || vec![name("localhost"), Host::Address(site.loopback)];
        match self {
            Self::ApiServer => server("kube-apiserver", api_hosts(site, node, names)),
            Self::KubeletClient => client(KUBELET_CLIENT),
            Self::ControllerManager => client("system:kube-controller-manager"),
            Self::ControllerManagerServer => server("kube-controller-manager", local()),
            Self::Scheduler => client("system:kube-scheduler"),
            Self::SchedulerServer => server("kube-scheduler", local()),
            Self::Reconciler => {
                Template::KubernetesClient { subject: subject(RECONCILER, Some(MASTERS)) }
            }
            Self::FrontProxy => client(FRONT_PROXY),
            Self::AuthProxy => client(AUTH_PROXY),
        }
    }

    /// The certificate for the key with this public half; that of the API server has the `names`
    /// of the cluster's configuration.
    pub(super) fn wish(
        self,
        site: &Site,
        node: NodeId,
        names: &[Host],
        public: [u8; 32],
    ) -> Certificate {
        Certificate {
            issuer: Issuer::Authority(self.authority()),
            name: Site::certificate_name(self.name(), node),
            template: self.template(site, node, names),
            mode: Mode::External(public),
        }
    }
}

/// The authority of Kubernetes' own components.
pub(super) fn authority() -> Arc<Certificate> {
    pki::kubernetes_authority()
}

/// The authority of the proxies that name a user.
pub(super) fn front_proxy_authority() -> Arc<Certificate> {
    pki::front_proxy_authority()
}

fn subject(user: &str, group: Option<&str>) -> KubernetesSubject {
    KubernetesSubject { user: user.to_owned(), group: group.map(str::to_owned) }
}

fn name(name: &str) -> Host {
    Host::Name(name.to_owned())
}

/// The names and addresses of the API server: of its Service, of its node, of this machine, and
/// those that the cluster's configuration gives it. The node's own address is not among them,
/// because it may change.
fn api_hosts(site: &Site, node: NodeId, names: &[Host]) -> Vec<Host> {
    let service = "kubernetes.default.svc";
    let mut hosts = vec![
        name("kubernetes"),
        name("kubernetes.default"),
        name(service),
        Host::Name(format!("{service}.{}", site.domain())),
        name("localhost"),
        Host::Name(node.to_string()),
        Host::Address(Ipv4Addr::LOCALHOST.into()),
        Host::Address(site.networks.first_service().into()),
    ];
    for host in [&Host::Address(site.loopback)].into_iter().chain(names) {
        if !hosts.contains(host) {
            hosts.push(host.clone());
        }
    }
    hosts
}

#[cfg(test)]
mod tests {
    use super::super::site::{live, with_networks};
    use super::*;

    #[test]
    fn each_certificate_has_its_subject_and_hosts() {
        let node = NodeId::from_public_key(&[7; 32]);
        let lines: Vec<_> = Purpose::ALL
            .into_iter()
            .map(|purpose| {
                let wish = purpose.wish(&live(), node, &[], [1; 32]);
                let signer = purpose.authority().name.clone();
                let (kind, subject, hosts) = match &wish.template {
                    Template::KubernetesServer { subject, hosts } => {
                        ("serves", subject, &hosts[..])
                    }
                    Template::KubernetesClient { subject } => ("calls", subject, &[][..]),
                    other => panic!("{other:?}"),
                };
                let group = subject.group.as_deref().unwrap_or("-");
                let hosts: Vec<_> = hosts.iter().map(ToString::to_string).collect();
                format!(
                    "{} {signer} {kind} {} {group} {}",
                    wish.name,
                    subject.user,
                    hosts.join(",")
                )
            })
            .collect();
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[test]
    fn the_names_of_the_cluster_are_in_the_certificate_of_the_api_server_alone() {
        let node = NodeId::from_public_key(&[7; 32]);
        // One that it has already, and two others.
        let own = [name("api.example"), Host::Address([192, 0, 2, 10].into())];
        let names = [&[name("localhost")][..], &own].concat();
        for purpose in Purpose::ALL {
            let plain = purpose.template(&live(), node, &[]);
            let named = purpose.template(&live(), node, &names);
            if purpose != Purpose::ApiServer {
                assert_eq!(named, plain, "{purpose:?}");
                continue;
            }
            let (
                Template::KubernetesServer { hosts: named, .. },
                Template::KubernetesServer { hosts: plain, .. },
            ) = (named, plain)
            else {
                panic!("{purpose:?}")
            };
            assert_eq!(named, [plain, own.to_vec()].concat());
        }
    }

    #[test]
    fn the_api_server_has_the_first_address_of_the_services_of_the_cluster() {
        let node = NodeId::from_public_key(&[7; 32]);
        let template = Purpose::ApiServer.template(&with_networks(), node, &[]);
        let Template::KubernetesServer { hosts, .. } = template else { panic!("{template:?}") };
        assert!(hosts.contains(&Host::Address([172, 24, 0, 1].into())), "{hosts:?}");
        assert!(!hosts.contains(&Host::Address([10, 224, 0, 1].into())), "{hosts:?}");
    }

    #[test]
    fn only_the_reconciler_has_the_group_of_masters() {
        let node = NodeId::from_public_key(&[7; 32]);
        for purpose in Purpose::ALL {
            let template = purpose.template(&live(), node, &[]);
            let masters = format!("{template:?}").contains(MASTERS);
            assert_eq!(masters, purpose == Purpose::Reconciler, "{purpose:?}");
        }
    }
}
