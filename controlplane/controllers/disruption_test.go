package controllers_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/client"
)

// A budget tells how many evictions it allows, as its pods come, go and get unready, and rests then.
func TestBudgetsTellWhatTheyAllow(t *testing.T) {
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
}
