package gateway

import (
	"crypto/tls"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/ingressproxy/route"
)

// Listener is one listener as it is served.
type Listener struct {
	spec       *gw.Listener
	host       route.Host
	kinds      []gw.RouteGroupKind
	namespaces labels.Selector // of namespaces whose routes are allowed; nil: the Gateway's own

	accepted   *problem // what is not supported
	conflicted *problem
	resolved   *problem // what its references lack
	keyless    bool     // no certificate is to be had
	overlaps   []string // listeners in TLS with hosts of its own

	pairs    []*tls.Certificate
	attached []attachment
}

// attachment is a route at a listener, and the hosts that both have; none is all of the listener's.
type attachment struct {
	route *Route
	hosts []route.Host
}

// Served says whether the proxy has the listener.
func (l *Listener) Served() bool { return l.accepted == nil && l.conflicted == nil && !l.keyless }

// Port is where it listens.
func (l *Listener) Port() int32 { return l.spec.Port }

// Name is its name.
func (l *Listener) Name() string { return string(l.spec.Name) }

// refusedGateway says what of a Gateway, other than its listeners, cannot be served.
func refusedGateway(o *gw.Gateway, class *gw.GatewayClass) *problem {
	if p := refusedClass(class); p != nil {
		return problemf(gw.GatewayReasonInvalidParameters, "GatewayClass %s: %s", class.Name, p.message)
	}
	s := &o.Spec
	if s.Infrastructure != nil && s.Infrastructure.ParametersRef != nil {
		return problemf(gw.GatewayReasonInvalidParameters, "spec.infrastructure.parametersRef: this class takes no parameters; leave it out")
	}
	for i, a := range s.Addresses {
		if t := deref(a.Type, string(gw.IPAddressType)); t != string(gw.IPAddressType) {
			return problemf(gw.GatewayReasonUnsupportedAddress, "spec.addresses[%d]: type %s is not supported; use %s", i, t, gw.IPAddressType)
		}
	}
	if s.AllowedListeners != nil && s.AllowedListeners.Namespaces != nil && deref(s.AllowedListeners.Namespaces.From, "None") != "None" {
		return problemf(gw.GatewayReasonInvalid, "spec.allowedListeners: ListenerSets are not supported; leave it out")
	}
	if s.TLS != nil && s.TLS.Backend != nil {
		return problemf(gw.GatewayReasonInvalid, "spec.tls.backend: TLS to backends is not supported; leave it out")
	}
	if s.DefaultScope != "" && s.DefaultScope != gw.GatewayDefaultScopeNone {
		return problemf(gw.GatewayReasonInvalid, "spec.defaultScope: default Gateways are not supported; leave it out")
	}
	return nil
}

// Address is the first address that a Gateway asks for, "" for any. One is all that it can have.
func (g *Gateway) Address() string {
	if asked := g.addresses(); len(asked) > 0 {
		return asked[0]
	}
	return ""
}

func (g *Gateway) addresses() (out []string) {
	for _, a := range g.Object.Spec.Addresses {
		if a.Value != "" {
			out = append(out, a.Value)
		}
	}
	return out
}

// refusedClass says what of a class cannot be served.
func refusedClass(c *gw.GatewayClass) *problem {
	if c.Spec.ParametersRef != nil {
		return problemf(gw.GatewayClassReasonInvalidParameters, "spec.parametersRef: this controller takes no parameters; leave it out")
	}
	return nil
}

// listeners judges the listeners of a Gateway, each by itself and against the others.
func (w *World) listeners(o *gw.Gateway) []*Listener {
	out := make([]*Listener, 0, len(o.Spec.Listeners))
	for i := range o.Spec.Listeners {
		out = append(out, w.listener(o, &o.Spec.Listeners[i]))
	}
	for i, a := range out {
		for _, b := range out[i+1:] {
			confront(a, b)
		}
	}
	return out
}

