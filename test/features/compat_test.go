package features

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/fields"
	"keelson.dev/keelson/controlplane/api/kinds"
)

const compatibility = root + "/docs/reference/compatibility.md"

// line is an answer with the paths of the fields of one kind that it applies to.
type line struct {
	answer *fields.Answer
	kind   string
	paths  []string
}

// answerLines returns each answer of a state once, at its shortest path in the first kind with the
// answer, because the fields of a pod occur in every template. Answers of a kind with the same text
// are merged into one line.
func answerLines(state fields.State) []*line {
	path, kind := map[*fields.Answer]string{}, map[*fields.Answer]string{}
	var order []*fields.Answer
	add := func(name string, a *fields.Answers) {
		for _, l := range a.Leaves() {
			if l.Answer == nil || l.Answer.State != state {
				continue
			}
			at := strings.ReplaceAll(l.At, "|", " or ")
			switch was, known := path[l.Answer]; {
			case !known:
				path[l.Answer], kind[l.Answer] = at, name
				order = append(order, l.Answer)
			case kind[l.Answer] == name && len(at) < len(was):
				path[l.Answer] = at
			}
		}
	}
	for _, k := range kinds.All().All() {
		add(k.GVK.Kind, k.Schema.Answers)
	}
	for _, k := range kinds.All().All() {
		for _, name := range subresourceNames(k) {
			if s := k.Subresources[name]; s.New != nil {
				add(k.Resource+"/"+name, s.Answers)
			}
		}
	}
	for _, o := range fields.OptionTypes() {
		add(reflect.TypeOf(o).Elem().Name(), fields.LoadTable().AnswersFor(o))
	}
	var out []*line
	for _, a := range order {
		same := slices.IndexFunc(out, func(l *line) bool {
			return l.kind == kind[a] && l.answer.Why == a.Why && l.answer.Gate == a.Gate
		})
		if same < 0 {
			same = len(out)
			out = append(out, &line{answer: a, kind: kind[a]})
		}
		out[same].paths = append(out[same].paths, "`"+path[a]+"`")
	}
	return out
}

