package admission

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
)

// Limits of the objects that one node may create, so that a stolen node key cannot fill the store.
// Kubernetes has no such limits. A node's Node, CSINode and Lease are one object each. A node may
// not write ResourceClaims, VolumeAttachments and objects of other nodes, so these have no limit
// here.
const (
	// mostMirrors exceeds the number of pods that a kubelet runs (110 by default), static or not.
	mostMirrors     = 500
	mostMirrorBytes = 16 << 20
	// mostSlices is the maximum number of ResourceSlices of a node. At up to 128 devices each, this
	// allows 32,768 devices, including drivers with one pool for each card.
	mostSlices     = 256
	mostSliceBytes = 16 << 20
	// mostNodeRequests is the maximum number of a node's CertificateSigningRequests, decided or
	// not. Automatically approved ones are kept for an hour.
	mostNodeRequests     = 100
	mostNodeRequestBytes = 1 << 20
	// mostNodeEvents and mostNodeEventBytes are half of the limits of a namespace, so that no node
	// fills one alone. They apply to events written within eventsLast.
	mostNodeEvents     = mostEvents / 2
	mostNodeEventBytes = mostEventBytes / 2
	// podStatusBytes is the maximum size of a pod's status beyond the size of its spec; the status
	// repeats images, resources and mounts. containerStatusBytes is added for each container: its
	// termination message has up to 4 KiB, its waiting message 8 KiB.
	podStatusBytes       = 64 << 10
	containerStatusBytes = 16 << 10
	// mostAddresses is the maximum number of addresses in a Node's status. Every node receives
	// them.
	mostAddresses    = 32
	mostAddressBytes = 253 // maximum length of a DNS name
)

// eventsLast is how long an event is kept after its last write.
const eventsLast = time.Hour

// nodeBound is a limit of the number and total size of one kind of objects of a node.
type nodeBound struct {
	what          string
	number, bytes int
	remedy        string
	of            func(ctx context.Context, node string) ([]api.Object, error)
}

// nodeBounds rejects writes of nodes that exceed the limits.
type nodeBounds struct {
	nodeOf                     func(u api.User) (string, bool)
	mirrors, slices, requests  nodeBound
	clock                      func() time.Time
	mostEvents, mostEventBytes int

	seed   maphash.Seed
	mu     sync.Mutex
	events map[string]*nodeEvents // by node
	swept  time.Time
}

// nodeEvents contains the events that a node has written within eventsLast, and possibly older ones
// until the next sweep.
type nodeEvents struct {
	written map[uint64]eventWritten // by a hash of namespace and name
	bytes   int
	swept   time.Time
}

type eventWritten struct {
	at   time.Time
	size int
}

func newNodeBounds(c Config) *nodeBounds {
	b := &nodeBounds{nodeOf: c.NodeOf, clock: c.Clock, mostEvents: mostNodeEvents, mostEventBytes: mostNodeEventBytes,
		seed: maphash.MakeSeed(), events: map[string]*nodeEvents{}}
	listed := func(resource string, its func(o api.Object, node string) bool) func(ctx context.Context, node string) ([]api.Object, error) {
		return func(ctx context.Context, node string) (out []api.Object, err error) {
			all, err := c.Cluster.List(ctx, resource, "", true) // read from the store, which is acceptable because nodes write few of these objects
			if err != nil {
				return nil, fmt.Errorf("counting what node %s has: %w", node, err)
			}
			for _, o := range all {
				if its(o, node) {
					out = append(out, o)
				}
			}
			return out, nil
		}
	}
	b.mirrors = nodeBound{"mirror pods", mostMirrors, mostMirrorBytes, "delete some, and take the static pods away for which they were made",
		func(_ context.Context, node string) (out []api.Object, err error) {
			for _, p := range c.PodsOf(node) {
				if podref.IsMirror(p) {
					out = append(out, p)
				}
			}
			return out, nil
		}}
	b.slices = nodeBound{"ResourceSlices", mostSlices, mostSliceBytes, "delete those that no driver keeps any more, or let the driver publish more devices in one",
		listed("resourceslices", func(o api.Object, node string) bool {
			s, ok := o.(*resourcev1.ResourceSlice)
			return ok && s.Spec.NodeName != nil && *s.Spec.NodeName == node
		})}
	b.requests = nodeBound{"CertificateSigningRequests", mostNodeRequests, mostNodeRequestBytes, "delete some; they go an hour after a decision, and after a day without one",
		listed("certificatesigningrequests", func(o api.Object, node string) bool {
			r, ok := o.(*certificatesv1.CertificateSigningRequest)
			return ok && r.Spec.Username == api.NodeUserPrefix+node
		})}
	return b
}

func (b *nodeBounds) admit(ctx context.Context, a *Attempt) error {
	node, ok := b.nodeOf(a.User)
	if !ok || a.Whole == nil {
		return nil
	}
	switch o := a.Whole.(type) {
	case *corev1.Pod:
		if a.Creates() {
			return b.mirrors.hold(ctx, a, node)
		}
		return holdPodStatus(a, node, o)
	case *resourcev1.ResourceSlice:
		return b.slices.hold(ctx, a, node)
	case *certificatesv1.CertificateSigningRequest:
		return b.requests.hold(ctx, a, node)
	case *corev1.Node:
		return holdAddresses(a, node, o)
	}
	return nil
}

