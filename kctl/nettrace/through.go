package nettrace

import (
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/ingressproxy/gateway"
	ingresstable "keelson.dev/keelson/ingressproxy/ingress"
	"keelson.dev/keelson/ingressproxy/route"
)

// targetHost returns the target's host in the normalized form that routing tables use.
func (x *tracer) targetHost() string { return route.NormalizeHost(x.target.Host) }

// entryScheme returns the scheme and the port with which the request reaches an ingress proxy.
// A target without a scheme gets https if its port is 443, otherwise http. A target without a port
// gets the default port of its scheme.
func (x *tracer) entryScheme() (scheme string, port uint16) {
	scheme, port = x.target.Scheme, uint16(x.target.Port)
	switch {
	case scheme == "" && port == ingresstable.HTTPSPort:
		scheme = "https"
	case scheme == "":
		scheme = "http"
	}
	if port == 0 && scheme == "https" {
		return scheme, ingresstable.HTTPSPort
	} else if port == 0 {
		return scheme, ingresstable.HTTPPort
	}
	return scheme, port
}

// entryPointWithAddress returns the entry point (IngressClass or Gateway) with a Service that has
// the target's address. It returns nil if the target is not a URL with an IP address, or if no
// entry point has the address.
func (x proxyTracer) entryPointWithAddress() *entryPoint {
	ip, err := netip.ParseAddr(x.trace.target.Host)
	if err != nil || x.trace.target.Scheme == "" || x.trace.Entrances == nil {
		return nil
	}
	for _, d := range x.listEntryPoints() {
		if d.service != nil && addressKind(d.service, ip.Unmap()) != "" {
			return d
		}
	}
	return nil
}

// matchRule returns the rule that handles a GET request to the target in the routing table of
// entry. It returns false if no rule matches.
func (x proxyTracer) matchRule(entry *entryPoint) (route.Found, bool) {
	index, _ := route.Compile(entry.table())
	_, port := x.trace.entryScheme()
	return index.Match(port, x.newRequest(http.MethodGet))
}

func (x proxyTracer) newRequest(method string) *http.Request {
	path, query, _ := strings.Cut(x.trace.target.Path, "?")
	if path == "" {
		path = "/"
	}
	if plain, err := url.PathUnescape(path); err == nil {
		path = plain
	}
	return &http.Request{Method: method, Host: x.trace.target.Host, Header: http.Header{},
		URL: &url.URL{Path: path, RawQuery: query}}
}

// traceFromHostObjects continues the trace at an Ingress, a route or a Gateway listener for the
// target's host. all are the objects that name the host; it must not be empty. It selects the
// object with the rule that matches the request, or the first object if no rule matches. If Keelson
// does not serve the selected object, the trace fails.
func (x proxyTracer) traceFromHostObjects(all []hostObject) {
	c := all[0]
	for _, other := range all {
		if other.entry == nil {
			continue
		}
		if found, ok := x.matchRule(other.entry); ok && ruleOwner(found) == other.what {
			c = other
			break
		}
	}
	if c.entry == nil {
		x.trace.addStep(Step{Name: "entrance", Stops: true,
			Says: fmt.Sprintf("%s names %s, but %s", c.what, x.trace.target.Host, c.why),
			Mend: []string{"kctl get ingressclasses,gatewayclasses"}})
		return
	}
	policy := x.trace.Pod.Spec.DNSPolicy
	if (policy == "" || policy == corev1.DNSClusterFirst) && !x.trace.Pod.Spec.HostNetwork && !x.trace.canQueryDNS() {
		return
	}
	says := fmt.Sprintf("%s is no name of the cluster: it has to lead", x.trace.target.Host)
	if to := externalAddresses(c.entry.service); len(to) > 0 {
		x.trace.addStep(Step{Name: "name", Says: fmt.Sprintf("%s to %s; who answers for it outside is not asked", says,
			strings.Join(to, ", "))})
	} else {
		x.trace.addStep(Step{Name: "name", Says: says + " to the entrance, which has no address for clients outside"})
	}
	x.traceThroughEntryPoint(c)
}

