package objectlimits

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// Limits for objects that any client can create and that are usually not deleted. Kubernetes has no
// such limits. They prevent one requester or namespace from filling the store.
const (
	// maxEvents is the maximum number of events of a namespace. Events expire an hour after their
	// last write.
	maxEvents = 100_000
	// maxEventBytes is the maximum size of all events of a namespace, because every replica caches
	// them. It allows maxEvents events of the usual size.
	maxEventBytes = 192 << 20
	// MaxEventSize is the maximum size of one event. Its message is a text for humans.
	MaxEventSize = 64 << 10
	// MaxUndecided is the maximum number of CertificateSigningRequests of a requester that are
	// neither approved nor denied. They expire after a day.
	MaxUndecided = 1000
	// maxUndecidedBytes is the maximum total size of a requester's CertificateSigningRequests that
	// are neither approved nor denied.
	maxUndecidedBytes = 16 << 20
)

// recountInterval is the minimum interval between two counts of the events of a namespace that has
// reached a limit.
const recountInterval = 10 * time.Second

// EventBound rejects new events in a namespace that has reached its limits. It counts the events of
// a namespace at the first event that it admits there, and again when the namespace seems to have
// reached a limit.
type EventBound struct {
	cluster  admission.Cluster
	clock    func() time.Time
	maxCount int
	maxBytes int

	mu     sync.Mutex
	counts map[string]*eventCount
}

// eventCount is an upper bound of the number and total size of the events in a namespace: the last
// count plus the events admitted since.
type eventCount struct {
	n       int
	bytes   int
	counted time.Time
}

// maxCounts is the maximum number of namespaces for which a count is cached.
const maxCounts = 16384

// NewEventBound returns an EventBound that counts the events in the cluster c.
func NewEventBound(c admission.Cluster, clock func() time.Time) *EventBound {
	return &EventBound{cluster: c, clock: clock, maxCount: maxEvents, maxBytes: maxEventBytes,
		counts: map[string]*eventCount{}}
}

// CheckCreate rejects a new event, or an update that enlarges an event, in a namespace that has
// reached its limits.
func (b *EventBound) CheckCreate(ctx context.Context, a *admission.Attempt) error {
	if a.Kind.Resource != "events" || a.Kind.GVK.Group != "" && a.Kind.GVK.Group != "events.k8s.io" || a.Whole == nil {
		return nil
	}
	size, number := encodedSize(a.Whole), 1
	grows := size
	if !a.CreatesObject() {
		if a.Stored == nil {
			return nil
		}
		number, grows = 0, size-encodedSize(a.Stored)
		if grows <= 0 {
			return nil
		}
	}
	if size > MaxEventSize {
		return admission.NewForbidden(a, a.Whole,
			fmt.Errorf("the event has %d bytes, the maximum is %d: shorten its message", size, MaxEventSize))
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	now, ns := b.clock(), a.Request.Namespace
	tooMany := func(c *eventCount) bool { return number > 0 && c.n+number > b.maxCount }
	full := func(c *eventCount) bool { return tooMany(c) || c.bytes+grows > b.maxBytes }
	c := b.counts[ns]
	if c == nil || full(c) && now.Sub(c.counted) >= recountInterval {
		list, err := b.cluster.List(ctx, "events", ns, false)
		if err != nil {
			return fmt.Errorf("counting the events of namespace %s: %w", ns, err)
		}
		if len(b.counts) >= maxCounts {
			clear(b.counts)
		}
		c = &eventCount{n: len(list), counted: now}
		for _, o := range list {
			c.bytes += encodedSize(o)
		}
		b.counts[ns] = c
	}
	if full(c) {
		what := fmt.Sprintf("%d events", b.maxCount)
		if !tooMany(c) {
			what = fmt.Sprintf("events of %d bytes", c.bytes)
		}
		return admission.NewForbidden(a, a.Whole,
			fmt.Errorf("namespace %s has %s, which is the maximum: events expire an hour after their last write; "+
				"delete some, or write fewer",
				ns, what))
	}
	c.n += number
	c.bytes += grows
	return nil
}

// encodedSize returns the serialized size of the object, which approximates its size in memory.
func encodedSize(o api.Object) int {
	if s, ok := o.(interface{ Size() int }); ok {
		return s.Size()
	}
	return 0
}

// LimitUndecidedRequests returns a plugin that rejects a CertificateSigningRequest if its requester
// has too many of them that are neither approved nor denied.
func LimitUndecidedRequests(
	cluster admission.Cluster, limit int,
) func(ctx context.Context, a *admission.Attempt) error {
	return func(ctx context.Context, a *admission.Attempt) error {
		if _, ok := a.Whole.(*certificatesv1.CertificateSigningRequest); !ok || !a.CreatesObject() ||
			slices.Contains(a.User.Groups, api.GroupMasters) {
			return nil
		}
		all, err := cluster.List(ctx, "certificatesigningrequests", "", false)
		if err != nil {
			return fmt.Errorf("counting certificate signing requests: %w", err)
		}
		n, bytes := 0, encodedSize(a.Whole)
		for _, o := range all {
			if c, ok := o.(*certificatesv1.CertificateSigningRequest); ok && c.Spec.Username == a.User.Name &&
				isUndecided(c) {
				n++
				bytes += encodedSize(c)
			}
		}
		if bytes > maxUndecidedBytes {
			return admission.NewForbidden(a, a.Whole,
				fmt.Errorf("%s would have undecided certificate signing requests of %d bytes, the maximum is %d: "+
					"approve, deny or delete some; they expire after a day",
					a.User.Name, bytes, maxUndecidedBytes))
		}
		if n >= limit {
			return admission.NewForbidden(a, a.Whole,
				fmt.Errorf("%s has %d undecided certificate signing requests, which is the maximum: approve, deny or "+
					"delete some; they expire after a day",
					a.User.Name, n))
		}
		return nil
	}
}

func isUndecided(c *certificatesv1.CertificateSigningRequest) bool {
	return !slices.ContainsFunc(c.Status.Conditions, func(k certificatesv1.CertificateSigningRequestCondition) bool {
		return k.Type == certificatesv1.CertificateApproved || k.Type == certificatesv1.CertificateDenied ||
			k.Type == certificatesv1.CertificateFailed
	})
}
