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
	entry "keelson.dev/keelson/ingressproxy/ingress"
	"keelson.dev/keelson/ingressproxy/route"
)

// targetHost returns the target's host in the normalized form that routing tables use.
func (x *tracer) targetHost() string { return route.NormalizeHost(x.target.Host) }

// entryScheme returns the scheme and the port with which the request reaches an ingress proxy.
// Missing parts of the target get the defaults of HTTP and HTTPS.
func (x *tracer) entryScheme() (scheme string, port uint16) {
	scheme, port = x.target.Scheme, uint16(x.target.Port)
	switch {
	case scheme == "" && port == entry.HTTPSPort:
		scheme = "https"
	case scheme == "":
		scheme = "http"
	}
	if port == 0 && scheme == "https" {
		return scheme, entry.HTTPSPort
	} else if port == 0 {
		return scheme, entry.HTTPPort
	}
	return scheme, port
}

// doorWithAddress returns the entry point (IngressClass or Gateway) with a Service that has the
// target's address. It returns nil if the target is not a URL with an IP address, or if no entry
// point has the address.
func (x *tracer) doorWithAddress() *door {
	ip, err := netip.ParseAddr(x.target.Host)
	if err != nil || x.target.Scheme == "" || x.Entrances == nil {
		return nil
	}
	for _, d := range x.listDoors() {
		if d.service != nil && addressOf(d.service, ip.Unmap()) != "" {
			return d
		}
	}
	return nil
}

// matchRule returns the rule for a GET request to the target from the routing table of entry point
// d. ok is false if no rule matches.
func (x *tracer) matchRule(d *door) (route.Found, bool) {
	index, _ := route.Compile(d.table())
	_, port := x.entryScheme()
	return index.Match(port, x.newRequest(http.MethodGet))
}

func (x *tracer) newRequest(method string) *http.Request {
	path, query, _ := strings.Cut(x.target.Path, "?")
	if path == "" {
		path = "/"
	}
	if plain, err := url.PathUnescape(path); err == nil {
		path = plain
	}
	return &http.Request{Method: method, Host: x.target.Host, Header: http.Header{}, URL: &url.URL{Path: path, RawQuery: query}}
}

