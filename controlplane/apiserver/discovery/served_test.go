package discovery_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// F12: plain and aggregated discovery have the same content.
func TestDiscovery(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	_, lists, err := r.Admin().Discovery().ServerGroupsAndResources() // aggregated
	if err != nil {
		t.Fatal(err)
	}
	fresh := map[string]metav1.APIResource{}
	for _, l := range lists {
		for _, res := range l.APIResources {
			fresh[l.GroupVersion+"/"+res.Name] = res
		}
	}
	c := r.AdminHTTP()
	plain := 0
	for _, k := range r.Kinds.All() {
		path := "/api/v1"
		if k.GVK.Group != "" {
			path = "/apis/" + k.GVK.GroupVersion().String()
		}
		var l metav1.APIResourceList
		if err := json.Unmarshal([]byte(r.Call(c, "GET", path, "").Body), &l); err != nil {
			t.Fatal(err)
		}
		for _, res := range l.APIResources {
			plain++
			if got, ok := fresh[l.GroupVersion+"/"+res.Name]; !ok || got.Kind != res.Kind ||
				got.Namespaced != res.Namespaced || fmt.Sprint(got.Verbs) != fmt.Sprint(res.Verbs) {
				t.Errorf("%s %s: aggregated %+v, plain %+v", l.GroupVersion, res.Name, got, res)
			}
		}
	}
	if plain == 0 || fresh["v1/pods"].ShortNames[0] != "po" || fresh["apps/v1/deployments/scale"].Kind != "Scale" {
		t.Errorf("%d resources, pods %+v", plain, fresh["v1/pods"])
	}
	// The aggregated document is not sent twice.
	accept := "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
	a := r.Call(c, "GET", "/apis", "", "Accept", accept)
	if a.Header.Get("ETag") == "" || !strings.Contains(a.Header.Get("Content-Type"), "as=APIGroupDiscoveryList") {
		t.Errorf("%v", a.Header)
	}
	if b := r.Call(c, "GET", "/apis", "", "Accept", accept, "If-None-Match", a.Header.Get("ETag")); b.Code != 304 {
		t.Errorf("asked again: %d", b.Code)
	}
}
