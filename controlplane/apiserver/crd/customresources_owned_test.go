package crd_test

import (
	"encoding/json"
	"fmt"
	"runtime"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/internal/memory/memtest"
)

// freely returns a definition of objects with arbitrary fields.
func freely(group, plural, kind, scope string) string {
	return fmt.Sprintf(
		`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"%s.%s"},
"spec":{"group":"%s","scope":"%s","names":{"plural":"%s","kind":"%s"},"versions":[{"name":"v1","served":true,"storage":true,
"schema":{"openAPIV3Schema":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}]}}`, plural, group, group,
		scope, plural, kind)
}

// owned returns an object with owners. Each owner is the response that created it.
func owned(apiVersion, kind, name string, owners ...apiservertest.Response) string {
	var refs []string
	for _, o := range owners {
		var made struct {
			APIVersion, Kind string
			Metadata         struct{ Name, UID string }
		}
		_ = json.Unmarshal([]byte(o.Body), &made)
		refs = append(refs, fmt.Sprintf(`{"apiVersion":%q,"kind":%q,"name":%q,"uid":%q,"blockOwnerDeletion":true}`,
			made.APIVersion, made.Kind, made.Metadata.Name, made.Metadata.UID))
	}
	return fmt.Sprintf(`{"apiVersion":%q,"kind":%q,"metadata":{"name":%q,"ownerReferences":[%s]}}`, apiVersion, kind,
		name, strings.Join(refs, ","))
}

const (
	lefts          = "/apis/left.example.com/v1/namespaces/default/lefts"
	rights         = "/apis/right.example.com/v1/namespaces/default/rights"
	configMapsPath = "/api/v1/namespaces/default/configmaps"
)

// Custom objects own and are owned as others are: by and of built-in ones, and across groups; in
// the background, in the foreground, and orphaned.
func TestOwnersOfCustomObjects(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	r.LeadAll()
	c := r.AdminHTTP()
	r.Establish(c, freely("left.example.com", "lefts", "Left", "Namespaced"))
	r.Establish(c, freely("right.example.com", "rights", "Right", "Namespaced"))
	js := []string{"Content-Type", "application/json"}
	make := func(path, body string) apiservertest.Response {
		t.Helper()
		return r.OK(r.Call(c, "POST", path, body, js...))
	}
	remove := func(path, policy string) {
		t.Helper()
		r.OK(r.Call(c, "DELETE", path, `{"apiVersion":"v1","kind":"DeleteOptions","propagationPolicy":"`+policy+`"}`,
			js...))
	}
	left := func(name string, owners ...apiservertest.Response) string {
		return owned("left.example.com/v1", "Left", name, owners...)
	}
	right := func(name string, owners ...apiservertest.Response) string {
		return owned("right.example.com/v1", "Right", name, owners...)
	}
	configMap := func(name string, owners ...apiservertest.Response) string {
		return owned("v1", "ConfigMap", name, owners...)
	}

	// An owner of a kind of which no object was ever seen, and one that does not exist.
	never := apiservertest.Response{Body: `{"apiVersion":"right.example.com/v1","kind":"Right",` +
		`"metadata":{"name":"never","uid":"11111111-2222-3333-4444-555555555555"}}`}
	make(configMapsPath, configMap("of-none", never))
	r.Gone(c, configMapsPath+"/of-none")

	for _, policy := range []string{"Background", "Foreground"} {
		owner := make(lefts, left("a"))
		make(configMapsPath, configMap("of-custom", owner))
		across := make(rights, right("b", owner))
		make(configMapsPath, configMap("below", across))
		remove(lefts+"/a", policy)
		for _, path := range []string{lefts + "/a", configMapsPath + "/of-custom", rights + "/b",
			configMapsPath + "/below"} {
			r.Gone(c, path)
		}
		builtIn := make(configMapsPath, configMap("owner"))
		make(lefts, left("of-builtin", builtIn))
		remove(configMapsPath+"/owner", policy)
		r.Gone(c, configMapsPath+"/owner")
		r.Gone(c, lefts+"/of-builtin")
	}

	owner := make(lefts, left("o"))
	make(rights, right("orphan", owner))
	make(configMapsPath, configMap("orphan", owner))
	remove(lefts+"/o", "Orphan")
	r.Gone(c, lefts+"/o")
	for _, path := range []string{rights + "/orphan", configMapsPath + "/orphan"} {
		if a := r.OK(r.Call(c, "GET", path, "")); strings.Contains(a.Body, "ownerReferences") {
			t.Errorf("an orphan has an owner: %s", a.Body)
		}
	}

	// A dependent with a finalizer holds its owner up in the foreground.
	owner = make(lefts, left("waiting"))
	held := strings.Replace(right("held", owner), `"name":"held"`, `"name":"held","finalizers":["example.com/hold"]`, 1)
	make(rights, held)
	remove(lefts+"/waiting", "Foreground")
	r.Eventually(func() error {
		if a := r.OK(r.Call(c, "GET", rights+"/held", "")); !strings.Contains(a.Body, "deletionTimestamp") {
			return apiservertest.ErrNotYet
		}
		return nil
	})
	r.OK(r.Call(c, "GET", lefts+"/waiting", ""), "foregroundDeletion")
	r.OK(r.Call(c, "PATCH", rights+"/held", `{"metadata":{"finalizers":null}}`, "Content-Type",
		"application/merge-patch+json"))
	r.Gone(c, lefts+"/waiting")
}

