package crd_test

import (
	"fmt"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// F15: the deletion of a definition waits for an instance that is stored in a version which the
// definition has no longer, and says so; neither the definition nor a namespace goes while the
// instance exists. The instance can be released after the version has been added again.
func TestDefinitionWaitsForInstancesOfARemovedVersion(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	r.LeadAll()
	c := r.AdminHTTP()
	version := func(name string, storage bool) string {
		return fmt.Sprintf(`{"name":%q,"served":true,"storage":%v,"schema":{"openAPIV3Schema":{"type":"object",`+
			`"x-kubernetes-preserve-unknown-fields":true}}}`, name, storage)
	}
	definition := func(versions ...string) string {
		return `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition",` +
			`"metadata":{"name":"lefts.left.example.com"},` +
			`"spec":{"group":"left.example.com","scope":"Namespaced","names":{"plural":"lefts",` +
			`"kind":"Left"},"versions":[` +
			strings.Join(versions, ",") + `]}}`
	}
	const path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/lefts.left.example.com"
	const merge = "application/merge-patch+json"
	r.Establish(c, definition(version("v1", true)))
	r.OK(r.Call(c, "POST", "/api/v1/namespaces", `{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"short"}}`,
		"Content-Type", "application/json"))
	held := strings.Replace(lefts, "/default/", "/short/", 1)
	r.OK(r.Call(c, "POST", held,
		`{"apiVersion":"left.example.com/v1","kind":"Left","metadata":{"name":"a","finalizers":["example.com/hold"]}}`,
		"Content-Type", "application/json"))
	r.OK(r.Call(c, "PATCH", path, `{"spec":{"versions":[`+version("v1", false)+`,`+version("v2", true)+`]}}`,
		"Content-Type", merge))
	r.OK(r.Call(c, "PATCH", path+"/status", `{"status":{"storedVersions":["v2"]}}`, "Content-Type", merge))
	r.OK(r.Call(c, "PATCH", path, `{"spec":{"versions":[`+version("v2", true)+`]}}`, "Content-Type", merge))
	list := strings.Replace(held, "/v1/", "/v2/", 1)
	r.Eventually(func() error { // version v1 is dropped
		if a := r.Call(c, "GET", held, ""); a.Code != 404 {
			return fmt.Errorf("v1 is served: %d", a.Code)
		}
		return nil
	})
	r.OK(r.Call(c, "GET", list, ""))
	a := r.Call(c, "GET", list+"/a", "")
	for _, want := range []string{
		`is of version \"v1\", which the CustomResourceDefinition no longer has; `,
		`add version \"v1\" to spec.versions of CustomResourceDefinition \"lefts.left.example.com\" again ('served: ` +
			`false' is enough), `,
		`or delete the object without regard to its finalizers ('kubectl delete lefts.left.example.com a -n ` +
			`short --wait=false')`,
	} {
		if a.Code != 500 || !strings.Contains(a.Body, want) || strings.Contains(a.Body, "damaged") {
			t.Errorf("no %s in %d %s", want, a.Code, a.Body)
		}
	}

	r.OK(r.Call(c, "DELETE", "/api/v1/namespaces/short", ""))
	r.Eventually(func() error {
		a := r.Call(c, "GET", "/api/v1/namespaces/short", "")
		if a.Code != 200 || !strings.Contains(a.Body, "ContentDeletionFailed") ||
			!strings.Contains(a.Body, `lefts \"a\" cannot be read`) {
			return fmt.Errorf("the namespace does not say what holds it: %d %s", a.Code, a.Body)
		}
		return nil
	})
	r.OK(r.Call(c, "DELETE", path, ""))
	r.Eventually(func() error {
		reason, message := r.Condition(c, "lefts.left.example.com", "Terminating", "True")
		if reason != "InstanceDeletionFailed" || !strings.Contains(message, `lefts "a" cannot be read`) ||
			!strings.HasPrefix(message, "could not list instances: ") {
			return fmt.Errorf("the definition does not say what holds it: %s: %s", reason, message)
		}
		return nil
	})

	r.OK(r.Call(c, "PATCH", path, `{"spec":{"versions":[`+version("v1", false)+`,`+version("v2", true)+`]}}`,
		"Content-Type", merge))
	r.Eventually(func() error {
		a := r.Call(c, "GET", held+"/a", "")
		if a.Code != 200 || !strings.Contains(a.Body, "deletionTimestamp") {
			return fmt.Errorf("the instance is not being deleted: %d %s", a.Code, a.Body)
		}
		return nil
	})
	r.OK(r.Call(c, "PATCH", held+"/a", `{"metadata":{"finalizers":null}}`, "Content-Type", merge))
	r.Gone(c, path)
	r.Gone(c, "/api/v1/namespaces/short")
}
