package apiserver

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
)

const gizmosV1 = "/apis/example.com/v1/namespaces/default/gizmos"
const gizmosV2 = "/apis/example.com/v2/namespaces/default/gizmos"

// gizmos returns a definition with two versions: v1 has spec.size, and v2, which is stored, has
// spec.width.
func gizmos(conversion string) string {
	return `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: gizmos.example.com}
spec:
  group: example.com
  scope: Namespaced
  names: {plural: gizmos, kind: Gizmo}
  conversion: ` + conversion + `
  versions:
  - name: v1
    served: true
    storage: false
    deprecated: true
    schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, properties: {size: {type: integer}, both: {type: string}}}}}}
  - name: v2
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, properties: {spec: {type: object, properties: {width: {type: integer}, both: {type: string, default: x}}}}}}
`
}

// converting is a conversion webhook of the test that can return wrong responses.
type converting struct {
	*httptest.Server
	spoil atomic.Pointer[func(w http.ResponseWriter, answer map[string]any) bool]
	asked atomic.Int64 // objects
	calls atomic.Int64
}

func newConverting(t *testing.T) *converting {
	c := &converting{}
	c.Server = httptest.NewTLSServer(http.HandlerFunc(c.serve))
	t.Cleanup(c.Close)
	return c
}

// conversion returns the webhook's configuration in a definition.
func (c *converting) conversion() string {
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Certificate().Raw})
	bundle, _ := json.Marshal(ca)
	return fmt.Sprintf(`{strategy: Webhook, webhook: {conversionReviewVersions: [v1], clientConfig: {url: %q, caBundle: %s}}}`, c.URL+"/convert", bundle)
}

func (c *converting) serve(w http.ResponseWriter, r *http.Request) {
	var review map[string]any
	data, _ := io.ReadAll(r.Body)
	if err := json.Unmarshal(data, &review); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	c.calls.Add(1)
	request := review["request"].(map[string]any)
	var out []any
	for _, o := range request["objects"].([]any) {
		c.asked.Add(1)
		obj := o.(map[string]any)
		spec, _ := obj["spec"].(map[string]any)
		for from, to := range map[string]string{"size": "width", "width": "size"} {
			if v, ok := spec[from]; ok && obj["apiVersion"] != request["desiredAPIVersion"] {
				spec[to] = v
				delete(spec, from)
				break
			}
		}
		obj["apiVersion"] = request["desiredAPIVersion"]
		out = append(out, obj)
	}
	answer := map[string]any{"apiVersion": review["apiVersion"], "kind": "ConversionReview", "response": map[string]any{
		"uid": request["uid"], "result": map[string]any{"status": "Success"}, "convertedObjects": out,
	}}
	if spoil := c.spoil.Load(); spoil != nil && (*spoil)(w, answer) {
		return
	}
	_ = json.NewEncoder(w).Encode(answer)
}

func gizmo(version, name, spec string) string {
	return `{"apiVersion":"example.com/` + version + `","kind":"Gizmo","metadata":{"name":"` + name + `"},"spec":` + spec + `}`
}

// F15: the versions of a definition are views of one object; a webhook turns one into the other, or the definition says
// that nothing is to be turned.
func TestVersionsOfCustomResources(t *testing.T) {
	r := withDefinitions(t)
	c := r.adminHTTP()
	body := []string{"Content-Type", "application/json"}
	t.Run("None", func(t *testing.T) {
		r.establish(c, gizmos("{strategy: None}"))
		a := r.ok(r.call(c, "POST", gizmosV1, gizmo("v1", "a", `{"both":"b","size":1}`), body...), `"apiVersion":"example.com/v1"`)
		if w := a.header.Get("Warning"); !strings.Contains(w, "example.com/v1 Gizmo is deprecated; use example.com/v2 Gizmo") {
			t.Errorf("the warning is %q", w)
		}
		if got := r.ok(r.call(c, "GET", gizmosV2+"/a", ""), `"apiVersion":"example.com/v2"`, `"both":"b"`).body; strings.Contains(got, `"size":`) {
			t.Errorf("v2 does not know size: %s", got)
		}
		r.drop(c, "gizmos.example.com")
	})
	t.Run("Webhook", func(t *testing.T) {
		hook := newConverting(t)
		r.establish(c, gizmos(hook.conversion()))
		r.ok(r.call(c, "POST", gizmosV1, gizmo("v1", "a", `{"size":3}`), body...), `"size":3`)
		r.ok(r.call(c, "GET", gizmosV2+"/a", ""), `"width":3`, `"both":"x"`)
		r.ok(r.call(c, "PATCH", gizmosV2+"/a", `{"spec":{"width":4}}`, "Content-Type", "application/merge-patch+json"), `"width":4`)
		r.ok(r.call(c, "GET", gizmosV1+"/a", ""), `"size":4`, `"generation":2`)
		for i := range 20 {
			r.ok(r.call(c, "POST", gizmosV2, gizmo("v2", fmt.Sprint("n", i), `{"width":1}`), body...))
		}
		calls := hook.calls.Load()
		r.ok(r.call(c, "GET", gizmosV1, ""), `"size":1`)
		if n := hook.calls.Load() - calls; n != 1 {
			t.Errorf("a list of 20 objects asked the webhook %d times", n)
		}
		r.spoiled(c, hook)
		r.drop(c, "gizmos.example.com")
	})
	t.Run("Service that is missing", func(t *testing.T) {
		r.establish(c, gizmos(`{strategy: Webhook, webhook: {conversionReviewVersions: [v1], clientConfig: {service: {name: conv, namespace: default}}}}`))
		r.ok(r.call(c, "POST", gizmosV2, gizmo("v2", "a", `{"width":3}`), body...))
		for _, a := range []answer{r.call(c, "GET", gizmosV1+"/a", ""), r.call(c, "POST", gizmosV1, gizmo("v1", "b", `{"size":3}`), body...)} {
			r.refused(a, 500, "conversion webhook for example.com/v", `, Kind=Gizmo failed: `, `service "conv" not found`)
		}
		r.drop(c, "gizmos.example.com")
	})
}