func (w *World) listener(o *gw.Gateway, spec *gw.Listener) *Listener {
	l := &Listener{spec: spec}
	var err error
	if l.host, err = route.ParseHost(deref(spec.Hostname, ""), route.AnyLabels); err != nil {
		l.accepted = problemf(gw.ListenerReasonUnsupportedValue, "hostname: %v", err)
	}
	switch spec.Protocol {
	case gw.HTTPProtocolType:
	case gw.HTTPSProtocolType:
		w.secure(o, l)
	default:
		l.accepted = problemf(gw.ListenerReasonUnsupportedProtocol, "protocol %s is not supported: use HTTP or HTTPS", spec.Protocol)
		return l
	}
	if slices.Contains(w.Reserved, spec.Port) {
		l.accepted = problemf(gw.ListenerReasonPortUnavailable, "port %d is the proxy's own: use another", spec.Port)
	}
	l.allow(spec.AllowedRoutes)
	return l
}

// allow judges which routes a listener of HTTP or HTTPS takes.
func (l *Listener) allow(allowed *gw.AllowedRoutes) {
	group := gw.Group(gw.GroupName)
	supported := []gw.RouteGroupKind{{Group: &group, Kind: httpRoute}, {Group: &group, Kind: grpcRoute}}
	if allowed == nil || len(allowed.Kinds) == 0 {
		l.kinds = supported
	} else {
		var unknown []string
		for _, k := range allowed.Kinds {
			i := slices.IndexFunc(supported, func(s gw.RouteGroupKind) bool {
				return s.Kind == k.Kind && deref(k.Group, gw.GroupName) == gw.GroupName
			})
			if i < 0 {
				unknown = append(unknown, string(k.Kind))
			} else if !l.takes(string(k.Kind)) {
				l.kinds = append(l.kinds, supported[i])
			}
		}
		if len(unknown) > 0 && l.resolved == nil {
			l.resolved = problemf(gw.ListenerReasonInvalidRouteKinds, "allowedRoutes.kinds: a listener of %s has no routes of kind %s, but HTTPRoute and GRPCRoute",
				l.spec.Protocol, strings.Join(unknown, ", "))
		}
	}
	if allowed == nil || allowed.Namespaces == nil {
		return
	}
	switch from := deref(allowed.Namespaces.From, string(gw.NamespacesFromSame)); gw.FromNamespaces(from) {
	case gw.NamespacesFromSame:
	case gw.NamespacesFromAll:
		l.namespaces = labels.Everything()
	case gw.NamespacesFromSelector:
		var err error
		if l.namespaces, err = metav1.LabelSelectorAsSelector(allowed.Namespaces.Selector); err != nil {
			l.namespaces = labels.Nothing()
			l.accepted = problemf(gw.ListenerReasonUnsupportedValue, "allowedRoutes.namespaces.selector: %v", err)
		}
	default:
		l.namespaces = labels.Nothing()
		if from != string(gw.NamespacesFromNone) {
			l.accepted = problemf(gw.ListenerReasonUnsupportedValue, "allowedRoutes.namespaces.from: %q is not known", from)
		}
	}
}

func (l *Listener) takes(kind string) bool {
	return slices.ContainsFunc(l.kinds, func(k gw.RouteGroupKind) bool { return string(k.Kind) == kind })
}

