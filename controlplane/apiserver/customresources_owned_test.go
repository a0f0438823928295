package apiserver

import (
	"encoding/json"
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/customresourcedefinition"
	"keelson.dev/keelson/controlplane/controllers/garbagecollector"
	"keelson.dev/keelson/controlplane/controllers/namespace"
	"keelson.dev/keelson/controlplane/controllers/resourcequota"
	"keelson.dev/keelson/internal/memory/memtest"
)

// leadAll runs the controllers of definitions, garbage collection, namespaces and quotas until the
// test ends.
func (r *replica) leadAll() *client.Informers {
	return r.lead(customresourcedefinition.New, garbagecollector.New, namespace.New, resourcequota.New)
}

// freely returns a definition of objects with arbitrary fields.
func freely(group, plural, kind, scope string) string {
	return fmt.Sprintf(`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition","metadata":{"name":"%s.%s"},
"spec":{"group":"%s","scope":"%s","names":{"plural":"%s","kind":"%s"},"versions":[{"name":"v1","served":true,"storage":true,
"schema":{"openAPIV3Schema":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}]}}`, plural, group, group, scope, plural, kind)
}

// owned returns an object with owners. Each owner is the response that created it.
func owned(apiVersion, kind, name string, owners ...answer) string {
	var refs []string
	for _, o := range owners {
		var made struct {
			APIVersion, Kind string
			Metadata         struct{ Name, UID string }
		}
		_ = json.Unmarshal([]byte(o.body), &made)
		refs = append(refs, fmt.Sprintf(`{"apiVersion":%q,"kind":%q,"name":%q,"uid":%q,"blockOwnerDeletion":true}`,
			made.APIVersion, made.Kind, made.Metadata.Name, made.Metadata.UID))
	}
	return fmt.Sprintf(`{"apiVersion":%q,"kind":%q,"metadata":{"name":%q,"ownerReferences":[%s]}}`, apiVersion, kind, name, strings.Join(refs, ","))
}

func (r *replica) gone(c *http.Client, path string) {
	r.t.Helper()
	r.eventually(func() error {
		if a := r.call(c, "GET", path, ""); a.code != 404 {
			return fmt.Errorf("%s is still there: %d %s", path, a.code, a.body)
		}
		return nil
	})
}

const (
	lefts          = "/apis/left.example.com/v1/namespaces/default/lefts"
	rights         = "/apis/right.example.com/v1/namespaces/default/rights"
	configMapsPath = "/api/v1/namespaces/default/configmaps"
)

// Custom objects own and are owned as others are: by and of built-in ones, and across groups; in the background, in
// the foreground, and orphaned.
func TestOwnersOfCustomObjects(t *testing.T) {
	r := start(t, nil)
	r.leadAll()
	c := r.adminHTTP()
	r.establish(c, freely("left.example.com", "lefts", "Left", "Namespaced"))
	r.establish(c, freely("right.example.com", "rights", "Right", "Namespaced"))
	js := []string{"Content-Type", "application/json"}
	make := func(path, body string) answer { t.Helper(); return r.ok(r.call(c, "POST", path, body, js...)) }
	remove := func(path, policy string) {
		t.Helper()
		r.ok(r.call(c, "DELETE", path, `{"apiVersion":"v1","kind":"DeleteOptions","propagationPolicy":"`+policy+`"}`, js...))
	}
	left := func(name string, owners ...answer) string {
		return owned("left.example.com/v1", "Left", name, owners...)
	}
	right := func(name string, owners ...answer) string {
		return owned("right.example.com/v1", "Right", name, owners...)
	}
	configMap := func(name string, owners ...answer) string { return owned("v1", "ConfigMap", name, owners...) }

	// An owner of a kind of which no object was ever seen, and one that does not exist.
	never := answer{body: `{"apiVersion":"right.example.com/v1","kind":"Right","metadata":{"name":"never","uid":"11111111-2222-3333-4444-555555555555"}}`}
	make(configMapsPath, configMap("of-none", never))
	r.gone(c, configMapsPath+"/of-none")

	for _, policy := range []string{"Background", "Foreground"} {
		owner := make(lefts, left("a"))
		make(configMapsPath, configMap("of-custom", owner))
		across := make(rights, right("b", owner))
		make(configMapsPath, configMap("below", across))
		remove(lefts+"/a", policy)
		for _, path := range []string{lefts + "/a", configMapsPath + "/of-custom", rights + "/b", configMapsPath + "/below"} {
			r.gone(c, path)
		}
		builtIn := make(configMapsPath, configMap("owner"))
		make(lefts, left("of-builtin", builtIn))
		remove(configMapsPath+"/owner", policy)
		r.gone(c, configMapsPath+"/owner")
		r.gone(c, lefts+"/of-builtin")
	}

	owner := make(lefts, left("o"))
	make(rights, right("orphan", owner))
	make(configMapsPath, configMap("orphan", owner))
	remove(lefts+"/o", "Orphan")
	r.gone(c, lefts+"/o")
	for _, path := range []string{rights + "/orphan", configMapsPath + "/orphan"} {
		if a := r.ok(r.call(c, "GET", path, "")); strings.Contains(a.body, "ownerReferences") {
			t.Errorf("an orphan has an owner: %s", a.body)
		}
	}

	// A dependent with a finalizer holds its owner up in the foreground.
	owner = make(lefts, left("waiting"))
	held := strings.Replace(right("held", owner), `"name":"held"`, `"name":"held","finalizers":["example.com/hold"]`, 1)
	make(rights, held)
	remove(lefts+"/waiting", "Foreground")
	r.eventually(func() error {
		if a := r.ok(r.call(c, "GET", rights+"/held", "")); !strings.Contains(a.body, "deletionTimestamp") {
			return errNotYet
		}
		return nil
	})
	r.ok(r.call(c, "GET", lefts+"/waiting", ""), "foregroundDeletion")
	r.ok(r.call(c, "PATCH", rights+"/held", `{"metadata":{"finalizers":null}}`, "Content-Type", "application/merge-patch+json"))
	r.gone(c, lefts+"/waiting")
}

