package apiserver

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
)

// F32: a node whose key was stolen makes of everything that it may make as much as it can: it is refused before the store is
// full, for each in one sentence, while another node goes on.
func TestNodeFillsTheStore(t *testing.T) {
	r := start(t, nil)
	for _, name := range []string{"a", "b"} {
		r.must(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	podOn(r, "own", "a")
	as := func(name string) func(at attempt) answer {
		cert := r.cert(pki.Client(api.NodeUserPrefix+name, api.GroupNodes))
		c := r.http(&cert)
		return func(at attempt) answer { return r.call(c, at.method, at.path, at.body, at.headers()...) }
	}
	thief, honest := as("a"), as("b")
	asked := &certificatesv1.CertificateSigningRequest{}
	if err := yaml.Unmarshal([]byte(valid["CertificateSigningRequest"]), asked); err != nil {
		t.Fatal(err)
	}
	csr := base64.StdEncoding.EncodeToString(asked.Spec.Request)
	sorts := map[string]struct {
		most int
		make func(node string, n int) attempt
	}{
		"mirror pods": {500, func(node string, n int) attempt {
			return attempt{"POST", core + "namespaces/default/pods", js, fmt.Sprintf(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"m-%s-%d",`+
				`"annotations":{"kubernetes.io/config.mirror":"x"}},"spec":{"nodeName":%q,"containers":[{"name":"c","image":"i"}]}}`, node, n, node)}
		}},
		"ResourceSlices": {256, func(node string, n int) attempt {
			return attempt{"POST", deviceSlices, js, strings.ReplaceAll(sliceOf(node), `"more"`, fmt.Sprintf(`"s-%s-%d"`, node, n))}
		}},
		"CertificateSigningRequests": {100, func(node string, n int) attempt {
			return attempt{"POST", "/apis/certificates.k8s.io/v1/certificatesigningrequests", js, fmt.Sprintf(`{"apiVersion":"certificates.k8s.io/v1",`+
				`"kind":"CertificateSigningRequest","metadata":{"name":"r-%s-%d"},"spec":{"signerName":"example.com/s","usages":["client auth"],"request":%q}}`, node, n, csr)}
		}},
	}
	for what, sort := range sorts {
		n, got := 0, answer{}
		for ; n < sort.most+200; n++ { // a replica counts the mirror pods that it has seen: a few more may come in
			if got = thief(sort.make("a", n)); got.code != 201 {
				break
			}
		}
		want := fmt.Sprintf(" %s, and may have %d: delete", what, sort.most)
		if got.code != 403 || !strings.Contains(got.body, "node a has ") || !strings.Contains(got.body, want) {
			t.Errorf("after %d %s: %d %.300s, want %q", n, what, got.code, got.body, want)
		}
		if got := honest(sort.make("b", 0)); got.code != 201 {
			t.Errorf("another node's %s: %d %.300s", what, got.code, got.body)
		}
	}
	for want, at := range map[string]attempt{
		"node a says": {"PATCH", pods + "own/status", merge, fmt.Sprintf(`{"status":{"message":%q}}`, strings.Repeat("x", 100<<10))},
		"node a has 33 addresses in status.addresses, and may have 32": {"PATCH", core + "nodes/a/status", merge, `{"status":{"addresses":[` +
			strings.TrimSuffix(strings.Repeat(`{"type":"InternalIP","address":"192.0.2.%d"},`, 33), ",") + `]}}`},
	} {
		for n := 1; strings.Contains(at.body, "%d"); n++ {
			at.body = strings.Replace(at.body, "%d", fmt.Sprint(n), 1)
		}
		if got := thief(at); got.code != 403 || !strings.Contains(got.body, want) {
			t.Errorf("%s %s: %d %.300s, want %q", at.method, at.path, got.code, got.body, want)
		}
	}
}
