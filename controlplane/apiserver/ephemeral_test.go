package apiserver_test

import (
	"testing"

	arv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// F128: a policy that always pulls images sees ephemeral containers on their subresource, and
// changes them.
func TestPoliciesChangeEphemeralContainers(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	<-r.Server.AdmissionReady()
	ctx := apiservertest.Within(t)
	sinks := r.Server.Policies().Sinks()
	set := func(resource string, o api.Object) { sinks[resource].Set(o) }
	set("mutatingadmissionpolicies", &arv1.MutatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: "pull"},
		Spec: arv1.MutatingAdmissionPolicySpec{
			MatchConstraints: &arv1.MatchResources{ResourceRules: []arv1.NamedRuleWithOperations{
				{RuleWithOperations: arv1.RuleWithOperations{Operations: []arv1.OperationType{arv1.Update},
					Rule: arv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"},
						Resources: []string{"pods/ephemeralcontainers"}}}}}},
			Mutations: []arv1.Mutation{{PatchType: arv1.PatchTypeApplyConfiguration,
				ApplyConfiguration: &arv1.ApplyConfiguration{
					Expression: `Object{spec: Object.spec{ephemeralContainers: ` +
						`object.spec.ephemeralContainers.map(c, Object.spec.ephemeralContainers{name: c.name, ` +
						`imagePullPolicy: "Always"})}}`}}}}})
	set("mutatingadmissionpolicybindings",
		&arv1.MutatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: "pull"},
			Spec: arv1.MutatingAdmissionPolicyBindingSpec{PolicyName: "pull"}})
	pods := r.Admin().CoreV1().Pods("default")
	r.Must(apiservertest.NewPod("p"))
	const body = `{"spec":{"ephemeralContainers":[{"name":"d","image":"i:1"}]}}`
	got, err := pods.Patch(ctx, "p", types.StrategicMergePatchType, []byte(body), metav1.PatchOptions{},
		"ephemeralcontainers")
	if err != nil || got.Spec.EphemeralContainers[0].ImagePullPolicy != corev1.PullAlways {
		t.Errorf("%v %v", got, err)
	}
}
