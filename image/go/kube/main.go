// Kube is every Kubernetes program of a node in one file: the name under which it is
// started selects the program.
//
//	kube-apiserver --version
//	kube kube-apiserver --version
//
// One file instead of five saves most of their size, since they share nearly all of
// their packages.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // metrics of API clients
	_ "k8s.io/component-base/metrics/prometheus/version"  // metric kubernetes_build_info
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// Own is the name of this file; behind it, the first argument names the program.
const own = "kube"

// Programs are the constructors by name. A constructor registers flags and signal
// handlers of the whole process, so only the selected one runs.
var programs = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-proxy":              proxy.NewProxyCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

func main() {
	name := filepath.Base(os.Args[0])
	if name == own && len(os.Args) > 1 {
		os.Args = os.Args[1:]
		name = filepath.Base(os.Args[0])
	}
	program, known := programs[name]
	if !known {
		fmt.Fprintf(os.Stderr, "%s: no such program; start it as kube-apiserver, "+
			"kube-controller-manager, kube-proxy, kube-scheduler or kubelet, "+
			"or with one of these names as the first argument\n", name)
		os.Exit(2)
	}
	os.Exit(cli.Run(program()))
}
