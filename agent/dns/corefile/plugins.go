package corefile

import (
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// parseNumber parses an integer. It returns an error if the number is not between minimum and
// maximum.
func parseNumber(s string, minimum, maximum int) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < minimum || n > maximum {
		return 0, fmt.Errorf("want a number from %d to %d", minimum, maximum)
	}
	return n, nil
}

// maxTime is the maximum duration in a Corefile.
const maxTime = 7 * 24 * time.Hour

// parseDuration parses a duration or a number of seconds.
func parseDuration(s string) (time.Duration, error) {
	if n, err := strconv.Atoi(s); err == nil {
		s = strconv.Itoa(n) + "s"
	}
	t, err := time.ParseDuration(s)
	if err != nil || t < 0 || t > maxTime {
		return 0, fmt.Errorf("want a time from 0s to %s", maxTime)
	}
	return t, nil
}

// parseZoneNames parses the arguments of a directive as zones.
func parseZoneNames(args []string) ([]string, error) {
	var out []string
	for _, a := range args {
		z, err := parseZone(a)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", a, err)
		}
		out = append(out, z)
	}
	return out, nil
}

// parseFallthrough parses the line "fallthrough [ZONES...]" of a plugin. Without zones, the line
// applies to all names.
func (r *pluginParser) parseFallthrough(l Directive) (Fallthrough, error) {
	z, err := parseZoneNames(l.Args)
	if err != nil {
		return Fallthrough{}, errorAt(l.Line, "fallthrough %v", err)
	}
	if len(z) == 0 {
		z = []string{"."}
	}
	return Fallthrough{z}, nil
}

func (r *pluginParser) parseKubernetes(d Directive) (err error) {
	if r.s.Kubernetes != nil {
		return errorAt(d.Line, "kubernetes stands twice in one server block")
	}
	k := &Kubernetes{TTL: 5}
	zones, err := parseZoneNames(d.Args)
	if err != nil {
		return errorAt(d.Line, "kubernetes %v", err)
	}
	if len(zones) == 0 {
		zones = r.s.Zones
	}
	for _, z := range zones {
		if IsInZone("in-addr.arpa.", z) || IsInZone("ip6.arpa.", z) {
			k.Reverse = append(k.Reverse, z)
		} else {
			k.Zones = append(k.Zones, z)
		}
	}
	if len(k.Zones) == 0 {
		return errorAt(d.Line, "kubernetes needs the cluster's zone, not only reverse zones")
	}
	for _, l := range d.Lines {
		if err := r.kubernetesLine(k, l); err != nil {
			return err
		}
	}
	r.s.Kubernetes = k
	return nil
}

// parseTTL parses the line "ttl SECONDS" of a plugin. It returns an error if the value is not
// between minimum and maximum.
func parseTTL(plugin string, l Directive, minimum, maximum int) (uint32, error) {
	if len(l.Args) != 1 {
		return 0, errorAt(l.Line, "%s: ttl wants one number", plugin)
	}
	n, err := parseNumber(l.Args[0], minimum, maximum)
	if err != nil {
		return 0, errorAt(l.Line, "%s: ttl %s: %v", plugin, l.Args[0], err)
	}
	return uint32(n), nil
}

func (r *pluginParser) kubernetesLine(k *Kubernetes, l Directive) (err error) {
	switch l.Name {
	case "ttl":
		k.TTL, err = parseTTL("kubernetes", l, 0, 3600)
		return err
	case "pods":
		switch strings.Join(l.Args, " ") {
		case "insecure":
			k.Pods = true
		case "disabled":
			k.Pods = false
		case "verified":
			r.c.addWarning(l.Line, "kubernetes: pods verified is not understood: a node knows its own pods only; "+
				"names of pods are not answered")
		default:
			return errorAt(l.Line, "kubernetes: pods %s: want disabled or insecure", strings.Join(l.Args, " "))
		}
	case "endpoint_pod_names":
		k.PodNames = true
	case "ignore":
		if len(l.Args) == 1 && l.Args[0] == "empty_service" {
			k.IgnoreEmpty = true
			return nil
		}
		return errorAt(l.Line, "kubernetes: ignore wants empty_service")
	case "namespaces":
		if len(l.Args) == 0 {
			return errorAt(l.Line, "kubernetes: namespaces wants names")
		}
		k.Namespaces = l.Args
	case "fallthrough":
		k.Fall, err = r.parseFallthrough(l)
		return err
	case "endpoint", "tls", "kubeconfig", "apiserver_qps", "apiserver_burst", "apiserver_max_inflight",
		"startup_timeout":
		r.c.addWarning(l.Line, "kubernetes: %s has no effect: the agent has its own session with the control plane",
			l.Name)
	default:
		r.c.addWarning(l.Line, "kubernetes: %s is not understood and has no effect", l.Name)
	}
	return nil
}

