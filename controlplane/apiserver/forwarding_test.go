package apiserver_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// A user who may write Services and use the proxy subresource reaches pods of the namespace only,
// and no other name or address.
func TestProxyReachesPodsOnly(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	b.PlainServer("web", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("the pod"))
	}))
	svc := func(name string, spec corev1.ServiceSpec) {
		spec.Ports = []corev1.ServicePort{{Name: "https", Port: 443}}
		b.Replica.Must(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: spec})
	}
	svc("named", corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "db.example.com"})
	svc("written", corev1.ServiceSpec{})
	port, name, tcp := int32(8443), "https", corev1.ProtocolTCP
	b.Replica.Must(&discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "written",
			Labels: map[string]string{discoveryv1.LabelServiceName: "written"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &tcp}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.7"}},
			{Addresses: []string{"192.0.2.8"}, TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "kube-system",
				Name: "web"}}},
	})
	b.Replica.Await(func() bool {
		_, named := b.Replica.Server.Dialer().Endpoints(t.Context(), "default", "named", 443)
		_, written := b.Replica.Server.Dialer().Endpoints(t.Context(), "default", "written", 443)
		_, pod := b.Replica.Server.Dialer().Endpoints(t.Context(), "default", "web", 443)
		return named == nil && written == nil && pod == nil
	})
	for name, want := range map[string]int{"named": 503, "written": 503, "web": 200} {
		a := b.Replica.Call(b.Replica.AdminHTTP(), "GET", "/api/v1/namespaces/default/services/"+name+":443/proxy/", "")
		if a.Code != want || want == 503 && !strings.Contains(a.Body, "no endpoints available for service") {
			t.Errorf("%s: %d %s", name, a.Code, a.Body)
		}
	}
}

// A request with the header Upgrade has the same timeout as other requests to an aggregated API
// server.
func TestUpgradeHeaderKeepsTimeout(t *testing.T) {
	b := apiservertest.StartAggregated(t)
	b.Replica.Server.SetAggregatedTimeout(300 * time.Millisecond)
	gone := make(chan struct{}, 1)
	b.Extension("hangs", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, "/flunders") {
			apiservertest.DiscoveryOf("hangs.example.com")(w, r)
			return
		}
		select {
		case <-r.Context().Done():
		case <-t.Context().Done():
		}
		gone <- struct{}{}
	}))
	b.AddAPIService("hangs.example.com", "hangs", nil)
	c := b.Replica.AdminHTTP()
	plain := c.Transport.(*http.Transport).Clone() // HTTP/2 has no such header
	plain.Protocols = &http.Protocols{}
	plain.Protocols.SetHTTP1(true)
	plain.TLSClientConfig.NextProtos = nil
	c.Transport = plain
	defer c.CloseIdleConnections()
	c.Timeout = 10 * time.Second
	a := b.Replica.Call(c, "GET", "/apis/hangs.example.com/v1/flunders", "", "Upgrade", "anything")
	if a.Code != http.StatusGatewayTimeout {
		t.Errorf("%d %s", a.Code, a.Body)
	}
	<-gone
}
