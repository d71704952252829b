// Policy enforces NetworkPolicies on one node: kube-network-policies, with the rules of a node
// of Polis around it.
//
// The kernel sends the first packet of a connection from or to a pod of this node to this
// process, which accepts or drops it. What this program adds:
//
//   - While the cluster has a NetworkPolicy, every address of the node's pods is watched, not
//     only those of pods with a policy. An address without a pod that the API server knows is
//     that of a pod that has just started: it is dropped until its labels are known.
//   - The name server of the node is a part of the node, to which its pods always have access.
//   - It may start before an API server answers, and tries until it may read: kubelet waits.
//   - The table stays when the process ends, and the kernel drops what is not accepted: a
//     connection is never made because this process is down. The node removes the table.
//   - An end of the data plane is the end of the process, so that it is started again.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"time"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	"sigs.k8s.io/kube-network-policies/pkg/api"
	"sigs.k8s.io/kube-network-policies/pkg/dataplane"
	"sigs.k8s.io/kube-network-policies/pkg/networkpolicy"
	"sigs.k8s.io/kube-network-policies/pkg/podinfo"
)

// The version of kube-network-policies, which the build sets.
var version = "unknown"

// The time that a caller of the health server has for its request.
const requestMax = 5 * time.Second

// The pause between two tries to read from an API server is a share of the time that has passed
// since the first one, within these bounds, and half as long or one and a half times as long by
// chance: nodes that start together do not ask together for long.
const (
	pauseMin   = time.Second
	pauseMax   = 15 * time.Second
	pauseShare = 20
	// The time for an answer.
	answerMax = 30 * time.Second
)

// The time from the first answer until the kernel has everything. This process ends then: its
// health only tells what the kernel has lost, and another process may succeed.
const startMax = 15 * time.Minute

// options are the command line.
type options struct {
	kubeconfig string
	node       string
	pods       netip.Prefix
	nameServer netip.Addr
	table      string
	queue      int
	health     string
}

func main() {
	klog.InitFlags(nil)
	var opts options
	flag.StringVar(&opts.kubeconfig, "kubeconfig", "", "the file with the way to the API server")
	flag.StringVar(&opts.node, "node", "", "the name of this node")
	flag.TextVar(&opts.pods, "pods", netip.Prefix{}, "the addresses of this node's pods, in CIDR")
	flag.TextVar(&opts.nameServer, "name-server", netip.Addr{}, "the name server of the node")
	flag.StringVar(&opts.table, "table", "", "the name of the table of nftables, of the family inet")
	flag.IntVar(&opts.queue, "queue", 0, "the number of the queue of packets")
	flag.StringVar(&opts.health, "health-bind-address", "", "where /readyz and /livez are served")
	printVersion := flag.Bool("version", false, "print the version and end")
	flag.Parse()
	if *printVersion {
		fmt.Println("kube-network-policies", version)
		return
	}
	if err := opts.check(); err != nil {
		fmt.Fprintf(os.Stderr, "error: %v\n", err)
		os.Exit(2)
	}
	err := run(context.Background(), &opts)
	klog.ErrorS(err, "The enforcement of NetworkPolicies has ended")
	klog.Flush()
	os.Exit(1)
}

// check says which argument is missing or wrong.
func (o *options) check() error {
	switch {
	case o.kubeconfig == "":
		return fmt.Errorf("--kubeconfig must name a file")
	case o.node == "":
		return fmt.Errorf("--node must name this node")
	case !o.pods.IsValid() || !o.pods.Addr().Is4() || o.pods.Bits() < widest || o.pods.Bits() > narrowest:
		return fmt.Errorf("--pods must be an IPv4 network of /%d to /%d, for example 10.192.3.0/24", widest, narrowest)
	case !o.nameServer.IsValid():
		return fmt.Errorf("--name-server must be an address")
	case o.table == "":
		return fmt.Errorf("--table must name a table")
	case o.queue < 1 || o.queue > 65535:
		return fmt.Errorf("--queue must be from 1 to 65535")
	case o.health == "":
		return fmt.Errorf("--health-bind-address must be an address with a port")
	}
	return nil
}

