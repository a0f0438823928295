package webhooks

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	arv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
	"keelson.dev/keelson/internal/virtual"
)

// A patch is applied, or rejected with a reason. Fields that webhooks may not change are preserved.
func TestPatches(t *testing.T) {
	ca := newAuthority(t)
	for _, tc := range []struct {
		name, patch, want string // want = "" means success
		check             func(p *corev1.Pod) bool
	}{
		{"add", `[{"op":"add","path":"/metadata/labels/x","value":"1"}]`, "", func(p *corev1.Pod) bool {
			return p.Labels["x"] == "1"
		}},
		{"replace", `[{"op":"replace","path":"/spec/containers/0/image","value":"j"}]`, "", func(p *corev1.Pod) bool {
			return p.Spec.Containers[0].Image == "j"
		}},
		{"remove", `[{"op":"remove","path":"/metadata/labels"}]`, "", func(p *corev1.Pod) bool {
			return len(p.Labels) == 0
		}},
		{"copy", `[{"op":"copy","from":"/metadata/labels/app","path":"/metadata/labels/y"}]`, "",
			func(p *corev1.Pod) bool { return p.Labels["y"] == "x" }},
		{"move", `[{"op":"move","from":"/metadata/labels/app","path":"/metadata/labels/y"}]`, "",
			func(p *corev1.Pod) bool { return p.Labels["app"] == "" && p.Labels["y"] == "x" }},
		{"sidecar", `[{"op":"add","path":"/spec/containers/-","value":{"name":"s","image":"k"}}]`, "",
			func(p *corev1.Pod) bool { return len(p.Spec.Containers) == 2 }},
		{"test that holds",
			`[{"op":"test","path":"/spec/containers/0/image","value":"i"},{"op":"add","path":"/metadata/labels/z",` +
				`"value":"1"}]`, "", func(p *corev1.Pod) bool { return p.Labels["z"] == "1" }},
		{"test that fails", `[{"op":"test","path":"/spec/containers/0/image","value":"other"}]`, "testing value", nil},
		{"nothing", `[]`, "", func(p *corev1.Pod) bool { return p.Labels["app"] == "x" }},
		{"status", `[{"op":"replace","path":"/status/phase","value":"Running"}]`, "", func(p *corev1.Pod) bool {
			return p.Status.Phase == corev1.PodPending
		}},
		{"generation", `[{"op":"replace","path":"/metadata/generation","value":7}]`, "", func(p *corev1.Pod) bool {
			return p.Generation == 1
		}},
		{"uid", `[{"op":"replace","path":"/metadata/uid","value":"v"}]`, "", func(p *corev1.Pod) bool {
			return p.UID == "u"
		}},
		{"name", `[{"op":"replace","path":"/metadata/name","value":"q"}]`,
			`metadata.name: Invalid value: "q": field is immutable`, nil},
		{"namespace", `[{"op":"replace","path":"/metadata/namespace","value":"q"}]`,
			`metadata.namespace: Invalid value: "q": field is immutable`, nil},
		{"kind", `[{"op":"replace","path":"/kind","value":"Node"}]`, "returned a /v1, Kind=Node", nil},
		{"wrong type", `[{"op":"replace","path":"/spec/containers","value":7}]`,
			"spec.containers: Invalid value: 7: must be a list", nil},
		{"no list", `{"op":"add"}`, "received undecodable patch in webhook response", nil},
		{"missing path", `[{"op":"replace","path":"/a/b/c","value":1}]`, "does not apply", nil},
		{"whole document", `[{"op":"replace","path":"","value":{}}]`, "returned a /, Kind= for a /v1, Kind=Pod", nil},
		{"bomb", `[{"op":"add","path":"/metadata/annotations","value":{"a":"` + strings.Repeat("x", 1<<20) + `"}},` +
			`{"op":"copy","from":"/metadata/annotations/a","path":"/metadata/annotations/b"},` +
			`{"op":"copy","from":"/metadata/annotations","path":"/metadata/labels"}]`, "patch exceeds a limit", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			srv := ca.server(t, patching(t, tc.patch))
			w := newWebhooks(t)
			w.Mutating().Set(mutating("c", []arv1.ValidatingWebhook{hookAt("m.example.com", srv.URL, ca.pem)}))
			a := podAttempt()
			before := a.Object.DeepCopyObject()
			shared := a.Object
			err := w.Mutate(t.Context(), a, &matching.Rounds{})
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Fatalf("%v", err)
			}
			if tc.check != nil && !tc.check(a.Object.(*corev1.Pod)) {
				t.Errorf("the pod is %+v", a.Object)
			}
			if fmt.Sprint(shared) != fmt.Sprint(before) {
				t.Error("the object that was given is changed")
			}
		})
	}
}

