package controllers_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/internal/virtual"
)

// A budget tells how many evictions it allows, as its pods come, go and get unready, and rests then.
func TestBudgetsTellWhatTheyAllow(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{quiet: true})
		two := intstr.FromInt32(2)
		w.create(&policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"}, Spec: policyv1.PodDisruptionBudgetSpec{
			MinAvailable: &two, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}}})
		w.create(app("web", 3, "web:1"))
		w.rolledOut("web", 3)
		allows := func(allowed, healthy int32) func() error {
			return func() error {
				b, err := client.Get[*policyv1.PodDisruptionBudget](w.ctx, w.admin, "default", "web")
				if err != nil {
					return err
				}
				if s := b.Status; s.DisruptionsAllowed != allowed || s.CurrentHealthy != healthy || s.ExpectedPods != 3 || s.DesiredHealthy != 2 {
					return fmt.Errorf("the budget says %+v", s)
				}
				return nil
			}
		}
		w.eventually("one may go", allows(1, 3))
		w.atRest()
		w.nodes.set(w.nodes.held, "web", true)
		p := w.pods()[0].DeepCopy()
		p.Status.Conditions[0].Status = corev1.ConditionFalse
		if _, err := client.UpdateStatus(w.ctx, w.admin, p); err != nil {
			t.Fatal(err)
		}
		w.eventually("none may go", allows(0, 2))
	})
}

// How many pods there should be is the word of whatever controls them, also of a StatefulSet and a ReplicationController.
func TestBudgetsCountWhatIsAskedFor(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{quiet: true})
		one := intstr.FromInt32(1)
		set := stateful("set", 3, "db:1")
		set.Spec.VolumeClaimTemplates = nil
		d := app("rc", 3, "web:1")
		rc := &corev1.ReplicationController{ObjectMeta: d.ObjectMeta, Spec: corev1.ReplicationControllerSpec{
			Replicas: d.Spec.Replicas, Selector: d.Spec.Selector.MatchLabels, Template: &d.Spec.Template}}
		for _, o := range []api.Object{set, rc} {
			w.create(&policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: o.GetName()}, Spec: policyv1.PodDisruptionBudgetSpec{
				MaxUnavailable: &one, Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": o.GetName()}}}})
			w.create(o)
			w.eventually("budget "+o.GetName(), func() error {
				b, err := client.Get[*policyv1.PodDisruptionBudget](w.ctx, w.admin, "default", o.GetName())
				if err == nil && (b.Status.ExpectedPods != 3 || b.Status.DisruptionsAllowed != 1) {
					err = fmt.Errorf("the budget says %+v", b.Status)
				}
				return err
			})
		}
	})
}
