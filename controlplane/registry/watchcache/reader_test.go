package watchcache

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/raftstore"
)

func names(l *api.ObjectList) string {
	var out []string
	for _, o := range l.Items {
		out = append(out, o.GetNamespace()+"/"+o.GetName())
	}
	return strings.Join(out, " ")
}

func TestListSelectsAndOrders(t *testing.T) {
	e := newEnv(t)
	for _, n := range []string{"b", "a", "c"} {
		cm := configMap("one", n)
		cm.Labels = map[string]string{"n": n}
		e.create(cm)
	}
	e.create(configMap("one-more", "x"))
	e.create(configMap("two", "a"))
	for name, c := range map[string]struct {
		namespace string
		o         metav1.ListOptions
		want      string
	}{
		"a namespace is not a prefix of another": {"one", metav1.ListOptions{}, "one/a one/b one/c"},
		"all namespaces":                         {"", metav1.ListOptions{}, "one-more/x one/a one/b one/c two/a"},
		"labels":                                 {"", metav1.ListOptions{LabelSelector: "n in (a,c)"}, "one/a one/c"},
		"name": {"one", metav1.ListOptions{FieldSelector: "metadata.name=b"},
			"one/b"},
		"name in all namespaces": {"", metav1.ListOptions{FieldSelector: "metadata.name=a"},
			"one/a two/a"},
		"namespace by field": {"", metav1.ListOptions{FieldSelector: "metadata.namespace=two"},
			"two/a"},
		"not this name": {"one", metav1.ListOptions{FieldSelector: "metadata.name!=b"},
			"one/a one/c"},
		"nothing": {"none", metav1.ListOptions{}, ""},
	} {
		l, err := e.list(configMap(c.namespace, ""), c.o)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if got := names(l); got != c.want {
			t.Errorf("%s: listed %q, want %q", name, got, c.want)
		}
		if l.ResourceVersion != storedform.FormatRevision(e.store.Applied()) {
			t.Errorf("%s: the list is at %s, the store at %d", name, l.ResourceVersion, e.store.Applied())
		}
	}
}

func TestTypedListIsKubernetesList(t *testing.T) {
	e := newEnv(t)
	e.create(configMap("default", "a", "k", "v"))
	out, err := e.reader.List(e.ctx, e.request(api.VerbList, configMap("default", "")))
	if err != nil {
		t.Fatal(err)
	}
	l := out.(*corev1.ConfigMapList)
	if l.Kind != "ConfigMapList" || l.APIVersion != "v1" || len(l.Items) != 1 || l.Items[0].Kind != "" ||
		l.Items[0].ResourceVersion == "" {
		t.Fatalf("list %+v", l)
	}
	for _, media := range []string{runtime.ContentTypeJSON, runtime.ContentTypeProtobuf} {
		if _, err := e.reader.Encoded(out, media); err != nil {
			t.Fatal(err)
		}
	}
}

// All pages of a list show one snapshot, whatever is written in between.
func TestPagesAreOneSnapshot(t *testing.T) {
	for _, selective := range []bool{false, true} {
		e := newEnv(t)
		for i := range 25 {
			cm := configMap("default", fmt.Sprintf("c%02d", i))
			// a different number in each page of the store
			cm.Labels = map[string]string{"wanted": fmt.Sprint(i%3 != 0)}
			e.create(cm)
		}
		o := metav1.ListOptions{Limit: 4}
		want := 25
		if selective {
			o.LabelSelector, want = "wanted=true", 16
		}
		var got []string
		var rv string
		for page := 0; ; page++ {
			l, err := e.list(configMap("default", ""), o)
			if err != nil {
				t.Fatal(err)
			}
			for _, it := range l.Items {
				got = append(got, it.GetName())
			}
			if len(l.Items) > int(o.Limit) || len(l.Items) == 0 {
				t.Fatalf("selective %v: page %d has %d objects, the limit is %d", selective, page,
					len(l.Items), o.Limit)
			}
			if rv != "" && l.ResourceVersion != rv {
				t.Fatalf("page %d is at %s, the first at %s", page, l.ResourceVersion, rv)
			}
			rv = l.ResourceVersion
			if left := l.RemainingItemCount; !selective && l.Continue != "" &&
				(left == nil || int(*left) != want-len(got)) {
				t.Fatalf("page %d says %v remain, %d do", page, left, want-len(got))
			}
			if l.Continue == "" {
				break
			}
			o.Continue = l.Continue
			// Deletions before and after the continue position, and a new object.
			e.delete(configMap("default", fmt.Sprintf("c%02d", page)), metav1.DeleteOptions{})
			e.delete(configMap("default", fmt.Sprintf("c%02d", 24-page)), metav1.DeleteOptions{})
			e.create(configMap("default", fmt.Sprintf("c%02d-new", page+10)))
		}
		if len(got) != want {
			t.Fatalf("selective %v: the pages hold %d objects, want %d: %v", selective, len(got), want, got)
		}
	}
}

