package controllers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/internal/lifecycle"
)

// Delays of a failing key, the period after which every cached object is looked at
// again, and how often views are swept.
const (
	minRetry      = 5 * time.Millisecond
	maxRetry      = 60 * time.Second
	defaultResync = 10 * time.Minute
	sweepPeriod   = 5 * time.Second
)

// Options of an Engine. The zero value is right for production.
type Options struct {
	// OwnIdentity lets each controller act as service account kube-system/NAME
	// instead of system:kube-controller-manager.
	OwnIdentity bool
	// Resync is how often all keys are queued again from the caches, without a
	// call to the API; 0 = 10 minutes. A lost notification delays by this at most.
	Resync time.Duration
	// Metrics show the queues; nil = nobody looks.
	Metrics *QueueMetrics
}

// Engine runs controllers while this replica leads.
type Engine struct {
	deps        Deps
	options     Options
	controllers []*Controller
}

// NewEngine returns an engine for the controllers. Nothing runs until Run.
func NewEngine(d Deps, o Options, cs ...*Controller) *Engine {
	if o.Resync == 0 {
		o.Resync = defaultResync
	}
	if o.Metrics == nil {
		o.Metrics = NewQueueMetrics()
	}
	return &Engine{deps: d, options: o, controllers: cs}
}

// Parts are the controllers, each of which runs until its context, the leadership, ends and all its workers have
// returned. The informers must run and be synced. fence is the raft term of the leadership: no write of a controller
// applies in a later one. A part that fails may be run again.
func (e *Engine) Parts(fence uint64) []lifecycle.Part {
	var out []lifecycle.Part
	for _, c := range e.controllers {
		out = append(out, lifecycle.Part{Name: c.Name, Run: func(ctx context.Context) error { return e.lead(ctx, c, fence) }})
	}
	return out
}

// Run runs every controller until ctx ends. One that fails is begun again, while the others go on.
func (e *Engine) Run(ctx context.Context, fence uint64) error {
	lifecycle.Supervise(ctx, func(name string, err error, again time.Duration) {
		e.deps.Log.Error("a controller failed and is begun again", "controller", name, "error", err, "after", again)
	}, e.Parts(fence)...)
	return ctx.Err()
}

// Term is one leadership of one controller: its fenced client, and where it records.
type Term struct {
	Client   *client.Client
	Events   record.EventRecorder
	Log      *slog.Logger
	Now      func() time.Time
	Timeline *api.Timeline
	Actor    string // "replicaset-controller/cp1"

	confirm   func(context.Context) error // see ConfirmLeadership; nil = never
	queue     workqueue.TypedRateLimitingInterface[Key]
	keys      *queue // what is in it
	observers map[cache.SharedIndexInformer][]observer
}

// observer is a View without its type.
type observer interface {
	observed(t ChangeType, obj any)
	expired() []any
}

func (t *Term) observe(inf cache.SharedIndexInformer, o observer) {
	t.observers[inf] = append(t.observers[inf], o)
}

// ConfirmLeadership returns nil when a majority has confirmed, after the call began, that this leadership goes on. It precedes every
// action that no fence stops: calls of CSI drivers, and changes in services outside the store.
func (t *Term) ConfirmLeadership(ctx context.Context) error {
	if t.confirm == nil {
		return errors.New("the leadership cannot be confirmed")
	}
	return t.confirm(ctx)
}

// Enqueue asks for a reconcile of key.
func (t *Term) Enqueue(key Key) { t.queue.Add(key) }

// identity is who a controller is to authorization and in events.
func (e *Engine) identity(c *Controller) api.User {
	if !e.options.OwnIdentity {
		return api.User{Name: api.UserController, Groups: []string{api.GroupAuthenticated}}
	}
	return Identity(c)
}

// Identity is the service account of a controller.
func Identity(c *Controller) api.User {
	return api.User{
		Name:   api.ServiceAccountPrefix + "kube-system:" + c.Name,
		Groups: []string{api.GroupServiceAccounts, api.GroupServiceAccounts + ":kube-system", api.GroupAuthenticated},
	}
}

// lead runs one controller for one leadership.
func (e *Engine) lead(ctx context.Context, c *Controller, fence uint64) error {
	cl := e.deps.Client.As(e.identity(c)).Fenced(fence)
	log := e.deps.Log.With("controller", c.Name)
	events, stopEvents := NewRecorder(ctx, cl, log, c.Name, e.deps.Replica)
	defer stopEvents()
	keys := e.options.Metrics.queue(c.Name, e.deps.Clock())
	defer keys.end()
	t := &Term{
		Client: cl, Events: events, Log: log, Now: e.deps.Clock(), Timeline: e.deps.Timeline,
		Actor:     c.Name + "/" + e.deps.Replica,
		observers: map[cache.SharedIndexInformer][]observer{},
		keys:      keys,
		queue: workqueue.NewTypedRateLimitingQueueWithConfig(
			workqueue.NewTypedItemExponentialFailureRateLimiter[Key](minRetry, maxRetry),
			workqueue.TypedRateLimitingQueueConfig[Key]{DelayingQueue: workqueue.NewTypedDelayingQueueWithConfig(
				workqueue.TypedDelayingQueueConfig[Key]{
					Queue: workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[Key]{Queue: keys})})}),
	}
	if confirm := e.deps.ConfirmLeadership; confirm != nil {
		t.confirm = func(ctx context.Context) error { return confirm(ctx, fence) }
	}
	defer t.queue.ShutDown()
	reconcile := c.Lead(t)
	feeds := newFeeds(c, t)
	defer feeds.detach()
	changed, err := feeds.attach()
	if err != nil {
		return err
	}

	var wg sync.WaitGroup
	for range max(1, c.Workers) {
		wg.Go(func() {
			for e.next(ctx, t, reconcile) {
			}
		})
	}
	wg.Go(func() { feeds.run(ctx, e.options.Resync, changed) })
	<-ctx.Done()
	t.queue.ShutDown()
	wg.Wait()
	return ctx.Err()
}

// next reconciles one key. It returns false when the queue has shut down.
func (e *Engine) next(ctx context.Context, t *Term, reconcile Reconcile) bool {
	key, down := t.queue.Get()
	if down {
		return false
	}
	defer t.queue.Done(key)
	defer t.keys.done(key)
	if ctx.Err() != nil {
		return true
	}
	again, err := guarded(ctx, reconcile, key)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		level := slog.LevelError
		if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || errors.Is(err, errRace) {
			level = slog.LevelDebug // someone was faster; the cache will tell
		}
		t.Log.Log(ctx, level, "reconcile", "key", key.String(), "retries", t.queue.NumRequeues(key), "error", err)
		t.keys.retries.Inc()
		t.queue.AddRateLimited(key)
	case again > 0:
		t.queue.Forget(key)
		t.keys.retries.Inc()
		t.queue.AddAfter(key, again)
	default:
		t.queue.Forget(key)
	}
	return true
}

// errRace marks an error that only says that the cache was behind.
var errRace = errors.New("the cache was behind")

// Race wraps an error that is a matter of timing: retried like any other, not logged as one.
func Race(format string, args ...any) error {
	return fmt.Errorf("%w: %w", errRace, fmt.Errorf(format, args...))
}

// guarded turns a panic into an error: one bad object must not take the leader down.
func guarded(ctx context.Context, reconcile Reconcile, key Key) (again time.Duration, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return reconcile(ctx, key)
}
