package policies

import (
	"strings"
	"testing"

	arv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
)

// mutatingPolicy returns a policy with one mutation, an apply configuration or a JSON patch.
func mutatingPolicy(name, apply, patch string) *arv1.MutatingAdmissionPolicy {
	m := arv1.Mutation{PatchType: arv1.PatchTypeJSONPatch, JSONPatch: &arv1.JSONPatch{Expression: patch}}
	if apply != "" {
		m = arv1.Mutation{PatchType: arv1.PatchTypeApplyConfiguration,
			ApplyConfiguration: &arv1.ApplyConfiguration{Expression: apply}}
	}
	return &arv1.MutatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: arv1.MutatingAdmissionPolicySpec{
			MatchConstraints: everything(), Mutations: []arv1.Mutation{m},
			ReinvocationPolicy: arv1.IfNeededReinvocationPolicy,
		}}
}

func mutatingBinding(policy string) *arv1.MutatingAdmissionPolicyBinding {
	return &arv1.MutatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: policy + "-b"},
		Spec: arv1.MutatingAdmissionPolicyBindingSpec{PolicyName: policy}}
}

// Mutations of both kinds change only the given fields, or are rejected with a reason.
func TestMutations(t *testing.T) {
	for _, tc := range []struct {
		name, apply, patch, want string
		check                    func(p *corev1.Pod) bool
	}{
		{"label", `Object{metadata: Object.metadata{labels: {"x": "1"}}}`, "", "", func(p *corev1.Pod) bool {
			return p.Labels["x"] == "1" && p.Labels["app"] == "x"
		}},
		{"sidecar", `Object{spec: Object.spec{initContainers: [Object.spec.initContainers{name: "mesh", image: "m", ` +
			`restartPolicy: "Always"}]}}`, "", "",
			func(p *corev1.Pod) bool {
				return len(p.Spec.InitContainers) == 1 && *p.Spec.InitContainers[0].RestartPolicy == "Always" &&
					len(p.Spec.Containers) == 2
			}},
		{"merge of a list", `Object{spec: Object.spec{containers: [Object.spec.containers{name: "c", ` +
			`imagePullPolicy: ` +
			`"Always"}]}}`, "", "",
			func(p *corev1.Pod) bool {
				return p.Spec.Containers[0].ImagePullPolicy == "Always" &&
					p.Spec.Containers[0].Image == "docker.io/a:1" && len(p.Spec.Containers) == 2
			}},
		{"computed",
			`Object{spec: Object.spec{containers: object.spec.containers.map(c, Object.spec.containers{name: ` +
				`c.name, image: "mirror/" + c.image})}}`, "", "",
			func(p *corev1.Pod) bool { return p.Spec.Containers[1].Image == "mirror/example.com/b@sha256:0" }},
		{"optional", `Object{metadata: Object.metadata{?labels: has(object.spec.hostNetwork) ? optional.of({"y": ` +
			`"1"}) : optional.none()}}`, "", "",
			func(p *corev1.Pod) bool { return p.Labels["y"] == "" }},
		{"unknown field", `Object{spec: Object.spec{nothing: "x"}}`, "", "field not declared in schema", nil},
		{"wrong type name", `Object{spec: Object.wrong{priority: 1}}`, "", "type mismatch", nil},
		{"atomic", `Object{spec: Object.spec{containers: [Object.spec.containers{name: "c", args: ["a"]}]}}`, "",
			"may not mutate atomic arrays, maps or structs", nil},
		{"no object", `"text"`, "", "must evaluate to", nil},
		{"name", `Object{metadata: Object.metadata{name: "q"}}`, "", "field is immutable", nil},
		{"status", `Object{status: Object.status{phase: "Running"}}`, "", "", func(p *corev1.Pod) bool {
			return p.Status.Phase == ""
		}},
		{"patch", "", `[JSONPatch{op: "add", path: "/metadata/labels/" + jsonpatch.escapeKey("a/b"), value: "1"}]`, "",
			func(p *corev1.Pod) bool { return p.Labels["a/b"] == "1" }},
		{"patch with an object", "", `[JSONPatch{op: "add", path: "/spec/containers/-", value: ` +
			`Object.spec.containers{name: "e", image: "i"}}]`, "",
			func(p *corev1.Pod) bool { return len(p.Spec.Containers) == 3 && p.Spec.Containers[2].Name == "e" }},
		{"test that holds", "", `[JSONPatch{op: "test", path: "/spec/priority", value: 7}, JSONPatch{op: "replace", ` +
			`path: "/spec/priority", value: 8}]`, "",
			func(p *corev1.Pod) bool { return *p.Spec.Priority == 8 }},
		{"test that fails", "", `[JSONPatch{op: "test", path: "/spec/priority", value: 9}, JSONPatch{op: "replace", ` +
			`path: "/spec/priority", value: 8}]`, "",
			func(p *corev1.Pod) bool { return *p.Spec.Priority == 7 }},
		{"remove", "", `[JSONPatch{op: "remove", path: "/metadata/labels/app"}]`, "", func(p *corev1.Pod) bool {
			return len(p.Labels) == 0
		}},
		{"copy and move", "", `[JSONPatch{op: "copy", from: "/metadata/labels/app", path: "/metadata/labels/b"}, ` +
			`JSONPatch{op: "move", from: "/metadata/labels/b", path: "/metadata/labels/c"}]`, "",
			func(p *corev1.Pod) bool { return p.Labels["c"] == "x" && p.Labels["b"] == "" }},
		{"missing path", "", `[JSONPatch{op: "remove", path: "/metadata/labels/none"}]`,
			"JSON Patch: remove operation does not apply", nil},
		{"unknown field by patch", "", `[JSONPatch{op: "add", path: "/spec/nothing", value: 1}]`, "unknown field", nil},
		{"no patch", "", `["x"]`, "must evaluate to", nil},
		{"nothing", "", `true ? [] : [JSONPatch{}]`, "", func(p *corev1.Pod) bool { return len(p.Labels) == 1 }},
		{"error", "", `[JSONPatch{op: "add", path: object.nothing, value: 1}]`, "no such key: nothing", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, ignore := range []bool{false, true} {
				p := newPolicies(t, nil)
				m := mutatingPolicy("m", tc.apply, tc.patch)
				if ignore {
					m.Spec.FailurePolicy = new(arv1.Ignore)
				}
				p.add(m)
				p.add(mutatingBinding("m"))
				a := podAttempt()
				given, before := a.Object.(*corev1.Pod), a.Object.(*corev1.Pod).DeepCopy()
				err := p.Mutate(t.Context(), a, &matching.Rounds{})
				want := tc.want
				if ignore && tc.want != "field is immutable" {
					want = ""
				}
				if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
					t.Fatalf("%v", err)
				}
				if tc.check != nil && !tc.check(a.Object.(*corev1.Pod)) {
					t.Errorf("the pod is %+v", a.Object)
				}
				if given.String() != before.String() {
					t.Error("the object that was given is changed")
				}
			}
		})
	}
}