// spoiled makes the webhook return wrong responses. Clients must receive an error and nothing must
// be stored.
func (r *replica) spoiled(c *http.Client, hook *converting) {
	response := func(a map[string]any) map[string]any { return a["response"].(map[string]any) }
	first := func(a map[string]any) map[string]any {
		return response(a)["convertedObjects"].([]any)[0].(map[string]any)
	}
	meta := func(a map[string]any) map[string]any { return first(a)["metadata"].(map[string]any) }
	for want, spoil := range map[string]func(http.ResponseWriter, map[string]any) bool{
		`expected response.uid=`: func(_ http.ResponseWriter, a map[string]any) bool { response(a)["uid"] = "x"; return false },
		`not today`: func(_ http.ResponseWriter, a map[string]any) bool {
			response(a)["result"] = map[string]any{"status": "Failure", "message": "not today"}
			return false
		},
		`response.result.status was`: func(_ http.ResponseWriter, a map[string]any) bool {
			response(a)["result"] = map[string]any{}
			return false
		},
		`returned 0 objects, expected 1`: func(_ http.ResponseWriter, a map[string]any) bool {
			response(a)["convertedObjects"] = []any{}
			return false
		},
		`no response provided`:         func(_ http.ResponseWriter, a map[string]any) bool { delete(a, "response"); return false },
		`expected webhook response of`: func(_ http.ResponseWriter, a map[string]any) bool { a["apiVersion"] = "v1"; return false },
		`invalid groupVersion`: func(_ http.ResponseWriter, a map[string]any) bool {
			first(a)["apiVersion"] = "example.com/v9"
			return false
		},
		`must have the same kind`: func(_ http.ResponseWriter, a map[string]any) bool { first(a)["kind"] = "Other"; return false },
		`must have the same name`: func(_ http.ResponseWriter, a map[string]any) bool { meta(a)["name"] = "other"; return false },
		`must have the same UID`:  func(_ http.ResponseWriter, a map[string]any) bool { meta(a)["uid"] = "other"; return false },
		`metadata.labels`: func(_ http.ResponseWriter, a map[string]any) bool {
			meta(a)["labels"] = map[string]any{"a b": "c"}
			return false
		},
		`the server responded with the status code 500`: func(w http.ResponseWriter, _ map[string]any) bool { http.Error(w, "no", 500); return true },
		`the answer is no Conversion`:                   func(w http.ResponseWriter, _ map[string]any) bool { fmt.Fprint(w, "{"); return true },
		`the response is larger than`:                   func(w http.ResponseWriter, _ map[string]any) bool { flood(w); return true },
	} {
		hook.spoil.Store(&spoil)
		r.refused(r.call(c, "POST", gizmosV1, gizmo("v1", "spoiled", `{"size":3}`), "Content-Type", "application/json"), 500, want)
	}
	hang := make(chan struct{})
	hook.spoil.Store(ptrTo(func(http.ResponseWriter, map[string]any) bool { <-hang; return true }))
	a := r.call(c, "POST", gizmosV1+"?timeout=1s", gizmo("v1", "spoiled", `{"size":3}`), "Content-Type", "application/json")
	close(hang)
	if a.code != 504 && a.code != 500 {
		r.t.Errorf("a webhook that hangs: %d %s", a.code, a.body)
	}
	hook.spoil.Store(nil)
	r.refused(r.call(c, "GET", gizmosV2+"/spoiled", ""), 404)
}

func ptrTo(f func(http.ResponseWriter, map[string]any) bool) *func(http.ResponseWriter, map[string]any) bool {
	return &f
}

// flood writes until the reader is gone.
func flood(w io.Writer) {
	junk := []byte(strings.Repeat("x", 64<<10))
	for {
		if _, err := w.Write(junk); err != nil {
			return
		}
	}
}
