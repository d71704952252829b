package main

import (
	"github.com/google/cadvisor/lib/fs"
	"github.com/google/cadvisor/lib/fs/vfs"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// Pods is the directory of kubelet, which has the project of workloads.
const pods = "/var/lib/kubelet"

// Quota reports the file system with pods on it as the kernel reports it below [pods]:
// the quota of their project, and what of it is left.
//
// cadvisor knows a file system by its device, and asks the kernel at the first place
// where it is mounted. The data partition has room left there, the node's own, when pods
// have filled their quota: kubelet would evict none, and each of their writes would fail.
type quota struct{ fs.FsPlugin }

func init() {
	if err := fs.RegisterPlugin("quota", quota{vfs.NewPlugin()}); err != nil {
		klog.Fatal(err)
	}
}

func (quota) Name() string { return "quota" }

// CanHandle names XFS alone, which answers statfs with the limits of a project.
func (quota) CanHandle(fsType string) bool { return fsType == "xfs" }

// Priority is above that of the plugin for all file systems, which has 0.
func (quota) Priority() int { return 1 }

func (q quota) GetStats(device string, partition fs.PartitionInfo) (*fs.FsStats, error) {
	var stat unix.Stat_t
	if err := unix.Stat(pods, &stat); err == nil &&
		unix.Major(stat.Dev) == uint32(partition.Major) &&
		unix.Minor(stat.Dev) == uint32(partition.Minor) {
		partition.Mountpoint = pods
	}
	return q.FsPlugin.GetStats(device, partition)
}