// A policy sees the changes of previous policies. It runs once more if a later policy changes the
// object.
func TestReinvocation(t *testing.T) {
	p := newPolicies(t, nil)
	p.add(mutatingPolicy("a", "", `"b" in object.metadata.labels ? [JSONPatch{op: "add", path: "/metadata/labels/a", `+
		`value: "1"}] : []`))
	p.add(mutatingPolicy("b", "", `[JSONPatch{op: "add", path: "/metadata/labels/b", value: "1"}]`))
	p.add(mutatingPolicy("c", "", `"b" in object.metadata.labels ? [JSONPatch{op: "add", path: "/metadata/labels/c", `+
		`value: "1"}] : []`))
	for _, name := range []string{"a", "b", "c"} {
		p.add(mutatingBinding(name))
	}
	a, rounds := podAttempt(), &matching.Rounds{}
	if err := p.Mutate(t.Context(), a, rounds); err != nil {
		t.Fatal(err)
	}
	if l := a.Object.(*corev1.Pod).Labels; l["a"] != "" || l["b"] == "" || l["c"] == "" || !rounds.NeedsReinvocation() {
		t.Fatalf("after the first round %v", l)
	}
	rounds.StartSecond()
	if err := p.Mutate(t.Context(), a, rounds); err != nil {
		t.Fatal(err)
	}
	if l := a.Object.(*corev1.Pod).Labels; l["a"] == "" || rounds.NeedsReinvocation() {
		t.Errorf("after the second round %v", l)
	}
}
