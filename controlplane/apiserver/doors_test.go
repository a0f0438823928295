package apiserver

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/pki"
)

// Of the kinds that are served, a node's agent reads those whole that it needs, and no others; nor does it write any.
func TestNodeAndEveryKind(t *testing.T) {
	r := start(t, nil)
	r.must(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "a"}})
	podOn(r, "own", "a")
	cert := r.cert(pki.Client(api.NodeUserPrefix+"a", api.GroupNodes))
	node := r.http(&cert)
	reads := sets.New("/services", "/endpoints", "discovery.k8s.io/endpointslices", "certificates.k8s.io/certificatesigningrequests",
		"storage.k8s.io/csidrivers", "node.k8s.io/runtimeclasses")
	creates := sets.New("/events", "events.k8s.io/events", "certificates.k8s.io/certificatesigningrequests", "/pods", "/nodes",
		"storage.k8s.io/csinodes", "authentication.k8s.io/tokenreviews", "authorization.k8s.io/subjectaccessreviews",
		"authorization.k8s.io/localsubjectaccessreviews",
		"resource.k8s.io/resourceslices", // admission compares the node
		// As everybody who has authenticated.
		"authorization.k8s.io/selfsubjectaccessreviews", "authorization.k8s.io/selfsubjectrulesreviews", "authentication.k8s.io/selfsubjectreviews")
	for _, k := range r.cfg.Kinds.Table().All() {
		path, name := "/apis/"+k.GVK.Group+"/"+k.GVK.Version+"/", k.GVK.Group+"/"+k.Resource
		if k.GVK.Group == "" {
			path = "/api/" + k.GVK.Version + "/"
		}
		if k.Namespaced {
			path += "namespaces/default/"
		}
		path += k.Resource
		body := `{"apiVersion":"` + k.GVK.GroupVersion().String() + `","kind":"` + k.GVK.Kind + `","metadata":{"name":"x"}}`
		for _, one := range []struct {
			method, path string
			may          bool
		}{
			{"GET", path, reads.Has(name)}, {"GET", path + "/x", reads.Has(name)}, {"GET", path + "?watch=1&timeoutSeconds=1", reads.Has(name)},
			{"POST", path, creates.Has(name)}, {"DELETE", path, false}, {"DELETE", path + "/x", false},
			{"PUT", path + "/x", false}, {"PUT", path + "/x/status", false}, {"PUT", path + "/x/scale", false}, {"PUT", path + "/x/approval", false},
			{"GET", path + "/x/proxy/", false}, {"POST", path + "/x/proxy/a", false},
		} {
			if one.may {
				continue
			}
			switch got := r.call(node, one.method, one.path, body); {
			case got.code == http.StatusForbidden:
			case got.code == http.StatusNotFound || got.code == http.StatusMethodNotAllowed:
				// There is no such thing for anybody.
			case strings.HasSuffix(name, "/events") && one.method == "PUT" && strings.HasSuffix(one.path, "/x"):
			default:
				t.Errorf("%s %s: %d %.200s", one.method, one.path, got.code, got.body)
			}
		}
	}
	for _, path := range []string{"own/proxy/", "own/exec?command=id", "own/log", "own/portforward", "own/attach", "own/resize"} {
		if got := r.call(node, "GET", pods+path, ""); got.code != http.StatusForbidden {
			t.Errorf("GET %s of its own pod: %d %.200s", path, got.code, got.body)
		}
	}
}