// secure reads the certificates of a listener of HTTPS.
func (w *World) secure(o *gw.Gateway, l *Listener) {
	t := l.spec.TLS
	if v := frontendValidation(o, l.spec.Port); v != nil {
		l.accepted = problemf(gw.ListenerReasonUnsupportedValue, "spec.tls.frontend: certificates of clients cannot be validated; leave it out")
	}
	if t == nil {
		l.accepted = problemf(gw.ListenerReasonUnsupportedValue, "tls: a listener of HTTPS has certificateRefs")
		return
	}
	if mode := deref(t.Mode, string(gw.TLSModeTerminate)); mode != string(gw.TLSModeTerminate) {
		l.accepted = problemf(gw.ListenerReasonUnsupportedValue, "tls.mode: %s is not supported with HTTPS; use %s", mode, gw.TLSModeTerminate)
	}
	if len(t.Options) > 0 {
		l.accepted = problemf(gw.ListenerReasonUnsupportedValue, "tls.options: none are supported; leave them out")
	}
	for i, ref := range t.CertificateRefs {
		pair, p := w.certificate(o.Namespace, ref)
		if p != nil && l.resolved == nil {
			l.resolved = problemf(p.reason, "tls.certificateRefs[%d]: %s", i, p.message)
		}
		if p == nil {
			l.pairs = append(l.pairs, pair)
		}
	}
	l.keyless = len(l.pairs) == 0
	if l.keyless && l.resolved == nil {
		l.resolved = problemf(gw.ListenerReasonInvalidCertificateRef, "tls.certificateRefs: there is none")
	}
}

func frontendValidation(o *gw.Gateway, port gw.PortNumber) *gw.FrontendTLSValidation {
	if o.Spec.TLS == nil || o.Spec.TLS.Frontend == nil {
		return nil
	}
	for _, p := range o.Spec.TLS.Frontend.PerPort {
		if p.Port == port {
			return p.TLS.Validation
		}
	}
	return o.Spec.TLS.Frontend.Default.Validation
}

// certificate follows a reference of a Gateway to a Secret.
func (w *World) certificate(namespace string, ref gw.SecretObjectReference) (*tls.Certificate, *problem) {
	if group, kind := deref(ref.Group, ""), deref(ref.Kind, "Secret"); group != "" || kind != "Secret" {
		return nil, problemf(gw.ListenerReasonInvalidCertificateRef, "a certificate is in a Secret, not in a %s of group %q", kind, group)
	}
	in := deref(ref.Namespace, namespace)
	if in != namespace && !w.granted("Gateway", namespace, "Secret", in, string(ref.Name)) {
		return nil, problemf(gw.ListenerReasonRefNotPermitted, "no ReferenceGrant in namespace %s lets Gateways of namespace %s refer to Secret %s",
			in, namespace, ref.Name)
	}
	s := w.Secret(in, string(ref.Name))
	if s == nil {
		return nil, problemf(gw.ListenerReasonInvalidCertificateRef, "Secret %s/%s does not exist", in, ref.Name)
	}
	pair, err := w.Keys.Of(s)
	if err != nil {
		return nil, problemf(gw.ListenerReasonInvalidCertificateRef, "Secret %s/%s holds no key pair in tls.crt and tls.key: %v", in, ref.Name, err)
	}
	return pair, nil
}

// confront says which of two listeners stand in each other's way: both do, or none.
func confront(a, b *Listener) {
	if a.spec.Port != b.spec.Port || unsupported(a) || unsupported(b) {
		return
	}
	conflict := func(l, other *Listener) {
		if l.conflicted != nil {
			return
		}
		if l.spec.Protocol != other.spec.Protocol {
			l.conflicted = problemf(gw.ListenerReasonProtocolConflict, "port %d has listener %s of protocol %s as well",
				l.spec.Port, other.spec.Name, other.spec.Protocol)
			return
		}
		l.conflicted = problemf(gw.ListenerReasonHostnameConflict, "listener %s has port %d and hostname %s as well", other.spec.Name, l.spec.Port, l.host)
	}
	if a.spec.Protocol != b.spec.Protocol || a.host == b.host {
		conflict(a, b)
		conflict(b, a)
		return
	}
	if _, both := a.host.Intersect(b.host); both && a.spec.Protocol == gw.HTTPSProtocolType {
		a.overlaps = append(a.overlaps, fmt.Sprintf("%s (%s)", b.spec.Name, b.host))
		b.overlaps = append(b.overlaps, fmt.Sprintf("%s (%s)", a.spec.Name, a.host))
	}
}

func unsupported(l *Listener) bool {
	return l.accepted != nil && l.accepted.reason == string(gw.ListenerReasonUnsupportedProtocol)
}