// admitEvents checks the limit of a node's events. It must run after all other plugins: an event
// that a later plugin rejects would still be counted.
func (b *nodeBounds) admitEvents(_ context.Context, a *Attempt) error {
	node, ok := b.nodeOf(a.User)
	if !ok || a.Whole == nil {
		return nil
	}
	if a.Kind.Resource == "events" && (a.Kind.GVK.Group == "" || a.Kind.GVK.Group == "events.k8s.io") {
		return b.holdEvents(a, node)
	}
	return nil
}

// hold rejects a creation beyond the maximum number, and a write that exceeds the maximum total
// size.
func (n *nodeBound) hold(ctx context.Context, a *Attempt, node string) error {
	size := sizeOf(a.Whole)
	if !a.Creates() && (a.Stored == nil || size <= sizeOf(a.Stored)) {
		return nil
	}
	all, err := n.of(ctx, node)
	if err != nil {
		return err
	}
	for _, o := range all {
		if a.Creates() || o.GetUID() != a.Whole.GetUID() {
			size += sizeOf(o)
		}
	}
	switch {
	case a.Creates() && len(all) >= n.number:
		return forbid(a, a.Whole, fmt.Errorf("node %s has %d %s, and may have %d: %s", node, len(all), n.what, n.number, n.remedy))
	case size > n.bytes:
		return forbid(a, a.Whole, fmt.Errorf("node %s would have %s of %d bytes together, and may have %d: %s", node, n.what, size, n.bytes, n.remedy))
	}
	return nil
}

// holdPodStatus rejects a pod status that is too large for the pod's spec, which other clients
// define. A status that does not grow is allowed.
func holdPodStatus(a *Attempt, node string, pod *corev1.Pod) error {
	before, ok := a.Stored.(*corev1.Pod)
	if !ok {
		return nil
	}
	most := podStatusBytes + pod.Spec.Size() + containerStatusBytes*(len(pod.Spec.Containers)+len(pod.Spec.InitContainers)+len(pod.Spec.EphemeralContainers))
	if size := statusSize(pod); size > most && size > statusSize(before) {
		return forbid(a, pod, fmt.Errorf("node %s says %d bytes of the status of this pod, and may say %d: let it shorten messages and conditions", node, size, most))
	}
	return nil
}

// statusSize returns the size of the pod's status and of the managed fields about it.
func statusSize(p *corev1.Pod) int {
	size := p.Status.Size()
	for i := range p.ManagedFields {
		if m := &p.ManagedFields[i]; m.Subresource == "status" {
			size += m.Size()
		}
	}
	return size
}

func holdAddresses(a *Attempt, node string, now *corev1.Node) error {
	before, _ := a.Stored.(*corev1.Node)
	if n := len(now.Status.Addresses); n > mostAddresses && (before == nil || n > len(before.Status.Addresses)) {
		return forbid(a, now, fmt.Errorf("node %s has %d addresses in status.addresses, and may have %d: leave out those by which nobody reaches it", node, n, mostAddresses))
	}
	for i, at := range now.Status.Addresses {
		if len(at.Address) > mostAddressBytes {
			return forbid(a, now, fmt.Errorf("status.addresses[%d] of node %s has %d bytes, and may have %d: give an IP address or a name of DNS",
				i, node, len(at.Address), mostAddressBytes))
		}
	}
	return nil
}

// holdEvents limits the events of a node in all namespaces. An updated event counts for eventsLast
// again.
func (b *nodeBounds) holdEvents(a *Attempt, node string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := b.clock()
	b.forget(now)
	e := b.events[node]
	if e == nil {
		e = &nodeEvents{written: map[uint64]eventWritten{}, swept: now}
	}
	key := maphash.String(b.seed, a.Whole.GetNamespace()+"/"+a.Whole.GetName())
	size := sizeOf(a.Whole)
	tooMany := func() bool { _, has := e.written[key]; return !has && len(e.written) >= b.mostEvents }
	full := func() bool {
		was := e.written[key].size
		return tooMany() || size > was && e.bytes-was+size > b.mostEventBytes
	}
	if full() && now.Sub(e.swept) >= recount {
		e.sweep(now)
	}
	if full() {
		what := fmt.Sprintf("%d events", b.mostEvents)
		if !tooMany() {
			what = fmt.Sprintf("events of %d bytes", b.mostEventBytes)
		}
		return forbid(a, a.Whole, fmt.Errorf("node %s has written %s within an hour, and may write no more: let it write fewer; they go an hour after they were last written",
			node, what))
	}
	if !a.DryRun {
		e.bytes += size - e.written[key].size
		e.written[key] = eventWritten{now, size}
		b.events[node] = e
	}
	return nil
}

// forget removes expired events, and nodes without events. The lock must be held.
func (b *nodeBounds) forget(now time.Time) {
	if now.Sub(b.swept) < eventsLast {
		return
	}
	b.swept = now
	for node, e := range b.events {
		if e.sweep(now); len(e.written) == 0 {
			delete(b.events, node)
		}
	}
}

func (e *nodeEvents) sweep(now time.Time) {
	e.swept = now
	for key, w := range e.written {
		if now.Sub(w.at) >= eventsLast {
			e.bytes -= w.size
			delete(e.written, key)
		}
	}
}
