package disruption

import (
	"context"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/policy"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// New returns the disruption controller.
func New(d engine.Deps) *engine.Descriptor {
	r := informers{
		budgets:     client.Informer[*policyv1.PodDisruptionBudget](d.Informers),
		pods:        client.Informer[*corev1.Pod](d.Informers),
		sets:        client.Informer[*appsv1.ReplicaSet](d.Informers),
		deployments: client.Informer[*appsv1.Deployment](d.Informers),
		stateful:    client.Informer[*appsv1.StatefulSet](d.Informers),
		replicated:  client.Informer[*corev1.ReplicationController](d.Informers),
	}
	read := []string{"get", "list", "watch"}
	return &engine.Descriptor{
		Name:    "disruption-controller",
		Workers: 1,
		Watches: []engine.Watch{
			engine.OnInformer(r.budgets, engine.Self[*policyv1.PodDisruptionBudget]),
			engine.OnInformer(r.pods, func(c engine.Change[*corev1.Pod]) []engine.Key {
				keys := r.budgetsOf(c.New)
				if _, target := staleTarget(c.New, time.Time{}); target {
					keys = append(keys, engine.Key{Kind: podKey, Namespace: c.New.Namespace, Name: c.New.Name})
				}
				return keys
			}),
			engine.OnInformer(r.deployments, func(c engine.Change[*appsv1.Deployment]) []engine.Key {
				return r.budgetsIn(c.New.Namespace, nil)
			}),
			engine.OnInformer(r.stateful, func(c engine.Change[*appsv1.StatefulSet]) []engine.Key {
				return r.budgetsIn(c.New.Namespace, nil)
			}),
			engine.OnInformer(r.replicated, func(c engine.Change[*corev1.ReplicationController]) []engine.Key {
				return r.budgetsIn(c.New.Namespace, nil)
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"pods", "replicationcontrollers"}, Verbs: read},
			{APIGroups: []string{""}, Resources: []string{"pods/status"}, Verbs: []string{"update"}},
			{APIGroups: []string{"apps"}, Resources: []string{"deployments", "replicasets", "statefulsets"},
				Verbs: read},
			{APIGroups: []string{"policy"}, Resources: []string{"poddisruptionbudgets"}, Verbs: read},
			{APIGroups: []string{"policy"}, Resources: []string{"poddisruptionbudgets/status"},
				Verbs: []string{"update"}},
			{APIGroups: []string{"*"}, Resources: []string{"*/scale"}, Verbs: []string{"get"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			return (&reconciler{informers: r, term: t, view: engine.ViewOf[*policyv1.PodDisruptionBudget](t,
				r.budgets)}).reconcileBudget
		},
	}
}

type informers struct {
	budgets, pods, sets, deployments, stateful, replicated cache.SharedIndexInformer
}

// budgetsOf returns the keys of the PodDisruptionBudgets that select pod p.
func (r informers) budgetsOf(p *corev1.Pod) []engine.Key {
	return r.budgetsIn(p.Namespace, func(s labels.Selector) bool { return s.Matches(labels.Set(p.Labels)) })
}

func (r informers) budgetsIn(namespace string, covers func(labels.Selector) bool) []engine.Key {
	var keys []engine.Key
	for _, b := range engine.CachedBy[*policyv1.PodDisruptionBudget](r.budgets,
		engine.NamespaceIndex, namespace) {
		if s, err := metav1.LabelSelectorAsSelector(b.Spec.Selector); err == nil && (covers == nil || covers(s)) {
			keys = append(keys, engine.Key{Namespace: b.Namespace, Name: b.Name})
		}
	}
	return keys
}

// reconciler reconciles PodDisruptionBudgets during one term of leadership. Every term has a new
// reconciler.
type reconciler struct {
	informers
	term *engine.Term
	view *engine.View[*policyv1.PodDisruptionBudget]
}

func (r *reconciler) reconcileBudget(ctx context.Context, key engine.Key) (time.Duration, error) {
	if key.Kind == podKey {
		return r.resetStaleTarget(ctx, key)
	}
	b, ok := r.view.Get(key.Namespace, key.Name)
	if !ok || b.DeletionTimestamp != nil {
		return 0, nil
	}
	selector, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
	if err != nil {
		return 0, nil // nothing to do until a user corrects the invalid selector
	}
	var pods []*corev1.Pod
	for _, p := range engine.CachedBy[*corev1.Pod](r.pods, engine.NamespaceIndex, b.Namespace) {
		if selector.Matches(labels.Set(p.Labels)) {
			pods = append(pods, p)
		}
	}
	if len(pods) == 0 {
		r.term.Events.Event(b, corev1.EventTypeNormal, "NoPods", "No matching pods found")
	}
	scale := func(namespace string, c *metav1.OwnerReference) (*policy.PodScale, error) {
		return r.controllerScale(ctx, namespace, c)
	}
	expected, unmanaged, unknown := policy.ExpectedPods(b, pods, scale)
	if unknown != nil {
		r.term.Events.Eventf(b, corev1.EventTypeWarning, "CalculateExpectedPodCountFailed",
			"Failed to calculate the number of expected pods: %v", unknown)
	} else if len(unmanaged) > 0 {
		r.term.Events.Eventf(b, corev1.EventTypeWarning, "UnmanagedPods", unmanagedMessage, b.Spec.Selector)
	}
	status, again, err := Status(b, pods, expected, unknown, r.term.Now())
	if err != nil {
		return 0, fmt.Errorf("reading PodDisruptionBudget %s/%s: %w", b.Namespace, b.Name, err)
	}
	if unknown != nil {
		again = unknownScaleRetryDelay // retry, because the creation of the pods' controller queues no budget
	}
	if equality.Semantic.DeepEqual(status, b.Status) {
		return again, nil
	}
	next := b.DeepCopy()
	next.Status = status
	switch next, err = client.UpdateStatus(ctx, r.term.Client, next); {
	case apierrors.IsNotFound(err):
		return 0, nil
	case err != nil:
		return 0, fmt.Errorf("writing the status of PodDisruptionBudget %s/%s: %w", b.Namespace, b.Name, err)
	}
	r.view.RecordWrite(next)
	return again, nil
}

// unmanagedMessage is the text of event UnmanagedPods, as in Kubernetes.
const unmanagedMessage = "Pods selected by this PodDisruptionBudget (selector: %v) were found to be unmanaged. " +
	"As a result, the status of the PDB cannot be calculated correctly, which may result in undefined behavior. " +
	"To account for these pods please set \".spec.minAvailable\" field of the PDB to an integer value."

// unknownScaleRetryDelay is the retry delay of a budget while the number of expected pods is
// unknown.
const unknownScaleRetryDelay = 30 * time.Second

// controllerScale returns the number of pods that the controller of a pod requests, or nil if it
// does not exist. For a ReplicaSet of a Deployment it returns the scale of the Deployment.
// Controllers of kinds without a cache are read from the API.
func (r *reconciler) controllerScale(ctx context.Context, namespace string, c *metav1.OwnerReference) (
	*policy.PodScale, error,
) {
	k, err := policy.ScaleKind(r.term.Client.Kinds(), c)
	if err != nil {
		return nil, err
	}
	switch k.GVK.GroupKind() {
	case appsv1.SchemeGroupVersion.WithKind("ReplicaSet").GroupKind():
		set, ok := engine.Cached[*appsv1.ReplicaSet](r.sets, namespace, c.Name)
		if !ok || set.UID != c.UID {
			return nil, nil
		}
		up := metav1.GetControllerOfNoCopy(set)
		if up == nil || up.Kind != "Deployment" || engine.GroupOf(up) != appsv1.GroupName {
			return scaleFrom(set.UID, set.Spec.Replicas), nil
		}
		d, ok := engine.Cached[*appsv1.Deployment](r.deployments, namespace, up.Name)
		if !ok || d.UID != up.UID {
			return nil, nil
		}
		return scaleFrom(d.UID, d.Spec.Replicas), nil
	case appsv1.SchemeGroupVersion.WithKind("StatefulSet").GroupKind():
		if s, ok := engine.Cached[*appsv1.StatefulSet](r.stateful, namespace, c.Name); ok && s.UID == c.UID {
			return scaleFrom(s.UID, s.Spec.Replicas), nil
		}
		return nil, nil
	case corev1.SchemeGroupVersion.WithKind("ReplicationController").GroupKind():
		if s, ok := engine.Cached[*corev1.ReplicationController](r.replicated, namespace, c.Name); ok &&
			s.UID == c.UID {
			return scaleFrom(s.UID, s.Spec.Replicas), nil
		}
		return nil, nil
	}
	out, err := r.term.Client.Do(ctx, &api.Request{
		Verb: api.VerbGet, Kind: k, Subresource: "scale", Namespace: namespace, Name: c.Name})
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("reading the scale of %s %s/%s: %w", c.Kind, namespace, c.Name, err)
	}
	return policy.NewPodScale(out.(*autoscalingv1.Scale), c), nil
}

func scaleFrom(uid types.UID, replicas *int32) *policy.PodScale {
	return &policy.PodScale{Controller: uid, Replicas: int(ptr.Deref(replicas, 1))}
}
