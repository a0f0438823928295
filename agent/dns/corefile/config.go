package corefile

import (
	"fmt"
	"net/netip"
	"regexp"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// Default is the Corefile that is used if the cluster has none.
const Default = `.:53 {
    errors
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 30
    }
    hosts /etc/coredns/NodeHosts {
        fallthrough
    }
    forward . /etc/resolv.conf
    cache 30
    loop
    reload
    loadbalance
}
`

// DefaultFor returns Default for a cluster with the given cluster domain.
func DefaultFor(domain string) string {
	return strings.ReplaceAll(Default, "cluster.local", strings.TrimSuffix(domain, "."))
}

// Warning is a part of the Corefile that has no effect.
type Warning struct {
	Line int
	What string
}

func (w Warning) String() string { return fmt.Sprintf("line %d: %s", w.Line, w.What) }

// Config is a parsed Corefile.
type Config struct {
	Servers    []Server
	Warnings   []Warning
	Health     bool // serve GET :8080/health
	Ready      bool // serve GET :8181/ready
	Prometheus bool // serve GET :9153/metrics
	LameDuck   time.Duration
}

// Server is a server block. Its plugins answer queries for names in its zones, in the order of
// CoreDNS.
type Server struct {
	Zones       []string // in lower case, fully qualified
	Log, Errors bool
	Loadbalance bool
	Cache       *Cache
	Rewrites    []Rewrite
	Hosts       *Hosts
	Kubernetes  *Kubernetes
	Forwards    []Forward
	BufferSize  int // maximum size of UDP answers, in bytes
}

// Kubernetes is the configuration of the kubernetes plugin, which answers names of the cluster.
type Kubernetes struct {
	Zones       []string // cluster zones
	Reverse     []string // reverse zones
	TTL         uint32
	Pods        bool
	PodNames    bool
	IgnoreEmpty bool
	Namespaces  []string
	Fall        Fallthrough
}

// Fallthrough lists the zones in which a query is passed to the next plugin if a plugin has no
// answer.
type Fallthrough struct{ Zones []string } // nil = no zones

// Includes reports whether the name is in one of the zones of f. Queries for such a name are passed
// to the next plugin.
func (f Fallthrough) Includes(name string) bool { return LongestZone(f.Zones, name) != "" }

// LongestZone returns the longest of the zones that contain the name, or "" if no zone contains the
// name.
func LongestZone(zones []string, name string) string {
	best := ""
	for _, z := range zones {
		if len(z) > len(best) && IsInZone(z, name) {
			best = z
		}
	}
	return best
}

// IsInZone reports whether a lower-case name is in a zone. Both are fully qualified.
func IsInZone(zone, name string) bool {
	if zone == "." {
		return true
	}
	return strings.HasSuffix(name, zone) && (len(name) == len(zone) || name[len(name)-len(zone)-1] == '.')
}

// Hosts is the configuration of the hosts plugin.
type Hosts struct {
	Zones   []string
	File    string // path of a hosts file; "" = none
	Inline  []string
	TTL     uint32
	Reverse bool
	Fall    Fallthrough
}

// Cache is the configuration of the cache plugin, which caches the answers of upstream servers.
type Cache struct {
	Zones                []string
	MaxTTL, MaxDenialTTL time.Duration
	MinTTL               time.Duration
	MinDenialTTL         time.Duration
	Capacity             int // number of answers
	CapacityDenied       int
	Stale                time.Duration // how long an expired answer may still be served
	StaleVerify          bool          // serve expired answers only if the upstream server does not respond
	ServFail             time.Duration
	Disabled             []string // zones with uncached answers
	DisabledDenial       []string // zones with uncached negative answers
}

// Forward is the configuration of the forward plugin.
type Forward struct {
	From          string
	To            []string // HOST:PORT addresses, optionally with tls://, or paths of resolv.conf files
	Except        []string
	Policy        string // random, round_robin or sequential
	MaxFails      int    // 0 = an upstream server is never considered down
	MaxConcurrent int    // 0 = the server's default
	ForceTCP      bool
	PreferUDP     bool
	TLSServer     string
	HealthEvery   time.Duration
}

// Rewrite is a rule of the rewrite plugin. Names are fully qualified and in lower case.
type Rewrite struct {
	Continue bool // later rules are applied too
	Kind     string
	From, To string
	Pattern  *regexp.Regexp // for kind regex
	Answers  []AnswerRule
	FromType uint16
	ToType   uint16
}

// AnswerRule rewrites names in answers. It belongs to a rule of the rewrite plugin.
type AnswerRule struct {
	Pattern *regexp.Regexp
	To      string
	Values  bool // apply to names in the data of records instead of owner names
}

// ParseConfig parses a Corefile. It returns an *Error if the Corefile is invalid.
func ParseConfig(text string) (*Config, error) {
	blocks, err := ParseBlocks(text)
	if err != nil {
		return nil, err
	}
	c := &Config{}
	taken := map[string]bool{}
	for _, b := range blocks {
		zones := c.parseZones(b)
		if len(zones) == 0 {
			continue
		}
		for _, z := range zones {
			if taken[z] {
				return nil, errorAt(b.Line, "zone %s is configured twice", z)
			}
			taken[z] = true
		}
		s := Server{Zones: zones}
		r := &pluginParser{c: c, s: &s}
		for _, d := range b.Directives {
			if err := r.parseDirective(d); err != nil {
				return nil, err
			}
		}
		c.Servers = append(c.Servers, s)
	}
	if len(c.Servers) == 0 {
		return nil, errorAt(1, "no server block is for port 53: begin with .:53 { ... }")
	}
	return c, nil
}

// maxWarnings is the maximum number of warnings per Corefile.
const maxWarnings = 64

func (c *Config) addWarning(line int, format string, args ...any) {
	if len(c.Warnings) < maxWarnings {
		c.Warnings = append(c.Warnings, Warning{line, fmt.Sprintf(format, args...)})
	}
}

// parseZones returns the zones of a server block from the keys before its brace. It omits keys that
// agents do not support, and adds a warning for each.
func (c *Config) parseZones(b Block) (out []string) {
	if strings.HasPrefix(b.Keys[0], "(") {
		c.addWarning(b.Line, "snippets are not understood: %s has no effect", b.Keys[0])
		return nil
	}
	if b.Keys[0] == "import" {
		c.addWarning(b.Line, "import is not understood: write what it would read into the Corefile")
		return nil
	}
	for _, k := range b.Keys {
		key := k
		if scheme, rest, ok := strings.Cut(k, "://"); ok {
			if scheme != "dns" {
				c.addWarning(b.Line, "%s: only plain DNS is served; the key has no effect", k)
				continue
			}
			key = rest
		}
		if i := strings.LastIndexByte(key, ':'); i > strings.IndexByte(key, '/') {
			// the colons of an IPv6 prefix precede its slash
			if key[i+1:] != "53" {
				c.addWarning(b.Line, "%s: only port 53 is served; the key has no effect", k)
				continue
			}
			key = key[:i]
		}
		z, err := parseZone(key)
		if err != nil {
			c.addWarning(b.Line, "%s: %v; the key has no effect", k, err)
			continue
		}
		out = append(out, z)
	}
	return out
}

// parseZone parses a zone, given as a domain name or as an address prefix. For a prefix, it returns
// the reverse zone.
func parseZone(s string) (string, error) {
	if strings.Contains(s, "/") {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return "", fmt.Errorf("no range of addresses")
		}
		return reverseZone(p)
	}
	if s == "" {
		s = "."
	}
	if _, ok := dns.IsDomainName(s); !ok {
		return "", fmt.Errorf("no name of a zone")
	}
	return strings.ToLower(dns.Fqdn(s)), nil
}

