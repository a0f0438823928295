package horizontalpodautoscaler

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Period is the interval between two evaluations of an autoscaler.
const Period = 15 * time.Second

// Source reads metrics from the metrics APIs. All values are in thousandths of the metric's unit.
// Every call returns when its context is canceled.
type Source interface {
	// Resource returns each matching pod's usage of a resource, such as cpu. If container is not
	// "", only the usage of that container counts.
	Resource(ctx context.Context, namespace string, selector labels.Selector, name corev1.ResourceName,
		container string) (Samples, error)
	// Pods returns the value of custom metric m for each pod that the selector matches.
	Pods(ctx context.Context, namespace string, selector labels.Selector, m autoscalingv2.MetricIdentifier) (
		Samples, error)
	// Object returns the value of custom metric m for the object to which ref refers.
	Object(ctx context.Context, namespace string, ref autoscalingv2.CrossVersionObjectReference,
		m autoscalingv2.MetricIdentifier) (int64, error)
	// External returns the sum of all values of external metric m that its selector matches.
	External(ctx context.Context, namespace string, m autoscalingv2.MetricIdentifier) (int64, error)
}

// New returns the controller of HorizontalPodAutoscalers. It reads metrics from source. o applies
// to all autoscalers.
func New(d engine.Deps, source Source, o Options) *engine.Descriptor {
	autoscalers := client.Informer[*autoscalingv2.HorizontalPodAutoscaler](d.Informers)
	pods := client.Informer[*corev1.Pod](d.Informers)
	read := []string{"get", "list", "watch"}
	return &engine.Descriptor{
		Name:    "horizontal-pod-autoscaler",
		Workers: 5,
		Watches: []engine.Watch{engine.OnInformer(autoscalers, specChanges)},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"autoscaling"}, Resources: []string{"horizontalpodautoscalers"}, Verbs: read},
			{APIGroups: []string{"autoscaling"}, Resources: []string{"horizontalpodautoscalers/status"},
				Verbs: []string{"update"}},
			{APIGroups: []string{"*"}, Resources: []string{"*/scale"}, Verbs: []string{"get", "update"}},
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: read},
			{APIGroups: []string{"metrics.k8s.io"}, Resources: []string{"pods"}, Verbs: []string{"list"}},
			{APIGroups: []string{"custom.metrics.k8s.io", "external.metrics.k8s.io"}, Resources: []string{"*"},
				Verbs: []string{"get", "list"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{term: t, source: source, options: o, pods: pods,
				view:  engine.ViewOf[*autoscalingv2.HorizontalPodAutoscaler](t, autoscalers),
				known: map[engine.Key]memo{}}
			r.status = engine.NewStatusWriter(t, r.view, "horizontal pod autoscaler")
			return r.reconcileAutoscaler
		},
	}
}

// specChanges returns the key of a changed autoscaler, or nil if only its status has changed. The
// controller writes the status itself; a reconciliation for each write would shorten its period.
func specChanges(c engine.Change[*autoscalingv2.HorizontalPodAutoscaler]) []engine.Key {
	if c.Type == engine.Updated && c.Old.UID == c.New.UID && c.Old.Generation == c.New.Generation {
		return nil
	}
	return []engine.Key{engine.KeyOf(c.New)}
}

// memo is the state of one autoscaler that the controller keeps in memory.
type memo struct {
	uid      types.UID
	history  History
	selector labels.Selector // pod selector of the scaled object; nil means unknown
}

// reconciler reconciles autoscalers during one term of leadership. Every term has a new reconciler.
type reconciler struct {
	term    *engine.Term
	source  Source
	options Options
	pods    cache.SharedIndexInformer
	view    *engine.View[*autoscalingv2.HorizontalPodAutoscaler]
	status  *engine.StatusWriter[*autoscalingv2.HorizontalPodAutoscaler]

	mu    sync.Mutex
	known map[engine.Key]memo
}

func (r *reconciler) reconcileAutoscaler(ctx context.Context, key engine.Key) (time.Duration, error) {
	h, ok := r.view.Get(key.Namespace, key.Name)
	if !ok || h.DeletionTimestamp != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.known, key)
		return 0, nil
	}
	ctx, cancel := context.WithTimeout(ctx, Period)
	defer cancel()
	s := Snapshot{Autoscaler: h, Options: r.options, Now: r.term.Now(), History: r.storedHistory(key, h.UID)}
	kind, scale, err := r.scaleOf(ctx, h)
	if s.TargetErr = err; err == nil {
		s.Target = Target{Spec: scale.Spec.Replicas, Status: scale.Status.Replicas, Selector: scale.Status.Selector}
		r.readPodsAndMetrics(ctx, key, &s)
	}
	step := PlanAutoscaler(s)
	if step.Rescale {
		err := r.writeScale(ctx, kind, h.Namespace, scale, step.Replicas)
		if apierrors.IsConflict(err) {
			return 0, engine.RaceError("scaling %s %s/%s: %w", kind.GVK.Kind, h.Namespace, scale.Name, err)
		}
		step = s.Rescaled(step, err)
	}
	r.storeHistory(key, step.History)
	for _, e := range step.Events {
		r.term.Events.Event(h, e.Type, e.Reason, e.Message)
	}
	if equality.Semantic.DeepEqual(step.Status, h.Status) {
		return Period, nil
	}
	next := h.DeepCopy()
	next.Status = step.Status
	if _, err := r.status.WriteNow(ctx, next); err != nil {
		return 0, err
	}
	return Period, nil
}