// Who may write Services and ask them by the proxy subresource reaches pods of the namespace by it, and no name or
// address of its own choice.
func TestProxyReachesPodsOnly(t *testing.T) {
	b := startBehind(t)
	b.plainServer("web", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("the pod")) }))
	svc := func(name string, spec corev1.ServiceSpec) {
		spec.Ports = []corev1.ServicePort{{Name: "https", Port: 443}}
		b.must(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: spec})
	}
	svc("named", corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "db.example.com"})
	svc("written", corev1.ServiceSpec{})
	port, name, tcp := int32(8443), "https", corev1.ProtocolTCP
	b.must(&discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "written", Labels: map[string]string{discoveryv1.LabelServiceName: "written"}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &tcp}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.7"}},
			{Addresses: []string{"192.0.2.8"}, TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "kube-system", Name: "web"}}},
	})
	b.await(func() bool {
		_, named := b.dialer.Endpoints(t.Context(), "default", "named", 443)
		_, written := b.dialer.Endpoints(t.Context(), "default", "written", 443)
		_, pod := b.dialer.Endpoints(t.Context(), "default", "web", 443)
		return named == nil && written == nil && pod == nil
	})
	for name, want := range map[string]int{"named": 503, "written": 503, "web": 200} {
		a := b.call(b.adminHTTP(), "GET", "/api/v1/namespaces/default/services/"+name+":443/proxy/", "")
		if a.code != want || want == 503 && !strings.Contains(a.body, "no endpoints available for service") {
			t.Errorf("%s: %d %s", name, a.code, a.body)
		}
	}
}

// meddler writes a role just before the apiserver writes it.
type meddler struct {
	authz.Authorizer
	left   atomic.Int32
	before func()
}

func (m *meddler) Authorize(ctx context.Context, a *authz.Attributes) (authz.Decision, string) {
	if a.User.Name == api.UserAPIServer && a.Verb == "update" && a.Name == "edit" && m.left.Add(-1) >= 0 {
		m.before()
	}
	return m.Authorizer.Authorize(ctx, a)
}

// Default roles are completed while others write them, and nobody's write is lost.
func TestDefaultRolesAreReconciledAmongOthers(t *testing.T) {
	r := start(t, nil)
	ctx := within(t)
	roles := r.admin().RbacV1().ClusterRoles()
	have, err := roles.Get(ctx, "edit", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	have.AggregationRule, have.Labels, have.Rules = nil, nil, nil
	if _, err := roles.Update(ctx, have, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	m := &meddler{Authorizer: r.chain.authorizer}
	m.left.Store(3)
	m.before = func() {
		c, err := roles.Get(ctx, "edit", metav1.GetOptions{})
		if err != nil {
			t.Error(err)
			return
		}
		c.Rules = append(c.Rules, rbacv1.PolicyRule{Verbs: []string{"get"}, APIGroups: []string{"example.com"}, Resources: []string{"things"}})
		if _, err := roles.Update(ctx, c, metav1.UpdateOptions{}); err != nil {
			t.Error(err)
		}
	}
	r.chain.authorizer = m
	if err := r.EnsureBootstrap(ctx, 0); err != nil {
		t.Fatal(err)
	}
	after, err := roles.Get(ctx, "edit", metav1.GetOptions{})
	if err != nil || after.AggregationRule == nil || m.left.Load() >= 0 {
		t.Fatalf("%+v, %v, %d", after, err, m.left.Load())
	}
	if n := len(slices.DeleteFunc(after.Rules, func(p rbacv1.PolicyRule) bool { return !slices.Contains(p.Resources, "things") })); n != 3 {
		t.Errorf("%d of 3 rules of others are left", n)
	}
}

// Who only says that another protocol is wanted is not waited for any longer than others.
func TestUpgradeInNameOnly(t *testing.T) {
	b := startBehind(t)
	b.cfg.RequestTimeout = 300 * time.Millisecond
	gone := make(chan struct{}, 1)
	b.extension("hangs", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, "/flunders") {
			discoveryOf("hangs.example.com")(w, r)
			return
		}
		select {
		case <-r.Context().Done():
		case <-t.Context().Done():
		}
		gone <- struct{}{}
	}))
	b.apiService("hangs.example.com", "hangs", nil)
	c := b.adminHTTP()
	plain := c.Transport.(*http.Transport).Clone() // HTTP/2 has no such header
	plain.Protocols = &http.Protocols{}
	plain.Protocols.SetHTTP1(true)
	plain.TLSClientConfig.NextProtos = nil
	c.Transport = plain
	defer c.CloseIdleConnections()
	c.Timeout = 10 * time.Second
	a := b.call(c, "GET", "/apis/hangs.example.com/v1/flunders", "", "Upgrade", "anything")
	if a.code != http.StatusGatewayTimeout {
		t.Errorf("%d %s", a.code, a.body)
	}
	<-gone
}
