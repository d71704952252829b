package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/google/nftables"
)

// The kernel's list of queues: the first column is the number of each.
const queues = "/proc/net/netfilter/nfnetlink_queue"

// health is what the process knows of its data plane.
type health struct {
	table  string
	queue  int
	synced func() bool
	// reason says why nothing can be read yet; empty, or unset, once it can.
	reason atomic.Value
	// begun says whether the kernel has had everything.
	begun atomic.Bool
}

// waits keeps the reason why nothing can be read yet.
func (h *health) waits(reason string) {
	h.reason.Store(reason)
}

// unready says what keeps policies from being enforced; empty if nothing does.
func (h *health) unready() string {
	if reason, _ := h.reason.Load().(string); reason != "" {
		return reason
	}
	if !h.synced() {
		return "pods, namespaces and policies are not read yet"
	}
	reason := missing(h.table, h.queue)
	if reason == "" {
		h.begun.Store(true)
	}
	return reason
}

// lost says what the kernel has had and has no more, as after a person's `nft flush ruleset`;
// empty if nothing. The data plane makes its table again once an hour, and its queue never, so
// a new process is the remedy.
func (h *health) lost() string {
	if !h.begun.Load() {
		return ""
	}
	return missing(h.table, h.queue)
}

// missing says what the kernel does not have of the data plane, which does not tell itself;
// empty if nothing.
func missing(table string, queue int) string {
	text, err := os.ReadFile(queues)
	if err != nil {
		return fmt.Sprintf("the kernel has no queues of packets: %v", err)
	}
	if !hasQueue(string(text), queue) {
		return fmt.Sprintf("the kernel has no queue %d", queue)
	}
	kernel, err := nftables.New()
	if err != nil {
		return fmt.Sprintf("no way to nftables: %v", err)
	}
	tables, err := kernel.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return fmt.Sprintf("the kernel does not list its tables: %v", err)
	}
	for _, one := range tables {
		if one.Name == table {
			return ""
		}
	}
	return fmt.Sprintf("the kernel has no table %s", table)
}

func hasQueue(text string, queue int) bool {
	for line := range strings.Lines(text) {
		if first, _, _ := strings.Cut(strings.TrimSpace(line), " "); first == strconv.Itoa(queue) {
			return true
		}
	}
	return false
}
