package engine

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

// Minimum and maximum retry delay of a failing key, default of Options.Resync, and the interval at
// which expired entries of views are removed.
const (
	minRetryDelay = 5 * time.Millisecond
	maxRetryDelay = 60 * time.Second
	defaultResync = 10 * time.Minute
	sweepPeriod   = 5 * time.Second
)

// Options configures an Engine. The zero value is suitable for production.
type Options struct {
	// OwnIdentity makes each controller act as service account kube-system/NAME instead of
	// system:kube-controller-manager.
	OwnIdentity bool
	// Resync is the interval at which all keys are queued again from the caches, without API calls.
	// It bounds the delay that a lost notification causes. 0 means 10 minutes.
	Resync time.Duration
	// Metrics receives the metrics of the work queues. nil means that they are not exported.
	Metrics *QueueMetrics
}

// Engine runs controllers while this replica of the control plane is the leader.
type Engine struct {
	deps        Deps
	options     Options
	controllers []*Descriptor
}

// NewEngine returns an engine for the controllers. It starts nothing.
func NewEngine(d Deps, o Options, cs ...*Descriptor) *Engine {
	if o.Resync == 0 {
		o.Resync = defaultResync
	}
	if o.Metrics == nil {
		o.Metrics = NewQueueMetrics()
	}
	return &Engine{deps: d, options: o, controllers: cs}
}

// Parts returns one lifecycle.Part per controller. A part runs until its context, which must be
// canceled at the end of the term of leadership, is canceled and all workers have returned. The
// informers must be running and synced. fence is the raft term: the store rejects a controller's
// writes in a later term. A failed part may be run again.
func (e *Engine) Parts(fence uint64) []lifecycle.Part {
	var out []lifecycle.Part
	for _, c := range e.controllers {
		out = append(out, lifecycle.Part{Name: c.Name, Run: func(ctx context.Context) error {
			return e.leadController(ctx, c, fence)
		}})
	}
	return out
}

// Run runs all controllers until ctx is canceled. fence is the raft term (see Parts). A controller
// that fails is restarted while the others continue.
func (e *Engine) Run(ctx context.Context, fence uint64) error {
	lifecycle.Supervise(ctx, func(name string, err error, again time.Duration) {
		e.deps.Log.Error("a controller failed and is restarted", "controller", name, "error", err, "after", again)
	}, e.Parts(fence)...)
	return ctx.Err()
}

// Term is one term of leadership for one controller. It has the controller's client, recorders and
// clock. The store rejects writes of the client after the term has ended.
type Term struct {
	Client   *client.Client
	Events   record.EventRecorder
	Log      *slog.Logger
	Now      func() time.Time
	Timeline *api.Timeline
	Actor    string // controller and replica, for example "replicaset-controller/cp1"

	confirm   func(context.Context) error // see ConfirmLeadership; nil means that leadership cannot be confirmed
	queue     workqueue.TypedRateLimitingInterface[Key]
	keys      *keyQueue // keys in the queue, for the metrics
	observers map[cache.SharedIndexInformer][]observer
}

// observer is the part of View that does not depend on its type parameter.
type observer interface {
	handleChange(t ChangeType, obj any)
	takeExpired() []any
}

func (t *Term) addObserver(inf cache.SharedIndexInformer, o observer) {
	t.observers[inf] = append(t.observers[inf], o)
}

// ConfirmLeadership returns nil once a quorum has confirmed, after the start of the call, that this
// term of leadership continues. Callers must call it before every action that the store cannot
// reject: calls of CSI drivers, and changes in services outside the store.
func (t *Term) ConfirmLeadership(ctx context.Context) error {
	if t.confirm == nil {
		return errors.New("leadership cannot be confirmed: no confirmation is configured")
	}
	return t.confirm(ctx)
}

// Enqueue queues key for a reconcile.
func (t *Term) Enqueue(key Key) { t.queue.Add(key) }

