// Package ingress makes a route.Table of the Ingresses of a class, and says of each what is wrong with it. It is pure.
package ingress

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"keelson.dev/keelson/ingressproxy/pairs"
	"keelson.dev/keelson/ingressproxy/route"
)

// Controller is what an IngressClass says in spec.controller to have its Ingresses served by Keelson's proxy.
const Controller = "keelson.dev/ingress"

// RedirectAnnotation, "true" on an Ingress, sends requests of its TLS hosts that come by HTTP to HTTPS, by status 308.
const RedirectAnnotation = "keelson.dev/redirect-to-https"

// classAnnotation named the class before there was a field for it.
const classAnnotation = "kubernetes.io/ingress.class"

// World is where the objects are looked up that Ingresses name. What is not there is nil.
type World interface {
	Service(namespace, name string) *corev1.Service
	Slices(namespace, service string) []*discoveryv1.EndpointSlice
	// Secret finds Secrets of type kubernetes.io/tls at least.
	Secret(namespace, name string) *corev1.Secret
}

// ClassOf is the class that an Ingress names, "" when none.
func ClassOf(i *networkingv1.Ingress) string {
	if i.Spec.IngressClassName != nil {
		return *i.Spec.IngressClassName
	}
	return i.Annotations[classAnnotation]
}

// Ports of the two listeners.
const (
	HTTPPort  = 80
	HTTPSPort = 443
)

// Translate makes the table of those Ingresses that are of class. Where two claim one host and path, the older one has it.
func Translate(class string, all []*networkingv1.Ingress, w World, keys *pairs.Keys) *route.Table {
	t := &translation{world: w, keys: keys, pools: map[string]route.Pool{}}
	for _, i := range ofClass(class, all) {
		t.add(i)
	}
	plain := route.Listener{Name: "http", Port: HTTPPort, Protocol: route.HTTP}
	plain.Rules = append(append(plain.Rules, t.plain...), t.last...)
	secure := route.Listener{Name: "https", Port: HTTPSPort, Protocol: route.HTTPS, Certificates: t.certificates, Default: t.standard}
	secure.Rules = append(append(secure.Rules, t.rules...), t.last...)
	return &route.Table{Listeners: []route.Listener{plain, secure}, Pools: t.pools}
}