// enterClaim continues the trace at an Ingress, a route or a Gateway listener for the target's
// host. all are the objects that name the host; it must not be empty. It selects the object with
// the rule that matches the request, or the first object if no rule matches. If Keelson does not
// serve the selected object, the trace fails.
func (x *tracer) enterClaim(all []claim) {
	c := all[0]
	for _, other := range all {
		if other.door == nil {
			continue
		}
		if found, ok := x.matchRule(other.door); ok && ruleOwner(found) == other.what {
			c = other
			break
		}
	}
	if c.door == nil {
		x.addStep(Step{Name: "entrance", Stops: true, Says: fmt.Sprintf("%s names %s, but %s", c.what, x.target.Host, c.why),
			Mend: []string{"kctl get ingressclasses,gatewayclasses"}})
		return
	}
	policy := x.Pod.Spec.DNSPolicy
	if (policy == "" || policy == corev1.DNSClusterFirst) && !x.Pod.Spec.HostNetwork && !x.mayAsk() {
		return
	}
	says := fmt.Sprintf("%s is no name of the cluster: it has to lead", x.target.Host)
	if to := externalAddresses(c.door.service); len(to) > 0 {
		x.addStep(Step{Name: "name", Says: fmt.Sprintf("%s to %s; who answers for it outside is not asked", says, strings.Join(to, ", "))})
	} else {
		x.addStep(Step{Name: "name", Says: says + " to the entrance, which has no address for clients outside"})
	}
	x.traceThroughDoor(c)
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
// claim.what, such as "ingress shop/web".
func ruleOwner(f route.Found) string {
	parts := strings.SplitN(f.Rule.Name, "/", 4)
	if len(parts) < 3 {
		return f.Rule.Name
	}
	return parts[0] + " " + parts[1] + "/" + parts[2]
}

// traceThroughDoor continues the trace at the entry point of claim c (its IngressClass or Gateway).
// It adds the steps for the listener, the matched rule, the connection to the ingress proxies, and
// their connections to the backends.
func (x *tracer) traceThroughDoor(c claim) {
	d := c.door
	if why := d.problem(); why != "" {
		x.addStep(Step{Name: "entrance", Stops: true, Says: fmt.Sprintf("%s is not served: %s", d, why), Mend: d.mendCommands()})
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
	if !x.addStep(entrance) || !x.addListenerStep(d, c) {
		return
	}
	found, ok := x.matchRule(d)
	if !ok {
		x.addStep(x.noRule(d, c, found))
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

func (d *door) mendCommands() []string {
	if d.gateway == nil {
		return []string{"kctl describe ingressclass/" + d.class}
	}
	return []string{fmt.Sprintf("kctl -n %s describe gateway/%s", d.gateway.Object.Namespace, d.gateway.Object.Name)}
}

// addListenerStep adds the step for the listener of entry point d (an IngressClass or a Gateway)
// that accepts the connection, and for its certificate. It returns false if no listener or no
// certificate fits. c supplies the problems and the repair command.
func (x *tracer) addListenerStep(d *door, c claim) bool {
	scheme, port := x.entryScheme()
	s := Step{Name: "listener", Mend: d.mendCommands()}
	index, _ := route.Compile(d.table())
	l := index.Listener(port, x.targetHost())
	stop := func(format string, args ...any) bool {
		s.Stops, s.Says = true, fmt.Sprintf(format, args...)
		return x.addStep(s)
	}
	blind := slices.Contains(x.Unread, Secrets)
	if l == nil {
		if d.gateway != nil {
			s.Details = x.listenerLines(d)
		}
		switch {
		case scheme == "https" && blind:
			return stop("secrets may not be read, so that it is not known whether port %d has a certificate", port)
		case d.gateway == nil:
			return stop("ingress classes listen on ports %d and %d, not on %d", entry.HTTPPort, entry.HTTPSPort, port)
		}
		return stop("none of %s that is served is for port %d and %s: a connection is refused, or the request answered 404", d, port, x.target.Host)
	}
	if want := strings.ToUpper(scheme); string(l.Protocol) != want {
		return stop("%s on port %d speaks %s, not %s", l.Name, port, l.Protocol, want)
	}
	s.Mend = nil
	s.Says = fmt.Sprintf("%s on port %d, %s, host %s", l.Name, port, l.Protocol, l.Host)
	if l.Protocol != route.HTTPS {
		return x.addStep(s)
	}
	for _, at := range Pairs(x.World, x.target) {
		state := "is there"
		if blind {
			state = "may not be read"
		} else if (given{x.World}).Secret(at.Namespace, at.Name) == nil {
			state = "is not there"
		}
		s.Details = append(s.Details, fmt.Sprintf("TLS Secret %s %s", at, state))
	}
	if index.Certificate(port, x.targetServerName()) == nil && !blind {
		s.Details = append(s.Details, d.wrong(c)...)
		s.Mend = d.mendCommands()
		if c.ingress != nil {
			s.Mend = []string{fmt.Sprintf("kctl -n %s edit ingress/%s", c.ingress.Namespace, c.ingress.Name)}
		}
		return stop("%s on port %d has no certificate for %s: the TLS handshake is refused", l.Name, port, x.target.Host)
	}
	return x.addStep(s)
}

// targetServerName returns the server name (SNI) that a TLS client sends for the target. It is
// empty for an IP address.
func (x *tracer) targetServerName() string {
	if _, err := netip.ParseAddr(x.target.Host); err == nil {
		return ""
	}
	return x.target.Host
}

// listenerLines returns one line for each listener of the Gateway of d: its port, protocol and
// host, and why it is not served, if so. d must be a Gateway.
func (x *tracer) listenerLines(d *door) (out []string) {
	status := d.gateway.Status(gateway.ProxyState{}, metav1.Time{})
	for i, l := range d.gateway.Object.Spec.Listeners {
		says := fmt.Sprintf("listener %s: port %d, %s", l.Name, l.Port, l.Protocol)
		if l.Hostname != nil {
			says += ", host " + string(*l.Hostname)
		}
		if why := deniedReason(status.Listeners[i].Conditions, string(gw.ListenerConditionAccepted), string(gw.ListenerConditionResolvedRefs)); why != "" {
			says += ": " + why
		}
		out = append(out, says)
	}
	return out
}

// addRuleStep adds the step for the matched rule f of entry point d. It returns false if the proxy
// answers every request with an error instead of forwarding it. The problems of claim c are added
// as details.
func (x *tracer) addRuleStep(d *door, c claim, f route.Found) bool {
	s := Step{Name: "match", Says: fmt.Sprintf("%s: %s", ruleOwner(f), matchText(f))}
	if r := f.Rule.Filters.Redirect; r != nil {
		status := r.Status
		if status == 0 {
			status = http.StatusFound
		}
		s.Details = append(s.Details, fmt.Sprintf("answers %d, a redirect: the client asks again elsewhere", status))
		return x.addStep(s)
	}
	wrong := d.wrong(c)
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
		s.Details = append(append(s.Details, fmt.Sprintf("%d of %d requests are answered with an error by the proxy itself", bad, total)), wrong...)
	}
	if answer == 0 {
		return x.addStep(s)
	}
	s.Stops, s.Details = true, wrong
	s.Says += fmt.Sprintf(": the proxy answers %d itself, no backend is asked", answer)
	if parts := strings.SplitN(f.Rule.Name, "/", 4); len(parts) > 2 {
		s.Mend = []string{fmt.Sprintf("kctl -n %s describe %s/%s", parts[1], parts[0], parts[2])}
	}
	return x.addStep(s)
}

// matchText describes the hosts of a matched rule and its path, method, header and query
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
	kind := map[route.PathKind]string{route.Prefix: "paths below", route.Exact: "path", route.Regex: "paths like", route.LateRegex: "paths like"}[m.Path.Kind]
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

// noRule returns the failed step for a request that matches no rule of entry point d. The step
// contains the problems of claim c, and the rule of the listener in f with the most similar path.
func (x *tracer) noRule(d *door, c claim, f route.Found) Step {
	path := x.newRequest(http.MethodGet).URL.Path
	s := Step{Name: "match", Stops: true, Says: fmt.Sprintf("no rule of %s is for %s%s: the proxy answers 404", d, x.target.Host, path), Details: d.wrong(c), Mend: d.mendCommands()}
	if f.Listener == nil {
		return s
	}
	nearest, best := "", -1
	for i := range f.Listener.Rules {
		r := &f.Listener.Rules[i]
		if len(r.Hosts) > 0 && !slices.ContainsFunc(r.Hosts, func(h route.Host) bool { return h.Matches(x.targetHost()) }) {
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

// addProxySteps adds the steps for the connection from the pod to the ingress proxies of entry
// point d, and returns the ready proxies. ok is false if that connection fails. The Service of d
// must exist.
func (x *tracer) addProxySteps(d *door) (ready []backend, ok bool) {
	_, port := x.entryScheme()
	asked := x.target
	x.target.Port = int32(port)
	defer func() { x.target = asked }()
	to := externalAddresses(d.service)
	says := fmt.Sprintf("service %s/%s in front of the proxies", d.service.Namespace, d.service.Name)
	if len(to) > 0 {
		says = strings.Join(to, ", ") + " is " + says
	}
	x.addStep(Step{Name: "address", Says: says})
	x.toService(d.service, "", "the entrance's address")
	for i := range d.service.Spec.Ports {
		if p := &d.service.Spec.Ports[i]; p.Port == int32(port) {
			_, ready = x.serviceEndpoints(d.service, p, "")
		}
	}
	return ready, x.report.Stops == ""
}

// addBackendSteps adds the steps from the ingress proxies to the backends of the matched rule f.
// proxies are the ready ingress proxies of entry point d.
func (x *tracer) addBackendSteps(d *door, c claim, f route.Found, proxies []backend) {
	table := d.table()
	var all []backend
	s := Step{Name: "backend"}
	var empty []string
	for _, b := range f.Rule.Backends {
		namespace, name, port, ok := poolOf(b.Pool)
		if !ok || b.Answer != 0 || b.Weight == 0 {
			continue
		}
		pool := table.Pools[b.Pool]
		s.Details = append(s.Details, fmt.Sprintf("service %s/%s port %s: %d ready", namespace, name, port, len(pool.Endpoints)))
		if len(pool.Endpoints) == 0 {
			empty = append(empty, fmt.Sprintf("kctl -n %s why service/%s", namespace, name))
		}
		for _, at := range pool.Endpoints[:min(len(pool.Endpoints), most)] {
			all = append(all, x.backendAt(at))
			s.Details = append(s.Details, "  "+x.backendText(all[len(all)-1]))
		}
	}
	switch {
	case slices.Contains(x.Unread, Slices):
		s.Stops, s.Says = true, "endpointslices may not be read, so that it is not known who answers"
	case len(all) == 0:
		s.Stops, s.Says, s.Mend = true, "no endpoint is ready: the proxy answers 503", empty
	case len(empty) > 0:
		s.Partly, s.Says = true, "a share of the requests meets no endpoint that is ready, and is answered 503"
	default:
		s.Says = fmt.Sprintf("%d ready, by the proxy's own choice", len(all))
	}
	if !x.addStep(s) {
		return
	}
	x.fromProxies(proxies, all)
}

// fromProxies adds the steps from each ingress proxy in proxies to the backends in all. Proxies on
// the same node that NetworkPolicies cannot distinguish are traced once. If only some proxies fail,
// the report is marked as partial.
func (x *tracer) fromProxies(proxies, all []backend) {
	var first []backend
	alike := map[string]int{}
	for _, b := range proxies {
		if b.pod == nil {
			continue
		}
		if alike[kindOf(b.pod)]++; alike[kindOf(b.pod)] == 1 {
			first = append(first, b)
		}
	}
	if len(first) == 0 {
		x.addStep(Step{Name: "route", Says: "the proxies' pods may not be read, so that the way from them is not judged"})
		return
	}
	client, before := x.Pod, x.report
	defer func() { x.Pod = client }()
	var ways []Report
	stopped := 0
	for _, b := range first {
		x.Pod, x.report = b.pod, Report{}
		says := "from here on it is " + x.sourceText()
		if len(first) > 1 {
			says = fmt.Sprintf("where it is %s", x.sourceText())
		}
		if more := alike[kindOf(b.pod)] - 1; more > 0 {
			says += fmt.Sprintf(", or another of %d like it there", more+1)
		}
		x.addStep(Step{Name: "proxy", Says: says})
		x.toBackends(all)
		if x.report.Stops != "" {
			stopped++
		}
		ways = append(ways, x.report)
	}
	x.report = before
	for i, w := range ways {
		if i == most {
			x.addStep(Step{Name: "proxy", Says: fmt.Sprintf("%d more, of which %d have a way", len(ways)-i, countPassing(ways[i:])), Partly: countPassing(ways[i:]) < len(ways)-i})
			break
		}
		for _, s := range w.Steps {
			if s.Stops && stopped < len(ways) { // at least one other proxy reaches the pods
				s.Stops, s.Partly = false, true
			}
			x.addStep(s)
		}
	}
}

// kindOf returns a key of the properties on which the trace from an ingress proxy depends: node,
// namespace, labels and host network.
func kindOf(p *corev1.Pod) string {
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

// backendAt returns the backend for an address and a TCP port. Its pod and its node are set if the
// World contains them.
func (x *tracer) backendAt(at netip.AddrPort) backend {
	b := backend{ip: at.Addr(), port: int32(at.Port()), proto: corev1.ProtocolTCP}
	for i := range x.Pods {
		if p := &x.Pods[i]; !p.Spec.HostNetwork && slices.Contains(podAddresses(p), at.Addr().String()) {
			b.pod, b.node = p, p.Spec.NodeName
		}
	}
	if b.pod != nil {
		return b
	}
	for _, s := range x.Slices {
		for _, e := range s.Endpoints {
			if e.NodeName != nil && slices.Contains(e.Addresses, at.Addr().String()) {
				b.node = *e.NodeName
			}
		}
	}
	return b
}
