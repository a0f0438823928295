package subresource_test

import (
	"slices"
	"strings"
	"testing"

	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/raftstore"
)

const evictionOfP = `{"apiVersion":"policy/v1","kind":"Eviction","metadata":{"name":"p"}}`

// held starts with a pending pod p and a budget that allows no disruption.
func held(t *testing.T, change func(*policyv1.PodDisruptionBudget)) (*apiservertest.Replica, func(status string)) {
	t.Helper()
	r := apiservertest.StartReplica(t, nil)
	p := apiservertest.NewPod("p")
	p.Labels = map[string]string{"app": "p"}
	r.Must(p)
	all := intstr.FromInt32(1)
	b := &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "b"},
		Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: &all, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "p"}},
		}}
	if change != nil {
		change(b)
	}
	r.Must(b)
	return r, func(status string) {
		t.Helper()
		_, err := r.Admin().CoreV1().Pods("default").Patch(apiservertest.Within(t), "p", types.MergePatchType,
			[]byte(status), metav1.PatchOptions{}, "status")
		if err != nil {
			t.Fatal(err)
		}
	}
}

const running, ready = `{"status":{"phase":"Running"}}`,
	`{"status":{"phase":"Running","conditions":[{"type":"Ready","status":"True"}]}}`

// A pod that became ready is judged as ready, also by a replica that has not heard of it yet.
func TestEvictionSeesWhatWasAcknowledged(t *testing.T) {
	always := policyv1.AlwaysAllow
	for name, c := range map[string]struct {
		change func(*policyv1.PodDisruptionBudget)
		before string
	}{
		"pending before": {before: `{"status":{"phase":"Pending"}}`},
		"unhealthy before": {before: running, change: func(b *policyv1.PodDisruptionBudget) {
			b.Spec.UnhealthyPodEvictionPolicy = &always
		}},
	} {
		t.Run(name, func(t *testing.T) {
			r, become := held(t, c.change)
			become(c.before)
			// The replica knows of the pod as it was.
			if _, err := r.Admin().CoreV1().Pods("default").Get(apiservertest.Within(t), "p",
				metav1.GetOptions{}); err != nil {
				t.Fatal(err)
			}
			release, asked := r.Store.Hold()
			defer release()
			become(ready)
			answered := make(chan apiservertest.Response, 1)
			go func() {
				answered <- r.Call(r.AdminHTTP(), "POST", "/api/v1/namespaces/default/pods/p/eviction", evictionOfP)
			}()
			select {
			case <-asked:
				release()
				apiservertest.Refused(t, <-answered, 429, "disruption budget")
			case a := <-answered:
				release()
				t.Errorf("answered by what was known: %d %s", a.Code, a.Body)
			}
			if p, err := r.Admin().CoreV1().Pods("default").Get(apiservertest.Within(t), "p",
				metav1.GetOptions{}); err != nil || p.DeletionTimestamp != nil {
				t.Errorf("%v, deleted %v", err, p.DeletionTimestamp)
			}
		})
	}
}

// A pod that is not Ready may be evicted regardless of the budget. If the pod becomes Ready before
// the deletion, the budget applies.
func TestEvictionOfWhatBecomesReady(t *testing.T) {
	r, become := held(t, nil)
	r.Store.First(func(c raftstore.Commit) {
		if slices.ContainsFunc(c.Ops, func(o raftstore.Op) bool {
			return strings.HasSuffix(o.Key, "/pods/default/p")
		}) {
			r.Store.First(nil)
			become(ready)
		}
	})
	apiservertest.Refused(t, r.Call(r.AdminHTTP(), "POST", "/api/v1/namespaces/default/pods/p/eviction", evictionOfP),
		429, "disruption budget")
	if p, err := r.Admin().CoreV1().Pods("default").Get(apiservertest.Within(t), "p", metav1.GetOptions{}); err !=
		nil || p.DeletionTimestamp != nil {
		t.Errorf("%v, deleted %v", err, p.DeletionTimestamp)
	}
}

// A budget with maxUnavailable or a percentage does not count pods without a controller, so it
// allows no eviction of a ready pod. The same eviction is allowed by a number in minAvailable that
// leaves a pod to spare. F14
func TestEvictionOfPodWithoutController(t *testing.T) {
	half, all, none := intstr.FromString("50%"), intstr.FromString("100%"), intstr.FromInt32(0)
	for name, c := range map[string]struct {
		min, max *intstr.IntOrString
		code     int
	}{
		"share spared":         {nil, &half, 429},
		"all spared":           {nil, &all, 429},
		"share required":       {&half, nil, 429},
		"nothing said":         {nil, nil, 429},
		"number zero required": {&none, nil, 201},
	} {
		t.Run(name, func(t *testing.T) {
			r, become := held(t, func(b *policyv1.PodDisruptionBudget) {
				b.Spec.MinAvailable, b.Spec.MaxUnavailable = c.min, c.max
			})
			become(ready)
			a := r.Call(r.AdminHTTP(), "POST", "/api/v1/namespaces/default/pods/p/eviction", evictionOfP)
			if a.Code != c.code || c.code == 429 &&
				!strings.Contains(string(a.Body), "The disruption budget b needs 0 healthy pods and has 1 currently") {
				t.Errorf("answered %d %s, want %d", a.Code, a.Body, c.code)
			}
		})
	}
}