// ofClass are the Ingresses of a class, the older first.
func ofClass(class string, all []*networkingv1.Ingress) (own []*networkingv1.Ingress) {
	for _, i := range all {
		if ClassOf(i) == class && i.DeletionTimestamp == nil {
			own = append(own, i)
		}
	}
	slices.SortFunc(own, func(a, b *networkingv1.Ingress) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return own
}

// Problems are what is wrong with one Ingress, a sentence each.
func Problems(i *networkingv1.Ingress, w World) []string {
	t := &translation{world: w, pools: map[string]route.Pool{}}
	t.add(i)
	slices.Sort(t.problems)
	return slices.Compact(t.problems)
}

type translation struct {
	world        World
	keys         *pairs.Keys
	pools        map[string]route.Pool
	rules, plain []route.Rule // by HTTPS, by HTTP
	last         []route.Rule // default backends, after all others
	certificates []route.Certificate
	standard     *tls.Certificate
	problems     []string
}

func (t *translation) wrong(format string, args ...any) {
	t.problems = append(t.problems, fmt.Sprintf(format, args...))
}

func (t *translation) add(i *networkingv1.Ingress) {
	name := "ingress/" + i.Namespace + "/" + i.Name
	secured := t.certify(i)
	redirect := i.Annotations[RedirectAnnotation] == "true"
	if v, set := i.Annotations[RedirectAnnotation]; set && v != "true" && v != "false" {
		t.wrong("Annotation %s is %q: it is \"true\" or \"false\".", RedirectAnnotation, v)
	}
	hosts := []route.Host{{}}
	for _, r := range i.Spec.Rules {
		h, err := route.ParseHost(r.Host, route.OneLabel)
		if err != nil {
			t.wrong("Rule for host %q is not served: %v.", r.Host, err)
			continue
		}
		hosts = append(hosts, h)
		if r.HTTP == nil {
			continue
		}
		for _, p := range r.HTTP.Paths {
			rule := route.Rule{Name: name, Hosts: []route.Host{h}, Matches: []route.Match{{Path: pathOf(p)}}, Backends: []route.Backend{t.backend(i.Namespace, &p.Backend)}}
			t.rules = append(t.rules, rule)
			if redirect && covered(secured, h) {
				rule.Backends, rule.Filters.Redirect = nil, &route.Redirect{Scheme: "https", Status: 308}
			}
			t.plain = append(t.plain, rule)
		}
	}
	if b := i.Spec.DefaultBackend; b != nil {
		t.last = append(t.last, route.Rule{Name: name, Hosts: hosts, Backends: []route.Backend{t.backend(i.Namespace, b)}})
	}
}

func covered(secured []route.Host, h route.Host) bool {
	return slices.ContainsFunc(secured, func(s route.Host) bool {
		both, ok := s.Intersect(h)
		return ok && both == h
	})
}

func pathOf(p networkingv1.HTTPIngressPath) route.PathMatch {
	m := route.PathMatch{Kind: route.Prefix, Value: p.Path}
	if p.PathType != nil && *p.PathType == networkingv1.PathTypeExact {
		m.Kind = route.Exact
	}
	if m.Value == "" {
		m.Value = "/"
	}
	return m
}

// certify reads the Ingress's key pairs, and says for which hosts there is one.
func (t *translation) certify(i *networkingv1.Ingress) (secured []route.Host) {
	for _, s := range i.Spec.TLS {
		if s.SecretName == "" {
			t.wrong("tls without secretName is served only where another Ingress of the class brings a certificate for its hosts.")
			continue
		}
		pair, problem := keyPair(t.world.Secret(i.Namespace, s.SecretName), t.keys)
		if problem != "" {
			t.wrong("Secret %s of tls %s: HTTPS is refused for %s.", s.SecretName, problem, hostList(s.Hosts))
			continue
		}
		if len(s.Hosts) == 0 {
			if t.standard == nil {
				t.standard = pair
			}
			secured = append(secured, route.Host{})
		}
		for _, host := range s.Hosts {
			h, err := route.ParseHost(host, route.OneLabel)
			if err != nil {
				t.wrong("tls for host %q is not served: %v.", host, err)
				continue
			}
			if err := pair.Leaf.VerifyHostname(strings.Replace(host, "*", "any", 1)); err != nil {
				t.wrong("The certificate in Secret %s is not for host %s: clients will refuse it.", s.SecretName, host)
			}
			t.certificates = append(t.certificates, route.Certificate{Hosts: []route.Host{h}, Pair: pair})
			secured = append(secured, h)
		}
	}
	return secured
}

// keyPair reads the key pair of a Secret, or says why that is none.
func keyPair(s *corev1.Secret, keys *pairs.Keys) (pair *tls.Certificate, problem string) {
	switch {
	case s == nil:
		return nil, fmt.Sprintf("does not exist, or is not of type %s", corev1.SecretTypeTLS)
	case s.Type != corev1.SecretTypeTLS:
		return nil, fmt.Sprintf("is of type %s, not %s", s.Type, corev1.SecretTypeTLS)
	case pairSize(s) > mostPair:
		return nil, fmt.Sprintf("holds more than %d KiB of certificates and key", mostPair>>10)
	}
	pair, err := keys.Of(s)
	if err != nil {
		return nil, fmt.Sprintf("holds no key pair that fits (%v)", err)
	}
	return pair, ""
}

func hostList(hosts []string) string {
	if len(hosts) == 0 {
		return "hosts without a certificate of their own"
	}
	return strings.Join(hosts, ", ")
}

// backend finds the endpoints of an Ingress's backend; requests for one that is not there are answered 503.
func (t *translation) backend(namespace string, b *networkingv1.IngressBackend) route.Backend {
	missing := route.Backend{Weight: 1, Answer: 503}
	if b.Service == nil {
		t.wrong("A backend is a resource: this class serves Services only.")
		return missing
	}
	service := t.world.Service(namespace, b.Service.Name)
	if service == nil {
		t.wrong("Service %s does not exist: its requests are answered 503.", b.Service.Name)
		return missing
	}
	if service.Spec.Type == corev1.ServiceTypeExternalName {
		t.wrong("Service %s is of type ExternalName, which has no endpoints: its requests are answered 503.", service.Name)
		return missing
	}
	port := portOf(service, b.Service.Port)
	if port == nil {
		t.wrong("Service %s has no TCP port %s: its requests are answered 503.", service.Name, portName(b.Service.Port))
		return missing
	}
	key := fmt.Sprintf("%s/%s/%d", namespace, service.Name, port.Port)
	if _, have := t.pools[key]; !have {
		pool, err := Pool(service, port, t.world.Slices(namespace, service.Name))
		if err != nil {
			t.wrong("Port %d of Service %s: %v.", port.Port, service.Name, err)
			return missing
		}
		t.pools[key] = pool
	}
	if len(t.pools[key].Endpoints) == 0 {
		t.wrong("Service %s has no ready endpoint for port %d: its requests are answered 503.", service.Name, port.Port)
	}
	return route.Backend{Pool: key, Weight: 1}
}

func portName(p networkingv1.ServiceBackendPort) string {
	if p.Name != "" {
		return p.Name
	}
	return fmt.Sprint(p.Number)
}

func portOf(s *corev1.Service, want networkingv1.ServiceBackendPort) *corev1.ServicePort {
	for i := range s.Spec.Ports {
		p := &s.Spec.Ports[i]
		if p.Protocol != "" && p.Protocol != corev1.ProtocolTCP {
			continue
		}
		if want.Name != "" && p.Name == want.Name || want.Name == "" && p.Port == want.Number {
			return p
		}
	}
	return nil
}
