// Package ingress translates the Ingresses of a class to a route.Table, which the proxy serves. It
// also returns the problems of each Ingress. The package does no I/O.
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

// Controller is the value of spec.controller in the IngressClasses that Keelson's proxies serve.
const Controller = "keelson.dev/ingress"

// RedirectAnnotation with the value "true" redirects HTTP requests for the TLS hosts of an Ingress
// to HTTPS with status 308.
const RedirectAnnotation = "keelson.dev/redirect-to-https"

// classAnnotation is the deprecated annotation that names the class of an Ingress without
// spec.ingressClassName.
const classAnnotation = "kubernetes.io/ingress.class"

// World looks up the objects to which Ingresses refer. Its methods return nil for objects that do
// not exist.
type World interface {
	Service(namespace, name string) *corev1.Service
	Slices(namespace, service string) []*discoveryv1.EndpointSlice
	// Secret must return Secrets of type kubernetes.io/tls. It may return nil for other Secrets.
	Secret(namespace, name string) *corev1.Secret
}

// ClassOf returns the class that an Ingress names, or "".
func ClassOf(i *networkingv1.Ingress) string {
	if i.Spec.IngressClassName != nil {
		return *i.Spec.IngressClassName
	}
	return i.Annotations[classAnnotation]
}

// Ports on which the proxies of an IngressClass listen.
const (
	HTTPPort  = 80
	HTTPSPort = 443
)

// Translate returns the listeners, rules and endpoints for the Ingresses of a class. If two
// Ingresses have the same host and path, the older Ingress receives the requests.
func Translate(class string, all []*networkingv1.Ingress, w World, keys *pairs.Cache) *route.Table {
	t := &translation{world: w, keys: keys, pools: map[string]route.Pool{}}
	for _, i := range ingressesOfClass(class, all) {
		t.addIngress(i)
	}
	plain := route.Listener{Name: "http", Port: HTTPPort, Protocol: route.HTTP}
	plain.Rules = append(append(plain.Rules, t.plainRules...), t.defaultRules...)
	secure := route.Listener{Name: "https", Port: HTTPSPort, Protocol: route.HTTPS, Certificates: t.certificates,
		Default: t.defaultCertificate}
	secure.Rules = append(append(secure.Rules, t.secureRules...), t.defaultRules...)
	return &route.Table{Listeners: []route.Listener{plain, secure}, Pools: t.pools}
}

// ingressesOfClass returns the Ingresses of a class that are not being deleted, oldest first.
func ingressesOfClass(class string, all []*networkingv1.Ingress) (own []*networkingv1.Ingress) {
	for _, i := range all {
		if ClassOf(i) == class && i.DeletionTimestamp == nil {
			own = append(own, i)
		}
	}
	slices.SortFunc(own, func(a, b *networkingv1.Ingress) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace),
			cmp.Compare(a.Name, b.Name))
	})
	return own
}

// Problems returns the reasons why parts of Ingress i are not served. Each is a sentence; they are
// sorted.
func Problems(i *networkingv1.Ingress, w World) []string {
	t := &translation{world: w, pools: map[string]route.Pool{}}
	t.addIngress(i)
	slices.Sort(t.problems)
	return slices.Compact(t.problems)
}

type translation struct {
	world                   World
	keys                    *pairs.Cache
	pools                   map[string]route.Pool
	secureRules, plainRules []route.Rule // rules of the HTTPS and of the HTTP listener
	defaultRules            []route.Rule // rules of default backends; they come after all other rules
	certificates            []route.Certificate
	defaultCertificate      *tls.Certificate
	problems                []string
}

func (t *translation) addProblem(format string, args ...any) {
	t.problems = append(t.problems, fmt.Sprintf(format, args...))
}

func (t *translation) addIngress(i *networkingv1.Ingress) {
	name := "ingress/" + i.Namespace + "/" + i.Name
	secured := t.addCertificates(i)
	redirect := i.Annotations[RedirectAnnotation] == "true"
	if v, set := i.Annotations[RedirectAnnotation]; set && v != "true" && v != "false" {
		t.addProblem("Annotation %s is %q: want \"true\" or \"false\".", RedirectAnnotation, v)
	}
	hosts := []route.Host{{}}
	for _, r := range i.Spec.Rules {
		h, err := route.ParseHost(r.Host, route.OneLabel)
		if err != nil {
			t.addProblem("Rule for host %q is not served: %v.", r.Host, err)
			continue
		}
		hosts = append(hosts, h)
		if r.HTTP == nil {
			continue
		}
		for _, p := range r.HTTP.Paths {
			rule := route.Rule{Name: name, Hosts: []route.Host{h}, Matches: []route.Match{{Path: pathMatchOf(p)}},
				Backends: []route.Backend{t.resolveBackend(i.Namespace, &p.Backend)}}
			t.secureRules = append(t.secureRules, rule)
			if redirect && hasCertificateFor(secured, h) {
				rule.Backends, rule.Filters.Redirect = nil, &route.Redirect{Scheme: "https", Status: 308}
			}
			t.plainRules = append(t.plainRules, rule)
		}
	}
	if b := i.Spec.DefaultBackend; b != nil {
		t.defaultRules = append(t.defaultRules, route.Rule{Name: name, Hosts: hosts,
			Backends: []route.Backend{t.resolveBackend(i.Namespace, b)}})
	}
}