// An object whose owner is of a kind that nobody knows stays, until the kind comes and has no such owner.
func TestOwnersOfKindsThatComeLater(t *testing.T) {
	r := start(t, nil)
	r.leadAll()
	c := r.adminHTTP()
	later := answer{body: `{"apiVersion":"later.example.com/v1","kind":"Later","metadata":{"name":"never","uid":"11111111-2222-3333-4444-555555555555"}}`}
	r.ok(r.call(c, "POST", configMapsPath, owned("v1", "ConfigMap", "of-a-stranger", later), "Content-Type", "application/json"))
	none := answer{body: `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"never","uid":"11111111-2222-3333-4444-555555555556"}}`}
	r.ok(r.call(c, "POST", configMapsPath, owned("v1", "ConfigMap", "of-none", none), "Content-Type", "application/json"))
	r.gone(c, configMapsPath+"/of-none") // the collector has been at work
	r.ok(r.call(c, "GET", configMapsPath+"/of-a-stranger", ""))
	r.establish(c, freely("later.example.com", "laters", "Later", "Namespaced"))
	r.gone(c, configMapsPath+"/of-a-stranger")
}

// A namespace takes its custom objects along, and names those that something holds.
func TestNamespaceOfCustomObjects(t *testing.T) {
	r := start(t, nil)
	r.leadAll()
	c := r.adminHTTP()
	r.establish(c, freely("left.example.com", "lefts", "Left", "Namespaced"))
	js := []string{"Content-Type", "application/json"}
	r.ok(r.call(c, "POST", "/api/v1/namespaces", `{"metadata":{"name":"ending"}}`, js...))
	const at = "/apis/left.example.com/v1/namespaces/ending/lefts"
	r.ok(r.call(c, "POST", at, owned("left.example.com/v1", "Left", "free"), js...))
	r.ok(r.call(c, "POST", at, strings.Replace(owned("left.example.com/v1", "Left", "held"), `"name"`, `"finalizers":["example.com/hold"],"name"`, 1), js...))
	r.ok(r.call(c, "DELETE", "/api/v1/namespaces/ending", ""))
	r.gone(c, at+"/free")
	r.eventually(func() error {
		a := r.ok(r.call(c, "GET", "/api/v1/namespaces/ending", ""))
		for _, want := range []string{string(corev1.NamespaceContentRemaining), "lefts.left.example.com has 1 resource instances", "example.com/hold in 1 resource instances"} {
			if !strings.Contains(a.body, want) {
				return fmt.Errorf("no %s in %s", want, a.body)
			}
		}
		return nil
	})
	r.refused(r.call(c, "POST", at, owned("left.example.com/v1", "Left", "late"), js...), 403, "because it is being terminated")
	r.ok(r.call(c, "PATCH", at+"/held", `{"metadata":{"finalizers":null}}`, "Content-Type", "application/merge-patch+json"))
	r.gone(c, "/api/v1/namespaces/ending")
}

// The leader's controllers, which look at every kind, spend nothing on definitions of which there are no objects.
func TestIdleDefinitionsOfALeader(t *testing.T) {
	r := start(t, nil)
	r.leadAll()
	c := r.adminHTTP()
	r.establish(c, freely("left.example.com", "lefts", "Left", "Namespaced"))
	heap, goroutines := memtest.LiveHeap(), runtime.NumGoroutine()
	const n = 500
	for i := range n {
		r.ok(r.call(c, "POST", definitionsPath, changed(t, crontabs, "metadata/name", fmt.Sprintf("c%d.stable.example.com", i), "spec/names",
			fmt.Sprintf("{plural: c%d, kind: C%d}", i, i)), "Content-Type", "application/json"))
	}
	r.condition(c, fmt.Sprintf("c%d.stable.example.com", n-1), "Established", "True")
	r.eventually(func() error {
		if have := len(r.cfg.Kinds.All()); have < n {
			return fmt.Errorf("%d kinds", have)
		}
		return nil
	})
	js := []string{"Content-Type", "application/json"}
	owner := r.ok(r.call(c, "POST", lefts, owned("left.example.com/v1", "Left", "a"), js...))
	r.ok(r.call(c, "POST", configMapsPath, owned("v1", "ConfigMap", "of-a", owner), js...))
	r.ok(r.call(c, "DELETE", lefts+"/a", ""))
	r.gone(c, configMapsPath+"/of-a")
	more, grown := runtime.NumGoroutine()-goroutines, memtest.LiveHeap()-heap
	t.Logf("%d definitions on the leader: %d MiB of heap, %d goroutines", n, grown>>20, more)
	if grown > 60<<20 {
		t.Errorf("%d definitions take %d MiB", n, grown>>20)
	}
	if more > 40 {
		t.Errorf("%d definitions run %d goroutines", n, more)
	}
}
