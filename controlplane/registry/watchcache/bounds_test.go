package watchcache

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// A list of a past state is decoded for a single client. Before it decodes each part, it waits for
// its memory budget, also without a limit from the client, and fails if there is none. The result
// is complete.
func TestListsOfThePastWaitForRoom(t *testing.T) {
	const objects = 2*pageChunk + 10
	e := newEnv(t, withHistory(4*objects, 64<<20))
	for i := range objects {
		e.create(configMap("default", fmt.Sprintf("c%04d", i), "k", strings.Repeat("x", 100)))
	}
	first, err := e.list(configMap("default", ""), metav1.ListOptions{Limit: 1})
	if err != nil {
		t.Fatal(err)
	}
	e.update(configMap("default", "c0003", "k", "new"), "")
	if _, err := e.get(configMap("default", "c0003")); err != nil { // waits until the cache has it
		t.Fatal(err)
	}
	req := e.request(api.VerbList, configMap("default", ""))
	req.Internal.Pointers, req.List.Continue = true, first.Continue
	full := errors.New("full")
	var asked []int64
	room := 2
	req.Internal.Expect = func(_ context.Context, bytes int64) error {
		if asked = append(asked, bytes); len(asked) > room {
			return full
		}
		return nil
	}
	if _, err := e.reader.List(e.ctx, req); err == nil || len(asked) != 3 {
		t.Errorf("without room: %v after %d parts", err, len(asked))
	}
	for _, bytes := range asked {
		if bytes > pageChunk*(decodedSizeFactor*400+decodedOverhead) || bytes == 0 {
			t.Errorf("a part of %d bytes", bytes)
		}
	}
	room, asked = 100, nil
	out, err := e.reader.List(e.ctx, req)
	if err != nil {
		t.Fatal(err)
	}
	rest := out.(*api.ObjectList)
	if len(rest.Items) != objects-1 || rest.Continue != "" || rest.ResourceVersion != first.ResourceVersion {
		t.Errorf("%d items at %s, continue %q", len(rest.Items), rest.ResourceVersion, rest.Continue)
	}
}

// Selectors are bounded in length, because every change is compared with the selectors of all
// watches of its kind under one lock.
func TestSelectorsAreBounded(t *testing.T) {
	e := newEnv(t)
	terms := func(n int, term string) string { return strings.TrimSuffix(strings.Repeat(term+",", n), ",") }
	for _, verb := range []api.Verb{api.VerbList, api.VerbWatch} {
		for name, o := range map[string]metav1.ListOptions{
			"labels": {LabelSelector: terms(10000, "!a")},
			"fields": {FieldSelector: terms(10000, "metadata.name!=a")},
		} {
			req := e.request(verb, configMap("default", ""))
			req.List = o
			var err error
			if verb == api.VerbList {
				_, err = e.reader.List(e.ctx, req)
			} else {
				_, err = e.reader.Watch(e.ctx, req)
			}
			refused(t, err, http.StatusBadRequest, metav1.StatusReasonBadRequest)
			if err == nil {
				t.Errorf("%s %s of 10,000 terms", verb, name)
			}
		}
	}
	var set []string
	for i := range 5000 {
		set = append(set, fmt.Sprint("v", i))
	}
	if _, err := e.list(configMap("default", ""),
		metav1.ListOptions{LabelSelector: "a in (" + strings.Join(set, ",") + ")"}); err != nil {
		t.Errorf("one term with many values: %v", err)
	}
}
