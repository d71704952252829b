package main

import (
	"context"
	"net"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	informers "k8s.io/client-go/informers/networking/v1"
	listers "k8s.io/client-go/listers/networking/v1"
	"k8s.io/client-go/tools/cache"
	"sigs.k8s.io/kube-network-policies/pkg/api"
	"sigs.k8s.io/kube-network-policies/pkg/network"
	"sigs.k8s.io/kube-network-policies/pkg/podinfo"
)

// The networks that one node can have: each address is an element of a set of nftables.
const (
	widest    = 20
	narrowest = 30
)

// namePort is where a name server answers, by UDP and TCP.
const namePort = 53

// boundary is the first evaluator: it decides about addresses of this node's pods that no pod
// is known for, and about the name server of the node.
type boundary struct {
	pods       netip.Prefix
	nameServer netip.Addr
	policies   listers.NetworkPolicyLister
	informer   cache.SharedIndexInformer
}

var _ api.PolicyEvaluator = &boundary{}

func newBoundary(pods netip.Prefix, nameServer netip.Addr, policies informers.NetworkPolicyInformer) *boundary {
	return &boundary{
		pods:       pods.Masked(),
		nameServer: nameServer,
		policies:   policies.Lister(),
		informer:   policies.Informer(),
	}
}

func (b *boundary) Name() string { return "Boundary" }

func (b *boundary) Ready() bool { return b.informer.HasSynced() }

// SetDataplaneSyncCallback has the rules made again when the first policy comes and when the
// last one goes. It is called before the informer starts.
func (b *boundary) SetDataplaneSyncCallback(sync api.SyncFunc) {
	_, _ = b.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { sync() },
		DeleteFunc: func(any) { sync() },
	})
}

// ManagedIPs are all addresses that a pod of this node can have, if there is a policy: a
// cluster without one sends no packet here.
func (b *boundary) ManagedIPs(context.Context) ([]netip.Addr, bool, error) {
	policies, err := b.policies.List(labels.Everything())
	if err != nil || len(policies) == 0 {
		return nil, false, err
	}
	var all []netip.Addr
	for ip := b.pods.Addr(); b.pods.Contains(ip); ip = ip.Next() {
		if b.isPod(ip) {
			all = append(all, ip)
		}
	}
	return all, false, nil
}

// EvaluateEgress lets every pod ask for names, also one that is not known yet, and drops what
// such a pod sends elsewhere.
func (b *boundary) EvaluateEgress(_ context.Context, p *network.Packet, from, _ *api.PodInfo) (api.Verdict, error) {
	// Other programs of the node answer at that address, too, at other ports.
	to, ok := netip.AddrFromSlice(p.DstIP)
	if ok && to.Unmap() == b.nameServer && p.DstPort == namePort {
		return api.VerdictAccept, nil
	}
	if from == nil && b.isPodIP(p.SrcIP) {
		return api.VerdictDeny, nil
	}
	return api.VerdictNext, nil
}

// EvaluateIngress drops what is sent to a pod that is not known yet.
func (b *boundary) EvaluateIngress(_ context.Context, p *network.Packet, _, to *api.PodInfo) (api.Verdict, error) {
	if to == nil && b.isPodIP(p.DstIP) {
		return api.VerdictDeny, nil
	}
	return api.VerdictNext, nil
}

func (b *boundary) isPodIP(ip net.IP) bool {
	address, ok := netip.AddrFromSlice(ip)
	return ok && b.isPod(address.Unmap())
}

// isPod says whether a pod of this node can have the address: all of the network but the first
// one, the second one, which is the node's own, and the last one.
func (b *boundary) isPod(ip netip.Addr) bool {
	first := b.pods.Addr()
	return b.pods.Contains(ip) && ip != first && ip != first.Next() && b.pods.Contains(ip.Next())
}

// resolver finds the pod with an address. A pod that has ended keeps its address in the API
// while another one may have it already, so it is not found.
type resolver struct {
	pods cache.Indexer
}

var _ podinfo.IPResolver = resolver{}

func (r resolver) LookupPod(ip string) (string, bool) {
	found, err := r.pods.ByIndex(podinfo.PodIPIndex, ip)
	if err != nil {
		return "", false
	}
	for _, object := range found {
		pod, ok := object.(*v1.Pod)
		if !ok || pod.Status.Phase == v1.PodSucceeded || pod.Status.Phase == v1.PodFailed {
			continue
		}
		if key, err := cache.MetaNamespaceKeyFunc(pod); err == nil {
			return key, true
		}
	}
	return "", false
}

// trimmed saves memory, since this process keeps every pod of the cluster: of a pod it leaves what
// the packages of kube-network-policies, the informer and this file read. Of another object it
// removes the managed fields, which nothing here reads.
func trimmed(object any) (any, error) {
	pod, ok := object.(*v1.Pod)
	if !ok {
		if accessor, err := meta.Accessor(object); err == nil {
			accessor.SetManagedFields(nil)
		}
		return object, nil
	}
	// A policy looks up a named port among these.
	var containers []v1.Container
	for i := range pod.Spec.Containers {
		if ports := pod.Spec.Containers[i].Ports; len(ports) > 0 {
			containers = append(containers, v1.Container{Ports: ports})
		}
	}
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:       pod.Namespace,
			Name:            pod.Name,
			UID:             pod.UID,
			ResourceVersion: pod.ResourceVersion,
			Labels:          pod.Labels,
		},
		Spec: v1.PodSpec{
			NodeName:    pod.Spec.NodeName,
			HostNetwork: pod.Spec.HostNetwork,
			Containers:  containers,
		},
		Status: v1.PodStatus{
			Phase:  pod.Status.Phase,
			PodIP:  pod.Status.PodIP,
			PodIPs: pod.Status.PodIPs,
		},
	}, nil
}
