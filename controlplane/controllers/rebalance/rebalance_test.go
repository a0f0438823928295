package rebalance_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/rebalance"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// roomy adds a ready node with room for pods.
func roomy(w *testcluster.Cluster, name string) {
	w.AddNode(name)
	w.Eventually("room on "+name, func() error {
		n, err := client.Get[*corev1.Node](w.Ctx, w.Admin, "", name)
		if err != nil {
			return err
		}
		n = n.DeepCopy()
		n.Labels[corev1.LabelHostname] = name
		if n, err = client.Update(w.Ctx, w.Admin, n); err != nil {
			return err
		}
		n = n.DeepCopy()
		n.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4"),
			corev1.ResourceMemory: resource.MustParse("8Gi"), corev1.ResourcePods: resource.MustParse("110")}
		_, err = client.UpdateStatus(w.Ctx, w.Admin, n)
		return err
	})
}

// evictions records the evictions, and violations at the time of each.
type evictions struct {
	mu    sync.Mutex
	at    []time.Time
	of    map[string]int // by app
	wrong []string
}

func watchEvictions(w *testcluster.Cluster, least time.Duration, pods func() []*corev1.Pod) *evictions {
	e := &evictions{of: map[string]int{}}
	// The consequences of an eviction may be visible before its response.
	var unready []string
	asks := func(r *api.Request) {
		if r.Subresource != "eviction" {
			return
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		unready = nil
		for _, p := range pods() {
			if p.Name != r.Name && (p.DeletionTimestamp != nil || !api.IsPodReady(p)) {
				unready = append(unready, fmt.Sprintf("%s was evicted while %s was not ready", r.Name, p.Name))
			}
		}
	}
	f := func(r *api.Request, _ runtime.Object) {
		if r.Subresource != "eviction" {
			return
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		e.wrong = append(e.wrong, unready...)
		now := time.Now()
		if n := len(e.at); n > 0 && now.Sub(e.at[n-1]) < least {
			e.wrong = append(e.wrong, fmt.Sprintf("%s was evicted %v after the one before", r.Name, now.Sub(e.at[n-1])))
		}
		e.at = append(e.at, now)
		e.of[r.Name[:3]]++
	}
	w.Calls.OnRequest.Store(&asks)
	w.Calls.OnWritten.Store(&f)
	return e
}

func (e *evictions) check(t *testing.T) (n int, of map[string]int) {
	t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, what := range e.wrong {
		t.Error(what)
	}
	return len(e.at), e.of
}

// cachedPods are the pods of default as the informer has them.
func cachedPods(w *testcluster.Cluster) []*corev1.Pod {
	return engine.CachedBy[*corev1.Pod](client.Informer[*corev1.Pod](w.Informers), engine.NamespaceIndex, "default")
}

// per counts an app's pods by node.
func per(w *testcluster.Cluster, app string) map[string]int {
	out := map[string]int{}
	for _, p := range w.LivePods() {
		if p.Labels["app"] == app {
			out[p.Spec.NodeName]++
		}
	}
	return out
}

// rebalancedEvents waits until each of n moves has an event of the pod and one of its workload.
func rebalancedEvents(w *testcluster.Cluster, n int) {
	w.T.Helper()
	w.Eventually("events", func() error {
		list, err := client.List[*corev1.Event](w.Ctx, w.Admin, "default", metav1.ListOptions{})
		told := map[bool]int{}
		for _, e := range list {
			if e.Reason == "Rebalanced" && strings.Contains(e.Message,
				"start on node w3: its node runs more pods of ") {
				told[e.InvolvedObject.Kind == "Pod"] += int(e.Count)
			}
		}
		if err == nil && (told[true] != n || told[false] != n) {
			err = fmt.Errorf("%d of pods and %d of workloads, want %d", told[true], told[false], n)
		}
		return err
	})
}

var rebalanced = map[string]string{api.RebalanceAnnotation: "true"}

// When a node is added, pods of workloads that request it move there, one at a time, each after the
// previous pod has a ready replacement. Pods stay if their workload does not request it or cannot
// spare a pod, or if a budget protects them.
func TestRebalance(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true, WithScheduler: true})
		w.Lead(engine.Options{})
		roomy(w, "w1")
		roomy(w, "w2")
		w.AwaitUsableNodes(2)
		time.Sleep(time.Second) // the scheduler has observed both
		one, none := intstr.FromInt32(1), intstr.FromInt32(0)
		web, stays, all := testcluster.NewDeployment("web", 6, "web:1"), testcluster.NewDeployment("not", 6, "web:1"),
			testcluster.NewDeployment("all", 3, "web:1")
		db, kept := testcluster.NewStatefulSet("dbs", 3, "db:1"), testcluster.NewStatefulSet("bud", 3, "db:1")
		for _, o := range []api.Object{web, all, db, kept} {
			o.SetAnnotations(rebalanced)
		}
		web.Spec.Strategy.RollingUpdate = &appsv1.RollingUpdateDeployment{MaxUnavailable: &one, MaxSurge: &none}
		all.Spec.Strategy.RollingUpdate = &appsv1.RollingUpdateDeployment{MaxUnavailable: &none, MaxSurge: &one}
		for _, s := range []*appsv1.StatefulSet{db, kept} {
			s.Spec.VolumeClaimTemplates = nil
		}
		w.CreateObject(&policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kept"},
			Spec: policyv1.PodDisruptionBudgetSpec{
				MaxUnavailable: &none, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "bud"}}}})
		for _, o := range []api.Object{web, stays, all, db, kept} {
			w.CreateObject(o)
		}
		w.AwaitRollout("web", 6)
		w.AwaitRollout("not", 6)
		w.AwaitRollout("all", 3)
		w.AwaitStatefulSet("dbs", 3)
		w.AwaitStatefulSet("bud", 3)
		e := watchEvictions(w, rebalance.DefaultInterval-2*time.Second, func() []*corev1.Pod { return cachedPods(w) })
		time.Sleep(10 * time.Minute)
		if n, of := e.check(t); n > 0 {
			t.Errorf("%d evictions where nothing is better: %v", n, of)
		}
		roomy(w, "w3")
		time.Sleep(30 * time.Minute)
		n, of := e.check(t)
		if web, db := per(w, "web"), per(w, "dbs"); web["w3"] != 2 || db["w3"] != 1 {
			t.Errorf("web is on %v, dbs on %v", web, db)
		}
		if n != 3 || of["web"] != 2 || of["dbs"] != 1 {
			t.Errorf("evictions: %v", of)
		}
		rebalancedEvents(w, n)
		time.Sleep(30 * time.Minute)
		if again, of := e.check(t); again != n {
			t.Errorf("it does not come to rest: %v", of)
		}
	})
}