// JSONPatch is the only patch type, and a webhook must set the type. A deletion cannot be patched.
func TestPatchTypes(t *testing.T) {
	ca := newAuthority(t)
	other, none, known := admissionv1.PatchType("MergePatch"), admissionv1.PatchType(""), admissionv1.PatchTypeJSONPatch
	patch := []byte(`[{"op":"add","path":"/metadata/labels/x","value":"1"}]`)
	for _, tc := range []struct {
		out     admissionv1.AdmissionResponse
		version string
		deletes bool
		want    string
	}{
		{admissionv1.AdmissionResponse{Patch: patch, PatchType: &other}, "v1", false, "unsupported patch type"},
		{admissionv1.AdmissionResponse{Patch: patch, PatchType: &none}, "v1", false, "invalid response.patchType"},
		{admissionv1.AdmissionResponse{Patch: patch}, "v1", false, "response.patch but not response.patchType"},
		{admissionv1.AdmissionResponse{PatchType: &known}, "v1", false, "response.patchType but not response.patch"},
		{admissionv1.AdmissionResponse{Patch: patch}, "v1beta1", false, ""},
		{admissionv1.AdmissionResponse{Patch: patch, PatchType: &known}, "v1", true,
			"not supported for this operation"},
	} {
		tc.out.Allowed = true
		srv := ca.server(t, says(t, tc.out))
		h := hookAt("m.example.com", srv.URL, ca.pem)
		h.AdmissionReviewVersions = []string{tc.version}
		w := newWebhooks(t)
		w.Mutating().Set(mutating("c", []arv1.ValidatingWebhook{h}))
		a := podAttempt()
		if tc.deletes {
			a.Operation, a.Object, a.Old = api.Delete, nil, a.Object
		}
		err := w.Mutate(t.Context(), a, &matching.Rounds{})
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%+v: %v", tc, err)
		}
	}
}

// F35: mutating webhooks are called in the order of their configurations' names, and each sees the
// changes of previous ones. The second round calls those with the policy IfNeeded if the object
// changed after them.
func TestOrderAndReinvocation(t *testing.T) {
	ca := newAuthority(t)
	var asked []string
	add := func(name string, when func(labels map[string]string) bool) arv1.ValidatingWebhook {
		kind := admissionv1.PatchTypeJSONPatch
		srv := ca.server(t, answering(t, func(r *admissionv1.AdmissionRequest, o *admissionv1.AdmissionResponse) {
			var p metav1.PartialObjectMetadata
			if err := json.Unmarshal(r.Object.Raw, &p); err != nil {
				t.Error(err)
			}
			asked = append(asked, name)
			if when(p.Labels) {
				o.PatchType, o.Patch = &kind, []byte(`[{"op":"add","path":"/metadata/labels/`+name+`","value":"1"}]`)
			}
		}))
		return hookAt(name, srv.URL, ca.pem)
	}
	has := func(label string) func(map[string]string) bool {
		return func(l map[string]string) bool { return l[label] != "" }
	}
	w := newWebhooks(t)
	w.Mutating().Set(mutating("b", []arv1.ValidatingWebhook{
		add("b1", has("a1")), add("b2", func(map[string]string) bool { return false }),
	}, "b2"))
	w.Mutating().Set(mutating("a", []arv1.ValidatingWebhook{add("a2", has("b1")), add("a1", has("app"))}, "a2"))
	a, rounds := podAttempt(), &matching.Rounds{}
	run := func() {
		t.Helper()
		if err := w.Mutate(t.Context(), a, rounds); err != nil {
			t.Fatal(err)
		}
	}
	run()
	if !slices.Equal(asked, []string{"a2", "a1", "b1", "b2"}) || !rounds.NeedsReinvocation() {
		t.Fatalf("the first round asks %v", asked)
	}
	rounds.StartSecond()
	asked = nil
	run()
	if !slices.Equal(asked, []string{"a2", "b2"}) || rounds.NeedsReinvocation() {
		// b2 has seen all changes but that of a2
		t.Errorf("the second round asks %v", asked)
	}
	if l := a.Object.(*corev1.Pod).Labels; l["a1"] == "" || l["b1"] == "" || l["a2"] == "" {
		t.Errorf("labels %v", l)
	}
	// If others change the object between the rounds, all webhooks with the policy IfNeeded are
	// called again.
	a, rounds, asked = podAttempt(), &matching.Rounds{}, nil
	run()
	a.Object.(*corev1.Pod).Labels["late"] = "1"
	rounds.StartSecond()
	asked = nil
	run()
	if !slices.Equal(asked, []string{"a2", "b2"}) {
		t.Errorf("the second round asks %v", asked)
	}
}

