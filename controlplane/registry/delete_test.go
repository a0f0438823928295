package registry

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storedform"
)

func policy(p metav1.DeletionPropagation) metav1.DeleteOptions {
	return metav1.DeleteOptions{PropagationPolicy: &p}
}

func grace(seconds int64) metav1.DeleteOptions {
	return metav1.DeleteOptions{GracePeriodSeconds: &seconds}
}

func TestDeleteAndPreconditions(t *testing.T) {
	e := newEnv(t)
	_, _, err := e.tryDelete(configMap("default", "a"), metav1.DeleteOptions{})
	refused(t, err, 404, metav1.StatusReasonNotFound)
	made := e.create(configMap("default", "a"))
	other, stale := types.UID("other"), "1"
	_, _, err = e.tryDelete(made, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &other}})
	refused(t, err, 409, metav1.StatusReasonConflict)
	made = e.update(configMap("default", "a", "k", "v"), "")
	_, _, err = e.tryDelete(made, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{ResourceVersion: &stale}})
	refused(t, err, 409, metav1.StatusReasonConflict)
	uid, rv := made.GetUID(), made.GetResourceVersion()
	if _, gone := e.delete(made,
		metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid, ResourceVersion: &rv}}); !gone {
		t.Fatal("not gone")
	}
	if _, err := e.get(made); !apierrors.IsNotFound(err) {
		t.Fatalf("still there: %v", err)
	}
}

func TestFinalizersHoldADeletedObject(t *testing.T) {
	e := newEnv(t)
	cm := configMap("default", "a", "k", "v")
	cm.Finalizers = []string{"example.org/hold"}
	e.create(cm)
	w := e.watch(configMap("default", ""),
		metav1.ListOptions{ResourceVersion: storedform.FormatRevision(e.store.Applied())})
	marked, gone := e.delete(cm, metav1.DeleteOptions{})
	if gone || marked.GetDeletionTimestamp() == nil || *marked.GetDeletionGracePeriodSeconds() != 0 {
		t.Fatalf("gone %v, deletionTimestamp %v", gone, marked.GetDeletionTimestamp())
	}
	before := e.store.Applied()
	if _, gone := e.delete(cm, metav1.DeleteOptions{}); gone || e.store.Applied() != before {
		t.Fatal("a second delete did something")
	}
	// A client's update neither reverts the deletion nor changes its timestamp.
	back := marked.DeepCopyObject().(*corev1.ConfigMap)
	back.DeletionTimestamp, back.Data["k"] = nil, "w"
	if got := e.update(back, ""); !got.GetDeletionTimestamp().Equal(marked.GetDeletionTimestamp()) {
		t.Fatalf("the deletionTimestamp is now %v", got.GetDeletionTimestamp())
	}
	free := configMap("default", "a", "k", "w")
	last := e.update(free, "")
	if _, err := e.get(cm); !apierrors.IsNotFound(err) {
		t.Fatalf("still there after the last finalizer: %v", err)
	}
	var kinds []watch.EventType
	var ev watch.Event
	for range 3 {
		ev = e.next(w)
		kinds = append(kinds, ev.Type)
	}
	if !slices.Equal(kinds, []watch.EventType{watch.Modified, watch.Modified, watch.Deleted}) {
		t.Fatalf("events %v", kinds)
	}
	if show(ev) != "DELETED a@"+last.GetResourceVersion() {
		t.Fatalf("deleted as %s, answered %s", show(ev), last.GetResourceVersion())
	}
}

