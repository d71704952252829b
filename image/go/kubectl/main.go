// Kubectl is the command-line client of Kubernetes, in the version of the cluster. It
// is a tool of the host: no image has it.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
)

func main() {
	command := cmd.NewDefaultKubectlCommand()
	if err := cli.RunNoErrOutput(command); err != nil {
		// Prints the error as kubectl's users know it, and ends the process.
		util.CheckErr(err)
		os.Exit(1)
	}
}