func reverseZone(p netip.Prefix) (string, error) {
	step, whole := 8, p.Addr().Is4()
	if !whole {
		step = 4
	}
	if p.Bits()%step != 0 || p.Bits() == 0 {
		return "", fmt.Errorf("a range ends at a multiple of %d bits", step)
	}
	name, err := dns.ReverseAddr(p.Masked().Addr().String())
	if err != nil {
		return "", err
	}
	labels := dns.SplitDomainName(name)
	total := 4
	if !whole {
		total = 32
	}
	return dns.Fqdn(strings.Join(labels[total-p.Bits()/step:], ".")), nil
}

// pluginParser parses the directives of one server block.
type pluginParser struct {
	c *Config
	s *Server
}

// parseDirective parses one directive of a server block, which configures a plugin.
func (r *pluginParser) parseDirective(d Directive) error {
	switch d.Name {
	case "errors":
		r.s.Errors = true
		r.ignoreLines(d)
	case "log":
		r.s.Log = true
		r.ignoreLines(d)
	case "health":
		r.c.Health = true
		return r.parseHealth(d)
	case "ready":
		r.c.Ready = true
		r.checkAddress(d, ":8181")
	case "prometheus":
		r.c.Prometheus = true
		r.checkAddress(d, ":9153")
	case "loadbalance":
		r.s.Loadbalance = true
		if len(d.Args) > 0 && d.Args[0] != "round_robin" {
			r.c.addWarning(d.Line, "loadbalance %s is not understood: answers go round", d.Args[0])
		}
	case "loop", "reload", "cancel", "metadata", "nsid":
		// the agent detects loops itself, reads a changed Corefile immediately, and gives every
		// query a deadline
		r.ignoreLines(d)
	case "bufsize":
		return r.parseBufsize(d)
	case "kubernetes":
		return r.parseKubernetes(d)
	case "hosts":
		return r.parseHosts(d)
	case "cache":
		return r.parseCache(d)
	case "forward":
		return r.parseForward(d)
	case "rewrite":
		return r.parseRewrite(d)
	default:
		r.c.addWarning(d.Line, "plugin %s is not understood and has no effect", d.Name)
	}
	return nil
}

