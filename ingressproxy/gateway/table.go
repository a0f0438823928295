package gateway

import (
	"slices"

	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/ingressproxy/route"
)

// Table returns the listeners, rules and endpoints that the proxy of one Gateway serves. It is
// empty if the Gateway cannot be served.
func (j *Evaluation) Table(namespace, name string) *route.Table {
	t := &route.Table{Pools: map[string]route.Pool{}}
	i := slices.IndexFunc(j.Gateways, func(g *Gateway) bool {
		return g.Object.Namespace == namespace && g.Object.Name == name
	})
	if i < 0 || j.Gateways[i].refused != nil {
		return t
	}
	for _, l := range j.Gateways[i].Listeners {
		if !l.Served() {
			continue
		}
		out := route.Listener{Name: namespace + "/" + name + "/" + l.Name(), Port: uint16(l.spec.Port),
			Protocol: route.HTTP, Host: l.host}
		if l.spec.Protocol == gw.HTTPSProtocolType {
			out.Protocol = route.HTTPS
			l.addCertificatesTo(&out)
		}
		for _, a := range l.attached {
			for _, r := range a.route.rules {
				if r.unmatchable {
					continue
				}
				served := r.Rule
				served.Hosts = a.hosts
				out.Rules = append(out.Rules, served)
				for _, p := range r.targets {
					if _, ok := t.Pools[p.poolKey()]; !ok {
						t.Pools[p.poolKey()] = j.world.poolOf(p)
					}
				}
			}
		}
		t.Listeners = append(t.Listeners, out)
	}
	return t
}

// addCertificatesTo adds the certificates of l to target, the same listener in the proxy's table.
// Each certificate is used for its DNS names, and the first certificate is the default.
func (l *Listener) addCertificatesTo(target *route.Listener) {
	target.Default = l.pairs[0]
	if len(l.pairs) == 1 {
		return
	}
	for _, pair := range l.pairs {
		c := route.Certificate{Pair: pair}
		if pair.Leaf != nil {
			for _, n := range pair.Leaf.DNSNames {
				if h, err := route.ParseHost(n, route.OneLabel); err == nil {
					c.Hosts = append(c.Hosts, h)
				}
			}
		}
		target.Certificates = append(target.Certificates, c)
	}
}