// F71: dependents are handled by the garbage collector, according to finalizers.
func TestPropagationPolicies(t *testing.T) {
	for name, c := range map[string]struct {
		have  []string
		o     metav1.DeleteOptions
		want  []string
		usual metav1.DeletionPropagation
	}{
		"default is background": {nil, metav1.DeleteOptions{}, nil, ""},
		"background":            {nil, policy(metav1.DeletePropagationBackground), nil, ""},
		"orphan":                {nil, policy(metav1.DeletePropagationOrphan), []string{"orphan"}, ""},
		"foreground": {nil, policy(metav1.DeletePropagationForeground),
			[]string{"foregroundDeletion"}, ""},
		"beside others": {[]string{"x"}, policy(metav1.DeletePropagationForeground),
			[]string{"x", "foregroundDeletion"}, ""},
		"set beforehand": {[]string{"orphan"}, metav1.DeleteOptions{}, []string{"orphan"}, ""},
		"explicit wins": {[]string{"orphan", "x"}, policy(metav1.DeletePropagationBackground),
			[]string{"x"}, ""},
		"orphanDependents":          {nil, metav1.DeleteOptions{OrphanDependents: new(true)}, []string{"orphan"}, ""},
		"orphanDependents is false": {[]string{"orphan"}, metav1.DeleteOptions{OrphanDependents: new(false)}, nil, ""},
		"the kind's own":            {nil, metav1.DeleteOptions{}, []string{"orphan"}, metav1.DeletePropagationOrphan},
		"said beforehand": {[]string{"foregroundDeletion"}, metav1.DeleteOptions{},
			[]string{"foregroundDeletion"}, metav1.DeletePropagationOrphan},
		"not the kind's own": {nil, policy(metav1.DeletePropagationBackground), nil,
			metav1.DeletePropagationOrphan},
	} {
		if got := dependentFinalizers(c.have, &c.o, c.usual); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
	e := newEnv(t)
	e.create(configMap("default", "a"))
	if _, gone := e.delete(configMap("default", "a"), policy(metav1.DeletePropagationForeground)); gone {
		t.Fatal("gone before the garbage collector")
	}
	// With another policy in a second delete, no finalizer is left to wait for.
	if _, gone := e.delete(configMap("default", "a"), policy(metav1.DeletePropagationBackground)); !gone {
		t.Fatal("still there")
	}
	_, _, err := e.tryDelete(configMap("default", "a"), policy("Sideways"))
	refused(t, err, 422, metav1.StatusReasonInvalid)
}

func TestPlanDeleteGracefully(t *testing.T) {
	k := &api.Kind{Deletion: api.DeletionRules{GracePeriod: func(obj api.Object, requested *int64) int64 {
		if requested != nil {
			return *requested
		}
		return 30
	}}}
	now := time.Unix(1_700_000_000, 0)
	fresh := pod("default", "p")
	fresh.Generation = 1
	opts := func(o metav1.DeleteOptions) *metav1.DeleteOptions { return &o }

	out := planDelete(k, fresh, opts(metav1.DeleteOptions{}), now)
	if out.remove || out.obj == nil {
		t.Fatalf("a graceful deletion gave %+v", out)
	}
	p := out.obj.(*corev1.Pod)
	if *p.DeletionGracePeriodSeconds != 30 || !p.DeletionTimestamp.Time.Equal(now.Add(30*time.Second)) ||
		p.Generation != 2 {
		t.Fatalf("grace %d until %v, generation %d", *p.DeletionGracePeriodSeconds, p.DeletionTimestamp, p.Generation)
	}
	if fresh.DeletionTimestamp != nil {
		t.Fatal("the stored object was changed")
	}
	if out := planDelete(k, p, opts(grace(60)), now); out.obj != nil || out.remove {
		t.Fatalf("a longer grace period gave %+v", out)
	}
	if out := planDelete(k, p, opts(metav1.DeleteOptions{}), now.Add(time.Second)); out.obj != nil || out.remove {
		t.Fatalf("deleting again gave %+v", out)
	}
	out = planDelete(k, p, opts(grace(5)), now.Add(time.Second))
	if q := out.obj.(*corev1.Pod); *q.DeletionGracePeriodSeconds != 5 ||
		!q.DeletionTimestamp.Time.Equal(now.Add(5*time.Second)) {
		t.Fatalf("shortened to %d until %v", *q.DeletionGracePeriodSeconds, q.DeletionTimestamp)
	}
	if out := planDelete(k, p, opts(grace(0)), now); !out.remove {
		t.Fatalf("grace 0 gave %+v", out)
	}
	held := p.DeepCopy()
	held.Finalizers = []string{"example.com/x"}
	out = planDelete(k, held, opts(grace(0)), now)
	if out.remove || out.obj == nil || *out.obj.GetDeletionGracePeriodSeconds() != 0 {
		t.Fatalf("grace 0 with a finalizer gave %+v", out)
	}
	free := out.obj.DeepCopyObject().(*corev1.Pod)
	if isRemovable(free) {
		t.Fatal("finished with a finalizer")
	}
	free.Finalizers = nil
	if !isRemovable(free) {
		t.Fatal("not finished without finalizers and grace")
	}
	if running := p.DeepCopy(); isRemovable(running) {
		t.Fatal("finished although the grace period runs")
	}
}

func TestPodDeletion(t *testing.T) {
	e := newEnv(t)
	e.create(pod("default", "pending"))
	if _, gone := e.delete(pod("default", "pending"), grace(0)); !gone {
		t.Fatal("a forced deletion left the pod")
	}
	bound := pod("default", "bound")
	bound.Spec.NodeName = "w1"
	e.create(bound)
	if e.kinds.ByType(bound).Deletion.GracePeriod == nil {
		t.Fatal("pods have no grace period")
	}
	marked, gone := e.delete(bound, metav1.DeleteOptions{})
	if gone || marked.GetDeletionTimestamp() == nil {
		t.Fatal("a bound pod went without its grace period")
	}
	if _, gone := e.delete(bound, grace(0)); !gone {
		t.Fatal("the node's final deletion left the pod")
	}
}

func TestNamespaceGoesWhenItsFinalizersDo(t *testing.T) {
	e := newEnv(t)
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "team"}}
	made := e.create(ns).(*corev1.Namespace)
	if !slices.Contains(made.Spec.Finalizers, corev1.FinalizerKubernetes) {
		t.Fatalf("finalizers %v", made.Spec.Finalizers)
	}
	out, gone := e.delete(ns, metav1.DeleteOptions{})
	if got := out.(*corev1.Namespace); gone || got.Status.Phase != corev1.NamespaceTerminating ||
		got.DeletionTimestamp == nil {
		t.Fatalf("gone %v, phase %q", gone, got.Status.Phase)
	}
	last := out.DeepCopyObject().(*corev1.Namespace)
	last.Spec.Finalizers = nil
	last.Status.Phase = "Smuggled"
	e.update(last, "finalize")
	if _, err := e.get(ns); !apierrors.IsNotFound(err) {
		t.Fatalf("still there: %v", err)
	}
}

func TestDeleteCollection(t *testing.T) {
	e := newEnv(t)
	for i := range 40 {
		cm := configMap("default", fmt.Sprintf("c%02d", i))
		cm.Labels = map[string]string{"odd": fmt.Sprint(i%2 == 1)}
		if i == 1 {
			cm.Finalizers = []string{"example.org/hold"}
		}
		e.create(cm)
	}
	req := e.request(api.VerbDeleteCollection, configMap("default", ""))
	req.List.LabelSelector = "odd=true"
	out, err := e.Registry.DeleteCollection(e.ctx, req, e.admit)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(out.(*corev1.ConfigMapList).Items); n != 20 {
		t.Fatalf("%d objects were deleted or marked, want 20", n)
	}
	l, err := e.list(configMap("default", ""), metav1.ListOptions{})
	if err != nil || len(l.Items) != 21 {
		t.Fatalf("%d are left, %v", len(l.Items), err)
	}
}
