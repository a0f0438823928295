package gateway

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/ingressproxy/route"
)

var (
	someHosts = []string{"", "a.x", "b.a.x", "*.x", "*.a.x", "*.b.a.x", "c.y", "*.y"}
	someNames = []string{"x", "a.x", "b.a.x", "c.b.a.x", "y", "c.y", "d.c.y", "z"}
	somePaths = []string{"/", "/p", "/p/q", "/pq", "/p/q/"}
)

func pick[T any](r *rand.Rand, list []T) T { return list[r.IntN(len(list))] }

// someWorld returns a random Gateway and routes. Each rule sets a response header that identifies
// it.
func someWorld(r *rand.Rand) *cluster {
	c := &cluster{namespaces: map[string]map[string]string{"default": {}, "other": {"in": "1"}}}
	c.Classes = []*gw.GatewayClass{{ObjectMeta: metav1.ObjectMeta{Name: "k"},
		Spec: gw.GatewayClassSpec{ControllerName: Controller}}}
	g := &gw.Gateway{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "g"},
		Spec: gw.GatewaySpec{GatewayClassName: "k"}}
	for i := range 1 + r.IntN(5) {
		l := gw.Listener{Name: gw.SectionName(fmt.Sprint("l", i)), Port: int32(80 + r.IntN(2)),
			Protocol: gw.HTTPProtocolType}
		if h := pick(r, someHosts); h != "" {
			l.Hostname = new(gw.Hostname(h))
		}
		l.AllowedRoutes = &gw.AllowedRoutes{Namespaces: pick(r,
			[]*gw.RouteNamespaces{nil, {From: new(gw.NamespacesFromAll)},
				{From: new(gw.NamespacesFromSame)}, {From: new(gw.NamespacesFromSelector),
					Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"in": "1"}}}})}
		g.Spec.Listeners = append(g.Spec.Listeners, l)
	}
	c.Gateways = []*gw.Gateway{g}
	for _, ns := range []string{"default", "other"} {
		c.services = append(c.services, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "s"},
			Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}})
	}
	for i := range r.IntN(5) {
		o := &gw.HTTPRoute{ObjectMeta: metav1.ObjectMeta{Namespace: pick(r, []string{"default", "other"}),
			Name:              fmt.Sprint("r", i),
			CreationTimestamp: metav1.NewTime(time.Unix(int64(r.IntN(3)), 0))}}
		ref := gw.ParentReference{Name: "g", Namespace: new(gw.Namespace("default"))}
		if r.IntN(3) == 0 {
			ref.SectionName = new(gw.SectionName(fmt.Sprint("l", r.IntN(4))))
		}
		if r.IntN(4) == 0 {
			ref.Port = new(int32(80 + r.IntN(3)))
		}
		o.Spec.ParentRefs = []gw.ParentReference{ref}
		for range r.IntN(3) {
			if h := pick(r, someHosts); h != "" {
				o.Spec.Hostnames = append(o.Spec.Hostnames, gw.Hostname(h))
			}
		}
		for range 1 + r.IntN(3) {
			m :=
				gw.HTTPRouteMatch{
					Path: &gw.HTTPPathMatch{Type: new(pick(r,
						[]gw.PathMatchType{gw.PathMatchExact, gw.PathMatchPathPrefix})),
						Value: new(pick(r, somePaths))}}
			if r.IntN(3) == 0 {
				m.Method = new(gw.HTTPMethodPut)
			}
			if r.IntN(3) == 0 {
				m.Headers = []gw.HTTPHeaderMatch{{Name: "v", Value: "1"}}
			}
			if r.IntN(3) == 0 {
				m.QueryParams = []gw.HTTPQueryParamMatch{{Name: "q", Value: "1"}}
			}
			o.Spec.Rules = append(o.Spec.Rules, gw.HTTPRouteRule{Matches: []gw.HTTPRouteMatch{m},
				BackendRefs: []gw.HTTPBackendRef{{
					BackendRef: gw.BackendRef{BackendObjectReference: gw.BackendObjectReference{Name: "s",
						Port: new(int32(80))}}}}})
		}
		c.HTTPRoutes = append(c.HTTPRoutes, o)
	}
	return c
}

// below reports whether a name matches a hostname, and how specific the hostname is: characters
// without asterisks, then all.
func below(name, host string) (fits bool, weight int) {
	switch {
	case host == "":
		return true, 0
	case strings.HasPrefix(host, "*."):
		return strings.HasSuffix(name, host[1:]) && len(name) > len(host)-1, len(host)
	}
	return name == host, 1000
}

