package apiserver_test

import (
	"encoding/json"
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	arv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// hookServer serves AdmissionReviews; rules are about pods.
func hookServer(
	t *testing.T, say func(r *admissionv1.AdmissionRequest, out *admissionv1.AdmissionResponse),
) arv1.ValidatingWebhook {
	t.Helper()
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var review admissionv1.AdmissionReview
		if err := json.NewDecoder(r.Body).Decode(&review); err != nil {
			t.Error(err)
			return
		}
		out := &admissionv1.AdmissionResponse{UID: review.Request.UID, Allowed: true}
		say(review.Request, out)
		review.Request, review.Response = nil, out
		_ = json.NewEncoder(w).Encode(&review)
	}))
	t.Cleanup(srv.Close)
	none := arv1.SideEffectClassNone
	return arv1.ValidatingWebhook{
		Name: "h.example.com", SideEffects: &none, AdmissionReviewVersions: []string{"v1"},
		ClientConfig: arv1.WebhookClientConfig{URL: &srv.URL, CABundle: pem.EncodeToMemory(
			&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})},
		Rules: []arv1.RuleWithOperations{{Operations: []arv1.OperationType{"*"},
			Rule: arv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"},
				Resources: []string{"pods", "pods/*"}}}},
	}
}

func plainPod(name string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
}

// What a mutating webhook adds is stored, completed and validated; its words about status and
// generation are not.
func TestMutatingWebhookInTheChain(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	<-r.Server.AdmissionReady()
	kind := admissionv1.PatchTypeJSONPatch
	var seen []string
	h := hookServer(t, func(q *admissionv1.AdmissionRequest, out *admissionv1.AdmissionResponse) {
		seen = append(seen, string(q.Operation)+" "+q.SubResource)
		if q.Operation != admissionv1.Create || q.SubResource != "" {
			return
		}
		out.PatchType, out.Patch = &kind, []byte(`[
			{"op":"add","path":"/spec/containers/-","value":{"name":"sidecar","image":"s:1"}},
			{"op":"add","path":"/metadata/labels","value":{"injected":"yes"}},
			{"op":"add","path":"/metadata/generation","value":9},
			{"op":"add","path":"/status","value":{"phase":"Running","podIP":"10.0.0.9"}}]`)
	})
	r.Server.Webhooks().Mutating().Set(&arv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "m"},
		Webhooks: []arv1.MutatingWebhook{{Name: h.Name, ClientConfig: h.ClientConfig, Rules: h.Rules,
			SideEffects:             h.SideEffects,
			AdmissionReviewVersions: h.AdmissionReviewVersions}}})
	c := r.Admin()
	p, err := c.CoreV1().Pods("default").Create(t.Context(), plainPod("a"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Spec.Containers) != 2 || p.Spec.Containers[1].ImagePullPolicy == "" || p.Labels["injected"] != "yes" ||
		p.Generation != 1 || p.Status.Phase != corev1.PodPending || p.Status.PodIP != "" {
		t.Errorf("the pod is %+v", p)
	}
	if err := c.CoreV1().Pods("default").Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(seen, ","); got != "CREATE ,DELETE " {
		t.Errorf("the webhook saw %s", got)
	}
}

// A validating webhook sees what will be stored and refuses it, over HTTP and from inside; a denial
// of a dry run is one as well.
func TestValidatingWebhookInTheChain(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	<-r.Server.AdmissionReady()
	h := hookServer(t, func(q *admissionv1.AdmissionRequest, out *admissionv1.AdmissionResponse) {
		var p corev1.Pod
		_ = json.Unmarshal(q.Object.Raw, &p)
		out.Allowed = p.Name != "bad" || p.Spec.RestartPolicy == "" // it has its defaults by now
		out.Result = &metav1.Status{Code: 403, Message: "bad pods are not wanted"}
	})
	sink := r.Server.Webhooks().Validating()
	conf := &arv1.ValidatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "v"},
		Webhooks: []arv1.ValidatingWebhook{h}}
	sink.Set(conf)
	c := r.Admin()
	for _, dry := range [][]string{nil, {"All"}} {
		_, err := c.CoreV1().Pods("default").Create(t.Context(), plainPod("bad"), metav1.CreateOptions{DryRun: dry})
		if err == nil || err.Error() != `admission webhook "h.example.com" denied the request: bad `+
			`pods are not wanted` {
			t.Errorf("%v", err)
		}
	}
	if _, err := c.CoreV1().Pods("default").Create(t.Context(), plainPod("good"), metav1.CreateOptions{}); err != nil {
		t.Error(err)
	}
	sink.Remove(conf)
	if _, err := c.CoreV1().Pods("default").Create(t.Context(), plainPod("bad"), metav1.CreateOptions{}); err != nil {
		t.Errorf("without the webhook: %v", err)
	}
}

// Policies of both kinds hold in the chain, with a parameter from the store.
func TestPoliciesInTheChain(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	<-r.Server.AdmissionReady()
	everything := &arv1.MatchResources{ResourceRules: []arv1.NamedRuleWithOperations{
		{RuleWithOperations: arv1.RuleWithOperations{
			Operations: []arv1.OperationType{"*"},
			Rule:       arv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}},
		}}}}
	sinks := r.Server.Policies().Sinks()
	set := func(resource string, o api.Object) { sinks[resource].Set(o) }
	set("mutatingadmissionpolicies", &arv1.MutatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: "m"},
		Spec: arv1.MutatingAdmissionPolicySpec{MatchConstraints: everything, Mutations: []arv1.Mutation{{
			PatchType: arv1.PatchTypeApplyConfiguration,
			ApplyConfiguration: &arv1.ApplyConfiguration{
				Expression: `Object{metadata: Object.metadata{labels: {"images": ` +
					`string(object.spec.containers.size())}}}`},
		}}}})
	set("mutatingadmissionpolicybindings",
		&arv1.MutatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: "m"},
			Spec: arv1.MutatingAdmissionPolicyBindingSpec{PolicyName: "m"}})
	set("validatingadmissionpolicies", &arv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: "v"},
		Spec: arv1.ValidatingAdmissionPolicySpec{MatchConstraints: everything,
			ParamKind: &arv1.ParamKind{APIVersion: "v1", Kind: "ConfigMap"},
			Validations: []arv1.Validation{{Expression: "int(object.metadata.labels.images) <= int(params.data.most)",
				Message: "too many containers"}}}})
	set("validatingadmissionpolicybindings",
		&arv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: "v"},
			Spec: arv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: "v",
				ValidationActions: []arv1.ValidationAction{arv1.Deny},
				ParamRef:          &arv1.ParamRef{Name: "limits"}}})
	r.Must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "limits"},
		Data: map[string]string{"most": "1"}})
	c := r.Admin()
	p, err := c.CoreV1().Pods("default").Create(t.Context(), plainPod("one"), metav1.CreateOptions{})
	if err != nil || p.Labels["images"] != "1" {
		t.Fatalf("%v: %v", p.GetLabels(), err)
	}
	two := plainPod("two")
	two.Spec.Containers = append(two.Spec.Containers, corev1.Container{Name: "d", Image: "j"})
	_, err = c.CoreV1().Pods("default").Create(t.Context(), two, metav1.CreateOptions{})
	if !apierrors.IsInvalid(err) || !strings.HasSuffix(err.Error(),
		`ValidatingAdmissionPolicy 'v' with binding 'v' denied request: too many containers`) {
		t.Errorf("%v", err)
	}
}
