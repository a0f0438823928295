package garbagecollector_test

import (
	"context"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/garbagecollector"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// pager answers every list with the page that it returns for the number of the call.
type pager struct {
	calls int
	page  func(call int) string
}

func (p *pager) Discover(context.Context) ([]engine.AggregatedResource, map[schema.GroupVersion]error) {
	return nil, nil
}

func (p *pager) Call(context.Context, string, string, url.Values, []byte) ([]byte, error) {
	p.calls++
	return []byte(p.page(p.calls)), nil
}

// P28: the list of a hostile server is bounded, and only the metadata that matters for deletion is
// kept.
func TestListsOfAggregatedAPIsAreBounded(t *testing.T) {
	const limit = 1 << 20
	object := func(n int, more string) string {
		return fmt.Sprintf(`{"metadata":{"name":"a%d","uid":"u%d"%s},"spec":{"text":"x"}}`, n, n, more)
	}
	large := strings.Repeat("x", 256<<10)
	for name, c := range map[string]struct {
		page  func(call int) string
		err   string
		calls int
		want  int
	}{
		"three pages": {func(n int) string {
			next := ""
			if n < 3 {
				next = "next"
			}
			return fmt.Sprintf(`{"kind":"List","items":[%s,%s],"metadata":{"continue":%q},"other":[1]}`,
				object(2*n, ""), object(2*n+1, ""), next)
		}, "", 3, 6},
		"no items": {func(int) string { return `{"metadata":{},"items":null}` }, "", 1, 0},
		"endless pages": {func(n int) string {
			return `{"metadata":{"continue":"c"},"items":[` + object(n, "") + `]}`
		}, "more than 1000 pages", 1000, 0},
		"endless empty pages": {func(int) string {
			return `{"metadata":{"continue":"c"},"items":[]}`
		}, "a page without objects", 1, 0},
		"very many objects": {func(int) string {
			return `{"items":[{}` + strings.Repeat(",{}", 1<<20) + `]}`
		}, "more than", 1, 0},
		"large finalizers": {func(n int) string {
			return `{"metadata":{"continue":"c"},"items":[` + object(n, `,"finalizers":["`+large+`"]`) + `]}`
		}, "1048576 bytes", 4, 0},
		"large other metadata": {func(int) string {
			return `{"items":[` + strings.Repeat(object(1, `,"annotations":{"a":"`+large+`"}`)+",", 8) +
				object(2, "") + `]}`
		}, "", 1, 9},
		"no list":        {func(int) string { return `[]` }, "instead of {", 1, 0},
		"half of a list": {func(int) string { return `{"items":[{}` }, "EOF", 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			p := &pager{page: c.page}
			objs, bytes, err := engine.ListAggregated(t.Context(), p, engine.AggregatedResource{}, "", limit)
			if len(objs) != c.want || p.calls != c.calls || bytes > limit {
				t.Errorf("got %d objects of %d bytes with %d calls, want %d with %d", len(objs), bytes, p.calls,
					c.want, c.calls)
			}
			if c.err == "" && err != nil || c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
				t.Errorf("the error is %v, want %q", err, c.err)
			}
		})
	}
}

// hangingToo is a shelf beside a server whose discovery responds and whose lists of many resources
// never do.
type hangingToo struct{ *shelf }

func (h hangingToo) Discover(ctx context.Context) ([]engine.AggregatedResource, map[schema.GroupVersion]error) {
	all, unknown := h.shelf.Discover(ctx)
	for i := range 100 {
		name := fmt.Sprintf("things%d", i)
		all = append(all, engine.AggregatedResource{
			GroupVersionResource: schema.GroupVersionResource{Group: "hanging.example.com", Version: "v1",
				Resource: name},
			APIResource: metav1.APIResource{Name: name, Kind: "Thing",
				Verbs: []string{"get", "list", "delete", "patch"}}})
	}
	return all, unknown
}

func (h hangingToo) Call(ctx context.Context, method, path string, query url.Values, body []byte) ([]byte, error) {
	if !strings.Contains(path, "hanging.example.com") {
		return h.shelf.Call(ctx, method, path, query, body)
	}
	select { // as the API server does, which waits 10 seconds for an answer
	case <-ctx.Done():
	case <-time.After(10 * time.Second):
	}
	return nil, context.DeadlineExceeded
}

// P28: an aggregated server that does not answer lists delays the deletion of others' objects by its bound, however many
// resources it has.
func TestHangingAggregatedServersDelayNobodyLong(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		s := &shelf{objects: map[string]*metav1.PartialObjectMetadata{}}
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true, Aggregated: hangingToo{s},
			Controllers: func(d engine.Deps) []*engine.Descriptor {
				return []*engine.Descriptor{garbagecollector.New(d)}
			}})
		w.Lead(engine.Options{})
		ref := ofConfigMap(configMap(w, "owner", nil))
		block := true
		ref.BlockOwnerDeletion = &block
		s.put("dependent", nil, *ref)
		time.Sleep(time.Minute) // virtual
		deleteConfigMap(w, "owner", metav1.DeletePropagationForeground)
		time.Sleep(3 * time.Minute) // virtual
		if s.get("dependent") != nil || hasConfigMap(w, "owner") {
			t.Errorf("3 minutes later the dependent is %v, and the owner is there: %v", s.get("dependent"),
				hasConfigMap(w, "owner"))
		}
	})
}