// Regardless of lost calls, crashes and leader changes, the interval is kept, and at the end pods
// are where they should be.
func TestRebalanceUnderFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true, WithScheduler: true,
			ChangeController: testcluster.FailReconciles("rebalance-controller", 3, time.Millisecond)})
		settings := engine.Options{Resync: 5 * time.Second}
		stop := w.Lead(settings)
		defer func() { stop() }()
		roomy(w, "w1")
		web := testcluster.NewDeployment("web", 9, "web:1")
		web.Annotations = rebalanced
		w.CreateObject(web)
		w.AwaitRollout("web", 9)
		e := watchEvictions(w, rebalance.DefaultInterval-2*time.Second, func() []*corev1.Pod { return cachedPods(w) })
		roomy(w, "w2")
		roomy(w, "w3")
		for range 60 {
			time.Sleep(17 * time.Second)
			stop()
			stop = w.Lead(settings)
		}
		time.Sleep(15 * time.Minute)
		w.AwaitRollout("web", 9)
		if per := per(w, "web"); per["w1"] != 3 || per["w2"] != 3 || per["w3"] != 3 {
			t.Errorf("web is on %v", per)
		}
		if n, _ := e.check(t); n != 6 {
			t.Errorf("%d evictions for 6 pods in the wrong place", n)
		}
	})
}