// An object whose owner is of a kind that nobody knows stays, until the kind comes and has no such
// owner.
func TestOwnersOfKindsThatComeLater(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	r.LeadAll()
	c := r.AdminHTTP()
	later := apiservertest.Response{Body: `{"apiVersion":"later.example.com/v1","kind":"Later",` +
		`"metadata":{"name":"never","uid":"11111111-2222-3333-4444-555555555555"}}`}
	r.OK(r.Call(c, "POST", configMapsPath, owned("v1", "ConfigMap", "of-a-stranger", later), "Content-Type",
		"application/json"))
	none := apiservertest.Response{Body: `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"never",` +
		`"uid":"11111111-2222-3333-4444-555555555556"}}`}
	r.OK(r.Call(c, "POST", configMapsPath, owned("v1", "ConfigMap", "of-none", none), "Content-Type",
		"application/json"))
	r.Gone(c, configMapsPath+"/of-none") // the collector has been at work
	r.OK(r.Call(c, "GET", configMapsPath+"/of-a-stranger", ""))
	r.Establish(c, freely("later.example.com", "laters", "Later", "Namespaced"))
	r.Gone(c, configMapsPath+"/of-a-stranger")
}

// A namespace takes its custom objects along, and names those that something holds.
func TestNamespaceOfCustomObjects(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	r.LeadAll()
	c := r.AdminHTTP()
	r.Establish(c, freely("left.example.com", "lefts", "Left", "Namespaced"))
	js := []string{"Content-Type", "application/json"}
	r.OK(r.Call(c, "POST", "/api/v1/namespaces", `{"metadata":{"name":"ending"}}`, js...))
	const at = "/apis/left.example.com/v1/namespaces/ending/lefts"
	r.OK(r.Call(c, "POST", at, owned("left.example.com/v1", "Left", "free"), js...))
	r.OK(r.Call(c, "POST", at, strings.Replace(owned("left.example.com/v1", "Left", "held"), `"name"`,
		`"finalizers":["example.com/hold"],"name"`, 1), js...))
	r.OK(r.Call(c, "DELETE", "/api/v1/namespaces/ending", ""))
	r.Gone(c, at+"/free")
	r.Eventually(func() error {
		a := r.OK(r.Call(c, "GET", "/api/v1/namespaces/ending", ""))
		for _, want := range []string{string(corev1.NamespaceContentRemaining),
			"lefts.left.example.com has 1 resource instances", "example.com/hold in 1 resource instances"} {
			if !strings.Contains(a.Body, want) {
				return fmt.Errorf("no %s in %s", want, a.Body)
			}
		}
		return nil
	})
	r.Refused(r.Call(c, "POST", at, owned("left.example.com/v1", "Left", "late"), js...), 403,
		"because it is being terminated")
	r.OK(r.Call(c, "PATCH", at+"/held", `{"metadata":{"finalizers":null}}`, "Content-Type",
		"application/merge-patch+json"))
	r.Gone(c, "/api/v1/namespaces/ending")
}

// The leader's controllers, which look at every kind, spend nothing on definitions of which there
// are no objects.
func TestIdleDefinitionsOfALeader(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	r.LeadAll()
	c := r.AdminHTTP()
	r.Establish(c, freely("left.example.com", "lefts", "Left", "Namespaced"))
	heap, goroutines := memtest.LiveHeap(), runtime.NumGoroutine()
	const n = 500
	for i := range n {
		r.OK(r.Call(c, "POST", apiservertest.DefinitionsPath,
			changed(t, apiservertest.Crontabs, "metadata/name", fmt.Sprintf("c%d.stable.example.com", i), "spec/names",
				fmt.Sprintf("{plural: c%d, kind: C%d}", i, i)), "Content-Type", "application/json"))
	}
	r.Condition(c, fmt.Sprintf("c%d.stable.example.com", n-1), "Established", "True")
	r.Eventually(func() error {
		if have := len(r.Kinds.All()); have < n {
			return fmt.Errorf("%d kinds", have)
		}
		return nil
	})
	js := []string{"Content-Type", "application/json"}
	owner := r.OK(r.Call(c, "POST", lefts, owned("left.example.com/v1", "Left", "a"), js...))
	r.OK(r.Call(c, "POST", configMapsPath, owned("v1", "ConfigMap", "of-a", owner), js...))
	r.OK(r.Call(c, "DELETE", lefts+"/a", ""))
	r.Gone(c, configMapsPath+"/of-a")
	more, grown := runtime.NumGoroutine()-goroutines, memtest.LiveHeap()-heap
	t.Logf("%d definitions on the leader: %d MiB of heap, %d goroutines", n, grown>>20, more)
	if grown > 60<<20 {
		t.Errorf("%d definitions take %d MiB", n, grown>>20)
	}
	if more > 40 {
		t.Errorf("%d definitions run %d goroutines", n, more)
	}
}
