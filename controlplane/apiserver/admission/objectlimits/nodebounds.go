// Package objectlimits contains the admission plugins that limit the number and size of objects of
// a namespace, a requester or a node.
package objectlimits

import (
	"context"
	"fmt"
	"hash/maphash"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podref"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// Config contains the dependencies of the plugins that limit the objects of a node.
type Config struct {
	Cluster admission.Cluster
	Clock   func() time.Time
	// NodeOf returns the node name of a user that is a node agent.
	NodeOf func(u api.User) (string, bool)
	// PodsOf returns the pods that are bound to a node, from this replica's cache. The caller must
	// not change them.
	PodsOf func(node string) []*corev1.Pod
}

// Limits of the objects that one node may create, so that a stolen node key cannot fill the store.
// Kubernetes has no such limits. Each node has only one Node, CSINode and Lease. A node may not
// write ResourceClaims, VolumeAttachments and objects of other nodes, so these have no limit here.
const (
	// maxMirrors is the maximum number of mirror pods of a node. It exceeds the number of pods,
	// static or not, that a kubelet runs (110 by default).
	maxMirrors     = 500
	maxMirrorBytes = 16 << 20
	// maxSlices is the maximum number of ResourceSlices of a node. At up to 128 devices each, this
	// allows 32,768 devices, including drivers with one pool for each card.
	maxSlices     = 256
	maxSliceBytes = 16 << 20
	// maxNodeRequests is the maximum number of a node's CertificateSigningRequests, decided or
	// not. Automatically approved ones are kept for an hour.
	maxNodeRequests     = 100
	maxNodeRequestBytes = 1 << 20
	// MaxNodeEvents and maxNodeEventBytes are half of the limits of a namespace, so that no node
	// can fill a namespace alone. They apply to events written within eventLifetime.
	MaxNodeEvents     = maxEvents / 2
	maxNodeEventBytes = maxEventBytes / 2
	// podStatusBytes is the maximum size of a pod's status, in addition to the size of its spec:
	// the status repeats images, resources and mounts. containerStatusBytes is added for each
	// container: its termination message has up to 4 KiB, its waiting message 8 KiB.
	podStatusBytes       = 64 << 10
	containerStatusBytes = 16 << 10
	// maxAddresses is the maximum number of addresses in a Node's status. They are sent to every
	// node.
	maxAddresses    = 32
	maxAddressBytes = 253 // maximum length of a DNS name
)

// eventLifetime is how long an event is kept after its last write.
const eventLifetime = time.Hour

// nodeBound is a limit of the number and total size of one kind of objects of a node.
type nodeBound struct {
	subject       string
	number, bytes int
	remedy        string
	usage         func(ctx context.Context, node string) ([]api.Object, error)
}

// NodeBounds rejects writes by which a node would exceed the limits for the objects of one node.
type NodeBounds struct {
	nodeOf                    func(u api.User) (string, bool)
	mirrors, slices, requests nodeBound
	clock                     func() time.Time
	maxEvents, maxEventBytes  int

	seed   maphash.Seed
	mu     sync.Mutex
	events map[string]*nodeEvents // by node
	swept  time.Time
}

// nodeEvents contains the events that a node has written within eventLifetime, and possibly older
// events until they are removed.
type nodeEvents struct {
	written map[uint64]eventWritten // by a hash of namespace and name
	bytes   int
	swept   time.Time
}

type eventWritten struct {
	time time.Time
	size int
}

// NewNodeBounds returns a NodeBounds with the limits of this package.
func NewNodeBounds(c Config) *NodeBounds {
	b := &NodeBounds{nodeOf: c.NodeOf, clock: c.Clock, maxEvents: MaxNodeEvents, maxEventBytes: maxNodeEventBytes,
		seed: maphash.MakeSeed(), events: map[string]*nodeEvents{}}
	listed := func(resource string,
		its func(o api.Object, node string) bool) func(ctx context.Context, node string) ([]api.Object, error) {
		return func(ctx context.Context, node string) (out []api.Object, err error) {
			// read from the store, which is acceptable because nodes write few of these objects
			all, err := c.Cluster.List(ctx, resource, "", true)
			if err != nil {
				return nil, fmt.Errorf("counting the objects of node %s: %w", node, err)
			}
			for _, o := range all {
				if its(o, node) {
					out = append(out, o)
				}
			}
			return out, nil
		}
	}
	b.mirrors = nodeBound{"mirror pods", maxMirrors, maxMirrorBytes,
		"delete some, and remove the static pods that they mirror",
		func(_ context.Context, node string) (out []api.Object, err error) {
			for _, p := range c.PodsOf(node) {
				if podref.IsMirror(p) {
					out = append(out, p)
				}
			}
			return out, nil
		}}
	b.slices = nodeBound{"ResourceSlices", maxSlices, maxSliceBytes,
		"delete slices without a driver, or let the driver publish more devices per slice",
		listed("resourceslices", func(o api.Object, node string) bool {
			s, ok := o.(*resourcev1.ResourceSlice)
			return ok && s.Spec.NodeName != nil && *s.Spec.NodeName == node
		})}
	b.requests = nodeBound{"CertificateSigningRequests", maxNodeRequests, maxNodeRequestBytes,
		"delete some; they expire an hour after a decision, or after a day without a decision",
		listed("certificatesigningrequests", func(o api.Object, node string) bool {
			r, ok := o.(*certificatesv1.CertificateSigningRequest)
			return ok && r.Spec.Username == api.NodeUserPrefix+node
		})}
	return b
}

// CheckWrite rejects writes of a node that exceed its limits.
func (b *NodeBounds) CheckWrite(ctx context.Context, a *admission.Attempt) error {
	node, ok := b.nodeOf(a.User)
	if !ok || a.Whole == nil {
		return nil
	}
	switch o := a.Whole.(type) {
	case *corev1.Pod:
		if a.CreatesObject() {
			return b.mirrors.checkBound(ctx, a, node)
		}
		return limitPodStatus(a, node, o)
	case *resourcev1.ResourceSlice:
		return b.slices.checkBound(ctx, a, node)
	case *certificatesv1.CertificateSigningRequest:
		return b.requests.checkBound(ctx, a, node)
	case *corev1.Node:
		return limitNodeAddresses(a, node, o)
	}
	return nil
}

// CheckEvent rejects an event of a node that has reached its limit of events. It must run after all
// other plugins: an event that a later plugin rejects would still be counted.
func (b *NodeBounds) CheckEvent(_ context.Context, a *admission.Attempt) error {
	node, ok := b.nodeOf(a.User)
	if !ok || a.Whole == nil {
		return nil
	}
	if a.Kind.Resource == "events" && (a.Kind.GVK.Group == "" || a.Kind.GVK.Group == "events.k8s.io") {
		return b.limitEvents(a, node)
	}
	return nil
}

// checkBound rejects the creation of an object if the node already has the maximum number. It also
// rejects a write after which the node's objects would exceed the maximum total size.
func (n *nodeBound) checkBound(ctx context.Context, a *admission.Attempt, node string) error {
	size := encodedSize(a.Whole)
	if !a.CreatesObject() && (a.Stored == nil || size <= encodedSize(a.Stored)) {
		return nil
	}
	all, err := n.usage(ctx, node)
	if err != nil {
		return err
	}
	for _, o := range all {
		if a.CreatesObject() || o.GetUID() != a.Whole.GetUID() {
			size += encodedSize(o)
		}
	}
	switch {
	case a.CreatesObject() && len(all) >= n.number:
		return admission.NewForbidden(a, a.Whole,
			fmt.Errorf("node %s has %d %s, the maximum is %d: %s", node, len(all), n.subject, n.number, n.remedy))
	case size > n.bytes:
		return admission.NewForbidden(a, a.Whole,
			fmt.Errorf("node %s would have %s of %d bytes in total, the maximum is %d: %s", node, n.subject, size,
				n.bytes, n.remedy))
	}
	return nil
}

// limitPodStatus rejects a pod status that is too large in proportion to the pod's spec, which
// other clients define. A status that does not grow is always allowed.
func limitPodStatus(a *admission.Attempt, node string, pod *corev1.Pod) error {
	before, ok := a.Stored.(*corev1.Pod)
	if !ok {
		return nil
	}
	most := podStatusBytes + pod.Spec.Size() +
		containerStatusBytes*(len(pod.Spec.Containers)+len(pod.Spec.InitContainers)+len(pod.Spec.EphemeralContainers))
	if size := statusSize(pod); size > most && size > statusSize(before) {
		return admission.NewForbidden(a, pod,
			fmt.Errorf("node %s reports a status of %d bytes for this pod, the maximum is %d: shorten messages and "+
				"conditions", node, size, most))
	}
	return nil
}

// statusSize returns the size of the pod's status and of the managed fields about it.
func statusSize(pod *corev1.Pod) int {
	size := pod.Status.Size()
	for i := range pod.ManagedFields {
		if m := &pod.ManagedFields[i]; m.Subresource == "status" {
			size += m.Size()
		}
	}
	return size
}

func limitNodeAddresses(a *admission.Attempt, node string, reported *corev1.Node) error {
	before, _ := a.Stored.(*corev1.Node)
	if n := len(reported.Status.Addresses); n > maxAddresses && (before == nil || n > len(before.Status.Addresses)) {
		return admission.NewForbidden(a, reported,
			fmt.Errorf("node %s has %d addresses in status.addresses, the maximum is %d: remove unreachable addresses",
				node, n, maxAddresses))
	}
	for i, at := range reported.Status.Addresses {
		if len(at.Address) > maxAddressBytes {
			return admission.NewForbidden(a, reported,
				fmt.Errorf("status.addresses[%d] of node %s has %d bytes, the maximum is %d: use an IP "+
					"address or a DNS name",
					i, node, len(at.Address), maxAddressBytes))
		}
	}
	return nil
}

// limitEvents rejects an event if the node has written too many within eventLifetime, in all
// namespaces together. The time starts again with each update of an event.
func (b *NodeBounds) limitEvents(a *admission.Attempt, node string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.clock()
	b.removeExpired(now)
	e := b.events[node]
	if e == nil {
		e = &nodeEvents{written: map[uint64]eventWritten{}, swept: now}
	}
	key := maphash.String(b.seed, a.Whole.GetNamespace()+"/"+a.Whole.GetName())
	size := encodedSize(a.Whole)
	tooMany := func() bool { _, has := e.written[key]; return !has && len(e.written) >= b.maxEvents }
	full := func() bool {
		was := e.written[key].size
		return tooMany() || size > was && e.bytes-was+size > b.maxEventBytes
	}
	if full() && now.Sub(e.swept) >= recountInterval {
		e.dropExpired(now)
	}
	if full() {
		what := fmt.Sprintf("%d events", b.maxEvents)
		if !tooMany() {
			what = fmt.Sprintf("events of %d bytes", b.maxEventBytes)
		}
		return admission.NewForbidden(a, a.Whole,
			fmt.Errorf("node %s has written %s within an hour, which is the maximum: write fewer events; events "+
				"expire an hour after their last write",
				node, what))
	}
	if !a.DryRun {
		e.bytes += size - e.written[key].size
		e.written[key] = eventWritten{now, size}
		b.events[node] = e
	}
	return nil
}

// removeExpired removes expired events, and nodes without events. The lock must be held.
func (b *NodeBounds) removeExpired(currentTime time.Time) {
	if currentTime.Sub(b.swept) < eventLifetime {
		return
	}
	b.swept = currentTime
	for node, e := range b.events {
		if e.dropExpired(currentTime); len(e.written) == 0 {
			delete(b.events, node)
		}
	}
}

func (e *nodeEvents) dropExpired(currentTime time.Time) {
	e.swept = currentTime
	for key, w := range e.written {
		if currentTime.Sub(w.time) >= eventLifetime {
			e.bytes -= w.size
			delete(e.written, key)
		}
	}
}
