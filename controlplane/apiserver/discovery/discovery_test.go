package discovery_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// Groups stand in Kubernetes' order, those of custom resources last, in every document.
func TestGroupsStandInKubernetesOrder(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	if err := r.Kinds.Register(apiservertest.GadgetKind()); err != nil {
		t.Fatal(err)
	}
	order := []string{
		"apiregistration.k8s.io", "apps", "events.k8s.io", "authentication.k8s.io", "authorization.k8s.io",
		"autoscaling", "batch",
		"certificates.k8s.io", "networking.k8s.io", "policy", "rbac.authorization.k8s.io", "storage.k8s.io",
		"admissionregistration.k8s.io", "apiextensions.k8s.io", "scheduling.k8s.io",
		"coordination.k8s.io", "node.k8s.io",
		"discovery.k8s.io", "flowcontrol.apiserver.k8s.io", "internal.apiserver.k8s.io", "resource.k8s.io",
		"storagemigration.k8s.io",
		"example.com", "metrics.k8s.io",
	}
	var plain metav1.APIGroupList
	if err := json.Unmarshal([]byte(r.Call(c, "GET", "/apis", "").Body), &plain); err != nil {
		t.Fatal(err)
	}
	var all apidiscoveryv2.APIGroupDiscoveryList
	if err := json.Unmarshal([]byte(r.Call(c, "GET", "/apis", "", "Accept", aggregatedV2).Body), &all); err != nil {
		t.Fatal(err)
	}
	var names, fresh []string
	for _, g := range plain.Groups {
		names = append(names, g.Name)
	}
	for _, g := range all.Items {
		fresh = append(fresh, g.Name)
	}
	want := slices.DeleteFunc(order, func(g string) bool { return !slices.Contains(names, g) })
	if !slices.Equal(names, want) || !slices.Equal(fresh, want) || len(names) < 8 {
		t.Errorf("groups %v, aggregated %v, want %v", names, fresh, want)
	}
}

const aggregatedV2 = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"

// The hashes of stored versions are those of Kubernetes: these three stand in the documents of any
// of its clusters.
func TestStorageVersionHashes(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	for path, want := range map[string]string{
		"/api/v1":       `"shortNames":["po"],"categories":["all"],"storageVersionHash":"xPOwRZ+Yhw8="`,
		"/api/v1?again": `"shortNames":["no"],"storageVersionHash":"XwShjMxG9Fs="`,
		"/apis/apps/v1": `"shortNames":["deploy"],"categories":["all"],"storageVersionHash":"8aSe+NMegvE="`,
	} {
		if a := r.Call(c, "GET", path, ""); !strings.Contains(a.Body, want) {
			t.Errorf("%s has no %s: %s", path, want, a.Body)
		}
	}
}

// Discovery is answered in every media type, and says the same in each.
func TestDiscoveryInEveryMediaType(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	codecs := api.Codecs(r.Scheme)
	for _, path := range []string{"/api", "/apis", "/apis/apps", "/apis/apps/v1", "/api/v1"} {
		want := r.Call(c, "GET", path, "")
		for _, media := range []string{"application/yaml", "application/cbor"} {
			got := r.Call(c, "GET", path, "", "Accept", media)
			if got.Header.Get("Content-Type") != media ||
				!reflect.DeepEqual(apiservertest.Plain(t, media, []byte(got.Body)),
					apiservertest.Plain(t, "", []byte(want.Body))) {
				t.Errorf("%s as %s: %s %.200q", path, media, got.Header.Get("Content-Type"), got.Body)
			}
		}
		got := r.Call(c, "GET", path, "", "Accept", "application/vnd.kubernetes.protobuf")
		if !strings.HasPrefix(got.Body, "k8s\x00") ||
			got.Header.Get("Content-Type") != "application/vnd.kubernetes.protobuf" {
			t.Errorf("%s as protobuf: %v %.100q", path, got.Header, got.Body)
			continue
		}
		if path == "/api" {
			continue // names no version, so no decoder takes it
		}
		obj, err := runtime.Decode(codecs.UniversalDeserializer(), []byte(got.Body))
		if err != nil {
			t.Errorf("%s as protobuf: %v", path, err)
			continue
		}
		said, err := json.Marshal(obj)
		if err != nil || !reflect.DeepEqual(apiservertest.Plain(t, "", said),
			apiservertest.Plain(t, "", []byte(want.Body))) {
			t.Errorf("%s as protobuf: %s, as JSON: %s (%v)", path, said, want.Body, err)
		}
		if a := r.Call(c, "GET", path, "", "Accept", "text/html"); a.Code != http.StatusNotAcceptable {
			t.Errorf("%s as text/html: %d", path, a.Code)
		}
	}
	as := strings.TrimPrefix(aggregatedV2, "application/json")
	for _, path := range []string{"/api", "/apis"} {
		want := r.Call(c, "GET", path, "", "Accept", aggregatedV2)
		for media, decode := range map[string]func(string) any{
			"application/cbor": func(b string) any { return apiservertest.Plain(t, "application/cbor", []byte(b)) },
			"application/vnd.kubernetes.protobuf": func(b string) any {
				var l apidiscoveryv2.APIGroupDiscoveryList
				var u runtime.Unknown
				if err := u.Unmarshal([]byte(strings.TrimPrefix(b, "k8s\x00"))); err != nil {
					t.Fatal(err)
				}
				if err := l.Unmarshal(u.Raw); err != nil {
					t.Fatal(err)
				}
				l.APIVersion, l.Kind = u.APIVersion, u.Kind
				said, err := json.Marshal(l)
				if err != nil {
					t.Fatal(err)
				}
				return apiservertest.Plain(t, "", said)
			},
		} {
			got := r.Call(c, "GET", path, "", "Accept", "application/json;q=0.1,"+media+as)
			if got.Header.Get("Content-Type") != media+as || got.Header.Get("ETag") != want.Header.Get("ETag") {
				t.Errorf("%s as %s: %v", path, media, got.Header)
				continue
			}
			if g, w := decode(got.Body), apiservertest.Plain(t, "", []byte(want.Body)); fmt.Sprint(g) != fmt.Sprint(w) {
				t.Errorf("%s as %s:\n%v\n%v", path, media, g, w)
			}
		}
		if a := r.Call(c, "GET", path, "", "Accept", aggregatedV2, "If-None-Match", want.Header.Get("ETag")); a.Code !=
			http.StatusNotModified || a.Body != "" {
			t.Errorf("%s again: %d %s", path, a.Code, a.Body)
		}
	}
	if a := r.Call(c, "GET", "/api", ""); !strings.Contains(a.Body,
		`[{"clientCIDR":"0.0.0.0/0","serverAddress":"`+r.Addr+`"}]`) {
		t.Errorf("/api does not say where this replica is: %s", a.Body)
	}
}
