package apiserver_test

import (
	"context"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	arv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// A configuration that a client creates is asked from then on, and no more when it is gone.
func TestConfigurationsAreFollowed(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	asked := make(chan struct{}, 1000)
	h := hookServer(t, func(q *admissionv1.AdmissionRequest, _ *admissionv1.AdmissionResponse) { asked <- struct{}{} })
	c := r.Admin()
	conf := &arv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "v"},
		Webhooks: []arv1.ValidatingWebhook{h}}
	if _, err := c.AdmissionregistrationV1().ValidatingWebhookConfigurations().Create(t.Context(), conf,
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	dry := metav1.CreateOptions{DryRun: []string{"All"}}
	ask := func() {
		t.Helper()
		if _, err := c.CoreV1().Pods("default").Create(t.Context(), plainPod("a"), dry); err != nil {
			t.Fatal(err)
		}
	}
	for len(asked) == 0 {
		ask()
	}
	if err := c.AdmissionregistrationV1().ValidatingWebhookConfigurations().Delete(t.Context(), "v",
		metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for before := -1; before != len(asked); {
		before = len(asked)
		ask()
	}
}

// The leader tells in a policy's status what is wrong with its types, once per generation.
func TestPolicyTypesInStatus(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- r.Server.PolicyTypes().Run(ctx, 0) }()
	api := r.Admin().AdmissionregistrationV1().ValidatingAdmissionPolicies()
	w, err := api.Watch(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	policy := &arv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: "p"},
		Spec: arv1.ValidatingAdmissionPolicySpec{
			MatchConstraints: &arv1.MatchResources{ResourceRules: []arv1.NamedRuleWithOperations{
				{RuleWithOperations: arv1.RuleWithOperations{
					Operations: []arv1.OperationType{"CREATE"},
					Rule: arv1.Rule{APIGroups: []string{"apps"}, APIVersions: []string{"v1"},
						Resources: []string{"deployments"}},
				}}}},
			Validations: []arv1.Validation{{Expression: "object.replicas > 1"}},
		}}
	made, err := api.Create(ctx, policy, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	checked := func(generation int64) *arv1.ValidatingAdmissionPolicy {
		t.Helper()
		for ev := range w.ResultChan() {
			if p, ok := ev.Object.(*arv1.ValidatingAdmissionPolicy); ok && ev.Type != watch.Deleted &&
				p.Status.ObservedGeneration == generation {
				return p
			}
		}
		t.Fatal("the policy is not checked")
		return nil
	}
	p := checked(made.Generation)
	if n := len(p.Status.TypeChecking.ExpressionWarnings); n != 1 ||
		p.Status.TypeChecking.ExpressionWarnings[0].FieldRef != "spec.validations[0].expression" {
		t.Errorf("%+v", p.Status)
	}
	p.Spec.Validations[0].Expression = "object.spec.replicas > 1"
	if p, err = api.Update(ctx, p, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if p = checked(p.Generation); len(p.Status.TypeChecking.ExpressionWarnings) != 0 {
		t.Errorf("%+v", p.Status)
	}
	cancel()
	<-done
}
