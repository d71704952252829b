package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/google/nftables"
)

// The kernel's list of queues: the first column is the number of each.
const queues = "/proc/net/netfilter/nfnetlink_queue"

// missing says what keeps policies from being enforced; empty if nothing does. It asks the
// kernel, since the data plane does not tell.
func missing(table string, queue int, synced func() bool) string {
	if !synced() {
		return "pods, namespaces and policies are not read yet"
	}
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
