// Command runsc is the container runtime of gVisor: a kernel in a process, between a pod
// and the kernel of the node.
//
// The list of commands is shorter than that of gVisor's own program: what a shim starts,
// what the runtime starts of itself, and `do`, with which a person tries the platform.
// Without the other commands, the program has no second program inside that others have
// compiled (that of checkpoints, which Kubernetes does not make).
package main

import (
	"github.com/google/subcommands"
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"
)

func main() {
	const runtime, inside = "", "internal use only"
	commands := map[util.SubCommand]string{
		new(cmd.Create):      runtime,
		new(cmd.Delete):      runtime,
		new(cmd.Events):      runtime,
		new(cmd.Exec):        runtime,
		new(cmd.Features):    runtime,
		new(cmd.Kill):        runtime,
		new(cmd.List):        runtime,
		new(cmd.PS):          runtime,
		new(cmd.Pause):       runtime,
		new(cmd.PortForward): runtime,
		new(cmd.Resume):      runtime,
		new(cmd.Run):         runtime,
		new(cmd.Start):       runtime,
		new(cmd.State):       runtime,
		new(cmd.Update):      runtime,
		new(cmd.Wait):        runtime,
		new(cmd.Do):          runtime,

		new(sentrycmd.Boot):   inside,
		new(cmd.Gofer):        inside,
		new(sentrycmd.Umount): inside,
	}
	cli.Run(nil, commands, []subcommands.Command{new(cmd.Platforms)})
}
