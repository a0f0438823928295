// Package addressevents records Events about IP addresses that nodes have reported, for themselves
// or their pods, and that the control plane has refused.
package addressevents

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// addressRefused is the reason of all Events that a Recorder records.
const addressRefused = "AddressRefused"

// Limits of the number of Events about IP addresses that the control plane has refused. After a
// refusal, an agent reports its addresses again every two seconds. A malicious node can report any
// number of addresses.
const (
	addressEventsBurst = 10               // number of Events that a node may cause without a pause
	addressEventEvery  = 30 * time.Second // pause between further Events that a node causes
	addressEventRepeat = 10 * time.Minute // pause before an Event with the same object and message is recorded again
	addressEventNodes  = 1024             // maximum number of nodes for which recorded Events are remembered
)

// Recorder records Warning Events about IP addresses that a node has reported and the control plane
// has refused. It limits the number of Events for each node.
type Recorder struct {
	now    func() time.Time
	record func(about api.Object, message string) // creates an Event; nil unless Run is running

	mu    sync.Mutex
	nodes map[string]*nodeRefusals
}

// nodeRefusals contains the Events that were recorded recently about IP addresses that one node has
// reported and the control plane has refused.
type nodeRefusals struct {
	budget   *rate.Limiter
	recorded map[string]time.Time // time of each Event, by object and message; limited by budget
}

// dropExpired forgets Events that are older than addressEventRepeat, which may be recorded again.
// It returns true if r contains no Event and its budget is full, so that the caller can delete r.
func (r *nodeRefusals) dropExpired(now time.Time) bool {
	for key, at := range r.recorded {
		if now.Sub(at) >= addressEventRepeat {
			delete(r.recorded, key)
		}
	}
	return len(r.recorded) == 0 && r.budget.TokensAt(now) >= addressEventsBurst
}

// NewRecorder returns a Recorder. It records no Event until Run is called.
func NewRecorder(now func() time.Time) *Recorder { return &Recorder{now: now} }

// RecordRefusal records an Event on object, a Node or a Pod: the control plane has refused the IP
// addresses that the node reported for object. The text of reason is the Event's message. If the
// node has used up its budget of Events, no Event is recorded.
func (e *Recorder) RecordRefusal(object api.Object, reason error) {
	node := object.GetName()
	if p, ok := object.(*corev1.Pod); ok {
		node = p.Spec.NodeName
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.record != nil && e.allowEvent(node, string(object.GetUID())+object.GetName()+reason.Error()) {
		e.record(object, reason.Error())
	}
}

func (e *Recorder) allowEvent(node, key string) bool {
	now := e.now()
	of := e.nodes[node]
	if of == nil {
		if len(e.nodes) >= addressEventNodes {
			for name, r := range e.nodes {
				if r.dropExpired(now) {
					delete(e.nodes, name)
				}
			}
		}
		if len(e.nodes) >= addressEventNodes {
			return false
		}
		if e.nodes == nil {
			e.nodes = make(map[string]*nodeRefusals)
		}
		of = &nodeRefusals{budget: rate.NewLimiter(rate.Every(addressEventEvery), addressEventsBurst),
			recorded: make(map[string]time.Time)}
		e.nodes[node] = of
	}
	of.dropExpired(now)
	if _, again := of.recorded[key]; again || !of.budget.AllowN(now, 1) {
		return false
	}
	of.recorded[key] = now
	return true
}

// Run creates the Events of RecordRefusal until ctx ends. c is a client with the identity of the
// API server, and replica is the name of this replica.
func (e *Recorder) Run(ctx context.Context, c *client.Client, replica string, log *slog.Logger) error {
	to, stop := engine.NewRecorder(ctx, c, log, "apiserver", replica)
	defer stop()
	set := func(record func(api.Object, string)) {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.record = record
	}
	set(func(about api.Object, message string) {
		to.Event(about, corev1.EventTypeWarning, addressRefused, message)
	})
	defer set(nil)
	<-ctx.Done()
	return nil
}