func (r *pluginParser) parseHosts(d Directive) (err error) {
	if r.s.Hosts != nil {
		return errorAt(d.Line, "hosts stands twice in one server block")
	}
	h := &Hosts{File: "/etc/hosts", TTL: 3600, Reverse: true, Zones: r.s.Zones}
	args := d.Args
	if len(args) > 0 {
		h.File = args[0]
		args = args[1:]
	}
	if len(args) > 0 {
		if h.Zones, err = parseZoneNames(args); err != nil {
			return errorAt(d.Line, "hosts %v", err)
		}
	}
	for _, l := range d.Lines {
		if err := r.hostsLine(h, l); err != nil {
			return err
		}
	}
	if len(d.Args) == 0 && len(h.Inline) > 0 {
		h.File = ""
	}
	r.s.Hosts = h
	return nil
}

func (r *pluginParser) hostsLine(h *Hosts, l Directive) (err error) {
	switch l.Name {
	case "ttl":
		h.TTL, err = parseTTL("hosts", l, 1, 65535)
		return err
	case "no_reverse":
		h.Reverse = false
	case "reload": // no effect: a changed file is always read again
	case "fallthrough":
		h.Fall, err = r.parseFallthrough(l)
		return err
	default:
		if _, err := netip.ParseAddr(l.Name); err != nil || len(l.Args) == 0 {
			return errorAt(l.Line, "hosts: %s is neither an address with names nor an option", l.Name)
		}
		h.Inline = append(h.Inline, l.Name+" "+strings.Join(l.Args, " "))
	}
	return nil
}

func (r *pluginParser) parseCache(d Directive) (err error) {
	c := &Cache{MaxTTL: time.Hour, MaxDenialTTL: 30 * time.Minute, MinTTL: 5 * time.Second,
		MinDenialTTL: 5 * time.Second,
		Capacity:     9984, CapacityDenied: 9984, ServFail: 5 * time.Second, Zones: r.s.Zones}
	args := d.Args
	if len(args) > 0 {
		if t, err := parseDuration(args[0]); err == nil {
			c.MaxTTL, c.MaxDenialTTL = t, t
			args = args[1:]
		}
	}
	if len(args) > 0 {
		if c.Zones, err = parseZoneNames(args); err != nil {
			return errorAt(d.Line, "cache %v", err)
		}
	}
	for _, l := range d.Lines {
		if err := r.cacheLine(c, l); err != nil {
			return err
		}
	}
	r.s.Cache = c
	return nil
}

func (r *pluginParser) cacheLine(c *Cache, l Directive) error {
	switch l.Name {
	case "success", "denial":
		capacity, most, least := &c.Capacity, &c.MaxTTL, &c.MinTTL
		if l.Name == "denial" {
			capacity, most, least = &c.CapacityDenied, &c.MaxDenialTTL, &c.MinDenialTTL
		}
		if len(l.Args) == 0 {
			return errorAt(l.Line, "cache: %s wants a capacity", l.Name)
		}
		n, err := parseNumber(l.Args[0], 0, 1<<20)
		if err != nil {
			return errorAt(l.Line, "cache: %s %s: %v", l.Name, l.Args[0], err)
		}
		*capacity = n
		for i, to := range []*time.Duration{most, least} {
			if len(l.Args) > i+1 {
				if *to, err = parseDuration(l.Args[i+1]); err != nil {
					return errorAt(l.Line, "cache: %s %s: %v", l.Name, l.Args[i+1], err)
				}
			}
		}
	case "serve_stale":
		c.Stale = time.Hour
		for _, a := range l.Args {
			if a == "verify" || a == "immediate" {
				c.StaleVerify = a == "verify"
				continue
			}
			t, err := parseDuration(a)
			if err != nil {
				return errorAt(l.Line, "cache: serve_stale %s: %v", a, err)
			}
			c.Stale = t
		}
	case "servfail":
		if len(l.Args) != 1 {
			return errorAt(l.Line, "cache: servfail wants one time")
		}
		t, err := parseDuration(l.Args[0])
		if err != nil || t > 5*time.Minute {
			return errorAt(l.Line, "cache: servfail %s: want a time from 0s to 5m", l.Args[0])
		}
		c.ServFail = t
	case "disable":
		if len(l.Args) == 0 || l.Args[0] != "success" && l.Args[0] != "denial" {
			return errorAt(l.Line, "cache: disable wants success or denial")
		}
		zones, err := parseZoneNames(l.Args[1:])
		if err != nil {
			return errorAt(l.Line, "cache: disable %v", err)
		}
		if len(zones) == 0 {
			zones = []string{"."}
		}
		if l.Args[0] == "success" {
			c.Disabled = append(c.Disabled, zones...)
		} else {
			c.DisabledDenial = append(c.DisabledDenial, zones...)
		}
	default:
		r.c.addWarning(l.Line, "cache: %s is not understood and has no effect", l.Name)
	}
	return nil
}

