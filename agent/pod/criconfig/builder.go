// Package criconfig converts pods to CRI configurations: sandbox and container configurations,
// environment, DNS, security context and resources. It writes the files that containers mount from
// the node: the hosts file and the termination message files.
package criconfig

import (
	"sync"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/subpath"
)

// Config has the settings of the node's containers. Fields are required unless their comment names
// a default.
type Config struct {
	Paths    agent.Paths
	Objects  agent.Objects
	SubPaths subpath.Mounter
	// CgroupRoot is the parent cgroup of kubepods.
	CgroupRoot string
	// ClusterDNS returns the addresses of the cluster DNS; nil or empty: pods use the node's
	// servers.
	ClusterDNS func() []string
	ResolvConf string // "" = /etc/resolv.conf
	// ResolvedConf is the file with the upstream servers of systemd-resolved; "" = its default
	// path.
	ResolvedConf string
	PodPIDs      int64 // maximum processes and threads per pod; 0 or less = no limit
	// SingleProcessOOMKill makes the kernel kill a single process on OOM instead of the whole
	// container, as cgroup v1 does.
	SingleProcessOOMKill bool
	SeccompDefault       bool // containers without a profile get the runtime's default
	// Allocatable returns the node's allocatable resources. Memory returns the node's memory in
	// bytes. Both are for the environment and the OOM scores of containers.
	Allocatable func() v1.ResourceList
	Memory      func() int64
}

// Builder converts one pod to CRI configurations and writes the files that they mount. It is safe
// for concurrent use.
type Builder struct {
	cfg  Config
	warn func(pod *v1.Pod, reason, message string)

	hostsMu sync.Mutex // guards the hosts file
}

// New returns a Builder for one pod. The Builder calls warn to emit a warning event of the pod.
func New(cfg Config, warn func(pod *v1.Pod, reason, message string)) *Builder {
	return &Builder{cfg: cfg, warn: warn}
}
