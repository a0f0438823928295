package noderestriction_test

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/pki"
)

// F32: a node that creates as many objects as it can is rejected before the store is full, with
// one sentence for each kind. Another node is not affected.
func TestObjectsOfNodeAreBounded(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	for _, name := range []string{"a", "b"} {
		r.Must(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	r.CreatePodOn("own", "a")
	as := func(name string) func(at nodeRequest) apiservertest.Response {
		cert := r.Cert(pki.Client(api.NodeUserPrefix+name, api.GroupNodes))
		c := r.HTTP(&cert)
		return func(at nodeRequest) apiservertest.Response {
			return r.Call(c, at.method, at.path, at.body, at.headers()...)
		}
	}
	thief, honest := as("a"), as("b")
	csr := apiservertest.EncodedCertificateRequest
	sorts := map[string]struct {
		most int
		make func(node string, n int) nodeRequest
	}{
		"mirror pods": {500, func(node string, n int) nodeRequest {
			return nodeRequest{"POST", core + "namespaces/default/pods", js,
				fmt.Sprintf(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"m-%s-%d",`+
					`"annotations":{"kubernetes.io/config.mirror":"x"}},"spec":{"nodeName":%q,`+
					`"containers":[{"name":"c",`+
					`"image":"i"}]}}`, node, n, node)}
		}},
		"ResourceSlices": {256, func(node string, n int) nodeRequest {
			return nodeRequest{"POST", deviceSlices, js,
				strings.ReplaceAll(sliceOf(node), `"more"`, fmt.Sprintf(`"s-%s-%d"`, node, n))}
		}},
		"CertificateSigningRequests": {100, func(node string, n int) nodeRequest {
			return nodeRequest{"POST", "/apis/certificates.k8s.io/v1/certificatesigningrequests", js,
				fmt.Sprintf(`{"apiVersion":"certificates.k8s.io/v1",`+
					`"kind":"CertificateSigningRequest","metadata":{"name":"r-%s-%d"},`+
					`"spec":{"signerName":"example.com/s","usages":["client auth"],"request":%q}}`, node, n, csr)}
		}},
	}
	for what, sort := range sorts {
		n, got := 0, apiservertest.Response{}
		for ; n < sort.most+200; n++ { // a replica counts the mirror pods that it has seen: a few more may come in
			if got = thief(sort.make("a", n)); got.Code != 201 {
				break
			}
		}
		want := fmt.Sprintf(" %s, the maximum is %d: delete", what, sort.most)
		if got.Code != 403 || !strings.Contains(got.Body, "node a has ") || !strings.Contains(got.Body, want) {
			t.Errorf("after %d %s: %d %.300s, want %q", n, what, got.Code, got.Body, want)
		}
		if got := honest(sort.make("b", 0)); got.Code != 201 {
			t.Errorf("another node's %s: %d %.300s", what, got.Code, got.Body)
		}
	}
	for want, at := range map[string]nodeRequest{
		"node a reports a status": {"PATCH", pods + "own/status", merge,
			fmt.Sprintf(`{"status":{"message":%q}}`, strings.Repeat("x", 100<<10))},
		"node a has 33 addresses in status.addresses, the maximum is 32": {"PATCH", core + "nodes/a/status", merge,
			`{"status":{"addresses":[` +
				strings.TrimSuffix(strings.Repeat(`{"type":"InternalIP","address":"192.0.2.%d"},`, 33), ",") + `]}}`},
	} {
		for n := 1; strings.Contains(at.body, "%d"); n++ {
			at.body = strings.Replace(at.body, "%d", fmt.Sprint(n), 1)
		}
		if got := thief(at); got.Code != 403 || !strings.Contains(got.Body, want) {
			t.Errorf("%s %s: %d %.300s, want %q", at.method, at.path, got.Code, got.Body, want)
		}
	}
}