// maxUpstreams is the maximum number of servers of one forward directive.
const maxUpstreams = 15

func (r *pluginParser) parseForward(d Directive) error {
	if len(d.Args) < 2 {
		return errorAt(d.Line, "forward wants a zone and at least one server: forward . /etc/resolv.conf")
	}
	from, err := parseZone(d.Args[0])
	if err != nil {
		return errorAt(d.Line, "forward %s: %v", d.Args[0], err)
	}
	f := Forward{From: from, To: d.Args[1:], Policy: "random", MaxFails: 2, HealthEvery: 500 * time.Millisecond}
	if len(f.To) > maxUpstreams {
		return errorAt(d.Line, "forward names %d servers; %d are the most", len(f.To), maxUpstreams)
	}
	for _, to := range f.To {
		if _, err := ParseUpstream(to); err != nil {
			return errorAt(d.Line, "forward: %v", err)
		}
	}
	for _, l := range d.Lines {
		if err := r.forwardLine(&f, l); err != nil {
			return err
		}
	}
	r.s.Forwards = append(r.s.Forwards, f)
	return nil
}

func (r *pluginParser) forwardLine(f *Forward, l Directive) (err error) {
	one := func() (string, error) {
		if len(l.Args) != 1 {
			return "", errorAt(l.Line, "forward: %s wants one value", l.Name)
		}
		return l.Args[0], nil
	}
	count := func(to *int, most int) error {
		v, err := one()
		if err != nil {
			return err
		}
		if *to, err = parseNumber(v, 0, most); err != nil {
			return errorAt(l.Line, "forward: %s %s: %v", l.Name, v, err)
		}
		return nil
	}
	switch l.Name {
	case "except":
		if f.Except, err = parseZoneNames(l.Args); err != nil {
			return errorAt(l.Line, "forward: except %v", err)
		}
	case "force_tcp":
		f.ForceTCP = true
	case "prefer_udp":
		f.PreferUDP = true
	case "policy":
		v, err := one()
		if err != nil {
			return err
		}
		if v != "random" && v != "round_robin" && v != "sequential" {
			return errorAt(l.Line, "forward: policy %s: want random, round_robin or sequential", v)
		}
		f.Policy = v
	case "max_fails":
		return count(&f.MaxFails, 1000)
	case "max_concurrent":
		return count(&f.MaxConcurrent, 100000)
	case "tls_servername":
		f.TLSServer, err = one()
		return err
	case "health_check":
		if len(l.Args) == 0 {
			return errorAt(l.Line, "forward: health_check wants a time")
		}
		if f.HealthEvery, err = time.ParseDuration(l.Args[0]); err != nil || f.HealthEvery < 100*time.Millisecond ||
			f.HealthEvery > time.Hour {
			return errorAt(l.Line, "forward: health_check %s: want a time from 100ms to 1h", l.Args[0])
		}
		if len(l.Args) > 1 {
			r.c.addWarning(l.Line, "forward: health_check %s is not understood and has no effect",
				strings.Join(l.Args[1:], " "))
		}
	case "expire": // no effect: connections are not reused
	default:
		r.c.addWarning(l.Line, "forward: %s is not understood and has no effect", l.Name)
	}
	return nil
}

// Upstream is one destination of a forward directive: an upstream server, or the path of a
// resolv.conf file that lists servers.
type Upstream struct {
	Path    string
	Address netip.AddrPort
	TLS     bool
	Server  string // expected name in the certificate of a TLS server
}

// ParseUpstream parses one upstream server of a forward directive.
func ParseUpstream(s string) (Upstream, error) {
	if strings.HasPrefix(s, "/") {
		return Upstream{Path: s}, nil
	}
	u := Upstream{}
	rest, port := s, uint16(53)
	if scheme, r, ok := strings.Cut(s, "://"); ok {
		switch scheme {
		case "dns":
		case "tls":
			u.TLS, port = true, 853
		default:
			return u, fmt.Errorf("%s: want an address, with dns:// or tls:// before it, or a file", s)
		}
		rest = r
	}
	rest, u.Server, _ = strings.Cut(rest, "%")
	if host, p, err := net.SplitHostPort(rest); err == nil {
		n, err := strconv.ParseUint(p, 10, 16)
		if err != nil || n == 0 {
			return u, fmt.Errorf("%s: no port", s)
		}
		rest, port = host, uint16(n)
	}
	ip, err := netip.ParseAddr(strings.Trim(rest, "[]"))
	if err != nil || ip.Zone() != "" {
		return u, fmt.Errorf("%s: want an address, with dns:// or tls:// before it, or a file", s)
	}
	u.Address = netip.AddrPortFrom(ip, port)
	return u, nil
}

