package agent

import (
	"context"
	"time"

	v1 "k8s.io/api/core/v1"
)

// ProbeTarget is one running container with probes.
type ProbeTarget struct {
	Pod         *v1.Pod
	Container   *v1.Container
	ContainerID string
	IP          string // target address of HTTP, TCP and gRPC probes that name no host
	StartedAt   time.Time
	// Resume is the last state that an earlier agent process reported for this container. It is nil
	// for a container that this process started.
	Resume *ProbeState
}

// ProbeState is the state of a container according to its startup, readiness and liveness probes.
type ProbeState struct {
	Started bool // the startup probe has passed, or none exists
	Ready   bool // the readiness probe passes, or none exists; false before Started
	// "liveness" or "startup" if that probe reached its failure threshold; the container must then
	// be restarted
	FailedProbe string
	Cause       string // message of the last failure of FailedProbe
}

// ProbeEvent reports a change of a container's ProbeState, or a probe result that must be counted
// or reported.
type ProbeEvent struct {
	State     ProbeState
	Probe     string // probe of this result: "startup", "liveness", "readiness"; "" for the first event
	OK        bool
	Message   string // message of a failure
	Warning   string // warning of a successful probe, if any
	Start     time.Time
	Took      time.Duration
	Uncounted bool // a failure that does not count: an early attempt before the first period has passed
}

// Prober runs the probes of containers.
type Prober interface {
	// Watch runs all probes of a container. It blocks until ctx ends or a liveness or startup probe
	// reaches its failure threshold. It calls onEvent with each event, from one goroutine at a
	// time. The first event is delivered immediately.
	Watch(ctx context.Context, t ProbeTarget, onEvent func(ProbeEvent))
}

// Labels and annotations that identify sandboxes and containers in the container runtime. All CRI
// tools use these labels.
const (
	LabelPodName       = "io.kubernetes.pod.name"
	LabelPodNamespace  = "io.kubernetes.pod.namespace"
	LabelPodUID        = "io.kubernetes.pod.uid"
	LabelContainerName = "io.kubernetes.container.name"
	// AnnotationTerminals is the maximum number of open pseudoterminals of a container. All
	// containers of the machine share the kernel's limit (4096 by default).
	AnnotationTerminals = "keelson.dev/terminals"
)
