package apiserver

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
)

// Groups stand in Kubernetes' order, those of custom resources last, in every document.
func TestGroupsStandInKubernetesOrder(t *testing.T) {
	r := start(t, nil)
	c := r.adminHTTP()
	if err := r.cfg.Kinds.Register(gadgetKind()); err != nil {
		t.Fatal(err)
	}
	order := []string{
		"apiregistration.k8s.io", "apps", "events.k8s.io", "authentication.k8s.io", "authorization.k8s.io", "autoscaling", "batch",
		"certificates.k8s.io", "networking.k8s.io", "policy", "rbac.authorization.k8s.io", "storage.k8s.io",
		"admissionregistration.k8s.io", "apiextensions.k8s.io", "scheduling.k8s.io", "coordination.k8s.io", "node.k8s.io",
		"discovery.k8s.io", "flowcontrol.apiserver.k8s.io", "internal.apiserver.k8s.io", "resource.k8s.io", "storagemigration.k8s.io",
		"example.com", "metrics.k8s.io",
	}
	var plain metav1.APIGroupList
	if err := json.Unmarshal([]byte(r.call(c, "GET", "/apis", "").body), &plain); err != nil {
		t.Fatal(err)
	}
	var all apidiscoveryv2.APIGroupDiscoveryList
	if err := json.Unmarshal([]byte(r.call(c, "GET", "/apis", "", "Accept", aggregatedV2).body), &all); err != nil {
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

// The hashes of stored versions are those of Kubernetes: these three stand in the documents of any of its clusters.
func TestStorageVersionHashes(t *testing.T) {
	r := start(t, nil)
	c := r.adminHTTP()
	for path, want := range map[string]string{
		"/api/v1":       `"shortNames":["po"],"categories":["all"],"storageVersionHash":"xPOwRZ+Yhw8="`,
		"/api/v1?again": `"shortNames":["no"],"storageVersionHash":"XwShjMxG9Fs="`,
		"/apis/apps/v1": `"shortNames":["deploy"],"categories":["all"],"storageVersionHash":"8aSe+NMegvE="`,
	} {
		if a := r.call(c, "GET", path, ""); !strings.Contains(a.body, want) {
			t.Errorf("%s has no %s: %s", path, want, a.body)
		}
	}
}

// Discovery is answered in every media type, and says the same in each.
func TestDiscoveryInEveryMediaType(t *testing.T) {
	r := start(t, nil)
	c := r.adminHTTP()
	codecs := api.Codecs(r.cfg.Scheme)
	for _, path := range []string{"/api", "/apis", "/apis/apps", "/apis/apps/v1", "/api/v1"} {
		want := r.call(c, "GET", path, "")
		for _, media := range []string{"application/yaml", "application/cbor"} {
			got := r.call(c, "GET", path, "", "Accept", media)
			if got.header.Get("Content-Type") != media || !reflect.DeepEqual(plain(t, media, []byte(got.body)), plain(t, "", []byte(want.body))) {
				t.Errorf("%s as %s: %s %.200q", path, media, got.header.Get("Content-Type"), got.body)
			}
		}
		got := r.call(c, "GET", path, "", "Accept", "application/vnd.kubernetes.protobuf")
		if !strings.HasPrefix(got.body, "k8s\x00") || got.header.Get("Content-Type") != "application/vnd.kubernetes.protobuf" {
			t.Errorf("%s as protobuf: %v %.100q", path, got.header, got.body)
			continue
		}
		if path == "/api" {
			continue // names no version, so no decoder takes it
		}
		obj, err := runtime.Decode(codecs.UniversalDeserializer(), []byte(got.body))
		if err != nil {
			t.Errorf("%s as protobuf: %v", path, err)
			continue
		}
		said, err := json.Marshal(obj)
		if err != nil || !reflect.DeepEqual(plain(t, "", said), plain(t, "", []byte(want.body))) {
			t.Errorf("%s as protobuf: %s, as JSON: %s (%v)", path, said, want.body, err)
		}
		if a := r.call(c, "GET", path, "", "Accept", "text/html"); a.code != http.StatusNotAcceptable {
			t.Errorf("%s as text/html: %d", path, a.code)
		}
	}
	as := strings.TrimPrefix(aggregatedV2, "application/json")
	for _, path := range []string{"/api", "/apis"} {
		want := r.call(c, "GET", path, "", "Accept", aggregatedV2)
		for media, decode := range map[string]func(string) any{
			"application/cbor": func(b string) any { return plain(t, "application/cbor", []byte(b)) },
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
				return plain(t, "", said)
			},
		} {
			got := r.call(c, "GET", path, "", "Accept", "application/json;q=0.1,"+media+as)
			if got.header.Get("Content-Type") != media+as || got.header.Get("ETag") != want.header.Get("ETag") {
				t.Errorf("%s as %s: %v", path, media, got.header)
				continue
			}
			if g, w := decode(got.body), plain(t, "", []byte(want.body)); fmt.Sprint(g) != fmt.Sprint(w) {
				t.Errorf("%s as %s:\n%v\n%v", path, media, g, w)
			}
		}
		if a := r.call(c, "GET", path, "", "Accept", aggregatedV2, "If-None-Match", want.header.Get("ETag")); a.code != http.StatusNotModified || a.body != "" {
			t.Errorf("%s again: %d %s", path, a.code, a.body)
		}
	}
	if a := r.call(c, "GET", "/api", ""); !strings.Contains(a.body, `[{"clientCIDR":"0.0.0.0/0","serverAddress":"`+r.addr+`"}]`) {
		t.Errorf("/api does not say where this replica is: %s", a.body)
	}
}