// With the match policy Equivalent, a rule for another version of the resource matches. The webhook
// receives that version, and its patch is converted to the client's version.
func TestEquivalent(t *testing.T) {
	ca := newAuthority(t)
	var seen admissionv1.AdmissionRequest
	kind := admissionv1.PatchTypeJSONPatch
	srv := ca.server(t, answering(t, func(r *admissionv1.AdmissionRequest, o *admissionv1.AdmissionResponse) {
		seen = *r
		o.PatchType, o.Patch = &kind, []byte(`[{"op":"replace","path":"/message","value":"changed"}]`)
	}))
	h := hookAt("e.example.com", srv.URL, ca.pem)
	h.Rules[0].Rule = arv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"events"}}
	attempt := func() *matching.Attempt {
		a := podAttempt()
		a.Kind, a.Resource = eventsv1.SchemeGroupVersion.WithKind("Event"),
			eventsv1.SchemeGroupVersion.WithResource("events")
		a.Object = &eventsv1.Event{
			TypeMeta:   metav1.TypeMeta{APIVersion: "events.k8s.io/v1", Kind: "Event"},
			ObjectMeta: metav1.ObjectMeta{Name: "e", Namespace: "default"}, Note: "as it was", Reason: "r",
		}
		return a
	}
	for policy, asked := range map[arv1.MatchPolicyType]bool{arv1.Equivalent: true, arv1.Exact: false} {
		h.MatchPolicy, seen = &policy, admissionv1.AdmissionRequest{}
		w := newWebhooks(t)
		w.Mutating().Set(mutating("c", []arv1.ValidatingWebhook{h}))
		a := attempt()
		if err := w.Mutate(t.Context(), a, &matching.Rounds{}); err != nil {
			t.Fatal(err)
		}
		e := a.Object.(*eventsv1.Event)
		if (seen.UID != "") != asked || (e.Note == "changed") != asked || e.APIVersion != "events.k8s.io/v1" {
			t.Errorf("%s: the event is %+v", policy, e)
		}
		if asked && (seen.Kind.Group != "" || seen.RequestKind.Group != "events.k8s.io" || seen.Resource.Group != "" ||
			!strings.Contains(string(seen.Object.Raw), `"apiVersion":"v1"`)) {
			t.Errorf("the webhook saw %+v", seen)
		}
	}
}

// pipes is a Services implementation with connections that never respond.
type pipes struct{}

func (pipes) ForService(string, string, int32) func(context.Context, string, string) (net.Conn, error) {
	return pipes{}.dial
}

func (pipes) dial(context.Context, string, string) (net.Conn, error) {
	a, b := net.Pipe()
	go func() { // discard all input
		buf := make([]byte, 1<<10)
		for {
			if _, err := b.Read(buf); err != nil {
				return
			}
		}
	}()
	return a, nil
}

// Ten unresponsive webhooks take the deadline of the request and not ten timeouts; one takes its
// timeout.
func TestBudget(t *testing.T) {
	for _, tc := range []struct {
		hooks    int
		deadline time.Duration
		took     time.Duration
	}{{1, time.Minute, 30 * time.Second}, {10, time.Minute, time.Minute}, {10, 34 * time.Second, 34 * time.Second}} {
		virtual.Test(t, func(t *testing.T) {
			var hooks []arv1.ValidatingWebhook
			for i := range tc.hooks {
				h := hookAt(fmt.Sprintf("h%d.example.com", i), "", nil)
				h.ClientConfig.URL = nil
				h.ClientConfig.Service = &arv1.ServiceReference{Namespace: "hooks", Name: "webhook"}
				h.FailurePolicy, h.TimeoutSeconds = new(arv1.Ignore), new(int32(30))
				hooks = append(hooks, h)
			}
			w := newWebhooks(t, func(c *Config) { c.Services = pipes{} })
			w.Mutating().Set(mutating("c", hooks))
			w.Validating().Set(validating("c", hooks...))
			for kind, ask := range map[string]func(context.Context) error{
				"mutating": func(ctx context.Context) error {
					return w.Mutate(ctx, podAttempt(), &matching.Rounds{})
				},
				"validating": func(ctx context.Context) error { return w.Validate(ctx, podAttempt()) },
			} {
				ctx, cancel := context.WithTimeout(t.Context(), tc.deadline)
				start := time.Now()
				err := ask(ctx)
				cancel()
				took := time.Since(start)
				if tc.hooks == 1 && (err != nil || took != tc.took) || tc.hooks > 1 && kind == "mutating" &&
					(took != tc.took || !apierrors.IsTimeout(err)) || took > tc.deadline {
					t.Errorf("%d %s webhooks took %v of %v: %v", tc.hooks, kind, took, tc.deadline, err)
				}
			}
			w.Mutating().Replace(nil)
			w.Validating().Replace(nil)
			virtual.Wait()
		})
	}
}

