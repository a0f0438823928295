package fields

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"sigs.k8s.io/yaml"
)

// inner and outer are types with a nested type, a recursive type and an embedded type.
type (
	outer struct {
		Inline `json:",inline"`
		Spec   inner             `json:"spec"`
		List   []inner           `json:"list"`
		Dict   map[string]inner  `json:"dict"`
		Labels map[string]string `json:"labels"`
	}
	Inline struct {
		Kind string `json:"kind"`
	}
	inner struct {
		Name string   `json:"name"`
		Mode *string  `json:"mode"`
		On   *bool    `json:"on"`
		Tags []string `json:"tags"`
		Self *inner   `json:"self"`
		New  int      `json:"new"`
	}
)

const pkg = "keelson.dev/keelson/controlplane/api/fields"

func table(t *testing.T, text string) *Table {
	t.Helper()
	tab := &Table{types: map[string]map[string][]*Answer{}, compiled: map[reflect.Type]*Answers{}}
	if err := tab.parseFile("x.txt", strings.ReplaceAll(text, "PKG", pkg)); err != nil {
		t.Fatal(err)
	}
	return tab
}

func leaves(a *Answers) []string {
	var out []string
	for _, l := range a.Leaves() {
		state := "nothing"
		if l.Answer != nil {
			state = string(l.Answer.State)
		}
		out = append(out, l.Path+" "+state)
	}
	return out
}

// Each field is listed once. A recursive type terminates. The outermost answer has precedence.
// Fields without an answer are listed, and answers about no field are stale.
func TestWalk(t *testing.T) {
	tab := table(t, `
[PKG.outer]
honoured: kind spec dict labels
refused: list.name -- no
refused: labels[a/*] -- no
refused: spec.gone -- no
[PKG.inner]
honoured: name tags self
honoured: mode
refused: mode=x|y* -- no
inert: on -- so it is
`)
	want := []string{
		"kind honoured",
		"spec.name honoured", "spec.mode=x|y* refused", "spec.mode honoured", "spec.on inert", "spec.tags honoured",
		"spec.self honoured", "spec.new nothing",
		"list[].name refused", "list[].mode=x|y* refused", "list[].mode honoured", "list[].on inert",
		"list[].tags honoured", "list[].self honoured", "list[].new nothing",
		"dict[].name honoured", "dict[].mode=x|y* refused", "dict[].mode honoured", "dict[].on inert",
		"dict[].tags honoured", "dict[].self honoured", "dict[].new nothing",
		"labels[a/*] refused", "labels honoured",
	}
	if got := leaves(tab.AnswersFor(&outer{})); !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if stale := tab.UnusedAnswers([]any{&outer{}}); len(stale) != 1 || !strings.Contains(stale[0], "spec.gone") {
		t.Errorf("stale: %q", stale)
	}
}

// All of a kind may be stored: what is refused or inert in the types below stays so, what all kinds have is honoured, and
// what the kind itself calls honoured is. A single field may be stored as well.
func TestStored(t *testing.T) {
	tab := table(t, `
[PKG.outer]
stored: . -- nobody looks
honoured: spec.name labels
[PKG.Inline]
honoured: kind
[PKG.inner]
honoured: name tags new
stored: mode -- nobody reads it
inert: on -- so it is
refused: self -- no
`)
	want := []string{
		"kind stored",
		"spec.name honoured", "spec.mode stored", "spec.on inert", "spec.self refused", "spec.tags stored",
		"spec.new stored",
		"list[].name stored", "list[].mode stored", "list[].on inert", "list[].tags stored", "list[].self refused",
		"list[].new stored",
		"dict[].name stored", "dict[].mode stored", "dict[].on inert", "dict[].tags stored", "dict[].self refused",
		"dict[].new stored",
		"labels honoured",
	}
	a := tab.AnswersFor(&outer{})
	got := leaves(a)
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if a.Stored() == nil || a.Stored().Why != "nobody looks" || tab.AnswersFor(&inner{}).Stored() != nil {
		t.Error("a whole kind is stored, and nothing else is")
	}
	if stale := tab.UnusedAnswers([]any{&outer{}}); len(stale) != 0 {
		t.Errorf("stale: %q", stale)
	}
	mode := "m"
	errs, warnings := a.FindIneffective(&outer{Spec: inner{Name: "n", Mode: &mode, Self: &inner{}}}, nil)
	if len(errs) != 1 || errs[0].Field != "spec.self" ||
		!slices.Equal(warnings, []string{"spec.mode: stored; nobody reads it"}) {
		t.Errorf("%v, %q", errs, warnings)
	}
	if _, warnings := a.FindIneffective(&outer{Spec: inner{Mode: &mode}}, &outer{Spec: inner{Mode: &mode}}); warnings !=
		nil {
		t.Errorf("told again: %q", warnings)
	}
}