// clientIdentity returns the user as which controller c makes its API calls.
func (e *Engine) clientIdentity(c *Descriptor) api.User {
	if !e.options.OwnIdentity {
		return api.User{Name: api.UserController, Groups: []string{api.GroupAuthenticated}}
	}
	return Identity(c)
}

// Identity returns the service account of controller c in the form of a user.
func Identity(c *Descriptor) api.User {
	return api.User{
		Name:   api.ServiceAccountPrefix + "kube-system:" + c.Name,
		Groups: []string{api.GroupServiceAccounts, api.GroupServiceAccounts + ":kube-system", api.GroupAuthenticated},
	}
}

// leadController runs controller c during one term of leadership. fence is the raft term. It
// returns when ctx is canceled and all workers have returned.
func (e *Engine) leadController(ctx context.Context, c *Descriptor, fence uint64) error {
	cl := e.deps.Client.As(e.clientIdentity(c)).Fenced(fence)
	log := e.deps.Log.With("controller", c.Name)
	events, stopEvents := NewRecorder(ctx, cl, log, c.Name, e.deps.Replica)
	defer stopEvents()
	keys := e.options.Metrics.startQueue(c.Name, e.deps.Clock())
	defer keys.clearKeys()
	t := &Term{
		Client: cl, Events: events, Log: log, Now: e.deps.Clock(), Timeline: e.deps.Timeline,
		Actor:     c.Name + "/" + e.deps.Replica,
		observers: map[cache.SharedIndexInformer][]observer{},
		keys:      keys,
		queue: workqueue.NewTypedRateLimitingQueueWithConfig(
			workqueue.NewTypedItemExponentialFailureRateLimiter[Key](minRetryDelay, maxRetryDelay),
			workqueue.TypedRateLimitingQueueConfig[Key]{DelayingQueue: workqueue.NewTypedDelayingQueueWithConfig(
				workqueue.TypedDelayingQueueConfig[Key]{
					Queue: workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[Key]{Queue: keys})})}),
	}
	if confirm := e.deps.ConfirmLeadership; confirm != nil {
		t.confirm = func(ctx context.Context) error { return confirm(ctx, fence) }
	}
	defer t.queue.ShutDown()
	reconcile := c.Lead(t)
	feeds := newInformerFeeds(c, t)
	defer feeds.detachHandlers()
	changed, err := feeds.attachHandlers()
	if err != nil {
		return err
	}

	var wg sync.WaitGroup
	for range max(1, c.Workers) {
		wg.Go(func() {
			for e.reconcileNextKey(ctx, t, reconcile) {
			}
		})
	}
	wg.Go(func() { feeds.runUntilDone(ctx, e.options.Resync, changed) })
	<-ctx.Done()
	t.queue.ShutDown()
	wg.Wait()
	return ctx.Err()
}

// reconcileNextKey waits for the next key in the queue and reconciles it. It returns false when the
// queue has shut down.
func (e *Engine) reconcileNextKey(ctx context.Context, t *Term, reconcile Reconcile) bool {
	key, down := t.queue.Get()
	if down {
		return false
	}
	defer t.queue.Done(key)
	defer t.keys.recordDone(key)
	if ctx.Err() != nil {
		return true
	}
	again, err := reconcileRecoveringPanic(ctx, reconcile, key)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		level := slog.LevelError
		if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || errors.Is(err, errCacheBehind) {
			level = slog.LevelDebug // another client wrote first: the cache will contain its write
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

// errCacheBehind is wrapped by errors that are caused only by a stale cache.
var errCacheBehind = errors.New("the cache was stale")

// RaceError returns an error that is caused only by a stale cache. The engine retries it like any
// other error, but logs it at level debug.
func RaceError(format string, args ...any) error {
	return fmt.Errorf("%w: %w", errCacheBehind, fmt.Errorf(format, args...))
}

// reconcileRecoveringPanic calls reconcile and returns its results. It turns a panic into an error,
// so that one malformed object does not stop the leader.
func reconcileRecoveringPanic(ctx context.Context, reconcile Reconcile, key Key) (again time.Duration, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
		}
	}()
	return reconcile(ctx, key)
}
