package watchcache

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storedform"
)

// selection is the selector of a list or watch, with an independent predicate for the same objects.
type selection struct {
	namespace string
	o         metav1.ListOptions
}

func (s selection) String() string {
	return fmt.Sprintf("%q, fields %q, labels %q", s.namespace, s.o.FieldSelector, s.o.LabelSelector)
}

func (s selection) wants(p *corev1.Pod) bool {
	f, err := fields.ParseSelector(s.o.FieldSelector)
	if err != nil {
		panic(err)
	}
	l, err := labels.Parse(s.o.LabelSelector)
	if err != nil {
		panic(err)
	}
	return (s.namespace == "" || s.namespace == p.Namespace) && l.Matches(labels.Set(p.Labels)) &&
		f.Matches(fields.Set{"metadata.name": p.Name, "metadata.namespace": p.Namespace,
			"spec.nodeName": p.Spec.NodeName})
}

// selections returns selections by every index, and some without an index.
func selections() (all []selection) {
	for _, namespace := range []string{"", "a", "b"} {
		for _, f := range []string{"", "spec.nodeName=n1", "spec.nodeName=", "spec.nodeName=absent",
			"spec.nodeName!=n1", "metadata.name=p3",
			"metadata.name=p3,spec.nodeName=n2", "metadata.namespace=a,spec.nodeName=n1"} {
			for _, l := range []string{"", "odd=true"} {
				all = append(all, selection{namespace, metav1.ListOptions{FieldSelector: f, LabelSelector: l}})
			}
		}
	}
	return all
}

// Lists and watches by index give the same results as full scans, for any sequence of changes.
func TestIndexIsThatOfAllObjects(t *testing.T) {
	e := newEnv(t)
	random := rand.New(rand.NewPCG(1, 2))
	all := selections()
	begun := storedform.FormatRevision(e.store.Applied())
	watchers := make([]*Watcher, len(all))
	shown := make([]map[string]string, len(all)) // resource version by key
	for i, s := range all {
		s.o.ResourceVersion = begun
		watchers[i], shown[i] = e.watch(pod(s.namespace, ""), s.o), map[string]string{}
		watchers[i].readHistory(e.ctx) // until it waits
	}
	have := map[string]*corev1.Pod{}
	for step := range 300 {
		key, before := changeSomePod(e, random, have, step)
		for i, s := range all {
			was, is := before != nil && s.wants(before), have[key] != nil && s.wants(have[key])
			if was || is {
				follow(t, e, watchers[i], s, shown[i])
			}
			if watchers[i].readHistory(e.ctx) { // until it waits
				t.Fatalf("%s: one change is more than one event", s)
			}
			compare(t, e, s, have, shown[i])
		}
	}
}

// changeSomePod creates, changes, binds or deletes one of twelve pods; have holds the existing
// ones.
func changeSomePod(e *env, random *rand.Rand, have map[string]*corev1.Pod, step int) (key string, before *corev1.Pod) {
	namespace, name := []string{"a", "b"}[random.IntN(2)], fmt.Sprintf("p%d", random.IntN(6))
	key = namespace + "/" + name
	p := have[key]
	before = p
	switch {
	case p == nil:
		p = pod(namespace, name)
		p.Labels = map[string]string{"odd": fmt.Sprint(step%2 == 1)}
		p.Spec.NodeName = []string{"", "n1", "n2"}[random.IntN(3)]
		have[key] = e.create(p).(*corev1.Pod)
	case random.IntN(4) == 0:
		e.delete(p, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
		delete(have, key)
	default:
		p = p.DeepCopy()
		p.Labels["odd"] = fmt.Sprint(random.IntN(2) == 1)
		p.Annotations = map[string]string{"step": fmt.Sprint(step)}
		if p.Spec.NodeName == "" {
			p.Spec.NodeName = []string{"", "n1", "n2"}[random.IntN(3)]
		}
		have[key] = e.update(p, "").(*corev1.Pod)
	}
	return key, before
}

// follow reads the single event that a change must cause.
func follow(t *testing.T, e *env, w *Watcher, s selection, shown map[string]string) {
	t.Helper()
	ev := e.next(w)
	o, ok := ev.Object.(*corev1.Pod)
	if !ok {
		t.Fatalf("%s: %v", s, ev)
	}
	key := o.Namespace + "/" + o.Name
	if _, known := shown[key]; known != (ev.Type != watch.Added) {
		t.Fatalf("%s: %s of %s, which was shown before: %v", s, ev.Type, key, known)
	}
	if shown[key] = o.ResourceVersion; ev.Type == watch.Deleted {
		delete(shown, key)
	}
}

// compare checks full and paged lists of a selection against the existing and the watched objects.
func compare(t *testing.T, e *env, s selection, have map[string]*corev1.Pod, watched map[string]string) {
	t.Helper()
	want := []string{}
	for key, p := range have {
		if s.wants(p) {
			want = append(want, key+"@"+p.ResourceVersion)
		}
	}
	slices.Sort(want)
	seen := []string{}
	for key, version := range watched {
		seen = append(seen, key+"@"+version)
	}
	if slices.Sort(seen); !slices.Equal(seen, want) {
		t.Fatalf("%s: watched\n%s\nthere is\n%s", s, strings.Join(seen, "\n"), strings.Join(want, "\n"))
	}
	for _, limit := range []int64{0, 2} {
		got, o := []string{}, s.o
		o.Limit = limit
		for {
			list, err := e.list(pod(s.namespace, ""), o)
			if err != nil {
				t.Fatalf("%s: %v", s, err)
			}
			for _, o := range list.Items {
				got = append(got, o.GetNamespace()+"/"+o.GetName()+"@"+o.GetResourceVersion())
			}
			if o.Continue = list.Continue; o.Continue == "" {
				break
			}
		}
		if !slices.Equal(got, want) {
			t.Fatalf("%s: %d at once\n%s\nthere is\n%s", s, limit, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	}
}

// BenchmarkWatchersOfNodes measures a change of a pod on one of 5,000 nodes with a watch each for
// its own pods.
func BenchmarkWatchersOfNodes(b *testing.B) {
	e := newEnv(b)
	const nodes = 5000
	watchers := make([]*Watcher, nodes)
	for i := range nodes {
		watchers[i] = e.watch(pod("", ""), metav1.ListOptions{FieldSelector: fmt.Sprintf("spec.nodeName=n%d", i),
			ResourceVersion: storedform.FormatRevision(e.store.Applied())})
	}
	for _, w := range watchers {
		w.readHistory(e.ctx) // until it waits
	}
	p := pod("default", "p")
	p.Spec.NodeName = "n7"
	e.create(p)
	e.next(watchers[7])
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		e.modify(p, func(obj api.Object) { obj.SetAnnotations(map[string]string{"n": fmt.Sprint(i)}) })
		e.next(watchers[7])
	}
}

// BenchmarkListOfNode measures LIST of the 10 pods of one node among 10,000.
func BenchmarkListOfNode(b *testing.B) {
	e := newEnv(b)
	for i := range 10000 {
		p := pod("default", fmt.Sprintf("p%d", i))
		p.Spec.NodeName = fmt.Sprintf("n%d", i%1000)
		e.create(p)
	}
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		list, err := e.list(pod("", ""), metav1.ListOptions{FieldSelector: "spec.nodeName=n7"})
		if err != nil || len(list.Items) != 10 {
			b.Fatal(err, len(list.Items))
		}
	}
}