// externalAddresses returns the load balancer IPs and external IPs of a Service. It returns nil if
// s is nil.
func externalAddresses(s *corev1.Service) (out []string) {
	if s == nil {
		return nil
	}
	for _, in := range s.Status.LoadBalancer.Ingress {
		if in.IP != "" {
			out = append(out, in.IP)
		}
	}
	return append(out, s.Spec.ExternalIPs...)
}

// ruleOwner returns the Ingress or the route that contains the matched rule, in the form of
// hostObject.what, such as "ingress shop/web".
func ruleOwner(f route.Found) string {
	parts := strings.SplitN(f.Rule.Name, "/", 4)
	if len(parts) < 3 {
		return f.Rule.Name
	}
	return parts[0] + " " + parts[1] + "/" + parts[2]
}

// traceThroughEntryPoint continues the trace at the entry point (IngressClass or Gateway) of c, an
// object that names the target's host. It adds the steps for the listener, the matched rule, the
// connection to the ingress proxies, and their connections to the backends.
func (x proxyTracer) traceThroughEntryPoint(c hostObject) {
	d := c.entry
	if why := d.problem(); why != "" {
		x.trace.addStep(Step{Name: "entrance", Stops: true, Says: fmt.Sprintf("%s is not served: %s", d, why),
			Mend: d.mendCommands()})
		return
	}
	entrance := Step{Name: "entrance", Says: d.String()}
	if c.what != "" {
		entrance.Says = fmt.Sprintf("%s, for %s", d, c.what)
	}
	if d.service == nil {
		entrance.Stops, entrance.Mend = true, []string{"kctl -n " + entryNamespace + " get deployments,services,events"}
		entrance.Says += ": no proxies were made for it yet"
	}
	if !x.trace.addStep(entrance) || !x.addListenerStep(d, c) {
		return
	}
	found, ok := x.matchRule(d)
	if !ok {
		x.trace.addStep(x.noRuleStep(d, c, found))
		return
	}
	if !x.addRuleStep(d, c, found) {
		return
	}
	proxies, ok := x.addProxySteps(d)
	if !ok || found.Rule.Filters.Redirect != nil {
		return
	}
	x.addBackendSteps(d, c, found, proxies)
}

func (d *entryPoint) mendCommands() []string {
	if d.gateway == nil {
		return []string{"kctl describe ingressclass/" + d.class}
	}
	return []string{fmt.Sprintf("kctl -n %s describe gateway/%s", d.gateway.Object.Namespace, d.gateway.Object.Name)}
}

// addListenerStep adds the step for the listener of entry that accepts the connection, and for its
// certificate. It returns false if no listener or no certificate fits. c is the object that names
// the target's host; it supplies the problems and the repair command.
func (x proxyTracer) addListenerStep(entry *entryPoint, c hostObject) bool {
	scheme, port := x.trace.entryScheme()
	s := Step{Name: "listener", Mend: entry.mendCommands()}
	index, _ := route.Compile(entry.table())
	l := index.Listener(port, x.trace.targetHost())
	stop := func(format string, args ...any) bool {
		s.Stops, s.Says = true, fmt.Sprintf(format, args...)
		return x.trace.addStep(s)
	}
	blind := slices.Contains(x.trace.Unread, Secrets)
	if l == nil {
		if entry.gateway != nil {
			s.Details = x.listenerLines(entry)
		}
		switch {
		case scheme == "https" && blind:
			return stop("secrets may not be read, so that it is not known whether port %d has a certificate", port)
		case entry.gateway == nil:
			return stop("ingress classes listen on ports %d and %d, not on %d",
				ingresstable.HTTPPort, ingresstable.HTTPSPort, port)
		}
		return stop("none of %s that is served is for port %d and %s: a connection is refused, or the request "+
			"answered 404", entry, port, x.trace.target.Host)
	}
	if want := strings.ToUpper(scheme); string(l.Protocol) != want {
		return stop("%s on port %d speaks %s, not %s", l.Name, port, l.Protocol, want)
	}
	s.Mend = nil
	s.Says = fmt.Sprintf("%s on port %d, %s, host %s", l.Name, port, l.Protocol, l.Host)
	if l.Protocol != route.HTTPS {
		return x.trace.addStep(s)
	}
	for _, at := range TLSSecretNames(x.trace.World, x.trace.target) {
		state := "is there"
		if blind {
			state = "may not be read"
		} else if (worldObjects{x.trace.World}).Secret(at.Namespace, at.Name) == nil {
			state = "is not there"
		}
		s.Details = append(s.Details, fmt.Sprintf("TLS Secret %s %s", at, state))
	}
	if index.Certificate(port, x.targetServerName()) == nil && !blind {
		s.Details = append(s.Details, entry.wrong(c)...)
		s.Mend = entry.mendCommands()
		if c.ingress != nil {
			s.Mend = []string{fmt.Sprintf("kctl -n %s edit ingress/%s", c.ingress.Namespace, c.ingress.Name)}
		}
		return stop("%s on port %d has no certificate for %s: the TLS handshake is refused", l.Name, port,
			x.trace.target.Host)
	}
	return x.trace.addStep(s)
}

