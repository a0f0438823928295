package admission

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"keelson.dev/keelson/controlplane/api"
)

// Limits for objects that any client can create and that are usually not deleted. Kubernetes has no
// such limits. They prevent one requester or namespace from filling the store.
const (
	// mostEvents is the maximum number of events of a namespace. Events expire an hour after their
	// last write.
	mostEvents = 100_000
	// mostEventBytes is the maximum size of all events of a namespace, because every replica caches
	// them. It allows mostEvents events of the usual size.
	mostEventBytes = 192 << 20
	// mostOfAnEvent is the maximum size of one event. Its message is a text for humans.
	mostOfAnEvent = 64 << 10
	// mostUndecided is the maximum number of CertificateSigningRequests of a requester that are
	// neither approved nor denied. They expire after a day.
	mostUndecided = 1000
	// mostUndecidedBytes is the maximum total size of a requester's CertificateSigningRequests that
	// are neither approved nor denied.
	mostUndecidedBytes = 16 << 20
)

// recount is the minimum interval between two counts of the events of a full namespace.
const recount = 10 * time.Second

// eventBound rejects new events in a namespace that has reached its limits. Events are counted at
// the first event of a namespace and again only when a limit seems to be reached.
type eventBound struct {
	cluster Cluster
	clock   func() time.Time
	most    int
	bytes   int

	mu     sync.Mutex
	counts map[string]*eventCount
}

// eventCount is an upper bound of the events of a namespace: the last count plus the events
// admitted since.
type eventCount struct {
	n       int
	bytes   int
	counted time.Time
}

// maxCounts is the maximum number of namespaces for which a count is cached.
const maxCounts = 16384

func newEventBound(c Cluster, clock func() time.Time) *eventBound {
	return &eventBound{cluster: c, clock: clock, most: mostEvents, bytes: mostEventBytes, counts: map[string]*eventCount{}}
}

func (b *eventBound) admit(ctx context.Context, a *Attempt) error {
	if a.Kind.Resource != "events" || a.Kind.GVK.Group != "" && a.Kind.GVK.Group != "events.k8s.io" || a.Whole == nil {
		return nil
	}
	size, number := sizeOf(a.Whole), 1
	grows := size
	if !a.Creates() {
		if a.Stored == nil {
			return nil
		}
		number, grows = 0, size-sizeOf(a.Stored)
		if grows <= 0 {
			return nil
		}
	}
	if size > mostOfAnEvent {
		return forbid(a, a.Whole, fmt.Errorf("it has %d bytes, and an event may have %d: shorten its message", size, mostOfAnEvent))
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	now, ns := b.clock(), a.Request.Namespace
	tooMany := func(c *eventCount) bool { return number > 0 && c.n+number > b.most }
	full := func(c *eventCount) bool { return tooMany(c) || c.bytes+grows > b.bytes }
	c := b.counts[ns]
	if c == nil || full(c) && now.Sub(c.counted) >= recount {
		list, err := b.cluster.List(ctx, "events", ns, false)
		if err != nil {
			return fmt.Errorf("counting the events of namespace %s: %w", ns, err)
		}
		if len(b.counts) >= maxCounts {
			clear(b.counts)
		}
		c = &eventCount{n: len(list), counted: now}
		for _, o := range list {
			c.bytes += sizeOf(o)
		}
		b.counts[ns] = c
	}
	if full(c) {
		what := fmt.Sprintf("%d events", b.most)
		if !tooMany(c) {
			what = fmt.Sprintf("events of %d bytes", c.bytes)
		}
		return forbid(a, a.Whole, fmt.Errorf("namespace %s has %s, which is the most that is kept: they go an hour after they were last written; delete some, or write fewer",
			ns, what))
	}
	c.n += number
	c.bytes += grows
	return nil
}

// sizeOf returns the serialized size of the object, which approximates its size in memory.
func sizeOf(o api.Object) int {
	if s, ok := o.(interface{ Size() int }); ok {
		return s.Size()
	}
	return 0
}

// undecidedRequests returns a plugin that rejects a CertificateSigningRequest if its requester has
// too many undecided ones.
func undecidedRequests(cluster Cluster, most int) func(ctx context.Context, a *Attempt) error {
	return func(ctx context.Context, a *Attempt) error {
		if _, ok := a.Whole.(*certificatesv1.CertificateSigningRequest); !ok || !a.Creates() || slices.Contains(a.User.Groups, api.GroupMasters) {
			return nil
		}
		all, err := cluster.List(ctx, "certificatesigningrequests", "", false)
		if err != nil {
			return fmt.Errorf("counting requests for certificates: %w", err)
		}
		n, bytes := 0, sizeOf(a.Whole)
		for _, o := range all {
			if c, ok := o.(*certificatesv1.CertificateSigningRequest); ok && c.Spec.Username == a.User.Name && undecided(c) {
				n++
				bytes += sizeOf(c)
			}
		}
		if bytes > mostUndecidedBytes {
			return forbid(a, a.Whole, fmt.Errorf("%s would have requests of %d bytes that nobody has approved or denied, and %d is the most: have them decided, or delete some; they go after a day",
				a.User.Name, bytes, mostUndecidedBytes))
		}
		if n >= most {
			return forbid(a, a.Whole, fmt.Errorf("%s has %d requests that nobody has approved or denied, which is the most: have them decided, or delete some; they go after a day",
				a.User.Name, n))
		}
		return nil
	}
}

func undecided(c *certificatesv1.CertificateSigningRequest) bool {
	return !slices.ContainsFunc(c.Status.Conditions, func(k certificatesv1.CertificateSigningRequestCondition) bool {
		return k.Type == certificatesv1.CertificateApproved || k.Type == certificatesv1.CertificateDenied || k.Type == certificatesv1.CertificateFailed
	})
}