// maxRewrites is the maximum number of rules per server block, because each rule costs time for
// every query.
const maxRewrites = 256

func (r *pluginParser) parseRewrite(d Directive) error {
	if len(r.s.Rewrites) >= maxRewrites {
		return errorAt(d.Line, "a server block has at most %d rewrite rules", maxRewrites)
	}
	args := d.Args
	out := Rewrite{}
	if len(args) > 0 && (args[0] == "stop" || args[0] == "continue") {
		out.Continue = args[0] == "continue"
		args = args[1:]
	}
	lines := d.Lines
	if len(args) == 0 && len(lines) > 0 { // form: rewrite stop { name ...; answer ... }
		args = append([]string{lines[0].Name}, lines[0].Args...)
		lines = lines[1:]
	}
	if len(args) == 0 {
		return errorAt(d.Line, "rewrite wants a field, what to look for and what to put there")
	}
	var err error
	switch args[0] {
	case "name":
		var rest []string
		if rest, err = rewriteName(&out, d.Line, args[1:]); err != nil {
			return err
		}
		for len(rest) > 0 && rest[0] == "answer" {
			n := min(len(rest), 4)
			if len(rest) > 1 && rest[1] == "auto" {
				n = 2
			}
			lines = append(lines, Directive{Name: "answer", Args: rest[1:n], Line: d.Line})
			rest = rest[n:]
		}
		if len(rest) > 0 {
			return errorAt(d.Line, "rewrite: %s follows nothing", strings.Join(rest, " "))
		}
	case "type":
		if err := rewriteType(&out, d.Line, args[1:]); err != nil {
			return err
		}
	default:
		r.c.addWarning(d.Line, "rewrite %s is not understood and has no effect", args[0])
		return nil
	}
	for _, l := range lines {
		if err := answerRule(&out, l); err != nil {
			return err
		}
	}
	r.s.Rewrites = append(r.s.Rewrites, out)
	return nil
}

// rewriteName parses the arguments "[exact|prefix|suffix|substring|regex] FROM TO" of a rewrite
// rule into out. It returns the remaining arguments.
func rewriteName(out *Rewrite, line int, args []string) (rest []string, err error) {
	out.Kind = "exact"
	if len(args) > 2 {
		switch args[0] {
		case "exact", "prefix", "suffix", "substring", "regex":
			out.Kind = args[0]
			args = args[1:]
		}
	}
	if len(args) < 2 {
		return nil, errorAt(line, "rewrite name wants what to look for and what to put there")
	}
	out.From, out.To = strings.ToLower(args[0]), strings.ToLower(args[1])
	switch out.Kind {
	case "exact":
		out.From, out.To = dns.Fqdn(out.From), dns.Fqdn(out.To)
	case "suffix":
		out.From, out.To = dns.Fqdn(out.From), dns.Fqdn(out.To)
	case "regex":
		if out.Pattern, err = regexp.Compile(args[0]); err != nil {
			return nil, errorAt(line, "rewrite name regex %s: %v", args[0], err)
		}
		out.To = args[1]
	}
	return args[2:], nil
}

func rewriteType(out *Rewrite, line int, args []string) error {
	if len(args) != 2 {
		return errorAt(line, "rewrite type wants two types")
	}
	from, ok := dns.StringToType[strings.ToUpper(args[0])]
	to, ok2 := dns.StringToType[strings.ToUpper(args[1])]
	if !ok || !ok2 {
		return errorAt(line, "rewrite type %s %s: one is no type of records", args[0], args[1])
	}
	out.Kind, out.FromType, out.ToType = "type", from, to
	return nil
}

// answerRule parses a line of a rewrite rule into out: "answer auto", "answer name FROM TO" or
// "answer value FROM TO".
func answerRule(out *Rewrite, l Directive) error {
	if l.Name != "answer" {
		return errorAt(l.Line, "rewrite: %s: want answer auto, answer name FROM TO or answer value FROM TO", l.Name)
	}
	args := l.Args
	if len(args) == 1 && args[0] == "auto" {
		return nil // answers always carry the name of the query
	}
	rule := AnswerRule{}
	if len(args) == 3 && (args[0] == "name" || args[0] == "value") {
		rule.Values = args[0] == "value"
		args = args[1:]
	}
	if len(args) != 2 {
		return errorAt(l.Line, "rewrite: want answer auto, answer name FROM TO or answer value FROM TO")
	}
	var err error
	if rule.Pattern, err = regexp.Compile(args[0]); err != nil {
		return errorAt(l.Line, "rewrite: answer %s: %v", args[0], err)
	}
	rule.To = args[1]
	out.Answers = append(out.Answers, rule)
	return nil
}
