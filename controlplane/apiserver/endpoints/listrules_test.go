package endpoints_test

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// Items of a list of a built-in kind have neither kind nor apiVersion, in lists that are encoded at
// once and in those that are streamed, as in Kubernetes. F16
func TestListItemsHaveNoKind(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	padding := strings.Repeat("x", 64<<10)
	for i := range 4 {
		name := fmt.Sprintf("c%d", i)
		r.Must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
			Labels: map[string]string{"n": name}},
			Data: map[string]string{"kind": "x", "padding": padding}})
	}
	for name, query := range map[string]string{"streamed": "", "at once": "?labelSelector=n%3Dc1",
		"pretty": "?pretty=1"} {
		a := r.OK(r.Call(c, "GET", "/api/v1/namespaces/default/configmaps"+query, ""))
		var list struct {
			Kind, APIVersion string
			Items            []map[string]any
		}
		if err := json.Unmarshal([]byte(a.Body), &list); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if list.Kind != "ConfigMapList" || list.APIVersion != "v1" || len(list.Items) == 0 {
			t.Errorf("%s: a %s of %s with %d items", name, list.Kind, list.APIVersion, len(list.Items))
		}
		for _, item := range list.Items {
			if item["kind"] != nil || item["apiVersion"] != nil || item["metadata"] == nil || item["data"] == nil {
				t.Errorf("%s: an item has kind %v, apiVersion %v, metadata %v", name, item["kind"], item["apiVersion"],
					item["metadata"])
			}
		}
	}
	var one map[string]any
	a := r.OK(r.Call(c, "GET", "/api/v1/namespaces/default/configmaps/c1", ""))
	if err := json.Unmarshal([]byte(a.Body), &one); err != nil || one["kind"] != "ConfigMap" {
		t.Errorf("the object itself has kind %v (%v)", one["kind"], err)
	}
}

// A continue token fixes the resourceVersion of the list. A request with both is rejected with the
// message of Kubernetes; 0 and the empty string have no effect. F16
func TestContinueExcludesResourceVersion(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	for i := range 3 {
		r.Must(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("c%d", i)}})
	}
	const path = "/api/v1/namespaces/default/configmaps?limit=1"
	var first metav1.PartialObjectMetadataList
	if err := json.Unmarshal([]byte(r.OK(r.Call(c, "GET", path, "")).Body), &first); err != nil ||
		first.Continue == "" {
		t.Fatalf("no token: %v", err)
	}
	next := path + "&continue=" + url.QueryEscape(first.Continue)
	r.Refused(r.Call(c, "GET", next+"&resourceVersion="+first.ResourceVersion, ""), 400,
		"specifying resource version is not allowed when using continue")
	r.OK(r.Call(c, "GET", next+"&resourceVersion=0", ""))
	r.OK(r.Call(c, "GET", next, ""))
	r.Refused(r.Call(c, "GET", path+"&continue=bad&resourceVersion=1", ""), 400, "continue key is not valid")
}

// A timeout that is not a duration is rejected before the client is authenticated, unless the
// request is long-running. F16
func TestInvalidTimeoutIsRefused(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	r.Must(apiservertest.NewPod("p"))
	const message = `invalid timeout specified in the request URL - time: invalid duration "invalid"`
	for _, path := range []string{"/api/v1/namespaces/default/pods", "/api/v1/namespaces/default/pods/p", "/version",
		"/api/v1/nosuch", "/apis/absent.example/v1/x"} {
		r.Refused(r.Call(c, "GET", path+"?timeout=invalid", ""), 400, message)
	}
	r.Refused(r.Call(r.Unauthenticated(), "GET", "/api/v1/namespaces/default/pods?timeout=invalid", ""), 400, message)
	for _, path := range []string{"/api/v1/namespaces/default/pods?watch=1&timeoutSeconds=1&timeout=invalid",
		"/api/v1/namespaces/default/pods?timeout=0s", "/version?timeout=32s"} {
		r.OK(r.Call(c, "GET", path, ""))
	}
}