// ignoreLines adds a warning for each line inside the braces of the directive d, because these
// lines have no effect.
func (r *pluginParser) ignoreLines(d Directive) {
	for _, l := range d.Lines {
		if d.Name == "log" && l.Name == "class" || d.Name == "errors" && l.Name == "consolidate" {
			r.c.addWarning(l.Line, "%s: %s is not understood: all is logged, a part of it where it is much",
				d.Name, l.Name)
			continue
		}
		r.c.addWarning(l.Line, "%s: %s is not understood and has no effect", d.Name, l.Name)
	}
}

// checkAddress adds a warning if the directive specifies a listen address other than fixedAddress,
// the address that is always used.
func (r *pluginParser) checkAddress(d Directive, fixedAddress string) {
	if len(d.Args) > 0 && strings.TrimPrefix(d.Args[0], "0.0.0.0") != fixedAddress {
		r.c.addWarning(d.Line, "%s %s: it is served at the DNS server's addresses and port %s", d.Name,
			d.Args[0], fixedAddress[1:])
	}
}

func (r *pluginParser) parseHealth(d Directive) error {
	r.checkAddress(d, ":8080")
	for _, l := range d.Lines {
		if l.Name != "lameduck" || len(l.Args) != 1 {
			r.c.addWarning(l.Line, "health: %s is not understood and has no effect", l.Name)
			continue
		}
		t, err := parseDuration(l.Args[0])
		if err != nil {
			return errorAt(l.Line, "health: lameduck %s: %v", l.Args[0], err)
		}
		r.c.LameDuck = t // no effect: the node's DNS server has no replacement that could take over
	}
	return nil
}

func (r *pluginParser) parseBufsize(d Directive) error {
	n := 1232
	if len(d.Args) > 0 {
		var err error
		if n, err = parseNumber(d.Args[0], 512, 4096); err != nil {
			return errorAt(d.Line, "bufsize %s: %v", d.Args[0], err)
		}
	}
	if n > 1232 {
		r.c.addWarning(d.Line, "bufsize %d: UDP answers have 1232 bytes at most", n)
	}
	r.s.BufferSize = min(n, 1232)
	return nil
}
