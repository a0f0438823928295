package gateway

import (
	"net/http"
	"net/url"
	"testing"

	"keelson.dev/keelson/ingressproxy/route"
)

// More specific method matches come first, whatever their order: the service before the method, and
// both before neither.
func TestGRPCPrecedence(t *testing.T) {
	c := &cluster{namespaces: map[string]map[string]string{}}
	c.add(t, []byte("kind: GatewayClass\nmetadata: {name: k}\nspec: {controllerName: keelson.dev/gateway}"))
	c.add(t,
		[]byte("kind: Gateway\nmetadata: {name: g}\nspec: {gatewayClassName: k, listeners: [{name: http, port: 80, "+
			"protocol: HTTP}]}"))
	c.add(t, []byte(`kind: GRPCRoute
metadata: {name: r}
spec:
  parentRefs: [{name: g}]
  rules:
  - {name: all}
  - {name: headers, matches: [{headers: [{name: v, value: "1"}]}]}
  - {name: method, matches: [{method: {method: AVeryLongMethod}}]}
  - {name: service, matches: [{method: {service: s.S}}]}
  - {name: both, matches: [{method: {service: s.S, method: Get}}]}`))
	x, wrong := route.Compile(Evaluate(c.world()).Table("default", "g"))
	if len(wrong) > 0 {
		t.Fatal(wrong)
	}
	for _, q := range []struct{ path, header, want string }{
		{"/s.S/Get", "1", "both"}, {"/s.S/AVeryLongMethod", "1", "service"}, {"/t.T/AVeryLongMethod", "1", "method"},
		{"/t.T/Get", "1", "headers"}, {"/t.T/Get", "", "all"}, {"/s.SS/Get", "", "all"},
	} {
		r := &http.Request{Method: http.MethodPost, Host: "a", URL: &url.URL{Path: q.path},
			Header: http.Header{"V": {q.header}}}
		if f, ok := x.Match(80, r); !ok || f.Rule.Name != "grpcroute/default/r/"+q.want {
			t.Errorf("%s with header %q goes to %v, want %s", q.path, q.header, f.Rule, q.want)
		}
	}
}
