package disruption_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// A budget's status follows its pods as they are created, deleted or become unready, and is then
// stable.
func TestBudgetsTellWhatTheyAllow(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
		two := intstr.FromInt32(2)
		w.CreateObject(&policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
			Spec: policyv1.PodDisruptionBudgetSpec{
				MinAvailable: &two, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}}})
		w.CreateObject(testcluster.NewDeployment("web", 3, "web:1"))
		w.AwaitRollout("web", 3)
		allows := func(allowed, healthy int32) func() error {
			return func() error {
				b, err := client.Get[*policyv1.PodDisruptionBudget](w.Ctx, w.Admin, "default", "web")
				if err != nil {
					return err
				}
				if s := b.Status; s.DisruptionsAllowed != allowed || s.CurrentHealthy != healthy ||
					s.ExpectedPods != 3 || s.DesiredHealthy != 2 {
					return fmt.Errorf("the budget says %+v", s)
				}
				return nil
			}
		}
		w.Eventually("one may go", allows(1, 3))
		w.AwaitRest()
		w.Nodes.Mark(w.Nodes.Held, "web", true)
		p := w.LivePods()[0].DeepCopy()
		p.Status.Conditions[0].Status = corev1.ConditionFalse
		if _, err := client.UpdateStatus(w.Ctx, w.Admin, p); err != nil {
			t.Fatal(err)
		}
		w.Eventually("none may go", allows(0, 2))
	})
}

// The expected number of pods comes from their controller, including StatefulSets and
// ReplicationControllers.
func TestBudgetsCountWhatIsAskedFor(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
		one := intstr.FromInt32(1)
		set := testcluster.NewStatefulSet("set", 3, "db:1")
		set.Spec.VolumeClaimTemplates = nil
		d := testcluster.NewDeployment("rc", 3, "web:1")
		rc := &corev1.ReplicationController{ObjectMeta: d.ObjectMeta, Spec: corev1.ReplicationControllerSpec{
			Replicas: d.Spec.Replicas, Selector: d.Spec.Selector.MatchLabels, Template: &d.Spec.Template}}
		for _, o := range []api.Object{set, rc} {
			w.CreateObject(&policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default",
				Name: o.GetName()}, Spec: policyv1.PodDisruptionBudgetSpec{
				MaxUnavailable: &one,
				Selector:       &metav1.LabelSelector{MatchLabels: map[string]string{"app": o.GetName()}}}})
			w.CreateObject(o)
			w.Eventually("budget "+o.GetName(), func() error {
				b, err := client.Get[*policyv1.PodDisruptionBudget](w.Ctx, w.Admin, "default", o.GetName())
				if err == nil && (b.Status.ExpectedPods != 3 || b.Status.DisruptionsAllowed != 1) {
					err = fmt.Errorf("the budget says %+v", b.Status)
				}
				return err
			})
		}
	})
}