func hasCertificateFor(secured []route.Host, h route.Host) bool {
	return slices.ContainsFunc(secured, func(s route.Host) bool {
		both, ok := s.Intersect(h)
		return ok && both == h
	})
}

func pathMatchOf(p networkingv1.HTTPIngressPath) route.PathMatch {
	m := route.PathMatch{Kind: route.Prefix, Value: p.Path}
	if p.PathType != nil && *p.PathType == networkingv1.PathTypeExact {
		m.Kind = route.Exact
	}
	if m.Value == "" {
		m.Value = "/"
	}
	return m
}

// addCertificates adds the key pairs of Ingress i to the HTTPS listener. It returns the hosts that
// have a key pair.
func (t *translation) addCertificates(i *networkingv1.Ingress) (secured []route.Host) {
	for _, s := range i.Spec.TLS {
		if s.SecretName == "" {
			t.addProblem("tls without secretName is served only where another Ingress of the class has a " +
				"certificate for its hosts.")
			continue
		}
		pair, problem := keyPair(t.world.Secret(i.Namespace, s.SecretName), t.keys)
		if problem != "" {
			t.addProblem("Secret %s of tls %s: HTTPS is refused for %s.", s.SecretName, problem, hostList(s.Hosts))
			continue
		}
		if len(s.Hosts) == 0 {
			if t.defaultCertificate == nil {
				t.defaultCertificate = pair
			}
			secured = append(secured, route.Host{})
		}
		for _, host := range s.Hosts {
			h, err := route.ParseHost(host, route.OneLabel)
			if err != nil {
				t.addProblem("tls for host %q is not served: %v.", host, err)
				continue
			}
			if err := pair.Leaf.VerifyHostname(strings.Replace(host, "*", "any", 1)); err != nil {
				t.addProblem("The certificate in Secret %s is not for host %s: clients will refuse it.",
					s.SecretName, host)
			}
			t.certificates = append(t.certificates, route.Certificate{Hosts: []route.Host{h}, Pair: pair})
			secured = append(secured, h)
		}
	}
	return secured
}

// keyPair returns the TLS key pair in Secret s. If s is nil or has no usable key pair, problem
// describes why. keys caches parsed key pairs.
func keyPair(s *corev1.Secret, keys *pairs.Cache) (pair *tls.Certificate, problem string) {
	switch {
	case s == nil:
		return nil, fmt.Sprintf("does not exist, or is not of type %s", corev1.SecretTypeTLS)
	case s.Type != corev1.SecretTypeTLS:
		return nil, fmt.Sprintf("is of type %s, not %s", s.Type, corev1.SecretTypeTLS)
	case pairSize(s) > maxPairBytes:
		return nil, fmt.Sprintf("has more than %d KiB of certificates and key", maxPairBytes>>10)
	}
	pair, err := keys.KeyPair(s)
	if err != nil {
		return nil, fmt.Sprintf("has no valid key pair (%v)", err)
	}
	return pair, ""
}

func hostList(hosts []string) string {
	if len(hosts) == 0 {
		return "hosts without a certificate of their own"
	}
	return strings.Join(hosts, ", ")
}

// resolveBackend returns the proxy's backend for a backend of an Ingress, and adds its endpoints to
// the table. If the Service or port does not exist, requests get status 503.
func (t *translation) resolveBackend(namespace string, b *networkingv1.IngressBackend) route.Backend {
	missing := route.Backend{Weight: 1, Answer: 503}
	if b.Service == nil {
		t.addProblem("A backend is a resource: this class supports only Services.")
		return missing
	}
	service := t.world.Service(namespace, b.Service.Name)
	if service == nil {
		t.addProblem("Service %s does not exist: its requests get status 503.", b.Service.Name)
		return missing
	}
	if service.Spec.Type == corev1.ServiceTypeExternalName {
		t.addProblem("Service %s is of type ExternalName, which has no endpoints: its requests get status 503.",
			service.Name)
		return missing
	}
	port := findServicePort(service, b.Service.Port)
	if port == nil {
		t.addProblem("Service %s has no TCP port %s: its requests get status 503.", service.Name,
			portName(b.Service.Port))
		return missing
	}
	key := fmt.Sprintf("%s/%s/%d", namespace, service.Name, port.Port)
	if _, have := t.pools[key]; !have {
		pool, err := NewPool(service, port, t.world.Slices(namespace, service.Name))
		if err != nil {
			t.addProblem("Port %d of Service %s: %v.", port.Port, service.Name, err)
			return missing
		}
		t.pools[key] = pool
	}
	if len(t.pools[key].Endpoints) == 0 {
		t.addProblem("Service %s has no ready endpoint for port %d: its requests get status 503.",
			service.Name, port.Port)
	}
	return route.Backend{Pool: key, Weight: 1}
}

func portName(p networkingv1.ServiceBackendPort) string {
	if p.Name != "" {
		return p.Name
	}
	return fmt.Sprint(p.Number)
}

func findServicePort(s *corev1.Service, want networkingv1.ServiceBackendPort) *corev1.ServicePort {
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
