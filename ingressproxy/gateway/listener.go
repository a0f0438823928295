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

// Listener is a listener of a Gateway with the result of its evaluation: its hosts, its routes and
// its problems.
type Listener struct {
	spec       *gw.Listener
	host       route.Host
	kinds      []gw.RouteGroupKind
	namespaces labels.Selector // selects the namespaces of allowed routes; nil means the Gateway's own namespace

	notAccepted        *problem // problem with unsupported settings; nil means none
	conflict           *problem
	unresolvedRef      *problem // first problem with a reference of the listener; nil means none
	withoutCertificate bool     // an HTTPS listener has no usable certificate
	overlaps           []string // names of other HTTPS listeners with overlapping hosts

	pairs    []*tls.Certificate
	attached []attachment
}

// attachment is a route that is attached to a listener, with the hosts that both have in common.
// Empty hosts mean all hosts of the listener.
type attachment struct {
	route *Route
	hosts []route.Host
}

// Served reports whether the proxy serves listener l: it has no problem that prevents this.
func (l *Listener) Served() bool {
	return l.notAccepted == nil && l.conflict == nil && !l.withoutCertificate
}

// Port returns the port of the listener.
func (l *Listener) Port() int32 { return l.spec.Port }

// Name returns the name of the listener.
func (l *Listener) Name() string { return string(l.spec.Name) }

