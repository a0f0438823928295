package authz_test

import (
	"net/http"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/pki"
)

// An agent reads all objects of the kinds that it needs, reads no others, and writes none of them.
func TestNodePermissionsForEveryKind(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	r.Must(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}})
	r.CreatePodOn("own", "a")
	cert := r.Cert(pki.Client(api.NodeUserPrefix+"a", api.GroupNodes))
	node := r.HTTP(&cert)
	reads := sets.New("/services", "/endpoints", "discovery.k8s.io/endpointslices",
		"certificates.k8s.io/certificatesigningrequests",
		"storage.k8s.io/csidrivers", "node.k8s.io/runtimeclasses")
	creates := sets.New("/events", "events.k8s.io/events", "certificates.k8s.io/certificatesigningrequests",
		"/pods", "/nodes",
		"storage.k8s.io/csinodes", "authentication.k8s.io/tokenreviews", "authorization.k8s.io/subjectaccessreviews",
		"authorization.k8s.io/localsubjectaccessreviews",
		"resource.k8s.io/resourceslices", // admission compares the node
		// As everybody who has authenticated.
		"authorization.k8s.io/selfsubjectaccessreviews", "authorization.k8s.io/selfsubjectrulesreviews",
		"authentication.k8s.io/selfsubjectreviews")
	for _, k := range r.Kinds.Table().All() {
		path, name := "/apis/"+k.GVK.Group+"/"+k.GVK.Version+"/", k.GVK.Group+"/"+k.Resource
		if k.GVK.Group == "" {
			path = "/api/" + k.GVK.Version + "/"
		}
		if k.Namespaced {
			path += "namespaces/default/"
		}
		path += k.Resource
		body := `{"apiVersion":"` + k.GVK.GroupVersion().String() + `","kind":"` + k.GVK.Kind +
			`","metadata":{"name":"x"}}`
		for _, one := range []struct {
			method, path string
			may          bool
		}{
			{"GET", path, reads.Has(name)}, {"GET", path + "/x", reads.Has(name)},
			{"GET", path + "?watch=1&timeoutSeconds=1", reads.Has(name)},
			{"POST", path, creates.Has(name)}, {"DELETE", path, false}, {"DELETE", path + "/x", false},
			{"PUT", path + "/x", false}, {"PUT", path + "/x/status", false}, {"PUT", path + "/x/scale", false},
			{"PUT", path + "/x/approval", false},
			{"GET", path + "/x/proxy/", false}, {"POST", path + "/x/proxy/a", false},
		} {
			if one.may {
				continue
			}
			switch got := r.Call(node, one.method, one.path, body); {
			case got.Code == http.StatusForbidden:
			case got.Code == http.StatusNotFound || got.Code == http.StatusMethodNotAllowed:
				// There is no such thing for anybody.
			case strings.HasSuffix(name, "/events") && one.method == "PUT" && strings.HasSuffix(one.path, "/x"):
			default:
				t.Errorf("%s %s: %d %.200s", one.method, one.path, got.Code, got.Body)
			}
		}
	}
	for _, path := range []string{"own/proxy/", "own/exec?command=id", "own/log", "own/portforward", "own/attach",
		"own/resize"} {
		if got := r.Call(node, "GET", "/api/v1/namespaces/default/pods/"+path, ""); got.Code != http.StatusForbidden {
			t.Errorf("GET %s of its own pod: %d %.200s", path, got.Code, got.Body)
		}
	}
}