func TestContinueAfterCompactionExpires(t *testing.T) {
	e := newEnv(t)
	for i := range 6 {
		e.create(configMap("default", fmt.Sprint("c", i)))
	}
	first, err := e.list(configMap("default", ""), metav1.ListOptions{Limit: 2})
	if err != nil {
		t.Fatal(err)
	}
	e.delete(configMap("default", "c0"), metav1.DeleteOptions{})
	if err := e.WaitFor(e.ctx, e.store.Applied()); err != nil {
		t.Fatal(err) // an older cache could still answer
	}
	e.store.Compact(e.store.Applied())
	_, err = e.list(configMap("default", ""), metav1.ListOptions{Limit: 2, Continue: first.Continue})
	s := refused(t, err, 410, metav1.StatusReasonExpired)
	if s.ListMeta.Continue == "" {
		t.Fatal("no token to go on inconsistently")
	}
	rest, err := e.list(configMap("default", ""), metav1.ListOptions{Continue: s.ListMeta.Continue})
	if err != nil || names(rest) != "default/c2 default/c3 default/c4 default/c5" {
		t.Fatalf("the rest is %v, %v", rest, err)
	}
	_, err = e.list(configMap("default", ""),
		metav1.ListOptions{ResourceVersion: first.ResourceVersion,
			ResourceVersionMatch: metav1.ResourceVersionMatchExact})
	refused(t, err, 410, metav1.StatusReasonExpired)
}

func TestResourceVersionMatch(t *testing.T) {
	e := newEnv(t)
	a := e.create(configMap("default", "a"))
	e.create(configMap("default", "b"))
	l, err := e.list(configMap("default", ""),
		metav1.ListOptions{ResourceVersion: a.GetResourceVersion(),
			ResourceVersionMatch: metav1.ResourceVersionMatchExact})
	if err != nil || names(l) != "default/a" || l.ResourceVersion != a.GetResourceVersion() {
		t.Fatalf("exactly at the first: %v, %v", l, err)
	}
	// Later reads may be from any newer state: a consistent list makes the cache show the second
	// object.
	if l, err := e.list(configMap("default", ""), metav1.ListOptions{}); err != nil || len(l.Items) != 2 {
		t.Fatalf("now: %v, %v", l, err)
	}
	for _, o := range []metav1.ListOptions{{ResourceVersion: "0"}, {ResourceVersion: a.GetResourceVersion()},
		{ResourceVersion: a.GetResourceVersion(), ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan}} {
		if l, err := e.list(configMap("default", ""), o); err != nil || len(l.Items) != 2 {
			t.Fatalf("%+v: %v, %v", o, l, err)
		}
	}
	_, err = e.list(configMap("default", ""), metav1.ListOptions{ResourceVersion: "999"})
	if !apierrors.IsTimeout(err) || !apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge) {
		t.Fatalf("a revision from the future gave %v", err)
	}
	for _, o := range []metav1.ListOptions{{ResourceVersionMatch: "Exact"},
		{ResourceVersionMatch: "Exact", ResourceVersion: "0"},
		{ResourceVersionMatch: "Nearly", ResourceVersion: "1"},
		{Continue: "x", ResourceVersionMatch: "Exact", ResourceVersion: "1"}} {
		_, err := e.list(configMap("default", ""), o)
		refused(t, err, 422, metav1.StatusReasonInvalid)
	}
	_, err = e.list(configMap("default", ""), metav1.ListOptions{Continue: "nonsense"})
	refused(t, err, 400, metav1.StatusReasonBadRequest)
}

// F46: reads from the cache never go back in time, and include every write that was acknowledged to
// this caller.
func TestReadsNeverGoBack(t *testing.T) {
	e := newEnv(t)
	e.create(configMap("default", "a", "n", "0"))
	if _, err := e.get(configMap("default", "a")); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range 300 {
			if _, err := e.tryCommit(configMap("default", "a", "n", fmt.Sprint(i+1)), raftstore.Put); err != nil {
				t.Errorf("update: %v", err)
			}
		}
	}()
	last := -1
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
		}
		l, err := e.list(configMap("default", ""), metav1.ListOptions{ResourceVersion: "0"})
		if err != nil {
			t.Fatal(err)
		}
		var n int
		if _, err := fmt.Sscan(l.Items[0].(*corev1.ConfigMap).Data["n"], &n); err != nil || n < last {
			t.Fatalf("the list went from %d to %d (%v)", last, n, err)
		}
		last = n
	}
	got, err := e.get(configMap("default", "a"))
	if err != nil || got.(*corev1.ConfigMap).Data["n"] != "300" {
		t.Fatalf("after the last write: %v, %v", got, err)
	}
}

func FuzzContinueToken(f *testing.F) {
	f.Add(continueToken{Revision: 7, After: "default/a"}.encodeToken(), "default/")
	f.Add(continueToken{Revision: -1, After: "x"}.encodeToken(), "")
	f.Add("e30", "")
	f.Fuzz(func(t *testing.T, s, prefix string) {
		tok, err := parseContinue(s, prefix)
		if err != nil {
			return
		}
		if !strings.HasPrefix(tok.After, prefix) || tok.Revision == 0 {
			t.Fatalf("accepted %+v for prefix %q", tok, prefix)
		}
		again, err := parseContinue(tok.encodeToken(), prefix)
		if err != nil || again != tok {
			t.Fatalf("%+v does not survive encoding: %+v, %v", tok, again, err)
		}
	})
}