// Rules and selectors decide which webhooks are called.
func TestMatching(t *testing.T) {
	ca := newAuthority(t)
	asked := false
	srv := ca.server(t, answering(t, func(*admissionv1.AdmissionRequest, *admissionv1.AdmissionResponse) {
		asked = true
	}))
	rule := func(groups, versions, resources string, ops ...arv1.OperationType) func(*arv1.ValidatingWebhook) {
		return func(h *arv1.ValidatingWebhook) {
			h.Rules = []arv1.RuleWithOperations{{Operations: ops, Rule: arv1.Rule{
				APIGroups: []string{groups}, APIVersions: []string{versions}, Resources: strings.Fields(resources),
			}}}
		}
	}
	scope := func(s arv1.ScopeType) func(*arv1.ValidatingWebhook) {
		return func(h *arv1.ValidatingWebhook) { h.Rules[0].Scope = &s }
	}
	condition := func(text string) func(*arv1.ValidatingWebhook) {
		return func(h *arv1.ValidatingWebhook) {
			h.MatchConditions = []arv1.MatchCondition{{Name: "c", Expression: text}}
		}
	}
	selects := func(namespaces bool, s metav1.LabelSelector) func(*arv1.ValidatingWebhook) {
		return func(h *arv1.ValidatingWebhook) {
			if namespaces {
				h.NamespaceSelector = &s
			} else {
				h.ObjectSelector = &s
			}
		}
	}
	label := func(k, v string) metav1.LabelSelector {
		return metav1.LabelSelector{MatchLabels: map[string]string{k: v}}
	}
	sub := func(name string) func(*matching.Attempt) {
		return func(a *matching.Attempt) { a.Subresource = name }
	}
	node := func(a *matching.Attempt) {
		a.Namespace, a.Name = "", "n"
		a.Resource, a.Kind = schema.GroupVersionResource{Version: "v1", Resource: "nodes"},
			schema.GroupVersionKind{Version: "v1", Kind: "Node"}
		a.Object = &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}}
	}
	namespace := func(a *matching.Attempt) {
		a.Namespace, a.Name = "fresh", "fresh"
		a.Resource, a.Kind = schema.GroupVersionResource{Version: "v1", Resource: "namespaces"},
			schema.GroupVersionKind{Version: "v1", Kind: "Namespace"}
		a.Object = &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "fresh",
			Labels: map[string]string{"team": "a"}}}
	}
	same := func(*matching.Attempt) {}
	for i, tc := range []struct {
		hook func(*arv1.ValidatingWebhook)
		at   func(*matching.Attempt)
		want bool
	}{
		{rule("", "v1", "pods", "CREATE"), same, true},
		{rule("", "v1", "pods", "UPDATE"), same, false},
		{rule("*", "*", "*", "*"), same, true},
		{rule("*", "*", "*", "*"), sub("status"), false},
		{rule("*", "*", "*/*", "*"), sub("status"), true},
		{rule("*", "*", "pods/*", "*"), sub("status"), true},
		{rule("*", "*", "*/status", "*"), sub("status"), true},
		{rule("*", "*", "*/scale", "*"), sub("status"), false},
		{rule("*", "*", "pods/status pods", "*"), same, true},
		{rule("apps", "v1", "pods", "CREATE"), same, false},
		{rule("", "v2", "pods", "CREATE"), same, false},
		{scope("Namespaced"), same, true}, {scope("Cluster"), same, false}, {scope("*"), same, true},
		{scope("Namespaced"), node, false}, {scope("Cluster"), node, true},
		{scope("Namespaced"), namespace, false}, {scope("Cluster"), namespace, true},
		{selects(false, label("app", "x")), same, true}, {selects(false, label("app", "y")), same, false},
		{selects(false, label("app", "x")), func(a *matching.Attempt) { a.Old, a.Object = a.Object, nil }, true},
		{selects(false, label("app", "x")), func(a *matching.Attempt) { a.Object = &corev1.PodExecOptions{} }, false},
		{selects(true, label("team", "a")), same, false}, {selects(true, label("env", "prod")), same, true},
		{selects(true, label("team", "a")), namespace, true}, {selects(true, label("team", "b")), namespace, false},
		{selects(true, label("team", "a")), node, true},
		{condition("object.metadata.labels.app == 'x'"), same, true},
		{condition("object.metadata.labels.app == 'y'"), same, false},
		{condition("request.userInfo.username == 'jane' && request.operation == 'CREATE'"), same, true},
		{condition("oldObject == null"), same, true},
	} {
		h := hookAt("m.example.com", srv.URL, ca.pem)
		tc.hook(&h)
		w := newWebhooks(t, func(c *Config) { c.Cluster = cluster{"default": {"env": "prod"}} })
		w.Validating().Set(validating("c", h))
		a := podAttempt()
		tc.at(a)
		asked = false
		if err := w.Validate(t.Context(), a); err != nil || asked != tc.want {
			t.Errorf("%d: asked %v, want %v: %v", i, asked, tc.want, err)
		}
	}
}

