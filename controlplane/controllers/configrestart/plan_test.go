package configrestart

import (
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"
)

// References that are visible to containers count; references that only the node uses do not.
func TestRefs(t *testing.T) {
	var spec corev1.PodSpec
	err := yaml.UnmarshalStrict([]byte(`
imagePullSecrets: [{name: registry}]
initContainers: [{name: i, envFrom: [{configMapRef: {name: init}}]}]
containers:
- name: c
  env: [{name: A, valueFrom: {configMapKeyRef: {name: one, key: a}}}, {name: B, valueFrom: {secretKeyRef: {name: two, key: b}}}, {name: C, value: x}]
  envFrom: [{secretRef: {name: three}}]
volumes:
- {name: a, configMap: {name: one}}
- {name: b, secret: {secretName: four}}
- {name: c, projected: {sources: [{configMap: {name: five}}, {secret: {name: six}}, {serviceAccountToken: {path: t}}]}}
- {name: d, csi: {driver: d, nodePublishSecretRef: {name: node}}}
- {name: e, emptyDir: {}}
`), &spec)
	if err != nil {
		t.Fatal(err)
	}
	got := Refs("default", &corev1.PodTemplateSpec{Spec: spec})
	want := []Ref{"configmaps/five", "configmaps/init", "configmaps/one", "secrets/four", "secrets/six",
		"secrets/three", "secrets/two"}
	if !slices.Equal(got, want) {
		t.Errorf("%v", got)
	}
}

func TestPlan(t *testing.T) {
	const a, b = Ref("configmaps/a"), Ref("secrets/b")
	both := []Ref{a, b}
	for name, c := range map[string]struct {
		refs      []Ref
		seen, now State
		next      State
		replace   bool
	}{
		"the first look": {both, State{}, State{a: "1", b: "1"}, State{a: "1", b: "1"}, false},
		"nothing new": {both, State{a: "1", b: "1"}, State{a: "1", b: "1"},
			State{a: "1", b: "1"}, false},
		"one has changed": {both, State{a: "1", b: "1"}, State{a: "2", b: "1"},
			State{a: "2", b: "1"}, true},
		"one is gone": {both, State{a: "1", b: "1"}, State{b: "1"}, State{a: "1", b: "1"}, false},
		"it is back as it was": {both, State{a: "1", b: "1"}, State{a: "1", b: "1"},
			State{a: "1", b: "1"}, false},
		"one is gone, another changed": {both, State{a: "1", b: "1"}, State{b: "2"}, State{a: "1", b: "2"}, true},
		"one comes for the first time": {both, State{a: "", b: "1"}, State{a: "1", b: "1"},
			State{a: "1", b: "1"}, false},
		"the template refers to another": {both, State{a: "1"}, State{a: "1", b: "1"}, State{a: "1", b: "1"}, false},
		"and to one no more": {[]Ref{a}, State{a: "1", b: "1"}, State{a: "1", b: "2"},
			State{a: "1"}, false},
	} {
		next, replace := PlanRestart(c.refs, c.seen, c.now)
		if replace != c.replace || !maps.Equal(next, c.next) {
			t.Errorf("%s: %s, %t", name, next, replace)
		}
		if again, more := PlanRestart(c.refs, next, c.now); more || !maps.Equal(again, next) {
			t.Errorf("%s: it does not come to rest: %s, %t", name, again, more)
		}
		if got := Parse(next.String()); !maps.Equal(got, next) {
			t.Errorf("%s: %q is read as %q", name, next, got)
		}
	}
	if got := Parse("x,=y,configmaps/a=1,,"); !maps.Equal(got, State{a: "1"}) {
		t.Errorf("%v", got)
	}
	many := make([]Ref, 2*maxRefs)
	for i := range many {
		many[i] = Ref(strings.Repeat("x", i+1))
	}
	if next, _ := PlanRestart(many, nil, nil); len(next) != maxRefs {
		t.Errorf("%d are kept", len(next))
	}
}

// A digest does not depend on the order of keys. It changes if a value changes or moves to another
// key or field. The digest of a Secret cannot be computed without its UID.
func TestDigests(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	seen := map[string]string{}
	for range 2000 {
		m := &corev1.ConfigMap{}
		for _, k := range []string{"a", "b", "ab"} {
			switch random.IntN(4) {
			case 0:
				m.Data = with(m.Data, k, []string{"", "a", "b", "ab"}[random.IntN(4)])
			case 1:
				m.BinaryData = with(m.BinaryData, k, []byte([]string{"", "a", "b", "ab"}[random.IntN(4)]))
			}
		}
		raw, err := yaml.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		d := OfConfigMap(m)
		if was, ok := seen[d]; ok && was != string(raw) {
			t.Fatalf("%s and %s have one digest", was, raw)
		}
		seen[d] = string(raw)
	}
	secret := func(uid, v string) string {
		return OfSecret(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{UID: types.UID(uid)},
			Data: map[string][]byte{"password": []byte(v)}})
	}
	if secret("u", "x") != secret("u", "x") || secret("u", "x") == secret("u", "y") ||
		secret("u", "x") == secret("v", "x") {
		t.Error("digests of Secrets")
	}
}

func with[V any](m map[string]V, k string, v V) map[string]V {
	if m == nil {
		m = map[string]V{}
	}
	m[k] = v
	return m
}