// readPodsAndMetrics adds the pods of the scaled object to s and, if the metrics are needed, their
// current values.
func (r *reconciler) readPodsAndMetrics(ctx context.Context, key engine.Key, s *Snapshot) {
	if s.Target.Selector == "" {
		return
	}
	selector, err := labels.Parse(s.Target.Selector)
	if err != nil {
		s.PodsErr = err
		return
	}
	for _, p := range engine.CachedBy[*corev1.Pod](r.pods, engine.NamespaceIndex, key.Namespace) {
		if selector.Matches(labels.Set(p.Labels)) {
			s.Pods = append(s.Pods, p)
		}
	}
	s.Shared = r.recordSelector(key, s.Autoscaler.UID, selector, s.Pods)
	if !UsesMetrics(s.Autoscaler, s.Target) || len(s.Shared) > 0 {
		return
	}
	for i := range s.Autoscaler.Spec.Metrics {
		s.Readings = append(s.Readings, r.readMetric(ctx, key.Namespace, selector, &s.Autoscaler.Spec.Metrics[i]))
	}
}

func (r *reconciler) readMetric(
	ctx context.Context, namespace string, of labels.Selector, m *autoscalingv2.MetricSpec,
) (out Reading) {
	switch {
	case m.Resource != nil:
		out.Samples, out.Err = r.source.Resource(ctx, namespace, of, m.Resource.Name, "")
	case m.ContainerResource != nil:
		out.Samples, out.Err = r.source.Resource(ctx, namespace, of, m.ContainerResource.Name,
			m.ContainerResource.Container)
	case m.Pods != nil:
		out.Samples, out.Err = r.source.Pods(ctx, namespace, of, m.Pods.Metric)
	case m.Object != nil:
		out.Value, out.Err = r.source.Object(ctx, namespace, m.Object.DescribedObject, m.Object.Metric)
	case m.External != nil:
		out.Value, out.Err = r.source.External(ctx, namespace, m.External.Metric)
	}
	return out
}

// storedHistory returns the History of the autoscaler with this key and UID. It is empty for a new
// autoscaler, also if a deleted autoscaler had the same name.
func (r *reconciler) storedHistory(key engine.Key, uid types.UID) History {
	r.mu.Lock()
	defer r.mu.Unlock()
	m, ok := r.known[key]
	if !ok || m.uid != uid {
		m = memo{uid: uid}
		r.known[key] = m
	}
	return m.history
}

func (r *reconciler) storeHistory(key engine.Key, h History) {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.known[key]
	m.history = h
	r.known[key] = m
}

// recordSelector stores the pod selector of the autoscaler with this key and UID. It returns the
// names of other autoscalers in the namespace that scale some of the same pods.
func (r *reconciler) recordSelector(
	key engine.Key, uid types.UID, selector labels.Selector, pods []*corev1.Pod,
) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	m := r.known[key]
	m.uid, m.selector = uid, selector
	r.known[key] = m
	var names []string
	for other, m := range r.known {
		if other == key || other.Namespace != key.Namespace || m.selector == nil {
			continue
		}
		if slices.ContainsFunc(pods, func(p *corev1.Pod) bool { return m.selector.Matches(labels.Set(p.Labels)) }) {
			names = append(names, other.Name)
		}
	}
	slices.Sort(names)
	return names
}

// scaleOf returns the kind of the object that h scales, and the object's scale subresource.
func (r *reconciler) scaleOf(ctx context.Context, h *autoscalingv2.HorizontalPodAutoscaler) (
	*api.Kind, *autoscalingv1.Scale, error,
) {
	ref := h.Spec.ScaleTargetRef
	kind, err := kindOf(r.term.Client.Kinds(), ref)
	if err != nil {
		return nil, nil, err
	}
	if kind.Subresources["scale"] == nil || !kind.Namespaced {
		return nil, nil, fmt.Errorf("a %s cannot be scaled: its kind has no subresource scale in a namespace", ref.Kind)
	}
	out, err := r.term.Client.Do(ctx, &api.Request{Verb: api.VerbGet, Kind: kind, Subresource: "scale",
		Namespace: h.Namespace, Name: ref.Name})
	if err != nil {
		return nil, nil, fmt.Errorf("reading the scale of %s %s/%s: %w", ref.Kind, h.Namespace, ref.Name, err)
	}
	scale, ok := out.(*autoscalingv1.Scale)
	if !ok {
		return nil, nil, fmt.Errorf("reading the scale of %s %s/%s: it is a %T", ref.Kind, h.Namespace, ref.Name, out)
	}
	return kind, scale, nil
}

// kindOf returns the kind to which ref refers. If the version of ref is not served, it returns
// another version of the kind.
func kindOf(kinds *api.Kinds, ref autoscalingv2.CrossVersionObjectReference) (*api.Kind, error) {
	gv, err := schema.ParseGroupVersion(ref.APIVersion)
	if err != nil {
		return nil, fmt.Errorf("apiVersion %q of %s %s: %w", ref.APIVersion, ref.Kind, ref.Name, err)
	}
	if kind := kinds.ByGVK(gv.WithKind(ref.Kind)); kind != nil {
		return kind, nil
	}
	for _, k := range kinds.All() {
		if k.GVK.Group == gv.Group && k.GVK.Kind == ref.Kind {
			return k, nil
		}
	}
	return nil, fmt.Errorf("no matches for kind %q in group %q", ref.Kind, gv.Group)
}

// writeScale writes the replicas to the scale subresource of an object of the given kind. It fails
// with a conflict if the object has changed since scale was read.
func (r *reconciler) writeScale(
	ctx context.Context, kind *api.Kind, namespace string, scale *autoscalingv1.Scale, replicas int32,
) error {
	next := scale.DeepCopy()
	next.Spec.Replicas = replicas
	_, err := r.term.Client.Do(ctx, &api.Request{Verb: api.VerbUpdate, Kind: kind, Subresource: "scale",
		Namespace: namespace,
		Name:      scale.Name, Object: next})
	return err
}
