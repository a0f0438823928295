package crd_test

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
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// definedGadget returns a kind like the kinds of CustomResourceDefinitions.
func definedGadget() *api.Kind {
	k := apiservertest.GadgetKind()
	k.Serving.Definition = "gadgets.example.com"
	return k
}

// F75: the definition of a custom resource may change while a request is in progress. The request
// is then repeated with the current definition, and its body is decoded again.
func TestRequestUnderWayWhileItsKindIsExchanged(t *testing.T) {
	var exchange atomic.Pointer[func()] // what happens once in the midst of the next write
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Admission.Mutators = append(c.Admission.Mutators,
			admission.Phase{Name: "exchange", Plugins: []admission.Plugin{{Name: "exchange",
				Admit: func(_ context.Context, a *api.Attempt) error {
					if do := exchange.Load(); do != nil && a.Kind.Resource == "gadgets" &&
						exchange.CompareAndSwap(do, nil) {
						(*do)()
					}
					return nil
				}}}})
	})
	c := r.AdminHTTP()
	k := definedGadget()
	if err := r.Kinds.Register(k); err != nil {
		t.Fatal(err)
	}
	soon := func(to *api.Kind) {
		from := k
		exchange.Store(ptrTo0(func() {
			if err := r.Kinds.Change([]*api.Kind{from}, []*api.Kind{to}); err != nil {
				t.Error(err)
			}
		}))
		k = to
	}
	const jsonType, merge = "application/json", "application/merge-patch+json"
	version := "" // as it is named by an update
	gadget := func(spec string) string {
		return `{"apiVersion":"example.com/v1","kind":"Gadget","metadata":{"name":"g"` + version +
			`},"spec":` + spec + `}`
	}
	for _, step := range []struct{ method, path, media, spec, want string }{
		{"POST", apiservertest.GadgetsPath, jsonType, `{"size":1}`, `"size":1`},
		{"PUT", apiservertest.GadgetsPath + "/g", jsonType, `{"size":2}`, `"size":2`},
		{"PATCH", apiservertest.GadgetsPath + "/g", merge, `{"spec":{"size":3}}`, `"size":3`},
		{"PATCH", apiservertest.GadgetsPath + "/g?fieldManager=m&force=true", "application/apply-patch+yaml",
			`{"size":4}`, `"size":4`},
		{"PATCH", apiservertest.GadgetsPath + "/g/status", merge, `{"status":{"seen":5}}`, `"seen":5`},
		{"DELETE", apiservertest.GadgetsPath + "/g", jsonType, `{"propagationPolicy":"Background"}`, `"Success"`},
	} {
		body := step.spec
		if strings.Contains(body, "size") && step.media != merge {
			body = gadget(body)
		}
		soon(definedGadget())
		a := r.Call(c, step.method, step.path, body, "Content-Type", step.media)
		if a.Code/100 != 2 || !strings.Contains(a.Body, step.want) {
			t.Errorf("%s %s: %d %s", step.method, step.path, a.Code, a.Body)
		}
		if version = ""; step.method == "POST" {
			_, after, _ := strings.Cut(a.Body, `"resourceVersion":"`)
			number, _, _ := strings.Cut(after, `"`)
			version = `,"resourceVersion":"` + number + `"`
		}
		if exchange.Swap(nil) != nil {
			t.Errorf("%s %s: nothing was exchanged", step.method, step.path)
		}
	}
	// If the new definition lacks the subresource, the request that meets the exchange gets a 503, and
	// the next request a 404.
	r.OK(r.Call(c, "POST", apiservertest.GadgetsPath, gadget(`{}`), "Content-Type", jsonType))
	less := definedGadget()
	less.Subresources = maps.Clone(less.Subresources)
	delete(less.Subresources, "status")
	soon(less)
	r.Refused(r.Call(c, "PATCH", apiservertest.GadgetsPath+"/g/status", `{"status":{"seen":6}}`, "Content-Type", merge),
		503, "try again")
	r.Refused(r.Call(c, "PATCH", apiservertest.GadgetsPath+"/g/status", `{"status":{"seen":6}}`, "Content-Type", merge),
		404)
}

func ptrTo0(f func()) *func() { return &f }

// The same under readers, watches among them, with the exchanges at any time. F75
func TestReadersWhileTheirKindIsExchanged(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	k := definedGadget()
	if err := r.Kinds.Register(k); err != nil {
		t.Fatal(err)
	}
	c := r.AdminHTTP()
	r.OK(r.Call(c, "POST", apiservertest.GadgetsPath,
		`{"apiVersion":"example.com/v1","kind":"Gadget","metadata":{"name":"g"}}`, "Content-Type", "application/json"))
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	var asked atomic.Int64
	for i, path := range []string{"/g", "", "?watch=1&timeoutSeconds=1&resourceVersion=0"} {
		running.Go(func() {
			c := r.AdminHTTP()
			for ctx.Err() == nil {
				method, target, body := "GET", apiservertest.GadgetsPath+path, ""
				if i == 0 && asked.Load()%2 == 0 {
					method, body = "PATCH", fmt.Sprintf(`{"spec":{"size":%d}}`, asked.Load())
				}
				a := r.Call(c, method, target, body, "Content-Type", "application/merge-patch+json")
				if a.Code != http.StatusOK {
					t.Errorf("%s %s: %d %s", method, target, a.Code, a.Body)
					return
				}
				asked.Add(1)
			}
		})
	}
	for n := 0; n < 300 || asked.Load() < 300 && !t.Failed(); n++ {
		next := definedGadget()
		if err := r.Kinds.Change([]*api.Kind{k}, []*api.Kind{next}); err != nil {
			t.Fatal(err)
		}
		k = next
		a := r.Call(c, "GET", apiservertest.GadgetsPath+"/g", "")
		if a.Code != http.StatusOK {
			t.Errorf("exchange %d: %d %s", n, a.Code, a.Body)
			break
		}
	}
	stop()
	running.Wait()
	t.Logf("%d requests", asked.Load())
}
