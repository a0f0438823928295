package engine

import (
	"context"
	"log/slog"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/record"

	"keelson.dev/keelson/controlplane/client"
)

// NewRecorder returns a recorder that writes Events through cl in the background, and a function
// that shuts it down. component and host are the source of the Events. Repeated Events are counted,
// and many Events of one object are limited. The event queue and its two goroutines are started
// with the first Event, because many controllers never record an Event.
func NewRecorder(ctx context.Context, cl *client.Client, log *slog.Logger, component, host string) (
	record.EventRecorder, func(),
) {
	r := &lazyRecorder{start: func() (record.EventRecorder, func()) {
		// The broadcaster must outlive the workers that use it; it is shut down after them.
		b := record.NewBroadcaster(record.WithContext(context.WithoutCancel(ctx)))
		b.StartRecordingToSink(eventSink{ctx: ctx, client: cl, log: log})
		return b.NewRecorder(scheme.Scheme, corev1.EventSource{Component: component, Host: host}), b.Shutdown
	}}
	return r, r.shutdownRecorder
}

// lazyRecorder is an EventRecorder that starts its broadcaster when the first event is recorded.
type lazyRecorder struct {
	start func() (record.EventRecorder, func())

	mu       sync.Mutex
	recorder record.EventRecorder
	stop     func()
	shutDown bool
}

// startedRecorder returns the recorder, after it has started it if necessary. It returns nil if the
// recorder was shut down before its first event.
func (r *lazyRecorder) startedRecorder() record.EventRecorder {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.recorder == nil && !r.shutDown {
		r.recorder, r.stop = r.start()
	}
	return r.recorder
}

func (r *lazyRecorder) shutdownRecorder() {
	r.mu.Lock()
	stop := r.stop
	r.stop, r.shutDown = nil, true
	r.mu.Unlock()
	if stop != nil {
		stop()
	}
}

func (r *lazyRecorder) Event(obj runtime.Object, kind, reason, message string) {
	if to := r.startedRecorder(); to != nil {
		to.Event(obj, kind, reason, message)
	}
}

func (r *lazyRecorder) Eventf(obj runtime.Object, kind, reason, format string, args ...any) {
	if to := r.startedRecorder(); to != nil {
		to.Eventf(obj, kind, reason, format, args...)
	}
}

func (r *lazyRecorder) AnnotatedEventf(
	obj runtime.Object, annotations map[string]string, kind, reason, format string, args ...any,
) {
	if to := r.startedRecorder(); to != nil {
		to.AnnotatedEventf(obj, annotations, kind, reason, format, args...)
	}
}

// eventSink stores the Events that the broadcaster has aggregated. An Event that cannot be stored
// is logged and dropped, so that recording never blocks or fails a reconcile.
type eventSink struct {
	ctx    context.Context
	client *client.Client
	log    *slog.Logger
}

func (s eventSink) Create(e *corev1.Event) (*corev1.Event, error) {
	got, err := client.Create(s.ctx, s.client, e)
	if apierrors.IsAlreadyExists(err) {
		// the name contains the time: two events of one object in one clock tick have the same name
		e.Name += "." + rand.String(5)
		got, err = client.Create(s.ctx, s.client, e)
	}
	return s.logLostEvent(e)(got, err)
}

func (s eventSink) Update(e *corev1.Event) (*corev1.Event, error) {
	return s.logLostEvent(e)(client.Update(s.ctx, s.client, e))
}

func (s eventSink) Patch(old *corev1.Event, data []byte) (*corev1.Event, error) {
	got, err := client.Patch[*corev1.Event](s.ctx, s.client, old.Namespace, old.Name, "",
		types.StrategicMergePatchType, data)
	if apierrors.IsNotFound(err) {
		return got, err // the Event has expired: the broadcaster creates a new Event
	}
	return s.logLostEvent(old)(got, err)
}

func (s eventSink) logLostEvent(e *corev1.Event) func(*corev1.Event, error) (*corev1.Event, error) {
	return func(got *corev1.Event, err error) (*corev1.Event, error) {
		if err == nil {
			return got, nil
		}
		if s.ctx.Err() == nil && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			s.log.Warn("event lost", "reason", e.Reason, "object", e.InvolvedObject.Namespace+"/"+e.InvolvedObject.Name,
				"error", err)
		}
		return e, nil
	}
}
