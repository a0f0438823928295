package testcluster

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// LateObject creates Object when a controller first lists Kind. The object is therefore in the
// list, but not in any cache. Done reports that it was created.
type LateObject struct {
	Kind   *api.Kind
	Admin  *client.Client
	Object api.Object
	Done   atomic.Bool
}

// UnconfirmedWrites is a backend that returns a timeout (504, outcome unknown) for the first
// request for which Match returns true. It performs that request right before the next such
// request. A raft entry is committed that late if the disks of the followers are slow.
type UnconfirmedWrites struct {
	api.Backend
	Match func(*api.Request) bool

	mu   sync.Mutex
	late *api.Request
	done bool
}

// Do implements api.Backend.
func (u *UnconfirmedWrites) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	if !u.Match(r) {
		return u.Backend.Do(ctx, r)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.done {
		u.done, u.late = true, r
		return nil,
			apierrors.NewTimeoutError("the store did not confirm the change in time; whether it was made is unknown", 1)
	}
	if late := u.late; late != nil {
		u.late = nil
		if _, err := u.Backend.Do(context.WithoutCancel(ctx), late); err != nil {
			return nil, err
		}
	}
	return u.Backend.Do(ctx, r)
}

// LossyInformer is an informer that loses half of its notifications.
type LossyInformer struct {
	cache.SharedIndexInformer
	Rand *rand.Rand
}

// AddEventHandler implements cache.SharedInformer.
func (l LossyInformer) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	// Each handler has its own random source: the handler of an ended leadership may still be
	// called when the next leadership starts.
	return l.SharedIndexInformer.AddEventHandler(LossyHandler{h, rand.New(rand.NewPCG(l.Rand.Uint64(), 0))})
}

// LossyHandler is an event handler that receives half of the notifications.
type LossyHandler struct {
	cache.ResourceEventHandler
	Rand *rand.Rand
}

// OnAdd implements cache.ResourceEventHandler.
func (h LossyHandler) OnAdd(obj any, initial bool) {
	if h.Rand.IntN(2) == 0 {
		h.ResourceEventHandler.OnAdd(obj, initial)
	}
}

// OnUpdate implements cache.ResourceEventHandler.
func (h LossyHandler) OnUpdate(old, obj any) {
	if h.Rand.IntN(2) == 0 {
		h.ResourceEventHandler.OnUpdate(old, obj)
	}
}

// OnDelete implements cache.ResourceEventHandler.
func (h LossyHandler) OnDelete(obj any) {
	if h.Rand.IntN(2) == 0 {
		h.ResourceEventHandler.OnDelete(obj)
	}
}

// LoseSomeEvents makes the informers of all kinds that e watches lose half of their events.
func LoseSomeEvents(e *engine.DynamicWatch, seed *atomic.Uint64) {
	now, made := e.Current, map[cache.SharedIndexInformer]cache.SharedIndexInformer{}
	var mu sync.Mutex // guards made: every controller calls e.Current
	e.Current = func() *client.Informed {
		mu.Lock()
		defer mu.Unlock()
		out := *now()
		out.Kinds = slices.Clone(out.Kinds)
		for i, k := range out.Kinds {
			if made[k.Informer] == nil {
				made[k.Informer] = LossyInformer{k.Informer, rand.New(rand.NewPCG(seed.Add(1), 0))}
			}
			out.Kinds[i].Informer = made[k.Informer]
		}
		return &out
	}
}