// run enforces policies. It returns only with an error.
func run(ctx context.Context, opts *options) error {
	config, err := clientcmd.BuildConfigFromFlags("", opts.kubeconfig)
	if err != nil {
		return fmt.Errorf("reading %s: %w", opts.kubeconfig, err)
	}
	config.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	config.ContentType = "application/vnd.kubernetes.protobuf"
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("making a client: %w", err)
	}
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTransform(trimmed))
	pods := factory.Core().V1().Pods()
	namespaces := factory.Core().V1().Namespaces()
	policies := factory.Networking().V1().NetworkPolicies()
	// It adds the index by address, which `resolver` reads.
	if _, err := podinfo.NewInformerResolver(pods.Informer()); err != nil {
		return fmt.Errorf("watching pods: %w", err)
	}
	resolvers := []podinfo.IPResolver{resolver{pods.Informer().GetIndexer()}}
	provider := podinfo.NewInformerProvider(pods, namespaces, nil, resolvers)
	engine := networkpolicy.NewPolicyEngine(provider, []api.PolicyEvaluator{
		newBoundary(opts.pods, opts.nameServer, policies),
		networkpolicy.NewStandardNetworkPolicy(opts.node, namespaces, pods, policies),
	})
	plane, err := dataplane.NewController(engine, dataplane.Config{
		FailOpen:    false,
		QueueID:     opts.queue,
		NFTableName: opts.table,
		StrictMode:  true,
	})
	if err != nil {
		return fmt.Errorf("making the data plane: %w", err)
	}
	state := &health{table: opts.table, queue: opts.queue, synced: engine.Ready}
	ended := make(chan error, 3)
	go func() { ended <- serve(opts.health, state) }()
	go func() {
		awaitRights(ctx, client, state)
		time.AfterFunc(startMax, func() {
			if reason := state.unready(); !state.begun.Load() {
				ended <- fmt.Errorf("not ready %v after an API server has answered: %s", startMax, reason)
			}
		})
		factory.Start(ctx.Done())
		ended <- plane.Run(ctx)
	}()
	if err := <-ended; err != nil {
		return err
	}
	return fmt.Errorf("the data plane has ended without a reason")
}

// awaitRights returns once this process may read the cluster's policies: the rights to all that it
// reads come together. An informer whose first tries have failed would make the next ones up to
// half a minute apart.
func awaitRights(ctx context.Context, client kubernetes.Interface, state *health) {
	for begun := time.Now(); ; {
		asked, done := context.WithTimeout(ctx, answerMax)
		// The client itself would try ten times more, a second apart, however long it goes on.
		err := client.NetworkingV1().RESTClient().Get().
			Resource("networkpolicies").Param("limit", "1").
			MaxRetries(0).Do(asked).Error()
		done()
		if err == nil {
			state.waits("")
			return
		}
		// Without the ports of each try, so that one reason stays one reason.
		if broken := new(net.OpError); errors.As(err, &broken) {
			err = broken.Err
		}
		state.waits(fmt.Sprintf("pods wait until the cluster's policies can be read: %v", err))
		pause := min(max(time.Since(begun)/pauseShare, pauseMin), pauseMax)
		time.Sleep(pause/2 + rand.N(pause))
	}
}

// serve answers for the health of this process.
func serve(address string, state *health) error {
	mux := http.NewServeMux()
	answer := func(path string, wrong func() string) {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			if reason := wrong(); reason != "" {
				http.Error(w, reason, http.StatusServiceUnavailable)
				return
			}
			fmt.Fprintln(w, "ok")
		})
	}
	answer("/livez", state.lost)
	answer("/readyz", state.unready)
	server := &http.Server{Addr: address, Handler: mux, ReadTimeout: requestMax, WriteTimeout: requestMax}
	return fmt.Errorf("serving the health of this process: %w", server.ListenAndServe())
}
