package fields

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

const droppedTable = `
[PKG.outer]
honoured: kind labels spec list
inert: dict -- so it is
[PKG.inner]
honoured: name on self
dropped GateOne: mode tags -- no
dropped GateTwo: new -- no
`

// Drop removes the fields of gates that the old object has no field of, and Check reports none of them. A subtree that
// is inert loses the fields too.
func TestDrop(t *testing.T) { // F37
	tab := table(t, droppedTable)
	text := "{spec: {name: n, mode: m, new: 1}, list: [{tags: [a]}, {name: o, self: {new: 2}}]}"
	for _, c := range []struct{ name, old, want string }{
		// self is a leaf: the type ends there
		{"a new object", "", "{spec: {name: n}, list: [{}, {name: o, self: {new: 2}}]}"},
		{"an old object without them", "{spec: {name: n}}", "{spec: {name: n}, list: [{}, {name: o, self: {new: 2}}]}"},
		{"an old object with a field of one gate", "{list: [{tags: [z]}]}",
			"{spec: {name: n, mode: m}, list: [{tags: [a]}, {name: o, self: {new: 2}}]}"},
		{"an old object with fields of both gates", "{spec: {new: 3, mode: x}}", text},
	} {
		t.Run(c.name, func(t *testing.T) {
			obj, want := object[outer](t, text), object[outer](t, c.want)
			var old *outer
			if c.old != "" {
				old = object[outer](t, c.old)
			}
			a := tab.AnswersFor(obj)
			if errs, warnings := a.FindIneffective(obj, old); len(errs)+len(warnings) > 0 {
				t.Errorf("Check: %v %q", errs, warnings)
			}
			a.Drop(obj, old)
			if !reflect.DeepEqual(obj, want) {
				t.Errorf("got %+v, want %+v", obj, want)
			}
			doc, wantDoc := document(t, text), document(t, c.want)
			a.DropFrom(doc, old)
			if !reflect.DeepEqual(doc, wantDoc) {
				t.Errorf("document: got %v, want %v", doc, wantDoc)
			}
		})
	}
	if got := leaves(tab.AnswersFor(&outer{})); !slices.Contains(got, "dict[].mode dropped") ||
		!slices.Contains(got, "dict[].name inert") {
		t.Errorf("below an inert field: %q", got)
	}
}

func document(t *testing.T, text string) map[string]any {
	t.Helper()
	out := map[string]any{}
	if err := yaml.Unmarshal([]byte(text), &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// A document loses the fields below members of a map, and null counts as set. Values of other types stay for the decoder to refuse.
func TestDropFromADocument(t *testing.T) {
	tab := table(t, droppedTable)
	doc := document(t, "{dict: {a: {mode: m, name: n}, b: 7}, spec: {new: null}, list: text}")
	tab.AnswersFor(&outer{}).DropFrom(doc, nil)
	if want := document(t, "{dict: {a: {name: n}, b: 7}, spec: {}, list: text}"); !reflect.DeepEqual(doc, want) {
		t.Errorf("got %v, want %v", doc, want)
	}
}

// A dropped field is in the table with its gate and a sentence, and as a whole.
func TestParseDropped(t *testing.T) {
	for _, text := range []string{
		"[x.Y]\ndropped: a -- b", "[x.Y]\ndropped Gate: a", "[x.Y]\ndropped Gate: a=b -- c",
		"[x.Y]\ndropped Gate: a[b] -- c", "[x.Y]\nrefused Gate: a -- b",
	} {
		tab := &Table{types: map[string]map[string][]*Answer{}}
		if err := tab.parseFile("x.txt", text); err == nil || !strings.HasPrefix(err.Error(), "x.txt:") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// A pod's fields are dropped in pods, templates and PodTemplates alike.
func TestDropInPods(t *testing.T) { // F37
	const spec = "{evictionResponders: [{name: a}], volumes: [{name: v, emptyDir: {mode: 511}}], " +
		"initContainers: [{name: i, readinessProbe: {httpGet: {port: 1, protocol: HTTP2}}}], " +
		"containers: [{name: c, volumeMounts: [{name: v, bindMountOptions: [x]}], livenessProbe: {grpc: {port: 1, " +
		"mode: Plaintext}}}]}"
	const left = "{volumes: [{name: v, emptyDir: {}}], initContainers: [{name: i, readinessProbe: " +
		"{httpGet: {port: 1}}}], containers: [{name: c, volumeMounts: [{name: v}], livenessProbe: {grpc: {port: 1}}}]}"
	var want corev1.PodSpec
	if err := yaml.Unmarshal([]byte(left), &want); err != nil {
		t.Fatal(err)
	}
	pod := object[corev1.Pod](t, "{spec: "+spec+"}")
	LoadTable().AnswersFor(pod).Drop(pod, nil)
	deployment := object[appsv1.Deployment](t, "{spec: {template: {spec: "+spec+"}}}")
	LoadTable().AnswersFor(deployment).Drop(deployment, nil)
	template := object[corev1.PodTemplate](t, "{template: {spec: "+spec+"}}")
	LoadTable().AnswersFor(template).Drop(template, nil)
	for name, got := range map[string]corev1.PodSpec{"Pod": pod.Spec, "Deployment": deployment.Spec.Template.Spec,
		"PodTemplate": template.Template.Spec} {
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: got %s, want %s", name, yamlOf(got), yamlOf(want))
		}
	}
}

// Writes pass Drop twice.
func TestDropOfAPlainPodAllocatesLittle(t *testing.T) {
	p := plainPod(t)
	a := LoadTable().AnswersFor(p)
	if n := testing.AllocsPerRun(100, func() { a.Drop(p, nil) }); n > 4 {
		t.Errorf("%v allocations for a pod without anything to drop", n)
	}
}

func BenchmarkDropPod(b *testing.B) {
	p := plainPod(b)
	a := LoadTable().AnswersFor(p)
	for b.Loop() {
		a.Drop(p, nil)
	}
}

func yamlOf(v any) string {
	out, err := yaml.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(out)
}
