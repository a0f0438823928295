package configrestart

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// settleDelay is how long the controller waits for further changes after a ConfigMap or Secret has
// changed. A user who applies a directory changes several objects one after the other.
const settleDelay = 2 * time.Second

// workloadKind is a kind of workload, such as Deployment. A workload replaces its pods when its pod
// template changes.
type workloadKind struct {
	kind     string
	informer cache.SharedIndexInformer
	template func(api.Object) *corev1.PodTemplateSpec
	patch    func(ctx context.Context, c *client.Client, namespace, name string, patch []byte) error
}

func workloadOf[T api.Object](d engine.Deps, kind string, template func(T) *corev1.PodTemplateSpec) workloadKind {
	w := workloadKind{kind: kind, informer: client.Informer[T](d.Informers),
		template: func(o api.Object) *corev1.PodTemplateSpec { return template(o.(T)) },
		patch: func(ctx context.Context, c *client.Client, namespace, name string, patch []byte) error {
			_, err := client.Patch[T](ctx, c, namespace, name, "", types.MergePatchType, patch)
			return err
		}}
	engine.Index(w.informer, refIndex, func(o api.Object) []string {
		if !isRestartRequested(o) {
			return nil
		}
		var at []string
		for _, r := range Refs(o.GetNamespace(), w.template(o)) {
			at = append(at, o.GetNamespace()+"/"+string(r))
		}
		return at
	})
	return w
}

// refIndex indexes workloads by the ConfigMaps and Secrets to which their template refers, for
// example "namespace/configmaps/name".
const refIndex = "config-restart"

func isRestartRequested(o api.Object) bool {
	return o.GetAnnotations()[api.RestartAnnotation] == "true" && o.GetDeletionTimestamp() == nil
}

// New returns the controller that restarts workloads after changes of their ConfigMaps and Secrets.
func New(d engine.Deps) *engine.Descriptor {
	all := []workloadKind{
		workloadOf(d, "Deployment", func(o *appsv1.Deployment) *corev1.PodTemplateSpec { return &o.Spec.Template }),
		workloadOf(d, "StatefulSet", func(o *appsv1.StatefulSet) *corev1.PodTemplateSpec { return &o.Spec.Template }),
		workloadOf(d, "DaemonSet", func(o *appsv1.DaemonSet) *corev1.PodTemplateSpec { return &o.Spec.Template }),
	}
	r := &restarter{now: d.Clock(), byKind: map[string]workloadKind{},
		maps: client.Informer[*corev1.ConfigMap](d.Informers), secrets: client.Informer[*corev1.Secret](d.Informers)}
	c := &engine.Descriptor{
		Name:    "config-restart-controller",
		Workers: 2,
		Watches: []engine.Watch{
			watchReferred(r.maps, "configmaps", all, func(m *corev1.ConfigMap) string { return OfConfigMap(m) }),
			watchReferred(r.secrets, "secrets", all, func(s *corev1.Secret) string { return OfSecret(s) }),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"apps"}, Resources: []string{"deployments", "statefulsets", "daemonsets"},
				Verbs: []string{"get", "list", "patch", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"configmaps", "secrets"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: r.leadRestarts,
	}
	for _, w := range all {
		r.byKind[w.kind] = w
		c.Watches = append(c.Watches, engine.OnInformer(w.informer, func(c engine.Change[api.Object]) []engine.Key {
			if c.Type == engine.Deleted || !isRestartRequested(c.New) {
				return nil
			}
			return []engine.Key{{Kind: w.kind, Namespace: c.New.GetNamespace(), Name: c.New.GetName()}}
		}))
	}
	return c
}

// watchReferred returns a Watch for the objects in inf, which are ConfigMaps or Secrets; resource
// is their plural name. A created, deleted or changed object queues the workloads of the given
// kinds that refer to the object. contents returns a digest of an object's contents; an update with
// an equal digest queues nothing.
func watchReferred[T api.Object](
	inf cache.SharedIndexInformer, resource string, kinds []workloadKind, contents func(T) string,
) engine.Watch {
	return engine.OnInformer(inf, func(c engine.Change[T]) (keys []engine.Key) {
		for _, w := range kinds {
			for _, o := range engine.CachedBy[api.Object](w.informer, refIndex,
				c.New.GetNamespace()+"/"+resource+"/"+c.New.GetName()) {
				keys = append(keys, engine.Key{Kind: w.kind, Namespace: o.GetNamespace(), Name: o.GetName()})
			}
		}
		if len(keys) > 0 && c.Type == engine.Updated && contents(c.New) == contents(c.Old) {
			return nil
		}
		return keys
	})
}

type restarter struct {
	now           func() time.Time
	byKind        map[string]workloadKind
	maps, secrets cache.SharedIndexInformer
}

func (r *restarter) leadRestarts(t *engine.Term) engine.Reconcile {
	var mu sync.Mutex
	since := map[engine.Key]time.Time{} // first observed change of each workload that waits for further changes
	return func(ctx context.Context, key engine.Key) (time.Duration, error) {
		w := r.byKind[key.Kind]
		o, ok := engine.Cached[api.Object](w.informer, key.Namespace, key.Name)
		if !ok || !isRestartRequested(o) {
			mu.Lock()
			defer mu.Unlock()
			delete(since, key)
			return 0, nil
		}
		refs := Refs(key.Namespace, w.template(o))
		before := o.GetAnnotations()[api.ConfigSeenAnnotation]
		next, replace := PlanRestart(refs, Parse(before), r.currentState(key.Namespace, refs))
		mu.Lock()
		first, waiting := since[key]
		switch {
		case !replace:
			delete(since, key)
		case !waiting:
			first = r.now()
			since[key] = first
		}
		mu.Unlock()
		if next.String() == before {
			return 0, nil
		}
		if left := first.Add(settleDelay).Sub(r.now()); replace && left > 0 {
			return left, nil
		}
		if err := w.patch(ctx, t.Client, key.Namespace, key.Name, workloadPatch(o, next, replace)); err != nil {
			if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
				return 0, engine.RaceError("%s: %w", key, err)
			}
			return 0, fmt.Errorf("recording the configuration of %s: %w", key, err)
		}
		mu.Lock()
		delete(since, key)
		mu.Unlock()
		if replace {
			t.Events.Eventf(o, corev1.EventTypeNormal, "ConfigChanged", "pods are replaced because of a change in %s",
				strings.Join(changedObjects(Parse(before), next), ", "))
		}
		return 0, nil
	}
}