// targetServerName returns the server name (SNI) that a TLS client sends for the target. It is
// empty for an IP address.
func (x proxyTracer) targetServerName() string {
	if _, err := netip.ParseAddr(x.trace.target.Host); err == nil {
		return ""
	}
	return x.trace.target.Host
}

// listenerLines returns one line for each listener of the Gateway of entry: its port, protocol and
// host, and why it is not served, if so. entry must be a Gateway.
func (x proxyTracer) listenerLines(entry *entryPoint) (out []string) {
	status := entry.gateway.Status(gateway.ProxyState{}, metav1.Time{})
	for i, l := range entry.gateway.Object.Spec.Listeners {
		says := fmt.Sprintf("listener %s: port %d, %s", l.Name, l.Port, l.Protocol)
		if l.Hostname != nil {
			says += ", host " + string(*l.Hostname)
		}
		if why := deniedReason(status.Listeners[i].Conditions, string(gw.ListenerConditionAccepted),
			string(gw.ListenerConditionResolvedRefs)); why != "" {
			says += ": " + why
		}
		out = append(out, says)
	}
	return out
}

// addRuleStep adds the step for f, the rule of entry that matches the request. It returns false if
// the proxy answers every request with an error instead of forwarding it. c is the object that
// names the target's host; its problems are added as details.
func (x proxyTracer) addRuleStep(entry *entryPoint, c hostObject, f route.Found) bool {
	s := Step{Name: "match", Says: fmt.Sprintf("%s: %s", ruleOwner(f), matchText(f))}
	if r := f.Rule.Filters.Redirect; r != nil {
		status := r.Status
		if status == 0 {
			status = http.StatusFound
		}
		s.Details = append(s.Details, fmt.Sprintf("answers %d, a redirect: the client asks again elsewhere", status))
		return x.trace.addStep(s)
	}
	wrong := entry.wrong(c)
	answer, bad, total := f.Rule.Answer, uint32(0), uint32(0)
	for _, b := range f.Rule.Backends {
		total += b.Weight
		if b.Answer != 0 {
			bad += b.Weight
		}
	}
	switch {
	case answer == 0 && total == 0:
		answer = http.StatusInternalServerError
	case answer == 0 && bad == total:
		answer = f.Rule.Backends[0].Answer
	case answer == 0 && bad > 0:
		s.Partly = true
		s.Details = append(append(s.Details,
			fmt.Sprintf("%d of %d requests are answered with an error by the proxy itself", bad, total)), wrong...)
	}
	if answer == 0 {
		return x.trace.addStep(s)
	}
	s.Stops, s.Details = true, wrong
	s.Says += fmt.Sprintf(": the proxy answers %d itself, no backend is asked", answer)
	if parts := strings.SplitN(f.Rule.Name, "/", 4); len(parts) > 2 {
		s.Mend = []string{fmt.Sprintf("kctl -n %s describe %s/%s", parts[1], parts[0], parts[2])}
	}
	return x.trace.addStep(s)
}

// matchText describes the matched rule in f: its hosts, and its path, method, header and query
// conditions.
func matchText(f route.Found) string {
	host := "every host"
	if len(f.Rule.Hosts) > 0 {
		var all []string
		for _, h := range f.Rule.Hosts {
			all = append(all, h.String())
		}
		host = "host " + strings.Join(all, ", ")
	}
	return host + ", " + conditionText(f.Match)
}