// A budget with maxUnavailable or a percentage uses the numbers that the pods' controllers request.
// Pods without a controller do not count, and a controller without a scale allows no disruption. A
// number in minAvailable counts pods. F14
func TestBudgetsOverPodsWithoutScale(t *testing.T) {
	one, half, two := intstr.FromInt32(1), intstr.FromString("50%"), intstr.FromInt32(2)
	for _, c := range []struct {
		name                       string
		min, max                   *intstr.IntOrString
		owned                      bool
		expected, desired, allowed int32
		event                      string
	}{
		{name: "number required", min: &one, expected: 2, desired: 1, allowed: 1},
		{name: "share required", min: &half, event: "UnmanagedPods"},
		{name: "number spared", max: &one, event: "UnmanagedPods"},
		{name: "share spared", max: &half, event: "UnmanagedPods"},
		{name: "nothing required", min: nil, max: nil},
		{name: "controller without scale", max: &one, owned: true, event: "CalculateExpectedPodCountFailed"},
		{name: "controller without scale, number required", min: &two, owned: true, expected: 2, desired: 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) {
				w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
				settings := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "settings"}}
				w.CreateObject(settings)
				settings, err := client.Get[*corev1.ConfigMap](w.Ctx, w.Admin, "default", "settings")
				if err != nil {
					t.Fatal(err)
				}
				for _, name := range []string{"a", "b"} {
					p := &corev1.Pod{
						ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
							Labels: map[string]string{"set": "bare"}},
						Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "c:1"}}}}
					if c.owned {
						owner := metav1.NewControllerRef(settings, corev1.SchemeGroupVersion.WithKind("ConfigMap"))
						p.OwnerReferences = []metav1.OwnerReference{*owner}
					}
					w.CreateObject(p)
				}
				w.CreateObject(&policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default",
					Name: "b"},
					Spec: policyv1.PodDisruptionBudgetSpec{MinAvailable: c.min, MaxUnavailable: c.max,
						Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"set": "bare"}}}})
				w.Eventually("the pods are healthy", func() error {
					b, err := client.Get[*policyv1.PodDisruptionBudget](w.Ctx, w.Admin, "default", "b")
					if err != nil {
						return err
					}
					condition := meta.FindStatusCondition(b.Status.Conditions, policyv1.DisruptionAllowedCondition)
					if c.event == "CalculateExpectedPodCountFailed" {
						if condition == nil || condition.Reason != policyv1.SyncFailedReason ||
							condition.Message != "configmaps does not implement the scale subresource" {
							return fmt.Errorf("conditions %+v", b.Status.Conditions)
						}
					} else if b.Status.CurrentHealthy != 2 {
						return fmt.Errorf("the budget says %+v", b.Status)
					}
					if s := b.Status; s.ExpectedPods != c.expected || s.DesiredHealthy != c.desired ||
						s.DisruptionsAllowed != c.allowed {
						return fmt.Errorf("the budget says %+v", s)
					}
					return nil
				})
				if c.event != "" {
					w.Eventually("event "+c.event, func() error {
						list, err := client.List[*corev1.Event](w.Ctx, w.Admin, "default", metav1.ListOptions{})
						if err != nil {
							return err
						}
						for _, e := range list {
							if e.Reason == c.event && e.InvolvedObject.Name == "b" {
								return nil
							}
						}
						return fmt.Errorf("none of %d events", len(list))
					})
				}
			})
		})
	}
}

// F14: the condition of a pod that was not deleted within two minutes of its disruption is reset.
// Conditions that an agent set stay, and those of terminating and terminal pods too.
func TestStaleDisruptionTargetsAreReset(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
		evicted := corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue,
			Reason: "EvictionByEvictionAPI", Message: "Eviction API: evicting", LastTransitionTime: metav1.Now()}
		byAgent := evicted
		byAgent.Reason = corev1.PodReasonTerminationByKubelet
		for name, c := range map[string]corev1.PodCondition{"evicted": evicted, "byagent": byAgent, "ended": evicted} {
			w.CreateObject(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
				Spec: corev1.PodSpec{SchedulerName: "none", Containers: []corev1.Container{{Name: "c", Image: "c:1"}}}})
			w.Eventually(name+" runs and has the condition", func() error {
				p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, "default", name)
				if err != nil {
					return err
				}
				if len(p.Status.Conditions) == 0 {
					return errors.New("it does not run")
				}
				p = p.DeepCopy()
				p.Status.Conditions = append(p.Status.Conditions, c)
				if name == "ended" {
					p.Status.Phase = corev1.PodFailed
				}
				_, err = client.UpdateStatus(w.Ctx, w.Admin, p)
				return err
			})
		}
		target := func(name string) corev1.PodCondition {
			p, err := client.Get[*corev1.Pod](w.Ctx, w.Admin, "default", name)
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range p.Status.Conditions {
				if c.Type == corev1.DisruptionTarget {
					return c
				}
			}
			t.Fatalf("pod %s has no condition: %+v", name, p.Status.Conditions)
			return corev1.PodCondition{}
		}
		time.Sleep(2*time.Minute - 5*time.Second)
		if c := target("evicted"); c.Status != corev1.ConditionTrue {
			t.Errorf("too early: %+v", c)
		}
		w.Eventually("the condition is reset", func() error {
			if c := target("evicted"); c.Status != corev1.ConditionFalse || c.Reason != "" || c.Message != "" ||
				c.LastTransitionTime.Sub(evicted.LastTransitionTime.Time) < 2*time.Minute-time.Second {
				return fmt.Errorf("%+v", c)
			}
			return nil
		})
		w.AwaitRest()
		for _, name := range []string{"byagent", "ended"} {
			if c := target(name); c.Status != corev1.ConditionTrue {
				t.Errorf("pod %s: %+v", name, c)
			}
		}
	})
}