// expected returns the rule that the specification selects, by testing every rule.
func expected(c *cluster, port int32, name, path, method string, header, query bool) (rule string) {
	g := c.Gateways[0]
	var chosen *gw.Listener
	best := -1
	for i := range g.Spec.Listeners {
		l := &g.Spec.Listeners[i]
		indistinct := false
		for k := range g.Spec.Listeners {
			o := &g.Spec.Listeners[k]
			indistinct = indistinct || k != i && o.Port == l.Port &&
				stringOr(o.Hostname, "") == stringOr(l.Hostname, "")
		}
		if fits, weight := below(name, stringOr(l.Hostname, "")); l.Port == port && !indistinct && fits &&
			weight > best {
			chosen, best = l, weight
		}
	}
	if chosen == nil {
		return ""
	}
	var score []int
	better := func(a []int) bool {
		for i := range a {
			if score == nil || a[i] != score[i] {
				return score == nil || a[i] > score[i]
			}
		}
		return false
	}
	for _, o := range c.HTTPRoutes {
		ref := o.Spec.ParentRefs[0]
		if ref.SectionName != nil && *ref.SectionName != chosen.Name || ref.Port != nil && *ref.Port != chosen.Port {
			continue
		}
		from := gw.NamespacesFromSame
		if n := chosen.AllowedRoutes.Namespaces; n != nil {
			from = *n.From
		}
		if from == gw.NamespacesFromSame && o.Namespace != "default" ||
			from == gw.NamespacesFromSelector && o.Namespace != "other" {
			continue
		}
		hosts := o.Spec.Hostnames
		if len(hosts) == 0 {
			hosts = []gw.Hostname{gw.Hostname(stringOr(chosen.Hostname, ""))}
		}
		for _, h := range hosts {
			fits, weight := below(name, string(h))
			if !fits {
				continue
			}
			if h == "" || len(o.Spec.Hostnames) == 0 {
				weight = 0
			}
			if lh := stringOr(chosen.Hostname, ""); lh != "" && len(o.Spec.Hostnames) > 0 {
				_, other := below(name, lh)
				weight = max(weight, other) // the more specific of both
			}
			for i, spec := range o.Spec.Rules {
				m := spec.Matches[0]
				value := strings.TrimSuffix(*m.Path.Value, "/")
				exact := *m.Path.Type == gw.PathMatchExact
				if exact && path != *m.Path.Value || !exact && path != value && !strings.HasPrefix(path, value+"/") ||
					m.Method != nil && string(*m.Method) != method || len(m.Headers) > 0 && !header ||
					len(m.QueryParams) > 0 && !query {
					continue
				}
				one := func(b bool) int {
					if b {
						return 1
					}
					return 0
				}
				this := []int{weight, one(exact), len(value), one(m.Method != nil), len(m.Headers), len(m.QueryParams),
					-int(o.CreationTimestamp.Unix())}
				if exact {
					this[2] = 0
				}
				label := fmt.Sprintf("httproute/%s/%s/%d", o.Namespace, o.Name, i)
				if better(this) || rule != "" && equal(this, score) && earlier(o, i, rule) {
					rule, score = label, this
				}
			}
		}
	}
	return rule
}

func equal(a, b []int) bool { return fmt.Sprint(a) == fmt.Sprint(b) }

// earlier reports whether a rule precedes another: by namespace and name of the route, then by
// index.
func earlier(o *gw.HTTPRoute, i int, than string) bool {
	at := strings.LastIndexByte(than, '/')
	name := fmt.Sprintf("httproute/%s/%s", o.Namespace, o.Name)
	if name != than[:at] {
		return name < than[:at]
	}
	return fmt.Sprint(i) < than[at+1:]
}

// For random Gateways and routes, every distinguishing request is handled by the rule that the
// specification selects.
func TestAgainstOracle(t *testing.T) {
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 1))
		c := someWorld(r)
		x, wrong := route.Compile(Evaluate(c.world()).Table("default", "g"))
		if len(wrong) > 0 {
			t.Fatalf("seed %d: %v", seed, wrong)
		}
		for _, name := range someNames {
			for _, path := range somePaths {
				for n := range 16 {
					port, method, header, query := int32(80+n&1), http.MethodGet, n&4 > 0, n&8 > 0
					if n&2 > 0 {
						method = http.MethodPut
					}
					q := &http.Request{Method: method, Host: name, URL: &url.URL{Path: path}, Header: http.Header{}}
					if header {
						q.Header.Set("V", "1")
					}
					if query {
						q.URL.RawQuery = "q=1"
					}
					got := ""
					if f, ok := x.Match(uint16(port), q); ok {
						got = f.Rule.Name
					}
					if want := expected(c, port, name, path, method, header, query); got != want {
						t.Fatalf("seed %d: %s %s:%d%s header %v query %v goes to %q, want %q\n%+v", seed, method, name,
							port, path, header, query, got, want, c.Gateways[0].Spec.Listeners)
					}
				}
			}
		}
	}
}
