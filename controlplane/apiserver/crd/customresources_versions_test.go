package crd_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

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

func newConverting(t *testing.T) *apiservertest.Converting {
	c := &apiservertest.Converting{}
	c.Server = httptest.NewTLSServer(http.HandlerFunc(c.ServeConversion))
	t.Cleanup(c.Close)
	return c
}

// F15: the versions of a definition are views of one object; a webhook turns one into the other, or
// the definition says that nothing is to be turned.
func TestVersionsOfCustomResources(t *testing.T) {
	r := apiservertest.WithDefinitions(t)
	c := r.AdminHTTP()
	body := []string{"Content-Type", "application/json"}
	t.Run("None", func(t *testing.T) {
		r.Establish(c, gizmos("{strategy: None}"))
		a := r.OK(r.Call(c, "POST", apiservertest.GizmosV1, apiservertest.Gizmo("v1", "a", `{"both":"b","size":1}`),
			body...), `"apiVersion":"example.com/v1"`)
		if w := a.Header.Get("Warning"); !strings.Contains(w,
			"example.com/v1 Gizmo is deprecated; use example.com/v2 Gizmo") {
			t.Errorf("the warning is %q", w)
		}
		if got := r.OK(r.Call(c, "GET", apiservertest.GizmosV2+"/a", ""), `"apiVersion":"example.com/v2"`,
			`"both":"b"`).Body; strings.Contains(got, `"size":`) {
			t.Errorf("v2 does not know size: %s", got)
		}
		r.Drop(c, "gizmos.example.com")
	})
	t.Run("Webhook", func(t *testing.T) {
		hook := newConverting(t)
		r.Establish(c, gizmos(hook.Conversion()))
		r.OK(r.Call(c, "POST", apiservertest.GizmosV1, apiservertest.Gizmo("v1", "a", `{"size":3}`), body...),
			`"size":3`)
		r.OK(r.Call(c, "GET", apiservertest.GizmosV2+"/a", ""), `"width":3`, `"both":"x"`)
		r.OK(r.Call(c, "PATCH", apiservertest.GizmosV2+"/a", `{"spec":{"width":4}}`, "Content-Type",
			"application/merge-patch+json"), `"width":4`)
		r.OK(r.Call(c, "GET", apiservertest.GizmosV1+"/a", ""), `"size":4`, `"generation":2`)
		for i := range 20 {
			r.OK(r.Call(c, "POST", apiservertest.GizmosV2, apiservertest.Gizmo("v2", fmt.Sprint("n", i), `{"width":1}`),
				body...))
		}
		calls := hook.Calls.Load()
		r.OK(r.Call(c, "GET", apiservertest.GizmosV1, ""), `"size":1`)
		if n := hook.Calls.Load() - calls; n != 1 {
			t.Errorf("a list of 20 objects asked the webhook %d times", n)
		}
		r.Spoiled(c, hook)
		r.Drop(c, "gizmos.example.com")
	})
	t.Run("Service that is missing", func(t *testing.T) {
		r.Establish(c,
			gizmos(`{strategy: Webhook, webhook: {conversionReviewVersions: [v1], clientConfig: {service: {name: `+
				`conv, namespace: default}}}}`))
		r.OK(r.Call(c, "POST", apiservertest.GizmosV2, apiservertest.Gizmo("v2", "a", `{"width":3}`), body...))
		for _, a := range []apiservertest.Response{r.Call(c, "GET", apiservertest.GizmosV1+"/a", ""),
			r.Call(c, "POST", apiservertest.GizmosV1, apiservertest.Gizmo("v1", "b", `{"size":3}`), body...)} {
			r.Refused(a, 500, "conversion webhook for example.com/v", `, Kind=Gizmo failed: `,
				`service "conv" not found`)
		}
		r.Drop(c, "gizmos.example.com")
	})
}
