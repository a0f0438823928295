package apiserver

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// definedGadget returns a kind like the kinds of CustomResourceDefinitions.
func definedGadget() *api.Kind {
	k := gadgetKind()
	k.Definition = "gadgets.example.com"
	return k
}

// F75: a kind that is exchanged for another of its name while a request is under way, as when its definition changes, is
// nothing that clients see: the request is answered with the kind of now, its body read again.
func TestRequestUnderWayWhileItsKindIsExchanged(t *testing.T) {
	var exchange atomic.Pointer[func()] // what happens once in the midst of the next write
	r := start(t, func(c *Config) {
		c.Mutators = append(c.Mutators, admission.Phase{Name: "exchange", Plugins: []admission.Plugin{{Name: "exchange",
			Admit: func(_ context.Context, a *api.Attempt) error {
				if do := exchange.Load(); do != nil && a.Kind.Resource == "gadgets" && exchange.CompareAndSwap(do, nil) {
					(*do)()
				}
				return nil
			}}}})
	})
	c := r.adminHTTP()
	k := definedGadget()
	if err := r.cfg.Kinds.Register(k); err != nil {
		t.Fatal(err)
	}
	soon := func(to *api.Kind) {
		from := k
		exchange.Store(ptrTo0(func() {
			if err := r.cfg.Kinds.Change([]*api.Kind{from}, []*api.Kind{to}); err != nil {
				t.Error(err)
			}
		}))
		k = to
	}
	const jsonType, merge = "application/json", "application/merge-patch+json"
	version := "" // as it is named by an update
	gadget := func(spec string) string {
		return `{"apiVersion":"example.com/v1","kind":"Gadget","metadata":{"name":"g"` + version + `},"spec":` + spec + `}`
	}
	for _, step := range []struct{ method, path, media, spec, want string }{
		{"POST", gadgetsPath, jsonType, `{"size":1}`, `"size":1`},
		{"PUT", gadgetsPath + "/g", jsonType, `{"size":2}`, `"size":2`},
		{"PATCH", gadgetsPath + "/g", merge, `{"spec":{"size":3}}`, `"size":3`},
		{"PATCH", gadgetsPath + "/g?fieldManager=m&force=true", "application/apply-patch+yaml", `{"size":4}`, `"size":4`},
		{"PATCH", gadgetsPath + "/g/status", merge, `{"status":{"seen":5}}`, `"seen":5`},
		{"DELETE", gadgetsPath + "/g", jsonType, `{"propagationPolicy":"Background"}`, `"Success"`},
	} {
		body := step.spec
		if strings.Contains(body, "size") && step.media != merge {
			body = gadget(body)
		}
		soon(definedGadget())
		a := r.call(c, step.method, step.path, body, "Content-Type", step.media)
		if a.code/100 != 2 || !strings.Contains(a.body, step.want) {
			t.Errorf("%s %s: %d %s", step.method, step.path, a.code, a.body)
		}
		if version = ""; step.method == "POST" {
			_, after, _ := strings.Cut(a.body, `"resourceVersion":"`)
			number, _, _ := strings.Cut(after, `"`)
			version = `,"resourceVersion":"` + number + `"`
		}
		if exchange.Swap(nil) != nil {
			t.Errorf("%s %s: nothing was exchanged", step.method, step.path)
		}
	}
	// A kind that has no such subresource any more answers for itself: who asks again is told that there is none.
	r.ok(r.call(c, "POST", gadgetsPath, gadget(`{}`), "Content-Type", jsonType))
	less := definedGadget()
	less.Subresources = maps.Clone(less.Subresources)
	delete(less.Subresources, "status")
	soon(less)
	r.refused(r.call(c, "PATCH", gadgetsPath+"/g/status", `{"status":{"seen":6}}`, "Content-Type", merge), 503, "ask again")
	r.refused(r.call(c, "PATCH", gadgetsPath+"/g/status", `{"status":{"seen":6}}`, "Content-Type", merge), 404)
}

func ptrTo0(f func()) *func() { return &f }

// The same under readers, watches among them, with the exchanges at any time. F75
func TestReadersWhileTheirKindIsExchanged(t *testing.T) {
	r := start(t, nil)
	k := definedGadget()
	if err := r.cfg.Kinds.Register(k); err != nil {
		t.Fatal(err)
	}
	c := r.adminHTTP()
	r.ok(r.call(c, "POST", gadgetsPath, `{"apiVersion":"example.com/v1","kind":"Gadget","metadata":{"name":"g"}}`, "Content-Type", "application/json"))
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	var asked atomic.Int64
	for i, path := range []string{"/g", "", "?watch=1&timeoutSeconds=1&resourceVersion=0"} {
		running.Go(func() {
			c := r.adminHTTP()
			for ctx.Err() == nil {
				method, target, body := "GET", gadgetsPath+path, ""
				if i == 0 && asked.Load()%2 == 0 {
					method, body = "PATCH", fmt.Sprintf(`{"spec":{"size":%d}}`, asked.Load())
				}
				a := r.call(c, method, target, body, "Content-Type", "application/merge-patch+json")
				if a.code != http.StatusOK {
					t.Errorf("%s %s: %d %s", method, target, a.code, a.body)
					return
				}
				asked.Add(1)
			}
		})
	}
	for n := 0; n < 300 || asked.Load() < 300 && !t.Failed(); n++ {
		next := definedGadget()
		if err := r.cfg.Kinds.Change([]*api.Kind{k}, []*api.Kind{next}); err != nil {
			t.Fatal(err)
		}
		k = next
		a := r.call(c, "GET", gadgetsPath+"/g", "")
		if a.code != http.StatusOK {
			t.Errorf("exchange %d: %d %s", n, a.code, a.body)
			break
		}
	}
	stop()
	running.Wait()
	t.Logf("%d requests", asked.Load())
}