func subresourceNames(k *api.Kind) []string {
	var out []string
	for name := range k.Subresources {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}

// stableVersion matches the names of API versions that are generally available.
var stableVersion = regexp.MustCompile(`^v[0-9]+$`)

// absentKinds returns the stored kinds of Kubernetes' stable versions that are not served, by
// group.
func absentKinds() map[string][]string {
	here := map[string]bool{}
	for _, k := range kinds.All().All() {
		here[k.GVK.GroupKind().String()] = true
		for _, s := range k.Subresources {
			here[s.GVK.GroupKind().String()] = true
		}
	}
	out := map[string][]string{}
	for gvk, t := range scheme.Scheme.AllKnownTypes() {
		_, named := t.FieldByName("ObjectMeta")
		if !named || !stableVersion.MatchString(gvk.Version) || here[gvk.GroupKind().String()] ||
			slices.Contains(out[gvk.Group], gvk.Kind) {
			continue
		}
		if !scheme.Scheme.Recognizes(gvk.GroupVersion().WithKind(gvk.Kind + "List")) {
			continue // not a stored kind
		}
		out[gvk.Group] = append(out[gvk.Group], gvk.Kind)
	}
	return out
}

func compatibilityText(t *testing.T) []byte {
	var b bytes.Buffer
	b.WriteString(`# Compatibility with Kubernetes

A field that is accepted has its documented effect. A field that is not implemented is refused with 422 and a message that says what to do. If Kubernetes
itself gives a field no effect, this page lists it, and the response has a warning where users may expect an effect. Fields that Kubernetes removes by default
are removed.

- [Defaults that differ from Kubernetes](#defaults-that-differ-from-kubernetes)
- [Kinds that are served](#kinds-that-are-served)
- [Fields that are refused](#fields-that-are-refused)
- [Fields that are dropped, as in Kubernetes](#fields-that-are-dropped-as-in-kubernetes)
- [Fields that have no effect in Kubernetes either](#fields-that-have-no-effect-in-kubernetes-either)
- [Absent kinds and features](#absent-kinds-and-features)

Every other field of the served kinds has its documented effect. Service rules exist in the modes nftables, iptables and IPVS
([Services](services.md#modes-nftables-iptables-ipvs)).

` + "`go test ./test/features -rewrite`" + ` generates this page from the kinds (` + "`controlplane/api/kinds`" +
		`) and the answers for their fields
(` + "`controlplane/api/fields/answers`" + `).
`)
	writeDifferences(&b)
	b.WriteString(`
## Kinds that are served

| kind | group and version | verbs | subresources |
|---|---|---|---|
`)
	for _, k := range kinds.All().All() {
		verbs := "all"
		if k.Serving.Verbs != nil {
			verbs = strings.Join(k.Serving.Verbs, ", ")
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", k.GVK.Kind, k.GVK.GroupVersion(), verbs,
			strings.Join(subresourceNames(k), ", "))
	}
	b.WriteString(`
*all*: get, list, watch, create, update, patch (JSON, merge, strategic merge, server-side apply), delete, deletecollection.

## Fields that are refused

Fields of a pod are also refused in the templates of workloads, below ` + "`spec.template`" +
		`. If the field was accepted earlier, an object may be
stored with it. Other fields of such an object can still be changed. No pods are created from it until the field is removed. Kinds whose names end in Options are query parameters of
requests.

| kind | field | reason and alternative |
|---|---|---|
`)
	for _, e := range answerLines(fields.Refused) {
		fmt.Fprintf(&b, "| %s | %s | %s |\n", e.kind, strings.Join(e.paths, ", "), e.answer.Why)
	}
	writeDropped(&b)
	b.WriteString(`
## Fields that have no effect in Kubernetes either

| kind | field | reason | warning |
|---|---|---|---|
`)
	for _, e := range answerLines(fields.Inert) {
		warned := ""
		if e.answer.Warn {
			warned = "yes"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", e.kind, strings.Join(e.paths, ", "), e.answer.Why, warned)
	}
	b.WriteString("\n## Absent kinds and features\n\n| group | kinds that are not served |\n|---|---|\n")
	absent := absentKinds()
	for _, group := range sortedKeys(absent) {
		slices.Sort(absent[group])
		fmt.Fprintf(&b, "| %s | %s |\n", cmp.Or(group, "core"), strings.Join(absent[group], ", "))
	}
	b.WriteString("\n")
	data, err := os.ReadFile("absent.txt")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if !strings.HasPrefix(line, "#") {
			b.WriteString("- " + line)
		}
	}
	return b.Bytes()
}

// writeDropped writes the table of fields that Kubernetes removes from requests by default.
func writeDropped(b *bytes.Buffer) {
	b.WriteString(`
## Fields that are dropped, as in Kubernetes

These fields are behind a feature gate of Kubernetes 1.37 that is off by default. As in Kubernetes, requests with such a field are accepted. The field is
removed before the object is validated and stored, without a warning. This holds for pods and for the templates of all kinds. An object that is stored with a
field of the gate keeps the fields of that gate. Unlike in Kubernetes, no manager in ` + "`metadata.managedFields`" +
		` owns a removed field.

| kind | field | feature gate | instead |
|---|---|---|---|
`)
	for _, e := range answerLines(fields.Dropped) {
		fmt.Fprintf(b, "| %s | %s | %s | %s |\n", e.kind, strings.Join(e.paths, ", "), e.answer.Gate, e.answer.Why)
	}
	b.WriteString("| PersistentVolumeClaim | `spec.dataSourceRef` that sets `namespace` | " +
		"CrossNamespaceVolumeDataSource | " +
		"a volume is filled from an object of the claim's namespace; import the snapshot there as a " +
		"VolumeSnapshotContent. |\n")
}

func sortedKeys[V any](m map[string]V) []string {
	var out []string
	for k := range m {
		out = append(out, k)
	}
	slices.Sort(out)
	return out
}

// docs/reference/compatibility.md agrees with the kinds and the answers for their fields.
func TestCompatibilityIsWhatTheKindsSay(t *testing.T) {
	want := compatibilityText(t)
	if *rewrite {
		if err := os.WriteFile(compatibility, want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	got, err := os.ReadFile(compatibility)
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("docs/reference/compatibility.md differs from the kinds (%v): run go test ./test/features -rewrite",
			err)
	}
}

// A kind without answers, or with a field without an answer, fails the test.
func TestAKindWithoutAnswersIsSeen(t *testing.T) {
	obj, err := scheme.Scheme.New(scheme.Scheme.PrioritizedVersionsForGroup("internal.apiserver.k8s.io")[0].WithKind(
		"StorageVersion"))
	if err != nil {
		t.Fatal(err)
	}
	unanswered := func(o runtime.Object) (n int) {
		for _, l := range fields.LoadTable().AnswersFor(o).Leaves() {
			if l.Answer == nil {
				n++
			}
		}
		return n
	}
	if unanswered(obj) == 0 {
		t.Error("every field of a StorageVersion, which is not served, has an answer")
	}
	for _, k := range kinds.All().All() {
		if n := unanswered(k.Type.New()); k.Schema.Answers == nil || n > 0 {
			t.Errorf("%s has %d fields without an answer", k.GVK.Kind, n)
		}
	}
}