// currentState returns the digests of the current ConfigMaps and Secrets in refs.
func (r *restarter) currentState(namespace string, refs []Ref) State {
	s := State{}
	for _, ref := range refs {
		resource, name, _ := strings.Cut(string(ref), "/")
		if resource == "secrets" {
			if o, ok := engine.Cached[*corev1.Secret](r.secrets, namespace, name); ok {
				s[ref] = OfSecret(o)
			}
		} else if o, ok := engine.Cached[*corev1.ConfigMap](r.maps, namespace, name); ok {
			s[ref] = OfConfigMap(o)
		}
	}
	return s
}

// changedObjects returns the names of the objects that have different digests in seen and next.
func changedObjects(seen, next State) (names []string) {
	for _, ref := range next.sortedRefs() {
		if was := seen[ref]; was != "" && was != next[ref] {
			names = append(names, string(ref))
		}
	}
	return names
}

// workloadPatch returns a patch that stores next in an annotation of workload o. If replace is true
// it also changes the pod template, so that the pods are replaced. The patch fails if o has
// changed.
func workloadPatch(o api.Object, next State, replace bool) []byte {
	body := map[string]any{"metadata": map[string]any{
		"resourceVersion": o.GetResourceVersion(), "uid": o.GetUID(),
		"annotations": map[string]string{api.ConfigSeenAnnotation: next.String()}}}
	if replace {
		sum := sha256.New()
		writeField(sum, next.String())
		body["spec"] = map[string]any{"template": map[string]any{
			"metadata": map[string]any{"annotations": map[string]string{api.ConfigAnnotation: digestString(sum)}}}}
	}
	raw, err := json.Marshal(body)
	if err != nil {
		panic(fmt.Sprintf("configrestart: encoding a patch: %v", err))
	}
	return raw
}