// gatewayProblem returns why Gateway o cannot be served. It returns nil if the Gateway can be
// served. It does not check the listeners.
func gatewayProblem(o *gw.Gateway, class *gw.GatewayClass) *problem {
	if p := classProblem(class); p != nil {
		return problemf(gw.GatewayReasonInvalidParameters, "GatewayClass %s: %s", class.Name, p.message)
	}
	s := &o.Spec
	if s.Infrastructure != nil && s.Infrastructure.ParametersRef != nil {
		return problemf(gw.GatewayReasonInvalidParameters,
			"spec.infrastructure.parametersRef: this class takes no parameters; leave it out")
	}
	for i, a := range s.Addresses {
		if t := stringOr(a.Type, string(gw.IPAddressType)); t != string(gw.IPAddressType) {
			return problemf(gw.GatewayReasonUnsupportedAddress, "spec.addresses[%d]: type %s is not supported; use %s",
				i, t, gw.IPAddressType)
		}
	}
	if s.AllowedListeners != nil && s.AllowedListeners.Namespaces != nil &&
		stringOr(s.AllowedListeners.Namespaces.From, "None") != "None" {
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

// Address returns the first address that the Gateway requests, or "" for any address. Only one
// address is supported.
func (g *Gateway) Address() string {
	if asked := g.requestedAddresses(); len(asked) > 0 {
		return asked[0]
	}
	return ""
}

func (g *Gateway) requestedAddresses() (out []string) {
	for _, a := range g.Object.Spec.Addresses {
		if a.Value != "" {
			out = append(out, a.Value)
		}
	}
	return out
}

// classProblem returns why GatewayClass c is not accepted. It returns nil if it is accepted.
func classProblem(c *gw.GatewayClass) *problem {
	if c.Spec.ParametersRef != nil {
		return problemf(gw.GatewayClassReasonInvalidParameters,
			"spec.parametersRef: this controller takes no parameters; leave it out")
	}
	return nil
}

// evaluateListeners returns the listeners of Gateway o with their problems, including conflicts
// between listeners.
func (w *World) evaluateListeners(o *gw.Gateway) []*Listener {
	out := make([]*Listener, 0, len(o.Spec.Listeners))
	for i := range o.Spec.Listeners {
		out = append(out, w.judgeListener(o, &o.Spec.Listeners[i]))
	}
	for i, a := range out {
		for _, b := range out[i+1:] {
			detectConflict(a, b)
		}
	}
	return out
}

func (w *World) judgeListener(o *gw.Gateway, spec *gw.Listener) *Listener {
	l := &Listener{spec: spec}
	var err error
	if l.host, err = route.ParseHost(stringOr(spec.Hostname, ""), route.AnyLabels); err != nil {
		l.notAccepted = problemf(gw.ListenerReasonUnsupportedValue, "hostname: %v", err)
	}
	switch spec.Protocol {
	case gw.HTTPProtocolType:
	case gw.HTTPSProtocolType:
		w.loadCertificates(o, l)
	default:
		l.notAccepted = problemf(gw.ListenerReasonUnsupportedProtocol,
			"protocol %s is not supported: use HTTP or HTTPS", spec.Protocol)
		return l
	}
	if slices.Contains(w.Reserved, spec.Port) {
		l.notAccepted = problemf(gw.ListenerReasonPortUnavailable,
			"port %d is reserved for the proxy: use another port", spec.Port)
	}
	l.setAllowedRoutes(spec.AllowedRoutes)
	return l
}

// setAllowedRoutes sets in l which kinds of routes the listener allows, and from which namespaces.
func (l *Listener) setAllowedRoutes(allowed *gw.AllowedRoutes) {
	group := gw.Group(gw.GroupName)
	supported := []gw.RouteGroupKind{{Group: &group, Kind: httpRoute}, {Group: &group, Kind: grpcRoute}}
	if allowed == nil || len(allowed.Kinds) == 0 {
		l.kinds = supported
	} else {
		var unknown []string
		for _, k := range allowed.Kinds {
			i := slices.IndexFunc(supported, func(s gw.RouteGroupKind) bool {
				return s.Kind == k.Kind && stringOr(k.Group, gw.GroupName) == gw.GroupName
			})
			if i < 0 {
				unknown = append(unknown, string(k.Kind))
			} else if !l.allowsKind(string(k.Kind)) {
				l.kinds = append(l.kinds, supported[i])
			}
		}
		if len(unknown) > 0 && l.unresolvedRef == nil {
			l.unresolvedRef = problemf(gw.ListenerReasonInvalidRouteKinds,
				"allowedRoutes.kinds: a listener with protocol %s does not support %s: use HTTPRoute or GRPCRoute",
				l.spec.Protocol, strings.Join(unknown, ", "))
		}
	}
	if allowed == nil || allowed.Namespaces == nil {
		return
	}
	switch from := stringOr(allowed.Namespaces.From, string(gw.NamespacesFromSame)); gw.FromNamespaces(from) {
	case gw.NamespacesFromSame:
	case gw.NamespacesFromAll:
		l.namespaces = labels.Everything()
	case gw.NamespacesFromSelector:
		var err error
		if l.namespaces, err = metav1.LabelSelectorAsSelector(allowed.Namespaces.Selector); err != nil {
			l.namespaces = labels.Nothing()
			l.notAccepted = problemf(gw.ListenerReasonUnsupportedValue, "allowedRoutes.namespaces.selector: %v", err)
		}
	default:
		l.namespaces = labels.Nothing()
		if from != string(gw.NamespacesFromNone) {
			l.notAccepted = problemf(gw.ListenerReasonUnsupportedValue,
				"allowedRoutes.namespaces.from: %q is not known", from)
		}
	}
}

func (l *Listener) allowsKind(kind string) bool {
	return slices.ContainsFunc(l.kinds, func(k gw.RouteGroupKind) bool { return string(k.Kind) == kind })
}

// loadCertificates loads the certificates of HTTPS listener l of Gateway o, or records why it
// cannot.
func (w *World) loadCertificates(o *gw.Gateway, l *Listener) {
	t := l.spec.TLS
	if v := frontendValidation(o, l.spec.Port); v != nil {
		l.notAccepted = problemf(gw.ListenerReasonUnsupportedValue,
			"spec.tls.frontend: certificates of clients cannot be validated; leave it out")
	}
	if t == nil {
		l.notAccepted = problemf(gw.ListenerReasonUnsupportedValue, "tls: an HTTPS listener needs certificateRefs")
		return
	}
	if mode := stringOr(t.Mode, string(gw.TLSModeTerminate)); mode != string(gw.TLSModeTerminate) {
		l.notAccepted = problemf(gw.ListenerReasonUnsupportedValue, "tls.mode: %s is not supported with HTTPS; use %s",
			mode, gw.TLSModeTerminate)
	}
	if len(t.Options) > 0 {
		l.notAccepted = problemf(gw.ListenerReasonUnsupportedValue, "tls.options: none are supported; leave them out")
	}
	for i, ref := range t.CertificateRefs {
		pair, p := w.resolveCertificateRef(o.Namespace, ref)
		if p != nil && l.unresolvedRef == nil {
			l.unresolvedRef = problemf(p.reason, "tls.certificateRefs[%d]: %s", i, p.message)
		}
		if p == nil {
			l.pairs = append(l.pairs, pair)
		}
	}
	l.withoutCertificate = len(l.pairs) == 0
	if l.withoutCertificate && l.unresolvedRef == nil {
		l.unresolvedRef = problemf(gw.ListenerReasonInvalidCertificateRef,
			"tls.certificateRefs: an HTTPS listener needs at least one")
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

// resolveCertificateRef returns the key pair in the Secret that ref names. namespace is the
// namespace of the Gateway that has the reference.
func (w *World) resolveCertificateRef(namespace string, ref gw.SecretObjectReference) (*tls.Certificate, *problem) {
	if group, kind := stringOr(ref.Group, ""), stringOr(ref.Kind, "Secret"); group != "" || kind != "Secret" {
		return nil, problemf(gw.ListenerReasonInvalidCertificateRef,
			"certificateRefs must refer to a Secret, not to a %s of group %q", kind, group)
	}
	in := stringOr(ref.Namespace, namespace)
	if in != namespace && !w.grantsReference("Gateway", namespace, "Secret", in, string(ref.Name)) {
		return nil, problemf(gw.ListenerReasonRefNotPermitted,
			"no ReferenceGrant in namespace %s allows Gateways of namespace %s to refer to Secret %s",
			in, namespace, ref.Name)
	}
	s := w.Secret(in, string(ref.Name))
	if s == nil {
		return nil, problemf(gw.ListenerReasonInvalidCertificateRef, "Secret %s/%s does not exist", in, ref.Name)
	}
	pair, err := w.Keys.KeyPair(s)
	if err != nil {
		return nil, problemf(gw.ListenerReasonInvalidCertificateRef,
			"Secret %s/%s has no valid key pair in tls.crt and tls.key: %v", in, ref.Name, err)
	}
	return pair, nil
}

// detectConflict records a problem in both listeners if a and b have the same port but different
// protocols, or the same port and host. If instead they are HTTPS listeners of one port with
// overlapping hosts, it records the overlap in both.
func detectConflict(a, b *Listener) {
	if a.spec.Port != b.spec.Port || hasUnsupportedProtocol(a) || hasUnsupportedProtocol(b) {
		return
	}
	conflict := func(l, other *Listener) {
		if l.conflict != nil {
			return
		}
		if l.spec.Protocol != other.spec.Protocol {
			l.conflict = problemf(gw.ListenerReasonProtocolConflict,
				"port %d is also used by listener %s with protocol %s",
				l.spec.Port, other.spec.Name, other.spec.Protocol)
			return
		}
		l.conflict = problemf(gw.ListenerReasonHostnameConflict, "listener %s also has port %d and hostname %s",
			other.spec.Name, l.spec.Port, l.host)
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

func hasUnsupportedProtocol(l *Listener) bool {
	return l.notAccepted != nil && l.notAccepted.reason == string(gw.ListenerReasonUnsupportedProtocol)
}
