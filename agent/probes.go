package agent

import (
	"context"
	"time"

	v1 "k8s.io/api/core/v1"
)

// ProbeTarget is one running container whose probes are to be run.
type ProbeTarget struct {
	Pod         *v1.Pod
	Container   *v1.Container
	ContainerID string
	IP          string // where HTTP, TCP and gRPC probes go unless they name a host
	StartedAt   time.Time
	// Resume is what an earlier life of the agent had found out about this very
	// container; nil for a container that was started in this one.
	Resume *ProbeState
}

// ProbeState is what the probes say of a container.
type ProbeState struct {
	Started bool   // the startup probe has passed, or there is none
	Ready   bool   // the readiness probe passes, or there is none; false before Started
	GaveUp  string // "liveness" or "startup" when that probe failed for good: the container is to be restarted
	Cause   string // the last failure of the probe that gave up
}

// ProbeEvent tells a change of state, or one probe's result that is worth telling.
type ProbeEvent struct {
	State   ProbeState
	Probe   string // whose result this is: "startup", "liveness", "readiness"; "" for the first event
	OK      bool
	Message string // of a failure
	Warning string // text of the warning with which the probe passed, if any
	Start   time.Time
	Took    time.Duration
	Quick   bool // a failure that counts for nothing: an early try before the first period has passed
}

// Prober runs probes.
type Prober interface {
	// Watch runs all probes of a container and blocks until ctx ends or a probe gave up. The first event
	// is delivered at once; on is called from one goroutine at a time.
	Watch(ctx context.Context, t ProbeTarget, on func(ProbeEvent))
}

// The labels and annotations by which sandboxes and containers are found again in
// the runtime. They are those that every CRI tool knows.
const (
	LabelPodName       = "io.kubernetes.pod.name"
	LabelPodNamespace  = "io.kubernetes.pod.namespace"
	LabelPodUID        = "io.kubernetes.pod.uid"
	LabelContainerName = "io.kubernetes.container.name"
	// AnnotationTerminals is how many pseudoterminals a container may have open; the kernel shares their number (4096 by
	// default) among all containers of the machine.
	AnnotationTerminals = "keelson.dev/terminals"
)