// A condition that cannot be evaluated fails the request or skips the webhook, by the failure
// policy. A false condition takes precedence.
func TestConditionErrors(t *testing.T) {
	ca := newAuthority(t)
	srv := ca.server(t, says(t, admissionv1.AdmissionResponse{Allowed: true}))
	for _, tc := range []struct {
		conditions []string
		fails      bool
	}{
		{[]string{"object.metadata.nothing == 'x'"}, true},
		{[]string{"object.metadata.nothing == 'x'", "false"}, false},
		{[]string{"no expression at all"}, true},
		{[]string{strings.Repeat("[1,2,3,4,5,6,7,8,9,10].all(x, ", 6) + "true" + strings.Repeat(")", 6) + " && " +
			strings.Repeat("[1,2,3,4,5,6,7,8,9,10].all(x, ", 7) + "true" + strings.Repeat(")", 7)}, true},
	} {
		h := hookAt("m.example.com", srv.URL, ca.pem)
		for i, c := range tc.conditions {
			h.MatchConditions = append(h.MatchConditions, arv1.MatchCondition{Name: fmt.Sprint(i), Expression: c})
		}
		for _, policy := range []arv1.FailurePolicyType{arv1.Fail, arv1.Ignore} {
			h.FailurePolicy = &policy
			w := newWebhooks(t)
			w.Validating().Set(validating("c", h))
			err := w.Validate(t.Context(), podAttempt())
			if failed := apierrors.IsForbidden(err); failed != (tc.fails && policy == arv1.Fail) ||
				err != nil && !failed {
				t.Errorf("%.60v, %s: %v", tc.conditions, policy, err)
			}
		}
	}
}

// Configuration changes are followed. A removed webhook is not called any more, and leaves neither
// an endpoint nor metric series.
func TestConfigurationsGo(t *testing.T) {
	ca := newAuthority(t)
	srv := ca.server(t, says(t, admissionv1.AdmissionResponse{}))
	w := newWebhooks(t)
	c := validating("c", hookAt("m.example.com", srv.URL, ca.pem))
	w.Validating().Set(c)
	if err := w.Validate(t.Context(), podAttempt()); err == nil {
		t.Fatal("not asked")
	}
	w.Validating().Remove(c)
	if err := w.Validate(t.Context(), podAttempt()); err != nil {
		t.Fatal(err)
	}
	if w.current.Load() != nil || len(w.endpoints) != 0 || counted(t, w, "request_total") != 0 {
		t.Error("something is left")
	}
}

// BenchmarkNoWebhook measures an attempt without webhooks and with webhooks for other resources;
// neither allocates.
func BenchmarkNoWebhook(b *testing.B) {
	for _, n := range []int{0, 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			w := newWebhooks(b)
			for i := range n {
				h := hookAt("m.example.com", "https://127.0.0.1:1", nil)
				h.Rules[0].Rule = arv1.Rule{APIGroups: []string{"apps"}, APIVersions: []string{"v1"},
					Resources: []string{"deployments"}}
				w.Validating().Set(validating(fmt.Sprint(i), h))
			}
			a, ctx := podAttempt(), b.Context()
			b.ReportAllocs()
			for b.Loop() {
				if err := w.Validate(ctx, a); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
