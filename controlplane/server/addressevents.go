package server

import (
	"context"
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers"
)

// addressRefused is the reason of Events about addresses that nodes report and that are refused.
const addressRefused = "AddressRefused"

// Bounds of these Events. An agent repeats a refused report every two seconds, and a hostile node sends any number.
const (
	addressEventsBurst = 10               // of a node at once
	addressEventEvery  = 30 * time.Second // and one more of a node so often
	addressEventAgain  = 10 * time.Minute // until the same refusal has another Event
	addressEventNodes  = 1024             // nodes that are remembered
)

// addressEvents records Warning Events about refused addresses, a bounded number for each node.
type addressEvents struct {
	now    func() time.Time
	record func(about api.Object, message string) // nil before Run and after it

	mu    sync.Mutex
	nodes map[string]*refusedOf
}

// refusedOf is what is remembered of a node.
type refusedOf struct {
	budget   *rate.Limiter
	recorded map[string]time.Time // by object and message; the budget bounds it
}

// forget drops refusals that may have another Event, and reports whether nothing is left to remember.
func (r *refusedOf) forget(now time.Time) bool {
	for key, at := range r.recorded {
		if now.Sub(at) >= addressEventAgain {
			delete(r.recorded, key)
		}
	}
	return len(r.recorded) == 0 && r.budget.TokensAt(now) >= addressEventsBurst
}

// refused records that a report about an object was refused, unless the node has had too many of these Events.
func (e *addressEvents) refused(about api.Object, why error) {
	node := about.GetName()
	if p, ok := about.(*corev1.Pod); ok {
		node = p.Spec.NodeName
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.record != nil && e.admit(node, string(about.GetUID())+about.GetName()+why.Error()) {
		e.record(about, why.Error())
	}
}

func (e *addressEvents) admit(node, key string) bool {
	now := e.now()
	of := e.nodes[node]
	if of == nil {
		if len(e.nodes) >= addressEventNodes {
			for name, r := range e.nodes {
				if r.forget(now) {
					delete(e.nodes, name)
				}
			}
		}
		if len(e.nodes) >= addressEventNodes {
			return false
		}
		if e.nodes == nil {
			e.nodes = make(map[string]*refusedOf)
		}
		of = &refusedOf{budget: rate.NewLimiter(rate.Every(addressEventEvery), addressEventsBurst), recorded: make(map[string]time.Time)}
		e.nodes[node] = of
	}
	of.forget(now)
	if _, again := of.recorded[key]; again || !of.budget.AllowN(now, 1) {
		return false
	}
	of.recorded[key] = now
	return true
}

// recordAddressEvents stores the Events until ctx ends.
func (r *Replica) recordAddressEvents(ctx context.Context) error {
	as := r.client.As(api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters, api.GroupAuthenticated}})
	to, stop := controllers.NewRecorder(ctx, as, r.log.With("part", "events of refused addresses"), "apiserver", r.cfg.Name)
	defer stop()
	set := func(record func(api.Object, string)) {
		r.addressEvents.mu.Lock()
		defer r.addressEvents.mu.Unlock()
		r.addressEvents.record = record
	}
	set(func(about api.Object, message string) {
		to.Event(about, corev1.EventTypeWarning, addressRefused, message)
	})
	defer set(nil)
	<-ctx.Done()
	return nil
}