// conditionText describes the path, method, header and query conditions of a match. A nil match
// stands for every path.
func conditionText(m *route.Match) string {
	if m == nil {
		return "every path"
	}
	kind := map[route.PathKind]string{route.Prefix: "paths below", route.Exact: "path", route.Regex: "paths like",
		route.LateRegex: "paths like"}[m.Path.Kind]
	value := m.Path.Value
	if value == "" {
		value = "/"
	}
	out := []string{kind + " " + value}
	if m.Method != "" {
		out = append(out, "method "+m.Method)
	}
	for _, h := range m.Headers {
		out = append(out, fmt.Sprintf("header %s: %s", h.Name, h.Value))
	}
	for _, q := range m.Query {
		out = append(out, fmt.Sprintf("query %s=%s", q.Name, q.Value))
	}
	return strings.Join(out, ", ")
}

// noRuleStep returns the failed step for a request that matches no rule of entry. The step contains
// the problems of c, the object that names the target's host. It also contains the rule of the
// listener in f with the most similar path.
func (x proxyTracer) noRuleStep(entry *entryPoint, c hostObject, f route.Found) Step {
	path := x.newRequest(http.MethodGet).URL.Path
	s := Step{Name: "match", Stops: true, Says: fmt.Sprintf("no rule of %s is for %s%s: the proxy answers 404", entry,
		x.trace.target.Host, path), Details: entry.wrong(c), Mend: entry.mendCommands()}
	if f.Listener == nil {
		return s
	}
	nearest, best := "", -1
	for i := range f.Listener.Rules {
		r := &f.Listener.Rules[i]
		if len(r.Hosts) > 0 && !slices.ContainsFunc(r.Hosts, func(h route.Host) bool {
			return h.Matches(x.trace.targetHost())
		}) {
			continue
		}
		matches := r.Matches
		if len(matches) == 0 {
			matches = []route.Match{{}}
		}
		for m := range matches {
			found := route.Found{Rule: r, Match: &matches[m]}
			if common := commonLength(matches[m].Path.Value, path); common > best {
				nearest, best = ruleOwner(found)+": "+matchText(found), common
			}
		}
	}
	if nearest != "" {
		s.Details = append(s.Details, "the nearest is "+nearest)
	}
	return s
}