// A table that cannot be read says where.
func TestParse(t *testing.T) {
	for _, text := range []string{
		"honoured: a", "[x.Y]\nperhaps: a -- b", "[x.Y]\nrefused: a", "[x.Y]\nhonoured: a -- b",
		"[x.Y]\nhonoured: a\ninert: a -- b", "[x.Y]\n[x.Y]", "[x.Y]\nstored: a",
	} {
		tab := &Table{types: map[string]map[string][]*Answer{}}
		if err := tab.parseFile("x.txt", text); err == nil || !strings.HasPrefix(err.Error(), "x.txt:") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func object[T any](t *testing.T, text string) *T {
	t.Helper()
	o := new(T)
	if err := yaml.UnmarshalStrict([]byte(text), o); err != nil {
		t.Fatal(err)
	}
	return o
}

// What is found is named as the user wrote it, and what is stored already excuses as much, no more.
func TestCheck(t *testing.T) {
	const refused = "volumes: [{name: v, rbd: {image: d}}]"
	pod := func(spec string) *corev1.Pod { return object[corev1.Pod](t, "{spec: {"+spec+"}}") }
	// F110
	driver := func(spec string) *storagev1.CSIDriver { return object[storagev1.CSIDriver](t, "{spec: {"+spec+"}}") }
	for _, c := range []struct {
		name     string
		obj, old any
		want     []string // paths
		warned   int
	}{
		{"nothing", pod("containers: [{name: c}]"), nil, nil, 0},
		{"two containers", pod("containers: [{name: a}, {name: b, securityContext: {procMount: Unmasked}}]"), nil,
			[]string{"spec.containers[1].securityContext.procMount"}, 0},
		{"by value", pod("hostUsers: false"), nil, []string{"spec.hostUsers"}, 0},
		{"by another value", pod("hostUsers: true"), nil, nil, 0},
		{"empty but there", pod("volumes: [{name: v, rbd: {}}]"), nil, []string{"spec.volumes[0].rbd"}, 0},
		{"template", object[appsv1.Deployment](t, "{spec: {template: {spec: {"+refused+"}}}}"), nil,
			[]string{"spec.template.spec.volumes[0].rbd"}, 0},
		{"stored", pod(refused), pod(refused), nil, 0},
		{"stored in another place", pod("volumes: [{name: a, emptyDir: {}}, {name: v, rbd: {image: d}}]"),
			pod("volumes: [{name: v, rbd: {image: d}}]"), nil, 0},
		{"stored once", pod("volumes: [{name: a, rbd: {image: d}}, {name: v, rbd: {image: d}}]"),
			pod("volumes: [{name: v, rbd: {image: d}}]"), []string{"spec.volumes[1].rbd"}, 0},
		{"one of a list",
			pod("containers: [{name: a, securityContext: {appArmorProfile: {type: Localhost}}}, {name: b, " +
				"securityContext: {appArmorProfile: {type: RuntimeDefault}}}]"), nil,
			[]string{"spec.containers[1].securityContext.appArmorProfile.type"}, 0},
		{"key", object[corev1.ServiceAccount](t,
			"{metadata: {annotations: {kubernetes.io/enforce-mountable-secrets: 'true'}}}"), nil,
			[]string{"metadata.annotations[kubernetes.io/enforce-mountable-secrets]"}, 0},
		{"key with another value", object[corev1.ServiceAccount](t,
			"{metadata: {annotations: {kubernetes.io/enforce-mountable-secrets: 'false'}}}"), nil, nil, 0},
		{"room that is asked for again", driver("nodeAllocatableUpdatePeriodSeconds: 60"), nil,
			[]string{"spec.nodeAllocatableUpdatePeriodSeconds"}, 0},
		{"pods kept from nodes without the driver", driver("preventPodSchedulingIfMissing: true"), nil,
			[]string{"spec.preventPodSchedulingIfMissing"}, 0},
		{"pods not kept from them", driver("preventPodSchedulingIfMissing: false"), nil, nil, 0},
		{"mounts with labels", driver("seLinuxMount: true"), nil, nil, 0},
		{"all else of a driver",
			driver("attachRequired: false, podInfoOnMount: true, volumeLifecycleModes: [Ephemeral], storageCapacity: " +
				"true, fsGroupPolicy: File, " +
				"requiresRepublish: true, seLinuxMount: false, tokenRequests: [{audience: a}], " +
				"serviceAccountTokenInSecrets: true"), nil, nil, 0},
		{"inert hook", pod("containers: [{name: c, lifecycle: {preStop: {tcpSocket: {port: 80}}}}]"), nil, nil, 0},
		{"warned value", object[corev1.Secret](t, "{type: bootstrap.kubernetes.io/token}"), nil, nil, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			errs, warnings := LoadTable().AnswersFor(c.obj).FindIneffective(c.obj, c.old)
			var got []string
			for _, e := range errs {
				got = append(got, e.Field)
			}
			if !slices.Equal(got, c.want) || len(warnings) != c.warned {
				t.Errorf("errors at %q, want %q; warnings %q, want %d", got, c.want, warnings, c.warned)
			}
		})
	}
}

// Pods pass here at every creation and every report of their status.
func TestCheckOfAPlainPodAllocatesLittle(t *testing.T) {
	p := plainPod(t)
	a := LoadTable().AnswersFor(p)
	if n := testing.AllocsPerRun(100, func() { a.FindIneffective(p, nil) }); n > 4 {
		t.Errorf("%v allocations for a pod without anything to refuse", n)
	}
}

func plainPod(t testing.TB) *corev1.Pod {
	p := &corev1.Pod{}
	err := yaml.UnmarshalStrict([]byte(`{metadata: {name: p, labels: {a: b}, annotations: {x: z}}, spec: {
volumes: [{name: v, projected: {sources: [{serviceAccountToken: {path: t}}, {configMap: {name: c}}, {downwardAPI: {items: [{path: name}]}}]}}],
containers: [{name: c, image: i, env: [{name: A, value: b}, {name: B, value: b}], volumeMounts: [{name: v, mountPath: /v}],
  readinessProbe: {httpGet: {path: /, port: 80}}, resources: {limits: {cpu: 1, memory: 1Gi}}}], securityContext: {}}}`),
		p)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func BenchmarkCheckPod(b *testing.B) {
	p := plainPod(b)
	a := LoadTable().AnswersFor(p)
	for b.Loop() {
		a.FindIneffective(p, nil)
	}
}