func commonLength(a, b string) (n int) {
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

// addProxySteps adds the steps for the connection from the pod to the ingress proxies of entry, and
// returns the ready proxies. ok is false if that connection fails. The Service of entry must exist.
func (x proxyTracer) addProxySteps(entry *entryPoint) (ready []backend, ok bool) {
	_, port := x.trace.entryScheme()
	asked := x.trace.target
	x.trace.target.Port = int32(port)
	defer func() { x.trace.target = asked }()
	to := externalAddresses(entry.service)
	says := fmt.Sprintf("service %s/%s in front of the proxies", entry.service.Namespace, entry.service.Name)
	if len(to) > 0 {
		says = strings.Join(to, ", ") + " is " + says
	}
	x.trace.addStep(Step{Name: "address", Says: says})
	x.trace.traceToService(entry.service, "", "the entrance's address")
	for i := range entry.service.Spec.Ports {
		if p := &entry.service.Spec.Ports[i]; p.Port == int32(port) {
			_, ready = x.trace.serviceEndpoints(entry.service, p, "")
		}
	}
	return ready, x.trace.report.Stops == ""
}

// addBackendSteps adds the steps from the ingress proxies to the backends of f, the rule of entry
// that matches the request. proxies are the ready ingress proxies of entry.
func (x proxyTracer) addBackendSteps(entry *entryPoint, c hostObject, f route.Found, proxies []backend) {
	table := entry.table()
	var all []backend
	s := Step{Name: "backend"}
	var empty []string
	for _, b := range f.Rule.Backends {
		namespace, name, port, ok := splitPoolKey(b.Pool)
		if !ok || b.Answer != 0 || b.Weight == 0 {
			continue
		}
		pool := table.Pools[b.Pool]
		s.Details = append(s.Details, fmt.Sprintf("service %s/%s port %s: %d ready", namespace, name, port,
			len(pool.Endpoints)))
		if len(pool.Endpoints) == 0 {
			empty = append(empty, fmt.Sprintf("kctl -n %s why service/%s", namespace, name))
		}
		for _, at := range pool.Endpoints[:min(len(pool.Endpoints), maxListed)] {
			all = append(all, x.backendAt(at))
			s.Details = append(s.Details, "  "+x.trace.backendText(all[len(all)-1]))
		}
	}
	switch {
	case slices.Contains(x.trace.Unread, Slices):
		s.Stops, s.Says = true, "endpointslices may not be read, so that it is not known who answers"
	case len(all) == 0:
		s.Stops, s.Says, s.Mend = true, "no endpoint is ready: the proxy answers 503", empty
	case len(empty) > 0:
		s.Partly, s.Says = true, "a share of the requests meets no endpoint that is ready, and is answered 503"
	default:
		s.Says = fmt.Sprintf("%d ready, by the proxy's own choice", len(all))
	}
	if !x.trace.addStep(s) {
		return
	}
	x.traceFromProxies(proxies, all)
}

// traceFromProxies adds the steps from each of the ingress proxies to each of the backends. Proxies
// on the same node that NetworkPolicies cannot distinguish are traced once. If only some proxies
// fail, the report is marked as partial.
func (x proxyTracer) traceFromProxies(proxies, backends []backend) {
	var first []backend
	alike := map[string]int{}
	for _, b := range proxies {
		if b.pod == nil {
			continue
		}
		if alike[proxyGroupKey(b.pod)]++; alike[proxyGroupKey(b.pod)] == 1 {
			first = append(first, b)
		}
	}
	if len(first) == 0 {
		x.trace.addStep(Step{Name: "route",
			Says: "the proxies' pods may not be read, so that the way from them is not judged"})
		return
	}
	client, before := x.trace.Pod, x.trace.report
	defer func() { x.trace.Pod = client }()
	var ways []Report
	stopped := 0
	for _, b := range first {
		x.trace.Pod, x.trace.report = b.pod, Report{}
		says := "from here on it is " + x.trace.sourceText()
		if len(first) > 1 {
			says = fmt.Sprintf("where it is %s", x.trace.sourceText())
		}
		if more := alike[proxyGroupKey(b.pod)] - 1; more > 0 {
			says += fmt.Sprintf(", or another of %d like it there", more+1)
		}
		x.trace.addStep(Step{Name: "proxy", Says: says})
		x.trace.traceToBackends(backends)
		if x.trace.report.Stops != "" {
			stopped++
		}
		ways = append(ways, x.trace.report)
	}
	x.trace.report = before
	for i, w := range ways {
		if i == maxListed {
			x.trace.addStep(Step{Name: "proxy", Says: fmt.Sprintf("%d more, of which %d have a way", len(ways)-i,
				countPassing(ways[i:])), Partly: countPassing(ways[i:]) < len(ways)-i})
			break
		}
		for _, s := range w.Steps {
			if s.Stops && stopped < len(ways) { // at least one other proxy reaches the pods
				s.Stops, s.Partly = false, true
			}
			x.trace.addStep(s)
		}
	}
}

// proxyGroupKey returns a map key for p, an ingress proxy. Two proxies with the same node,
// namespace, labels and host network have the same key, and the same trace to a backend.
func proxyGroupKey(p *corev1.Pod) string {
	return fmt.Sprint(p.Spec.NodeName, p.Namespace, p.Labels, p.Spec.HostNetwork)
}

// countPassing returns the number of reports without a failed step.
func countPassing(ways []Report) (n int) {
	for _, w := range ways {
		if w.Stops == "" {
			n++
		}
	}
	return n
}

// backendAt returns the backend for an IP address and a TCP port. Its pod and its node are set if
// the World contains them.
func (x proxyTracer) backendAt(at netip.AddrPort) backend {
	b := backend{ip: at.Addr(), port: int32(at.Port()), proto: corev1.ProtocolTCP}
	for i := range x.trace.Pods {
		if p := &x.trace.Pods[i]; !p.Spec.HostNetwork && slices.Contains(podAddresses(p), at.Addr().String()) {
			b.pod, b.node = p, p.Spec.NodeName
		}
	}
	if b.pod != nil {
		return b
	}
	for _, s := range x.trace.Slices {
		for _, e := range s.Endpoints {
			if e.NodeName != nil && slices.Contains(e.Addresses, at.Addr().String()) {
				b.node = *e.NodeName
			}
		}
	}
	return b
}
